"""The ranges that name what workers do for tools that watch the process, on recorded lanes."""

import itertools
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import streams as recorded_streams
import torch

import dtorch
from dtorch import Replicate, Shard
from dtorch.profiling import Profile
from dtorch.runtime import EXECUTOR, NATIVE, streams

Devices = tuple[list[int], Callable[[], list[str]]]
_ids = itertools.count(1 << 31, 8)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    """Ids of devices that run behind the host, and what gives their ranges since it was asked."""
    if EXECUTOR == "python":
        with recorded_streams.recorded() as (world, ids):

            def take() -> list[str]:
                taken, world.ranges = world.ranges, []
                return taken

            yield ids, take
        return
    monkeypatch.setattr(streams, "place_of", lambda device: torch.device("cpu"))
    first = next(_ids)
    NATIVE.trace_lanes(True)
    try:
        yield (
            list(range(first, first + 8)),
            lambda: [x for x in NATIVE.take_lane_trace() if re.search(" (push|pop)", x)],
        )
    finally:
        NATIVE.trace_lanes(False)


def check(profile: Profile, ranges: list[str]) -> dict[str, list[str]]:
    """Each device has a range for each of its events, of that name, closed before the next."""
    found: dict[str, list[str]] = {name: [] for name in profile.devices}
    ranges = sorted(ranges, key=lambda line: line.split()[0])
    for pushed, popped in zip(ranges[::2], ranges[1::2], strict=True):
        device, _, name = re.split(" (push) ", pushed)
        assert popped == f"{device} pop"
        found[device].append(name)
    for device, names in found.items():
        events = [e for e in profile.events if e.row == f"{device} compute"]
        assert names == [e.name for e in events]
    return found


def test_names_are_those_of_the_events(devices: Devices) -> None:
    ids, take = devices
    first, second = (dtorch.DeviceMesh("cpu", i) for i in (ids[:4], ids[4:6]))

    @dtorch.jit
    def compute(x: dtorch.Tensor) -> dtorch.Tensor:
        whole = x.sum(0).redistribute(placements=[Replicate()])
        part = (whole + 1).redistribute(placements=[Shard(0)])
        return part.redistribute(second, [Shard(0)]) * 3

    x = dtorch.tensor(torch.ones(4, 1 << 16), device_mesh=first, placements=[Shard(0)])
    compute(x)  # traced, and bound to the devices
    dtorch.synchronize()
    assert take() == []  # no profile is recorded
    with dtorch.profile() as profile:
        y = compute(x)
        dtorch.synchronize()
    found = check(profile, take())
    reduced = ["wait for all_reduce", "all_reduce"] * 2  # in two rounds
    assert found[f"cpu:{ids[1]}"] == [
        "aten.sum.dim_IntList", "show for all_reduce", *reduced, "aten.add.Tensor", "slice",
        "show for transfer",
    ]  # fmt: skip
    assert found[f"cpu:{ids[5]}"] == ["wait for transfer", "transfer", "aten.mul.Tensor"]
    torch.testing.assert_close(y.to_torch(), torch.full((1 << 16,), 15.0))
    assert take() == []


def test_a_range_ends_where_its_instruction_fails(devices: Devices) -> None:
    ids, take = devices
    mesh = dtorch.DeviceMesh("cpu", ids[:2])
    x = dtorch.tensor(torch.zeros(4, 4), device_mesh=mesh, placements=[Replicate()])

    @dtorch.jit
    def compute(x: dtorch.Tensor) -> dtorch.Tensor:
        part = torch.linalg.cholesky(x).redistribute(placements=[Shard(0)])
        return (part + 1).redistribute(placements=[Replicate()])

    dtorch.synchronize()
    take()
    with dtorch.profile() as profile:
        y = compute(x)
        dtorch.synchronize()
    for names in check(profile, take()).values():
        assert any("cholesky" in name for name in names)
        assert names[-1] == "wait for all_gather"  # what is taken is a failure
    with pytest.raises(Exception, match="cholesky"):
        y.to_torch()


def test_a_range_ends_where_the_workers_stop() -> None:
    code = """
        import threading, time
        import torch
        import dtorch
        from dtorch.runtime import EXECUTOR, NATIVE, stop, streams

        ended, trace = threading.Event(), []

        class Event:
            def query(self): return True
            def synchronize(self): pass

        class Lanes:
            def __init__(self, device): self.device = device
            def begin(self): pass
            def on(self, lane): return torch.inference_mode()
            def record(self, lane): return Event()
            def wait(self, lane, event): pass
            def keep(self, lane, tensors): pass
            def push(self, name): trace.append(f"{self.device} push {name}")
            def pop(self): trace.append(f"{self.device} pop")

        streams.place_of = lambda device: torch.device("cpu")
        if EXECUTOR == "python":
            streams.lanes_of = Lanes
        else:
            NATIVE.trace_lanes(True)

        @torch.library.custom_op("dtorch_test::slow", mutates_args=())
        def slow(x: torch.Tensor) -> torch.Tensor:
            ended.wait()  # until the workers stop
            return x.clone()
        slow.register_fake(torch.empty_like)

        first, second = dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("pp",)).unbind("pp")
        x = dtorch.ones(4, device_mesh=first, placements=[])
        y = dtorch.ones(4, device_mesh=second, placements=[])
        step = dtorch.jit(lambda x, y: slow(x) + y)
        step.program(x, y)
        dtorch.synchronize()
        with dtorch.profile() as profile:
            step(x, y)
            while not any(line.startswith("cpu:1 push wait") for line in trace):
                time.sleep(0.01)
                trace += NATIVE.take_lane_trace() if NATIVE else []
            threading.Timer(1, ended.set).start()  # later than that waiting ends
            stop()
        trace += NATIVE.take_lane_trace() if NATIVE else []
        print("\\n".join(line for line in trace if line.startswith("cpu:1 p")))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    *lines, second, first = done.stdout.splitlines()[::-1]
    assert (first, second) == ("cpu:1 push wait for transfer", "cpu:1 pop")
    assert [line.split()[1] for line in lines] == ["pop", "push"] * (len(lines) // 2)


def test_ranges_of_cuda_are_those_of_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    for kind in ("cuda", "xpu"):
        lanes = streams.TorchLanes(torch.device(kind, 0))
        lanes.push(f"a range of {kind}")
        lanes.pop()
    assert seen == ["a range of cuda", "pop"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="where Linux has thread names")
def test_worker_threads_have_names() -> None:
    number = next(_ids) % 1000 + 4000
    dtorch.ones(1, device_mesh=dtorch.DeviceMesh("cpu", [number])).to_torch()
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert f"dtorch-cpu:{number}" in names
