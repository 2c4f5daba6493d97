"""The only code that knows threads: workers, collectives, futures and the executor.

Takes local programs and handles; a worker thread per device runs the programs in the order of
submission and stores the results into handles.
"""

from .collectives import Exchange
from .executor import Call, Executable
from .future import Failure, Handle, TensorFuture
from .worker import submit, synchronize

__all__ = [
    "Call",
    "Exchange",
    "Executable",
    "Failure",
    "Handle",
    "TensorFuture",
    "submit",
    "synchronize",
]
