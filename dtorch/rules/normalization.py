"""Layer, RMS, batch and group normalisation: what is normalised together must be whole.

That is the normalised dims of layer and RMS normalisation, in training the batch and the spatial
dims of batch normalisation, and each group of channels of group normalisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..custom_ops import cudnn_batch_norm
from ..lowering import LocalContext
from ..spec import Spec
from .sharding import Dims, OpCall, Sharding, assign, dim_names, rule, split_axes

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


@rule(
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._batch_norm_with_update_functional,
    aten.cudnn_batch_norm,
    cudnn_batch_norm,
)
def batch_norm(call: OpCall) -> Sharding:
    """``n c s, c, c, c, c -> n c s, c, c``: in training, n and s must be whole.

    In evaluation nothing is saved for the backward, so there is nothing to split.
    """
    names = dim_names(call["input"].shape)
    channels = names[1:2]
    training = call.arguments.get("training", True)
    whole = frozenset(n for d, n in enumerate(names) if n and d != 1 and training)
    statistics = ("weight", "bias", "running_mean", "running_var")
    return assign(
        call,
        {"input": names, **dict.fromkeys(statistics, channels)},
        (names, *(channels if m.shape[0] else (None,) for m in call.results[1:])),
        whole=whole,
        filled=frozenset(n for n in names if n),
    )


@rule(aten.native_batch_norm_backward, aten.cudnn_batch_norm_backward)
def batch_norm_backward(call: OpCall) -> Sharding:
    """The gradients of batch normalisation, its channels apart; in evaluation also n and s.

    What cuDNN has reserved for its backward stays where it is, and with it the channels. Where
    the forward was no kernel of its own there is nothing, and PyTorch's own kernel goes without.
    """
    names = dim_names(call["input"].shape)
    channels = names[1:2]
    others = frozenset(n for d, n in enumerate(names) if n and d != 1)
    vectors = ("weight", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")
    mask = call.arguments.get("output_mask", (True, True, True))
    kept = [d for d, w in zip((names, channels, channels), mask, strict=True) if w]
    training = call.arguments.get("train", True)
    inputs: dict[str, Dims] = dict.fromkeys(("grad_out", "grad_output", "input"), names)
    inputs |= dict.fromkeys(vectors, channels)
    options: dict[str, Any] = {}
    if "reserveSpace" in call.arguments:
        options = _with_reserve(call["reserveSpace"], channels, inputs)
    return assign(
        call,
        inputs,
        kept,
        reduce={} if training else dict.fromkeys(others, "sum"),
        whole=others if training else frozenset(),
        filled=frozenset(n for n in names if n),
        **options,
    )


def _with_reserve(reserve: Spec, channels: Dims, inputs: dict[str, Dims]) -> dict[str, Any]:
    if not reserve.shape[0]:
        return {"localize": _without_reserve}
    inputs["reserveSpace"] = channels
    return {"fixed": dict.fromkeys((c for c in channels if c), split_axes(reserve))}


def _without_reserve(context: LocalContext) -> None:
    x, grad, weight, mean, var, save_mean, save_invstd, eps, _ = context.args
    operands = grad, x, weight, mean, var, save_mean, save_invstd, True, eps, [True] * 3
    context.emit(aten.native_batch_norm_backward.default, *operands, outputs=context.outputs)


@rule(aten.native_group_norm)
def group_norm(call: OpCall) -> Sharding:
    """``n c s!, c, c -> n c s!, n c, n c``: channels split by whole groups."""
    source = ("n", "c", *(None,) * (call["input"].ndim - 2))
    inputs = {"input": source, "weight": ("c",), "bias": ("c",)}
    return _by_groups(call, inputs, (source, ("n", "c"), ("n", "c")))


@rule(aten.native_group_norm_backward)
def group_norm_backward(call: OpCall) -> Sharding:
    """The gradients of the input and, partial sums over n, of weight and bias."""
    source = ("n", "c", *(None,) * (call["input"].ndim - 2))
    inputs = {"grad_out": source, "input": source, "weight": ("c",)}
    inputs |= {"mean": ("n", "c"), "rstd": ("n", "c")}
    mask = call["output_mask"]
    kept = [d for d, w in zip((source, ("c",), ("c",)), mask, strict=True) if w]
    return _by_groups(call, inputs, kept, reduce={"n": "sum"})


def _by_groups(
    call: OpCall, inputs: dict[str, Dims], outputs: Sequence[Dims], **options: Any
) -> Sharding:
    return assign(
        call,
        inputs,
        outputs,
        blocks={"c": call["group"]},
        filled=frozenset({"n", "c"}),
        localize=_group_locally,
        **options,
    )


def _group_locally(context: LocalContext) -> None:
    """Gives each device its own numbers of samples, channels and groups."""
    source = context.spec(context.args[0])
    group, num_channels = context.argument("group"), max(source.shape[1], 1)
    shapes = source.local_shapes
    context.emit_with(
        N=context.per_device(lambda i: shapes[i][0]),
        C=context.per_device(lambda i: shapes[i][1]),
        group=context.per_device(lambda i: group * shapes[i][1] // num_channels),
    )
