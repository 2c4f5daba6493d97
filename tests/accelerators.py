"""Accelerators that are not there: places of devices of the CPU, whose driver a test can break."""

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch.mesh import Device
from dtorch.runtime import EXECUTOR, NATIVE, faults, streams
from dtorch.runtime.streams import Lane

_ids = itertools.count(20_000, 100)


_places = itertools.count(1)  # a test leaves its own marked, so that their workers stay idle


class Accelerators:
    """Three accelerators, each with ten virtual devices; other devices are of the host.

    Attributes:
        places: Where they are.
        broken: The places whose driver gives errors: at most one on the native executor.
        held: The places where nothing that is launched is done yet, on the portable executor.
    """

    def __init__(self) -> None:
        self._first = next(_ids)
        self.places = [torch.device("cpu", next(_places)) for _ in range(3)]
        self.broken: set[torch.device] = set()
        self.have_arrived = threading.Event()
        self.have_arrived.set()
        self.held: set[torch.device] = set()

    def devices(self, number: int, count: int = 2) -> list[int]:
        """The ids of some devices of an accelerator."""
        return [self._first + 10 * number + i for i in range(count)]

    def mesh(self, *numbers: int) -> dtorch.DeviceMesh:
        """A mesh of two devices of each of some accelerators."""
        return dtorch.DeviceMesh("cpu", [i for n in numbers for i in self.devices(n)])

    def place_of(self, device: Device) -> torch.device | None:
        number = (device.id - self._first) // 10
        return self.places[number] if 0 <= number < len(self.places) else None

    def break_driver(self, number: int) -> None:
        self.broken.add(self.places[number])
        if EXECUTOR == "native":
            NATIVE.break_lanes(self.places[number].index)

    def mend_drivers(self) -> None:
        self.broken.clear()
        if EXECUTOR == "native":
            NATIVE.break_lanes(-1)

    def hold_arrivals(self) -> None:
        """From now on, what the accelerators copy to the host is not there yet."""
        self.have_arrived.clear()
        if EXECUTOR == "native":
            NATIVE.hold_arrivals(True)

    def arrive(self) -> None:
        """What they have copied is there."""
        self.have_arrived.set()
        if EXECUTOR == "native":
            NATIVE.hold_arrivals(False)

    def check(self, place: torch.device) -> None:
        if place in self.broken:
            raise torch.AcceleratorError("a lane that is broken")


class _Lanes:
    def __init__(self, owner: Accelerators, place: torch.device) -> None:
        self._owner, self._place = owner, place

    def begin(self) -> None:
        """These devices are none of torch's."""

    def stream(self, lane: Lane) -> Any:
        raise AssertionError("these devices have no communicators")

    def push(self, name: str) -> None:
        """Nobody watches."""

    def pop(self) -> None:
        """Nobody watches."""

    def on(self, lane: Lane) -> contextlib.AbstractContextManager[Any]:
        self._owner.check(self._place)
        return contextlib.nullcontext()

    def record(self, lane: Lane) -> Any:
        self._owner.check(self._place)
        return _Event(self._owner, self._place)

    def wait(self, lane: Lane, event: Any) -> None:
        self._owner.check(self._place)

    def keep(self, lane: Lane, tensors: Iterable[torch.Tensor]) -> None:
        self._owner.check(self._place)


class _Event:
    def __init__(self, owner: Accelerators, place: torch.device) -> None:
        self._owner, self._place = owner, place

    def query(self) -> bool:
        self._owner.check(self._place)
        return self._place not in self._owner.held

    def synchronize(self) -> None:
        self._owner.check(self._place)


class _Arrival(_Event):
    def query(self) -> bool:
        return super().query() and self._owner.have_arrived.is_set()

    def synchronize(self) -> None:
        self._owner.check(self._place)
        self._owner.have_arrived.wait()


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerators]:
    """A context in which they are there."""
    made = Accelerators()
    monkeypatch.setattr(streams, "place_of", made.place_of)
    monkeypatch.setattr(streams, "lanes_of", lambda d: _Lanes(made, made.place_of(d)))  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(streams, "joined", lambda places: _Arrival(made, places[0]))
    monkeypatch.setattr(streams, "answers", lambda place: place not in made.broken)
    if EXECUTOR == "native":
        NATIVE.trace_lanes(True)
    try:
        yield made
        dtorch.synchronize()
    finally:
        made.mend_drivers()
        made.arrive()
        for place in made.places:
            ended = RuntimeError("the test has ended")
            faults.mark(place, faults.driver_failure(str(place), ended))
        if EXECUTOR == "native":
            NATIVE.trace_lanes(False)
            NATIVE.take_lane_trace()
