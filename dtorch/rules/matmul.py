"""Matrix products: linear, matmul and its relatives, in one line each.

`matmul` itself needs code because its arguments may have one dim (a vector) or many.

Splitting the contracted dim gives a `Partial` result, but a `Partial` argument is reduced first,
although products are linear: with inf or zeros in the other argument, the parts' products would
cancel to nan where the whole has a value.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from ..custom_ops import fold_mm
from ..lowering import LocalContext
from .sharding import Dims, OpCall, Sharding, assign, dim_names, notation, parse, rule

aten = torch.ops.aten

notation("m k, k n -> m n", aten.mm)
notation("b m k, b k n -> b m n", aten.bmm)
notation("m k, k -> m", aten.mv)
notation("k, k -> ", aten.dot, aten.vdot)
notation("m, n -> m n", aten.outer)


@rule(aten.linear)
def linear(call: OpCall) -> Sharding:
    """``... k, n k, +n -> ... n``; a weight of one dim is a row that gives no n."""
    row = call.tensors[1].ndim == 1
    return parse("... k, k, + -> ..." if row else "... k, n k, +n -> ... n", call)


@rule(aten.matmul)
def matmul(call: OpCall) -> Sharding:
    """``... m k, ... k n -> ... m n``, where a vector lacks its m or n."""
    a, b = (t.ndim for t in call.tensors)
    batch = max(a, b) - 2
    left = _with_batch(("k",) if a == 1 else ("m", "k"), call, 0, batch)
    right = _with_batch(("k",) if b == 1 else ("k", "n"), call, 1, batch)
    result = tuple(f"b{i}" for i in range(max(batch, 0)))
    result += (("m",) if a > 1 else ()) + (("n",) if b > 1 else ())
    return Sharding((left, right), (result,), reduce={"k": "sum"})


def _with_batch(matrix: Dims, call: OpCall, index: int, batch: int) -> Dims:
    shape, other = call.tensors[index].shape, call.tensors[1 - index].shape
    count = len(shape) - len(matrix)
    names: list[str | None] = []
    for i in range(count):
        place = batch - count + i
        across = len(other) - 2 - (count - i)
        broadcast = shape[i] == 1 and across >= 0 and other[across] != 1
        names.append(None if broadcast else f"b{place}")
    return (*names, *matrix)


@rule(aten.addmm)
def addmm(call: OpCall) -> Sharding:
    """``+(m n), m k, k n -> m n`` with the addend broadcast to the result."""
    return _with_addend(call, ("m", "k"), ("k", "n"), ("m", "n"))


@rule(aten.baddbmm)
def baddbmm(call: OpCall) -> Sharding:
    """``+(b m n), b m k, b k n -> b m n`` with the addend broadcast to the result."""
    return _with_addend(call, ("b", "m", "k"), ("b", "k", "n"), ("b", "m", "n"))


@rule(aten.addbmm)
def addbmm(call: OpCall) -> Sharding:
    """``+(m n), b m k, b k n -> m n``: summed over the batch too."""
    return _with_addend(call, ("b", "m", "k"), ("b", "k", "n"), ("m", "n"))


@rule(aten.addr)
def addr(call: OpCall) -> Sharding:
    """``m n, m, n -> m n`` with the addend broadcast to the result."""
    return _with_addend(call, ("m",), ("n",), ("m", "n"))


@rule(aten._trilinear)
def trilinear(call: OpCall) -> Sharding:
    """The product of three tensors, each with new dims inserted, summed over some dims."""
    result = dim_names(range(call["i1"].ndim + len(call["expand1"])))
    inputs = {}
    for i in "123":
        shape, inserted = call[f"i{i}"].shape, call[f"expand{i}"]
        kept = [n for d, n in enumerate(result) if d not in inserted]
        inputs[f"i{i}"] = tuple(None if s == 1 else n for s, n in zip(shape, kept, strict=True))
    summed = [n for d, n in enumerate(result) if d in call["sumdim"] and n]
    outputs = (tuple(n for n in result if n not in summed),)
    return assign(call, inputs, outputs, reduce=dict.fromkeys(summed, "sum"))


@rule(aten._cdist_forward)
def cdist(call: OpCall) -> Sharding:
    """``... m k!, ... n k! -> ... m n``."""
    return parse("... m k!, ... n k! -> ... m n", call, filled=frozenset({"m", "n"}))


@rule(aten._cdist_backward)
def cdist_backward(call: OpCall) -> Sharding:
    """``... m n, ... m k!, ... n k!, ... m n -> ... m k!``: over n a partial sum.

    Of nothing the kernel returns what has the shape of the first points, not broadcast.
    """
    found = parse("... m n, ... m k!, ... n k!, ... m n -> ... m k!", call)
    names = (n for dims in found.inputs for n in dims if n is not None)
    return dataclasses.replace(found, filled=frozenset(names))


@rule(aten.addmv)
def addmv(call: OpCall) -> Sharding:
    """``+m, m k, k -> m``."""
    return _with_addend(call, ("m", "k"), ("k",), ("m",))


def _with_addend(call: OpCall, left: Dims, right: Dims, result: Dims) -> Sharding:
    shape, full = call.tensors[0].shape, call.results[0].shape
    offset = len(full) - len(shape)
    addend = tuple(
        None if size == 1 and full[i + offset] != 1 else result[i + offset]
        for i, size in enumerate(shape)
    )
    return Sharding(
        (addend, left, right),
        (result,),
        reduce={n: "sum" for n in (*left, *right) if n and n not in result},
        additive=frozenset({0}),
    )


def _fold_locally(context: LocalContext) -> None:
    """Flattens each shard, then multiplies."""
    flat = []
    for argument in context.args:
        shapes = context.spec(argument).local_shapes
        size = context.per_device(
            lambda i, shapes=shapes: (math.prod(shapes[i][:-1]), shapes[i][-1])
        )
        flat.append(context.emit(aten.reshape.default, argument, size))
    left = context.emit(aten.t.default, flat[0])
    context.emit(aten.mm.default, left, flat[1], outputs=context.outputs)


notation("... m, ... k -> m k", fold_mm, localize=_fold_locally)
