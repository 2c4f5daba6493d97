"""`dtorch.nn.attention`: its groups, masks and cache. Against transformers: test_llama.py.

Shapes: B batch, L new tokens, S keys attended to, D hidden, H query heads, K key/value heads,
E head size.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dtorch import nn, random

B, L, D, E = 2, 6, 20, 8


def by_hand(q_BHLE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, bias: Tensor) -> Tensor:
    """Attention as its formula, with the key/value heads repeated."""
    group_size = q_BHLE.shape[1] // k_BKSE.shape[1]
    k_BHSE, v_BHSE = (x.repeat_interleave(group_size, 1) for x in (k_BKSE, v_BKSE))
    scores_BHLS = q_BHLE @ k_BHSE.mT / math.sqrt(q_BHLE.shape[-1]) + bias
    return scores_BHLS.softmax(-1) @ v_BHSE


def bias_of(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("mask_heads", [None, 1, "all"])
@pytest.mark.parametrize("is_bool", [True, False])
def test_grouped_attention_with_a_mask_is_the_formula(
    num_heads: int, num_kv_heads: int, num_queries: int, mask_heads: Any, is_bool: bool
) -> None:
    q_BHLE = torch.randn(B, num_heads, num_queries, E)
    k_BKSE, v_BKSE = torch.randn(2, B, num_kv_heads, 9, E)
    shape = (num_queries, 9)
    if mask_heads is not None:
        shape = (B, num_heads if mask_heads == "all" else 1, *shape)
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    bias = bias_of(mask) if is_bool else bias_of(mask) + torch.randn(shape)
    out = nn.grouped_attention(q_BHLE, k_BKSE, v_BKSE, mask=mask if is_bool else bias)
    assert out.shape == q_BHLE.shape
    torch.testing.assert_close(out, by_hand(q_BHLE, k_BKSE, v_BKSE, bias))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 4), (5, 5), (3, 5)])
def test_grouped_attention_without_a_mask_is_causal(
    num_heads: int, num_kv_heads: int, num_queries: int, num_keys: int
) -> None:
    q_BHLE = torch.randn(B, num_heads, num_queries, E)
    k_BKSE, v_BKSE = torch.randn(2, B, num_kv_heads, num_keys, E)
    bias = bias_of(torch.ones(num_queries, num_keys, dtype=torch.bool).tril())
    out = nn.grouped_attention(q_BHLE, k_BKSE, v_BKSE)
    torch.testing.assert_close(out, by_hand(q_BHLE, k_BKSE, v_BKSE, bias))


def attend(params: Any, x_BLD: Tensor, position_L: Tensor, **options: Any) -> Any:
    cos_LE, sin_LE = nn.rotary_tables(position_L, E)
    return nn.attention(params, x_BLD, cos_LE, sin_LE, head_dim=E, **options)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (4, 2)])
def test_tokens_one_by_one_through_the_cache_give_the_whole_sequence(
    num_heads: int, num_kv_heads: int
) -> None:
    params = nn.attention_init(random.key(0), D, num_heads, num_kv_heads, E)
    x_BLD = torch.randn(B, L, D)
    whole_BLD, no_cache = attend(params, x_BLD, torch.arange(L))
    assert no_cache is None
    cache = nn.cache_init(B, num_kv_heads, 10, E)
    outs = []
    for i in range(L):
        slot_1 = torch.tensor([i])
        mask_1S = torch.arange(10) <= i
        out, cache = attend(
            params, x_BLD[:, i : i + 1], slot_1, mask=mask_1S[None], cache=cache, slot_L=slot_1
        )
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), whole_BLD)


def test_a_prefill_is_the_whole_sequence_and_fills_the_first_slots() -> None:
    params = nn.attention_init(random.key(1), D, 4, 2, E)
    x_BLD, position_L = torch.randn(B, L, D), torch.arange(L)
    empty = nn.cache_init(B, 2, 10, E)
    out_BLD, cache = attend(params, x_BLD, position_L, cache=empty, slot_L=position_L)
    assert torch.equal(out_BLD, attend(params, x_BLD, position_L)[0])
    assert not any(t.any() for t in empty.values())
    for kept in cache.values():
        assert kept[:, :, :L].all() and not kept[:, :, L:].any()


def test_a_chunk_attends_to_what_the_cache_held_before() -> None:
    params = nn.attention_init(random.key(2), D, 4, 2, E)
    x_BLD, position_L = torch.randn(B, L, D), torch.arange(L)
    whole_BLD, _ = attend(params, x_BLD, position_L)
    cache, outs = nn.cache_init(B, 2, 8, E), []
    for part_L in position_L.split((4, 2)):
        mask_LS = torch.arange(8) <= part_L[:, None]
        out, cache = attend(
            params, x_BLD[:, part_L], part_L, mask=mask_LS, cache=cache, slot_L=part_L
        )
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), whole_BLD)


def test_attention_init_has_the_checkpoints_names_and_shapes() -> None:
    params = nn.attention_init(random.key(3), D, 4, 2, E, bias=True, dtype=torch.float64)
    shapes = {name: tuple(tree["weight"].shape) for name, tree in params.items()}
    assert shapes == {"q_proj": (32, D), "k_proj": (16, D), "v_proj": (16, D), "o_proj": (D, 32)}
    assert all(t.dtype == torch.float64 for tree in params.values() for t in tree.values())
    assert attend(params, torch.randn(B, L, D).double(), torch.arange(L))[0].shape == (B, L, D)


def test_heads_that_do_not_divide_raise() -> None:
    with pytest.raises(ValueError, match="4 query heads do not divide over 3 key/value heads"):
        nn.attention_init(random.key(0), D, 4, 3, E)
    q_BHLE, k_BKSE = torch.randn(B, 4, L, E), torch.randn(B, 3, L, E)
    with pytest.raises(ValueError, match="4 query heads do not divide over 3 key/value heads"):
        nn.grouped_attention(q_BHLE, k_BKSE, k_BKSE)


def test_a_cache_without_slots_raises() -> None:
    params = nn.attention_init(random.key(0), D, 4, 2, E)
    with pytest.raises(ValueError, match="cache and slot_L together"):
        attend(params, torch.randn(B, L, D), torch.arange(L), cache=nn.cache_init(B, 2, 8, E))
