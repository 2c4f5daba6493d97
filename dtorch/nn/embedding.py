"""The table that turns token ids into vectors.

Shapes: V vocabulary, D hidden.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, dtype

from .. import random

__all__ = ["embedding", "embedding_init"]


def embedding_init(
    key: Tensor,
    num_embeddings: int,
    embedding_dim: int,
    *,
    std: float = 0.02,
    dtype: dtype | None = None,
) -> dict[str, Tensor]:
    """Returns the parameters of an embedding, normally distributed.

    Args:
        key: A random key, int64 [2].
        num_embeddings: The number of ids.
        embedding_dim: The size of each vector.
        std: The standard deviation.
        dtype: The parameters' dtype; torch's default dtype if None.

    Returns:
        `weight` [V, D].
    """
    return {"weight": random.normal(key, (num_embeddings, embedding_dim), dtype) * std}


def embedding(params: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Returns the vector of each id.

    Args:
        params: `weight` [V, D].
        ids: Integers in [0, V), [...].

    Returns:
        The vectors [..., D].

    Raises:
        IndexError: If an id is out of range, when the value is computed.

    Source: `torch.nn.functional.embedding`.
    """
    return F.embedding(ids, params["weight"])
