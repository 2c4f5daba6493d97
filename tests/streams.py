"""Recorded streams: finds an access to memory that nothing orders, in whatever workers run.

A `World` stands for devices whose kernels run at any time that streams and events allow. Each
stream has a vector clock: how much of every stream has surely run before what it is given next. An
access is in order if it comes after every write to the same memory, a write after every access;
memory may be freed if the stream that it was allocated on comes after every access, or the
allocator has been told of the streams that do not. A graph is captured on a stream of its own, to
which its memory belongs; what another thread launches on a stream that is captured is a fault.

The devices have communicators, which part of the collectives that NCCL could carry out use: what
is launched for a group reads and writes the memory of each device on the lane that it gives.

`python -m tests.streams 10000` runs that many random programs.
"""

import contextlib
import functools
import itertools
import random
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import optree
import torch
from graph_fake import Graph, graphs_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import dtorch
from dtorch import Partial, Replicate, Shard, compilation, inductor
from dtorch.mesh import Device
from dtorch.redistribution import Collective, Step
from dtorch.runtime import (
    collectives,
    communicators,
    faults,
    graph_calls,
    graph_memory,
    lent,
    shards,
    streams,
    worker,
)
from dtorch.runtime.streams import Lane

Stream = tuple[Any, int]
CALLER: Stream = ("caller", 0)
PLACE = torch.device("cpu")


class World:
    """The streams of all devices, and what they have done with memory.

    Args:
        pool: How many streams there are for all lanes; None for as many as there are lanes.
    """

    def __init__(self, pool: int | None = None) -> None:
        self.lock = threading.RLock()
        self.faults: list[str] = []
        self.num_accesses = 0
        self.ranges: list[str] = []
        self.communicators: Any = None
        self.clocks: dict[Stream, Counter[Stream]] = defaultdict(Counter)
        self.owners: dict[int, Stream] = {}
        self.kept: dict[int, set[Stream]] = {}
        self.reads: dict[int, list[tuple[Stream, int, str]]] = {}
        self.writes: dict[int, list[tuple[Stream, int, str]]] = {}
        self.captures: dict[Stream, int] = {}  # the threads that capture, by stream
        self._pool = itertools.cycle(range(pool)) if pool else None

    def new_stream(self, device: str, lane: Lane) -> Stream:
        return (device, int(lane)) if self._pool is None else ("pool", next(self._pool))

    def launch(self, stream: Stream, op: Any, read: Iterable[Any], written: Iterable[Any]) -> None:
        with self.lock:
            if stream in self.captures:
                if self.captures[stream] != threading.get_ident():
                    self.faults.append(f"{op} becomes part of what is captured on {stream}")
                for storage in written:
                    self._known(storage, stream)
                return
            clock = self.clocks[stream]
            clock[stream] += 1
            access = (stream, clock[stream], f"{op} on {stream}")
            for storage in read:
                key = self._known(storage, CALLER)
                self._check(stream, self.writes[key], access)
                self.reads[key].append(access)
            for storage in written:
                is_new = storage._cdata not in self.owners
                key = self._known(storage, stream)
                if not is_new:
                    self._check(stream, [*self.writes[key], *self.reads[key]], access)
                self.writes[key].append(access)
            self.num_accesses += 1

    def handed_over(self, part: Any) -> Any:
        """What `Shards` does to a part of the caller's."""
        if not isinstance(part, (torch.Tensor, shards.Borrowed)):
            return part
        event = _Event(self, Counter(self.clocks[CALLER]))
        return faults.Launched(part, faults.Event(PLACE, event))

    def order_caller(self, tensor: torch.Tensor, event: Any) -> None:
        """What `Shards` does for who takes a part."""
        with self.lock:
            self.clocks[CALLER] |= event.raw.clock
            self.kept[self._known(tensor.untyped_storage(), CALLER)].add(CALLER)
        lent.used(tensor, CALLER)

    def wait_for(self, streams: Sequence[Stream], device: torch.device) -> None:
        """What a graph does before it writes to memory that others use."""
        with self.lock:
            for stream in streams:
                self.clocks[_current.stream] |= self.clocks[stream]

    def _known(self, storage: Any, owner: Stream) -> int:
        key = storage._cdata
        if key not in self.owners:
            self.owners[key] = owner
            self.kept[key], self.reads[key], self.writes[key] = set(), [], []
            weakref.finalize(storage, self._free, key).atexit = False
        return key

    def _check(self, stream: Stream, earlier: list[Any], access: Any) -> None:
        for other, time, what in earlier:
            if other != stream and self.clocks[stream][other] < time:
                self.faults.append(f"{access[2]} does not wait for {what}")

    def _free(self, key: int) -> None:
        with self.lock:
            owner = self.owners.pop(key)
            kept = self.kept.pop(key)
            for stream, time, what in (*self.reads.pop(key), *self.writes.pop(key)):
                if stream != owner and stream not in kept and self.clocks[owner][stream] < time:
                    self.faults.append(f"memory of {owner} is free before {what} has run")


class Recorded:
    """`Lanes` that record what is done with them; with a fault, which leaves out some of it."""

    def __init__(self, world: World, device: Device, fault: str, drawn: random.Random) -> None:
        self._world = world
        self._device = str(device)
        self._streams = [world.new_stream(self._device, lane) for lane in Lane]
        self._fault = fault
        self._drawn = drawn

    def _is_left_out(self, what: str) -> bool:
        return self._fault == what and self._drawn.random() < 0.3

    def begin(self) -> None:
        """These devices are none of torch's."""

    def stream(self, lane: Lane) -> Stream:
        return self._streams[lane]

    @contextlib.contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        if self._is_left_out("lane"):
            lane = Lane(1 - lane)
        with _Watch(self._world, self._streams[lane]):
            yield

    def record(self, lane: Lane) -> Any:
        stream = self._streams[lane]
        with self._world.lock:
            clock = Counter(self._world.clocks[stream])
        if self._is_left_out("record") and clock[stream]:
            clock[stream] -= 1
        return _Event(self._world, clock)

    def wait(self, lane: Lane, event: Any) -> None:
        if not self._is_left_out("wait"):
            with self._world.lock:
                self._world.clocks[self._streams[lane]] |= event.clock

    def keep(self, lane: Lane, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if not self._is_left_out("keep"):
                with self._world.lock:
                    key = self._world._known(tensor.untyped_storage(), CALLER)
                    self._world.kept[key].add(self._streams[lane])
                lent.used(tensor, self._streams[lane])

    def push(self, name: str) -> None:
        self._world.ranges.append(f"{self._device} push {name}")

    def pop(self) -> None:
        self._world.ranges.append(f"{self._device} pop")


class Communicators:
    """Collectives that are launched for a group: what `communicators` does, on recorded lanes."""

    def __init__(self, world: World, ids: list[int], fault: str, drawn: random.Random) -> None:
        self._world = world
        self._devices = {Device("cpu", i) for i in ids}
        self._fault = fault
        self._drawn = drawn
        self._chosen: dict[Any, bool] = {}
        self._late: list[Any] = []
        self._is_carried = communicators.is_carried
        self.num_launches = 0

    def check(self, groups: Any) -> None:
        """These devices need none."""

    def is_joined(self, group: Sequence[Device]) -> bool:
        return len(group) > 1 and self._devices.issuperset(group)

    def is_carried(self, step: Step, members: Sequence[int]) -> bool:
        """As the real one, but for some steps, which are carried out by copies."""
        if not self._is_carried(step, members):
            return False
        return self._chosen.setdefault((step, tuple(members)), self._drawn.random() < 0.8)

    def launch(
        self, kind: Collective, op: str, inputs: Any, outputs: Any, lanes: Sequence[Stream]
    ) -> None:
        with _disable_current_modes():
            compute(kind, op, inputs, outputs)
        accesses = [
            (lane, f"{kind.value}", storages(given), storages(received))
            for lane, given, received in zip(lanes, inputs, outputs, strict=True)
        ]
        if self._fault == "one lane":
            accesses = [(lanes[0], *access) for _, *access in accesses]
        if self._fault == "late":  # the members go on before the launch
            accesses, self._late = self._late, accesses
        for access in accesses:
            self._world.launch(*access)
        self.num_launches += 1


def compute(
    kind: Collective, op: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Fills what the devices of a group receive of a collective."""
    whole = torch.stack(list(inputs))
    if kind is not Collective.ALL_GATHER:
        whole = collectives.reduce_parts(list(inputs), op)
    pieces = whole if kind is Collective.REDUCE_SCATTER else [whole] * len(outputs)
    for piece, output in zip(pieces, outputs, strict=True):
        assert piece.shape == output.shape and output.is_contiguous()
        output.copy_(piece)


class _Event:
    """What has surely run when it is reached."""

    def __init__(self, world: World, clock: Counter[Stream]) -> None:
        self._world = world
        self.clock = clock

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        with self._world.lock:
            self._world.clocks[CALLER] |= self.clock


class _Current(threading.local):
    stream: Stream = CALLER


_current = _Current()


class _Watch(TorchDispatchMode):
    def __init__(self, world: World, stream: Stream) -> None:
        super().__init__()
        self._world = world
        self._stream = stream

    def __enter__(self) -> "_Watch":
        self._before = _current.stream
        _current.stream = self._stream
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _current.stream = self._before
        super().__exit__(*error)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is graph_calls.run_graph:
            with _Watch(self._world, _current.stream):
                return graph_calls._run(*args)
        result = op(*args, **(kwargs or {}))
        given = tensors((args, kwargs or {}))
        memory = {t.untyped_storage()._cdata for t in given}
        written = [t for t in tensors(result) if t.untyped_storage()._cdata not in memory]
        for argument, value in zip(op._schema.arguments, args, strict=False):
            if argument.is_write:
                written += tensors(value)
        if written or not _is_view(op):
            self._world.launch(_current.stream, op, storages(given), storages(written))
        return result


class Captured(Graph):
    """What `captures` makes: a graph that is captured on a stream of its own.

    Args:
        world: Where it is.
        fault: "capture", and it is captured on the lane; "drop", and its memory is freed too early.
        work: What launches it.
    """

    _numbers = itertools.count()

    def __init__(self, world: World, fault: str, work: Callable[[], None]) -> None:
        self._world = world
        self._fault = fault
        lane = self._replayed_on = _current.stream
        stream = self._stream = lane if fault == "capture" else ("capture", next(self._numbers))
        world.captures[stream] = threading.get_ident()
        _current.stream = stream
        try:
            super().__init__(work)
        finally:
            _current.stream = lane
            del world.captures[stream]

    def replay(self) -> None:
        self._replayed_on = _current.stream
        super().replay()

    def drop(self) -> None:
        with self._world.lock:
            if self._fault != "drop":
                self._world.clocks[self._stream] |= self._world.clocks[self._replayed_on]


def _is_view(op: Any) -> bool:
    """Whether an operation only describes memory anew."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def storages(tree: Any) -> list[Any]:
    """The memory that is accessed where tensors are; for one without elements that is none."""
    return [t.untyped_storage() for t in tensors(tree) if t.numel()]


def tensors(tree: Any) -> list[torch.Tensor]:
    leaves = optree.tree_leaves(tree, none_is_leaf=True)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


# -- random programs -----------------------------------------------------------------------

_numbers = iter(range(1000, 1 << 30, 8))
COMMUNICATORS = ("is_joined", "is_carried", "launch", "check")


@contextlib.contextmanager
def recorded(
    fault: str = "", seed: int = 0, pool: int | None = None
) -> Iterator[tuple[World, list[int]]]:
    """A context with a world, and the ids of eight devices that live in it."""
    world, drawn, start = World(pool), random.Random(seed), next(_numbers)
    real = streams.place_of, streams.lanes_of, shards.handed_over, shards.order_caller
    real_communicators = {name: getattr(communicators, name) for name in COMMUNICATORS}
    ids = list(range(start, start + 8))
    joined = Communicators(world, ids, fault, drawn)
    streams.place_of = lambda device: PLACE
    streams.lanes_of = lambda device: Recorded(world, device, fault, drawn)
    shards.handed_over, shards.order_caller = world.handed_over, world.order_caller
    for name in COMMUNICATORS:
        setattr(communicators, name, getattr(joined, name))
    world.communicators = joined
    real_wait, graph_memory.wait_for = graph_memory.wait_for, world.wait_for
    real_compiler = inductor.function_of, compilation._known
    inductor.function_of, compilation._known = inductor._graph, {}
    if fault == "users":
        graph_memory.wait_for = lambda streams, device: None
    try:
        dtorch.synchronize([Device("cpu", i) for i in ids])  # makes the workers
        with graphs_on_cpu(functools.partial(Captured, world, fault)), _Watch(world, CALLER):
            yield world, ids
        dtorch.synchronize()
    finally:
        streams.place_of, streams.lanes_of, shards.handed_over, shards.order_caller = real
        for name, function in real_communicators.items():
            setattr(communicators, name, function)
        graph_memory.wait_for = real_wait
        inductor.function_of, compilation._known = real_compiler


def run_program(ids: list[int], seed: int) -> None:
    """Runs a random program on some devices, and compares its values with PyTorch's."""
    drawn = random.Random(seed)
    meshes = _meshes(ids, drawn)
    shape = drawn.choice([(4, 6), (5, 3), (8, 8)])
    drawer = torch.Generator().manual_seed(seed)  # doubles: some programs amplify rounding
    values = [torch.randn(shape, generator=drawer, dtype=torch.float64) for _ in range(2)]
    choices = [drawn.randrange(9) for _ in range(drawn.randint(3, 12))]
    numbers = [drawn.random() for _ in range(100)]

    def compute(*given: Any) -> Any:
        made, draws = list(given), iter(numbers)
        pick = lambda items: items[int(next(draws) * len(items))]  # noqa: E731
        for choice in choices:
            x, y = pick(made), pick(made)
            match choice:
                case 0:
                    made.append(x + y)
                case 1:
                    made.append((x * 0.5).sin())
                case 2:
                    made.append((x @ y.mT @ x * 0.1).tanh())
                case 3:
                    made.append(x - x.sum(pick((0, 1)), keepdim=True))
                case 4:
                    made.append(torch.cat([x, y], 0)[: shape[0]])
                case 5:
                    made.append(x.roll(1, pick((0, 1))))
                case 6:
                    placements, mesh = pick(LAYOUTS), pick(meshes)
                    if isinstance(x, torch.Tensor) and not hasattr(x, "redistribute"):
                        made.append(x)
                    else:
                        made.append(x.redistribute(mesh, placements[: mesh.ndim]))
                case 7:
                    made.append(x.mT.mT.clone())
                case _:
                    made.append(torch.softmax(x, pick((0, 1))))
            if hasattr(made[-1], "redistribute"):
                made[-1] = made[-1].redistribute(meshes[0])
        return made[-1], made[len(made) // 2], made[2 % len(made)]

    start = [Shard(drawn.randrange(2)), drawn.choice([Replicate(), Shard(0)])]
    placed = [
        dtorch.tensor(v, device_mesh=meshes[0], placements=start[: meshes[0].ndim]) for v in values
    ]
    call, count = (dtorch.jit(compute), 2) if drawn.random() < 0.7 else (compute, 2)
    if drawn.random() < 0.3:
        options = {"compile": drawn.random() < 0.5, "cuda_graph": True}
        call, count = dtorch.jit(compute, donate_argnums=0, **options), 7
    found, expected = placed[:1], values[:1]
    for _ in range(count):
        found = call(found[0], placed[1])
        expected = compute(expected[0], values[1])
        if count > 2 and drawn.random() < 0.5:  # what reads the memory that the next call writes to
            whole = found[0].redistribute(placements=[Replicate()] * found[0].device_mesh.ndim)
            torch.testing.assert_close(
                (whole + 1).to_torch(), expected[0] + 1, rtol=1e-3, atol=1e-3
            )
            torch.testing.assert_close(found[0].to_torch(), expected[0], rtol=1e-3, atol=1e-3)
            del whole
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.to_torch(), theirs, rtol=1e-3, atol=1e-3)


LAYOUTS = [
    (Shard(0), Replicate()),
    (Shard(1), Shard(0)),
    (Replicate(), Shard(1)),
    (Replicate(), Replicate()),
    (Partial(), Replicate()),
]


def _meshes(ids: list[int], drawn: random.Random) -> list[dtorch.DeviceMesh]:
    """The mesh of a program, and others that values pass through."""
    grids = [ids[:2], ids[:3], [ids[:2], ids[2:4]], ids[:1], ids[4:7], ids[:4]]
    return [dtorch.DeviceMesh("cpu", g) for g in drawn.sample(grids, 3)]


def main(count: int) -> None:
    with recorded() as (world, ids):
        for seed in range(count):
            run_program(ids, seed)
            dtorch.synchronize()
            dtorch.cache_clear()
            if world.faults:
                raise SystemExit(f"program {seed}: {world.faults[:3]}")
            if seed % 500 == 499:
                print(
                    f"{seed + 1} programs, {world.num_accesses} launches, "
                    f"{world.communicators.num_launches} of groups, nothing unordered"
                )
        worker.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]))
