"""Tensors that share a storage: every write counts and all see it, from whichever thread."""

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from layouts import TRIPLE, S

import dtorch


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(*functions: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            for _ in range(40):
                function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not errors


def zeros() -> dtorch.Tensor:
    return dtorch.zeros(5, 4, device_mesh=TRIPLE, placements=[S(0)])


def assert_all(tensor: dtorch.Tensor, value: float) -> None:
    assert torch.equal(tensor.to_torch(), torch.full(tensor.shape, value))


def test_writes_from_several_threads_all_count() -> None:
    base = zeros()
    in_threads(*(lambda: base.add_(1),) * 3)
    assert_all(base, 120)


def test_writes_to_a_base_and_to_its_views_all_count() -> None:
    base = zeros()
    view, row = base[1:3], base[0]
    in_threads(
        lambda: base.add_(1), lambda: base.add_(1), lambda: view.add_(2), lambda: row.sub_(1)
    )
    expected = torch.full((5, 4), 80.0)
    expected[1:3] += 80
    expected[0] -= 40
    for tensor, wanted in ((base, expected), (view, expected[1:3]), (row, expected[0])):
        assert torch.equal(tensor.to_torch(), wanted)


def test_a_view_made_during_writes_shows_its_base() -> None:
    base, views = zeros(), []
    write, look = lambda: base.add_(1), lambda: views.append(base[1:4])
    in_threads(write, write, look, look)
    assert_all(base, 80)
    for view in views[::8]:
        assert_all(view, 80)


def test_jitted_writes_and_eager_ones_all_count() -> None:
    base = zeros()
    add = dtorch.jit(lambda x: x.add_(1))
    in_threads(lambda: add(base), lambda: add(base), lambda: base.add_(1))
    assert_all(base, 120)


def test_a_partial_tensor_read_during_writes_is_not_set_back() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # a thread is interrupted between what it reads and what it writes
    try:
        for _ in range(20):
            base = dtorch.zeros(4, device_mesh=TRIPLE, placements=[dtorch.Partial()])
            in_threads(lambda: base.add_(1), lambda: base.add_(1), lambda: base.exp())  # noqa: B023
            assert_all(base, 80)
    finally:
        sys.setswitchinterval(interval)
