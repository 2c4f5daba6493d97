"""The cases from the field that planning and rules answer, each under its number."""

import asyncio
import itertools

import pytest
import torch
import torch.nn.functional as F
from layouts import PAIR, SQUARE, SUM, R, S, check, placements_of, values

import dtorch
from dtorch.mesh import DeviceMesh
from dtorch.runtime import Shards
from dtorch.spec import Spec
from dtorch.tensor import Tensor

FOUR = DeviceMesh("cpu", [0, 1, 2, 3])


def _place(value, mesh, *placements):
    return Tensor(value, device_mesh=mesh, placements=placements)


def _partial(mesh, *locals_):
    """The tensor whose devices hold these addends."""
    parts = [torch.as_tensor(v) for v in locals_]
    spec = Spec.of(parts[0].shape, parts[0].dtype, mesh, (SUM,))
    return Tensor._of(spec, Shards(list(parts)))


def _num_collectives(function, *tensors):
    return len(dtorch.jit(function).program(*tensors).communication())


# -- views and shapes ----------------------------------------------------------------------


def test_case_1_a_view_across_the_sharded_dim():
    value = torch.arange(96).view(12, 8)
    found = _place(value, FOUR, S(1)).view(16, 6)
    assert found.to_torch()[0].tolist() == [0, 1, 2, 3, 4, 5]
    check(found, value.view(16, 6))


@pytest.mark.parametrize("shape", [(1, 2), (3, 2)])
def test_case_2_a_view_to_the_same_shape_keeps_uneven_shards(shape):
    x = _place(values(shape), PAIR, S(0))
    assert x.view(shape).placements == [S(0)]
    assert _num_collectives(lambda x: x.view(shape), x) == 0
    check(x.view(shape), values(shape))


def test_case_3_an_uneven_dim_comes_back():
    value = values((5, 10))
    sharded = _place(value, FOUR, R).redistribute(placements=[S(0)])
    assert [tuple(t.shape) for t in sharded.local_shards().values()] == [
        (2, 10),
        (2, 10),
        (1, 10),
        (0, 10),
    ]
    check(sharded.redistribute(placements=[R]), value)


@pytest.mark.parametrize("length", [2, 3])
def test_case_4_empty_shards_survive(length):
    value = values((length,))
    x = _place(value, FOUR, S(0))
    check(x, value)
    check(x + x, value + value)
    check(x.sum(), value.sum())
    check(x.max(), value.max())
    check(x.amax(0), value.amax(0))
    check(torch.cat([x, x]), torch.cat([value, value]))


def test_case_5_linear_over_a_sharded_sequence():
    value, weight = values((2, 8, 4)), values((4, 4), seed=1)
    x, w = _place(value, PAIR, S(1)), _place(weight, PAIR, R)
    assert _num_collectives(F.linear, x, w) == 0
    assert F.linear(x, w).placements == [S(1)]
    check(F.linear(x, w), F.linear(value, weight))

    def loss(w, x):
        return F.linear(x, w).square().sum()

    weight.requires_grad_()
    loss(weight, value).backward()
    check(dtorch.grad(loss)(w, x), weight.grad, rtol=1e-5, atol=1e-5)


def test_case_6_a_batched_product_keeps_both_axes():
    value, other = values((2, 2, 3)), values((3, 1))
    x, y = _place(value, SQUARE, S(0), S(1)), _place(other, SQUARE, R, R)
    assert _num_collectives(torch.matmul, x, y) == 0
    assert (x @ y).placements == [S(0), S(1)]
    check(x @ y, value @ other)


# -- partial -------------------------------------------------------------------------------


def test_case_7_norm_and_maximum_of_a_partial_value():
    x = _partial(PAIR, [1.0, 3.0], [2.0, 1.0])
    assert torch.linalg.vector_norm(x).item() == 5
    assert x.norm().item() == 5
    assert x.max().item() == 4


@pytest.mark.parametrize("ten", [10, torch.tensor(10)], ids=["number", "tensor"])
def test_case_8_a_scalar_is_added_to_a_sum_once(ten):
    x = _place(torch.arange(10), PAIR, S(0))
    assert (x.sum() + ten).item() == 55
    assert dtorch.jit(lambda x: x.sum() + ten)(x).item() == 55


def test_case_9_item_and_await_reduce_and_clamp_sees_the_sum():
    x = _partial(FOUR, 0.0, 1.0, 2.0, 3.0)
    assert x.item() == 6

    async def fetch():
        return await x.to_torch_async()

    assert asyncio.run(fetch()).item() == 6
    assert _partial(FOUR, 1.0, 1.0, 1.0, 1.0).clamp(max=2).item() == 2


def test_case_9a_partial_plus_one_and_two_redistributions():
    x = _partial(PAIR, [1.0, 3.0], [2.0, 1.0])
    assert (x + 1.0).tolist() == [4, 5]
    for _ in range(2):
        assert x.redistribute(placements=[R]).tolist() == [3, 4]
        assert x.redistribute(placements=[S(0)]).tolist() == [3, 4]
    assert x.placements == [SUM]
    assert [t.tolist() for t in x.local_shards().values()] == [[1, 3], [2, 1]]


def test_case_9b_every_pair_of_layouts_on_two_axes():
    value = values((4, 6))
    layouts = placements_of(2, SQUARE, (SUM,))
    for before, after in itertools.product(layouts, repeat=2):
        check(_place(value, SQUARE, *before).redistribute(placements=after), value)


# -- indices -------------------------------------------------------------------------------


def test_case_10_positions_of_maxima_are_global():
    assert _place(torch.tensor([3, 8, 10, 5]), PAIR, S(0)).argmax().item() == 2
    found = _place(torch.tensor([[1, 5, 2, 0], [0, 1, 9, 3]]), PAIR, S(1)).max(1)
    assert found.values.tolist() == [5, 9]
    assert found.indices.tolist() == [1, 2]


def test_case_11_index_put_with_everything_sharded():
    found = _place(torch.zeros(16), PAIR, S(0)).index_put(
        (_place(torch.arange(16), PAIR, S(0)),), _place(torch.ones(16), PAIR, S(0))
    )
    check(found, torch.ones(16))
    diagonal = _place(torch.arange(4), FOUR, S(0))
    found = _place(torch.zeros(4, 4), FOUR, S(0)).index_put(
        (diagonal, diagonal), _place(torch.arange(1.0, 5), FOUR, S(0))
    )
    check(found, torch.diag(torch.arange(1.0, 5)))
