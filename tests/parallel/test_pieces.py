"""Pieces of a program: together they are the program, and keep nothing for longer than needed."""

from typing import Any

import torch
import torch.nn.functional as F

import dtorch
from dtorch.parallel.pieces import Piece, pieces_of

STAGES = dtorch.init_device_mesh("cpu", (3, 2), mesh_dim_names=("pp", "tp")).unbind("pp")


def taken_apart() -> tuple[dtorch.Program, tuple[Piece, ...]]:
    """The gradients of a model on three stages."""

    def model(params: Any, x: Any) -> Any:
        for w in params:
            x = x + torch.tanh(F.linear(x, w))
        return x.square().mean()

    params = [dtorch.randn(4, 4, device_mesh=mesh) for mesh in STAGES]
    compiled, _ = dtorch.jit(dtorch.value_and_grad(model)).traced(params, torch.ones(2, 4))
    program = compiled.program
    loss = program.outputs[compiled.outputs[0].item]
    return program, pieces_of(compiled, tuple(STAGES), loss)


def test_every_instruction_is_in_one_piece_on_its_own_stage() -> None:
    program, pieces = taken_apart()
    together = [i for piece in pieces for i in piece.program.instructions]
    assert len(together) == len(program.instructions)
    assert {id(i) for i in together} == {id(i) for i in program.instructions}
    assert [p.program.name for p in pieces] == [
        *(f"forward of stage {s}" for s in (0, 1, 2)),
        *(f"backward of stage {s}" for s in (2, 1, 0)),
    ]
    for piece, stage in zip(pieces, (0, 1, 2, 2, 1, 0), strict=True):
        assert piece.program.instructions
        for instruction in piece.program.instructions:
            homes = {program.specs[v].mesh for v in instruction.inputs()}
            assert homes <= {STAGES[stage]}


def test_a_stage_keeps_nothing_of_a_microbatch_after_its_backward() -> None:
    program, pieces = taken_apart()
    kept: set[int] = set()
    most = []
    for number, piece in enumerate(pieces):
        given = set(piece.program.inputs) - kept
        assert given <= set(program.inputs)
        kept |= {*piece.program.inputs, *piece.program.outputs}
        kept -= set(piece.last)
        kept -= {v for v in program.outputs if v not in piece.later}
        assert kept <= piece.later
        if number >= len(STAGES):
            stage = STAGES[len(pieces) - 1 - number]
            assert not [v for v in kept if program.specs[v].mesh == stage]
        most.append(len(kept))
    assert most[2] > most[0] > 0
    assert most[-1] == 0
