"""Rivals in processes of their own: scripts that answer each request with a line of JSON.

Requests are lines of JSON on standard input: a measure's name, its options and its budget. An
answer has the seconds of one repetition, or an error. Between requests the process waits.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..timing import Measure

ROOT = Path(__file__).parents[2]


class Unavailable(Exception):
    """A measure that cannot be made here, and why."""


class Rival:
    """A script of this folder, started at the first measure.

    Args:
        script: Its name.
        devices: How many devices (JAX) or processes (DTensor) it uses.
        budget: Seconds of one repetition; None: it is not started at all.
    """

    def __init__(self, script: str, devices: int, budget: float | None) -> None:
        self._script = script
        self._devices = devices
        self._budget = budget

    def measure(self, name: str, **options: Any) -> Measure:
        """Returns a measure that the script makes."""
        request = {"name": name, "options": options, "budget": self._budget}
        return lambda: self._ask(request)

    def _ask(self, request: dict[str, Any]) -> float:
        if self._budget is None:
            raise Unavailable("not started")
        process, log = _started(self._script, self._devices)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            log.seek(0)
            raise RuntimeError(f"{self._script} ended:\n{log.read().decode()[-4000:]}")
        found = json.loads(answer)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found["seconds"]


def jax_python() -> str:
    """Returns a python that can import jax.

    Raises:
        Unavailable: There is none.
    """
    python = os.environ.get("DTORCH_BENCH_JAX", sys.executable)
    if not _imports_jax(python):
        raise Unavailable("not installed")
    return python


@functools.cache
def _imports_jax(python: str) -> bool:
    return subprocess.run([python, "-c", "import jax"], capture_output=True).returncode == 0


@functools.cache
def _started(script: str, devices: int) -> tuple["subprocess.Popen[str]", Any]:
    python = jax_python() if script == "jax" else sys.executable
    log = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
    process = subprocess.Popen(
        [python, "-m", f"{__package__}.{script}", str(devices)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        cwd=ROOT,
        env=os.environ | ({"DTORCH_EXECUTOR": "python"} if script == "portable" else {}),
    )
    atexit.register(_stop, process)
    return process, log


def _stop(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
