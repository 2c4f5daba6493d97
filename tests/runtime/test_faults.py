"""Accelerators whose driver fails: who is marked, what is lost, and how devices come back."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerators import Accelerators, installed

import dtorch
from dtorch import Replicate, Shard
from dtorch.errors import DTorchError, WorkerError
from dtorch.runtime import EXECUTOR, faults, streams

pytestmark = pytest.mark.timeout(60)
ILLEGAL_ADDRESS = 700


def driver_error(code: int, text: str = "CUDA error: an illegal memory access") -> RuntimeError:
    error = torch.AcceleratorError(text)
    error.error_code = code  # pyright: ignore[reportAttributeAccessIssue]
    return error


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerators]:
    with installed(monkeypatch) as made:
        yield made


@pytest.fixture
def failing(operations: torch.library.Library) -> list[BaseException | None]:
    """What the operation ``dtorch_test::failing`` raises, in a list of one; None for nothing."""
    raised: list[BaseException | None] = [None]

    def kernel(x: torch.Tensor) -> torch.Tensor:
        if raised[0] is not None:
            raise raised[0]
        return x + 1

    operations.define("failing(Tensor x) -> Tensor")
    operations.impl("failing", kernel, "CPU")
    operations.impl("failing", torch.empty_like, "Meta")
    return raised


def fail(x: dtorch.Tensor) -> dtorch.Tensor:
    return torch.ops.dtorch_test.failing(x)  # the first failure


def ones(mesh: dtorch.DeviceMesh) -> dtorch.Tensor:
    return dtorch.ones(8, device_mesh=mesh, placements=[Shard(0)])


def states(mesh: dtorch.DeviceMesh) -> list[str]:
    return [state.partition(":")[0] for state in dtorch.health(mesh).values()]


# -- who is marked -------------------------------------------------------------------------


def test_all_virtual_devices_of_an_accelerator_fail_and_no_others(
    accelerators: Accelerators, failing: Any
) -> None:
    own, others = accelerators.mesh(0), accelerators.mesh(1)
    one = dtorch.DeviceMesh("cpu", [own.devices[0].id])
    failing[0] = driver_error(ILLEGAL_ADDRESS)
    with pytest.raises(WorkerError, match=r"AcceleratorError on cpu:.* an illegal memory access"):
        fail(ones(one)).to_torch()
    failing[0] = None
    assert states(own) == ["failed", "failed"] and states(others) == ["ok", "ok"]
    (state,) = dtorch.health(own.devices[1]).values()
    assert "illegal memory access" in state and "dtorch_test.failing" in state
    assert "in fail" in state
    second = dtorch.DeviceMesh("cpu", [own.devices[1].id])
    with pytest.raises(WorkerError, match=r"can be trusted\. The first error:") as caught:
        (dtorch.ones(3, device_mesh=second) + 1).to_torch()
    message = str(caught.value)
    assert message.startswith(f"{own.devices[1]} computes nothing any more")
    assert f"AcceleratorError on {own.devices[0]}: CUDA error: an illegal" in message
    assert f"Fix: dtorch.restart('{own.devices[1]}'), which" in message
    assert isinstance(caught.value.__cause__, torch.AcceleratorError)
    with pytest.raises(WorkerError, match="illegal memory access"):
        dtorch.tensor([1.0, 2.0], device_mesh=second).to_torch()
    assert (ones(others) + 1).sum().item() == 16


@pytest.mark.parametrize(
    "error",
    [
        ValueError("of the kernel"),
        RuntimeError("shapes do not fit"),
        torch.OutOfMemoryError("CUDA out of memory"),
        driver_error(2, "CUDA error: out of memory"),
        SystemExit(3),
    ],
    ids=repr,
)
def test_an_ordinary_failure_marks_nothing(
    accelerators: Accelerators, failing: Any, error: BaseException
) -> None:
    mesh = accelerators.mesh(0)
    failing[0] = error
    with pytest.raises(WorkerError, match=f"{type(error).__name__} on cpu:"):
        fail(ones(mesh)).to_torch()
    failing[0] = None
    assert states(mesh) == ["ok", "ok"]
    assert fail(ones(mesh)).sum().item() == 16


def test_an_error_of_any_kind_marks_if_the_driver_answers_no_more(
    accelerators: Accelerators, failing: Any
) -> None:
    """As cuBLAS and Triton report what a kernel before theirs has done."""
    mesh = accelerators.mesh(0, 1)
    x = ones(mesh)
    dtorch.synchronize()

    def kernel_fails(x: Any) -> Any:
        return fail(x)

    accelerators.break_driver(1)
    failing[0] = RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")
    with pytest.raises(WorkerError, match=r"CUBLAS|broken"):
        kernel_fails(x).to_torch()
    assert states(mesh) == ["ok", "ok", "failed", "failed"]


def test_a_failure_on_the_host_marks_nothing(failing: Any) -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    failing[0] = driver_error(ILLEGAL_ADDRESS)
    with pytest.raises(WorkerError, match="AcceleratorError"):
        fail(ones(mesh)).to_torch()
    assert states(mesh) == ["ok", "ok"]


# -- what is lost --------------------------------------------------------------------------


def test_peers_get_failures_and_nobody_hangs(accelerators: Accelerators, failing: Any) -> None:
    mesh, both = accelerators.mesh(0), accelerators.mesh(0, 1)
    failing[0] = driver_error(ILLEGAL_ADDRESS)
    fail(ones(mesh))
    dtorch.synchronize()
    failing[0] = None
    large = dtorch.ones(40_000, device_mesh=both, placements=[dtorch.Partial()])
    results = [
        ones(both).redistribute(placements=[Replicate()]),
        ones(both).sum(),
        large.redistribute(placements=[Replicate()]),  # in two rounds
        ones(both).redistribute(accelerators.mesh(2), [Shard(0)]),
        ones(both).to("cpu"),
    ]
    for result in results:
        with pytest.raises(WorkerError, match="computes nothing any more"):
            result.to_torch()
    assert states(accelerators.mesh(1, 2)) == ["ok"] * 4


def test_a_mark_between_what_a_device_has_shown_and_what_its_peers_take(
    accelerators: Accelerators, operations: torch.library.Library
) -> None:
    """In the midst of an all-reduce of two rounds, peers still wait for the second."""
    mesh = accelerators.mesh(0, 1)

    def mark(x: torch.Tensor) -> torch.Tensor:
        error = driver_error(ILLEGAL_ADDRESS)
        faults.mark(accelerators.places[0], faults.driver_failure("cpu:1", error))
        return x * 1

    operations.define("marking(Tensor x) -> Tensor")
    operations.impl("marking", mark, "CPU")
    operations.impl("marking", torch.empty_like, "Meta")

    @dtorch.jit
    def run(x: Any, y: Any) -> Any:
        total = (x + 1).redistribute(placements=[Replicate()])
        return torch.ops.dtorch_test.marking(y), total * 2

    for _ in range(5):
        x = dtorch.ones(40_000, device_mesh=mesh, placements=[dtorch.Partial()])
        y = dtorch.ones(3, device_mesh=mesh)
        for result in run(x, y):
            with pytest.raises(WorkerError, match="computes nothing any more"):
                dtorch.Tensor.to_torch(result)
        dtorch.synchronize()
        faults.clear(accelerators.places[0])


def test_what_is_not_known_to_be_computed_is_lost(accelerators: Accelerators) -> None:
    mesh, other = accelerators.mesh(0), accelerators.mesh(1)
    value, there = ones(mesh) + 1, ones(other) + 1
    dtorch.synchronize()
    accelerators.break_driver(0)
    future = value.to_torch_async()
    assert future.is_ready() and future.wait_for(1000)
    with pytest.raises(WorkerError, match=r"computes nothing.*\n.*a lane that is broken"):
        future.get()
    for fetch in (value.to_torch, value.local_shards):
        with pytest.raises(WorkerError, match="a lane that is broken"):
            fetch()
    assert there.to_torch().tolist() == [2.0] * 8
    assert states(mesh) == ["failed"] * 2


def test_who_waits_is_told(accelerators: Accelerators) -> None:
    value = ones(accelerators.mesh(0)) + 1
    dtorch.synchronize()
    accelerators.break_driver(0)
    called = threading.Event()
    value.to_torch_async().add_done_callback(lambda future: called.set())
    assert called.wait(10)

    async def wait() -> None:
        await value.to_torch_async()

    with pytest.raises(WorkerError, match="a lane that is broken"):
        asyncio.run(asyncio.wait_for(wait(), 10))
    begin = time.monotonic()
    dtorch.synchronize()
    assert time.monotonic() - begin < 10


@pytest.mark.skipif(EXECUTOR != "python", reason="its events are those of the test")
def test_who_waits_for_a_stream_that_then_fails_is_told(accelerators: Accelerators) -> None:
    value = ones(accelerators.mesh(0)) + 1
    dtorch.synchronize()
    accelerators.held.add(accelerators.places[0])
    future = value.to_torch_async()
    assert not future.is_ready()
    accelerators.break_driver(0)  # `synchronize` of its event raises
    called = threading.Event()
    future.add_done_callback(lambda future: called.set())
    assert called.wait(10) and future.is_ready()
    with pytest.raises(WorkerError, match="a lane that is broken"):
        future.get()


@pytest.mark.skipif(EXECUTOR != "python", reason="its events are those of the test")
def test_what_is_known_to_be_computed_can_be_fetched(
    accelerators: Accelerators, failing: Any
) -> None:
    mesh = accelerators.mesh(0)
    value, late = ones(mesh) + 1, ones(mesh) + 2
    dtorch.synchronize()
    failing[0] = driver_error(ILLEGAL_ADDRESS)
    fail(ones(mesh))
    dtorch.synchronize()
    assert value.to_torch().tolist() == [2.0] * 8  # its event says so
    accelerators.held.add(accelerators.places[0])
    with pytest.raises(WorkerError, match="computes nothing any more"):
        late.to_torch()


def test_lanes_that_cannot_be_made(accelerators: Accelerators) -> None:
    accelerators.break_driver(0)
    with pytest.raises(WorkerError, match="a lane that is broken"):
        (ones(accelerators.mesh(0)) + 1).to_torch()
    assert states(accelerators.mesh(0, 1)) == ["failed", "failed", "ok", "ok"]


def test_a_function_of_shard_map_on_a_device_that_has_failed(
    accelerators: Accelerators, failing: Any
) -> None:
    ids = [d.id for d in accelerators.mesh(0, 1).devices]
    mesh = dtorch.DeviceMesh("cpu", ids, mesh_dim_names=("x",))
    failing[0] = driver_error(ILLEGAL_ADDRESS)
    fail(ones(accelerators.mesh(0)))
    dtorch.synchronize()
    failing[0] = None

    def compute(part: torch.Tensor) -> torch.Tensor:
        return dtorch.psum(part, "x")

    summed = dtorch.shard_map(compute, mesh, dtorch.P("x"), dtorch.P())
    with pytest.raises(WorkerError, match="computes nothing any more"):
        summed(torch.ones(8)).to_torch()
    dtorch.restart(mesh)
    assert summed(torch.ones(8)).tolist() == [4.0] * 2


# -- restart -------------------------------------------------------------------------------


def test_restart_takes_the_mark_back(accelerators: Accelerators, failing: Any) -> None:
    mesh = accelerators.mesh(0)
    before = ones(mesh) + 1
    dtorch.synchronize()
    failing[0] = driver_error(ILLEGAL_ADDRESS)
    lost = fail(before)
    dtorch.synchronize()
    failing[0] = None
    later = before + 1
    dtorch.restart(mesh.devices[1])
    assert states(mesh) == ["ok", "ok"]
    for value in (lost, later):
        with pytest.raises(WorkerError, match="illegal memory access"):
            value.to_torch()
    assert before.tolist() == [2.0] * 8
    assert fail(ones(mesh)).sum().item() == 16


@pytest.mark.parametrize("what", ["mesh", "devices", "one", "name", "torch"])
def test_restart_of_healthy_devices(accelerators: Accelerators, what: str) -> None:
    mesh = accelerators.mesh(0, 1)
    value = ones(mesh) + 1
    (one, *_), all_of_them = mesh.devices, iter(mesh.devices)
    named = {"name": str(one), "torch": torch.device("cpu", 1), "one": one}
    given: Any = {"mesh": mesh, "devices": all_of_them, **named}[what]
    dtorch.restart(given)
    assert value.sum().item() == 16 and states(mesh) == ["ok"] * 4
    dtorch.restart(dtorch.DeviceMesh("cpu", [0, 1]))
    assert ones(dtorch.DeviceMesh("cpu", [0, 1])).sum().item() == 8


def test_restart_makes_new_lanes(
    accelerators: Accelerators, failing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = accelerators.mesh(0)
    accelerators.break_driver(0)
    with pytest.raises(WorkerError, match="a lane that is broken"):
        (ones(mesh) + 1).to_torch()
    accelerators.mend_drivers()
    assert states(mesh) == ["failed", "failed"]  # until it is asked for
    dtorch.restart(mesh)
    assert (ones(mesh) + 1).sum().item() == 16


@pytest.mark.parametrize(
    "probe", [lambda place: False, lambda place: (_ for _ in ()).throw(driver_error(700))]
)
def test_an_accelerator_that_cannot_be_used_again(
    accelerators: Accelerators, failing: Any, monkeypatch: pytest.MonkeyPatch, probe: Any
) -> None:
    mesh = accelerators.mesh(0)
    failing[0] = driver_error(710, "CUDA error: device-side assert triggered")
    fail(ones(mesh))
    dtorch.synchronize()
    failing[0] = None
    monkeypatch.setattr(streams, "computes", probe)
    wrong = (
        r"restart: cpu:[0-9]+ cannot be used again .*(gives an error: CUDA|computes wrong values)"
    )
    with pytest.raises(DTorchError, match=wrong) as caught:
        dtorch.restart(mesh)
    assert "device-side assert triggered" in str(caught.value)
    assert "Fix: save what other devices hold" in str(caught.value)
    assert states(mesh) == ["failed", "failed"]
    with pytest.raises(WorkerError, match="device-side assert triggered"):
        (ones(mesh) + 1).to_torch()


def test_a_device_that_hangs_cannot_be_restarted(operations: torch.library.Library) -> None:
    go_on = threading.Event()

    def wait(x: torch.Tensor) -> torch.Tensor:
        go_on.wait(60)
        return x + 1

    operations.define("waiting(Tensor x) -> Tensor")
    operations.impl("waiting", wait, "CPU")
    operations.impl("waiting", torch.empty_like, "Meta")
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    result = torch.ops.dtorch_test.waiting(ones(mesh))
    try:
        with pytest.raises(DTorchError, match=r"restart: cpu:0, cpu:1 did not get through .*0.2 s"):
            dtorch.restart(mesh, timeout=0.2)
    finally:
        go_on.set()
    assert result.tolist() == [2.0] * 8


def test_a_worker_cannot_restart() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))

    def ask(x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            dtorch.restart(mesh)
        return x

    with pytest.raises(DTorchError, match="would wait for itself"):
        dtorch.shard_map(ask, mesh, dtorch.P(), dtorch.P())(torch.ones(1)).to_torch()
