"""Factories: each device makes its own part."""

import pytest
import torch
from layouts import (
    AVG,
    MAX,
    MESHES,
    PAIR,
    SUM,
    TRIPLE,
    R,
    S,
    case,
    check,
    placements_of,
    spread,
    sweep,
    values,
)

import dtorch

FACTORIES = [
    ("zeros", ((5, 3),), {}),
    ("ones", ((1, 2),), {}),
    ("ones", ((0, 2),), {}),
    ("ones", ((5, 3),), {"dtype": torch.int64}),
    ("ones", ((5, 3),), {"dtype": torch.bool}),
    ("full", ((5, 3), 2.5), {}),
    ("full", ((4,), True), {}),
    ("arange", (7,), {}),
    ("arange", (2, 12, 3), {}),
    ("arange", (9, -3, -2), {}),
    ("arange", (0.0, 1.0, 0.25), {}),
    ("arange", (5,), {"dtype": torch.float32}),
    ("arange", (0,), {}),
    ("linspace", (0, 1, 5), {}),
    ("eye", (4, 3), {}),
    ("tril_indices", (3, 3), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), FACTORIES, ids=str)
def test_every_layout_has_the_same_value(name, args, kwargs):
    expected = getattr(torch, name)(*args, **kwargs)
    for mesh in MESHES:
        for placements in [*placements_of(expected.ndim, mesh, (SUM,)), (MAX,) * mesh.ndim]:
            made = getattr(dtorch, name)(*args, device_mesh=mesh, placements=placements, **kwargs)
            assert tuple(made.placements) == placements
            check(made, expected)


def test_average_keeps_the_value():
    check(dtorch.ones((2, 2), device_mesh=PAIR, placements=[AVG]), torch.ones(2, 2))


LIKE = [
    case("new_zeros", lambda x: x.new_zeros(4, 2), (5, 3)),
    case("new_ones", lambda x: x.new_ones((3,)), (5, 3)),
    case("new_full", lambda x: x.new_full((3, 2), 1.5), (5, 3)),
    case("new_full_int", lambda x: x.new_full((3, 2), 1, dtype=torch.int32), (5, 3)),
    case("arange_inside", lambda x: x + torch.arange(3), (5, 3)),
    case("zeros_inside", lambda x: x + torch.zeros(5, 1), (5, 3)),
    case("ones_like_int", lambda x: torch.ones_like(x, dtype=torch.int64), (5, 3)),
]


@pytest.mark.parametrize("which", LIKE, ids=str)
def test_factories_from_a_tensor(which):
    sweep(which)


@pytest.mark.parametrize("placement", [S(0), S(1)])
def test_new_does_not_read_the_tensor(placement):
    program = dtorch.jit(lambda x: x.new_zeros(4, 2)).program(
        spread(values((6, 4)), PAIR, [placement])
    )
    assert program.communication() == []


def test_a_sharded_factory_does_not_make_the_whole():
    program = dtorch.jit(
        lambda: dtorch.zeros(1 << 15, 2, device_mesh=PAIR, placements=[S(0)]) + 1
    ).program()
    assert [program.specs[v].placements for i in program.instructions for v in i.results()] == [
        (S(0),)
    ] * 2
    assert R not in program.specs[program.outputs[0]].placements


@pytest.mark.parametrize("placement", [S(0), S(1), R])
def test_a_gradient_in_the_memory_order_of_its_leaf_needs_no_communication(placement):
    leaf, grad = torch.randn(4, 7), torch.randn(7, 4).mT
    ours = spread(leaf, PAIR, [placement]).requires_grad_()
    with dtorch.strict():
        (ours * spread(grad, PAIR, [placement])).sum().backward()
        ours.mT.contiguous().mT.backward(spread(grad, PAIR, [placement]))
    assert ours.grad.placements == [placement] and ours.grad.stride() == (7, 1)
    assert torch.equal(ours.grad.to_torch(), grad * 2)


@pytest.mark.parametrize("stride", [(7, 1), (1, 4), (14, 2)])
@pytest.mark.parametrize("shape", [(4, 7), (7, 4)])
def test_strides_without_values_follow_a_layout_of_the_same_shape(shape, stride):
    x = spread(torch.randn(shape), TRIPLE, [S(0)])
    found = x.new_empty_strided((4, 7), stride)
    assert found.stride() == stride and found.to_torch().shape == (4, 7)
    assert found.placements == ([S(0)] if shape == (4, 7) else [R])
