"""The operations of a layer of experts.

`expert_mlp` is such a layer without its router, in PyTorch's own operations. Where tokens or
experts are split over devices, `sharded_forms.experts` makes of it the other operations here, which
have no kernels: the rules write what each device runs.

How many rows a device gets is known when it runs. The *pieces* of rows that devices exchange are as
long as the routing makes them, while a program gives them the shape that even routing would.
They and what is computed of them are read by these operations alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .program import Apply, Instruction, Program, refs

_library = torch.library.Library("dtorch", "FRAGMENT")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.nn.functional.relu,
}
"""What `expert_mlp` takes the gate through, by name."""

_library.define(
    "expert_mlp(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, "
    "str activation) -> Tensor"
)
_library.define(
    "expert_mlp_forward(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, "
    "str activation) -> Tensor[]"
)
_library.define(
    "expert_mlp_backward(Tensor grad, Tensor[] saved, Tensor weights, Tensor gate_up, "
    "Tensor down, str activation) -> Tensor[]"
)
_library.define(
    "expert_order(Tensor ids, int num_experts, int num_parts) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "expert_pieces(Tensor source, Tensor order, Tensor counts, int[] expert_axes, int[] bounds, "
    "int num_pieces, int num_rows) -> Tensor[]"
)
_library.define(
    "expert_apply(Tensor[] pieces, Tensor counts, Tensor gate_up, Tensor down, str activation, "
    "int[] expert_axes, int[] bounds) -> Tensor[]"
)
_library.define(
    "expert_apply_backward(Tensor[] pieces, Tensor rows, Tensor projected, Tensor? order, "
    "Tensor? back, Tensor counts, Tensor gate_up, Tensor down, str activation, "
    "int[] expert_axes, int[] bounds) -> Tensor[]"
)
_library.define(
    "expert_join(Tensor[] pieces, Tensor rank, Tensor counts, int[] expert_axes, int[] bounds) "
    "-> Tensor"
)
_library.define("expert_sum(Tensor pairs, Tensor weights) -> Tensor")
_library.define("expert_dot(Tensor pairs, Tensor grad) -> Tensor")


def _expert_mlp(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """As the grouped experts of `transformers`, operation by operation."""
    count, num_experts = ids.shape[-1], gate_up.shape[0]
    experts, order = torch.sort(ids.reshape(-1))
    every = torch.arange(num_experts, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(experts, every, right=True, out_int32=True)
    rows = x.reshape(-1, x.shape[-1])[order // count].to(gate_up.dtype)
    projected = torch.nn.functional.grouped_mm(rows, gate_up.transpose(-2, -1), offs=ends)
    gate, up = projected.chunk(2, dim=-1)
    hidden = ACTIVATIONS[activation](gate) * up
    results = torch.nn.functional.grouped_mm(hidden, down.transpose(-2, -1), offs=ends)
    weighted = results * weights.reshape(-1)[order].unsqueeze(-1)
    pairs = weighted[torch.argsort(order)].view(*ids.shape, x.shape[-1])
    return pairs.sum(dim=-2).to(x.dtype)


_library.impl("expert_mlp", _expert_mlp, "CompositeImplicitAutograd")


def _alone(x: Tensor, *rest: object) -> list[Tensor]:
    return [torch.empty_like(x)]


def _order(ids: Tensor, num_experts: int, num_parts: int) -> tuple[Tensor, Tensor, Tensor]:
    places = ids.new_empty(ids.shape, dtype=torch.int64)
    return places, torch.empty_like(places), places.new_empty(num_parts, num_experts)


def _pieces(
    source: Tensor,
    order: Tensor,
    counts: Tensor,
    expert_axes: list[int],
    bounds: list[int],
    num_pieces: int,
    num_rows: int,
) -> list[Tensor]:
    return [source.new_empty(num_rows, source.shape[-1]) for _ in range(num_pieces)]


def _apply(
    pieces: list[Tensor], counts: Tensor, gate_up: Tensor, down: Tensor, *rest: object
) -> list[Tensor]:
    first, num_rows = pieces[0], sum(p.shape[0] for p in pieces)
    results = [first.new_empty(num_rows, gate_up.shape[1])]
    results += [torch.empty_like(p) for p in pieces]
    if len(pieces) > 1:
        results += [first.new_empty(num_rows, first.shape[1])]
        results += [counts.new_empty(num_rows) for _ in range(2)]
    return results


def _apply_backward(
    pieces: list[Tensor],
    rows: Tensor,
    projected: Tensor,
    order: Tensor | None,
    back: Tensor | None,
    counts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *rest: object,
) -> list[Tensor]:
    weights = [w.new_empty(w.shape) for w in (gate_up, down)]
    return weights + [torch.empty_like(p) for p in pieces]


def _join(
    pieces: list[Tensor], rank: Tensor, counts: Tensor, expert_axes: list[int], bounds: list[int]
) -> Tensor:
    return pieces[0].new_empty(*rank.shape, pieces[0].shape[1])


def _sum(pairs: Tensor, weights: Tensor) -> Tensor:
    dtype = torch.promote_types(pairs.dtype, weights.dtype)
    return pairs.new_empty(weights.shape[:-1] + pairs.shape[-1:], dtype=dtype)


def _dot(pairs: Tensor, grad: Tensor) -> Tensor:
    return pairs.new_empty(pairs.shape[:-1], dtype=torch.promote_types(pairs.dtype, grad.dtype))


for _name, _meta in {
    "expert_mlp_forward": _alone,
    "expert_mlp_backward": _alone,
    "expert_order": _order,
    "expert_pieces": _pieces,
    "expert_apply": _apply,
    "expert_apply_backward": _apply_backward,
    "expert_join": _join,
    "expert_sum": _sum,
    "expert_dot": _dot,
}.items():
    _library.impl(_name, _meta, "Meta")

expert_mlp = torch.ops.dtorch.expert_mlp.default
"""Experts' gated layers on the rows of tokens routed to them, added up with the routers' weights.

Tokens [..., D], ids and weights [..., K], gate and up projection [X, 2F, D], down projection
[X, D, F].
"""

expert_mlp_forward = torch.ops.dtorch.expert_mlp_forward.default
"""`expert_mlp`, and after its result what the backward reads."""

expert_mlp_backward = torch.ops.dtorch.expert_mlp_backward.default
"""The gradients of tokens, weights, gate and up projection, down projection."""

expert_order = torch.ops.dtorch.expert_order.default
"""Of each part of the tokens: its pairs of token and expert by expert, the inverse, and counts."""

expert_pieces = torch.ops.dtorch.expert_pieces.default
"""The rows that go to each device of the experts, from the device itself on."""

expert_apply = torch.ops.dtorch.expert_apply.default
"""The experts of each device on all pieces that it has got: what the gate and up projection gave,
the results as pieces, and of several pieces the rows by expert, their order and its inverse."""

expert_apply_backward = torch.ops.dtorch.expert_apply_backward.default
"""Its backward: the gradients of both weights, and of the rows, as pieces."""

expert_join = torch.ops.dtorch.expert_join.default
"""The pieces that came back, one row for each pair [..., K, D]."""

expert_sum = torch.ops.dtorch.expert_sum.default
"""The weighted sum [..., D] of the results of each token's experts, which may be partial sums."""

expert_dot = torch.ops.dtorch.expert_dot.default
"""The gradient of its weights [..., K]."""

# The arguments and results whose local shapes are known at run time only.
_RAGGED: dict[torch._ops.OpOverload, tuple[tuple[int, ...], slice]] = {
    expert_pieces: ((), slice(None)),
    expert_apply: ((0,), slice(None)),
    expert_apply_backward: ((0, 1, 2, 3, 4), slice(2, None)),
    expert_join: ((0,), slice(0)),
}


def is_ragged(instruction: Instruction) -> bool:
    """Returns whether a device learns only at run time of what shapes it computes."""
    return isinstance(instruction, Apply) and instruction.op in _RAGGED


def ragged_values(program: Program) -> set[int]:
    """Returns the values of a program whose local shapes are known at run time only."""
    found: set[int] = set()
    for instruction in program.instructions:
        if isinstance(instruction, Apply) and instruction.op in _RAGGED:
            args, results = _RAGGED[instruction.op]
            found.update(r.id for r in refs([instruction.args[i] for i in args]))
            found.update(v for v in instruction.outputs[results] if v is not None)
    return found
