"""Causal self-attention with grouped key/value heads and an optional static key/value cache.

The numbers of heads are read from the weights, so the same function serves every Llama. A cache is
a value like any other: it goes in, and the one with the new tokens written comes out.

Shapes: B batch, L new tokens, S keys attended to (the slots of the cache, if there is one),
D hidden, H query heads, K key/value heads, G = H / K query heads a group, E head size.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import random
from .linear import linear, linear_init
from .rotary import rotate

__all__ = ["attention", "attention_init", "cache_init", "grouped_attention"]


def attention_init(
    key: Tensor,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    bias: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Returns the parameters of an attention layer.

    Args:
        key: A random key, int64 [2].
        hidden_size: The size of the last dim of input and output.
        num_heads: The number of query heads.
        num_kv_heads: The number of key/value heads, a divisor of `num_heads`.
        head_dim: The size of a head, even.
        bias: Whether the four linear layers have biases.
        dtype: The parameters' dtype; torch's default dtype if None.

    Returns:
        `q_proj` with `weight` [H*E, D], `k_proj` and `v_proj` with `weight` [K*E, D], `o_proj` with
        `weight` [D, H*E].

    Raises:
        ValueError: If the query heads do not divide into groups.
    """
    _check_groups(num_heads, num_kv_heads)
    q_key, k_key, v_key, o_key = random.split(key, 4)
    options = {"bias": bias, "dtype": dtype}
    return {
        "q_proj": linear_init(q_key, hidden_size, num_heads * head_dim, **options),
        "k_proj": linear_init(k_key, hidden_size, num_kv_heads * head_dim, **options),
        "v_proj": linear_init(v_key, hidden_size, num_kv_heads * head_dim, **options),
        "o_proj": linear_init(o_key, num_heads * head_dim, hidden_size, **options),
    }


def cache_init(
    batch_size: int,
    num_kv_heads: int,
    num_slots: int,
    head_dim: int,
    *,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Returns an empty key/value cache for one layer.

    Args:
        batch_size: The number of sequences.
        num_kv_heads: The number of key/value heads.
        num_slots: How many tokens a sequence can have.
        head_dim: The size of a head.
        dtype: The cache's dtype; torch's default dtype if None.

    Returns:
        `key` and `value`, zeros [B, K, S, E].
    """
    shape = (batch_size, num_kv_heads, num_slots, head_dim)
    return {"key": torch.zeros(shape, dtype=dtype), "value": torch.zeros(shape, dtype=dtype)}


def attention(
    params: Mapping[str, Mapping[str, Tensor]],
    x_BLD: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    head_dim: int,
    mask: Tensor | None = None,
    cache: Mapping[str, Tensor] | None = None,
    slot_L: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """Returns the attention of the tokens to themselves, or to all that a cache holds.

    Without a mask the new tokens attend causally to one another. That is a whole sequence, or the
    prefill of an empty cache. With a mask they attend to what it allows: of the cache's slots if
    there is a cache, of the new tokens if there is none.

    Args:
        params: As `attention_init` makes them.
        x_BLD: The input [B, L, D].
        cos: Cosines from `rotary_tables`, [L, E] or [B, L, E].
        sin: Sines from `rotary_tables`, of the same shape.
        head_dim: The size of a head.
        mask: True, or 0.0, where a token attends, False, or -inf, where not; bool or floating
            point, broadcast to [B, H, L, S].
        cache: `key` and `value` [B, K, S, E]; not changed.
        slot_L: The slots that the new tokens take in the cache, int64 [L].

    Returns:
        The output [B, L, D], and the cache with the new tokens (None if there was no cache).

    Raises:
        ValueError: If only one of `cache` and `slot_L` is given, or the query heads do not divide
            into groups.

    Source: equal bit for bit to transformers' `LlamaAttention` with "sdpa" attention and, for the
    cache, `StaticCache`.
    """
    if (cache is None) != (slot_L is None):
        raise ValueError("attention takes cache and slot_L together, but got one of them.")
    q_BHLE = rotate(_heads(params["q_proj"], x_BLD, head_dim), cos, sin)
    k_BKLE = rotate(_heads(params["k_proj"], x_BLD, head_dim), cos, sin)
    v_BKLE = _heads(params["v_proj"], x_BLD, head_dim)
    keys, values, new_cache = k_BKLE, v_BKLE, None
    if cache is not None and slot_L is not None:
        new_cache = {
            "key": cache["key"].index_copy(2, slot_L, k_BKLE),
            "value": cache["value"].index_copy(2, slot_L, v_BKLE),
        }
        if mask is not None:
            keys, values = new_cache["key"], new_cache["value"]
    out_BHLE = grouped_attention(q_BHLE, keys, values, mask=mask)
    return linear(params["o_proj"], out_BHLE.transpose(1, 2).flatten(2)), new_cache


def grouped_attention(
    q_BHLE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """Returns scaled dot-product attention where each key/value head serves a group of queries.

    Args:
        q_BHLE: Queries [B, H, L, E].
        k_BKSE: Keys [B, K, S, E].
        v_BKSE: Values [B, K, S, E].
        mask: Bool or floating point, broadcast to [B, H, L, S]. None is causal, with the first
            query at the first key.

    Returns:
        The output [B, H, L, E].

    Raises:
        ValueError: If the query heads do not divide into groups.

    Source: `torch.nn.functional.scaled_dot_product_attention`, called as transformers' "sdpa"
    attention calls it.
    """
    num_heads, num_kv_heads = q_BHLE.shape[1], k_BKSE.shape[1]
    _check_groups(num_heads, num_kv_heads)
    group_size = num_heads // num_kv_heads
    if mask is None:
        return F.scaled_dot_product_attention(
            q_BHLE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=group_size > 1
        )
    if group_size > 1 and q_BHLE.shape[2] == 1:
        return _one_query(q_BHLE, k_BKSE, v_BKSE, mask)
    k_BHSE, v_BHSE = _repeat_heads(k_BKSE, group_size), _repeat_heads(v_BKSE, group_size)
    return F.scaled_dot_product_attention(q_BHLE, k_BHSE, v_BHSE, attn_mask=mask)


def _one_query(q_BH1E: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: Tensor) -> Tensor:
    """Attends with each group as the queries of its key/value head, which then stays one copy."""
    num_kv_heads = k_BKSE.shape[1]
    q_BKGE = q_BH1E.squeeze(2).unflatten(1, (num_kv_heads, -1))
    if mask.ndim == 4 and mask.shape[1] > 1:
        mask = mask.squeeze(2).unflatten(1, (num_kv_heads, -1))
    out_BKGE = F.scaled_dot_product_attention(q_BKGE, k_BKSE, v_BKSE, attn_mask=mask)
    return out_BKGE.flatten(1, 2).unsqueeze(2)


def _repeat_heads(x_BKSE: Tensor, num_times: int) -> Tensor:
    if num_times == 1:
        return x_BKSE
    return x_BKSE.unsqueeze(2).expand(-1, -1, num_times, -1, -1).flatten(1, 2)


def _heads(params: Mapping[str, Tensor], x_BLD: Tensor, head_dim: int) -> Tensor:
    return linear(params, x_BLD).unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _check_groups(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(
            f"Each key/value head serves as many query heads, but {num_heads} query heads do not "
            f"divide over {num_kv_heads} key/value heads."
        )
