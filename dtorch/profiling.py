"""`profile`: what every device and every client thread did in a block, as events and as a trace.

Takes the records of `runtime.timeline` and gives `Event`s, in which each has its user's line; a
table of how busy the devices were; and a file for Perfetto in Chrome's trace event format.
"""

from __future__ import annotations

import dataclasses
import enum
import gzip
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import DTorchError
from .lowering import LocalCall, LocalProgram
from .mesh import Device
from .program import SourceLine
from .runtime import begin_recording, check_not_on_worker, end_recording, synchronize
from .runtime.timeline import Dispatch, Doing, Phase, Recorder, Span, span_names
from .source import Site, line_at


class Kind(enum.Enum):
    """What an `Event` is."""

    COMPUTE = "compute"
    """A device runs an operation, or changes a layout without its peers."""
    COMMUNICATION = "communication"
    """A device shows its part to its peers, or takes and joins theirs."""
    WAIT = "wait"
    """A device waits for what its peers show."""
    CALL = "call"
    """A client thread calls a torch function or a jitted one, and submits its program."""
    TRACE = "trace"
    """A client thread traces a function that it has not seen with such arguments."""
    COMPILE = "compile"
    """A client thread compiles a traced function: ``jit(f, compile=True)``."""
    FETCH = "fetch"
    """A client thread waits for a value and copies it."""


_KINDS = {
    Doing.PROGRAM: Kind.CALL,
    Doing.EAGER: Kind.CALL,
    Doing.JIT: Kind.CALL,
    Doing.TRACE: Kind.TRACE,
    Doing.COMPILE: Kind.COMPILE,
    Doing.FETCH: Kind.FETCH,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One slice of a profile: what a device or a client thread did for a while.

    Attributes:
        kind: What it was doing.
        name: The operation, the collective, or the function that was called.
        row: The row that it is drawn in: ``cpu:0 compute``, ``client MainThread``.
        start: When it began, in seconds since the profile began.
        end: When it ended.
        device: The device; None for a client thread.
        call: The number of the submission, which the events of the client and of the devices
            share; 0 where nothing was submitted, or before the profile began.
        program: The name of the program.
        instruction: The printed instruction; empty for a client thread.
        source: The user's line that the instruction or the call comes from.
        called_at: The user's line that made the call, where that is another.
        num_bytes: Of a collective, the bytes that the busiest device receives.
        axes: Of a collective, the names of the mesh axes that take part, or their numbers.
    """

    kind: Kind
    name: str
    row: str
    start: float
    end: float
    device: Device | None = None
    call: int = 0
    program: str = ""
    instruction: str = ""
    source: SourceLine | None = None
    called_at: SourceLine | None = None
    num_bytes: int = 0
    axes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceTime:
    """How one device spent a profile, in seconds."""

    compute: float
    communication: float
    wait: float
    idle: float


class Profile:
    """What happened in the block of a `profile`.

    Attributes:
        path: The file that the trace goes to, or None.
        events: The events of all rows by their start, once the block has ended.
        seconds: How long the block took, until everything submitted in it had run.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.events: tuple[Event, ...] = ()
        self.seconds = 0.0
        self._process = 0

    def __enter__(self) -> Profile:
        check_not_on_worker("profiling")
        if self._process:
            raise DTorchError(
                "this profile has been recorded already.\n  Fix: call dtorch.profile() again."
            )
        begin_recording()
        self._process = os.getpid()
        return self

    def __exit__(self, *error: object) -> None:
        if os.getpid() != self._process:  # a forked child has left the block too
            return
        try:
            synchronize()
        finally:
            recorder = end_recording()
            self.seconds = (recorder.end - recorder.start) * 1e-9
            self.events = _events(recorder)
            if self.path is not None:
                _write(self.path, self.events)

    @property
    def devices(self) -> dict[str, DeviceTime]:
        """How each device that did something spent its time, by its name, such as ``cpu:0``."""
        found: dict[Device, dict[Kind, float]] = {}
        for event in self.events:
            if event.device is not None:
                spent = found.setdefault(event.device, {})
                spent[event.kind] = spent.get(event.kind, 0.0) + event.seconds
        return {str(d): _device_time(found[d], self.seconds) for d in sorted(found)}

    def busy(self, device: Device | str) -> list[tuple[float, float]]:
        """Returns when a device was computing, as disjoint ranges of seconds, in order.

        Args:
            device: The device or its name, such as ``cpu:0``; one that did nothing has no ranges.

        Raises:
            ValueError: It is not the name of a device.
        """
        if not re.fullmatch(r"\w+:\d+", str(device)):
            known = ", ".join(self.devices) or "none"
            raise ValueError(
                f"{device!r} is not the name of a device.\n  Fix: one of this profile: {known}."
            )
        found: list[tuple[float, float]] = []
        for event in self.events:
            if str(event.device) == str(device) and event.kind is Kind.COMPUTE:
                if found and event.start <= found[-1][1]:
                    found[-1] = (found[-1][0], max(event.end, found[-1][1]))
                else:
                    found.append((event.start, event.end))
        return found

    def overlap(self, first: Device | str, second: Device | str) -> float:
        """Returns for how many seconds two devices were computing at the same time."""
        ours, theirs = self.busy(first), self.busy(second)
        total, i, j = 0.0, 0, 0
        while i < len(ours) and j < len(theirs):
            (start, end), (other_start, other_end) = ours[i], theirs[j]
            total += max(0.0, min(end, other_end) - max(start, other_start))
            i, j = (i + 1, j) if end <= other_end else (i, j + 1)
        return total

    def summary(self) -> str:
        """Returns a table of how the devices spent their time."""
        devices = self.devices
        head = f"{_time(self.seconds)}, {len(devices)} devices, {len(self.events)} events"
        rows = [("device", "compute", "communication", "wait", "idle")]
        rows += [
            (name, *(self._share(s) for s in dataclasses.astuple(d))) for name, d in devices.items()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([head, *lines])

    def _share(self, seconds: float) -> str:
        return f"{_time(seconds)} {100 * seconds / self.seconds:.0f}%"

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        return f"<profile of {_time(self.seconds)} with {len(self.events)} events>"


def profile(path: str | os.PathLike[str] | None = None) -> Profile:
    """Returns a context that records what every device and client thread does in it.

    At its end it writes a trace that https://ui.perfetto.dev opens (Chrome's trace event format).
    There is a row for each device, with every instruction, and for collectives the showing of a
    part, the waiting for the peers and the taking of their parts apart; and a row for each client
    thread, with each call, its tracing at the first time, and its waiting for values. Every slice
    carries the user's line; arrows lead from a call to where the devices begin it. What was
    submitted before the block and runs in it is there too, without its call. On a GPU a slice is
    the time that the worker takes to launch an instruction, and a range of NVTX of that name.

    Args:
        path: The file; gzipped if it ends in ``.gz``. None writes none.

    Returns:
        The profile, whose events and summary are there when the block has ended.

    Blocking: at the end of the block, until what was submitted in it has run.

    Raises:
        DTorchError: At the block's beginning, a profile is being recorded already.
        FileNotFoundError: There is no such folder.
        IsADirectoryError: The path is a folder.

    Source: `jax.profiler.trace`, `torch.profiler`.

    Example:
        >>> import dtorch
        >>> mesh = dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        >>> x = dtorch.ones(4, 6, device_mesh=mesh, placements=[dtorch.Shard(1)])
        >>> with dtorch.profile() as profile:
        ...     y = x.sum(1).relu()
        >>> {e.name for e in profile.events if e.row == "cpu:1 compute"} >= {"aten.relu.default"}
        True
    """
    where = None if path is None else Path(path)
    if where is not None and not where.parent.is_dir():
        raise FileNotFoundError(
            f"a profile cannot be written to {where}: there is no folder {where.parent}."
        )
    if where is not None and where.is_dir():
        raise IsADirectoryError(
            f"a profile cannot be written to {where}, which is a folder.\n"
            f"  Fix: give a file, such as {where / 'trace.json'}."
        )
    return Profile(where)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _device_time(spent: dict[Kind, float], seconds: float) -> DeviceTime:
    compute, communication, wait = (
        spent.get(k, 0.0) for k in (Kind.COMPUTE, Kind.COMMUNICATION, Kind.WAIT)
    )
    idle = max(0.0, seconds - compute - communication - wait)
    return DeviceTime(compute, communication, wait, idle)


# -- from records to events ----------------------------------------------------------------


def _events(recorder: Recorder) -> tuple[Event, ...]:
    calls = _client_events(recorder)
    # An eager program has the line of its first call; each call has its own.
    eager = {event.call for event, doing in calls if doing is Doing.EAGER}
    spans = (s for s in recorder.spans if s.start >= recorder.start)
    events = [e for e, _ in calls]
    events += [_device_event(s, s.call in eager, recorder.start) for s in spans]
    return tuple(sorted(events, key=lambda e: (e.start, -e.end)))


def _device_event(span: Span, is_eager: bool, origin: int) -> Event:
    instruction = span.program.instructions[span.instruction]
    source, called_at = span.program.sources[instruction.origin], line_at(span.site)
    if source is None or (is_eager and called_at is not None):
        source = called_at
    device = _device_of(span.program, span.device)
    kind, num_bytes, axes = Kind.COMPUTE, 0, ()
    if not isinstance(instruction, LocalCall) and not instruction.step.kind.is_local:
        kind = Kind.WAIT if span.phase is Phase.WAIT else Kind.COMMUNICATION
        num_bytes, mesh = instruction.step.num_bytes, instruction.step.source.mesh
        axes = tuple(mesh.axis_name(a).strip("'") for a in instruction.step.axes)
    return Event(
        kind,
        span_names(instruction)[span.phase],
        f"{device} compute",
        (span.start - origin) * 1e-9,
        (span.end - origin) * 1e-9,
        device,
        span.call,
        span.program.name,
        span.program.texts[instruction.origin],
        source,
        None if called_at == source else called_at,
        num_bytes,
        axes,
    )


def _device_of(program: LocalProgram, name: str) -> Device:
    return next(d for d in program.devices if str(d) == name)


@dataclasses.dataclass(slots=True)
class _Slice:
    """What a client thread did, and the program that it submitted meanwhile."""

    record: Dispatch
    call: int
    program: str
    site: Site | None

    @property
    def awaits_call(self) -> bool:
        """Whether it is a call whose own submission has not been met."""
        return not self.call and self.record.doing in (Doing.EAGER, Doing.JIT)


def _client_events(recorder: Recorder) -> list[tuple[Event, Doing]]:
    """The events of the client threads, each with what it was."""
    threads: dict[threading.Thread, list[Dispatch]] = {}
    for record in (d for d in recorder.dispatches if d.start >= recorder.start):
        threads.setdefault(record.thread, []).append(record)
    made: list[tuple[Event, Doing]] = []
    for records, row in zip(threads.values(), _rows(threads), strict=True):
        for part in _slices(records):
            made.append((_client_event(part, row, recorder.start), part.record.doing))
    return made


def _rows(threads: Iterable[threading.Thread]) -> Iterator[str]:
    """A name for each thread, which no other has."""
    seen: dict[str, int] = {}
    for thread in threads:
        count = seen[thread.name] = seen.get(thread.name, 0) + 1
        yield f"client {thread.name}" + (f" ({count})" if count > 1 else "")


def _slices(records: Sequence[Dispatch]) -> list[_Slice]:
    """What one thread did, without the submissions that are the work of a call."""
    slices: list[_Slice] = []
    around: list[_Slice] = []
    for record in sorted(records, key=lambda r: (r.start, -r.end)):
        while around and around[-1].record.end < record.end:
            around.pop()
        inside = around[-1] if around else None
        if record.doing is Doing.PROGRAM and inside is not None and inside.awaits_call:
            inside.call, inside.program = record.call, record.name
            inside.site = inside.site or record.site
            continue
        around.append(_Slice(record, record.call, record.name, record.site))
        slices.append(around[-1])
    return slices


def _client_event(part: _Slice, row: str, origin: int) -> Event:
    record = part.record
    name = record.name or part.program
    kind = _KINDS[record.doing]
    return Event(
        kind,
        f"{kind.value} {name}" if kind in (Kind.TRACE, Kind.COMPILE) else name,
        row,
        (record.start - origin) * 1e-9,
        (record.end - origin) * 1e-9,
        call=part.call,
        program=part.program,
        source=line_at(part.site),
    )


# -- the trace ------------------------------------------------------------------------------


def _write(path: Path, events: Sequence[Event]) -> None:
    entries = ",\n".join(map(json.dumps, _trace(events)))
    text = f'{{"displayTimeUnit": "ms", "traceEvents": [\n{entries}\n]}}\n'.encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def _trace(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """The entries of a trace: the rows' names, the slices, and the arrows between them."""
    rows = dict.fromkeys(e.row for e in sorted(events, key=_row_order))
    places = {row: {"pid": int(" compute" in row), "tid": i + 1} for i, row in enumerate(rows)}
    for pid, name in enumerate(("client threads", "devices")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for row, place in places.items():
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": row}}
        order = {"sort_index": place["tid"]}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": order}
    for event in events:
        start = _micros(event.start)
        yield {
            "ph": "X",
            "name": event.name,
            "cat": event.kind.value,
            **places[event.row],
            "ts": start,
            "dur": round(_micros(event.end) - start, 3),
            "args": dict(_arguments(event)),
        }
    for number, (call, first) in enumerate(_arrows(events)):
        arrow = {"name": "submit", "cat": "submit", "id": number}
        yield {"ph": "s", **arrow, **places[call.row], "ts": _micros(call.start)}
        yield {"ph": "f", "bp": "e", **arrow, **places[first.row], "ts": _micros(first.start)}


def _arrows(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    """Each call with the first event on every device that runs it."""
    calls = {e.call: e for e in events if e.call and e.device is None}
    firsts: dict[tuple[int, str], Event] = {}
    for event in events:
        if event.device is not None and event.call in calls:
            firsts.setdefault((event.call, event.row), event)
    return [(calls[call], event) for (call, _), event in firsts.items()]


def _row_order(event: Event) -> tuple[bool, Device | None, float]:
    return event.device is not None, event.device or Device("", 0), event.start


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _arguments(event: Event) -> Iterator[tuple[str, Any]]:
    for name, value in (
        ("source", event.source),
        ("called at", event.called_at),
        ("program", event.program),
        ("instruction", event.instruction),
        ("call", event.call),
        ("axes", ", ".join(event.axes)),
        ("bytes", event.num_bytes),
    ):
        if value:
            yield name, value if isinstance(value, int) else str(value)
