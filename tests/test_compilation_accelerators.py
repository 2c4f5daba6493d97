"""jit(compile=True) on accelerators, whose code is a function of Python: here on the CPU."""

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
from accelerators import installed

import dtorch
from dtorch import Shard, inductor
from dtorch.compilation import compile_stretches
from dtorch.lowering import LocalCall, lower
from dtorch.runtime.stretches import Layout, add_callable, run_callable

pytestmark = pytest.mark.timeout(300)  # Inductor takes seconds for each stretch


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[dtorch.DeviceMesh]:
    with installed(monkeypatch) as made:
        yield made.mesh(0)


def everything(x: torch.Tensor, s: float) -> Any:
    whole = (x * s + 1).relu()
    return whole.T[1:] * 2, whole.sum(0), (x.abs() * 10).long() + 3, x > s, x.T, x.clone()


def layout(x: dtorch.Tensor, index: int) -> Any:
    part = x._shards.get(index)
    steps = zip(part.shape, part.stride(), strict=True)
    return part.dtype, part.shape, [s for n, s in steps if n > 1 and part.numel()]


def check(jitted: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> None:
    found, expected = (optree.tree_leaves(f(*args)) for f in (jitted, plain))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.to_torch(), theirs.to_torch(), rtol=1e-5, atol=1e-6)
        for index in range(len(ours._shards)):
            assert layout(ours, index) == layout(theirs, index)


def test_values_shapes_and_strides_of_two_client_threads(
    mesh: dtorch.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    real = inductor.function_of

    def counted(stretch: Any) -> Any:
        assert threading.current_thread() in clients  # never a worker
        compiled.append(stretch)
        return real(stretch)

    monkeypatch.setattr(inductor, "function_of", counted)
    jitted, plain = dtorch.jit(everything, compile=True), dtorch.jit(everything)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for size in (4, 5):  # equal shards, and uneven ones
                x = dtorch.tensor(torch.randn(size, 6), device_mesh=mesh, placements=[Shard(0)])
                for s in (0.5, -2.0, float(number)):
                    check(jitted, plain, x, s)
        except BaseException as error:
            errors.append(error)

    clients = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
    assert errors == []
    # Of 2 + 2 and of 3 + 2 rows: two codes, though both threads trace.
    assert [s.inputs[0].shape for s in compiled] == [(2, 6), (3, 6)]
    assert {s.place for s in compiled} == {torch.device("cpu")}


def test_a_program_runs_functions_there_and_libraries_on_the_host(
    mesh: dtorch.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dtorch.compilation._numbered", lambda parts: dict.fromkeys(_keys(parts), 7)
    )

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).relu()

    for where, op in ((mesh, "run_callable"), (dtorch.DeviceMesh("cpu", [0, 1]), "run_compiled")):
        program = dtorch.jit(f).program(dtorch.ones(4, device_mesh=where))
        (call,) = compile_stretches(lower(program), program).instructions
        assert isinstance(call, LocalCall) and call.op.name() == f"dtorch::{op}"


def _keys(parts: Any) -> list[str]:
    return [s.key for part in parts for s in part.stretches]


def test_the_first_call_of_a_function_runs_alone() -> None:
    running, most = 0, 0
    go_on, lock = threading.Event(), threading.Lock()

    def function(x: torch.Tensor, s: torch.Tensor) -> list[torch.Tensor]:
        nonlocal running, most
        assert s.dtype == torch.float64 and s.shape == () and s.is_cpu
        with lock:
            running, most = running + 1, max(most, running + 1)
        go_on.wait(10)
        with lock:
            running -= 1
        return [x * s, x]

    plain, fresh = (Layout((2,), (1,), torch.float32, is_fresh) for is_fresh in (False, True))
    number = add_callable(function, [plain], [plain, fresh])
    x = torch.ones(2)
    threads = [threading.Thread(target=run_callable, args=(number, [x], [2.0])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(0.2)
    assert running == most == 1
    go_on.set()
    for thread in threads:
        thread.join()
    product, copy = run_callable(number, [x], [3.0])
    assert product.tolist() == [3.0, 3.0]
    assert copy.tolist() == [1.0, 1.0] and copy.data_ptr() != x.data_ptr()
    with pytest.raises(RuntimeError, match=r"(?s)compiled code for .* met .* Fix: "):
        run_callable(number, [torch.ones(3)], [1.0])


def test_a_failure_names_the_operations(
    mesh: dtorch.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: torch.Tensor) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(inductor, "function_of", lambda stretch: broken)
    x = dtorch.ones(7, 11, device_mesh=mesh)
    with pytest.raises(dtorch.errors.WorkerError, match="compiled as one") as caught:
        dtorch.jit(lambda x: (x * 2 + 1).cos(), compile=True)(x).to_torch()
    for part in ("OutOfMemoryError on cpu:", "aten.cos.default", "held there"):
        assert part in str(caught.value)
    assert set(dtorch.health(mesh).values()) == {"ok"}
