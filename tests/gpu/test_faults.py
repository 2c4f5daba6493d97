"""Health, restart and memory of a GPU; what an error of its driver leaves behind."""

import subprocess
import sys
import textwrap

import pytest
import torch

import dtorch
from dtorch import Shard
from dtorch.errors import WorkerError

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _virtual_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTORCH_VIRTUAL_DEVICES", "8")


def pair() -> dtorch.DeviceMesh:
    return dtorch.DeviceMesh("cuda", [0, 1])


def test_restart_of_a_healthy_gpu() -> None:
    x = torch.randn(64, 3, device="cuda")
    y = dtorch.tensor(x, device_mesh=pair(), placements=[Shard(0)]) * 2
    for devices in (pair(), pair().devices[0], pair().devices):
        dtorch.restart(devices)
        assert set(dtorch.health(pair()).values()) == {"ok"}
        assert torch.equal((y + 1).to_torch(), x * 2 + 1)


def test_empty_cache_gives_memory_back() -> None:
    x = dtorch.ones(1 << 26, device_mesh=pair(), placements=[Shard(0)]) * 2
    assert x.sum().item() == 1 << 27
    del x
    dtorch.synchronize()
    before = torch.cuda.memory_reserved()
    dtorch.empty_cache()
    assert torch.cuda.memory_reserved() < before


def test_memory_that_is_full_names_the_shapes_and_the_gpu_goes_on() -> None:
    held = dtorch.ones(1 << 20, device_mesh=pair(), placements=[Shard(0)])

    @dtorch.jit
    def compute(x: torch.Tensor) -> torch.Tensor:
        large = x * 2  # is held
        return large.unsqueeze(0).expand(1 << 22, -1).contiguous().sum() + large.sum()

    with pytest.raises(WorkerError, match="OutOfMemoryError on cuda:") as caught:
        compute(held).to_torch()
    message = str(caught.value)
    assert "  gives " in message and "4194304, 1048576" in message
    assert "held there" in message and "aten.mul" in message and "test_faults.py:" in message
    assert set(dtorch.health(pair()).values()) == {"ok"}
    assert held.sum().item() == 1 << 20


def test_values_are_awaited_on_the_host() -> None:
    x = torch.randn(2048, 2048, device="cuda")
    y = dtorch.tensor(x, device_mesh=pair(), placements=[Shard(0)])
    values = [y + float(i) for i in range(8)]
    futures = [value.to_torch_async(device="cpu") for value in values]
    for number, future in enumerate(futures):
        found = future.get()
        assert found.device.type == "cpu" and future.is_ready()
        assert torch.equal(found, (x + float(number)).cpu())
    columns = dtorch.tensor(x, device_mesh=pair(), placements=[Shard(1)]).mT
    assert torch.equal(columns.to_torch_async(device="cpu").get(), x.mT.cpu())


ASSERT = """
import torch, dtorch
from dtorch.errors import DTorchError, WorkerError

mesh = dtorch.DeviceMesh("cuda", [0])
fine = dtorch.ones(4, 8, device_mesh=mesh)
other = dtorch.DeviceMesh("cuda", [1])
print(fine.sum().item(), (dtorch.ones(3, device_mesh=other) + 1).sum().item())
lost = torch.nn.functional.embedding(dtorch.tensor([99], device_mesh=mesh), fine) + 1
dtorch.synchronize()
for device, state in dtorch.health(dtorch.DeviceMesh("cuda", [0, 1])).items():
    print(device, state.partition(":")[0], "assert" in state)
for fetch in (lost.to_torch, lambda: lost.to_torch_async(device="cpu").get(),
              lambda: (dtorch.ones(3, device_mesh=other) + 1).to_torch()):
    try:
        fetch()
    except WorkerError as error:
        print("lost", "assert" in str(error))
try:
    dtorch.restart(mesh)
except DTorchError as error:
    print("gone", "cannot be used again in this process" in str(error))
print("end", (dtorch.ones(3) + 1).sum().item(), flush=True)
"""


@pytest.mark.parametrize("executor", ["native", "python"])
def test_an_assertion_on_the_device_ends_its_use_and_nothing_hangs(
    monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    monkeypatch.setenv("DTORCH_EXECUTOR", executor)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ASSERT)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.stdout.splitlines() == [
        "32.0 6.0",
        "cuda:0 failed True",
        "cuda:1 failed True",
        *["lost True"] * 3,
        "gone True",
        "end 6.0",
    ], done.stderr[-3000:]
