"""`dtorch.nn.linear`."""

import pytest
import torch
import torch.nn.functional as F

from dtorch import nn, random


@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_torchs(bias: bool) -> None:
    params = nn.linear_init(random.key(0), 6, 10, bias=bias)
    x = torch.randn(2, 3, 6)
    assert torch.equal(nn.linear(params, x), F.linear(x, params["weight"], params.get("bias")))
    assert list(params) == (["weight", "bias"] if bias else ["weight"])


def test_linear_init_keeps_the_variance() -> None:
    params = nn.linear_init(random.key(1), 400, 500, bias=True)
    assert params["weight"].shape == (500, 400)
    assert abs(params["weight"].std() * 20 - 1) < 0.02
    assert torch.equal(params["bias"], torch.zeros(500))


def test_linear_init_takes_a_deviation_and_a_dtype() -> None:
    params = nn.linear_init(random.key(2), 40, 500, std=0.5, bias=True, dtype=torch.bfloat16)
    assert abs(params["weight"].float().std() - 0.5) < 0.02
    assert params["weight"].dtype == params["bias"].dtype == torch.bfloat16
