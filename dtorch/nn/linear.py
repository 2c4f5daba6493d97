"""The affine map of the last dim, from a weight stored as PyTorch and its checkpoints store it.

Shapes: I input features, O output features.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, dtype, zeros

from .. import random

__all__ = ["linear", "linear_init"]


def linear_init(
    key: Tensor,
    in_features: int,
    out_features: int,
    *,
    bias: bool = False,
    std: float | None = None,
    dtype: dtype | None = None,
) -> dict[str, Tensor]:
    """Returns the parameters of a linear layer, with a normal weight and a zero bias.

    Args:
        key: A random key, int64 [2].
        in_features: The size of the last dim of the input.
        out_features: The size of the last dim of the output.
        bias: Whether there is a bias.
        std: The weight's standard deviation; `in_features ** -0.5` if None, which keeps the
            variance of the input.
        dtype: The parameters' dtype; torch's default dtype if None.

    Returns:
        `weight` [O, I] and, if asked for, `bias` [O].
    """
    scale = in_features**-0.5 if std is None else std
    params = {"weight": random.normal(key, (out_features, in_features), dtype) * scale}
    if bias:
        params["bias"] = zeros(out_features, dtype=dtype)
    return params


def linear(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Returns `x @ weight.T`, plus the bias if the parameters have one.

    Args:
        params: `weight` [O, I] and perhaps `bias` [O].
        x: The input [..., I].

    Returns:
        The output [..., O].

    Source: `torch.nn.functional.linear`.
    """
    return F.linear(x, params["weight"], params.get("bias"))
