"""Peak memory: the bytes of live CPU tensors, and beside them the resident set of the process.

Each subject runs in a process of its own, `benchmarks.peak`. The parameters count, what loading
them took does not. A result counts once, on its device, and once more where it is fetched.
"""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .harness import Case, Options
from .peak import ACTIVATIONS, MARK
from .timing import Measure

TARGETS = {
    "chain, jit": 0.75,
    "chain, eager": None,
    "llama": 1.0,
    "llama, fetched": 1.0,
    "sd3, small": 0.95,
    "sd3, realistic": 0.95,
}
RIVAL = "PyTorch"
GATHERED = "keys gathered"
ONE_DEVICE = "one device"


def cases(options: Options) -> Iterator[Case]:
    for subject, target in TARGETS.items():
        if options.quick and not subject.startswith("chain"):
            continue
        ours, theirs = (Peaks(subject, library, options) for library in ("dtorch", "torch"))
        targets = {} if target is None else {RIVAL: target}
        for title, kind, bound in (("live tensors", "live", targets), ("resident", "resident", {})):
            measure, rivals = ours.measure(kind), {RIVAL: theirs.measure(kind)}
            yield Case(f"{title}, {subject}", measure, rivals, bound, unit="B", warm_ups=0)
    if not options.quick:
        yield ring(options)
        yield split(options, "small", {ONE_DEVICE: 0.35})
        yield split(options, "realistic", {})


def ring(options: Options) -> Case:
    """Attention over 16,384 tokens on 8 devices, beside the same with all keys on each."""
    ours, gathered = (Peaks(s, "dtorch", options) for s in ("ring", "ring, gathered"))
    rivals = {GATHERED: gathered.measure("live")}
    title = "live tensors, ring of 8 devices"
    return Case(title, ours.measure("live"), rivals, {GATHERED: 0.5}, unit="B", warm_ups=0)


def split(options: Options, size: str, targets: dict[str, float]) -> Case:
    """The activations of SD3's transformer on 4 devices, a device, beside those on one."""
    one, four = (Peaks(f"{size}, {n} devices{ACTIVATIONS}", "dtorch", options) for n in (1, 4))
    together = four.measure("live")
    title = f"activations, sd3, {size}, ulysses_cp=4, a device"
    rivals = {ONE_DEVICE: one.measure("live")}
    return Case(title, lambda: together() / 4, rivals, targets, unit="B", warm_ups=0)


class Peaks:
    """The peaks of one subject, a pair for each repetition; all come from one process."""

    def __init__(self, subject: str, library: str, options: Options) -> None:
        rounds = str(options.repetitions)
        self._command = [sys.executable, "-m", f"{__package__}.peak", subject, library, rounds]

    def measure(self, kind: str) -> Measure:
        """Returns a measure of one kind of peak."""
        peaks = self._peaks(kind)
        return lambda: next(peaks)

    def _peaks(self, kind: str) -> Iterator[float]:
        yield from self._found[kind]

    @functools.cached_property
    def _found(self) -> dict[str, list[float]]:
        root = Path(__file__).parents[1]
        done = subprocess.run(self._command, cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        rounds = done.stderr.split(MARK)[1:]
        live = [max(map(float, re.findall(r"total alloc (\d+) bytes", text))) for text in rounds]
        return {"live": live, "resident": json.loads(done.stdout)}
