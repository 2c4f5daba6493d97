"""`Shards`: the parts of one value, one for each device of its mesh.

A part is pending, a local tensor, or a `Failure`. A worker sets it once; from then on it never
changes. The worker that sets the last part that somebody waits for wakes them. This is the
portable class; the native executor has one with the same methods (`runtime.backend` chooses).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ..errors import MutationError
from . import lent
from .failures import Failure
from .faults import Event, Launched

_PENDING = object()
_waiting = threading.Lock()
os.register_at_fork(
    before=_waiting.acquire, after_in_parent=_waiting.release, after_in_child=_waiting.release
)


class Borrowed:
    """A part in memory that belongs to the caller, who must not write to it, or to a graph.

    Attributes:
        part: The local tensor.
        owner: The owner's tensor, whose version is watched.
        version: Its version when it was handed over.
        gone: What the part is once a graph has written to it; None in memory of the caller.
    """

    __slots__ = ("gone", "owner", "part", "version")

    def __init__(
        self,
        part: torch.Tensor,
        owner: torch.Tensor,
        version: int | None = None,
        gone: Failure | None = None,
    ) -> None:
        self.part = part
        self.owner = owner
        self.version = owner._version if version is None else version
        self.gone = gone

    def broken(self) -> Failure:
        """Returns what the part is once the owner has written to it."""
        return self.gone or written_to()

    def is_broken(self) -> bool:
        """Returns whether the owner has been written to since."""
        return self.owner._version != self.version

    def lends(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is in the same memory."""
        return tensor.untyped_storage()._cdata == self.part.untyped_storage()._cdata


def handed_over(part: Any) -> Any:
    """Returns a part of the caller's, on an accelerator with what its current stream has to do."""
    tensor = part.part if type(part) is Borrowed else part
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "cpu":
        return part
    event = torch.accelerator.current_stream(tensor.device).record_event()
    return Launched(part, Event(tensor.device, event))


def order_caller(tensor: torch.Tensor, event: Event) -> None:
    """Has the calling thread's current stream wait for an event, and keep what it then reads.

    For a tensor on the host, which an accelerator still fills, the thread itself waits.
    """
    if tensor.device.type == "cpu":
        event.finish()
        return
    stream = torch.accelerator.current_stream(tensor.device)
    stream.wait_event(event.raw)
    tensor.record_stream(stream)
    lent.used(tensor, stream)


def written_to() -> Failure:
    """Returns what a borrowed part is once its owner has been written to."""
    message = (
        "a torch tensor that dtorch reads in place (copy=False, or captured by a jitted "
        "function) was written to after it was handed over. Fix: pass a copy."
    )
    return Failure(message, MutationError(message))


class _Waiter:
    """Calls `wake` once a number of parts have been set."""

    __slots__ = ("missing", "wake")

    def __init__(self, missing: set[int], wake: Callable[[], None]) -> None:
        self.missing = missing
        self.wake = wake


class Shards:
    """The parts of a value, one for each device of its mesh, in the mesh's order.

    Args:
        parts: Local tensors of the caller, `Failure`s, or `Borrowed` memory.

    Attributes:
        demand: Set while somebody may wait for a part: workers then do not let calls gather.
    """

    __slots__ = ("__weakref__", "_parts", "_waiters")

    demand: ClassVar = threading.Event()

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = [handed_over(part) for part in parts]
        self._waiters: list[_Waiter] | None = None

    @staticmethod
    def pending(count: int) -> Shards:
        """Returns parts that workers are going to set."""
        return Shards([_PENDING] * count)

    def __len__(self) -> int:
        return len(self._parts)

    def get(self, index: int) -> Any:
        """Returns a part that is ready, for what the caller launches next, or a `Failure`."""
        part, event = self.part(index), self.event(index)
        if event is not None and type(part) is not Failure:
            if event.lost is None:
                try:
                    order_caller(part, event)
                except RuntimeError as error:
                    event.fail(error)
            part = event.lost or part
        for loan in self.loans((index,)):
            if loan.gone is not None and isinstance(part, torch.Tensor):
                part = part.clone()  # launched while the graph had not written to it
                return loan.gone if loan.is_broken() else part
        return part

    def is_done(self, indices: Sequence[int]) -> bool:
        """Returns whether the streams that compute parts, which are ready, are done with them."""
        return all(event is None or event.is_over() for event in map(self.event, indices))

    def finish(self, indices: Sequence[int]) -> None:
        """Waits for the streams that compute parts, which are ready."""
        for event in map(self.event, indices):
            if event is not None:
                event.finish()

    def part(self, index: int) -> Any:
        """Returns a part that is ready, which a stream may still compute, or a `Failure`."""
        part = self._parts[index]
        if type(part) is Launched:
            part = part.part
        if type(part) is Borrowed:
            return part.broken() if part.is_broken() else part.part
        return part

    def event(self, index: int) -> Event | None:
        """Returns what has to be waited for before a part that is ready is read, or None."""
        part = self._parts[index]
        return part.event if type(part) is Launched else None

    def loans(self, indices: Sequence[int]) -> list[Borrowed]:
        """Returns those of the parts, which are ready, that are memory of the caller."""
        parts = [self._parts[i] for i in indices]
        inner = [p.part if type(p) is Launched else p for p in parts]
        return [p for p in inner if type(p) is Borrowed]

    def is_ready(self, indices: Sequence[int]) -> bool:
        """Returns whether parts have been computed or have failed."""
        return all(self._parts[i] is not _PENDING for i in indices)

    def set(self, index: int, part: Any) -> None:
        """Stores a part and wakes those who wait; called once, by the worker."""
        self._parts[index] = part
        # A waiter registers before it looks at the parts again, so this cannot miss one.
        if self._waiters is not None:
            with _waiting:
                woken = self._seen(index)
            for waiter in woken:
                waiter.wake()

    def _seen(self, index: int) -> list[_Waiter]:
        woken = []
        for waiter in list(self._waiters or ()):
            waiter.missing.discard(index)
            if not waiter.missing:
                woken.append(waiter)
                self._waiters.remove(waiter)  # pyright: ignore[reportOptionalMemberAccess]
        return woken

    def when_ready(self, indices: Sequence[int], wake: Callable[[], None]) -> Callable[[], None]:
        """Calls `wake`, which must not wait, once parts are ready: now, or from another thread.

        Returns:
            A function that takes the request back.
        """
        waiter = _Waiter(set(indices), wake)
        Shards.demand.set()
        with _waiting:
            self._waiters = [*(self._waiters or ()), waiter]
        for index in indices:
            if self._parts[index] is not _PENDING:
                with _waiting:
                    woken = self._seen(index)
                for late in woken:
                    late.wake()

        def forget() -> None:
            with _waiting:
                if waiter in (self._waiters or ()):
                    self._waiters.remove(waiter)  # pyright: ignore[reportOptionalMemberAccess]

        return forget

    def wait(self, indices: Sequence[int], timeout: float | None = None) -> bool:
        """Waits until parts are ready, or for `timeout` seconds; returns whether they are."""
        if self.is_ready(indices):
            return True
        done = threading.Event()
        forget = self.when_ready(indices, done.set)
        try:
            return done.wait(timeout)
        finally:
            if not done.is_set():
                forget()

    def copy(self, index: int) -> Any:
        """Waits for a part and returns a copy for the caller, or its `Failure`."""
        self.wait((index,))
        part = self.get(index)
        if type(part) is Failure:
            return part
        with torch.inference_mode(False):
            return part.clone()

    def abandon(self, failure: Failure) -> None:
        """Makes the pending parts fail; wakes nobody. For a forked child, which has no waiters."""
        self._parts = [failure if p is _PENDING else p for p in self._parts]


def values_of(shards: Shards, indices: Sequence[int]) -> list[torch.Tensor]:
    """Returns parts that are ready; raises the first failure."""
    parts = [shards.get(i) for i in indices]
    for part in parts:
        if type(part) is Failure:
            raise part.error()
    return parts
