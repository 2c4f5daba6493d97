"""Waiting for devices, and asking how they are, by marks in their queues."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ..mesh import Device, DeviceMesh
from .backend import mark


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


def health(
    devices: DeviceMesh | Iterable[Device] | None = None, *, timeout: float = 5.0
) -> dict[Device, str]:
    """Asks devices whether they get through their queues.

    Args:
        devices: A mesh, or devices; None for all that have been used.
        timeout: How many seconds a device has to answer.

    Returns:
        For each device ``"ok"``; ``"busy"`` if what was submitted before takes longer, or hangs;
        or ``"failed: ..."`` with what the device's driver says, whose work is then lost.

    Blocking: until all have answered, at most the timeout.

    Example:
        >>> health(DeviceMesh("cpu", [0, 1]))
        {Device(type='cpu', id=0): 'ok', Device(type='cpu', id=1): 'ok'}
    """
    end = time.monotonic() + timeout
    chosen, marks = mark(devices.devices if isinstance(devices, DeviceMesh) else devices)
    marks.wait(range(len(chosen)), timeout)

    def state(index: int) -> str:
        if not marks.is_ready((index,)):
            return "busy"
        try:
            while not marks.is_done((index,)):
                if time.monotonic() > end:
                    return "busy"
                time.sleep(_PAUSE)
        except RuntimeError as error:
            return f"failed: {error}"
        return "ok"

    return dict(sorted((device, state(index)) for index, device in enumerate(chosen)))


_PAUSE = 1e-3
