"""Reductions over dims, and operations along dims that keep the shape."""

import pytest
import torch
from layouts import AVG, MAX, MIN, PAIR, SUM, TRIPLE, R, S, case, spread, sweep, values

import dtorch

BF16 = torch.bfloat16
I64 = torch.int64
BOOL = torch.bool
SIZES = [(6, 4), (5, 3), (1, 2)]

OVER_DIMS = [
    ("sum", lambda x: x.sum(), True),
    ("sum_0", lambda x: x.sum(0), True),
    ("sum_1", lambda x: x.sum(-1, keepdim=True), True),
    ("sum_both", lambda x: x.sum((0, 1)), True),
    ("sum_double", lambda x: x.sum(0, dtype=torch.float64), True),
    ("mean", lambda x: x.mean(), False),
    ("mean_0", lambda x: x.mean(0), False),
    ("mean_1", lambda x: x.mean(1, keepdim=True), False),
    ("amax", lambda x: x.amax(), True),
    ("amax_0", lambda x: x.amax(0), True),
    ("amin_1", lambda x: x.amin(1, keepdim=True), True),
    ("max", lambda x: x.max(), True),
    ("max_0", lambda x: x.max(0), True),
    ("min_1", lambda x: x.min(1), True),
    ("any", lambda x: (x > 1.9).any(0), True),
    ("any_of_floats", lambda x: x.any(0), True),
    ("all", lambda x: (x > -1.9).all(1), True),
    ("all_of_floats", lambda x: x.all(1), True),
    ("all_whole", lambda x: (x > -1.9).all(), True),
    ("prod", lambda x: x.prod(0), False),
    ("argmax", lambda x: x.argmax(), True),
    ("argmax_0", lambda x: x.argmax(0), True),
    ("argmin_1", lambda x: x.argmin(1, keepdim=True), True),
    ("var_0", lambda x: x.var(0, correction=0), False),
    ("std", lambda x: x.std(correction=0), False),
    ("var_mean", lambda x: torch.var_mean(x, 1, correction=0), False),
    ("logsumexp", lambda x: x.logsumexp(0), False),
    ("norm", lambda x: torch.linalg.vector_norm(x), False),
    ("norm_1", lambda x: x.norm(dim=1), False),
    ("count_nonzero", lambda x: x.count_nonzero(0), True),
    ("median", lambda x: x.median(), True),
    ("nansum", lambda x: x.nansum(0), True),
    ("softmax", lambda x: x.softmax(-1), False),
    ("softmax_0", lambda x: x.softmax(0), False),
    ("log_softmax", lambda x: x.log_softmax(1), False),
    ("cumsum_0", lambda x: x.cumsum(0), True),
    ("cumprod_1", lambda x: x.cumprod(1), False),
    ("cummax", lambda x: x.cummax(0), True),
    ("logcumsumexp", lambda x: x.logcumsumexp(1), False),
    ("sort", lambda x: x.sort(dim=0, stable=True), True),
    ("argsort", lambda x: x.argsort(dim=1, stable=True), True),
    ("flip", lambda x: x.flip(0), True),
    ("roll", lambda x: x.roll(1, 1), True),
    ("roll_all", lambda x: x.roll(1), True),
]


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize(("name", "function", "exact"), OVER_DIMS, ids=lambda v: str(v)[:16])
def test_equals_torch_in_every_layout(name, function, exact, shape):
    sweep(case(name, function, shape, exact=exact, count=5))


OTHERS = [
    case("sum_empty", lambda x: x.sum(0), (0, 3)),
    case("sum_empty_other", lambda x: x.sum(1), (0, 3)),
    case("mean_empty", lambda x: x.mean(0), (0, 3)),
    case("amax_other", lambda x: x.amax(1), (0, 3)),
    case("all_empty", lambda x: x.all(0), ((0, 3), BOOL)),
    case("softmax_empty", lambda x: x.softmax(1), (0, 3)),
    case("sum_scalar", lambda x: x.sum(), ()),
    case("softmax_scalar", lambda x: x.softmax(0), ()),
    case("argmax_scalar", lambda x: x.argmax(), ()),
    case("sum_int", lambda x: x.sum(0), ((5, 3), I64)),
    case("sum_int32", lambda x: x.sum(0), ((5, 3), torch.int32)),
    case("sum_bool", lambda x: x.sum(0), ((5, 3), BOOL)),
    case("amax_int", lambda x: x.amax(0), ((5, 3), I64)),
    case("any_int", lambda x: x.any(0), ((5, 3), I64)),
    case("all_int", lambda x: x.all(0), ((6, 3), I64)),
    case("any_bool", lambda x: x.any(0), ((6, 3), BOOL)),
    case("all_bool", lambda x: x.all(), ((6, 3), BOOL)),
    case("sum_bf16", lambda x: x.sum(0), ((5, 3), BF16), exact=False),
    case("softmax_bf16", lambda x: x.softmax(1), ((5, 3), BF16), exact=False),
    case("sum_3d", lambda x: x.sum((0, 2)), (4, 3, 5)),
    case("mean_3d", lambda x: x.mean((0, 2), keepdim=True), (4, 6, 2), exact=False),
    case("sum_complex", lambda x: x.sum(0), ((4, 3), torch.complex64)),
    case("softmax_backward", lambda g, y: torch.ops.aten._softmax_backward_data(
        g, y, -1, torch.float32), (5, 3), (5, 3), exact=False),
    case("log_softmax_backward", lambda g, y: torch.ops.aten._log_softmax_backward_data(
        g, y, 0, torch.float32), (5, 3), (5, 3), exact=False),
    case("kthvalue", lambda x: x.kthvalue(2, 0), torch.arange(15.0).reshape(5, 3)),
    case("mode", lambda x: x.mode(1), ((5, 3), I64)),
    case("median_dim", lambda x: x.median(0), torch.arange(15.0).reshape(5, 3)),
    case("topk", lambda x: x.topk(2, 1), torch.arange(15.0).reshape(5, 3)),
]  # fmt: skip


@pytest.mark.parametrize("which", OTHERS, ids=str)
def test_other_kinds_equal_torch_in_every_layout(which):
    sweep(which)


@pytest.mark.parametrize(
    ("function", "mesh", "before", "after", "communicates"),
    [
        (lambda x: x.sum(0), PAIR, S(0), SUM, False),
        (lambda x: x.sum(0), PAIR, S(1), S(0), False),
        (lambda x: x.sum(0), PAIR, SUM, SUM, False),
        (lambda x: x.sum(0), PAIR, AVG, AVG, False),
        (lambda x: x.sum(0), PAIR, MAX, R, True),
        (lambda x: x.sum(0), TRIPLE, S(0), SUM, False),
        (lambda x: x.mean(0), PAIR, S(0), AVG, False),
        (lambda x: x.mean(0), TRIPLE, S(0), R, True),  # 4 over 3 devices: a sum, divided
        (lambda x: x.amax(0), PAIR, S(0), MAX, False),
        (lambda x: x.amin(0), PAIR, MIN, MIN, False),
        (lambda x: x.amax(0), PAIR, MIN, R, True),
        (lambda x: x.softmax(0), PAIR, S(1), S(1), False),
        (lambda x: x.softmax(1), PAIR, S(0), S(0), False),
    ],
)
def test_what_a_reduction_leaves(function, mesh, before, after, communicates):
    program = dtorch.jit(function).program(spread(values((4, 2)), mesh, [before]))
    assert program.specs[program.outputs[0]].placements == (after,)
    assert bool(program.communication()) == communicates


@pytest.mark.parametrize("function", [torch.var, torch.std, torch.var_mean, torch.std_mean])
def test_a_piece_without_elements_is_warned_of_nowhere(function, capfd):
    x = values((4, 2))
    found, expected = function(spread(x, TRIPLE, [S(1)]), 0), function(x, 0)
    if isinstance(found, dtorch.Tensor):
        found, expected = (found,), (expected,)
    torch.testing.assert_close(tuple(f.to_torch() for f in found), tuple(expected))
    assert all(f.placements == [S(0)] for f in found)
    assert "degrees of freedom" not in capfd.readouterr().err
