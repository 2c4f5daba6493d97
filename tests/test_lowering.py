"""Lowering: tables for what differs between devices, and slots freed at their last use."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from layouts import PAIR, SQUARE, TRIPLE, R, S, check, check_local, spread, values

import dtorch
from dtorch.builder import Builder
from dtorch.lowering import (
    LocalCall,
    LocalShow,
    LocalStep,
    PerDevice,
    lower,
    slots_read,
    slots_written,
)
from dtorch.mesh import Device, DeviceMesh
from dtorch.program import Ref
from dtorch.spec import Spec

aten = torch.ops.aten


def _lowered(function, *arguments):
    return lower(dtorch.jit(function).program(*arguments))


def _tables(local):
    return [a for i in local.instructions for a in i.args if type(a) is PerDevice]


def test_an_operation_is_lowered_to_itself():
    local = _lowered(lambda x: x.relu(), spread(values((4, 2)), PAIR, [S(0)]))
    (call,) = local.instructions
    assert isinstance(call, LocalCall)
    assert (call.op, call.args, call.outputs) == (aten.relu.default, (Ref(0),), (1,))
    assert local.devices == (Device("cpu", 0), Device("cpu", 1))
    assert str(local) == (
        "local <lambda> on cpu:0, cpu:1:\n  %1 = aten.relu.default(%0)  free %0\n  return %1"
    )


def test_even_views_need_no_table():
    local = _lowered(lambda x: x.view(4, 2, 2), spread(values((4, 4)), PAIR, [S(0)]))
    assert local.instructions[0].args == (Ref(0), (2, 2, 2))


def test_uneven_views_have_a_table():
    local = _lowered(lambda x: x.view(5, 2, 2), spread(values((5, 4)), TRIPLE, [S(0)]))
    (table,) = _tables(local)
    assert table == PerDevice([(2, 2, 2), (2, 2, 2), (1, 2, 2)])


def test_a_table_is_in_the_order_of_the_mesh():
    mesh = DeviceMesh("cpu", [5, 1])
    x = spread(values((3, 4)), mesh, [S(0)])
    local = _lowered(lambda x: x.view(3, 2, 2), x)
    assert local.devices == (Device("cpu", 5), Device("cpu", 1))
    assert _tables(local) == [PerDevice([(2, 2, 2), (1, 2, 2)])]
    check(x.view(3, 2, 2), values((3, 4)).view(3, 2, 2))


def test_factories_make_their_own_part():
    def make():
        return dtorch.zeros(5, 2, device_mesh=TRIPLE, placements=[S(0)])

    local = _lowered(make)
    assert _tables(local) == [PerDevice([(2, 2), (2, 2), (1, 2)])]
    counted = _lowered(lambda: dtorch.arange(7, device_mesh=PAIR, placements=[S(0)]))
    assert _tables(counted) == [PerDevice([0, 4]), PerDevice([4, 7])]


def test_expand_takes_local_sizes():
    local = _lowered(lambda x: x.expand(3, 5), spread(values((5,)), PAIR, [S(0)]))
    assert _tables(local) == [PerDevice([(3, 3), (3, 2)])]


def test_an_embedding_over_its_rows_is_masked():
    ids, table = torch.tensor([0, 2]), values((3, 4))
    local = _lowered(F.embedding, spread(ids, PAIR, [R]), spread(table, PAIR, [S(0)]))
    assert PerDevice([0, 2]) in _tables(local)
    assert local.num_slots > 3
    check_local(local)
    assert aten.constant_pad_nd.default not in [i.op for i in local.instructions]


def test_an_embedding_with_an_empty_shard_is_padded_there():
    ids, table = torch.tensor([0, 3]), values((4, 2))
    local = _lowered(F.embedding, spread(ids, TRIPLE, [R]), spread(table, TRIPLE, [S(0)]))
    (padded,) = [i for i in local.instructions if i.op is aten.constant_pad_nd.default]
    assert padded.args[1] == PerDevice([(0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1)])


def test_steps_are_kept_as_steps():
    local = _lowered(
        lambda x: torch.relu(x.sum(0)), spread(values((4, 2)), DeviceMesh("cpu", [0, 1]), [S(0)])
    )
    show, step = local.instructions[1:3]
    assert isinstance(show, LocalShow) and isinstance(step, LocalStep)
    assert show.step is step.step and step.step.source.mesh == PAIR
    assert "show %1 for #1  free %1\n  %2 = all_reduce(#1)\n" in str(local)


def test_what_peers_need_is_shown_as_soon_as_it_is_there():
    def function(x, y):
        a = y * 2
        b = x.redistribute(placements=[R])
        return a.redistribute(placements=[R]) + b + 1

    x, y = spread(values((4, 2)), PAIR, [S(0)]), spread(values((4, 2)), PAIR, [S(0)])
    local = _lowered(function, x, y)
    kinds = [type(i) for i in local.instructions]
    assert kinds[:3] == [LocalShow, LocalCall, LocalShow]
    assert kinds.count(LocalStep) == 2 and kinds[-1] is LocalCall
    check_local(local)


def test_a_slot_is_freed_after_its_last_use():
    def function(x):
        y = x.relu()
        return (y + y.exp()).sum()

    local = _lowered(function, spread(values((4, 2)), PAIR, [S(0)]))
    check_local(local)
    assert [i.frees for i in local.instructions] == [(0,), (), (1, 2), (3,)]


def test_outputs_and_what_they_share_are_not_freed():
    def function(x):
        y = x.relu()
        return y, y.exp()

    local = _lowered(function, spread(values((4, 2)), PAIR, [S(0)]))
    freed = {s for i in local.instructions for s in i.frees}
    assert not freed & {s for s, _ in local.outputs}


def test_unused_results_are_freed_at_once():
    local = _lowered(lambda x: x.sort(0)[1], spread(values((4, 2)), PAIR, [S(1)]))
    (call,) = local.instructions
    unused = set(slots_written(call)) - {local.outputs[0][0]}
    assert unused <= set(call.frees)


def test_the_check_of_frees_finds_planted_faults():
    local = _lowered(lambda x: x.relu().exp(), spread(values((4, 2)), PAIR, [S(0)]))
    check_local(local)
    first, second = local.instructions
    early = dataclasses.replace(first, frees=(0, 1))
    with pytest.raises(AssertionError, match="freed slot"):
        check_local(dataclasses.replace(local, instructions=(early, second)))
    never = dataclasses.replace(second, frees=())
    with pytest.raises(AssertionError, match="never freed"):
        check_local(dataclasses.replace(local, instructions=(first, never)))
    output = dataclasses.replace(second, frees=(1, 2))
    with pytest.raises(AssertionError, match="an output is freed"):
        check_local(dataclasses.replace(local, instructions=(first, output)))
    with pytest.raises(AssertionError, match="unfilled slot"):
        check_local(dataclasses.replace(local, instructions=(second,)))


def test_reads_and_writes_include_the_generator_state():
    local = _lowered(lambda x: x + torch.rand(4), spread(values((4,)), PAIR, [R]))
    (draw,) = [i for i in local.instructions if isinstance(i, LocalCall) and i.draws]
    assert draw.draws[0] in slots_read(draw)
    assert draw.draws[1] in slots_written(draw)
    check_local(local)


def test_a_device_takes_part_in_what_is_on_its_meshes_only():
    first, second = DeviceMesh("cpu", [[0, 1], [2, 3]]).unbind(0)
    builder = Builder(lambda: None)
    x = builder.add_input(Spec.of((4,), torch.float32, first, (S(0),)))
    y = builder.add_input(Spec.of((4,), torch.float32, second, (S(0),)))
    (a,) = builder.apply(aten.relu.default, (Ref(x),), {})
    (z,) = builder.apply(aten.add.Tensor, (Ref(a), Ref(y)), {})
    local = lower(builder.finish([z], "f"))
    assert len(local.devices) == 4
    relu, show, step, add = local.instructions
    assert isinstance(relu, LocalCall) and relu.mesh == first
    assert isinstance(add, LocalCall) and add.mesh == second
    assert isinstance(show, LocalShow) and isinstance(step, LocalStep)
    assert (step.step.source.mesh, step.step.target.mesh) == (first, second)
    assert local.inputs == ((x, first), (y, second))
    assert local.outputs == ((z, second),)


def test_messages_keep_the_global_instruction_and_line():
    local = _lowered(lambda x: x.view(2, 8), spread(values((4, 4)), SQUARE, [S(0), S(1)]))
    assert any("aten.view.default(" in t for t in local.texts)
    assert all(s.short.startswith("test_lowering.py:") for s in local.sources)
