"""Scaled dot product attention over batch and heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..attention_kernels import KERNELS, Sizes
from ..lowering import LocalContext, memory_order
from ..program import Ref
from ..spec import Spec
from .sharding import Dims, OpCall, Sharding, replicated, rule

aten = torch.ops.aten
_QUERY: Dims = ("b", "h", "l", "e")
_KEY: Dims = ("b", "h", "s", "e")
_VALUE: Dims = ("b", "h", "s", "v")
_RESULT: Dims = ("b", "h", "l", "v")
_WHOLE = frozenset({"l", "s", "e", "v"})
_FILLED = frozenset({"b", "h", "l"})
"""PyTorch's kernel divides by the number of heads and batches: an empty shard ends the process."""


@rule(aten._scaled_dot_product_flash_attention_for_cpu)
def flash_attention_for_cpu(call: OpCall) -> Sharding:
    """``b h l e!, b h s! e!, b h s! v!, mask -> b h l v!, b l h`` (log-sum-exp); l! if causal."""
    _check_shapes(call)
    inputs = (_QUERY, _KEY, _VALUE, *_mask(call, 3))
    outputs = (_RESULT, _logsumexp(call, call.results[1].shape))
    whole = frozenset({"s", "e", "v", *("l" if call["is_causal"] else "")})
    return Sharding(inputs, outputs, whole=whole, even=_unequal_heads(call), filled=_FILLED)


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward)
def flash_attention_for_cpu_backward(call: OpCall) -> Sharding:
    """The gradients of q, k and v."""
    logsumexp = _logsumexp(call, call.tensors[5].shape)
    inputs = (_RESULT, _QUERY, _KEY, _VALUE, _RESULT, logsumexp, *_mask(call, 6))
    outputs = (_QUERY, _KEY, _VALUE)
    whole = frozenset({"s", "e", "v", *("l" if call["is_causal"] else "")})
    options: Any = {"even": _unequal_heads(call, 1), "filled": _FILLED}
    return Sharding(inputs, outputs, reduce={"l": "sum"}, whole=whole, **options)


@rule(
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)
def attention_on_accelerators(call: OpCall) -> Sharding:
    """``b h l! e!, b h s! e!, b h s! v!, mask -> b h l! v!, b h ...`` (log-sum-exp), and seeds."""
    _check_shapes(call)
    inputs = (_QUERY, _KEY, _VALUE, *_mask(call, 3))
    outputs = (_RESULT, *(_beside(len(meta.shape)) for meta in call.results[1:]))
    options = {"whole": _WHOLE, "filled": _FILLED, "localize": _align_mask}
    return Sharding(inputs, outputs, even=_unequal_heads(call), **options)


@rule(
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
)
def attention_on_accelerators_backward(call: OpCall) -> Sharding:
    """The gradients of q, k and v; with that of a mask, of the whole."""
    if len(call.results) > 3:
        return dataclasses.replace(replicated(call), localize=_lay_out)
    named = {"query": _QUERY, "key": _KEY, "value": _VALUE}
    named |= dict.fromkeys(("grad_out", "grad_out_", "out"), _RESULT)
    names = [name for name, value in call.arguments.items() if isinstance(value, Spec)]
    if "attn_bias" in names:
        (named["attn_bias"],) = _mask(call, names.index("attn_bias"))
    pairs = zip(names, call.tensors, strict=True)
    inputs = tuple(named.get(name, _beside(len(spec.shape))) for name, spec in pairs)
    outputs = (_QUERY, _KEY, _VALUE)
    options = {"whole": _WHOLE, "filled": _FILLED, "localize": _lay_out}
    return Sharding(inputs, outputs, even=_unequal_heads(call, 1), **options)


def _align_mask(context: LocalContext) -> None:
    context.emit_with(**_aligned(context))


def _aligned(context: LocalContext) -> dict[str, Any]:
    """The mask of a device, its rows where the kernels want them: PyTorch did so of the whole."""
    has_one = any(a.name == "attn_bias" for a in context.op._schema.arguments)
    mask = context.argument("attn_bias") if has_one else None
    if mask is None or (size := context.spec(mask).shape[-1]) % 8 == 0:
        return {}
    filled = context.emit(aten.constant_pad_nd.default, mask, [0, -size % 8], 0.0)
    return {"attn_bias": context.emit(aten.narrow.default, filled, -1, 0, size)}


def _lay_out(context: LocalContext) -> None:
    """Gives a kernel what it reads by place as it reads it, which a part of a whole need not be."""
    (kernel,) = (k for k in KERNELS.values() if k.backward_op is context.op)
    out, sums = (context.argument(name) for name in ("out", "logsumexp"))
    order = memory_order(context.spec(context.argument("query")))
    out, sums = kernel.laid_out(_Shards(context), out, sums, order)
    context.emit_with(out=out, logsumexp=sums, **_aligned(context))


class _Shards(NamedTuple):
    """The shards of the devices of an instruction, which all have the same rows and keys."""

    context: LocalContext

    def one(self, op: Any, *args: Any, **kwargs: Any) -> Ref:
        return self.context.emit(op, *args, **kwargs)

    def sizes(self, value: Callable[[Sizes], Any]) -> Any:
        shapes = (self.context.spec(self.context.argument(n)).shape for n in ("query", "key"))
        (batch, heads, rows, _), (_, _, keys, _) = shapes
        return value(Sizes(batch, heads, rows, keys))


def _beside(ndim: int) -> Dims:
    """The names of a log-sum-exp, or of the few numbers that say what dropout has drawn."""
    return ("b", "h", *(None,) * (ndim - 2)) if ndim > 2 else (None,) * ndim


def _check_shapes(call: OpCall) -> None:
    """Refuses fewer values than keys, beyond which the kernel would read."""
    query, key, value, *_ = (list(t.shape) for t in call.tensors)
    if key[2] != value[2]:
        raise ValueError(
            "attention cannot combine these shapes:\n"
            f"  query {query}, key {key}, value {value}\n"
            "  Fix: as many values as keys."
        )


def _logsumexp(call: OpCall, shape: Sequence[int]) -> Dims:
    """The names of the log-sum-exp, which some versions of PyTorch give with the heads last."""
    batch, heads, rows, _ = call["query"].shape
    return ("b", "h", "l") if tuple(shape) == (batch, heads, rows) else ("b", "l", "h")


def _unequal_heads(call: OpCall, first: int = 0) -> frozenset[str]:
    """Fewer key heads than query heads are split evenly: each device has whole groups of both."""
    query, key = call.tensors[first].shape, call.tensors[first + 1].shape
    return frozenset({"h"} if query[1] != key[1] else ())


def _mask(call: OpCall, place: int) -> tuple[Dims, ...]:
    """The mask's names, if there is one: broadcast from the right."""
    if len(call.tensors) <= place:
        return ()
    shape = call.tensors[place].shape
    names = ("b", "h", "l", "s")[4 - len(shape) :]
    return (tuple(None if size == 1 else n for n, size in zip(names, shape, strict=True)),)
