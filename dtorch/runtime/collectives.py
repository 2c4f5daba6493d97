"""In-process collectives: devices show each other their parts and take the pieces they need.

Takes one step of a redistribution; says for each device whom it meets and, for each round, which
pieces of the parts it takes and how it joins them. The plan is plain data, which the portable and
the native executor run alike. A posted tensor is never written to again, so a peer may read it at
any later time; it is freed when its last reader drops it. Reductions add in the order of the
group, on every device alike, so replicas agree bit for bit. Where the group has a communicator,
its first member launches one collective for all (`communicators`), whose order is NCCL's own.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence

import torch

from ..lowering import LocalProgram, LocalStep
from ..mesh import Device
from ..placement import Partial, Shard
from ..redistribution import Collective, Step, group_of, pieces
from ..spec import Box, chunk
from . import communicators

TWO_PHASE_BYTES = 1 << 16
"""From this size on an all-reduce reduces one piece a device and gathers the pieces."""

Cuts = tuple[tuple[int, int, int], ...]
"""A part of a local tensor: the (dim, start, length) of each dim that is not whole."""


class Join(enum.Enum):
    """What a device makes of the pieces that it takes."""

    SAME = 0  # the one piece itself
    COPY = 1  # a copy of the one piece
    CONCATENATE = 2
    REDUCE = 3
    PLACE = 4  # each piece at its place in a new tensor, the rest filled
    TOGETHER = 5  # a collective of the pieces that the first member launches for the whole group


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the part of a member of the group, and where a new tensor has it."""

    member: int
    cuts: Cuts = ()
    place: Cuts = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One meeting of a group as one device takes part: what it takes, and what it makes of it.

    Attributes:
        pieces: What it takes.
        join: How it joins them.
        dim: The dim of a concatenation, or of a collective that gathers or scatters.
        op: The reduction.
        shape: The shape of the new tensor that pieces are placed in, or a collective writes to.
        fill: What is where no piece is; None for what adds nothing.
        kind: The collective that is launched together.
    """

    pieces: tuple[Piece, ...]
    join: Join
    dim: int = 0
    op: str = ""
    shape: tuple[int, ...] = ()
    fill: float | None = None
    kind: Collective | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Meeting:
    """How one device takes part in a step.

    Attributes:
        group: The devices that show their parts, in the order of the members.
        visitors: The devices that take part, in any way; empty for a step within the device.
        member: The place of this device among those that show a part, or None.
        rounds: What it does; none for a device that only shows its part.
        dtype: The dtype of its result.
        device: Where its result lies.
    """

    group: tuple[Device, ...]
    visitors: tuple[Device, ...]
    member: int | None
    rounds: tuple[Round, ...]
    dtype: torch.dtype
    device: torch.device


@functools.lru_cache(maxsize=8192)
def meeting(step: Step, device: Device) -> Meeting | None:
    """Returns how a device takes part in a step, or None if it does not."""
    if step.kind is Collective.TRANSFER:
        return _transfer(step, device)
    mesh = step.source.mesh
    if device not in mesh.devices:
        return None
    index = mesh.devices.index(device)
    place = mesh.torch_device(index)
    if step.kind.is_local:
        return Meeting((device,), (), 0, (_local(step, index),), step.target.dtype, place)
    members = group_of(mesh, step.axes)[index]
    group = tuple(mesh.devices[m] for m in members)
    if communicators.is_joined(group) and communicators.is_carried(step, members):
        rounds = _together(step, index, members)
    else:
        rounds = _rounds(step, index, members)
    return Meeting(group, group, members.index(index), rounds, step.target.dtype, place)


def _local(step: Step, index: int) -> Round:
    """A slice, a relabelling, or the change to partial: a device needs only its own part."""
    held, wanted = step.source.boxes[index], step.target.boxes[index]
    if step.kind is Collective.SLICE:
        # A copy, so that a small shard does not keep the whole alive.
        return Round((Piece(0, _cuts(held, wanted)),), Join.COPY)
    if step.kind is Collective.TO_PARTIAL:
        (axis,) = step.axes
        if step.source.placements[axis].is_shard():
            piece = Piece(0, (), _cuts(wanted, held))
            return Round((piece,), Join.PLACE, shape=_sizes(wanted))
        first = step.source.mesh.coordinates()[index][axis] == 0
        if not first and step.target.placements[axis].is_partial("sum"):
            return Round((), Join.PLACE, shape=_sizes(wanted))
    return Round((Piece(0),), Join.SAME)


def _together(step: Step, index: int, members: tuple[int, ...]) -> tuple[Round, ...]:
    """A device takes its own part, and one collective of the group makes of all what it needs."""
    own = Round((Piece(members.index(index)),), Join.SAME)
    everyone = tuple(map(Piece, range(len(members))))
    before, after = (s.placements[step.axes[0]] for s in (step.source, step.target))
    op = before.op if isinstance(before, Partial) else ""
    dim = next((p.dim for p in (before, after) if isinstance(p, Shard)), 0)
    shape = step.target.local_shapes[index]
    if step.kind is Collective.ALL_GATHER:
        shape = (len(members), *step.source.local_shapes[index])
    return (own, Round(everyone, Join.TOGETHER, dim, op, shape, kind=step.kind))


def launched_together(program: LocalProgram) -> list[tuple[Device, ...]]:
    """Returns the groups of devices for which a program launches collectives."""
    steps = dict.fromkeys(i.step for i in program.instructions if isinstance(i, LocalStep))
    found = (meeting(step, device) for step in steps for device in program.devices)
    return list(
        dict.fromkeys(
            m.group for m in found if m is not None and any(r.kind is not None for r in m.rounds)
        )
    )


def _rounds(step: Step, index: int, members: tuple[int, ...]) -> tuple[Round, ...]:
    if step.kind is Collective.PERMUTE:
        return (_permuted(step, index, members),)
    source, target = (s.placements[step.axes[0]] for s in (step.source, step.target))
    everyone = range(len(members))
    if step.kind is Collective.ALL_REDUCE:
        assert isinstance(source, Partial)
        return _all_reduce(step.source.local_shapes[index], step, members.index(index), source.op)
    if step.kind is Collective.ALL_GATHER:
        assert isinstance(source, Shard)
        return (Round(tuple(map(Piece, everyone)), Join.CONCATENATE, source.dim),)
    assert isinstance(target, Shard)
    start, stop = step.target.boxes[index][target.dim]
    taken = []
    for place, member in enumerate(members):
        offset, end = step.source.boxes[member][target.dim]
        whole = (start, stop) == (offset, end)
        cuts = () if whole else ((target.dim, start - offset, stop - start),)
        taken.append(Piece(place, cuts))
    if step.kind is Collective.ALL_TO_ALL:
        assert isinstance(source, Shard)
        return (Round(tuple(taken), Join.CONCATENATE, source.dim),)
    assert isinstance(source, Partial)
    return (Round(tuple(taken), Join.REDUCE, op=source.op),)


def _permuted(step: Step, index: int, members: tuple[int, ...]) -> Round:
    """The ranges that make up a device's part, each from whoever holds it."""
    movement, wanted = step.movement, step.target.boxes[index]
    assert movement is not None
    dim = movement.dim
    start, stop = wanted[dim]
    pieces, covered = [], 0
    for place, source, length in movement.sources(start, stop):
        for number, member in enumerate(members):
            held, end = step.source.boxes[member][dim]
            low, high = max(source, held), min(source + length, end)
            if low < high:
                whole = (low, high) == (held, end)
                cuts = () if whole else ((dim, low - held, high - low),)
                at = place + low - source - start
                pieces.append(Piece(number, cuts, ((dim, at, high - low),)))
        covered += length
    shape = _sizes(wanted)
    if covered < stop - start or not pieces:
        return Round(tuple(pieces), Join.PLACE, shape=shape, fill=movement.fill)
    if len(pieces) > 1:
        return Round(tuple(pieces), Join.CONCATENATE, dim)
    return Round(tuple(pieces), Join.COPY if pieces[0].cuts else Join.SAME)


def _all_reduce(shape: tuple[int, ...], step: Step, member: int, op: str) -> tuple[Round, ...]:
    count = math.prod(step.source.mesh.shape[a] for a in step.axes)
    everyone = tuple(map(Piece, range(count)))
    if count <= 2 or math.prod(shape) * step.source.dtype.itemsize < TWO_PHASE_BYTES:
        return (Round(everyone, Join.REDUCE, op=op),)
    dim = max(range(len(shape)), key=lambda d: shape[d])
    start, stop = chunk((0, shape[dim]), count, member)
    mine = tuple(Piece(m, ((dim, start, stop - start),)) for m in range(count))
    return (Round(mine, Join.REDUCE, op=op), Round(everyone, Join.CONCATENATE, dim))


def _transfer(step: Step, device: Device) -> Meeting | None:
    source, target = step.source.mesh, step.target.mesh
    sends, receives = device in source.devices, device in target.devices
    if not sends and not receives:
        return None
    rounds, place = (), torch.device("cpu")
    if receives:
        index = target.devices.index(device)
        rounds, place = (_received(step, index),), target.torch_device(index)
    return Meeting(
        group=source.devices,
        visitors=tuple(dict.fromkeys((*source.devices, *target.devices))),
        member=source.devices.index(device) if sends else None,
        rounds=rounds,
        dtype=step.target.dtype,
        device=place,
    )


def _received(step: Step, index: int) -> Round:
    wanted = step.target.boxes[index]
    found = pieces(step.source, step.target)[index]
    if len(found) == 1:
        giver, box = found[0]
        cuts = _cuts(step.source.boxes[giver], box)
        return Round((Piece(giver, cuts),), Join.COPY if cuts else Join.SAME)
    taken = tuple(
        Piece(giver, _cuts(step.source.boxes[giver], box), _cuts(wanted, box))
        for giver, box in found
    )
    return Round(taken, Join.PLACE, shape=_sizes(wanted))


def _cuts(held: Box, wanted: Box) -> Cuts:
    """The box `wanted` of a part that is the box `held`, both in global coordinates."""
    return tuple(
        (dim, start - offset, stop - start)
        for dim, ((start, stop), (offset, end)) in enumerate(zip(wanted, held, strict=True))
        if (start, stop) != (offset, end)
    )


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


# -- running them --------------------------------------------------------------------------


def join(round: Round, meeting: Meeting, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns what a device makes of a round, given the parts of the group, wherever they are.

    What comes from an accelerator to the host arrives once the streams of this thread are done.
    """
    taken = [_cut(parts[p.member], p.cuts) for p in round.pieces]
    if round.join is Join.SAME:
        return _brought(taken[0], meeting.device)
    if round.join is Join.COPY:
        moved = _brought(taken[0], meeting.device)
        return moved.clone() if moved is taken[0] else moved
    if round.join is Join.CONCATENATE:
        return torch.cat([part.to(meeting.device) for part in taken], round.dim)
    if round.join is Join.REDUCE:
        return reduce_parts([part.to(meeting.device) for part in taken], round.op)
    arrives = meeting.device.type == "cpu" and any(not part.is_cpu for part in taken)
    if round.fill is None:
        result = nothing(round.shape, meeting.dtype, meeting.device, pin_memory=arrives)
    else:
        place = {"device": meeting.device, "pin_memory": arrives}
        result = torch.full(round.shape, round.fill, dtype=meeting.dtype, **place)
    for piece, part in zip(round.pieces, taken, strict=True):
        target = _cut(result, piece.place)
        # Into other memory torch copies by way of a buffer that is not pinned.
        target.copy_(part, non_blocking=arrives and target.is_contiguous())
    return result


def _brought(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A part on a device; onto the host in pinned memory, which the part's own device fills later.

    The allocator of pinned memory gives it to nobody else before that.
    """
    if device.type != "cpu" or part.is_cpu:
        return part.to(device)
    staged = torch.empty_like(part, device=device, pin_memory=True)
    part = part if part.stride() == staged.stride() else part.clone()
    return staged.copy_(part, non_blocking=True)


def prepared(
    round: Round, meeting: Meeting, part: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what a device gives to a collective that is launched together, and what it fills."""
    if round.kind is Collective.REDUCE_SCATTER:
        part = part.unflatten(round.dim, (len(meeting.group), -1)).movedim(round.dim, 0)
    filled = torch.empty(round.shape, dtype=meeting.dtype, device=meeting.device)
    return part.contiguous(), filled


def completed(round: Round, filled: torch.Tensor) -> torch.Tensor:
    """Returns what a device has of a collective that has been launched together."""
    if round.kind is Collective.ALL_GATHER:
        return filled.movedim(0, round.dim).flatten(round.dim, round.dim + 1)
    return filled


def _cut(part: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    for dim, start, length in cuts:
        part = part.narrow(dim, start, length)
    return part


def nothing(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool = False
) -> torch.Tensor:
    """Returns what adds nothing to a sum: negative zeros, where there are any."""
    zero = -0.0 if dtype.is_floating_point else complex(-0.0, -0.0) if dtype.is_complex else 0
    return torch.full(tuple(shape), zero, dtype=dtype, device=device, pin_memory=pin_memory)


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
