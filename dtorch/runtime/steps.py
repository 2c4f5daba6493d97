"""Steps of a redistribution as the portable executor takes them, on one device of a group.

An action shows a part to the group, or waits for what the device takes of it and makes its own
part of that: of pieces that it copies itself, or of a collective that the first member of the
group launches for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..lowering import LocalProgram, LocalShow, LocalStep
from . import collectives, communicators, lent, streams, timeline
from .collectives import Join, Meeting, Round
from .failures import Failure, stopped_failure
from .faults import Event
from .frames import Action, Frame, failure, free
from .shards import Shards, order_caller
from .streams import Lane
from .timeline import Phase


def show_action(program: LocalProgram, instruction: LocalShow, meeting: Meeting) -> Action:
    """Binds the beginning of a step: a device shows its part, and does not wait."""
    key = (instruction.number, meeting.group[0], 0)

    def action(frame: Frame) -> None:
        if meeting.member is not None:
            event = frame.events.get(instruction.input)
            try:
                part = _plain(frame.slots[instruction.input])
                if isinstance(part, torch.Tensor) and lent.entry_of(part) is not None:
                    part = part.clone()  # a peer may be late, and the graph ahead of it
                    event = _event_of(frame, Lane.COMPUTE)
            except Exception as error:
                part = failure(program, instruction.origin, frame, error)
            exchange = frame.call.exchange(key, len(meeting.group))
            exchange.set(meeting.member, frame.shown(part, event))
            if not meeting.rounds:
                frame.call.leave(key, len(meeting.visitors))
        free(frame.slots, instruction.frees)

    return action


def step_action(
    program: LocalProgram, instruction: LocalStep, meeting: Meeting, number: int
) -> Action:
    """Binds a step: a device takes what it needs; in a second round it shows that."""
    name = (instruction.number, meeting.group[0])

    def failed(frame: Frame, error: BaseException, events: Sequence[Event | None] = ()) -> Failure:
        others = [event.place for event in events if event is not None]
        return failure(program, instruction.origin, frame, error, others)

    def taken(frame: Frame, key: Any, round: Round, part: Any) -> tuple[Any, Event | None]:
        """What a device makes of the pieces that it takes, and on the host when that arrives."""
        with frame.doing(number, Phase.WAIT) if meeting.visitors else timeline.NOTHING:
            parts, events = _met(frame, meeting, key, round, part)
        lost = next((p for p in parts if type(p) is Failure), None)
        lost = lost or frame.lost or _lost(events)
        if lost is not None:
            return lost, None
        with frame.doing(number, Phase.TAKE):
            try:
                _order_after(frame, parts, events)
                made = _lost(events) or collectives.join(round, meeting, parts)
                return made, _arrival(parts, events) if frame.state.place is None else None
            except Exception as error:
                return failed(frame, error, events), None

    def launched(frame: Frame, key: Any, round: Round, part: Any) -> tuple[Any, None]:
        """What a device receives of a collective that the first member launches for all.

        Hand-over: each member's lane of communication has waited for what the member gives; both
        that and what it receives are memory of this lane, or kept by it, so that the launch, which
        uses them on this lane alone, needs no event, and may be forgotten by the host once it is
        made. Until then the exchange holds both. An event that the member records afterwards
        comes after the launch.
        """
        size = len(meeting.group)
        exchange, filled = frame.call.exchange(key, 2 * size + 1), None
        with frame.doing(number, Phase.WAIT):
            if type(part) is not Failure:
                try:
                    part, filled = collectives.prepared(round, meeting, part)
                except Exception as error:
                    part = failed(frame, error)
            show(frame, exchange, part, filled)
            if meeting.member == 0:
                try:
                    outcome = _launch(frame, exchange, size, round)
                except Exception as error:
                    outcome = failed(frame, error)
                exchange.set(2 * size, outcome)
            if not _awaited(frame, exchange, (2 * size,)):
                return stopped_failure(), None
        with frame.doing(number, Phase.TAKE):
            try:
                frame.loans += exchange.loans(range(size))
                lost = exchange.part(2 * size)
                if lost is not None or filled is None:  # a member's own failure is one of the group
                    return lost, None
                return collectives.completed(round, filled), None
            except Exception as error:
                return failed(frame, error), None
            finally:
                frame.call.leave(key, len(meeting.visitors))

    def show(frame: Frame, exchange: Shards, part: Any, filled: Any) -> None:
        """Shows what a device gives to a collective, and where it receives on which stream."""
        assert meeting.member is not None
        lanes = frame.state.lanes
        lane = None if lanes is None else lanes.stream(Lane.COMMUNICATION)
        exchange.set(meeting.member, frame.shown(part, None))
        exchange.set(len(meeting.group) + meeting.member, (filled, lane))

    def action(frame: Frame) -> None:
        part, event = None, None
        if not meeting.visitors:
            part = frame.failed((instruction.input,)) or frame.slots[instruction.input]
        for count, round in enumerate(meeting.rounds):
            take = launched if round.join is Join.TOGETHER else taken
            part, event = take(frame, (*name, count), round, part)
        if meeting.rounds:
            frame.store(instruction.output, part)
            if event is not None:
                frame.events[instruction.output] = event
        free(frame.slots, instruction.frees)

    return action


def _met(
    frame: Frame, meeting: Meeting, key: tuple[Any, ...], round: Round, part: Any
) -> tuple[list[Any], list[Event | None]]:
    """The parts of the group, where the round takes a piece of them, and their events.

    Args:
        part: What an earlier round has given, which the device shows in this one.
    """
    if not meeting.visitors:
        return [part], [None]
    exchange = frame.call.exchange(key, len(meeting.group))
    if part is not None:
        assert meeting.member is not None
        exchange.set(meeting.member, frame.shown(part, _event_of(frame, Lane.COMMUNICATION)))
    taken = [p.member for p in round.pieces]
    if not _awaited(frame, exchange, taken):
        return [stopped_failure()], [None]
    parts: list[Any] = [None] * len(exchange)
    events: list[Event | None] = [None] * len(exchange)
    for member in taken:
        parts[member], events[member] = exchange.part(member), exchange.event(member)
    frame.loans += exchange.loans(taken)
    frame.call.leave(key, len(meeting.visitors))
    return parts, events


def _awaited(frame: Frame, exchange: Shards, indices: Sequence[int]) -> bool:
    """Waits for parts of an exchange; returns whether they came before the workers were stopped."""
    while not exchange.wait(indices, 0.2):
        if frame.state.stopping.is_set():
            return False
    return True


def _launch(frame: Frame, exchange: Shards, size: int, round: Round) -> Failure | None:
    """Launches a collective once all members have shown what they give; returns what is wrong."""
    if not _awaited(frame, exchange, range(2 * size)):
        return stopped_failure()
    inputs = [exchange.part(m) for m in range(size)]
    lost = next((part for part in inputs if type(part) is Failure), None)
    if lost is None:
        assert round.kind is not None
        outputs, lanes = zip(*(exchange.part(size + m) for m in range(size)), strict=True)
        communicators.launch(round.kind, round.op, inputs, outputs, lanes)
    return lost


def _order_after(frame: Frame, parts: Sequence[Any], events: Sequence[Event | None]) -> None:
    """Has the lane of communication wait for what peers have shown, and keep their memory.

    A device without lanes reads it by streams of its own thread.
    """
    lanes = frame.state.lanes
    shown = [
        (p, e)
        for p, e in zip(parts, events, strict=True)
        if isinstance(p, torch.Tensor) and e is not None
    ]
    if lanes is None:
        for part, event in shown:
            streams.visit(part.device)
            order_caller(part, event)
        return
    for event in dict.fromkeys(event for _, event in shown):
        lanes.wait(Lane.COMMUNICATION, event)
    lanes.keep(Lane.COMMUNICATION, [part for part, _ in shown])


def _lost(events: Sequence[Event | None]) -> Failure | None:
    """What has become of parts that peers have shown, if the driver of one has failed since."""
    return next((lost for e in events if e is not None and (lost := e.lost)), None)


def _arrival(parts: Sequence[Any], events: Sequence[Event | None]) -> Event | None:
    """An event for when the host has what accelerators copy to it; None where none does."""
    places = list[torch.device]()
    for part, event in zip(parts, events, strict=True):
        has_arrived = event and part.is_cpu and event.place.type != "cpu"  # it has waited for it
        if event and not has_arrived and event.place not in places:
            places.append(event.place)
    return Event(places[0], streams.joined(places)) if places else None


def _event_of(frame: Frame, lane: Lane) -> Event | None:
    """An event for what a lane has computed so far."""
    lanes = frame.state.lanes
    return None if lanes is None else lanes.record(lane)


def _plain(part: Any) -> Any:
    return part if type(part) is Failure else part.resolve_conj().resolve_neg()
