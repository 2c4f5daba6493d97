"""`shard_map`: user functions on shards, their collectives, gradients, failures and lifetimes."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from layouts import check, check_program, placements_of, spread, values

import dtorch
from dtorch import P
from dtorch.errors import (
    CollectiveError,
    DTorchError,
    MeshError,
    MutationError,
    PlacementError,
    TraceError,
    WorkerError,
)

LINE = dtorch.init_device_mesh("cpu", (3,), mesh_dim_names=("x",))
GRID = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
ONE = dtorch.init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
PAIR = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
EIGHT = dtorch.init_device_mesh("cpu", (8,), mesh_dim_names=("x",))
LINES = [ONE, PAIR, LINE, EIGHT]
MESHES = [*LINES, GRID]


def ids(mesh: Any) -> str:
    return "x".join(map(str, mesh.shape))


lines = pytest.mark.parametrize("mesh", LINES, ids=ids)
meshes = pytest.mark.parametrize("mesh", MESHES, ids=ids)


# -- layouts -------------------------------------------------------------------------------


@meshes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool,
                                   torch.complex64], ids=str)  # fmt: skip
def test_elementwise(mesh: Any, dtype: torch.dtype) -> None:
    a, b = values((5, 3), dtype), values((3,), dtype, seed=1)
    f = dtorch.shard_map(lambda a, b: (a * b, a), mesh, (P("x"), P()), (P("x"), P("x")))
    for _ in range(2):
        product, same = f(a, b)
        check(product, a * b)
        check(same, a)
    check_program(f.program(a, b))


@pytest.mark.parametrize("mesh", [LINE, GRID], ids=ids)
def test_every_layout_is_brought_to_the_spec(mesh: Any) -> None:
    a = values((5, 4))
    specs = [P(), P("x"), P(None, "x"), *([P("x", "y"), P(("x", "y"))] if mesh.ndim > 1 else [])]
    for spec in specs:
        f = dtorch.jit(dtorch.shard_map(torch.sin, mesh, spec, spec))
        for layout in placements_of(2, mesh):
            found = f(spread(a, mesh, layout))
            check(found, a.sin())
            assert found.placements == list(spec.to_placements(mesh))


def test_local_shapes_are_those_of_chunk() -> None:
    seen: dict[int, tuple[int, ...]] = {}

    def note(a: torch.Tensor) -> torch.Tensor:
        if not a.is_meta:
            seen[dtorch.axis_index("x")] = tuple(a.shape)
        return a + 1

    a = torch.arange(10.0).reshape(5, 2)
    four = dtorch.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    check(dtorch.shard_map(note, four, P("x"), P("x"))(a), a + 1)
    assert seen == {0: (2, 2), 1: (2, 2), 2: (1, 2), 3: (0, 2)}


def test_trees_prefixes_and_numbers() -> None:
    def step(state: Any, factor: float, count: int, flag: Any) -> Any:
        assert type(factor) is float and type(count) is int and flag is None
        return {"a": state["a"] * factor, "b": [b + count for b in state["b"]]}

    a, b = values((4, 2)), values((4,))
    f = dtorch.shard_map(step, PAIR, (P("x"), P(), P(), None), {"a": P("x"), "b": P("x")})
    for factor in (2.0, 3.0):
        found = f({"a": a, "b": [b, b]}, factor, 5, None)
        check(found["a"], a * factor)
        check(found["b"][1], b + 5)
    assert f.cache_info().misses == 1


def test_without_arguments() -> None:
    f = dtorch.shard_map(lambda: torch.tensor([dtorch.axis_index("x")]), LINE, (), P("x"))
    assert f().tolist() == [0, 1, 2]
    g = dtorch.jit(lambda x: x + dtorch.shard_map(_counted, LINE, (), P())())
    assert g(dtorch.zeros((), device_mesh=LINE)).item() == 3


def _counted() -> torch.Tensor:
    return dtorch.psum(torch.ones(()), "x")


@meshes
def test_on_one_device_it_is_the_function_itself(mesh: Any) -> None:
    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(torch.nn.functional.layer_norm(x @ w, (6,))).mT

    x, w = torch.randn(4, 5, 8), torch.randn(8, 6)
    found = dtorch.shard_map(block, mesh, (P(), P()), P())(x, w)
    if mesh is ONE:
        assert torch.equal(found.to_torch(), block(x, w))
        assert found.stride() == block(x, w).stride()
    check(found, block(x, w), rtol=1e-5, atol=1e-5)


def test_strided_conjugated_and_empty_operands() -> None:
    a = values((4, 3), torch.complex64)
    b = spread(a, PAIR, [dtorch.Shard(0)])
    f = dtorch.shard_map(lambda a: a.resolve_conj(), PAIR, P("x"), P("x"))
    check(f(b.conj()), a.conj().resolve_conj())
    check(dtorch.shard_map(lambda a: a.mT, PAIR, P("x"), P(None, "x"))(b.mT.mT), a.mT)
    check(dtorch.shard_map(lambda a: a, PAIR, P("x"), P("x"))(torch.empty(0, 3)), torch.empty(0, 3))


# -- collectives ---------------------------------------------------------------------------


@lines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64],
                         ids=str)  # fmt: skip
def test_reductions(mesh: Any, dtype: torch.dtype) -> None:
    n = mesh.shape[0]
    a = values((n, 4), dtype)

    def reduced(a: torch.Tensor) -> Any:
        whole = {"sum": dtorch.psum(a, "x"), "mean": dtorch.pmean(a, "x")}
        if not dtype.is_complex:
            whole |= {"max": dtorch.pmax(a, "x"), "min": dtorch.pmin(a, "x")}
        return whole, dtorch.psum(1, "x") * torch.ones(())

    found, count = dtorch.shard_map(reduced, mesh, P("x"), (P(), P()))(a)
    check(found["sum"], a.sum(0, keepdim=True), rtol=1e-2)
    check(found["mean"], a.sum(0, keepdim=True) / n, rtol=1e-2)
    assert count.item() == n
    if not dtype.is_complex:
        check(found["max"], a.amax(0, keepdim=True))
        check(found["min"], a.amin(0, keepdim=True))


def test_booleans_are_added_as_integers() -> None:
    f = dtorch.shard_map(lambda a: (dtorch.psum(a, "x"), dtorch.pmax(a, "x")), LINE, P("x"), P())
    total, any_ = f(torch.tensor([True, False, True]))
    assert total.tolist() == [2] and any_.tolist() == [True]


@lines
def test_gathers_and_scatters(mesh: Any) -> None:
    n = mesh.shape[0]
    a, b = values((2 * n, 3)), values((n, n * 2, 3))

    def moved(a: torch.Tensor, b: torch.Tensor) -> Any:
        return (
            dtorch.all_gather(a, "x"),
            dtorch.all_gather(a, "x", axis=-1, tiled=True),
            dtorch.psum_scatter(b[0], "x", tiled=True),
            dtorch.psum_scatter(b[0].unflatten(0, (n, 2)), "x"),
        )

    specs = (P(), P(), P("x"), P("x"))
    found = dtorch.shard_map(moved, mesh, (P("x"), P("x")), specs)(a, b)
    check(found[0], a.unflatten(0, (n, 2)))
    check(found[1], torch.cat(a.chunk(n), -1))
    check(found[2], b.sum(0))
    check(found[3], b.sum(0))


@lines
def test_permutation_and_exchange(mesh: Any) -> None:
    n = mesh.shape[0]
    a, b = values((n, 2)), values((n, 2 * n, 3))
    around = [(i, (i + 1) % n) for i in range(n)]

    def moved(a: torch.Tensor, b: torch.Tensor) -> Any:
        return (
            dtorch.ppermute(a, "x", around),
            dtorch.ppermute(a, "x", around[:1]),
            dtorch.all_to_all(b, "x", 1, 0, tiled=True),
            dtorch.all_to_all(b[0].unflatten(0, (n, 2)), "x", 0, 1),
        )

    specs = (P("x"), P("x"), P(None, "x"), P("x"))
    found = dtorch.shard_map(moved, mesh, (P("x"), P("x")), specs)(a, b)
    check(found[0], a.roll(1, 0))
    first = torch.zeros_like(a)
    first[1 % n] = a[0]
    check(found[1], first)
    check(found[2], b)
    check(found[3], b.unflatten(1, (n, 2)).permute(1, 2, 0, 3).flatten(0, 1))


def test_several_axes_at_once() -> None:
    def places(a: torch.Tensor) -> Any:
        index = dtorch.axis_index(("y", "x"))
        assert dtorch.axis_size(("x", "y")) == 4 and dtorch.axis_size("y") == 2
        return torch.full((1, 1), index), dtorch.all_gather(a, ("y", "x"), tiled=True).flatten()

    a = torch.arange(4).reshape(2, 2)
    index, gathered = dtorch.shard_map(places, GRID, P("x", "y"), (P("x", "y"), P()))(a)
    assert index.tolist() == [[0, 2], [1, 3]]
    assert gathered.tolist() == [0, 2, 1, 3]


def test_replicas_agree_bit_for_bit() -> None:
    a = torch.randn(8, 1000)
    found = dtorch.shard_map(lambda a: dtorch.psum(a, "x"), EIGHT, P("x"), P("x"))(a)
    shards = list(found.local_shards().values())
    assert all(torch.equal(s, shards[0]) for s in shards)
    in_order = a[0]
    for row in a[1:]:
        in_order = in_order + row
    assert torch.equal(shards[0][0], in_order)


def test_writing_after_an_exchange_changes_nothing_elsewhere() -> None:
    def write(a: torch.Tensor) -> torch.Tensor:
        mine = a.clone()
        total = torch.zeros_like(a)
        for _ in range(20):
            total += dtorch.ppermute(mine, "x", [(0, 1), (1, 2), (2, 0)])
            mine += 1
        return total

    a = torch.arange(3.0)
    check(dtorch.shard_map(write, LINE, P("x"), P("x"))(a), 20 * a.roll(1) + 190)


# -- what users write ----------------------------------------------------------------------


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over a sequence split along "x": keys and values go around."""
    n = dtorch.axis_size("x")
    around = [(i, (i + 1) % n) for i in range(n)]
    total, norm = torch.zeros_like(q), q.new_zeros(*q.shape[:-1], 1)
    peak = q.new_full((*q.shape[:-1], 1), -torch.inf)
    for step in range(n):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights, faded = torch.exp(scores - higher), torch.exp(peak - higher)
        total, norm, peak = (
            total * faded + weights @ v,
            norm * faded + weights.sum(-1, True),
            higher,
        )
        if step < n - 1:
            k, v = dtorch.ppermute((k, v), "x", around)
    return total / norm


@pytest.mark.parametrize("mesh", [ONE, LINE], ids=ids)
def test_ring_attention(mesh: Any) -> None:
    tensors = [torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    spec = P(None, "x")
    ring = dtorch.shard_map(ring_attention, mesh, spec, spec)
    whole = torch.nn.functional.scaled_dot_product_attention(*tensors)
    check(ring(*(t.detach() for t in tensors)), whole, rtol=1e-9, atol=1e-9)
    grads = torch.autograd.grad(whole.square().sum(), tensors)

    def loss(*tensors: Any) -> torch.Tensor:
        return ring(*tensors).square().sum()

    plain = [t.detach() for t in tensors]
    placed = [dtorch.Tensor(t, device_mesh=mesh) for t in plain]
    for found in (
        dtorch.grad(loss, (0, 1, 2))(*placed),
        dtorch.jit(dtorch.grad(loss, (0, 1, 2)))(*placed),
    ):
        for g, wanted in zip(found, grads, strict=True):
            check(g, wanted, rtol=1e-9, atol=1e-9)


@pytest.fixture
def kernel() -> Iterator[Callable[..., Any]]:
    @torch.library.custom_op("dtorch_test_local::scaled", mutates_args=())
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * factor)

    yield scaled
    dtorch.synchronize()


def test_custom_kernel(kernel: Any) -> None:
    a = torch.arange(5.0)
    like = torch.empty(5, device="meta")

    def call(x: torch.Tensor, factor: float) -> torch.Tensor:
        return kernel(x, factor)

    with pytest.raises(RuntimeError, match=r"(?s)no fake impl.*shard_map\(call\).*out_shapes"):
        dtorch.shard_map(call, PAIR, (P("x"), P()), P("x"))(a, 3.0)
    f = dtorch.shard_map(call, PAIR, (P("x"), P()), P("x"), out_shapes=like)
    check(f(a, 3.0), a * 3)
    kernel.register_fake(lambda x, factor: torch.empty_like(x))
    kernel.register_autograd(lambda ctx, grad: (kernel(grad, ctx.factor), None),
                             setup_context=_keep_factor)  # fmt: skip
    f = dtorch.shard_map(call, PAIR, (P("x"), P()), P("x"))
    check(f(a, 3.0), a * 3)
    x = dtorch.Tensor(a, device_mesh=PAIR, requires_grad=True)
    f(x, 3.0).sum().backward()
    assert x.grad is not None
    check(x.grad, torch.full((5,), 3.0))


def _keep_factor(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.factor = inputs


def test_a_captured_plain_tensor_meets_meta_tensors() -> None:
    table = torch.arange(3.0)
    f = dtorch.shard_map(lambda a: torch.cat([a * table, table[None]]), PAIR, P("x"), P("x"))
    a = torch.ones(2, 3)
    check(f(a), torch.cat([table[None]] * 4))


# -- gradients -----------------------------------------------------------------------------


def _psum_loss(a: Any, w: Any) -> Any:
    return dtorch.psum((a @ w).sin(), "x")


def _mean(a: Any, w: Any) -> Any:
    return dtorch.pmean((a @ w).sin(), "x") + dtorch.axis_index("x") * 0


def _max(a: Any, w: Any) -> Any:
    return dtorch.pmax((a @ w).sin(), "x") - dtorch.pmin((a @ w).cos(), "x")


def _gather(a: Any, w: Any) -> Any:
    return dtorch.all_gather((a @ w).sin(), "x", tiled=True).cos()


def _scatter(a: Any, w: Any) -> Any:
    return dtorch.psum_scatter((a.mT @ a @ w).sin(), "x", tiled=True)


def _exchange(a: Any, w: Any) -> Any:
    n = dtorch.axis_size("x")
    h = (a @ w).sin().unflatten(1, (n, -1))
    return dtorch.all_to_all(h, "x", 1, 1).flatten(1) * dtorch.ppermute(a, "x", [(0, n - 1)])


def whole_psum(a: Any, w: Any, n: int) -> Any:
    return sum((p @ w).sin() for p in a.chunk(n))


def whole_mean(a: Any, w: Any, n: int) -> Any:
    return whole_psum(a, w, n) / n


def whole_max(a: Any, w: Any, n: int) -> Any:
    h = torch.stack([p @ w for p in a.chunk(n)])
    return h.sin().amax(0) - h.cos().amin(0)


def whole_gather(a: Any, w: Any, n: int) -> Any:
    return (a @ w).sin().cos()


def whole_scatter(a: Any, w: Any, n: int) -> Any:
    return sum((p.mT @ p @ w).sin() for p in a.chunk(n))


def whole_exchange(a: Any, w: Any, n: int) -> Any:
    h = torch.stack([p @ w for p in a.chunk(n)]).sin().unflatten(2, (n, -1))
    sent = torch.zeros_like(a).index_copy(0, torch.arange(len(a) - len(a) // n, len(a)),
                                          a[: len(a) // n])  # fmt: skip
    return h.permute(2, 1, 0, 3).flatten(0, 1).flatten(1) * sent


@pytest.mark.parametrize("mesh", [ONE, PAIR, LINE, GRID], ids=ids)
@pytest.mark.parametrize(
    ("local", "whole", "out"),
    [
        (_psum_loss, whole_psum, P()),
        (_mean, whole_mean, P()),
        (_max, whole_max, P()),
        (_gather, whole_gather, P()),
        (_scatter, whole_scatter, P("x")),
        (_exchange, whole_exchange, P("x")),
    ],
    ids=["psum", "pmean", "pmax", "all_gather", "psum_scatter", "all_to_all"],
)
def test_gradients(mesh: Any, local: Any, whole: Any, out: Any) -> None:
    a = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    result = whole(a, w, mesh.shape[0])
    weight = torch.randn_like(result)
    expected = torch.autograd.grad((result * weight).sum(), (a, w))
    f = dtorch.shard_map(local, mesh, (P("x"), P()), out)
    placed = dtorch.Tensor(weight, device_mesh=mesh)

    def loss(a: Any, w: Any) -> Any:
        return (f(a, w) * placed).sum()

    args = [dtorch.Tensor(t.detach(), device_mesh=mesh) for t in (a, w)]
    check(f(*args), result, rtol=1e-9, atol=1e-9)
    for differentiated in (dtorch.grad(loss, (0, 1)), dtorch.jit(dtorch.grad(loss, (0, 1)))):
        for found, wanted in zip(differentiated(*args), expected, strict=True):
            check(found, wanted, rtol=1e-9, atol=1e-9)


def test_backward_uneven_several_results_and_integers() -> None:
    def local(a: Any, w: Any, i: Any) -> Any:
        return a * w, {"index": i + 1, "unused": a.sin()}

    a = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    f = dtorch.shard_map(local, LINE, (P("x"), P(), P("x")), P("x"))
    x = dtorch.Tensor(a.detach(), device_mesh=LINE, requires_grad=True)
    plain = w.detach().requires_grad_()
    product, rest = f(x, plain, torch.arange(5))
    assert product.requires_grad and not rest["index"].requires_grad
    product.square().sum().backward()
    (a * w).square().sum().backward()
    assert a.grad is not None and w.grad is not None and plain.grad is not None
    check(x.grad, a.grad, rtol=1e-9)
    torch.testing.assert_close(plain.grad, w.grad)


def test_backward_of_results_that_are_arguments_or_each_other() -> None:
    def same(a: torch.Tensor, b: torch.Tensor) -> Any:
        c = a * b
        return a, c, c, b.detach()

    f = dtorch.shard_map(same, PAIR, P("x"), P("x"))

    def loss(a: Any, b: Any) -> Any:
        first, second, third, fourth = f(a, b)
        return (first + 2 * second * third + fourth).sum()

    a, b = (dtorch.Tensor(values((3,), seed=i), device_mesh=PAIR) for i in range(2))
    to_a, to_b = dtorch.grad(loss, (0, 1))(a, b)
    x, y = a.to_torch(), b.to_torch()
    check(to_a, 1 + 4 * x * y * y)
    check(to_b, 4 * x * x * y)


def test_second_derivative_in_jit() -> None:
    f = dtorch.shard_map(lambda a: dtorch.psum((a**3).sum(), "x"), LINE, P("x"), P())
    a = torch.randn(5, dtype=torch.float64)
    twice = dtorch.jit(dtorch.grad(lambda a: dtorch.grad(f)(a).square().sum()))
    check(twice(dtorch.Tensor(a, device_mesh=LINE)), 36 * a**3, rtol=1e-9)


def test_autograd_works_inside() -> None:
    def slope(a: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            return torch.autograd.grad(dtorch.psum(a.sin().sum(), "x"), a)[0]

    a = torch.randn(4)
    check(dtorch.jit(dtorch.shard_map(slope, PAIR, P("x"), P("x")))(a), 2 * a.cos())


# -- programs ------------------------------------------------------------------------------


def test_it_is_one_instruction_of_a_program() -> None:
    def double(a: torch.Tensor) -> torch.Tensor:
        return a * 2

    f = dtorch.shard_map(double, PAIR, P("x"), P("x"))
    step = dtorch.jit(lambda a: f(a + 1).sum())
    a = dtorch.ones(4, device_mesh=PAIR, placements=[dtorch.Shard(0)])
    program = step.program(a)
    calls = [i for i in program.instructions if "shard_map(double)" in str(i)]
    assert len(calls) == 1 and not program.fallbacks()
    assert "dtorch.local_call.default([%1], shard_map(double))" in str(program)
    assert [step(a).item() for _ in range(3)] == [16, 16, 16]
    assert step.cache_info().misses == 1
    assert step._traced.calls.hits == 2  # the fast path of jitted calls


def test_strict_refuses_implicit_communication() -> None:
    f = dtorch.shard_map(lambda a: dtorch.psum(a, "x"), PAIR, P("x"), P("x"))
    a = dtorch.ones(4, 4, device_mesh=PAIR, placements=[dtorch.Shard(1)])
    elsewhere = dtorch.ones(4, 4, device_mesh=dtorch.DeviceMesh("cpu", [5, 6]))
    with dtorch.strict():
        f(a.redistribute(placements=[dtorch.Shard(0)])).to_torch()
        with pytest.raises(PlacementError, match=r"(?s)strict: .*S\(1\).*Fix: "):
            f(a)
        with pytest.raises(PlacementError, match=r"(?s)strict: shard_map.*\[5, 6\].*Fix: "):
            f(elsewhere)
    check(f(elsewhere), torch.full((4, 4), 2.0))


def test_compiled_programs_keep_it() -> None:
    f = dtorch.shard_map(lambda a: a * 2, PAIR, P("x"), P("x"))
    a = dtorch.ones(4, device_mesh=PAIR)
    check(dtorch.jit(lambda a: f(a + 1), compile=True)(a), torch.full((4,), 4.0))


def test_nothing_is_kept_of_what_has_died() -> None:
    def used() -> Any:
        def local(a: torch.Tensor) -> torch.Tensor:
            return dtorch.psum(a.sin(), "x")

        f = dtorch.shard_map(local, PAIR, P("x"), P())
        a = dtorch.ones(4, device_mesh=PAIR, requires_grad=True)
        f(a).sum().backward()
        dtorch.jit(dtorch.grad(lambda a: f(a).sum()))(a.detach()).to_torch()
        return weakref.ref(local)

    dead = used()
    deadline = time.monotonic() + 5
    while dead() is not None and time.monotonic() < deadline:
        dtorch.synchronize()
        gc.collect()
        time.sleep(0.01)
    assert dead() is None
    assert not dtorch.runtime.local_calls._runs


# -- failures ------------------------------------------------------------------------------


def test_a_failing_device_ends_the_wait_of_its_peers() -> None:
    def fail(a: torch.Tensor) -> torch.Tensor:
        if not a.is_meta and dtorch.axis_index("x") == 1:
            raise ValueError("out of cheese")
        return dtorch.psum(dtorch.psum(a, "x"), "x")

    f = dtorch.shard_map(fail, LINE, P("x"), P("x"))
    a = dtorch.ones(6, device_mesh=LINE)
    result = f(a)
    with pytest.raises(DTorchError, match=r"(?s)shard_map\(fail\).*cpu:1 .*ValueError: out of ch"):
        result.to_torch()
    with pytest.raises(WorkerError, match=r"(?s)ValueError on cpu:1.*test_shard_map.py"):
        dtorch.runtime.values_of(result._shards, [1])
    check(dtorch.shard_map(_sum, LINE, P("x"), P("x"))(a), torch.full((6,), 3.0))


def _sum(a: torch.Tensor) -> torch.Tensor:
    return dtorch.psum(a, "x")


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (lambda a: dtorch.all_gather(a, "x", tiled=True)[:2], "all_gather"),
        (lambda a: dtorch.psum(a.double(), "x").float(), "float64"),
        (lambda a: dtorch.psum(a[:1], "x").expand(2), r"float32\[1\]"),
        (lambda a: a, "ended after 0 collectives"),
        (lambda a: dtorch.psum(a, ("x", "y")), "'x', 'y'"),
    ],
)
def test_differing_collectives_are_an_error_for_all(other: Any, shown: str) -> None:
    def differ(a: torch.Tensor) -> torch.Tensor:
        if not a.is_meta and dtorch.axis_index("x") == 1:
            return other(a)
        return dtorch.psum(a, "x")

    a = dtorch.ones(4, device_mesh=GRID)
    result = dtorch.shard_map(differ, GRID, P("x"), P("x"))(a)
    result._shards.wait(range(4))
    for position in range(4):
        wanted = rf"(?s)cpu:{position % 2}  psum.*cpu:{position % 2 + 2}  .*{shown}.*Fix: "
        if position < 2 or "ended" not in shown:
            with pytest.raises(CollectiveError, match=wanted):
                dtorch.runtime.values_of(result._shards, [position])


def test_failed_operands_on_one_device_stop_all() -> None:
    def fail(a: torch.Tensor) -> torch.Tensor:
        if not a.is_meta and dtorch.axis_index("x") == 2:
            raise ValueError("early")
        return a

    ran: list[int] = []

    def meet(a: torch.Tensor) -> torch.Tensor:
        ran.append(0 if a.is_meta else 1)
        return dtorch.psum(a, "x")

    a = dtorch.ones(6, device_mesh=LINE)
    first = dtorch.shard_map(fail, LINE, P("x"), P("x"))(a)
    with pytest.raises(WorkerError, match="early"):
        dtorch.shard_map(meet, LINE, P("x"), P("x"))(first).to_torch()
    dtorch.synchronize()
    assert sum(ran) == 0
    with pytest.raises(WorkerError, match="early"):
        dtorch.jit(lambda a: dtorch.shard_map(meet, LINE, P("x"), P("x"))(a))(first).to_torch()


def test_a_result_other_than_said_is_an_error_at_the_fetch() -> None:
    def grow(a: torch.Tensor) -> torch.Tensor:
        return a if a.is_meta else torch.cat([a, a])

    result = dtorch.shard_map(grow, PAIR, P("x"), P("x"))(torch.ones(4))
    with pytest.raises(DTorchError, match=r"(?s)float32\[4\].*cpu:0.*said float32\[2\].*Fix"):
        result.to_torch()
    like = torch.empty(6, dtype=torch.float64, device="meta")
    result = dtorch.shard_map(torch.sin, PAIR, P("x"), P("x"), out_shapes=like)(torch.ones(4))
    with pytest.raises(DTorchError, match=r"(?s)float32\[2\].*said float64\[3\]"):
        result.to_torch()


def test_many_clients_and_devices_that_run_ahead() -> None:
    def meet(a: torch.Tensor, delay: float) -> torch.Tensor:
        if not a.is_meta and dtorch.axis_index("x") == 0:
            time.sleep(delay)
        return dtorch.psum(dtorch.ppermute(a, "x", [(0, 1), (1, 2), (2, 0)]), "x")

    f = dtorch.shard_map(meet, LINE, (P("x"), P()), P())
    wrong: list[Any] = []

    def client(number: int) -> None:
        futures = [f(torch.full((3,), float(number + i)), 0.001).to_torch_async() for i in range(8)]
        found = [future.get().item() for future in futures]
        if found != [3.0 * (number + i) for i in range(8)]:
            wrong.append(found)

    threads = [threading.Thread(target=client, args=(100 * n,)) for n in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong


def test_exit_ends_the_wait() -> None:
    script = """
import time, torch, dtorch
from dtorch import P
mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
def late(a):
    if not a.is_meta and dtorch.axis_index("x") == 0:
        time.sleep(1.5)
    return dtorch.psum(a, "x")
f = dtorch.shard_map(late, mesh, P("x"), P())
results = [f(torch.ones(2)) for _ in range(40)]
time.sleep(0.3)
print(time.monotonic())
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=100, capture_output=True,
                          text=True, env=os.environ)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - float(done.stdout) < 30  # of the 60 s that all of them would take


# -- errors at the call ----------------------------------------------------------------------


def _raises(kind: type[Exception], match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=f"(?s){match}.*Fix: "):
        call()


def test_wrong_arguments_of_shard_map() -> None:
    wrong: Any = 3
    _raises(TypeError, "not int 3", lambda: dtorch.shard_map(wrong, PAIR, P(), P()))
    _raises(TypeError, "a mesh, not int 3", lambda: dtorch.shard_map(_sum, wrong, P(), P()))
    _raises(TypeError, "in_specs has str 'x'", lambda: dtorch.shard_map(_sum, PAIR, "x", P()))
    _raises(PlacementError, "out_specs has P.'z'.*'z'",
            lambda: dtorch.shard_map(_sum, PAIR, P("x"), P("z")))  # fmt: skip
    for spec in (P("x", "x"), P(("y", "x"))):
        _raises(
            PlacementError, r"in_specs: P\(", lambda s=spec: dtorch.shard_map(_sum, GRID, s, P())
        )
    told = dtorch.shard_map(_sum, PAIR, P(), P(), out_shapes=wrong)
    _raises(TypeError, "out_shapes has int 3", lambda: told(torch.ones(2)))


def test_specs_that_do_not_fit() -> None:
    one = torch.ones(4)
    _raises(PlacementError, "in_specs is no prefix",
            lambda: dtorch.shard_map(_sum, PAIR, (P(), P()), P())(one))  # fmt: skip
    _raises(PlacementError, "out_specs is no prefix",
            lambda: dtorch.shard_map(_sum, PAIR, P(), (P(), P()))(one))  # fmt: skip
    _raises(PlacementError, r"P\(None, 'x'\) for args\[0\]\['a'\], which has 1 dim",
            lambda: dtorch.shard_map(_sum, PAIR, P(None, "x"), P())({"a": one}))  # fmt: skip
    _raises(PlacementError, r"P\('x'\) for args\[0\], which has 0 dims",
            lambda: dtorch.shard_map(_sum, PAIR, P("x"), P())(1.0))  # fmt: skip
    _raises(PlacementError, r"no shards of one tensor.*cpu:1  float32\[1\]",
            lambda: dtorch.shard_map(lambda a: a, PAIR, P("x"), P())(torch.ones(3)))  # fmt: skip
    _raises(TraceError, "returned float 1.0", lambda: _mapped(lambda a: 1.0)(one))


def _mapped(function: Any) -> Any:
    return dtorch.shard_map(function, PAIR, P("x"), P("x"))


def test_distributed_tensors_are_arguments() -> None:
    w = dtorch.ones(2, device_mesh=PAIR)
    a = torch.ones(4)
    for function in (lambda a: a * w, lambda a: w * a, lambda a: torch.cat([a, w]), lambda a: w):
        _raises(TraceError, r"distributed tensor of shape \[2\] that is none of its arguments",
                lambda function=function: _mapped(function)(a))  # fmt: skip
        _raises(TraceError, r"distributed tensor of shape \[2\] that is none of its arguments",
                lambda function=function: dtorch.jit(_mapped(function))(a))  # fmt: skip
    traced = dtorch.jit(lambda a, w: _mapped(lambda a: a * w)(a))
    _raises(TraceError, "none of its arguments", lambda: traced(a, w))
    like = torch.empty(4, device="meta")
    late = dtorch.shard_map(lambda a: a * w, PAIR, P("x"), P("x"), out_shapes=like)
    with pytest.raises(DTorchError, match=r"(?s)Fix: .*argument"):
        late(a).to_torch()


def test_captured_tensors_do_not_lose_their_gradient() -> None:
    w = torch.ones(2, requires_grad=True)
    a = torch.ones(4)
    _raises(TraceError, r"shape \[2\] that requires grad", lambda: _mapped(lambda a: a * w)(a))
    with torch.no_grad():
        check(_mapped(lambda a: a * w)(a), a)


def test_arguments_are_not_written_to() -> None:
    def write(a: torch.Tensor) -> torch.Tensor:
        return a.mul_(2)

    like = torch.empty(4, device="meta")
    late = dtorch.shard_map(write, PAIR, P("x"), P("x"), out_shapes=like)(torch.ones(4))
    with pytest.raises(MutationError, match=r"(?s)writes to its argument.*Fix: "):
        late.to_torch()

    _raises(MutationError, r"shard_map\(write\) writes to its argument of number 0, float32\[2\]",
            lambda: _mapped(write)(torch.ones(4)))  # fmt: skip


def test_collectives_outside() -> None:
    one = torch.ones(2)
    for call in (
        lambda: dtorch.psum(one, "x"),
        lambda: dtorch.axis_index("x"),
        lambda: dtorch.ppermute(one, "x", [(0, 1)]),
    ):
        _raises(DTorchError, "is for functions that shard_map runs", call)


@pytest.mark.parametrize(
    ("kind", "match", "call"),
    [
        (MeshError, "axis_name='z'.*no such axis", lambda a: dtorch.psum(a, "z")),
        (MeshError, "axis_name=0", lambda a: dtorch.psum(a, 0)),
        (ValueError, "names an axis twice", lambda a: dtorch.psum(a, ("x", "x"))),
        (ValueError, "1 is a destination twice",
         lambda a: dtorch.ppermute(a, "x", [(0, 1), (1, 1)])),
        (ValueError, "0 is a source twice", lambda a: dtorch.ppermute(a, "x", [(0, 1), (0, 0)])),
        (ValueError, "5 is no index", lambda a: dtorch.ppermute(a, "x", [(0, 5)])),
        (ValueError, "its size is 3", lambda a: dtorch.all_to_all(a, "x", 0, 1, tiled=True)),
        (ValueError, "its size is 3", lambda a: dtorch.all_to_all(a, "x", 0, 1)),
        (ValueError, "split_axis=2", lambda a: dtorch.all_to_all(a, "x", 2, 1)),
        (ValueError, "its size is 3", lambda a: dtorch.psum_scatter(a, "x", tiled=True)),
        (ValueError, "axis=3", lambda a: dtorch.all_gather(a, "x", axis=3)),
        (TypeError, "not float 1.0", lambda a: dtorch.all_gather(1.0, "x")),
        (DTorchError, "is called in a function", lambda a: _mapped(lambda b: b)(a)),
    ],
)  # fmt: skip
def test_wrong_collectives(kind: Any, match: str, call: Any) -> None:
    _raises(kind, match, lambda: _mapped(call)(torch.ones(6, 4)))


def test_uneven_shapes_in_a_collective_are_an_error_at_the_call() -> None:
    _raises(CollectiveError, r"cpu:0  psum\(float32\[2\], 'x'\).*cpu:2  psum\(float32\[1\]",
            lambda: dtorch.shard_map(_sum, LINE, P("x"), P("x"))(torch.ones(5)))  # fmt: skip
    a = torch.ones(4, 3)  # uneven along another axis than the collective's
    check(dtorch.shard_map(_sum, GRID, P("x", "y"), P(None, "y"))(a), torch.full((2, 3), 2.0))


def test_errors_of_the_function_are_its_own() -> None:
    with pytest.raises(RuntimeError, match=r"reduction dim, but got \[2, 4\] X \[3, 3\]"):
        _mapped(lambda a: a @ torch.ones(3, 3))(torch.ones(4, 4))


def test_memory_that_is_full_names_what_is_held() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))

    def full(x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 1.00 TiB.")
        return x

    @dtorch.jit
    def compute(x: Any) -> Any:
        small, large = x[:2] + 1, torch.cat([x, x, x]) * 2
        return dtorch.shard_map(full, mesh, P(), P())(x), small, large

    x = dtorch.zeros(256, 1024, device_mesh=mesh, placements=[dtorch.Replicate()])
    with pytest.raises(WorkerError, match="Tried to allocate") as raised:
        compute(x)[0].to_torch()
    lines = [line.strip() for line in str(raised.value).splitlines()]
    assert lines[0].startswith("OutOfMemoryError on cpu:")
    (held,) = (
        i for i, line in enumerate(lines) if line.startswith("held there   4.0 MiB in 3 val")
    )
    assert lines[held + 1].startswith("3.0 MiB  %") and "test_shard_map.py:" in lines[held + 1]
    assert lines[held + 2] == "1.0 MiB  an input, float32[256, 1024] x=R"
    assert lines[held + 3].startswith("0.0 MiB  %")
