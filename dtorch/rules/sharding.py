"""`Sharding`: how one operation may be sharded, in the notation of einsum.

A rule gives every dim of every tensor argument and result a name. What follows from the names,
for one mesh axis at a time, are the operation's *strategies*:

- all arguments replicated: always right;
- a name that appears in arguments and results is sharded through;
- a name only in arguments is contracted: sharding it leaves the results `Partial`;
- a `linear` set of arguments may be `Partial` together, and so then are the results;
- an `unread` argument may be `Partial` with replicated results.

In text, ``... k, n k, +n -> ... n``: ``...`` stands for the remaining dims, aligned from the
right and broadcast; ``k!`` must be whole; ``+`` marks an argument that is added once (a bias),
so under a contraction it is made partial instead of being counted on every device.

The idea of naming dims is that of OpenXLA Shardy's op sharding rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..placement import Partial, Placement, Replicate, Shard
from ..program import Localize
from ..redistribution import Movement
from ..spec import Spec

Dims = tuple[str | None, ...]
"""The name of each dim of a tensor; None for a dim that is never sharded (broadcast)."""

LINEAR = ("sum", "avg")
ANY_REDUCTION = ("sum", "avg", "max", "min")


class Meta(NamedTuple):
    """What inference says of a result: a spec without a layout, and where a view starts.

    The offset is that of a view in the storage of its base, in elements, where the base itself
    starts at 0.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    conj: bool = False
    neg: bool = False
    offset: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class OpCall:
    """An operation with its arguments, as a rule sees it.

    Attributes:
        op: The operation.
        arguments: Every argument by its name in the schema, defaults filled in; tensors are
            `Spec`s, lists of tensors are lists of `Spec`s.
        tensors: The tensor arguments in the order of the schema.
        results: The results.
    """

    op: torch._ops.OpOverload
    arguments: dict[str, Any]
    tensors: tuple[Spec, ...]
    results: tuple[Meta, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


class Strategy(NamedTuple):
    """One legal choice for one mesh axis: a placement for every argument and result."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    name: str | None = None


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How an operation may be sharded.

    Attributes:
        inputs: The names of the dims of each tensor argument.
        outputs: The names of the dims of each result.
        reduce: For each contracted name, the reduction that completes the results.
        whole: The names that must not be split.
        even: The names that may be split only into equal pieces.
        filled: The names that may be split only where no piece is empty.
        blocks: Names that may be split only into pieces of whole blocks, and how many blocks.
        fixed: Names that are split over just these mesh axes, over which nothing else is.
        additive: The arguments (by index) that are added once.
        linear: The sets of arguments that may be partial together.
        partial_ops: The reductions that the linear sets commute with.
        unread: The arguments of which only the shape counts: partial ones stay as they are.
        sizes: Arguments, by name, that hold the size of a result (by index); each device gets
            its local size there.
        movement: For an operation that only moves ranges of a dim of its first argument: what
            it does where that dim is split.
        localize: Writes what a device runs, where that is not the operation on the shards.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    reduce: Mapping[str, str] = dataclasses.field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    even: frozenset[str] = frozenset()
    filled: frozenset[str] = frozenset()
    blocks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, frozenset[int]] = dataclasses.field(default_factory=dict)
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    partial_ops: tuple[str, ...] = LINEAR
    unread: frozenset[int] = frozenset()
    sizes: tuple[tuple[str, int], ...] = ()
    movement: Movement | None = None
    localize: Localize | None = None

    def strategies(self) -> Iterator[Strategy]:
        """Yields every strategy for one axis; the first is the replicated one."""
        yield Strategy(self._all(Replicate(), self.inputs), self._all(Replicate(), self.outputs))
        for name in self._names():
            yield self._split(name)
        for together in self.linear:
            for op in self.partial_ops:
                yield self._partial(together, op)
        for op in ANY_REDUCTION if self.unread else ():
            inputs = self._partial(self.unread, op).inputs
            yield Strategy(inputs, self._all(Replicate(), self.outputs))

    def allows(self, name: str | None, axis: int) -> bool:
        """Returns whether a mesh axis may split a name, or none."""
        here = next((n for n, axes in self.fixed.items() if axis in axes), None)
        return name not in self.fixed if here is None else name == here

    def may_split(self, name: str, sizes: dict[str, list[int]], count: int) -> bool:
        """Returns whether splitting a name into `count` pieces is allowed."""
        if name in self.even and any(size % count for size in sizes[name]):
            return False
        if name in self.blocks and self.blocks[name] % count:
            return False
        return name not in self.filled or all(
            -(-size // count) * (count - 1) < size for size in sizes[name]
        )

    def _names(self) -> list[str]:
        everything = (n for dims in (*self.inputs, *self.outputs) for n in dims)
        return [n for n in dict.fromkeys(everything) if n is not None and n not in self.whole]

    @staticmethod
    def _all(placement: Placement, tensors: Sequence[Dims]) -> tuple[Placement, ...]:
        return (placement,) * len(tensors)

    def _split(self, name: str) -> Strategy:
        rest = Partial(self.reduce[name]) if name in self.reduce else Replicate()
        inputs = [
            Shard(dims.index(name))
            if name in dims
            else (rest if i in self.additive else Replicate())
            for i, dims in enumerate(self.inputs)
        ]
        outputs = [Shard(d.index(name)) if name in d else rest for d in self.outputs]
        return Strategy(tuple(inputs), tuple(outputs), name)

    def _partial(self, together: frozenset[int], op: str) -> Strategy:
        partial = together | self.additive
        inputs = [Partial(op) if i in partial else Replicate() for i in range(len(self.inputs))]
        return Strategy(tuple(inputs), self._all(Partial(op), self.outputs))


Rule = Callable[[OpCall], Sharding]
_rules: dict[Any, Rule] = {}


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of operations.

    They are overloads, packets for all overloads, or the names of operations that may not be
    there: those of another library, or that not every torch has.
    """

    def register(function: Rule) -> Rule:
        for op in ops:
            _rules[op] = function
        return function

    return register


def notation(text: str, *ops: Any, **options: Any) -> None:
    """Registers a line of the notation as the rule of operations."""
    rule(*ops)(lambda call: parse(text, call, **options))


def rule_of(op: torch._ops.OpOverload) -> Rule | None:
    """Returns the rule of an operation, or None where it has none."""
    return _rules.get(op) or _rules.get(op.overloadpacket) or _rules.get(op._schema.name)


def parse(text: str, call: OpCall, **options: Any) -> Sharding:
    """Returns the sharding that a line of the notation means for one call.

    Args:
        text: Such as ``... k, n k, +n -> ... n``; terms for arguments that the call leaves out
            are ignored.
        call: The call.
        options: Further fields of `Sharding`. A contracted name that `reduce` does not
            mention is summed.
    """
    left, right = (side.split(",") for side in text.split("->"))
    used = left[: len(call.tensors)]
    additive = frozenset(i for i, term in enumerate(used) if term.strip().startswith("+"))
    extra = _ellipsis_shape(used, call)
    inputs = [_expand(t, spec.shape, extra) for t, spec in zip(used, call.tensors, strict=True)]
    outputs = [_expand(t, meta.shape, extra) for t, meta in zip(right, call.results, strict=False)]
    outputs += [(None,) * len(meta.shape) for meta in call.results[len(outputs) :]]
    inputs = _without_broadcast(inputs, [spec.shape for spec in call.tensors])
    marked = {n.rstrip("!") for t in (*left, *right) for n in t.split() if n.endswith("!")}
    found = {n for dims in outputs for n in dims}
    contracted = {n for dims in inputs for n in dims if n is not None} - found - marked
    reduce = dict.fromkeys(contracted, "sum") | options.pop("reduce", {})
    options["additive"] = options.get("additive", additive)
    return Sharding(
        tuple(inputs), tuple(outputs), reduce=reduce, whole=frozenset(marked), **options
    )


def _ellipsis_shape(terms: Sequence[str], call: OpCall) -> tuple[int, ...]:
    """The broadcast shape of what ``...`` stands for."""
    shapes = []
    for term, spec in zip(terms, call.tensors, strict=True):
        words = term.replace("+", " ").split()
        if "..." in words:
            at, rest = words.index("..."), len(words) - 1
            shapes.append(spec.shape[at : at + spec.ndim - rest])
    return tuple(torch.broadcast_shapes(*shapes)) if shapes else ()


def _without_broadcast(inputs: Sequence[Dims], shapes: Sequence[Sequence[int]]) -> list[Dims]:
    """Drops the name of a dim of size one that is broadcast to the size of others."""
    sizes: dict[str | None, int] = {}
    for dims, shape in zip(inputs, shapes, strict=True):
        for name, size in zip(dims, shape, strict=True):
            sizes[name] = size if size != 1 else sizes.get(name, 1)
    return [
        tuple(
            None if size == 1 != sizes[name] else name
            for name, size in zip(dims, shape, strict=True)
        )
        for dims, shape in zip(inputs, shapes, strict=True)
    ]


def _expand(term: str, shape: Sequence[int], extra: tuple[int, ...]) -> Dims:
    words = term.replace("+", " ").split()
    if len(words) - ("..." in words) > len(shape):  # a result that the call leaves empty
        return (None,) * len(shape)
    names: list[str | None] = []
    for word in words:
        if word != "...":
            names.append(None if word == "1" else word.rstrip("!"))
            continue
        count = len(shape) - (len(words) - 1)
        for i in range(count):
            place = len(extra) - count + i
            broadcast = shape[len(names)] == 1 and extra[place] != 1
            names.append(None if broadcast else f"...{place}")
    return tuple(names)


def dim_names(shape: Sequence[int], prefix: str = "d") -> Dims:
    """Returns one name per dim."""
    return tuple(f"{prefix}{i}" for i in range(len(shape)))


def broadcast_names(shape: Sequence[int], result: Sequence[int]) -> Dims:
    """Returns the names of a tensor's dims, aligned from the right with those of a result."""
    offset = len(result) - len(shape)
    return tuple(
        None if size == 1 and result[i + offset] != 1 else f"d{i + offset}"
        for i, size in enumerate(shape)
    )


def assign(
    call: OpCall, inputs: Mapping[str, Dims], outputs: Sequence[Dims], **options: Any
) -> Sharding:
    """Returns a sharding from the names of the dims of some arguments, by argument.

    Arguments and results without names, or with another number of dims (which a call leaves
    empty), are whole.

    Args:
        call: The call.
        inputs: The names of the dims of its tensor arguments.
        outputs: Those of its results.
        options: Further fields of `Sharding`.
    """

    def fitting(dims: Dims, shape: Sequence[int]) -> Dims:
        return dims if len(dims) == len(shape) else (None,) * len(shape)

    given = [
        fitting(inputs.get(name, ()), spec.shape)
        for name, value in call.arguments.items()
        for spec in (value if isinstance(value, list) else [value])
        if isinstance(spec, Spec)
    ]
    made = [fitting(d, m.shape) for d, m in zip(outputs, call.results, strict=False)]
    made += [(None,) * len(m.shape) for m in call.results[len(made) :]]
    return Sharding(tuple(given), tuple(made), **options)


def outer(call: OpCall, count: int, **options: Any) -> Sharding:
    """Returns the sharding that splits all but the last `count` dims of everything."""

    def names(shape: Sequence[int]) -> Dims:
        kept = max(len(shape) - count, 0)
        return (*dim_names(shape[:kept]), *(None,) * (len(shape) - kept))

    return Sharding(
        tuple(names(t.shape) for t in call.tensors),
        tuple(names(m.shape) for m in call.results),
        **options,
    )


def moved(call: OpCall, names: Dims, movement: Movement, **options: Any) -> Sharding:
    """Returns the sharding of an operation that only moves ranges of a dim of its argument."""
    (source, *_) = call.tensors
    if source.conj or source.neg:  # devices exchange plain memory
        kept = tuple(None if d == movement.dim else n for d, n in enumerate(names))
        return Sharding((kept,), (kept,), **options)
    return Sharding((names,), (names,), movement=movement, **options)


def split_axes(spec: Spec) -> frozenset[int]:
    """Returns the mesh axes over which a tensor is split."""
    axes = enumerate(zip(spec.mesh.shape, spec.placements, strict=True))
    return frozenset(axis for axis, (n, p) in axes if n > 1 and p.is_shard())


def sizes_by_name(sharding: Sharding, call: OpCall) -> dict[str, list[int]]:
    """Returns the sizes of all dims that carry a name."""
    sizes: dict[str, list[int]] = {}
    shapes = [t.shape for t in call.tensors] + [m.shape for m in call.results]
    for dims, shape in zip((*sharding.inputs, *sharding.outputs), shapes, strict=True):
        for name, size in zip(dims, shape, strict=True):
            if name is not None:
                sizes.setdefault(name, []).append(size)
    return sizes


def replicated(call: OpCall) -> Sharding:
    """Returns the sharding of an operation that is only known to be right on whole tensors."""
    return Sharding(
        tuple((None,) * t.ndim for t in call.tensors),
        tuple((None,) * len(m.shape) for m in call.results),
    )
