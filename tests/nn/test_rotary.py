"""`dtorch.nn.rotary`, against transformers' `LlamaRotaryEmbedding`."""

from typing import Any

import pytest
import torch

from dtorch import nn

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def reference(head_dim: int, theta: float, **rope: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    rope = {"rope_type": "default", "rope_theta": theta, **rope}
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters=rope,
    )
    return llama.LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("head_dim", [2, 8, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_are_those_of_transformers(head_dim: int, theta: float, dtype: torch.dtype) -> None:
    position_BL = torch.stack([torch.arange(300), torch.arange(1700, 2000)])
    expected = reference(head_dim, theta)(torch.empty(0, dtype=dtype), position_BL)
    tables = nn.rotary_tables(position_BL, head_dim, theta=theta, dtype=dtype)
    assert all(torch.equal(t, e) for t, e in zip(tables, expected, strict=True))


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_scaled_tables_are_those_of_transformers(head_dim: int) -> None:
    position_BL = torch.arange(2000)[None]
    module = reference(head_dim, 5e5, rope_type="llama3", **LLAMA3)
    expected = module(torch.empty(0), position_BL)
    tables = nn.rotary_tables(position_BL, head_dim, theta=5e5, scaling=nn.Llama3Scaling(**LLAMA3))
    assert all(torch.equal(t, e) for t, e in zip(tables, expected, strict=True))
    plain = nn.rotary_tables(position_BL, head_dim, theta=5e5)
    assert not torch.equal(tables[0], plain[0])


def test_one_row_of_positions_needs_no_batch_dim() -> None:
    position_L = torch.arange(5)
    batched = nn.rotary_tables(position_L[None], 8)
    for table, expected in zip(nn.rotary_tables(position_L, 8), batched, strict=True):
        assert torch.equal(table, expected[0])


def test_rotate_is_that_of_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q_BHLE, k_BKLE = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    position_BL = torch.tensor([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])
    cos_BLE, sin_BLE = nn.rotary_tables(position_BL, 8)
    q_expected, k_expected = llama.apply_rotary_pos_emb(q_BHLE, k_BKLE, cos_BLE, sin_BLE)
    assert torch.equal(nn.rotate(q_BHLE, cos_BLE, sin_BLE), q_expected)
    assert torch.equal(nn.rotate(k_BKLE, cos_BLE, sin_BLE), k_expected)


def test_the_product_of_query_and_key_depends_on_their_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    products = []
    for query_position, key_position in ((3, 1), (40, 38)):
        tables = nn.rotary_tables(
            torch.tensor([query_position, key_position]), 16, dtype=torch.float64
        )
        (q_cos, k_cos), (q_sin, k_sin) = (t.split(1) for t in tables)
        products.append((nn.rotate(q, q_cos, q_sin) * nn.rotate(k, k_cos, k_sin)).sum())
    torch.testing.assert_close(products[0], products[1], rtol=1e-5, atol=1e-5)


def test_an_odd_head_raises() -> None:
    with pytest.raises(ValueError, match="head_dim=7 is odd"):
        nn.rotary_tables(torch.arange(3), 7)
