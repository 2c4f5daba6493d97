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
    summary = summarize(program(lambda x: x.median(1), ((2, 6), [S(1)])))
    (found,) = summary.communications
    assert found.reader is torch.ops.aten.median.dim
    assert found.source is not None
    assert found.source.file == __file__
    assert found.num_bytes == summary.num_bytes > 0
    assert str(found).startswith(f"{found.collective.value} [S(1)] -> [")


def test_an_axis_that_splits_no_longer_is_gathered():
    whole = summarize(program(lambda x: torch.linalg.det(x), ((4, 4), [S(1)])))
    assert len(whole.gathers) == 1
    assert whole.communications[0].collective is Collective.ALL_GATHER
    moved = summarize(program(lambda x: x.median(1), ((4, 6), [S(1)])))
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
    summary = summarize(program(torch.block_diag, ((4, 4), [S(0)])))
    assert [a.op.overloadpacket for a in summary.replicated] == [torch.ops.aten.block_diag]


def test_what_is_returned_in_another_layout_has_no_reader():
    def moved(x):
        return x.redistribute(placements=[R])

    summary = summarize(program(moved, ((4, 4), [S(0)])))
    assert [c.reader for c in summary.communications] == [None]
    assert len(summary.gathers) == 1


def test_explain_prints_each_collective_and_runs_nothing(capsys):
    def f(x):
        return torch.block_diag(x.softmax(0) + 1)

    x = spread(values((4, 6)), PAIR, [S(0)])
    runs = dtorch.cache_info()
    for given in (f, dtorch.jit(f)):
        summary = dtorch.explain(given, x)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == (
            "3 communications, 96 bytes a device; 1 operation replicated for want of a rule"
        )
        assert lines[1].split()[:3] == ["line", "for", "collective"]
        assert [line.split()[1:3] for line in lines[2:5]] == [
            ["aten.sub.Tensor", "all_reduce"],
            ["aten.div.Tensor", "all_reduce"],
            ["aten.block_diag.default", "all_gather"],
        ]
        assert lines[2].startswith("test_communication.py:")
        assert "[P(max)] -> [R]" in lines[2]
        assert "aten.block_diag.default has no sharding rule" in lines[5]
        assert (len(summary.communications), summary.num_bytes) == (3, 96)
    assert dtorch.cache_info() == runs


def test_explain_of_what_communicates_nothing(capsys):
    summary = dtorch.explain(lambda x: x + 1, spread(values((4, 6)), PAIR, [S(0)]))
    assert capsys.readouterr().out == (
        "0 communications, 0 bytes a device; 0 operations replicated for want of a rule\n"
    )
    assert repr(summary).startswith("<0 communications")
