"""Softmax and its relatives: a maximum and a sum over the split dim."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .registry import FLOATING, alike, dims_of, form, squeezed, wide

aten = torch.ops.aten


def _exponentials(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``x - max`` and the sum of its exponentials."""
    shifted = x - x.amax(dim, keepdim=True)
    return shifted, shifted.exp().sum(dim, keepdim=True)


@form(aten._softmax.default, takes=alike(FLOATING))
def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    shifted, total = _exponentials(wide(x), dim)
    return (shifted.exp() / total).to(torch.float32 if half_to_float else x.dtype)


@form(aten._log_softmax.default, takes=alike(FLOATING))
def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    shifted, total = _exponentials(wide(x), dim)
    return (shifted - total.log()).to(torch.float32 if half_to_float else x.dtype)


@form(aten.softmax.int)
def _softmax_int(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    return _softmax(x, dim, False) if x.dtype in FLOATING else NotImplemented


@form(aten.log_softmax.int)
def _log_softmax_int(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    return _log_softmax(x, dim, False) if x.dtype in FLOATING else NotImplemented


@form(aten._safe_softmax.default, takes=lambda given: not given[0].is_complex)
def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    result = _softmax_int(x, dim, dtype)
    if result is NotImplemented:
        return result
    return result.masked_fill((x == -math.inf).all(dim, keepdim=True), 0.0)


@form(aten._softmax_backward_data.default, takes=alike(FLOATING))
def _softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    grad, output = wide(grad), wide(output)
    scaled = grad * output
    return (scaled - output * scaled.sum(dim, keepdim=True)).to(input_dtype)


@form(aten._log_softmax_backward_data.default, takes=alike(FLOATING))
def _log_softmax_backward(
    grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    grad, output = wide(grad), wide(output)
    return (grad - output.exp() * grad.sum(dim, keepdim=True)).to(input_dtype)


@form(aten.logsumexp.default, takes=alike(FLOATING))
def _logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    dims = dims_of(x, dim)
    largest = wide(x).amax(dims, keepdim=True)
    largest = torch.where(largest.abs() == math.inf, 0.0, largest)
    total = (wide(x) - largest).exp().sum(dims, keepdim=True)
    return squeezed((total.log() + largest).to(x.dtype), dims, keepdim)
