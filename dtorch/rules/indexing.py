"""Embedding and indexing: reading rows of a table, and gathering by index tensors.

`embedding` over a vocabulary that is split runs on each device's rows alone: indices that
belong to other devices read row zero and are masked, and the sum over devices is complete. An
index outside the whole table still raises, on every device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..lowering import LocalContext
from ..program import Localize, Ref
from ..spec import Spec
from .sharding import Dims, OpCall, Sharding, assign, dim_names, notation, rule

aten = torch.ops.aten


notation("... -> ... c!", aten.one_hot)


@rule(aten.take)
def take(call: OpCall) -> Sharding:
    """Elements of a whole tensor, by their number: the index keeps its layout."""
    names = dim_names(call["index"].shape, "i")
    return assign(call, {"index": names}, (names,), linear=(frozenset({0}),))


@rule(aten.bucketize.Tensor, aten.searchsorted.Tensor)
def search(call: OpCall) -> Sharding:
    """Places in whole sorted sequences: one for all values, or one for each row of them."""
    names = dim_names(call["self"].shape)
    order = call.arguments.get("sorted_sequence")
    rows = (*names[:-1], None) if order is not None and order.ndim > 1 else ()
    inputs = {"self": names, "sorted_sequence": rows, "sorter": rows}
    return assign(call, inputs, (names,))


@rule(aten._embedding_bag, aten._embedding_bag_forward_only)
def embedding_bag(call: OpCall) -> Sharding:
    """``v! d, 1, 1 -> 1 d`` and what a backward needs: the vocabulary and the bags are whole."""
    *others, last = call.results
    maxima = (None, "d") if len(last.shape) == 2 else (None,)
    outputs = ((None, "d"), *((None,) * len(m.shape) for m in others[1:]), maxima)
    return assign(call, {"weight": (None, "d")}, outputs)


@rule(aten.embedding)
def embedding(call: OpCall) -> Sharding:
    """``v d, ... -> ... d``: a split v gives a masked partial sum."""
    outer = dim_names(call.tensors[1].shape, "i")
    return Sharding(
        (("v", "d"), outer),
        ((*outer, "d"),),
        reduce={"v": "sum"},
        linear=(frozenset({0}),),
        localize=_embed_locally,
    )


class _OwnPart(NamedTuple):
    """What a device has of a table that is split: its rows, its indices, and which are not its."""

    rows: Ref
    indices: Ref
    elsewhere: Ref


def _own_part(context: LocalContext, table: Ref, dim: int, indices: Ref) -> _OwnPart | None:
    """Returns what a device can read of a table split over `dim`, or None where it is whole."""
    spec = context.spec(table)
    size, boxes = spec.shape[dim], [box[dim] for box in spec.boxes]
    if all(box == (0, size) for box in boxes):
        return None
    start = context.per_device(lambda i: boxes[i][0])
    stop = context.per_device(lambda i: boxes[i][1])
    empty = context.per_device(lambda i: int(boxes[i][0] == boxes[i][1]))

    def between(low: object, high: object) -> Ref:
        above = context.emit(aten.ge.Scalar, indices, low)
        below = context.emit(aten.lt.Scalar, indices, high)
        return context.emit(aten.logical_and.default, above, below)

    elsewhere = context.emit(aten.logical_or.default, between(0, start), between(stop, size))
    shifted = context.emit(aten.sub.Tensor, indices, start)
    own = context.emit(aten.masked_fill.Scalar, shifted, elsewhere, 0)
    if empty != 0:  # a device without rows of its own reads a row of zeros
        table = context.emit(aten.constant_pad_nd.default, table, _pad(context, spec, dim, empty))
    return _OwnPart(table, own, elsewhere)


def _pad(context: LocalContext, spec: Spec, dim: int, empty: object) -> object:
    counts = empty if isinstance(empty, tuple) else (empty,) * len(context.mesh.devices)
    before = (0, 0) * (spec.ndim - 1 - dim)
    return context.per_device(lambda i: (*before, 0, counts[i]))


def _embed_locally(context: LocalContext) -> None:
    part = _own_part(context, context.args[0], 0, context.args[1])
    if part is None:
        return context.emit_default()
    read = context.emit(aten.embedding.default, part.rows, part.indices)
    mask = context.emit(aten.unsqueeze.default, part.elsewhere, -1)
    context.emit(aten.masked_fill.Scalar, read, mask, 0, outputs=context.outputs)


def _gather_locally(context: LocalContext) -> None:
    table, dim, indices = context.args[:3]
    part = _own_part(context, table, dim % context.spec(table).ndim, indices)
    if part is None:
        return context.emit_default()
    read = context.emit(aten.gather.default, part.rows, dim, part.indices)
    context.emit(aten.masked_fill.Scalar, read, part.elsewhere, 0, outputs=context.outputs)


def _select_locally(context: LocalContext) -> None:
    table, dim, indices = context.args
    ndim = context.spec(table).ndim
    part = _own_part(context, table, dim % ndim, indices)
    if part is None:
        return context.emit_default()
    read = context.emit(aten.index_select.default, part.rows, dim, part.indices)
    shape = [-1 if d == dim % ndim else 1 for d in range(ndim)]
    mask = context.emit(aten.reshape.default, part.elsewhere, shape)
    context.emit(aten.masked_fill.Scalar, read, mask, 0, outputs=context.outputs)


@rule(aten.embedding_dense_backward)
def embedding_backward(call: OpCall) -> Sharding:
    """``... d, ... -> v! d``: rows of gradient summed by index.

    Scaling by frequency needs the indices of all devices, to count them.
    """
    outer = dim_names(call.tensors[1].shape, "i")
    counted = frozenset(n for n in outer if n) if call["scale_grad_by_freq"] else frozenset()
    return Sharding(
        ((*outer, "d"), outer),
        (("v", "d"),),
        reduce={n: "sum" for n in outer if n},
        whole=frozenset({"v"}) | counted,
        linear=(frozenset({0}),),
    )


@rule(aten.index_select)
def index_select(call: OpCall) -> Sharding:
    """``a s b, i -> a i b``: a split s gives a masked partial sum."""
    names = dim_names(call.tensors[0].shape)
    if not names:
        return Sharding(((), (None,) * call.tensors[1].ndim), ((),))
    at = call["dim"] % len(names)
    index: Dims = ("i",) if call.tensors[1].ndim else ()
    result = (*names[:at], "i" if index else None, *names[at + 1 :])
    return _read(call, (names, index), result, at, _select_locally)


@rule(aten.gather)
def gather(call: OpCall) -> Sharding:
    """Elements along a dim, which if split gives a masked partial sum.

    Other dims split where the sizes agree.
    """
    source, index = call.tensors[0].shape, call.tensors[1].shape
    if len(source) != len(index) or not source:
        return Sharding(((None,) * len(source), (None,) * len(index)), ((None,) * len(index),))
    at = call["dim"] % len(source)
    alike = [s == i for s, i in zip(source, index, strict=True)]
    result = tuple(n if d == at or alike[d] else None for d, n in enumerate(dim_names(index)))
    table = tuple("s" if d == at else n if alike[d] else None for d, n in enumerate(result))
    return _read(call, (table, result), result, at, _gather_locally)


def _read(
    call: OpCall, inputs: tuple[Dims, Dims], result: Dims, at: int, localize: Localize
) -> Sharding:
    """Reads along a dim of a table; split, it is worth it only where less is read than there is."""
    table, index = call.tensors[0], call.tensors[1]
    split = inputs[0][at]
    reads_less = index.shape[at if index.ndim > 1 else 0 :][:1] < table.shape[at : at + 1]
    may_split = reads_less and table.dtype != torch.bool
    return Sharding(
        inputs,
        (result,),
        reduce={split: "sum"} if split and may_split else {},
        whole=frozenset({split} if split and not may_split else ()),
        linear=(frozenset({0}),),
        localize=localize,
    )


@rule(aten.index.Tensor)
def index(call: OpCall) -> Sharding:
    """Index tensors in place of dims, which must be whole; the others keep their names."""
    indices = call["indices"]
    shape = call.tensors[0].shape
    given = [d for d, i in enumerate(indices) if i is not None]
    if any(indices[d].dtype in (torch.bool, torch.uint8) for d in given):
        # A mask's result has a shape that depends on its values.
        return Sharding(
            tuple((None,) * t.ndim for t in call.tensors),
            tuple((None,) * len(m.shape) for m in call.results),
        )
    names = dim_names(shape)
    broadcast = torch.broadcast_shapes(*(indices[d].shape for d in given))
    drawn = dim_names(broadcast, "i")
    adjacent = given == list(range(given[0], given[-1] + 1))
    at = given[0] if adjacent else 0
    kept = [n for d, n in enumerate(names) if d not in given]
    result = (*kept[:at], *drawn, *kept[at:])
    inputs: list[Dims] = [names]
    for d in given:
        offset = len(broadcast) - indices[d].ndim
        inputs.append(
            tuple(
                None if size == 1 and broadcast[i + offset] != 1 else drawn[i + offset]
                for i, size in enumerate(indices[d].shape)
            )
        )
    whole = frozenset(n for d in given if (n := names[d]))
    return Sharding(tuple(inputs), (result,), whole=whole, linear=(frozenset({0}),))
