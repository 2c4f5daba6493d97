"""Functions of the user's on worker threads, and how devices that run one meet in it.

Takes a `LocalFunction` and what one device holds; gives that device's results. Here are the kernels
of `local_ops`, for both executors, and the `Place` in which a function runs: which device it is on,
and with whom it exchanges tensors.

The devices of one run share a `Run`, which they find by the number that `local_ready` has given
them all. It counts what each device has shown; the n-th exchange of a device is with the n-th of
its peers, and is an error for all of them where it is not the same. A device that has ended says
so: nobody waits for what cannot come. What is shown is a copy that nobody writes to, and is dropped
once the group has taken it. Waiting releases the interpreter lock, and ends with the workers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CollectiveError, DTorchError, MeshError, MutationError, ShutdownError
from ..local_ops import LocalFunction, function_of
from ..mesh import DeviceMesh
from ..spec import dtype_name
from . import streams
from .shards import Launched, handed_over, order_caller

stopping = threading.Event()
"""Set when the workers are stopped; ends every wait."""


class Exchange(NamedTuple):
    """One collective as a device calls it: its text, alike on all devices, and the group."""

    text: str
    axes: tuple[int, ...]
    group: tuple[int, ...]


class Run:
    """One run of a function on the devices of a mesh, shared by their workers."""

    def __init__(self, name: str, mesh: DeviceMesh) -> None:
        self._name = name
        self._mesh = mesh
        self._changed = threading.Condition()
        self._called: list[list[str]] = [[] for _ in mesh.devices]
        self._shown: dict[tuple[int, int], Any] = {}  # by number and device
        self._taken: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._ended: dict[int, BaseException | None] = {}

    def exchange(self, position: int, called: Exchange, part: Tensor) -> list[Tensor]:
        """Shows a part, which is never written to again, and returns those of the group.

        Blocking: until the group has called the same, or one of them has called something else.

        Raises:
            CollectiveError: A peer takes part in another collective, or has ended.
            ShutdownError: The workers are stopped.
        """
        with self._changed:
            number = len(self._called[position])
            self._called[position].append(called.text)
            self._shown[number, position] = handed_over(part)
            self._changed.notify_all()
            while not all(len(self._called[p]) > number or p in self._ended for p in called.group):
                self._changed.wait(0.2)
                if stopping.is_set():
                    raise ShutdownError(
                        f"the dtorch workers were stopped while {self._name} waited in "
                        f"{called.text}."
                    )
            self._check(number, called.group)
            parts = [self._shown[number, p] for p in called.group]
            self._taken[number, called.group] += 1
            if self._taken[number, called.group] == len(called.group):
                for p in called.group:
                    del self._shown[number, p]
        return [_received(shown, part.device) for shown in parts]

    def _check(self, number: int, group: Sequence[int]) -> None:
        texts = {
            p: self._called[p][number] if len(self._called[p]) > number else self._end(p)
            for p in group
        }
        if len(set(texts.values())) > 1:
            errors = (self._ended.get(p) for p in group if len(self._called[p]) <= number)
            cause = next((e for e in errors if e is not None), None)
            if isinstance(cause, CollectiveError):  # of another group: that is where it began
                raise CollectiveError(str(cause)) from cause
            raise differing(self._name, self._mesh, number, texts) from cause

    def _end(self, position: int) -> str:
        error, count = self._ended[position], len(self._called[position])
        after = f"after {count} collective{'s' * (count != 1)}"
        return f"ended {after}" if error is None else f"raised {type(error).__name__}: {error}"

    def end(self, position: int, error: BaseException | None) -> bool:
        """Says that a device has ended, perhaps with an error; returns whether all have."""
        with self._changed:
            self._ended[position] = error
            self._changed.notify_all()
            return len(self._ended) == len(self._called)


def differing(
    name: str, mesh: DeviceMesh, number: int, texts: Mapping[int, str]
) -> CollectiveError:
    """Returns the error of devices that do not call the same collective.

    Args:
        name: The function.
        mesh: Its devices.
        number: How many collectives each has called before.
        texts: What each device of the group has called, or how it has ended.
    """
    lines = [f"  {mesh.devices[p]}  {text}" for p, text in sorted(texts.items())]
    return CollectiveError(
        "\n".join(
            [
                f"the devices that run {name} differ in their collective number {number + 1}:",
                *lines,
                "  Fix: call the same collectives, on tensors of the same shape and dtype, in the "
                "same order on every device; let only values depend on axis_index.",
            ]
        )
    )


def _received(shown: Any, device: torch.device) -> Tensor:
    """What a peer has shown, on a device, for what this thread launches next there."""
    if type(shown) is not Launched:
        return shown.to(device)
    part = shown.part
    assert shown.event is not None  # it is of a tensor that was handed over
    if part.device != device:
        streams.visit(part.device)
    order_caller(part, shown.event)
    return part.to(device)


_runs: dict[int, Run] = {}
_run_numbers = itertools.count(1)
os.register_at_fork(after_in_child=_runs.clear)


# -- where a function runs -----------------------------------------------------------------


class Place:
    """Where a function runs: a device of a mesh, and how it exchanges tensors with others.

    Args:
        function: The function's name.
        mesh: Its mesh.
        position: The device, by its place in the mesh.
        run: What the devices share in a run in which they exchange tensors; None in another.
        is_trial: Whether it only learns what the function gives: then every peer shows the same.

    Attributes:
        called: The collectives that it has called in a trial.
    """

    def __init__(
        self,
        function: str,
        mesh: DeviceMesh,
        position: int,
        run: Run | None = None,
        is_trial: bool = False,
    ) -> None:
        self.function = function
        self.called: list[Exchange] = []
        self._mesh = mesh
        self._position = position
        self._coordinate = mesh.coordinates()[position]
        self._run = run
        self._is_trial = is_trial

    def axes(self, names: str | Sequence[str]) -> tuple[int, ...]:
        """Returns the mesh axes of a name or of several.

        Raises:
            MeshError: The mesh lacks one.
            ValueError: An axis is named twice.
        """
        given = (names,) if isinstance(names, str) or not isinstance(names, Sequence) else names
        known = self._mesh.mesh_dim_names or ()
        for name in given:
            if name not in known:
                raise MeshError(
                    f"axis_name={name!r} in {self.function}: {self._mesh!r} has no such axis.\n"
                    f"  Fix: name one of {known}."
                )
        if len(set(given)) < len(given):
            raise ValueError(
                f"axis_name={names!r} in {self.function} names an axis twice.\n"
                "  Fix: name each axis once."
            )
        return tuple(known.index(name) for name in given)

    def names(self, axes: Sequence[int]) -> str:
        """Returns how messages call axes."""
        return ", ".join(map(self._mesh.axis_name, axes))

    def size(self, axes: Sequence[int]) -> int:
        """Returns how many devices there are along axes."""
        return math.prod(self._mesh.shape[a] for a in axes)

    def index(self, axes: Sequence[int]) -> int:
        """Returns the device's index along axes, the first of which is major."""
        index = 0
        for axis in axes:
            index = index * self._mesh.shape[axis] + self._coordinate[axis]
        return index

    def exchange(self, axes: tuple[int, ...], text: str, part: Tensor) -> list[Tensor]:
        """Returns what the devices along axes show, in the order of their index.

        Args:
            axes: The axes.
            text: What the device calls, in words that are the same on every device.
            part: What it shows; it is copied.

        Raises:
            CollectiveError: Not all of them call the same.
        """
        called = Exchange(text, axes, group_along(self._mesh, self._position, axes))
        part = part.detach().clone()
        if self._is_trial:
            self.called.append(called)
        if self._is_trial or len(called.group) == 1:
            return [part] * len(called.group)
        if self._run is None:
            raise CollectiveError(
                f"{self.function} calls {text} on {self._mesh.devices[self._position]}, but called "
                "no collective when it was run on meta tensors.\n"
                "  Fix: call the same collectives whatever the values are, or pass out_shapes."
            )
        return self._run.exchange(self._position, called, part)


@functools.lru_cache(maxsize=4096)
def group_along(mesh: DeviceMesh, position: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the devices that differ from one along axes alone, in the order of their index."""
    coordinates = mesh.coordinates()
    own = coordinates[position]
    others = [a for a in range(mesh.ndim) if a not in axes]
    group = [p for p, c in enumerate(coordinates) if all(c[a] == own[a] for a in others)]
    return tuple(sorted(group, key=lambda p: [coordinates[p][a] for a in axes]))


class _Here(threading.local):
    place: Place | None = None


_here = _Here()


def here() -> Place | None:
    """Returns where the function runs that this thread is in, or None outside of one."""
    return _here.place


@contextlib.contextmanager
def _at(place: Place) -> Iterator[None]:
    outer, _here.place = _here.place, place
    try:
        yield
    finally:
        _here.place = outer


def run(
    function: LocalFunction, operands: Sequence[Tensor], scalars: Sequence[float], place: Place
) -> list[Tensor]:
    """Runs a function on this thread and returns its results.

    Autograd is at hand but does not record; a backward runs on this thread, where the collectives
    in it know their place.

    Raises:
        MutationError: It has written to one of its arguments, which others may read.
    """
    given = list(operands)
    before = [t._version for t in given]
    with _at(place), torch.no_grad(), torch.autograd.set_multithreading_enabled(False):
        results = function.function(given, list(scalars))
    for number, (tensor, version) in enumerate(zip(operands, before, strict=True)):
        if tensor._version != version:
            raise MutationError(
                f"{function.name} writes to its argument of number {number}, "
                f"{_shown(tensor)}, in place; others read the same memory.\n"
                "  Fix: write to a clone() of it, and return that."
            )
    return results


# -- kernels -------------------------------------------------------------------------------


def _ready(operands: Sequence[Tensor], function: int, position: int) -> Tensor:
    number = next(_run_numbers) if position == 0 else 0
    return torch.tensor(number, dtype=torch.int64)  # read on the host, so it stays there


def _call(
    operands: Sequence[Tensor], function: int, scalars: Sequence[float] | None, position: int
) -> list[Tensor]:
    called = function_of(function)
    if not called.communicates:
        return _checked(called, operands, scalars or (), position, None)
    *operands, ready = operands
    number = int(ready.item())
    run = _runs.setdefault(number, Run(called.name, called.mesh))
    error = None
    try:
        return _checked(called, operands, scalars or (), position, run)
    except BaseException as raised:
        error = raised
        raise
    finally:
        if run.end(position, error):
            del _runs[number]


def _checked(
    function: LocalFunction,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    position: int,
    shared: Run | None,
) -> list[Tensor]:
    """The results of a function, if they are what its layouts say."""
    mesh = function.mesh
    place = Place(function.name, mesh, position, shared)
    device = mesh.torch_device(position)
    with torch.inference_mode(False), _current_device(device):
        results = run(function, [_plain(t) for t in operands], scalars, place)
        results = [r.detach().resolve_conj().resolve_neg() for r in results]
    for number, (result, spec) in enumerate(zip(results, function.outputs, strict=True)):
        wanted = f"{dtype_name(spec.dtype)}{list(spec.local_shapes[position])}"
        if _shown(result) != wanted or result.device != device:
            where = "" if result.device == device else f" on {result.device}"
            raise DTorchError(
                f"{function.name} gave {_shown(result)}{where} as result {number} on "
                f"{mesh.devices[position]}, where its run on meta tensors, or out_shapes, said "
                f"{wanted}.\n"
                "  Fix: return results of the same shape, dtype and device whatever the values "
                "are, or correct out_shapes."
            )
    return results


def _shown(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def _plain(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that autograd may save, whose writes are counted alone."""
    tensor = tensor.resolve_conj().resolve_neg()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return made.set_(tensor.untyped_storage(), *place)


def _current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(device).device(device)


_library = torch.library.Library("dtorch", "FRAGMENT")
_library.impl("local_ready", _ready, "CompositeExplicitAutograd")
_library.impl("local_call", _call, "CompositeExplicitAutograd")
