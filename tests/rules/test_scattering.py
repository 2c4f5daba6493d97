"""Writing parts of a tensor."""

import dataclasses

import pytest
import torch
from layouts import PAIR, R, S, case, spread, sweep, values

import dtorch

IDS = torch.tensor([4, 0, 3])
LESS = torch.tensor([[2, 0, 4], [1, 3, 0]])


def _accumulated(x, i, v):
    return x.index_put((i,), v, accumulate=True)


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
