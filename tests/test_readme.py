"""The snippets of the README, in its order, as a reader would run them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs(number: int, tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(SNIPPETS[number])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_printed_program_is_what_the_readme_shows(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(next(s for s in SNIPPETS if "parallel.shard" in s))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    shown = re.search(r"```text\n(mlp\(.*?)```", README.read_text(), re.DOTALL)
    assert shown is not None
    assert done.stdout == shown[1] + "[Replicate(), Shard(dim=0)]\n"
