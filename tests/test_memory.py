"""Giving memory back, and what is said where there is none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Shard, memory
from dtorch.errors import WorkerError
from dtorch.mesh import Device

PAIR = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types of accelerators whose allocators have been emptied."""
    found: list[str] = []

    def module(kind: str) -> Any:
        return SimpleNamespace(empty_cache=lambda: found.append(kind))

    monkeypatch.setattr(torch, "get_device_module", module)
    return found


def test_the_allocators_of_accelerators_that_have_been_used_are_emptied(
    monkeypatch: pytest.MonkeyPatch, emptied: list[str]
) -> None:
    used = [Device("cpu", 0), Device("cuda", 0), Device("cuda", 9), Device("xpu", 0)]
    monkeypatch.setattr(memory, "used_devices", lambda: used)
    dtorch.empty_cache()
    assert emptied == ["cuda", "xpu"]


def test_no_accelerator_is_asked_on_the_host(emptied: list[str]) -> None:
    x = dtorch.ones(4, device_mesh=PAIR, placements=[Shard(0)]) + 1
    dtorch.empty_cache()
    assert emptied == [] and x.tolist() == [2.0] * 4


def test_an_operation_without_memory_names_shapes_and_what_is_held(
    operations: torch.library.Library,
) -> None:
    def full(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB.")

    operations.define("full(Tensor x) -> Tensor")
    operations.impl("full", full, "CPU")
    operations.impl("full", torch.empty_like, "Meta")

    @dtorch.jit
    def compute(x: Any) -> Any:
        large = torch.cat([x, x, x], 1) * 2  # is held
        return torch.ops.dtorch_test.full(x + 1), large

    x = dtorch.zeros(256, 1024, device_mesh=PAIR, placements=[Shard(0)])
    lost, kept = compute(x)
    with pytest.raises(WorkerError, match=r"OutOfMemoryError on cpu:.* 1\.00 TiB") as caught:
        lost.to_torch()
    lines = str(caught.value).splitlines()
    assert "dtorch_test.full.default" in lines[1] and "test_memory.py:" in lines[2]
    (reads,) = (line for line in lines if line.startswith("  reads "))
    (gives,) = (line for line in lines if line.startswith("  gives "))
    assert "float32[256, 1024] x=" in reads and "float32[256, 1024] x=" in gives
    held = next(i for i, line in enumerate(lines) if line.startswith("  held there"))
    assert "aten.mul.Tensor" in lines[held + 1] and "test_memory.py:" in lines[held + 1]
    assert ": float32[256, 3072] x=S(0)  " in lines[held + 1]
    assert kept.sum().item() == 0 and set(dtorch.health(PAIR).values()) == {"ok"}
