"""Propagation: the cheapest legal strategy for each mesh axis."""

import pytest
import torch
import torch.nn.functional as F
from layouts import AVG, MAX, OBLONG, PAIR, SQUARE, SUM, TRIPLE, R, S, spread, values

import dtorch
from dtorch.propagation import propagate
from dtorch.redistribution import Collective
from dtorch.rules import Meta, OpCall, Sharding, sizes_by_name
from dtorch.rules.sharding import parse
from dtorch.spec import Spec, contiguous_stride

aten = torch.ops.aten


def _call(*specs, result=(4, 6)):
    meta = Meta(result, torch.float32, contiguous_stride(result))
    return OpCall(aten.linear.default, {}, specs, (meta,))


def _spec(shape, *placements, mesh=PAIR):
    return Spec.of(shape, torch.float32, mesh, placements)


def _program(function, *pairs, mesh=PAIR):
    tensors = [spread(values(shape), mesh, placements) for shape, placements in pairs]
    return dtorch.jit(function).program(*tensors)


def _kinds(program):
    return [r.step.kind for r in program.communication()]


# -- the notation --------------------------------------------------------------------------


def test_names_of_a_notation():
    call = _call(_spec((5, 4, 8), R), _spec((6, 8), R), _spec((6,), R), result=(5, 4, 6))
    found = parse("... k, n k, +n -> ... n", call)
    assert found.inputs == (("...0", "...1", "k"), ("n", "k"), ("n",))
    assert found.outputs == (("...0", "...1", "n"),)
    assert found.reduce == {"k": "sum"}
    assert found.additive == {2}


def test_a_notation_drops_terms_that_the_call_leaves_out():
    call = _call(_spec((4, 8), R), _spec((6, 8), R))
    assert len(parse("... k, n k, +n -> ... n", call).inputs) == 2


def test_marked_names_are_whole():
    call = _call(_spec((4, 8), R), result=(4, 8))
    found = parse("... k! -> ... k!", call)
    assert found.whole == {"k"}
    assert [s.name for s in found.strategies()] == [None, "...0"]


def test_broadcast_dims_have_no_name():
    call = _call(_spec((1, 8), R), _spec((4, 8), R), result=(4, 8))
    found = parse("... k, ... k -> ... k", call)
    assert found.inputs == ((None, "k"), ("...0", "k"))
    call = _call(_spec((4, 8), R), _spec((6, 8), R), _spec((1,), R))
    assert parse("... k, n k, +n -> ... n", call).inputs[2] == (None,)


# -- strategies ----------------------------------------------------------------------------


LINEAR = Sharding(
    (("m", "k"), ("n", "k"), ("n",)),
    (("m", "n"),),
    reduce={"k": "sum"},
    additive=frozenset({2}),
    linear=(frozenset({0}),),
)


def test_every_strategy_of_a_linear_layer():
    found = {(s.name, s.inputs, s.outputs) for s in LINEAR.strategies()}
    assert found == {
        (None, (R, R, R), (R,)),
        ("m", (S(0), R, R), (S(0),)),
        ("k", (S(1), S(1), SUM), (SUM,)),
        ("n", (R, S(0), S(0)), (S(1),)),
        (None, (SUM, R, SUM), (SUM,)),
        (None, (AVG, R, AVG), (AVG,)),
    }


def test_sizes_by_name():
    call = _call(_spec((4, 8), R), _spec((6, 8), R), _spec((6,), R))
    assert sizes_by_name(LINEAR, call) == {"m": [4, 4], "k": [8, 8], "n": [6, 6, 6]}


def test_even_names_divide_over_all_their_axes():
    sharding = Sharding((("a",),), (("a",),), even=frozenset({"a"}))
    for size, expected in ((8, (S(0), S(0))), (6, (S(0), R))):
        call = _call(_spec((size,), S(0), S(0), mesh=SQUARE), result=(size,))
        assert propagate(sharding, call, SQUARE).outputs == (expected,)


def test_filled_names_leave_no_device_without_a_piece():
    sharding = Sharding((("a",),), (("a",),), filled=frozenset({"a"}))
    for size, expected in ((5, S(0)), (4, R), (3, S(0)), (2, R), (0, R)):
        call = _call(_spec((size,), S(0), mesh=TRIPLE), result=(size,))
        assert propagate(sharding, call, TRIPLE).outputs == ((expected,),)


def test_wanted_placements_are_given_where_they_can_be():
    sharding = Sharding((), (("a", None),))
    for wanted, given in (((S(0),), (S(0),)), ((S(1),), (R,)), ((SUM,), (R,))):
        assert propagate(sharding, _call(), PAIR, wanted).outputs == (given,)


# -- the choice ----------------------------------------------------------------------------


def test_what_is_free_is_taken():
    assert _kinds(_program(F.linear, ((4, 8), [S(0)]), ((6, 8), [R]))) == []
    assert _kinds(_program(F.linear, ((4, 8), [R]), ((6, 8), [S(0)]))) == []
    assert _kinds(_program(F.linear, ((4, 8), [S(1)]), ((6, 8), [R]))) == []


def test_a_megatron_block_needs_one_reduction():
    def mlp(x, up, down):
        return F.linear(F.relu(F.linear(x, up)), down)

    program = _program(mlp, ((4, 8), [R]), ((16, 8), [S(0)]), ((8, 16), [S(1)]))
    assert program.communication() == []
    assert program.specs[program.outputs[0]].placements == (SUM,)


def test_a_sharded_residual_scatters_the_sum():
    program = _program(torch.add, ((2, 8, 4), [S(1)]), ((2, 8, 4), [SUM]))
    assert _kinds(program) == [Collective.REDUCE_SCATTER]
    assert program.specs[program.outputs[0]].placements == (S(1),)


def test_a_replicated_residual_reduces_the_sum_when_it_is_needed_whole():
    program = _program(lambda x, y: F.rms_norm(x + y, (4,)), ((2, 8, 4), [R]), ((2, 8, 4), [SUM]))
    assert _kinds(program) == [Collective.ALL_REDUCE]


def test_each_axis_is_chosen_on_its_own():
    program = _program(
        F.linear, ((4, 8), [S(0), R]), ((6, 8), [R, S(0)]), ((6,), [R, S(0)]), mesh=SQUARE
    )
    assert program.communication() == []
    assert program.specs[program.outputs[0]].placements == (S(0), S(1))


def test_a_tie_keeps_the_layout_of_the_largest_argument():
    for big, small in ((S(0), S(1)), (S(1), S(0))):
        program = _program(torch.add, ((8, 8), [big]), ((1, 8), [R if big == S(0) else small]))
        assert program.specs[program.outputs[0]].placements == (big,)


def test_a_value_is_moved_once():
    def twice(x):
        return x.relu(), x.sigmoid()

    assert len(_kinds(_program(twice, ((4, 8), [SUM])))) == 1


def test_a_value_that_was_reduced_does_not_stay_partial():
    def both(x):
        return torch.relu(x), -x

    program = _program(both, ((4, 8), [SUM]))
    assert len(_kinds(program)) == 1
    assert program.specs[program.outputs[1]].placements == (R,)


@pytest.mark.parametrize("mesh", [SQUARE, OBLONG], ids=["2x2", "2x3"])
def test_partials_of_both_axes_are_reduced_together(mesh):
    program = _program(torch.relu, ((4, 8), [SUM, SUM]), mesh=mesh)
    (step,) = program.communication()
    assert step.step.axes == (0, 1)


def test_an_operation_without_a_rule_runs_replicated_and_says_so():
    program = _program(lambda x: torch.block_diag(x, x), ((4, 8), [S(1)]))
    assert [i.op for i in program.fallbacks()] == [aten.block_diag.default]
    assert "replicated aten.block_diag" in str(program)
    assert _kinds(program) == [Collective.ALL_GATHER]


def test_max_is_not_linear():
    program = _program(torch.add, ((4, 8), [MAX]), ((4, 8), [MAX]))
    assert program.specs[program.outputs[0]].placements == (R,)
