"""Sharding rules, a family of operations a file.

Takes an operation with the specs of its arguments; gives a `Sharding`. Importing this package
registers every rule.
"""

from . import (
    attention,
    creation,
    indexing,
    linalg,
    matmul,
    normalization,
    pointwise,
    reduction,
    scattering,
    view,
)
from .sharding import Meta, OpCall, Sharding, Strategy, replicated, rule_of, sizes_by_name

__all__ = [
    "Meta",
    "OpCall",
    "Sharding",
    "Strategy",
    "attention",
    "creation",
    "indexing",
    "linalg",
    "matmul",
    "normalization",
    "pointwise",
    "reduction",
    "replicated",
    "rule_of",
    "scattering",
    "sizes_by_name",
    "view",
]
