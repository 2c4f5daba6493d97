"""The exception types of dtorch, and how shapes and layouts are printed in their messages.

Every message says what happened, shows the actual values, and ends with what to do.
"""

from __future__ import annotations


class DTorchError(Exception):
    """Base of every error that dtorch raises on its own account."""


class MeshError(DTorchError, ValueError):
    """A device mesh is malformed, unavailable here, or two meshes do not fit together."""


class PlacementError(DTorchError, ValueError):
    """A placement does not fit its mesh, its tensor, or the operation that it is given to."""


class CheckpointError(DTorchError, ValueError):
    """A checkpoint does not hold what the tree that it is to fill has."""


class TraceError(DTorchError, RuntimeError):
    """A function cannot be traced into a program (leaked value, unknown argument, ...)."""


class DataDependentError(TraceError):
    """A traced function asked for the value of a tensor, which only exists at run time."""


class MutationError(DTorchError, RuntimeError):
    """An in-place call would have to change a tensor that dtorch cannot reach through it."""


class DonatedError(DTorchError, RuntimeError):
    """A tensor that was donated to a jitted call is used again."""


class WorkerError(DTorchError, RuntimeError):
    """An instruction failed on a device; raised where a value that depends on it is fetched.

    The exception of the kernel itself is the `__cause__`.
    """


class CollectiveError(DTorchError, RuntimeError):
    """Devices that run a function of `shard_map` do not all take part in the same collective."""


class ShutdownError(DTorchError, RuntimeError):
    """The workers were stopped (at interpreter exit) before the value was computed."""
