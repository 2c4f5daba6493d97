"""The order of launches on devices with streams, on streams that record it."""

import contextlib
import functools
import gc
import threading
from typing import Any

import pytest
import streams as recorded_streams
import torch
from graph_fake import Graph

import dtorch
from dtorch import Replicate, Shard
from dtorch.lowering import LocalStep, lower
from dtorch.runtime import EXECUTOR, NATIVE, graph_calls, streams
from dtorch.runtime.streams import Lane, plan

python_only = pytest.mark.skipif(EXECUTOR != "python", reason="the Python executor's lanes")


@python_only
@pytest.mark.parametrize("pool", [None, 3])
def test_random_programs_have_no_unordered_access(pool: int | None) -> None:
    with recorded_streams.recorded(pool=pool) as (world, ids):
        for seed in range(40):
            recorded_streams.run_program(ids, seed)
        dtorch.synchronize()
        assert world.num_accesses > 1000
        assert world.communicators.num_launches > 40
        assert world.faults == []


@python_only
@pytest.mark.parametrize("fault", ["wait", "keep", "record", "lane", "one lane", "late"])
def test_what_is_left_out_is_found(fault: str) -> None:
    with recorded_streams.recorded(fault) as (world, ids):
        for seed in range(40):
            recorded_streams.run_program(ids, seed)
            if world.faults:
                break
        dtorch.synchronize()
        assert world.faults


@python_only
@pytest.mark.parametrize("fault", ["", "users"])
def test_a_graph_waits_for_those_who_read_what_it_overwrites(fault: str) -> None:
    def step(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return cache.index_copy(0, at, x) * 0.5

    with recorded_streams.recorded(fault) as (world, ids):
        mesh = dtorch.DeviceMesh("cpu", ids[:1])
        jitted = dtorch.jit(step, donate_argnums=0, cuda_graph=True)
        expected = torch.zeros(5, 3)
        cache = dtorch.tensor(expected, device_mesh=mesh)
        x, at = torch.ones(1, 3), torch.tensor([2])
        given = [dtorch.tensor(v, device_mesh=mesh) for v in (x, at)]
        for _ in range(8):
            cache, expected = jitted(cache, *given), step(expected, x, at)
            torch.testing.assert_close(cache.to_torch(), expected)
        dtorch.synchronize()
    assert bool(world.faults) == (fault == "users")


@python_only
@pytest.mark.parametrize("fault", ["", "capture"])
def test_what_others_launch_while_a_graph_is_captured_is_no_part_of_it(fault: str) -> None:
    with recorded_streams.recorded(fault, pool=1) as (world, ids):
        lanes = streams.lanes_of(dtorch.mesh.Device("cpu", ids[0]))
        other = streams.lanes_of(dtorch.mesh.Device("cpu", ids[1]))
        assert lanes is not None and other is not None

        def launch() -> None:
            with other.on(Lane.COMPUTE):
                torch.ones(2)

        def work() -> None:
            thread = threading.Thread(target=launch)
            thread.start()
            thread.join()
            results.append(torch.ones(2) + 1)

        results: list[torch.Tensor] = []
        with lanes.on(Lane.COMPUTE):
            graph = graph_calls.capture(work)
            graph.replay()
        graph.drop()
        assert results[0].tolist() == [2.0, 2.0]
    assert bool(world.faults) == (fault == "capture")


@python_only
@pytest.mark.parametrize("fault", ["", "drop"])
def test_memory_of_a_graph_is_freed_after_its_last_replay(fault: str) -> None:
    with recorded_streams.recorded(fault) as (world, ids):
        jitted = dtorch.jit(lambda x: (x * 2).sin() + 1, cuda_graph=True)
        x = dtorch.ones(4, device_mesh=dtorch.DeviceMesh("cpu", ids[:1]))
        for _ in range(4):
            jitted(x)
        dtorch.synchronize()
        jitted.cache_clear()
        gc.collect()
    assert bool(world.faults) == (fault == "drop")


@python_only
@pytest.mark.parametrize("size", [0, 2])
def test_what_has_no_elements_may_be_read_after_its_graph_is_dropped(size: int) -> None:
    with recorded_streams.recorded() as (world, ids):
        lanes = streams.lanes_of(dtorch.mesh.Device("cpu", ids[0]))
        assert lanes is not None
        results: list[torch.Tensor] = []
        with lanes.on(Lane.COMPUTE):
            graph = graph_calls.capture(lambda: results.append(torch.ones(size) + 1))
            graph.replay()
            graph.drop()
            results.pop() + 1
        del graph
    assert bool(world.faults) == (size > 0)


@python_only
def test_a_part_without_elements_stays_with_its_reader_when_its_graph_is_captured_again() -> None:
    def step(state: dtorch.Tensor, x: dtorch.Tensor) -> tuple[dtorch.Tensor, dtorch.Tensor]:
        inside, state = x * 2, state + 1
        whole = state.redistribute(placements=[Replicate()])
        return state, inside.sin() + whole.sum()

    with recorded_streams.recorded() as (world, ids):
        mesh = dtorch.DeviceMesh("cpu", ids[:2])
        place = functools.partial(dtorch.tensor, device_mesh=mesh, placements=[Shard(0)])
        jitted = dtorch.jit(step, donate_argnums=0, cuda_graph=True)
        x = place(torch.ones(1, 3))  # the second device has no row of it
        held = [jitted(place(torch.full((2, 3), float(n))), x) for n in range(6)]
        for number, (state, found) in enumerate(held):
            expected = torch.full((2, 3), number + 1.0)
            torch.testing.assert_close(state.to_torch(), expected)
            torch.testing.assert_close(found.to_torch(), (x.to_torch() * 2).sin() + expected.sum())
        first, second = (4, 4), (4, 1)  # of the two parts, by device
        assert Graph.made == sum(first) + sum(second)
        jitted.cache_clear()
    assert world.faults == []


def compute(x: dtorch.Tensor) -> dtorch.Tensor:
    whole = (x + 1).redistribute(placements=[dtorch.Replicate()])
    return (x * 2).sin() @ whole


def test_the_plan_of_a_program() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = dtorch.zeros(4, 4, device_mesh=mesh, placements=[dtorch.Shard(0)])
    program = lower(dtorch.jit(compute).program(x))
    launches = plan(program, mesh.devices[0])
    text = [f"{i}".split(" = ")[-1] for i in str(program).splitlines()[1:-1]]
    lanes = dict(zip(text, launches, strict=True))
    gathers = [launch for name, launch in lanes.items() if name.startswith("all_gather")]
    assert [g.lane for g in gathers if g] == [Lane.COMMUNICATION]
    assert gathers[0] is not None and len(gathers[0].marks) == 1
    product = next(launch for name, launch in lanes.items() if "mat" in name or "mm" in name)
    assert product is not None and product.lane is Lane.COMPUTE
    assert product.waits == gathers[0].marks and set(gathers[0].marks) <= set(product.keeps)
    waiting = [launch for launch in launches if launch is not None and launch.waits]
    inputs = {slot for slot, _ in program.inputs}
    assert all(launch is product or set(launch.waits) <= inputs for launch in waiting)


@pytest.mark.skipif(EXECUTOR != "native", reason="the native executor's lanes")
def test_the_native_executor_does_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "place_of", lambda device: torch.device("cpu"))
    mesh = dtorch.DeviceMesh("cpu", [900, 901, 902])
    x = dtorch.tensor(torch.randn(5, 5), device_mesh=mesh, placements=[dtorch.Shard(0)])
    jitted = dtorch.jit(compute)
    program = lower(jitted.program(x))
    NATIVE.trace_lanes(True)
    try:
        found = jitted(x).to_torch()
        jitted(x)
        dtorch.synchronize(mesh.devices)
        trace = NATIVE.take_lane_trace()
    finally:
        NATIVE.trace_lanes(False)
    y = x.to_torch()
    torch.testing.assert_close(found, (y * 2).sin() @ (y + 1))
    for device in mesh.devices:
        lines = [line.split(" ", 1)[1] for line in trace if line.startswith(f"{device} ")]
        expected, number = list[str](), 0
        events: dict[int, str] = {}
        for _ in range(2):
            events.clear()
            for instruction, launch in zip(
                program.instructions, plan(program, device), strict=True
            ):
                assert launch is not None
                for slot in launch.waits:
                    if slot in events:  # what the caller hands over on the CPU has none
                        expected.append(f"wait {launch.lane} for {events[slot]}")
                expected += [f"keep {launch.lane}"] * len(launch.keeps)
                expected.append(f"enter {launch.lane}")
                if isinstance(instruction, LocalStep):
                    for _ in mesh.devices:  # each peer's part: its event, and its memory
                        expected += ["wait 1 for a peer", "keep 1"]
                if launch.marks:
                    name = f"{device}/{launch.lane}/{number}"
                    number += 1
                    expected.append(f"record {name}")
                    events |= dict.fromkeys(launch.marks, name)
        expected += [f"record {device}/0/{number}", f"wait 1 for {device}/0/{number}"]
        expected.append(f"record {device}/1/{number + 1}")  # for who synchronizes
        assert len(lines) == len(expected)
        for ours, theirs in zip(lines, expected, strict=True):
            assert ours == theirs or (theirs.endswith("a peer") and ours.startswith("wait 1 for"))


class Accelerator:
    """What a worker's thread does with the streams of GPUs, which are not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = torch.device("cuda", 0)
        self.current: dict[torch.device, Any] = {}
        self.done: list[str] = []
        accelerator = self

        class Event:
            def __init__(self, device: torch.device) -> None:
                self.device = device

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.device, self.name = device, f"{device}/{len(accelerator.current)}"

            def wait_event(self, event: Event) -> None:
                accelerator.done.append(f"{self.name} waits for {event.device}")

        def set_stream(stream: Stream) -> None:
            self.device = stream.device
            self.current[stream.device] = stream
            self.done.append(f"{stream.name} is current")

        @contextlib.contextmanager
        def device_index(index: int) -> Any:
            before, self.device = self.device, torch.device("cuda", index)
            yield
            self.device = before

        def set_device(device: torch.device) -> None:
            self.device = device

        self.Event = Event
        monkeypatch.setattr(torch, "Stream", Stream)
        monkeypatch.setattr(torch.accelerator, "set_stream", set_stream)
        monkeypatch.setattr(torch.accelerator, "device_index", device_index)
        monkeypatch.setattr(torch.accelerator, "set_device_index", set_device)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda d: self.current[d])


def test_copies_from_a_peer_are_on_a_stream_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(monkeypatch)
    own, peer = torch.device("cuda", 1), torch.device("cuda", 2)

    def work() -> None:  # on a thread that has visited no device
        lanes = streams.TorchLanes(own)
        lanes.begin()
        assert accelerator.device == own
        lanes.wait(Lane.COMMUNICATION, accelerator.Event(own))
        lanes.wait(Lane.COMMUNICATION, accelerator.Event(peer))
        lanes.wait(Lane.COMMUNICATION, accelerator.Event(peer))
        assert accelerator.device == own

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert accelerator.done == [
        "cuda:1/0 waits for cuda:1",
        "cuda:1/0 waits for cuda:2",
        "cuda:2/0 is current",
        "cuda:2/0 waits for cuda:2",
        "cuda:1/0 waits for cuda:2",
        "cuda:2/0 waits for cuda:2",
    ]
    assert set(accelerator.current) == {peer}
