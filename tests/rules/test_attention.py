"""Scaled dot product attention over batch and heads."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from layouts import PAIR, SQUARE, TRIPLE, R, S, case, spread, sweep, values

import dtorch

Q = (2, 4, 3, 8)
KV = (2, 4, 5, 8)


def _causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


MASK = values((3, 5)) > 0

CASES = [
    case("plain", F.scaled_dot_product_attention, Q, KV, KV),
    case("causal", _causal, KV, KV, KV),
    case("mask", F.scaled_dot_product_attention, Q, KV, KV, (3, 5)),
    case("mask_of_batch", F.scaled_dot_product_attention, Q, KV, KV, (2, 1, 3, 5)),
    case("mask_of_heads", F.scaled_dot_product_attention, Q, KV, KV, (1, 4, 3, 5)),
    case("bool_mask", F.scaled_dot_product_attention, Q, KV, KV, values((2, 1, 3, 5)).abs() < 1.8),
    case("grouped", _grouped, Q, (2, 2, 5, 8), (2, 2, 5, 8)),
    case("uneven_heads", F.scaled_dot_product_attention, (1, 3, 2, 8), (1, 3, 4, 8), (1, 3, 4, 8)),
    case("three_dims", F.scaled_dot_product_attention, (4, 3, 8), (4, 5, 8), (4, 5, 8)),
    case("bf16", F.scaled_dot_product_attention, *[(s, torch.bfloat16) for s in (Q, KV, KV)]),
]


@pytest.mark.parametrize("which", CASES, ids=str)
def test_equals_torch_in_every_layout(which):
    sweep(dataclasses.replace(which, exact=False, fallback=True))


@pytest.mark.parametrize("grad_of", [(0,), (0, 1, 2), (1, 2)])
@pytest.mark.parametrize("mesh", [PAIR, TRIPLE], ids=["2", "3"])
@pytest.mark.parametrize("placement", [R, S(0), S(1)])
@pytest.mark.parametrize("heads", [4, 2])
def test_gradients_equal_torch(mesh, placement, grad_of, heads):
    keys = (2, heads, 5, 8)
    inputs = [values(s, seed=i) for i, s in enumerate((Q, keys, keys))]

    def loss(*tensors):
        return _grouped(*tensors).square().sum()

    wanted = [t.clone().requires_grad_(i in grad_of) for i, t in enumerate(inputs)]
    loss(*wanted).backward()
    spread_out = [spread(t, mesh, [placement]) for t in inputs]
    found = dtorch.grad(loss, argnums=grad_of)(*spread_out)
    for i, g in zip(grad_of, found, strict=True):
        torch.testing.assert_close(g.to_torch(), wanted[i].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [4, 2])
def test_batch_and_heads_do_not_communicate(heads):
    q, kv = values((2, 4, 3, 8)), values((2, heads, 5, 8))
    tensors = [spread(t, SQUARE, [S(0), S(1)]) for t in (q, kv, kv)]
    program = dtorch.jit(_grouped).program(*tensors)
    assert program.communication() == []
    assert not program.fallbacks()
    assert program.specs[program.outputs[0]].placements == (S(0), S(1))
