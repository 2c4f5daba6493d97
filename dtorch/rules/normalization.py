"""Layer and RMS normalisation: the normalised dims must be whole."""

from __future__ import annotations

import torch

from .sharding import Dims, OpCall, Sharding, dim_names, rule

aten = torch.ops.aten


def _split(call: OpCall, place: int = 0) -> tuple[Dims, Dims]:
    """The names of the input's outer dims and of its normalised ones."""
    names = dim_names(call.tensors[place].shape)
    at = len(names) - len(call["normalized_shape"])
    return names[:at], names[at:]


@rule(aten.layer_norm, aten.rms_norm, aten.native_layer_norm, aten._fused_rms_norm)
def layer_norm(call: OpCall) -> Sharding:
    """``... k!, k!, k! -> ... k!`` and, for the native forms, the statistics ``... 1``."""
    outer, inner = _split(call)
    weights = (inner,) * (len(call.tensors) - 1)
    statistics = tuple((*outer, *(None,) * (len(m.shape) - len(outer))) for m in call.results[1:])
    whole = frozenset(n for n in inner if n)
    return Sharding(((*outer, *inner), *weights), ((*outer, *inner), *statistics), whole=whole)


@rule(aten.native_layer_norm_backward, aten._fused_rms_norm_backward)
def layer_norm_backward(call: OpCall) -> Sharding:
    """The gradients of the input, which keeps its outer dims, and of the weights, partial sums."""
    outer, inner = _split(call, 1)
    full = (*outer, *inner)
    inputs = tuple(
        full
        if t.ndim == len(full) and i < 2
        else (*outer, *(None,) * (t.ndim - len(outer)))
        if t.ndim > len(inner)
        and i >= 2
        and t.shape[: len(outer)] == call.tensors[1].shape[: len(outer)]
        and t.ndim == len(full)
        else inner
        for i, t in enumerate(call.tensors)
    )
    # Results that the mask leaves out are not among the call's results.
    first = 0 if call["output_mask"][0] else None
    outputs = tuple(full if i == first else inner for i in range(len(call.results)))
    return Sharding(
        inputs,
        outputs,
        reduce={n: "sum" for n in outer if n},
        whole=frozenset(n for n in inner if n),
    )
