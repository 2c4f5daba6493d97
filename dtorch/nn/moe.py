"""A mixture of experts: a router sends each token to some of many gated feed-forward layers.

No token is dropped, and an expert may get none. Shapes: X experts, K experts a token, D hidden,
F intermediate.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import random
from ..expert_ops import ACTIVATIONS, expert_mlp
from .linear import linear, linear_init

__all__ = ["experts", "moe", "moe_init"]


def moe_init(
    key: Tensor,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    *,
    dtype: torch.dtype | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Returns the parameters of a mixture of experts.

    Args:
        key: A random key, int64 [2].
        hidden_size: The size of the last dim of input and output.
        intermediate_size: The size in between, of each expert.
        num_experts: The number of experts.
        dtype: The parameters' dtype; torch's default dtype if None.

    Returns:
        `gate` with `weight` [X, D], the router; `experts` with `gate_up_proj` [X, 2F, D], gate
        over up, and `down_proj` [X, D, F]. Each is normal with variance one over its last dim.
    """
    gate_key, gate_up_key, down_key = random.split(key, 3)
    gate_up = (num_experts, 2 * intermediate_size, hidden_size)
    down = (num_experts, hidden_size, intermediate_size)
    return {
        "gate": linear_init(gate_key, hidden_size, num_experts, dtype=dtype),
        "experts": {
            "gate_up_proj": random.normal(gate_up_key, gate_up, dtype) * hidden_size**-0.5,
            "down_proj": random.normal(down_key, down, dtype) * intermediate_size**-0.5,
        },
    }


def moe(
    params: Mapping[str, Mapping[str, Tensor]],
    x: Tensor,
    num_experts_per_token: int,
    *,
    normalize: bool = True,
    weights_dtype: torch.dtype | None = None,
    activation: str = "silu",
) -> Tensor:
    """Returns the sum of what the experts of each token give, weighted by the router.

    Args:
        params: As `moe_init` makes them.
        x: The input [..., D].
        num_experts_per_token: K, how many experts see a token: those to which the router gives
            the greatest probability.
        normalize: Whether the weights of a token's experts add up to one.
        weights_dtype: The dtype that the weights are rounded to; that of `x` if None.
        activation: What the gate is taken through; see `experts`.

    Returns:
        The output [..., D].

    Source: N. Shazeer et al., "Outrageously Large Neural Networks", 2017; equal bit for bit to
    transformers' `Qwen3MoeSparseMoeBlock` with its grouped experts and, with weights in float32,
    to `MixtralSparseMoeBlock`.
    """
    logits = linear(params["gate"], x)
    probabilities = F.softmax(logits, dim=-1, dtype=torch.float)
    weights, ids = torch.topk(probabilities, num_experts_per_token, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    weights = weights.to(weights_dtype or x.dtype)
    return experts(params["experts"], x, ids, weights, activation=activation)


def experts(
    params: Mapping[str, Tensor],
    tokens: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    activation: str = "silu",
) -> Tensor:
    """Returns the weighted sum of what each token's experts give: a layer without its router.

    Args:
        params: `gate_up_proj` [X, 2F, D], `down_proj` [X, D, F].
        tokens: The input [..., D].
        ids: The experts of each token, integers [..., K].
        weights: Their weights [..., K].
        activation: What the gate is taken through: "silu", "gelu", "gelu_tanh" or "relu".

    Returns:
        The output [..., D].

    Raises:
        ValueError: The activation is not known, the shapes do not agree, or the ids are no
            integers.
    """
    _check_routing(tokens, ids, weights)
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation {activation!r} is not known.\n  Fix: one of {', '.join(ACTIVATIONS)}."
        )
    operands: Any = (params["gate_up_proj"], params["down_proj"])
    return expert_mlp(tokens, ids, weights, *operands, activation)


def _check_routing(tokens: Tensor, ids: Tensor, weights: Tensor) -> None:
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise ValueError(
            f"the ids of experts are integers, not {ids.dtype}.\n"
            "  Fix: the indices that torch.topk gives, as they are."
        )
    if (*tokens.shape[:-1], *ids.shape[-1:]) != ids.shape or ids.shape != weights.shape:
        raise ValueError(
            "tokens [..., D] come with ids [..., K] and weights [..., K], but here\n"
            f"  tokens   {list(tokens.shape)}\n"
            f"  ids      {list(ids.shape)}\n"
            f"  weights  {list(weights.shape)}\n"
            "  Fix: give each token as many ids as weights."
        )
