"""Linear algebra that is recorded whole, because PyTorch decomposes it otherwise for subclasses.

Given to a tensor subclass, these pick a kernel that also computes vectors, whose values differ in
the last place. Batch dims stay sharded; the two dims of a matrix must be whole.
"""

from __future__ import annotations

import torch

from .sharding import OpCall, Sharding, dim_names, rule

aten = torch.ops.aten


@rule(aten.linalg_eigvalsh, aten.linalg_svdvals, aten.linalg_cond.default)
def values_of_matrices(call: OpCall) -> Sharding:
    """``... m! n! -> ... k``: numbers for each matrix of a batch."""
    names = dim_names(call.tensors[0].shape)
    batch = names[:-2]
    outputs = tuple((*batch, *(None,) * (len(m.shape) - len(batch))) for m in call.results)
    return Sharding((names,), outputs, whole=frozenset(n for n in names[-2:] if n))
