"""CUDA graphs on the CPU: what is captured is written down, and done again by a replay.

A replay does each operation again on the tensors of the capture and copies what it gives into the
memory that it gave then, so that, as on a GPU, all that a graph reads and writes is where it was.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtorch.runtime import graph_calls, graph_memory


class Graph:
    """What was captured."""

    made: int = 0
    replays: int = 0

    def __init__(self, work: Callable[[], None]) -> None:
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        with _Writer(self._calls):
            work()
        for call in self._calls:  # a capture computes nothing
            for result in filter(torch.Tensor.is_floating_point, _made(*call)):
                result.fill_(float("nan"))
        Graph.made += 1

    def replay(self) -> None:
        """Does it again."""
        Graph.replays += 1
        for op, args, kwargs, result in self._calls:
            found = op(*args, **kwargs)
            old, new = (_made(op, args, kwargs, r) for r in (result, found))
            for ours, theirs in zip(old, new, strict=True):
                ours.copy_(theirs)

    def drop(self) -> None:
        """Its memory goes with it."""


class _Writer(TorchDispatchMode):
    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        result = op(*args, **(kwargs or {}))
        self._calls.append((op, args, kwargs or {}, result))
        return result


def _made(op: Any, args: Any, kwargs: Any, result: Any) -> list[torch.Tensor]:
    """The results that are in memory of their own, without what is there several times."""
    given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
    own = [t for t in _tensors(result) if t.untyped_storage()._cdata not in given]
    return [graph_memory.once(t) for t in own]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in optree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


@contextlib.contextmanager
def graphs_on_cpu(capture: Callable[[Callable[[], None]], Graph] = Graph) -> Iterator[type[Graph]]:
    """A context in which CPU devices have graphs."""
    before = graph_calls.capture, graph_calls.have_graphs
    graph_calls.capture, graph_calls.have_graphs = capture, lambda device_type: True
    Graph.made = Graph.replays = 0
    try:
        yield Graph
    finally:
        graph_calls.capture, graph_calls.have_graphs = before
