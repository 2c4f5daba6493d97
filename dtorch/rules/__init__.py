"""Sharding rules, a family of operations a file.

Takes an operation with the specs of its arguments; gives a `Sharding`. Importing this package
registers every rule.
"""

from . import (
    attention,
    convolution,
    creation,
    experts,
    grouped,
    indexing,
    linalg,
    local,
    losses,
    matmul,
    normalization,
    pointwise,
    pooling,
    recurrent,
    reduction,
    ring,
    scattering,
    spectral,
    view,
)
from .sharding import Meta, OpCall, Sharding, Strategy, replicated, rule_of, sizes_by_name

__all__ = [
    "Meta",
    "OpCall",
    "Sharding",
    "Strategy",
    "attention",
    "convolution",
    "creation",
    "experts",
    "grouped",
    "indexing",
    "linalg",
    "local",
    "losses",
    "matmul",
    "normalization",
    "pointwise",
    "pooling",
    "recurrent",
    "reduction",
    "replicated",
    "ring",
    "rule_of",
    "scattering",
    "sizes_by_name",
    "spectral",
    "view",
]
