"""Losses over split samples and split classes, with their gradients."""

import pytest
import torch
import torch.nn.functional as F
from layouts import OBLONG, PAIR, SQUARE, TRIPLE, R, S, case, spread, sweep, values

import dtorch
from dtorch.program import Redistribute
from dtorch.redistribution import Collective

X, Y = values((5, 6)), values((5, 6), seed=1)
P01 = torch.rand(5, 6, generator=torch.Generator().manual_seed(0))
TARGET = torch.tensor([2, 0, -100, 5, 1])
LOSSES = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "soft_margin": lambda x, y, reduction: F.soft_margin_loss(x, y.sign(), reduction=reduction),
    "bce": lambda x, y, reduction: F.binary_cross_entropy(
        x.sigmoid(), y.sigmoid(), reduction=reduction
    ),
    "bce_logits": lambda x, y, reduction: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), y[0].abs(), reduction=reduction, pos_weight=y[1].abs()
    ),
    "multi_margin": lambda x, y, reduction: F.multi_margin_loss(
        x, TARGET.clamp(min=0), reduction=reduction
    ),
    "multilabel": lambda x, y, reduction: F.multilabel_margin_loss(
        x, TARGET.clamp(min=0).expand(6, 5).t().sort(1)[0], reduction=reduction
    ),
    "cross_entropy": lambda x, y, reduction: F.cross_entropy(x, TARGET, reduction=reduction),
    "weighted": lambda x, y, reduction: F.cross_entropy(
        x, TARGET, weight=y[0].abs(), reduction=reduction, label_smoothing=0.1
    ),
    "of_images": lambda x, y, reduction: F.cross_entropy(
        x.view(5, 3, 2), (TARGET % 3)[:, None].expand(5, 2), reduction=reduction
    ),
}


def _call(name, reduction):
    loss = LOSSES[name]
    return lambda x, y: loss(x, y, reduction=reduction)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_torch_in_every_layout(name, reduction):
    sweep(case(name, _call(name, reduction), X, Y, exact=False, count=6, partials=()))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_torch(name, reduction):
    def loss(x, y):
        return _call(name, reduction)(x, y).sum()

    expected = torch.func.grad(loss)(X, Y)
    layouts = [(PAIR, [S(0)]), (PAIR, [S(1)]), (TRIPLE, [S(1)]), (SQUARE, [S(0), S(1)])]
    for mesh, placements in layouts:
        x, y = spread(X, mesh, placements), spread(Y, mesh, [R] * mesh.ndim)
        for grad in (dtorch.grad(loss), dtorch.jit(dtorch.grad(loss))):
            found = grad(x, y)
            assert found.placements == placements
            torch.testing.assert_close(found.to_torch(), expected)


def test_split_classes_are_not_gathered():
    """Case 14: what is communicated is a few numbers a sample, also for the gradient."""
    num_samples, num_classes = 7, 50257
    x = torch.randn(num_samples, num_classes, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([3, 50256, -100, 0, 25129, 25128, 7])

    def loss(x):
        return F.cross_entropy(x, target)

    expected, gradient = loss(x), torch.func.grad(loss)(x)
    both = dtorch.jit(dtorch.value_and_grad(loss))
    for mesh in (PAIR, TRIPLE, OBLONG):
        placements = [S(1)] * mesh.ndim
        logits = spread(x, mesh, placements)
        steps = [
            i.step
            for i in both.program(logits).instructions
            if isinstance(i, Redistribute) and i.step.kind is not Collective.SLICE
        ]
        assert all(s.source.num_bytes <= 8 * num_samples for s in steps), steps
        value, found = both(logits)
        torch.testing.assert_close(value.to_torch(), expected)
        assert found.placements == placements
        torch.testing.assert_close(found.to_torch(), gradient)
