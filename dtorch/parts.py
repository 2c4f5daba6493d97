"""From a torch tensor to the parts that devices hold, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .placement import Partial, Shard
from .runtime import Borrowed, Failure, Shards, faults, host_cache
from .runtime.collectives import nothing, reduce_parts
from .spec import Box, Spec


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides that a copy of a tensor has."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def place_parts(source: torch.Tensor, spec: Spec, copy: bool) -> Shards:
    """Returns the shards of a torch tensor."""

    def part(box: Box, device: torch.device) -> torch.Tensor | Borrowed:
        cut = source.detach()
        for dim, (start, stop) in enumerate(box):
            if (start, stop) != (0, source.shape[dim]):
                cut = cut.narrow(dim, start, stop - start)
        if cut.device != device:
            return cut.to(device)
        # A tensor of inference mode has no version, so that a write to it would not be seen.
        return cut.clone() if copy or cut.is_inference() else Borrowed(cut, source)

    return placed_parts(spec, part)


def placed_parts(
    spec: Spec, part: Callable[[Box, torch.device], torch.Tensor | Borrowed]
) -> Shards:
    """Returns shards made part by part; devices that share memory share an equal part.

    Where the driver of an accelerator has failed, nothing is made: the part is a failure.
    """
    made: dict[Any, torch.Tensor | Borrowed] = {}
    parts: list[torch.Tensor | Borrowed | Failure] = []
    for index, (box, place) in enumerate(zip(spec.boxes, spec.mesh.coordinates(), strict=True)):
        if (lost := faults.untrusted(spec.mesh.devices[index])) is not None:
            parts.append(lost)
            continue
        device = spec.mesh.torch_device(index)
        zero = _adds_nothing(spec, place)
        key = (box, device, zero)
        if key not in made:
            made[key] = _zeros(spec, box, device) if zero else part(box, device)
        parts.append(made[key])
    return Shards(parts)


def _zeros(spec: Spec, box: Box, device: torch.device) -> torch.Tensor:
    return nothing([stop - start for start, stop in box], spec.dtype, device)


def _adds_nothing(spec: Spec, coordinate: tuple[int, ...]) -> bool:
    """Whether a device holds zeros, because another holds the value of a partial sum."""
    return any(p.is_partial("sum") and c for p, c in zip(spec.placements, coordinate, strict=True))


@functools.lru_cache(maxsize=4096)
def indices_to_fetch(spec: Spec) -> tuple[int, ...]:
    """The devices whose parts make up the global value: one of each set of replicas."""
    return tuple(
        i
        for i, coordinate in enumerate(spec.mesh.coordinates())
        if not any(c and p.is_replicate() for c, p in zip(coordinate, spec.placements, strict=True))
    )


def assembled(spec: Spec, indices: Sequence[int], parts: list[torch.Tensor]) -> torch.Tensor:
    """Returns the global value, as a new tensor, from the parts of the devices `indices`."""
    by_coordinate = {
        spec.mesh.coordinates()[i]: p.detach() for i, p in zip(indices, parts, strict=True)
    }
    with torch.inference_mode(False), host_cache():
        value = _joined(spec, by_coordinate, ())
        return value.clone() if any(value is p for p in by_coordinate.values()) else value


def _joined(
    spec: Spec, parts: Mapping[tuple[int, ...], torch.Tensor], prefix: tuple[int, ...]
) -> torch.Tensor:
    axis = len(prefix)
    if axis == spec.mesh.ndim:
        return parts[prefix]
    placement = spec.placements[axis]
    if placement.is_replicate():
        return _joined(spec, parts, (*prefix, 0))
    along = [_joined(spec, parts, (*prefix, c)) for c in range(spec.mesh.shape[axis])]
    device = spec.mesh.torch_device()
    along = [p.to(device) for p in along]
    if isinstance(placement, Shard):
        return torch.cat([p.resolve_conj().resolve_neg() for p in along], placement.dim)
    assert isinstance(placement, Partial)
    return reduce_parts(along, placement.op)
