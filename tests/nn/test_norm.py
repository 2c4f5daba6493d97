"""`dtorch.nn.rms_norm`."""

import pytest
import torch

from dtorch import nn, random


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 33, 64])
def test_rms_norm_is_that_of_transformers(dtype: torch.dtype, size: int) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    module = llama.LlamaRMSNorm(size, eps=1e-5)
    module.weight.data = torch.randn(size).to(dtype)
    x = (3 * torch.randn(2, 5, size)).to(dtype)
    y = nn.rms_norm({"weight": module.weight}, x, eps=1e-5)
    assert torch.equal(y, module(x))
    assert y.dtype == dtype


def test_rms_norm_init_is_ones() -> None:
    params = nn.rms_norm_init(random.key(0), 4, dtype=torch.float16)
    assert torch.equal(params["weight"], torch.ones(4, dtype=torch.float16))
