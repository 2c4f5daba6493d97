"""Parallelism beside the model: annotations of parameter trees, loading, constraints."""

from .huggingface import plan_from_huggingface, stages_from_huggingface
from .loading import Joined, load
from .plan import ColumnParallel, RowParallel, constrain, shard

__all__ = [
    "ColumnParallel",
    "Joined",
    "RowParallel",
    "constrain",
    "load",
    "plan_from_huggingface",
    "shard",
    "stages_from_huggingface",
]
