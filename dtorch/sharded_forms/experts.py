"""Expert parallelism: a layer of experts where tokens or experts are split over devices.

Over an axis that splits both, tokens are exchanged: a device sends each row to the device of its
expert and gets its result back. The devices first tell each other how many rows each expert gets;
then they pass the rows on in as many steps as there are other devices, in each of which every
device sends to one and takes from one. No row is dropped or filled up. Over an axis that splits the
experts alone, each device computes the rows of its own experts, and what the devices have adds up;
over one that splits the features of the experts (gate, up and down projection) likewise. Over an
axis that splits the tokens alone nothing is communicated.

Sources: GShard (arXiv:2006.16668) for the exchange, MegaBlocks (arXiv:2211.15841) for not dropping.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..expert_ops import (
    expert_apply,
    expert_apply_backward,
    expert_dot,
    expert_join,
    expert_mlp,
    expert_mlp_backward,
    expert_mlp_forward,
    expert_order,
    expert_pieces,
    expert_sum,
)
from ..placement import Replicate, Shard
from ..redistribution import Movement, Segment, group_of
from .movement import permuted
from .registry import form, replicated

_ALIGNMENT = 16  # bytes: `_grouped_mm` refuses strides that are no multiple of it


@form(expert_mlp, always=True)
def _mlp(x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, activation: str) -> Any:
    layout = _layout(x, gate_up, down)
    if not layout.is_split:
        return NotImplemented
    return _forward(layout, x, ids, weights, gate_up, down, activation)[0]


@form(expert_mlp_forward, always=True)
def _mlp_forward(x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, activation: str) -> Any:
    layout = _layout(x, gate_up, down)
    return _forward(layout, x, ids, weights, gate_up, down, activation)


def _forward(
    layout: _Layout, x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, activation: str
) -> tuple[Any, ...]:
    x, ids, weights = (layout.by_token(t) for t in (x, ids, weights))
    gate_up, down = layout.gate_up(gate_up), layout.down(down)
    order, rank, counts = expert_order(ids, gate_up.shape[0], layout.num_parts)
    pieces = layout.sent(x.to(gate_up.dtype), order, counts)
    seen = replicated(counts) if layout.exchanges else counts
    projected, *results = expert_apply(pieces, seen, gate_up, down, activation, *layout.who)
    results, kept = results[: len(pieces)], results[len(pieces) :] or pieces
    pairs = layout.returned(results, rank, counts)
    out = expert_sum(pairs, weights)
    if out.dtype != x.dtype:  # a rounded sum, not a sum of rounded parts
        out = layout.by_token(out).to(x.dtype)
    return (out, pairs, order, rank, counts, seen, projected, *kept)


@form(expert_mlp_backward, always=True)
def _mlp_backward(
    grad: Any, saved: Any, weights: Any, gate_up: Any, down: Any, activation: str
) -> Any:
    pairs, order, rank, counts, seen, projected, rows, *orders = saved
    layout = _layout(order, gate_up, down)
    grad, weights = layout.by_token(grad), layout.by_token(weights)
    gate_up, down = layout.gate_up(gate_up), layout.down(down)
    to_weights = layout.by_token(expert_dot(pairs, grad)).to(weights.dtype)
    to_pairs = (grad.unsqueeze(-2) * weights.unsqueeze(-1)).to(pairs.dtype)
    pieces = layout.sent(to_pairs, order, counts)
    orders = orders or (None, None)
    operands = (rows, projected, *orders, seen, gate_up, down, activation)
    to_gate_up, to_down, *results = expert_apply_backward(pieces, *operands, *layout.who)
    to_x = layout.returned(results, rank, counts).sum(-2).to(grad.dtype)
    return to_x, to_weights, layout.in_order(to_gate_up), to_down


# -- layouts -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Which axes split what of a layer.

    Attributes:
        mesh: The mesh.
        tokens: The axes that split the tokens, and the dims that they split.
        experts: The axes that split the experts.
        features: The axes that split the features of the experts.
        bounds: The first of the experts of each device, and the one after the last.
    """

    mesh: Any
    tokens: dict[int, int]
    experts: tuple[int, ...]
    features: frozenset[int]
    bounds: tuple[int, ...]

    @property
    def is_split(self) -> bool:
        """Whether any axis splits anything."""
        return bool(self.tokens or self.experts or self.features)

    @property
    def exchanges(self) -> bool:
        """Whether tokens move to the devices of their experts."""
        return not self.tokens.keys().isdisjoint(self.experts)

    @property
    def num_parts(self) -> int:
        """How many parts the tokens are split into."""
        return self._count(self.tokens)

    @property
    def who(self) -> tuple[list[int], list[int]]:
        """Which devices have which experts, as the operations take it."""
        return list(self.experts), list(self.bounds)

    def _count(self, axes: Any) -> int:
        return math.prod(self.mesh.shape[a] for a in axes)

    def _placed(self, x: Any, dims: dict[int, int]) -> Any:
        """Returns a tensor of which each axis splits one dim, or nothing."""
        split = {axis: Shard(dim) for axis, dim in dims.items()}
        placements = [split.get(a, Replicate()) for a in range(self.mesh.ndim)]
        return x.redistribute(self.mesh, placements)

    def by_token(self, x: Any) -> Any:
        """Returns something of the tokens as they are split."""
        return self._placed(x, self.tokens)

    def _weight(self, features: int) -> dict[int, int]:
        return dict.fromkeys(self.experts, 0) | dict.fromkeys(self.features, features)

    def gate_up(self, x: Any) -> Any:
        """Returns the gate and up projection, each device with the same features of both."""
        x = self._placed(x, self._weight(1))
        if not self.features:
            return x
        return permuted(x, Movement(1, tuple(sorted(self._segments(x)))), x.shape[1])

    def in_order(self, x: Any) -> Any:
        """The inverse of `gate_up`, for its gradient."""
        if not self.features:
            return x
        back = (Segment(s.source, s.target, s.length) for s in self._segments(x))
        return permuted(x, Movement(1, tuple(sorted(back))), x.shape[1])

    def _segments(self, gate_up: Any) -> list[Segment]:
        size, count = gate_up.shape[1] // 2, self._count(self.features)
        part = size // count
        return [
            Segment((2 * i + half) * part, half * size + i * part, part)
            for i in range(count)
            for half in range(2)
        ]

    def down(self, x: Any) -> Any:
        """Returns the down projection as it is split."""
        return self._placed(x, self._weight(2))

    def sent(self, source: Any, order: Any, counts: Any) -> list[Any]:
        """Returns the pieces of rows that each device has got for its experts."""
        count = self._count(self.experts) if self.exchanges else 1
        pairs = -(-order.numel() // self.num_parts)
        num_rows = self.num_parts * max(-(-pairs // count), 1)
        pieces = expert_pieces(source, order, counts, *self.who, count, num_rows)
        return [self._passed(p, s) for s, p in enumerate(pieces)]

    def returned(self, pieces: list[Any], rank: Any, counts: Any) -> Any:
        """Returns a row for each pair of token and expert, from the pieces of results."""
        pieces = [self._passed(p, -s) for s, p in enumerate(pieces)]
        return expert_join(pieces, rank, counts, *self.who)

    def _passed(self, piece: Any, steps: int) -> Any:
        """Every device's piece at the device some steps after it."""
        if not steps:
            return piece
        axes = sorted(self.tokens)
        coordinates = [tuple(c[a] for a in axes) for c in self.mesh.coordinates()]
        parts = {c: n for n, c in enumerate(sorted(set(coordinates)))}
        groups, length = group_of(self.mesh, self.experts), piece.shape[0] // self.num_parts
        segments = set()
        for index, coordinate in enumerate(coordinates):
            group = groups[index]
            giver = group[(group.index(index) - steps) % len(group)]
            source, target = parts[coordinates[giver]], parts[coordinate]
            segments.add(Segment(target * length, source * length, length))
        return permuted(piece, Movement(0, tuple(sorted(segments))), piece.shape[0])


def _layout(tokens: Any, gate_up: Any, down: Any) -> _Layout:
    mesh = gate_up.device_mesh
    axes = [a for a, n in enumerate(mesh.shape) if n > 1]

    def split(x: Any, dim: int) -> frozenset[int]:
        return frozenset(a for a in axes if x.placements[a].is_shard(dim))

    experts = split(gate_up, 0) | split(down, 0)
    features = (split(gate_up, 1) | split(down, 2)) - experts
    count = math.prod(mesh.shape[a] for a in features)
    part = down.shape[2] / count * down.dtype.itemsize / _ALIGNMENT
    features = features if part.is_integer() else frozenset()
    by_token = {a: d for d in range(tokens.ndim - 1) for a in split(tokens, d) - features}
    if not experts.isdisjoint(by_token):  # tokens go to their expert, whichever axis it is on
        by_token = dict.fromkeys(experts, 0) | by_token
    placements = [Shard(0) if a in experts else Replicate() for a in range(mesh.ndim)]
    boxes = gate_up._spec.with_layout(mesh, tuple(placements)).boxes
    bounds = tuple(bound for box in boxes for bound in box[0])
    return _Layout(mesh, by_token, tuple(sorted(experts)), features, bounds)
