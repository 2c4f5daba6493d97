"""Redistribution: from one layout of a tensor to another, as the cheapest list of collectives.

Takes two specs of one tensor and gives steps. A step changes the placements of one mesh axis
(or reduces over several at once), or moves boxes between arbitrary layouts (`TRANSFER`, which
also crosses meshes). The cost of a step is the number of bytes that the busiest device
receives; `plan` finds the cheapest sequence by Dijkstra's algorithm over placements, preferring
fewer steps that communicate, and collectives with a name over transfers, where the bytes are equal.

An axis can be gathered, scattered or exchanged only while it is the innermost of the axes that
split its dim: splitting follows mesh-axis order, so an outer axis' shards are not contiguous
pieces of the global dim until the inner ones are whole. In the same way a partial axis is reduced
only after the later ones whose reduction does not commute with it (the maximum of sums is not the
sum of maxima): the value is the reduction over the last axis first.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import heapq
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from .mesh import DeviceMesh
from .placement import Partial, Placement, Placements, Replicate, Shard
from .spec import Box, Spec, format_layout


class Collective(enum.Enum):
    """What a redistribution step does on the devices."""

    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SLICE = "slice"
    TO_PARTIAL = "to_partial"
    TRANSFER = "transfer"
    RELABEL = "relabel"
    PERMUTE = "permute"

    @property
    def is_local(self) -> bool:
        """Whether a device needs only its own part."""
        return self in (Collective.SLICE, Collective.TO_PARTIAL, Collective.RELABEL)


class Segment(NamedTuple):
    """A range of a dim that moves: where it begins after and before, and its length."""

    target: int
    source: int
    length: int


class Movement(NamedTuple):
    """What `PERMUTE` does along a dim that is split.

    Attributes:
        dim: The dim.
        segments: What of the result comes from where, by where it is in the result. Their places
            in the source may overlap.
        fill: What the result has where no segment is; None for what adds nothing to a sum.
    """

    dim: int
    segments: tuple[Segment, ...]
    fill: float | None = None

    def sources(self, start: int, stop: int) -> list[Segment]:
        """Returns what a range of the result is made of."""
        found = []
        for segment in self.segments:
            low = max(start, segment.target)
            high = min(stop, segment.target + segment.length)
            if low < high:
                found.append(Segment(low, segment.source + low - segment.target, high - low))
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step of a redistribution: a collective over mesh axes, between two specs.

    Attributes:
        kind: The collective.
        axes: The mesh axes that take part; empty for `TRANSFER` and `RELABEL`.
        source: The spec before.
        target: The spec after.
        num_bytes: The bytes that the busiest device receives.
        movement: For `PERMUTE`, the one step that changes the value, what moves where.
    """

    kind: Collective
    axes: tuple[int, ...]
    source: Spec
    target: Spec
    num_bytes: int
    movement: Movement | None = None

    def __repr__(self) -> str:
        before = format_layout(self.source.mesh, self.source.placements)
        after = format_layout(self.target.mesh, self.target.placements)
        return f"{self.kind.value}: {before} -> {after} ({self.num_bytes} bytes)"


@functools.lru_cache(maxsize=4096)
def plan(source: Spec, target: Spec) -> tuple[Step, ...]:
    """Returns the cheapest steps from one layout of a tensor to another.

    Args:
        source: The tensor as it is.
        target: The same tensor in the wanted layout, on the same mesh or any other.
    """
    if source is target:
        return ()
    if source.mesh == target.mesh and source.mesh.stage == target.mesh.stage:
        return _search(source, target)
    if source.mesh == target.mesh:
        moved = source.with_layout(target.mesh, source.placements)
        return (_step(Collective.RELABEL, (), source, moved, 0), *plan(moved, target))
    return _across_meshes(source, target)


def cost(source: Spec, target: Spec) -> int:
    """Returns the bytes that the busiest device receives in `plan`'s steps."""
    return sum(step.num_bytes for step in plan(source, target))


def permute(source: Spec, movement: Movement, target: Spec) -> Step:
    """Returns the step that moves ranges of a split dim, each device taking what it is to hold.

    Args:
        source: The tensor as it is, with plain memory.
        movement: What moves where.
        target: The tensor as it will be, with the same placements.
    """
    dim, segments = movement.dim, movement.segments
    axes = tuple(a for a, p in enumerate(source.placements) if p.is_shard(dim))
    missing = []
    for held, wanted in zip(source.boxes, target.boxes, strict=True):
        taken = movement.sources(*wanted[dim])
        own = sum(_overlap(s.source, s.length, held[dim]) for s in taken)
        others = math.prod(b - a for d, (a, b) in enumerate(wanted) if d != dim)
        missing.append((sum(s.length for s in taken) - own) * others * source.dtype.itemsize)
    boxes = zip(source.boxes, target.boxes, strict=True)
    inside = all(h[dim][0] <= w[dim][0] and w[dim][1] <= h[dim][1] for h, w in boxes)
    if inside and segments == (Segment(0, 0, target.shape[dim]),):
        return Step(Collective.SLICE, axes, source, target, 0)
    return Step(Collective.PERMUTE, axes, source, target, max(missing), movement)


def _overlap(start: int, length: int, held: tuple[int, int]) -> int:
    return max(min(start + length, held[1]) - max(start, held[0]), 0)


def _across_meshes(source: Spec, target: Spec) -> tuple[Step, ...]:
    arrival = target.with_placements(_without_partial(target.placements, Replicate()))
    choices = [[p] if not p.is_partial() else _reduced(source, a) for a, p in _axes(source)]
    routes: list[tuple[int, int, tuple[Step, ...]]] = []
    for number, departure in enumerate(itertools.product(*choices)):
        start = source.with_placements(tuple(departure))
        move = _transfer(start, arrival)
        steps = (*plan(source, start), move, *plan(arrival, target))
        routes.append((sum(s.num_bytes for s in steps), number, steps))
    return min(routes)[2]


def _axes(spec: Spec) -> Iterator[tuple[int, Placement]]:
    return iter(enumerate(spec.placements))


def _reduced(source: Spec, axis: int) -> list[Placement]:
    """The layouts that a partial axis may take before its value leaves the mesh."""
    later = source.placements[axis + 1 :]
    dims = (d for d in range(source.ndim) if not any(p.is_shard(d) for p in later))
    return [Replicate(), *(Shard(d) for d in dims)]


def _without_partial(placements: Placements, instead: Placement) -> Placements:
    return tuple(instead if p.is_partial() else p for p in placements)


def _search(source: Spec, target: Spec) -> tuple[Step, ...]:
    """Dijkstra over placements, by (bytes, communicating steps, transfers, order of discovery)."""
    order = itertools.count()
    queue: list[tuple[int, int, int, int, Spec, tuple[Step, ...]]] = [
        (0, 0, 0, next(order), source, ())
    ]
    settled: set[Spec] = set()
    while queue:
        spent, taken, transfers, _, spec, steps = heapq.heappop(queue)
        if spec is target:
            return steps
        if spec in settled:
            continue
        settled.add(spec)
        for step in _edges(spec, target):
            if step.target not in settled:
                transfer = transfers + (step.kind is Collective.TRANSFER)
                total = spent + step.num_bytes
                rounds = taken + (not step.kind.is_local)
                entry = (total, rounds, transfer, next(order), step.target, (*steps, step))
                heapq.heappush(queue, entry)
    raise AssertionError(f"no redistribution from {source!r} to {target!r}")


def _edges(spec: Spec, target: Spec) -> Iterator[Step]:
    """The steps worth taking from here: towards the target's placements, or to Replicate."""
    for axis, (now, wanted) in enumerate(zip(spec.placements, target.placements, strict=True)):
        for after in {wanted, Replicate()} if now != wanted else {Replicate()}:
            if after != now:
                step = _change(spec, axis, after)
                if step is not None:
                    yield step
    reducible = [
        a
        for a in spec.partial_axes
        if target.placements[a].is_replicate() and spec.mesh.shape[a] > 1
    ]
    alike = len({spec.placements[a] for a in reducible}) == 1
    if len(reducible) > 1 and alike and _is_reducible(spec, tuple(reducible)):
        yield _all_reduce(spec, tuple(reducible))
    if not spec.partial_axes:
        whole = _without_partial(target.placements, Replicate())
        yield _transfer(spec, spec.with_placements(whole))


def _change(spec: Spec, axis: int, after: Placement) -> Step | None:
    """The step that changes one axis' placement, or None where it cannot be taken alone."""
    now = spec.placements[axis]
    changed = (*spec.placements[:axis], after, *spec.placements[axis + 1 :])
    target = spec.with_placements(changed)
    n = spec.mesh.shape[axis]
    if n == 1:
        return _step(Collective.RELABEL, (), spec, target, 0)
    if isinstance(now, Shard) and not _is_innermost(spec, axis, now.dim):
        return None
    if isinstance(after, Shard) and not _is_innermost(spec, axis, after.dim):
        return None
    if isinstance(now, Partial) and not _is_reducible(spec, (axis,)):
        return None
    match now, after:
        case Shard(), Replicate():
            missing = target.num_local_bytes - min(_local_bytes(spec))
            return _step(Collective.ALL_GATHER, (axis,), spec, target, missing)
        case Shard(), Shard():
            return _step(Collective.ALL_TO_ALL, (axis,), spec, target, _missing(spec, target))
        case Replicate(), Shard():
            return _step(Collective.SLICE, (axis,), spec, target, 0)
        case (Replicate(), Partial()) | (Shard(), Partial(op="sum")):
            return _step(Collective.TO_PARTIAL, (axis,), spec, target, 0)
        case Partial(), Replicate():
            return _all_reduce(spec, (axis,))
        case Partial(), Shard():
            num_bytes = target.num_local_bytes * (n - 1)
            return _step(Collective.REDUCE_SCATTER, (axis,), spec, target, num_bytes)
    return None


def _is_innermost(spec: Spec, axis: int, dim: int) -> bool:
    return not any(p.is_shard(dim) for p in spec.placements[axis + 1 :])


def _is_reducible(spec: Spec, axes: tuple[int, ...]) -> bool:
    """Whether axes may be reduced now: later axes come first unless the reductions commute."""
    kinds = {_kind(spec.placements[a]) for a in axes}
    later = (spec.placements[a] for a in spec.partial_axes if a > min(axes) and a not in axes)
    return all(kinds == {_kind(p)} for p in later)


def _kind(placement: Placement) -> str:
    """What a partial placement reduces by, sum and average being one."""
    return "sum" if placement.is_partial("avg") else getattr(placement, "op", "")


def _all_reduce(spec: Spec, axes: tuple[int, ...]) -> Step:
    target = spec.with_placements(
        tuple(Replicate() if a in axes else p for a, p in enumerate(spec.placements))
    )
    n = math.prod(spec.mesh.shape[a] for a in axes)
    num_bytes = 2 * spec.num_local_bytes * (n - 1) // n
    return _step(Collective.ALL_REDUCE, axes, spec, target, num_bytes)


def _transfer(source: Spec, target: Spec) -> Step:
    return _step(Collective.TRANSFER, (), source, target, _missing(source, target))


def _step(
    kind: Collective, axes: tuple[int, ...], source: Spec, target: Spec, num_bytes: int
) -> Step:
    return Step(kind, axes, source, target, num_bytes)


def _local_bytes(spec: Spec) -> list[int]:
    return [math.prod(shape) * spec.dtype.itemsize for shape in spec.local_shapes]


def _missing(source: Spec, target: Spec) -> int:
    """The bytes that the busiest device of the target wants and does not hold already."""
    held = dict(zip(source.mesh.devices, source.boxes, strict=True))
    wants = zip(target.mesh.devices, target.boxes, strict=True)
    return (
        max(
            (box_size(box) - (box_size(intersection(box, held[d])) if d in held else 0))
            for d, box in wants
        )
        * target.dtype.itemsize
    )


def box_size(box: Box) -> int:
    """Returns the number of elements of a box."""
    return math.prod(max(stop - start, 0) for start, stop in box)


def intersection(a: Box, b: Box) -> Box:
    """Returns the box that two boxes share; its ranges may be empty."""
    return tuple(
        (max(s, t), max(min(e, f), max(s, t))) for (s, e), (t, f) in zip(a, b, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def pieces(source: Spec, target: Spec) -> tuple[tuple[tuple[int, Box], ...], ...]:
    """Returns, for each device of the target, which source device gives which box of its part.

    Neither spec may be partial. A device takes what it can from itself, then from the other
    holders in the order of the source mesh; the boxes of one device are disjoint and cover its
    part. Boxes are in global coordinates.
    """
    holders: dict[Box, list[int]] = {}
    for index, box in enumerate(source.boxes):
        holders.setdefault(box, []).append(index)
    place = {device: i for i, device in enumerate(source.mesh.devices)}
    return tuple(
        _pieces_of(box, place.get(device), source, holders, number)
        for number, (device, box) in enumerate(zip(target.mesh.devices, target.boxes, strict=True))
    )


def _pieces_of(
    wanted: Box,
    own: int | None,
    source: Spec,
    holders: dict[Box, list[int]],
    number: int,
) -> tuple[tuple[int, Box], ...]:
    if box_size(wanted) == 0:
        return ()
    if own is not None and intersection(wanted, source.boxes[own]) == wanted:
        return ((own, wanted),)
    found = []
    for box, indices in holders.items():
        shared = intersection(wanted, box)
        if box_size(shared):
            giver = own if own in indices else indices[number % len(indices)]
            found.append((giver, shared))
    return tuple(found)


def group_of(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns, for each device of a mesh, the indices of the devices of its group over `axes`.

    A group holds the devices whose coordinates differ only on `axes`, in row-major order.
    """
    coordinates = mesh.coordinates()
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, c in enumerate(coordinates):
        groups.setdefault(tuple(v for a, v in enumerate(c) if a not in axes), []).append(index)
    members = {i: tuple(g) for g in groups.values() for i in g}
    return tuple(members[i] for i in range(len(coordinates)))
