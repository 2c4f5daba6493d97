"""Reductions over dims: a split reduced dim leaves the result `Partial`.

Code instead of notation, because the reduced dims are an argument. `mean` over pieces of
unequal size is not the mean of their means, so there the dim must split evenly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..custom_ops import masked_sum
from .pointwise import pointwise
from .sharding import LINEAR, Dims, OpCall, Sharding, broadcast_names, dim_names, rule

aten = torch.ops.aten

_REDUCE = {
    aten.sum: "sum",
    aten.mean: "avg",
    aten.amax: "max",
    aten.amin: "min",
    aten.any: "max",
    aten.all: "min",
}
_WHOLE = (
    aten.prod,
    aten.argmax,
    aten.argmin,
    aten.max,
    aten.min,
    aten.logsumexp,
    aten.linalg_vector_norm,
    aten.norm,
    aten.median,
    aten.nanmedian,
    aten.mode,
    aten.kthvalue,
    aten.nansum,
    aten.count_nonzero,
    aten.aminmax,
)
_VARIANCE = (
    aten.var.correction,
    aten.std.correction,
    aten.var_mean.correction,
    aten.std_mean.correction,
)
_ALONG = (
    aten.softmax,
    aten._softmax,
    aten.log_softmax,
    aten._log_softmax,
    aten.cumsum,
    aten.cumprod,
    aten.cummax,
    aten.cummin,
    aten.logcumsumexp,
    aten.sort,
    aten.argsort,
    aten.flip,
    aten.rot90,
    aten.topk,
    aten._safe_softmax,
    aten.glu,
)


@rule(*_REDUCE)
def reduction(call: OpCall) -> Sharding:
    """Reductions that combine across devices by sum, avg, max or min."""
    op = _REDUCE[call.op.overloadpacket]
    names, reduced = _reduced(call)
    linear = op in LINEAR and call.results[0].dtype == call.tensors[0].dtype
    # The truth of a number does not grow with the number: -1 is true and 0 is not.
    monotone = op in ("max", "min") and call.results[0].dtype == call.tensors[0].dtype
    ops = LINEAR if linear else (op,)
    # Partial sums may leave the range of half precision where the whole sum does not.
    overflows = op == "sum" and call.results[0].dtype == torch.float16
    empty_reduction = any(call.tensors[0].shape[d] == 0 for d in _dims(call))
    return Sharding(
        (names,),
        (_kept(call, names, reduced),),
        reduce=dict.fromkeys(reduced, op),
        even=frozenset(reduced) if op == "avg" else frozenset(),
        filled=frozenset(reduced) if op in ("max", "min") else frozenset(),
        whole=frozenset(reduced) if empty_reduction or overflows else frozenset(),
        linear=(frozenset({0}),) if linear or monotone else (),
        partial_ops=ops,
    )


@rule(masked_sum)
def sum_of_selected(call: OpCall) -> Sharding:
    """The sum over all dims of the elements that a mask selects."""
    source, mask = call.tensors
    names = dim_names(source.shape)
    summed = [n for n in names if n is not None]
    return Sharding(
        (names, broadcast_names(mask.shape, source.shape)),
        ((),),
        reduce=dict.fromkeys(summed, "sum"),
        whole=frozenset(summed if source.dtype == torch.float16 else ()),
        linear=(frozenset({0}),),
    )


@rule(*_WHOLE)
def whole_reduction(call: OpCall) -> Sharding:
    """Reductions whose reduced dims must be whole; the other dims stay sharded."""
    if len(call.tensors) != 1:
        return pointwise(call)  # torch.max(x, y)
    names, reduced = _reduced(call)
    outputs = tuple(_kept(call, names, reduced) for _ in call.results)
    return Sharding((names,), outputs, whole=frozenset(reduced))


@rule(*_VARIANCE)
def variance(call: OpCall) -> Sharding:
    """The same, and no piece is empty: the kernels warn where there is nothing to compute."""
    sharding = whole_reduction(call)
    kept = frozenset(n for n in sharding.outputs[0] if n is not None)
    return dataclasses.replace(sharding, filled=kept)


@rule(*_ALONG)
def along_dim(call: OpCall) -> Sharding:
    """Operations along dims that keep the shape: those dims must be whole."""
    names, along = _reduced(call)
    return Sharding((names,), (names,) * len(call.results), whole=frozenset(along))


@rule(aten.glu_backward)
def glu_backward(call: OpCall) -> Sharding:
    """The gradient has half the input's size along the dim, which must be whole."""
    names = dim_names(call["self"].shape)
    whole = frozenset({f"d{call['dim'] % len(names)}"})
    return Sharding((names, names), (names,), whole=whole)


@rule(aten.renorm)
def renorm(call: OpCall) -> Sharding:
    """Each index of one dim has a norm over all the others, which must be whole."""
    names = dim_names(call.tensors[0].shape)
    at = call["dim"] % len(names)
    kept = tuple(n if d == at else None for d, n in enumerate(names))
    return Sharding((kept,), (kept,))


@rule(aten._softmax_backward_data, aten._log_softmax_backward_data)
def softmax_backward(call: OpCall) -> Sharding:
    """The gradients of softmax: the dim must be whole."""
    names = dim_names(call.tensors[0].shape)
    along = frozenset({names[call["dim"]]} if names else ())
    return Sharding((names, names), (names,), whole=along)


def _dims(call: OpCall) -> tuple[int, ...]:
    """The dims that a call reduces or works along, non-negative; all of them if it names none."""
    ndim = call.tensors[0].ndim
    given = call.arguments.get("dim", call.arguments.get("dims"))
    if given is None or (isinstance(given, Sequence) and not given):
        return tuple(range(ndim))
    dims = given if isinstance(given, Sequence) else (given,)
    bound = max(ndim, 1)
    for d in dims:
        if not -bound <= d < bound:  # some meta kernels do not look
            raise IndexError(
                f"{call.op}: Dimension out of range (expected to be in range of "
                f"[{-bound}, {bound - 1}], but got {d})"
            )
    return tuple(d % ndim for d in dims) if ndim else ()


def _reduced(call: OpCall) -> tuple[Dims, list[str]]:
    names = dim_names(call.tensors[0].shape)
    return names, [f"d{d}" for d in _dims(call)]


def _kept(call: OpCall, names: Dims, reduced: Sequence[str]) -> Dims:
    if len(call.results[0].shape) == len(names):
        return tuple(None if n in reduced else n for n in names)
    return tuple(n for n in names if n not in reduced)
