"""What an executor keeps while it runs: calls, the state of a device, and one run's slots.

A `Call` is one submission of a program, a `DeviceState` what its worker keeps between programs, a
`Frame` one run of a program on one device, which actions read and write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from ..lowering import LocalProgram
from ..mesh import Device
from ..source import Site, line_at
from . import faults, lent, streams, timeline
from .failures import Failure, failure_of
from .faults import Event, GuardedLanes, Launched
from .shards import Borrowed, Shards
from .streams import Lane
from .timeline import Phase, Span

if TYPE_CHECKING:
    from .executor import Executable


class Call:
    """One submission of an executable, shared by the workers that run it.

    Args:
        executable: What runs.
        inputs: For each input, its shards.
        outputs: For each output, the shards to fill.
        scalars: The run-time scalars.
        num_threads: Intra-operation threads for each worker.
        site: Where the user made the call.
        number: Its number in the timeline that is recorded, or 0.
    """

    __slots__ = (
        "executable",
        "inputs",
        "num_threads",
        "number",
        "outputs",
        "scalars",
        "site",
    )

    def __init__(
        self,
        executable: Executable,
        inputs: Sequence[Shards],
        outputs: Sequence[Shards],
        scalars: Sequence[Any],
        num_threads: int,
        site: Site | None,
        number: int,
    ) -> None:
        self.executable = executable
        self.inputs = inputs
        self.outputs = outputs
        self.scalars = scalars
        self.num_threads = num_threads
        self.site = site
        self.number = number

    def exchange(self, key: Any, size: int) -> Shards:
        """Returns what a group shows each other in a round."""
        entry = (Shards.pending(size), [])
        return self.executable.exchanges.setdefault((self, key), entry)[0]

    def leave(self, key: Any, visitors: int) -> None:
        """Says that one of the visitors of an exchange needs it no longer; the last frees it."""
        exchanges = self.executable.exchanges
        _, done = exchanges[self, key]
        done.append(None)
        if len(done) == visitors:
            exchanges.pop((self, key), None)


class DeviceState:
    """What one worker keeps between programs: its device, lanes, a generator, the stop signal.

    Attributes:
        device: The device.
        stopping: The stop signal.
        place: The accelerator that the device is on; None for the host.
        lanes: The lanes there.
    """

    def __init__(self, device: Device, stopping: threading.Event) -> None:
        self.device = device
        self.stopping = stopping
        self.place = streams.place_of(device)
        self.lanes = None if self.place is None else GuardedLanes(device, self.place)
        self._generator: torch.Generator | None = None

    def reached(self) -> Launched | None:
        """Returns what ends when all ends that has been launched so far; None without lanes."""
        if self.lanes is None:
            return None
        self.lanes.wait(Lane.COMMUNICATION, self.lanes.record(Lane.COMPUTE))
        return Launched(None, self.lanes.record(Lane.COMMUNICATION))

    def generator(self, device: torch.device) -> torch.Generator:
        """Returns the worker's own generator, whose state each random instruction sets."""
        if self._generator is None:
            self._generator = torch.Generator(device)
        return self._generator


class Frame:
    """One run of a program on one device: its slots, and the caller's memory that it reads.

    Attributes:
        events: Of slots that a stream writes. A lane waits for them; on the host, whose slots an
            accelerator still fills, the thread.
        lost: What all results are, where the driver had failed before the run.
    """

    __slots__ = ("call", "events", "loans", "lost", "names", "poisoned", "slots", "state")

    def __init__(self, call: Call, names: Sequence[Any], state: DeviceState) -> None:
        self.call = call
        self.names = names  # of the instructions, by phase, on a device with lanes
        self.events: dict[int, Event] = {}
        self.slots: list[Any] = [None] * call.executable.program.num_slots
        self.state = state
        self.lost = self.untrusted()
        self.poisoned = self.lost is not None
        self.loans: list[Borrowed] = []

    def untrusted(self) -> Failure | None:
        """Returns what becomes of all that others may see, if the driver has failed."""
        return None if self.state.place is None else faults.untrusted(self.state.device)

    def failed(self, slots: Sequence[int]) -> Failure | None:
        """Returns why an instruction that reads some slots cannot run, or None."""
        if self.events and self.state.place is None:
            self._arrive(slots)
        if not self.poisoned:
            return None
        return self.lost or next((f for s in slots if type(f := self.slots[s]) is Failure), None)

    def _arrive(self, slots: Sequence[int]) -> None:
        """Waits on the host for what accelerators write to slots."""
        for slot in slots:
            event = self.events.pop(slot, None)
            if event is not None:
                event.finish()
                if event.lost is not None:
                    self.store(slot, event.lost)

    def settled(self, part: Any) -> Any:
        """Returns what others may see of a part.

        The driver must not have failed, and the caller not have written to what this run has read;
        what is in the caller's memory stays borrowed.
        """
        if self.state.place is not None and type(part) is not Failure:
            part = self.untrusted() or part
        for loan in self.loans:
            if type(part) is Failure:
                break
            if loan.is_broken():
                return loan.broken()
            if isinstance(part, torch.Tensor) and loan.lends(part):
                part = Borrowed(part, loan.owner, loan.version, loan.gone)
        return part

    def note_shared_loans(self) -> None:
        """Notes which memory of graphs more than one input is in: none may be written to."""
        owners = [loan.owner for loan in self.loans if loan.gone is not None]
        if len(owners) > 1:
            lent.note_shared(owners)

    def renew_loans(self, results: Iterable[int]) -> None:
        """After a graph has run: what it gave is lent anew, and what it was given is gone."""
        self.loans = [loan for loan in self.loans if loan.gone is None or not loan.is_broken()]
        for part in map(self.slots.__getitem__, results):
            entry = lent.entry_of(part) if isinstance(part, torch.Tensor) else None
            if entry is not None:
                self.loans.append(Borrowed(part, entry.owner, entry.version, entry.gone))

    def shown(self, part: Any, event: Event | None) -> Any:
        """Returns a part as others may see it, who wait for an event, if there is one."""
        part = self.settled(part)
        return part if event is None or type(part) is Failure else Launched(part, event)

    def store(self, slot: int, value: Any) -> None:
        """Puts a value or a failure into a slot."""
        if type(value) is Failure:
            self.poisoned = True
        self.slots[slot] = value

    def doing(self, instruction: int, phase: Phase) -> AbstractContextManager[Any]:
        """Returns a context for a part of an instruction, which the timeline has if recorded."""
        if timeline.recorder is None:
            return timeline.NOTHING
        call, state = self.call, self.state
        program, device = call.executable.program, str(state.device)
        span = Span(device, program, call.number, call.site, instruction, phase, 0, 0)
        lanes = state.lanes
        return timeline.Slice(span, lanes, self.names[instruction][phase] if lanes else "")


Action = Callable[[Frame], None]


def free(slots: list[Any], frees: Iterable[int]) -> None:
    """Drops what is in slots."""
    for s in frees:
        slots[s] = None


def failure(
    program: LocalProgram,
    origin: int,
    frame: Frame,
    error: BaseException,
    others: Iterable[torch.device] = (),
) -> Failure:
    """Returns the failure of an instruction in a run, which took parts from other accelerators too.

    Marks the accelerator that it failed on, if that was its driver's error.
    """
    device, line = str(frame.state.device), line_at(frame.call.site)
    failure = failure_of(program, origin, device, line, error)
    faults.blame(failure, frame.state.place, others)
    return failure
