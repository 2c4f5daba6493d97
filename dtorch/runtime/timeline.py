"""The timeline: what workers and client threads do while it is recorded, as plain records.

Takes what the executors, dispatch and `jit` note; gives `Span`s and `Dispatch`es. Where nothing is
recorded, whoever would note something looks at `recorder` and goes on. While something is, workers
of GPUs also name what they do as ranges (`Lanes.push`), for tools that watch the process.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import DTorchError
from ..lowering import LocalCall, LocalInstruction, LocalProgram
from ..source import Site, line_at, user_site
from .streams import Lanes


class Phase(enum.IntEnum):
    """What a worker does of an instruction; the numbers are those of executor.h."""

    RUN = 0
    SHOW = 1  # begins a step: shows its part to the peers
    WAIT = 2  # for the peers' parts, in a round of a step
    TAKE = 3  # makes its new part of theirs, or of its own


def span_names(instruction: LocalInstruction) -> tuple[str, ...]:
    """Returns what the spans of an instruction are called, by their phase."""
    if isinstance(instruction, LocalCall):
        return (str(instruction.op),)
    name = instruction.step.kind.value
    return (name, f"show for {name}", f"wait for {name}", name)


class Doing(enum.IntEnum):
    """What a client thread does; the first three numbers are those of bindings.h."""

    PROGRAM = 0  # submits a program
    EAGER = 1  # calls a torch function
    JIT = 2  # calls a jitted function
    TRACE = 3
    COMPILE = 4
    FETCH = 5  # waits for a value


class Span(NamedTuple):
    """A part of an instruction that a worker ran; times are those of `now`.

    `call` is the number of the submission, 0 if that was before the recording.
    """

    device: str
    program: LocalProgram
    call: int
    site: Site | None
    instruction: int
    phase: Phase
    start: int
    end: int


class Slice:
    """What a worker does while this is entered: a span, and a range of that name on its lanes."""

    def __init__(self, span: Span, lanes: Lanes | None, name: str) -> None:
        self._span = span
        self._lanes = lanes
        self._name = name

    def __enter__(self) -> None:
        self._start = now()
        if self._lanes is not None:
            self._lanes.push(self._name)

    def __exit__(self, *error: object) -> None:
        if self._lanes is not None:
            self._lanes.pop()
        if recorder is not None:
            recorder.spans.append(self._span._replace(start=self._start, end=now()))


class Dispatch(NamedTuple):
    """What a client thread did; `call` is 0 unless it submitted that program itself."""

    thread: threading.Thread
    doing: Doing
    name: str
    call: int
    site: Site | None
    start: int
    end: int


class Recorder:
    """What is recorded from one `begin` to its `end`; appending is atomic, so there is no lock."""

    def __init__(self, site: Site | None) -> None:
        self.site = site
        self.start = self.end = now()
        self.spans: list[Span] = []
        self.dispatches: list[Dispatch] = []
        self._calls = itertools.count(1)

    def new_call(self) -> int:
        """Returns the number of the next submission."""
        return next(self._calls)

    def add(
        self, doing: Doing, name: str, call: int, site: Site | None, start: int, end: int
    ) -> None:
        """Notes what the calling thread has done."""
        thread = threading.current_thread()
        self.dispatches.append(Dispatch(thread, doing, name, call, site, start, end))


now: Callable[[], int] = time.perf_counter_ns
"""The clock of workers and clients; the native executor puts its own in its place."""

recorder: Recorder | None = None
"""What is being recorded, or None."""

_lock = threading.Lock()
NOTHING = contextlib.nullcontext()


def begin() -> None:
    """Begins to record.

    Raises:
        DTorchError: Something is being recorded.
    """
    global recorder
    site = user_site()
    with _lock:
        if recorder is not None:
            line = line_at(recorder.site)
            raise DTorchError(
                f"a profile is already being recorded, since {line or 'an unknown line'}.\n"
                "  Fix: leave that block first; one profile sees every device and thread."
            )
        recorder = Recorder(site)


def end() -> Recorder:
    """Ends what `begin` began and returns what has been recorded."""
    global recorder
    with _lock:
        assert recorder is not None, "nothing is being recorded"
        ended, recorder = recorder, None
    ended.end = now()
    return ended


def dispatched(
    doing: int, start: int, end: int, call: int, program: LocalProgram | None, site: Site | None
) -> None:
    """Notes what the calling client thread has done: called by the executors."""
    if recorder is not None:
        recorder.add(Doing(doing), program.name if program else "", call, site, start, end)


def noted(doing: Doing, name: Any = "") -> contextlib.AbstractContextManager[Any]:
    """Returns a context that notes what the client does in it, where somebody records.

    Args:
        doing: What it is.
        name: Of what: a text, or a function; by default that of the program that it submits.
    """
    return NOTHING if recorder is None else _Noted(recorder, doing, name)


class _Noted:
    def __init__(self, recorder: Recorder, doing: Doing, name: Any) -> None:
        self._recorder = recorder
        self._doing = doing
        self._name = name if isinstance(name, str) else getattr(name, "__name__", str(name))
        self._site = user_site()

    def __enter__(self) -> None:
        self._start = now()

    def __exit__(self, *error: object) -> None:
        self._recorder.add(self._doing, self._name, 0, self._site, self._start, now())


def _forget() -> None:
    """In a forked child, which has none of the workers: the parent records on."""
    global recorder, _lock
    recorder, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
