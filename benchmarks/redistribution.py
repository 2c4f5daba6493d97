"""Redistributions of 64 MiB on two devices, from ready value to ready value, and a small one."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

import dtorch

from .harness import Case, Options
from .rivals import Rival
from .timing import Measure, looped, prepared

PLACEMENTS: dict[str, dtorch.Placement] = {
    "S(0)": dtorch.Shard(0), "S(1)": dtorch.Shard(1), "R": dtorch.Replicate(),
    "P": dtorch.Partial(),
}  # fmt: skip
PAIRS = (("S(0)", "R"), ("P", "R"), ("P", "S(0)"), ("S(0)", "S(1)"))
JAX, DTENSOR = "JAX, 2 devices", "DTensor, 2 processes"
SMALL_LIMIT = 60e-6


def cases(options: Options) -> Iterator[Case]:
    side = 512 if options.quick else 4096
    for source, target in PAIRS:
        yield large(options, source, target, side)
    yield small(options)
    yield many(options, 4 if options.quick else 100)


def ready(rows: int, columns: int, source: str) -> Callable[[], dtorch.Tensor]:
    """Returns a function that makes a new value in a layout and waits for it.

    A new one each time: a partial sum remembers that it has been reduced.
    """
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    whole = dtorch.Tensor(torch.randn(rows, columns), device_mesh=mesh)

    def make() -> dtorch.Tensor:
        made = whole.redistribute(mesh, [PLACEMENTS[source]])
        dtorch.synchronize()
        return made

    return make


def large(options: Options, source: str, target: str, side: int) -> Case:
    make = ready(side, side, source)

    def move(x: dtorch.Tensor) -> dtorch.Tensor:
        moved = x.redistribute(x.device_mesh, [PLACEMENTS[target]])
        dtorch.synchronize()
        return moved

    assert torch.equal(move(make()).to_torch(), make().to_torch())
    x = torch.randn(side, side)
    used = x.clone()
    settings = {"rows": side, "columns": side, "source": source, "target": target}
    rivals = {
        "one copy, used pages": options.timed(looped(lambda: used.copy_(x))),
        "one copy, fresh pages": options.timed(looped(x.clone)),
        JAX: Rival("jax", 2, options.rival_budget).measure("redistribute", **settings),
        DTENSOR: Rival("dtensor", 2, options.rival_budget).measure("redistribute", **settings),
    }
    name = f"{side * side * 4 / 2**20:.0f} MiB {source} to {target}"
    return Case(name, options.timed(prepared(make, move)), rivals, {JAX: 1 / 2, DTENSOR: 1 / 4})


def small(options: Options) -> Case:
    """A call, its work and its fetch."""

    def reduce(x: dtorch.Tensor) -> torch.Tensor:
        return x.redistribute(x.device_mesh, [dtorch.Replicate()]).to_torch()

    settings = {"rows": 32, "columns": 32, "source": "P", "target": "R"}
    rivals = {
        JAX: Rival("jax", 2, options.rival_budget).measure("redistribute", **settings),
        DTENSOR: Rival("dtensor", 2, options.rival_budget).measure("redistribute", **settings),
    }
    measure = options.timed(prepared(ready(32, 32, "P"), reduce))
    return Case("4 KiB all-reduce, with the fetch", measure, rivals, limit=SMALL_LIMIT)


def many(options: Options, count: int) -> Case:
    """Small reductions in one program, apart and fused by hand: see docs/design."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    whole = [dtorch.Tensor(torch.randn(64), device_mesh=mesh) for _ in range(count)]
    replicated = [dtorch.Replicate()]

    def make() -> list[dtorch.Tensor]:
        made = [x.redistribute(mesh, [dtorch.Partial()]) for x in whole]
        dtorch.synchronize()
        return made

    def apart(parts: list[dtorch.Tensor]) -> list[dtorch.Tensor]:
        return [p.redistribute(mesh, replicated) for p in parts]

    def fused(parts: list[dtorch.Tensor]) -> Any:
        return torch.cat(parts).redistribute(mesh, replicated).split(64)

    def measure(function: Callable[[list[dtorch.Tensor]], Any]) -> Measure:
        jitted = dtorch.jit(function)

        def run(parts: list[dtorch.Tensor]) -> Any:
            results = jitted(parts)
            dtorch.synchronize()
            return results

        return options.timed(prepared(make, run))

    return Case(f"{count} all-reduces of 64", measure(apart), {"fused by hand": measure(fused)})
