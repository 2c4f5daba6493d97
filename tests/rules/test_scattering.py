"""Writing parts of a tensor."""

import dataclasses

import pytest
import torch
from layouts import PAIR, QUAD, SQUARE, R, S, case, check, spread, sweep, values

import dtorch

IDS = torch.tensor([4, 0, 3])
LESS = torch.tensor([[2, 0, 4], [1, 3, 0]])


def _accumulated(x, i, v):
    return x.index_put((i,), v, accumulate=True)


def _set_slice(x, v):
    x = x.clone()
    x[:, 2:5] = v
    return x


def _set_ids(x, i, v):
    x = x.clone()
    x[:, i] = v
    return x


CASES = [
    case("index_copy", lambda x, i, v: x.index_copy(0, i, v), (6, 3), IDS, (3, 3)),
    case("index_copy_1", lambda x, i, v: x.index_copy(1, i, v), (2, 5), IDS, (2, 3)),
    case("index_add", lambda x, i, v: x.index_add(0, i, v, alpha=2), (6, 3), IDS, (3, 3)),
    case("index_add_twice", lambda x, i, v: x.index_add(0, i % 2, v), (6, 3), IDS, (3, 3)),
    case("index_fill", lambda x, i: x.index_fill(0, i, 2.0), (6, 3), IDS),
    case("index_put", lambda x, i, v: x.index_put((i,), v), (6, 3), IDS, (3, 3)),
    case("index_put_row", lambda x, i, v: x.index_put((i,), v), (6, 3), IDS, (3,)),
    case("index_put_scalar", lambda x, i, v: x.index_put((i,), v), (6, 3), IDS, ()),
    case("index_put_accumulate", _accumulated, (6, 3), torch.tensor([1, 1, 5]), (3, 3)),
    case("index_put_two", lambda x, i, j, v: x.index_put((i, j), v),
         (5, 4), IDS, torch.tensor([1, 2, 3]), (3,)),
    case("index_put_second", lambda x, i, v: torch.ops.aten.index_put(x, [None, i], v),
         (2, 5), IDS, (2, 3)),
    case("index_put_apart", lambda x, i, j, v: torch.ops.aten.index_put(x, [i, None, j], v),
         (5, 2, 4), IDS, torch.tensor([1, 2, 3]), (3, 2)),
    case("scatter", lambda x, i, v: x.scatter(0, i, v), (5, 3), LESS, (2, 3)),
    case("scatter_1", lambda x, i, v: x.scatter(1, i, v), (2, 5), LESS, (2, 3)),
    case("scatter_larger_source", lambda x, i, v: x.scatter(0, i, v), (5, 3), LESS, (4, 3)),
    case("scatter_value", lambda x, i: x.scatter(1, i, 2.0), (2, 5), LESS),
    case("scatter_add", lambda x, i, v: x.scatter_add(0, i, v), (5, 3), LESS, (2, 3)),
    case("scatter_reduce", lambda x, i, v: x.scatter_reduce(0, i, v, "amax"), (5, 3), LESS, (2, 3)),
    case("select_scatter", lambda x, v: x.select_scatter(v, 0, 2), (5, 3), (3,)),
    case("select_scatter_1", lambda x, v: x.select_scatter(v, -1, 0), (5, 3), (5,)),
    case("slice_scatter", lambda x, v: x.slice_scatter(v, 0, 1, 3), (5, 3), (2, 3)),
    case("slice_scatter_all", lambda x, v: x.slice_scatter(v, 1), (5, 3), (5, 3)),
    case("index_copy_repeated", lambda x, i, v: x.index_copy(0, i, v),
         (7, 3), torch.tensor([6, 2, 6, 2, 0]), (5, 3)),
    case("index_copy_one", lambda x, i, v: x.index_copy(1, i, v),
         (2, 5), torch.tensor([3]), (2, 1)),
    case("index_copy_few_slots", lambda x, i, v: x.index_copy(0, i, v),
         (2, 3), torch.tensor([1]), (1, 3)),
    case("index_copy_nothing", lambda x, i, v: x.index_copy(0, i, v),
         (6, 3), torch.tensor([], dtype=torch.int64), (0, 3)),
    case("index_copy_all", lambda x, i, v: x.index_copy(0, i, v), (6, 3), torch.arange(6), (6, 3)),
    case("index_fill_tensor", lambda x, i, v: x.index_fill(0, i, v), (6, 3), IDS, ()),
    case("index_put_negative", lambda x, i, v: x.index_put((i,), v),
         (6, 3), torch.tensor([-1, 0, -6]), (3, 3)),
    case("index_put_grid", lambda x, i, j, v: x.index_put((i, j), v),
         (5, 4), torch.tensor([[4], [1]]), torch.tensor([[0, 3, 2]]), (2, 3)),
    case("index_put_grid_row", lambda x, i, j, v: x.index_put((i, j), v),
         (5, 4, 2), torch.tensor([[4], [1]]), torch.tensor([[0, 3, 2]]), (3, 2)),
    case("index_put_one", lambda x, i, v: x.index_put((i,), v), (6, 3), torch.tensor(4), (3,)),
    case("index_put_apart_accumulate",
         lambda x, i, j, v: torch.ops.aten.index_put(x, [i, None, j], v, True),
         (5, 2, 4), torch.tensor([4, 0, 4]), torch.tensor([1, 2, 1]), (3, 2)),
    case("slice_scatter_step", lambda x, v: x.slice_scatter(v, 0, 1, 8, 3), (9, 2), (3, 2)),
    case("slice_scatter_from_end", lambda x, v: x.slice_scatter(v, -1, -2), (3, 7), (3, 2)),
    case("slice_scatter_few", lambda x, v: x.slice_scatter(v, 0, 1), (2, 3), (1, 3)),
    case("setitem_slice", _set_slice, (3, 7), (3, 3)),
    case("setitem_ids", _set_ids, (3, 7), IDS, (3, 3)),
    case("diagonal_scatter", lambda x, v: x.diagonal_scatter(v), (5, 3), (3,), fallback=True),
    case("masked_scatter", lambda x, m, v: x.masked_scatter(m, v),
         (5, 3), values((5, 3)) > 0, (5, 3), fallback=True),
    case("select_backward", lambda g: torch.ops.aten.select_backward(g, [5, 3], 0, 1), (3,),
         fallback=True),
    case("slice_backward", lambda g: torch.ops.aten.slice_backward(g, [5, 3], 0, 1, 3, 1), (2, 3),
         fallback=True),
]  # fmt: skip


@pytest.mark.parametrize("which", CASES, ids=str)
def test_equals_torch_in_every_layout(which):
    sweep(dataclasses.replace(which))


def test_dims_that_are_not_written_along_stay_sharded():
    x, v = spread(values((6, 4)), PAIR, [S(1)]), spread(values((3, 4)), PAIR, [S(1)])
    i = spread(IDS, PAIR, [R])
    for function in (lambda x, i, v: x.index_copy(0, i, v), lambda x, i, v: x.index_put((i,), v)):
        program = dtorch.jit(function).program(x, i, v)
        assert program.communication() == []
        assert program.specs[program.outputs[0]].placements == (S(1),)


WRITES = [
    lambda x, i, v: x.index_copy(0, i, v),
    lambda x, i, v: x.index_fill(0, i, 3.0),
    lambda x, i, v: x.index_add(0, i, v),
    lambda x, i, v: x.index_put((i,), v),
    lambda x, i, v: _accumulated(x, i, v),
    lambda x, i, v: x.slice_scatter(v, 0, 1, 4),
    lambda x, i, v: x.select_scatter(v[0], 0, 4),
]


@pytest.mark.parametrize("function", WRITES)
@pytest.mark.parametrize("mesh", [PAIR, QUAD, SQUARE], ids=str)
def test_each_device_writes_into_its_own_range(function, mesh):
    split = [S(0)] * mesh.ndim
    x, v, i = values((9, 64)), values((3, 64)), torch.tensor([8, 2, 5])
    given = spread(x, mesh, split), spread(i, mesh, [R] * mesh.ndim), spread(v, mesh, split)
    program = dtorch.jit(function).program(*given)
    assert program.fallbacks() == []
    assert program.specs[program.outputs[0]].placements == tuple(split)
    assert all(9 not in i.step.target.shape for i in program.communication())
    check(function(*given), function(x, i, v))


@pytest.mark.parametrize("function", WRITES[:5])
@pytest.mark.parametrize("index", [9, 12, -10, -1])
def test_an_index_outside_the_whole_dim_raises(function, index):
    x, v, i = values((9, 2)), values((3, 2)), torch.tensor([8, index, 5])
    given = spread(x, QUAD, [S(0)]), spread(i, QUAD, [R]), spread(v, QUAD, [R])
    try:
        expected = function(x, i, v)
    except (IndexError, RuntimeError):
        with pytest.raises((IndexError, RuntimeError), match=r"index|out of (range|bounds)"):
            function(*given).to_torch()
    else:
        check(function(*given), expected)


def test_the_last_of_several_writes_to_one_place_stays():
    x, v, i = values((9, 2)), values((6, 2)), torch.tensor([8, 2, 8, 2, 8, 0])
    given = spread(x, QUAD, [S(0)]), spread(i, QUAD, [R]), spread(v, QUAD, [R])
    check(WRITES[0](*given), WRITES[0](x, i, v))
