"""Pieces: a program over the meshes of several stages, taken apart so that each can be submitted.

Takes the program of a loss and its gradients and gives a piece for the forward of each stage and
one for the backward of each, which together are the program. A schedule decides when each is
submitted. What passes between them, activations above all, is kept by the microbatch that they run
for, until the last piece that reads it has been submitted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from ..compiled import Compiled
from ..lowering import lower
from ..mesh import DeviceMesh
from ..program import Apply, Instruction, Program, needed
from ..runtime import Executable

__all__ = ["Piece", "pieces_of", "split"]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """A part of a program.

    Attributes:
        program: It, with the value numbers of the whole program; its inputs are what it reads, its
            outputs what later pieces or the caller read.
        executable: Its local form.
        later: The values that later pieces read.
        last: The values that it reads and no later piece does.
    """

    program: Program
    executable: Executable
    later: frozenset[int]
    last: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def pieces_of(compiled: Compiled, meshes: tuple[DeviceMesh, ...], loss: int) -> tuple[Piece, ...]:
    """Returns the pieces of a traced loss with gradients: the forwards, then the backwards.

    Args:
        compiled: The traced call.
        meshes: The stages' meshes, in order.
        loss: The value that is the loss. What it depends on is the forward.

    Returns:
        The forward of stage 0 to the last, and then the backward of the last stage to stage 0.
    """
    program = compiled.program
    forward = {id(i) for i in needed(program.instructions, (loss,))}
    numbers: list[int] = []
    defined: dict[int, int] = {}
    last = 2 * len(meshes) - 1
    for instruction in program.instructions:
        stage = _stage(instruction, meshes)
        own = stage if id(instruction) in forward else last - stage
        # What reads a later stage's value, against the order, has to wait for it.
        number = max([own, *(defined.get(v, 0) for v in instruction.inputs())])
        defined.update(dict.fromkeys(instruction.results(), number))
        numbers.append(number)
    names = [f"forward of stage {s}" for s in range(len(meshes))]
    names += [f"backward of stage {s}" for s in reversed(range(len(meshes)))]
    return split(program, numbers, names)


def _stage(instruction: Instruction, meshes: Sequence[DeviceMesh]) -> int:
    """The stage of an instruction: that of its mesh, or of where it takes its value from."""
    is_apply = isinstance(instruction, Apply)
    mesh = instruction.mesh if is_apply else instruction.step.source.mesh
    return meshes.index(mesh) if mesh in meshes else 0


def split(program: Program, numbers: Sequence[int], names: Sequence[str]) -> tuple[Piece, ...]:
    """Returns the pieces of a program.

    Args:
        program: The program.
        numbers: The piece of each instruction; none reads a value of a later piece.
        names: The name of each piece.
    """
    instructions: list[list[Instruction]] = [[] for _ in names]
    for instruction, number in zip(program.instructions, numbers, strict=True):
        instructions[number].append(instruction)
    later: set[int] = set()
    pieces: list[Piece] = []
    for part, name in zip(reversed(instructions), reversed(names), strict=True):
        made = dict.fromkeys(v for i in part for v in i.results())
        read = tuple(dict.fromkeys(v for i in part for v in i.inputs() if v not in made))
        outputs = tuple(v for v in made if v in later or v in program.outputs)
        whole = dataclasses.replace(
            program, inputs=read, outputs=outputs, instructions=tuple(part), name=name
        )
        last = tuple(v for v in read if v not in later and v not in program.outputs)
        pieces.append(Piece(whole, Executable(lower(whole)), frozenset(later), last))
        later.update(read)
    return tuple(reversed(pieces))
