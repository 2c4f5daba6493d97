"""The scripts' side: answers requests until standard input ends. Standard library only."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from ..timing import Measure, Run, calibrated

Build = Callable[..., Run]


def serve(build: Callable[[str, dict[str, Any]], Run]) -> None:
    """Answers each request with one repetition of what `build` returns for it."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        measures: dict[str, Measure] = {}
        for request in sys.stdin:
            print(json.dumps(_answer(request, measures, build)), file=answers, flush=True)


def _answer(
    request: str, measures: dict[str, Measure], build: Callable[[str, dict[str, Any]], Run]
) -> dict[str, Any]:
    try:
        if request not in measures:
            wanted = json.loads(request)
            run = build(wanted["name"], wanted["options"])
            measures[request] = calibrated(run, wanted["budget"])
        return {"seconds": measures[request]()}
    except Exception:
        return {"error": traceback.format_exc()}
