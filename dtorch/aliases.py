"""Which tensors share a storage in PyTorch's sense: a write to one must not be lost on another."""

from __future__ import annotations

import weakref

from .tensor import Tensor


class AliasGroup:
    """The tensors that share one storage in PyTorch's sense, held weakly."""

    def __init__(self) -> None:
        self._members: list[tuple[weakref.ref[Tensor], bool]] = []
        self._limit = 8

    def add(self, tensor: Tensor, is_whole: bool) -> None:
        """Adds a tensor, and whether it is the whole storage rather than a view of it."""
        if len(self._members) >= self._limit:
            self._members = [m for m in self._members if m[0]() is not None]
            self._limit = 2 * len(self._members) + 8
        self._members.append((weakref.ref(tensor), is_whole))
        tensor._aliases = self

    def remove(self, tensor: Tensor) -> None:
        """Takes out a tensor that now has another storage."""
        self._members = [m for m in self._members if m[0]() is not tensor]
        tensor._aliases = None

    def others(self, tensor: Tensor) -> list[tuple[Tensor, bool]]:
        """Returns the other living members, and whether each is whole."""
        living = [(r(), r, whole) for r, whole in self._members]
        self._members = [(r, whole) for t, r, whole in living if t is not None]
        return [(t, whole) for t, _, whole in living if t is not None and t is not tensor]

    def is_whole(self, tensor: Tensor) -> bool:
        """Returns whether a member is the whole storage."""
        return any(whole for r, whole in self._members if r() is tensor)
