"""Attention over a split sequence: Ulysses, ring, and keys that are split alone.

Where queries, keys and values are split over the sequence, the name of the mesh axis says how they
meet. *Ulysses* ("ulysses_cp") exchanges: each device gets the whole sequence for some of the heads
and gives back its piece of the result. A *ring* ("ring_cp") passes the keys and values from device
to device while each attends with its own queries to what it has, and merges the results by their
log-sum-exp; no device ever holds all keys. Under a causal mask the devices with the end of the
sequence have the most to do; over an axis "zigzag_cp" the ring works on an order in which each
device has a part of the beginning and one of the end, so that all finish together. An axis of any
other name takes what moves fewer bytes, and the ring where the heads do not divide. Several axes
combine: those of the ring are one ring, within which the heads are exchanged.

Where only the keys are split (the cache of a decoder), each device attends to its own, and the
results are merged.

Sources: DeepSpeed-Ulysses (arXiv:2309.14509), Ring Attention (arXiv:2310.01889).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ..attention_kernels import KERNELS, Kernel, Whole
from ..custom_ops import attend_block, attend_block_backward
from ..placement import Placement, Replicate, Shard
from ..redistribution import Movement, Segment
from .movement import permuted
from .registry import form

aten = torch.ops.aten
_ULYSSES = ("ulysses_cp", "ulysess_cp")
_ZIGZAG = "zigzag_cp"
_RINGS = ("ring_cp", _ZIGZAG)


def _split_axes(x: Any) -> set[int]:
    """The axes of more than one device that split the sequence."""
    placed = enumerate(zip(x.device_mesh.shape, x.placements, strict=True))
    return {a for a, (n, p) in placed if n > 1 and p.is_shard(2)}


def _with(x: Any, axes: Collection[int], placement: Placement) -> Any:
    """Returns a tensor, reduced if it is partial, with another placement on some axes."""
    kept = (Replicate() if p.is_partial() else p for p in x.placements)
    return x.redistribute(placements=[placement if a in axes else p for a, p in enumerate(kept)])


def _num_pieces(x: Any, axes: Collection[int]) -> int:
    return math.prod(x.device_mesh.shape[a] for a in axes)


def _is_named(query: Any, key: Any, value: Any, *_: Any) -> bool:
    """Whether the names of the axes ask for all that is communicated."""
    axes, heads = _split_axes(query), _head_axes(query)
    names = query.device_mesh.mesh_dim_names
    if not axes or names is None or any(p.is_partial() for p in query.placements):
        return False
    if not query.placements == key.placements == value.placements:
        return False
    exchanged = _ulysses_axes(query, key, axes)
    asked = all(names[a] in (_ULYSSES if a in exchanged else _RINGS) for a in axes)
    return asked and _heads_divide(query, key, heads | exchanged)


def _is_named_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any) -> bool:
    return grad.placements == query.placements and _is_named(query, key, value)


def _attention(kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    """The form of a kernel."""
    given = _named(kernel.forward_op, args, kwargs)
    if given["dropout_p"] or _begins_elsewhere(kernel, given):
        return NotImplemented
    query, key, value = (given[name] for name in ("query", "key", "value"))
    is_causal, scale, mask = given["is_causal"], given["scale"], _mask_of(given)
    axes = _split_axes(query) | _split_axes(key) | _split_axes(value)
    if not axes:
        query, keys, values = _with_heads_alike(query, key, value)
        if keys.shape == key.shape:
            return NotImplemented
        whole = Whole.of(query, keys)
        out, sums = kernel.forward(whole, (query, keys, values), mask, is_causal, scale)
        return kernel.results(whole, out, sums, given)
    if not _split_axes(query) and (not is_causal or query.shape[2] < _num_pieces(query, axes)):
        if is_causal and not kernel.takes_mask:
            return NotImplemented
        found = _over_split_keys(kernel, query, key, value, is_causal, mask, scale)
        if found is None:
            return NotImplemented
        return kernel.results(Whole.of(query, key), *found, given)
    query, key, value = (_with(t, axes, Shard(2)) for t in (query, key, value))
    ulysses = _ulysses_axes(query, key, axes)
    query, key, value = _with_heads_alike(query, key, value, ulysses)
    whole = Whole.of(query, key)
    if ulysses:
        exchanged = tuple(_with(t, ulysses, Shard(1)) for t in (query, key, value))
        results = kernel.forward(whole, exchanged, mask, is_causal, scale)
        out, sums = (_with(t, ulysses, Shard(2)) for t in results)
        return kernel.results(whole, out, sums, given)
    ring = _ring_of(kernel, query, key, mask, is_causal, scale)
    if ring.is_too_fine:
        return NotImplemented
    query, mask, level = _leveled(query, _narrowest(mask))
    keys, values = ring.start(key), ring.start(value)
    query = ring.arranged(query)
    out: Any = None
    sums: Any = None
    for step in range(ring.count):
        now = keys, values
        if step + 1 < ring.count:  # what comes next is under way while this is computed
            keys, values = ring.passed_on(keys), ring.passed_on(values)
        out, sums = attend_block(query, *now, mask, out, sums, ring.count, step, *ring.options)
    out, sums = ring.restored(out), ring.restored(sums)
    out, sums = _finished(out, sums, query.dtype, level)
    return kernel.results(whole, out, sums, given)


def _attention_backward(kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    """The form of a kernel's gradients."""
    given = _named(kernel.backward_op, args, kwargs)
    if given["dropout_p"] or _begins_elsewhere(kernel, given):
        return NotImplemented
    if given.get("grad_input_mask", [False])[-1]:  # that of the mask
        return NotImplemented
    grad, query, key, value = args[:4]
    out, kept = given["out"], given["logsumexp"]
    is_causal, scale, mask = given["is_causal"], given["scale"], _mask_of(given)
    heads = key.shape[1]
    axes = _split_axes(query) | _split_axes(key) | _split_axes(value) | _split_axes(grad)
    sums = kernel.sums_of(Whole.of(query, key), kept)
    grad, query, key, value, out, sums = (
        _with(t, axes, Shard(2)) for t in (grad, query, key, value, out, sums)
    )
    ulysses = _ulysses_axes(query, key, axes)
    query, keys, values = _with_heads_alike(query, key, value, ulysses)
    if not axes and keys.shape == key.shape:
        return NotImplemented
    if ulysses or not axes:
        exchanged = (_with(t, ulysses, Shard(1)) for t in (grad, query, keys, values, out, sums))
        whole = Whole.of(query, keys)
        results = kernel.backward(whole, tuple(exchanged), mask, is_causal, scale)
        to_query, *to_keys = (_with(t, ulysses, Shard(2)) for t in results)
        return kernel.gradients((to_query, *(_added_up(t, heads) for t in to_keys)))
    ring = _ring_of(kernel, query, key, mask, is_causal, scale)
    if ring.is_too_fine:
        return NotImplemented
    mask, keys, values = _narrowest(mask), ring.start(keys), ring.start(values)
    grad, query, out, sums = map(ring.arranged, (grad, query, out, sums))
    to_query: Any = None
    to_key = to_value = None
    for step in range(ring.count):
        now = keys, values
        if step + 1 < ring.count:
            keys, values = ring.passed_on(keys), ring.passed_on(values)
        operands = (grad, query, *now, mask, out, sums, to_query, to_key, to_value)
        to_query, *to_keys = attend_block_backward(*operands, ring.count, step, *ring.options)
        # The gradients travel with what they belong to, and at last home.
        to_key, to_value = map(ring.passed_on, to_keys)
    to_keys = (_added_up(ring.end(t), heads) for t in (to_key, to_value))
    to_query = ring.restored(to_query).to(query.dtype)
    return kernel.gradients((to_query, *(t.to(key.dtype) for t in to_keys)))


for _kernel in KERNELS.values():
    form(_kernel.forward_op, asked=_is_named)(functools.partial(_attention, _kernel))
    form(_kernel.backward_op, asked=_is_named_backward)(
        functools.partial(_attention_backward, _kernel)
    )


def _named(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults of those that it leaves out."""
    arguments = op._schema.arguments
    defaults = {a.name: a.default_value for a in arguments}
    return defaults | dict(zip((a.name for a in arguments), args, strict=False)) | kwargs


def _begins_elsewhere(kernel: Kernel, given: dict[str, Any]) -> bool:
    """Whether the last query sees all keys, and not the first query the first key alone."""
    sizes = given["query"].shape[2], given["key"].shape[2]
    return given["is_causal"] and not kernel.takes_mask and sizes[0] != sizes[1]


def _mask_of(given: dict[str, Any]) -> Any:
    return given.get("attn_mask", given.get("attn_bias"))


def _over_split_keys(
    kernel: Kernel,
    query: Any,
    key: Any,
    value: Any,
    is_causal: bool,
    mask: Any,
    scale: float | None,
) -> tuple[Tensor, Tensor] | None:
    """Every device attends with all queries to its own keys; the results are merged."""
    axes = _split_axes(key) | _split_axes(value)
    query, key, value = _with_heads_alike(query, *(_with(t, axes, Shard(2)) for t in (key, value)))
    axes, mask, rows = _split_axes(key), _narrowest(mask), query.shape[2]  # heads may take an axis
    keys = _pieces(key, axes)
    queries = (((0, rows),),) * len(keys)
    ring = _Ring(kernel, frozenset(axes), queries, keys, False, key.shape[2], is_causal, scale)
    if ring.is_too_fine:
        return None
    query, mask, level = _leveled(query, mask)
    if mask is not None and mask.shape[2] > 1:
        mask = _for_each_piece(mask, ring)
    operands = (_for_each_piece(query, ring), key, value, mask, None, None)
    out, sums = attend_block(*operands, ring.count, 0, *ring.options)
    out, sums = out.unflatten(2, (ring.count, rows)), sums.unflatten(2, (ring.count, rows))
    largest = sums.amax(2, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (sums - largest).exp()
    total = weights.sum(2)
    out = (out * (weights / total.unsqueeze(2)).unsqueeze(-1)).sum(2)
    if mask is not None or is_causal:
        out = out.masked_fill(total.unsqueeze(-1) == 0, 0.0)
    return _finished(out, total.log() + largest.squeeze(2), query.dtype, level)


def _for_each_piece(x: Any, ring: _Ring) -> Any:
    """Returns the rows of dim 2 once on each device of the ring, as one dim that is split."""
    shape = (*x.shape[:2], ring.count, *x.shape[2:])
    repeated = _with(x.unsqueeze(2).expand(shape), ring.axes, Shard(2))
    flat = [*x.shape[:2], ring.count * x.shape[2], x.shape[3]]
    return aten._reshape_copy.default(repeated, flat)  # which copies nothing on a device


def _leveled(query: Any, mask: Any) -> tuple[Any, Any, Any]:
    """Takes from a mask what is the same for a whole row and would leave no digits for its sum.

    A row that is masked whole by a huge number, as by that of ``torch.finfo(dtype).min``, gets the
    mean of the values, since scores are lost beside that number. Of pieces nothing would tell how
    many keys each has.

    Args:
        query: The queries.
        mask: In four dims, or None.

    Returns:
        The queries, zero in such rows, the mask, and what is missing of it in each row, or None.
    """
    if mask is None:
        return query, None, None
    largest = mask.amax(-1, keepdim=True)
    is_huge = (largest.abs() >= 2.0**12) & largest.isfinite()
    level = torch.where(is_huge, largest, 0.0)
    query = query.masked_fill(level.abs() >= 2.0**26, 0.0)
    return query, mask - level, level.squeeze(-1)


def _finished(out: Any, sums: Any, dtype: torch.dtype, level: Any) -> tuple[Tensor, Tensor]:
    if level is not None:
        sums = sums + level
    # As the kernel has it for a row that sees no key.
    return out.to(dtype), sums.masked_fill(sums == -math.inf, 0.0)


Piece = tuple[tuple[int, int], ...]
"""The ranges of a sequence that one device has: where each starts and its length."""


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The devices along the axes that split the sequence, each with a piece of it.

    Attributes:
        kernel: What attends to each piece.
        axes: The axes.
        queries: The queries of each device, in the order of the ring.
        keys: The keys of each device.
        is_balanced: Whether each device has a part of the beginning and one of the end.
        size: The number of keys.
        is_causal: As the kernel takes it.
        scale: As the kernel takes it.
    """

    kernel: Kernel
    axes: frozenset[int]
    queries: tuple[Piece, ...]
    keys: tuple[Piece, ...]
    is_balanced: bool
    size: int
    is_causal: bool
    scale: float | None

    @property
    def count(self) -> int:
        """The number of devices."""
        return len(self.keys)

    @property
    def length(self) -> int:
        """How long the pieces are that travel."""
        return max(sum(length for _, length in piece) for piece in self.keys)

    @property
    def is_too_fine(self) -> bool:
        """Whether a device would have fewer keys at once than the kernel takes."""
        lengths = (length for piece in self.keys for _, length in piece if length)
        return any(length < self.kernel.least_keys for length in lengths)

    @property
    def options(self) -> tuple[Any, ...]:
        """What `attend_block` is told of the ring."""
        flat = [
            [n for piece in pieces for one in piece for n in one]
            for pieces in (self.queries, self.keys)
        ]
        return self.kernel.name, self.is_causal, self.scale, *flat

    def start(self, x: Any) -> Any:
        """Returns keys or values as the pieces of the devices, the short ones filled up."""
        if not self._is_moved:
            return x
        return permuted(x, Movement(2, self._segments(), 0.0), self.count * self.length)

    def passed_on(self, x: Tensor) -> Any:
        """Returns every piece at the next device of the ring."""
        size, rest = self.count * self.length, (self.count - 1) * self.length
        shift = (Segment(0, rest, self.length), Segment(self.length, 0, rest))
        return permuted(x, Movement(2, shift), size)

    def end(self, x: Any) -> Any:
        """Returns pieces as the sequence that they are of, without what filled them up."""
        if not self._is_moved:
            return x
        back = sorted(Segment(s.source, s.target, s.length) for s in self._segments())
        return permuted(x, Movement(2, tuple(back)), self.size)

    def arranged(self, x: Any) -> Any:
        """As `start`, for what belongs to the queries: they move only for the sake of balance."""
        return self.start(x) if self.is_balanced else x

    def restored(self, x: Any) -> Any:
        """The inverse of `arranged`."""
        return self.end(x) if self.is_balanced else x

    @property
    def _is_moved(self) -> bool:
        return self.is_balanced or self.count * self.length != self.size

    def _segments(self) -> tuple[Segment, ...]:
        found = []
        for number, piece in enumerate(self.keys):
            at = number * self.length
            for start, length in piece:
                found += [Segment(at, start, length)] if length else []
                at += length
        return tuple(found)


def _ring_of(
    kernel: Kernel, query: Any, key: Any, mask: Any, is_causal: bool, scale: float | None
) -> _Ring:
    axes, size = _split_axes(key), key.shape[2]
    names = key.device_mesh.mesh_dim_names or ()
    is_balanced = any(names[a] == _ZIGZAG for a in axes if names)
    is_balanced = is_balanced and is_causal and mask is None and query.shape[2] == size
    pieces = _balanced(size, _num_pieces(key, axes)) if is_balanced else _pieces(key, axes)
    queries = pieces if is_balanced else _pieces(query, axes)
    return _Ring(kernel, frozenset(axes), queries, pieces, is_balanced, size, is_causal, scale)


def _pieces(x: Any, axes: set[int]) -> tuple[Piece, ...]:
    """The range of dim 2 that each device of a ring has, in its order."""
    found = {}
    for coordinate, box in zip(x.device_mesh.coordinates(), x._spec.boxes, strict=True):
        start, stop = box[2]
        found[tuple(coordinate[a] for a in sorted(axes))] = ((start, stop - start),)
    return tuple(found[c] for c in sorted(found))


def _balanced(size: int, count: int) -> tuple[Piece, ...]:
    """The i-th and the i-th last of twice as many ranges as there are devices, for each."""
    half = -(-size // (2 * count))

    def part(number: int) -> tuple[int, int]:
        start = min(number * half, size)
        return start, min(half, size - start)

    return tuple((part(i), part(2 * count - 1 - i)) for i in range(count))


def _narrowest(mask: Any) -> Any:
    """Returns a mask in four dims; those before the keys that it has been expanded to are one."""
    if mask is None:
        return None
    sizes = zip(mask.shape[:-1], mask._spec.stride[:-1], strict=True)
    for dim, (size, stride) in enumerate(sizes):
        if size > 1 and stride == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask.view(*(1,) * (4 - mask.ndim), *mask.shape)


# -- heads -------------------------------------------------------------------------------------


def _ulysses_axes(query: Any, key: Any, axes: set[int]) -> set[int]:
    """The axes over which sequence and heads are exchanged."""
    names = query.device_mesh.mesh_dim_names or (None,) * query.device_mesh.ndim
    chosen: set[int] = set()
    for axis in sorted(axes):
        heads = _head_axes(query) | chosen | {axis}
        if names[axis] in _RINGS or not _heads_divide(query, key, heads):
            continue
        if names[axis] in _ULYSSES or _exchange_is_cheaper(query, key, axis, axes):
            chosen.add(axis)
    return chosen


def _heads_divide(query: Any, key: Any, axes: set[int]) -> bool:
    """Whether the heads can be split over more axes: evenly, or at least with none left empty."""
    heads, pieces = query.shape[1], _num_pieces(query, axes)
    if heads == key.shape[1]:
        return -(-heads // pieces) * (pieces - 1) < heads
    return heads % pieces == 0


def _exchange_is_cheaper(query: Any, key: Any, axis: int, axes: set[int]) -> bool:
    """Whether an exchange over an axis moves fewer bytes than the ring of all axes."""
    count = query.device_mesh.shape[axis]
    exchanged = 2 * query.shape[1] * query.shape[2] + 2 * key.shape[1] * key.shape[2]
    passed_on = 2 * key.shape[1] * key.shape[2] * count
    return exchanged <= passed_on


def _head_axes(x: Any) -> set[int]:
    return {a for a, p in enumerate(x.placements) if p.is_shard(1)}


def _with_heads_alike(
    query: Any, key: Any, value: Any, axes: Collection[int] = ()
) -> tuple[Any, Any, Any]:
    """Returns all three with their heads split over the same axes.

    Keys and values of which each serves several queries are repeated until they can be split.

    Args:
        query: Queries [B, H, L, E].
        key: Keys [B, K, S, E].
        value: Values, of the same shape.
        axes: More axes that are to split the heads later.
    """
    chosen: set[int] = set()
    for axis in sorted(_head_axes(query) | _head_axes(key)):
        free = query.placements[axis].is_shard(1) or query.placements[axis].is_replicate()
        if free and _heads_divide(query, key, {*chosen, axis, *axes}):
            chosen.add(axis)
    pieces, num_heads, num_keys = _num_pieces(query, {*chosen, *axes}), query.shape[1], key.shape[1]
    repeats = 1
    if num_heads != num_keys and num_keys % pieces:
        repeats = math.lcm(num_keys, pieces) // num_keys
        repeats = repeats if num_heads % (num_keys * repeats) == 0 else num_heads // num_keys

    def alike(x: Any) -> Any:
        kept = [p if p.is_shard() and not p.is_shard(1) else Replicate() for p in x.placements]
        wanted = [Shard(1) if a in chosen else p for a, p in enumerate(kept)]
        if repeats > 1 and x is not query:
            x = x.redistribute(x.device_mesh, kept).repeat_interleave(repeats, 1)
        return x.redistribute(x.device_mesh, wanted)

    return alike(query), alike(key), alike(value)


def _added_up(grad: Any, num_heads: int) -> Any:
    """The gradient of heads from those of their repetitions."""
    times = grad.shape[1] // num_heads
    return grad if times == 1 else grad.unflatten(1, (num_heads, times)).sum(2)
