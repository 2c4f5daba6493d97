"""Embedding and indexing, tables split over their rows included."""

import pytest
import torch
import torch.nn.functional as F
from layouts import MAX, PAIR, SUM, TRIPLE, R, S, case, check, spread, sweep, values

import dtorch
from dtorch.errors import WorkerError
from dtorch.lowering import lower

I64 = torch.int64
aten = torch.ops.aten


def _indices(high, *shape, dtype=I64):
    made = torch.Generator().manual_seed(7)
    return torch.randint(0, high, shape, generator=made).to(dtype)


CASES = [
    case("embedding", F.embedding, _indices(7, 5), (7, 4), partials=(SUM, MAX)),
    case("embedding_2d", F.embedding, _indices(7, 2, 3), (7, 4), partials=(SUM,)),
    case("embedding_int32", F.embedding, _indices(7, 4, dtype=torch.int32), (7, 4), partials=()),
    case("embedding_short", F.embedding, _indices(2, 4), (2, 3), partials=(SUM,)),
    case("embedding_one_row", F.embedding, _indices(1, 4), (1, 3), partials=(SUM,)),
    case("embedding_none", F.embedding, _indices(7, 0), (7, 3), partials=(SUM,)),
    case("embedding_bf16", F.embedding, _indices(7, 5), ((7, 4), torch.bfloat16), partials=()),
    case("embedding_padding", lambda i, w: F.embedding(i, w, padding_idx=1),
         _indices(7, 5), (7, 4)),
    case("embedding_scalar", F.embedding, torch.tensor(3), (7, 4), partials=(SUM,)),
    case("embedding_backward", lambda g, i: aten.embedding_dense_backward(g, i, 7, -1, False),
         (6, 4), _indices(7, 6), partials=(SUM,)),
    case("embedding_backward_padding",
         lambda g, i: aten.embedding_dense_backward(g, i, 7, 2, False), (6, 4), _indices(7, 6)),
    case("embedding_backward_by_frequency",
         lambda g, i: aten.embedding_dense_backward(g, i, 3, -1, True), (6, 4), _indices(3, 6),
         exact=False),
    case("index_select", lambda x, i: x.index_select(0, i), (5, 3), _indices(5, 4)),
    case("index_select_1", lambda x, i: x.index_select(-1, i), (5, 3), _indices(3, 4)),
    case("index_select_scalar", lambda x, i: x.index_select(0, i), (5, 3), torch.tensor(2)),
    case("gather", lambda x, i: x.gather(1, i), (5, 3), _indices(3, 5, 2)),
    case("gather_0", lambda x, i: x.gather(0, i), (5, 3), _indices(5, 4, 3)),
    case("gather_part", lambda x, i: x.gather(1, i), (5, 3), _indices(3, 2, 4)),
    case("take_along_dim", lambda x, i: x.take_along_dim(i, 1), (5, 3), _indices(3, 5, 1)),
    case("index", lambda x, i: x[i], (5, 3), _indices(5, 4)),
    case("index_1", lambda x, i: x[:, i], (5, 3), _indices(3, 4)),
    case("index_2d", lambda x, i: x[i], (5, 3), _indices(5, 2, 2)),
    case("index_both", lambda x, i, j: x[i, j], (5, 3), _indices(5, 4), _indices(3, 4)),
    case("index_apart", lambda x, i, j: x[i, :, j], (4, 3, 2), _indices(4, 3), _indices(2, 3)),
    case("index_broadcast", lambda x, i, j: x[i, j], (5, 3), _indices(5, 4, 1), _indices(3, 2)),
    case("index_slices", lambda x, i: x[1:, i, None], (4, 5, 3), _indices(5, 3)),
    case("index_none", lambda x, i: x[i], (5, 3), _indices(5, 0)),
    case("index_negative", lambda x, i: x[i - 5], (5, 3), _indices(5, 4)),
    case("masked_select_by_where", lambda x: torch.where(x > 0, x, 0.0), (5, 3)),
    case("one_hot", lambda i: F.one_hot(i, 5), _indices(5, 4), fallback=True),
]  # fmt: skip


@pytest.mark.parametrize("which", CASES, ids=str)
def test_equals_torch_in_every_layout(which):
    sweep(which)


def test_a_table_split_over_rows_gives_a_partial_sum_without_communication():
    ids, table = _indices(7, 5), values((7, 4))
    for mesh in (PAIR, TRIPLE):
        program = dtorch.jit(F.embedding).program(
            spread(ids, mesh, [R]), spread(table, mesh, [S(0)])
        )
        assert program.specs[program.outputs[0]].placements == (SUM,)
        assert program.communication() == []


def test_a_table_split_over_one_device_is_read_as_it_is():
    mesh = dtorch.DeviceMesh("cpu", [0])
    ids, table = spread(_indices(7, 5), mesh, [R]), spread(values((7, 4)), mesh, [S(0)])
    local = lower(dtorch.jit(F.embedding).program(ids, table))
    assert [i.op for i in local.instructions] == [aten.embedding.default]


@pytest.mark.parametrize("bad", [-1, 7, 8, 100])
@pytest.mark.parametrize("mesh", [PAIR, TRIPLE], ids=["2", "3"])
def test_an_index_outside_the_table_raises(bad, mesh):
    ids = spread(torch.tensor([1, bad]), mesh, [R])
    with pytest.raises(WorkerError, match="embedding"):
        F.embedding(ids, spread(values((7, 4)), mesh, [S(0)])).to_torch()


def test_a_boolean_mask_waits_for_its_value():
    x = values((5, 3))
    with torch.no_grad():
        check(spread(x, PAIR, [S(0)])[spread(x > 0, PAIR, [S(0)])], x[x > 0])
