"""The command: ``python -m dtorch.test.opinfo``.

It sweeps the entries of PyTorch's OpInfo database, says on the standard error what came of each,
and writes the report. It ends with status 1 if a value is wrong, if a process crashed or hung, or
if fewer entries stay sharded than the page of --document claims.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import shlex
import sys
from pathlib import Path

from .check import MODES
from .document import Share, page, read_dtensor, unsharded
from .layouts import MESHES
from .pool import Pool
from .report import expectation_lines, sums, table, worst
from .sweep import QUICK, Plan, Result


def main() -> int:
    """Runs the command and returns its status."""
    options = _parser().parse_args()
    plan = _plan(options)
    names = plan.names(tuple(options.op))
    if not names:
        print(f"no entry fits {options.op} with {plan}", file=sys.stderr)
        return 2
    dtensor = read_dtensor(options.dtensor)
    results = _sweep(names, plan, options.jobs, options.limit)
    text = table(results, plan)
    if options.report is not None:
        options.report.write_text(text, encoding="utf-8")
    if options.report is None and options.document is None:
        print(text, end="")
    else:
        print("\n".join(sums(results)))
    if options.expect is not None:
        options.expect.write_text(expectation_lines(results), encoding="utf-8")
    is_bad = any(r.status in ("wrong", "crashed", "hung") for r in results)
    if options.document is not None:
        share, command = Share.of(results, unsharded()), shlex.join(sys.argv[1:])
        command = f"python -m dtorch.test.opinfo {command}"
        text = page(results, plan, unsharded(), dtensor, command)
        options.document.write_text(text, encoding="utf-8")
        print(share)
        is_bad = is_bad or not share.is_reached
    return int(is_bad)


def _sweep(names: list[str], plan: Plan, jobs: int, limit: float) -> list[Result]:
    pool = Pool(names, plan, jobs, limit)
    done = concurrent.futures.as_completed(pool.results.values())
    for number, future in enumerate(done, 1):
        print(f"[{number}/{len(names)}] {_progress(future.result())}", file=sys.stderr, flush=True)
    return [pool.results[name].result() for name in names]


def _progress(result: Result) -> str:
    failure = worst(result)
    text = f": {failure.message}" if failure else ""
    return f"{result.name} {result.status} {result.right}/{result.tried}{text}"[:150]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dtorch.test.opinfo", description=__doc__)
    add = parser.add_argument
    add("--op", nargs="+", default=["*"], metavar="NAME", help="entries, by name or shell pattern")
    add("--mesh", nargs="+", default=["2", "3", "2x2"], choices=sorted(MESHES), help="the meshes")
    add("--dtype", default="float32", help="the dtype of the inputs; float32 if not given")
    add("--backward", action="store_true", help="compare gradients")
    add("--variant", default="function", choices=["function", "inplace", "out"])
    add("--mode", nargs="+", default=list(MODES), choices=MODES, help="how every call runs")
    add("--samples", type=int, help="how many samples of an entry")
    add("--layouts", type=int, help="how many layouts of a sample on a mesh")
    add("--seed", type=int, default=0, help="what the choice of samples and layouts depends on")
    add("--quick", action="store_true", help="as few samples and layouts as the tests take")
    add("--jobs", type=int, default=1, help="how many processes")
    add("--limit", type=float, default=120, help="how many seconds an entry may take")
    add("--report", type=Path, metavar="FILE", help="where to write the table; else it is printed")
    add("--document", type=Path, metavar="FILE", help="write the page docs/operators.md")
    add("--dtensor", type=Path, metavar="FILE", help="what DTensor does, for the page")
    add("--expect", type=Path, metavar="FILE", help="write what tests/test_opinfo.py expects")
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    default = QUICK if options.quick else Plan() if options.dtype == "float32" else _SMALLER
    return dataclasses.replace(
        default,
        dtype=options.dtype,
        meshes=tuple(options.mesh),
        samples=options.samples or default.samples,
        layouts=options.layouts or default.layouts,
        backward=options.backward,
        variant=options.variant,
        seed=options.seed,
        modes=tuple(options.mode),
    )


_SMALLER = Plan(samples=3, layouts=2)


if __name__ == "__main__":
    sys.exit(main())
