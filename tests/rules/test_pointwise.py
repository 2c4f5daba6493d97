"""Pointwise operations: broadcasting names, and where Partial passes."""

import pytest
import torch
import torch.nn.functional as F
from layouts import AVG, MAX, PAIR, SUM, R, S, case, spread, sweep, values

import dtorch
from dtorch.runtime import Shards
from dtorch.spec import Spec
from dtorch.tensor import Tensor

BF16 = torch.bfloat16
I64 = torch.int64
BOOL = torch.bool

SIZES = [(5, 3), (1, 2), (0, 4)]

UNARY = [
    ("neg", torch.neg, True),
    ("relu", torch.relu, True),
    ("exp", torch.exp, False),
    ("tanh", torch.tanh, False),
    ("sigmoid", torch.sigmoid, False),
    ("silu", F.silu, False),
    ("gelu", F.gelu, False),
    ("abs", torch.abs, True),
    ("floor", torch.floor, True),
    ("sign", torch.sign, True),
    ("clone", torch.clone, True),
    ("square", torch.square, True),
    ("add_scalar", lambda x: x + 1.0, True),
    ("rsub_scalar", lambda x: 1.0 - x, True),
    ("mul_scalar", lambda x: x * 2.0, True),
    ("mul_negative", lambda x: x * -2.0, True),
    ("div_scalar", lambda x: x / 2.0, True),
    ("div_floor", lambda x: torch.div(x, 2.0, rounding_mode="floor"), True),
    ("clamp", lambda x: torch.clamp(x, max=1.0), True),
    ("pow", lambda x: x**2, True),
    ("ge", lambda x: x >= 0.5, True),
    ("masked_fill", lambda x: x.masked_fill(x > 0, 3.0), True),
    ("double", lambda x: x.double(), True),
    ("to_int", lambda x: x.long(), True),
    ("to_bf16", lambda x: x.bfloat16(), True),
    ("isnan", torch.isnan, True),
    ("twice", lambda x: x * x, True),
    ("plus_itself", lambda x: x + x, True),
    ("minus_half", lambda x: x - 0.5 * x, True),
    ("nan_to_num", torch.nan_to_num, True),
    ("logical_not", torch.logical_not, True),
    ("deg2rad", torch.deg2rad, False),
    ("zeros_like", torch.zeros_like, True),
    ("ones_like", torch.ones_like, True),
    ("full_like", lambda x: torch.full_like(x, 2.0), True),
]

BINARY = [
    ("add", torch.add, True),
    ("sub", torch.sub, True),
    ("add_alpha", lambda x, y: torch.add(x, y, alpha=2), True),
    ("mul", torch.mul, True),
    ("div", lambda x, y: x / (y.abs() + 1), False),
    ("maximum", torch.maximum, True),
    ("max_other", torch.max, True),
    ("atan2", torch.atan2, False),
    ("lt", torch.lt, True),
    ("where", lambda x, y: torch.where(x > y, x, y), True),
    ("where_scalar", lambda x, y: torch.where(x > y, x, 2.0), True),
    ("lerp", lambda x, y: torch.lerp(x, y, 0.5), True),
    ("copysign", torch.copysign, True),
]

SHAPES = [
    ((6, 4), (6, 4)),
    ((5, 3), (3,)),
    ((5, 1), (1, 3)),
    ((1, 1), (1, 3)),
    ((4,), ()),
    ((0, 3), (1, 3)),
    ((2, 1, 3), (5, 1)),
]


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize(("name", "function", "exact"), UNARY, ids=lambda v: str(v)[:12])
def test_unary_equals_torch_in_every_layout(name, function, exact, shape):
    sweep(case(name, function, shape, exact=exact, count=5))


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "function", "exact"), BINARY, ids=lambda v: str(v)[:12])
def test_binary_equals_torch_in_every_layout(name, function, exact, shapes):
    sweep(case(name, function, *shapes, exact=exact, count=5, partials=(SUM, MAX)))


OTHER_DTYPES = [
    case("bf16_add", torch.add, ((5, 3), BF16), ((3,), BF16), exact=False),
    case(
        "bf16_mixed", torch.add, ((5, 3), BF16), ((5, 3), torch.float32), exact=False, partials=()
    ),
    case("bf16_half", lambda x: x * 0.5, ((5, 3), BF16)),
    case("int_add", torch.add, ((5, 3), I64), ((5, 3), I64)),
    case("int_sub", torch.sub, ((5, 3), I64), ((3,), I64)),
    case("int_mul", torch.mul, ((5, 3), I64), ((3,), I64)),
    case("int_div", lambda x: x / 4, ((5, 3), I64)),
    case("int_floordiv", lambda x: x // 4, ((5, 3), I64)),
    case("int_plus_float", lambda x: x + 1.5, ((5, 3), I64)),
    case("int_plus_int", lambda x: x + 1, ((5, 3), I64)),
    case("int_neg", torch.neg, ((5, 3), I64)),
    case("int_to_float", lambda x: x.float(), ((5, 3), I64)),
    case("int_to_bool", lambda x: x.bool(), ((5, 3), I64)),
    case("int_add_float", torch.add, ((5, 3), I64), ((5, 3), torch.float32)),
    case("int_mul_float", torch.mul, ((5, 3), I64), ((5, 3), torch.float32)),
    case("bool_and", torch.logical_and, ((5, 3), BOOL), ((3,), BOOL)),
    case("bool_or", lambda x, y: x | y, ((5, 3), BOOL), ((5, 3), BOOL)),
    case("bool_not", torch.logical_not, ((5, 3), BOOL)),
    case("bool_add", torch.add, ((5, 3), BOOL), ((5, 3), BOOL)),
    case("bool_mul", torch.mul, ((5, 3), BOOL), ((5, 3), BOOL)),
    case("bool_to_float", lambda x: x.float(), ((5, 3), BOOL)),
    case("bool_clone", torch.clone, ((5, 3), BOOL)),
    case("where", torch.where, ((5, 3), BOOL), (5, 3), (3,)),
    case("where_int", torch.where, ((5, 3), BOOL), ((5, 3), I64), ((3,), I64)),
    case("complex_mul", torch.mul, ((4, 3), torch.complex64), ((4, 3), torch.complex64)),
    case("complex_conj", lambda x: x.conj() + x, ((4, 3), torch.complex64)),
    case("complex_real", lambda x: x.real, ((4, 3), torch.complex64), fallback=True),
    case("complex_abs", torch.abs, ((4, 3), torch.complex64), exact=False),
    case("addcmul", torch.addcmul, (5, 3), (5, 3), (3,)),
    case("lerp_tensor", torch.lerp, (5, 3), (5, 3), (5, 3), exact=False),
]


@pytest.mark.parametrize("which", OTHER_DTYPES, ids=str)
def test_other_dtypes_equal_torch_in_every_layout(which):
    sweep(which)


def test_sharded_operands_keep_their_layout_without_communication():
    x, y = values((6, 4)), values((4,))
    program = dtorch.jit(torch.add).program(spread(x, PAIR, [S(0)]), spread(y, PAIR, [R]))
    assert program.communication() == []
    assert program.specs[program.outputs[0]].placements == (S(0),)


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        (lambda x: x * 2.0, SUM, R),
        (torch.deg2rad, SUM, R),
        (lambda x: -x, SUM, SUM),
        (lambda x: x + x, SUM, SUM),
        (lambda x: x - x, AVG, AVG),
        (lambda x: x + 1.0, SUM, R),
        (torch.relu, SUM, R),
        (torch.relu, MAX, MAX),
        (torch.neg, MAX, R),
        (lambda x: x * -1.0, MAX, R),
        (torch.clone, AVG, AVG),
        (lambda x: x / 2, AVG, R),
        (lambda x: x + 2 * x, SUM, R),
        (lambda x: torch.sub(x, x, alpha=2), SUM, R),
        (lambda x: x.to(torch.float32, copy=True), MAX, MAX),
        (lambda x: x.double(), SUM, R),
        (lambda x: x.double(), MAX, R),
        (lambda x: x.bfloat16(), SUM, R),
    ],
)
def test_partial_passes_only_where_the_operation_commutes(function, before, after):
    program = dtorch.jit(function).program(spread(values((4, 2)), PAIR, [before]))
    assert program.specs[program.outputs[0]].placements == (after,)


def _parts(first, second, dtype=torch.float32):
    """A partial sum of two given parts."""
    parts = [torch.tensor(p, dtype=dtype) for p in (first, second)]
    spec = Spec.of(parts[0].shape, dtype, PAIR, (SUM,))
    return Tensor._of(spec, Shards(list(parts)))


@pytest.mark.parametrize(
    "function",
    [
        lambda p: p / 0,
        lambda p: p * float("inf"),
        lambda p: p * torch.tensor(float("inf")),
        lambda p: torch.add(p, p, alpha=float("inf")),
        lambda p: p * 3e38,
        lambda p: torch.sign(p * float("inf")),
    ],
)
def test_what_scales_a_partial_value_scales_the_whole(function):
    p = _parts([3.0, -2.0], [-2.0, 3.0])
    for alpha in (1, 1.0):  # the same call with another alpha may run the same program
        torch.add(p, p, alpha=alpha)
    assert torch.equal(function(p).to_torch(), function(torch.ones(2)))


@pytest.mark.parametrize(
    "function", [lambda p: p / 4, lambda p: p / 3, torch.deg2rad, lambda p: torch.true_divide(p, 7)]
)
def test_integer_parts_are_reduced_before_they_become_floats(function):
    """Each part alone is too large for a float32 to hold."""
    first, second = [2**24 + 1, 2**30 + 1], [-(2**24), -(2**30)]
    p = _parts(first, second, I64)
    assert torch.equal(function(p).to_torch(), function(torch.ones(2, dtype=I64)))


@pytest.mark.parametrize(
    "function",
    [
        lambda p: p.float(),
        lambda p: p.double(),
        lambda p: p + torch.zeros(1),
        lambda p: torch.cat([p, torch.zeros(1)]),
        lambda p: torch.where(torch.tensor([True]), p, torch.zeros(1)),
    ],
)
def test_a_wider_dtype_does_not_see_more_than_the_value(function):
    """256 and 1 are the parts of a value that bfloat16 rounds to 256."""
    p = _parts([256.0], [1.0], BF16)
    assert p.tolist() == [256.0]
    assert torch.equal(function(p).to_torch(), function(torch.tensor([256.0], dtype=BF16)))


def test_operands_of_two_dtypes_are_not_partial_together():
    narrow, wide = _parts([256.0], [1.0], BF16), _parts([1.0], [2.0])
    assert (narrow + wide).tolist() == [259.0]
    assert (narrow - wide).tolist() == [253.0]
    assert torch.cat([narrow, wide]).tolist() == [256.0, 3.0]
    assert torch.stack([narrow, wide]).tolist() == [[256.0], [3.0]]
    assert torch.where(torch.tensor([True]), narrow, wide).tolist() == [256.0]


def test_the_smaller_operand_moves():
    big, small = spread(values((64, 64)), PAIR, [S(0)]), spread(values((1, 64)), PAIR, [S(1)])
    program = dtorch.jit(torch.add).program(big, small)
    assert program.specs[program.outputs[0]].placements == (S(0),)
    assert len(program.communication()) == 1
