"""Passes over the global program.

`fold_constants` takes a program and gives two: one of what depends on nothing that the caller
passes, which needs to run only once, and the rest, which takes its results as further inputs.
"""

from __future__ import annotations

import dataclasses

from .program import Apply, Instruction, Program, ScalarRef, needed

MAX_VALUE_BYTES = 1 << 16
MAX_TOTAL_BYTES = 1 << 20
"""Folded values are kept as long as the program, so they must be small, on each device."""


def fold_constants(program: Program) -> tuple[Program | None, Program]:
    """Returns the program of the constants, if there are any, and the program that takes them.

    The outputs of the first are the last inputs of the second. What the caller receives stays in
    the second, so that no two calls return the same memory.
    """
    folded: list[Instruction] = []
    rest: list[Instruction] = []
    known: set[int] = set()
    room = MAX_TOTAL_BYTES
    for instruction in program.instructions:
        sizes = [program.specs[v].num_local_bytes for v in instruction.results()]
        fits = max(sizes, default=0) <= MAX_VALUE_BYTES and sum(sizes) <= room
        if fits and _is_constant(instruction, known, program):
            folded.append(instruction)
            known.update(instruction.results())
            room -= sum(sizes)
        else:
            rest.append(instruction)
    used = tuple(dict.fromkeys(v for i in rest for v in i.inputs() if v in known))
    if not used:
        return None, program
    constants = dataclasses.replace(
        program,
        inputs=(),
        outputs=used,
        instructions=needed(folded, used),
        num_scalars=0,
        name=f"constants of {program.name}",
    )
    inputs = (*program.inputs, *used)
    return constants, dataclasses.replace(program, inputs=inputs, instructions=tuple(rest))


def _is_constant(instruction: Instruction, known: set[int], program: Program) -> bool:
    if isinstance(instruction, Apply) and (instruction.draws or _reads_scalars(instruction)):
        return False
    returned = any(v in program.outputs for v in instruction.results())
    return not returned and all(v in known for v in instruction.inputs())


def _reads_scalars(tree: object) -> bool:
    if isinstance(tree, Apply):
        tree = (tree.args, tree.kwargs)
    if type(tree) in (tuple, list):
        return any(map(_reads_scalars, tree))  # pyright: ignore[reportArgumentType]
    return type(tree) is ScalarRef
