"""`Builder`: records operations on values, with their layouts, into a program.

Takes one operation at a time, over value numbers. It infers the results, looks up the rule,
lets propagation choose layouts, adds the redistributions that the choice needs (once for each
value and target), and appends the instruction. `finish` drops what nobody reads.

A view that changes nothing is its argument. The same view of a value, and the same operation on
what depends on constants alone, are recorded once; other repeated operations are left as they are,
since a function may compute again what it would not keep (activation checkpointing).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .custom_ops import checked
from .decision import Decision, decide, flattened, legal_placements, tensor_names
from .errors import MeshError
from .infer import Question, answer, argument_names, question
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
    needed,
    refs,
)
from .redistribution import Collective, Movement, Step, permute, plan
from .spec import Spec
from .strictness import is_strict, refuse_communication

aten = torch.ops.aten


class Builder:
    """A program in the making.

    Args:
        source: Returns the user's line that is being traced.

    Attributes:
        specs: The spec of each value.
        inputs: The values that are inputs.
        constants: The values that are the same at every call: constant inputs (whoever adds one
            says so here), and what is computed from them and from factories alone.
        scalar_values: The values of the run-time scalars in this trace.
    """

    def __init__(self, source: Callable[[], SourceLine | None]) -> None:
        self.specs: list[Spec] = []
        self.constants: set[int] = set()
        self.inputs: list[int] = []
        self.scalar_values: list[Any] = []
        self._instructions: list[Instruction] = []
        self._moved: dict[tuple[int, Spec | Step], int] = {}
        self._reduced: dict[int, int] = {}
        self._kept: dict[Any, tuple[int | None, ...]] = {}
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

    def permute(self, value: int, movement: Movement, target: Spec) -> int:
        """Returns the number of a value whose ranges of a split dim have moved.

        Args:
            value: The value, without conj and neg bits.
            movement: What moves where.
            target: The spec of the result, which is split as the value is.
        """
        return self._add_step(value, permute(self.specs[value], movement, target))

    def with_stride(self, value: int, stride: tuple[int, ...]) -> int:
        """Returns the number of a value that PyTorch would give other strides on one device."""
        spec = self.specs[value]
        if spec.stride == stride:
            return value
        options = (spec.mesh, spec.placements, stride, spec.conj, spec.neg)
        target = Spec.of(spec.shape, spec.dtype, *options)
        return self._add_step(value, Step(Collective.RELABEL, (), spec, target, 0))

    def results(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Returns the results of an operation, each tensor as a `Meta`, without recording it."""
        asked = question(op, tuple(args), _ordered(op, kwargs), self.specs, self.scalar_values)
        return flattened(answer(asked))

    def _add_step(self, value: int, step: Step) -> int:
        key = (value, step)
        if key not in self._moved:
            moved = self._new_value(step.target)
            if value in self.constants:
                self.constants.add(moved)
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
        """Records an operation and returns its results: tensors by their numbers, numbers `Known`.

        Args:
            op: The operation; it neither mutates nor aliases its arguments.
            args: Its arguments, tensors as `Ref`, run-time scalars as `ScalarRef`.
            kwargs: Its keyword arguments, likewise.
            mesh: Where it runs, if it has no tensor arguments.
            wanted: Placements that the first result shall have if a strategy gives them.
            draws: The generator state that a random operation starts from; the new state is
                appended to the results.
        """
        args, kwargs = tuple(args), _ordered(op, kwargs)
        given = operands = [r.id for r in refs((args, tuple(kwargs.values())))]
        home = self._home(op, operands)
        if home is not None:
            operands = [self.brought(v, home) for v in operands]
            args, kwargs = _with_operands(args, kwargs, operands)
        asked = question(op, args, kwargs, self.specs, self.scalar_values)
        decision = decide(asked, mesh, wanted, draws is not None)
        if is_strict() and operands:
            self._refuse_communication(asked, given, decision)
        if any(self.specs[v] is not s for v, s in zip(operands, decision.inputs, strict=True)):
            operands = list(map(self.redistribute, operands, decision.inputs))
            args, kwargs = _with_operands(args, kwargs, operands)
        if draws is None:
            outputs = self._results(asked, args, kwargs, operands, decision)
            return _as_list(_rebuild(decision.results, iter(outputs)))
        state = self._next_state(draws, decision.mesh)
        outputs = self._append(op, args, kwargs, decision, state)
        return _rebuild(decision.results, iter(outputs)), state[1]

    def _refuse_communication(
        self, asked: Question, given: Sequence[int], decision: Decision
    ) -> None:
        before = [self.specs[self._reduced.get(v, v)] for v in given]
        after = decision.inputs
        if decision.movement is not None:  # which communicates, unlike the operation on wholes
            dim, (first, *others) = decision.movement.dim, after
            whole = (Replicate() if p.is_shard(dim) else p for p in first.placements)
            after = (first.with_placements(tuple(whole)), *others)
        legal = [legal_placements(asked, axis) for axis in range(decision.mesh.ndim)]
        refuse_communication(asked.op, tensor_names(asked), before, after, legal)

    def moves_shards(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> bool:
        """Returns whether an operation would have to move the shards of an argument first."""
        kwargs = _ordered(op, kwargs)
        operands = [r.id for r in refs((tuple(args), tuple(kwargs.values())))]
        operands = [self._reduced.get(v, v) for v in operands]
        if len({self.specs[v].mesh for v in operands}) != 1:  # they are brought to one mesh first
            return False
        args, kwargs = _with_operands(tuple(args), kwargs, operands)
        asked = question(op, args, kwargs, self.specs, self.scalar_values)
        decision = decide(asked)
        moved = zip(operands, decision.inputs, strict=True)
        return any(_leaves_a_shard(self.specs[v], after) for v, after in moved)

    def _results(
        self,
        asked: Question,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: Sequence[int],
        decision: Decision,
    ) -> tuple[int | None, ...]:
        """The results of an operation that is not random, recorded now or before."""
        if decision.is_identity and self.specs[operands[0]] is decision.outputs[0]:
            return (operands[0],)
        if decision.movement is not None:
            return (self._moved_by(operands[0], decision),)
        is_constant = self.constants.issuperset(operands)
        if not (asked.is_a_key and (decision.is_view or is_constant)):
            return self._append(asked.op, args, kwargs, decision)
        scalars = tuple(a for a in (*args, *kwargs.values()) if type(a) is ScalarRef)
        key = (asked, tuple(operands), scalars, decision.outputs)
        if key not in self._kept:
            self._kept[key] = self._append(asked.op, args, kwargs, decision)
            if is_constant:
                self.constants.update(v for v in self._kept[key] if v is not None)
        return self._kept[key]

    def _moved_by(self, value: int, decision: Decision) -> int:
        """The result of an operation that only moves ranges of a split dim."""
        (target,) = decision.outputs
        assert target is not None and decision.movement is not None
        moved, dim = self.permute(value, decision.movement, target), decision.movement.dim
        axes = zip(target.mesh.shape, target.placements, strict=True)
        count = math.prod(n for n, p in axes if p.is_shard(dim))
        if 0 < target.shape[dim] < count:
            # What is too small for all devices is whole on each.
            whole = (Replicate() if p.is_shard(dim) else p for p in target.placements)
            moved = self.redistribute(moved, target.with_placements(tuple(whole)))
        return moved

    def _append(
        self,
        op: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        decision: Decision,
        state: tuple[int, int] | None = None,
    ) -> tuple[int | None, ...]:
        outputs = tuple(None if s is None else self._new_value(s) for s in decision.outputs)
        instruction = Apply(
            op,
            args,
            tuple(kwargs.items()),
            outputs,
            decision.mesh,
            decision.localize,
            state,
            decision.is_fallback,
            self._source(),
        )
        self._instructions.append(instruction)
        return outputs

    def _next_state(self, draws: int, home: DeviceMesh) -> tuple[int, int]:
        """The states of a generator before and after a random operation."""
        before = self.move(draws, home, (Replicate(),) * home.ndim)
        return before, self._new_value(self.specs[before])

    def _home(self, op: torch._ops.OpOverload, operands: Sequence[int]) -> DeviceMesh | None:
        """The mesh to bring operands to, their own or the latest of stages; None if they stay."""
        meshes = {id(mesh): mesh for mesh in [self.specs[v].mesh for v in operands]}
        if len(meshes) < 2 and self._reduced.keys().isdisjoint(operands):
            return None
        return functools.reduce(functools.partial(_later, op), meshes.values())

    def common_home(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> DeviceMesh | None:
        """Returns the mesh to bring the operands of an operation to if they are on several."""
        operands = [r.id for r in refs((tuple(args), tuple(kwargs.values())))]
        if len({self.specs[v].mesh for v in operands}) < 2:
            return None
        return self._home(op, operands)

    def brought(self, value: int, home: DeviceMesh) -> int:
        """Returns the number of an operand on the mesh of its operation."""
        # A partial value that was reduced once is not kept partial for its next use.
        value = self._reduced.get(value, value)
        spec = self.specs[value]
        if spec.mesh == home:
            return value
        alike = spec.mesh.shape == home.shape
        return self.move(value, home, spec.placements if alike else (Replicate(),) * home.ndim)

    def with_scalars(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Returns arguments with the run-time scalars among them as they are in this trace."""
        return tuple(self.scalar_values[a.number] if type(a) is ScalarRef else a for a in args)

    def reduced(self, value: int) -> int | None:
        """Returns a partial value that has been reduced already, or None."""
        return self._reduced.get(value)

    def producer(self, value: int) -> Instruction | None:
        """Returns the instruction that defines a value, or None for an input."""
        return next((i for i in self._instructions if value in i.results()), None)

    def check(self, info: int, name: str, is_matrix: bool) -> bool:
        """Makes whatever is computed with an operation's results depend on what its `info` says.

        Args:
            info: The operation's result that is zero where it has succeeded.
            name: What an error calls the operation.
            is_matrix: Whether it is of one matrix, not of a batch.

        Returns:
            Whether an instruction gives `info`; otherwise nothing is done.
        """
        found = self.producer(info)
        if not isinstance(found, Apply):
            return False
        at = next(n for n, i in enumerate(self._instructions) if i is found)
        # What is checked takes the old numbers, under which the rest of the trace knows it.
        results = [v for v in found.outputs if v is not None]
        before = {v: self._new_value(self.specs[v]) for v in results}
        outputs = tuple(None if v is None else before[v] for v in found.outputs)
        args = ([Ref(before[v]) for v in results], Ref(before[info]), name, is_matrix)
        after = Apply(checked, args, (), tuple(results), found.mesh, source=self._source())
        self._instructions[at : at + 1] = dataclasses.replace(found, outputs=outputs), after
        return True

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
        after = self._program(self._instructions[boundary:], self.inputs, later, "backward")
        saved = _undefined(after, extra)
        after = dataclasses.replace(after, inputs=(*saved, *extra))
        inputs = [v for v in self.inputs if v not in extra]
        first = self._instructions[:boundary]
        before = self._program(first, inputs, (*outputs, *saved), "forward")
        return before, after, saved

    def finish_after(
        self, boundary: int, later: Sequence[int], inputs: Sequence[int]
    ) -> Program | None:
        """Returns another program after a boundary, or None if it reads more than its inputs.

        Args:
            boundary: How many instructions do not belong to it.
            later: Its outputs.
            inputs: Its inputs.
        """
        after = self._program(self._instructions[boundary:], inputs, later, "backward")
        return None if _undefined(after, inputs) else after

    def _program(
        self,
        instructions: Sequence[Instruction],
        inputs: Sequence[int],
        outputs: Sequence[int],
        name: str,
    ) -> Program:
        return Program(
            specs=tuple(self.specs),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            instructions=needed(instructions, outputs),
            num_scalars=len(self.scalar_values),
            name=name,
        )


def _undefined(program: Program, given: Iterable[int]) -> tuple[int, ...]:
    """The values that a program reads without defining them or being given them."""
    defined = {v for i in program.instructions for v in i.results()} | set(given)
    used = [v for i in program.instructions for v in i.inputs()] + list(program.outputs)
    return tuple(dict.fromkeys(v for v in used if v not in defined))


def _leaves_a_shard(now: Spec, after: Spec) -> bool:
    if not now.num_bytes:
        return False
    axes = zip(now.mesh.shape, now.placements, after.placements, strict=True)
    return any(n > 1 and before.is_shard() and before != to for n, before, to in axes)


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


class Known(NamedTuple):
    """A number among the results of an operation, which is not that of a value."""

    value: int


def _rebuild(results: Any, values: Any) -> Any:
    if isinstance(results, list):
        return [_rebuild(item, values) for item in results]
    value = next(values)
    if value is not None:
        return value
    return Known(results) if type(results) is int else results


def _as_list(tree: Any) -> Any:
    return tree if isinstance(tree, list) else [tree]


def _with_operands(
    args: tuple[Any, ...], kwargs: dict[str, Any], operands: Iterable[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with other operands, in their order."""
    values = iter(operands)

    def following(ref: Ref) -> Ref:
        return Ref(next(values))

    return map_refs(args, following), {k: map_refs(v, following) for k, v in kwargs.items()}


def _ordered(op: torch._ops.OpOverload, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the order of the schema."""
    if len(kwargs) < 2:
        return kwargs
    names = argument_names(op)
    return {k: kwargs[k] for k in sorted(kwargs, key=names.index)}
