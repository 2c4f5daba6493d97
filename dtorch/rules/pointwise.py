"""Pointwise operations of every arity: names by broadcasting, from PyTorch's own tag.

Every operation that PyTorch tags as pointwise follows one rule. The tables below add what the
tag does not say: through which operations `Partial` passes.

A sum passes through what adds or only moves and negates values of one dtype: add and sub of two
partial values, neg, copies, real and imag. It does not pass through what scales them, although
that is linear: ``p / 0`` is inf where the parts 3 and -2 of ``p = 1`` give inf - inf. Nor does it
pass through a change of dtype, which rounds the sum and each part differently. A max or min
passes through what is monotone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..spec import Spec
from .sharding import ANY_REDUCTION, LINEAR, OpCall, Sharding, broadcast_names, rule

aten = torch.ops.aten

_LINEAR_TOGETHER = {aten.add, aten.sub, aten.rsub}
_LINEAR_UNARY = {aten.neg, aten.real, aten.imag, aten._conj, aten._neg_view}
_SAME_VALUE = {
    aten.clone,
    aten.positive,
    aten.alias,
    aten.detach,
    aten.contiguous,
    aten.resolve_conj,
    aten.resolve_neg,
}
_MONOTONE = {aten.relu, aten.exp, aten.floor, aten.ceil, aten.sigmoid, aten.tanh}
_ALSO_POINTWISE = {
    aten._to_copy,
    aten.copy,
    aten.where,
    aten.masked_fill,
    aten.floor_divide,
    aten.rsub,
    aten.fill,
    aten.complex,
    aten.polar,
    aten.hardswish,
    aten.hardswish_backward,
    aten.mish_backward,
    aten.silu_backward,
    aten._prelu_kernel,
    aten.log_sigmoid_forward,
    aten.log_sigmoid_backward,
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
    dtype = call.results[0].dtype
    if packet in _SAME_VALUE or (packet is aten._to_copy and _have_dtype(call.tensors, dtype)):
        return (frozenset({0}),), ANY_REDUCTION
    if packet in _LINEAR_TOGETHER and count == 2 and _adds(call):
        return (frozenset({0, 1}),), _linear_ops(dtype)
    if packet is aten.where and count == 3 and _have_dtype(call.tensors[1:], dtype):
        return (frozenset({1, 2}),), _linear_ops(dtype)
    if packet in _LINEAR_UNARY:
        return (frozenset({0}),), _linear_ops(dtype)
    if packet in _MONOTONE and _have_dtype(call.tensors, dtype):
        return (frozenset({0}),), ("max", "min")
    return (), ()


def _adds(call: OpCall) -> bool:
    # A float is that of the call being traced: another one, such as inf, may run the program.
    alpha = call.arguments.get("alpha", 1)
    return (
        type(alpha) is int and alpha in (1, -1) and _have_dtype(call.tensors, call.results[0].dtype)
    )


def _have_dtype(tensors: Sequence[Spec], dtype: torch.dtype) -> bool:
    return all(t.dtype == dtype for t in tensors)


def _linear_ops(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype == torch.bool:
        return ()
    return LINEAR if dtype.is_floating_point or dtype.is_complex else ("sum",)
