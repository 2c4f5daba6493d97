"""The memory of graphs: what is taken for it, and when it is on loan no longer."""

import gc
import threading
import weakref

import torch

from dtorch.runtime import graph_calls, graph_memory, lent


def test_memory_for_a_conjugate_is_never_taken_for_the_conjugate() -> None:
    value = torch.tensor([1 + 2j])
    for given in (value.conj(), value.conj().imag):
        memory = graph_memory.Buffer(given, counts_writes=True)
        assert not memory.holds(memory.view.conj())
        assert not memory.holds(torch._neg_view(memory.view))
    memory = graph_memory.Buffer(value, counts_writes=True)
    assert memory.holds(memory.view) and not memory.holds(value)


def test_graphs_are_freed_by_a_collection_at_any_time() -> None:
    class Owner:
        def __init__(self) -> None:
            self.itself = self
            self.memory = torch.ones(2)
            lent.lend(self.memory, graph_calls._GONE)
            weakref.finalize(self, lent.withdraw, self.memory).atexit = False

    done = threading.Event()

    def work() -> None:
        for _ in range(300):
            Owner()
        done.set()

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        threading.Thread(target=work, daemon=True).start()
        assert done.wait(60)
    finally:
        gc.set_threshold(*thresholds)
