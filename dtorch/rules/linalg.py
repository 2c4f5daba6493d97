"""Linear algebra: batch dims stay sharded, and so do the columns of a right-hand side.

The two dims of a matrix must be whole. Composite operations whose kernels check what they have
factored (`linalg_inv`, `linalg_solve`, ...) are recorded whole: the check runs on the device, and
its error is that of the instruction. So are those for which PyTorch picks another kernel when it
is given a tensor subclass, whose values differ in the last place.
"""

from __future__ import annotations

import torch

from .pointwise import pointwise
from .sharding import OpCall, Sharding, broadcast_names, notation, parse, replicated, rule

aten = torch.ops.aten

notation("... 1 1 -> ... 1", aten.linalg_eigvalsh, aten.linalg_svdvals)
notation("... 1 1 -> ...", aten.linalg_cond.default)
notation("... 1 1 -> ... 1 1", aten.linalg_inv, aten.linalg_cholesky, aten.linalg_matrix_exp)
notation("... 1 1 -> ... 1 1", aten.cholesky_inverse, "aten::cholesky")  # before torch 2.14
notation("... 1 1 -> ... 1 1", "aten::linalg_matrix_sqrth")  # since torch 2.14
notation("... 1 1 -> ... 1 1, ... 1 1", aten.linalg_qr, "aten::linalg_polar")  # the same
notation("... 1 1 -> ... 1 1, ...", aten.linalg_inv_ex, aten.linalg_cholesky_ex)
notation("... 1 1 -> ... 1 1, ... 1, ... 1 1", aten._linalg_svd)
notation("... 1 1 -> ... 1, ... 1 1", aten.linalg_eig, aten._linalg_eigh)
notation("... 1 1 -> ... 1 1, ... 1 1, ... 1 1", aten.linalg_lu)
notation("... 1 1 -> ... 1 1, ... 1, ...", aten.linalg_lu_factor_ex, aten.linalg_ldl_factor_ex)
notation("... 1 1 -> ... 1 1, ... 1", aten.linalg_lu_factor, aten.linalg_ldl_factor)
notation("... 1 1 -> ..., ... 1 1, ... 1", aten._linalg_det)
notation("... 1 1 -> ..., ..., ... 1 1, ... 1", aten._linalg_slogdet)
notation("... 1 1, ..., ... -> ... 1 1", aten.linalg_pinv.atol_rtol_tensor)
notation("... 1 1, ... 1 -> ... 1 1, ... 1 1, ... 1 1", aten.lu_unpack)
notation("... 1 1, ... 1 -> ... 1 1", aten.linalg_householder_product)
notation("... 1 1, ... 1, ... 1 1 -> ... 1 1", aten.ormqr)
notation("... 1 n, ... 1 1 -> ... 1 n", aten.cholesky_solve)
notation("... 1 n, ... 1 1 -> ... 1 n, ... 1 1", aten.triangular_solve)
notation("... 1 1, ... 1, ... 1 n -> ... 1 n", aten.linalg_ldl_solve)

rule(aten.linalg_tensorinv)(replicated)


def _with_right_hand_side(call: OpCall, left: str, right: str) -> Sharding:
    """A matrix on the left of its unknown splits the unknown's columns; on the right, its rows."""
    return parse(left if call["left"] else right, call)


@rule(aten.linalg_solve_triangular)
def solve_triangular(call: OpCall) -> Sharding:
    """``... 1 1, ... 1 n -> ... 1 n``, or with the unknown on the left."""
    return _with_right_hand_side(call, "... 1 1, ... 1 n -> ... 1 n", "... 1 1, ... n 1 -> ... n 1")


@rule(aten.linalg_lu_solve)
def lu_solve(call: OpCall) -> Sharding:
    """``... 1 1, ... 1, ... 1 n -> ... 1 n``, or with the unknown on the left."""
    return _with_right_hand_side(
        call, "... 1 1, ... 1, ... 1 n -> ... 1 n", "... 1 1, ... 1, ... n 1 -> ... n 1"
    )


@rule(aten.linalg_solve, aten._linalg_solve_ex)
def solve(call: OpCall) -> Sharding:
    """``... 1 1, ... 1 n -> ... 1 n`` and the factors; a vector for each matrix has no n."""
    matrix, right = (t.shape for t in call.tensors)
    factors = ", ... 1 1, ... 1, ..."
    if len(right) == 1 or tuple(right) == tuple(matrix[:-1]):
        return parse(f"... 1 1, ... 1 -> ... 1{factors}", call)
    return _with_right_hand_side(
        call, f"... 1 1, ... 1 n -> ... 1 n{factors}", f"... 1 1, ... n 1 -> ... n 1{factors}"
    )


@rule(aten.linalg_cross)
def cross(call: OpCall) -> Sharding:
    """Pointwise but for the dim of the three components."""
    result = call.results[0].shape
    whole = frozenset({f"d{call['dim'] % len(result)}"})
    inputs = tuple(broadcast_names(t.shape, result) for t in call.tensors)
    return Sharding(inputs, pointwise(call).outputs, whole=whole)
