"""Fixtures and markers that every test has."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"
SECONDS_TO_END = 5.0

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a network for anything


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked ``gpu`` where this torch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch.cuda.is_available() is false")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """``shared("models/stories260K")`` is that path in ../shared, or skips and names it."""

    def path(name: str) -> Path:
        found = SHARED / name
        if not found.exists():
            pytest.skip(f"{found} does not exist")
        return found

    return path


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fails a test that leaves a new non-daemon thread running: it would hold up the exit."""
    before = set(threading.enumerate())
    yield
    new = [t for t in threading.enumerate() if t not in before and not t.daemon]
    deadline = time.monotonic() + SECONDS_TO_END
    for thread in new:
        thread.join(max(0.0, deadline - time.monotonic()))
    alive = [t.name for t in new if t.is_alive()]
    if alive:
        pytest.fail(f"non-daemon threads still run {SECONDS_TO_END:g} s after the test: {alive}")
