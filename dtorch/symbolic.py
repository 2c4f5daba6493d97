"""Symbolic tensors: the values of a program that is being traced.

Symbolic tensors that alias share a `Storage`; each knows the path of views that leads to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from .errors import DataDependentError, TraceError
from .source import user_line
from .spec import Spec
from .tensor import Tensor

if TYPE_CHECKING:
    from .tracer import Tracer


class Storage:
    """What symbolic tensors that alias each other share: the value of the whole."""

    __slots__ = ("cache", "value", "version")

    def __init__(self, value: int) -> None:
        self.value = value
        self.version = 0
        self.cache: dict[tuple[Any, ...], int] = {}

    def write(self, value: int) -> None:
        """Replaces the whole value; every view is read again."""
        self.value = value
        self.version += 1
        self.cache.clear()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ViewStep:
    """One view operation on the way from a storage to a symbolic tensor."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int


class SymbolicTensor(Tensor):
    """A value of the program that is being traced."""

    _tracer: Tracer
    _storage: Storage
    _path: tuple[ViewStep, ...]
    _offset: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @property
    def _spec(self) -> Spec:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._tracer.builder.specs[self._tracer.read(self)]

    @property
    def _shards(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise self._no_value("the shards")

    def _no_value(self, what: str) -> DataDependentError:
        return DataDependentError(
            f"{what} of a tensor cannot be read before run time, but the function is being traced "
            f"({user_line() or 'unknown line'}).\n"
            "  Fix: keep the computation in tensors (torch.where, masks), return the tensor and "
            "fetch it outside, or pass the value as a static argument."
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tensor = next(a for a in _flat_tensors((args, kwargs or {})) if isinstance(a, cls))
        raise tensor._outlived(str(func))

    def _outlived(self, what: str) -> TraceError:
        return TraceError(
            f"{what} got a tensor of a trace that has ended ({user_line() or 'unknown line'}).\n"
            "  Fix: return it from the traced function instead of storing it outside."
        )

    def to_torch_async(self, device: str | torch.device | None = None) -> Any:
        """Raises: the value does not exist yet."""
        raise self._no_value("the elements")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SymbolicTensor({self._spec!r})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()


def _flat_tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _flat_tensors(item)
