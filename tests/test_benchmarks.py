"""The benchmarks run: small sizes, one repetition, no rival processes. Numbers are not judged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from layouts import TIMES

ROOT = Path(__file__).parents[1]
SECONDS = 240
pytest.importorskip("transformers")


@pytest.mark.once
@pytest.mark.skipif(TIMES < 1, reason="fewer layouts, and no benchmarks")
@pytest.mark.timeout(SECONDS + 10)
def test_every_family_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for family in ("adds", "attention", "training", "client", "llama", "redistribution", "memory"):
        assert f"### {family}" in done.stdout
    assert "failed" not in done.stdout
