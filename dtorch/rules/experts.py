"""What each device runs of a layer of experts: its own experts on the rows routed to them.

Pairs of token and expert are sorted by expert, so that the rows for one device are one range, the
ends of which are read at run time from how many pairs each expert has. Piece s of a device is for
the s-th device after it among those that split the experts; where tokens are not split as the
experts are, nothing is exchanged, and the one piece has the rows of the device's own experts.

On each mesh axis, tokens are split, or experts, or both (which exchange), or the features of the
experts; the sharded form has brought the arguments to one of these layouts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..expert_ops import (
    expert_apply,
    expert_apply_backward,
    expert_dot,
    expert_join,
    expert_order,
    expert_pieces,
    expert_sum,
)
from ..lowering import LocalContext
from ..placement import Partial, Placement, Replicate, Shard
from ..program import Localize, Ref
from ..redistribution import group_of
from ..spec import Spec
from .sharding import OpCall, Sharding, Strategy, replicated, rule

aten = torch.ops.aten
_WHOLE, _ROWS, _SUM = Replicate(), Shard(0), Partial("sum")


# -- layouts -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Listed(Sharding):
    """A sharding whose strategies are listed: no name can say that two dims are split alike."""

    listed: tuple[Strategy, ...] = ()

    def strategies(self) -> Iterator[Strategy]:
        yield from self.listed


_Layouts = Sequence[tuple[Sequence[Placement], Sequence[Placement]]]


def _listed(call: OpCall, localize: Localize, layouts: _Layouts) -> Sharding:
    whole = replicated(call)
    listed = tuple(Strategy(tuple(inputs), tuple(outputs)) for inputs, outputs in layouts)
    return _Listed(whole.inputs, whole.outputs, localize=localize, listed=listed)


def _alike(call: OpCall, localize: Localize, tokens: Spec, *more: Any) -> Sharding:
    """Everything whole, or everything by tokens, given one argument that has [..., K] of them."""
    num_dims = tokens.ndim - 1
    layouts: list[Any] = [([_WHOLE] * len(call.tensors), [_WHOLE] * len(call.results))]
    for dim in range(num_dims):  # what has no such dims is cut into the parts of the devices
        sides = (
            [Shard(dim) if len(t.shape) > num_dims else _ROWS for t in side]
            for side in (call.tensors, call.results)
        )
        layouts.append(tuple(sides))
    return _listed(call, localize, [*layouts, *more])


@rule(expert_order)
def expert_order_rule(call: OpCall) -> Sharding:
    """Each part of the tokens by itself."""
    return _alike(call, _sort_by_expert, call["ids"])


@rule(expert_pieces)
def expert_pieces_rule(call: OpCall) -> Sharding:
    """Each part of the tokens by itself."""
    return _alike(call, _cut_pieces, call["order"])


@rule(expert_join)
def expert_join_rule(call: OpCall) -> Sharding:
    """Each part of the tokens by itself; results of some of the experts or features add up."""
    count = len(call["pieces"])
    return _alike(call, _join_pieces, call["rank"], ([_SUM] * count + [_WHOLE] * 2, [_SUM]))


@rule(expert_sum)
def expert_sum_rule(call: OpCall) -> Sharding:
    """By tokens; a sum of weighted parts is the weighted sum, the weights being finite."""
    return _alike(call, _add_up, call["weights"], ([_SUM, _WHOLE], [_SUM]))


@rule(expert_dot)
def expert_dot_rule(call: OpCall) -> Sharding:
    """As `expert_sum`."""
    return _alike(call, _multiply, call["grad"], ([_SUM, _WHOLE], [_SUM]))


@rule(expert_apply)
def expert_apply_rule(call: OpCall) -> Sharding:
    """Split by tokens, by experts, by both, or by features."""
    count = len(call["pieces"])
    more = 3 if count > 1 else 0

    def layout(
        rows: Placement,
        counts: Placement,
        weights: Sequence[Placement],
        projected: Placement,
        results: Placement,
    ) -> Any:
        inputs = [rows] * count + [counts, *weights]
        return inputs, [projected] + [results] * count + [rows] * more

    whole = (_WHOLE, _WHOLE)
    layouts = [
        layout(_WHOLE, _WHOLE, whole, _WHOLE, _WHOLE),
        layout(_ROWS, _ROWS, whole, _ROWS, _ROWS),
        layout(_ROWS, _WHOLE, whole, _ROWS, _ROWS),
        layout(_ROWS, _WHOLE, (_ROWS, _ROWS), _ROWS, _ROWS),
        layout(_WHOLE, _WHOLE, (_ROWS, _ROWS), _WHOLE, _SUM),
        layout(_WHOLE, _WHOLE, (Shard(1), Shard(2)), Shard(1), _SUM),
    ]
    return _listed(call, _apply_experts, layouts)


@rule(expert_apply_backward)
def expert_apply_backward_rule(call: OpCall) -> Sharding:
    """As forward."""
    count = len(call["pieces"])
    orders = 0 if call["order"] is None else 2

    def layout(
        rows: Placement,
        projected: Placement,
        counts: Placement,
        weights: Sequence[Placement],
        grads: Sequence[Placement],
        results: Placement,
    ) -> Any:
        inputs = [rows] * (count + 1) + [projected] + [rows] * orders + [counts, *weights]
        return inputs, [*grads] + [results] * count

    whole, by_expert, by_feature = (_WHOLE,) * 2, (_ROWS,) * 2, (Shard(1), Shard(2))
    layouts = [
        layout(_WHOLE, _WHOLE, _WHOLE, whole, whole, _WHOLE),
        layout(_ROWS, _ROWS, _ROWS, whole, (_SUM, _SUM), _ROWS),
        layout(_ROWS, _ROWS, _WHOLE, whole, (_SUM, _SUM), _ROWS),
        layout(_ROWS, _ROWS, _WHOLE, by_expert, by_expert, _ROWS),
        layout(_WHOLE, _WHOLE, _WHOLE, by_expert, by_expert, _SUM),
        layout(_WHOLE, Shard(1), _WHOLE, by_feature, by_feature, _SUM),
    ]
    return _listed(call, _apply_experts_backward, layouts)


# -- what a device runs ------------------------------------------------------------------------


def _flat(context: LocalContext, tensor: Ref) -> Ref:
    return context.emit(aten.reshape.default, tensor, [-1])


def _shaped(context: LocalContext, tensor: Ref, like: Ref, *more: int, outputs: Any) -> None:
    """A tensor in the local shape of another, and more dims."""
    shapes = context.spec(like).local_shapes
    shape = context.per_device(lambda i: [*shapes[i], *more])
    context.emit(aten.reshape.default, tensor, shape, outputs=outputs)


class _Local:
    """Writes local operations, with what each device knows of the others' experts."""

    def __init__(self, context: LocalContext) -> None:
        self.context = context
        self.emit, self.table = context.emit, context.per_device
        bounds = context.argument("bounds")
        self.bounds = list(zip(bounds[::2], bounds[1::2], strict=True))
        self.groups = group_of(context.mesh, tuple(context.argument("expert_axes")))

    def after(self, index: int, steps: int) -> int:
        """The device some steps after another among those that split the experts."""
        group = self.groups[index]
        return group[(group.index(index) + steps) % len(group)]

    def several(self, count: int, op: Any, *args: Any, **kwargs: Any) -> list[Ref]:
        slots = [self.context.new_slot() for _ in range(count)]
        self.emit(op, *args, outputs=slots, **kwargs)
        return list(map(Ref, slots))

    def ends(self, counts: Ref) -> Ref:
        """Where the rows of each expert begin, and the last ones end, given how many there are."""
        return self.emit(
            aten.constant_pad_nd.default, self.emit(aten.cumsum.default, counts, 0), [1, 0]
        )

    def entry(self, ends: Ref, place: Callable[[int], int]) -> Ref:
        """One of the ends on each device, a tensor without dims."""
        return self.emit(aten.select.int, ends, 0, self.table(place))

    def number(self, tensor: Ref) -> Ref:
        """The value of a tensor without dims, as other operations take an integer."""
        return self.emit(aten._local_scalar_dense.default, tensor)

    def range(self, ends: Ref, steps: int) -> tuple[Ref, Ref]:
        """The range of the pairs for the device some steps after, as tensors without dims."""
        low = self.entry(ends, lambda i: self.bounds[self.after(i, steps)][0])
        return low, self.entry(ends, lambda i: self.bounds[self.after(i, steps)][1])

    def rows(self, tensor: Ref, low: Ref, high: Ref, outputs: Any = None) -> Ref:
        start, stop = self.number(low), self.number(high)
        return self.emit(aten.slice.Tensor, tensor, 0, start, stop, outputs=outputs)

    def taken(self, tensor: Ref, index: Ref, outputs: Any = None) -> Ref:
        return self.emit(aten.index_select.default, tensor, 0, index, outputs=outputs)

    @property
    def has_all(self) -> bool:
        """Whether the experts are not split."""
        return len(self.groups[0]) == 1


def _sort_by_expert(context: LocalContext) -> None:
    ids, num_experts = context.args[:2]
    flat = _flat(context, ids)
    order, rank, counts = context.outputs
    places = context.new_slot()
    context.emit(
        aten.sort.stable, flat, stable=True, dim=0, descending=False, outputs=[None, places]
    )
    inverse = context.new_slot()
    context.emit(aten.sort.default, Ref(places), outputs=[None, inverse])
    _shaped(context, Ref(places), ids, outputs=[order])
    _shaped(context, Ref(inverse), ids, outputs=[rank])
    found = context.emit(aten.bincount.default, flat, None, num_experts)
    # Of an id that is no expert's there would be more.
    context.emit(aten.view.default, found, [1, num_experts], outputs=[counts])


def _cut_pieces(context: LocalContext) -> None:
    local = _Local(context)
    source, order, counts = context.args[:3]
    index = _flat(context, order)
    if context.spec(source).ndim == context.spec(order).ndim:  # a row for each token, not each pair
        divide = context.spec(order).shape[-1]
        index = local.emit(aten.div.Scalar_mode, index, divide, rounding_mode="floor")
    if context.spec(source).ndim != 2:
        rows = local.table(lambda i: math.prod(context.spec(source).local_shapes[i][:-1]))
        width = context.spec(source).shape[-1]
        source = local.emit(aten.reshape.default, source, [rows, width])
    if local.has_all:
        local.taken(source, index, context.outputs)
        return
    ends = local.ends(_flat(context, counts))
    if len(context.outputs) == 1:
        local.taken(source, local.rows(index, *local.range(ends, 0)), context.outputs)
        return
    rows = local.taken(source, index)
    for steps, output in enumerate(context.outputs):
        local.rows(rows, *local.range(ends, steps), outputs=[output])


def _join_pieces(context: LocalContext) -> None:
    local = _Local(context)
    pieces, rank, counts = context.args[:3]
    width = context.spec(pieces[0]).shape[-1]
    place, rows = _flat(context, rank), pieces[0]
    if not local.has_all:
        low, high = local.range(local.ends(_flat(context, counts)), 0)
        place = local.emit(aten.sub.Tensor, place, low)
        if len(pieces) > 1:  # in the order of the devices, from the device itself on
            shapes = context.spec(rank).local_shapes
            total = local.table(lambda i: max(math.prod(shapes[i]), 1))
            place = local.emit(aten.remainder.Scalar, place, total)
            rows = local.emit(aten.cat.default, pieces, 0)
        else:  # what other devices' experts give is zero here
            total = local.emit(aten.sub.Tensor, high, low)
            after = local.emit(aten.lt.Tensor, place, total)
            before = local.emit(aten.ge.Scalar, place, 0)
            own = local.emit(aten.logical_and.default, before, after)
            place = local.emit(aten.where.self, own, place, total)
            rows = local.emit(aten.constant_pad_nd.default, rows, [0, 0, 0, 1])
    found = local.taken(rows, place)
    _shaped(context, found, rank, width, outputs=context.outputs)


def _add_up(context: LocalContext) -> None:
    pairs, weights = context.args
    weights = context.emit(aten.unsqueeze.default, weights, -1)
    weighted = context.emit(aten.mul.Tensor, pairs, weights)
    context.emit(aten.sum.dim_IntList, weighted, [-2], outputs=context.outputs)


def _multiply(context: LocalContext) -> None:
    pairs, grad = context.args
    grad = context.emit(aten.unsqueeze.default, grad, -2)
    product = context.emit(aten.mul.Tensor, pairs, grad)
    context.emit(aten.sum.dim_IntList, product, [-1], outputs=context.outputs)


class _Experts(_Local):
    """The experts of each device, and how many rows it has for each of them."""

    def __init__(self, context: LocalContext) -> None:
        super().__init__(context)
        self.pieces, self.activation = context.args[0], context.argument("activation")
        self.gate_up, self.down = context.argument("gate_up"), context.argument("down")
        self.features = self.table(lambda i: context.spec(self.down).local_shapes[i][2])
        self.number_of = self.table(lambda i: self.bounds[i][1] - self.bounds[i][0])
        self.counts = self._counts(context.argument("counts"))
        total = self.emit(aten.sum.dim_IntList, self.counts, [0])
        ends = self.emit(aten.cumsum.default, total, 0)
        self.ends_of_experts = self.emit(aten._to_copy.default, ends, dtype=torch.int32)

    def _counts(self, counts: Ref) -> Ref:
        """The rows for each of the device's experts in each of its pieces."""
        low = self.table(lambda i: self.bounds[i][0])
        own = self.emit(aten.narrow.default, counts, 1, low, self.number_of)
        if len(self.pieces) == 1:
            return own
        parts = _token_parts(self.context, self.pieces[0])
        rows = [
            self.emit(
                aten.narrow.default, own, 0, self.table(lambda i, s=s: parts[self.after(i, -s)]), 1
            )
            for s in range(len(self.pieces))
        ]
        return self.emit(aten.cat.default, rows, 0)

    def orders(self, outputs: Sequence[int | None]) -> tuple[Ref, Ref]:
        """The order of the rows of all pieces by expert, and its inverse."""
        order, back = outputs
        assert order is not None and back is not None
        ids = self.emit(aten.repeat_interleave.Tensor, _flat(self.context, self.counts))
        num_experts = self.table(lambda i: max(self.bounds[i][1] - self.bounds[i][0], 1))
        ids = self.emit(aten.remainder.Scalar, ids, num_experts)
        self.emit(
            aten.sort.stable, ids, stable=True, dim=0, descending=False, outputs=[None, order]
        )
        self.emit(aten.sort.default, Ref(order), outputs=[None, back])
        return Ref(order), Ref(back)

    def product(self, rows: Ref, matrices: Ref) -> Ref:
        return self.emit(aten._grouped_mm.default, rows, matrices, self.ends_of_experts)

    def transposed(self, tensor: Ref) -> Ref:
        return self.emit(aten.transpose.int, tensor, -2, -1)

    def gated(self, projected: Ref) -> tuple[Ref, Ref, Ref, Ref]:
        """Gate, the activation of it, up, and the product of these."""
        gate = self.emit(aten.narrow.default, projected, 1, 0, self.features)
        up = self.emit(aten.narrow.default, projected, 1, self.features, self.features)
        op, options = _ACTIVATIONS[self.activation]
        active = self.emit(op, gate, **options)
        return gate, active, up, self.emit(aten.mul.Tensor, active, up)

    def give(self, rows: Ref, outputs: Sequence[int | None]) -> None:
        """Cuts rows in the order in which they came into the pieces of their devices."""
        sizes = self.ends(self.emit(aten.sum.dim_IntList, self.counts, [1]))
        places = [self.number(self.entry(sizes, lambda i, s=s: s)) for s in range(len(outputs) + 1)]
        for number, output in enumerate(outputs):
            start, stop = places[number : number + 2]
            self.emit(aten.slice.Tensor, rows, 0, start, stop, outputs=[output])


_ACTIVATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "silu": (aten.silu.default, {}),
    "gelu": (aten.gelu.default, {}),
    "gelu_tanh": (aten.gelu.default, {"approximate": "tanh"}),
    "relu": (aten.relu.default, {}),
}
_ACTIVATIONS_BACKWARD: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "silu": (aten.silu_backward.default, (), {}),
    "gelu": (aten.gelu_backward.default, (), {}),
    "gelu_tanh": (aten.gelu_backward.default, (), {"approximate": "tanh"}),
    "relu": (aten.threshold_backward.default, (0,), {}),
}


def _token_parts(context: LocalContext, rows: Ref) -> list[int]:
    """The number of the part of the tokens that each device has."""
    axes = [a for a, p in enumerate(context.spec(rows).placements) if p.is_shard(0)]
    found = [tuple(c[a] for a in axes) for c in context.mesh.coordinates()]
    order = sorted(set(found))
    return [order.index(c) for c in found]


def _apply_experts(context: LocalContext) -> None:
    local = _Experts(context)
    count = len(local.pieces)
    kept, outputs = context.outputs[0], context.outputs[1 : 1 + count]
    rows, back = local.pieces[0], None
    if count > 1:
        sorted_rows, *orders = context.outputs[1 + count :]
        order, back = local.orders(orders)
        rows = local.emit(aten.cat.default, local.pieces, 0)
        rows = local.taken(rows, order, [sorted_rows])
    assert kept is not None
    projected = Ref(kept)
    gate_up = local.transposed(local.gate_up)
    local.emit(aten._grouped_mm.default, rows, gate_up, local.ends_of_experts, outputs=[kept])
    *_, hidden = local.gated(projected)
    down = local.transposed(local.down)
    if back is None:
        ends = local.ends_of_experts
        local.emit(aten._grouped_mm.default, hidden, down, ends, outputs=outputs)
        return
    local.give(local.taken(local.product(hidden, down), back), outputs)


def _apply_experts_backward(context: LocalContext) -> None:
    local = _Experts(context)
    rows, projected = context.argument("rows"), context.argument("projected")
    order, back = context.argument("order"), context.argument("back")
    to_gate_up, to_down, *outputs = context.outputs
    grad = local.pieces[0]
    if order is not None:
        grad = local.taken(local.emit(aten.cat.default, local.pieces, 0), order)
    gate, active, up, hidden = local.gated(projected)
    ends = local.ends_of_experts
    grad_t = local.transposed(grad)
    local.emit(aten._grouped_mm.default, grad_t, hidden, ends, outputs=[to_down])
    to_hidden = local.product(grad, local.down)
    op, extra, options = _ACTIVATIONS_BACKWARD[local.activation]
    to_active = local.emit(aten.mul.Tensor, to_hidden, up)
    to_gate = local.emit(op, to_active, gate, *extra, **options)
    to_up = local.emit(aten.mul.Tensor, to_hidden, active)
    to_projected = local.emit(aten.cat.default, [to_gate, to_up], 1)
    turned = local.transposed(to_projected)
    local.emit(aten._grouped_mm.default, turned, rows, ends, outputs=[to_gate_up])
    if order is None:
        local.emit(aten._grouped_mm.default, to_projected, local.gate_up, ends, outputs=outputs)
        return
    local.give(local.taken(local.product(to_projected, local.gate_up), back), outputs)
