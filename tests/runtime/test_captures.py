"""Capturing a CUDA graph on a stream of its own; the allocator is as before; on a stand-in."""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtorch.runtime import captures

POOL = (0, 7)


class Driver:
    """What PyTorch has of CUDA graphs, and what is done with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
        self.done: list[Any] = []
        self.current = "lane"
        self._made = itertools.count()
        self._fails = fails
        self._is_captured = False
        monkeypatch.setattr(captures, "_free", defaultdict[int, list[Any]](list))
        monkeypatch.setattr(captures, "_new_stream", lambda: Stream(self, next(self._made)))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(self, self.current))
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

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def replay(self) -> None:
        self.done.append(f"replay on {self.current}")

    def reset(self) -> None:
        self.done.append("reset")

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


class Stream:
    """A stream of GPU 3."""

    device = torch.device("cuda", 3)

    def __init__(self, driver: Driver, name: Any) -> None:
        self._driver = driver
        self.name = name

    def record_event(self) -> Any:
        return f"event on {self.name}"

    def wait_event(self, event: Any) -> None:
        self._driver.done.append(f"{self.name} waits for {event}")


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
        captures.capture(work)
    assert driver.done == done
    assert driver.current == "lane"


def test_graphs_have_streams_of_their_own_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, "")
    used: list[Any] = []

    def work() -> None:
        used.append(driver.current)

    first, second = captures.capture(work), captures.capture(work)
    first.replay()
    first.drop()
    third = captures.capture(work)
    assert used == [0, 1, 0]
    assert driver.done == [
        *("end", "end", "replay on lane", "0 waits for event on lane", "reset", "end")
    ]
    del second, third


@pytest.mark.parametrize("error", [0, 2])
def test_a_stream_is_made_by_the_driver(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def create(place: Any, flags: int) -> int:
        place._obj.value = 4096
        assert flags == 1
        return error

    library = SimpleNamespace(cuStreamCreate=create)
    monkeypatch.setattr(captures.ctypes, "CDLL", {"libcuda.so.1": library}.__getitem__)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda *given: given)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    if error:
        with pytest.raises(RuntimeError, match="makes no stream: CUDA error 2"):
            captures._new_stream()
    else:
        assert captures._new_stream() == (4096, 3)


def test_graphs_are_of_cuda() -> None:
    assert captures.have_graphs("cuda") and not captures.have_graphs("cpu")
