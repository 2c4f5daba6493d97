"""What only moves ranges of a split dim: each device takes what it is to hold, and no more."""

import pytest
import torch
import torch.nn.functional as F
from layouts import OBLONG, PAIR, QUAD, SQUARE, SUM, TRIPLE, R, S, sample, spread, values

import dtorch
from dtorch.errors import PlacementError
from dtorch.program import Redistribute
from dtorch.redistribution import Collective, Movement, Segment, permute
from dtorch.spec import Spec

ONE = dtorch.DeviceMesh("cpu", [0])
CALLS = {
    "from": lambda x: x[:, 1:],
    "to": lambda x: x[:, :-1],
    "within": lambda x: x[:, 2:-2],
    "last": lambda x: x[:, -1:],
    "nothing": lambda x: x[:, 2:2],
    "narrow": lambda x: x.narrow_copy(1, 1, 2),
    "roll": lambda x: x.roll(1, 1),
    "roll_back": lambda x: x.roll(-3, 1),
    "roll_both": lambda x: x.roll((1, 2), (0, 1)),
    "roll_flat": lambda x: x.roll(2),
    "pad": lambda x: F.pad(x, (0, 0, 2, 1), value=3.0),
    "pad_less": lambda x: F.pad(x, (0, 0, -1, 4)),
    "pad_both": lambda x: F.pad(x, (1, 1, 2, 2)),
    "flip": lambda x: x.flip(1),
    "flip_both": lambda x: x.flip((0, -2)),
    "cat": lambda x: torch.cat([x, x[:, :2], x], 1),
    "cat_more": lambda x: torch.cat([x[:, :1].double(), x], 1),
    "join": lambda x: torch.cat([x, x], 1),
    "shift": lambda x: x[:, 1:] * x[:, :-1],
}
LAYOUTS = [
    (PAIR, [S(1)]),
    (TRIPLE, [S(1)]),
    (QUAD, [S(1)]),
    (SQUARE, [S(1), S(1)]),
    (SQUARE, [S(0), S(1)]),
    (OBLONG, [S(1), SUM]),
]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [9, 5, 3])
def test_equals_torch(name, size):
    call = CALLS[name]
    x = values((4, size, 3))
    expected = call(x)
    for mesh, placements in sample(LAYOUTS, 4, len(name) + size):
        given = spread(x, mesh, placements)
        for found in (call(given), dtorch.jit(call)(given)):
            torch.testing.assert_close(found.to_torch(), expected, rtol=1e-6, atol=1e-6)
            assert found.stride() == expected.stride()


@pytest.mark.parametrize("name", CALLS)
def test_gradients_equal_torch(name):
    x = values((4, 9, 3))

    def loss(x):
        result = CALLS[name](x)
        return (result * torch.arange(result.numel()).view(result.shape).sin()).sum()

    try:
        expected = torch.func.grad(loss)(x)
    except RuntimeError as error:
        if name != "narrow" or "derivative for aten::narrow_copy" not in str(error):
            raise
        pytest.skip(f"torch {torch.__version__}: {error}")
    for mesh, placements in sample(LAYOUTS[:5], 3, len(name)):
        found = dtorch.grad(loss)(spread(x, mesh, placements))
        torch.testing.assert_close(found.to_torch(), expected, rtol=1e-6, atol=1e-6)
        assert found.placements == placements


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("name", ["from", "roll", "pad", "flip", "cat", "last"])
def test_other_dtypes(name, dtype):
    x = values((4, 9, 3)).to(dtype)
    found = CALLS[name](spread(x, TRIPLE, [S(1)]))
    assert torch.equal(found.to_torch(), CALLS[name](x))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn])
def test_what_cannot_be_added_is_joined_all_the_same(dtype):
    x = values((4, 9, 3)).abs().to(dtype)
    found = torch.cat([spread(x, TRIPLE, [S(1)])] * 2, 1).to_torch()
    assert torch.equal(found.view(torch.uint8), torch.cat([x, x], 1).view(torch.uint8))


@pytest.mark.parametrize("mesh", [ONE, TRIPLE], ids=["1", "3"])
def test_a_complex_number_is_padded_with(mesh):
    x = values((4, 9), torch.complex64)
    found = torch.constant_pad_nd(spread(x, mesh, [S(1)]), (1, 2), 1 + 2j)
    assert torch.equal(found.to_torch(), torch.constant_pad_nd(x, (1, 2), 1 + 2j))


def test_the_number_that_is_padded_with_may_change():
    x = values((4, 9))
    call = dtorch.jit(lambda x, value: F.pad(x, (1, 2), value=value))
    for value in (0.5, 0.7, -3.0):
        found = call(spread(x, TRIPLE, [S(1)]), value)
        assert torch.equal(found.to_torch(), F.pad(x, (1, 2), value=value))


def test_a_conjugate_view_keeps_its_value():
    x = torch.complex(values((4, 9)), values((4, 9), seed=1))
    found = spread(x, PAIR, [S(1)]).conj()[:, 1:]
    assert torch.equal(found.to_torch(), x.conj()[:, 1:])


@pytest.mark.parametrize("name", ["from", "to", "roll", "pad", "join", "flip", "shift"])
def test_keeps_the_layout_and_moves_little(name):
    x = torch.zeros(4, 64, 8)
    given = spread(x, QUAD, [S(1)])
    call = dtorch.jit(CALLS[name])
    assert call(given).placements == [S(1)]
    steps = [i.step for i in call.program(given).instructions if isinstance(i, Redistribute)]
    assert {s.kind for s in steps} <= {Collective.PERMUTE, Collective.SLICE}
    if name not in ("flip", "join"):
        row = 4 * 8 * 4
        assert max(s.num_bytes for s in steps) <= 2 * row


def test_what_is_smaller_than_the_devices_is_whole():
    last = spread(values((2, 8, 4)), QUAD, [S(1)])[:, -1:]
    assert last.placements == [R]


def test_strict_refuses_it():
    x = spread(values((4, 8)), PAIR, [S(1)])
    with dtorch.strict(), pytest.raises(PlacementError, match=r"slice.*cannot keep S\(1\)"):
        x[:, 1:]


def test_the_bytes_of_a_step_are_those_that_a_device_lacks():
    spec = Spec.of((4, 8), torch.float32, QUAD, (S(1),))
    rolled = permute(spec, Movement(1, (Segment(0, 7, 1), Segment(1, 0, 7))), spec)
    assert (rolled.kind, rolled.num_bytes) == (Collective.PERMUTE, 4 * 4)
    target = Spec.of((4, 7), torch.float32, QUAD, (S(1),))
    cut = permute(spec, Movement(1, (Segment(0, 0, 7),)), target)
    assert (cut.kind, cut.num_bytes) == (Collective.SLICE, 0)


def test_what_padding_fills_up_with_belongs_to_the_program() -> None:
    x = torch.arange(12.0).reshape(4, 3)
    d = dtorch.tensor(x, device_mesh=PAIR, placements=[S(0)])
    jitted = dtorch.jit(lambda t, value: torch.constant_pad_nd(t, (0, 0, 1, 1), value))
    for value in (1.0, 2.0, 4.5, 3, True):
        expected = torch.constant_pad_nd(x, (0, 0, 1, 1), value)
        assert torch.equal(torch.constant_pad_nd(d, (0, 0, 1, 1), value).to_torch(), expected)
        assert torch.equal(jitted(d, value).to_torch(), expected)


SPLITS = {
    "split": lambda x: x.split(3, 1),
    "split_with_sizes": lambda x: x.split([2, 0, 5], -1),
    "chunk": lambda x: x.chunk(2, 1),
    "split_the_other_dim": lambda x: x.split(3, 0),
    "tensor_split": lambda x: x.tensor_split(3, 1),
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 4, 1),
    "split_copy": lambda x: torch.split_copy(x, 4, 1),
}


@pytest.mark.parametrize("placement", [S(0), S(1), R, SUM], ids=str)
@pytest.mark.parametrize("name", SPLITS)
def test_splits_of_a_split_dim(name, placement):
    x = values((4, 7))
    for mesh in (PAIR, TRIPLE):
        for run in (SPLITS[name], dtorch.jit(SPLITS[name])):
            found, expected = run(spread(x, mesh, [placement])), SPLITS[name](x)
            assert [t.shape for t in found] == [t.shape for t in expected]
            for part, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(part.to_torch(), wanted)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", list(SPLITS)[:5])
def test_the_ranges_of_a_split_dim_are_views(name, jitted):
    def call(x):
        x = x.clone()
        for number, part in enumerate(SPLITS[name](x)):
            part.mul_(number)
        return x

    x = values((4, 7))
    run = dtorch.jit(call) if jitted else call
    for mesh in (PAIR, TRIPLE):
        assert torch.equal(run(spread(x, mesh, [S(1)])).to_torch(), call(x))


def test_nothing_of_a_fused_projection_is_gathered():
    def call(x, weight):
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.silu(gate) * up

    x, weight = values((2, 5, 6)), values((16, 6))
    given = spread(x, PAIR, [R]), spread(weight, PAIR, [S(0)])
    jitted = dtorch.jit(call)
    program = jitted.program(*given)
    steps = [i.step.kind for i in program.instructions if isinstance(i, Redistribute)]
    assert steps == [Collective.PERMUTE] * 2
    torch.testing.assert_close(jitted(*given).to_torch(), call(x, weight))
