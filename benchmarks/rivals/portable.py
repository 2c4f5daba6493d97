"""dtorch itself on its Python executor."""

import sys
from typing import Any

import dtorch

from ..timing import Run, looped
from .server import serve


def add(elements: int, operations: int) -> Run:
    assert dtorch.runtime.EXECUTOR == "python"
    x, y = dtorch.zeros(elements), dtorch.ones(elements)

    def chain() -> object:
        z = x
        for _ in range(operations):
            z = z + y
        return z.to_torch()

    return looped(chain, operations)


def build(name: str, options: dict[str, Any]) -> Run:
    return {"add": add}[name](**options)


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    serve(build)
