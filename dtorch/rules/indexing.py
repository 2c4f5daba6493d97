"""Embedding and indexing: reading rows of a table, and gathering by index tensors.

`embedding` over a vocabulary that is split runs on each device's rows alone: indices that
belong to other devices read row zero and are masked, and the sum over devices is complete. An
index outside the whole table still raises, on every device.
"""

from __future__ import annotations

import torch

from ..lowering import LocalContext
from .sharding import Dims, OpCall, Sharding, dim_names, notation, rule

aten = torch.ops.aten


notation("... -> ... c!", aten.one_hot)


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


def _embed_locally(context: LocalContext) -> None:
    weight = context.spec(context.args[0])
    size, boxes = weight.shape[0], weight.boxes
    if all(box[0] == (0, size) for box in boxes):
        context.emit_default()
        return
    start = context.per_device(lambda i: boxes[i][0][0])
    stop = context.per_device(lambda i: boxes[i][0][1])
    empty = context.per_device(lambda i: int(boxes[i][0][0] == boxes[i][0][1]))
    indices = context.args[1]
    below = _and(context, context.emit(aten.ge.Scalar, indices, 0), aten.lt.Scalar, start)
    above = _and(context, context.emit(aten.ge.Scalar, indices, stop), aten.lt.Scalar, size)
    elsewhere = context.emit(aten.logical_or.default, below, above)
    shifted = context.emit(aten.sub.Tensor, indices, start)
    local = context.emit(aten.masked_fill.Scalar, shifted, elsewhere, 0)
    rows = context.args[0]
    if empty != 0:  # a device without rows of its own reads a row of zeros
        rows = context.emit(aten.constant_pad_nd.default, rows, _pad_rows(context, empty))
    read = context.emit(aten.embedding.default, rows, local)
    mask = context.emit(aten.unsqueeze.default, elsewhere, -1)
    context.emit(aten.masked_fill.Scalar, read, mask, 0, outputs=context.outputs)


def _and(context: LocalContext, mask: object, op: torch._ops.OpOverload, bound: object) -> object:
    other = context.emit(op, context.args[1], bound)
    return context.emit(aten.logical_and.default, mask, other)


def _pad_rows(context: LocalContext, empty: object) -> object:
    counts = empty if isinstance(empty, tuple) else (empty,) * len(context.mesh.devices)
    return context.per_device(lambda i: (0, 0, 0, counts[i]))


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
    """Rows of a dim, which must be whole."""
    names = dim_names(call.tensors[0].shape)
    if not names:
        return Sharding(((), (None,) * call.tensors[1].ndim), ((),))
    at = call["dim"] % len(names)
    index: Dims = ("i",) if call.tensors[1].ndim else ()
    result = (*names[:at], "i" if index else None, *names[at + 1 :])
    whole = frozenset(n for n in (names[at],) if n)
    return Sharding((names, index), (result,), whole=whole, linear=(frozenset({0}),))


@rule(aten.gather)
def gather(call: OpCall) -> Sharding:
    """Elements along a dim, which must be whole; other dims split where the sizes agree."""
    source, index = call.tensors[0].shape, call.tensors[1].shape
    if len(source) != len(index) or not source:
        return Sharding(((None,) * len(source), (None,) * len(index)), ((None,) * len(index),))
    at = call["dim"] % len(source)
    names = dim_names(index)
    table = tuple(n if d != at and source[d] == index[d] else None for d, n in enumerate(names))
    result = tuple(n if d == at or source[d] == index[d] else None for d, n in enumerate(names))
    return Sharding((table, result), (result,), linear=(frozenset({0}),))


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
