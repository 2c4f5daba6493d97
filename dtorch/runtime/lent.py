"""Memory that a graph gives its results in and writes to again, and which streams use it.

A jitted call that is captured as a graph updates an argument that is donated to it in place: the
result is in the graph's own memory, on loan until it is donated to the next call. Before the graph
writes there, its stream waits for all that have used it. This is the portable executor's table; the
native one has its own, native/lent.cpp.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable
from typing import Any

import torch


@dataclasses.dataclass(slots=True)
class Entry:
    """Memory on loan.

    Attributes:
        owner: The graph's own tensor in it, whose version counts what the graph writes.
        version: Its version when it was lent.
        gone: What a part in it is from then on, a `Failure`.
        users: The streams that have used it since.
        is_shared: Whether a call was given it more than once since.
    """

    owner: torch.Tensor
    version: int
    gone: Any
    users: list[Any] = dataclasses.field(default_factory=list)
    is_shared: bool = False


# Taken again by its own thread where a collection of garbage frees graphs.
_lock = threading.RLock()
_entries: dict[int, Entry] = {}  # by storage


def lend(owner: torch.Tensor, gone: Any) -> None:
    """Notes that what shares the memory of a tensor is on loan, until the tensor is written to."""
    with _lock:
        _entries[_key(owner)] = Entry(owner, owner._version, gone)


def withdraw(owner: torch.Tensor) -> None:
    """Forgets the memory of a tensor, which nobody writes to any more."""
    with _lock:
        _entries.pop(_key(owner), None)


def entry_of(tensor: torch.Tensor) -> Entry | None:
    """Returns what is noted of the memory of a tensor, or None."""
    if not _entries:
        return None
    with _lock:
        return _entries.get(_key(tensor))


def used(tensor: torch.Tensor, stream: Any) -> None:
    """Notes that a stream reads a tensor from now on."""
    if not _entries:
        return
    with _lock:
        entry = _entries.get(_key(tensor))
        if entry is not None and stream not in entry.users:
            entry.users.append(stream)


def take_users(owner: torch.Tensor) -> list[Any]:
    """Returns the streams that have used the memory of a tensor since it was lent."""
    with _lock:
        entry = _entries.get(_key(owner))
        users = [] if entry is None else entry.users
        if entry is not None:
            entry.users = []
        return users


def note_shared(owners: Iterable[torch.Tensor]) -> None:
    """Notes which memory a call was given more than once, by the owners of all it was given."""
    seen = set[int]()
    for key in map(_key, owners):
        if key in seen:
            with _lock:
                if key in _entries:
                    _entries[key].is_shared = True
        seen.add(key)


def is_shared(owner: torch.Tensor) -> bool:
    """Returns whether a call was given the memory of a tensor more than once since it was lent."""
    with _lock:
        entry = _entries.get(_key(owner))
        return entry is not None and entry.is_shared


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _after_fork_in_child() -> None:
    """A thread of the parent may have held the lock; graphs do not work in a forked child."""
    global _lock
    _lock = threading.RLock()
    _entries.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
