"""Fixtures and markers that every test has."""

import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import dtorch

SHARED = Path(__file__).resolve().parents[2] / "shared"
SECONDS_TO_END = 5.0

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a network for anything

# A helper that doctest would import; the tests that need it skip themselves.
collect_ignore = [] if importlib.util.find_spec("diffusers") else ["pipelines.py"]


# What is planned before an executor sees it, or what has more to do with a library than with one.
ONCE = {
    "models", "nn", "test_cases", "test_cases_upper", "test_cpu_results", "test_debug",
    "test_decision", "test_form_dtypes", "test_huggingface", "test_infer", "test_lowering",
    "test_mesh", "test_names", "test_opinfo", "test_passes", "test_placement", "test_plan",
    "test_propagation", "test_refusals", "test_scalars", "test_spec", "test_strides",
    "test_transformers",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests ``once`` by `ONCE`, and skips those marked ``gpu`` where there is none."""
    for item in items:
        if not ONCE.isdisjoint({item.path.stem, item.path.parent.name}):
            item.add_marker(pytest.mark.once)
        if item.path.stem == "huggingface" and not importlib.util.find_spec("transformers"):
            item.add_marker(pytest.mark.skip(reason="its doctest needs transformers"))
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


@pytest.fixture
def operations() -> Iterator[torch.library.Library]:
    """The namespace ``dtorch_test``, for a test's own operations; no worker runs them any longer
    when it goes."""
    with torch.library._scoped_library("dtorch_test", "DEF") as library:
        yield library
        dtorch.synchronize()


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
