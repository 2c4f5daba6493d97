"""The registry of the forms, and what several of them are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..placement import Replicate

_Form = Callable[..., Any]
_FORMS: dict[torch._ops.OpOverload, _Form] = {}


def sharded_form(op: torch._ops.OpOverload) -> _Form | None:
    """Returns the form of an operation, or None where it has none."""
    return _FORMS.get(op)


def form(*ops: torch._ops.OpOverload) -> Callable[[_Form], _Form]:
    """Registers a function as the form of operations."""

    def register(function: _Form) -> _Form:
        for op in ops:
            _FORMS[op] = function
        return function

    return register


def wide(x: Tensor) -> Tensor:
    """Returns half precision as float32, anything else as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def squeezed(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Drops the reduced dims, unless they are to be kept."""
    return x if keepdim else x.squeeze(dims)


def dims_of(x: Tensor, dim: Any) -> tuple[int, ...]:
    """Returns the dims of a reduction, all of them where none is named."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return tuple(range(x.ndim))
    dims = dim if isinstance(dim, Sequence) else (dim,)
    return tuple(d % x.ndim for d in dims)


def count_of(x: Tensor, dims: tuple[int, ...]) -> int:
    """Returns how many elements are reduced to one."""
    return math.prod(x.shape[d] for d in dims)


def replicated(x: Any) -> Any:
    """Returns a tensor with all of it on every device."""
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def places_along(x: Any, dim: int) -> Any:
    """Returns the places along a dim, to be broadcast over `x`, split as the dim is."""
    shape = [-1 if d == dim else 1 for d in range(x.ndim)]
    places: Any = torch.arange(x.shape[dim], device=x.device).view(shape)
    return places.redistribute(
        x.device_mesh, [p if p.is_shard(dim) else Replicate() for p in x.placements]
    )
