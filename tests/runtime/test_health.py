"""Asking devices how they are."""

import threading
import time

import pytest
import torch

import dtorch
from dtorch import P
from dtorch.errors import DTorchError

PAIR = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))


def test_devices_that_get_through_their_queues_are_ok() -> None:
    dtorch.ones(2, device_mesh=PAIR).sum()
    first, second = PAIR.devices
    assert dtorch.health(PAIR) == {first: "ok", second: "ok"}
    assert dtorch.health([second]) == {second: "ok"}
    assert set(dtorch.health().values()) == {"ok"} and list(dtorch.health()) == sorted(
        dtorch.health()
    )
    assert dtorch.health([]) == {}


def test_a_device_that_hangs_is_busy_and_the_others_are_ok() -> None:
    go_on = threading.Event()

    def wait_on_the_first(x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta and dtorch.axis_index("x") == 0:
            go_on.wait(60)
        return x + 1

    result = dtorch.shard_map(wait_on_the_first, PAIR, P("x"), P("x"))(torch.ones(4))
    begin = time.monotonic()
    try:
        assert list(dtorch.health(PAIR, timeout=0.2).values()) == ["busy", "ok"]
        assert time.monotonic() - begin < 10
    finally:
        go_on.set()
    assert result.tolist() == [2.0] * 4
    assert list(dtorch.health(PAIR).values()) == ["ok", "ok"]


def test_a_worker_cannot_ask() -> None:
    def ask(x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            dtorch.health(PAIR)
        return x

    with pytest.raises(DTorchError, match="would wait for itself"):
        dtorch.shard_map(ask, PAIR, P(), P())(torch.ones(1)).to_torch()
