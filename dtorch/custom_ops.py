"""The operations that dtorch adds to PyTorch's: products whose dims must not be flattened first.

PyTorch's backward of a linear layer flattens batch and sequence before it multiplies, which
would gather a tensor that is sharded over both. `fold_mm` is that product with its dims kept
apart; every device flattens its own shard.
"""

from __future__ import annotations

import torch

_library = torch.library.Library("dtorch", "DEF")
_library.define("fold_mm(Tensor left, Tensor right) -> Tensor")


def _fold_mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.mm(left.flatten(0, -2).t(), right.flatten(0, -2))


_library.impl("fold_mm", _fold_mm, "CompositeImplicitAutograd")

fold_mm = torch.ops.dtorch.fold_mm.default
"""``... m, ... k -> m k``: the matrix product over all leading dims."""
