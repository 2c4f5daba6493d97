"""The native executor: how it is chosen and built, and what its cache of calls must tell apart."""

import gc
import math
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.dispatch import _calls
from dtorch.errors import WorkerError
from dtorch.runtime import EXECUTOR, NATIVE
from dtorch.tree import flatten

TWO = dtorch.DeviceMesh("cpu", [0, 1])
CHAIN_SHAPE, MARK = (2048, 2048), "--- from here ---"  # of benchmarks/peak.py
native = pytest.mark.skipif(EXECUTOR != "native", reason="the Python executor runs")


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DTORCH_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )


# -- how it is chosen ----------------------------------------------------------------------

TELL = "import dtorch; print(dtorch.runtime.EXECUTOR, (dtorch.ones(3) + 1).tolist())"


@pytest.mark.once
def test_the_variable_chooses() -> None:
    done = python(TELL, DTORCH_EXECUTOR="python")
    assert (done.stdout, done.stderr) == ("python [2.0, 2.0, 2.0]\n", "")
    done = python(TELL, DTORCH_EXECUTOR="fast")
    assert "DTORCH_EXECUTOR='fast': expected 'native' or 'python'" in done.stderr


@pytest.mark.once
def test_without_a_compiler_one_line_says_so(tmp_path: Path) -> None:
    nowhere = {"XDG_CACHE_HOME": str(tmp_path), "CXX": "/no/such/compiler"}
    done = python(TELL, **nowhere)
    assert done.stdout == "python [2.0, 2.0, 2.0]\n"
    assert re.fullmatch(
        r"dtorch: using the Python executor, which is slower: there is no C\+\+ compiler .*\n",
        done.stderr,
    )
    done = python(TELL, DTORCH_EXECUTOR="native", **nowhere)
    assert done.returncode == 1
    assert "DTORCH_EXECUTOR=native, but there is no C++ compiler" in done.stderr


@pytest.mark.once
def test_a_build_that_failed_is_not_tried_at_every_import(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    broken = {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler)}
    first, second = python(TELL, **broken), python(TELL, **broken)
    assert first.stdout == second.stdout == "python [2.0, 2.0, 2.0]\n"
    assert "the build failed, see" in first.stderr
    assert "an earlier build failed, see" in second.stderr
    assert "python -m dtorch.build tries again" in second.stderr


@native
@pytest.mark.once
def test_building_ahead_says_where_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dtorch.build"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0
    assert re.fullmatch(r"dtorch: the native executor is .*dtorch_native\.so\n", done.stdout)


# -- what the cache of calls tells apart ---------------------------------------------------


def twice(call: Callable[[], Any]) -> Any:
    """The result of a call that is new, then known, then known once more."""
    results = [call(), call(), call()]
    for result in results[1:]:
        assert type(result) is type(results[0])
    return results[-1]


@pytest.mark.parametrize("number", [1, 1.0, True, 0.0, -0.0, -3, 2.5, 1 << 40])
def test_numbers_keep_their_type_and_sign(number: Any) -> None:
    t = torch.tensor([1, 2])
    x = dtorch.Tensor(t, device_mesh=TWO, placements=[Shard(0)])
    for _ in range(2):
        for other in (1, 1.0, True, -0.0, 0.0):
            assert (x * other).dtype == (t * other).dtype
        found = twice(lambda: x * number)
        assert found.dtype == (t * number).dtype and torch.equal(found.to_torch(), t * number)
        sign = twice(lambda: torch.copysign(x, number))
        assert torch.equal(sign.to_torch(), torch.copysign(t, number))


def test_an_integer_that_does_not_fit_64_bits_raises_as_in_torch() -> None:
    for x in (torch.ones(2, dtype=torch.int64), dtorch.ones(2, dtype=torch.int64)):
        for _ in range(2):
            with pytest.raises(OverflowError, match="int too big to convert"):
                x * (1 << 70)


def test_an_integer_of_64_bits_without_a_sign_is_taken_as_in_torch() -> None:
    t = torch.ones(2)
    x = dtorch.Tensor(t, device_mesh=TWO)
    for number in (1 << 63, (1 << 64) - 1):
        assert torch.equal(twice(lambda n=number: x + n).to_torch(), t + number)


def test_a_torch_tensor_on_the_left_keeps_its_own_operator() -> None:
    t = torch.linspace(0.1, 3, 999)
    u = torch.linspace(2, 7, 999)
    x = dtorch.Tensor(u, device_mesh=TWO, placements=[Shard(0)])
    assert not torch.equal(u.__rtruediv__(t), t / u)  # it multiplies by the reciprocal
    for _ in range(3):
        assert torch.equal((t / x).to_torch(), t / u)
        assert torch.equal((t - x).to_torch(), t - u)
        assert torch.equal((2 / x).to_torch(), 2 / u)
    assert torch.equal(dtorch.jit(lambda x: t / x)(x).to_torch(), t / u)


def test_run_time_scalars_are_not_in_the_key() -> None:
    x = dtorch.ones(4)
    _ = x * 2.0
    before = dtorch.cache_info()
    for i in range(5):
        assert (x * (i + 0.5)).tolist() == [i + 0.5] * 4
    after = dtorch.cache_info()
    assert after.misses == before.misses and after.hits >= before.hits + 5


def test_scalars_that_a_shape_reads_are_in_the_key() -> None:
    t = torch.arange(12.0)
    x = dtorch.Tensor(t, device_mesh=TWO, placements=[Shard(0)])
    for _ in range(3):
        for sizes in ((3, 4), (4, 3), (2, 6)):
            assert x.reshape(*sizes).shape == sizes
            assert torch.equal(x.reshape(sizes).sum(1).to_torch(), t.reshape(sizes).sum(1))
        for dim in (0, 1):
            assert torch.equal(x.reshape(3, 4).sum(dim).to_torch(), t.reshape(3, 4).sum(dim))


@native
def test_calls_with_every_value_that_is_read_become_known() -> None:
    x = dtorch.ones(12)
    for _ in range(2):
        for sizes in ((3, 4), (4, 3), (2, 6)):
            x.reshape(*sizes)
    before = _calls.hits
    for sizes in ((3, 4), (4, 3), (2, 6)):
        assert x.reshape(*sizes).shape == sizes
    assert _calls.hits == before + 3


def test_settings_are_in_the_key() -> None:
    x = dtorch.ones(3, dtype=torch.int64)
    assert (x * 0.5).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (x * 0.5).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (x * 0.5).dtype == torch.float32
    with torch.inference_mode():
        assert (x + 1).is_inference()
    assert not (x + 1).is_inference()


def test_requires_grad_is_seen_on_a_known_call() -> None:
    x, y = dtorch.ones(3), dtorch.ones(3)
    assert not twice(lambda: x * y).requires_grad
    y.requires_grad_()
    assert (x * y).requires_grad
    with torch.no_grad():
        assert not (x * y).requires_grad
    (x * y).sum().backward()
    assert y.grad is not None and y.grad.tolist() == [1, 1, 1]


def test_autocast_and_modes_are_seen_on_a_known_call() -> None:
    x = dtorch.ones(4, 4)
    assert twice(lambda: x @ x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    seen: list[Any] = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Spy():
        _ = x + x
    assert torch.Tensor.add in seen


def test_containers_names_and_strings_are_in_the_key() -> None:
    t = torch.randn(4, 6)
    x = dtorch.Tensor(t, device_mesh=TWO, placements=[Shard(0)])
    for _ in range(3):
        assert torch.equal(torch.cat([x, x]).to_torch(), torch.cat([t, t]))
        assert torch.equal(torch.cat((x, x, x), dim=1).to_torch(), torch.cat((t, t, t), dim=1))
        for how in ("none", "tanh"):
            # Where a vector ends, and another rounding begins, depends on the number of elements.
            found = torch.nn.functional.gelu(x, approximate=how).to_torch()
            torch.testing.assert_close(found, torch.nn.functional.gelu(t, approximate=how))
        for key in (0, -1, slice(1, 3), (slice(None), 2), (..., None), (slice(None, None, 2), 1)):
            assert torch.equal(x[key].to_torch(), t[key])
        keep = torch.sum(x, dim=1, keepdim=True)
        assert keep.shape == (4, 1) and torch.sum(x, keepdim=False, dim=1).shape == (4,)


def test_a_partial_value_that_has_been_reduced_is_another_key() -> None:
    p = dtorch.ones(4, 4, device_mesh=TWO, placements=[Partial()])
    for _ in range(4):
        assert torch.equal((p * p).to_torch(), torch.ones(4, 4))
        assert (p + p).sum().item() == 32


@native
def test_a_call_is_not_remembered_for_a_tensor_that_was_reduced_meanwhile() -> None:
    p = dtorch.ones(4, device_mesh=TWO, placements=[Partial()])
    q = dtorch.ones(4, device_mesh=TWO, placements=[Partial()])
    _ = q * q
    cache = NATIVE.CallCache(True, False, 8)
    made = {
        "slow": lambda leaves: "for the partial one",
        "read": (),
        "program": None,
        "is_autograds": False,
    }
    made["traced"] = [(0, p._spec)]
    cache.remember("token", (q,), {}, ((0,), {}), made)  # as if another thread had reduced it
    assert cache.call("token", (q,), {}) is NATIVE.MISSED
    cache.remember("token", (p,), {}, ((0,), {}), made)
    assert cache.call("token", (p,), {}) == "for the partial one"


@native
def test_a_collection_in_the_middle_of_a_call() -> None:
    x = dtorch.ones(2, 3, device_mesh=TWO)

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            _ = x.sum(dim=1) * 3.0
            (x + 1).add_(2)

    before = gc.get_threshold()
    gc.set_threshold(3, 2, 2)
    try:
        for _ in range(300):
            Cycle()
            y = x + 0
            assert y.add_(1) is y
        assert y.tolist() == [[2.0] * 3] * 2
    finally:
        gc.set_threshold(*before)


@native
@pytest.mark.parametrize("call", [lambda x: x * x, lambda x: x.add_(1)])
def test_a_value_is_seen_once_its_program_is_queued(call: Callable[..., Any]) -> None:
    def make() -> dtorch.Tensor:
        return dtorch.Tensor(torch.ones(4), device_mesh=TWO, placements=[Partial()])

    for _ in range(2):
        call(make())
        _ = make() + 0
    x = make()
    seen: list[dtorch.Tensor] = []

    def look(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and len(seen) < 9:
            seen.append(x + 0)

    threshold = gc.get_threshold()
    for turn in range(20):  # collections at every place of the call
        x = make()
        seen.clear()
        gc.callbacks.append(look)
        gc.set_threshold(1 + turn)
        try:
            call(x)
        finally:
            gc.set_threshold(*threshold)
            gc.callbacks.remove(look)
        assert all(value.tolist() in ([1.0] * 4, [2.0] * 4) for value in seen)


def test_the_entry_point_takes_what_a_subclass_may_hand_on() -> None:
    x = dtorch.ones(2)
    enter: Any = dtorch.Tensor.__torch_function__
    for _ in range(3):
        assert enter(torch.add, (dtorch.Tensor,), args=(x, x)).tolist() == [2, 2]
        assert enter(torch.add, (), (x, x), {"alpha": 2}).tolist() == [3, 3]
        assert enter(func=torch.neg, types=(), args=[x], kwargs=None).tolist() == [-1, -1]
    with pytest.raises(TypeError, match=r"func"):
        enter()
    foreign = torch.ones(2).as_subclass(dtorch.Tensor)
    assert not hasattr(foreign, "_spec")
    assert dtorch.Tensor.add.__doc__ == torch.Tensor.add.__doc__


def test_views_and_writes_on_known_calls() -> None:
    for _ in range(3):
        x = dtorch.zeros(4, device_mesh=TWO, placements=[Shard(0)])
        view = x[1:3]
        view.add_(1)
        assert x._version == view._version == 1
        del view
        x.add_(1)
        x += 2
        assert x.tolist() == [3.0, 4, 4, 3] and x._version == 3


def test_a_known_call_keeps_nothing_alive() -> None:
    f = dtorch.jit(lambda a, b: (a + b, {"twice": a * 2}))
    x, y = dtorch.ones(3), dtorch.ones(3)
    for _ in range(3):
        f(x, y)
        x.add_(0.0)
        _ = x[1:]
    refs = [weakref.ref(x), weakref.ref(y)]
    del x, y, _
    dtorch.synchronize()
    gc.collect()
    assert [r() for r in refs] == [None, None]


def test_a_known_call_fails_with_the_line_that_made_it() -> None:
    weight = dtorch.ones(4, 2, device_mesh=TWO, placements=[Shard(0)])
    good = dtorch.tensor([1, 2], device_mesh=TWO)
    bad = dtorch.tensor([1, 9], device_mesh=TWO)
    lines = []
    for ids in (good, bad, bad):
        lines.append(sys._getframe().f_lineno + 1)
        found = torch.nn.functional.embedding(ids, weight)
    with pytest.raises(WorkerError, match="IndexError on cpu:") as caught:
        found.to_torch()
    assert f"{__file__}:{lines[-1]} in test_a_known_call_fails" in str(caught.value)


# -- jitted calls --------------------------------------------------------------------------


def test_jitted_calls_with_trees_in_any_order() -> None:
    f = dtorch.jit(lambda p, x, scale=1.0: {"y": x @ p["w"] * scale, "same": x, "b": p["b"]})
    w, b, x = torch.randn(3, 2), torch.randn(2), torch.randn(4, 3)
    W, B, X = (dtorch.Tensor(t, device_mesh=TWO) for t in (w, b, x))
    for _ in range(3):
        for params in ({"w": W, "b": B}, {"b": B, "w": W}):
            for scale in (1.0, 2.5):
                found = f(params, X, scale=scale)
                assert list(found) == ["y", "same", "b"]
                assert found["same"] is X and found["b"] is B
                assert torch.allclose(found["y"].to_torch(), x @ w * scale)
    assert f.cache_info().hits >= 10


def test_static_arguments_of_a_jitted_call() -> None:
    f = dtorch.jit(lambda x, p: x * p if p > 1.5 else x, static_argnums=1)
    x = dtorch.ones(2)
    for _ in range(3):
        assert f(x, 2.0).tolist() == [2, 2] and f(x, 1.0).tolist() == [1, 1]


def test_a_jitted_call_sees_the_layout() -> None:
    f = dtorch.jit(lambda x: x.sum(0) * 2)
    t = torch.arange(6.0).reshape(3, 2)
    for _ in range(3):
        for placement in (Shard(0), Shard(1), Replicate(), Partial()):
            x = dtorch.Tensor(t, device_mesh=TWO, placements=[placement])
            assert torch.equal(f(x).to_torch(), t.sum(0) * 2)


def test_many_client_threads_on_known_calls() -> None:
    meshes = [dtorch.DeviceMesh("cpu", [i, i + 1]) for i in range(4)]
    tensors = [dtorch.ones(5, device_mesh=m, placements=[Shard(0)]) for m in meshes]
    f = dtorch.jit(lambda x, s: (x * s).sum())
    wrong: list[Any] = []

    def work(number: int) -> None:
        for i in range(60):
            x = tensors[(number + i) % 4]
            found = [(x + number).sum().item(), f(x, float(i)).item()]
            if found != [5.0 * (number + 1), 5.0 * i]:
                wrong.append((number, i, found))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(t.is_alive() for t in threads) and wrong == []


@native
def test_a_python_kernel_takes_the_lock_only_for_itself(operations: torch.library.Library) -> None:
    operations.define("doubled(Tensor x) -> Tensor")
    operations.impl("doubled", lambda x: x * 2, "CPU")
    operations.impl("doubled", torch.empty_like, "Meta")
    x = dtorch.ones(3, device_mesh=TWO)
    for _ in range(3):
        assert torch.ops.dtorch_test.doubled(x).tolist() == [2.0] * 3

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("from the kernel")

    operations.define("failing(Tensor x) -> Tensor")
    operations.impl("failing", fails, "CPU")
    operations.impl("failing", torch.empty_like, "Meta")
    with pytest.raises(WorkerError, match="ValueError on cpu:0: from the kernel") as caught:
        torch.ops.dtorch_test.failing(x).to_torch()
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_failed_python_kernel_is_read_by_many_threads(operations: torch.library.Library) -> None:
    raised: type[BaseException]

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise raised("from the kernel")

    operations.define("failing(Tensor x) -> Tensor")
    operations.impl("failing", fails, "CPU")
    operations.impl("failing", torch.empty_like, "Meta")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for raised in (ValueError, SystemExit, ValueError):
            lost = torch.ops.dtorch_test.failing(dtorch.ones(3))
            causes: list[Any] = []

            def read(lost: Any = lost, causes: list[Any] = causes) -> None:
                with pytest.raises(WorkerError, match="from the kernel") as caught:
                    lost.to_torch()
                causes.append(type(caught.value.__cause__))

            threads = [threading.Thread(target=read) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert causes == [raised] * 8
    finally:
        sys.setswitchinterval(interval)


# -- results in the memory of operands -----------------------------------------------------


@native
def test_an_elementwise_result_takes_the_memory_of_an_operand_that_nobody_has() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peak", "chain, jit", "dtorch", "1"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    live = re.findall(r"total alloc (\d+) bytes", done.stderr.partition(MARK)[2])
    one_tensor = 4 * math.prod(CHAIN_SHAPE)
    assert one_tensor <= max(map(int, live)) < 1.01 * one_tensor


OVERWRITES: dict[str, Callable[[Any], Any]] = {
    "a_view_lives_on": lambda y: (y[1:], y.exp()),
    "an_alias_lives_on": lambda y: (y.detach(), y.neg()),
    "twice_an_operand": lambda y: y * y,
    "the_second_operand": lambda y: 3 - y,
    "wider_than_the_operand": lambda y: y[:1] + torch.ones(6, 4),
    "transposed": lambda y: y.mT + torch.ones(4, 6),
    "another_dtype": lambda y: (y > 0.5, y + torch.ones((), dtype=torch.float64)),
    "complex": lambda y: y * 1j,
    "integers_divided": lambda y: (y * 10).long() / 2,
    "one_column": lambda y: (y[:, :1] * 2).expand(6, 4).exp(),
    "overlapping": lambda y: y[0].expand(6, 4) + y,
    "half": lambda y: y.half() + torch.ones(6, 4),
    "in_between": lambda y: y.sigmoid() * y + y.sum(0),
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("name", OVERWRITES)
def test_what_is_still_read_is_not_overwritten(name: str, placement: Any) -> None:
    def f(x: Any) -> Any:
        return OVERWRITES[name](x + 1)

    x = torch.rand(6, 4)
    given = dtorch.Tensor(x, device_mesh=TWO, placements=[placement])
    for run in (f, dtorch.jit(f)):
        found = [t.to_torch() for t in flatten(run(given))[0]]
        torch.testing.assert_close(found, flatten(f(x))[0], rtol=1e-6, atol=1e-6)
        assert torch.equal(given.to_torch(), x)


def test_what_peers_read_is_not_overwritten() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1, 2, 3])

    @dtorch.jit
    def f(x: Any) -> Any:
        for _ in range(30):
            y = x * 1.01
            whole = y.redistribute(placements=[Replicate()])
            x = (y.neg() + whole[:1]).sigmoid()
        return x

    def on_one(x: Any) -> Any:
        for _ in range(30):
            y = x * 1.01
            x = (y.neg() + y[:1]).sigmoid()
        return x

    x = torch.rand(8, 4000)
    given = dtorch.Tensor(x, device_mesh=mesh, placements=[Shard(0)])
    for _ in range(5):
        torch.testing.assert_close(f(given).to_torch(), on_one(x))


def test_memory_of_the_caller_is_not_overwritten() -> None:
    x = torch.rand(4, 3)
    before = x.clone()
    f = dtorch.jit(lambda x: x.exp().neg(), donate_argnums=0)
    for source in (x, x.numpy(), x[:]):
        lent = dtorch.Tensor(source, device_mesh=TWO, placements=[Shard(0)], copy=False)
        found = f(lent)
        del lent
        assert torch.equal(found.to_torch(), before.exp().neg()) and torch.equal(x, before)
