"""Losses: means over unequal pieces, and the negative log likelihood over split classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .reduction import mean_of_all
from .registry import FLOATING, form, places_along, wide

aten = torch.ops.aten
_SUM = 2
"""The number of a loss that is summed, in ATen; 1 is a mean, 0 keeps each."""


def _arguments(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    schema = op._schema.arguments
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return defaults | dict(zip((a.name for a in schema), args, strict=False)) | kwargs


def _mean_backward(op: torch._ops.OpOverload) -> None:
    @form(op)
    def backward(*args: Any, **kwargs: Any) -> Any:
        """The gradient of a mean is that of a sum, of the gradient over the count."""
        given = _arguments(op, args, kwargs)
        if given["reduction"] != 1:
            return NotImplemented
        x = given["self"]
        count = (x.shape[0] if x.ndim > 1 else 1) if op in _PER_SAMPLE else x.numel()
        return op(**given | {"grad_output": given["grad_output"] / count, "reduction": _SUM})


_PER_SAMPLE = {
    aten.multi_margin_loss_backward.default,
    aten.multilabel_margin_loss_backward.default,
}
for _op in (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
    *_PER_SAMPLE,
):
    _mean_backward(_op)


def _loss(op: torch._ops.OpOverload) -> None:
    @form(op)
    def loss(*args: Any, **kwargs: Any) -> Any:
        """A mean over pieces that are not alike."""
        given = _arguments(op, args, kwargs)
        if given["reduction"] != 1:
            return NotImplemented
        losses = op(**given | {"reduction": 0})
        return mean_of_all(losses)  # what is not floating has none


for _op in (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.multi_margin_loss.default,
):
    _loss(_op)


def _classes(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Where a target counts, and the class of each, 0 where it does not."""
    valid = target != ignore_index
    return valid, torch.where(valid, target, 0).long()


def _by_class(weight: Tensor, classes: Tensor) -> Tensor:
    return weight.index_select(0, classes.flatten()).view(classes.shape)


def _with_classes(given: Sequence[torch.dtype]) -> bool:
    """Scores, the class of each sample, and perhaps weights of the dtype of the scores."""
    scores, target, *weight = given
    return (
        scores in FLOATING
        and target in (torch.int64, torch.uint8)
        and all(w == scores for w in weight)
    )


@form(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, takes=_with_classes)
def _nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    dim = 1 if x.ndim > 1 else 0
    valid, classes = _classes(target, ignore_index)
    losses = -wide(x).gather(dim, classes.unsqueeze(dim)).squeeze(dim)
    weights = (
        valid.to(losses.dtype)
        if weight is None
        else torch.where(valid, _by_class(weight, classes), 0)
    )
    losses = torch.where(valid, losses * weights, 0)
    if reduction == 0:
        return losses.to(x.dtype), torch.zeros((), dtype=x.dtype, device=x.device)
    total, loss = weights.sum(), losses.sum()
    return (loss if reduction == _SUM else loss / total).to(x.dtype), total.to(x.dtype)


@form(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total: Tensor,
) -> Tensor:
    dim = 1 if x.ndim > 1 else 0
    valid, classes = _classes(target, ignore_index)
    scaled = grad / total if reduction == 1 else grad
    scaled = -scaled if weight is None else -scaled * _by_class(weight, classes)
    scaled = torch.where(valid, scaled, 0).unsqueeze(dim)
    return torch.where(places_along(x, dim) == classes.unsqueeze(dim), scaled, 0).to(x.dtype)
