"""Dispatch: what is in the key, what is not, what stays bounded, and eager mutation."""

import gc
import operator
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.errors import MutationError
from dtorch.runtime import Shards

TWO = dtorch.DeviceMesh("cpu", [0, 1])
F = torch.nn.functional


def sharded(value: Any, placements: Any = None) -> dtorch.Tensor:
    return dtorch.Tensor(value, device_mesh=TWO, placements=placements or [Shard(0)])


def same(found: dtorch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found.to_torch(), expected)
    assert torch.equal(torch.signbit(found.to_torch()), torch.signbit(expected))


def misses(call: Callable[[], Any]) -> int:
    """How many programs a call adds to the eager cache."""
    before = dtorch.cache_info().currsize
    call()
    return dtorch.cache_info().currsize - before


# -- the key -------------------------------------------------------------------------------

SCALARS = [1, 1.0, True, 0, 0.0, -0.0, False, 2, 2.0, 1j, -1, float("inf"), float("nan"), 2**40]


@pytest.mark.parametrize(
    "op", [operator.add, operator.mul, torch.true_divide, torch.pow, torch.where]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool, torch.int8])
def test_numbers_keep_their_type_and_sign(op: Any, dtype: torch.dtype) -> None:
    value = torch.tensor([0, 1, 3, 0]).to(dtype)
    x = sharded(value)
    for scalar in SCALARS:
        if op is torch.pow and dtype == torch.bool and isinstance(scalar, bool):
            continue  # the meta kernel says int64, the real one gives bool
        for kind in (lambda s: s, *([numpy.float64] if type(scalar) is float else [])):
            number = kind(scalar)

            def call(t: Any, number: Any = number) -> Any:
                return torch.where(t > 0, t, number) if op is torch.where else op(t, number)

            try:
                expected = call(value)
            except RuntimeError:
                with pytest.raises(RuntimeError, match=r"\S"):
                    call(x).to_torch()
                continue
            found = call(x)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found.to_torch(), expected, rtol=0, atol=0, equal_nan=True)


def test_an_int_tensor_plus_one_then_plus_one_point_zero() -> None:
    x = sharded(torch.arange(4))
    assert (x + 1).dtype == torch.int64 and (x + 1.0).dtype == torch.float32
    assert (x + True).dtype == torch.int64 and (x + 1).dtype == torch.int64
    f = dtorch.jit(lambda t, s: t + s)
    assert [f(x, s).dtype for s in (1, 1.0, True, 1)] == [torch.int64, torch.float32] + [
        torch.int64
    ] * 2


def test_zero_and_minus_zero() -> None:
    x = sharded(torch.ones(4))
    f = dtorch.jit(lambda t, s: t / s)
    g = dtorch.jit(lambda t, s: t / s, static_argnums=1)
    h = dtorch.jit(lambda t, s: t / s[0], static_argnums=1)
    for zero, expected in ((0.0, float("inf")), (-0.0, float("-inf")), (0.0, float("inf"))):
        for call in (lambda t, s: t / s, f, g, lambda t, s: t.div(s), lambda t, s: h(t, (s,))):
            assert call(x, zero).tolist() == [expected] * 4
    assert [
        (x * z).real.signbit().any().item() for z in (complex(0.0, 0.0), complex(-0.0, 0.0))
    ] == [
        (torch.ones(4) * z).real.signbit().any().item()
        for z in (complex(0.0, 0.0), complex(-0.0, 0.0))
    ]


def test_static_arguments_keep_their_type() -> None:
    seen: list[Any] = []
    f = dtorch.jit(lambda x, s: seen.append(s) or x * 1, static_argnums=1)
    x = sharded(torch.ones(2))
    for s in (1, 1.0, True, (1,), (1.0,), (True,), ((1, 0.0),), ((1, -0.0),), "1", None):
        f(x, s)
        f(x, s)
    assert [repr(s) for s in seen] == [
        "1", "1.0", "True", "(1,)", "(1.0,)", "(True,)", "((1, 0.0),)", "((1, -0.0),)",
        "'1'", "None",
    ]  # fmt: skip


def test_the_layout_is_in_the_key() -> None:
    value = torch.arange(12.0).view(4, 3)
    for placements in ([Shard(0)], [Shard(1)], [Replicate()], [Partial()], [Partial("max")]):
        same(torch.relu(sharded(value, placements) - 3), torch.relu(value - 3))
        same(sharded(value, placements).sum(0), value.sum(0))


def test_strides_are_in_the_key() -> None:
    value = torch.arange(6.0).view(2, 3)
    for v in (value, value.t().contiguous().t()):
        assert (sharded(v, [Replicate()]) + 1).stride() == (v + 1).stride()


def test_autocast_entered_after_the_first_call() -> None:
    a, b = torch.rand(4, 4), torch.rand(4, 4)
    x, y = sharded(a), sharded(b, [Replicate()])
    jitted = dtorch.jit(lambda x, y: F.linear(x, y))
    for call in (F.linear, jitted):
        assert call(x, y).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = F.linear(a, b)
            assert call(x, y).dtype == torch.bfloat16
            torch.testing.assert_close(call(x, y).to_torch(), expected)
        assert call(x, y).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.float16):
            assert call(x, y).dtype == torch.float16


def test_default_dtype_grad_mode_and_inference_mode_are_in_the_key() -> None:
    x = sharded(torch.arange(4))
    try:
        assert (x / 2).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        assert (x / 2).dtype == torch.float64
        assert dtorch.jit(lambda t: t / 2)(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    w = dtorch.ones(4, device_mesh=TWO, requires_grad=True)
    with torch.no_grad():
        assert not (w * 2).requires_grad
    assert (w * 2).requires_grad
    with torch.inference_mode():
        assert (w * 2).tolist() == [2.0] * 4
    assert (w * 2).requires_grad


def test_kernel_choices_are_captured_when_the_call_is_made() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    mine = [dtorch.Tensor(t, device="cpu") for t in (q, k, v)]
    for call in (F.scaled_dot_product_attention, dtorch.jit(F.scaled_dot_product_attention)):
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            with sdpa_kernel(backend):
                expected = F.scaled_dot_product_attention(q, k, v)
                found = call(*mine)
            assert torch.equal(found.to_torch(), expected), backend
    with sdpa_kernel(SDPBackend.MATH):
        names = str(dtorch.jit(F.scaled_dot_product_attention).program(*mine))
    assert "flash" not in names


def test_the_order_of_kernels_is_in_the_key() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    numbers = torch._C._get_sdp_priority_order()
    x, found = dtorch.zeros(4, device_mesh=TWO), []
    jitted = dtorch.jit(torch.sinc)
    for order in (numbers, numbers[::-1], numbers):
        with sdpa_kernel([SDPBackend(n) for n in order], set_priority=True):
            before = dtorch.cache_info().misses
            torch.sinc(x)
            jitted(x)
            found.append((dtorch.cache_info().misses - before, jitted.cache_info().misses))
    assert found == [(1, 1), (1, 2), (0, 2)]


def test_deterministic_algorithms_are_in_the_key() -> None:
    x = dtorch.zeros(4, device_mesh=TWO)
    index = torch.tensor([0, 0, 1])
    try:
        for value in (False, True, False):
            torch.use_deterministic_algorithms(value)
            y = torch.index_put(x, (index,), torch.ones(3), accumulate=True)
            assert y.tolist() == [2, 1, 0, 0]
    finally:
        torch.use_deterministic_algorithms(False)


# -- what is a value at run time -----------------------------------------------------------


def test_changing_numbers_do_not_retrace() -> None:
    x = sharded(torch.arange(4.0))
    for step in range(2):
        x * step, x + step / 7, x.clamp(max=step + 0.5), torch.add(x, x, alpha=step + 0.25)
    before = dtorch.cache_info()
    for step in range(2, 40):
        assert (x * step).tolist() == [i * float(step) for i in range(4)]
        same(x + step / 7, torch.arange(4.0) + step / 7)
        same(x.clamp(max=step + 0.5), torch.arange(4.0).clamp(max=step + 0.5))
        same(
            torch.add(x, x, alpha=step + 0.25),
            torch.add(*[torch.arange(4.0)] * 2, alpha=step + 0.25),
        )
    assert dtorch.cache_info().currsize == before.currsize
    f = dtorch.jit(lambda t, s: t * s + s / 2 - torch.full((4,), s) * -s)
    for step in range(30):
        s = step / 3
        value = torch.arange(4.0)
        same(f(x, s), value * s + s / 2 - torch.full((4,), s) * -s)
    assert f.cache_info().currsize == 1


def test_numpy_numbers_are_numbers() -> None:
    x = sharded(torch.arange(4.0))
    x * numpy.float64(0.5)
    x * numpy.float32(0.5)
    before = dtorch.cache_info().currsize
    for step in range(20):
        same(x * numpy.float64(step / 3), torch.arange(4.0) * numpy.float64(step / 3))
        same(x * numpy.float32(step), torch.arange(4.0) * numpy.float32(step))
    assert dtorch.cache_info().currsize - before <= 2


def test_numbers_that_shape_the_result_do_retrace() -> None:
    x = sharded(torch.arange(6.0))
    for n in (2, 3, 2):
        assert x.view(n, 6 // n).shape == (n, 6 // n)
        assert torch.zeros_like(x).new_full((n,), 1.0).shape == (n,)
        assert x.repeat(n).shape == (6 * n,) and x.chunk(n)[0].shape == (-(-6 // n),)
        assert x.view(3, 2).sum(n - 2).shape == torch.zeros(3, 2).sum(n - 2).shape
    f = dtorch.jit(lambda t, n: t[:n] * n)
    assert [f(x, n).shape[0] for n in (2, 3, 2)] == [2, 3, 2]
    g = dtorch.jit(lambda t, s: t * 2 if s > 0.5 else t)
    assert [g(x, s)[1].item() for s in (0.0, 1.0, 0.25, 0.75)] == [1.0, 2.0, 1.0, 2.0]


def test_a_plain_operand_is_copied_at_the_call() -> None:
    x = sharded(torch.ones(4))
    t = torch.full((4,), 3.0)
    array = numpy.full(4, 2.0, dtype="float32")
    f = dtorch.jit(torch.add)
    for call in (torch.add, f):
        y = call(x, t)
        t.zero_()
        assert y.tolist() == [4.0] * 4
        t.fill_(3.0)
    y = f(x, array)
    array[:] = 0
    assert y.tolist() == [3.0] * 4


def test_plain_operands_in_every_position() -> None:
    x, value, t = sharded(torch.arange(4.0)), torch.arange(4.0), torch.tensor([1.0, 2, 3, 4])
    for op in (operator.add, operator.sub, operator.truediv, torch.maximum, torch.dot, torch.outer):
        same(op(x, t), op(value, t))
        same(op(t, x), op(t, value))
    same(torch.cat([t, x]), torch.cat([t, value]))
    same(torch.stack([x, t])[1], t)
    assert (2 - x).tolist() == [2, 1, 0, -1] and (1 / (x + 1))[0].item() == 1
    wrapped = torch.tensor(2.0, dtype=torch.float64)
    assert (x * wrapped).dtype == torch.float32


# -- bounds --------------------------------------------------------------------------------


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_nothing_grows() -> None:
    """10,000 eager operations and 1,000 jitted calls, with all that changes from call to call."""
    x = sharded(torch.arange(16.0))
    w = dtorch.ones(16, device_mesh=TWO, requires_grad=True)

    def eager(count: int) -> None:
        for i in range(count):
            y = x * (i / 7)
            y = y + torch.full((16,), float(i))
            y = torch.relu(y - i)
            y += 1.5 * i
            if i % 20 == 0:
                (w * i).sum().backward()
                w.grad = None
                y.redistribute(placements=[Replicate()]).to_torch()
                torch.rand_like(y)

    def jitted(count: int) -> None:
        f = dtorch.jit(lambda t, s, p: torch.relu(t * s + p))
        for i in range(count):
            f(x, i / 3, torch.ones(16))
            if i % 2 == 0:
                dtorch.jit(lambda t, i=i: t * i + 1.0)(x).sum().item()
        assert f.cache_info().currsize <= 2

    def settle() -> tuple[int, int, int, int]:
        dtorch.synchronize()
        gc.collect()
        shards = sum(type(o) is Shards for o in gc.get_objects())
        return shards, threading.active_count(), dtorch.cache_info().currsize, rss()

    eager(300)
    jitted(200)
    before = settle()
    eager(2500)
    jitted(1000)
    after = settle()
    assert after[0] <= before[0] + 10 and after[1] == before[1]
    assert after[2] <= before[2] + 4
    assert after[3] - before[3] < 8 << 20


def test_fresh_functions_are_forgotten() -> None:
    from dtorch.cache import Cache

    def num_caches() -> int:
        gc.collect()
        return sum(type(o) is Cache for o in gc.get_objects())

    x = sharded(torch.ones(4))
    before = num_caches()
    for _ in range(50):
        dtorch.jit(lambda t: t + 1)(x)
    assert num_caches() <= before + 1


def test_the_same_function_jitted_again_is_not_traced_again() -> None:
    count = 0

    def f(t: Any) -> Any:
        nonlocal count
        count += 1
        return t + 1

    x = sharded(torch.ones(4))
    for _ in range(5):
        dtorch.jit(f)(x)
    assert count == 1


def test_the_cache_is_bounded() -> None:
    f = dtorch.jit(lambda t, n: t[:n], maxsize=8)
    x = sharded(torch.ones(64))
    for n in range(40):
        f(x, n)
    assert f.cache_info().currsize <= 8 and f.cache_info().maxsize == 8
    f.cache_clear()
    assert f.cache_info() == (0, 0, 8, 0)
    assert dtorch.cache_info().maxsize >= 1024


def test_a_second_call_does_no_propagation(monkeypatch: pytest.MonkeyPatch) -> None:
    from dtorch import builder

    x, y = sharded(torch.ones(4)), sharded(torch.ones(4))
    torch.stack([x, y])
    torch.cat((x, y)).sum()
    calls: list[Any] = []
    original = builder.decide
    monkeypatch.setattr(builder, "decide", lambda *a: calls.append(a) or original(*a))
    torch.stack([x, y])
    torch.cat((x, y)).sum()
    assert calls == []
    torch.stack([x, y, x])
    assert calls


# -- eager mutation ------------------------------------------------------------------------


def test_an_in_place_call_rebinds_the_base() -> None:
    for placements in ([Shard(0)], [Replicate()], [Partial()]):
        x = sharded(torch.arange(4.0), placements)
        alias, version = x.detach(), x._version
        assert x.add_(1) is x and x.placements == placements
        x *= 2
        x.clamp_(max=6.0)
        torch.relu_(x)
        assert x.tolist() == alias.tolist() == [2, 4, 6, 6] and x._version > version


def test_index_assignment_sets_the_global_element() -> None:
    value = torch.arange(12.0).view(4, 3)
    x = sharded(value)
    for index, new in (
        (1, 5.0),
        ((slice(None), 1), -1.0),
        ((2, 2), 7),
        (slice(0, 3, 2), torch.ones(2, 3)),
        ((torch.tensor([0, 3]), torch.tensor([0, 2])), torch.tensor([8.0, 9.0])),
        (Ellipsis, 0.5),
        (value > 0.4, 2.0),
        ((None, 3), sharded(torch.ones(3))),
    ):
        x[index] = new
        value[index] = new.to_torch() if isinstance(new, dtorch.Tensor) else new
        assert torch.equal(x.to_torch(), value) and x.placements == [Shard(0)]
    mask = x > 1
    x[mask] = 0
    value[value > 1] = 0
    assert torch.equal(x.to_torch(), value)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[1],
        lambda t: t[:2],
        lambda t: t.view(2, 2),
        lambda t: t.unsqueeze(0),
        lambda t: t.chunk(2)[0],
        lambda t: t.detach()[1:],
        lambda t: t.unbind()[0],
        lambda t: t.as_strided((2,), (1,)),
        lambda t: t[1:][1:],
    ],
)
def test_writes_through_a_view_and_its_base_are_seen_by_both(view: Callable[..., Any]) -> None:
    def values(x: Any) -> list[Any]:
        v = view(x)
        found = []
        for write in (
            lambda x, v: v.add_(1),
            lambda x, v: x.mul_(2),
            lambda x, v: v.fill_(3),
            lambda x, v: x.__setitem__(-1, 7),
            lambda x, v: torch.neg(v, out=v),
        ):
            write(x, v)
            found += [x.tolist(), v.tolist()]
        del v
        x.add_(1)
        return [*found, x.tolist()]

    for _ in range(3):
        assert values(sharded(torch.arange(4.0))) == values(torch.arange(4.0))


def test_a_view_whose_base_is_gone_is_a_storage_of_its_own() -> None:
    """Also after it was written to, and where a jitted function made it."""

    def last(make: Callable[..., Any], view: Any) -> list[Any]:
        v = view(make(torch.arange(6.0)))
        v.add_(1)
        w = v[:2]
        v.mul_(2)
        w.add_(1)
        return [v.tolist(), w.tolist()]

    def views(x: Any) -> Any:
        y = x * 1
        return y[1:], y[:1]

    expected = last(torch.clone, lambda x: x[1:])
    assert last(sharded, lambda x: x[1:]) == expected
    assert last(sharded, lambda x: dtorch.jit(views)(x)[0]) == expected


@pytest.mark.parametrize("placement", [Replicate(), dtorch.Shard(0), dtorch.Partial()])
def test_a_copy_over_itself_reads_the_old_values(placement: Any) -> None:
    x = sharded(torch.arange(5.0), [placement])
    x[1:] = x[:-1]
    assert x.tolist() == [0, 0, 1, 2, 3]


def test_an_expanded_view_is_not_written_to() -> None:
    x = sharded(torch.arange(4.0))
    v = x.expand(3, 4)
    with pytest.raises(RuntimeError, match=r"writing through the view made by aten\.expand"):
        v.add_(1)
    x.add_(1)
    assert v.tolist() == [[1, 2, 3, 4]] * 3


def test_a_failed_write_through_a_view_fails_all_that_share_its_storage() -> None:
    x = dtorch.zeros(4, dtype=torch.int64, device_mesh=TWO, placements=[dtorch.Shard(0)])
    view, other = x[1:], x[:1]
    view.copy_(torch.ones(3, dtype=torch.int64) // dtorch.zeros(3, dtype=torch.int64))
    for tensor in (view, x, other):
        with pytest.raises(dtorch.errors.WorkerError, match="ZeroDivisionError"):
            tensor.to_torch()


def test_a_view_that_nobody_else_sees_may_be_written() -> None:
    v = (sharded(torch.arange(4.0)) * 2)[1:]
    v.add_(1)
    assert v.tolist() == [3, 5, 7]
    w = torch.nn.Parameter(sharded(torch.ones(4, 3)))
    F.linear(sharded(torch.ones(2, 3), [Replicate()]), w).sum().backward()
    torch.nn.utils.clip_grad_norm_([w], 1.0)
    assert w.grad is not None and w.grad.square().sum().item() == pytest.approx(1.0, rel=1e-4)


def test_a_copy_is_no_view() -> None:
    x = sharded(torch.arange(4.0))
    for y in (
        x.clone(),
        x[torch.tensor([0, 1, 2, 3])],
        x + 0,
        x.to(torch.float64),
        dtorch.tensor(x),
    ):
        y.zero_()
        assert y.tolist() == [0.0] * 4
    assert x.tolist() == [0, 1, 2, 3]


def test_a_write_to_a_redistributed_tensor_is_its_own() -> None:
    x = sharded(torch.arange(4.0))
    y = x.redistribute(placements=[Replicate()])
    y.zero_()
    assert x.tolist() == [0, 1, 2, 3] and y.tolist() == [0] * 4


def test_the_same_tensor_written_twice_in_one_call() -> None:
    x = sharded(torch.ones(4))
    with pytest.raises(MutationError, match="under another name"):
        torch._foreach_add_([x, x], 1.0)
    assert x.tolist() == [1.0] * 4


def test_running_statistics_that_are_also_a_weight_are_refused() -> None:
    x, w, v = sharded(torch.arange(12.0).view(4, 3)), sharded(torch.ones(3)), torch.ones(3)

    def normalize(x: Any, w: Any, v: Any) -> Any:
        return F.batch_norm(x, w, v, w, None, True)

    for function in (normalize, dtorch.jit(normalize)):
        with pytest.raises(MutationError, match="under another name"):
            function(x, w, sharded(v))
    assert w.tolist() == [1.0] * 3


def test_data_assignment() -> None:
    p = torch.nn.Parameter(sharded(torch.ones(4)))
    p.data = sharded(torch.zeros(4), [Replicate()])
    assert p.tolist() == [0.0] * 4 and p.placements == [Shard(0)]
    with pytest.raises(MutationError, match=r"takes only a dtorch\.Tensor of the same shape"):
        p.data = torch.zeros(4)


def test_a_storage_cannot_be_exchanged() -> None:
    x = sharded(torch.ones(4, 2))
    with pytest.raises(MutationError, match="changes a tensor's shape or storage in place"):
        x.set_(x + 1)
    assert x.shape == (4, 2) and x.sum().item() == 8


def test_optimizers_update_in_place() -> None:
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    ):
        torch.manual_seed(0)
        plain = torch.nn.Linear(4, 3)
        mine = torch.nn.Linear(4, 3)
        mine.weight = torch.nn.Parameter(sharded(plain.weight))
        mine.bias = torch.nn.Parameter(sharded(plain.bias, [Replicate()]))
        x = torch.randn(5, 4)
        for module, data in ((plain, x), (mine, sharded(x, [Replicate()]))):
            optimizer = make(module.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                module(data).square().mean().backward()
                optimizer.step()
        assert mine.weight.placements == [Shard(0)]
        torch.testing.assert_close(mine.weight.detach().to_torch(), plain.weight.detach())
        torch.testing.assert_close(mine.bias.detach().to_torch(), plain.bias.detach())


# -- errors at the call --------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t(torch.ones(2, 3)) @ t(torch.ones(2, 3)),
        lambda t: t(torch.ones(4)) + t(torch.ones(3)),
        lambda t: t(torch.ones(4)).view(3),
        lambda t: torch.relu(t(torch.ones(4, dtype=torch.bool))),
        lambda t: t(torch.ones(4, 4)) @ t(torch.ones(4, 4, dtype=torch.float64)),
        lambda t: torch.bitwise_and(t(torch.ones(4)), 1),
        lambda t: torch.softmax(t(torch.ones(4, dtype=torch.int64)), 0),
        lambda t: t(torch.ones(4)).sum(3),
        lambda t: torch.fft.fft(t(torch.ones(4, dtype=torch.bfloat16))),
        lambda t: t(torch.ones(4, dtype=torch.int64)).mean(),
        lambda t: t(torch.ones(4)).add_(1j),
        lambda t: t(torch.arange(4)).add_(0.5),
        lambda t: torch.linalg.inv(t(torch.ones(2, 2, dtype=torch.int64))),
        lambda t: F.embedding(t(torch.ones(2)), t(torch.ones(4, 2))),
        lambda t: torch.nn.functional.layer_norm(t(torch.ones(2, 3)), (4,)),
        lambda t: t(torch.ones(4))[7],
        lambda t: torch.cat([t(torch.ones(4)), t(torch.ones(2, 2))]),
        lambda t: -t(torch.ones(4, dtype=torch.bool)),
        lambda t: torch.add(t(torch.ones(4)), 1, alpha="x"),
        lambda t: torch.no_such_function(t),
    ],
)
def test_what_pytorch_refuses_raises_at_the_call(call: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match=r"\S") as expected:
        call(lambda v: v)
    for wrap in (call, lambda t: dtorch.jit(lambda: call(t))()):
        with pytest.raises(expected.type, match=r"\S"):
            wrap(lambda v: dtorch.Tensor(v, device_mesh=TWO))


def test_as_strided_under_jit_refuses_to_take_a_view_for_its_storage() -> None:
    x, plain = dtorch.arange(10, device_mesh=TWO), torch.arange(10)
    captured = x[4:]
    by_place = dtorch.jit(lambda t: t.as_strided((2,), (1,), 1))
    capturing = dtorch.jit(lambda t: captured.as_strided((2,), (1,), 1) + t[:2])
    for _ in range(3):
        assert by_place(x).tolist() == [1, 2]
        for call, argument in ((by_place, x[4:]), (by_place, plain[4:]), (capturing, x)):
            with pytest.raises(MutationError, match="is only a view of its storage"):
                call(argument)
    assert dtorch.jit(lambda t: t[4:].as_strided((2,), (1,), 1))(x).tolist() == [1, 2]


def test_as_strided_of_a_view_reads_the_storage() -> None:
    x = dtorch.arange(6)
    assert x.as_strided((2,), (1,), 1).tolist() == [1, 2]
    view = x[1:]
    assert view.as_strided((2,), (2,)).tolist() == [1, 3]
    reached = view.as_strided((2,), (1,), 0)
    reached.fill_(9)
    assert (x.tolist(), view.tolist()) == ([9, 9, 2, 3, 4, 5], [9, 2, 3, 4, 5])
    alone = dtorch.arange(6)[1:]
    assert alone.as_strided((2,), (1,), 0).tolist() == [0, 1]  # autograd keeps its base
    with torch.no_grad():
        alone = dtorch.arange(6)[1:]
    alone.add_(1)  # nobody sees the rest any more
    with pytest.raises(dtorch.errors.MutationError, match="reads the storage of its base"):
        alone.as_strided((2,), (1,), 0)


def test_a_kernel_that_contradicts_shape_inference_raises() -> None:
    with pytest.raises(dtorch.errors.DTorchError, match="PyTorch's shape inference says"):
        dtorch.ones(2, dtype=torch.bool) ** True


def test_meta_tensors_are_made_for_their_shapes() -> None:
    x = dtorch.ones(2, 3)
    assert torch.zeros_like(x, device="meta").is_meta
    assert dtorch.jit(lambda x: x + torch.empty_like(x, device="meta").dim())(x).tolist()[0][0] == 3


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: dtorch.ones(2, 3).softmax(9), IndexError, "Dimension out of range"),
        (lambda: dtorch.ones(2, 3).log_softmax(-5), IndexError, "Dimension out of range"),
        (lambda: 1 - dtorch.ones(2, dtype=torch.bool), RuntimeError, "with a bool tensor"),
        (lambda: dtorch.rand(3, dtype=torch.int64), NotImplementedError, "for 'Long'"),
    ],
)
def test_what_is_wrong_with_the_call_raises_at_the_call(call: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_unbound_methods_that_want_memory_are_the_tensors_own() -> None:
    x = dtorch.ones(2)
    with pytest.raises(TypeError, match="apply_"):
        torch.Tensor.apply_(x, lambda v: v)
    with pytest.raises(RuntimeError, match="data_ptr"):
        torch.Tensor.data_ptr(x)
    assert torch.Tensor.tolist(x) == [1.0, 1.0]
    assert torch.Tensor.numpy(x).tolist() == [1.0, 1.0]


def test_data_assignment_leaves_the_old_storage() -> None:
    for make in (torch, dtorch):
        x = make.ones(2)
        d = x.detach()
        value = make.zeros(2)
        d.data = value
        x.fill_(3)
        assert d.tolist() == [0, 0]
        value.fill_(5)  # whose storage it has now
        assert (d.tolist(), x.tolist()) == ([5, 5], [3, 3])


@pytest.mark.parametrize("call", [torch.sub, torch.mul, lambda a, b, out: torch.exp(a, out=out)])
def test_a_write_over_a_partial_operand_is_read_afterwards(call: Any) -> None:
    whole = torch.full((2,), 5.0)
    for _ in range(3):
        a = dtorch.Tensor(whole, device_mesh=TWO, placements=[dtorch.Partial()])
        b = dtorch.Tensor(torch.ones(2), device_mesh=TWO, placements=[dtorch.Shard(0)])
        call(a, b, out=a)
        expected = call(whole, torch.ones(2), out=torch.empty(2))
        for found in (a, a + 0, a.detach()):
            assert torch.equal(found.to_torch(), expected)


def test_a_write_reaches_an_alias_in_another_layout() -> None:
    for _ in range(3):
        x = dtorch.ones(4, 4, device_mesh=TWO, placements=[Partial()])
        x.redistribute(placements=[Shard(1)])
        _ = (x * x).sum()  # reduces it, and what aliases it from here on is replicated
        same = x.detach()
        with torch.no_grad():
            x.add_(1)
        assert x.tolist() == same.tolist() == [[2.0] * 4] * 4
        same.mul_(2)
        assert x.tolist() == same.tolist() == [[4.0] * 4] * 4


def _quantile(make: Callable[..., Any]) -> list[Any]:
    x = make(torch.tensor([0.3, 0.1, 0.7, 0.2])).requires_grad_()
    torch.quantile(x, 0.3).backward()
    return [x.grad]


def _reshaped(make: Callable[..., Any]) -> list[Any]:
    x = make(torch.arange(24.0).view(4, 1, 6))
    view = x[1:]
    found = []
    for change in (
        lambda: x.squeeze_(1),
        lambda: x.add_(1),
        lambda: x.t_(),
        lambda: x.mul_(2),
        lambda: x.unsqueeze_(0).add_(1),
        lambda: view.zero_(),
        lambda: x.transpose_(0, 2),
    ):
        change()
        found += [x.clone(), view.clone()]
    return found


def _reshaped_under_autograd(make: Callable[..., Any]) -> list[Any]:
    x = make(torch.ones(4)).requires_grad_()
    y = x * 2
    y.unsqueeze_(0)
    (y * y).sum().backward()
    return [x.grad, y.detach()]


def _into_empty(make: Callable[..., Any]) -> list[Any]:
    out = make(torch.empty(0))
    torch.add(make(torch.ones(3)), 1, out=out)
    out.add_(1)
    other, inverse = make(torch.empty(0)), make(torch.empty(0))
    torch.msort(make(torch.tensor([[3.0, 1.0], [2.0, 5.0]])), out=other)
    torch.linalg.inv(make(torch.eye(3) * 2), out=inverse)
    chosen = make(torch.empty(0))
    result = torch.masked_select(make(torch.arange(3.0)), make(torch.arange(3) > 0), out=chosen)
    assert result is chosen
    return [out, other, inverse, chosen]


def _of_composites(make: Callable[..., Any]) -> list[Any]:
    product, rank = make(torch.zeros(4, 4)), make(torch.zeros((), dtype=torch.int64))
    torch.kron(make(torch.eye(2)), make(torch.ones(2, 2)), out=product)
    torch.linalg.matrix_rank(make(torch.eye(3)), out=rank)
    return [product, rank]


def _resized(make: Callable[..., Any]) -> list[Any]:
    x = make(torch.arange(6.0))
    x.resize_(2, 2)
    y = make(torch.arange(6.0)).polygamma_(1)
    return [x, y]


SHAPES = [_quantile, _reshaped, _reshaped_under_autograd, _into_empty, _of_composites, _resized]


@pytest.mark.parametrize("placement", [Replicate(), dtorch.Shard(0)])
@pytest.mark.parametrize("calls", SHAPES)
def test_calls_that_change_what_they_are_given(calls: Any, placement: Any) -> None:
    def make(value: torch.Tensor) -> Any:
        where = placement if value.ndim else Replicate()
        return dtorch.Tensor(value, device_mesh=TWO, placements=[where])

    for _ in range(3):
        for found, expected in zip(calls(make), calls(torch.clone), strict=True):
            torch.testing.assert_close(found.to_torch(), expected)


def test_what_has_no_meta_kernel_runs_on_the_host() -> None:
    x = dtorch.Tensor(torch.arange(4.0), device_mesh=TWO, placements=[dtorch.Shard(0)])
    counts, edges = torch.histogram(x, 2)
    assert (counts.tolist(), edges.tolist()) == ([2, 2], [0, 1.5, 3])
    parts = torch.tensor_split(x, dtorch.tensor([1, 3]))
    assert [p.tolist() for p in parts] == [[0], [1, 2], [3]]
    with pytest.raises(dtorch.errors.DataDependentError, match="it has no meta kernel"):
        dtorch.jit(lambda x: torch.histogram(x, 2))(x)


def test_sparse_and_nested_tensors_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"a sparse_coo tensor cannot be distributed(.|\n)*to_dense"
    ):
        dtorch.Tensor(torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match="a sparse_coo tensor cannot be distributed"):
        dtorch.eye(2).to_sparse()


def test_seeding_inside_a_traced_function_raises() -> None:
    def f(x: Any) -> Any:
        torch.manual_seed(3)
        return torch.rand_like(x)

    x = dtorch.ones(3)
    assert torch.equal(f(x).to_torch(), f(torch.ones(3)))
    with pytest.raises(dtorch.errors.TraceError, match=r"manual_seed\(3\)(.|\n)*Fix: seed before"):
        dtorch.jit(f)(x)

    def of_the_generator(x: Any) -> Any:
        torch.default_generator.manual_seed(torch.initial_seed() + 1)
        return torch.rand_like(x)

    with pytest.raises(dtorch.errors.TraceError, match="Fix: seed before"):
        dtorch.jit(of_the_generator)(x)


def test_another_thread_seeds_during_a_trace() -> None:
    def f(x: Any) -> Any:
        thread = threading.Thread(target=lambda: (torch.manual_seed(11), torch.seed()))
        thread.start()
        thread.join()
        return x + 1

    assert dtorch.jit(f)(dtorch.ones(3)).tolist() == [2.0] * 3
    assert type(torch.random.default_generator) is torch.Generator


@pytest.mark.parametrize(
    "draw",
    [torch.rand_like, lambda x: x.clone().normal_(), lambda x: x.clone().bernoulli_(0.3)],
)
def test_a_draw_into_a_split_tensor_does_not_gather_it(draw: Callable[..., Any]) -> None:
    torch.manual_seed(5)
    expected = draw(torch.zeros(4, 3))
    x = dtorch.zeros(4, 3, device_mesh=TWO, placements=[dtorch.Shard(1)])
    assert not dtorch.jit(draw).program(x).communication()
    torch.manual_seed(5)
    found = draw(x)
    assert found.placements == [dtorch.Shard(1)]
    assert torch.equal(found.to_torch(), expected)
