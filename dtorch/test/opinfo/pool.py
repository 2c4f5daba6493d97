"""Pool: entries in worker processes, so that one that hangs or crashes is only one result.

Each job is a thread that feeds a process of its own, one entry at a time. A process that says
nothing more within an entry's time is killed, and one that dies is replaced; both are failures of
the entry, at the layout that the process had named last. Nothing but the threads reads a pipe.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from .sweep import Failure, Plan, Result

CHUNK = 50
"""How many entries a process runs before a fresh one takes its place."""
SECONDS_TO_START = 300.0


class Pool:
    """Runs entries in worker processes.

    Args:
        names: The entries; they are started in this order.
        plan: What is tried of each.
        jobs: How many processes run at a time.
        limit: How many seconds an entry may take.

    Attributes:
        results: A future for each entry.
    """

    def __init__(self, names: Sequence[str], plan: Plan, jobs: int = 1, limit: float = 120) -> None:
        self.results: dict[str, concurrent.futures.Future[Result]] = {
            name: concurrent.futures.Future() for name in names
        }
        self._plan, self._limit = plan, limit
        self._num_threads = max(1, (os.cpu_count() or 1) // jobs)
        self._waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closed = threading.Event()
        for name in self.results:
            self._waiting.put(name)
        for _ in range(min(jobs, len(names))):
            threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Lets no further entry start; those that run are waited for by nobody."""
        self._closed.set()

    def _serve(self) -> None:
        process: _Process | None = None
        while not self._closed.is_set():
            try:
                name = self._waiting.get_nowait()
            except queue.Empty:
                break
            try:
                if process is None or process.asked >= CHUNK or not process.is_alive():
                    if process is not None:
                        process.stop()
                    process = _Process(self._plan, self._num_threads)
                self.results[name].set_result(process.ask(name, self._limit))
            except Exception as error:  # without a worker, nobody would ever answer
                self.results[name].set_exception(error)
        if process is not None:
            process.stop()


class _Process:
    """A worker process and the pipes to it; used by one thread."""

    def __init__(self, plan: Plan, num_threads: int) -> None:
        self.asked = 0
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker", plan.to_json(), str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._unread = b""
        if self._read(time.monotonic() + SECONDS_TO_START) is None:
            said = self._said()
            self.stop()
            raise RuntimeError(f"a worker of the OpInfo sweep did not start:\n{said}")

    def is_alive(self) -> bool:
        """Returns whether it can be asked again."""
        return self._process.poll() is None

    def ask(self, name: str, limit: float) -> Result:
        """Returns what comes of an entry, a crash or a hang of the process included."""
        self.asked += 1
        deadline = time.monotonic() + limit
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading finds that the process has ended
            self._process.stdin.write(f"{name}\n".encode())
            self._process.stdin.flush()
        so_far, where = Result(name), "before its first layout"
        while True:
            message = self._read(deadline)
            if message is None:
                return self._lost(so_far, where, limit)
            if "result" in message:
                return Result.from_dict(message["result"])
            so_far, where = Result.from_dict(message["so_far"]), message["at"]

    def _lost(self, so_far: Result, where: str, limit: float) -> Result:
        """The result of an entry that the process was killed for, or died of."""
        time.sleep(0.1)  # a process whose pipe has closed is about to be gone
        code, last = self._process.poll(), self._said().strip().splitlines()[-1:]
        self.stop()
        if code is None:
            failure = Failure("hung", where, "", f"no end within {limit:g} s")
        else:
            name = signal.Signals(-code).name if code < 0 else f"status {code}"
            failure = Failure("crashed", where, "", f"the process ended by {name}: {last}")
        so_far.failures.append(failure)
        so_far.tried += 1
        return so_far

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._errors.close()

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def _read(self, deadline: float) -> dict[str, Any] | None:
        """The next message; None at the deadline or where the process has ended."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                return None
            more = os.read(pipe, 1 << 16)
            if not more:
                return None
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)
