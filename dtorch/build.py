"""``python -m dtorch.build``: builds the native executor ahead of its first use.

Ends with status 1 and one line where it cannot be built; dtorch then runs with the portable one.
"""

from __future__ import annotations

import sys

from .runtime.native.build import BuildError, load


def main() -> int:
    """Builds the executor; returns the exit status."""
    try:
        module = load(again=True)
    except BuildError as error:
        print(f"dtorch: {error}", file=sys.stderr)
        return 1
    print(f"dtorch: the native executor is {module.__file__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
