"""Convolution, pooling and resampling over a split spatial dim, with an exchange of halos.

A device computes its own piece of the result. For that it needs a window of the input: its own
piece and, where the kernel reaches over the border, the neighbours' rows there. The windows of all
devices, one after another, are a movement of the input, in which neighbouring windows overlap.
They then stand beside the channels, as groups of a grouped operation, so that each device runs the
kernel on its own window and the batch keeps its layout. The gradient of the windows is their sum
where they overlap.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..placement import Replicate, Shard
from ..redistribution import Movement, Segment
from .movement import num_pieces, permuted
from .registry import form, places_along

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class _Windows:
    """The windows of a dim, one a device.

    Attributes:
        dim: The dim.
        size: Its size.
        count: The number of windows.
        start: Where the first one begins; the dim begins at 0.
        step: From one window to the next.
        length: The length of a window.
        out: The size of the result's dim.
        piece: The length of a piece of the result.
    """

    dim: int
    size: int
    count: int
    start: int
    step: int
    length: int
    out: int
    piece: int

    def of(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Returns the windows in place of the dim, [count, length]; outside it is `fill`."""
        segments = tuple(
            Segment(i * self.length + begin - at, begin, end - begin)
            for i, at, begin, end in self._ranges()
        )
        moved = permuted(x, Movement(self.dim, segments, fill), self.count * self.length)
        return moved.unflatten(self.dim, (self.count, self.length))

    def added_up(self, windows: Tensor) -> Tensor:
        """Returns the dim again, from windows that are added where they overlap."""
        flat = _merged(windows, self.dim)
        ranges = list(self._ranges())
        apart = max(-(-self.length // self.step), 1)  # windows that far apart do not overlap
        total: Any = None
        for first in range(min(apart, self.count)):
            segments = tuple(
                Segment(begin, i * self.length + begin - at, end - begin)
                for i, at, begin, end in ranges
                if i % apart == first
            )
            part = permuted(flat, Movement(self.dim, segments, 0.0), self.size)
            total = part if total is None else total + part
        return total

    def result(self, pieces: Tensor) -> Tensor:
        """Returns the result's dim from its pieces [count, piece], the last ones cut."""
        return _merged(pieces, self.dim).narrow(self.dim, 0, self.out)

    def pieces(self, result: Tensor) -> Tensor:
        """Returns the pieces of a tensor like the result, filled up with zeros."""
        movement = Movement(self.dim, (Segment(0, 0, self.out),), 0.0)
        flat = permuted(result, movement, self.count * self.piece)
        return flat.unflatten(self.dim, (self.count, self.piece))

    def _ranges(self) -> Any:
        """Each window with where it begins, and the range of the dim that is in it."""
        for i in range(self.count):
            at = self.start + i * self.step
            begin, end = max(at, 0), min(at + self.length, self.size)
            if begin < end:
                yield i, at, begin, end


def _windows(
    x: Any, first: int, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> _Windows | None:
    """The windows of the first split dim from `first` on, or None where none is split."""
    dim = _split_dim(x, first)
    if dim is None or not x.numel():
        return None
    i, size, count = dim - first, x.shape[dim], num_pieces(x, dim)
    reach = _at(dilation, i) * (kernel[i] - 1) + 1
    step, pad = _at(stride, i), _at(padding, i)
    out = (size + 2 * pad - reach) // step + 1
    piece = -(-out // count)
    return _Windows(dim, size, count, -pad, piece * step, (piece - 1) * step + reach, out, piece)


def _split_dim(x: Any, first: int) -> int | None:
    return next((d for d in range(first, x.ndim) if num_pieces(x, d) > 1), None)


def _at(values: Any, i: int) -> int:
    values = [values] if isinstance(values, int) else values
    return values[i] if len(values) > 1 else values[0]


def _without(values: Any, i: int, count: int) -> list[int]:
    """The values of `count` dims, with 0 for one of them."""
    return [0 if j == i else _at(values, j) for j in range(count)]


def _with_whole(x: Any, channel: int) -> Any:
    """Reduces what is partial and gathers the channels, beside which the windows are to stand."""
    kept = [p if p.is_shard() and not p.is_shard(channel) else Replicate() for p in x.placements]
    return x.redistribute(x.device_mesh, kept)


def _merged(x: Tensor, dim: int) -> Tensor:
    """Two dims as one; on the devices, where the first has one index, that copies nothing."""
    merged = x.shape[dim] * x.shape[dim + 1]
    return aten._reshape_copy.default(x, [*x.shape[:dim], merged, *x.shape[dim + 2 :]])


def _to_channels(x: Tensor, dim: int, channel: int) -> Tensor:
    """Puts the dim of windows in front of the channels, as one dim with them."""
    return _merged(x.movedim(dim, channel), channel)


def _from_channels(x: Tensor, dim: int, channel: int, count: int) -> Tensor:
    return x.unflatten(channel, (count, x.shape[channel] // count)).movedim(channel, dim)


# -- convolution -----------------------------------------------------------------------------


@form(aten.convolution.default)
def _convolution(
    x: Any,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    cut = None if transposed else _windows(x, 2, weight.shape[2:], stride, padding, dilation)
    if cut is None:
        return NotImplemented
    x = _with_whole(x, 1)
    padding = _without(padding, cut.dim - 2, x.ndim - 2)
    out = aten.convolution.default(
        _to_channels(cut.of(x), cut.dim, 1),
        _for_each(weight, x, cut),
        None if bias is None else _for_each(bias, x, cut),
        stride,
        padding,
        dilation,
        False,
        output_padding,
        groups * cut.count,
    )
    return cut.result(_from_channels(out, cut.dim, 1, cut.count))


@form(aten.convolution_backward.default)
def _convolution_backward(
    grad: Any,
    x: Any,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    if _split_dim(x, 2) is None:
        x = x.redistribute(grad.device_mesh, grad.placements)
    cut = None if transposed else _windows(x, 2, weight.shape[2:], stride, padding, dilation)
    if cut is None:
        return NotImplemented
    x = _with_whole(x, 1)
    grad = grad.redistribute(x.device_mesh, x.placements)
    padding = _without(padding, cut.dim - 2, x.ndim - 2)
    to_x, to_weight, to_bias = aten.convolution_backward.default(
        _to_channels(cut.pieces(grad), cut.dim, 1),
        _to_channels(cut.of(x), cut.dim, 1),
        _for_each(weight, x, cut),
        None if bias_sizes is None else [weight.shape[0] * cut.count],
        stride,
        padding,
        dilation,
        False,
        output_padding,
        groups * cut.count,
        output_mask,
    )
    if output_mask[0]:
        to_x = cut.added_up(_from_channels(to_x, cut.dim, 1, cut.count))
    if output_mask[1]:
        to_weight = to_weight.unflatten(0, (cut.count, weight.shape[0])).sum(0)
    if output_mask[2]:
        to_bias = to_bias.unflatten(0, (cut.count, weight.shape[0])).sum(0)
    return to_x, to_weight, to_bias


def _for_each(weight: Any, x: Any, cut: _Windows) -> Tensor:
    """A parameter once for each window, where the window is."""
    repeated: Any = weight.unsqueeze(0).expand(cut.count, *weight.shape)
    split = [
        Shard(0) if p.is_shard(cut.dim) else q
        for p, q in zip(x.placements, repeated.placements, strict=True)
    ]
    return _merged(repeated.redistribute(x.device_mesh, split), 0)


# -- pooling and resampling --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Pool:
    """A pooling over the windows of one dim, whose channels stand at `channel`."""

    cut: _Windows
    channel: int

    @staticmethod
    def of(x: Any, spatial: int, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Any:
        """Returns the pooling over the first split dim, or None where none is split."""
        first = x.ndim - spatial
        sizes = [_at(kernel, i) for i in range(spatial)]
        cut = _windows(x, first, sizes, stride or kernel, padding, dilation)
        return None if cut is None else _Pool(cut, first - 1)

    @property
    def index(self) -> int:
        """Which of the spatial dims it is."""
        return self.cut.dim - self.channel - 1

    def of_windows(self, x: Tensor, fill: float = 0.0) -> Tensor:
        return _to_channels(self.cut.of(x, fill), self.cut.dim, self.channel)

    def of_pieces(self, result: Tensor) -> Tensor:
        return _to_channels(self.cut.pieces(result), self.cut.dim, self.channel)

    def result(self, pieces: Tensor) -> Tensor:
        return self.cut.result(_from_channels(pieces, self.cut.dim, self.channel, self.cut.count))

    def added_up(self, windows: Tensor) -> Tensor:
        return self.cut.added_up(
            _from_channels(windows, self.cut.dim, self.channel, self.cut.count)
        )

    def moved(self, places: Tensor, x: Tensor, to_windows: bool) -> Tensor:
        """Returns numbers of elements of the whole plane as those of the windows, or back."""
        cut, inner = self.cut, math.prod(x.shape[self.cut.dim + 1 :])
        before, after = (cut.size, cut.length) if to_windows else (cut.length, cut.size)
        places = places.unflatten(
            self.channel, (cut.count, places.shape[self.channel] // cut.count)
        )
        start = cut.start + places_along(places, self.channel) * cut.step
        along = places // inner % before + (-start if to_windows else start)
        along = along.clamp(0, max(after - 1, 0))  # what fills up the last pieces is anywhere
        outer = places // (before * inner)
        return _merged((outer * after + along) * inner + places % inner, self.channel)


def _lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else float(torch.iinfo(dtype).min)


_MAX_POOLS = {
    aten.max_pool2d_with_indices.default: aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices.default: aten.max_pool3d_with_indices_backward.default,
}
_AVG_POOLS = {
    aten.avg_pool2d.default: aten.avg_pool2d_backward.default,
    aten.avg_pool3d.default: aten.avg_pool3d_backward.default,
}


def _max_pool(op: Any, spatial: int) -> None:
    @form(op)
    def forward(
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        pool = None if ceil_mode else _Pool.of(x, spatial, kernel, stride, padding, dilation)
        if pool is None:
            return NotImplemented
        x, padding = _with_whole(x, pool.channel), _without(padding, pool.index, spatial)
        windows = pool.of_windows(x, _lowest(x.dtype))
        values, places = op(windows, kernel, stride, padding, dilation)
        return pool.result(values), pool.result(pool.moved(places, x, to_windows=False))

    @form(_MAX_POOLS[op])
    def backward(
        grad: Any,
        x: Any,
        kernel: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
        places: Any,
    ) -> Any:
        pool = None if ceil_mode else _Pool.of(x, spatial, kernel, stride, padding, dilation)
        if pool is None:
            return NotImplemented
        x, padding = _with_whole(x, pool.channel), _without(padding, pool.index, spatial)
        grad, places = (t.redistribute(x.device_mesh, x.placements) for t in (grad, places))
        places = pool.moved(pool.of_pieces(places), x, to_windows=True)
        windows = pool.of_windows(x)
        result = _MAX_POOLS[op](
            pool.of_pieces(grad), windows, kernel, stride, padding, dilation, False, places
        )
        return pool.added_up(result)


def _avg_pool(op: Any, spatial: int) -> None:
    def pool_of(x: Any, kernel: Any, stride: Any, padding: Any, options: Any) -> Any:
        ceil_mode, counts_padding, divisor = options
        pool = None if ceil_mode else _Pool.of(x, spatial, kernel, stride, padding, 1)
        if pool is None or not (counts_padding or divisor or not _at(padding, pool.index)):
            return None  # at a border the divisor is another one
        return pool

    @form(op)
    def forward(
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        options = ceil_mode, count_include_pad, divisor_override
        pool = pool_of(x, kernel, stride, padding, options)
        if pool is None:
            return NotImplemented
        x, padding = _with_whole(x, pool.channel), _without(padding, pool.index, spatial)
        return pool.result(op(pool.of_windows(x), kernel, stride, padding, *options))

    @form(_AVG_POOLS[op])
    def backward(grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, *options: Any) -> Any:
        pool = pool_of(x, kernel, stride, padding, options)
        if pool is None:
            return NotImplemented
        x, padding = _with_whole(x, pool.channel), _without(padding, pool.index, spatial)
        grad = pool.of_pieces(grad.redistribute(x.device_mesh, x.placements))
        result = _AVG_POOLS[op](grad, pool.of_windows(x), kernel, stride, padding, *options)
        return pool.added_up(result)


for _op in _MAX_POOLS:
    _max_pool(_op, 3 if "3d" in str(_op) else 2)
for _op in _AVG_POOLS:
    _avg_pool(_op, 3 if "3d" in str(_op) else 2)


_NEAREST = {
    aten.upsample_nearest1d.default: aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d.default: aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d.default: aten.upsample_nearest3d_backward.default,
}


def _nearest(op: Any) -> None:
    """A whole number of copies of each element: a piece gives a piece."""

    def pool_of(x: Any, size: Sequence[int], scales: Sequence[float | None]) -> Any:
        dim = _split_dim(x, 2)
        if dim is None:
            return None
        out, times = size[dim - 2], size[dim - 2] // x.shape[dim]
        if out != times * x.shape[dim] or scales[dim - 2] not in (None, times):
            return None
        count = num_pieces(x, dim)
        length = -(-x.shape[dim] // count)
        cut = _Windows(dim, x.shape[dim], count, 0, length, length, out, length * times)
        return _Pool(cut, 1)

    def local(sizes: Sequence[int], pool: _Pool, length: int) -> list[int]:
        return [length if i == pool.index else n for i, n in enumerate(sizes)]

    @form(op)
    def forward(x: Any, size: Sequence[int], *scales: float | None) -> Any:
        pool = pool_of(x, size, scales or (None,) * len(size))
        if pool is None:
            return NotImplemented
        x = _with_whole(x, 1)
        return pool.result(op(pool.of_windows(x), local(size, pool, pool.cut.piece), *scales))

    @form(_NEAREST[op])
    def backward(
        grad: Any, size: Sequence[int], input_size: Sequence[int], *scales: float | None
    ) -> Any:
        x: Any = torch.empty(input_size, dtype=grad.dtype, device=grad.device)
        x = x.redistribute(grad.device_mesh, grad.placements)
        pool = pool_of(x, size, scales or (None,) * len(size))
        if pool is None:
            return NotImplemented
        grad = pool.of_pieces(_with_whole(grad, 1))
        n, c, *sizes = input_size
        sizes = [n, c * pool.cut.count, *local(sizes, pool, pool.cut.length)]
        result = _NEAREST[op](grad, local(size, pool, pool.cut.piece), sizes, *scales)
        return pool.added_up(result)


def _nearest_by_scale(packet: Any) -> None:
    @form(packet.vec)
    def forward(x: Any, size: Sequence[int] | None, scales: Sequence[float] | None) -> Any:
        if size is None:
            assert scales is not None
            size = [int(n * scale) for n, scale in zip(x.shape[2:], scales, strict=True)]
        return packet.default(x, size, *(scales or ()))


for _op in _NEAREST:
    _nearest(_op)
    _nearest_by_scale(_op.overloadpacket)
