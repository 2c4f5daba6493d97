"""Views: a sharding survives where the pieces of both shapes are the same elements."""

import pytest
import torch
from layouts import PAIR, SQUARE, SUM, S, case, check, spread, sweep, values

import dtorch
from dtorch.errors import PlacementError
from dtorch.mesh import DeviceMesh

I64 = torch.int64

RESHAPES = [
    ((12, 8), (16, 6)),
    ((12, 8), (96,)),
    ((96,), (12, 8)),
    ((6, 4), (2, 3, 4)),
    ((6, 4), (3, 2, 4)),
    ((6, 4), (6, 2, 2)),
    ((5, 4), (5, 2, 2)),
    ((5, 4), (20,)),
    ((4, 6), (24,)),
    ((2, 3, 4), (6, 4)),
    ((2, 3, 4), (2, 12)),
    ((2, 3, 4), (4, 6)),
    ((1, 2), (1, 2)),
    ((3, 2), (3, 2)),
    ((1, 6), (6,)),
    ((6,), (1, 6, 1)),
    ((6, 1, 2), (1, 6, 2)),
    ((6, 1, 4), (12, 2)),
    ((1,), ()),
    ((), (1, 1)),
    ((0, 4), (0, 2, 2)),
    ((0, 4), (4, 0)),
    ((2, 2, 6), (4, 6)),
]


@pytest.mark.parametrize(("before", "after"), RESHAPES, ids=str)
def test_view_equals_torch_in_every_layout(before, after):
    sweep(case(f"view{after}", lambda x: x.view(after), before))


VIEWS = [
    case("reshape_infer", lambda x: x.reshape(-1), (5, 4)),
    case("reshape_of_t", lambda x: x.t().reshape(-1), (5, 4)),
    case("flatten", lambda x: x.flatten(1), (4, 3, 2)),
    case("unflatten", lambda x: x.unflatten(1, (2, 3)), (5, 6)),
    case("permute", lambda x: x.permute(2, 0, 1), (4, 3, 2)),
    case("transpose", lambda x: x.transpose(0, -1), (4, 3, 2)),
    case("t", torch.t, (5, 3)),
    case("mT", lambda x: x.mT, (2, 5, 3)),
    case("T", lambda x: x.T, (5, 3)),
    case("movedim", lambda x: x.movedim(0, 2), (4, 3, 2)),
    case("unsqueeze", lambda x: x.unsqueeze(-1), (5, 3)),
    case("unsqueeze_0", lambda x: x.unsqueeze(0), (5, 3)),
    case("squeeze", torch.squeeze, (2, 1, 3, 1)),
    case("squeeze_1", lambda x: x.squeeze(1), (2, 1, 3)),
    case("squeeze_none", lambda x: x.squeeze(0), (2, 1, 3)),
    case("squeeze_dims", lambda x: x.squeeze((0, -1)), (1, 2, 1)),
    case("expand", lambda x: x.expand(4, 3), (1, 3)),
    case("expand_new", lambda x: x.expand(2, 5, 3), (5, 3)),
    case("expand_keep", lambda x: x.expand(-1, 4), (3, 1)),
    case("expand_add", lambda x: x.expand(4, 3) + 1, (1, 3)),
    case("broadcast_to", lambda x: torch.broadcast_to(x, (2, 5)), (5,)),
    case("select", lambda x: x[1], (5, 3)),
    case("select_last", lambda x: x[:, -1], (5, 3)),
    case("slice", lambda x: x[1:4], (5, 3)),
    case("slice_step", lambda x: x[:, ::2], (5, 3)),
    case("slice_all", lambda x: x[:5, -7:], (5, 3)),
    case("slice_none", lambda x: x[5:], (5, 3)),
    case("narrow", lambda x: x.narrow(1, 1, 2), (5, 3)),
    case("diagonal", torch.diagonal, (5, 3)),
    case("diagonal_batch", lambda x: x.diagonal(1, 0, 2), (3, 2, 4)),
    case("unbind", lambda x: x.unbind(0), (3, 4)),
    case("split", lambda x: x.split(2), (5, 3)),
    case("split_sizes", lambda x: x.split([1, 2], 1), (5, 3)),
    case("chunk", lambda x: x.chunk(2, 1), (5, 3)),
    case("tensor_split", lambda x: x.tensor_split(2), (5, 3)),
    case("cat", lambda x, y: torch.cat([x, y]), (5, 3), (2, 3)),
    case("cat_1", lambda x, y: torch.cat([x, y], -1), (5, 3), (5, 2)),
    case("cat_empty", lambda x, y: torch.cat([x, y], 1), (5, 3), (0,)),
    case("cat_zero", lambda x, y: torch.cat([x, y]), (5, 3), (0, 3)),
    case("cat_dtypes", lambda x, y: torch.cat([x, y]), (2, 3), ((2, 3), I64)),
    case("cat_bool", lambda x, y: torch.cat([x, y]), ((2, 3), torch.bool), ((2, 3), torch.bool)),
    case("stack", lambda x, y: torch.stack([x, y]), (5, 3), (5, 3)),
    case("stack_2", lambda x, y: torch.stack([x, y], -1), (5, 3), (5, 3)),
    case("repeat", lambda x: x.repeat(2, 1), (5, 3)),
    case("repeat_new", lambda x: x.repeat(2, 1, 3), (5, 3)),
    case("repeat_interleave", lambda x: x.repeat_interleave(2, 0), (5, 3)),
    case("tile", lambda x: x.tile(2), (5, 3)),
    case("tril", torch.tril, (5, 3)),
    case("triu", lambda x: x.triu(1), (2, 4, 3)),
    case("as_strided", lambda x: x.as_strided((2, 3), (1, 2), 1), (4, 3)),
    case("as_strided_t", lambda x: x.t().as_strided((3, 4), (1, 3)), (4, 3)),
    case("as_strided_of_row", lambda x: x[2].as_strided((2, 2), (3, 1), 1), (4, 3)),
    case("as_strided_default", lambda x: x[2].as_strided((2, 2), (3, 1)), (4, 3)),
    case("as_strided_new", lambda x: (x.t() + 1).as_strided((2, 3), (1, 2)), (4, 3)),
    case("view_dtype", lambda x: x.view(torch.int32), (4, 3), fallback=True),
    case("view_half", lambda x: x.view(torch.float16), (4, 3), fallback=True),
    case("view_as_real", torch.view_as_real, ((4, 3), torch.complex64), fallback=True),
    case("view_as_complex", torch.view_as_complex, (5, 3, 2), fallback=True),
    case("unfold", lambda x: x.unfold(0, 2, 1), (5, 3), fallback=True),
    case("pad", lambda x: torch.nn.functional.pad(x, (1, 0)), (5, 3), fallback=True),
    case("heads", lambda x: x.view(2, 5, 4, 2).transpose(1, 2), (2, 5, 8)),
    case("merge_heads", lambda x: x.transpose(1, 2).reshape(2, 5, 8), (2, 4, 5, 2)),
    case("contiguous", lambda x: x.t().contiguous().view(-1), (5, 3)),
    case("int_view", lambda x: x.view(-1), ((5, 3), I64)),
    case("bool_view", lambda x: x.view(-1), ((5, 3), torch.bool)),
]


@pytest.mark.parametrize("which", VIEWS, ids=str)
def test_equals_torch_in_every_layout(which):
    sweep(which)


def _layout_after(function, shape, mesh, placements):
    program = dtorch.jit(function).program(spread(values(shape), mesh, placements))
    return program.specs[program.outputs[0]].placements, len(program.communication())


def test_a_split_outermost_dim_is_kept_where_it_divides():
    assert _layout_after(lambda x: x.view(2, 3, 4), (6, 4), PAIR, [S(0)]) == ((S(0),), 0)
    assert _layout_after(lambda x: x.view(3, 2, 4), (6, 4), PAIR, [S(0)]) == ((S(2),), 1)
    assert _layout_after(lambda x: x.view(6, 4), (2, 3, 4), PAIR, [S(0)]) == ((S(0),), 0)
    assert _layout_after(lambda x: x.view(6, 4), (2, 3, 4), PAIR, [S(1)]) == ((S(0),), 1)
    assert _layout_after(lambda x: x.view(6, 2, 2), (6, 4), PAIR, [S(1)]) == ((S(1),), 0)


def test_views_keep_partial():
    for function in (torch.t, lambda x: x.view(-1), lambda x: x[0], lambda x: x.unsqueeze(0)):
        assert _layout_after(function, (4, 2), PAIR, [SUM]) == ((SUM,), 0)


def test_uneven_shards_survive_a_view_of_other_dims():
    assert _layout_after(lambda x: x.view(5, 2, 2), (5, 4), PAIR, [S(0)]) == ((S(0),), 0)


def test_both_axes_of_a_mesh_pass_through_a_view():
    layout = _layout_after(lambda x: x.view(4, 2, 3), (4, 6), SQUARE, [S(0), S(1)])
    assert layout == ((S(0), S(1)), 0)
    layout = _layout_after(lambda x: x.view(2, 2, 6), (4, 6), SQUARE, [S(0), S(0)])
    assert layout == ((S(0), S(2)), 1)


def test_a_chain_of_views_on_many_devices():
    value = values((2, 7, 8))
    mesh = DeviceMesh("cpu", list(range(8)))
    x = spread(value, mesh, [S(2)])
    check(x.view(2, 7, 8, 1).transpose(1, 2), value.view(2, 7, 8, 1).transpose(1, 2))
    check(x.view(2, 7, 2, 4).sum(1), value.view(2, 7, 2, 4).sum(1))


def test_as_strided_over_gaps_in_memory_is_refused():
    x = spread(values((4, 6)), PAIR, [S(0)])
    with pytest.raises(PlacementError, match=r"(?s)gaps or overlaps in memory.*contiguous\(\)"):
        dtorch.jit(lambda view: view.as_strided((2, 2), (3, 1)))(x[:, ::2])
    expected = values((4, 6)).as_strided((2, 2), (3, 1))
    for run in (lambda f: f, dtorch.jit):
        found = run(lambda x: x[:, ::2].as_strided((2, 2), (3, 1)))(x)
        assert torch.equal(found.to_torch(), expected)
    check(x[:, ::2].contiguous().as_strided((2, 2), (3, 1)), values((4, 6))[:2, :4:2])
