"""Layer and RMS normalisation, forward and backward."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from layouts import PAIR, SUM, TRIPLE, R, S, case, spread, sweep, values

import dtorch

aten = torch.ops.aten


def _statistics(x):
    return x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True).add(1).rsqrt()


def _backward(*mask):
    def run(grad, x, mean, rstd, weight, bias):
        found = aten.native_layer_norm_backward(
            grad, x, [x.shape[-1]], mean, rstd, weight, bias, list(mask)
        )
        return [g for g, wanted in zip(found, mask, strict=True) if wanted]

    return run


X = values((2, 3, 4))
MEAN, RSTD = _statistics(X)

CASES = [
    case("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), X, (4,), (4,)),
    case("layer_norm_plain", lambda x: F.layer_norm(x, (4,)), X),
    case("layer_norm_two_dims", lambda x, w: F.layer_norm(x, (3, 4), w), X, (3, 4)),
    case("layer_norm_all", lambda x: F.layer_norm(x, (2, 3, 4)), X),
    case("layer_norm_uneven", lambda x: F.layer_norm(x, (3,)), (5, 3)),
    case("layer_norm_short", lambda x: F.layer_norm(x, (3,)), (1, 3)),
    case("layer_norm_empty", lambda x: F.layer_norm(x, (3,)), (0, 3)),
    case("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), X, (4,)),
    case("rms_norm_plain", lambda x: F.rms_norm(x, (4,)), X),
    case("rms_norm_empty", lambda x: F.rms_norm(x, (3,)), (0, 3)),
    case("native_layer_norm", lambda x, w, b: torch.native_layer_norm(x, (4,), w, b, 1e-5),
         X, (4,), (4,)),
    case("native_rms_norm", lambda x, w: aten._fused_rms_norm(x, (4,), w, 1e-5), X, (4,)),
    case("backward", _backward(True, True, True), (2, 3, 4), X, MEAN, RSTD, (4,), (4,)),
    case("backward_of_weights", _backward(False, True, True), (2, 3, 4), X, MEAN, RSTD, (4,), (4,)),
    case("backward_of_input", _backward(True, False, False), (2, 3, 4), X, MEAN, RSTD, (4,), (4,)),
    case("backward_of_bias", _backward(True, False, True), (2, 3, 4), X, MEAN, RSTD, (4,), (4,)),
    case("group_norm", lambda x, w: F.group_norm(x, 2, w), (2, 4, 3), (4,)),
    case("group_norm_uneven", lambda x: F.group_norm(x, 3), (5, 6, 2, 2)),
    case("batch_norm", lambda x, m, v: F.batch_norm(x, m, v.abs() + 1), (4, 3), (3,), (3,)),
    case("batch_norm_training", lambda x, w: F.batch_norm(x, None, None, w, training=True),
         (4, 3, 2), (3,)),
]  # fmt: skip


@pytest.mark.parametrize("which", CASES, ids=str)
def test_equals_torch_in_every_layout(which):
    sweep(dataclasses.replace(which, exact=False))


def test_outer_dims_stay_sharded_and_weight_gradients_are_partial():
    x = spread(X, PAIR, [S(0)])
    program = dtorch.jit(lambda x: F.layer_norm(x, (4,))).program(x)
    assert program.specs[program.outputs[0]].placements == (S(0),)
    assert program.communication() == []
    tensors = [spread(t, PAIR, [S(0)]) for t in (X, X, MEAN, RSTD)]
    weights = [spread(values((4,)), PAIR, [R])] * 2
    program = dtorch.jit(_backward(True, True, True)).program(*tensors, *weights)
    assert [program.specs[o].placements for o in program.outputs] == [(S(0),), (SUM,), (SUM,)]
    assert program.communication() == []


@pytest.mark.parametrize("wrap", [lambda f: f, dtorch.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("placement", [R, S(0), S(1)])
def test_batch_norm_whose_input_needs_no_gradient(wrap, placement):
    """The kernel gives no gradient of the input; those of the channels are in their places."""
    x, weight, bias = values((6, 5)), values((5,)), values((5,)) + 1

    def loss(weight, bias, x):
        return torch.nn.functional.batch_norm(x, None, None, weight, bias, True).square().sum()

    expected = torch.func.grad(loss, argnums=(0, 1))(weight, bias, x)
    for channels in (R, S(0)):
        given = spread(weight, TRIPLE, [channels]), spread(bias, TRIPLE, [R])
        found = wrap(dtorch.grad(loss, argnums=(0, 1)))(*given, spread(x, TRIPLE, [placement]))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.to_torch(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
@pytest.mark.parametrize("mesh", [dtorch.DeviceMesh("cpu", [0]), PAIR, TRIPLE], ids=str)
def test_group_norm_of_tokens_as_an_image(mesh: dtorch.DeviceMesh, batch: int) -> None:
    """A part of one image has strides that do not tell its memory format."""

    def normed(x: torch.Tensor) -> torch.Tensor:
        image = x.mT.reshape(len(x), 8, 4, 4) + 0
        return F.group_norm(F.group_norm(image, 4), 2)

    x = torch.randn(batch, 16, 8)
    y = dtorch.tensor(x, device_mesh=mesh, placements=[S(0)]).requires_grad_()
    z = x.clone().requires_grad_()
    torch.testing.assert_close(dtorch.jit(normed)(y.detach()).to_torch(), normed(x))
    normed(y).sin().sum().backward()
    normed(z).sin().sum().backward()
    assert y.grad is not None and z.grad is not None
    torch.testing.assert_close(y.grad.to_torch(), z.grad)
