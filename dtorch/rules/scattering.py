"""Writing parts of a tensor: scatters, index_copy, index_put.

The dims that are written along must be whole, so that every device sees all writes to its
elements in the order that one device would; the other dims stay sharded.
"""

from __future__ import annotations

import torch

from .sharding import Dims, OpCall, Sharding, dim_names, replicated, rule

aten = torch.ops.aten


@rule(aten.index_copy, aten.index_add, aten.index_fill, aten.index_reduce)
def index_copy(call: OpCall) -> Sharding:
    """``a d! b, i, a 1 b -> a d! b``: slices along one dim are replaced, combined or filled."""
    ndim = call.tensors[0].ndim
    if ndim == 0 or call.tensors[1].ndim > 1:
        return replicated(call)
    names = dim_names(call.tensors[0].shape)
    at = call["dim"] % ndim
    source = (*names[:at], None, *names[at + 1 :])
    rest = tuple(source if t.ndim == ndim else (None,) * t.ndim for t in call.tensors[2:])
    index = (None,) * call.tensors[1].ndim
    return Sharding((names, index, *rest), (names,), whole=_only(names[at]))


@rule(aten.select_scatter)
def select_scatter(call: OpCall) -> Sharding:
    """``a d! b, a b -> a d! b``: one index of a dim is replaced."""
    names = dim_names(call.tensors[0].shape)
    at = call["dim"] % len(names)
    part = (*names[:at], *names[at + 1 :])
    return Sharding((names, part), (names,), whole=_only(names[at]), linear=_together(call))


@rule(aten.diagonal_scatter)
def diagonal_scatter(call: OpCall) -> Sharding:
    """The diagonal of two dims, which must be whole, is replaced."""
    names = dim_names(call.tensors[0].shape)
    a, b = call["dim1"] % len(names), call["dim2"] % len(names)
    part = (*(n for d, n in enumerate(names) if d not in (a, b)), None)
    whole = frozenset(n for d, n in enumerate(names) if d in (a, b) and n)
    return Sharding((names, part), (names,), whole=whole, linear=_together(call))


@rule(aten.slice_scatter)
def slice_scatter(call: OpCall) -> Sharding:
    """``a d! b, a 1 b -> a d! b``: a range of a dim is replaced."""
    names = dim_names(call.tensors[0].shape)
    at = call["dim"] % len(names)
    part = (*names[:at], None, *names[at + 1 :])
    return Sharding((names, part), (names,), whole=_only(names[at]), linear=_together(call))


@rule(aten.scatter, aten.scatter_add, aten.scatter_reduce)
def scatter(call: OpCall) -> Sharding:
    """Elements along one dim are written; other dims split where all sizes agree."""
    shapes = [t.shape for t in call.tensors]
    if not shapes[0] or any(len(s) != len(shapes[0]) for s in shapes):
        return replicated(call)
    at = call["dim"] % len(shapes[0])
    names = tuple(
        n if d != at and len({s[d] for s in shapes}) == 1 else None
        for d, n in enumerate(dim_names(shapes[0]))
    )
    return Sharding((names,) * len(shapes), (names,))


@rule(aten.index_put)
def index_put(call: OpCall) -> Sharding:
    """Index tensors say what is written; the dims that they index must be whole."""
    indices, shape = call["indices"], call.tensors[0].shape
    given = [d for d, i in enumerate(indices) if i is not None]
    if any(indices[d].dtype in (torch.bool, torch.uint8) for d in given):
        return replicated(call)
    names = dim_names(shape)
    broadcast = torch.broadcast_shapes(*(indices[d].shape for d in given))
    adjacent = given == list(range(given[0], given[-1] + 1))
    before = given[0] if adjacent else 0
    kept = [n for d, n in enumerate(names) if d not in given]
    sizes = [s for d, s in enumerate(shape) if d not in given]
    written = (*kept[:before], *(None,) * len(broadcast), *kept[before:])
    full = (*sizes[:before], *broadcast, *sizes[before:])
    offset = len(written) - call["values"].ndim
    values: Dims = tuple(
        written[d + offset] if size == full[d + offset] else None
        for d, size in enumerate(call["values"].shape)
    )
    whole = frozenset(n for d in given if (n := names[d]))
    dropped = tuple((None,) * indices[d].ndim for d in given)
    return Sharding((names, *dropped, values), (names,), whole=whole)


def _together(call: OpCall) -> tuple[frozenset[int], ...]:
    alike = call.tensors[0].dtype == call.tensors[1].dtype
    return (frozenset({0, 1}),) if alike else ()


def _only(name: str | None) -> frozenset[str]:
    return frozenset() if name is None else frozenset({name})
