"""Program: the printed form, the verifier, pickling, dead code."""

import dataclasses
import pickle

import pytest
import torch
import torch.nn.functional as F
from layouts import PAIR, SQUARE, SUM, R, S, check, check_program, spread, values

import dtorch
from dtorch.builder import Builder
from dtorch.lowering import lower
from dtorch.mesh import DeviceMesh
from dtorch.program import (
    Apply,
    Program,
    Redistribute,
    Ref,
    ScalarRef,
    SourceLine,
    map_refs,
    refs,
    verify,
)
from dtorch.spec import Spec

aten = torch.ops.aten
NAMED = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))


def _builder():
    return Builder(lambda: None)


def _input(builder, shape, placements, mesh=PAIR, dtype=torch.float32):
    return builder.add_input(Spec.of(shape, dtype, mesh, placements))


def _mlp(mesh=NAMED):
    """Two linear layers in tensor parallel, and a norm."""
    builder = _builder()
    x = _input(builder, (4, 8), (S(0), R), mesh)
    up = _input(builder, (16, 8), (R, S(0)), mesh)
    down = _input(builder, (8, 16), (R, S(1)), mesh)
    (hidden,) = builder.apply(aten.linear.default, (Ref(x), Ref(up)), {})
    (hidden,) = builder.apply(aten.relu.default, (Ref(hidden),), {})
    (y,) = builder.apply(aten.linear.default, (Ref(hidden), Ref(down)), {})
    (y,) = builder.apply(aten.rms_norm.default, (Ref(y), [8]), {})
    return builder.finish([y], "mlp")


# -- printing ------------------------------------------------------------------------------

MLP = """\
mlp(%0: float32[4, 8] dp=S(0) tp=R, %1: float32[16, 8] dp=R tp=S(0), %2: float32[8, 16] dp=R tp=S(1)):
  %3 = aten.linear.default(%0, %1)                                # float32[4, 16] dp=S(0) tp=S(1)
  %4 = aten.relu.default(%3)                                      # float32[4, 16] dp=S(0) tp=S(1)
  %5 = aten.linear.default(%4, %2)                                # float32[4, 8] dp=S(0) tp=P(sum)
  %6 = all_reduce[tp](%5)                                         # float32[4, 8] dp=S(0) tp=R
  %7 = aten.rms_norm.default(%6, [8])                             # float32[4, 8] dp=S(0) tp=R
  return %7"""  # noqa: E501


def test_a_tensor_parallel_mlp_prints():
    assert str(_mlp()) == MLP


def test_scalars_keywords_dtypes_and_fallbacks_print():
    builder = _builder()
    x = _input(builder, (4, 2), (S(0),))
    builder.scalar_values.append(2.5)
    (y,) = builder.apply(aten.mul.Scalar, (Ref(x), ScalarRef(0)), {})
    (y,) = builder.apply(aten.sum.dim_IntList, (Ref(y), [1]), {"dtype": torch.float64})
    (y,) = builder.apply(aten.block_diag.default, ([Ref(y)],), {})
    assert str(builder.finish([y], "f")) == (
        """\
f(%0: float32[4, 2] [S(0)], $0):
  %1 = aten.mul.Scalar(%0, $0)                                    # float32[4, 2] [S(0)]
  %2 = aten.sum.dim_IntList(%1, [1], dtype=float64)               # float64[4] [S(0)]
  %3 = all_gather[0](%2)                                          # float64[4] [R]
  %4 = replicated aten.block_diag.default([%3])                   # float64[1, 4] [R]
  return %4"""
    )


def test_transfers_and_source_lines_print():
    builder = Builder(lambda: SourceLine("/home/me/model.py", 12, "forward"))
    x = _input(builder, (4, 2), (S(0),))
    moved = builder.move(x, DeviceMesh("cpu", [2, 3]), (S(0),))
    assert str(builder.finish([moved], "f")) == (
        """\
f(%0: float32[4, 2] [S(0)]):
  %1 = transfer(%0)                                               # float32[4, 2] [S(0)]  model.py:12
  return %1"""  # noqa: E501
    )
    assert str(builder._source()) == "/home/me/model.py:12 in forward"


def test_a_jitted_program_prints_the_users_line():
    program = dtorch.jit(lambda x: x.sum(0)).program(spread(values((4, 2)), PAIR, [S(0)]))
    assert "test_program.py:" in str(program)
    assert "%1 = aten.sum.dim_IntList(%0, [0])" in str(program)


# -- queries -------------------------------------------------------------------------------


def test_communication_leaves_out_what_is_local():
    builder = _builder()
    x = _input(builder, (4, 2), (R,))
    sliced = builder.move(x, PAIR, (S(0),))
    exchanged = builder.move(sliced, PAIR, (S(1),))
    program = builder.finish([exchanged], "f")
    assert len(program.instructions) == 2
    assert len(program.communication()) == 1


def test_what_nobody_reads_is_dropped():
    builder = _builder()
    x = _input(builder, (4, 2), (SUM,))
    builder.apply(aten.relu.default, (Ref(x),), {})
    (y,) = builder.apply(aten.neg.default, (Ref(x),), {})
    program = builder.finish([y], "f")
    verify(program)
    assert len(program.instructions) == 1 or program.communication()


def test_the_same_redistribution_is_recorded_once():
    builder = _builder()
    x = _input(builder, (4, 2), (S(0),))
    assert builder.move(x, PAIR, (R,)) == builder.move(x, PAIR, (R,))
    assert len(builder) == 1


def test_operands_on_unrelated_meshes_are_refused():
    builder = _builder()
    x, y = _input(builder, (4,), (R,)), _input(builder, (4,), (R,), DeviceMesh("cpu", [4, 5]))
    with pytest.raises(dtorch.errors.MeshError, match=r"(?s)unrelated meshes.*\[0, 1\].*\[4, 5\]"):
        builder.apply(aten.add.Tensor, (Ref(x), Ref(y)), {})


def test_operands_on_stages_meet_on_the_latest():
    first, second = DeviceMesh("cpu", [[0, 1], [2, 3]]).unbind(0)
    builder = _builder()
    x, y = _input(builder, (4,), (S(0),), second), _input(builder, (4,), (S(0),), first)
    (z,) = builder.apply(aten.add.Tensor, (Ref(x), Ref(y)), {})
    program = builder.finish([z], "f")
    check_program(program)
    assert program.specs[z].mesh == second
    assert len(program.communication()) == 1


def test_refs_are_found_and_replaced_in_nested_lists():
    tree = (Ref(1), [Ref(2), (3, Ref(4))], ScalarRef(5))
    assert [r.id for r in refs(tree)] == [1, 2, 4]
    replaced = map_refs(tree, lambda r: Ref(r.id * 10))
    assert replaced == (Ref(10), [Ref(20), (3, Ref(40))], ScalarRef(5))
    assert type(replaced[2]) is ScalarRef


# -- the verifier --------------------------------------------------------------------------


def _with_instructions(program, change):
    return dataclasses.replace(program, instructions=tuple(change(list(program.instructions))))


def _swap_last_two(instructions):
    *rest, a, b = instructions
    return [*rest, b, a]


def _double_first(instructions):
    return [instructions[0], *instructions]


def _rename(instructions, number, **changes):
    found = list(instructions)
    found[number] = dataclasses.replace(found[number], **changes)
    return found


FAULTS = {
    "used before it is defined": _swap_last_two,
    "defined twice": _double_first,
    "wrong source spec": lambda i: _rename(i, 3, input=3),
    "on another mesh": lambda i: _rename(i, 0, mesh=SQUARE),
    "nothing reads": lambda i: [*i, dataclasses.replace(i[1], outputs=(0 + 8,))],
}


def test_the_programs_of_these_tests_verify():
    verify(_mlp())


@pytest.mark.parametrize("match", FAULTS)
def test_the_verifier_finds_a_planted_fault(match):
    program = _mlp()
    program = dataclasses.replace(program, specs=(*program.specs, program.specs[4]))
    with pytest.raises(AssertionError, match=match):
        verify(_with_instructions(program, FAULTS[match]))


def test_the_verifier_finds_wrong_inputs_and_outputs():
    program = _mlp()
    with pytest.raises(AssertionError, match="an input appears twice"):
        verify(dataclasses.replace(program, inputs=(0, 0, 1, 2)))
    with pytest.raises(AssertionError, match="before it is defined"):
        verify(dataclasses.replace(program, inputs=(0, 1)))
    with pytest.raises(AssertionError, match=r"output %99 is never defined"):
        verify(dataclasses.replace(program, outputs=(99,)))


def test_the_verifier_finds_a_wrong_target():
    program = _mlp()
    specs = list(program.specs)
    specs[6] = specs[5]
    with pytest.raises(AssertionError, match="wrong target spec"):
        verify(dataclasses.replace(program, specs=tuple(specs)))


# -- pickling ------------------------------------------------------------------------------


def _programs():
    """Programs with every kind of instruction that carries more than an operation's name."""
    ids, table = torch.tensor([0, 2, 1]), values((3, 4))
    mesh = PAIR
    yield F.embedding, (spread(ids, mesh, [R]), spread(table, mesh, [S(0)]))
    yield lambda x: x.view(2, 2, 3).expand(4, 2, 2, 3), (spread(values((4, 3)), mesh, [S(0)]),)
    yield lambda x: x + torch.arange(4), (spread(values((4,)), mesh, [S(0)]),)
    yield lambda x: x.t().as_strided((2, 2), (1, 2)), (spread(values((4, 3)), mesh, [S(0)]),)
    yield lambda x: x + torch.rand(4), (spread(values((4,)), mesh, [S(0)]),)
    yield lambda x: (x * 2.0).sum(0).relu(), (spread(values((5, 3)), mesh, [S(0)]),)
    yield (
        lambda x: dtorch.zeros(4, device_mesh=mesh, placements=[S(0)]) + x,
        (spread(values((4,)), mesh, [S(0)]),),
    )


@pytest.mark.parametrize("number", range(7))
def test_programs_pickle_with_what_they_run(number):
    function, arguments = list(_programs())[number]
    program = dtorch.jit(function).program(*arguments)
    copied = pickle.loads(pickle.dumps(program))
    assert isinstance(copied, Program)
    assert str(copied) == str(program)
    verify(copied)
    assert str(lower(copied)) == str(lower(program))
    local = pickle.loads(pickle.dumps(lower(program)))
    assert str(local) == str(lower(program))
    assert local.sources == lower(program).sources


def test_instructions_compare_by_value():
    a, b = _mlp(), _mlp()
    assert a.instructions == b.instructions
    assert {type(i) for i in a.instructions} == {Apply, Redistribute}


def test_programs_run_as_they_print():
    x, up, down = values((4, 8)), values((16, 8), seed=1), values((8, 16), seed=2)

    def mlp(x, up, down):
        return F.rms_norm(F.linear(F.relu(F.linear(x, up)), down), (8,))

    arguments = [
        spread(x, NAMED, [S(0), R]),
        spread(up, NAMED, [R, S(0)]),
        spread(down, NAMED, [R, S(1)]),
    ]
    program = dtorch.jit(mlp).program(*arguments)
    assert [i.split("#")[0].strip() for i in str(program).splitlines()[1:]] == [
        i.split("#")[0].strip() for i in MLP.splitlines()[1:]
    ]
    check(dtorch.jit(mlp)(*arguments), mlp(x, up, down), rtol=1e-5, atol=1e-5)


# -- what is recorded once -----------------------------------------------------------------


def _ops(program):
    return [i.op for i in program.instructions if isinstance(i, Apply)]


def _program_of(function, *shapes):
    program = dtorch.jit(function).program(*(spread(values(s), PAIR, [S(0)]) for s in shapes))
    verify(program)
    return program


def test_a_view_that_changes_nothing_is_not_recorded():
    program = _program_of(lambda x: x.view(4, 6).expand(4, 6)[:, :].relu(), (4, 6))
    assert _ops(program) == [aten.relu.default]


def test_the_same_view_is_recorded_once():
    program = _program_of(lambda x: x.t().relu() + x.t().exp() + x[None][0].t(), (4, 4))
    assert _ops(program).count(aten.t.default) == 2


def test_a_view_of_what_has_changed_is_another_view():
    def function(x):
        x = x.clone()
        before = x.t().relu()
        x.add_(1)
        return before + x.t()

    x = values((4, 4))
    assert torch.equal(dtorch.jit(function)(spread(x, PAIR, [S(0)])).to_torch(), function(x))


def test_constants_are_not_in_the_program():
    def function(x):
        for _ in range(3):
            x = x * (1.0 / 10.0 ** (torch.arange(0, 6, dtype=x.dtype, device=x.device) / 6))
        return x

    ops = _ops(_program_of(function, (4, 6)))
    assert ops == [aten.mul.Tensor] * 3


def test_constants_of_different_numbers_are_kept_apart():
    def function(x):
        return x * torch.full((6,), 0.0) + x / torch.full((6,), -0.0)

    x = values((4, 6))
    assert torch.equal(dtorch.jit(function)(spread(x, PAIR, [S(0)])).to_torch(), function(x))


def test_run_time_scalars_are_kept_apart_where_they_are_equal_in_the_trace():
    def function(x, a, b):
        return x * torch.full((6,), a) + torch.full((6,), b)

    jitted, x = dtorch.jit(function), values((4, 6))
    for a, b in ((2.0, 2.0), (3.0, 5.0)):
        found = jitted(spread(x, PAIR, [S(0)]), a, b).to_torch()
        assert torch.equal(found, function(x, a, b))
    assert jitted.cache_info().misses == 1


def test_random_numbers_are_drawn_each_time():
    def function(x):
        return torch.stack([torch.rand(4), torch.rand(4)]) + 0 * x.sum()

    first, second = dtorch.jit(function)(spread(values((4, 6)), PAIR, [S(0)])).to_torch()
    assert not torch.equal(first, second)


def test_what_is_computed_again_from_arguments_is_left():
    program = _program_of(lambda x: x.exp() + x.exp(), (4, 6))
    assert _ops(program).count(aten.exp.default) == 2


def test_two_equal_constants_can_both_be_changed():
    def function(x):
        a, b = torch.zeros(6), torch.zeros(6)
        a[0] = 1
        return a + x, b + x

    x = values((4, 6))
    found = dtorch.jit(function)(spread(x, PAIR, [S(0)]))
    for left, right in zip(found, function(x), strict=True):
        assert torch.equal(left.to_torch(), right)


def test_two_equal_constants_are_two_results():
    a, b = dtorch.jit(lambda x: (torch.zeros(6) + 0, torch.zeros(6) + 0))(
        spread(values((4, 6)), PAIR, [S(0)])
    )
    a.add_(1)
    assert torch.equal(a.to_torch(), torch.ones(6))
    assert torch.equal(b.to_torch(), torch.zeros(6))
