"""Capturing a CUDA graph leaves the allocator as it was, also where it fails; on a stand-in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtorch.runtime import captures

POOL = (0, 7)


class Driver:
    """What PyTorch has of CUDA graphs, and what is done with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
        self.done: list[Any] = []
        self._fails = fails
        self._is_captured = False
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(torch._C, name, self._noted(name), raising=False)

    def _noted(self, name: str) -> Callable[..., None]:
        def note(*arguments: Any) -> None:
            self.done.append((name, *arguments))
            if self._fails == "told" and name == "_cuda_endAllocateToPool":
                raise RuntimeError("not currently recording to mempool_id")

        return note

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == (POOL, "thread_local")

    def capture_end(self) -> None:
        self.done.append("end")
        self._is_captured = self._fails not in ("end", "told")
        if self._fails:
            raise RuntimeError("operation failed due to a previous error during capture")

    def pool(self) -> Any:
        if not self._is_captured:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return POOL


GIVEN_BACK = ["end", ("_cuda_endAllocateToPool", 3, POOL), ("_cuda_releasePool", 3, POOL)]


def refuse() -> None:
    raise ValueError("first")


@pytest.mark.parametrize("work", [refuse, lambda: None])
@pytest.mark.parametrize(
    ("version", "fails", "done"),
    [
        ((2, 12), "end", GIVEN_BACK),
        ((2, 13), "told", GIVEN_BACK),  # PyTorch has ended it there itself
        ((2, 13), "instantiate", ["end"]),  # the graph frees what it has captured
        ((2, 14), "end", ["end"]),
        ((2, 13), "", ["end"]),
    ],
)
def test_memory_of_a_capture_that_fails_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int],
    fails: str,
    done: list[Any],
    work: Callable[[], None],
) -> None:
    driver = Driver(monkeypatch, fails)
    monkeypatch.setattr(captures, "_TORCH", version)
    if work is refuse:
        with pytest.raises(ValueError, match="first"):
            captures.capture(work)
    elif fails:
        with pytest.raises(RuntimeError, match="previous error during capture"):
            captures.capture(work)
    else:
        assert captures.capture(work) is driver
    assert driver.done == done


def test_graphs_are_of_cuda() -> None:
    assert captures.have_graphs("cuda") and not captures.have_graphs("cpu")
