"""Normalisation by the root mean square of the last dim.

Shapes: D hidden.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["rms_norm", "rms_norm_init"]


def rms_norm_init(key: Tensor, size: int, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Returns the parameters of an RMS norm: a weight of ones.

    Args:
        key: A random key, not used: every layer's init takes one.
        size: The size of the last dim.
        dtype: The parameters' dtype; torch's default dtype if None.

    Returns:
        `weight` [D].
    """
    del key
    return {"weight": torch.ones(size, dtype=dtype)}


def rms_norm(params: Mapping[str, Tensor], x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Returns `x` divided by the root mean square of its last dim, times the weight.

    The statistics are computed in float32, and the weight multiplies the result after it is back
    in the input's dtype. `torch.nn.functional.rms_norm` rounds differently.

    Args:
        params: `weight` [D].
        x: The input [..., D].
        eps: Added to the mean square.

    Returns:
        The output [..., D], in the dtype of `weight * x`.

    Source: B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019; equal
    bit for bit to transformers' `LlamaRMSNorm`.
    """
    x_float = x.to(torch.float32)
    mean_square = x_float.pow(2).mean(-1, keepdim=True)
    return params["weight"] * (x_float * torch.rsqrt(mean_square + eps)).to(x.dtype)
