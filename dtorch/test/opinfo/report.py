"""Report: the table of a sweep, its sums, and every distinct failure.

Also the file of what is expected of each entry, which `tests/test_opinfo.py` holds a sweep to.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from .sweep import Failure, Plan, Result

_COLUMNS = ("entry", "layouts", "right", "raised", "wrong", "native", "bytes", "first failure")
_WIDTH = 100


def table(results: Sequence[Result], plan: Plan) -> str:
    """Returns the report.

    Args:
        results: What came of each entry.
        plan: What was tried.
    """
    rows = [_COLUMNS, *(_row(r) for r in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS) - 1)]
    lines = [_line(row, widths) for row in rows]
    everything = [*_header(plan), "", *lines, "", *sums(results), "", *_details(results)]
    return "\n".join(everything) + "\n"


def _header(plan: Plan) -> list[str]:
    kind = "gradients" if plan.backward else "results"
    return [
        f"OpInfo, {plan.dtype} {kind}, variant {plan.variant}, meshes 1 {' '.join(plan.meshes)}, "
        f"{plan.samples} samples, {plan.layouts} layouts a mesh, seed {plan.seed}",
        "layouts: tried; right: eagerly and under jit (*: jit refuses what depends on data);",
        "native: of those sharded on a dim other than 0, how many were right and gathered nothing;",
        "bytes: what the busiest devices receive, summed over the right ones",
    ]


def _row(result: Result) -> tuple[str, ...]:
    counts = Counter(f.status for f in result.failures)
    return (
        result.name,
        str(result.tried),
        f"{result.right}{'*' if result.data_dependent else ''}",
        str(counts["raised"]),
        _wrong(counts),
        f"{result.native}/{result.inner}",
        str(result.num_bytes),
        _first(result),
    )


def _wrong(counts: Counter[str]) -> str:
    kinds = ("misplaced", "inexact", "crashed", "hung")
    others = [f"{counts[k]} {k}" for k in kinds if counts[k]]
    return ", ".join([str(counts["wrong"]), *others])


def _first(result: Result) -> str:
    failure = worst(result)
    if failure is None:
        return "" if result.tried else f"no sample to try ({result.refused} refused by PyTorch)"
    return f"{failure.status}: {failure.message}"[:_WIDTH]


def worst(result: Result) -> Failure | None:
    """Returns the first failure of the worst kind, or None."""
    return next((f for f in result.failures if f.status == result.status), None)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers, last = row
    cells = [f"{n:>{w}}" for n, w in zip(numbers, widths[1:], strict=True)]
    return "  ".join([f"{name:<{widths[0]}}", *cells, last]).rstrip()


def sums(results: Iterable[Result]) -> list[str]:
    """Returns how many entries and layouts came out how, as lines."""
    results = list(results)
    by_status = Counter(r.status for r in results)
    tried = sum(r.tried for r in results)
    right = sum(r.right for r in results)
    native = sum(r.native > 0 for r in results)
    statuses = ", ".join(f"{count} {status}" for status, count in by_status.most_common())
    return [
        f"{len(results)} entries: {statuses}; {native} ran natively sharded",
        f"{tried} layouts: {right} right",
    ]


def _details(results: Iterable[Result]) -> list[str]:
    lines = []
    for result in results:
        kinds: dict[tuple[str, str, str], list[Failure]] = {}
        for failure in result.failures:
            text = failure.message if failure.status == "raised" else ""
            kinds.setdefault((failure.status, failure.how, text), []).append(failure)
        for (status, how, _), failures in kinds.items():
            first = failures[0]
            lines.append(f"{result.name}: {len(failures)} {status} {how} at {first.where}")
            lines.append(f"    {first.message}")
    return lines


# -- what is expected ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What an entry is known to do.

    Attributes:
        status: As `Result.status`.
        message: Of a failure, its message.
    """

    status: str
    message: str = ""


def expectations(text: str) -> dict[str, Expectation]:
    """Returns what a file says of each entry.

    Args:
        text: A line an entry: its name, and where it is not right a tab, what comes of it, a tab,
            and the message. Lines that start with ``#`` are comments.
    """
    lines = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: Expectation(*rest) if rest else Expectation("right") for name, *rest in lines}


def expectation_lines(results: Iterable[Result]) -> str:
    """Returns such a file for what came of entries, without those that have nothing to try."""
    lines = ["# Written by `python -m dtorch.test.opinfo --quick --expect FILE`."]
    for result in results:
        failure = worst(result)
        if failure is not None:
            lines.append(f"{result.name}\t{failure.status}\t{failure.message[:_WIDTH]}".rstrip())
        elif result.tried:
            lines.append(result.name)
    return "\n".join(lines) + "\n"
