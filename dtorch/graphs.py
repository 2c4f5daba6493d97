"""The pass that gives the parts of a local program to CUDA graphs.

Takes a `LocalProgram` and gives one that computes the same: each run of operations on one mesh that
a graph can hold becomes one `LocalCall` of `run_graph`. What the host sees ends a part: a step in
which devices meet, a random operation (its generator is read on the host), a number that changes
from call to call, a function of the user's, a result whose shape depends on values.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from .local_specs import for_device
from .lowering import (
    LocalCall,
    LocalInstruction,
    LocalProgram,
    LocalShow,
    LocalStep,
    PerDevice,
    slots_read,
    slots_written,
    with_instructions,
)
from .mesh import DeviceMesh
from .program import Ref, ScalarRef, map_refs
from .redistribution import Collective
from .runtime import collectives, graph_calls
from .runtime.graph_calls import LocalJoin, Part, add_part, remove_parts, run_graph


def capture_parts(local: LocalProgram, donated: Collection[int] = ()) -> LocalProgram:
    """Returns a local program whose parts are captured as CUDA graphs when they run.

    Args:
        local: The program.
        donated: The inputs, by slot, that the caller gives up.
    """
    types = {device.type for device in local.devices}
    if not any(map(graph_calls.have_graphs, types)):
        kinds = ", ".join(sorted(types))
        graph_calls.say(f"cuda_graph=True does nothing on devices of type {kinds}")
        return local
    items = list(_grouped(local))
    outputs = {slot for slot, _ in local.outputs}
    readers: dict[int, set[int]] = {}
    for number, group in enumerate(items):
        for instruction in group:
            step = isinstance(instruction, LocalStep)
            for slot in (instruction.input,) if step else slots_read(instruction):
                readers.setdefault(slot, set()).add(number)
    parts = {number for number, group in enumerate(items) if len(group) > 1}
    last = {s: max(found) for s, found in readers.items()} | dict.fromkeys(outputs, len(items))
    viewed = _viewed(items, set(donated), last)
    made: list[LocalInstruction] = []
    texts, sources = list(local.texts), list(local.sources)
    inside: set[int] = set()
    numbers: list[int] = []
    for number, group in enumerate(items):
        if number not in parts:
            made += group
            continue
        written = dict.fromkeys(s for i in group for s in slots_written(i))
        kept = [s for s in written if s in outputs or readers.get(s, set()) - {number}]
        inside |= {s for s in kept if s not in outputs and readers[s] <= parts}
        numbers.append(add_part(_part(group, kept, inside, set(donated) - viewed[number])))
        made.append(_call(numbers[-1], group, kept, len(texts)))
        texts.append(_text(group, local.texts))
        sources.append(local.sources[group[0].origin])
    result = with_instructions(local, made, texts, sources)
    weakref.finalize(result, remove_parts, numbers).atexit = False
    return result


def _inputs(group: Sequence[LocalInstruction]) -> list[int]:
    written = {s for i in group for s in slots_written(i)}
    read = dict.fromkeys(s for i in group for s in slots_read(i))
    return [s for s in read if s not in written]


def _mesh(instruction: LocalInstruction) -> DeviceMesh:
    """The devices that run an instruction, if it is within each of them."""
    if isinstance(instruction, LocalCall):
        return instruction.mesh
    return instruction.step.source.mesh


def _call(
    number: int, group: Sequence[LocalInstruction], outputs: Sequence[int], origin: int
) -> LocalCall:
    """The call that a part becomes."""
    mesh = _mesh(group[0])
    positions = range(len(mesh.devices))
    position = PerDevice(positions) if len(positions) > 1 else 0
    args = (number, position, [Ref(s) for s in _inputs(group)])
    return LocalCall(run_graph, args, (), tuple(outputs), mesh, origin)


def _part(
    group: Sequence[LocalInstruction],
    outputs: Sequence[int],
    inside: set[int],
    donated: Collection[int],
) -> Part:
    written = dict.fromkeys(s for i in group for s in slots_written(i))
    inputs = _inputs(group)
    numbers = {slot: i for i, slot in enumerate((*inputs, *written))}
    mesh = _mesh(group[0])

    def renumbered(instruction: LocalInstruction, index: int) -> LocalCall | LocalJoin:
        frees = tuple(numbers[s] for s in instruction.frees if s not in outputs)
        if isinstance(instruction, LocalStep):
            found = collectives.meeting(instruction.step, mesh.devices[index])
            assert found is not None
            read, wrote = numbers[instruction.input], numbers[instruction.output]
            return LocalJoin(found, read, (wrote,), frees)
        assert isinstance(instruction, LocalCall)
        args, kwargs = for_device((instruction.args, instruction.kwargs), index)
        args, kwargs = map_refs((args, kwargs), lambda ref: Ref(numbers[ref.id]))
        results = tuple(None if s is None else numbers[s] for s in instruction.outputs)
        return dataclasses.replace(
            instruction, args=args, kwargs=kwargs, outputs=results, frees=frees
        )

    devices = range(len(mesh.devices))
    return Part(
        operations=tuple(tuple(renumbered(i, device) for i in group) for device in devices),
        num_inputs=len(inputs),
        num_slots=len(numbers),
        outputs=tuple(numbers[s] for s in outputs),
        inside=frozenset(numbers[s] for s in outputs if s in inside),
        from_parts=frozenset(numbers[s] for s in inputs if s in inside),
        donated=frozenset(numbers[s] for s in inputs if s in donated),
        text=f"a part of {len(group)} operations on {', '.join(map(str, mesh.devices))}",
    )


def _viewed(
    items: Sequence[Sequence[LocalInstruction]], inputs: set[int], last: Mapping[int, int]
) -> list[set[int]]:
    """For each group, the inputs of which a view from before is read there or later.

    Args:
        items: The groups.
        inputs: The inputs, by slot.
        last: The group that reads a slot last.
    """
    views: dict[int, set[int]] = {}  # of which inputs a slot may be one
    found = list[set[int]]()
    for number, group in enumerate(items):
        found.append({i for s, of in views.items() if last.get(s, -1) >= number for i in of})
        for instruction in group:
            if not _is_fresh(instruction):
                step = isinstance(instruction, LocalStep)
                read = (instruction.input,) if step else slots_read(instruction)
                of = {i for s in read for i in views.get(s, {s} & inputs)}
                views |= dict.fromkeys(slots_written(instruction), of)
    return found


def _is_fresh(instruction: LocalInstruction) -> bool:
    """Whether results are in memory of their own, whatever the operands are."""
    if not isinstance(instruction, LocalCall):
        return False
    op = instruction.op
    return (
        op.namespace == "aten"
        and all(r.alias_info is None for r in op._schema.returns)
        and op not in (_aten._unsafe_view.default, _aten.lift.default)  # whose schemas do not say
        and not op._can_decompose()
    )


def _text(group: Sequence[LocalInstruction], texts: Sequence[str]) -> str:
    found = list(dict.fromkeys(texts[i.origin] for i in group))
    if len(found) > 8:
        found[4:-3] = [f"... {len(found) - 7} more ..."]
    return "\n    ".join(["one of these, which are launched as one graph:", *found])


# -- which operations ------------------------------------------------------------------------


def _grouped(local: LocalProgram) -> Iterator[list[LocalInstruction]]:
    """Yields the instructions, those that are to be a part together."""
    pending: list[LocalInstruction] = []
    for instruction in local.instructions:
        if isinstance(instruction, LocalShow):
            continue  # they are placed anew
        fits = _fits(instruction, local)
        if pending and not (fits and _mesh(instruction) == _mesh(pending[0])):
            yield from _worth_it(pending)
            pending = []
        if fits:
            pending.append(instruction)
        else:
            yield [instruction]
    yield from _worth_it(pending)


def _worth_it(group: list[LocalInstruction]) -> Iterator[list[LocalInstruction]]:
    """Yields instructions as a part, or one by one where there is nothing to gain."""
    num_launches = sum(not _is_view(i) for i in group)
    yield from [group] if num_launches > 1 else ([i] for i in group)


def _is_view(instruction: LocalInstruction) -> bool:
    if isinstance(instruction, LocalCall):
        return all(r.alias_info is not None for r in instruction.op._schema.returns)
    return instruction.step.kind is Collective.RELABEL


_UNFIT = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
_HOST = ("linalg", "_linalg", "cholesky", "geqrf", "lu_", "ormqr", "svd", "triangular_solve")
_aten = torch.ops.aten
_BY_INDEX = {_aten.index, _aten.index_put, _aten._unsafe_index, _aten._unsafe_index_put}


def _fits(instruction: LocalInstruction, local: LocalProgram) -> bool:
    """Whether an instruction can be captured: the host only launches it, always with the same."""
    if not graph_calls.have_graphs(_mesh(instruction).device_type):
        return False
    if not isinstance(instruction, LocalCall):
        return instruction.step.kind.is_local
    op = instruction.op
    return (
        instruction.draws is None
        and (op.namespace == "aten" or op.name() in _OWN)
        and not op._schema.is_mutable
        and (
            not _reads_bools(instruction, local)
            if op.overloadpacket in _BY_INDEX
            else _UNFIT.isdisjoint(op.tags) or _is_attention(instruction)
        )
        and not op._schema.name.removeprefix("aten::").startswith(_HOST)
        and not _has(ScalarRef, (instruction.args, instruction.kwargs))
        and not any(isinstance(v, torch.device) and v.type == "cpu" for _, v in instruction.kwargs)
    )


def _is_attention(call: LocalCall) -> bool:
    """Whether it is an attention without dropout, which draws no random numbers."""
    if not call.op._schema.name.startswith("aten::_scaled_dot_product_"):
        return False
    names = [a.name for a in call.op._schema.arguments]
    given = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
    return given.get("dropout_p", 0.0) == 0.0


_OWN = {"dtorch::fold_mm", "dtorch::attend_block", "dtorch::run_callable", "dtorch::run_compiled"}
"""Operations of dtorch's that only launch kernels."""


def _has(kind: type, tree: Any) -> bool:
    if type(tree) in (tuple, list, PerDevice):
        return any(_has(kind, item) for item in tree)
    return type(tree) is kind


def _reads_bools(call: LocalCall, local: LocalProgram) -> bool:
    """Whether what says where to read may be a mask, whose elements are counted on the host."""
    slots = slots_read(call)[1:]
    known = [local.specs[s].dtype for s in slots if s < len(local.specs)]
    return len(known) < len(slots) or any(d in (torch.bool, torch.uint8) for d in known)
