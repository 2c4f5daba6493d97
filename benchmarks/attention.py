"""scaled_dot_product_attention, one call after another: the time of one, with one fetch at the end.

Shapes: B batch, H heads, L tokens, E head size.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dtorch

from .harness import Case, Options
from .timing import looped

SHAPES_BHLE = ((1, 4, 16, 16), (4, 8, 128, 64), (2, 8, 512, 64), (1, 16, 1024, 64))
LENGTH = 20
TARGET = 1.03


def chain(q_BHLE: Tensor, k_BHLE: Tensor, v_BHLE: Tensor) -> Tensor:
    for _ in range(LENGTH):
        q_BHLE = F.scaled_dot_product_attention(q_BHLE, k_BHLE, v_BHLE)
    return q_BHLE


def cases(options: Options) -> Iterator[Case]:
    jitted = dtorch.jit(chain)
    for shape in SHAPES_BHLE[:1] if options.quick else SHAPES_BHLE:
        qkv = [torch.randn(shape) for _ in range(3)]
        placed = [dtorch.Tensor(x) for x in qkv]
        for mode, function in (("eager", chain), ("jit", jitted)):
            yield case(options, f"attention {shape}, {mode}", function, qkv, placed)


def case(
    options: Options,
    name: str,
    function: Callable[..., Any],
    qkv: list[Tensor],
    placed: list[dtorch.Tensor],
) -> Case:
    assert torch.equal(function(*placed).to_torch(), chain(*qkv))
    return Case(
        name,
        options.timed(looped(lambda: function(*placed).to_torch(), LENGTH)),
        {"PyTorch eager": options.timed(looped(lambda: chain(*qkv), LENGTH))},
        {"PyTorch eager": TARGET},
    )
