"""The strides of what an elementwise kernel returns, also those of dims of size one.

Those mean nothing to the elements, but code that asks a tensor for its memory format (group
normalisation among others) goes by them, and PyTorch's meta kernels give others than its kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .spec import contiguous_stride

aten = torch.ops.aten
# Tagged as pointwise, and made of other kernels, or of one with its operands in another order.
_OTHERS = {
    aten.clone,
    aten.conj_physical,
    aten.deg2rad,
    aten.hardtanh,
    aten.isfinite,
    aten.isinf,
    aten.ldexp,
    aten.masked_fill,
    aten.mvlgamma,
    aten.nan_to_num,
    aten.positive,
    aten.rad2deg,
    aten.relu6,
    aten.threshold_backward,
}
# Parameters whose number becomes a tensor; others are kept apart from the operands.
_OPERANDS = {"other", "n"}


def with_strides(op: torch._ops.OpOverload, arguments: Mapping[str, Any], result: Any) -> Any:
    """Returns the result of an elementwise operation with the strides that its kernel gives it.

    Args:
        op: The operation.
        arguments: Its arguments by name, meta tensors among them.
        result: What its meta kernel has returned.
    """
    if not isinstance(result, Tensor) or result.ndim < 2:
        return result
    if torch.Tag.pointwise not in op.tags or op.overloadpacket in _OTHERS:
        return result
    operands = [
        value if isinstance(value, Tensor) else torch.empty((), device="meta")
        for name, value in arguments.items()
        if isinstance(value, Tensor) or (value is not None and name in _operands(op))
    ]
    if any(t.is_conj() or t.is_neg() for t in operands):
        return result
    found = strides(operands)
    return result if found == result.stride() else result.new_empty_strided(result.shape, found)


@functools.cache
def _operands(op: torch._ops.OpOverload) -> frozenset[str]:
    return frozenset(
        a.name
        for a in op._schema.arguments
        if isinstance(a.type, torch.TensorType) or a.name in _OPERANDS
    )


def strides(operands: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the strides of the result of an elementwise kernel.

    Args:
        operands: Its operands, in their order; a number is a tensor without dims.

    Source: `at::TensorIteratorBase`, of which this follows `fast_set_up`, `reorder_dimensions` and
        `allocate_or_resize_outputs`.
    """
    shape = torch.broadcast_shapes(*(t.shape for t in operands))
    if all(t.shape == shape for t in operands):
        if all(t.is_contiguous() for t in operands):
            return contiguous_stride(shape)
        if len(shape) == 4 and all(
            t.is_contiguous(memory_format=torch.channels_last) for t in operands
        ):
            _, channels, height, width = shape
            return channels * height * width, 1, width * channels, channels
        first, *rest = (t.stride() for t in operands)
        is_dense = all(_is_dense(t) for t in operands)
        if is_dense and all(stride == first for stride in rest):
            return first
    order = _order(shape, [_broadcast(t, shape) for t in operands])
    if order == list(reversed(range(len(shape)))):
        return contiguous_stride(shape)
    found, size = [0] * len(shape), 1
    for dim in order:
        found[dim] = size
        size *= shape[dim]
    return tuple(found)


def _is_dense(tensor: Tensor) -> bool:
    return aten.is_non_overlapping_and_dense.default(tensor)


def _broadcast(tensor: Tensor, shape: Sequence[int]) -> list[int]:
    missing = len(shape) - tensor.ndim
    own = zip(tensor.shape, tensor.stride(), shape[missing:], strict=True)
    return [0] * missing + [0 if size == 1 != wide else stride for size, stride, wide in own]


def _order(shape: Sequence[int], operands: Sequence[Sequence[int]]) -> list[int]:
    """The dims from the one that moves fastest: sorted by insertion, since some are undecided."""
    order = list(reversed(range(len(shape))))
    for place in range(1, len(shape)):
        moved = place
        for other in reversed(range(place)):
            compared = _compared(order[other], order[moved], shape, operands)
            if compared > 0:
                order[other], order[moved] = order[moved], order[other]
                moved = other
            elif compared < 0:
                break
    return order


def _compared(a: int, b: int, shape: Sequence[int], operands: Sequence[Sequence[int]]) -> int:
    for stride in operands:
        if stride[a] == 0 or stride[b] == 0:
            continue
        if stride[a] != stride[b]:
            return 1 if stride[a] > stride[b] else -1
        if shape[a] > shape[b]:
            return 1
    return 0
