"""Document: the page docs/operators.md, which says what is right and what stays sharded.

Takes the results of a sweep, the list `unsharded.txt` and, where there is one, the JSON of
``benchmarks/rivals/operators_dtensor.py``; gives Markdown. An entry *stays sharded* if one of its
layouts with a tensor split on a dim other than 0 is right, gathers nothing that is split and runs
nothing replicated. Entries without a tensor argument of two or more dims have no such layout and do
not count, and neither do those of the list.
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .report import worst
from .sweep import Plan, Result

GOAL = 0.85
MAX_UNSHARDED = 120
UNSHARDED = Path(__file__).with_name("unsharded.txt")
_WIDTH = 90


def unsharded(text: str | None = None) -> dict[str, str]:
    """Returns why each entry of the list stays sharded on no dim other than 0.

    Args:
        text: A line an entry: its name, a tab, and the reason. Lines that start with ``#`` are
            comments. The committed list if not given.
    """
    text = UNSHARDED.read_text(encoding="utf-8") if text is None else text
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: reason for name, _, reason in (line.partition("\t") for line in lines)}


@dataclasses.dataclass(frozen=True)
class Share:
    """How many entries stay sharded.

    Attributes:
        counted: Entries with a tensor argument of two or more dims, less those of the list.
        native: Those of them that stay sharded.
        rest: The others.
        listed: Entries of the list that were swept and have such an argument.
        stale: Entries of the list that stay sharded all the same, or have no such argument.
    """

    counted: int
    native: int
    rest: tuple[str, ...]
    listed: tuple[str, ...]
    stale: tuple[str, ...]

    @classmethod
    def of(cls, results: Iterable[Result], reasons: Mapping[str, str]) -> Share:
        """Returns the share of some results.

        Args:
            results: What came of each entry.
            reasons: The list.
        """
        results = list(results)
        listed = [r for r in results if r.name in reasons]
        counted = [r for r in results if r.has_matrix and r.name not in reasons]
        return cls(
            len(counted),
            sum(r.native > 0 for r in counted),
            tuple(r.name for r in counted if not r.native),
            tuple(r.name for r in listed if r.has_matrix),
            tuple(r.name for r in listed if r.native or not r.has_matrix),
        )

    @property
    def fraction(self) -> float:
        """The native ones of the counted ones."""
        return self.native / self.counted if self.counted else 1.0

    @property
    def is_reached(self) -> bool:
        """Whether it is the goal or more, with a list that is true."""
        return self.fraction >= GOAL and not self.stale

    def __str__(self) -> str:
        lines = [
            f"{self.native} of {self.counted} entries stay sharded ({self.fraction:.1%}; "
            f"the goal is {GOAL:.0%}), less {len(self.listed)} of {UNSHARDED.name}"
        ]
        if self.stale:
            lines.append(f"to be taken off {UNSHARDED.name}: {' '.join(self.stale)}")
        return "\n".join(lines)


def page(
    results: Sequence[Result],
    plan: Plan,
    reasons: Mapping[str, str],
    dtensor: Mapping[str, Any] | None = None,
    command: str = "python -m dtorch.test.opinfo --document FILE",
) -> str:
    """Returns the page.

    Args:
        results: What came of each entry.
        plan: What was tried.
        reasons: The list of entries for which no sharded algorithm exists.
        dtensor: The JSON of the DTensor script.
        command: How the page was made.
    """
    share = Share.of(results, reasons)
    parts = [
        ["# Operators"],
        _head(plan, dtensor, command),
        ["## Summary", "", *_summary(results, share, dtensor)],
        ["## Not right in every layout", "", *_failures(results)],
        ["## Gathered or replicated", "", *_rest(share)],
        ["## No sharded algorithm on an inner dim", "", *_listed(share, reasons)],
        ["## All entries", "", *_table(results, reasons, dtensor)],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def read_dtensor(path: Path | None) -> dict[str, Any] | None:
    """Returns the JSON of the DTensor script, None without a path."""
    return None if path is None else json.loads(path.read_text(encoding="utf-8"))


# -- the parts -----------------------------------------------------------------------------


def _head(plan: Plan, dtensor: Mapping[str, Any] | None, command: str) -> list[str]:
    kind = "gradients" if plan.backward else "results"
    modes = " and ".join({"eager": "eagerly", "jit": "under `jit`"}[m] for m in plan.modes)
    tried = (
        f"Every entry of PyTorch's OpInfo database ({plan.dtype}, {kind}) on its own samples, run "
        f"{modes} and compared with torch {torch.__version__} on whole tensors. Tried of each: at "
        f"most {plan.samples} samples, and of each sample one device and at most {plan.layouts} "
        f"layouts on each mesh of {', '.join(plan.meshes)} devices, drawn with seed {plan.seed}. "
        "Generated, not edited, by"
    )
    sharded = (
        "*Sharded*: how many of the layouts with a tensor split on a dim other than 0 are right, "
        "gather nothing that is split, and run nothing replicated for want of a sharding rule."
    )
    lines = [_filled(tried), "", "```sh", *_dtensor_command(dtensor), command, "```"]
    lines += ["", _filled(sharded)]
    return lines if dtensor is None else [*lines, "", _filled(_of_dtensor(dtensor))]


def _filled(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _of_dtensor(dtensor: Mapping[str, Any]) -> str:
    plan = _dtensor_plan(dtensor)
    return (
        f"*DTensor*: how many of the first {plan.layouts} layouts on two devices of {plan.samples} "
        f"samples torch {dtensor['torch']}'s DTensor gets right on two gloo processes, which share "
        "one PYTHONHASHSEED: with different ones, some wait for each other or are wrong at times. "
        "Values are compared within the same tolerance, of random entries only shape and dtype. "
        "An entry ends at the first layout in which a process hangs, or raises alone."
    )


def _dtensor_command(dtensor: Mapping[str, Any] | None) -> list[str]:
    if dtensor is None:
        return []
    plan = _dtensor_plan(dtensor)
    options = f"--samples {plan.samples} --layouts {plan.layouts} --seed {plan.seed}"
    return [f"python -m benchmarks.rivals.operators_dtensor {options} --json dtensor.json"]


def _dtensor_plan(dtensor: Mapping[str, Any]) -> Plan:
    return Plan.from_json(dtensor["plan"])


def _summary(
    results: Sequence[Result], share: Share, dtensor: Mapping[str, Any] | None
) -> list[str]:
    tried = [r for r in results if r.tried]
    right = sum(r.status == "right" for r in tried)
    layouts, right_layouts = sum(r.tried for r in tried), sum(r.right for r in tried)
    skipped = len(results) - len(tried)
    every = share.counted + len(share.listed)
    lines = [
        f"- {len(results)} entries, {skipped} of them without a sample that can be tried.",
        f"- {right} of {len(tried)} ({_percent(right, len(tried))}) are right in every layout; "
        f"{right_layouts} of {layouts} layouts are right.",
        f"- {every} have a tensor argument of two or more dims; {len(share.listed)} of these have "
        "no sharded algorithm on an inner dim (the list below).",
        f"- {share.native} of the other {share.counted} ({share.fraction:.1%}) stay sharded on an "
        f"inner dim; the goal is {GOAL:.0%}.",
    ]
    if dtensor is not None:
        rows = [e for e in dtensor["entries"] if e["tried"]]
        theirs = sum(e["status"] == "right" for e in rows)
        lines.append(
            f"- DTensor is right in every layout tried of it for {theirs} of {len(rows)} entries "
            f"({_percent(theirs, len(rows))})."
        )
    return lines


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _failures(results: Sequence[Result]) -> list[str]:
    failures = [(r, f) for r in results if (f := worst(r)) is not None]
    lines = [
        f"- `{r.name}`, {r.tried - r.right} of {r.tried}: {f.status}, {_cell(f.message)}"
        for r, f in failures
    ]
    return lines or ["None."]


def _rest(share: Share) -> list[str]:
    if not share.rest:
        return ["None."]
    names = ", ".join(f"`{name}`" for name in share.rest)
    return [f"{len(share.rest)} entries, in every layout tried: {names}."]


def _listed(share: Share, reasons: Mapping[str, str]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name in share.listed:
        by_reason.setdefault(reasons[name], []).append(f"`{name}`")
    return [f"- {reason}: {', '.join(n)}." for reason, n in by_reason.items()] or ["None."]


def _table(
    results: Sequence[Result], reasons: Mapping[str, str], dtensor: Mapping[str, Any] | None
) -> list[str]:
    columns = ["entry", "right", "sharded", "first failure"]
    theirs = {} if dtensor is None else {e["name"]: e for e in dtensor["entries"]}
    if dtensor is not None:
        columns.append("DTensor")
    rows = [columns, ["---"] * len(columns)]
    for result in results:
        failure = worst(result)
        text = f"{failure.status}: {failure.message}" if failure else ""
        cells = [f"`{result.name}`", _right(result), _sharded(result, reasons), _cell(text)]
        if dtensor is not None:
            cells.append(_theirs(theirs.get(result.name)))
        rows.append(cells)
    return ["| " + " | ".join(row) + " |" for row in rows]


def _right(result: Result) -> str:
    return f"{result.right}/{result.tried}" if result.tried else "no sample"


def _sharded(result: Result, reasons: Mapping[str, str]) -> str:
    if result.native:
        return f"yes, {result.native}/{result.inner}"
    if result.name in reasons:
        return "listed"
    if not result.has_matrix:
        return ""
    return f"no, 0/{result.inner}" if result.inner else "no such layout"


def _theirs(row: Mapping[str, Any] | None) -> str:
    if row is None or not row["tried"]:
        return ""
    text = "" if row["status"] == "right" else f" {row['status']}: {row['message']}"
    return _cell(f"{row['right']}/{row['tried']}{text}")


def _cell(text: str) -> str:
    """A text that stays in its cell, without what differs from run to run."""
    text = re.sub(r"0x[0-9a-f]+", "0x...", " ".join(text.split()))
    cut = text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
    return re.sub(r"([|<>*_\\`\[\]])", r"\\\1", cut)
