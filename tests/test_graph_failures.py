"""A call that fails is of no consequence for later ones with jit(cuda_graph=True)."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graph_fake import Graph, graphs_on_cpu
from torch import Tensor

import dtorch
from dtorch import Replicate, Shard
from dtorch.errors import DonatedError, WorkerError
from dtorch.runtime import graph_calls

GOOD = torch.tensor([1, 4])
BAD = torch.tensor([1, 77])


@pytest.fixture(autouse=True)
def _graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graph_calls, "_said", set())
    with graphs_on_cpu():
        yield


def placed(value: Tensor, mesh: dtorch.DeviceMesh, placement: Any = Replicate()) -> dtorch.Tensor:  # noqa: B008
    return dtorch.tensor(value, device_mesh=mesh, placements=[placement])


def failing(*results: dtorch.Tensor) -> None:
    for result in results:
        with pytest.raises(WorkerError, match="index out of range"):
            result.to_torch()


# The first two calls run the operations, the third is captured, later ones are replayed.
CALLS = [{0}, {1}, {2}, {3}, {6}, {0, 1}, {0, 1, 2, 3}, {2, 3}, {3, 4, 7}]


@pytest.mark.parametrize("bad", CALLS, ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_later_calls_are_right(bad: set[int], size: int, capfd: pytest.CaptureFixture[str]) -> None:
    def compute(table: Any, index: Any, x: Any) -> Any:
        rows = torch.nn.functional.embedding(index, table) * 2
        y = (rows + x) @ table.mT
        return y, y.tanh().sum(0), rows

    mesh = dtorch.DeviceMesh("cpu", list(range(size)))
    jitted, table = dtorch.jit(compute, cuda_graph=True), torch.randn(5, 3)
    ours, kept = placed(table, mesh), []
    for number in range(9):
        x = torch.randn(2, 3)
        index = BAD if number in bad else torch.tensor([number % 5, 4])
        found = jitted(ours, placed(index, mesh), placed(x, mesh))
        if number in bad:
            failing(*found)
        else:
            kept.append((found, compute(table, index, x)))
    for found, expected in kept:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.to_torch(), b)
    dtorch.synchronize()  # the second device, from which nothing is fetched
    assert Graph.made == size
    assert "without a CUDA graph" not in capfd.readouterr().err


@pytest.mark.parametrize("bad", CALLS, ids=str)
@pytest.mark.parametrize(("size", "placement"), [(1, Replicate()), (2, Shard(1))], ids=str)
@pytest.mark.parametrize("is_held", [False, True])
def test_later_calls_with_donated_caches_are_right(
    bad: set[int], size: int, placement: Any, is_held: bool
) -> None:
    def step(cache: Any, x: Any, at: Any, table: Any, index: Any) -> Any:
        cache = cache.index_copy(0, at, x * 2)  # in place, before the failure
        rows = torch.nn.functional.embedding(index, table)
        return cache + rows.sum(), (cache * rows.sum()).sum(0) + 1

    mesh = dtorch.DeviceMesh("cpu", list(range(size)))
    jitted = dtorch.jit(step, donate_argnums=0, cuda_graph=True)
    theirs, table, held = torch.zeros(5, 4), torch.randn(6, 3), []
    ours, ours_table = placed(theirs, mesh, placement), placed(table, mesh)
    for number in range(9):
        x, at = torch.randn(1, 4), torch.tensor([number % 5])
        given = placed(x, mesh), placed(at, mesh), ours_table
        if number in bad:
            if is_held:
                held.append((ours, ours.detach(), theirs))
            failing(*jitted(ours, *given, placed(BAD, mesh)))
            ours = placed(theirs, mesh, placement)
        ours, found = jitted(ours, *given, placed(GOOD, mesh))
        theirs, expected = step(theirs, x, at, table, GOOD)
        torch.testing.assert_close(found.to_torch(), expected)
        torch.testing.assert_close(ours.to_torch(), theirs)
    assert size <= Graph.made <= size * (1 + len(bad))
    for given, other, before in held:  # another name has the value of before, or none
        with pytest.raises(DonatedError, match="donated"):
            given.to_torch()
        with contextlib.suppress(DonatedError):
            torch.testing.assert_close(other.to_torch(), before)


@pytest.mark.parametrize("bad", CALLS, ids=str)
def test_a_failure_in_one_part_of_several(bad: set[int]) -> None:
    def compute(table: Any, index: Any, x: Any) -> Any:
        first = (x * 2).tanh() @ table.mT  # which the next part reads in the graph's memory
        noise = torch.rand_like(x) * 0
        rows = torch.nn.functional.embedding(index, table) + first.sum()
        last = (rows * 2 + noise.sum()).redistribute(placements=[Shard(0)])
        whole = (last + 1).redistribute(placements=[Replicate()])
        return (x + 1).exp() * 2, (whole * 2).sin() + first.sum()

    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    jitted, table = dtorch.jit(compute, cuda_graph=True), torch.randn(5, 3)
    ours, plain = placed(table, mesh), dtorch.jit(compute)
    for number in range(9):
        given = ours, placed(BAD if number in bad else GOOD, mesh), placed(torch.randn(2, 3), mesh)
        found = jitted(*given)
        if number in bad:
            failing(found[1])
            continue
        for a, b in zip(found, plain(*given), strict=True):
            torch.testing.assert_close(a.to_torch(), b.to_torch())
