"""A function of the user's on each device's shards: its layouts are the ones that it was given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..local_ops import LocalFunction, local_call, local_ready
from ..lowering import LocalContext
from ..placement import Partial, Replicate
from .sharding import OpCall, Sharding, Strategy, replicated, rule


@dataclasses.dataclass(frozen=True)
class _AsTold(Sharding):
    """A sharding with one strategy for each mesh axis, which bears the axis's number as name."""

    told: tuple[Strategy, ...] = ()

    def strategies(self) -> Iterator[Strategy]:
        yield from self.told

    def allows(self, name: str | None, axis: int) -> bool:
        return name == str(axis)


@rule(local_call, local_ready)
def local_rule(call: OpCall) -> Sharding:
    """The operands as the function takes them, and what the devices have agreed on whole."""
    function: LocalFunction = call["function"].function
    axes = range(function.mesh.ndim)
    inputs = [spec.placements for spec in function.inputs]
    inputs += [(Replicate(),) * len(axes)] * (len(call.tensors) - len(inputs))
    if call.op is local_ready:
        outputs = [(Partial("sum"),) * len(axes)]
    else:
        outputs = [spec.placements for spec in function.outputs]
    whole = replicated(call)
    told = tuple(
        Strategy(tuple(p[axis] for p in inputs), tuple(p[axis] for p in outputs), str(axis))
        for axis in axes
    )
    return _AsTold(whole.inputs, whole.outputs, localize=_with_position, told=told)


def _with_position(context: LocalContext) -> None:
    context.emit_with(position=context.per_device(lambda i: i))
