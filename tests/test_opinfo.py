"""PyTorch's OpInfo entries: right in every layout that is tried, or known not to be.

``opinfo_expected.txt`` names every entry, and what is known to go wrong with it. An entry that
comes out otherwise, for better or worse, fails here; write the file anew with ``python -m
dtorch.test.opinfo --quick --jobs 2 --expect tests/opinfo_expected.txt`` and read its diff. The
full sweep is the same command without ``--quick``.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from layouts import PAIR, SQUARE, SUM, TRIPLE, R, S, placements_of, sample, values

import dtorch
from dtorch.placement import Partial
from dtorch.test.opinfo import check, compare, entries, layouts, pool, report
from dtorch.test.opinfo.compare import Expected
from dtorch.test.opinfo.entries import Call, Tolerance
from dtorch.test.opinfo.layouts import Layout
from dtorch.test.opinfo.sweep import QUICK, Failure, Plan, Result

FILE = Path(__file__).with_name("opinfo_expected.txt")
EXPECTED = report.expectations(FILE.read_text(encoding="utf-8"))
SECONDS = 240
EXACT = Tolerance(0, 0)

WRITTEN_BY = "2.13."
"""The torch whose entries the file names; another one may lack some of them."""


def known(names: Iterable[str]) -> list[str]:
    """Those that this torch must have, or has."""
    if torch.__version__.startswith(WRITTEN_BY):
        return list(names)
    return sorted({*names} & {*entries.names(torch.float32)})


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[pool.Pool]:
    """The entries of the tests that were selected, in worker processes."""
    selected = [getattr(item, "callspec", None) for item in request.session.items]
    names = [c.params["entry"] for c in selected if c is not None and "entry" in c.params]
    started = pool.Pool(known(names), QUICK, jobs=2)
    yield started
    started.close()


@pytest.mark.xdist_group("opinfo")  # one process runs them all
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("entry", sample(list(EXPECTED), len(EXPECTED), seed=0))
def test_entry_comes_out_as_expected(entry: str, running: pool.Pool) -> None:
    if entry not in running.results:
        pytest.skip(f"torch {torch.__version__} has no entry {entry}")
    result = running.results[entry].result(timeout=SECONDS)
    failure = report.worst(result)
    text = "right in every layout" if failure is None else str(failure)
    assert result.status == EXPECTED[entry].status, f"{entry} is {result.status}: {text}"


# -- the harness itself --------------------------------------------------------------------


def call_of(function: Callable[..., object], *tensors: torch.Tensor) -> Call:
    return Call(0, tensors, function, lambda result: result)


def outcome(
    call: Call, layout: Layout, expected: list[torch.Tensor], tolerance: Tolerance = EXACT
) -> check.Outcome:
    return check.check_forward(call, dtorch.jit(call), layout, Expected(expected, tolerance))


def test_a_wrong_value_is_found_and_a_right_one_is_not():
    x = values((4, 6))
    call, layout = call_of(torch.neg, x), Layout(PAIR, ((S(1),),))
    assert outcome(call, layout, [-x]) == check.Outcome("right", is_inner=True, is_native=True)
    found = outcome(call, layout, [-x + (x == x[3, 5])])
    assert (found.status, found.how, found.is_native) == ("wrong", "eager", False)
    one = Layout(layouts.MESHES["1"], ((R,),))
    assert outcome(call, one, [-x * (1 + 1e-6)], Tolerance(1e-5, 0)).status == "inexact"
    assert outcome(call, one, [-x * (1 + 1e-4)], Tolerance(1e-5, 0)).status == "wrong"
    assert outcome(call, layout, [-x, x]).message == "1 results, not 2"
    assert "shape" in outcome(call, layout, [-x[:3]]).message
    assert "float64" in outcome(call, layout, [-x.double()]).message


def test_what_only_jit_gets_wrong_is_found():
    x, layout = values((4,)), Layout(PAIR, ((S(0),),))
    other = dtorch.jit(lambda x: x + 1)
    found = check.check_forward(call_of(torch.clone, x), other, layout, Expected([x], EXACT))
    assert (found.status, found.how) == ("wrong", "jit")


def test_what_raises_says_its_first_line_and_what_depends_on_data_is_right():
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no\nmore")

    x, layout = values((4,)), Layout(PAIR, ((S(0),),))
    found = outcome(call_of(refuse, x), layout, [x])
    assert (found.status, found.message) == ("raised", "ValueError: no")
    assert outcome(call_of(torch.nonzero, x), layout, [x.nonzero()]).status == "data-dependent"


def test_native_is_what_gathers_nothing():
    x = values((4, 6))
    softmax = call_of(lambda x: torch.softmax(x, 1), x)
    close = Tolerance(1e-5, 1e-5)
    rows = outcome(softmax, Layout(PAIR, ((S(0),),)), [x.softmax(1)], close)
    assert (rows.status, rows.is_inner, rows.num_bytes) == ("right", False, 0)
    det = call_of(torch.linalg.det, values((4, 4)))
    columns = outcome(det, Layout(PAIR, ((S(1),),)), [torch.linalg.det(values((4, 4)))], close)
    assert (columns.status, columns.is_inner, columns.is_native) == ("right", True, False)
    assert columns.num_bytes == 4 * 2 * 4


def test_a_sum_over_devices_may_round_and_nothing_else_may():
    x = values((4, 6)) * 1000
    off = x.sum(1) + 6e-4
    summed = call_of(lambda x: x.sum(1), x)
    assert outcome(summed, Layout(PAIR, ((S(1),),)), [off]).status == "right"
    assert outcome(summed, Layout(PAIR, ((S(0),),)), [off]).status == "wrong"
    assert outcome(summed, Layout(PAIR, ((S(1),),)), [off + 1]).status == "wrong"


def test_a_gradient_must_be_right():
    x = values((4, 6)).requires_grad_()
    call, layout = call_of(torch.square, x), Layout(PAIR, ((S(1),),))
    grads = check.expected_gradients(call)
    assert check.check_backward(call, layout, Expected(grads, EXACT)).status == "right"
    for number in range(2):
        others = [g + (i == number) for i, g in enumerate(grads)]
        assert check.check_backward(call, layout, Expected(others, EXACT)).status == "wrong"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("mesh", [PAIR, TRIPLE, SQUARE], ids=lambda m: str(list(m.shape)))
def test_parts_differ_and_make_up_the_value(mesh, dtype):
    value = values((5, 4), dtype) if dtype.itemsize < 4 else values((5, 4), dtype) / 3
    value = value.to(dtype)
    partials = layouts._partials(dtype, mesh.shape[0])
    for placements in placements_of(2, mesh, partials):
        kinds = {p.op for p in placements if isinstance(p, Partial)}
        if len(kinds) > 1:
            continue
        made = layouts.spread(value, mesh, placements)
        assert torch.equal(made.to_torch(), value), placements
        assert torch.equal(made.redistribute(placements=[R] * mesh.ndim).to_torch(), value)
        if kinds:
            shards = list(made.local_shards().values())
            assert not all(torch.equal(s, shards[0]) for s in shards)


def test_layouts_are_drawn_alike_for_a_seed_and_all_are_allowed():
    tensors = [values((4, 6)), values((6,)), values(())]
    drawn = [layouts.draw(tensors, SQUARE, 20, random.Random(3)) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) > 10
    for layout in drawn[0]:
        for tensor, made in zip(tensors, layout.spread(tensors), strict=True):
            assert torch.equal(made.to_torch(), tensor)
    assert any(layouts.splits_inner_dim(layout, tensors) for layout in drawn[0])
    assert any(SUM in p for layout in drawn[0] for p in layout.placements)


def test_an_entry_that_hangs_and_one_that_crashes_are_one_result_each():
    hung = pool.Pool(["add"], QUICK, limit=0.0).results["add"].result(timeout=100)
    assert [f.status for f in hung.failures] == ["hung"]
    process = pool._Process(QUICK, 1)
    process._process.kill()
    process._process.wait()
    crashed = process.ask("add", 60)
    assert [f.status for f in crashed.failures] == ["crashed"]
    assert "SIGKILL" in crashed.failures[0].message
    assert not process.is_alive()


def test_the_report_names_every_failure_once():
    results = [
        Result("good", tried=3, right=3, native=1, inner=2, num_bytes=8),
        Result(
            "bad", tried=2, failures=[Failure("raised", f"here {i}", "jit", "E: no") for i in "ab"]
        ),
    ]
    text = report.table(results, Plan())
    assert "2 entries: 1 right, 1 raised; 1 ran natively sharded" in text
    assert text.count("E: no") == 2
    assert report.expectations(report.expectation_lines(results)) == {
        "good": report.Expectation("right"),
        "bad": report.Expectation("raised", "E: no"),
    }


def test_tolerances_are_wider_over_devices_by_some_units_of_the_largest_value():
    expected = Expected([torch.tensor([64.0])], Tolerance(0, 0), largest=128.0)
    eps = torch.finfo(torch.float32).eps
    assert expected.over_devices().tolerance == (0, compare.NUM_ROUNDINGS * eps * 128)
