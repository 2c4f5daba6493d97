"""jit(compile=True, cuda_graph=True): graphs that hold compiled code; on stand-ins of the CPU."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import pytest
import torch
from accelerators import Accelerators, installed
from graph_fake import Graph, graphs_on_cpu
from torch import Tensor

import dtorch
from dtorch import Replicate, Shard, inductor
from dtorch.errors import DonatedError
from dtorch.runtime import graph_calls
from dtorch.runtime.graph_calls import LocalJoin

pytestmark = pytest.mark.timeout(300)  # Inductor takes seconds for each stretch


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerators]:
    with installed(monkeypatch) as made, graphs_on_cpu():
        yield made


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code runs its operations one by one, so that its values are exactly those."""

    def function_of(stretch: inductor.Stretch) -> Callable[..., Sequence[Tensor]]:
        return inductor._graph(stretch)

    monkeypatch.setattr(inductor, "function_of", function_of)
    monkeypatch.setattr("dtorch.compilation._known", {})


def in_graphs(mesh: dtorch.DeviceMesh) -> list[list[str]]:
    """The names of the operations in each graph on a mesh, which no other test has."""
    runs = [run for part in graph_calls._runs.values() for run in part if run._replayed]
    return [
        ["join" if isinstance(o, LocalJoin) else o.op._schema.name for o in run._operations]
        for run in runs
        if str(mesh.devices[0]) in run._part.text
    ]


COMPILED = "dtorch::run_callable"


def check(
    function: Callable[..., Any],
    mesh: dtorch.DeviceMesh,
    fixed: Sequence[tuple[Tensor, Any]],
    new: Callable[[int], Sequence[tuple[Any, Any]]],
    is_exact: bool = True,
) -> None:
    """Compares calls with those of a plain `jit`, and their results again after the last call.

    Args:
        function: It takes fixed tensors, and others that are new in each call.
        mesh: Where they are.
        fixed: The first, with how they are placed; None leaves a number as it is.
        new: The others of a call.
        is_exact: Whether values are to be equal, or only close.
    """

    def given(items: Sequence[tuple[Any, Any]]) -> list[Any]:
        return [
            v if p is None else dtorch.tensor(v, device_mesh=mesh, placements=[p]) for v, p in items
        ]

    jitted, plain = dtorch.jit(function, compile=True, cuda_graph=True), dtorch.jit(function)
    first, kept = given(fixed), []
    for number in range(6):
        others = given(new(number))
        ours = optree.tree_leaves(jitted(*first, *others))
        theirs = [t.to_torch().clone() for t in optree.tree_leaves(plain(*first, *others))]
        kept.append((ours, theirs))
        for results in (kept[-1:], kept if number == 5 else []):
            for found, expected in results:
                for a, b in zip(found, expected, strict=True):
                    same(a.to_torch(), b, is_exact)


def same(found: Tensor, expected: Tensor, is_exact: bool = True) -> None:
    if is_exact:
        assert torch.equal(found, expected) and found.stride() == expected.stride()
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def layer(w: Any, table: Any, x: Any, at: Any) -> Any:
    h = torch.nn.functional.gelu(x @ w) * 2 + 1
    y = h.index_select(0, at) + table.index_select(0, at)  # which stay apart
    q, k, v = (y @ w).tanh().view(1, 2, 4, 4), (y * 2).sin()[None, None], y[None, None]
    k, v = k.expand(1, 2, 8, 4), v.expand(1, 2, 8, 4)
    seen = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return seen.relu() + 1, h.mT, h[1:, ::2], w.mT, y.expand(3, -1, -1), seen.transpose(1, 2)


def rows(number: int, placement: Any = Replicate()) -> list[tuple[Any, Any]]:  # noqa: B008
    """Nine rows, and which of them to take."""
    at = torch.tensor([number % 9, 3, 3, 8, 0, 1, 2, number % 5])
    return [(torch.randn(9, 4), placement), (at, Replicate())]


@pytest.mark.parametrize("is_exact", [True, False])
def test_compiled_and_other_operations_in_one_part(
    there: Accelerators, request: pytest.FixtureRequest, is_exact: bool
) -> None:
    if is_exact:
        request.getfixturevalue("one_by_one")
    mesh = dtorch.DeviceMesh("cpu", there.devices(0, 1))
    fixed = [(torch.randn(4, 4), Replicate()), (torch.randn(9, 4), Replicate())]
    check(layer, mesh, fixed, rows, is_exact)
    (names,) = in_graphs(mesh)
    assert names.count(COMPILED) >= 2 and names.count("aten::index_select") == 2
    assert (Graph.made, Graph.replays) == (1, 4)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("numbers", [(0,), (0, 1)])
def test_collectives_between_parts_with_compiled_code(
    there: Accelerators, numbers: tuple[int, ...]
) -> None:
    def compute(w: Any, v: Any, x: Any, at: Any) -> Any:
        h = torch.softmax((x @ w).relu() * 2, 0).index_select(0, at)  # of columns
        y = (h.tanh() @ v).redistribute(placements=[Replicate()])
        y = y.tanh() * 3 + x.index_select(0, at)
        z = torch.complex(y, y * 2)
        part = y.redistribute(placements=[Shard(0)])  # within each device
        return y.mT, (part * 2).exp() - 1, (z * z).real + 1, h, (y + 1).sum(0)

    mesh = there.mesh(*numbers)
    fixed = [(torch.randn(4, 8), Shard(1)), (torch.randn(8, 4), Shard(0))]
    check(compute, mesh, fixed, rows)
    assert Graph.made >= 2 * len(mesh.devices)
    assert any(COMPILED in names and "aten::index_select" in names for names in in_graphs(mesh))
    assert any(COMPILED in names and "join" in names for names in in_graphs(mesh))


@pytest.mark.usefixtures("one_by_one")
def test_numbers_and_draws_between_parts(there: Accelerators) -> None:
    def compute(w: Any, x: Any, at: Any, s: float) -> Any:
        h = (x @ w).relu() + 1
        y, view = h.index_select(0, at), h.mT
        scaled = (y * s + 1).tanh()  # compiled, but not captured
        noise = torch.rand_like(y) * 0
        return (view * 2 + 1).index_select(1, at), (scaled + noise).mT @ y, view, y * s

    mesh = there.mesh(0)
    w = torch.randn(4, 4), Replicate()
    check(compute, mesh, [w], lambda number: [*rows(number, Shard(1)), (0.5 + number, None)])
    assert Graph.made >= 2 * len(mesh.devices)


def donated(caches: Any, x: Any, at: Any, w: Any) -> Any:
    """Changes a cache in place, reads views of another before, and computes a third anew."""
    written, viewed, computed = caches
    before = (viewed * 1).sum() + viewed[1:].mT.exp().sum()
    y = (x @ w).relu() + 1
    written = written.index_copy(0, at, y)
    viewed = viewed.index_copy(0, at, y * 2)
    computed = (computed * 0.5 + y.sum(0)).tanh()
    return [written, viewed, computed], (written * 2 + 1).sum(0), before, computed[1:].mT, y


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("placement", [Replicate(), Shard(1)])
@pytest.mark.parametrize("is_kept", [False, True])
def test_donated_caches(there: Accelerators, placement: Any, is_kept: bool) -> None:
    mesh = there.mesh(0)

    def place(value: Tensor, placement: Any) -> dtorch.Tensor:
        return dtorch.tensor(value, device_mesh=mesh, placements=[placement])

    jitted = dtorch.jit(donated, donate_argnums=0, compile=True, cuda_graph=True)
    plain = dtorch.jit(donated)
    whole = [torch.randn(9, 4) for _ in range(3)]
    ours, theirs = ([place(v, placement) for v in whole] for _ in range(2))
    w, kept = place(torch.randn(4, 4), Replicate() if placement.is_replicate() else Shard(1)), []
    for number in range(8):
        given = place(torch.randn(2, 4), Replicate()), place(torch.tensor([number, 8]), Replicate())
        ours, *found = jitted(ours, *given, w)
        theirs, *expected = plain(theirs, *given, w)
        for a, b in zip([*ours, *found], [*theirs, *expected], strict=True):
            same(a.to_torch(), b.to_torch())
        kept.append((found, [t.to_torch().clone() for t in expected]) if is_kept else ([], []))
    for found, expected in kept:
        for a, b in zip(found, expected, strict=True):
            same(a.to_torch(), b)
    assert any({COMPILED, "aten::index_copy"} <= set(names) for names in in_graphs(mesh))


@pytest.mark.usefixtures("one_by_one")
def test_a_view_that_compiled_code_returns_keeps_a_donated_buffer_from_being_written(
    there: Accelerators,
) -> None:
    def compute(cache: Any, x: Any, at: Any) -> Any:
        view, total = cache.mT, (cache * 2).exp().sum(0)
        cache = cache.index_copy(0, at, x)
        return cache, (view * 3 + 1).sum(0) + total.sum(), view

    mesh = dtorch.DeviceMesh("cpu", there.devices(0, 1))
    jitted = dtorch.jit(compute, donate_argnums=0, compile=True, cuda_graph=True)
    theirs = torch.randn(5, 3)
    ours = dtorch.tensor(theirs, device_mesh=mesh)
    for number in range(8):
        given = torch.randn(1, 3), torch.tensor([number % 5])
        ours, *found = jitted(ours, *(dtorch.tensor(v, device_mesh=mesh) for v in given))
        theirs, *expected = compute(theirs, *given)
        for a, b in zip([ours, *found], [theirs, *expected], strict=True):
            same(a.to_torch(), b)


@pytest.mark.usefixtures("one_by_one")
def test_a_view_of_what_was_written_that_compiled_code_returns(there: Accelerators) -> None:
    def compute(cache: Any, x: Any, at: Any) -> Any:
        cache = cache.index_copy(0, at, x)
        return cache, cache.mT[1:], (cache * 2).exp().sum(0)

    mesh = dtorch.DeviceMesh("cpu", there.devices(0, 1))
    jitted = dtorch.jit(compute, donate_argnums=0, compile=True, cuda_graph=True)
    theirs = torch.randn(5, 3)
    ours, kept = dtorch.tensor(theirs, device_mesh=mesh), []
    for number in range(8):
        given = torch.randn(1, 3), torch.tensor([number % 5])
        ours, view, total = jitted(ours, *(dtorch.tensor(v, device_mesh=mesh) for v in given))
        theirs, *expected = compute(theirs, *given)
        for a, b in zip([ours, view, total], [theirs, *expected], strict=True):
            assert torch.equal(a.to_torch(), b)
        kept.append((view, view.to_torch()))
    with pytest.raises(DonatedError, match="has written to its memory since"):
        kept[-2][0].to_torch()
    same(kept[-1][0].to_torch(), kept[-1][1])
