"""The operations that dtorch adds to PyTorch's.

PyTorch's backward of a linear layer flattens batch and sequence before it multiplies, which
would gather a tensor that is sharded over both. `fold_mm` is that product with its dims kept
apart; every device flattens its own shard.

PyTorch checks what it has factored by an operation without results. `checked` gives what it has
checked, so that a failure is one of the values that are computed with it.
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


_library.define("checked(Tensor[] values, Tensor info, str name, bool is_matrix) -> Tensor[]")


def _checked(
    values: list[torch.Tensor], info: torch.Tensor, name: str, is_matrix: bool
) -> list[torch.Tensor]:
    torch.ops.aten._linalg_check_errors(info, name, is_matrix=is_matrix)
    return values


_library.impl("checked", _checked, "CompositeImplicitAutograd")

checked = torch.ops.dtorch.checked.default
"""The values, where `info` says that they have been computed; otherwise PyTorch's error."""
