"""The portable executor: runs a local program on one device, instruction by instruction.

Takes a `LocalProgram` and a `Call` (one submission of it); fills the call's output shards of
one device. A failing instruction does not stop the program: its results become `Failure`s,
which pass through everything that depends on them, so a device always takes part in the
collectives that its peers wait in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from ..lowering import (
    LocalCall,
    LocalProgram,
    LocalShow,
    LocalStep,
    PerDevice,
    slots_read,
    slots_written,
)
from ..mesh import Device, DeviceMesh
from ..program import Ref, ScalarRef
from ..source import Site, line_at
from . import collectives, lent, peers, streams, timeline
from .collectives import Meeting, Round
from .failures import failure_of, stopped_failure
from .graph_calls import run_graph
from .shards import Borrowed, Failure, Launched, Shards, order_caller
from .streams import Lane, Lanes, Launch
from .timeline import Phase, Span


class Executable:
    """A local program, and how each device runs it (bound at its first run there).

    Attributes:
        program: The program.
        sizes: The number of parts of each output.
        exchanges: What devices show each other in calls that are running, and who is done with it.
    """

    __slots__ = ("_bound", "exchanges", "program", "sizes")

    def __init__(self, program: LocalProgram) -> None:
        peers.check(map(streams.place_of, program.devices))
        self.program = program
        self.sizes = [len(mesh.devices) for _, mesh in program.outputs]
        # Each operation on it is atomic, so the workers need no lock.
        self.exchanges: dict[Any, tuple[Shards, list[None]]] = {}
        self._bound: dict[Device, _Bound] = {}

    def bound(self, state: DeviceState) -> _Bound:
        """Returns what a device runs; called by the device's worker alone."""
        bound = self._bound.get(state.device)
        if bound is None:
            bound = self._bound[state.device] = _bind(self.program, state)
        return bound


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
    """What one worker keeps between programs: its device, lanes, a generator, the stop signal."""

    def __init__(self, device: Device, stopping: threading.Event) -> None:
        self.device = device
        self.stopping = stopping
        self.lanes: Lanes | None = streams.lanes_of(device)
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


class _Frame:
    """One run of a program on one device: its slots, and the caller's memory that it reads."""

    __slots__ = ("call", "events", "loans", "names", "poisoned", "slots", "state")

    def __init__(self, call: Call, bound: _Bound, state: DeviceState) -> None:
        self.call = call
        self.names = bound.names
        self.events: dict[int, Any] = {}  # of slots, on a device with lanes
        self.slots: list[Any] = [None] * call.executable.program.num_slots
        self.state = state
        self.poisoned = False
        self.loans: list[Borrowed] = []

    def settled(self, part: Any) -> Any:
        """Returns what others may see of a part.

        The caller must not have written to what this run has read, and what is in the caller's
        memory stays borrowed.
        """
        for loan in self.loans:
            if type(part) is Failure:
                break
            if loan.is_broken():
                return loan.broken()
            if isinstance(part, torch.Tensor) and loan.lends(part):
                part = Borrowed(part, loan.owner, loan.version, loan.gone)
        return part

    def renew_loans(self, results: Iterable[int]) -> None:
        """After a graph has run: what it gave is lent anew, and what it was given is gone."""
        self.loans = [loan for loan in self.loans if loan.gone is None or not loan.is_broken()]
        for part in map(self.slots.__getitem__, results):
            entry = lent.entry_of(part) if isinstance(part, torch.Tensor) else None
            if entry is not None:
                self.loans.append(Borrowed(part, entry.owner, entry.version, entry.gone))

    def shown(self, part: Any, event: Any) -> Any:
        """Returns a part as others may see it, who wait for an event, if there is one."""
        part = self.settled(part) if self.loans else part
        return part if event is None or type(part) is Failure else Launched(part, event)

    def store(self, slot: int, value: Any) -> None:
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


Action = Callable[[_Frame], None]


class _Bound(NamedTuple):
    """A local program as one device runs it: each action with its instruction's number.

    The phase is what the timeline calls an action, None for one that notes its phases itself, or
    does nothing. The names are those of each instruction's spans, on a device with lanes.
    """

    inputs: tuple[tuple[int, int, int], ...]
    actions: tuple[tuple[Action, int, Phase | None], ...]
    outputs: tuple[tuple[int, int, int], ...]
    names: tuple[tuple[str, ...], ...]


def run(call: Call, state: DeviceState) -> None:
    """Runs a call on one device and fills its output shards there. Never raises."""
    bound = call.executable.bound(state)
    frame = _Frame(call, bound, state)
    slots, inputs, outputs = frame.slots, call.inputs, call.outputs
    for slot, number, index in bound.inputs:
        slots[slot] = part = inputs[number]._parts[index]
        if type(part) is not torch.Tensor:
            frame.events[slot] = inputs[number].event(index)
            frame.loans += inputs[number].loans((index,))
            frame.store(slot, inputs[number].part(index))
    for action, number, phase in bound.actions:
        if timeline.recorder is None or phase is None:
            action(frame)
        else:
            with frame.doing(number, phase):
                action(frame)
    for slot, number, index in bound.outputs:
        outputs[number].set(index, frame.shown(slots[slot], frame.events.get(slot)))


def _bind(program: LocalProgram, state: DeviceState) -> _Bound:
    device = state.device

    def places(
        values: Sequence[tuple[int, DeviceMesh]],
    ) -> tuple[tuple[int, int, int], ...]:
        return tuple(
            (slot, number, mesh.devices.index(device))
            for number, (slot, mesh) in enumerate(values)
            if device in mesh.devices
        )

    actions = [
        action
        for number in range(len(program.instructions))
        for action in _actions(program, number, device)
    ]
    names = ()
    if state.lanes is not None:
        names = tuple(map(timeline.span_names, program.instructions))
        launches = streams.plan(program, device)
        actions = [
            (_launched(action, launches[number], state.lanes), number, phase)
            for action, number, phase in actions
        ]
    return _Bound(places(program.inputs), tuple(actions), places(program.outputs), names)


def _actions(
    program: LocalProgram, number: int, device: Device
) -> list[tuple[Action, int, Phase | None]]:
    instruction = program.instructions[number]
    if isinstance(instruction, LocalCall):
        if device not in instruction.mesh.devices:
            return []
        index = instruction.mesh.devices.index(device)
        return [(_call_action(program, instruction, index), number, Phase.RUN)]
    meeting = collectives.meeting(instruction.step, device)
    if meeting is None:
        return []
    if isinstance(instruction, LocalShow):
        phase = None if meeting.member is None else Phase.SHOW
        return [(_show_action(program, instruction, meeting), number, phase)]
    return [(_step_action(program, instruction, meeting, number), number, None)]


def _launched(action: Action, launch: Launch | None, lanes: Lanes) -> Action:
    """An action that runs on a lane, in the order that the plan gives it."""
    assert launch is not None
    lane = launch.lane

    def launched(frame: _Frame) -> None:
        events, slots = frame.events, frame.slots
        for slot in launch.waits:
            if (event := events.get(slot)) is not None:
                lanes.wait(lane, event)
        lanes.keep(lane, [t for t in map(slots.__getitem__, launch.keeps) if _is_tensor(t)])
        with lanes.on(lane):
            action(frame)
        if launch.marks:
            events.update(dict.fromkeys(launch.marks, lanes.record(lane)))

    return launched


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


# -- operations ----------------------------------------------------------------------------


def _call_action(program: LocalProgram, call: LocalCall, index: int) -> Action:
    """Binds an operation to a device: what is left to run time is filling in slots."""
    args = [_resolve(a, index) for a in call.args]
    kwargs = {k: _resolve(v, index) for k, v in call.kwargs}
    operands = [(i, a.id) for i, a in enumerate(args) if type(a) is Ref]
    fillers = [(i, _filler(a)) for i, a in enumerate(args) if type(a) is not Ref]
    positions = [(i, fill) for i, fill in fillers if fill is not None]
    named = [(k, fill) for k, v in kwargs.items() if (fill := _filler(v)) is not None]
    op, outputs, frees, draws = call.op._op, call.outputs, call.frees, call.draws
    single = len(outputs) == 1 and not _returns_list(call.op)
    only = outputs[0] if single else None
    nested = len(call.op._schema.returns) > 1 and _returns_lists(call.op)
    device = call.mesh.torch_device(index)
    reads, results = slots_read(call), slots_written(call)
    is_graph = call.op is run_graph

    def action(frame: _Frame) -> None:
        slots = frame.slots
        if frame.poisoned:
            failed = next((slots[s] for s in reads if type(slots[s]) is Failure), None)
            if failed is not None:
                for s in results:
                    slots[s] = failed
                _free(slots, frees)
                return
        try:
            values = args.copy()
            for i, slot in operands:
                values[i] = slots[slot]
            for i, fill in positions:
                values[i] = fill(frame)
            named_values = kwargs
            if named:
                named_values = kwargs | {k: fill(frame) for k, fill in named}
            if draws is not None:
                generator = frame.state.generator(device)
                generator.set_state(slots[draws[0]].cpu().clone())
                out = op(*values, **named_values, generator=generator)
                slots[draws[1]] = generator.get_state()
            else:
                out = op(*values, **named_values)
            if nested:
                out = [tensor for item in out for tensor in item]
            if only is not None:
                slots[only] = out
            elif not single:
                for s, value in zip(outputs, out, strict=True):
                    if s is not None:
                        slots[s] = value
            if is_graph:
                frame.renew_loans(results)
        except BaseException as error:  # a kernel in Python may raise SystemExit
            failure = _failure(program, call.origin, frame, error)
            for s in results:
                frame.store(s, failure)
        for s in frees:
            slots[s] = None

    return action


def _free(slots: list[Any], frees: tuple[int, ...]) -> None:
    for s in frees:
        slots[s] = None


def _returns_list(op: torch._ops.OpOverload) -> bool:
    returns = op._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)


def _returns_lists(op: torch._ops.OpOverload) -> bool:
    return all(isinstance(r.type, torch.ListType) for r in op._schema.returns)


def _resolve(value: Any, index: int) -> Any:
    """Replaces `PerDevice` tables by the device's own entry."""
    if type(value) is PerDevice:
        return value[index]
    if type(value) in (tuple, list):
        return [_resolve(v, index) for v in value]
    return value


def _filler(value: Any) -> Callable[[_Frame], Any] | None:
    if type(value) is Ref:
        slot = value.id
        return lambda frame: frame.slots[slot]
    if type(value) is ScalarRef:
        number = value.number
        return lambda frame: frame.call.scalars[number]
    if type(value) is list:
        fillers = [_filler(v) for v in value]
        if any(f is not None for f in fillers):
            pairs = list(zip(value, fillers, strict=True))
            return lambda frame: [v if f is None else f(frame) for v, f in pairs]
    return None


def _failure(program: LocalProgram, origin: int, frame: _Frame, error: BaseException) -> Failure:
    device, line = str(frame.state.device), line_at(frame.call.site)
    return failure_of(program, origin, device, line, error)


# -- redistribution ------------------------------------------------------------------------


def _show_action(program: LocalProgram, instruction: LocalShow, meeting: Meeting) -> Action:
    key = (instruction.number, meeting.group[0], 0)

    def action(frame: _Frame) -> None:
        if meeting.member is not None:
            event = frame.events.get(instruction.input)
            try:
                part = _plain(frame.slots[instruction.input])
                if _is_tensor(part) and lent.entry_of(part) is not None:
                    part = part.clone()  # a peer may be late, and the graph ahead of it
                    event = _event_of(frame, Lane.COMPUTE)
            except Exception as error:
                part = _failure(program, instruction.origin, frame, error)
            exchange = frame.call.exchange(key, len(meeting.group))
            exchange.set(meeting.member, frame.shown(part, event))
            if not meeting.rounds:
                frame.call.leave(key, len(meeting.visitors))
        _free(frame.slots, instruction.frees)

    return action


def _step_action(
    program: LocalProgram, instruction: LocalStep, meeting: Meeting, number: int
) -> Action:
    """Binds a step: a device takes pieces and joins them; in a second round it shows that."""
    name = (instruction.number, meeting.group[0])

    def action(frame: _Frame) -> None:
        part = None
        for count, round in enumerate(meeting.rounds):
            if not meeting.visitors:
                parts = [frame.slots[instruction.input]]
            else:
                if count:
                    exchange = frame.call.exchange((*name, count), len(meeting.group))
                    event = _event_of(frame, Lane.COMMUNICATION)
                    exchange.set(meeting.member or 0, frame.shown(part, event))
                with frame.doing(number, Phase.WAIT):
                    parts = _met(frame, meeting, (*name, count), round)
            failed = next((p for p in parts if type(p) is Failure), None)
            if failed is not None:
                # The peers have seen it too, and start no other round either.
                part = failed
                break
            with frame.doing(number, Phase.TAKE):
                try:
                    part = collectives.join(round, meeting, parts)
                except Exception as error:
                    part = _failure(program, instruction.origin, frame, error)
        if meeting.rounds:
            frame.store(instruction.output, part)
        _free(frame.slots, instruction.frees)

    return action


def _met(frame: _Frame, meeting: Meeting, key: tuple[Any, ...], round: Round) -> Sequence[Any]:
    """The parts of the group, where the round takes a piece of them."""
    exchange = frame.call.exchange(key, len(meeting.group))
    taken = [p.member for p in round.pieces]
    while not exchange.wait(taken, 0.2):
        if frame.state.stopping.is_set():
            return [stopped_failure()]
    parts: list[Any] = [None] * len(exchange)
    for member in taken:
        parts[member] = exchange.part(member)
    _order_after(frame, [parts[m] for m in taken], [exchange.event(m) for m in taken])
    frame.loans += exchange.loans(taken)
    frame.call.leave(key, len(meeting.visitors))
    return parts


def _order_after(frame: _Frame, parts: Sequence[Any], events: Sequence[Any]) -> None:
    """Has the lane of communication wait for what peers have shown, and keep their memory.

    A device without lanes reads it by the streams of its own thread.
    """
    lanes = frame.state.lanes
    shown = [(p, e) for p, e in zip(parts, events, strict=True) if _is_tensor(p) and e is not None]
    if lanes is None:
        for part, event in shown:
            order_caller(part, event)
        return
    for event in dict.fromkeys(event for _, event in shown):
        lanes.wait(Lane.COMMUNICATION, event)
    lanes.keep(Lane.COMMUNICATION, [part for part, _ in shown])


def _event_of(frame: _Frame, lane: Lane) -> Any:
    """An event for what a lane has computed so far."""
    lanes = frame.state.lanes
    return None if lanes is None else lanes.record(lane)


def _plain(part: Any) -> Any:
    return part if type(part) is Failure else part.resolve_conj().resolve_neg()
