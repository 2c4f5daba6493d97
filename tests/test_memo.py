"""What is remembered of calls: what tells them apart, and that a known call does what it did."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, calls
from dtorch.memo import MISSED
from dtorch.runtime import NATIVE
from dtorch.tree import flatten, unflatten

TWO = dtorch.DeviceMesh("cpu", [0, 1])
MESHED = [dtorch.zeros(2, device_mesh=TWO, placements=p) for p in ([Replicate()], [Shard(0)])]
Cache = pytest.mark.parametrize(
    "kind", [calls.CallCache, *([] if NATIVE is None else [NATIVE.CallCache])]
)
Case = tuple[tuple[Any, ...], dict[str, Any]]


def missed(result: Any) -> bool:
    return result is calls.MISSED or result is MISSED


def remember(
    cache: Any, token: Any, call: Case, slow: Callable[..., Any], read: tuple[int, ...] = ()
) -> None:
    args, kwargs = call
    leaves, treespec = flatten((args, kwargs))
    traced = [(i, t._spec) for i, t in enumerate(leaves) if isinstance(t, dtorch.Tensor)]
    made = {"slow": slow, "read": read, "traced": traced, "program": None, "is_autograds": False}
    numbered = unflatten(treespec, list(range(len(leaves))))
    cache.remember(token, args, kwargs, numbered, made)


X, Y = MESHED
APART: list[Case] = [
    *(((X, value), {}) for value in (1, True, False, 1j, complex(-0.0, 1), None)),
    *(((X, value), {}) for value in (0, 2, 0.0, "a", "b", ..., torch.float32, torch.float64)),
    *(((X, value), {}) for value in ((), [], {}, (1,), [1], (1, 2), ((1,), 2), (1, (2,)))),
    *(((X, value), {}) for value in (torch.Size([1]), torch.Size([2]), torch.device("meta"))),
    *(((X, value), {}) for value in ({"a": 1}, {"b": 1}, (Y,), [Y], (X,), Y)),
    *(((X, value), {}) for value in (slice(1), slice(1, None), slice(None, None, 1))),
    *(((X,), {name: value}) for name in ("a", "b") for value in (1, None, X, Y)),
    ((), {}),
    ((X,), {}),
    ((X, X), {}),
    ((X, 1), {"a": 1}),
]  # fmt: skip


@Cache
def test_what_tells_calls_apart(kind: Any) -> None:
    cache = kind(False, False, 1000)  # integers belong to the key
    known = [case for case in APART if cache.wants("f", *case)]
    assert len(known) >= len(APART) - 2  # C++ leaves complex numbers to Python
    for token in ("f", "g"):
        for number, case in enumerate(known):
            assert missed(cache.call(token, *case)), case
            remember(cache, token, case, lambda leaves, n=number, t=token: (t, n))
    for token in ("f", "g"):
        for number, case in enumerate(known):
            assert cache.call(token, *case) == (token, number), case
    assert cache.hits == 2 * len(known)


@Cache
def test_run_time_values_are_not_in_the_key_unless_they_are_read(kind: Any) -> None:
    cache = kind(True, False, 1000)
    remember(cache, "f", ((X, 1, 0.5), {}), lambda leaves: leaves[1:])
    assert cache.call("f", (X, 7, -0.0), {}) == [7, -0.0]
    assert missed(cache.call("f", (X, 7.0, 0.5), {})) and missed(
        cache.call("f", (X, True, 0.5), {})
    )
    for value in (0.0, -0.0, 1.0):
        assert missed(cache.call("g", (X, 3, value), {}))
        remember(cache, "g", ((X, 3, value), {}), lambda leaves, v=value: str(v), read=(2,))
    assert [cache.call("g", (X, 4, v), {}) for v in (0.0, -0.0, 1.0)] == ["0.0", "-0.0", "1.0"]
    assert missed(cache.call("g", (X, 3, 2.0), {}))


@Cache
def test_leaves_come_in_the_order_of_the_python_path(kind: Any) -> None:
    cache = kind(False, False, 8)
    case = ((X, {"b": 2.0, "a": [Y, 3.0]}), {"z": 4.0, "y": slice(None, 5, None)})
    remember(cache, "f", case, lambda leaves: leaves)
    expected = flatten(case)[0]
    found = cache.call("f", *case)
    assert all(a is b for a, b in zip(found, expected, strict=True))
    assert [a for a in found if not isinstance(a, torch.Tensor)] == [3.0, 2.0, 5, 4.0]


@Cache
def test_what_takes_the_python_path(kind: Any) -> None:
    cache, below = kind(True, False, 8), kind(True, True, 8)
    for each in (cache, below):
        remember(each, "f", ((X,), {}), lambda leaves: "known")
    w = dtorch.zeros(2, device_mesh=TWO, requires_grad=True)
    assert w._spec is X._spec
    assert missed(cache.call("f", (w,), {})) and below.call("f", (w,), {}) == "known"
    with torch.no_grad():
        assert missed(cache.call("f", (w,), {}))  # another setting of torch
    for unusual in (torch.zeros(2), object(), torch.Generator()):
        assert not cache.wants("f", (unusual,), {})
    with torch.overrides.TorchFunctionMode():
        assert missed(cache.call("f", (X,), {}))


@Cache
def test_the_capacity_bounds_it(kind: Any) -> None:
    cache = kind(False, False, 4)
    for number in range(9):
        remember(cache, "f", ((number,), {}), lambda leaves: "known")
    known = [not missed(cache.call("f", (number,), {})) for number in range(9)]
    assert known[-1] and sum(known) <= 4
    cache.clear()
    assert cache.hits == 0 and missed(cache.call("f", (8,), {}))


# -- what a known call does ----------------------------------------------------------------

CALLS: list[Callable[..., Any]] = [
    lambda x, y, s: x + y,
    lambda x, y, s: s * x,
    lambda x, y, s: torch.add(x, y, alpha=s * 1),
    lambda x, y, s: x.sum(dim=0, keepdim=True) * y,
    lambda x, y, s: x.sum(int(s) % 2).unsqueeze(int(s) % 2).expand(4, 4) + y,
    lambda x, y, s: x.t().contiguous(),
    lambda x, y, s: x[int(s) % 4] + y,
    lambda x, y, s: x[:, None, 1:].amax(1).sum() + y,
    lambda x, y, s: torch.cat(x.chunk(2, dim=1)[::-1], dim=1),
    lambda x, y, s: torch.stack([x, y]).mean(0),
    lambda x, y, s: x.max(dim=1, keepdim=True).values + y.tanh(),
    lambda x, y, s: torch.where(x > s, x, y),
    lambda x, y, s: x.add_(y, alpha=s * 1).clamp_(-9, 9),
    lambda x, y, s: x.clone().view(16).mul_(s).view(4, 4),
    lambda x, y, s: x.detach().copy_(y),
    lambda x, y, s: (x @ y) / 8,
]


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()])
def test_a_sequence_of_calls_is_as_in_pytorch(placement: Any) -> None:
    draw = random.Random(7)
    generator = torch.Generator().manual_seed(7)
    values = [torch.randn(4, 4, generator=generator).double() for _ in range(3)]
    ours = [dtorch.Tensor(v, device_mesh=TWO, placements=[placement]) for v in values]
    before = dtorch.cache_info().hits
    for _ in range(300):
        call, s = draw.choice(CALLS), draw.choice([1, 2, 3, 0.5, -0.0, True])
        i, j, k = draw.choices(range(3), k=3)
        found, expected = call(ours[i], ours[j], s), call(values[i], values[j], s)
        torch.testing.assert_close(found.to_torch(), expected)
        ours[k], values[k] = found.clamp(-9, 9), expected.clamp(-9, 9)
    for found, expected in zip(ours, values, strict=True):
        torch.testing.assert_close(found.to_torch(), expected)
    assert dtorch.cache_info().hits - before > 300


def test_a_known_call_is_recorded_by_autograd() -> None:
    x = torch.linspace(-1, 1, 8)
    for _ in range(3):
        w = x.clone().requires_grad_()
        d = dtorch.Tensor(x, device_mesh=TWO, placements=[Shard(0)])
        _ = d * d + 1
        d.requires_grad_()
        (w * w + 1).sum().backward()
        (d * d + 1).sum().backward()
        assert w.grad is not None and d.grad is not None
        assert torch.equal(d.grad.to_torch(), w.grad)


def test_a_view_of_a_known_call_shares_its_storage() -> None:
    for _ in range(3):
        x = dtorch.ones(4, 4, device_mesh=TWO)
        row, same = x[0], x.detach()
        row.add_(1)
        same.mul_(3)
        assert (x.sum().item(), row.sum().item()) == (60, 24)


def test_a_jitted_call_with_a_captured_tensor() -> None:
    captured = dtorch.ones(4, device_mesh=TWO)
    f = dtorch.jit(lambda x, s: {"sum": x + captured * s, "x": x})
    for s in (1.0, 2.0, 2.0):
        x = dtorch.ones(4, device_mesh=TWO)
        found = f(x, s)
        assert found["x"] is x and found["sum"].tolist() == [1 + s] * 4
        captured.add_(0)
