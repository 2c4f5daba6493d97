"""The Python side of the native executor, which runs programs without the interpreter lock.

Gives what the portable one gives: `Shards`, `Executable`, `submit`, `synchronize`, `stop` and
`check_not_on_worker`. This module hands the plain data of a local program to the C++ module.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch

from ...errors import ShutdownError
from ...lowering import LocalCall, LocalProgram, LocalShow, LocalStep, PerDevice, slots_read
from ...mesh import Device, DeviceMesh
from ...program import Ref, ScalarRef, SourceLine
from ...redistribution import Collective
from ...source import is_library
from .. import collectives, communicators, faults, lent, local_calls, peers, streams, timeline
from ..failures import (
    Failure,
    driver_failure,
    failure_of,
    stopped_failure,
    untrusted_failure,
)
from ..shards import Borrowed, written_to
from ..timeline import Phase, Recorder, Span
from ..worker import start_client_team, thread_setters, would_wait_for_itself
from .build import load

NATIVE: Any = load()
Shards: Any = NATIVE.Shards


class Executable:
    """A local program, handed over to C++."""

    __slots__ = ("native", "program")

    def __init__(self, program: LocalProgram) -> None:
        peers.check(map(streams.place_of, program.devices))
        communicators.check(collectives.launched_together(program))
        self.program = program
        self.native = _handed_over(program)


def _handed_over(program: LocalProgram) -> Any:
    places: dict[DeviceMesh, list[int]] = {}

    def places_of(mesh: DeviceMesh) -> list[int]:
        """For each device of the program, its index in a mesh, or -1."""
        if mesh not in places:
            index = {device: i for i, device in enumerate(mesh.devices)}
            places[mesh] = [index.get(device, -1) for device in program.devices]
        return places[mesh]

    def ports(values: Iterable[tuple[int, DeviceMesh]]) -> list[Any]:
        return [(slot, len(mesh.devices), places_of(mesh)) for slot, mesh in values]

    made = NATIVE.Program(
        program,
        [str(device) for device in program.devices],
        program.num_slots,
        ports(program.inputs),
        ports(program.outputs),
    )
    exchanges = _Exchanges()
    for instruction in program.instructions:
        if isinstance(instruction, LocalCall):
            _add_operation(made, instruction, places_of(instruction.mesh))
        else:
            _add_step(made, instruction, program.devices, exchanges)
    for position, device in enumerate(program.devices):
        place = streams.place_of(device)
        if place is not None:
            launches = [launch and _flat(launch) for launch in streams.plan(program, device)]
            made.add_launches(position, place, launches)
    if any(map(streams.place_of, program.devices)):
        made.add_names(list(map(timeline.span_names, program.instructions)))
    return made


def _flat(launch: streams.Launch) -> tuple[int, Any, Any, Any]:
    return int(launch.lane), launch.waits, launch.keeps, launch.marks


def _add_operation(made: Any, call: LocalCall, places: list[int]) -> None:
    schema = call.op._schema
    into = _into(call.op)
    made.add_operation(
        schema.name,
        schema.overload_name,
        call.args,
        dict(call.kwargs),
        places,
        slots_read(call),
        [-1 if slot is None else slot for slot in call.outputs],
        call.frees,
        call.draws or (-1, -1),
        call.origin,
        into,
        [slot for slot in slots_read(call) if slot in call.frees] if into else [],
    )


aten = torch.ops.aten
_OVERWRITING = {
    aten.abs, aten.add, aten.cos, aten.div, aten.elu, aten.erf, aten.exp, aten.gelu,
    aten.gelu_backward, aten.hardswish, aten.leaky_relu, aten.log, aten.maximum, aten.minimum,
    aten.mul, aten.neg, aten.pow, aten.reciprocal, aten.rsqrt, aten.sigmoid,
    aten.sigmoid_backward, aten.silu, aten.silu_backward, aten.sin, aten.softplus, aten.sqrt,
    aten.sub, aten.tanh, aten.tanh_backward, aten.threshold_backward,
}  # fmt: skip
"""Elementwise operations whose result may take the memory of an operand that nobody else has: of
floating operands of one dtype it has that dtype."""


@functools.cache
def _into(op: torch._ops.OpOverload) -> str:
    """Returns the overload of an operation that writes its result to a given tensor, or ""."""
    if op.overloadpacket not in _OVERWRITING:
        return ""
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        found = getattr(op.overloadpacket, name)
        *others, last = found._schema.arguments
        if last.is_out and [(a.name, str(a.type)) for a in others] == wanted:
            # Others compute a result first, and copy it.
            has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(found.name(), "CPU")
            return name if has_kernel else ""
    return ""


class _Exchanges:
    """Numbers for the rounds in which groups of devices meet."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, Device], int] = {}
        self._count = 0

    def first(self, number: int, group: tuple[Device, ...], num_rounds: int) -> int:
        """Returns the number of the first round of a group's step."""
        key = (number, group[0])
        if key not in self._first:
            self._first[key] = self._count
            self._count += num_rounds
        return self._first[key]


def _add_step(
    made: Any,
    instruction: LocalStep | LocalShow,
    devices: tuple[Device, ...],
    exchanges: _Exchanges,
) -> None:
    meetings = [collectives.meeting(instruction.step, device) for device in devices]
    num_rounds = max((len(m.rounds) for m in meetings if m is not None), default=0)
    number = instruction.number
    made.add_step(
        isinstance(instruction, LocalShow),
        instruction.input,
        instruction.output if isinstance(instruction, LocalStep) else -1,
        instruction.frees,
        [m and (exchanges.first(number, m.group, num_rounds), m) for m in meetings],
        instruction.origin,
    )


# -- submission ----------------------------------------------------------------------------


def check_not_on_worker(what: str) -> None:
    """Raises if the calling thread is a worker, which must never wait for itself."""
    if NATIVE.on_worker():
        raise would_wait_for_itself(what)


def submit(executable: Executable, inputs: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
    """Queues a program on every device that takes part. Does not wait.

    Args:
        executable: What runs.
        inputs: The shards of each input.
        scalars: The run-time scalars.

    Returns:
        The shards of each output, which are pending.
    """
    check_not_on_worker("submitting work")
    _start()
    return NATIVE.submit(executable.native, inputs, scalars)


def mark(devices: Iterable[Device] | None = None) -> tuple[list[Device], Any]:
    """Queues a mark on some devices, or on all that have workers.

    Returns:
        The devices, and shards with a part for each, set when its worker gets there.
    """
    check_not_on_worker("synchronizing")
    _start()
    chosen = list(used_devices() if devices is None else devices)
    return chosen, NATIVE.mark(list(map(str, chosen))) if chosen else Shards.pending(0)


def used_devices() -> list[Device]:
    """Returns the devices that have workers."""
    names = (name.rsplit(":", 1) for name in NATIVE.devices())
    return [Device(kind, int(number)) for kind, number in names]


def begin_recording() -> None:
    """Begins to record a timeline; see `timeline.begin`."""
    timeline.begin()
    NATIVE.take_spans()  # what workers began in an earlier recording and ended after it
    NATIVE.set_recording(True)


def end_recording() -> Recorder:
    """Ends the recording and returns it."""
    NATIVE.set_recording(False)
    recorder = timeline.end()
    for device, program, call, site, instruction, phase, start, end in NATIVE.take_spans():
        span = Span(device, program, call, site, instruction, Phase(phase), start, end)
        recorder.spans.append(span)
    return recorder


@contextlib.contextmanager
def host_cache() -> Iterator[None]:
    """Lets large tensors that this thread makes reuse the memory of others, and serve for more."""
    before = NATIVE.use_host_cache(True)
    try:
        yield
    finally:
        NATIVE.use_host_cache(before)


def empty_host_cache() -> None:
    """Gives back the host memory that the workers keep for their next results."""
    NATIVE.empty_host_cache()


def _wake_loop() -> None:
    """Calls what `when_ready` was given, for the workers, which go on without the interpreter."""
    while (wake := NATIVE.next_completion()) is not None:
        wake()


class _Once:
    """What is done before the first use, and again in a forked child."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.done = False
        self.forked = False
        self.waker: threading.Thread | None = None


_once = _Once()


def _start() -> None:
    if _once.done:
        return
    with _once.lock:
        if not _once.done:
            if not _once.forked:
                start_client_team()
            _once.done = True


def stop() -> None:
    """Ends the workers; what was still queued becomes a `ShutdownError` for whoever waits."""
    local_calls.stopping.set()
    NATIVE.stop(stopped_failure())
    waker = _once.waker
    if waker is not None and waker is not threading.current_thread():
        NATIVE.complete(None)
        waker.join()  # it must not be in C++ code when the interpreter ends
        _once.waker = None


def _describe(
    program: LocalProgram,
    origin: int,
    device: str,
    site: tuple[CodeType, int] | None,
    error: BaseException,
) -> Failure:
    line = None
    if site is not None:
        code, number = site
        line = SourceLine(code.co_filename, number, code.co_name)
    return failure_of(program, origin, device, line, error)


def _launch(
    kind: str,
    op: str,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    lanes: list[torch.Stream | None],
) -> None:
    """Launches a collective for all workers of a group, on the thread of one of them."""
    communicators.launch(Collective(kind), op, inputs, outputs, lanes)


def _after_fork_in_child() -> None:
    """As for the portable executor: no workers, no threads of OpenMP, nobody to wake."""
    message = (
        "this value was still being computed when the process was forked; the workers that "
        "compute it belong to the parent.\n  Fix: fetch it, or call dtorch.synchronize(), "
        "before the fork."
    )
    global _once
    used = NATIVE.after_fork_in_child(Failure(message, ShutdownError(message)))
    _once = _Once()
    if used:
        _once.forked = True
        torch.set_num_threads(1)


def _start_waker() -> None:
    with _once.lock:
        if _once.waker is None:
            _once.waker = threading.Thread(target=_wake_loop, name="dtorch-waker", daemon=True)
            _once.waker.start()


timeline.now = NATIVE.now
lent.lend, lent.withdraw, lent.take_users = NATIVE.lend, NATIVE.withdraw, NATIVE.take_users
lent.is_shared = NATIVE.is_shared
faults.of, faults.mark, faults.clear = NATIVE.fault_of, NATIVE.mark_fault, NATIVE.clear_fault
NATIVE.give(
    {
        "Ref": Ref,
        "ScalarRef": ScalarRef,
        "PerDevice": PerDevice,
        "Failure": Failure,
        "Borrowed": Borrowed,
        "describe": _describe,
        "driver_failure": driver_failure,
        "untrusted_failure": untrusted_failure,
        "is_of_driver": faults.is_of_driver,
        "is_library": is_library,
        "written_to": written_to,
        "start_waker": _start_waker,
        "dispatched": timeline.dispatched,
        "launch": _launch,
    }
)
NATIVE.set_thread_setters(
    [ctypes.cast(setter, ctypes.c_void_p).value for setter in thread_setters()]
)
NATIVE.install_host_cache(int(os.environ.get("DTORCH_HOST_CACHE_MB", "1024")) << 20)
atexit.register(stop)
os.register_at_fork(after_in_child=_after_fork_in_child)
