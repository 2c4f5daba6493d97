"""Reductions: sums of what each device reduces, and the first place of an extreme value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..placement import Replicate
from .registry import (
    FLOATING,
    INEXACT,
    alike,
    count_of,
    dims_of,
    first,
    form,
    places_along,
    squeezed,
    wide,
)

aten = torch.ops.aten
_REAL = FLOATING | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


@form(aten.sum.dim_IntList)
def _sum(x: Any, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Of what float16 cannot hold, float32 partial sums, which are rounded once."""
    dtype = x.dtype if dtype is None else dtype
    if dtype != torch.float16:
        return NotImplemented
    total: Any = x.to(dtype).sum(dims_of(x, dim), keepdim=keepdim, dtype=torch.float32)
    reduced = [Replicate() if p.is_partial() else p for p in total.placements]
    return total.redistribute(placements=reduced).to(dtype)


@form(aten.sum.default)
def _sum_of_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _sum(x, None, dtype=dtype)


@form(aten.mean.dim)
def _mean(
    x: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    if x.dtype not in INEXACT:
        return NotImplemented
    dims = dims_of(x, dim)
    return (wide(x).sum(dims, keepdim=keepdim) / count_of(x, dims)).to(x.dtype)


@form(aten.mean.default)
def mean_of_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the mean of all elements, whatever the sizes of the pieces."""
    return _mean(x, None, dtype=dtype)


def variance_and_mean(x: Tensor, dims: tuple[int, ...], correction: float) -> tuple[Tensor, Tensor]:
    """Returns variance and mean of what is not half precision, with the reduced dims kept."""
    count = count_of(x, dims)
    mean = x.sum(dims, keepdim=True) / count
    difference = x - mean
    squares = (difference * difference.conj()).real if x.is_complex() else difference * difference
    total = squares.sum(dims, keepdim=True)
    return total / max(count - correction, 0), mean


@form(aten.var_mean.correction, takes=first(INEXACT))
def _var_mean_of(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = dims_of(x, dim)
    variance, mean = variance_and_mean(wide(x), dims, 1 if correction is None else correction)
    real = x.real.dtype if x.is_complex() else x.dtype
    return squeezed(variance.to(real), dims, keepdim), squeezed(mean.to(x.dtype), dims, keepdim)


@form(aten.var.correction, takes=first(INEXACT))
def _var(x: Tensor, dim: Any = None, **options: Any) -> Tensor:
    return _var_mean_of(x, dim, **options)[0]


@form(aten.std_mean.correction, takes=first(INEXACT))
def _std_mean(x: Tensor, dim: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    variance, mean = _var_mean_of(wide(x), dim, **options)
    real = x.real.dtype if x.is_complex() else x.dtype
    return variance.sqrt().to(real), mean.to(x.dtype)


@form(aten.std.correction, takes=first(INEXACT))
def _std(x: Tensor, dim: Any = None, **options: Any) -> Tensor:
    return _std_mean(x, dim, **options)[0]


@form(aten.linalg_vector_norm.default)
def _vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    if x.dtype not in INEXACT:
        return NotImplemented
    dims = dims_of(x, dim)
    magnitude = wide(x).abs()
    if ord == math.inf:
        result = magnitude.amax(dims, keepdim=keepdim)
    elif ord == -math.inf:
        result = magnitude.amin(dims, keepdim=keepdim)
    elif ord == 0:
        result = (magnitude != 0).sum(dims, keepdim=keepdim).to(magnitude.dtype)
    elif ord == 1:
        result = magnitude.sum(dims, keepdim=keepdim)
    elif ord == 2:
        result = (magnitude * magnitude).sum(dims, keepdim=keepdim).sqrt()
    else:
        result = magnitude.pow(ord).sum(dims, keepdim=keepdim).pow(1 / ord)
    return result.to(x.real.dtype if x.is_complex() else x.dtype)


@form(aten.dist.default, takes=alike(INEXACT))
def _dist(x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(x - other, p)


@form(aten.nansum.default, takes=first(_REAL | {torch.bool}))
def _nansum(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    return torch.where(x.isnan(), 0, x).sum(dims_of(x, dim), keepdim=keepdim, dtype=dtype)


@form(aten.count_nonzero.dim_IntList)
def _count_nonzero(x: Tensor, dim: Sequence[int]) -> Tensor:
    return (x != 0).sum(dims_of(x, dim))


@form(aten.count_nonzero.default)
def _count_nonzero_along(x: Tensor, dim: int | None = None) -> Tensor:
    return (x != 0).sum(dims_of(x, dim))


@form(aten.trace.default, takes=first(_REAL | INEXACT))
def _trace(x: Tensor) -> Tensor:
    return torch.where(places_along(x, 0) == places_along(x, 1), x, 0).sum()


# -- the largest and the smallest -----------------------------------------------------------


def _extreme(x: Tensor, dims: tuple[int, ...], largest: bool) -> tuple[Tensor, Tensor]:
    """The largest or smallest value over dims, which are kept, and the first place of it."""
    value = x.amax(dims, keepdim=True) if largest else x.amin(dims, keepdim=True)
    found = (x == value) | x.isnan()
    place: Any = 0
    for d in dims:
        place = place * x.shape[d] + places_along(x, d)
    return value, torch.where(found, place, count_of(x, dims)).amin(dims, keepdim=True)


def _extreme_along(x: Tensor, dim: int, keepdim: bool, largest: bool) -> tuple[Tensor, Tensor]:
    dims = dims_of(x, dim)
    value, place = _extreme(x, dims, largest)
    return squeezed(value, dims, keepdim), squeezed(place, dims, keepdim)


@form(aten.max.dim, takes=first(_REAL | {torch.bool}))
def _max(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _extreme_along(x, dim, keepdim, True)


@form(aten.min.dim, takes=first(_REAL | {torch.bool}))
def _min(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _extreme_along(x, dim, keepdim, False)


@form(aten.max.default, takes=first(_REAL | {torch.bool}))
def _max_of_all(x: Tensor) -> Tensor:
    return x.amax()


@form(aten.min.default, takes=first(_REAL | {torch.bool}))
def _min_of_all(x: Tensor) -> Tensor:
    return x.amin()


@form(aten.aminmax.default, takes=first(_REAL | {torch.bool}))
def _aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = dims_of(x, dim)
    return x.amin(dims, keepdim=keepdim), x.amax(dims, keepdim=keepdim)


@form(aten.argmax.default, takes=first(_REAL))
def _argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    dims = dims_of(x, dim)
    return squeezed(_extreme(x, dims, True)[1], dims, keepdim)


@form(aten.argmin.default, takes=first(_REAL))
def _argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    dims = dims_of(x, dim)
    return squeezed(_extreme(x, dims, False)[1], dims, keepdim)
