"""Parallelism beside the model: annotations of parameter trees, loading, pipelines."""

from .huggingface import plan_from_huggingface, stages_from_huggingface
from .loading import Joined, load
from .pipeline import Pipeline, pipeline
from .plan import ColumnParallel, RowParallel, constrain, gathered, shard
from .schedules import assign_layers_to_stages

__all__ = [
    "ColumnParallel",
    "Joined",
    "Pipeline",
    "RowParallel",
    "assign_layers_to_stages",
    "constrain",
    "gathered",
    "load",
    "pipeline",
    "plan_from_huggingface",
    "shard",
    "stages_from_huggingface",
]
