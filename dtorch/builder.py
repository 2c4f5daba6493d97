"""`Builder`: records operations on values, with their layouts, into a program.

Takes one operation at a time, over value numbers. It infers the results, looks up the rule,
lets propagation choose layouts, adds the redistributions that the choice needs (once for each
value and target), and appends the instruction. `finish` drops what nobody reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .errors import MeshError
from .infer import infer
from .lowering import LocalContext
from .mesh import DeviceMesh
from .placement import Placements, Replicate
from .program import (
    Apply,
    Instruction,
    Program,
    Redistribute,
    Ref,
    ScalarRef,
    SourceLine,
    map_refs,
    refs,
)
from .propagation import propagate
from .redistribution import plan
from .rules import Meta, OpCall, Sharding, replicated, rule_of
from .rules.pointwise import is_pointwise, pointwise
from .spec import Spec

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class _Sizes:
    """Runs an operation with each device's local size in place of a global one."""

    sizes: tuple[tuple[str, int], ...]

    def __call__(self, context: LocalContext) -> None:
        names = [a.name for a in context.op._schema.arguments]
        args, kwargs = list(context.args), dict(context.kwargs)
        for name, output in self.sizes:
            shapes = context.output_spec(output).local_shapes
            local = context.per_device(lambda i, shapes=shapes: shapes[i])
            place = names.index(name)
            if place < len(args):
                args[place] = local
            else:
                kwargs[name] = local
        context.emit(context.op, *args, outputs=context.outputs, **kwargs)


class Builder:
    """A program in the making.

    Args:
        source: Returns the user's line that is being traced.
    """

    def __init__(self, source: Callable[[], SourceLine | None]) -> None:
        self.specs: list[Spec] = []
        self.inputs: list[int] = []
        self.scalar_values: list[Any] = []
        self._instructions: list[Instruction] = []
        self._moved: dict[tuple[int, Spec], int] = {}
        self._reduced: dict[int, int] = {}
        self._source = source

    def __len__(self) -> int:
        return len(self._instructions)

    def add_input(self, spec: Spec) -> int:
        """Returns the number of a new input."""
        value = self._new_value(spec)
        self.inputs.append(value)
        return value

    def _new_value(self, spec: Spec) -> int:
        self.specs.append(spec)
        return len(self.specs) - 1

    def redistribute(self, value: int, target: Spec) -> int:
        """Returns the number of a value in another layout; asking twice adds nothing new."""
        source = self.specs[value]
        if source is target:
            return value
        if source.conj or source.neg:
            value, source, target = self._materialized(value, target)
        known = self._moved.get((value, target))
        if known is None:
            known = value
            for step in plan(source, target):
                known = self._add_step(known, step)
            self._moved[(value, target)] = known
            if source.partial_axes and not target.partial_axes and target.mesh == source.mesh:
                self._reduced.setdefault(value, known)
        return known

    def _materialized(self, value: int, target: Spec) -> tuple[int, Spec, Spec]:
        """Collectives see plain memory: conj and neg bits are resolved before them."""
        for op in (aten.resolve_conj.default, aten.resolve_neg.default):
            (value,) = self.apply(op, (Ref(value),), {})
        source = self.specs[value]
        return value, source, source.with_layout(target.mesh, target.placements)

    def _add_step(self, value: int, step: Any) -> int:
        key = (value, step.target)
        if key not in self._moved:
            moved = self._new_value(step.target)
            self._instructions.append(Redistribute(step, value, moved, self._source()))
            self._moved[key] = moved
        return self._moved[key]

    def move(self, value: int, mesh: DeviceMesh, placements: Placements) -> int:
        """Returns the number of a value in the layout given by a mesh and placements."""
        return self.redistribute(value, self.specs[value].with_layout(mesh, placements))

    def apply(
        self,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        mesh: DeviceMesh | None = None,
        wanted: Placements | None = None,
        draws: int | None = None,
    ) -> Any:
        """Records an operation and returns its results, tensors by their numbers.

        Args:
            op: The operation; it neither mutates nor aliases its arguments.
            args: Its arguments, tensors as `Ref`, run-time scalars as `ScalarRef`.
            kwargs: Its keyword arguments, likewise.
            mesh: Where it runs, if it has no tensor arguments.
            wanted: Placements that the first result shall have if a strategy gives them.
            draws: The generator state that a random operation starts from; the new state is
                appended to the results.
        """
        operands = [r.id for r in refs((tuple(args), tuple(kwargs.values())))]
        home = self._home(op, [self.specs[v] for v in operands]) if operands else mesh
        assert home is not None, f"{op} has no tensor arguments and no mesh"
        moved, kwargs = self._brought_home((tuple(args), kwargs), home)
        results = infer(op, self._with_specs(moved), self._with_specs(kwargs))
        flat = _flatten(results)
        call = self._call(op, moved, kwargs, tuple(m for m in flat if isinstance(m, Meta)))
        sharding, fallback = _sharding_of(call, draws is not None)
        choice = propagate(sharding, call, home, wanted)
        order = iter(choice.inputs)
        moved, kwargs = self._relayout(op, moved, kwargs, home, order)
        outputs = self._new_results(flat, choice.outputs, home)
        self._append(op, moved, kwargs, outputs, home, sharding, fallback, draws)
        named = iter(outputs)
        tree = _rebuild(results, named)
        return (tree, *self._next_state(draws)) if draws is not None else _as_list(tree)

    def _append(
        self,
        op: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[int | None],
        home: DeviceMesh,
        sharding: Sharding,
        fallback: bool,
        draws: int | None,
    ) -> None:
        state = None
        if draws is not None:
            draws = self.move(draws, home, (Replicate(),) * home.ndim)
            state = (draws, self._new_value(self.specs[draws]))
        localize = sharding.localize or (_Sizes(sharding.sizes) if sharding.sizes else None)
        self._instructions.append(
            Apply(
                op,
                args,
                tuple(kwargs.items()),
                tuple(outputs),
                home,
                localize,
                state,
                fallback and len(home.devices) > 1,
                self._source(),
            )
        )

    def _next_state(self, draws: int | None) -> tuple[int, ...]:
        last = self._instructions[-1]
        assert isinstance(last, Apply)
        return () if last.draws is None else (last.draws[1],)

    def _home(self, op: torch._ops.OpOverload, specs: list[Spec]) -> DeviceMesh:
        """The mesh on which an operation runs: its operands' own, or the latest of stages."""
        home = specs[0].mesh
        for spec in specs[1:]:
            home = _later(op, home, spec.mesh)
        return home

    def _brought_home(self, tree: Any, home: DeviceMesh) -> Any:
        def bring(ref: Ref) -> Ref:
            # A partial value that was reduced once is not kept partial for its next use.
            ref = Ref(self._reduced.get(ref.id, ref.id))
            spec = self.specs[ref.id]
            if spec.mesh == home:
                return ref
            alike = spec.mesh.shape == home.shape
            placements = spec.placements if alike else (Replicate(),) * home.ndim
            return Ref(self.move(ref.id, home, placements))

        args, kwargs = tree
        return map_refs(args, bring), {k: map_refs(v, bring) for k, v in kwargs.items()}

    def with_scalars(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Returns arguments with the run-time scalars among them as they are in this trace."""
        return tuple(self.scalar_values[a.number] if type(a) is ScalarRef else a for a in args)

    def _with_specs(self, tree: Any) -> Any:
        def value(item: Any) -> Any:
            if type(item) is Ref:
                return self.specs[item.id]
            if type(item) is ScalarRef:
                return self.scalar_values[item.number]
            if type(item) in (tuple, list):
                return type(item)(value(i) for i in item)
            return item

        if isinstance(tree, dict):
            return {k: value(v) for k, v in tree.items()}
        return value(tree)

    def _call(
        self,
        op: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: tuple[Meta, ...],
    ) -> OpCall:
        schema = op._schema.arguments
        given = dict(zip((a.name for a in schema), self._with_specs(args), strict=False))
        given |= self._with_specs(kwargs)
        arguments = {a.name: given.get(a.name, _default(a)) for a in schema}
        return OpCall(op, arguments, tuple(_specs_in(list(arguments.values()))), results)

    def _relayout(
        self,
        op: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        home: DeviceMesh,
        placements: Any,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Redistributes the operands to the chosen layouts, in the order of the schema."""

        def place(ref: Ref) -> Ref:
            return Ref(self.move(ref.id, home, next(placements)))

        args = map_refs(args, place)
        order = [a.name for a in op._schema.arguments]
        kwargs = {k: map_refs(kwargs[k], place) for k in sorted(kwargs, key=order.index)}
        return args, kwargs

    def _new_results(
        self, flat: list[Any], placements: Sequence[Placements], home: DeviceMesh
    ) -> list[int | None]:
        chosen = iter(placements)
        return [
            self._new_value(Spec.of(m.shape, m.dtype, home, next(chosen), m.stride, m.conj, m.neg))
            if isinstance(m, Meta)
            else None
            for m in flat
        ]

    def reduced(self, value: int) -> int | None:
        """Returns a partial value that has been reduced already, or None."""
        return self._reduced.get(value)

    def producer(self, value: int) -> Instruction | None:
        """Returns the instruction that defines a value, or None for an input."""
        return next((i for i in self._instructions if value in i.results()), None)

    def finish(self, outputs: Sequence[int], name: str) -> Program:
        """Returns the program that computes `outputs`, without what they do not need."""
        return self._program(self._instructions, self.inputs, outputs, name)

    def finish_apart(
        self, boundary: int, outputs: Sequence[int], later: Sequence[int], extra: Sequence[int]
    ) -> tuple[Program, Program, tuple[int, ...]]:
        """Returns the program before a boundary, the one after it, and what the latter reads.

        Args:
            boundary: How many instructions belong to the first program.
            outputs: The outputs of the first program.
            later: The outputs of the second.
            extra: The inputs of the second that its caller passes.
        """
        first, second = self._instructions[:boundary], self._instructions[boundary:]
        after = self._program(second, self.inputs, later, "backward")
        defined = {v for i in after.instructions for v in i.results()} | set(extra)
        used = [v for i in after.instructions for v in i.inputs()] + list(later)
        saved = tuple(dict.fromkeys(v for v in used if v not in defined))
        after = dataclasses.replace(after, inputs=(*saved, *extra))
        inputs = [v for v in self.inputs if v not in extra]
        before = self._program(first, inputs, (*outputs, *saved), "forward")
        return before, after, saved

    def _program(
        self,
        instructions: Sequence[Instruction],
        inputs: Sequence[int],
        outputs: Sequence[int],
        name: str,
    ) -> Program:
        needed = set(outputs)
        kept: list[Instruction] = []
        for instruction in reversed(instructions):
            if any(v in needed for v in instruction.results()):
                needed.update(instruction.inputs())
                kept.append(instruction)
        return Program(
            specs=tuple(self.specs),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            instructions=tuple(reversed(kept)),
            num_scalars=len(self.scalar_values),
            name=name,
        )


def _later(op: torch._ops.OpOverload, a: DeviceMesh, b: DeviceMesh) -> DeviceMesh:
    if a == b:
        return a
    if a.stage and b.stage and (a.stage.parent, a.stage.axes) == (b.stage.parent, b.stage.axes):
        return a if a.stage.index > b.stage.index else b
    raise MeshError(
        f"the operands of {op} live on unrelated meshes:\n  {a!r}\n  {b!r}\n"
        "  Fix: x.redistribute(device_mesh=...) one of them, or take both meshes from one "
        "DeviceMesh.unbind call."
    )


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


def _default(argument: Any) -> Any:
    return argument.default_value if argument.has_default_value() else None


def _specs_in(tree: Any) -> list[Spec]:
    if isinstance(tree, Spec):
        return [tree]
    if type(tree) in (tuple, list):
        return [s for item in tree for s in _specs_in(item)]
    return []


def _flatten(results: Any) -> list[Any]:
    if isinstance(results, list):
        return [r for item in results for r in _flatten(item)]
    return [results]


def _rebuild(results: Any, values: Any) -> Any:
    if isinstance(results, list):
        return [_rebuild(item, values) for item in results]
    value = next(values)
    return results if value is None and not isinstance(results, Meta) else value


def _as_list(tree: Any) -> Any:
    return tree if isinstance(tree, list) else [tree]
