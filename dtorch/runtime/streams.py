"""Streams: the order of work on a device that runs behind the host.

A worker launches work on such a device and goes on. What is launched on one stream runs in that
order, and nothing else orders it. A worker has two streams, its *lanes*: operations run on one, and
what devices take from each other on the other, so that both go on at once. An *event* marks a point
of a stream; another stream, of this device or of a peer, waits for it there, and the host nowhere
but where it needs a value.

`plan` says for a program and a device where each instruction runs, what it waits for, and which
memory of the other lane it uses. It is a pure function, and `Lanes` does what it says.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ..lowering import LocalProgram, LocalShow, LocalStep, slots_read, slots_written
from ..mesh import Device
from . import collectives, lent


class Lane(enum.IntEnum):
    """One of the streams of a worker."""

    COMPUTE = 0
    COMMUNICATION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """How one instruction uses the lanes of a device.

    Attributes:
        lane: Where it runs.
        waits: The slots whose events the lane waits for before.
        keeps: The slots in memory of elsewhere that this lane uses for the first time: the
            allocator gives that memory to nobody before the lane is done with it.
        marks: The slots whose event is recorded after.
    """

    lane: Lane
    waits: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()


def plan(program: LocalProgram, device: Device) -> tuple[Launch | None, ...]:
    """Returns how each instruction of a program uses the lanes of a device.

    Args:
        program: The program.
        device: One of its devices.

    Returns:
        A launch for each instruction; None for one in which the device takes no part.
    """
    # Of each slot: where it was written, and after how many instructions. Inputs come from
    # elsewhere, each with an event of its own.
    written: dict[int, tuple[Lane, int]] = {}
    waited: set[tuple[Lane, int]] = set()
    kept: set[tuple[Lane, int]] = set()
    reached = dict.fromkeys(Lane, -1)  # how far each lane has waited for the other
    marked = {slot for slot, mesh in program.outputs if device in mesh.devices}
    launches: list[Launch | None] = []
    for number, instruction in enumerate(program.instructions):
        lane = _lane(instruction, device, written)
        if lane is None:
            launches.append(None)
            continue
        if isinstance(instruction, LocalShow):
            marked.add(instruction.input)
        waits: list[int] = []
        keeps: list[int] = []
        for slot in dict.fromkeys(slots_read(instruction)):
            where, since = written.get(slot, (None, number))
            if where is lane:
                continue
            if (lane, slot) not in kept:
                kept.add((lane, slot))
                keeps.append(slot)
            if where is None and (lane, slot) not in waited:
                waited.add((lane, slot))
                waits.append(slot)
            elif where is not None and since > reached[lane]:
                reached[lane] = since
                waits.append(slot)
                marked.add(slot)
        for slot in slots_written(instruction):
            written[slot] = (lane, number)
        launches.append(Launch(lane, tuple(waits), tuple(keeps)))
    for number, (launch, instruction) in enumerate(
        zip(launches, program.instructions, strict=True)
    ):
        marks = tuple(s for s in slots_written(instruction) if s in marked)
        if launch is not None and marks:
            launches[number] = dataclasses.replace(launch, marks=marks)
    return tuple(launches)


def _lane(instruction: Any, device: Device, written: dict[int, tuple[Lane, int]]) -> Lane | None:
    """Where an instruction runs; a step within the device beside the operations."""
    if isinstance(instruction, (LocalShow, LocalStep)):
        meeting = collectives.meeting(instruction.step, device)
        if meeting is None:
            return None
        if isinstance(instruction, LocalShow):
            return written.get(instruction.input, (Lane.COMPUTE, 0))[0]
        return Lane.COMMUNICATION if meeting.visitors else Lane.COMPUTE
    return Lane.COMPUTE if device in instruction.mesh.devices else None


class Lanes(Protocol):
    """The lanes of one worker: what `TorchLanes` does on a device, and tests record."""

    def begin(self) -> None:
        """Makes the device the one of the calling thread, the worker's own."""
        ...

    def stream(self, lane: Lane) -> Any:
        """Returns the stream that a lane is, for who launches there for several workers."""
        ...

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """Returns a context whose work is launched on a lane."""
        ...

    def record(self, lane: Lane) -> Any:
        """Returns an event for what has been launched on a lane so far."""
        ...

    def wait(self, lane: Lane, event: Any) -> None:
        """Has what is launched on a lane from now on wait for an event."""
        ...

    def keep(self, lane: Lane, tensors: Iterable[torch.Tensor]) -> None:
        """Tells the allocator that a lane uses the memory of tensors from elsewhere."""
        ...

    def push(self, name: str) -> None:
        """Names what the thread does until `pop`, for tools that watch the process."""
        ...

    def pop(self) -> None:
        """Ends what `push` began last."""
        ...


class TorchLanes:
    """The lanes of a device of torch; those of a virtual device are its own.

    Source: `torch.Stream` and `torch.Event`, which are the same for every accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.Stream(device) for _ in Lane]

    def begin(self) -> None:
        """As in `Lanes`. A thread that is left to the first device makes a context there too."""
        torch.accelerator.set_device_index(self._device)

    def stream(self, lane: Lane) -> torch.Stream:
        """As in `Lanes`."""
        return self._streams[lane]

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """As in `Lanes`."""
        return self._streams[lane]

    def record(self, lane: Lane) -> torch.Event:
        """As in `Lanes`."""
        return self._streams[lane].record_event()

    def wait(self, lane: Lane, event: torch.Event) -> None:
        """As in `Lanes`; so do the worker's copies from a peer, where the event is of one."""
        self._streams[lane].wait_event(event)
        if event.device != self._device:
            visit(event.device)
            torch.accelerator.current_stream(event.device).wait_event(event)

    def keep(self, lane: Lane, tensors: Iterable[torch.Tensor]) -> None:
        """As in `Lanes`."""
        for tensor in tensors:
            if tensor.device.type == self._device.type:
                tensor.record_stream(self._streams[lane])
                lent.used(tensor, self._streams[lane])

    def push(self, name: str) -> None:
        """As in `Lanes`: a range of NVTX, which is for CUDA alone."""
        if self._device.type == "cuda":
            torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        """As in `Lanes`."""
        if self._device.type == "cuda":
            torch.cuda.nvtx.range_pop()


class _Visited(threading.local):
    def __init__(self) -> None:
        self.devices: set[torch.device] = set()


_visited = _Visited()


def visit(device: torch.device) -> None:
    """Gives the calling thread, a worker's, a stream of its own on the device of a peer.

    PyTorch copies between devices on the current stream of the source, which waits for the
    current stream of the target before, and for which that waits after (``copy_device_to_device``
    in Copy.cu). By default all threads have the same there, so that copies of all workers would
    queue behind each other and behind what the user launches.

    Hand-over: the stream has to wait for the event of what it reads as the worker's lane does,
    since PyTorch packs what is not contiguous there before it waits for the target. What it reads
    belongs to the peer, and is kept by telling the allocator of the worker's lane, since that
    waits for the copy; what it packs into is its own.
    """
    if device.type == "cpu" or device in _visited.devices:
        return
    _visited.devices.add(device)
    with torch.accelerator.device_index(device.index):  # which setting the stream would change
        torch.accelerator.set_stream(torch.Stream(device))


def place_of(device: Device) -> torch.device | None:
    """Returns where the streams of a worker are; None where a call returns when it is done."""
    if device.type == "cpu":
        return None
    count = torch.get_device_module(device.type).device_count()
    return torch.device(device.type, device.id % count)


def lanes_of(device: Device) -> Lanes | None:
    """Returns the lanes of a worker; None where a call returns when its work is done."""
    place = place_of(device)
    return None if place is None else TorchLanes(place)


def answers(place: torch.device) -> bool:
    """Returns whether the driver of an accelerator takes and answers a request without an error."""
    if place.type == "cpu":
        return True
    try:
        torch.accelerator.current_stream(place).record_event().query()
    except RuntimeError:
        return False
    return True


def computes(place: torch.device) -> bool:
    """Returns whether an accelerator computes what the host does; raises what its driver does."""
    numbers = torch.arange(1 << 12, dtype=torch.float32).view(64, 64) % 7
    there = numbers.to(place)
    return torch.equal((there @ there + there).cpu(), numbers @ numbers + numbers)


def empty_caches(kinds: Iterable[str]) -> None:
    """Has the allocators of some kinds of accelerators give back the memory that nothing uses."""
    for kind in dict.fromkeys(kinds):
        if kind != "cpu":
            torch.get_device_module(kind).empty_cache()


def joined(places: Sequence[torch.device]) -> torch.Event:
    """Returns an event for what the calling thread has launched on some accelerators of a kind."""
    last, *others = map(torch.accelerator.current_stream, places)
    for stream in others:
        last.wait_event(stream.record_event())
    return last.record_event()
