"""In-process collectives: devices show each other their parts and read what they need.

Takes one step of a redistribution and the parts that the devices of a group posted; gives the
part of one device. A posted tensor is never written to again, so a peer may read it at any
later time; it is freed when its last reader drops it. Reductions add in the order of the
group, on every device alike, so replicas agree bit for bit.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..placement import Shard
from ..redistribution import Collective, Step, group_of, pieces
from ..spec import Box, chunk
from .future import Failure

TWO_PHASE_BYTES = 1 << 16
"""From this size on an all-reduce reduces one piece a device and gathers the pieces."""

Gather = Callable[[Any], "list[Any] | Failure"]
"""Posts a part for the next round and returns the parts of the group, in its order."""


class Exchange:
    """One meeting of a group of devices: each posts a part, each may wait for all of them."""

    __slots__ = ("_complete", "_lock", "_missing", "parts")

    def __init__(self, size: int) -> None:
        self.parts: list[Any] = [None] * size
        self._missing = size
        self._lock = threading.Lock()
        self._complete = threading.Event()

    def post(self, member: int, part: Any) -> None:
        """Shows a part to the group; the caller must not write to it again."""
        self.parts[member] = part
        with self._lock:
            self._missing -= 1
            complete = self._missing == 0
        if complete:
            self._complete.set()

    def wait(self, stopping: threading.Event) -> bool:
        """Waits until all parts are there; returns False if the workers are being stopped."""
        while not self._complete.wait(0.2):
            if stopping.is_set():
                return False
        return True


@functools.lru_cache(maxsize=4096)
def senders_and_groups(step: Step) -> tuple[tuple[int, ...], ...]:
    """Returns, for each device of the source mesh, the devices that it meets in a step."""
    if step.kind is Collective.TRANSFER:
        everyone = tuple(range(len(step.source.mesh.devices)))
        return (everyone,) * len(everyone)
    return group_of(step.source.mesh, step.axes)


def num_rounds(step: Step, index: int) -> int:
    """Returns how often a device meets its group in a step: the same for the whole group."""
    count = math.prod(step.source.mesh.shape[a] for a in step.axes)
    num_bytes = math.prod(step.source.local_shapes[index]) * step.source.dtype.itemsize
    large = count > 2 and num_bytes >= TWO_PHASE_BYTES
    return 2 if step.kind is Collective.ALL_REDUCE and large else 1


def run_local(step: Step, index: int, part: torch.Tensor) -> torch.Tensor:
    """Returns a device's part after a step that needs only its own part before.

    Args:
        step: A slice, a relabelling, or the change to partial.
        index: The device's place in the mesh.
        part: Its part before the step.
    """
    if step.kind is Collective.SLICE:
        # A copy, so that a small shard does not keep the whole alive.
        return _cut(part, step.source.boxes[index], step.target.boxes[index]).clone()
    if step.kind is Collective.TO_PARTIAL:
        (axis,) = step.axes
        if step.source.placements[axis].is_shard():
            return _amid_zeros(part, step.source.boxes[index], step.target.boxes[index])
        first = step.source.mesh.coordinates()[index][axis] == 0
        keep = first or not step.target.placements[axis].is_partial("sum")
        return part if keep else nothing(part.shape, part.dtype, part.device)
    return part


def nothing(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns what adds nothing to a sum: negative zeros, where there are any."""
    zero = -0.0 if dtype.is_floating_point else complex(-0.0, -0.0) if dtype.is_complex else 0
    return torch.full(tuple(shape), zero, dtype=dtype, device=device)


def _amid_zeros(part: torch.Tensor, held: Box, wanted: Box) -> torch.Tensor:
    """A part of the value as an addend of it: zeros elsewhere."""
    result = part.new_zeros([stop - start for start, stop in wanted])
    _cut(result, wanted, held).copy_(part)
    return result


def run_collective(step: Step, index: int, part: torch.Tensor, gather: Gather) -> Any:
    """Returns a device's part after a collective over its group, or a `Failure`.

    Args:
        step: The step; not a local one, and not a transfer.
        index: The device's place in the mesh.
        part: Its part before the step.
        gather: Meets the group.
    """
    if step.kind is Collective.ALL_REDUCE:
        return _all_reduce(step, index, part, gather)
    parts = gather(part)
    if isinstance(parts, Failure):
        return parts
    (axis,) = step.axes
    source, target = step.source.placements[axis], step.target.placements[axis]
    if step.kind is Collective.ALL_GATHER:
        assert isinstance(source, Shard)
        return torch.cat(parts, source.dim)
    assert isinstance(target, Shard)
    members = group_of(step.source.mesh, step.axes)[index]
    wanted = step.target.boxes[index][target.dim]
    cuts = [
        p.narrow(target.dim, wanted[0] - step.source.boxes[m][target.dim][0], wanted[1] - wanted[0])
        for m, p in zip(members, parts, strict=True)
    ]
    if step.kind is Collective.ALL_TO_ALL:
        assert isinstance(source, Shard)
        return torch.cat(cuts, source.dim)
    return reduce_parts(cuts, source.op)  # pyright: ignore[reportAttributeAccessIssue]


def run_transfer(step: Step, index: int, parts: Sequence[Any]) -> Any:
    """Returns the part of the target's `index`-th device, read from the source's parts."""
    wanted = step.target.boxes[index]
    found = pieces(step.source, step.target)[index]
    failed = next((parts[g] for g, _ in found if isinstance(parts[g], Failure)), None)
    if failed is not None:
        return failed
    device = step.target.mesh.torch_device(index)
    if len(found) == 1:
        giver, box = found[0]
        whole = box == step.source.boxes[giver]
        part = _cut(parts[giver], step.source.boxes[giver], box)
        return part.to(device) if whole else part.to(device).clone()
    shape = [stop - start for start, stop in wanted]
    result = torch.empty(shape, dtype=step.target.dtype, device=device)
    for giver, box in found:
        _cut(result, wanted, box).copy_(_cut(parts[giver], step.source.boxes[giver], box))
    return result


def _cut(part: torch.Tensor, held: Box, wanted: Box) -> torch.Tensor:
    """A view of the box `wanted` of a part that is the box `held`, both in global coordinates."""
    for dim, ((start, stop), (offset, end)) in enumerate(zip(wanted, held, strict=True)):
        if (start, stop) != (offset, end):
            part = part.narrow(dim, start - offset, stop - start)
    return part


def _all_reduce(step: Step, index: int, part: torch.Tensor, gather: Gather) -> Any:
    op = step.source.placements[step.axes[0]].op  # pyright: ignore[reportAttributeAccessIssue]
    if num_rounds(step, index) == 1:
        parts = gather(part)
        return parts if isinstance(parts, Failure) else reduce_parts(parts, op)
    return _two_phase(part, op, group_of(step.source.mesh, step.axes)[index].index(index), gather)


def _two_phase(part: torch.Tensor, op: str, member: int, gather: Gather) -> Any:
    parts = gather(part)
    if isinstance(parts, Failure):
        return parts
    dim = max(range(part.ndim), key=lambda d: part.shape[d])
    start, stop = chunk((0, part.shape[dim]), len(parts), member)
    reduced = gather(reduce_parts([p.narrow(dim, start, stop - start) for p in parts], op))
    return reduced if isinstance(reduced, Failure) else torch.cat(reduced, dim)


def reduce_parts(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduces in the order of the list, into a new tensor."""
    first, *rest = parts
    if not rest:
        return first.clone()
    if op in ("max", "min"):
        combine = torch.maximum if op == "max" else torch.minimum
        return functools.reduce(combine, rest, first)
    if op == "avg":
        return _average(parts)
    total = first + rest[0]
    for part in rest[1:]:
        total += part
    return total


def _average(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The average in the parts' own dtype, added up in one where the sum does not overflow."""
    dtype = parts[0].dtype
    whole = not (dtype.is_floating_point or dtype.is_complex)
    wide = torch.int64 if whole else torch.promote_types(dtype, torch.float32)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return (total // len(parts) if whole else total / len(parts)).to(dtype)
