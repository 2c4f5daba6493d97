"""The registry of the forms, and what several of them are made of.

A form computes with what PyTorch promotes and converts, where the kernel that it stands for would
refuse a dtype. So each says which it takes, and with others the kernel is asked, which raises.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..placement import Replicate

_Form = Callable[..., Any]
_Takes = Callable[[Sequence[torch.dtype]], bool]
HALF = frozenset({torch.float16, torch.bfloat16})
FLOATING = HALF | {torch.float32, torch.float64}
INEXACT = FLOATING | {torch.complex64, torch.complex128}
_FORMS: dict[torch._ops.OpOverload, _Form] = {}
_ALWAYS: set[torch._ops.OpOverload] = set()
_ASKED: dict[torch._ops.OpOverload, Callable[..., bool]] = {}


def sharded_form(op: torch._ops.OpOverload) -> _Form | None:
    """Returns the form of an operation, or None where it has none."""
    return _FORMS.get(op)


def is_always_taken(op: torch._ops.OpOverload) -> bool:
    """Returns whether the form of an operation is taken even where no shard would have to move."""
    return op in _ALWAYS


def is_asked_for(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Returns whether the layouts of the arguments name what the form of an operation does."""
    return op in _ASKED and _ASKED[op](*args)


def form(
    *ops: torch._ops.OpOverload,
    takes: _Takes | None = None,
    always: bool = False,
    asked: Callable[..., bool] | None = None,
) -> Callable[[_Form], _Form]:
    """Registers a function as the form of operations.

    Args:
        ops: The operations.
        takes: Says of the dtypes of the tensors among the arguments, in their order, whether the
            kernels of the operations take them; None if they take all.
        always: Whether it is taken even where no shard of an argument would have to move.
        asked: Says of the positional arguments whether their layouts name what the form does, so
            that it is no implicit communication; None if none does.
    """

    def register(function: _Form) -> _Form:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            given = [a.dtype for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            return function(*args, **kwargs) if takes is None or takes(given) else NotImplemented

        for op in ops:
            _FORMS[op] = checked
            if asked is not None:
                _ASKED[op] = asked
        _ALWAYS.update(ops if always else ())
        return function

    return register


def alike(dtypes: frozenset[torch.dtype]) -> _Takes:
    """Tensors of one dtype, among these."""
    return lambda given: given[0] in dtypes and len(set(given)) == 1


def first(dtypes: frozenset[torch.dtype]) -> _Takes:
    """A first tensor of one of these dtypes, and any others."""
    return lambda given: given[0] in dtypes


def with_parameters(given: Sequence[torch.dtype]) -> bool:
    """Floating tensors of one dtype, or a first one of half precision with float32 ones."""
    rest = set(given[1:])
    mixed = given[0] in HALF and rest == {torch.float32}
    return given[0] in FLOATING and (rest <= {given[0]} or mixed)


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
