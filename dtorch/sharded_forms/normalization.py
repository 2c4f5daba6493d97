"""Layer, RMS, batch and group normalisation: statistics from sums over the split dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..custom_ops import cudnn_batch_norm
from .reduction import variance_and_mean
from .registry import FLOATING, HALF, count_of, first, form, wide, with_parameters

aten = torch.ops.aten


def _normalized(
    x: Tensor, dims: tuple[int, ...], eps: float, centered: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised values, their mean and the reciprocal of their deviation, dims kept."""
    if not centered:
        mean = torch.zeros((), dtype=x.dtype, device=x.device)
        scale = (x * x).sum(dims, keepdim=True).div(count_of(x, dims)).add(eps).rsqrt()
        return x * scale, mean, scale
    variance, mean = variance_and_mean(x, dims, 0)
    scale = (variance + eps).rsqrt()
    return (x - mean) * scale, mean, scale


def _statistics_dtype(x: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """That of the input, unless a parameter has another: then float32, as the CPU kernels do."""
    alike = all(p is None or p.dtype == x.dtype for p in parameters)
    return x.dtype if alike else wide(x).dtype


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _last(x: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(x.ndim - len(shape), x.ndim))


@form(aten.native_layer_norm.default, takes=with_parameters)
def _native_layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    result, mean, scale = _normalized(wide(x), _last(x, shape), eps)
    dtype = _statistics_dtype(x, weight, bias)
    return _scaled(result, weight, bias).to(x.dtype), mean.to(dtype), scale.to(dtype)


@form(aten.layer_norm.default, takes=with_parameters)
def _layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return _native_layer_norm(x, shape, weight, bias, eps)[0]


@form(aten.rms_norm.default, takes=first(FLOATING))
def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _scaled(_normalized(wide(x), _last(x, shape), eps, False)[0], weight, None).to(x.dtype)


def _through_normalization(
    grad: Tensor, normal: Tensor, scale: Tensor, dims: tuple[int, ...], centered: bool = True
) -> Tensor:
    """The gradient of what was normalised, from that of the normalised values."""
    count = count_of(grad, dims)
    along = normal * ((grad * normal).sum(dims, keepdim=True) / count)
    mean = grad.sum(dims, keepdim=True) / count if centered else 0
    return (grad - mean - along) * scale


@form(aten.native_layer_norm_backward.default, takes=first(FLOATING))
def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Any, ...]:
    outer = tuple(range(x.ndim - len(shape)))
    grad, normal = wide(grad), (wide(x) - mean) * scale
    inner = grad if weight is None else grad * weight
    grads = (
        lambda: _through_normalization(inner, normal, scale, _last(x, shape)).to(x.dtype),
        lambda: (grad * normal).sum(outer).to(x.dtype) if outer else (grad * normal).to(x.dtype),
        lambda: grad.sum(outer).to(x.dtype) if outer else grad.to(x.dtype),
    )
    return tuple(make() if wanted else None for make, wanted in zip(grads, mask, strict=True))


def _by_channel(x: Any, ndim: int) -> Any:
    return None if x is None else x.view([-1 if d == 1 else 1 for d in range(ndim)])


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = tuple(d for d in range(x.ndim) if d != 1)
    result, mean, scale = _normalized(wide(x), dims, eps)
    result = _scaled(result, _by_channel(weight, x.ndim), _by_channel(bias, x.ndim))
    return result.to(x.dtype), mean.flatten(), scale.flatten()


@form(aten._native_batch_norm_legit.no_stats, takes=with_parameters)
def _batch_norm_without_statistics(
    x: Tensor, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    if not training:
        return NotImplemented
    result, mean, scale = _batch_norm(x, weight, bias, eps)
    dtype = _statistics_dtype(x, weight, bias)
    return result, mean.to(dtype), scale.to(dtype)


@form(aten._native_batch_norm_legit_functional.default, takes=with_parameters)
def _batch_norm_with_statistics(
    x: Tensor,
    weight: Any,
    bias: Any,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training:
        return NotImplemented
    result, mean, scale = _batch_norm(x, weight, bias, eps)
    dims = tuple(d for d in range(x.ndim) if d != 1)
    variance, _ = variance_and_mean(wide(x), dims, 1)
    dtype = _statistics_dtype(x, weight, bias, running_mean, running_var)
    return (
        result,
        mean.to(dtype),
        scale.to(dtype),
        torch.lerp(running_mean, mean.to(running_mean.dtype), momentum),
        torch.lerp(running_var, variance.flatten().to(running_var.dtype), momentum),
    )


@form(aten.native_batch_norm.default, takes=with_parameters)
def _native_batch_norm(
    x: Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: Any,
    eps: float,
) -> Any:
    if mean is not None:
        return NotImplemented
    return _batch_norm_without_statistics(x, weight, bias, training, momentum, eps)


def _as_cudnn_takes(given: Sequence[torch.dtype]) -> bool:
    """Floating tensors of one dtype, or a first one of half precision with float32 ones."""
    rest = torch.float32 if given[0] in HALF else given[0]
    return given[0] in FLOATING and set(given[1:]) <= {rest}


@form(cudnn_batch_norm, takes=_as_cudnn_takes)
def _cudnn_batch_norm(
    x: Tensor, weight: Tensor, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> Any:
    """What the kernel reserves for its backward is no bytes here."""
    if mean is None:
        saved = _batch_norm_without_statistics(x, weight, bias, True, momentum, eps)
        running = (weight.new_empty(0), weight.new_empty(0))
    else:
        normed = _batch_norm_with_statistics(x, weight, bias, mean, var, True, momentum, eps)
        saved, running = normed[:3], normed[3:]
    return *saved, x.new_empty(0, dtype=torch.uint8), *running


@form(aten.native_batch_norm_backward.default, takes=first(FLOATING))
def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    mean: Tensor,
    scale: Tensor,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> Any:
    if not train:
        return NotImplemented
    dims = tuple(d for d in range(x.ndim) if d != 1)
    grad, scale = wide(grad), _by_channel(scale, x.ndim)
    normal = (wide(x) - _by_channel(mean, x.ndim)) * scale
    inner = _scaled(grad, _by_channel(weight, x.ndim), None)
    grads = (
        lambda: _through_normalization(inner, normal, scale, dims).to(x.dtype),
        lambda: (grad * normal).sum(dims),
        lambda: grad.sum(dims),
    )
    return tuple(make() if wanted else None for make, wanted in zip(grads, mask, strict=True))


@form(aten.cudnn_batch_norm_backward.default, takes=first(FLOATING))
def _cudnn_batch_norm_backward(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    running_mean: Any,
    running_var: Any,
    mean: Tensor,
    scale: Tensor,
    eps: float,
    reserve: Tensor,
) -> Any:
    operands = grad, x, weight, running_mean, running_var, mean, scale
    return _batch_norm_backward(*operands, True, eps, (True, True, True))


@form(aten.native_group_norm.default, takes=with_parameters)
def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = wide(x).unflatten(1, (group, -1))
    result, mean, scale = _normalized(groups, tuple(range(2, groups.ndim)), eps)
    result = result.flatten(1, 2)
    result = _scaled(result, _by_channel(weight, x.ndim), _by_channel(bias, x.ndim))
    dtype = _statistics_dtype(x, weight, bias)
    return result.to(x.dtype), mean.flatten(1).to(dtype), scale.flatten(1).to(dtype)
