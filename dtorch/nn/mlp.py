"""The gated feed-forward layer of a Llama.

Shapes: D hidden, F intermediate.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import random
from .linear import linear, linear_init

__all__ = ["swiglu", "swiglu_init"]


def swiglu_init(
    key: Tensor,
    hidden_size: int,
    intermediate_size: int,
    *,
    bias: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Returns the parameters of a gated feed-forward layer.

    Args:
        key: A random key, int64 [2].
        hidden_size: The size of the last dim of input and output.
        intermediate_size: The size in between.
        bias: Whether the three linear layers have biases.
        dtype: The parameters' dtype; torch's default dtype if None.

    Returns:
        `gate_proj` and `up_proj` with `weight` [F, D], `down_proj` with `weight` [D, F].
    """
    gate_key, up_key, down_key = random.split(key, 3)
    options = {"bias": bias, "dtype": dtype}
    return {
        "gate_proj": linear_init(gate_key, hidden_size, intermediate_size, **options),
        "up_proj": linear_init(up_key, hidden_size, intermediate_size, **options),
        "down_proj": linear_init(down_key, intermediate_size, hidden_size, **options),
    }


def swiglu(params: Mapping[str, Mapping[str, Tensor]], x: Tensor) -> Tensor:
    """Returns `down(silu(gate(x)) * up(x))`.

    Args:
        params: As `swiglu_init` makes them.
        x: The input [..., D].

    Returns:
        The output [..., D].

    Source: N. Shazeer, "GLU Variants Improve Transformer", 2020; equal bit for bit to
    transformers' `LlamaMLP`.
    """
    gated = F.silu(linear(params["gate_proj"], x)) * linear(params["up_proj"], x)
    return linear(params["down_proj"], gated)
