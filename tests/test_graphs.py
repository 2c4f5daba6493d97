"""jit(cuda_graph=True) computes what jit computes; on the CPU, whose graphs `graph_fake` makes."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graph_fake import Graph, graphs_on_cpu
from llama_combinations import load_example
from torch import Tensor

import dtorch
from dtorch import Replicate, Shard
from dtorch.errors import DonatedError, WorkerError
from dtorch.runtime import graph_calls, graph_memory


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with graphs_on_cpu():
        yield


def mesh_of(size: int) -> dtorch.DeviceMesh:
    return dtorch.DeviceMesh("cpu", list(range(size)))


def placed(value: Tensor, mesh: dtorch.DeviceMesh, placement: Any = Replicate()) -> dtorch.Tensor:  # noqa: B008
    return dtorch.tensor(value, device_mesh=mesh, placements=[placement])


def check(function: Callable[..., Any], mesh: dtorch.DeviceMesh, *fixed: Tensor) -> None:
    """Calls a function of fixed values and of ever new ones, by graphs, and keeps all results."""
    jitted = dtorch.jit(function, cuda_graph=True)
    weights = [placed(w, mesh) for w in fixed]
    found = []
    for _ in range(6):
        x = torch.randn(7, 4)
        found.append((x, jitted(*weights, placed(x, mesh, Shard(0)))))
    for x, ours in found:
        theirs = function(*fixed, x)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.to_torch(), b)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_are_those_of_the_operations(size: int) -> None:
    def compute(w: Any, x: Any) -> Any:
        h = torch.tanh(x @ w)
        return h + 1, (h * 2).mT, (h - 1).expand(2, -1, -1), h.sum(0), w.mT

    check(compute, mesh_of(size), torch.randn(4, 4))
    assert Graph.made >= size and Graph.replays >= 4 * size


def test_one_device_is_one_launch_a_call() -> None:
    w = placed(torch.randn(4, 4), mesh_of(1))
    jitted = dtorch.jit(lambda w, x: torch.softmax((x @ w).relu(), -1), cuda_graph=True)
    for _ in range(7):
        jitted(w, placed(torch.randn(3, 4), mesh_of(1))).to_torch()
    assert (Graph.made, Graph.replays) == (1, 5)


def test_what_the_host_sees_ends_a_part() -> None:
    def compute(w: Any, x: Any) -> Any:
        h = torch.tanh(x @ w) + 1
        h = h + torch.rand_like(h) * 0
        h = (h * 2).relu() @ w
        return ((h * 2 + 1).sum(0),)

    check(compute, mesh_of(2), torch.randn(4, 4))
    assert Graph.made > 2


def test_numbers_that_change_are_not_captured() -> None:
    jitted = dtorch.jit(lambda x, t: (torch.tanh(x) + 1) * t + 1, cuda_graph=True)
    for number in range(6):
        x, t = torch.randn(3), 0.5 + number
        ours = jitted(placed(x, mesh_of(1)), t)
        torch.testing.assert_close(ours.to_torch(), (torch.tanh(x) + 1) * t + 1)


def test_new_weights_are_captured_anew_and_then_copied() -> None:
    jitted = dtorch.jit(lambda w, x: torch.tanh(x @ w) + 1, cuda_graph=True)
    mesh, x = mesh_of(1), torch.randn(3, 4)
    for _ in range(3):
        w = torch.randn(4, 4)
        ours = placed(w, mesh)
        for _ in range(4):
            found = jitted(ours, placed(x, mesh)).to_torch()
            torch.testing.assert_close(found, torch.tanh(x @ w) + 1)
    assert Graph.made == 2


def test_results_live_on_when_the_graph_runs_again() -> None:
    jitted = dtorch.jit(lambda x: (x * 2 + 1, (x * 3).tanh()), cuda_graph=True)
    results = [jitted(placed(torch.full((3,), float(n)), mesh_of(1))) for n in range(8)]
    for number, (double, _) in enumerate(results):
        assert double.tolist() == [number * 2 + 1] * 3


def test_strides_of_the_call_are_kept() -> None:
    jitted = dtorch.jit(lambda x: ((x * 2).mT, (x + 1).mT[::2], (x * 3)[:, None]), cuda_graph=True)
    plain = dtorch.jit(lambda x: ((x * 2).mT, (x + 1).mT[::2], (x * 3)[:, None]))
    for _ in range(4):
        x = placed(torch.randn(3, 4), mesh_of(1))
        for ours, theirs in zip(jitted(x), plain(x), strict=True):
            assert torch.equal(ours.to_torch(), theirs.to_torch())
            assert ours.to_torch().stride() == theirs.to_torch().stride()


def test_what_cannot_be_captured_runs_and_says_why_once(capfd: pytest.CaptureFixture[str]) -> None:
    def compute(x: Any) -> Any:
        return (x * 2 + 1).tanh().std() * 3

    jitted = dtorch.jit(compute, cuda_graph=True)

    def refuse(work: Callable[[], None]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graph_calls.capture = refuse
    for _ in range(6):
        x = torch.randn(5)
        torch.testing.assert_close(jitted(placed(x, mesh_of(1))).to_torch(), compute(x))
    said = capfd.readouterr().err
    assert said.count("runs without a CUDA graph: RuntimeError: operation not permitted") == 1
    assert "more" not in said


def test_devices_without_graphs_say_so_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_calls, "have_graphs", lambda device_type: False)
    monkeypatch.setattr(graph_calls, "_said", set())
    for number in range(2):
        jitted = dtorch.jit(lambda x, n=number: x * n + 1, cuda_graph=True)
        assert jitted(placed(torch.ones(2), mesh_of(1))).tolist() == [number + 1] * 2
    assert capfd.readouterr().err.count("cuda_graph=True does nothing on devices of type cpu") == 1


def test_an_error_in_a_part_names_the_operation() -> None:
    def compute(x: Any, index: Any) -> Any:
        return torch.tanh(x * 2)[index] + 1

    jitted = dtorch.jit(compute, cuda_graph=True)
    x = placed(torch.ones(3), mesh_of(1))
    bad = placed(torch.tensor([7]), mesh_of(1))
    with pytest.raises(WorkerError, match=r"out of bounds|out of range") as raised:
        jitted(x, bad).to_torch()
    assert "index" in str(raised.value)
    good = placed(torch.tensor([1]), mesh_of(1))
    for _ in range(5):
        torch.testing.assert_close(
            jitted(x, good).to_torch(), torch.tanh(torch.full((1,), 2.0)) + 1
        )


def test_gradients() -> None:
    def loss(w: Any, x: Any) -> Any:
        return torch.tanh(x @ w).square().sum()

    step = dtorch.jit(dtorch.value_and_grad(loss), cuda_graph=True)
    mesh, w = mesh_of(2), torch.randn(4, 4)
    ours = placed(w, mesh)
    for _ in range(5):
        x = torch.randn(6, 4)
        value, grad = step(ours, placed(x, mesh, Shard(0)))
        theirs = w.clone().requires_grad_()
        expected = loss(theirs, x)
        expected.backward()
        torch.testing.assert_close(value.to_torch(), expected.detach())
        torch.testing.assert_close(grad.to_torch(), theirs.grad)


def test_backward_of_a_call() -> None:
    jitted = dtorch.jit(lambda w, x: torch.tanh(x @ w).square(), cuda_graph=True)
    mesh, w = mesh_of(1), torch.randn(4, 4)
    ours = placed(w, mesh).requires_grad_()
    theirs = w.clone().requires_grad_()
    for _ in range(5):
        x = torch.randn(6, 4)
        jitted(ours, placed(x, mesh)).sum().backward()
        torch.tanh(x @ theirs).square().sum().backward()
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.to_torch(), theirs.grad)


def test_graphs_are_freed_with_their_program() -> None:
    jitted = dtorch.jit(lambda x: x * 5 + 1, cuda_graph=True)
    before = set(graph_calls._runs)
    for _ in range(4):
        jitted(placed(torch.ones(2), mesh_of(1))).to_torch()
    (number,) = set(graph_calls._runs) - before
    graph = weakref.ref(graph_calls._runs[number][0]._replayed)
    assert graph() is not None
    jitted.cache_clear()
    del jitted
    dtorch.synchronize()
    gc.collect()
    assert number not in graph_calls._runs and graph() is None


def test_calls_are_counted_for_each_program() -> None:
    jitted = dtorch.jit(lambda x: x * 5 + 1, cuda_graph=True)
    for _ in range(4):
        jitted(placed(torch.ones(2), mesh_of(1)))
    assert list(jitted._traced._num_runs.values()) == [4]
    jitted.cache_clear()
    dtorch.synchronize()
    gc.collect()
    assert not jitted._traced._num_runs  # a later program may have the same address


# -- what is donated -------------------------------------------------------------------------


def step(cache: Any, x: Any, at: Any) -> Any:
    a, b = cache
    a, b = a.index_copy(0, at, x), b * 0.5
    b = b.index_put((at,), (x + 1)[0])
    return (a, b), a.sum() + b.sum()


jitted_step = dtorch.jit(step, donate_argnums=0, cuda_graph=True)
LAYOUTS = [(1, Replicate()), (3, Replicate()), (2, Shard(1)), (3, Shard(0))]


def new_caches(mesh: dtorch.DeviceMesh, placement: Any) -> Any:
    return tuple(placed(torch.full((5, 3), float(n)), mesh, placement) for n in (0, 8))


def inputs(number: int) -> tuple[Tensor, Tensor]:
    return torch.full((1, 3), float(number)), torch.tensor([number % 5])


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what was copied into buffers of graphs."""
    made: list[int] = []
    fill = graph_memory.Buffer.fill

    def counted(self: Any, tensor: Any) -> None:
        if not self.holds(tensor):
            made.append(tensor.numel())
        fill(self, tensor)

    monkeypatch.setattr(graph_memory.Buffer, "fill", counted)
    return made


def run(mesh: dtorch.DeviceMesh, placement: Any, count: int = 9) -> list[Any]:
    """Runs steps; returns the caches after each, as torch tensors, and checks every value."""
    cache, expected = new_caches(mesh, placement), [torch.zeros(5, 3), torch.full((5, 3), 8.0)]
    seen = []
    for number in range(count):
        x, at = inputs(number)
        cache, total = jitted_step(cache, placed(x, mesh), placed(at, mesh))
        expected, theirs = step(expected, x, at)
        torch.testing.assert_close(total.to_torch(), theirs)
        seen.append(cache)
        for ours, wanted in zip(cache, expected, strict=True):
            torch.testing.assert_close(ours.to_torch(), wanted)
    return seen


@pytest.mark.parametrize(("size", "placement"), LAYOUTS, ids=str)
def test_donated_caches_are_right_after_every_step(size: int, placement: Any) -> None:
    jitted_step.cache_clear()
    run(mesh_of(size), placement)


def test_donated_caches_are_not_copied(copies: list[int]) -> None:
    jitted_step.cache_clear()
    mesh = mesh_of(1)
    cache = new_caches(mesh, Replicate())
    for number in range(12):
        x, at = (placed(v, mesh) for v in inputs(number))
        cache, _ = jitted_step(cache, x, at)
    dtorch.synchronize()
    assert Graph.made == 1
    # At the capture the caches are copied in, from then on the token and its place alone.
    assert sorted(copies) == [1] * 10 + [3] * 10 + [15] * 2


def test_what_was_fetched_before_is_a_copy() -> None:
    jitted_step.cache_clear()
    mesh = mesh_of(1)
    cache = new_caches(mesh, Replicate())
    fetched = []
    for number in range(8):
        x, at = (placed(v, mesh) for v in inputs(number))
        cache, _ = jitted_step(cache, x, at)
        fetched.append(cache[0].to_torch())
    for number, value in enumerate(fetched):
        assert value[number % 5].tolist() == [number] * 3


def test_another_name_of_what_is_donated_is_gone() -> None:
    jitted_step.cache_clear()
    mesh = mesh_of(1)
    cache = new_caches(mesh, Replicate())
    for number in range(6):
        x, at = (placed(v, mesh) for v in inputs(number))
        other = cache[0].detach()
        cache, _ = jitted_step(cache, x, at)
    dtorch.synchronize()
    with pytest.raises(DonatedError, match="has written to its memory since"):
        other.to_torch()
    with pytest.raises(DonatedError, match="has written to its memory since"):
        (other * 2).to_torch()


def test_what_was_computed_with_a_cache_before_it_is_donated_stays() -> None:
    jitted_step.cache_clear()
    mesh = mesh_of(2)
    cache, expected = new_caches(mesh, Shard(1)), [torch.zeros(5, 3), torch.full((5, 3), 8.0)]
    results = []
    for number in range(10):
        x, at = inputs(number)
        views = cache[0].mT, cache[1] * 2, cache[0].redistribute(placements=[Replicate()])
        results.append((views[1:], expected))
        cache, _ = jitted_step(cache, placed(x, mesh), placed(at, mesh))
        expected, _ = step(expected, x, at)
    for (double, whole), (a, b) in results:
        torch.testing.assert_close(double.to_torch(), b * 2)
        torch.testing.assert_close(whole.to_torch(), a)


def test_two_sequences_with_one_program() -> None:
    jitted_step.cache_clear()
    mesh = mesh_of(1)
    ours = [new_caches(mesh, Replicate()) for _ in range(2)]
    theirs = [[torch.zeros(5, 3), torch.full((5, 3), 8.0)] for _ in range(2)]
    for number in range(24):
        which = number % 2 if number < 16 else 0
        x, at = inputs(number * (which + 1))
        ours[which], _ = jitted_step(ours[which], placed(x, mesh), placed(at, mesh))
        theirs[which], _ = step(theirs[which], x, at)
    for cache, expected in zip(ours, theirs, strict=True):
        for a, b in zip(cache, expected, strict=True):
            torch.testing.assert_close(a.to_torch(), b)


def test_one_cache_after_another(copies: list[int]) -> None:
    jitted_step.cache_clear()
    for _ in range(3):
        run(mesh_of(1), Replicate(), count=6)
    assert Graph.made <= 4


def test_a_cache_that_is_given_twice() -> None:
    def both(cache: Any, other: Any, at: Any, x: Any) -> Any:
        return cache.index_copy(0, at, x), (other * 2).sum(0) + 1

    jitted = dtorch.jit(both, donate_argnums=0, cuda_graph=True)
    mesh, expected = mesh_of(1), torch.zeros(5, 3)
    cache = placed(expected, mesh)
    for number in range(9):
        x, at = inputs(number)
        given = cache if number % 2 else placed(expected, mesh)
        cache, total = jitted(cache, given.detach(), placed(at, mesh), placed(x, mesh))
        wanted = (expected * 2).sum(0) + 1
        expected = expected.index_copy(0, at, x)
        torch.testing.assert_close(total.to_torch(), wanted)
        torch.testing.assert_close(cache.to_torch(), expected)


def test_a_cache_that_is_also_returned_is_not_written_to() -> None:
    def keep(cache: Any, x: Any, at: Any) -> Any:
        return cache, cache.index_copy(0, at, x), cache[1:] * 2

    jitted = dtorch.jit(keep, donate_argnums=0, cuda_graph=True)
    mesh, cache = mesh_of(1), torch.randn(5, 3)
    ours = placed(cache, mesh)
    for number in range(6):
        x, at = inputs(number)
        ours, new, _ = jitted(ours, placed(x, mesh), placed(at, mesh))
        torch.testing.assert_close(new.to_torch(), cache.index_copy(0, at, x))
        torch.testing.assert_close(ours.to_torch(), cache)


def test_a_step_of_the_llama_example_is_one_launch() -> None:
    pytest.importorskip("safetensors")
    llama = load_example()
    config, params = llama.load(llama.OWN_MODEL, llama.make_mesh("dp=1", "cpu"))
    mesh, prompt = params["model"]["norm"]["weight"].device_mesh, torch.tensor([[1, 2, 3, 4]])
    theirs, ours = (
        [ids.tolist() for ids in llama.generate(config, params, mesh, prompt, 12, 0.0, **options)]
        for options in ({}, {"cuda_graph": True})
    )
    assert ours == theirs
    assert (Graph.made, Graph.replays) == (1, 9)


def test_two_threads_with_caches_of_their_own() -> None:
    jitted_step.cache_clear()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3):
                run(mesh_of(2), Shard(1), count=5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(t.is_alive() for t in threads)


def check_donated(function: Callable[..., Any], given: Callable[[Any], tuple[Any, ...]]) -> None:
    """Calls a function that updates a cache; `given` makes more arguments of the cache."""
    jitted = dtorch.jit(function, donate_argnums=0, cuda_graph=True)
    mesh, theirs = mesh_of(1), torch.zeros(5, 3)
    ours = placed(theirs, mesh)
    for number in range(8):
        x = torch.full((3,), number + 1.0)
        ours, found = jitted(ours, placed(x, mesh), *given(ours))
        theirs, expected = function(theirs, x, *given(theirs))
        torch.testing.assert_close(found.to_torch(), expected)
        torch.testing.assert_close(ours.to_torch(), theirs)


def test_a_view_from_before_is_not_written_to() -> None:
    def compute(cache: Any, x: Any) -> Any:
        view = cache.mT
        x = x + torch.rand_like(x) * 0  # a part ends, so the view is no part's
        cache = (cache + x) * 2
        noise = torch.rand_like(x) * 0
        return cache, (view * 3).sum(0) + noise.sum()

    check_donated(compute, lambda cache: ())


def test_an_alias_that_is_read_after_the_part_is_not_written_to() -> None:
    def compute(cache: Any, x: Any, other: Any) -> Any:
        cache = (cache + x) * 2
        noise = torch.rand_like(x) * 0
        return cache, (other.mT * 3).sum(0) + noise.sum()

    check_donated(compute, lambda cache: (cache.detach(),))


def test_what_only_reads_a_donated_input_before_does_not_keep_it(copies: list[int]) -> None:
    def compute(cache: Any, x: Any) -> Any:
        noise = torch.rand_like(cache.sum(1).relu()) * 0
        return (cache + x) * 2, noise.sum() + 1

    check_donated(compute, lambda cache: ())
    # The part that reads it copies it every time, the one that writes to it at the capture only.
    assert copies.count(15) == 7


def test_what_takes_rows_by_index_is_captured_and_by_mask_is_not() -> None:
    def compute(x: Any, at: Any) -> Any:
        x = torch.tanh(x * 2)
        rows = x[at] + 1, x.index_put((at,), x[at] * 3) + 1, x[:, at] * 2
        return *rows, x.index_put((x > 0,), at.sum() * 1.5)

    first, jitted = next(graph_calls._numbers), dtorch.jit(compute, cuda_graph=True)
    for number in range(6):
        x, at = torch.randn(4, 4), torch.tensor([number % 4, 3])
        found = jitted(placed(x, mesh_of(1)), placed(at, mesh_of(1)))
        for ours, theirs in zip(found, compute(x, at), strict=True):
            assert torch.equal(ours.to_torch(), theirs)
    (part,) = (runs for number, runs in graph_calls._runs.items() if number > first)
    names = [o.op._schema.name for o in part[0]._operations if hasattr(o, "op")]
    assert (names.count("aten::index"), names.count("aten::index_put")) == (3, 1)
