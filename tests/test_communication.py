"""What a program communicates, read from the program."""

import torch
from layouts import PAIR, SQUARE, SUM, R, S, spread, values

import dtorch
from dtorch.communication import summarize
from dtorch.redistribution import Collective


def program(function, *placed):
    mesh = PAIR if len(placed[0][1]) == 1 else SQUARE
    tensors = [spread(values(shape), mesh, placements) for shape, placements in placed]
    return dtorch.jit(function).program(*tensors)


def test_a_program_that_keeps_its_shards_communicates_nothing():
    summary = summarize(program(torch.exp, ((4, 6), [S(1)])))
    assert (summary.communications, summary.gathers, summary.replicated) == ((), (), ())
    assert summary.num_bytes == 0


def test_a_gather_names_its_reader_and_the_users_line():
    summary = summarize(program(lambda x: torch.softmax(x, 1), ((2, 6), [S(1)])))
    (found,) = summary.communications
    assert found.reader is torch.ops.aten.softmax.int
    assert found.source is not None
    assert found.source.file == __file__
    assert found.num_bytes == summary.num_bytes > 0
    assert str(found).startswith(f"{found.collective.value} [S(1)] -> [")


def test_an_axis_that_splits_no_longer_is_gathered():
    whole = summarize(program(lambda x: torch.linalg.det(x), ((4, 4), [S(1)])))
    assert len(whole.gathers) == 1
    assert whole.communications[0].collective is Collective.ALL_GATHER
    moved = summarize(program(lambda x: torch.softmax(x, 1), ((4, 6), [S(1)])))
    assert moved.gathers == ()
    assert moved.communications[0].collective is Collective.ALL_TO_ALL


def test_a_reduction_is_no_gather():
    def doubled(x):
        return torch.exp(x.sum(1))

    summary = summarize(program(doubled, ((4, 6), [S(1), R])))
    assert summary.gathers == ()
    assert [c.axes for c in summary.communications] == [(0,)]
    summary = summarize(program(torch.exp, ((4, 6), [SUM])))
    assert summary.gathers == ()
    assert len(summary.communications) == 1


def test_an_operation_without_a_rule_is_named():
    summary = summarize(program(torch.linalg.det, ((4, 4), [S(0)])))
    assert [a.op.overloadpacket for a in summary.replicated] == [torch.ops.aten._linalg_det]


def test_what_is_returned_in_another_layout_has_no_reader():
    def moved(x):
        return x.redistribute(placements=[R])

    summary = summarize(program(moved, ((4, 4), [S(0)])))
    assert [c.reader for c in summary.communications] == [None]
    assert len(summary.gathers) == 1
