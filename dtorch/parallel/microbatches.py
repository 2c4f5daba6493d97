"""Microbatches: the parts of a batch, and the batch's output from theirs.

The batch is dim 0 of every tensor of a call. Takes the arguments of a call and gives those of each
microbatch, with its share of the batch, by which what is averaged counts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch

from ..tree import argument_path, flatten, unflatten

__all__ = ["Part", "joined", "parts_of", "total"]


class Part(NamedTuple):
    """A microbatch: its share of the batch, its size, and the arguments of the model."""

    weight: float
    size: int
    arguments: tuple[Any, ...]


def parts_of(tree: Any, count: int) -> list[Part]:
    """Returns the microbatches of the arguments of a call, at most `count`, as `torch.chunk`."""
    leaves, treespec = flatten(tree)
    leaves = [torch.from_numpy(x) if isinstance(x, numpy.ndarray) else x for x in leaves]
    size = _batch_size(tree, leaves, count)
    chunks = [leaf.chunk(count) if _is_split(leaf) else None for leaf in leaves]
    pairs = list(zip(leaves, chunks, strict=True))
    sizes = [len(t) for t in next(c for c in chunks if c is not None)]
    return [
        Part(n / size, n, unflatten(treespec, [leaf if c is None else c[i] for leaf, c in pairs]))
        for i, n in enumerate(sizes)
    ]


def _is_split(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0


def _batch_size(tree: Any, leaves: Sequence[Any], count: int) -> int:
    sizes = {i: len(leaf) for i, leaf in enumerate(leaves) if _is_split(leaf)}
    if len(set(sizes.values())) != 1:
        names = ("args", "kwargs", "target")
        lines = [f"\n  {argument_path(names, tree, i)}: {list(leaves[i].shape)}" for i in sizes]
        raise ValueError(
            "the batch of a pipeline is dim 0 of its tensors, but "
            + (f"they differ in it:{''.join(lines)}" if lines else "it is given none with dims.")
            + "\n  Fix: what is not split belongs in the parameters, or is captured."
        )
    size = next(iter(sizes.values()))
    if size < count:
        raise ValueError(
            f"num_microbatches={count} is more than the batch of {size}.\n"
            "  Fix: take a larger batch" + (f", or at most {size} microbatches." if size else ".")
        )
    return size


def joined(outputs: Sequence[Any], parts: Sequence[Part]) -> Any:
    """The outputs of the microbatches as that of the batch."""
    flat = [flatten(output) for output in outputs]
    leaves, treespecs = zip(*flat, strict=True)
    if any(t != treespecs[0] for t in treespecs):
        raise ValueError(
            f"the microbatches return different structures: {treespecs[0]} and "
            f"{next(t for t in treespecs if t != treespecs[0])}."
        )
    return unflatten(treespecs[0], [_joined_leaf(t, parts) for t in zip(*leaves, strict=True)])


def _joined_leaf(leaves: Sequence[Any], parts: Sequence[Part]) -> Any:
    first = leaves[0]
    if not isinstance(first, torch.Tensor):
        return first
    if first.ndim == 0 and (first.is_floating_point() or first.is_complex()):
        return total([leaf * part.weight for leaf, part in zip(leaves, parts, strict=True)])
    if first.ndim == 0 or len(first) % parts[0].size:
        raise ValueError(
            f"a pipeline cannot join an output of dtype {first.dtype} and shape "
            f"{list(first.shape)} of microbatches of {parts[0].size}: dim 0 must be the batch.\n"
            "  Fix: return tensors of which dim 0 is the batch, or floating-point means."
        )
    return torch.cat(list(leaves))


def total(values: Sequence[Any]) -> Any:
    """Returns the sum of some tensors."""
    return functools.reduce(torch.add, values)
