"""A chain of adds, `x = x + y` over and over: the time of one operation, with one fetch at the end.

In eager mode each add is a call; in jit the chain is one program.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import dtorch

from .harness import Case, Options
from .rivals import Rival
from .timing import looped

EAGER_TARGETS: dict[tuple[int, ...], float] = {(1,): 1.37, (1024, 1024): 1.03}
JIT_TARGETS: dict[tuple[int, ...], float] = {(1,): 0.7}
COMPILED_LIMIT = 0.05e-6


def chain(x: Tensor, y: Tensor, length: int) -> Any:
    for _ in range(length):
        x = x + y
    return x


def cases(options: Options) -> Iterator[Case]:
    for shape in ((1,), (1024,), (1024, 1024)):
        length = 20 if options.quick else 2000 if len(shape) == 1 else 200
        yield from one_device(options, shape, length)
    if not options.quick:
        yield compiled(options, 2000)
    yield portable(options, 20 if options.quick else 2000)
    yield two_devices(options, 20 if options.quick else 2000)


def one_device(options: Options, shape: tuple[int, ...], length: int) -> Iterator[Case]:
    x, y = torch.zeros(shape), torch.ones(shape)
    dx, dy = dtorch.zeros(shape), dtorch.ones(shape)
    jitted = dtorch.jit(lambda x, y: chain(x, y, length))
    for mode, call, targets in (
        ("eager", lambda: chain(dx, dy, length).to_torch(), EAGER_TARGETS),
        ("jit", lambda: jitted(dx, dy).to_torch(), JIT_TARGETS),
    ):
        assert torch.equal(call(), chain(x, y, length))
        rival = options.timed(looped(lambda: chain(x, y, length), length))
        yield Case(
            f"add {shape}, {mode}",
            options.timed(looped(call, length)),
            {"PyTorch eager": rival},
            {"PyTorch eager": targets[shape]} if shape in targets else {},
        )


def compiled(options: Options, length: int) -> Case:
    """The chain through Inductor, which fuses it; JAX's jit does the same."""
    x, y = torch.zeros(1), torch.ones(1)
    dx, dy = dtorch.zeros(1), dtorch.ones(1)
    jitted = dtorch.jit(lambda x, y: chain(x, y, length), compile=True)
    torch.testing.assert_close(jitted(dx, dy).to_torch(), chain(x, y, length))
    return Case(
        "add (1,), jit(compile=True)",
        options.timed(looped(lambda: jitted(dx, dy).to_torch(), length)),
        {"PyTorch eager": options.timed(looped(lambda: chain(x, y, length), length))},
        limit=COMPILED_LIMIT,
    )


def portable(options: Options, length: int) -> Case:
    x, y = torch.zeros(1), torch.ones(1)
    return Case(
        "add (1,), eager, on the Python executor",
        Rival("portable", 1, options.rival_budget).measure("add", elements=1, operations=length),
        {"PyTorch eager": options.timed(looped(lambda: chain(x, y, length), length))},
        {"PyTorch eager": 10.0},
    )


def two_devices(options: Options, length: int) -> Case:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x, y = (
        make((2,), device_mesh=mesh, placements=[dtorch.Shard(0)])
        for make in (dtorch.zeros, dtorch.ones)
    )
    measure = options.timed(looped(lambda: chain(x, y, length).to_torch(), length))
    rivals = {
        "DTensor, 2 processes": Rival("dtensor", 2, options.rival_budget),
        "DTensor, 1 process": Rival("dtensor", 1, options.rival_budget),
        "JAX eager, 2 devices": Rival("jax", 2, options.rival_budget),
    }
    return Case(
        "add (2,) as Shard(0) on 2 devices, eager",
        measure,
        {name: r.measure("add", elements=2, operations=length) for name, r in rivals.items()},
        {
            "DTensor, 2 processes": 1 / 4,
            "JAX eager, 2 devices": 1 / 10,
        },
    )
