"""`Program`: what runs, as plain data; its printer and its verifier.

A program is a straight-line list of instructions over numbered values, each a global tensor
with a layout (`Spec`). It takes inputs, returns outputs, and reads run-time scalars. There are
two kinds of instruction: `Apply` runs one ATen operation on every device of a mesh, and
`Redistribute` takes one step from one layout to another. Programs are immutable, hold no tensor
data, and pickle (operations by name).
"""

from __future__ import annotations

import copyreg
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .mesh import DeviceMesh
from .redistribution import Step
from .spec import Spec

if TYPE_CHECKING:
    from .lowering import LocalContext

Localize = Callable[["LocalContext"], None]
"""Writes the local instructions of one `Apply`; see `lowering`."""


class Ref(NamedTuple):
    """A tensor value of a program, by its number."""

    id: int

    def __repr__(self) -> str:
        return f"%{self.id}"


class ScalarRef(NamedTuple):
    """A run-time scalar of a program, by its number."""

    number: int

    def __repr__(self) -> str:
        return f"${self.number}"


class SourceLine(NamedTuple):
    """The user's line that issued an instruction."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def short(self) -> str:
        """The file's name and the line."""
        return f"{os.path.basename(self.file)}:{self.line}"


@dataclasses.dataclass(frozen=True, slots=True)
class Apply:
    """One ATen operation on every device of a mesh.

    Attributes:
        op: The operation.
        args: Its positional arguments; tensors are `Ref`, run-time scalars `ScalarRef`.
        kwargs: Its keyword arguments, likewise, as pairs.
        outputs: The values that its tensor results become; None for a result nobody uses.
        mesh: Where it runs.
        localize: Writes what each device runs, where that is not simply `op` on the shards.
        draws: For a random operation, the values of the generator state before and after.
        is_fallback: Whether it runs replicated because the operation has no sharding rule.
        source: The user's line.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int | None, ...]
    mesh: DeviceMesh
    localize: Localize | None = None
    draws: tuple[int, int] | None = None
    is_fallback: bool = False
    source: SourceLine | None = None

    def inputs(self) -> tuple[int, ...]:
        """Returns the numbers of the values that it reads."""
        state = () if self.draws is None else (self.draws[0],)
        return (*(r.id for r in refs((self.args, self.kwargs))), *state)

    def results(self) -> tuple[int, ...]:
        """Returns the numbers of the values that it defines."""
        state = () if self.draws is None else (self.draws[1],)
        return (*(o for o in self.outputs if o is not None), *state)


@dataclasses.dataclass(frozen=True, slots=True)
class Redistribute:
    """One step of a redistribution."""

    step: Step
    input: int
    output: int
    source: SourceLine | None = None

    def inputs(self) -> tuple[int, ...]:
        """Returns the numbers of the values that it reads."""
        return (self.input,)

    def results(self) -> tuple[int, ...]:
        """Returns the numbers of the values that it defines."""
        return (self.output,)


Instruction = Apply | Redistribute


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Program:
    """A straight-line list of instructions over global tensors with layouts.

    Attributes:
        specs: The spec of each value, by its number.
        inputs: The values that the caller passes.
        outputs: The values that the caller receives.
        instructions: What runs, in order.
        num_scalars: How many run-time scalars the caller passes.
        name: What it is called in messages and profiles.
    """

    specs: tuple[Spec, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    num_scalars: int = 0
    name: str = "program"

    def fallbacks(self) -> list[Apply]:
        """Returns the operations that run replicated for want of a sharding rule."""
        return [i for i in self.instructions if isinstance(i, Apply) and i.is_fallback]

    def communication(self) -> list[Redistribute]:
        """Returns the redistributions that move bytes between devices."""
        found = (i for i in self.instructions if isinstance(i, Redistribute))
        return [i for i in found if not i.step.kind.is_local]

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _operation(name: str, overload: str) -> torch._ops.OpOverload:
    namespace, packet = name.split("::")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _name_of(op: torch._ops.OpOverload) -> tuple[Any, tuple[str, str]]:
    return _operation, (op._schema.name, op._overloadname)


# PyTorch's operations do not pickle by themselves.
copyreg.pickle(torch._ops.OpOverload, _name_of)


def refs(tree: Any) -> list[Ref]:
    """Returns the `Ref`s in nested tuples and lists, in order."""
    found: list[Ref] = []
    _collect_refs(tree, found)
    return found


def _collect_refs(tree: Any, found: list[Ref]) -> None:
    if type(tree) is Ref:
        found.append(tree)
    elif type(tree) in (tuple, list):
        for item in tree:
            _collect_refs(item, found)


def map_refs(tree: Any, change: Callable[[Ref], Any]) -> Any:
    """Returns nested tuples and lists with every `Ref` replaced by ``change(ref)``."""
    if type(tree) is Ref:
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)(map_refs(item, change) for item in tree)
    return tree


def needed(instructions: Sequence[Instruction], outputs: Iterable[int]) -> tuple[Instruction, ...]:
    """Returns the instructions that some values depend on, in order."""
    wanted = set(outputs)
    kept: list[Instruction] = []
    for instruction in reversed(instructions):
        if any(v in wanted for v in instruction.results()):
            wanted.update(instruction.inputs())
            kept.append(instruction)
    return tuple(reversed(kept))


# -- printing ------------------------------------------------------------------------------


def _lines(program: Program) -> Iterator[str]:
    arguments = ", ".join(f"%{i}: {program.specs[i]!r}" for i in program.inputs)
    scalars = "".join(f", ${i}" for i in range(program.num_scalars))
    yield f"{program.name}({arguments}{scalars}):"
    for instruction in program.instructions:
        text = f"  {format_instruction(instruction)}"
        shown = ", ".join(repr(program.specs[i]) for i in instruction.results())
        line = f"  {instruction.source.short}" if instruction.source else ""
        yield f"{text:<64}  # {shown}{line}"
    yield f"  return {', '.join(f'%{i}' for i in program.outputs)}"


def format_instruction(instruction: Instruction) -> str:
    """Returns an instruction as one line of a printed program."""
    results = ", ".join(f"%{i}" for i in instruction.results())
    if isinstance(instruction, Redistribute):
        return f"{results} = {_format_step(instruction.step)}(%{instruction.input})"
    arguments = [_format_argument(a) for a in instruction.args]
    arguments += [f"{k}={_format_argument(v)}" for k, v in instruction.kwargs]
    if instruction.draws is not None:
        arguments.append(f"state=%{instruction.draws[0]}")
    mark = "replicated " if instruction.is_fallback else ""
    return f"{results} = {mark}{instruction.op}({', '.join(arguments)})"


def _format_step(step: Step) -> str:
    mesh = step.source.mesh
    axes = ", ".join(mesh.axis_name(a).strip("'") for a in step.axes)
    return f"{step.kind.value}[{axes}]" if axes else step.kind.value


def _format_argument(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if type(value) in (list, tuple):
        return f"[{', '.join(map(_format_argument, value))}]"
    return repr(value)


# -- verification --------------------------------------------------------------------------


def verify(program: Program) -> None:
    """Raises AssertionError where a program is malformed: for tests and for pass authors.

    Every value is defined once and before its use, each operand lives on the mesh of its
    instruction, steps start and end at the specs of their values, and no value is unread.
    """
    defined = set(program.inputs)
    assert len(defined) == len(program.inputs), "an input appears twice"
    for instruction in program.instructions:
        text = format_instruction(instruction)
        for value in instruction.inputs():
            assert value in defined, f"%{value} is used before it is defined: {text}"
        for value in instruction.results():
            assert value not in defined, f"%{value} is defined twice: {text}"
            defined.add(value)
        _verify_layouts(program, instruction, text)
    for value in program.outputs:
        assert value in defined, f"the output %{value} is never defined"
    _verify_all_read(program)


def _verify_layouts(program: Program, instruction: Instruction, text: str) -> None:
    if isinstance(instruction, Redistribute):
        step = instruction.step
        assert program.specs[instruction.input] is step.source, f"wrong source spec: {text}"
        assert program.specs[instruction.output] is step.target, f"wrong target spec: {text}"
        return
    for value in (*instruction.inputs(), *instruction.results()):
        spec = program.specs[value]
        assert spec.mesh == instruction.mesh, f"%{value} is on another mesh: {text}"


def _verify_all_read(program: Program) -> None:
    read = {v for i in program.instructions for v in i.inputs()} | set(program.outputs)
    for instruction in program.instructions:
        results: Iterable[int] = instruction.results()
        unread = not any(v in read for v in results)
        assert not unread, f"nothing reads the results of {format_instruction(instruction)}"
