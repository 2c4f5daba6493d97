"""Every layout of a tensor, made and read back without dtorch's own redistribution.

`spread` builds a tensor from its shards, with partial values that really differ between the
devices; `check` reads the shards back and compares them with PyTorch's value; `sweep` runs a
torch function on every combination of layouts of its arguments. Where there are many, a seeded
sample is taken; ``DTORCH_SWEEP=10`` takes one ten times as large, ``DTORCH_SWEEP=0.1`` one a tenth
as large, and ``DTORCH_SWEEP=full`` runs all.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import dtorch
from dtorch.mesh import DeviceMesh
from dtorch.placement import Partial, Placement, Placements, Replicate, Shard
from dtorch.program import Program, verify
from dtorch.runtime import Shards
from dtorch.spec import Spec
from dtorch.tensor import Tensor

SWEEP = os.environ.get("DTORCH_SWEEP", "1")
FULL = SWEEP == "full"
TIMES = 1.0 if FULL else float(SWEEP)
ONE_AXIS = 50
"""How many combinations to try on a mesh of one axis: all of them for two matrices."""

PAIR = DeviceMesh("cpu", [0, 1])
TRIPLE = DeviceMesh("cpu", [0, 1, 2])
QUAD = DeviceMesh("cpu", [0, 1, 2, 3])
SQUARE = DeviceMesh("cpu", [[0, 1], [2, 3]])
OBLONG = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]])
MESHES = (PAIR, TRIPLE, SQUARE, OBLONG)

R = Replicate()
SUM, AVG, MAX, MIN = (Partial(op) for op in ("sum", "avg", "max", "min"))


def S(dim: int) -> Shard:
    return Shard(dim)


def sampled(count: int) -> int:
    """How many of a sample to take, where `count` is the usual number."""
    return max(1, round(count * TIMES))


def sample(items: Sequence[Any], count: int, seed: int) -> list[Any]:
    """At most `count` of the items, always the same ones; all of them in a full sweep."""
    count = sampled(count)
    if FULL or len(items) <= count:
        return list(items)
    return random.Random(seed).sample(list(items), count)


# -- values --------------------------------------------------------------------------------


def values(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Values whose sums are exact in every order: small integers, in eighths where they can be."""
    made = torch.Generator().manual_seed(seed * 1009 + sum(shape) + 1)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=made).bool()
    whole = torch.randint(-16, 17, tuple(shape), generator=made)
    if not dtype.is_floating_point and not dtype.is_complex:
        return whole.to(dtype)
    if dtype.is_complex:
        other = torch.randint(-16, 17, tuple(shape), generator=made)
        return torch.complex(whole / 8, other / 8).to(dtype)
    return (whole / 8).to(dtype)


# -- making --------------------------------------------------------------------------------


def bounds(size: int, count: int, index: int) -> tuple[int, int]:
    """Where `torch.chunk`, with empty chunks at the end, puts the index-th piece."""
    length = -(-size // count)
    return min(index * length, size), min((index + 1) * length, size)


def spread(
    value: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], seed: int = 0
) -> Tensor:
    """The distributed tensor of a value, built from shards of this module's own making."""
    made = torch.Generator().manual_seed(seed)
    spec = Spec.of(value.shape, value.dtype, mesh, tuple(placements))
    parts = _parts(value.contiguous(), mesh, tuple(placements), 0, made)
    return Tensor._of(spec, Shards([p.contiguous().clone() for p in parts]))


def _parts(
    value: torch.Tensor, mesh: DeviceMesh, placements: Placements, axis: int, made: torch.Generator
) -> list[torch.Tensor]:
    if axis == mesh.ndim:
        return [value]
    if placements[axis].is_replicate():
        return _parts(value, mesh, placements, axis + 1, made) * mesh.shape[axis]
    pieces = _pieces(value, placements[axis], mesh.shape[axis], made)
    return [p for piece in pieces for p in _parts(piece, mesh, placements, axis + 1, made)]


def _pieces(
    value: torch.Tensor, placement: Placement, count: int, made: torch.Generator
) -> list[torch.Tensor]:
    if isinstance(placement, Shard):
        size = value.shape[placement.dim]
        ranges = [bounds(size, count, i) for i in range(count)]
        return [value.narrow(placement.dim, start, stop - start) for start, stop in ranges]
    assert isinstance(placement, Partial)
    return _addends(value, placement.op, count, made)


def _addends(value: torch.Tensor, op: str, count: int, made: torch.Generator) -> list[torch.Tensor]:
    """Different local values whose reduction is exactly `value`."""
    if value.dtype == torch.bool:
        return _flags(value, op, count, made)
    noise = [
        torch.randint(1, 9, tuple(value.shape), generator=made).to(value.dtype)
        for _ in range(count - 1)
    ]
    if op in ("max", "min"):
        sign = -1 if op == "max" else 1
        owner = torch.randint(0, count, tuple(value.shape), generator=made)
        worse = [value + sign * n for n in noise]
        return [torch.where(owner == i, value, (worse * count)[i]) for i in range(count)]
    total = value * count if op == "avg" else value
    return [*noise, total - sum(noise)] if noise else [total]


def _flags(value: torch.Tensor, op: str, count: int, made: torch.Generator) -> list[torch.Tensor]:
    owner = torch.randint(0, count, tuple(value.shape), generator=made)
    if op == "min":
        return [value | (owner != i) for i in range(count)]
    return [value & (owner == i) for i in range(count)]


def placements_of(
    ndim: int, mesh: DeviceMesh, partials: Sequence[Placement] = (SUM,)
) -> list[Placements]:
    """Every layout of a tensor with `ndim` dims on a mesh."""
    each = [R, *(Shard(d) for d in range(ndim)), *partials]
    return list(itertools.product(each, repeat=mesh.ndim))


def partials_for(dtype: torch.dtype) -> tuple[Placement, ...]:
    """The partial placements that a dtype can have."""
    if dtype == torch.bool:
        return (MAX, MIN)
    if dtype.is_complex:
        return (SUM, AVG)
    return (SUM, AVG, MAX, MIN) if dtype.is_floating_point else (SUM, MAX, MIN)


# -- checking ------------------------------------------------------------------------------


def check(tensor: Tensor, expected: torch.Tensor, *, rtol: float = 0, atol: float = 0) -> None:
    """Compares a distributed tensor with its value, shard by shard."""
    assert type(tensor) is Tensor or isinstance(tensor, torch.nn.Parameter), type(tensor)
    assert tensor.shape == expected.shape, f"shape {tensor.shape}, expected {expected.shape}"
    assert tensor.dtype == expected.dtype, f"dtype {tensor.dtype}, expected {expected.dtype}"
    spec, mesh = tensor._spec, tensor.device_mesh
    shards = list(tensor.local_shards().values())
    for place, shard, shape in zip(mesh.coordinates(), shards, spec.local_shapes, strict=True):
        assert shape == _local_shape(spec, place), f"spec.local_shapes at {place}: {shape}"
        assert tuple(shard.shape) == shape, f"shard at {place}: {tuple(shard.shape)} != {shape}"
        assert shard.dtype == spec.dtype, f"shard at {place}: {shard.dtype} != {spec.dtype}"
    _check_replicas(tensor, shards)
    found = tensor.detach().to_torch()
    expected = expected.detach()
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)


def _local_shape(spec: Spec, place: tuple[int, ...]) -> tuple[int, ...]:
    shape = list(spec.shape)
    for index, count, placement in zip(place, spec.mesh.shape, spec.placements, strict=True):
        if isinstance(placement, Shard):
            start, stop = bounds(shape[placement.dim], count, index)
            shape[placement.dim] = stop - start
    return tuple(shape)


def _check_replicas(tensor: Tensor, shards: Sequence[torch.Tensor]) -> None:
    first: dict[tuple[int, ...], torch.Tensor] = {}
    for place, shard in zip(tensor.device_mesh.coordinates(), shards, strict=True):
        own = tuple(
            0 if p.is_replicate() else c for c, p in zip(place, tensor.placements, strict=True)
        )
        other = first.setdefault(own, shard)
        equal = torch.equal(other.nan_to_num(), shard.nan_to_num())
        assert equal, f"replicas differ at {place}"


def check_program(program: Program) -> None:
    """Verifies a program, and that it lowers to one whose slots are freed exactly once."""
    verify(program)
    check_local(dtorch.lowering.lower(program))


def check_local(local: Any) -> None:
    """Every slot is filled before it is read, freed once, and never touched after that."""
    filled = {slot for slot, _ in local.inputs}
    freed: set[int] = set()
    kept = {slot for slot, _ in local.outputs}
    for instruction in local.instructions:
        read = set(dtorch.lowering.slots_read(instruction))
        written = set(dtorch.lowering.slots_written(instruction))
        assert read <= filled, f"unfilled slot in {instruction}"
        assert not (read | written) & freed, f"freed slot in {instruction}"
        filled |= written
        assert not set(instruction.frees) & kept, f"an output is freed by {instruction}"
        assert set(instruction.frees) <= read | written, f"untouched slot freed by {instruction}"
        freed |= set(instruction.frees)
        assert max(written, default=0) < local.num_slots
    assert kept <= filled, "an output is never filled"
    used = {s for i in local.instructions for s in dtorch.lowering.slots_read(i)}
    assert used - kept <= freed, f"never freed: {used - kept - freed}"


# -- sweeping ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A torch function and the tensors to call it on.

    Attributes:
        name: The test's id.
        function: Called with the tensors.
        inputs: The torch tensors.
        exact: Whether the result must be equal bit for bit.
        partials: The partial placements to try; those that the dtype can have, if None.
        fallback: Whether replicating for want of a rule is expected.
        count: How many combinations of layouts to try on a mesh of two axes.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    exact: bool = True
    partials: tuple[Placement, ...] | None = None
    fallback: bool = False
    count: int = 8

    def __str__(self) -> str:
        return self.name


def case(name: str, function: Callable[..., Any], *inputs: Any, **options: Any) -> Case:
    """A case; inputs are tensors, shapes, or pairs of a shape and a dtype."""
    return Case(name, function, tuple(_input(i, n) for n, i in enumerate(inputs)), **options)


def _input(item: Any, seed: int) -> torch.Tensor:
    if isinstance(item, torch.Tensor):
        return item
    if len(item) == 2 and isinstance(item[1], torch.dtype):
        return values(item[0], item[1], seed)
    return values(item, seed=seed)


def combinations(
    inputs: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    count: int,
    partials: Sequence[Placement] | None = None,
) -> list[tuple[Placements, ...]]:
    """Layouts for each input: all combinations, or a sample of them."""
    each = [
        placements_of(t.ndim, mesh, partials_for(t.dtype) if partials is None else partials)
        for t in inputs
    ]
    total = 1
    for layouts in each:
        total *= len(layouts)
    count = sampled(count)
    if FULL or total <= count:
        return list(itertools.product(*each))
    drawn = random.Random(total)
    found = {tuple(drawn.choice(layouts) for layouts in each) for _ in range(count)}
    return sorted(found, key=repr)


def sweep(
    case: Case,
    meshes: Sequence[DeviceMesh] = MESHES,
) -> None:
    """Runs a case on every combination of layouts; fails with the first few that are wrong."""
    expected = _leaves(case.function(*case.inputs))
    jitted = dtorch.jit(case.function, maxsize=1)
    failures = []
    for mesh in meshes:
        count = case.count if mesh.ndim > 1 else ONE_AXIS
        for number, layouts in enumerate(combinations(case.inputs, mesh, count, case.partials)):
            tensors = [
                spread(t, mesh, p, seed=number) for t, p in zip(case.inputs, layouts, strict=True)
            ]
            try:
                _run(case, jitted, tensors, expected)
            except Exception as error:
                failures.append(f"{list(mesh.shape)} {layouts}: {type(error).__name__}: {error}")
    text = "\n".join(failures[:4])
    assert not failures, f"{len(failures)} layouts of {case.name} fail, such as\n{text}"


def _run(
    case: Case,
    jitted: Any,
    tensors: list[Tensor],
    expected: list[torch.Tensor],
) -> None:
    program = jitted.program(*tensors)
    check_program(program)
    assert case.fallback or not program.fallbacks(), f"fallback: {program.fallbacks()}"
    results = _leaves(jitted(*tensors))
    assert len(results) == len(expected)
    for result, value in zip(results, expected, strict=True):
        check(result, value, **_tolerance(case, value))


def _tolerance(case: Case, value: torch.Tensor) -> dict[str, float]:
    if case.exact:
        return {}
    if value.dtype in (torch.bfloat16, torch.float16):
        return {"rtol": 2e-2, "atol": 2e-1}  # the addends are rounded too
    return {"rtol": 1e-5, "atol": 1e-5}


def _leaves(tree: Any) -> list[Any]:
    return list(_iterate(tree))


def _iterate(tree: Any) -> Iterator[Any]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _iterate(item)
