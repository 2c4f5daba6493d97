"""The snippets of the README and the guides in docs/, as a reader would run them.

A snippet of the README is a script; those of a guide are one script together, and print the texts
that follow them.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once
README = Path(__file__).resolve().parents[1] / "README.md"
GUIDES = [g for g in sorted((README.parent / "docs").glob("*.md")) if "```python" in g.read_text()]
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


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_guide_prints_what_it_shows(guide: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```(python|text)\n(.*?)```", guide.read_text(), re.DOTALL)
    script = tmp_path / f"{guide.stem}.py"
    mark = "-- next snippet --\n"
    # The line that separates them stands where a reader would have an empty one.
    snippets = [text for kind, text in blocks if kind == "python"]
    script.write_text(f"print({mark[:-1]!r})\n".join(snippets))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    shown = []
    for kind, text in blocks:
        shown += [""] if kind == "python" else []
        shown[-1] += text if kind == "text" else ""
    assert [_timeless(t) for t in done.stdout.split(mark)] == [_timeless(t) for t in shown]


def _timeless(text: str) -> str:
    """A text in which every time is the same, and nothing is padded to its width."""
    timeless, count = re.subn(r"\d[\d.e+-]* (s|ms|us)( \d+%)?", "TIME", text)
    return re.sub(" +", " ", timeless) if count else text
