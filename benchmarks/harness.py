"""Cases, their repetitions, the table, the JSON, and the list of families.

A family is a module of this package with `cases(options)`. A case measures dtorch once and each
rival once, over and over: the machine's drift meets all of them alike.
"""

import dataclasses
import functools
import importlib
import json
import os
import platform
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import dtorch

from .rivals import Unavailable
from .timing import Measure, Run, calibrated

FAMILIES: tuple[str, ...] = (
    "adds", "attention", "training", "client", "llama", "sd3", "redistribution", "tracing",
    "memory", "loading",
)  # fmt: skip
ON_GPUS = ("gpu",)
"""Families that are run if they are named."""
OPTIONAL = ("diffusers", "safetensors", "transformers")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line chooses.

    Attributes:
        quick: Small sizes, one repetition, no rival processes: whether everything runs.
        model: The folder of the trained stories260K.
        device: Where the families `ON_GPUS` run: "cuda" or "cpu".
    """

    quick: bool
    model: Path
    device: str = "cpu"

    @property
    def repetitions(self) -> int:
        return 1 if self.quick else 5

    @property
    def budget(self) -> float:
        """Seconds that one repetition of one measure takes."""
        return 0.002 if self.quick else 0.15

    @property
    def rival_budget(self) -> float | None:
        """The same for rival processes; None: they are not started."""
        return None if self.quick else self.budget

    def timed(self, run: Run) -> Measure:
        """Returns a measure of a run; it calibrates itself at its first use."""
        measure = functools.cache(lambda: calibrated(run, self.budget))
        return lambda: measure()()


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured together.

    Attributes:
        name: What the table calls it.
        measure: One repetition of dtorch's.
        rivals: One repetition of each rival's.
        targets: The ratio to a rival that dtorch's median may have at most.
        limit: What dtorch's median may be at most.
        unit: "s" or "B".
        warm_ups: How many repetitions of each come first and do not count.
    """

    name: str
    measure: Measure
    rivals: Mapping[str, Measure] = dataclasses.field(default_factory=dict)
    targets: Mapping[str, float] = dataclasses.field(default_factory=dict)
    limit: float | None = None
    unit: str = "s"
    warm_ups: int = 1


@dataclasses.dataclass(frozen=True)
class Result:
    """The repetitions of one measure, or why there are none."""

    values: tuple[float, ...] = ()
    note: str = ""
    failed: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def without(self, warm_ups: int) -> "Result":
        return dataclasses.replace(self, values=self.values[warm_ups:])

    def cell(self, unit: str) -> str:
        if not self.values:
            return self.note
        scale, name = _scale(self.median, unit)
        middle, low, high = (
            f"{v / scale:.3g}" if v < 1000 * scale else f"{v / scale:.0f}"
            for v in (self.median, min(self.values), max(self.values))
        )
        return f"{middle} {name} ({low}..{high})"

    def record(self) -> dict[str, Any]:
        if not self.values:
            return {"note": self.note}
        spread = {"median": self.median, "min": min(self.values), "max": max(self.values)}
        return {**spread, "values": self.values}


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: dtorch beside one rival, or beside a limit."""

    case: str
    unit: str
    ours: Result
    rival: str = ""
    theirs: Result | None = None
    target: float | None = None

    @property
    def value(self) -> float | None:
        """What the target bounds: the ratio to the rival, or dtorch's own median."""
        if self.theirs is None:
            return self.ours.median if self.ours.values else None
        both = self.ours.values and self.theirs.values
        return self.ours.median / self.theirs.median if both else None

    @property
    def met(self) -> bool | None:
        return None if self.target is None or self.value is None else self.value <= self.target

    def cells(self) -> tuple[str, ...]:
        theirs = self.theirs.cell(self.unit) if self.theirs else ""
        ratio = f"{self.value:.3g}" if self.theirs and self.value is not None else ""
        met = {None: "", True: "met", False: "MISSED"}[self.met]
        return self.case, self.ours.cell(self.unit), self.rival, theirs, ratio, self._bound(), met

    def record(self) -> dict[str, Any]:
        rival = {"rival": self.rival, "theirs": self.theirs.record()} if self.theirs else {}
        bound = {"value": self.value, "target": self.target, "met": self.met}
        ours = {"case": self.case, "unit": self.unit, "dtorch": self.ours.record()}
        return {**ours, **rival, **bound}

    def _bound(self) -> str:
        if self.target is None:
            return ""
        if self.theirs is not None:
            return f"<= {self.target:.3g} x"
        scale, name = _scale(self.target, self.unit)
        return f"<= {self.target / scale:.3g} {name}"


def _scale(value: float, unit: str) -> tuple[float, str]:
    if unit == "B":
        return 2**20, "MiB"
    return next(((s, n) for s, n in ((1.0, "s"), (1e-3, "ms")) if value >= s), (1e-6, "us"))


HEADER = ("case", "dtorch", "rival", "rival's", "ratio", "target", "")
WIDTHS = (42, 26, 23, 26, 7, 10, 6)


def line(cells: Iterable[str]) -> str:
    """Returns a row of the table, which is Markdown."""
    padded = (cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True))
    return f"| {' | '.join(padded)} |"


def rows_of(case: Case, repetitions: int) -> list[Row]:
    """Measures a case: the warm-ups, then the repetitions, one of each in turn."""
    measures = {**case.rivals, "": case.measure}
    results = dict.fromkeys(measures, Result())
    for _ in range(case.warm_ups + repetitions):
        for name, measure in measures.items():
            results[name] = repeated(results[name], measure, f"{case.name} {name}")
    results = {name: result.without(case.warm_ups) for name, result in results.items()}
    ours = results.pop("")
    alone = [Row(case.name, case.unit, ours, target=case.limit)]
    beside = [
        Row(case.name, case.unit, ours, rival, theirs, case.targets.get(rival))
        for rival, theirs in results.items()
    ]
    return [*(alone if case.limit is not None or not beside else []), *beside]


def repeated(result: Result, measure: Measure, name: str) -> Result:
    """Returns a result with one more repetition, or why there is none."""
    if result.note:
        return result
    try:
        return Result((*result.values, measure()))
    except Unavailable as reason:
        return Result(note=str(reason))
    except Exception as error:
        print(f"{name} failed:\n{traceback.format_exc()}", file=sys.stderr)
        return Result(note=f"failed: {type(error).__name__}", failed=True)


def unmeasured(reason: Exception) -> Measure:
    """Returns a measure that only raises why there is nothing to measure."""

    def measure() -> float:
        raise reason

    return measure


def run_family(name: str, options: Options) -> list[Row]:
    """Measures the cases of a family and prints each as soon as it is there."""
    print(f"\n### {name}\n\n{line(HEADER)}\n{line('-' * w for w in WIDTHS)}", flush=True)
    rows: list[Row] = []
    for case in _cases(name, options):
        rows += (new := rows_of(case, options.repetitions))
        print("\n".join(line(row.cells()) for row in new), flush=True)
        del case  # and what it measures, before the next is made
    return rows


def _cases(name: str, options: Options) -> Iterator[Case]:
    return guarded(name, lambda: importlib.import_module(f"{__package__}.{name}").cases(options))


def guarded(name: str, cases: Callable[[], Iterator[Case]]) -> Iterator[Case]:
    """The cases; one that says why, where they cannot be made or go on."""
    try:
        yield from cases()
    except Unavailable as reason:
        yield Case(name, unmeasured(reason))
    except ModuleNotFoundError as missing:
        if missing.name not in OPTIONAL:
            raise
        yield Case(name, unmeasured(Unavailable(f"{missing.name} is not installed")))
    except Exception as error:
        yield Case(f"{name}: the next case", unmeasured(error))


def description(name: str) -> str:
    """Returns the first line of a family's docstring, without importing what it measures."""
    text = (Path(__file__).parent / f"{name}.py").read_text()
    return text.split('"""')[1].splitlines()[0]


def drain(results: object) -> None:
    """Waits for dtorch's workers, and so for these results too."""
    dtorch.synchronize()


def machine(device: str = "cpu") -> dict[str, Any]:
    """Returns what the numbers depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [text.split(":")[1].strip() for text in lines if text.startswith("model name")]
    gpu = {}
    if device == "cuda":
        gpu = {"gpu": torch.cuda.get_device_name(), "CUDA": torch.version.cuda}
    return gpu | {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "executor": getattr(dtorch.runtime, "EXECUTOR", "unknown"),
        "load": round(os.getloadavg()[0], 2),
    }


def write(folder: Path, name: str, options: Options, rows: Iterable[Row]) -> None:
    """Writes a family's rows as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {"family": name, "quick": options.quick, "machine": machine(options.device)}
    content = {**head, "rows": [row.record() for row in rows]}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
