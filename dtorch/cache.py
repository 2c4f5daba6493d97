"""The cache of compiled calls: bounded, least recently used first.

Run-time scalars whose value a trace has read become part of the key; the cache remembers which.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from .arguments import Arguments

_cache_lock = threading.Lock()
os.register_at_fork(
    before=_cache_lock.acquire,
    after_in_parent=_cache_lock.release,
    after_in_child=_cache_lock.release,
)

DEFAULT_CAPACITY = 4096


class CacheInfo(NamedTuple):
    """What a cache has done: calls served, functions traced, and entries held."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class Cache:
    """Compiled calls by key, least recently used first; bounded."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[Any, Any] = OrderedDict()
        self._lock = _cache_lock
        self.hits = self.misses = 0

    def get(self, key: Hashable) -> Any:
        """Returns the entry of a key, or None; `count` keeps the score."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def count(self, hit: bool) -> None:
        """Counts one call that was served, or one function that was traced."""
        with self._lock:
            if hit:
                self.hits += 1
            else:
                self.misses += 1

    def put(self, key: Hashable, entry: Any) -> None:
        """Stores an entry and drops the least recently used beyond the capacity."""
        with self._lock:
            self._entries[key] = entry
            while len(self._entries) > self.capacity:
                self._entries.popitem(last=False)

    def rename(self, old: Hashable, new: Hashable) -> None:
        """Moves what is stored under a key, and under keys that begin with it, to another."""
        with self._lock:
            for key in [
                k for k in self._entries if k == old or (type(k) is tuple and k and k[0] == old)
            ]:
                entry = self._entries.pop(key)
                self._entries[new if key == old else (new, *key[1:])] = entry

    def clear(self) -> None:
        """Drops all entries and zeroes the counts."""
        with self._lock:
            self._entries.clear()
            self.hits = self.misses = 0

    def info(self) -> CacheInfo:
        """Returns the counts."""
        return CacheInfo(self.hits, self.misses, self.capacity, len(self._entries))


def lookup(
    cache: Cache,
    key: Hashable,
    arguments: Arguments,
    build: Callable[[set[int]], tuple[Any, set[int]]],
) -> tuple[Any, tuple[int, ...]]:
    """Returns the entry of a call, made by `build` if the cache has none, and what it has read.

    Scalars that a trace reads become part of the key: under the key that only has their types,
    the cache holds which ones they are.
    """
    static = () if not arguments.scalars else cache.get((key, "static")) or ()
    entry = cache.get((key, static, _values(arguments, static)))
    cache.count(hit=entry is not None)
    if entry is None:
        entry, reads = build(set(static))
        if reads - set(static):
            static = tuple(sorted(reads))
            cache.put((key, "static"), static)
        cache.put((key, static, _values(arguments, static)), entry)
    return entry, static


def _values(arguments: Arguments, static: Sequence[int]) -> Hashable:
    read = (arguments.leaves[i] for i in static)
    return tuple(v.hex() if type(v) is float else v for v in read)
