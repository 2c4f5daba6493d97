"""The client's time: a jitted call of one operation until it returns, and a ready value's fetch."""

from collections.abc import Iterator
from typing import Any

import torch

import dtorch

from .harness import Case, Options, drain
from .rivals import Rival
from .timing import burst, looped

LIMITS = {1: 8e-6, 2: 12e-6, 4: None, 8: None, 16: None, 32: None, 64: 40e-6}
FETCH_LIMIT = 10e-6


def cases(options: Options) -> Iterator[Case]:
    jitted = dtorch.jit(torch.add)
    for num_devices in (1, 2) if options.quick else LIMITS:
        yield call(options, jitted, num_devices)
    ready = dtorch.ones(4)
    dtorch.synchronize()
    yield Case(
        "to_torch() of a ready (4,)", options.timed(looped(ready.to_torch)), limit=FETCH_LIMIT
    )


def call(options: Options, jitted: Any, num_devices: int) -> Case:
    mesh = dtorch.DeviceMesh("cpu", list(range(num_devices)))
    layout = {"device_mesh": mesh, "placements": [dtorch.Shard(0)]}
    x, y = (make((num_devices,), **layout) for make in (dtorch.zeros, dtorch.ones))
    rivals = {}
    if num_devices <= 2:
        rival = Rival("jax", num_devices, options.rival_budget)
        rivals = {f"JAX jit, {num_devices} devices": rival.measure("call", elements=num_devices)}
    measure = options.timed(burst(lambda: jitted(x, y), drain))
    name = f"client of a jitted add, {num_devices} devices"
    return Case(name, measure, rivals, limit=LIMITS[num_devices])
