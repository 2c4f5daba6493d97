"""`TensorFuture`: waits for the shards of a value and gives the value."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from .backend import Shards
from .shards import values_of


class _CallbackThread:
    """Runs what it is given, one after another, on a daemon thread made at first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, callback: Callable[[], Any]) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
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


_callbacks = _CallbackThread("dtorch-callbacks")
_finishing = _CallbackThread("dtorch-finishing")  # waits for streams


class TensorFuture:
    """The value of a distributed tensor, on its way to the caller.

    Made by `Tensor.to_torch_async`. The value is assembled from the shards when it is first
    asked for, once; every `get` returns the same `torch.Tensor`.
    """

    def __init__(
        self,
        shards: Shards,
        indices: Sequence[int],
        assemble: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> None:
        self._shards = shards
        self._indices = indices
        self._assemble = assemble
        self._lock = threading.Lock()
        self._result: torch.Tensor | None = None

    def is_ready(self) -> bool:
        """Returns whether the value has been computed, or could not be."""
        return self._shards.is_ready(self._indices) and self._shards.is_done(self._indices)

    def wait_for(self, ms: float) -> bool:
        """Waits until the value is ready, at most `ms` milliseconds; returns whether it is.

        Blocking: up to `ms` milliseconds.
        """
        end = time.monotonic() + ms / 1000
        if not self._shards.wait(self._indices, ms / 1000):
            return False
        if self._shards.is_done(self._indices):
            return True
        done = threading.Event()
        self._when_ready(done.set)
        return done.wait(max(0.0, end - time.monotonic()))

    def get(self) -> torch.Tensor:
        """Returns the global value.

        On an accelerator, what the caller launches next on its current stream has the value; the
        host does not wait for the streams that compute it.

        Blocking: until every shard is computed; on an accelerator, until it has been launched.

        Raises:
            WorkerError: An operation that the value depends on failed.
        """
        self._shards.wait(self._indices)
        with self._lock:
            if self._result is None:
                self._result = self._assemble(values_of(self._shards, self._indices))
            return self._result

    def add_done_callback(self, callback: Callable[[TensorFuture], Any]) -> None:
        """Calls ``callback(self)`` once the value is ready, on dtorch's callback thread."""
        self._when_ready(lambda: _callbacks.submit(lambda: callback(self)))

    def _when_ready(self, wake: Callable[[], Any]) -> Callable[[], None]:
        """Calls `wake` once the value is ready; returns a function that takes that back."""
        shards, indices = self._shards, self._indices

        def finish() -> None:
            shards.finish(indices)
            wake()

        def launched() -> None:
            if shards.is_done(indices):
                wake()
            else:
                _finishing.submit(finish)

        return shards.when_ready(indices, launched)

    def __await__(self) -> Generator[Any, None, torch.Tensor]:
        """Waits in asyncio: the worker wakes the event loop, nothing polls."""
        if not self.is_ready():
            loop = asyncio.get_running_loop()
            ready = loop.create_future()
            forget = self._when_ready(lambda: _wake(loop, ready))
            try:
                yield from ready.__await__()
            finally:
                if not ready.done() or ready.cancelled():
                    forget()
        return self.get()

    def __repr__(self) -> str:
        return f"TensorFuture({'ready' if self.is_ready() else 'pending'})"


def _wake(loop: asyncio.AbstractEventLoop, ready: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has been closed, nobody waits
        loop.call_soon_threadsafe(lambda: ready.done() or ready.set_result(None))
