"""Recurrent layers: in training too, on every mesh."""

import itertools
from typing import Any

import pytest
import torch
from layouts import PAIR, TRIPLE, R, S, spread, values

import dtorch

ONE = dtorch.DeviceMesh("cpu", [0])


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, True)])
def test_values_and_gradients(kind: str, layers: int, both: bool) -> None:
    torch.manual_seed(0)
    module = getattr(torch.nn, kind)(3, 4, layers, bidirectional=both)
    params, apply = dtorch.nn.functionalize(module)
    x = values((5, 2, 3))

    def loss(params: Any, x: Any) -> Any:
        return sum(t.square().sum() for t in torch.utils._pytree.tree_leaves(apply(params, x)))

    expected = torch.func.grad_and_value(loss, argnums=(0, 1))(params, x)
    for mesh, placement in itertools.chain(
        [(ONE, R)], itertools.product((PAIR, TRIPLE), (R, S(1)))
    ):
        given = dtorch.parallel.shard(params, mesh), spread(x, mesh, [placement])
        for wrap in (lambda f: f, dtorch.jit):
            (value, grads) = wrap(dtorch.value_and_grad(loss, argnums=(0, 1)))(*given)
            torch.testing.assert_close(value.to_torch(), expected[1])
            for name, grad in params.items():
                torch.testing.assert_close(
                    grads[0][name].to_torch(), expected[0][0][name], rtol=1e-4, atol=1e-5
                )
                assert grad.shape == grads[0][name].shape
            torch.testing.assert_close(grads[1].to_torch(), expected[0][1], rtol=1e-4, atol=1e-5)
