"""Workers: one thread per device, which runs calls in the order of submission.

Submission takes one lock, so every worker sees the calls, and the collectives in them, in the
same order. Workers are made when a device is first used. At interpreter exit, and in a forked
child, they are stopped; what was still queued becomes a `ShutdownError` for whoever waits.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import pathlib
import queue
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing import _set_thread_name

from ..errors import DTorchError, ShutdownError
from ..mesh import Device
from ..source import user_site
from . import executor, local_calls, timeline
from .executor import Executable
from .failures import stopped_failure
from .frames import Call, DeviceState
from .shards import Failure, Shards
from .timeline import Doing

_GATHERING_SECONDS = 1e-4


class Worker:
    """The thread of one device."""

    def __init__(self, device: Device, stopping: threading.Event) -> None:
        self._state = DeviceState(device, stopping)
        self._queue: queue.SimpleQueue[Call | tuple[Shards, int] | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._thread = threading.Thread(target=self._run, name=f"dtorch-{device}", daemon=True)
        self._thread.start()

    def submit(self, item: Call | tuple[Shards, int] | None) -> None:
        """Queues a call, a part to set when the queue gets there, or the end."""
        self._queue.put(item)

    def join(self) -> None:
        """Waits for the thread to end."""
        self._thread.join()

    def _run(self) -> None:
        _on_worker.active = True
        _set_thread_name(self._thread.name)  # for tools that watch the process
        is_stopping, take = self._state.stopping.is_set, self._queue.get_nowait
        with torch.inference_mode():
            while True:
                try:
                    item = take()
                except queue.Empty:
                    item = self._take_after_sleep()
                if item is None:
                    break
                if isinstance(item, tuple):
                    mark, index = item
                    mark.set(index, self._state.reached())
                elif is_stopping():
                    _abandon(item)
                else:
                    if item.num_threads != self._num_threads:
                        self._set_num_threads(item.num_threads)
                    executor.run(item, self._state)
                del item

    def _take_after_sleep(self) -> Call | tuple[Shards, int] | None:
        """Takes an item once there is one, and after it more have come or somebody waits.

        A worker that ran each call as it came would take the interpreter lock from the client
        each time, which costs more than the call.
        """
        item = self._queue.get()
        Shards.demand.wait(_GATHERING_SECONDS)
        return item

    def _set_num_threads(self, count: int) -> None:
        """Sets the intra-operation threads of this thread alone (`torch`'s call is global)."""
        torch.get_num_threads()  # makes ATen initialise this thread first
        _set_thread_local_threads(count)
        self._num_threads = count


def thread_setters() -> list[Any]:
    """The calls that set the threads of the calling thread alone, where torch's library has them.

    Where it has none, worker threads keep the number that torch gives every new thread.
    """
    folder = pathlib.Path(torch.__file__).parent / "lib"
    names = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")
    libraries = [ctypes.CDLL(str(f)) for f in sorted(folder.glob("*torch_cpu.*[!b]"))]
    return [getattr(lib, n) for lib in libraries for n in names if hasattr(lib, n)]


_setters = thread_setters()


def _set_thread_local_threads(count: int) -> None:
    for setter in _setters:
        setter(count)


_forked = False


def start_client_team() -> None:
    """Runs one parallel loop on the client, so that OpenMP knows more threads than cores.

    libgomp otherwise spins for milliseconds in the barriers of a worker's team, which made an
    attention of 0.03 ms take 8 ms on two cores.
    """
    torch.zeros(1 << 18)


def _abandon(call: Call) -> None:
    failure = stopped_failure()
    for shards in call.outputs:
        for index in range(len(shards)):
            if not shards.is_ready((index,)):
                shards.set(index, failure)


class _Pool:
    """The workers of this process, by device."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.workers: dict[Device, Worker] = {}
        self.stopping = threading.Event()

    def worker(self, device: Device) -> Worker:
        worker = self.workers.get(device)
        if worker is None:
            if not self.workers and not _forked:
                start_client_team()
            worker = self.workers[device] = Worker(device, self.stopping)
        return worker

    def stop(self) -> None:
        self.stopping.set()
        with self.lock:
            workers, self.workers = list(self.workers.values()), {}
            for worker in workers:
                worker.submit(None)
        for worker in workers:
            worker.join()


def would_wait_for_itself(what: str) -> DTorchError:
    """Returns the error of a worker that would have to wait for itself."""
    return DTorchError(
        f"{what} from a dtorch worker thread would wait for itself.\n"
        "  Fix: give a function that shard_map runs what it needs as arguments, with a P for each."
    )


class _OnWorker(threading.local):
    active = False


_on_worker = _OnWorker()
_pool = _Pool()


def check_not_on_worker(what: str) -> None:
    """Raises if the calling thread is a worker, which must never wait for itself."""
    if _on_worker.active:
        raise would_wait_for_itself(what)


def submit(
    executable: Executable, inputs: Sequence[Shards], scalars: Sequence[Any]
) -> list[Shards]:
    """Queues a program on every device that takes part. Does not wait.

    Args:
        executable: What runs.
        inputs: The shards of each input.
        scalars: The run-time scalars.

    Returns:
        The shards of each output, which are pending.
    """
    check_not_on_worker("submitting work")
    devices = executable.program.devices
    outputs = list(map(Shards.pending, executable.sizes))
    num_threads = torch.get_num_threads() // (len(devices) or 1) or 1
    recorder = timeline.recorder
    since, number = (0, 0) if recorder is None else (timeline.now(), recorder.new_call())
    call = Call(executable, inputs, outputs, scalars, num_threads, user_site(), number)
    if Shards.demand.is_set():  # by who waited for earlier calls
        Shards.demand.clear()
    with _pool.lock:
        if _pool.stopping.is_set():
            _abandon(call)
        else:
            for device in devices:
                _pool.worker(device).submit(call)
    if recorder is not None:
        name = executable.program.name
        recorder.add(Doing.PROGRAM, name, number, call.site, since, timeline.now())
    return outputs


def mark(devices: Iterable[Device] | None = None) -> tuple[list[Device], Shards]:
    """Queues a mark on some devices, or on all that have workers.

    Returns:
        The devices, and shards with a part for each, set when its worker gets there.
    """
    check_not_on_worker("synchronizing")
    with _pool.lock:
        chosen = list(_pool.workers if devices is None else devices)
        marks = Shards.pending(len(chosen))
        for index, device in enumerate(chosen):
            _pool.worker(device).submit((marks, index))
    return chosen, marks


def used_devices() -> list[Device]:
    """Returns the devices that have workers."""
    with _pool.lock:
        return list(_pool.workers)


def _before_fork() -> None:
    _pool.lock.acquire()


def _after_fork() -> None:
    _pool.lock.release()


def _after_fork_in_child() -> None:
    """The child has no workers, makes its own, and never sees what was pending computed.

    OpenMP's threads are gone too, and waiting for them would never end, so the client keeps to
    one thread, as PyTorch's data loaders do. Waiters belong to the parent: nobody is woken.
    """
    global _pool, _forked
    used, _pool = bool(_pool.workers), _Pool()
    Shards.demand = threading.Event()  # a worker may have held its lock
    if not used:
        return
    _forked = True
    torch.set_num_threads(1)
    message = (
        "this value was still being computed when the process was forked; the workers that "
        "compute it belong to the parent.\n  Fix: fetch it, or call dtorch.synchronize(), "
        "before the fork."
    )
    failure = Failure(message, ShutdownError(message))
    for item in gc.get_objects():
        if type(item) is Shards:
            item.abandon(failure)


def host_cache() -> contextlib.AbstractContextManager[None]:
    """Returns a context that does nothing: the portable executor keeps no memory."""
    return contextlib.nullcontext()


def empty_host_cache() -> None:
    """Does nothing: the portable executor keeps no memory."""


def stop() -> None:
    """Ends the workers; what was still queued becomes a `ShutdownError` for whoever waits."""
    local_calls.stopping.set()
    _pool.stop()


atexit.register(stop)
os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
