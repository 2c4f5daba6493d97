"""The portable executor: runs a local program on one device, instruction by instruction.

Takes a `LocalProgram` and a `Call` (one submission of it); fills the call's output shards of
one device. A failing instruction does not stop the program: its results become `Failure`s,
which pass through everything that depends on them, so a device always takes part in the
collectives that its peers wait in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..lowering import (
    LocalCall,
    LocalProgram,
    LocalShow,
    PerDevice,
    slots_read,
    slots_written,
)
from ..mesh import Device, DeviceMesh
from ..program import Ref, ScalarRef
from . import collectives, communicators, faults, peers, streams, timeline
from .faults import GuardedLanes
from .frames import Action, Call, DeviceState, Frame, failure, free
from .graph_calls import run_graph
from .shards import Shards
from .steps import show_action, step_action
from .streams import Launch
from .timeline import Phase


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
        communicators.check(collectives.launched_together(program))
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
    frame = Frame(call, bound.names, state)
    slots, inputs, outputs = frame.slots, call.inputs, call.outputs
    for slot, number, index in bound.inputs:
        slots[slot] = part = inputs[number]._parts[index]
        if type(part) is not torch.Tensor:
            if (event := inputs[number].event(index)) is not None:
                frame.events[slot] = event
            frame.loans += inputs[number].loans((index,))
            frame.store(slot, inputs[number].part(index))
    frame.note_shared_loans()
    for action, number, phase in bound.actions:
        if timeline.recorder is None or phase is None:
            action(frame)
        else:
            with frame.doing(number, phase):
                action(frame)
    for slot, number, index in bound.outputs:
        outputs[number].set(index, frame.shown(slots[slot], frame.events.get(slot)))
    if frame.lost is None and state.place is not None and faults.of(state.place) is not None:
        faults.keep(state.place, slots)


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
        return [(show_action(program, instruction, meeting), number, phase)]
    return [(step_action(program, instruction, meeting, number), number, None)]


def _launched(action: Action, launch: Launch | None, lanes: GuardedLanes) -> Action:
    """An action that runs on a lane, in the order that the plan gives it."""
    assert launch is not None
    lane = launch.lane

    def launched(frame: Frame) -> None:
        events, slots = frame.events, frame.slots
        for slot in launch.waits:
            if (event := events.get(slot)) is not None:
                lanes.wait(lane, event)
        lanes.keep(lane, [t for t in map(slots.__getitem__, launch.keeps) if _is_tensor(t)])
        with lanes.on(lane):
            action(frame)
        if launch.marks and (event := lanes.record(lane)) is not None:
            events.update(dict.fromkeys(launch.marks, event))

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
    nested = len(call.op._schema.returns) > 1 and _has_lists(call.op)
    device = call.mesh.torch_device(index)
    reads, results = slots_read(call), slots_written(call)
    is_graph = call.op is run_graph

    def action(frame: Frame) -> None:
        slots = frame.slots
        if frame.poisoned or frame.events:
            failed = frame.failed(reads)
            if failed is not None:
                for s in results:
                    slots[s] = failed
                free(slots, frees)
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
                out = [t for item in out for t in (item if isinstance(item, list) else [item])]
            if only is not None:
                slots[only] = out
            elif not single:
                for s, value in zip(outputs, out, strict=True):
                    if s is not None:
                        slots[s] = value
            if is_graph:
                frame.renew_loans(results)
        except BaseException as error:  # a kernel in Python may raise SystemExit
            failed = failure(program, call.origin, frame, error)
            for s in results:
                frame.store(s, failed)
        for s in frees:
            slots[s] = None

    return action


def _returns_list(op: torch._ops.OpOverload) -> bool:
    returns = op._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)


def _has_lists(op: torch._ops.OpOverload) -> bool:
    return any(isinstance(r.type, torch.ListType) for r in op._schema.returns)


def _resolve(value: Any, index: int) -> Any:
    """Replaces `PerDevice` tables by the device's own entry."""
    if type(value) is PerDevice:
        return value[index]
    if type(value) in (tuple, list):
        return [_resolve(v, index) for v in value]
    return value


def _filler(value: Any) -> Callable[[Frame], Any] | None:
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
