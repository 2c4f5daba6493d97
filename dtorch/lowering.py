"""Lowering: from the global program to the local one, which a device runs.

Takes a `Program` and gives a `LocalProgram`: the same instructions over shards. There is one
local program for all devices; what depends on a device's coordinate (sizes of views and
factories, bounds of uneven shards) is a `PerDevice` table, indexed by the device's place in the
mesh of its instruction. Each instruction says after which use a slot is free. The local form
is plain data, an `OpOverload` with slots and constants, so that any executor can run it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .mesh import Device, DeviceMesh
from .program import (
    Apply,
    Instruction,
    Program,
    Ref,
    SourceLine,
    format_instruction,
    map_refs,
    refs,
)
from .redistribution import Step
from .spec import Spec

aten = torch.ops.aten


class PerDevice(tuple):
    """A constant that differs between devices: one value per device of the mesh, in order."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class LocalCall:
    """One ATen operation on local tensors.

    Attributes:
        op: The operation.
        args: Positional arguments: `Ref` (a slot), `ScalarRef`, `PerDevice`, or constants.
        kwargs: Keyword arguments, likewise, as pairs.
        outputs: The slots of its results; None for one that is dropped.
        mesh: The devices that run it.
        origin: The index of the global instruction that it comes from.
        draws: For a random operation, the slots of the generator state before and after.
        frees: The slots that nothing reads after it.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int | None, ...]
    mesh: DeviceMesh
    origin: int
    draws: tuple[int, int] | None = None
    frees: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class LocalShow:
    """The beginning of a step: a device shows its part to its peers, and does not wait."""

    step: Step
    input: int
    number: int
    origin: int
    frees: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class LocalStep:
    """One step of a redistribution, from slot `input` to slot `output`.

    A step that communicates has been begun by a `LocalShow` of the same number; here a device
    waits for its peers and takes what it needs.
    """

    step: Step
    input: int
    output: int
    number: int
    origin: int
    frees: tuple[int, ...] = ()


LocalInstruction = LocalCall | LocalShow | LocalStep


@dataclasses.dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class LocalProgram:
    """What every device of a program runs.

    Attributes:
        devices: The devices that take part, in the order of first appearance.
        num_slots: How many slots a device needs.
        inputs: The slots that the caller fills, with the mesh of each.
        outputs: The slots that the caller receives, with the mesh of each.
        instructions: What runs, in order; a device skips what is not on its meshes.
        texts: The printed global instructions, by index, for messages.
        sources: The user's lines, by the same index.
        specs: What the first slots hold, one for each value of the global program.
    """

    devices: tuple[Device, ...]
    num_slots: int
    inputs: tuple[tuple[int, DeviceMesh], ...]
    outputs: tuple[tuple[int, DeviceMesh], ...]
    instructions: tuple[LocalInstruction, ...]
    texts: tuple[str, ...]
    sources: tuple[SourceLine | None, ...]
    specs: tuple[Spec, ...] = ()
    name: str = "program"

    def __str__(self) -> str:
        lines = [f"local {self.name} on {', '.join(map(str, self.devices))}:"]
        lines += [f"  {_format_local(i)}" for i in self.instructions]
        return "\n".join([*lines, f"  return {', '.join(f'%{s}' for s, _ in self.outputs)}"])


class LocalContext:
    """What a `Localize` function sees and writes: one `Apply`, its specs, and `emit`."""

    def __init__(self, program: Program, origin: int, new_slot: Callable[[], int]) -> None:
        instruction = program.instructions[origin]
        assert isinstance(instruction, Apply)
        self.op = instruction.op
        self.args = instruction.args
        self.kwargs = dict(instruction.kwargs)
        self.mesh = instruction.mesh
        self.outputs = instruction.outputs
        self.emitted: list[LocalCall] = []
        self._instruction = instruction
        self._specs = program.specs
        self._origin = origin
        self.new_slot = new_slot

    def spec(self, ref: Ref) -> Spec:
        """Returns the spec of an operand."""
        return self._specs[ref.id]

    def output_spec(self, index: int = 0) -> Spec:
        """Returns the spec of a result."""
        value = self.outputs[index]
        assert value is not None
        return self._specs[value]

    def per_device(self, value: Callable[[int], Any]) -> Any:
        """Returns ``value(i)`` of each device as a table, or the value where all agree."""
        values = [value(i) for i in range(len(self.mesh.devices))]
        return values[0] if all(v == values[0] for v in values) else PerDevice(values)

    def emit(
        self,
        op: torch._ops.OpOverload,
        *args: Any,
        outputs: Sequence[int | None] | None = None,
        mesh: DeviceMesh | None = None,
        **kwargs: Any,
    ) -> Ref:
        """Adds a local operation; its result is a new slot, or `outputs` where given.

        Args:
            op: The operation.
            args: Its arguments.
            outputs: The slots of its results.
            mesh: The devices that run it, all of the instruction's if None.
            kwargs: Its keyword arguments.
        """
        slots = (self.new_slot(),) if outputs is None else tuple(outputs)
        mesh = mesh or self.mesh
        call = LocalCall(op, args, tuple(kwargs.items()), slots, mesh, self._origin)
        self.emitted.append(call)
        return Ref(next((s for s in slots if s is not None), -1))

    def argument(self, name: str) -> Any:
        """Returns an argument by its name in the schema; None where the call leaves it out."""
        place = self._names.index(name)
        return self.args[place] if place < len(self.args) else self.kwargs.get(name)

    def emit_with(self, op: torch._ops.OpOverload | None = None, /, **changes: Any) -> None:
        """Adds the operation on the shards with other values for some arguments.

        Args:
            op: Another with the same arguments in its place.
            changes: The values, by name.
        """
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in changes.items():
            place = self._names.index(name)
            if place < len(args):
                args[place] = value
            else:
                kwargs[name] = value
        self.emit(op or self.op, *args, outputs=self.outputs, **kwargs)

    @property
    def _names(self) -> list[str]:
        return [a.name for a in self.op._schema.arguments]

    def emit_default(self) -> None:
        """Adds the operation itself, on the shards."""
        i = self._instruction
        self.emitted.append(
            LocalCall(i.op, i.args, i.kwargs, i.outputs, i.mesh, self._origin, i.draws)
        )


def lower(program: Program) -> LocalProgram:
    """Returns the local program of a global one."""
    num_slots = len(program.specs)

    def new_slot() -> int:
        nonlocal num_slots
        num_slots += 1
        return num_slots - 1

    local: list[LocalInstruction] = []
    for origin, instruction in enumerate(program.instructions):
        local += _lower_instruction(program, origin, instruction, new_slot)
    return LocalProgram(
        devices=_devices(program),
        num_slots=num_slots,
        inputs=tuple((v, program.specs[v].mesh) for v in program.inputs),
        outputs=tuple((v, program.specs[v].mesh) for v in program.outputs),
        instructions=_with_frees(_with_shows(local), program.outputs),
        texts=tuple(format_instruction(i) for i in program.instructions),
        sources=tuple(i.source for i in program.instructions),
        specs=tuple(program.specs),
        name=program.name,
    )


def with_instructions(
    program: LocalProgram,
    instructions: Iterable[LocalInstruction],
    texts: Sequence[str],
    sources: Sequence[SourceLine | None],
) -> LocalProgram:
    """Returns a local program with other instructions, their texts and lines; without shows."""
    made = _with_frees(_with_shows(list(instructions)), (slot for slot, _ in program.outputs))
    return dataclasses.replace(
        program, instructions=made, texts=tuple(texts), sources=tuple(sources)
    )


def _lower_instruction(
    program: Program, origin: int, instruction: Instruction, new_slot: Callable[[], int]
) -> list[LocalInstruction]:
    if not isinstance(instruction, Apply):
        step = instruction.step
        return [LocalStep(step, instruction.input, instruction.output, origin, origin)]
    context = LocalContext(program, origin, new_slot)
    if instruction.localize is None:
        context.emit_default()
    else:
        instruction.localize(context)
    if instruction.op in STRIDES_ASSUMED:
        return _with_strides_of_operands(context, program.specs, instruction)
    if instruction.op in STRIDES_CHOSEN:
        return _with_strides_of_results(context, program.specs)
    return list(context.emitted)


STRIDES_ASSUMED = {
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    aten._linalg_det.default,
    aten._linalg_slogdet.default,
    aten._pdist_forward.default,
    aten._pdist_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.nll_loss2d_backward.default,
}
"""Operations whose kernels take it for granted how operands lie in memory, as PyTorch calls them. A
part may lie otherwise than the whole: the order of its strides comes from what computed it."""

STRIDES_CHOSEN = {aten.convolution.default, aten.convolution_backward.default}
"""Operations whose kernels choose how results lie in memory, for a part perhaps otherwise."""


def _with_strides_of_operands(
    context: LocalContext, specs: Sequence[Spec], instruction: Apply
) -> list[LocalInstruction]:
    calls, context.emitted = context.emitted, []
    read = {v for call in calls for v in slots_read(call)}
    operands = [v for v in dict.fromkeys(instruction.inputs()) if v in read]
    laid = {v: _laid_out(context, Ref(v), specs[v]) for v in operands}

    def changed(ref: Ref) -> Ref:
        return laid.get(ref.id, ref)

    calls = [
        dataclasses.replace(c, args=map_refs(c.args, changed), kwargs=map_refs(c.kwargs, changed))
        for c in calls
    ]
    return [*context.emitted, *calls]


def _with_strides_of_results(
    context: LocalContext, specs: Sequence[Spec]
) -> list[LocalInstruction]:
    raw = {v: context.new_slot() for v in context.outputs if v is not None}
    context.emitted = [
        dataclasses.replace(c, outputs=tuple(o if o is None else raw.get(o, o) for o in c.outputs))
        for c in context.emitted
    ]
    for value, slot in raw.items():
        _laid_out(context, Ref(slot), specs[value], outputs=[value])
    return list(context.emitted)


def _laid_out(
    context: LocalContext, part: Ref, spec: Spec, outputs: Sequence[int] | None = None
) -> Ref:
    """Gives a part strides in the order of the whole tensor's; it is copied only if it must be.

    A view gives dims of size one, which a contiguous tensor may have with any stride, their own.
    """
    order, sizes = memory_order(spec), spec.local_shapes
    is_in_order, has_ones = order == list(range(spec.ndim)), any(1 in size for size in sizes)

    def emit(op: Any, part: Ref, *args: Any, is_last: bool) -> Ref:
        return context.emit(op, part, *args, outputs=outputs if is_last else None)

    if not is_in_order:
        part = context.emit(aten.permute.default, part, order)
    part = emit(aten.contiguous.default, part, is_last=is_in_order and not has_ones)
    if has_ones:
        size = context.per_device(lambda i: [sizes[i][d] for d in order])
        part = emit(aten.view.default, part, size, is_last=is_in_order)
    if not is_in_order:
        inverse = [order.index(d) for d in range(spec.ndim)]
        part = emit(aten.permute.default, part, inverse, is_last=True)
    return part


def memory_order(spec: Spec) -> list[int]:
    """Returns the dims from the one with the largest stride on."""
    return sorted(range(spec.ndim), key=lambda d: (-spec.stride[d], spec.shape[d] == 1))


def _devices(program: Program) -> tuple[Device, ...]:
    values = {*program.inputs, *program.outputs}
    values.update(v for i in program.instructions for v in (*i.inputs(), *i.results()))
    meshes = dict.fromkeys(program.specs[v].mesh for v in sorted(values))
    return tuple(dict.fromkeys(d for mesh in meshes for d in mesh.devices))


def slots_read(instruction: LocalInstruction) -> tuple[int, ...]:
    """Returns the slots that a local instruction reads."""
    if isinstance(instruction, LocalShow):
        return (instruction.input,)
    if isinstance(instruction, LocalStep):
        return (instruction.input,) if instruction.step.kind.is_local else ()
    state = () if instruction.draws is None else (instruction.draws[0],)
    return (*(r.id for r in refs((instruction.args, instruction.kwargs))), *state)


def slots_written(instruction: LocalInstruction) -> tuple[int, ...]:
    """Returns the slots that a local instruction fills."""
    if isinstance(instruction, LocalShow):
        return ()
    if isinstance(instruction, LocalStep):
        return (instruction.output,)
    state = () if instruction.draws is None else (instruction.draws[1],)
    return (*(s for s in instruction.outputs if s is not None), *state)


def live_before(program: LocalProgram, origin: int) -> dict[int, int | None]:
    """Returns the values that a device holds before it runs an instruction.

    Args:
        program: The program.
        origin: The number of the global instruction.

    Returns:
        Of each global value, the number of the instruction that made it, None for an input.
    """
    live: dict[int, int | None] = {slot: None for slot, _ in program.inputs}
    for instruction in program.instructions:
        if instruction.origin == origin and not isinstance(instruction, LocalShow):
            break
        live |= dict.fromkeys(slots_written(instruction), instruction.origin)
        for slot in instruction.frees:
            live.pop(slot, None)
    return {slot: made for slot, made in live.items() if slot < len(program.specs)}


def _with_shows(instructions: list[LocalInstruction]) -> list[LocalInstruction]:
    """Lets devices show what their peers take as soon as it is there, and take it when needed.

    Then a device that is ahead computes on instead of waiting, and the peers of one that is late
    have already shown it everything.
    """
    written = {
        s: i for i, instruction in enumerate(instructions) for s in slots_written(instruction)
    }
    shows: dict[int, list[LocalInstruction]] = {}
    for instruction in instructions:
        if isinstance(instruction, LocalStep) and not instruction.step.kind.is_local:
            show = LocalShow(
                instruction.step, instruction.input, instruction.number, instruction.origin
            )
            shows.setdefault(written.get(instruction.input, -1), []).append(show)
    result = shows.get(-1, [])
    for index, instruction in enumerate(instructions):
        result += [instruction, *shows.get(index, ())]
    return result


def _with_frees(
    instructions: list[LocalInstruction], outputs: Iterable[int]
) -> tuple[LocalInstruction, ...]:
    kept = set(outputs)
    freed: list[LocalInstruction] = []
    for instruction in reversed(instructions):
        touched = dict.fromkeys((*slots_read(instruction), *slots_written(instruction)))
        last = tuple(s for s in touched if s not in kept)
        kept.update(last)
        freed.append(dataclasses.replace(instruction, frees=last))
    return tuple(reversed(freed))


def _format_local(instruction: LocalInstruction) -> str:
    frees = f"  free {', '.join(f'%{s}' for s in instruction.frees)}" if instruction.frees else ""
    if isinstance(instruction, LocalShow):
        return f"show %{instruction.input} for #{instruction.number}{frees}"
    if isinstance(instruction, LocalStep):
        kind = instruction.step.kind
        source = f"%{instruction.input}" if kind.is_local else f"#{instruction.number}"
        return f"%{instruction.output} = {kind.value}({source}){frees}"
    arguments = [repr(a) for a in instruction.args]
    arguments += [f"{k}={v!r}" for k, v in instruction.kwargs]
    results = ", ".join("_" if s is None else f"%{s}" for s in instruction.outputs)
    return f"{results} = {instruction.op}({', '.join(arguments)}){frees}"
