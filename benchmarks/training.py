"""An eager training step: a linear layer, its loss, `backward()`, and a step of Adam."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import dtorch

from .harness import Case, Options
from .timing import looped

TARGET = 3.0


def cases(options: Options) -> Iterator[Case]:
    ours, theirs = steps(dtorch.Tensor), steps(torch.clone)
    for _ in range(3):
        assert torch.equal(ours().to_torch(), theirs())
    yield Case(
        "Adam step of Linear(32, 5), eager",
        options.timed(looped(lambda: ours().to_torch())),
        {"PyTorch eager": options.timed(looped(theirs))},
        {"PyTorch eager": TARGET},
    )


def steps(wrap: Callable[[Tensor], Any]) -> Callable[[], Any]:
    """Returns a function that makes one step and returns its loss."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(wrap(torch.randn(5, 32, generator=generator)))
    bias = torch.nn.Parameter(wrap(torch.zeros(5)))
    x = wrap(torch.randn(16, 32, generator=generator))
    optimizer = torch.optim.Adam([weight, bias])

    def step() -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.linear(x, weight, bias).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
