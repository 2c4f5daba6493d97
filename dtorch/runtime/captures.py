"""CUDA graphs of PyTorch: which devices have them, and capturing one.

Takes what launches work on the calling thread's current stream; gives what replays it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Graph(Protocol):
    """What a device replays."""

    def replay(self) -> None:
        """Launches it on the current stream."""
        ...


def capture(work: Callable[[], None]) -> Graph:
    """Returns a graph of what `work` launches on the current stream, which does not run."""
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
