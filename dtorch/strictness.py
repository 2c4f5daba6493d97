"""`strict`: every communication has to be asked for.

Takes an operation, the layouts that its arguments have and those that propagation chose for them;
raises where getting from one to the other needs the network, and says what would not.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import torch

from .errors import PlacementError
from .mesh import DeviceMesh
from .placement import Placement
from .redistribution import plan
from .spec import Spec, format_layout, format_placement

_strict: contextvars.ContextVar[bool] = contextvars.ContextVar("dtorch.strict", default=False)


def is_strict() -> bool:
    """Returns whether implicit communication is an error here."""
    return _strict.get()


@contextlib.contextmanager
def strictly() -> Iterator[None]:
    """Makes implicit communication an error."""
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def refuse_communication(
    op: torch._ops.OpOverload,
    names: Sequence[str],
    before: Sequence[Spec],
    after: Sequence[Spec],
    legal: Sequence[Sequence[tuple[Placement, ...]]],
) -> None:
    """Raises if an argument cannot get to its chosen layout without communication.

    Args:
        op: The operation.
        names: The names of its tensor arguments.
        before: Their specs.
        after: The specs that they would be brought to.
        legal: For each mesh axis, the placements of all arguments that need nothing else.

    Raises:
        PlacementError: One of them has to communicate.
    """
    for name, now, to in zip(names, before, after, strict=True):
        if all(step.kind.is_local for step in plan(now, to)):
            continue
        if now.mesh != to.mesh:
            raise PlacementError(
                f"strict: {op} would move its argument {name!r} from {now.mesh!r} to {to.mesh!r}.\n"
                f"  Fix: {name}.redistribute(device_mesh=...) before the call."
            )
        axis = next(
            a
            for a, n in enumerate(now.mesh.shape)
            if n > 1 and now.placements[a] != to.placements[a]
        )
        raise PlacementError(_message(op, axis, names.index(name), names, before, to, legal[axis]))


def _message(
    op: torch._ops.OpOverload,
    axis: int,
    place: int,
    names: Sequence[str],
    before: Sequence[Spec],
    to: Spec,
    legal: Sequence[tuple[Placement, ...]],
) -> str:
    mesh, now = before[place].mesh, before[place].placements[axis]
    width = max(map(len, names))
    arguments = [
        f"  {n:<{width}}  {list(s.shape)}  {format_layout(s.mesh, s.placements)}"
        for n, s in zip(names, before, strict=True)
    ]
    choices = ", ".join(f"({', '.join(map(format_placement, c))})" for c in legal[:_SHOWN])
    more = f", and {len(legal) - _SHOWN} more" if len(legal) > _SHOWN else ""
    return "\n".join(
        [
            f"strict: {op} cannot keep {format_placement(now)} on axis {mesh.axis_name(axis)} of "
            f"its argument {names[place]!r}.",
            *arguments,
            f"  legal for axis {mesh.axis_name(axis)}, in this order: {choices}{more}",
            f"  Fix: {names[place]}.{_call(mesh, axis, to)} before the call, or give the arguments "
            "legal placements.",
        ]
    )


_SHOWN = 8


def _call(mesh: DeviceMesh, axis: int, to: Spec) -> str:
    placement = to.placements[axis]
    if mesh.mesh_dim_names is None:
        return f"redistribute(placements={list(to.placements)!r})"
    wanted = {mesh.mesh_dim_names[axis]: placement}
    return f'redistribute_by_dict(None, {wanted!r}, "keep")'
