"""Functions of a storage in PyTorch's sense: what a view of it shows, and what a write makes of it.

Tensors that alias share a storage (`aliases`), which is known by its value. Each function here is
traced with that value as its argument, like any other.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from . import aliases
from .aliases import AliasGroup, Path
from .errors import MutationError
from .symbolic import SymbolicTensor
from .tensor import Tensor


class _Follow(NamedTuple):
    """From a storage to a view of it, as a function."""

    path: Path

    def __call__(self, storage: SymbolicTensor) -> SymbolicTensor:
        tracer = storage._tracer
        return tracer.wrap(tracer.follow(storage._storage, self.path))


class _PutBack(NamedTuple):
    """A storage with a new value in the place of a view, as a function."""

    path: Path

    def __call__(self, storage: SymbolicTensor, value: SymbolicTensor) -> SymbolicTensor:
        tracer = storage._tracer
        return tracer.wrap(tracer.put_back(storage._storage, self.path, tracer.read(value)))


# One object for each path: caches of calls know functions by identity.
follow, put_back = functools.lru_cache(4096)(_Follow), functools.lru_cache(4096)(_PutBack)


class _OnView(NamedTuple):
    """A function of the storage that a view is in, called on the view."""

    function: Any
    path: Path

    def __call__(self, storage: SymbolicTensor, *args: Any, **kwargs: Any) -> Any:
        return self.function(storage._tracer.view_along(storage, self.path), *args, **kwargs)


def in_its_storage(func: Any, leaves: list[Any]) -> tuple[Any, list[Any]]:
    """Returns a call that reads the storage of a view as one on the storage."""
    base = leaves[0] if leaves else None
    if func not in STORAGE_FUNCTIONS or not isinstance(base, Tensor) or base._aliases is None:
        return func, leaves
    with aliases.lock:
        return _in_its_storage(func, base, base._aliases, leaves[1:])


def _in_its_storage(
    func: Any, base: Tensor, group: AliasGroup, rest: list[Any]
) -> tuple[Any, list[Any]]:
    path = group.path_of(base)
    if group.whole is None or group.is_part:
        raise MutationError(
            f"as_strided of a view (shape {list(base.shape)}) reads the storage of its base, which "
            "is gone.\n  Fix: call it on the base, or clone() the view."
        )
    if not path:
        return func, [base, *rest]
    storage = Tensor._of(*group.whole)
    group.add(storage, ())
    return _OnView(func, path), [storage, *rest]


STORAGE_FUNCTIONS = {
    torch.as_strided,
    torch.Tensor.as_strided,
    torch.as_strided_copy,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_copy.default,
}
