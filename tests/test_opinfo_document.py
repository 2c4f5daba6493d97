"""The page docs/operators.md, made of a few results, and the list of entries that do not count."""

import json
from pathlib import Path

import pytest
import torch

from dtorch.test.opinfo import document, entries
from dtorch.test.opinfo.sweep import QUICK, Failure, Plan, Result

pytestmark = pytest.mark.once
RAISED = Failure("raised", "sample 0", "eager", "ValueError: a | b at 0x7f00")
RESULTS = [
    Result("abs", tried=4, right=4, inner=2, native=2, has_matrix=True),
    Result("svd", tried=4, right=4, inner=2, has_matrix=True),
    Result("kron", tried=4, right=3, inner=1, has_matrix=True, failures=[RAISED]),
    Result("ger", tried=4, right=4),
    Result("arange"),
]
REASONS = {"svd": "a factorisation", "unknown here": "not swept"}


def test_what_counts_and_what_stays_sharded() -> None:
    share = document.Share.of(RESULTS, REASONS)
    assert (share.counted, share.native, share.rest) == (2, 1, ("kron",))
    assert (share.listed, share.stale, share.is_reached) == (("svd",), (), False)
    assert document.Share.of(RESULTS[:2], REASONS).is_reached
    assert "1 of 2 entries stay sharded (50.0%; the goal is 85%)" in str(share)


@pytest.mark.parametrize("name", ["abs", "ger"])
def test_the_list_may_not_name_what_stays_sharded_or_has_no_inner_dim(name: str) -> None:
    share = document.Share.of(RESULTS[:2] + RESULTS[3:], REASONS | {name: "none"})
    assert share.stale == (name,) and not share.is_reached
    assert f"to be taken off unsharded.txt: {name}" in str(share)


def test_the_page_names_every_entry_with_what_comes_of_it() -> None:
    theirs = {"name": "abs", "status": "wrong", "right": 1, "tried": 2, "message": "shape [2]"}
    dtensor = {"torch": "2.x", "plan": Plan(meshes=("2",)).to_json(), "entries": [theirs]}
    text = document.page(RESULTS, QUICK, REASONS, dtensor, "the command")
    lines = text.splitlines()
    assert "| `abs` | 4/4 | yes, 2/2 |  | 1/2 wrong: shape \\[2\\] |" in lines
    assert "| `svd` | 4/4 | listed |  |  |" in lines
    assert "| `kron` | 3/4 | no, 0/1 | raised: ValueError: a \\| b at 0x... |  |" in lines
    assert "| `ger` | 4/4 |  |  |  |" in lines
    assert "| `arange` | no sample |  |  |  |" in lines
    assert "- 3 of 4 (75.0%) are right in every layout; 15 of 16 layouts are right." in lines
    assert "- `kron`, 1 of 4: raised, ValueError: a \\| b at 0x..." in lines
    assert "1 entries, in every layout tried: `kron`." in lines
    assert "- a factorisation: `svd`." in lines
    assert "the command" in lines and f"with torch {torch.__version__}" in text
    assert "DTensor" not in document.page(RESULTS, QUICK, REASONS)


def test_dtensors_results_are_read(tmp_path: Path) -> None:
    file = tmp_path / "dtensor.json"
    file.write_text(json.dumps({"entries": []}), encoding="utf-8")
    assert document.read_dtensor(file) == {"entries": []}
    assert document.read_dtensor(None) is None


def test_the_list_is_short_and_gives_a_reason_for_each_known_entry() -> None:
    text = document.UNSHARDED.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    reasons = document.unsharded(text)
    assert len(lines) == len(reasons) <= document.MAX_UNSHARDED
    assert all(len(reason.split()) > 3 for reason in reasons.values())
    if torch.__version__.startswith("2.13."):
        assert not set(reasons) - set(entries.names(torch.float32))
