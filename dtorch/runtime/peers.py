"""A check that copies between accelerators arrive: on some machines they silently do not."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from ..errors import MeshError
from . import faults

_NUM_ELEMENTS = 1 << 16

_lock = threading.Lock()
_checked: set[tuple[torch.device, torch.device]] = set()


def check(places: Iterable[torch.device | None]) -> None:
    """Copies known values between each two accelerators, once for a pair in a process.

    Args:
        places: Where the devices of a program are, None for the host. Those that have failed are
            left out: nothing will be launched there.

    Blocking: the first time, until the copies have been compared.

    Raises:
        MeshError: A copy holds other values than were sent.
    """
    used = {place for place in places if place is not None}
    distinct = sorted((place for place in used if faults.of(place) is None), key=str)
    pairs = [pair for pair in itertools.permutations(distinct, 2) if pair not in _checked]
    if not pairs:
        return
    # A thread of its own is in no mode of the caller's, such as a trace.
    with _lock, ThreadPoolExecutor(1) as thread:
        for source, target in pairs:
            wrong = thread.submit(_num_changed, source, target).result()
            if wrong:
                raise MeshError(
                    f"a copy from {source} to {target} arrived with {wrong} of {_NUM_ELEMENTS} "
                    "values changed: peer access between them does not work on this machine.\n"
                    "  Fix: a mesh of one of them; or turn off IOMMU and PCI access control "
                    "(ACS), the usual cause. nvidia-smi topo -m shows how they are connected."
                )
            _checked.add((source, target))


def _num_changed(source: torch.device, target: torch.device) -> int:
    sent = torch.arange(_NUM_ELEMENTS, dtype=torch.int32) * 40503
    return int((_copied(sent, source, target) != sent).sum())


def _copied(sent: torch.Tensor, source: torch.device, target: torch.device) -> torch.Tensor:
    """What comes back to the host of values sent to one device, and from there to the other."""
    return sent.to(source).to(target).cpu()
