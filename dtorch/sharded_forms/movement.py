"""What only moves: ranges of split dims, from the devices that hold them to those that want them.

A range of one dim is a movement by its rule (`rules.sharding.moved`); here is what takes several.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..placement import Replicate
from ..redistribution import Movement, Segment
from .registry import INEXACT, form

aten = torch.ops.aten


def permuted(x: Any, movement: Movement, size: int) -> Any:
    """Returns a tensor whose ranges of a split dim have moved.

    Args:
        x: A tensor whose dim is split.
        movement: What moves where.
        size: The size of the dim afterwards.
    """
    return x._tracer.permute(x, movement, size)


@form(aten.roll.default)
def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    if not dims:
        return x.flatten().roll(tuple(shifts), 0).view(x.shape)
    if len(dims) < 2:
        return NotImplemented
    for shift, dim in zip(shifts, dims, strict=True):
        x = x.roll(shift, dim)
    return x


@form(aten.constant_pad_nd.default)
def _pad(x: Tensor, pad: Sequence[int], value: Any = 0) -> Any:
    padded = [i for i in range(0, len(pad), 2) if pad[i] or pad[i + 1]]
    if len(padded) < 2:
        return NotImplemented
    for i in padded:
        x = aten.constant_pad_nd.default(x, [*(0,) * i, *pad[i : i + 2]], value)
    return x


@form(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.split_copy.Tensor,
    aten.split_with_sizes_copy.default,
)
def _split(x: Any, sizes: int | Sequence[int], dim: int = 0) -> Any:
    """The ranges one by one, each of which moves."""
    length = x.shape[dim]
    if dim % x.ndim not in _split_dims(x) or not length:
        return NotImplemented
    if isinstance(sizes, int):
        starts = range(0, length, sizes)
        sizes = [min(sizes, length - start) for start in starts]
    else:
        starts = itertools.accumulate(sizes[:-1], initial=0)
    return [x.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]


@form(aten.flip.default)
def _flip(x: Any, dims: Sequence[int]) -> Any:
    """Each device's part, reversed, where the part opposite to it was."""
    whole = [d for d in dims if d % x.ndim not in _split_dims(x)]
    for dim in dims:
        if dim not in whole:
            x = _flipped(x, dim % x.ndim)
    return x.flip(whole) if whole else x


def _flipped(x: Any, dim: int) -> Any:
    size, count = x.shape[dim], num_pieces(x, dim)
    length = -(-size // count)
    # The pieces, the last ones filled up to be as long as the others.
    x = permuted(x, Movement(dim, (Segment(0, 0, size),)), length * count)
    x = x.unflatten(dim, (count, length)).flip(dim + 1).flatten(dim, dim + 1)
    ends = (Segment(i * length, (count - 1 - i) * length, length) for i in range(count))
    # What was filled up is now in front.
    gap = length * count - size
    moved = [Segment(max(t - gap, 0), s + max(gap - t, 0), n - max(gap - t, 0)) for t, s, n in ends]
    return permuted(x, Movement(dim, tuple(s for s in moved if s.length > 0)), size)


def _split_dims(x: Any) -> set[int]:
    placed = zip(x.device_mesh.shape, x.placements, strict=True)
    return {p.dim for n, p in placed if n > 1 and p.is_shard()}


def num_pieces(x: Any, dim: int) -> int:
    """Returns how many pieces a dim is split into."""
    placed = zip(x.device_mesh.shape, x.placements, strict=True)
    return functools.reduce(lambda a, b: a * b, (n for n, p in placed if p.is_shard(dim)), 1)


_ADDED = INEXACT | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
"""The dtypes that PyTorch adds."""


@form(aten.cat.default)
def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """The sum of the tensors, each moved to its place among what adds nothing."""
    tensors = [t for t in tensors if t.shape != (0,)] or tensors
    largest = max(tensors, key=lambda t: t.numel())
    dim = dim % max(largest.ndim, 1)
    if num_pieces(largest, dim) < 2 or not largest.numel():
        return NotImplemented
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    if dtype not in _ADDED:
        return NotImplemented
    kept = [Replicate() if p.is_partial() else p for p in largest.placements]
    size, start, parts = sum(t.shape[dim] for t in tensors), 0, []
    for t in tensors:
        t = t.redistribute(largest.device_mesh, kept).to(dtype)
        segment = Segment(start, 0, t.shape[dim])
        parts.append(permuted(t, Movement(dim, (segment,)), size))
        start += t.shape[dim]
    if dtype == torch.bool:
        return functools.reduce(torch.logical_or, parts)
    return functools.reduce(torch.add, parts)
