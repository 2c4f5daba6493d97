"""Propagation: which layouts an operation's arguments take, and which its results get.

Takes a `Sharding` and the specs of the arguments; picks a strategy for each mesh axis in turn.
The choice moves the fewest bytes; where the bytes are equal, it changes the layout of the
fewest bytes of arguments, so that the largest argument keeps its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .mesh import DeviceMesh
from .placement import Placement, Placements, Replicate, Shard
from .rules import OpCall, Sharding, Strategy, sizes_by_name
from .spec import Spec


class Choice(NamedTuple):
    """The chosen placements of each argument and result, and whether any strategy was legal."""

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]


def propagate(
    sharding: Sharding,
    call: OpCall,
    mesh: DeviceMesh,
    wanted: Placements | None = None,
) -> Choice:
    """Returns the cheapest legal layouts.

    Args:
        sharding: How the operation may be sharded.
        call: The operation and its arguments, whose specs are all on `mesh`.
        mesh: Where it runs.
        wanted: Placements that the first result shall have where a strategy can give them.
    """
    sizes = sizes_by_name(sharding, call)
    pieces: dict[str, int] = {}
    strategies = list(sharding.strategies())
    chosen: list[Strategy] = []
    for axis, count in enumerate(mesh.shape):
        legal = [
            s
            for s in strategies
            if sharding.allows(s.name, axis)
            and (s.name is None or sharding.may_split(s.name, sizes, pieces.get(s.name, 1) * count))
        ]
        if wanted is not None:
            preferred = [s for s in legal if s.outputs[0] == wanted[axis]]
            legal = preferred or legal
        best = min(legal, key=lambda s: _price(s, call.tensors, axis, count))
        chosen.append(best)
        if best.name is not None:
            pieces[best.name] = pieces.get(best.name, 1) * count
    return Choice(
        tuple(tuple(s.inputs[i] for s in chosen) for i in range(len(call.tensors))),
        tuple(tuple(s.outputs[i] for s in chosen) for i in range(len(call.results))),
    )


def _price(strategy: Strategy, tensors: Sequence[Spec], axis: int, count: int) -> tuple[float, int]:
    kept = {
        after
        for spec, after in zip(tensors, strategy.inputs, strict=True)
        if after.is_shard() and spec.placements[axis] == after
    }
    moved, changed = 0.0, 0
    for spec, after in zip(tensors, strategy.inputs, strict=True):
        now = spec.placements[axis]
        if now != after:
            moved += _bytes_moved(now, after, spec.num_local_bytes, count, bool(kept))
            changed += max(spec.num_bytes, 1)
    return moved, changed


def _bytes_moved(now: Placement, after: Placement, local: int, count: int, kept: bool) -> float:
    """The bytes that a device receives when one axis changes, from its bytes before.

    `kept` says whether an argument stays sharded on the axis.
    """
    match now, after:
        case Replicate(), _:
            return 0.0
        case Shard(), Shard():
            return local * (count - 1) / count
        case Shard(), _:
            # To a partial sum it is free, but that has to be reduced as a whole later.
            return float(local * (count - 1))
    # Partial to Shard moves half as much, but a shard that no argument has would only have to be
    # gathered again, so it is not made to look cheaper than the whole.
    times = 1 if kept and after.is_shard() else 2
    return times * local * (count - 1) / count
