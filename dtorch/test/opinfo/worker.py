"""Worker: the process in which entries run, for `pool`.

Reads names of entries from its standard input, and writes one line of JSON to its standard output
before each layout and after each entry. What the entries print goes to the standard error.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
from typing import Any

import torch

from . import entries
from .sweep import Failure, Plan, Result, sweep_entry


def main(plan: Plan, num_threads: int) -> None:
    """Serves names until the input ends.

    Args:
        plan: What is tried of every entry.
        num_threads: The threads of PyTorch's kernels.
    """
    faulthandler.enable()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")

    torch.set_num_threads(num_threads)
    entries.database()
    reply(ready=True)
    for line in sys.stdin:
        name = line.strip()
        try:
            result = sweep_entry(
                name, plan, lambda where, so_far: reply(at=where, so_far=_plain(so_far))
            )
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
            result = Result(name, failures=[Failure("raised", "the harness", "", text)])
        reply(result=_plain(result))


def _plain(result: Result) -> dict[str, Any]:
    return dataclasses.asdict(result)


if __name__ == "__main__":
    main(Plan.from_json(sys.argv[1]), int(sys.argv[2]))
