"""Faults: the accelerators whose driver has failed, and what becomes of values there.

A kernel fails after the call that launched it, so an error of the driver may be of anything that
was launched before, and all virtual devices of an accelerator share what it leaves behind. Its
*place*, a device of torch, is then marked with the first failure: devices there compute nothing
any more, what is not known to be computed is lost, and nobody who waits for it hangs, until
`clear`. `of`, `mark`, `clear` and `num_cleared` are all that knows the marks; the native executor
puts its own in their place.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ..mesh import Device
from . import streams
from .failures import Failure, driver_failure, untrusted_failure
from .streams import Lane, Lanes

_R = TypeVar("_R")

# -- marks ---------------------------------------------------------------------------------


class _Marks:
    """The marks of the portable executor; each operation on a table is atomic."""

    def __init__(self) -> None:
        self._failures: dict[torch.device, Failure] = {}
        self._kept: dict[torch.device, list[Any]] = {}
        self._num_cleared: dict[torch.device, int] = {}

    def of(self, place: torch.device) -> Failure | None:
        return self._failures.get(place)

    def mark(self, place: torch.device, failure: Failure) -> None:
        if self._failures.setdefault(place, failure) is failure:
            launched = (o for o in gc.get_objects() if type(o) is Launched and hasattr(o, "event"))
            self.keep(place, [o.part for o in launched if o.event and o.event.place == place])

    def keep(self, place: torch.device, memory: list[Any]) -> None:
        """Keeps memory of a marked place until the mark is cleared.

        Where another stream has used it, torch asks the driver when it is freed, and an error then
        ends the process. So nothing frees it at the end of the process either.
        """
        kept = self._kept.setdefault(place, [])
        if not kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        kept.append(memory)

    def clear(self, place: torch.device) -> None:
        self._num_cleared[place] = self.num_cleared(place) + 1
        self._failures.pop(place, None)
        self._kept.pop(place, []).clear()

    def num_cleared(self, place: torch.device) -> int:
        return self._num_cleared.get(place, 0)


_marks = _Marks()

of: Callable[[torch.device], Failure | None] = _marks.of
"""Returns the first failure of a place that is marked, or None."""

mark: Callable[[torch.device, Failure], None] = _marks.mark
"""Marks a place with a failure, unless it is marked already."""

clear: Callable[[torch.device], None] = _marks.clear
"""Takes the mark of a place back; its workers then make new lanes."""

keep = _marks.keep
num_cleared = _marks.num_cleared


def untrusted(device: Device) -> Failure | None:
    """Returns what all results of a device are, if its place is marked."""
    place = streams.place_of(device)
    return None if place is None else _untrusted(str(device), place)


def _untrusted(device: str, place: torch.device) -> Failure | None:
    first = of(place)
    return None if first is None else untrusted_failure(device, first)


def blame(failure: Failure, own: torch.device | None, others: Iterable[torch.device] = ()) -> None:
    """Marks the accelerator that an instruction has failed on, if that was its driver's error.

    After some errors a driver gives no other answer any more, whatever kind of exception they came
    as; others come as `torch.AcceleratorError`.

    Args:
        failure: The failure of the instruction.
        own: The place of the device that ran it; None for the host.
        others: The places of the parts that it took from peers.
    """
    asked = [place for place in dict.fromkeys((own, *others)) if place is not None]
    guilty = [place for place in asked if not streams.answers(place)]
    if not guilty and own is not None and is_of_driver(failure.cause):
        guilty = [own]
    for place in guilty:
        mark(place, failure)


_OUT_OF_MEMORY = 2  # of CUDA and HIP: there was no memory for a stream, or for pinned memory


def is_of_driver(error: BaseException) -> bool:
    """Returns whether an exception is an error of an accelerator's driver."""
    code = getattr(error, "error_code", None)
    return isinstance(error, torch.AcceleratorError) and code != _OUT_OF_MEMORY


# -- values and lanes ----------------------------------------------------------------------


class Event:
    """A point of a stream; an error of who asks for it marks the place, and is not raised.

    Attributes:
        place: Where the stream is.
        raw: The event of torch.
    """

    __slots__ = ("place", "raw")

    def __init__(self, place: torch.device, raw: Any) -> None:
        self.place = place
        self.raw = raw

    def is_over(self) -> bool:
        """Returns whether the point is reached, or never will be."""
        try:
            return self.raw.query()
        except RuntimeError as error:
            self.fail(error)
            return True

    def finish(self) -> None:
        """Waits until it is over."""
        try:
            self.raw.synchronize()
        except RuntimeError as error:
            self.fail(error)

    def fail(self, error: RuntimeError) -> None:
        """Marks the place."""
        mark(self.place, driver_failure(str(self.place), error))

    @property
    def lost(self) -> Failure | None:
        """What has become of values there: a failure if the place has failed before this point."""
        lost = _untrusted(str(self.place), self.place)
        if lost is None:
            return None
        try:
            return None if self.raw.query() else lost
        except RuntimeError:  # that of the mark, or one that follows from it
            return lost


class Launched:
    """A part whose computation a stream has been given, and the event that says it is done.

    Attributes:
        part: The local tensor, or `Borrowed` memory; None for a mark in the queue.
        event: What has to be waited for before the part is read; None where that has failed.
    """

    __slots__ = ("event", "part")

    def __init__(self, part: Any, event: Event | None) -> None:
        self.part = part
        self.event = event  # last: `mark` sees those of other threads


class GuardedLanes:
    """The lanes of a worker, made when they are first used, whose errors mark the place.

    Once it is marked, nothing is launched there any more. Where there is then no event, who would
    show a value sees the mark.
    """

    def __init__(self, device: Device, place: torch.device) -> None:
        self._device = device
        self._place = place
        self._lanes: Lanes | None = None
        self._number = -1  # of the marks that had been cleared when they were made

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """As in `Lanes`."""
        context = self._attempt(lambda lanes: lanes.on(lane))
        is_on = context and self._attempt(lambda _: (context.__enter__(),))
        try:
            yield
        finally:
            if context and is_on:
                self._attempt(lambda _: context.__exit__(None, None, None))

    def begin(self) -> None:
        """Does nothing: lanes begin when they are made."""

    def stream(self, lane: Lane) -> Any:
        """As in `Lanes`; None where the place is marked."""
        return self._attempt(lambda lanes: lanes.stream(lane))

    def push(self, name: str) -> None:
        """As in `Lanes`."""
        self._attempt(lambda lanes: lanes.push(name))

    def pop(self) -> None:
        """As in `Lanes`."""
        self._attempt(lambda lanes: lanes.pop())

    def record(self, lane: Lane) -> Event | None:
        """As in `Lanes`; None where the place is marked."""
        return self._attempt(lambda lanes: Event(self._place, lanes.record(lane)))

    def wait(self, lane: Lane, event: Event | None) -> None:
        """As in `Lanes`."""
        if event is not None:
            self._attempt(lambda lanes: lanes.wait(lane, event.raw), event.place)

    def keep(self, lane: Lane, tensors: Iterable[torch.Tensor]) -> None:
        """As in `Lanes`."""
        self._attempt(lambda lanes: lanes.keep(lane, tensors))

    def _attempt(self, do: Callable[[Lanes], _R], other: torch.device | None = None) -> _R | None:
        """Does something with the lanes; an error marks their place, or the other one."""
        if of(self._place) is not None:
            return None
        try:
            if self._lanes is None or self._number != num_cleared(self._place):
                self._number = num_cleared(self._place)
                self._lanes = streams.lanes_of(self._device)
                assert self._lanes is not None
                self._lanes.begin()
            return do(self._lanes)
        except RuntimeError as error:
            guilty = self._place if other is None or not streams.answers(self._place) else other
            mark(guilty, driver_failure(str(guilty), error))
            return None
