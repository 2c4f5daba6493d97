"""Handles, which hold what a worker computes, and `TensorFuture`, which waits for it.

A handle belongs to one value on one device. A worker sets it once, with a local tensor or with
a `Failure`; from then on it never changes. The worker that sets a handle wakes those who wait.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from ..errors import DTorchError, MutationError, WorkerError

PENDING = object()
_waiting = threading.Lock()
os.register_at_fork(
    before=_waiting.acquire, after_in_parent=_waiting.release, after_in_child=_waiting.release
)


class Failure:
    """Why a value could not be computed; it stands in the value's place and passes on."""

    __slots__ = ("cause", "message")

    def __init__(self, message: str, cause: BaseException) -> None:
        self.message = message
        self.cause = cause

    def error(self) -> DTorchError:
        """Returns a new exception to raise, with the kernel's own as its cause."""
        if isinstance(self.cause, DTorchError):
            return type(self.cause)(self.message)
        error = WorkerError(self.message)
        error.__cause__ = self.cause
        return error


class Handle:
    """The place of one value on one device: pending, a local tensor, or a `Failure`."""

    __slots__ = ("_waiters", "value")

    value: Any

    def __init__(self, value: Any = PENDING) -> None:
        self.value = value
        self._waiters: list[Callable[[], None]] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the value has been computed or has failed."""
        return self.value is not PENDING

    def set(self, value: Any) -> None:
        """Stores the value and wakes those who wait; called once, by the worker."""
        self.value = value
        # A waiter registers before it looks at `value` again, so this cannot miss one.
        if self._waiters is not None:
            with _waiting:
                waiters, self._waiters = self._waiters, None
            for wake in waiters or ():
                wake()

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Calls `wake` once the value is there: now, or later from the worker's thread."""
        with _waiting:
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(wake)
        if self.is_ready:
            with _waiting:
                waiters, self._waiters = self._waiters, None
            for late in waiters or ():
                late()

    def forget(self, wake: Callable[[], None]) -> None:
        """Takes back what `when_ready` was given, if it has not been called."""
        with _waiting:
            if self._waiters is not None and wake in self._waiters:
                self._waiters.remove(wake)


class Borrowed:
    """A ready value in memory that belongs to the caller, who must not write to it meanwhile.

    Reading it after the caller has written to the memory gives a `Failure`.
    """

    __slots__ = ("_owner", "_part", "_version")

    is_ready = True

    def __init__(self, part: torch.Tensor, owner: torch.Tensor) -> None:
        self._part = part
        self._owner = owner
        self._version = owner._version

    @property
    def value(self) -> Any:
        """The local tensor, or a `Failure` if it has been written to."""
        if self._owner._version == self._version:
            return self._part
        message = (
            "a torch tensor that dtorch reads in place (copy=False, or captured by a jitted "
            "function) was written to after it was handed over. Fix: pass a copy."
        )
        return Failure(message, MutationError(message))

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Calls `wake` now: the value is always there."""
        wake()


class _Countdown:
    """Calls `wake` after `count` calls."""

    __slots__ = ("_count", "_wake")

    def __init__(self, count: int, wake: Callable[[], None]) -> None:
        self._count = iter(range(count - 1, -1, -1))
        self._wake = wake

    def __call__(self) -> None:
        if next(self._count) == 0:
            self._wake()


def when_all_ready(
    handles: Sequence[Handle | Borrowed], wake: Callable[[], None]
) -> Callable[[], None]:
    """Calls `wake` once every handle is ready: now, or later from a worker's thread.

    Returns:
        A function that takes the request back.
    """
    pending = [h for h in handles if isinstance(h, Handle) and not h.is_ready]
    if not pending:
        wake()
        return lambda: None
    countdown = _Countdown(len(pending), wake)
    for handle in pending:
        handle.when_ready(countdown)

    def forget() -> None:
        for handle in pending:
            handle.forget(countdown)

    return forget


def wait_all(handles: Sequence[Handle | Borrowed], timeout: float | None = None) -> bool:
    """Waits until every handle is ready, or for `timeout` seconds; returns whether they are."""
    if all(h.is_ready for h in handles):
        return True
    done = threading.Event()
    forget = when_all_ready(handles, done.set)
    try:
        return done.wait(timeout)
    finally:
        if not done.is_set():
            forget()


class _CallbackThread:
    """Runs the callbacks of futures, one after another, on a daemon thread made at first use."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, callback: Callable[[], Any]) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="dtorch-callbacks", daemon=True
                )
                self._thread.start()
        self._queue.put(callback)

    def _run(self) -> None:
        while True:
            callback = self._queue.get()
            try:
                callback()
            except Exception as error:
                threading.excepthook(
                    threading.ExceptHookArgs(
                        (type(error), error, error.__traceback__, threading.current_thread())
                    )
                )


_callbacks = _CallbackThread()


class TensorFuture:
    """The value of a distributed tensor, on its way to the caller.

    Made by `Tensor.to_torch_async`. The value is assembled from the shards when it is first
    asked for, once; every `get` returns the same `torch.Tensor`.
    """

    def __init__(
        self,
        handles: Sequence[Handle | Borrowed],
        assemble: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> None:
        self._handles = tuple(handles)
        self._assemble = assemble
        self._lock = threading.Lock()
        self._result: torch.Tensor | None = None

    def is_ready(self) -> bool:
        """Returns whether `get` would return (or raise) at once."""
        return all(h.is_ready for h in self._handles)

    def wait_for(self, ms: float) -> bool:
        """Waits until the value is ready, at most `ms` milliseconds; returns whether it is.

        Blocking: up to `ms` milliseconds.
        """
        return wait_all(self._handles, ms / 1000)

    def get(self) -> torch.Tensor:
        """Returns the global value.

        Blocking: until every shard is computed.

        Raises:
            WorkerError: An operation that the value depends on failed.
        """
        wait_all(self._handles)
        with self._lock:
            if self._result is None:
                self._result = self._assemble(values_of(self._handles))
            return self._result

    def add_done_callback(self, callback: Callable[[TensorFuture], Any]) -> None:
        """Calls ``callback(self)`` once the value is ready, on dtorch's callback thread."""
        when_all_ready(self._handles, lambda: _callbacks.submit(lambda: callback(self)))

    def __await__(self) -> Generator[Any, None, torch.Tensor]:
        """Waits in asyncio: the worker wakes the event loop, nothing polls."""
        if not self.is_ready():
            loop = asyncio.get_running_loop()
            ready = loop.create_future()
            forget = when_all_ready(self._handles, lambda: _wake(loop, ready))
            try:
                yield from ready.__await__()
            finally:
                if not ready.done() or ready.cancelled():
                    forget()
        return self.get()

    def __repr__(self) -> str:
        return f"TensorFuture({'ready' if self.is_ready() else 'pending'})"


def _wake(loop: asyncio.AbstractEventLoop, ready: asyncio.Future[None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(lambda: ready.done() or ready.set_result(None))


def values_of(handles: Sequence[Handle | Borrowed]) -> list[torch.Tensor]:
    """Returns the local tensors of handles that are ready; raises the first failure."""
    for handle in handles:
        if isinstance(value := handle.value, Failure):
            raise value.error()
    return [handle.value for handle in handles]
