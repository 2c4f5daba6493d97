"""`python -m benchmarks [NAME ...]`: runs families of cases; if none is named, those of the CPU."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

from . import harness
from .harness import FAMILIES, ON_GPUS, Options

HERE = Path(__file__).parent


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="see --list")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--quick", action="store_true", help="only see whether everything runs")
    parser.add_argument("--json", type=Path, help="where; benchmarks/results without --quick")
    default = HERE.parent.parent / "shared" / "models" / "stories260K"
    parser.add_argument("--model", type=Path, default=default, help="the trained stories260K")
    devices = {"choices": ("cuda", "cpu"), "default": "cuda"}
    parser.add_argument("--device", help=f"where {', '.join(ON_GPUS)} runs", **devices)
    args = parser.parse_args()
    known = FAMILIES + ON_GPUS
    if unknown := set(args.names) - set(known):
        parser.error(f"no {', '.join(sorted(unknown))}; there is {', '.join(known)}")
    if set(args.names).isdisjoint(ON_GPUS):
        args.device = "cpu"
    if args.device == "cuda" and not args.list and not torch.cuda.is_available():
        fix = "Fix: --device cpu --quick sees whether the same cases run."
        parser.exit(1, f"There is no GPU: torch.cuda.is_available() is False. {fix}\n")
    return args


def run_here(names: list[str], options: Options, folder: Path | None) -> bool:
    """Returns whether nothing failed."""
    failed = False
    for name in names:
        rows = harness.run_family(name, options)
        failed |= any(r.ours.failed or (r.theirs is not None and r.theirs.failed) for r in rows)
        if folder is not None:
            harness.write(folder, name, options, rows)
    return not failed


def run_apart(names: list[str], options: Options, folder: Path) -> bool:
    """Runs each family in a process of its own, so that none inherits another's state."""
    same = ["--model", str(options.model), "--device", options.device, "--json", str(folder)]
    command = [sys.executable, "-m", __package__, *same]
    codes = [subprocess.run([*command, name], check=False).returncode for name in names]
    print(f"\n{summary(names, folder)}")
    return not any(codes)


def summary(names: list[str], folder: Path) -> str:
    """Returns how many targets were met, and which were not."""
    files = [folder / f"{name}.json" for name in names]
    rows = [r for f in files if f.exists() for r in json.loads(f.read_text())["rows"]]
    bound = [r for r in rows if r["target"] is not None]
    missed = [
        f"  {r['case']} | {r.get('rival', 'limit')}: {r['value']:.3g}, target {r['target']:.3g}"
        for r in bound
        if r["met"] is False
    ]
    met = sum(r["met"] is True for r in bound)
    counts = f"{met} of {len(bound)} targets met, {len(missed)} missed, the rest not measured."
    return "\n".join([counts, *missed])


def main() -> int:
    args = parse()
    if args.list:
        names = args.names or FAMILIES + ON_GPUS
        print("\n".join(f"{name:16}{harness.description(name)}" for name in names))
        return 0
    names, options = args.names or list(FAMILIES), Options(args.quick, args.model, args.device)
    folder = args.json or (None if args.quick else HERE / "results")
    if len(names) > 1 and not args.quick:
        return 0 if run_apart(names, options, folder or HERE / "results") else 1
    if args.quick:
        print("Quick: whether everything runs. The numbers say nothing.")
    machine = harness.machine(args.device)
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    return 0 if run_here(names, options, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
