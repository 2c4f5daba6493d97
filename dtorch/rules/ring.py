"""One step of ring attention on each device: which queries attend to which keys, and how.

The queries, and the keys and values, are split into as many pieces as the ring has devices. In
step s the device with piece i of the queries has the keys of piece i - s. A piece is one range of
the sequence, or two where the order is balanced. Of two pieces a causal mask leaves nothing, a
part that a device reads as a range of the queries and a range of the keys, or a triangle.

A device that has nothing to do in a step passes on what it had. The kernel must not see an empty
piece. What kernels give for a row that sees no key differs, NaN among it; here it is zero, with a
log-sum-exp of minus infinity, which a merge gives no weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..attention_kernels import KERNELS, Sizes
from ..custom_ops import attend_block, attend_block_backward
from ..lowering import LocalContext, PerDevice, memory_order
from ..mesh import DeviceMesh
from ..program import Ref
from ..spec import Spec
from .sharding import Dims, OpCall, Sharding, assign, rule

aten = torch.ops.aten

Range = tuple[int, int]
"""A range of a sequence: where it starts and its length."""


class Block(NamedTuple):
    """What a device computes in one step, in places of its own pieces.

    Attributes:
        queries: The rows of its queries.
        keys: The rows of the keys and values that it has now.
        diagonal: Row r sees the keys up to r + diagonal; None where it sees all.
    """

    queries: Range
    keys: Range
    diagonal: int | None


def block(queries: tuple[Range, ...], keys: tuple[Range, ...], is_causal: bool) -> Block | None:
    """Returns what of two pieces attends to each other, or None where nothing does.

    Args:
        queries: The ranges of a piece of the queries, ascending.
        keys: The ranges of a piece of the keys.
        is_causal: Whether query r sees the keys up to r only.
    """
    queries, keys = _filled(queries), _filled(keys)
    num_queries, num_keys = _length(queries), _length(keys)
    if not num_queries or not num_keys:
        return None
    if not is_causal:
        return Block((0, num_queries), (0, num_keys), None)
    if queries == keys:
        return Block((0, num_queries), (0, num_keys), 0)
    if len(queries) == len(keys) == 1:
        (start, _), (first, _) = queries[0], keys[0]
        diagonal = start - first
        if diagonal + num_queries <= 0:
            return None
        whole = diagonal >= num_keys - 1
        return Block((0, num_queries), (0, num_keys), None if whole else diagonal)
    # Of two pieces of a balanced order, every range sees all of another or nothing.
    seen = [
        (_offset(queries, q), _offset(keys, k))
        for q in range(len(queries))
        for k in range(len(keys))
        if _end(keys[k]) <= queries[q][0]
    ]
    if not seen:
        return None
    (rows, row_stop), (columns, column_stop) = (
        (min(start for start, _ in side), max(stop for _, stop in side))
        for side in (list(s) for s in zip(*seen, strict=True))
    )
    return Block((rows, row_stop - rows), (columns, column_stop - columns), None)


def _filled(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    return tuple(r for r in ranges if r[1])


def _length(ranges: tuple[Range, ...]) -> int:
    return sum(length for _, length in ranges)


def _end(one: Range) -> int:
    return one[0] + one[1]


def _offset(ranges: tuple[Range, ...], number: int) -> Range:
    """Where a range of a piece begins and stops within the piece."""
    start = _length(ranges[:number])
    return start, start + ranges[number][1]


_NOTHING = Block((0, 0), (0, 0), None)


# -- the rules -------------------------------------------------------------------------------

_HEADS = ("b", "h", "n", "e")


@rule(attend_block)
def attend_block_rule(call: OpCall) -> Sharding:
    """``b h n e!`` for all: n, the pieces, stay where they are."""
    inputs = dict.fromkeys(("query", "key", "value", "out"), _HEADS)
    inputs |= {"logsumexp": _HEADS[:3], "mask": _mask(call["mask"])}
    outputs = (_HEADS, _HEADS[:3])
    return assign(call, inputs, outputs, localize=_attend_locally, **_options(call))


@rule(attend_block_backward)
def attend_block_backward_rule(call: OpCall) -> Sharding:
    """As forward."""
    names = ("grad", "query", "key", "value", "out", "grad_query", "grad_key", "grad_value")
    inputs = dict.fromkeys(names, _HEADS)
    inputs |= {"logsumexp": _HEADS[:3], "mask": _mask(call["mask"])}
    outputs = (_HEADS,) * 3
    return assign(call, inputs, outputs, localize=_attend_locally_backward, **_options(call))


def _options(call: OpCall) -> dict[str, Any]:
    """Fewer key heads than query heads are split evenly; the axes of the ring split n alone."""
    fewer = call["query"].shape[1] != call["key"].shape[1]
    return {
        "whole": frozenset({"e"}),
        "filled": frozenset({"b", "h"}),
        "even": frozenset({"h"} if fewer else ()),
        "fixed": {"n": frozenset(_axes_of(call["query"]))},
    }


def _mask(mask: Spec | None) -> Dims:
    if mask is None:
        return ()
    names = ("b", "h", "n", None)
    return tuple(None if size == 1 else n for n, size in zip(names, mask.shape, strict=True))


# -- what a device runs ------------------------------------------------------------------------


class _Step:
    """One step on the devices of a mesh: their blocks, and the devices that have one kind."""

    def __init__(self, context: LocalContext) -> None:
        self.context = context
        query = context.argument("query")
        self.spec = context.spec(query)
        self.places = _ring_places(self.spec)
        count = context.argument("num_pieces")
        queries = _ranges(context.argument("query_ranges"), count)
        keys = _ranges(context.argument("key_ranges"), count)
        step, is_causal = context.argument("step"), context.argument("is_causal")
        self.kernel = KERNELS[context.argument("kernel")]
        self.key_ranges = [keys[(i - step) % count] for i in self.places]
        assert self.places == [i % count for i in self.places], "not the layout of the ring"
        filled_up = self.spec.shape[2] // count
        for i, shape in zip(self.places, self.spec.local_shapes, strict=True):
            assert shape[2] in (filled_up, _length(queries[i])), "not the pieces of the ring"
        self.blocks = [
            block(queries[i], k, is_causal)
            for i, k in zip(self.places, self.key_ranges, strict=True)
        ]

    def kinds(self) -> dict[str | None, list[int]]:
        """The devices that run the same operations, by what these are."""
        kinds: dict[str | None, list[int]] = {}
        for index, found in enumerate(self.blocks):
            kinds.setdefault(None if found is None else self._kind(index, found), []).append(index)
        return kinds

    def _kind(self, index: int, found: Block) -> str:
        rows = self.spec.local_shapes[index][2]
        part = "" if found.queries == (0, rows) else "part"
        if found.diagonal is None:
            return "all" + part
        is_plain = found.diagonal == 0 and self.context.argument("mask") is None
        return ("causal" if is_plain else "diagonal") + part


def _ring_places(spec: Spec) -> list[int]:
    """The number of the piece of each device: dim 2 is split in mesh-axis order."""
    axes = _axes_of(spec)
    coordinates = [tuple(c[a] for a in axes) for c in spec.mesh.coordinates()]
    order = sorted(set(coordinates))
    return [order.index(c) for c in coordinates]


def _axes_of(spec: Spec) -> list[int]:
    """The axes of the ring."""
    placed = enumerate(zip(spec.mesh.shape, spec.placements, strict=True))
    return [a for a, (n, p) in placed if n > 1 and p.is_shard(2)]


def _ranges(flat: list[int], count: int) -> list[tuple[Range, ...]]:
    """The ranges of each of `count` pieces, given one after another."""
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
    each = len(pairs) // count
    return [tuple(pairs[i * each : (i + 1) * each]) for i in range(count)]


class _Here:
    """Writes what the devices of one kind run: a mesh of theirs, and tables over them."""

    def __init__(self, step: _Step, devices: list[int]) -> None:
        self.step, self.devices = step, devices
        mesh = step.context.mesh
        self.mesh = DeviceMesh(mesh.device_type, [mesh.devices[i].id for i in devices])

    def emit(self, op: Any, *args: Any, outputs: Any = None, **kwargs: Any) -> Ref:
        return self.step.context.emit(op, *args, outputs=outputs, mesh=self.mesh, **kwargs)

    def one(self, op: Any, *args: Any, **kwargs: Any) -> Ref:
        return self.emit(op, *args, **kwargs)

    def several(self, count: int, op: Any, *args: Any, **kwargs: Any) -> list[Ref]:
        slots = [self.step.context.new_slot() for _ in range(count)]
        dropped = [None] * (len(op._schema.returns) - count)
        self.emit(op, *args, outputs=[*slots, *dropped], **kwargs)
        return list(map(Ref, slots))

    def zeros(self, shape: list[int], dtype: torch.dtype) -> Ref:
        device = self.step.context.mesh.torch_device()
        return self.emit(aten.full.default, shape, 0, dtype=dtype, device=device)

    def sizes(self, value: Callable[[Sizes], Any]) -> Any:
        def here(index: int) -> Any:
            found = self.step.blocks[index] or _NOTHING
            batch, heads, *_ = self.step.spec.local_shapes[index]
            return value(Sizes(batch, heads, found.queries[1], found.keys[1]))

        return self.table(here)

    def table(self, value: Callable[[int], Any]) -> Any:
        """The value of each of the devices, by its number in the whole mesh."""
        values = [value(i) for i in self.devices]
        return values[0] if all(v == values[0] for v in values) else PerDevice(values)

    def of_block(self, value: Callable[[Block], Any]) -> Any:
        """A value that follows from the block of each of the devices."""
        return self.table(lambda i: value(self.step.blocks[i] or _NOTHING))

    def rows(self, tensor: Ref, whole: bool) -> Ref:
        """The block's rows of something with the queries in dim 2."""
        return tensor if whole else self._narrow(tensor, lambda b: b.queries)

    def keys(self, tensor: Ref) -> Ref:
        """The block's rows of the keys or values."""
        return self._narrow(tensor, lambda b: b.keys)

    def _narrow(self, tensor: Ref, of: Callable[[Block], Range]) -> Ref:
        start, length = self.of_block(lambda b: of(b)[0]), self.of_block(lambda b: of(b)[1])
        return self.emit(aten.narrow.default, tensor, 2, start, length)

    @property
    def num_rows(self) -> list[int]:
        """The rows of queries of each device of the whole mesh."""
        return [s[2] for s in self.step.spec.local_shapes]

    def among(
        self,
        fill: float,
        tensor: Ref,
        of: Callable[[Block], Range],
        sizes: list[int],
        last: int = 3,
    ) -> Ref:
        """Rows of dim 2, of dims up to `last`, at their place in `sizes` rows of `fill`."""

        def pad(index: int) -> list[int]:
            start, length = of(self.step.blocks[index] or _NOTHING)
            return [*(0, 0) * (last - 2), start, sizes[index] - start - length]

        return self.emit(aten.constant_pad_nd.default, tensor, self.table(pad), fill)

    def put_back(self, whole: Ref, rows: Ref) -> Ref:
        """Everything, with other rows in the place of the block's."""
        start = self.of_block(lambda b: b.queries[0])
        end = self.of_block(lambda b: _end(b.queries))
        return self.emit(aten.slice_scatter.default, whole, rows, 2, start, end)

    def cast(self, tensor: Ref, dtype: torch.dtype) -> Ref:
        if self.step.spec.dtype == dtype:
            return tensor
        return self.emit(aten._to_copy.default, tensor, dtype=dtype)

    def merged(self, old: Ref, new: Ref, old_sums: Ref, sums: Ref, is_masked: bool) -> Ref:
        """Two results, weighted by what their scores add up to."""
        more = self.emit(aten.sub.Tensor, sums, old_sums)
        if is_masked:  # a row may have seen no key in either
            more = self.emit(aten.nan_to_num.default, more, 0.0, math.inf, -math.inf)
        # Their difference may be infinite, and one less a weight may round to zero.
        weights = [
            self.emit(aten.unsqueeze.default, self.emit(aten.sigmoid.default, t), -1)
            for t in (self.emit(aten.neg.default, more), more)
        ]
        weighted = self.emit(aten.mul.Tensor, old, weights[0])
        return self.emit(aten.addcmul.default, weighted, new, weights[1])

    def pass_on(self, number: int, given: Ref | None, fill: float) -> None:
        """A result of devices whose pieces have nothing to do with each other."""
        context = self.step.context
        to = (context.outputs[number],)
        if given is not None:
            self.emit(aten.alias.default, given, outputs=to)
            return
        spec = context.output_spec(number)
        shape = self.table(lambda i: list(spec.local_shapes[i]))
        options = {"dtype": spec.dtype, "device": context.mesh.torch_device()}
        self.emit(aten.full.default, shape, fill, outputs=to, **options)

    def mask(self, kind: str) -> Ref | None:
        """What the block sees of each other, to be added to the scores; None for all."""
        context, triangle = self.step.context, None
        if kind.startswith("diagonal"):
            sizes = self.of_block(lambda b: [1, 1, b.queries[1], b.keys[1]])
            options = {"dtype": self.step.spec.dtype, "device": context.mesh.torch_device()}
            filled = self.emit(aten.full.default, sizes, -math.inf, **options)
            above = self.of_block(lambda b: (b.diagonal or 0) + 1)
            triangle = self.emit(aten.triu.default, filled, above)
        given = context.argument("mask")
        if given is None:
            return triangle
        shape = context.spec(given).shape
        if shape[2] != 1:
            given = self.rows(given, not kind.endswith("part"))
        if shape[3] != 1:
            # Keys of one piece are one range: a balanced order is only for causal attention.
            first = self.table(lambda i: self.step.key_ranges[i][0][0])
            length = self.of_block(lambda b: b.keys[1])
            given = self.emit(aten.narrow.default, given, 3, first, length)
        return given if triangle is None else self.emit(aten.add.Tensor, given, triangle)


def _attend_locally(context: LocalContext) -> None:
    step = _Step(context)
    out, logsumexp = (context.argument(n) for n in ("out", "logsumexp"))
    for kind, devices in step.kinds().items():
        here = _Here(step, devices)
        if kind is None:
            here.pass_on(0, out, 0.0)
            here.pass_on(1, logsumexp, -math.inf)
        else:
            _attend(here, kind, out, logsumexp)


def _attend(here: _Here, kind: str, out: Ref | None, logsumexp: Ref | None) -> None:
    context, whole = here.step.context, not kind.endswith("part")
    rows = here.rows(context.argument("query"), whole)
    keys, values = (here.keys(context.argument(n)) for n in ("key", "value"))
    mask = here.mask(kind)
    kernel, scale = here.step.kernel, context.argument("scale")
    fitted = None if mask is None else kernel.fitted(here, mask)
    is_causal = kind.startswith("causal")
    new, sums = kernel.forward(here, (rows, keys, values), fitted, is_causal, scale)
    new = here.cast(new, context.output_spec(0).dtype)
    if mask is not None:
        largest = here.emit(aten.amax.default, mask, [-1])
        unseeing = here.emit(aten.eq.Scalar, largest, -math.inf)
        sums = here.emit(aten.masked_fill.Scalar, sums, unseeing, -math.inf)
        unseeing = here.emit(aten.unsqueeze.default, unseeing, -1)
        new = here.emit(aten.masked_fill.Scalar, new, unseeing, 0.0)
    if out is None or logsumexp is None:
        if not whole:
            new = here.among(0.0, new, lambda b: b.queries, here.num_rows)
            sums = here.among(-math.inf, sums, lambda b: b.queries, here.num_rows, last=2)
    else:
        old, old_sums = here.rows(out, whole), here.rows(logsumexp, whole)
        new = here.merged(old, new, old_sums, sums, mask is not None)
        sums = here.emit(aten.logaddexp.default, old_sums, sums)
        if not whole:
            new, sums = here.put_back(out, new), here.put_back(logsumexp, sums)
    here.emit(aten.alias.default, new, outputs=context.outputs[:1])
    here.emit(aten.alias.default, sums, outputs=context.outputs[1:])


def _attend_locally_backward(context: LocalContext) -> None:
    step = _Step(context)
    sums = [context.argument(n) for n in ("grad_query", "grad_key", "grad_value")]
    for kind, devices in step.kinds().items():
        here = _Here(step, devices)
        if kind is not None:
            _attend_backward(here, kind, sums)
            continue
        for number, given in enumerate(sums):
            here.pass_on(number, given, 0.0)


def _attend_backward(here: _Here, kind: str, sums: list[Ref | None]) -> None:
    context, whole = here.step.context, not kind.endswith("part")
    grad, rows, out, logsumexp = (
        here.rows(context.argument(n), whole) for n in ("grad", "query", "out", "logsumexp")
    )
    keys, values = (here.keys(context.argument(n)) for n in ("key", "value"))
    kernel, scale = here.step.kernel, context.argument("scale")
    mask = here.mask(kind)
    fitted = None if mask is None else kernel.fitted(here, mask)
    laid_out = kernel.laid_out(here, out, logsumexp, memory_order(here.step.spec))
    operands = (grad, rows, keys, values, *laid_out)
    made = kernel.backward(here, operands, fitted, kind.startswith("causal"), scale)
    num_keys = [s[2] for s in context.spec(context.argument("key")).local_shapes]
    for number, (new, given) in enumerate(zip(made, sums, strict=True)):
        wide = here.cast(new, context.output_spec(number).dtype)
        if number or not whole:
            sizes = num_keys if number else here.num_rows
            wide = here.among(0.0, wide, _keys_of if number else _queries_of, sizes)
        to = (context.outputs[number],)
        if given is None:
            here.emit(aten.alias.default, wide, outputs=to)
        else:
            here.emit(aten.add.Tensor, given, wide, outputs=to)


def _queries_of(one: Block) -> Range:
    return one.queries


def _keys_of(one: Block) -> Range:
    return one.keys
