"""Fourier transforms: the transformed dims must be whole, the others pass."""

from __future__ import annotations

import torch

from .sharding import OpCall, Sharding, dim_names, rule

aten = torch.ops.aten


@rule(aten._fft_r2c, aten._fft_c2c, aten._fft_c2r)
def transform(call: OpCall) -> Sharding:
    """The dims that are transformed keep their place; MKL refuses an empty tensor."""
    names = dim_names(call.tensors[0].shape)
    along = {d % len(names) for d in call["dim"]}
    kept = tuple(None if d in along else n for d, n in enumerate(names))
    return Sharding((kept,), (kept,), filled=frozenset(n for n in kept if n))
