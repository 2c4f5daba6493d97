"""Convolution: over the batch, the input channels (a partial sum) and the output channels.

A grouped convolution keeps its channels together by whole groups, so each device has some of the
groups. The kernel needs the spatial dims whole; where they are split, `sharded_forms.windows`
exchanges halos.
"""

from __future__ import annotations

import torch

from ..lowering import LocalContext
from .sharding import Dims, OpCall, Sharding, assign, rule

aten = torch.ops.aten


def _names(call: OpCall) -> tuple[Dims, Dims, Dims, Dims]:
    """The names of the input, the weight, the bias and the result."""
    spatial = (None,) * (call["weight"].ndim - 2)
    if call["groups"] > 1:
        return ("n", "g", *spatial), ("g", None, *spatial), ("g",), ("n", "g", *spatial)
    weight = ("c", "o") if call["transposed"] else ("o", "c")
    return ("n", "c", *spatial), (*weight, *spatial), ("o",), ("n", "o", *spatial)


@rule(aten.convolution)
def convolution(call: OpCall) -> Sharding:
    """``n c s, o c k, +o -> n o s``; with groups, ``n g s, g 1 k, g -> n g s``."""
    source, weight, bias, result = _names(call)
    return assign(
        call,
        {"input": source, "weight": weight, "bias": bias},
        (result,),
        reduce={} if call["groups"] > 1 else {"c": "sum"},
        filled=frozenset({"n", "c", "o"}),
        blocks={"g": call["groups"]},
        additive=frozenset({2}),
        localize=_convolve_locally if call["groups"] > 1 else None,
    )


@rule(aten.convolution_backward)
def convolution_backward(call: OpCall) -> Sharding:
    """``n o s, n c s, o c k -> n c s, o c k, o``: over o and n the gradients are partial sums."""
    source, weight, bias, result = _names(call)
    kept = [
        d for d, wanted in zip((source, weight, bias), call["output_mask"], strict=True) if wanted
    ]
    return assign(
        call,
        {"grad_output": result, "input": source, "weight": weight},
        kept,
        reduce=dict.fromkeys(("n",) if call["groups"] > 1 else ("n", "o"), "sum"),
        filled=frozenset({"n", "c", "o"}),
        blocks={"g": call["groups"]},
        localize=_convolve_locally,
    )


def _convolve_locally(context: LocalContext) -> None:
    """Gives each device the number of its own groups, and of its own output channels."""
    backward = context.op is aten.convolution_backward.default
    weight = context.spec(context.args[2 if backward else 1])
    groups, size = context.argument("groups"), max(weight.shape[0], 1)
    own = context.per_device(lambda i: groups * weight.local_shapes[i][0] // size)
    changes = {"groups": own} if groups > 1 else {}
    if backward and context.argument("bias_sizes") is not None:
        result = context.spec(context.args[0])
        changes["bias_sizes"] = context.per_device(lambda i: [result.local_shapes[i][1]])
    context.emit_with(**changes)
