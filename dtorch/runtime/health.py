"""Waiting for devices, asking how they are, and making those anew whose driver has failed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import DTorchError
from ..mesh import Device, DeviceMesh
from . import faults, streams
from .backend import mark, used_devices


def synchronize(devices: Iterable[Device] | None = None) -> None:
    """Waits until everything submitted so far has run, on some devices or on all.

    Failures are not raised here, but where a value that depends on them is fetched.

    Args:
        devices: The devices to wait for, such as ``mesh.devices``; None for all.

    Blocking: until the queues that existed at the call are empty, and their streams done.
    """
    chosen, marks = mark(devices)
    marks.wait(range(len(chosen)))
    marks.finish(range(len(chosen)))


Devices = Device | DeviceMesh | str | torch.device | Iterable[Device]
"""Some devices; a name such as ``"cuda:0"`` is that of one."""


def health(devices: Devices | None = None, *, timeout: float = 5.0) -> dict[Device, str]:
    """Asks devices whether they get through their queues.

    Args:
        devices: A device or its name, a mesh, or devices; None for all that have been used.
        timeout: How many seconds a device has to answer.

    Returns:
        For each device ``"ok"``; ``"busy"`` if what was submitted before takes longer, or hangs;
        or ``"failed: ..."`` with the first error of its driver, after which it computes nothing
        before `restart`. All virtual devices of an accelerator fail together.

    Blocking: until all have answered, at most the timeout.

    Example:
        >>> health(DeviceMesh("cpu", [0, 1]))
        {Device(type='cpu', id=0): 'ok', Device(type='cpu', id=1): 'ok'}
    """
    chosen, marks = mark(None if devices is None else _listed(devices))
    answered = _answered(marks, len(chosen), timeout)
    return dict(sorted((d, _state(d, ok)) for d, ok in zip(chosen, answered, strict=True)))


def _listed(devices: Devices) -> list[Device]:
    if isinstance(devices, Device):
        return [devices]
    if isinstance(devices, (str, torch.device)):
        kind, _, number = str(devices).partition(":")
        return [Device(kind, int(number or 0))]
    return list(devices.devices if isinstance(devices, DeviceMesh) else devices)


def _answered(marks: Any, count: int, timeout: float) -> list[bool]:
    """Whether the queue has reached each of some marks, and the streams are done, in time."""
    end = time.monotonic() + timeout
    marks.wait(range(count), timeout)

    def is_done(index: int) -> bool:
        if not marks.is_ready((index,)):
            return False
        while not marks.is_done((index,)):
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE)
        return True

    return list(map(is_done, range(count)))


_PAUSE = 1e-3


def _state(device: Device, has_answered: bool) -> str:
    place = streams.place_of(device)
    first = None if place is None else faults.of(place)
    if first is not None:
        return f"failed: {first.message}"
    return "ok" if has_answered else "busy"


def restart(devices: Devices, *, timeout: float = 30.0) -> None:
    """Makes devices ready again after an error of their driver.

    It waits for the queues of all devices of the same accelerators, computes something there and
    compares it on the host, empties torch's cache of their memory, gives workers new streams, and
    takes the mark back that `health` shows. Values that were lost stay lost. On the host there is
    nothing to make anew, and it only waits.

    Args:
        devices: A device or its name, a mesh, or devices; healthy ones too.
        timeout: How many seconds their queues have to empty.

    Blocking: until the queues are empty, at most the timeout, and the computation is done.

    Raises:
        DTorchError: A queue does not empty: a thread that hangs cannot be ended. Or an accelerator
            gives an error or wrong values, as after every error that CUDA keeps until the process
            ends; other accelerators go on.

    Example:
        >>> restart(DeviceMesh("cpu", [0, 1]))
    """
    chosen = _listed(devices)
    places = dict.fromkeys(place for d in chosen if (place := streams.place_of(d)) is not None)
    sharing = [d for d in used_devices() if streams.place_of(d) in places]
    waited, marks = mark(dict.fromkeys([*chosen, *sharing]))
    answered = _answered(marks, len(waited), timeout)
    late = [str(d) for d, ok in zip(waited, answered, strict=True) if not ok]
    if late:
        raise DTorchError(
            f"restart: {', '.join(late)} did not get through what was submitted within "
            f"{timeout:g} s, and a kernel or a thread that hangs cannot be ended.\n"
            "  Fix: give it a longer timeout=, or end the process and start it again."
        )
    for place in places:
        _make_anew(place)


def _make_anew(place: torch.device) -> None:
    first = faults.of(place)
    try:
        is_right = streams.computes(place)
    except RuntimeError as error:
        raise _cannot_be_used(place, f"gives an error: {error}", first) from error
    if not is_right:
        raise _cannot_be_used(place, "computes wrong values", first)
    faults.clear(place)
    used = {streams.place_of(device) for device in used_devices()}
    if all(p is None or faults.of(p) is None for p in used):  # torch would ask the others too
        streams.empty_caches([place.type])


def _cannot_be_used(place: torch.device, what: str, first: faults.Failure | None) -> DTorchError:
    lines = [f"restart: {place} cannot be used again in this process: it {what}"]
    if first is not None:
        lines += ["  the first error there:", *(f"    {x}" for x in first.message.splitlines())]
    lines.append(
        "  Fix: save what other devices hold, which go on, and start the process again; if it "
        "fails there too, look at the machine (nvidia-smi -q, dmesg)."
    )
    return DTorchError("\n".join(lines))
