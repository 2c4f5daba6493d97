"""Matrix products by group: each run of rows by a matrix of its own, as the experts of a layer.

``s! k, e k n, e! -> s n``, where the groups' ends say which rows belong to which matrix. Splitting
k gives partial sums. So does splitting the matrices: a device multiplies the rows of its own
groups, which it brings to the front, and has zeros for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..lowering import LocalContext
from ..program import Ref
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


@rule("transformers::grouped_mm_fallback_backward")
def grouped_mm_fallback_backward(call: OpCall) -> Sharding:
    """``s k, e k n, e!, s n -> s k, e k n``."""
    rows, matrices, _, grad = call.arguments
    return assign(
        call,
        {rows: (None, "k"), matrices: ("e", "k", "n"), "offs": (None,), grad: (None, "n")},
        ((None, "k"), ("e", "k", "n")),
        reduce={"n": "sum", "e": "sum"},
        even=frozenset({"e"}),
        localize=_multiply_own_groups_backward,
    )


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
    own = _own_groups(context, rows, matrices)
    if own is None:
        return context.emit_default()
    product = context.emit(context.op, own.first(rows), matrices, own.ends)
    own.put_back(product, context.outputs)


def _multiply_own_groups_backward(context: LocalContext) -> None:
    rows, matrices, _, grad = context.args
    own = _own_groups(context, rows, matrices)
    if own is None:
        return context.emit_default()
    to_rows, to_matrices = context.new_slot(), context.outputs[1]
    operands = (own.first(rows), matrices, own.ends, own.first(grad))
    context.emit(context.op, *operands, outputs=[to_rows, to_matrices])
    own.put_back(Ref(to_rows), [context.outputs[0]])


def _own_groups(context: LocalContext, rows: Ref, matrices: Ref) -> _OwnGroups | None:
    """The groups of each device, or None where it has them all."""
    spec = context.spec(matrices)
    bounds = [box[0] for box in spec.boxes]
    if all(bound == (0, spec.shape[0]) for bound in bounds):
        return None
    return _OwnGroups(context, bounds, context.spec(rows).shape[0])


class _OwnGroups:
    """The rows of each device's own groups, brought to the front and back to their places."""

    def __init__(self, context: LocalContext, bounds: list[tuple[int, int]], size: int) -> None:
        self.emit, ends = context.emit, context.argument("offs")
        low, high = (context.per_device(lambda i, at=at: bounds[i][at]) for at in (0, 1))
        after_low = context.per_device(lambda i: bounds[i][0] + 1)
        starts = self.emit(aten.constant_pad_nd.default, ends, [1, 0])
        self._start = self.emit(aten.slice.Tensor, starts, 0, low, after_low)
        own = self.emit(aten.slice.Tensor, ends, 0, low, high)
        self.ends = self.emit(aten.sub.Tensor, own, self._start)
        self._count = max(size, 1)
        ones = self.emit(aten.new_ones.default, ends, [size])
        place = self.emit(aten.cumsum.default, ones, 0)
        self._place = self.emit(aten.sub.Scalar, place, 1)
        forward = self.emit(aten.add.Tensor, self._place, self._start)
        self._forward = self.emit(aten.remainder.Scalar, forward, self._count)

    def first(self, rows: Ref) -> Ref:
        """Returns rows with those of the own groups in front."""
        return self.emit(aten.index_select.default, rows, 0, self._forward)

    def put_back(self, rows: Ref, outputs: Sequence[int | None]) -> None:
        """Gives the outputs the rows of the own groups at their places, among zeros."""
        back = self.emit(aten.sub.Tensor, self._place, self._start)
        back = self.emit(aten.remainder.Scalar, back, self._count)
        rows = self.emit(aten.index_select.default, rows, 0, back)
        end = self.emit(aten.slice.Tensor, self.ends, 0, -1)
        elsewhere = self.emit(aten.ge.Tensor, back, end)
        elsewhere = self.emit(aten.unsqueeze.default, elsewhere, 1)
        self.emit(aten.masked_fill.Scalar, rows, elsewhere, 0, outputs=outputs)
