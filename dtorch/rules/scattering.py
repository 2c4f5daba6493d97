"""Writing parts of a tensor: scatters, index_copy, index_put.

Every device must see all writes to its elements in the order that one device would. Where a dim is
split that is written along, what is written is whole on every device, and each writes what falls
into its own range; an index outside the whole dim still raises, on every device. The dims of
`scatter` and of a diagonal must be whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..lowering import LocalContext, PerDevice
from ..mesh import DeviceMesh
from ..program import Ref
from .sharding import Dims, OpCall, Sharding, dim_names, replicated, rule

aten = torch.ops.aten


@rule(aten.index_copy, aten.index_add, aten.index_fill, aten.index_reduce)
def index_copy(call: OpCall) -> Sharding:
    """``a d b, i, a 1 b -> a d b``: slices along one dim are replaced, combined or filled."""
    ndim = call.tensors[0].ndim
    if ndim == 0 or call.tensors[1].ndim > 1:
        return replicated(call)
    names = dim_names(call.tensors[0].shape)
    at = call["dim"] % ndim
    source = (*names[:at], None, *names[at + 1 :])
    rest = tuple(source if t.ndim == ndim else (None,) * t.ndim for t in call.tensors[2:])
    index = (None,) * call.tensors[1].ndim
    localize = _COPIES.get(call.op.overloadpacket) if index else None
    whole = _only(names[at]) if localize is None else frozenset()
    return Sharding((names, index, *rest), (names,), whole=whole, localize=localize)


@rule(aten.select_scatter)
def select_scatter(call: OpCall) -> Sharding:
    """``a d b, a b -> a d b``: one index of a dim is replaced."""
    names = dim_names(call.tensors[0].shape)
    at = call["dim"] % len(names)
    part = (*names[:at], *names[at + 1 :])
    return Sharding((names, part), (names,), linear=_together(call), localize=_select_locally)


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
    """``a d b, a 1 b -> a d b``: a range of a dim is replaced."""
    target, source = call.tensors
    names = dim_names(target.shape)
    at = call["dim"] % len(names)
    if source.shape == target.shape:
        return Sharding((names, names), (names,), whole=_only(names[at]), linear=_together(call))
    part = (*names[:at], None, *names[at + 1 :])
    return Sharding((names, part), (names,), linear=_together(call), localize=_slice_locally)


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
    """Index tensors say what is written; they are whole, and what is written along their dims."""
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
    dropped = tuple((None,) * indices[d].ndim for d in given)
    return Sharding((names, *dropped, values), (names,), localize=_put_locally)


def _together(call: OpCall) -> tuple[frozenset[int], ...]:
    alike = call.tensors[0].dtype == call.tensors[1].dtype
    return (frozenset({0, 1}),) if alike else ()


def _only(name: str | None) -> frozenset[str]:
    return frozenset() if name is None else frozenset({name})


# -- what a device runs ------------------------------------------------------------------------


class _Part:
    """The devices that have something of the dims that are written along, and their ranges.

    Devices that have nothing of them pass their empty shard on.
    """

    def __init__(self, context: LocalContext, target: Ref, split: Sequence[int]) -> None:
        self.context = context
        spec = context.spec(target)
        self._size = spec.shape
        self._boxes = spec.boxes
        self._split = split
        filled = [all(b[d][0] < b[d][1] for d in split) for b in spec.boxes]
        self._devices = [i for i, is_filled in enumerate(filled) if is_filled]
        self._mesh = self._mesh_of(self._devices)
        empty = [i for i, is_filled in enumerate(filled) if not is_filled]
        if empty:
            mesh = self._mesh_of(empty)
            context.emit(aten.alias.default, target, outputs=context.outputs, mesh=mesh)

    @classmethod
    def of(cls, context: LocalContext, target: Ref, dims: Sequence[int]) -> _Part | None:
        """Returns what is needed to write along some dims, or None where all are whole."""
        spec = context.spec(target)
        split = [d for d in dims if any(b[d] != (0, spec.shape[d]) for b in spec.boxes)]
        return cls(context, target, split) if split else None

    def _mesh_of(self, devices: Sequence[int]) -> DeviceMesh:
        mesh = self.context.mesh
        if len(devices) == len(mesh.devices):
            return mesh
        return DeviceMesh(mesh.device_type, [mesh.devices[i].id for i in devices])

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> Ref:
        return self.context.emit(op, *args, mesh=self._mesh, **kwargs)

    def table(self, dim: int, value: Callable[[int, int], Any]) -> Any:
        """A value that follows from where the range of a device begins and ends."""
        values = [value(*self._boxes[i][dim]) for i in self._devices]
        return values[0] if all(v == values[0] for v in values) else PerDevice(values)

    def own(self, indices: Mapping[int, Ref], wraps: bool) -> tuple[Ref, dict[int, Ref]]:
        """Returns which elements a device writes, and its own indices: 0 for those it does not.

        An index outside the whole dim is every device's, and outside its range.

        Args:
            indices: The indices along each dim, all of one shape.
            wraps: Whether negative indices count from the end.
        """
        elsewhere: Ref | None = None
        local = dict(indices)
        for dim in self._split:
            index, size = indices[dim], self._size[dim]
            if wraps:
                index = self._wrapped(index, size)
            start, stop = self.table(dim, lambda a, _: a), self.table(dim, lambda _, b: b)
            before, after = self._between(index, 0, start), self._between(index, stop, size)
            found = self.emit(aten.logical_or.default, before, after)
            either = (elsewhere, found)
            elsewhere = found if elsewhere is None else self.emit(aten.logical_or.default, *either)
            local[dim] = self.emit(aten.sub.Tensor, index, start)
        assert elsewhere is not None
        for dim in self._split:
            local[dim] = self.emit(aten.masked_fill.Scalar, local[dim], elsewhere, 0)
        return self.emit(aten.logical_not.default, elsewhere), local

    def _between(self, index: Ref, low: Any, high: Any) -> Ref:
        above = self.emit(aten.ge.Scalar, index, low)
        return self.emit(aten.logical_and.default, above, self.emit(aten.lt.Scalar, index, high))

    def _wrapped(self, index: Ref, size: int) -> Ref:
        moved = self.emit(aten.add.Scalar, index, size)
        negative = self.emit(aten.lt.Scalar, index, 0)
        index = self.emit(aten.where.self, negative, moved, index)
        below = self.emit(aten.lt.Scalar, index, 0)
        return self.emit(aten.masked_fill.Scalar, index, below, size)

    def order(self, own: Ref, count: int) -> Ref | None:
        """Returns which of `count` elements to write in the place of each.

        That is the last one of the device in place of those that are not its: written again, it
        changes nothing. A device with none gets the first. None for all in their own place.
        """
        if count == 1:
            return None
        options = {"dtype": torch.int64, "device": self.context.mesh.torch_device()}
        places = self.emit(aten.arange.default, count, **options)
        last = self.emit(aten.amax.default, self.emit(aten.mul.Tensor, places, own), [0], True)
        return self.emit(aten.where.self, own, places, last)

    def taken(self, tensor: Ref, dim: int, order: Ref | None) -> Ref:
        """Returns elements in the order of `order`."""
        return tensor if order is None else self.emit(aten.index_select.default, tensor, dim, order)

    def along(self, flags: Ref, dim: int, ndim: int) -> Ref:
        """Returns a vector as one that broadcasts along a dim of a tensor."""
        shape = [-1 if d == dim else 1 for d in range(ndim)]
        return self.emit(aten.reshape.default, flags, shape)


def _copy_locally(context: LocalContext) -> None:
    """Of `index_copy` and `index_fill`: where nothing is a device's own, it writes what it has."""
    target, index = context.argument("self"), context.argument("index")
    ndim, (count,) = context.spec(target).ndim, context.spec(index).shape
    dim = context.argument("dim") % ndim
    part = _Part.of(context, target, [dim]) if count else None
    if part is None:
        return context.emit_default()
    is_copy = context.op.overloadpacket is aten.index_copy
    own, local = part.own({dim: index}, wraps=not is_copy)
    order = part.order(own, count)
    own, at = part.taken(own, 0, order), part.taken(local[dim], 0, order)
    old, is_own = part.emit(aten.index_select.default, target, dim, at), part.along(own, dim, ndim)
    if is_copy:
        source = part.taken(context.argument("source"), dim, order)
        new = part.emit(aten.where.self, is_own, source, old)
    else:
        value = context.argument("value")
        fill = aten.masked_fill.Tensor if type(value) is Ref else aten.masked_fill.Scalar
        new = part.emit(fill, old, is_own, value)
    part.emit(aten.index_copy.default, target, dim, at, new, outputs=context.outputs)


def _add_locally(context: LocalContext) -> None:
    """Of `index_add`: what is not a device's own is added as nothing."""
    target, index, source = (context.argument(n) for n in ("self", "index", "source"))
    dim = context.argument("dim") % context.spec(target).ndim
    part = _Part.of(context, target, [dim])
    if part is None:
        return context.emit_default()
    own, local = part.own({dim: index}, wraps=False)
    elsewhere = part.along(part.emit(aten.logical_not.default, own), dim, context.spec(source).ndim)
    added = part.emit(aten.masked_fill.Scalar, source, elsewhere, 0)
    options = {"alpha": context.argument("alpha"), "outputs": context.outputs}
    options = {k: v for k, v in options.items() if v is not None}
    part.emit(aten.index_add.default, target, dim, local[dim], added, **options)


_COPIES = {
    aten.index_copy: _copy_locally,
    aten.index_fill: _copy_locally,
    aten.index_add: _add_locally,
}


def _put_locally(context: LocalContext) -> None:
    """Of `index_put`: as the other two, with the elements of all index tensors in one dim."""
    target, given = context.argument("self"), context.argument("indices")
    indices = {d: i for d, i in enumerate(given) if i is not None}
    shape = torch.broadcast_shapes(*(context.spec(i).shape for i in indices.values()))
    count = math.prod(shape)
    part = _Part.of(context, target, list(indices)) if count else None
    if part is None:
        return context.emit_default()
    flat = {
        d: part.emit(aten.reshape.default, part.emit(aten.expand.default, i, list(shape)), [-1])
        for d, i in indices.items()
    }
    dims = list(indices)
    at = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    num_after = context.spec(target).ndim - len(dims) - at
    values = _in_one_dim(part, context.argument("values"), shape, at, num_after)
    ndim = at + 1 + num_after
    own, local = part.own(flat, wraps=True)
    accumulates = bool(context.argument("accumulate"))
    order = None if accumulates else part.order(own, count)
    own = part.along(part.taken(own, 0, order), at, ndim)
    where = [local.get(d) for d in range(len(given))]
    where = [None if i is None else part.taken(i, 0, order) for i in where]
    if accumulates:
        other = part.emit(aten.logical_not.default, own)
        values = part.emit(aten.masked_fill.Scalar, values, other, 0)
    else:
        old = part.emit(aten.index.Tensor, target, where)
        values = part.emit(aten.where.self, own, part.taken(values, at, order), old)
    part.emit(aten.index_put.default, target, where, values, accumulates, outputs=context.outputs)


def _in_one_dim(part: _Part, values: Ref, shape: Sequence[int], at: int, num_after: int) -> Ref:
    """Returns values with what belongs to the dims of the index tensors in dim `at`."""
    ndim = part.context.spec(values).ndim
    for _ in range(at + len(shape) + num_after - ndim):
        values = part.emit(aten.unsqueeze.default, values, 0)
    sizes = [*(-1,) * at, *shape, *(-1,) * num_after]
    values = part.emit(aten.expand.default, values, sizes)
    if not shape:
        return part.emit(aten.unsqueeze.default, values, at)
    return part.emit(aten.flatten.using_ints, values, at, at + len(shape) - 1)


def _slice_locally(context: LocalContext) -> None:
    target, dim = context.spec(context.argument("self")), context.argument("dim") or 0
    dim, step = dim % target.ndim, context.argument("step") or 1
    start, _, _ = slice(context.argument("start"), None).indices(target.shape[dim])
    _write_range(context, dim, start, step)


def _select_locally(context: LocalContext) -> None:
    target = context.spec(context.argument("self"))
    dim = context.argument("dim") % target.ndim
    _write_range(context, dim, context.argument("index") % target.shape[dim], 1)


def _write_range(context: LocalContext, dim: int, start: int, step: int) -> None:
    """Writes what of the source falls into a device's own range of a dim, from `start` on."""
    target, source = context.argument("self"), context.argument("src")
    part = _Part.of(context, target, [dim])
    if part is None:
        return context.emit_default()
    if context.spec(source).ndim < context.spec(target).ndim:
        length, source = 1, part.emit(aten.unsqueeze.default, source, dim)
    else:
        length = context.spec(source).shape[dim]

    def numbers(low: int, high: int) -> tuple[int, int]:
        first = min(max(-(-(low - start) // step), 0), length)
        return first, min(max(-(-(high - start) // step), first), length)

    def place(low: int, high: int) -> tuple[int, int]:
        first, stop = numbers(low, high)
        at = start + first * step - low
        return (at, at + (stop - first - 1) * step + 1) if first < stop else (0, 0)

    first = part.table(dim, lambda *box: numbers(*box)[0])
    count = part.table(dim, lambda *box: numbers(*box)[1] - numbers(*box)[0])
    written = part.emit(aten.narrow.default, source, dim, first, count)
    bounds = part.table(dim, lambda *box: place(*box)[0]), part.table(dim, lambda *b: place(*b)[1])
    part.emit(
        aten.slice_scatter.default, target, written, dim, *bounds, step, outputs=context.outputs
    )
