"""What a profile records: events by row, their lines, and the file that holds them."""

import gzip
import inspect
import json
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard
from dtorch.errors import DTorchError
from dtorch.profiling import Kind
from dtorch.program import Apply

PAIR = dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
LINE = {}


def mlp(x, up, down):
    h = torch.nn.functional.linear(x, up)
    LINE["linear"] = inspect.currentframe().f_lineno - 1
    h = torch.relu(h)
    return torch.tanh(torch.nn.functional.linear(h, down))


@pytest.fixture
def arguments():
    made = (
        dtorch.rand(8, 16, device_mesh=PAIR, placements=[Replicate()]),
        dtorch.rand(32, 16, device_mesh=PAIR, placements=[Shard(0)]),
        dtorch.rand(16, 32, device_mesh=PAIR, placements=[Shard(1)]),
    )
    dtorch.synchronize()  # or what makes them may run in a profile
    return made


def on(profile, row):
    return [e for e in profile.events if e.row == row]


def check_rows(profile):
    """Slices of a device do not overlap; those of a client are apart or one inside the other."""
    assert list(profile.events) == sorted(profile.events, key=lambda e: e.start)
    for row in {e.row for e in profile.events}:
        around = []
        for event in on(profile, row):
            assert 0 <= event.start <= event.end <= profile.seconds
            while around and around[-1].end <= event.start:
                around.pop()
            assert not around or (event.device is None and event.end <= around[-1].end)
            around.append(event)


def test_every_instruction_is_on_every_device_with_its_line(arguments):
    step = dtorch.jit(mlp)
    program = step.program(*arguments)
    with dtorch.profile() as profile:
        step(*arguments)
        called = inspect.currentframe().f_lineno - 1
    check_rows(profile)
    (call,) = [e for e in on(profile, "client MainThread") if e.kind is Kind.CALL]
    assert (call.name, call.source.line) == ("mlp", called)
    for row in ("cpu:0 compute", "cpu:1 compute"):
        events = on(profile, row)
        ran = [e.name for e in events if e.kind is Kind.COMPUTE]
        assert ran == [str(i.op) for i in program.instructions if isinstance(i, Apply)]
        moved = [e for e in events if e.kind is not Kind.COMPUTE]
        names = ["show for all_reduce", "wait for all_reduce", "all_reduce"]
        assert [e.name for e in moved] == names
        assert moved[1].kind is Kind.WAIT
        (communication,) = program.communication()
        for event in moved:
            assert event.num_bytes == communication.step.num_bytes > 0
            assert event.axes == ("tp",)
        for event in events:
            assert (event.call, event.program) == (call.call, "mlp")
            assert event.source.file == __file__
            assert event.source.function == "mlp"
            assert event.called_at.line == called
            assert event.instruction
        assert events[0].source.line == LINE["linear"]
        assert min(e.start for e in events) >= call.start


def test_the_trace_is_what_the_events_say(arguments, tmp_path):
    step = dtorch.jit(mlp)
    for name in ("trace.json", "trace.json.gz"):
        with dtorch.profile(tmp_path / name) as profile:
            step(*arguments)
        read = gzip.open if name.endswith(".gz") else open
        with read(tmp_path / name, "rt") as file:
            trace = json.load(file)["traceEvents"]
        slices = [t for t in trace if t["ph"] == "X"]
        assert [t["name"] for t in slices] == [e.name for e in profile.events]
        assert [t["cat"] for t in slices] == [e.kind.value for e in profile.events]
        starts = [t["ts"] for t in slices]
        assert starts == sorted(starts)
        assert all(t["dur"] >= 0 for t in slices)
        rows = {
            (t["pid"], t["tid"]): t["args"]["name"] for t in trace if t["name"] == "thread_name"
        }
        assert [rows[t["pid"], t["tid"]] for t in slices] == [e.row for e in profile.events]
        assert list(rows.values()) == ["client MainThread", "cpu:0 compute", "cpu:1 compute"]
        (reduce, _) = [t for t in slices if t["name"] == "all_reduce"]
        assert reduce["args"]["axes"] == "tp"
        assert reduce["args"]["bytes"] > 0
        assert reduce["args"]["source"].startswith(__file__)
        starts = {t["id"]: t for t in trace if t["ph"] == "s"}
        ends = {t["id"]: t for t in trace if t["ph"] == "f"}
        assert starts.keys() == ends.keys()
        arrived = sorted(rows[t["pid"], t["tid"]] for t in ends.values())
        assert arrived == ["cpu:0 compute", "cpu:1 compute"]
        assert all(starts[i]["ts"] <= ends[i]["ts"] for i in starts)


def test_tracing_is_a_slice_of_the_first_call(arguments):
    def fresh(x):
        return x * 2

    step = dtorch.jit(fresh)
    with dtorch.profile() as profile:
        step(arguments[0])
        step(arguments[0])
    check_rows(profile)
    client = [(e.kind, e.name) for e in on(profile, "client MainThread")]
    assert client == [
        (Kind.CALL, "fresh"),
        (Kind.TRACE, "trace fresh"),
        (Kind.CALL, "fresh"),
    ]


def test_an_eager_call_has_its_own_line_each_time():
    x = dtorch.ones(4, device_mesh=PAIR, placements=[Shard(0)])
    x + 1  # traced here
    dtorch.synchronize()
    with dtorch.profile() as profile:
        x + 1
        first = inspect.currentframe().f_lineno - 1
        x + 1
        x.to_torch()
    check_rows(profile)
    client = on(profile, "client MainThread")
    assert [e.kind for e in client] == [Kind.CALL, Kind.CALL, Kind.FETCH]
    for row in (client[:2], on(profile, "cpu:0 compute"), on(profile, "cpu:1 compute")):
        assert [e.source.line for e in row] == [first, first + 2]
        assert [e.call for e in row] == [e.call for e in client[:2]]
        assert all(e.called_at is None for e in row)


def test_calls_that_do_more_than_compute_are_one_slice_each():
    x = dtorch.zeros(4, device_mesh=PAIR, placements=[Shard(0)])
    view = x[:2]
    for _ in range(2):  # the second time from the cache
        with dtorch.profile() as profile:
            x.add_(1)
            dtorch.rand(4, device_mesh=PAIR, placements=[Shard(0)])
            torch.nonzero(x)
        check_rows(profile)
        client = [e for e in on(profile, "client MainThread") if e.kind is Kind.CALL]
        names = [e.name for e in client]
        assert [n for n in names if n in ("add_", "rand", "nonzero")] == ["add_", "rand", "nonzero"]
        assert all(names)
        assert {e.source.file for e in client} == {__file__}
    assert view.tolist() == [2, 2]


def test_a_backward_is_recorded(arguments):
    x, up, down = arguments
    up.requires_grad_()
    step = dtorch.jit(mlp)
    with dtorch.profile() as profile:
        step(x, up, down).sum().backward()
    check_rows(profile)
    calls = [e for e in on(profile, "client MainThread") if e.kind is Kind.CALL]
    assert ("mlp", "forward") in [(e.name, e.program) for e in calls]
    assert "backward" in [e.name for e in calls]
    assert {e.program for e in on(profile, "cpu:0 compute")} >= {"forward", "backward"}


def test_nothing_submitted_in_the_block_is_lost(arguments):
    def long(x):
        for _ in range(300):
            x = x + 1
        return x

    step = dtorch.jit(long)
    step(arguments[1]).to_torch()
    with dtorch.profile() as profile:
        for _ in range(5):
            step(arguments[1])
    for row in ("cpu:0 compute", "cpu:1 compute"):
        assert len(on(profile, row)) == 1500


def test_what_was_submitted_before_is_there_without_its_call():
    x = dtorch.ones(1500, 1500)
    step = dtorch.jit(lambda x: x @ x @ x @ x)
    step(x).to_torch()
    step(x)
    with dtorch.profile() as profile:
        pass
    check_rows(profile)
    assert all(e.call == 0 for e in profile.events)
    assert profile.events
    assert all(e.device is not None and e.source.file == __file__ for e in profile.events)


def test_each_client_thread_has_a_row(arguments):
    x = arguments[0]
    (x + 1).to_torch()

    def work():
        for _ in range(20):
            x + 1

    threads = [threading.Thread(target=work, name="feeder") for _ in range(2)]
    with dtorch.profile() as profile:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        x + 1
    check_rows(profile)
    rows = {e.row for e in profile.events if e.device is None}
    assert rows == {"client feeder", "client feeder (2)", "client MainThread"}
    assert len(on(profile, "client feeder")) == len(on(profile, "client feeder (2)")) == 20
    assert len(on(profile, "cpu:0 compute")) == 41


def test_an_error_in_the_block_leaves_the_trace(arguments, tmp_path):
    x = arguments[0]
    path = tmp_path / "trace.json"
    with pytest.raises(ZeroDivisionError, match="division"), dtorch.profile(path) as profile:
        x + 1
        _ = 1 / 0
    assert len(on(profile, "cpu:0 compute")) == 1
    assert json.loads(path.read_text())["traceEvents"]
    with dtorch.profile():  # and another may begin
        pass


def test_a_failing_instruction_is_recorded():
    x = torch.zeros(4, 4)
    with dtorch.profile() as profile:
        broken = dtorch.linalg.cholesky(
            dtorch.Tensor(x, device_mesh=PAIR, placements=[Replicate()])
        )
    with pytest.raises(Exception, match="cholesky"):
        broken.to_torch()
    assert len([e for e in on(profile, "cpu:0 compute") if "cholesky" in e.name]) == 1


def test_one_profile_at_a_time(tmp_path):
    second = dtorch.profile()
    message = r"already being recorded, since .*test_profile.py:"
    with dtorch.profile() as profile, pytest.raises(DTorchError, match=message):
        second.__enter__()
    with pytest.raises(DTorchError, match=r"recorded already"):
        profile.__enter__()
    with pytest.raises(FileNotFoundError, match=r"there is no folder"):
        dtorch.profile(tmp_path / "missing" / "trace.json")
    with pytest.raises(IsADirectoryError, match=r"which is a folder.\n  Fix: .*trace.json"):
        dtorch.profile(tmp_path)


def test_times_of_devices_add_up(arguments):
    step = dtorch.jit(mlp)
    step(*arguments)
    dtorch.synchronize()
    with dtorch.profile() as profile:
        time.sleep(0.01)
        step(*arguments)
    assert list(profile.devices) == ["cpu:0", "cpu:1"]
    for name, spent in profile.devices.items():
        total = spent.compute + spent.communication + spent.wait + spent.idle
        assert total == pytest.approx(profile.seconds)
        busy = sum(end - start for start, end in profile.busy(name))
        assert busy == pytest.approx(spent.compute)
        assert spent.idle > 0.009
    first, head, *rows = profile.summary().split("\n")
    assert first.endswith(f"2 devices, {len(profile.events)} events")
    assert head.split() == ["device", "compute", "communication", "wait", "idle"]
    assert [row.split()[0] for row in rows] == ["cpu:0", "cpu:1"]


def test_stages_overlap():
    mesh = dtorch.DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("pp", "tp"))
    x = [
        dtorch.ones(400, 400, device_mesh=stage, placements=[Replicate()])
        for stage in mesh.unbind("pp")
    ]

    def chain(x):
        for _ in range(60):
            x = x @ x * 0.01
        return x

    step = dtorch.jit(chain)
    for part in x:
        step(part).to_torch()
    with dtorch.profile() as profile:
        for part in x:
            step(part)
    both = profile.overlap("cpu:0", "cpu:1")
    assert 0 < both <= profile.devices["cpu:0"].compute
    assert profile.overlap("cpu:0", "cpu:0") == pytest.approx(profile.devices["cpu:0"].compute)
    assert profile.overlap("cpu:0", "cpu:7") == 0


def test_a_transfer_is_shown_by_one_stage_and_taken_by_the_next():
    first, second = dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("pp",)).unbind("pp")
    x = dtorch.ones(4, device_mesh=first, placements=[])
    y = dtorch.ones(4, device_mesh=second, placements=[])
    step = dtorch.jit(lambda x, y: torch.exp(x) + y)
    step(x, y)
    dtorch.synchronize()
    with dtorch.profile() as profile:
        step(x, y)
    check_rows(profile)
    shown = [e.name for e in on(profile, "cpu:0 compute")]
    taken = [e.name for e in on(profile, "cpu:1 compute")]
    assert shown == ["aten.exp.default", "show for transfer"]
    assert taken == ["wait for transfer", "transfer", "aten.add.Tensor"]


def test_a_forked_child_records_nothing_and_writes_nothing(tmp_path):
    script = """
        import os, sys, dtorch
        x = dtorch.ones(4)
        with dtorch.profile(sys.argv[1]) as profile:
            (x + 1).to_torch()
            child = os.fork()
            if child == 0:
                y = dtorch.ones(4)
                (y + 1).to_torch()
        if child == 0:
            assert profile.events == ()  # and so none are written
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert [e.name for e in profile.events].count("aten.add.Tensor") == 1
    """
    path = tmp_path / "trace.json"
    command = [sys.executable, "-c", textwrap.dedent(script), str(path)]
    subprocess.run(command, check=True, timeout=100)
    assert json.loads(path.read_text())["traceEvents"]


def test_nothing_is_recorded_outside():
    x = dtorch.ones(4)
    with dtorch.profile():
        pass
    (x + 1).to_torch()
    with dtorch.profile() as profile:
        pass
    assert profile.events == ()
    assert profile.summary().endswith(
        "0 devices, 0 events\ndevice  compute  communication  wait  idle"
    )


def test_what_is_no_device_has_no_times():
    with dtorch.profile() as profile:
        pass
    assert profile.busy("cpu:0") == []
    for ask in (lambda: profile.busy("foo"), lambda: profile.overlap("cpu:0", "cpu")):
        with pytest.raises(ValueError, match=r"is not the name of a device.\n  Fix:"):
            ask()
