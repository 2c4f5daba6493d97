"""Which executor runs programs: the native one, or the portable one where it cannot be built.

The environment variable ``DTORCH_EXECUTOR`` chooses: ``native`` (an error where it cannot be
built) or ``python``. Gives `Shards`, `Executable` and the functions of the chosen executor.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ..errors import DTorchError
from .native.build import BuildError, load

VARIABLE = "DTORCH_EXECUTOR"


def _chosen() -> str:
    wanted = os.environ.get(VARIABLE) or None
    if wanted not in (None, "native", "python"):
        raise DTorchError(f"{VARIABLE}={wanted!r}: expected 'native' or 'python'.")
    if wanted == "python":
        return "python"
    try:
        load()
    except BuildError as error:
        if wanted == "native":
            raise DTorchError(f"{VARIABLE}=native, but {error}.") from error
        print(
            f"dtorch: using the Python executor, which is slower: {error}. "
            f"({VARIABLE}=python silences this.)",
            file=sys.stderr,
        )
        return "python"
    return "native"


EXECUTOR = _chosen()
"""``"native"`` or ``"python"``."""

NATIVE: Any = None
"""The C++ module of the native executor, or None."""

if TYPE_CHECKING or EXECUTOR == "python":
    from .executor import Executable
    from .shards import Shards
    from .timeline import begin as begin_recording
    from .timeline import end as end_recording
    from .worker import (
        check_not_on_worker,
        empty_host_cache,
        host_cache,
        mark,
        stop,
        submit,
        used_devices,
    )
else:
    from .native.executor import (
        NATIVE,
        Executable,
        Shards,
        begin_recording,
        check_not_on_worker,
        empty_host_cache,
        end_recording,
        host_cache,
        mark,
        stop,
        submit,
        used_devices,
    )

__all__ = [
    "EXECUTOR",
    "NATIVE",
    "Executable",
    "Shards",
    "begin_recording",
    "check_not_on_worker",
    "empty_host_cache",
    "end_recording",
    "host_cache",
    "mark",
    "stop",
    "submit",
    "used_devices",
]
