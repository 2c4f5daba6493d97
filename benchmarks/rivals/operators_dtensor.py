"""What DTensor makes of the OpInfo entries that ``python -m dtorch.test.opinfo`` sweeps.

    python -m benchmarks.rivals.operators_dtensor --json FILE [--op NAME ...]

Two gloo processes run every entry on the samples and layouts that dtorch's harness draws for a
mesh of two devices, and compare the full results with PyTorch's, as generously as the harness
where sums run over devices. Of random entries, shape and dtype count. This process asks both
for one layout at a time; where one raises, hangs or dies, the other may wait in a collective, so
that both are replaced. ``--document --dtensor FILE`` puts the JSON into docs/operators.md.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from dtorch.test.opinfo import compare, entries, layouts
from dtorch.test.opinfo.check import run
from dtorch.test.opinfo.entries import Call
from dtorch.test.opinfo.layouts import Layout
from dtorch.test.opinfo.sweep import Plan, drawn_layouts, is_random, torch_value

NUM_PROCESSES = 2
SECONDS_TO_START = 120.0
SECONDS_FOR_OTHER = 2.0
"""How long the other process may take once one has raised."""
CHUNK = 100
"""How many entries the processes run before fresh ones take their place."""


# -- the processes -------------------------------------------------------------------------


def work(rank: int, store: str, pipe: Connection, plan: Plan) -> None:
    """Answers names of entries with how many layouts there are, and then numbers of layouts."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (as long as the process)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_PROCESSES
    )
    mesh = init_device_mesh("cpu", (NUM_PROCESSES,))
    entries.database()
    pipe.send("ready")
    cases: list[tuple[Call, Layout, Any]] = []
    while (request := pipe.recv()) is not None:
        if isinstance(request, str):
            cases = list(cases_of(request, plan))
            pipe.send(len(cases))
        else:
            call, layout, expected = cases[int(request)]
            pipe.send(outcome(call, layout, expected, mesh))


def cases_of(name: str, plan: Plan) -> Iterator[tuple[Call, Layout, Any]]:
    """Every sample in every layout, and what PyTorch gives."""
    op = entries.find(name)
    for call in entries.calls(op, plan.torch_dtype, plan.samples, plan.seed):
        if call.is_factory:
            continue
        try:
            leaves = torch_value(call)
        except Exception:  # the harness refuses these too
            continue
        if any(isinstance(v, torch.Tensor) and v.layout is not torch.strided for v in leaves):
            continue
        undefined = name in entries.UNDEFINED or is_random(call, leaves)
        largest = [compare.largest_size(t) for t in call.tensors if compare.is_inexact(t)]
        expected = compare.Expected(
            leaves,
            entries.tolerance(op, plan.torch_dtype),
            undefined,
            largest=max(largest, default=0.0),
        )
        for layout in drawn_layouts(name, call.number, call.tensors, plan):
            yield call, layout, expected.over_devices()


def outcome(call: Call, layout: Layout, expected: compare.Expected, mesh: DeviceMesh) -> Any:
    """A status and a message: what comes of a call in a layout."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pairs = zip(call.tensors, layout.placements, strict=True)
            found = run(call, [spread(t, layout, p, mesh) for t, p in pairs])
            whole = [v.full_tensor() if isinstance(v, DTensor) else v for v in found]
    except Exception as error:
        lines = [*str(error).strip().splitlines(), ""]
        return "raised", f"{type(error).__name__}: {lines[0]}"
    try:
        check(whole, expected)
    except AssertionError as error:
        return "wrong", " ".join(str(error).split())[:300]
    return "right", ""


def spread(value: torch.Tensor, layout: Layout, placements: Any, mesh: DeviceMesh) -> DTensor:
    """A tensor in a layout; a partial one of the parts that the harness makes."""
    (placement,) = placements
    if placement.is_partial():
        shards = list(layouts.spread(value, layout.mesh, placements).local_shards().values())
        made = DTensor.from_local(shards[mesh.get_rank()], mesh, [Partial(placement.op)])
    else:
        kind: Placement = Replicate() if placement.is_replicate() else Shard(placement.dim)
        made = distribute_tensor(value.detach(), mesh, [kind])
    return made


def check(found: Sequence[Any], expected: compare.Expected) -> None:
    assert len(found) == len(expected.leaves), f"{len(found)} results"
    for result, value in zip(found, expected.leaves, strict=True):
        if not isinstance(value, torch.Tensor):
            assert expected.only_metadata or result == value, f"{result!r} instead of {value!r}"
            continue
        assert result.shape == value.shape, f"shape {[*result.shape]}, not {[*value.shape]}"
        assert result.dtype == value.dtype, f"{result.dtype} instead of {value.dtype}"
        if not expected.only_metadata:
            rtol, atol = expected.tolerance if compare.is_inexact(value) else (0, 0)
            torch.testing.assert_close(
                result, value, rtol=rtol, atol=atol, equal_nan=True, check_stride=False
            )


# -- this process --------------------------------------------------------------------------


class Pair:
    """The two processes, which are asked the same at the same time."""

    def __init__(self, plan: Plan) -> None:
        self.asked = 0
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(NUM_PROCESSES):
            ours, theirs = context.Pipe()
            arguments = (rank, f"{self._folder.name}/store", theirs, plan)
            self._processes.append(context.Process(target=work, args=arguments, daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)
        if None in self._answers(SECONDS_TO_START):
            self.stop()
            raise RuntimeError("the processes of DTensor did not start")

    def ask(self, request: str | int, limit: float) -> list[Any]:
        """Returns each process's answer; None of one that gave none in time or ended."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(request)
        return self._answers(limit)

    def _answers(self, limit: float) -> list[Any]:
        deadline = time.monotonic() + limit
        answers: list[Any] = [None] * NUM_PROCESSES
        open_pipes = list(self._pipes)
        while open_pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(open_pipes, left):
                assert isinstance(pipe, Connection)
                open_pipes.remove(pipe)
                try:
                    answer = answers[self._pipes.index(pipe)] = pipe.recv()
                except (EOFError, ConnectionError):
                    answer = None
                if answer is None or (isinstance(answer, tuple) and answer[0] == "raised"):
                    deadline = min(deadline, time.monotonic() + SECONDS_FOR_OTHER)
        return answers

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def sweep(names: Sequence[str], plan: Plan, limit: float) -> list[dict[str, Any]]:
    """What comes of each entry: a row of the JSON."""
    pair: Pair | None = None
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(names, 1):
        if pair is None or pair.asked >= CHUNK:
            if pair is not None:
                pair.stop()
            pair = Pair(plan)
        pair.asked += 1
        row, is_usable = entry(name, pair, limit)
        if not is_usable:
            pair.stop()
            pair = None
        rows.append(row)
        text = f"[{number}/{len(names)}] {name} {row['status']} {row['right']}/{row['tried']}"
        print(f"{text} {row['message']}"[:150], file=sys.stderr, flush=True)
    if pair is not None:
        pair.stop()
    return rows


def entry(name: str, pair: Pair, limit: float) -> tuple[dict[str, Any], bool]:
    """The row of an entry, and whether the processes can go on."""
    deadline = time.monotonic() + limit
    count, other = pair.ask(name, limit)
    found: list[tuple[str, str]] = []
    is_usable = count is not None and count == other
    for number in range(count or 0) if is_usable else ():
        answers = pair.ask(number, max(0.1, deadline - time.monotonic()))
        found.append(judged(answers))
        statuses = {a and a[0] == "raised" for a in answers}
        if None in answers or len(statuses) > 1:
            is_usable = False
            break
    if count is None:
        found.append(("hung", f"no samples within {limit:g} s"))
    order = ("hung", "wrong", "raised", "right")
    status, message = min(found, key=lambda f: order.index(f[0]), default=("skipped", ""))
    counts = Counter(s for s, _ in found)
    row = {"name": name, "status": status, "right": counts["right"], "message": message}
    return row | {"tried": len(found), "layouts": count or 0}, is_usable


def judged(answers: list[Any]) -> tuple[str, str]:
    """One status of both answers; a value is judged by the first process."""
    raised = [a for a in answers if a is not None and a[0] == "raised"]
    if raised:
        return raised[0]
    if None in answers:
        return "hung", "a process gave no answer in time, or ended"
    return answers[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--op", nargs="+", default=["*"], metavar="NAME", help="entries, by name or shell pattern")
    add("--samples", type=int, default=2, help="how many samples of an entry")
    add("--layouts", type=int, default=2, help="how many layouts of a sample")
    add("--seed", type=int, default=0, help="what the choice of samples and layouts depends on")
    add("--limit", type=float, default=10, help="how many seconds an entry may take")
    add("--json", type=Path, metavar="FILE", required=True, help="where to write the results")
    options = parser.parse_args()
    os.environ["PYTHONHASHSEED"] = (
        "0"  # DTensor's choices among equals depend on it in each process
    )
    plan = Plan(meshes=("2",), samples=options.samples, layouts=options.layouts, seed=options.seed)
    rows = sweep(plan.names(tuple(options.op)), plan, options.limit)
    text = json.dumps({"torch": torch.__version__, "plan": plan.to_json(), "entries": rows})
    options.json.write_text(text + "\n", encoding="utf-8")
    print(Counter(row["status"] for row in rows))


if __name__ == "__main__":
    main()
