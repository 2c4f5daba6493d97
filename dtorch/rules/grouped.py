"""Matrix products by group: each run of rows by a matrix of its own, as the experts of a layer.

``s! k, e k n, e! -> s n``, where the groups' ends say which rows belong to which matrix. Splitting
k gives partial sums. So does splitting the matrices: a device multiplies the rows of its own
groups, which it brings to the front, and has zeros for the others.
"""

from __future__ import annotations

import torch

from ..lowering import LocalContext
from .sharding import OpCall, Sharding, assign, replicated, rule

aten = torch.ops.aten
_ALIGNMENT = 16  # bytes: `_grouped_mm` refuses strides that are no multiple of it


@rule(aten._grouped_mm)
def grouped_mm(call: OpCall) -> Sharding:
    """With groups of rows; split only where the parts are aligned as the kernel wants it."""
    rows, matrices = call.tensors[:2]
    if rows.ndim != 2 or matrices.ndim != 3 or call["offs"] is None:
        return replicated(call)
    bytes_of = {"k": rows.shape[1], "n": matrices.shape[2]}
    blocks = {name: size * rows.dtype.itemsize / _ALIGNMENT for name, size in bytes_of.items()}
    if not all(count.is_integer() for count in blocks.values()):
        return replicated(call)
    return _sharding(call, {name: int(count) for name, count in blocks.items()})


@rule("transformers::grouped_mm_fallback")
def grouped_mm_fallback(call: OpCall) -> Sharding:
    """The operation that Hugging Face's models call instead of `_grouped_mm` while compiling."""
    return _sharding(call, {})


def _sharding(call: OpCall, blocks: dict[str, int]) -> Sharding:
    rows, matrices, *_ = call.arguments
    return assign(
        call,
        {rows: (None, "k"), matrices: ("e", "k", "n"), "offs": (None,)},
        ((None, "n"),),
        reduce={"k": "sum", "e": "sum"},
        even=frozenset({"e"}),
        blocks=blocks,
        localize=_multiply_own_groups,
    )


def _multiply_own_groups(context: LocalContext) -> None:
    rows, matrices = context.args[:2]
    ends, spec = context.argument("offs"), context.spec(matrices)
    bounds = [box[0] for box in spec.boxes]
    if all(bound == (0, spec.shape[0]) for bound in bounds):
        return context.emit_default()
    low, high = (context.per_device(lambda i, at=at: bounds[i][at]) for at in (0, 1))
    after_low = context.per_device(lambda i: bounds[i][0] + 1)
    count = max(context.spec(rows).shape[0], 1)
    starts = context.emit(aten.constant_pad_nd.default, ends, [1, 0])
    start = context.emit(aten.slice.Tensor, starts, 0, low, after_low)
    own = context.emit(aten.slice.Tensor, ends, 0, low, high)
    own = context.emit(aten.sub.Tensor, own, start)
    ones = context.emit(aten.new_ones.default, ends, [context.spec(rows).shape[0]])
    place = context.emit(aten.cumsum.default, ones, 0)
    place = context.emit(aten.sub.Scalar, place, 1)
    forward = context.emit(aten.add.Tensor, place, start)
    forward = context.emit(aten.remainder.Scalar, forward, count)
    first = context.emit(aten.index_select.default, rows, 0, forward)
    product = context.emit(context.op, first, matrices, own)
    back = context.emit(aten.sub.Tensor, place, start)
    back = context.emit(aten.remainder.Scalar, back, count)
    product = context.emit(aten.index_select.default, product, 0, back)
    end = context.emit(aten.slice.Tensor, own, 0, -1)
    elsewhere = context.emit(aten.ge.Tensor, back, end)
    elsewhere = context.emit(aten.unsqueeze.default, elsewhere, 1)
    context.emit(aten.masked_fill.Scalar, product, elsewhere, 0, outputs=context.outputs)
