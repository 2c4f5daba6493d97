"""Sharded forms: an operation on pieces of a dim that its kernel needs whole.

A kernel of softmax sees whole rows, so a rule lets no row be split. Where one is split, its
device could be given all of it; but a maximum and a sum over the row are all that a device needs
to know of the others. A form is such a program: the same value, in operations that each keep the
layout of their large arguments and communicate only what is small. The tracer takes it where the
operation itself would have to move the shards of an argument; where nothing is split, as on one
device, the kernel runs.

A layer of experts is a form where anything is split: what it communicates is asked for, so it is
taken in `strict` mode too.

A form is ordinary torch code, called with the operation's arguments. It returns NotImplemented for
what it cannot do. Half precision is computed in float32 and rounded once, as the kernels do.
"""

from . import attention, experts, losses, movement, normalization, reduction, scan, softmax, windows
from .registry import is_always_taken, is_asked_for, sharded_form

__all__ = [
    "attention",
    "experts",
    "is_always_taken",
    "is_asked_for",
    "losses",
    "movement",
    "normalization",
    "reduction",
    "scan",
    "sharded_form",
    "softmax",
    "windows",
]
