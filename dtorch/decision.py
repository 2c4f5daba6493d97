"""Decision: all that follows for an operation from its arguments alone.

Takes a `Question`; gives the operation's results, the layouts that its arguments are brought to
and its results get, and what a device runs. It does not depend on the program that asks, so what
was decided once is remembered: a repeated layer costs a look-up for each of its operations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from .infer import CAPACITY, Question, answer, settings
from .lowering import LocalContext
from .mesh import DeviceMesh
from .placement import Placement, Placements
from .program import Localize
from .propagation import propagate
from .redistribution import Movement
from .refusals import as_torch_refuses
from .rules import Meta, OpCall, Sharding, replicated, rule_of, sizes_by_name
from .rules.pointwise import is_pointwise, pointwise
from .spec import Spec


class Decision(NamedTuple):
    """What an operation gives and how it runs.

    Attributes:
        results: Its results, each tensor as a `Meta`.
        mesh: Where it runs.
        inputs: The spec that each tensor argument is brought to.
        outputs: The spec of each result, lists laid out flat; None for one that is not a tensor.
        is_view: Whether the results are views of the argument.
        movement: What it does instead of running, where it only moves ranges of a split dim.
        is_identity: Whether the result is the argument itself, seen the same way.
        localize: Writes what each device runs, where that is not simply the operation.
        is_fallback: Whether it runs replicated because the operation has no sharding rule.
    """

    results: Any
    mesh: DeviceMesh
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec | None, ...]
    is_view: bool
    movement: Movement | None
    is_identity: bool
    localize: Localize | None
    is_fallback: bool


def decide(
    asked: Question,
    mesh: DeviceMesh | None = None,
    wanted: Placements | None = None,
    draws: bool = False,
) -> Decision:
    """Returns what follows for an operation.

    Args:
        asked: The operation and its arguments, whose specs are all on one mesh; the keyword
            arguments are in the order of the schema.
        mesh: Where it runs, if it has no tensor arguments.
        wanted: Placements that the first result shall have if a strategy gives them.
        draws: Whether it draws random numbers, which is done for the whole tensor.
    """
    if not asked.is_a_key:
        return _decide(asked, mesh, wanted, draws)
    return _remembered(asked, mesh, mesh and mesh.stage, wanted, draws, settings())


@functools.lru_cache(maxsize=CAPACITY)
def _remembered(
    asked: Question,
    mesh: DeviceMesh | None,
    stage: Hashable,
    wanted: Placements | None,
    draws: bool,
    settings: Hashable,
) -> Decision:
    return _decide(asked, mesh, wanted, draws)


def _decide(
    asked: Question, mesh: DeviceMesh | None, wanted: Placements | None, draws: bool
) -> Decision:
    with as_torch_refuses(asked.op, *asked.arguments()):
        return _decided(asked, answer(asked), mesh, wanted, draws)


def _decided(
    asked: Question, results: Any, mesh: DeviceMesh | None, wanted: Placements | None, draws: bool
) -> Decision:
    flat = flattened(results)
    metas = [m for m in flat if isinstance(m, Meta)]
    call = _call(asked, metas)
    home = call.tensors[0].mesh if call.tensors else mesh
    assert home is not None, f"{asked.op} has no tensor arguments and no mesh"
    sharding, is_fallback = _sharding_of(call, draws)
    choice = propagate(sharding, call, home, wanted)
    placed = zip(call.tensors, choice.inputs, strict=True)
    inputs = tuple(_brought(spec, home, placements) for spec, placements in placed)
    chosen = iter(choice.outputs)
    outputs = tuple(_placed(m, home, next(chosen)) if isinstance(m, Meta) else None for m in flat)
    movement = sharding.movement
    is_view = any(r.alias_info is not None for r in asked.op._schema.returns)
    return Decision(
        results,
        home,
        inputs,
        outputs,
        is_view,
        movement if movement and _splits(inputs[0], movement.dim) else None,
        is_view and not movement and inputs == outputs and metas[0].offset == 0,
        sharding.localize or (_Sizes(sharding.sizes) if sharding.sizes else None),
        is_fallback and len(home.devices) > 1,
    )


def tensor_names(asked: Question) -> list[str]:
    """Returns the names of an operation's tensor arguments, in the order of `Decision.inputs`."""
    found = []
    for name, value in _call(asked, ()).arguments.items():
        if isinstance(value, Spec):
            found.append(name)
        elif type(value) in (tuple, list):
            found += [f"{name}[{i}]" for i, v in enumerate(value) if isinstance(v, Spec)]
    return found


def legal_placements(asked: Question, axis: int) -> list[tuple[Placement, ...]]:
    """Returns the placements on one axis with which an operation needs no communication.

    Args:
        asked: The operation and its arguments.
        axis: The mesh axis.

    Returns:
        One placement for each tensor argument, in each choice.
    """
    results = [m for m in flattened(answer(asked)) if isinstance(m, Meta)]
    call = _call(asked, results)
    sharding, _ = _sharding_of(call, False)
    sizes, count = sizes_by_name(sharding, call), call.tensors[0].mesh.shape[axis]
    moved = sharding.movement and sharding.inputs[0][sharding.movement.dim]
    strategies = (
        s.inputs
        for s in sharding.strategies()
        if sharding.allows(s.name, axis)
        and (s.name is None or (s.name != moved and sharding.may_split(s.name, sizes, count)))
    )
    return list(dict.fromkeys(strategies))


def _brought(spec: Spec, mesh: DeviceMesh, placements: Placements) -> Spec:
    """An argument in its chosen layout; over an axis of one device all layouts are the same."""
    axes = zip(mesh.shape, spec.placements, placements, strict=True)
    return spec.with_layout(mesh, tuple(now if n == 1 else after for n, now, after in axes))


def _placed(meta: Meta, mesh: DeviceMesh, placements: Placements) -> Spec:
    return Spec.of(meta.shape, meta.dtype, mesh, placements, meta.stride, meta.conj, meta.neg)


def _splits(spec: Spec, dim: int) -> bool:
    axes = zip(spec.mesh.shape, spec.placements, strict=True)
    return any(n > 1 and p.is_shard(dim) for n, p in axes)


def _call(asked: Question, results: Sequence[Meta]) -> OpCall:
    args, kwargs = asked.arguments()
    schema = asked.op._schema.arguments
    given = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    arguments = {a.name: given.get(a.name, _default(a)) for a in schema}
    return OpCall(asked.op, arguments, tuple(_specs_in(list(arguments.values()))), tuple(results))


def _default(argument: Any) -> Any:
    return argument.default_value if argument.has_default_value() else None


def _specs_in(tree: Any) -> list[Spec]:
    if isinstance(tree, Spec):
        return [tree]
    if type(tree) in (tuple, list):
        return [s for item in tree for s in _specs_in(item)]
    return []


def flattened(results: Any) -> list[Any]:
    """Returns the items of nested lists."""
    if isinstance(results, list):
        return [r for item in results for r in flattened(item)]
    return [results]


def _sharding_of(call: OpCall, draws: bool) -> tuple[Sharding, bool]:
    found = rule_of(call.op)
    if draws:
        return replicated(call), False
    if found is not None:
        return found(call), False
    if is_pointwise(call.op) and len(call.results) >= 1:
        return pointwise(call), False
    return replicated(call), True


def has_rule(op: torch._ops.OpOverload) -> bool:
    """Returns whether an operation has a sharding rule."""
    return rule_of(op) is not None or is_pointwise(op)


@dataclasses.dataclass(frozen=True, slots=True)
class _Sizes:
    """Runs an operation with each device's local size in place of a global one."""

    sizes: tuple[tuple[str, int], ...]

    def __call__(self, context: LocalContext) -> None:
        changes = {}
        for name, output in self.sizes:
            shapes = context.output_spec(output).local_shapes
            changes[name] = context.per_device(lambda i, shapes=shapes: shapes[i])
        context.emit_with(**changes)
