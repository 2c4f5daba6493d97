"""`dtorch.nn.swiglu`."""

import pytest
import torch

from dtorch import nn, random


@pytest.mark.parametrize("bias", [False, True])
def test_swiglu_is_that_of_transformers(bias: bool) -> None:
    transformers = pytest.importorskip("transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = transformers.LlamaConfig(
        hidden_size=24, num_attention_heads=4, intermediate_size=52, mlp_bias=bias
    )
    params = nn.swiglu_init(random.key(0), 24, 52, bias=bias)
    module = llama.LlamaMLP(config).requires_grad_(False)
    module.load_state_dict({f"{p}.{n}": t for p, tree in params.items() for n, t in tree.items()})
    x = torch.randn(2, 7, 24)
    assert torch.equal(nn.swiglu(params, x), module(x))


def test_the_three_weights_are_drawn_apart() -> None:
    params = nn.swiglu_init(random.key(1), 8, 8, dtype=torch.float64)
    weights = torch.stack([tree["weight"] for tree in params.values()])
    assert weights.dtype == torch.float64
    assert weights.unique().numel() == weights.numel()
