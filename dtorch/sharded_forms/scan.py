"""Along a dim in pieces of equal size: cumulative sums and products, products, topk."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .registry import FLOATING, first, form, places_along, replicated

aten = torch.ops.aten


def _in_pieces(x: Any, dim: int) -> Any:
    """A split dim as two, the pieces and what each holds; None where they are not alike."""
    placed = zip(x.device_mesh.shape, x.placements, strict=True)
    count = math.prod(n for n, p in placed if p.is_shard(dim))
    if count < 2 or x.shape[dim] % count or x.shape[dim] == count:
        return None
    return x.unflatten(dim, (count, -1))


def _scan(
    x: Tensor,
    dim: int,
    along: Callable[[Tensor, int], Tensor],
    both: Callable[..., Tensor],
    start: Any,
) -> Any:
    """Each piece by itself, combined with what the pieces before it come to."""
    dim = dim % max(x.ndim, 1)
    pieces = _in_pieces(x, dim)
    if pieces is None:
        return NotImplemented
    each = along(pieces, dim + 1)
    totals = replicated(each.narrow(dim + 1, each.shape[dim + 1] - 1, 1))
    first = torch.full_like(totals.narrow(dim, 0, 1), start)
    earlier = torch.cat([first, totals.narrow(dim, 0, totals.shape[dim] - 1)], dim)
    return both(each, along(earlier, dim)).flatten(dim, dim + 1)


@form(aten.cumsum.default)
def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    along = functools.partial(torch.cumsum, dtype=dtype)
    return _scan(x, dim, along, torch.add, 0)


@form(aten.cumprod.default)
def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    along = functools.partial(torch.cumprod, dtype=dtype)
    return _scan(x, dim, along, torch.mul, 1)


@form(aten.logcumsumexp.default, takes=first(FLOATING))
def _logcumsumexp(x: Tensor, dim: int) -> Any:
    return _scan(x, dim, torch.logcumsumexp, torch.logaddexp, -math.inf)


@form(aten.prod.dim_int)
def _prod(x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    pieces = _in_pieces(x, dim % max(x.ndim, 1))
    if pieces is None:
        return NotImplemented
    dim = dim % x.ndim
    each = pieces.prod(dim + 1, dtype=dtype)
    return replicated(each).prod(dim, keepdim=keepdim, dtype=dtype)


@form(aten.prod.default)
def _prod_of_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    for _ in range(x.ndim):
        x = x.prod(0, dtype=dtype)
    return x


@form(aten.topk.default)
def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The best of each piece, and the best of those.

    Which of equal values is found may be another one than on one device, so it is left to the
    kernel where equal values are to be expected.
    """
    dim = dim % max(x.ndim, 1)
    pieces = _in_pieces(x, dim) if x.dtype in (torch.float32, torch.float64) else None
    if pieces is None or k > pieces.shape[dim + 1]:
        return NotImplemented
    values, places = pieces.topk(k, dim + 1, largest, sorted)
    start = places_along(pieces, dim) * pieces.shape[dim + 1]
    candidates = replicated(values).flatten(dim, dim + 1)
    values, chosen = candidates.topk(k, dim, largest, sorted)
    return values, replicated(places + start).flatten(dim, dim + 1).gather(dim, chosen)
