"""Tracing: the first call of a jitted Llama (hidden 64, the example's forward) until it returns."""

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import dtorch

from .example import LLAMA, Saved, Tree, placed, save, tensor_parallel
from .harness import Case, Options
from .models.llama import SIZES, Size
from .timing import Measure, seconds_of

LIMIT, BASE, TARGET = 2.0, "dtorch, 8 layers", 3.0
TOKENS = 16


def cases(options: Options) -> Iterator[Case]:
    numbers = (2, 8) if options.quick else (2, 8, 32, 80)
    with tempfile.TemporaryDirectory() as folder:
        saved = {n: save(size(n), Path(folder) / str(n)) for n in numbers}
        for num_devices in (1, 2):
            yield from depths({n: tracing(s, num_devices) for n, s in saved.items()}, num_devices)


def depths(measures: dict[int, Measure], num_devices: int) -> Iterator[Case]:
    for num_layers, measure in measures.items():
        deep = num_layers == 80
        yield Case(
            f"tracing {num_layers} layers, tp={num_devices}",
            measure,
            {BASE: measures[8]} if deep else {},
            {BASE: TARGET} if deep else {},
            LIMIT if deep else None,
        )


def size(num_layers: int) -> Size:
    return dataclasses.replace(SIZES["tiny"], layers=num_layers, tokens=TOKENS)


def tracing(saved: Saved, num_devices: int) -> Measure:
    mesh, config = tensor_parallel(num_devices), saved.config
    params = saved.params(mesh)
    ids = placed(torch.ones(1, TOKENS, dtype=torch.int64), mesh)

    def measure() -> float:
        def forward(params: Tree, ids: Tensor) -> Tensor:  # a new one, which no cache knows
            return LLAMA.forward(config, params, ids)

        seconds = seconds_of(lambda: dtorch.jit(forward)(params, ids))
        dtorch.synchronize()
        return seconds

    return measure
