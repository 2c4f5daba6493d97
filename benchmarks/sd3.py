"""The models of Stable Diffusion 3, unmodified, through functionalize and jit."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import dtorch
from dtorch.models import diffusion
from dtorch.nn import functionalize
from dtorch.parallel import constrain, shard

from .harness import Case, Options, drain
from .models import sd3
from .timing import burst, looped

RIVAL = "PyTorch eager"
LATENCY = {"small": 0.9, "realistic": 1.02}  # of the transformer
CLIENT = 0.1


def cases(options: Options) -> Iterator[Case]:
    for size in ("small",) if options.quick else LATENCY:
        model, args = sd3.transformer(size), sd3.inputs(size)
        targets = {"": LATENCY[size], ", client": CLIENT}
        yield from both(options, f"SD3 transformer, {size}", model, args, targets)
        yield halves(options, f"SD3 transformer, {size}, cfg=2", model, args)
        del model
        for name in sd3.TEXT_ENCODERS:
            encoder, ids = sd3.text_encoder(name, size), sd3.token_ids(name)
            yield from both(options, f"{name}, {size}", encoder, (ids,), {})


def both(
    options: Options,
    name: str,
    model: torch.nn.Module,
    args: tuple[Tensor, ...],
    targets: dict[str, float],
) -> Iterator[Case]:
    """On one device, where every bit has to be PyTorch's."""
    params, apply = functionalize(model)
    forward = dtorch.jit(lambda params, *args: apply(params, *args, return_dict=False)[0])
    params, placed = shard((params, args), dtorch.DeviceMesh("cpu", [0]))
    theirs = torch.inference_mode()(lambda: model(*args, return_dict=False)[0])
    assert torch.equal(forward(params, *placed).to_torch(), theirs())
    latency = looped(lambda: forward(params, *placed).to_torch())
    client = burst(lambda: forward(params, *placed), drain, length=3)
    for kind, run in (("", latency), (", client", client)):
        bound = {RIVAL: targets[kind]} if kind in targets else {}
        yield Case(name + kind, options.timed(run), {RIVAL: options.timed(looped(theirs))}, bound)


def halves(options: Options, name: str, model: torch.nn.Module, args: tuple[Tensor, ...]) -> Case:
    """On two devices, each of which computes one half of the batch."""
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("cfg",))
    params, apply = functionalize(model)

    def forward(params: Any, *args: Tensor) -> Tensor:
        args = tuple(constrain(x, dtorch.P(diffusion.BATCH)) for x in args)
        return apply(params, *args, return_dict=False)[0]

    jitted = dtorch.jit(forward)
    params, placed = shard((params, args), mesh)
    theirs = torch.inference_mode()(lambda: model(*args, return_dict=False)[0])
    torch.testing.assert_close(jitted(params, *placed).to_torch(), theirs(), rtol=1e-3, atol=1e-3)
    run = looped(lambda: jitted(params, *placed).to_torch())
    return Case(name, options.timed(run), {RIVAL: options.timed(looped(theirs))})
