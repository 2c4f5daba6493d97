"""Losses: pointwise, or reduced to a mean (over equal pieces) or a sum.

A backward kernel of a mean divides by the number of elements that it sees, so there a device may
only see all of them; `sharded_forms` gives what runs on pieces instead.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .pointwise import pointwise
from .sharding import Dims, OpCall, Sharding, assign, broadcast_names, dim_names, rule

aten = torch.ops.aten
_REDUCE = {1: "avg", 2: "sum"}
"""The reduction by its number in ATen; 0 is none."""


def _reduced(call: OpCall, names: tuple[str | None, ...]) -> Mapping[str, object]:
    """The fields of a sharding whose results are reduced over these names."""
    split = [n for n in names if n is not None]
    op = _REDUCE[call["reduction"]]
    return {
        "reduce": dict.fromkeys(split, op),
        "even": frozenset(split if op == "avg" else ()),
        "filled": frozenset(split),
    }


@rule(
    aten.mse_loss,
    aten.smooth_l1_loss,
    aten.huber_loss,
    aten.soft_margin_loss,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_with_logits,
)
def pointwise_loss(call: OpCall) -> Sharding:
    """Pointwise over the broadcast arguments, and then the reduction."""
    if call["reduction"] == 0:
        return pointwise(call)
    shape = torch.broadcast_shapes(*(t.shape for t in call.tensors))
    inputs = tuple(broadcast_names(t.shape, shape) for t in call.tensors)
    return Sharding(inputs, ((),), **_reduced(call, dim_names(shape)))  # pyright: ignore[reportArgumentType]


@rule(
    aten.mse_loss_backward,
    aten.smooth_l1_loss_backward,
    aten.huber_loss_backward,
    aten.soft_margin_loss_backward,
    aten.binary_cross_entropy_backward,
)
def pointwise_loss_backward(call: OpCall) -> Sharding:
    """Pointwise; of a mean, whole."""
    result = call.results[0].shape
    inputs = tuple(broadcast_names(t.shape, result) for t in call.tensors)
    whole = frozenset(n for n in dim_names(result) if n and call["reduction"] == 1)
    return Sharding(inputs, (dim_names(result),), whole=whole)


@rule(aten.multi_margin_loss, aten.multilabel_margin_loss_forward)
def margin_loss(call: OpCall) -> Sharding:
    """``n c!, n (c!) -> n`` and what each class was: a sample is whole."""
    names = ("n",) if call["self"].ndim == 2 else ()
    losses = names if call["reduction"] == 0 else ()
    options = _reduced(call, names) if call["reduction"] else {"filled": frozenset(names)}
    inputs = {"self": (*names, None), "target": (*names, *(None,) * (call["target"].ndim - 1))}
    return assign(call, inputs, (losses, (*names, None)), **options)


@rule(aten.multi_margin_loss_backward, aten.multilabel_margin_loss_backward)
def margin_loss_backward(call: OpCall) -> Sharding:
    """``n, n c!, n (c!), n c! -> n c!``; of a mean, which divides by n, whole."""
    names: Dims = ("n",) if call["self"].ndim == 2 else ()
    inputs: dict[str, Dims] = dict.fromkeys(("self", "is_target"), (*names, None))
    inputs["target"] = (*names, *(None,) * (call["target"].ndim - 1))
    inputs["grad_output"] = names if call["reduction"] == 0 else ()
    split = frozenset(n for n in names if n)
    whole = split if call["reduction"] == 1 else frozenset()
    return assign(call, inputs, ((*names, None),), whole=whole, filled=split)


@rule(aten.nll_loss_forward, aten.nll_loss2d_forward)
def nll_loss(call: OpCall) -> Sharding:
    """``n c! s, n s, c! -> n s`` and the total weight; a sum of both is a partial sum.

    A weighted mean is not the mean of those of pieces.
    """
    scores, samples = _of_samples(call)
    split = frozenset(n for n in samples if n)
    reduction = call["reduction"]
    return assign(
        call,
        {"self": scores, "target": samples},
        (samples if reduction == 0 else (), ()),
        reduce=dict.fromkeys(split, "sum") if reduction else {},
        whole=split if reduction == 1 else frozenset(),
        filled=split,
    )


@rule(aten.nll_loss_backward, aten.nll_loss2d_backward)
def nll_loss_backward(call: OpCall) -> Sharding:
    """``n s, n c! s, n s, c!, 1 -> n c! s``: the total weight is an argument."""
    scores, samples = _of_samples(call)
    inputs = {"self": scores, "target": samples}
    if call["reduction"] == 0:
        inputs["grad_output"] = samples
    return assign(call, inputs, (scores,), filled=frozenset(n for n in samples if n))


def _of_samples(call: OpCall) -> tuple[Dims, Dims]:
    """The names of the scores and of their targets."""
    samples = dim_names(call["target"].shape)
    at = 1 if call["self"].ndim > 1 else 0
    return (*samples[:at], None, *samples[at:]), samples
