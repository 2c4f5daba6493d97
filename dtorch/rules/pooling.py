"""Pooling, resampling, padding and rolling: the kernels need the trailing spatial dims whole.

Where they are split, `sharded_forms.windows` pools and resamples with an exchange of halos. One
dim that is padded or rolled moves as ranges.

Batch and channel dims pass. PyTorch's kernels refuse a tensor without channels, so no piece may
be empty.
"""

from __future__ import annotations

from typing import Any

import torch

from ..redistribution import Movement, Segment
from .sharding import OpCall, Sharding, assign, dim_names, moved, outer, rule

aten = torch.ops.aten

_NUM_SPATIAL = {
    1: (
        aten.upsample_nearest1d,
        aten._upsample_nearest_exact1d,
        aten.upsample_linear1d,
        aten.reflection_pad1d,
        aten.replication_pad1d,
        aten.reflection_pad1d_backward,
        aten.replication_pad1d_backward,
    ),
    2: (
        aten.avg_pool2d,
        aten.avg_pool2d_backward,
        aten.max_pool2d_with_indices,
        aten.max_pool2d_with_indices_backward,
        aten._adaptive_avg_pool2d,
        aten._adaptive_avg_pool2d_backward,
        aten.adaptive_max_pool2d,
        aten.adaptive_max_pool2d_backward,
        aten.max_unpool2d,
        aten.upsample_nearest2d,
        aten._upsample_nearest_exact2d,
        aten.upsample_bilinear2d,
        aten._upsample_bilinear2d_aa,
        aten.upsample_bicubic2d,
        aten._upsample_bicubic2d_aa,
        aten.reflection_pad2d,
        aten.replication_pad2d,
        aten.reflection_pad2d_backward,
        aten.replication_pad2d_backward,
    ),
    3: (
        aten.avg_pool3d,
        aten.avg_pool3d_backward,
        aten.max_pool3d_with_indices,
        aten.max_pool3d_with_indices_backward,
        aten._adaptive_avg_pool3d,
        aten._adaptive_avg_pool3d_backward,
        aten.adaptive_max_pool3d,
        aten.adaptive_max_pool3d_backward,
        aten.max_unpool3d,
        aten.upsample_nearest3d,
        aten._upsample_nearest_exact3d,
        aten.upsample_trilinear3d,
        aten.reflection_pad3d,
        aten.replication_pad3d,
        aten.reflection_pad3d_backward,
        aten.replication_pad3d_backward,
    ),
}
_RESAMPLING = {
    1: (
        aten.upsample_nearest1d_backward,
        aten._upsample_nearest_exact1d_backward,
        aten.upsample_linear1d_backward,
    ),
    2: (
        aten.upsample_nearest2d_backward,
        aten._upsample_nearest_exact2d_backward,
        aten.upsample_bilinear2d_backward,
        aten._upsample_bilinear2d_aa_backward,
        aten.upsample_bicubic2d_backward,
        aten._upsample_bicubic2d_aa_backward,
    ),
    3: (
        aten.upsample_nearest3d_backward,
        aten._upsample_nearest_exact3d_backward,
        aten.upsample_trilinear3d_backward,
    ),
}


def _spatial(num_dims: int, ops: tuple[Any, ...], **options: Any) -> None:
    @rule(*ops)
    def spatial(call: OpCall) -> Sharding:
        """All but the last `num_dims` dims pass."""
        return outer(call, num_dims, filled=_outer_names(call, num_dims), **options)


def _outer_names(call: OpCall, num_dims: int) -> frozenset[str]:
    return frozenset(n for n in dim_names(call.tensors[0].shape)[:-num_dims] if n)


for _num_dims in (1, 2, 3):
    _spatial(_num_dims, _NUM_SPATIAL[_num_dims])
    _spatial(_num_dims, _RESAMPLING[_num_dims], sizes=(("input_size", 0),))


@rule(aten.fractional_max_pool2d, aten.fractional_max_pool3d)
def fractional_max_pool(call: OpCall) -> Sharding:
    """Batch and channels pass; each has random samples of its own."""
    spatial = len(call["kernel_size"])
    names = (*dim_names(call["self"].shape[:-spatial]), *(None,) * spatial)
    batch = ("d0", "d1") if call["self"].ndim == spatial + 2 else (None, "d0")
    inputs = {"self": names, "random_samples": (*batch, None)}
    return assign(call, inputs, (names, names), filled=frozenset(n for n in names if n))


@rule(aten.fractional_max_pool2d_backward, aten.fractional_max_pool3d_backward)
def fractional_max_pool_backward(call: OpCall) -> Sharding:
    """Batch and channels pass."""
    num_dims = len(call["kernel_size"])
    return outer(call, num_dims, filled=_outer_names(call, num_dims))


@rule(aten.im2col)
def im2col(call: OpCall) -> Sharding:
    """``n 1 1 1 -> n 1 1``: the batch passes, channels are mixed with the places in a window."""
    batch = ("n",) * (call.tensors[0].ndim - 3)
    dims = (*batch, None, None, None), (*batch, None, None)
    return Sharding(dims[:1], dims[1:], filled=frozenset(batch))


@rule(aten.col2im)
def col2im(call: OpCall) -> Sharding:
    """``n 1 1 -> n 1 1 1``: as `im2col`."""
    batch = ("n",) * (call.tensors[0].ndim - 2)
    dims = (*batch, None, None), (*batch, None, None, None)
    return Sharding(dims[:1], dims[1:], filled=frozenset(batch))


@rule(aten.constant_pad_nd)
def constant_pad(call: OpCall) -> Sharding:
    """One dim padded with a real number moves where it is split; otherwise it must be whole."""
    (source,), (result,) = call.tensors, call.results
    names, pad = dim_names(source.shape), call["pad"]
    padded = sorted({len(names) - 1 - i // 2 for i, width in enumerate(pad) if width})
    if len(padded) > 1 or isinstance(call["value"], complex):
        kept = tuple(None if d in padded else n for d, n in enumerate(names))
        return Sharding((kept,), (kept,))
    if not padded:
        return Sharding((names,), (names,))
    (dim,) = padded
    before = pad[2 * (len(names) - 1 - dim)]
    first, size = max(before, 0), source.shape[dim] + min(before, 0)
    length = max(min(size, result.shape[dim] - first), 0)
    segments = (Segment(first, max(-before, 0), length),)
    return moved(call, names, Movement(dim, segments, float(call["value"])))


@rule(aten.roll)
def roll(call: OpCall) -> Sharding:
    """One rolled dim moves where it is split; of several each must be whole."""
    shape = call.tensors[0].shape
    names = dim_names(shape)
    if len(call["dims"]) != 1 or 0 in shape:
        rolled = {d % len(shape) for d in call["dims"]} if call["dims"] else range(len(shape))
        kept = tuple(None if d in rolled else n for d, n in enumerate(names))
        return Sharding((kept,), (kept,), linear=(frozenset({0}),))
    (dim,), (shift,) = call["dims"], call["shifts"]
    dim = dim % len(shape)
    size, shift = shape[dim], shift % shape[dim]
    segments = (Segment(0, size - shift, shift), Segment(shift, 0, size - shift))
    return moved(call, names, Movement(dim, segments), linear=(frozenset({0}),))


@rule(aten.grid_sampler_2d, aten.grid_sampler_3d)
def grid_sampler(call: OpCall) -> Sharding:
    """``n c s, n s' 1 -> n c s'``: the points of the grid pass, the sampled dims do not."""
    points = tuple(f"p{i}" for i in range(call["grid"].ndim - 2))
    source = ("n", "c", *(None,) * len(points))
    inputs = {"input": source, "grid": ("n", *points, None)}
    filled = frozenset({"n", "c", *points})
    return assign(call, inputs, (("n", "c", *points),), filled=filled)


@rule(aten.grid_sampler_2d_backward, aten.grid_sampler_3d_backward)
def grid_sampler_backward(call: OpCall) -> Sharding:
    """``n c s', n c s, n s' 1 -> n c s, n s' 1``: over c and s' partial sums."""
    points = tuple(f"p{i}" for i in range(call["grid"].ndim - 2))
    source, grid = ("n", "c", *(None,) * len(points)), ("n", *points, None)
    inputs = {"grad_output": ("n", "c", *points), "input": source, "grid": grid}
    kept = [d for d, wanted in zip((source, grid), call["output_mask"], strict=True) if wanted]
    filled = frozenset({"n", "c", *points})
    reduce = dict.fromkeys(("c", *points), "sum")
    return assign(call, inputs, kept, reduce=reduce, filled=filled)


@rule(aten.pixel_shuffle, aten.pixel_unshuffle)
def pixel_shuffle(call: OpCall) -> Sharding:
    """Places move between channels and neighbours: a split goes by whole groups of them."""
    names = dim_names(call.tensors[0].shape)
    split = frozenset(n for n in names if n)
    return Sharding((names,), (names,), even=split & {*names[-3:]}, filled=split)


@rule(aten.channel_shuffle)
def channel_shuffle(call: OpCall) -> Sharding:
    """Everything but the channels passes."""
    first, _, *rest = dim_names(call.tensors[0].shape)
    return Sharding(((first, None, *rest),), ((first, None, *rest),))
