"""Matrix products, with contracted dims that leave Partial and biases that are added once."""

import pytest
import torch
import torch.nn.functional as F
from layouts import AVG, PAIR, SUM, R, S, case, spread, sweep, values

import dtorch
from dtorch.runtime import Shards
from dtorch.spec import Spec
from dtorch.tensor import Tensor

BF16 = torch.bfloat16
I64 = torch.int64

CASES = [
    case("linear", F.linear, (5, 4), (3, 4)),
    case("linear_bias", F.linear, (5, 4), (3, 4), (3,)),
    case("linear_3d", F.linear, (2, 3, 4), (5, 4), (5,)),
    case("linear_vector", F.linear, (4,), (3, 4), (3,)),
    case("linear_one_row", F.linear, (5, 4), (4,)),
    case("linear_empty", F.linear, (0, 4), (3, 4), (3,)),
    case("linear_short", F.linear, (1, 2), (1, 2), (1,)),
    case("linear_wide_bias", F.linear, (5, 4), (3, 4), (1,)),
    case("linear_bf16", F.linear, ((5, 4), BF16), ((3, 4), BF16), ((3,), BF16), exact=False,
         partials=()),
    case("mm", torch.mm, (5, 4), (4, 3)),
    case("mm_int", torch.mm, ((5, 4), I64), ((4, 3), I64)),
    case("mm_contract_nothing", torch.mm, (5, 0), (0, 3)),
    case("mm_contract_one", torch.mm, (5, 1), (1, 3)),
    case("mm_t", lambda x, y: x.t() @ y, (4, 5), (4, 3)),
    case("bmm", torch.bmm, (2, 3, 4), (2, 4, 5)),
    case("mv", torch.mv, (5, 4), (4,)),
    case("dot", torch.dot, (5,), (5,)),
    case("vdot", torch.vdot, ((5,), torch.complex64), ((5,), torch.complex64)),
    case("outer", torch.outer, (5,), (3,)),
    case("matmul", torch.matmul, (5, 4), (4, 3)),
    case("matmul_batch", torch.matmul, (2, 3, 4), (4, 5)),
    case("matmul_batches", torch.matmul, (2, 1, 3, 4), (3, 4, 2)),
    case("matmul_broadcast", torch.matmul, (1, 3, 4), (2, 4, 5)),
    case("matmul_vector_left", torch.matmul, (4,), (2, 4, 3)),
    case("matmul_vector_right", torch.matmul, (2, 3, 4), (4,)),
    case("matmul_vectors", torch.matmul, (4,), (4,)),
    case("matmul_square", lambda x: x @ x, (4, 4)),
    case("addmm", torch.addmm, (3,), (5, 4), (4, 3)),
    case("addmm_full", torch.addmm, (5, 3), (5, 4), (4, 3)),
    case("addmm_column", torch.addmm, (5, 1), (5, 4), (4, 3)),
    case("addmm_scaled", lambda b, x, y: torch.addmm(b, x, y, beta=2, alpha=0.5),
         (3,), (5, 4), (4, 3)),
    case("baddbmm", torch.baddbmm, (3, 1), (2, 3, 4), (2, 4, 5)),
    case("addmv", torch.addmv, (5,), (5, 4), (4,)),
    case("einsum", lambda x, y: torch.einsum("bij,bjk->bik", x, y), (2, 3, 4), (2, 4, 5)),
    case("einsum_outer", lambda x, y: torch.einsum("ij,kl->ijkl", x, y), (2, 3), (2, 4)),
    case("einsum_heads", lambda x, y: torch.einsum("bld,hdk->bhlk", x, y), (2, 3, 4), (2, 4, 2)),
    case("bilinear_chain", lambda x, y, z: x @ y @ z, (5, 4), (4, 6), (6, 2)),
    case("fold_mm", torch.ops.dtorch.fold_mm, (2, 3, 4), (2, 3, 5)),
]  # fmt: skip


@pytest.mark.parametrize("which", CASES, ids=str)
def test_equals_torch_in_every_layout(which):
    sweep(which)


def _placed(function, *pairs):
    tensors = [spread(values(shape), PAIR, [p]) for shape, p in pairs]
    program = dtorch.jit(function).program(*tensors)
    return program.specs[program.outputs[0]].placements[0], len(program.communication())


def test_column_parallel_does_not_communicate():
    assert _placed(F.linear, ((5, 4), R), ((6, 4), S(0)), ((6,), S(0))) == (S(1), 0)


def test_row_parallel_leaves_a_partial_sum():
    assert _placed(F.linear, ((5, 4), S(1)), ((6, 4), S(1)), ((6,), R)) == (SUM, 0)


def test_data_parallel_does_not_communicate():
    assert _placed(F.linear, ((5, 4), S(0)), ((6, 4), R), ((6,), R)) == (S(0), 0)


def test_partial_is_reduced_before_a_product():
    assert _placed(torch.mm, ((5, 4), SUM), ((4, 3), R)) == (R, 1)
    assert _placed(torch.mm, ((5, 4), R), ((4, 3), AVG)) == (R, 1)
    assert _placed(torch.mm, ((5, 4), SUM), ((4, 3), SUM)) == (R, 2)
    assert _placed(F.linear, ((5, 4), SUM), ((3, 4), R), ((3,), R)) == (R, 1)


def test_a_partial_argument_meets_inf_as_a_whole():
    """The parts 3 and -2 of a one, times inf, would cancel to nan."""
    one, whole = torch.ones(1, 1), torch.full((1, 1), float("inf"))
    spec = Spec.of((1, 1), torch.float32, PAIR, (SUM,))
    p = Tensor._of(spec, Shards([3 * one, -2 * one]))
    for product in (torch.mm, torch.matmul, F.linear, torch.ops.dtorch.fold_mm):
        assert product(p, whole).tolist() == product(whole, p).tolist() == [[float("inf")]]
    assert torch.bmm(p[None], whole[None]).tolist() == [[[float("inf")]]]
    assert torch.mv(p, whole[0]).tolist() == torch.outer(p[0], whole[0])[0].tolist()
    assert torch.dot(p[0], whole[0]).item() == float("inf")
    assert torch.addmm(one, p, whole).tolist() == [[float("inf")]]
