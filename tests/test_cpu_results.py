"""What inference says where meta kernels are wrong or missing: compared with the CPU kernels."""

from typing import Any

import pytest
import torch

from dtorch.infer import infer
from dtorch.mesh import DeviceMesh
from dtorch.placement import Replicate
from dtorch.spec import Spec

aten = torch.ops.aten
ONE = DeviceMesh("cpu", [0])


def spec_of(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return Spec.of(value.shape, value.dtype, ONE, (Replicate(),), value.stride())


def agrees(op: Any, *args: Any) -> None:
    results = op(*args)
    found = infer(op, [spec_of(a) for a in args], {})
    results = results if isinstance(results, tuple) else (results,)
    found = found if isinstance(found, list) else [found]
    for meta, result in zip(found, results, strict=True):
        assert (meta.shape, meta.dtype) == (tuple(result.shape), result.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("parameters", [None, torch.float32, torch.bfloat16])
def test_statistics_of_normalisations(dtype: Any, training: bool, parameters: Any) -> None:
    if parameters not in (None, dtype) and dtype != torch.bfloat16:
        pytest.skip("PyTorch takes no such mixture")
    x = torch.rand(2, 3, 4).to(dtype)
    p = None if parameters is None else torch.rand(3).to(parameters)
    running = torch.rand(3).to(parameters or dtype)
    agrees(aten.native_batch_norm.default, x, p, p, running, running, training, 0.1, 1e-5)
    agrees(aten._native_batch_norm_legit.no_stats, x, p, p, True, 0.1, 1e-5)
    q = None if parameters is None else torch.rand(4).to(parameters)
    agrees(aten.native_layer_norm.default, x, [4], q, q, 1e-5)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("padding", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_embedding_bags_keep(mode: int, padding: int, dtype: Any) -> None:
    weight, indices = torch.rand(5, 3).to(dtype), torch.tensor([0, 1, 2, 3])
    for op in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default):
        args = (weight, indices, torch.tensor([0, 2]), False, mode, False, None, False, padding)
        agrees(op, *args)


def test_gradients_have_the_shape_of_their_argument() -> None:
    x, target = torch.rand(3, 4), torch.tensor([0, 3, 1])
    agrees(aten.multi_margin_loss_backward.default, torch.tensor(1.0), x, target, 1, 1.0, None, 1)
    agrees(aten._standard_gamma_grad.default, x, x)
    agrees(aten.binomial.default, torch.full((2, 3), 4.0), torch.rand(2, 3))
