"""Parallelism beside the model: annotations of parameter trees, loading, constraints."""

from .plan import ColumnParallel, RowParallel, constrain, load, shard

__all__ = ["ColumnParallel", "RowParallel", "constrain", "load", "shard"]
