"""Layouts: which ones are tried, and tensors made in them without dtorch's redistribution.

A layout gives every tensor of a call its placements on one mesh. The drawn ones go in turn
through those that matter: all tensors sharded alike on one dim, only the largest one sharded, the
largest one partial, and anything. A partial value is made of parts whose reduction is exactly the
value, in every order: a sum has ``2 v`` on one device, ``-v`` on another and nothing elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...errors import PlacementError
from ...mesh import DeviceMesh
from ...parts import dense_stride
from ...placement import Partial, Placement, Placements, Replicate, Shard, normalized
from ...runtime import Shards
from ...spec import Spec, chunk, format_layout
from ...tensor import Tensor

MESHES = {
    "1": DeviceMesh("cpu", [0]),
    "2": DeviceMesh("cpu", [0, 1]),
    "3": DeviceMesh("cpu", [0, 1, 2]),
    "4": DeviceMesh("cpu", [0, 1, 2, 3]),
    "2x2": DeviceMesh("cpu", [[0, 1], [2, 3]]),
}


class Layout(NamedTuple):
    """A mesh and the placements of each tensor on it."""

    mesh: DeviceMesh
    placements: tuple[Placements, ...]

    def __str__(self) -> str:
        size = "x".join(map(str, self.mesh.shape))
        return f"{size}: {' '.join(format_layout(self.mesh, p) for p in self.placements)}"

    def spread(self, tensors: Sequence[torch.Tensor]) -> list[Tensor]:
        """Returns torch tensors in this layout."""
        pairs = zip(tensors, self.placements, strict=True)
        return [spread(t, self.mesh, p) for t, p in pairs]


def whole(mesh: DeviceMesh, count: int) -> Layout:
    """Returns the layout in which `count` tensors are replicated."""
    return Layout(mesh, ((Replicate(),) * mesh.ndim,) * count)


def splits_inner_dim(layout: Layout, tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether a tensor is really split on a dim other than 0."""
    return any(
        isinstance(p, Shard) and p.dim > 0 and n > 1 and t.shape[p.dim] > 1
        for t, placements in zip(tensors, layout.placements, strict=True)
        for p, n in zip(placements, layout.mesh.shape, strict=True)
    )


# -- drawing -------------------------------------------------------------------------------


def draw(
    tensors: Sequence[torch.Tensor], mesh: DeviceMesh, count: int, drawn: random.Random
) -> list[Layout]:
    """Returns up to `count` different layouts of some tensors.

    Args:
        tensors: The tensors.
        mesh: The mesh.
        count: How many to draw.
        drawn: What decides.
    """
    found: dict[Layout, None] = {}
    kinds = (_alike, _single, _partial, _anything)
    first = drawn.randrange(len(kinds))
    for number in range(first, first + count if tensors else first):
        chosen = [kinds[number % len(kinds)], *drawn.choices(kinds, k=mesh.ndim - 1)]
        axes = [kind(tensors, n, drawn) for kind, n in zip(chosen, mesh.shape, strict=True)]
        drawn.shuffle(axes)
        placements = tuple(zip(*axes, strict=True))
        if all(_is_allowed(p, t, mesh) for p, t in zip(placements, tensors, strict=True)):
            found[Layout(mesh, placements)] = None
    return list(found)


def _is_allowed(placements: Placements, tensor: torch.Tensor, mesh: DeviceMesh) -> bool:
    try:
        normalized(placements, mesh, tensor.ndim)
    except PlacementError:
        return False
    return True


def _largest(tensors: Sequence[torch.Tensor]) -> int:
    return max(range(len(tensors)), key=lambda i: tensors[i].numel())


def _alike(tensors: Sequence[torch.Tensor], n: int, drawn: random.Random) -> list[Placement]:
    """All sharded on one dim, counted from the right; a broadcast one is replicated there."""
    model = tensors[_largest(tensors)]
    if not model.ndim:
        return [Replicate()] * len(tensors)
    dim = drawn.randrange(1, model.ndim) if model.ndim > 1 else 0
    back, size = model.ndim - dim, model.shape[dim]
    return [
        Shard(t.ndim - back) if t.ndim >= back and t.shape[-back] == size else Replicate()
        for t in tensors
    ]


def _single(tensors: Sequence[torch.Tensor], n: int, drawn: random.Random) -> list[Placement]:
    """Only the largest sharded."""
    placements: list[Placement] = [Replicate()] * len(tensors)
    which = _largest(tensors)
    if tensors[which].ndim:
        placements[which] = Shard(drawn.randrange(tensors[which].ndim))
    return placements


def _partial(tensors: Sequence[torch.Tensor], n: int, drawn: random.Random) -> list[Placement]:
    """Only the largest partial."""
    placements: list[Placement] = [Replicate()] * len(tensors)
    which = _largest(tensors)
    placements[which] = drawn.choice(_partials(tensors[which].dtype, n))
    return placements


def _anything(tensors: Sequence[torch.Tensor], n: int, drawn: random.Random) -> list[Placement]:
    return [
        drawn.choice([Replicate(), *_partials(t.dtype, n), *map(Shard, range(t.ndim))])
        for t in tensors
    ]


def _partials(dtype: torch.dtype, n: int) -> list[Placement]:
    """The partial placements of a dtype whose parts can be exact."""
    if dtype == torch.bool:
        ops = ["max", "min"]
    elif dtype.is_complex:
        ops = ["sum"]
    else:
        ops = ["sum", "max", "min"]
    is_power_of_two = n & (n - 1) == 0
    if is_power_of_two and (dtype.is_floating_point or dtype.is_complex):
        ops.append("avg")
    return [Partial(op) for op in ops]


# -- making --------------------------------------------------------------------------------


def spread(value: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    """Returns a tensor in a layout, made of shards that this module cuts and adds up itself.

    Args:
        value: The global value.
        mesh: The mesh.
        placements: One placement per axis.
    """
    value = value.detach().resolve_conj().resolve_neg()
    spec = Spec.of(value.shape, value.dtype, mesh, placements, dense_stride(value))
    parts = _parts(value, mesh, placements, 0, may_double=True)
    return Tensor._of(spec, Shards([p.clone() for p in parts]))


def _parts(
    value: torch.Tensor, mesh: DeviceMesh, placements: Placements, axis: int, may_double: bool
) -> list[torch.Tensor]:
    if axis == mesh.ndim:
        return [value]
    now = placements[axis]
    pieces = _pieces(value, now, mesh.shape[axis], may_double)
    may_double = may_double and not now.is_partial("sum")
    return [p for piece in pieces for p in _parts(piece, mesh, placements, axis + 1, may_double)]


def _pieces(
    value: torch.Tensor, placement: Placement, count: int, may_double: bool
) -> list[torch.Tensor]:
    if isinstance(placement, Shard):
        ranges = [chunk((0, value.shape[placement.dim]), count, i) for i in range(count)]
        return [value.narrow(placement.dim, start, stop - start) for start, stop in ranges]
    if isinstance(placement, Partial) and count > 1:
        if value.is_complex():
            real = torch.view_as_real(value)
            parts = _addends(real, placement.op, count, may_double)
            return [torch.view_as_complex(p.contiguous()) for p in parts]
        return _addends(value, placement.op, count, may_double)
    return [value] * count


def _addends(value: torch.Tensor, op: str, count: int, may_double: bool) -> list[torch.Tensor]:
    """Different values whose reduction is exactly `value`; which device holds what alternates.

    A sum over a second axis is not doubled again: of three and more parts, not every order of
    adding them would be exact.
    """
    owner = torch.arange(value.numel()).remainder(count).view(value.shape)
    if op in ("max", "min"):
        worse = _worse(value, op)
        return [torch.where(owner == i, value, worse) for i in range(count)]
    if op == "avg" or not may_double:
        held = value * count if op == "avg" else value
        return [torch.where(owner == i, held, _nothing(value)) for i in range(count)]
    twice, rest = value * 2, -value
    if value.is_floating_point():
        apart = twice.isfinite()
        twice = torch.where(apart, twice, value)
        rest = torch.where(apart, rest, _nothing(value))
    other = (owner + 1).remainder(count)
    none = _nothing(value)
    return [
        torch.where(owner == i, twice, torch.where(other == i, rest, none)) for i in range(count)
    ]


def _nothing(value: torch.Tensor) -> torch.Tensor:
    """What adds nothing, not even to a negative zero."""
    return torch.full_like(value, -0.0 if value.is_floating_point() else 0)


def _worse(value: torch.Tensor, op: str) -> torch.Tensor:
    """Values that lose against `value` in a maximum or minimum."""
    if value.dtype == torch.bool:
        return torch.full_like(value, op == "min")
    if not value.is_floating_point():
        info = torch.iinfo(value.dtype)
        return torch.full_like(value, info.min if op == "max" else info.max)
    return value - 3 if op == "max" else value + 3
