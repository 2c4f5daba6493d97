"""Pointwise operations of every arity: names by broadcasting, from PyTorch's own tag.

Every operation that PyTorch tags as pointwise follows one rule. The tables below add what the
tag does not say: in which arguments an operation is linear (so that `Partial` passes through),
and which are monotone, so that they commute with max and min.
"""

from __future__ import annotations

import torch

from .sharding import ANY_REDUCTION, LINEAR, OpCall, Sharding, broadcast_names, rule

aten = torch.ops.aten

_LINEAR_TOGETHER = {aten.add: (0, 1), aten.sub: (0, 1), aten.rsub: (0, 1)}
_LINEAR_IN_EACH = {aten.mul: (0, 1), aten.div: (0,), aten.neg: (0,)}
_LINEAR_UNARY = {aten.real, aten.imag, aten.deg2rad, aten.rad2deg, aten._conj, aten._neg_view}
_SAME_VALUE = {
    aten.clone,
    aten.positive,
    aten.alias,
    aten.detach,
    aten.contiguous,
    aten.resolve_conj,
    aten.resolve_neg,
}
_MONOTONE = {aten.relu, aten.exp, aten.floor, aten.ceil, aten.sigmoid, aten.tanh, aten.sign}
_ALSO_POINTWISE = {
    aten._to_copy,
    aten.copy,
    aten.where,
    aten.masked_fill,
    aten.floor_divide,
    aten._conj,
    aten._neg_view,
    *_SAME_VALUE,
}


def is_pointwise(op: torch._ops.OpOverload) -> bool:
    """Returns whether PyTorch tags an operation as pointwise, or this module does."""
    return torch.Tag.pointwise in op.tags or op.overloadpacket in _ALSO_POINTWISE


@rule(*_ALSO_POINTWISE)
def pointwise(call: OpCall) -> Sharding:
    """The rule of every pointwise operation."""
    result = call.results[0].shape
    linear, ops = _partial_sets(call)
    return Sharding(
        tuple(broadcast_names(t.shape, result) for t in call.tensors),
        tuple(broadcast_names(m.shape, result) for m in call.results),
        linear=linear,
        partial_ops=ops,
    )


def _partial_sets(call: OpCall) -> tuple[tuple[frozenset[int], ...], tuple[str, ...]]:
    packet, count = call.op.overloadpacket, len(call.tensors)
    if packet in _SAME_VALUE:
        return (frozenset({0}),), ANY_REDUCTION
    if not call.results[0].dtype.is_floating_point and not call.results[0].dtype.is_complex:
        if packet in _LINEAR_TOGETHER and count == 2 and _keeps_dtype(call):
            return (frozenset({0, 1}),), ("sum",)
        return (), ()
    if packet in _LINEAR_TOGETHER:
        return ((frozenset({0, 1}),), LINEAR) if count == 2 else ((), ())
    if packet in _LINEAR_IN_EACH:
        if call.arguments.get("rounding_mode") is not None:
            return (), ()
        return tuple(frozenset({i}) for i in _LINEAR_IN_EACH[packet] if i < count), LINEAR
    if packet is aten._to_copy:
        return ((frozenset({0}),), ANY_REDUCTION) if _widens(call) else ((), ())
    if packet is aten.where and count == 3:
        return (frozenset({1, 2}),), LINEAR
    if packet in _LINEAR_UNARY:
        return (frozenset({0}),), LINEAR
    if packet in _MONOTONE:
        return (frozenset({0}),), ("max", "min")
    return (), ()


def _keeps_dtype(call: OpCall) -> bool:
    dtype = call.results[0].dtype
    return dtype != torch.bool and all(t.dtype == dtype for t in call.tensors)


def _widens(call: OpCall) -> bool:
    before, after = call.tensors[0].dtype, call.results[0].dtype
    return before.is_floating_point and torch.promote_types(before, after) == after
