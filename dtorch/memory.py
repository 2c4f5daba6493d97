"""How much memory tensors take, device by device, and giving back what is kept."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import torch

from .mesh import Device, DeviceMesh
from .runtime import empty_host_cache, streams, used_devices
from .tensor import Tensor

__all__ = ["DeviceMemory", "empty_cache", "memory_stats"]


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device, in bytes.

    What an allocator counts is None on the CPU, whose memory all devices share, and the same for
    all virtual devices of one accelerator.

    Attributes:
        held: What the parts of the tensors take that the caller has; memory that several share
            counts once.
        allocated: What the accelerator's allocator has given out.
        reserved: What the allocator has from the driver.
        peak: The largest that `allocated` was.
        total: The device's memory.
    """

    held: int
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    total: int | None = None


def memory_stats(mesh: DeviceMesh) -> dict[Device, DeviceMemory]:
    """Returns how much memory is in use on each device of a mesh.

    Args:
        mesh: The mesh.

    Example:
        >>> import dtorch
        >>> mesh = DeviceMesh("cpu", [501, 502])
        >>> x = dtorch.zeros(3, device_mesh=mesh, placements=[dtorch.Shard(0)])
        >>> {str(device): memory.held for device, memory in memory_stats(mesh).items()}
        {'cpu:501': 8, 'cpu:502': 4}
    """
    held: dict[Device, dict[Any, int]] = {device: {} for device in mesh.devices}
    for tensor in [o for o in gc.get_objects() if type(o) is Tensor]:
        for index, device in enumerate(tensor._spec.mesh.devices):
            if device in held:
                key, size = _memory(tensor, index)
                held[device][key] = size
    return {
        device: DeviceMemory(sum(held[device].values()), **_allocator(mesh.torch_device(index)))
        for index, device in enumerate(mesh.devices)
    }


def _memory(tensor: Tensor, index: int) -> tuple[Any, int]:
    """The memory of a part, and its size; that of one that is being computed is its own."""
    spec, shards = tensor._spec, tensor._shards
    if not shards.is_ready((index,)):
        size = torch.Size(spec.local_shapes[index]).numel() * spec.dtype.itemsize
        return (id(shards), index), size
    part = shards.get(index)
    if not isinstance(part, torch.Tensor):
        return None, 0
    storage = part.untyped_storage()
    return storage._cdata, storage.nbytes()


def _allocator(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {}
    module: Any = torch.get_device_module(device)
    return {
        "allocated": module.memory_allocated(device),
        "reserved": module.memory_reserved(device),
        "peak": module.max_memory_allocated(device),
        "total": module.mem_get_info(device)[1],
    }


def empty_cache() -> None:
    """Gives back the memory that is kept for the next results and that no tensor uses.

    That is what dtorch keeps on the host, and what PyTorch keeps on accelerators of the types that
    have been used.

    Source: `torch.cuda.empty_cache`.
    """
    empty_host_cache()
    streams.empty_caches(device.type for device in used_devices())
