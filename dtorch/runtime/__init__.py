"""The only code that knows threads: workers, collectives, futures and the executors.

Takes local programs and shards; a worker thread per device runs the programs in the order of
submission and stores the results into the shards of the outputs.
"""

from .backend import (
    EXECUTOR,
    NATIVE,
    Executable,
    Shards,
    begin_recording,
    check_not_on_worker,
    empty_host_cache,
    end_recording,
    host_cache,
    stop,
    submit,
    used_devices,
)
from .failures import Failure
from .future import TensorFuture
from .health import health, restart, synchronize
from .shards import Borrowed, values_of

__all__ = [
    "EXECUTOR",
    "NATIVE",
    "Borrowed",
    "Executable",
    "Failure",
    "Shards",
    "TensorFuture",
    "begin_recording",
    "check_not_on_worker",
    "empty_host_cache",
    "end_recording",
    "health",
    "host_cache",
    "restart",
    "stop",
    "submit",
    "synchronize",
    "used_devices",
    "values_of",
]
