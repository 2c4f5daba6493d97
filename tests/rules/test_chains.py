"""Chains of operations drawn at random: what one rule leaves, the next has to take."""

import random

import pytest
import torch
import torch.nn.functional as F
from layouts import MESHES, check, check_program, placements_of, sampled, spread, values

import dtorch

UNARY = [
    torch.relu,
    torch.neg,
    torch.tanh,
    lambda x: x * 0.5,
    lambda x: x + 1.0,
    lambda x: x.clone(),
    lambda x: x.double().float(),
    lambda x: x.unsqueeze(0),
    lambda x: x.reshape(-1),
    lambda x: x.flip(-1) if x.ndim else x,
    lambda x: x.transpose(0, -1) if x.ndim else x,
    lambda x: x.sum(0, keepdim=True) if x.ndim else x,
    lambda x: x.mean(-1) if x.ndim else x,
    lambda x: x.amax(0) if x.ndim and x.shape[0] else x,
    lambda x: x.amin(-1, keepdim=True) if x.ndim and x.shape[-1] else x,
    lambda x: x.softmax(-1) if x.ndim else x,
    lambda x: x.cumsum(0) if x.ndim else x,
    lambda x: x[1:] if x.ndim and x.shape[0] > 1 else x,
    lambda x: x[..., ::2] if x.ndim else x,
    lambda x: x[0] if x.ndim > 1 and x.shape[0] else x,
    lambda x: x.reshape(2, -1) if x.ndim and x.numel() % 2 == 0 and x.numel() else x,
    lambda x: x.expand(3, *x.shape),
    lambda x: F.layer_norm(x, x.shape[-1:]) if x.ndim and x.numel() else x,
    lambda x: x.squeeze(),
    lambda x: torch.where(x > 0, x, -x),
    lambda x: torch.zeros_like(x) + x,
    lambda x: x.sort(dim=-1, stable=True)[0] if x.ndim else x,
]

BINARY = [
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    lambda x, y: torch.stack([x, y]) if x.shape == y.shape else x + x,
    lambda x, y: torch.cat([x, y]) if x.ndim and x.ndim == y.ndim and x.shape[1:] == y.shape[1:]
    else x - x.sum(),
    lambda x, y: x @ y.transpose(-1, -2)
    if x.ndim == 2 and y.ndim == 2 and x.shape[1] == y.shape[1] else x,
    lambda x, y: x @ y if x.ndim == 2 and y.ndim == 2 and x.shape[1] == y.shape[0] else y,
    lambda x, y: x + y.sum(),
]  # fmt: skip


def _draw(drawn):
    """A function of two tensors, as a list of steps over what was computed before."""
    steps = []
    for number in range(drawn.randint(3, 6)):
        known = number + 2
        if drawn.random() < 0.65:
            steps.append((drawn.choice(UNARY), (drawn.randrange(max(0, known - 3), known),)))
        else:
            operands = (drawn.randrange(known), drawn.randrange(max(0, known - 2), known))
            steps.append((drawn.choice(BINARY), operands))
    return steps


def _run(steps, x, y):
    found = [x, y]
    for function, operands in steps:
        try:
            found.append(function(*(found[i] for i in operands)))
        except (RuntimeError, IndexError):  # shapes that do not broadcast
            found.append(found[operands[0]])
        if found[-1].numel() > 500:
            found[-1] = found[-1].reshape(-1)[:100]
    return found[2:]


SHAPES = [((5, 3), (5, 3)), ((4, 6), (6,)), ((2, 3, 4), (4,)), ((1, 2), (3, 2)), ((0, 3), (1, 3))]


@pytest.mark.parametrize("seed", range(sampled(60)))
def test_a_chain_equals_torch(seed):
    drawn = random.Random(seed)
    steps = _draw(drawn)
    inputs = [values(s, seed=i) for i, s in enumerate(drawn.choice(SHAPES))]
    expected = _run(steps, *inputs)
    for _ in range(6):
        mesh = drawn.choice(MESHES)
        layouts = [drawn.choice(placements_of(t.ndim, mesh)) for t in inputs]
        tensors = [spread(t, mesh, p) for t, p in zip(inputs, layouts, strict=True)]
        jitted = dtorch.jit(lambda x, y: _run(steps, x, y))
        check_program(jitted.program(*tensors))
        for found, value in zip(jitted(*tensors), expected, strict=True):
            check(found, value, rtol=1e-4, atol=1e-4)
        for found, value in zip(_run(steps, *tensors), expected, strict=True):
            check(found, value, rtol=1e-4, atol=1e-4)
