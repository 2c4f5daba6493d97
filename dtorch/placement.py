"""Placements: what one mesh axis does to a tensor, and `PartitionSpec`, the same by tensor dim.

A layout has one placement per mesh axis. `Shard(d)` splits dim `d` over the axis as
`torch.chunk` would, `Replicate()` gives every device of the axis the same value, and
`Partial(op)` leaves a value that is complete only after a reduction over the axis.
`PartitionSpec` (`P`) says the same by naming, for each tensor dim, the axes that split it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from .errors import PlacementError
from .mesh import DeviceMesh

REDUCTIONS = ("sum", "avg", "max", "min")


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """What one mesh axis does to a tensor: the base of `Shard`, `Replicate` and `Partial`."""

    def is_shard(self, dim: int | None = None) -> bool:
        """Returns whether this splits a dim (that dim, if one is given)."""
        return False

    def is_replicate(self) -> bool:
        """Returns whether every device of the axis holds the same value."""
        return False

    def is_partial(self, op: str | None = None) -> bool:
        """Returns whether the value awaits a reduction (that reduction, if one is given)."""
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class Shard(Placement):
    """Splits tensor dim `dim` over the mesh axis, as `torch.chunk` would (5 over 4: 2, 2, 1, 0).

    A negative dim counts from the end of the tensor that it is given to.
    """

    dim: int

    def is_shard(self, dim: int | None = None) -> bool:
        """Returns whether this splits that dim; True if none is given."""
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})"


@dataclasses.dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Gives every device of the mesh axis the whole value."""

    def is_replicate(self) -> bool:
        """Returns True."""
        return True

    def __repr__(self) -> str:
        return "Replicate()"


@dataclasses.dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Leaves a value whose reduction over the mesh axis by `op` is the global value.

    Args:
        op: ``"sum"``, ``"avg"``, ``"max"`` or ``"min"``.

    Raises:
        PlacementError: `op` is none of these.
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCTIONS:
            raise PlacementError(f"Partial({self.op!r}): op must be one of {REDUCTIONS}.")

    @property
    def reduce_op(self) -> str:
        """The reduction, under the name that PyTorch's `Partial` gives it."""
        return self.op

    def is_partial(self, op: str | None = None) -> bool:
        """Returns whether the value awaits that reduction; True if none is given."""
        return op is None or op == self.op

    def __repr__(self) -> str:
        return f"Partial({self.op})"


Placements = tuple[Placement, ...]


def normalized(placements: Sequence[Placement], mesh: DeviceMesh, ndim: int) -> Placements:
    """Returns placements as a tuple with non-negative dims, checked against mesh and tensor.

    Args:
        placements: One placement per mesh axis.
        mesh: The mesh that they are for.
        ndim: The number of dims of the tensor that they are for.

    Raises:
        PlacementError: The number of placements differs from the number of axes, an element
            is no placement, or a `Shard` names a dim that the tensor lacks.
    """
    placements = counted(placements, mesh)
    try:
        return _normalized(placements, mesh, ndim)
    except TypeError:  # something that is no placement is not hashable; the check names it
        return _normalized.__wrapped__(placements, mesh, ndim)


@functools.lru_cache(maxsize=4096)
def _normalized(placements: Placements, mesh: DeviceMesh, ndim: int) -> Placements:
    checked = tuple(_checked(p, axis, mesh, ndim) for axis, p in enumerate(placements))
    kinds = {"sum" if p.op == "avg" else p.op for p in checked if isinstance(p, Partial)}
    if len(kinds) > 1:
        raise PlacementError(
            f"placements={list(checked)} mix reductions that do not commute, so the value would "
            "depend on their order. Use one of sum/avg, max or min on all partial axes."
        )
    return checked


def counted(placements: Sequence[Placement], mesh: DeviceMesh) -> Placements:
    """Returns placements as a tuple, checked to be one for each mesh axis.

    Raises:
        PlacementError: The number of placements differs from the number of axes.
    """
    if isinstance(placements, Placement):
        placements = (placements,)
    if len(placements) != mesh.ndim:
        raise PlacementError(
            f"placements={list(placements)} has {len(placements)} entries, but {mesh!r} has "
            f"{mesh.ndim} axes. Give one placement per mesh axis."
        )
    return tuple(placements)


def _checked(placement: Placement, axis: int, mesh: DeviceMesh, ndim: int) -> Placement:
    if not isinstance(placement, Placement):
        raise PlacementError(
            f"placements[{axis}] is {placement!r}; "
            "expected dtorch.Shard(dim), dtorch.Replicate() or dtorch.Partial(op)."
        )
    if not isinstance(placement, Shard):
        return placement
    if not -ndim <= placement.dim < ndim:
        raise PlacementError(
            f"{placement!r} on axis {mesh.axis_name(axis)} is out of range for a tensor of "
            f"{ndim} dims. Use a dim from {-ndim} to {ndim - 1}."
            if ndim
            else f"{placement!r} on axis {mesh.axis_name(axis)}: a tensor without dims cannot "
            "be sharded. Use Replicate()."
        )
    return placement if placement.dim >= 0 else Shard(placement.dim + ndim)


def complete(placements: Sequence[Placement]) -> Placements:
    """Returns placements with `Replicate` in place of `Partial`: the layout of a gradient."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


class PartitionSpec(tuple):
    """For each tensor dim, the mesh axes that split it: ``P("dp", None, ("tp", "cp"))``.

    Each entry is an axis name, a tuple of names (major first), or None for a dim that no axis
    splits; dims beyond the last entry are whole, axes that no entry names replicate.

    Source: `jax.sharding.PartitionSpec`.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> P(None, "tp").to_placements(mesh)
        (Replicate(), Shard(dim=1))
    """

    __slots__ = ()

    def __new__(cls, *entries: str | Sequence[str] | None) -> PartitionSpec:
        """Returns the partition spec of these entries, one per tensor dim."""
        return tuple.__new__(cls, (_entry(e) for e in entries))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def axes(self) -> tuple[str, ...]:
        """Returns every axis name, in the order of the dims."""
        return tuple(name for entry in self for name in _names(entry))

    def to_placements(self, mesh: DeviceMesh, *, ignore_missing: bool = False) -> Placements:
        """Returns the same layout as one placement per axis of `mesh`.

        Args:
            mesh: A mesh with named axes.
            ignore_missing: Skip axis names that the mesh lacks, instead of raising.

        Raises:
            PlacementError: The mesh lacks a name (unless `ignore_missing`), an axis splits two
                dims, or the axes of one dim are not in the mesh's order (in which placements
                split).
        """
        names = mesh.mesh_dim_names or ()
        placements: list[Placement] = [Replicate()] * mesh.ndim
        for dim, entry in enumerate(self):
            present = [n for n in _names(entry) if n in names]
            missing = [n for n in _names(entry) if n not in names]
            if missing and not ignore_missing:
                raise PlacementError(
                    f"{self!r} names the axis {missing[0]!r}, which {mesh!r} lacks."
                )
            order = [names.index(n) for n in present]
            if order != sorted(order):
                raise PlacementError(
                    f"{self!r} splits dim {dim} by {tuple(present)}, but placements split in "
                    f"mesh-axis order {tuple(n for n in names if n in present)}. "
                    "Reorder the entry, or the mesh's axes."
                )
            for axis in order:
                if placements[axis].is_shard():
                    raise PlacementError(f"{self!r} uses the axis {names[axis]!r} twice.")
                placements[axis] = Shard(dim)
        return tuple(placements)

    @classmethod
    def from_placements(cls, placements: Sequence[Placement], mesh: DeviceMesh) -> PartitionSpec:
        """Returns the partition spec of placements on a mesh with named axes.

        Raises:
            PlacementError: The mesh has no axis names, or a placement is `Partial`, which a
                partition spec cannot say.
        """
        if mesh.mesh_dim_names is None:
            raise PlacementError(f"{mesh!r} has no axis names; pass mesh_dim_names=(...).")
        if any(p.is_partial() for p in placements):
            raise PlacementError(
                f"{list(placements)} holds a Partial, which a PartitionSpec cannot express."
            )
        split: dict[int, list[str]] = {}
        for name, placement in zip(mesh.mesh_dim_names, placements, strict=True):
            if isinstance(placement, Shard):
                split.setdefault(placement.dim, []).append(name)
        entries = [split.get(dim) for dim in range(max(split, default=-1) + 1)]
        return cls(*(e[0] if e and len(e) == 1 else e for e in entries))

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"


P = PartitionSpec


def _entry(entry: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    if entry is None or isinstance(entry, str):
        return entry
    names = tuple(entry) if isinstance(entry, Sequence) else (entry,)
    if not all(isinstance(n, str) for n in names):
        raise PlacementError(f"P entry {entry!r}: expected an axis name, names, or None.")
    return names


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry
