"""CUDA graphs of PyTorch: which devices have them, and capturing one.

Takes what launches work on the calling thread's current stream; gives what replays it on the stream
that is current then. A graph is captured on a stream that is its own for as long as it lives:

- nobody else launches there. PyTorch's pool has 32 streams for each GPU and gives them out over and
  over; what another thread launches on a stream that is being captured becomes part of the graph;
- PyTorch keeps the workspaces of cuBLAS by thread and stream. Torch 2.13 frees those of the stream
  that a graph was captured on when the graph goes, also where another graph uses them
  (pytorch#193402). Here the first product of a capture makes one, in the memory of its graph.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch

_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Graph(Protocol):
    """What a device replays."""

    def replay(self) -> None:
        """Launches it on the current stream."""
        ...

    def drop(self) -> None:
        """Frees it, and its memory once what has been launched with it is done."""
        ...


def capture(work: Callable[[], None]) -> Graph:
    """Returns a graph of what `work` launches on the current stream, which does not run.

    One thread at a time calls it. A stream on which a capture fails is not used again.
    """
    free = _free[torch.cuda.current_device()]
    stream = free.pop() if free else _new_stream()
    with torch.cuda.stream(stream):
        graph = _captured(work)
    return _Captured(graph, stream)


_free: defaultdict[int, list[torch.cuda.Stream]] = defaultdict(list)
"""The streams of graphs that are gone, by GPU."""
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it is not ordered with the default stream


def _new_stream() -> torch.cuda.Stream:
    """Makes a stream of the current GPU that is not of PyTorch's pool, as those of it are made."""
    made = ctypes.c_void_p()
    error = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(made), _NON_BLOCKING)
    if error:
        raise RuntimeError(f"the driver makes no stream: CUDA error {error}")
    return torch.cuda.ExternalStream(made.value, torch.cuda.current_device())


class _Captured:
    """A graph of PyTorch's, and the stream that it was captured on, to which its memory belongs."""

    def __init__(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
        self._graph = graph
        self._stream = stream
        self._replayed_on = stream

    def replay(self) -> None:
        """As in `Graph`."""
        self._replayed_on = torch.cuda.current_stream()
        self._graph.replay()

    def drop(self) -> None:
        """As in `Graph`: before memory is unmapped, PyTorch waits for the stream that it is of."""
        with contextlib.suppress(RuntimeError):  # of the driver, which a worker notes as well
            self._stream.wait_event(self._replayed_on.record_event())
        self._graph.reset()
        _free[self._stream.device.index].append(self._stream)


def _captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        graph.capture_begin(pool, "thread_local")
        work()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # that of the capture, which the first error ended
            _end(graph, pool)
        raise
    _end(graph, pool)
    return graph


def _end(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Ends a capture; the allocator is as before it also where that fails.

    Before torch 2.14 a capture that fails keeps its memory, and in 2.12 the allocator takes it for
    one that goes on: it would then never again give out memory that two streams have used.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        if _TORCH < (2, 14) and not _has_memory(graph):
            device, bindings = torch.cuda.current_device(), torch._C
            with contextlib.suppress(RuntimeError):  # it knows already
                bindings._cuda_endAllocateToPool(device, pool)
            bindings._cuda_releasePool(device, pool)
        raise


def _has_memory(graph: torch.cuda.CUDAGraph) -> bool:
    """Returns whether a graph has been captured, and so frees its memory when it goes."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def have_graphs(device_type: str) -> bool:
    """Returns whether devices of a type replay graphs.

    Before torch 2.12 all threads share what a capture notes of the default generator: while a
    worker captures, ``torch.randn`` on the same GPU raises in another thread. The caller's own
    waits in its call meanwhile.
    """
    return device_type == "cuda"
