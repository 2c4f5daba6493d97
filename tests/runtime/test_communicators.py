"""Collectives that one member launches for its group: which, their values, failures, the check."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import streams as recorded_streams
import torch
from layouts import AVG, MAX, MIN, SUM, R, S, check, spread, values

import dtorch
from dtorch import DeviceMesh
from dtorch.errors import DTorchError, MeshError, WorkerError
from dtorch.lowering import LocalShow, LocalStep, lower
from dtorch.mesh import Device
from dtorch.redistribution import Collective, Step, plan
from dtorch.runtime import EXECUTOR, NATIVE, collectives, communicators, streams
from dtorch.runtime.collectives import Join, Piece, Round
from dtorch.spec import Spec

pytestmark = pytest.mark.timeout(60)
embed = torch.nn.functional.embedding

_numbers = itertools.count(40_000_000, 100)


def new_mesh(*shape: int) -> DeviceMesh:
    """A mesh of devices that no other test has used, for which nothing is remembered."""
    first, count = next(_numbers), torch.Size(shape).numel()
    return DeviceMesh("cpu", torch.arange(first, first + count).reshape(shape).tolist())


class Launches:
    """The collectives that have been launched: carried out on the host, in place of NCCL's."""

    def __init__(self) -> None:
        self.made: list[tuple[Collective, str, int]] = []
        self.at_once = threading.Lock()
        self.error: RuntimeError | None = None

    def call(
        self,
        kind: Collective,
        op: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        streams: Sequence[Any],
    ) -> None:
        assert self.at_once.acquire(blocking=False), "two launches at once"
        try:
            if self.error is not None:
                raise self.error
            assert len(streams) == len(inputs) and all(i.is_contiguous() for i in inputs)
            self.made.append((kind, op, len(inputs)))
            recorded_streams.compute(kind, op, inputs, outputs)
        finally:
            self.at_once.release()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Devices of the host have communicators."""
    found = Launches()
    monkeypatch.setattr(communicators, "is_joined", lambda group: len(group) > 1)
    monkeypatch.setattr(communicators, "check", lambda groups: None)
    monkeypatch.setattr(communicators, "_call", found.call)
    yield found
    dtorch.synchronize()


# -- which ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "before", "after", "is_carried"),
    [
        ((4, 8), torch.float32, SUM, R, True),
        ((4, 7), torch.float32, SUM, R, True),
        ((), torch.float64, SUM, R, True),
        ((4, 8), torch.bfloat16, SUM, S(1), True),
        ((4, 8), torch.float32, S(1), R, True),
        ((4, 8), torch.bool, S(1), R, True),
        ((4, 8), torch.int32, MAX, R, True),
        ((4, 8), torch.int64, MIN, S(0), True),
        ((4, 8), torch.float32, MAX, R, False),  # NCCL's ignores NaN
        ((4, 8), torch.float32, MIN, S(0), False),
        ((4, 8), torch.float32, AVG, R, False),
        ((4, 8), torch.bool, SUM, R, False),  # as bytes, it would overflow
        ((4, 8), torch.complex64, SUM, R, False),
        ((4, 8), torch.int16, SUM, R, False),
        ((4, 7), torch.float32, SUM, S(1), False),  # uneven
        ((3, 8), torch.float32, S(0), R, False),
        ((0, 8), torch.float32, S(1), R, False),
        ((4, 8), torch.float32, S(0), S(1), False),
        ((4, 8), torch.float32, R, S(1), False),
    ],
)
def test_which_steps_are_one_call(
    shape: tuple[int, ...], dtype: torch.dtype, before: Any, after: Any, is_carried: bool
) -> None:
    source = Spec.of(shape, dtype, new_mesh(4), (before,))
    (step,) = plan(source, source.with_placements((after,)))
    assert communicators.is_carried(step, range(4)) == is_carried


def test_groups_of_one_mesh_are_judged_alone() -> None:
    """On the first axis the shards are uneven, and so the groups of the second differ in shape."""
    source = Spec.of((3, 4), torch.float32, new_mesh(2, 2), (S(0), S(1)))
    target = source.with_placements((S(0), R))
    step = Step(Collective.ALL_GATHER, (1,), source, target, 8)
    assert communicators.is_carried(step, (0, 1)) and communicators.is_carried(step, (2, 3))
    assert not communicators.is_carried(step, range(4))


def test_which_groups_have_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Device("cuda", i) for i in range(6)]
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    monkeypatch.delenv(communicators.VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delattr(torch._C, "_nccl_all_reduce", raising=False)
    assert not communicators.is_joined(gpus[:2])  # a torch built without
    monkeypatch.setattr(torch._C, "_nccl_all_reduce", print, raising=False)
    assert communicators.is_joined(gpus[:2]) and communicators.is_joined(gpus[3::-1])
    assert not communicators.is_joined(gpus[:1])
    assert not communicators.is_joined(gpus[2:])  # two devices of the same GPUs as others
    assert not communicators.is_joined([gpus[0], Device("cpu", 1)])
    assert not communicators.is_joined([Device("xpu", 0), Device("xpu", 1)])
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert not communicators.is_joined(gpus[:2])
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    for value, is_joined in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv(communicators.VARIABLE, value)
        assert communicators.is_joined(gpus[:2]) == is_joined
    monkeypatch.setenv(communicators.VARIABLE, "no")
    with pytest.raises(DTorchError, match="DTORCH_NCCL='no': expected '0' or '1'"):
        communicators.is_joined(gpus[:2])


@pytest.mark.parametrize(
    ("before", "after", "dim", "op", "shape", "kind"),
    [
        (SUM, R, 0, "sum", (4, 6), Collective.ALL_REDUCE),
        (S(1), R, 1, "", (2, 4, 3), Collective.ALL_GATHER),
        (SUM, S(1), 1, "sum", (4, 3), Collective.REDUCE_SCATTER),
    ],
)
def test_the_rounds_of_a_meeting(
    launches: Launches, before: Any, after: Any, dim: int, op: str, shape: Any, kind: Collective
) -> None:
    mesh = new_mesh(2)
    source = Spec.of((4, 6), torch.float32, mesh, (before,))
    (step,) = plan(source, source.with_placements((after,)))
    for member, device in enumerate(mesh.devices):
        found = collectives.meeting(step, device)
        assert found is not None and found.group == found.visitors == mesh.devices
        assert found.rounds == (
            Round((Piece(member),), Join.SAME),
            Round((Piece(0), Piece(1)), Join.TOGETHER, dim, op, shape, kind=kind),
        )


def test_the_groups_of_a_program(launches: Launches) -> None:
    mesh = new_mesh(2, 2)
    a, b, c, d = mesh.devices
    x = dtorch.zeros(4, 4, device_mesh=mesh, placements=[S(0), S(1)])
    rows = dtorch.jit(lambda x: x.redistribute(placements=[S(0), R]))
    both = dtorch.jit(lambda x: rows(x) + x.redistribute(placements=[R, S(1)]))
    assert collectives.launched_together(lower(rows.program(x))) == [(a, b), (c, d)]
    groups = collectives.launched_together(lower(both.program(x)))
    assert set(groups) == {(a, b), (c, d), (a, c), (b, d)}
    assert collectives.launched_together(lower(dtorch.jit(lambda x: x + 1).program(x))) == []


# -- values --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(4, 8), (8, 4, 4), (5, 3)], ids=str)
@pytest.mark.parametrize("grid", [(2,), (4,), (2, 2)], ids=str)
def test_every_redistribution(
    launches: Launches, grid: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    value, mesh = values(shape, dtype), new_mesh(*grid)
    places = [R, *map(S, range(len(shape))), MAX, SUM]
    before = list(itertools.product(places, repeat=len(grid)))
    after = [
        p for p in itertools.product(places[:-2], repeat=len(grid)) if len(grid) == 1 or R in p
    ]
    for number, (source, target) in enumerate(itertools.product(before, after)):
        if len(grid) == 1 or number % 3 == 0:
            x = spread(value, mesh, source, seed=number)
            check(x.redistribute(placements=target), value)
    kinds = {kind for kind, _, _ in launches.made}
    if shape == (5, 3):  # on one axis, only what need not be cut into pieces
        assert len(grid) == 2 or kinds <= {Collective.ALL_REDUCE}
    elif dtype == torch.bool:
        assert kinds == {Collective.ALL_GATHER}
    else:
        assert len(kinds) == 3


def test_a_part_in_any_memory_format(launches: Launches) -> None:
    mesh, value = new_mesh(2), values((6, 8))
    x = dtorch.tensor(value, device_mesh=mesh, placements=[S(1)])
    check((x.mT + 1).redistribute(placements=[R]), value.mT + 1)
    check((x.mT.conj() * 2).redistribute(placements=[R]), value.mT * 2)
    assert [kind for kind, _, _ in launches.made] == [Collective.ALL_GATHER] * 2


def test_uneven_parts_are_copied(launches: Launches) -> None:
    mesh, value = new_mesh(4), values((6, 3))
    check(spread(value, mesh, [S(0)]).redistribute(placements=[R]), value)
    check(spread(value, mesh, [SUM]).redistribute(placements=[S(1)]), value)
    assert launches.made == []


def on_threads(functions: Sequence[Any]) -> list[Any]:
    found: list[Any] = [None] * len(functions)

    def run(number: int) -> None:
        found[number] = functions[number]()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_groups_that_share_devices_from_two_threads(launches: Launches) -> None:
    """Each device takes part in a group along each axis, in turn; no two launches at once."""
    mesh, value = new_mesh(2, 2), values((8, 8))

    @dtorch.jit
    def turn(x: Any) -> Any:
        x = x.redistribute(placements=[R, S(1)]).redistribute(placements=[S(0), S(1)])  # dp
        x = x.redistribute(placements=[S(0), R]).redistribute(placements=[S(0), S(1)])  # tp
        return x + 1

    def client() -> torch.Tensor:
        x = spread(value, mesh, [S(0), S(1)])
        for _ in range(20):
            x = turn(x)
        return x.to_torch()

    for found in on_threads([client, client]):
        assert torch.equal(found, value + 20)
    assert launches.made.count((Collective.ALL_GATHER, "", 2)) == len(launches.made) == 2 * 20 * 4


@pytest.mark.skipif(EXECUTOR != "native", reason="the native executor's lanes")
def test_the_native_executor_launches_on_lanes_that_have_waited(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "place_of", lambda device: torch.device("cpu"))
    mesh, value = new_mesh(3), values((6, 6))
    x = spread(value, mesh, [S(0)])
    gather = dtorch.jit(lambda x: (x + 1).redistribute(placements=[R]) * 2)
    program = lower(gather.program(x))
    NATIVE.trace_lanes(True)
    try:
        check(gather(x), (value + 1) * 2)
        dtorch.synchronize(mesh.devices)
        trace = NATIVE.take_lane_trace()
    finally:
        NATIVE.trace_lanes(False)
    assert launches.made == [(Collective.ALL_GATHER, "", 3)]
    steps = [i for i in program.instructions if isinstance(i, (LocalShow, LocalStep))]
    assert len(steps) == 2
    for device in mesh.devices:
        lines = [line.split(" ", 1)[1] for line in trace if line.startswith(f"{device} ")]
        assert lines == [
            "keep 0",  # x, of the caller
            "enter 0",  # x + 1, which is shown
            f"record {device}/0/0",
            "enter 0",  # the show, which launches nothing
            "enter 1",  # the step: its own part alone, then what it gives and receives
            f"wait 1 for {device}/0/0",
            "keep 1",
            f"record {device}/1/1",  # a point of the lane for the launch
            f"record {device}/1/2",  # and one after it, for who reads the result
            f"wait 0 for {device}/1/2",
            "keep 0",
            "enter 0",  # the product
            f"record {device}/0/3",
            f"record {device}/0/4",  # for who synchronizes
            f"wait 1 for {device}/0/4",
            f"record {device}/1/5",
        ]


# -- failures ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_member_that_fails(launches: Launches, bad: int) -> None:
    """Its indices are not in the table; the others have theirs, and wait for the launch."""
    mesh = new_mesh(4)
    rows = torch.zeros(8, dtype=torch.int64)
    rows[2 * bad] = 99
    ids = dtorch.tensor(rows, device_mesh=mesh, placements=[S(0)])
    found = embed(ids, dtorch.ones(4, 8, device_mesh=mesh)).redistribute(placements=[R])
    for _ in mesh.devices:
        with pytest.raises(WorkerError, match=f"IndexError on {mesh.devices[bad]}: index out of"):
            found.local_shards()
    assert launches.made == []
    check(spread(values((4, 4)), mesh, [SUM]).redistribute(placements=[R]), values((4, 4)))
    assert launches.made == [(Collective.ALL_REDUCE, "sum", 4)]


def test_a_launch_that_raises(launches: Launches) -> None:
    mesh, value = new_mesh(2), values((4, 4))
    launches.error = RuntimeError("NCCL Error 2: unhandled system error")
    found = spread(value, mesh, [SUM]).redistribute(placements=[R])
    message = (
        rf"RuntimeError on {mesh.devices[0]}: all_reduce of torch.float32 \[4, 4\] on cpu, cpu "
        r"could not be launched through NCCL: NCCL Error 2: unhandled system error\n"
        r"  Fix: DTORCH_NCCL=0, with which (.|\n)*instruction  "
    )
    for device in range(2):
        shards = found._shards
        shards.wait((device,))
        assert "NCCL Error 2" in shards.get(device).message
    with pytest.raises(WorkerError, match=message):
        found.to_torch()
    launches.error = None
    check(spread(value, mesh, [SUM]).redistribute(placements=[R]), value)


def test_a_tensor_that_is_written_to_meanwhile(launches: Launches) -> None:
    """What a member gives may be memory of the caller, which all members then have read."""
    mesh, value = new_mesh(2), torch.ones(4, 4)
    x = dtorch.Tensor(value, device_mesh=mesh, placements=[S(0)], copy=False)
    y = x.redistribute(placements=[R])
    y.to_torch()
    value.zero_()
    with pytest.raises(DTorchError, match="was written to after it was handed over"):
        x.redistribute(placements=[R]).to_torch()


def run(code: str) -> tuple[str, str]:
    """What a process writes, which has to end."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=40)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"the process hangs: {process.communicate()}")
    return out, err


@pytest.mark.parametrize("slow", [0, 1])
def test_the_workers_are_stopped_while_members_wait(slow: int) -> None:
    """One member is late, the other waits: for the launch, or to launch."""
    code = f"""
    import threading, time
    import torch, dtorch, dtorch.runtime
    from dtorch import P, Replicate
    from dtorch.runtime import communicators
    mesh = dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("x",))
    communicators.is_joined = lambda group: len(group) > 1
    communicators.check = lambda groups: None
    def call(kind, op, inputs, outputs, lanes):  # shard_map itself has a sum of a number
        if kind is communicators.Collective.ALL_GATHER:
            print("launched")
    communicators._call = call
    begun = threading.Event()
    def late(part):
        if part.device.type == "cpu" and dtorch.axis_index("x") == {slow}:
            begun.set()
            time.sleep(1)
        return part + 1
    x = dtorch.ones(4, 2, device_mesh=mesh, placements=[dtorch.Shard(0)])
    y = dtorch.shard_map(late, mesh, P("x"), P("x"), out_shapes=x)(x)
    y = y.redistribute(placements=[Replicate()])
    begun.wait()
    time.sleep(0.3)
    begin = time.monotonic()
    dtorch.runtime.stop()
    assert time.monotonic() - begin < 5
    try:
        y.to_torch()
    except dtorch.errors.ShutdownError:
        print("stopped")
    """
    out, err = run(code)
    assert (out, err) == ("stopped\n", "")


def test_a_forked_child_does_not_wait_for_a_launch_of_its_parent() -> None:
    code = """
    import os, threading
    import torch
    from dtorch.runtime import communicators
    from dtorch.redistribution import Collective
    begun, end = threading.Event(), threading.Event()
    def call(kind, *others):
        if kind is Collective.ALL_REDUCE:
            begun.set()
            end.wait()
    communicators._call = call
    x = [torch.ones(2)] * 2
    arguments = "sum", x, x, [None] * 2
    first = threading.Thread(target=communicators.launch, args=(Collective.ALL_REDUCE, *arguments))
    first.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        communicators.launch(Collective.ALL_GATHER, *arguments)
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    end.set()
    first.join()
    """
    assert run(code)[0] == "7\n"


# -- the bindings and the check --------------------------------------------------------------


class Binding:
    """Takes the place of a function of torch._C, and of the class of its streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            monkeypatch.setattr(
                torch._C,
                f"_nccl_{name}",
                lambda *args, name=name: self.calls.append((name, *args)),
                raising=False,
            )
        monkeypatch.setattr(torch.cuda, "Stream", lambda **kwargs: tuple(kwargs.values()))


class Stream:
    stream_id, device_index, device_type = 7, 1, 1


def test_what_the_bindings_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    binding, x, y = Binding(monkeypatch), torch.ones(2), torch.ones(4)
    for kind, op in (
        (Collective.ALL_REDUCE, "sum"),
        (Collective.ALL_REDUCE, "max"),
        (Collective.ALL_GATHER, ""),
        (Collective.REDUCE_SCATTER, "min"),
    ):
        communicators.launch(kind, op, (x,), (y,), (Stream(),))
    lanes = [(7, 1, 1)]
    assert binding.calls == [
        ("all_reduce", [x], [y], 0, lanes, None),
        ("all_reduce", [x], [y], 2, lanes, None),
        ("all_gather", [x], [y], lanes, None),
        ("reduce_scatter", [x], [y], 3, lanes, None),
    ]


GPUS = [Device("cuda", i) for i in range(3)]


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Collectives of the check, carried out on the host; between two GPUs with a fault."""
    state: dict[str, Any] = {"made": [], "wrong": set(), "error": None}

    def exchanged(kind: Collective, sent: torch.Tensor, shape: torch.Size, places: Any) -> Any:
        state["made"].append((kind, [place.index for place in places]))
        if state["error"] is not None:
            raise state["error"]
        outputs = [torch.empty(shape, dtype=sent.dtype) for _ in places]
        recorded_streams.compute(kind, "sum", list(sent), outputs)
        if state["wrong"] and state["wrong"] <= {place.index for place in places}:
            outputs[-1][..., :100] += 1
        return outputs

    monkeypatch.setattr(communicators, "_exchanged", exchanged)
    monkeypatch.setattr(communicators, "_checked", set())
    return state


def test_each_group_is_checked_once(exchanges: dict[str, Any]) -> None:
    for _ in range(2):
        communicators.check([GPUS[:2], GPUS])
    communicators.check([])
    assert exchanges["made"] == [
        (kind, group)
        for group in ([0, 1], [0, 1, 2])
        for kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER)
    ]


@pytest.mark.parametrize(
    ("wrong", "pairs"), [({0, 2}, "cuda:0, cuda:2"), ({0, 1, 2}, "no two of them")]
)
def test_a_group_that_is_wrong_names_the_pairs(
    exchanges: dict[str, Any], wrong: set[int], pairs: str
) -> None:
    exchanges["wrong"] = wrong
    message = (
        r"do not work on cuda:0, cuda:1, cuda:2: all_reduce gave 100 of 65536 values wrong on "
        rf"cuda:2.\n  at fault alone: {pairs}\n  Fix: DTORCH_NCCL=0"
    )
    for _ in range(2):
        with pytest.raises(MeshError, match=message):
            communicators.check([GPUS])
    communicators.check([GPUS[:2]])


@pytest.mark.parametrize("error", [RuntimeError("NCCL Error 3"), TimeoutError("did not end")])
def test_a_check_that_fails(exchanges: dict[str, Any], error: Exception) -> None:
    exchanges["error"] = error
    with pytest.raises(MeshError, match=rf"cuda:0, cuda:1: .*{error}\n  Fix: DTORCH_NCCL=0"):
        communicators.check([GPUS[:2]])
    assert len(exchanges["made"]) == 1


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_check_that_does_not_end(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    class Late:
        def record_event(self) -> Any:
            return self

        def query(self) -> bool:
            return False

    monkeypatch.setattr(torch.cuda, "synchronize", lambda place: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: Late())
    monkeypatch.setattr(communicators, "_call", lambda *args: None)
    monkeypatch.setattr(communicators, "_SECONDS", seconds)
    places = [torch.device("cpu")] * 2
    with pytest.raises(TimeoutError, match="all_reduce on cpu, cpu did not end within 0 s"):
        communicators._fault(places)
