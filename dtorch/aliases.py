"""Which tensors share a storage in PyTorch's sense: a write to one has to be seen by the others.

A tensor is the whole storage, or a view of it along a path of view operations. Shards are not
shared: after a write the storage is put together anew, and what else shares it is made again.

One lock orders what client threads do with it. A write to a tensor that nothing shares does not
need it: the executors do that in one step, from reading the tensor to its new value. A tensor in a
group is left to the code that holds the lock, so `held` puts one in a group of its own meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from .runtime import Shards
from .spec import Spec
from .tensor import Tensor

Path = tuple[Any, ...]
"""The view operations, `symbolic.ViewStep`s, from a storage to a tensor; empty for all of it."""


lock = threading.RLock()
"""Held from reading a tensor that shares a storage until all that shares it has the new value.

Taken before the locks of generators and of tracing, never after.
"""
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class AliasGroup:
    """The tensors that share one storage in PyTorch's sense, held weakly; used under the lock.

    Args:
        whole: The storage itself, as the spec and the shards of a tensor; None where nobody has
            it, as with two views of what a jitted function did not return.
        is_part: Whether that is a view of a storage whose rest is gone.
    """

    def __init__(self, whole: tuple[Spec, Shards] | None, is_part: bool = False) -> None:
        self.whole = whole
        self.is_part = is_part
        self._members: dict[int, tuple[weakref.ref[Tensor], Path]] = {}
        self._limit = 8

    def add(self, tensor: Tensor, path: Path) -> None:
        """Adds a tensor, and where it is in the storage."""
        if len(self._members) >= self._limit:
            self._drop_the_dead()
            self._limit = 2 * len(self._members) + 8
        self._members[id(tensor)] = weakref.ref(tensor), path
        tensor._aliases = self

    def remove(self, tensor: Tensor) -> None:
        """Takes out a tensor that now has another storage."""
        self._members.pop(id(tensor), None)
        tensor._aliases = None

    def others(self, tensor: Tensor) -> list[tuple[Tensor, Path]]:
        """Returns the other living members, and where each is in the storage."""
        if len(self._members) == 1 and id(tensor) in self._members:
            return []
        self._drop_the_dead()
        living = ((reference(), path) for reference, path in self._members.values())
        return [(t, path) for t, path in living if t is not None and t is not tensor]

    def path_of(self, tensor: Tensor) -> Path:
        """Returns where a member is in the storage."""
        return self._members[id(tensor)][1]

    def _drop_the_dead(self) -> None:
        self._members = {k: m for k, m in self._members.items() if m[0]() is not None}


def grouped(tensor: Tensor) -> AliasGroup:
    """Returns the group of a tensor, made if it is in none."""
    group = tensor._aliases
    if group is None:
        group = AliasGroup(None)
        group.add(tensor, ())  # before its value is read, which others do not write from then on
        group.whole = tensor._spec, tensor._shards
    return group


@contextlib.contextmanager
def held(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A context with the lock, in which no other thread writes to the tensors."""
    with lock:
        made = [(t, grouped(t)) for t in tensors if t._aliases is None]
        try:
            yield
        finally:
            for tensor, group in made:
                if tensor._aliases is group and not group.others(tensor):
                    group.remove(tensor)
