"""SD3's transformer, unmodified from diffusers, through functional_call and jit, on one device."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import dtorch

from .example import state
from .harness import Case, Options, drain
from .models.sd3 import SIZES, inputs, transformer
from .timing import burst, looped


def cases(options: Options) -> Iterator[Case]:
    for size, numbers in SIZES.items():
        if size == "small" or not options.quick:
            yield from both(options, size, transformer(*numbers), inputs(*numbers[1:]))


def both(
    options: Options, size: str, model: torch.nn.Module, args: tuple[Tensor, ...]
) -> Iterator[Case]:
    @dtorch.jit
    def forward(params: Any, *args: Tensor) -> Any:
        keywords = {"return_dict": False}
        return torch.func.functional_call(model, dict(params), args, keywords)[0]

    mesh = dtorch.DeviceMesh("cpu", [0])
    params, placed = dtorch.parallel.shard((dict(state(model)), args), mesh)
    expected = model(*args, return_dict=False)[0]
    assert torch.equal(forward(params, *placed).to_torch(), expected)

    latency = looped(lambda: forward(params, *placed).to_torch())
    client = burst(lambda: forward(params, *placed), drain, length=3)
    rival = looped(torch.inference_mode()(lambda: model(*args)))
    for name, run in (("", latency), (", client", client)):
        rivals = {"PyTorch eager": options.timed(rival)}
        yield Case(f"SD3 transformer, {size}{name}", options.timed(run), rivals)
