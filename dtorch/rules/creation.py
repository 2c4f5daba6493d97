"""Factories: results whose dims may be split freely, each device making its own part.

`arange` needs code because a device's part starts elsewhere. Random factories have no rule
here: each device draws the whole tensor and keeps its part, so that values do not depend on
the layout.
"""

from __future__ import annotations

import torch

from ..lowering import LocalContext, memory_order
from .sharding import OpCall, Sharding, broadcast_names, dim_names, replicated, rule

aten = torch.ops.aten


@rule(aten.zeros, aten.ones, aten.empty.memory_format)
def filled(call: OpCall) -> Sharding:
    """Factories with a size and one value everywhere."""
    return Sharding((), (dim_names(call.results[0].shape),), sizes=(("size", 0),))


@rule(aten.full.default)
def full(call: OpCall) -> Sharding:
    """As above, with a given value."""
    return filled(call)


@rule(aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full)
def new_filled(call: OpCall) -> Sharding:
    """Factories with a size, and a tensor that only gives the dtype: its layout does not matter."""
    names = dim_names(call.tensors[0].shape, "t")
    return Sharding(
        (names,), (dim_names(call.results[0].shape),), sizes=(("size", 0),), unread=frozenset({0})
    )


@rule(aten.new_empty_strided)
def new_empty_strided(call: OpCall) -> Sharding:
    """A factory with a size, strides that name an order of dims, and a tensor that gives a layout.

    Autograd asks for one where a gradient lies in memory in another order than its leaf.
    """
    result = call.results[0].shape
    if tuple(call.tensors[0].shape) != tuple(result):
        return replicated(call)
    names = dim_names(result)
    return Sharding((names,), (names,), unread=frozenset({0}), localize=_strided_locally)


def _strided_locally(context: LocalContext) -> None:
    spec = context.output_spec()
    order = memory_order(spec)

    def strides(index: int) -> list[int]:
        found, step = [0] * spec.ndim, 1
        for dim in reversed(order):
            found[dim] = step
            step *= max(spec.local_shapes[index][dim], 1)
        return found

    size = context.per_device(lambda i: list(spec.local_shapes[i]))
    context.emit_with(size=size, stride=context.per_device(strides))


@rule(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like)
def like(call: OpCall) -> Sharding:
    """Factories with the shape and the layout of a tensor."""
    result = call.results[0].shape
    names = broadcast_names(call.tensors[0].shape, result)
    return Sharding((names,), (dim_names(result),), unread=frozenset({0}))


@rule(aten.scalar_tensor, aten.linspace, aten.logspace, aten.eye)
def small(call: OpCall) -> Sharding:
    """Factories that every device runs whole."""
    return replicated(call)


@rule(aten.arange)
def arange(call: OpCall) -> Sharding:
    """A range of integers: each device starts at its own element; other ranges are whole."""
    integral = not call.results[0].dtype.is_floating_point
    whole = frozenset() if integral else frozenset({"d0"})
    return Sharding((), (("d0",),), whole=whole, localize=_arange_locally)


def _arange_locally(context: LocalContext) -> None:
    spec = context.output_spec()
    if not spec.shard_axes(0):
        context.emit_default()
        return
    names = [a.name for a in context.op._schema.arguments]
    given = dict(zip(names, context.args, strict=False)) | context.kwargs
    start, step = given.get("start", 0), given.get("step", 1)
    boxes = spec.boxes
    context.emit(
        aten.arange.start_step,
        context.per_device(lambda i: start + boxes[i][0][0] * step),
        context.per_device(lambda i: start + boxes[i][0][1] * step),
        step,
        outputs=context.outputs,
        dtype=spec.dtype,
        device=given["device"],
    )
