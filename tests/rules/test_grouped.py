"""Grouped matrix products, split by groups, by the contracted dim and by columns."""

import itertools
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard

MESH = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
GRID = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
WAYS = [Replicate(), Shard(0), Shard(1), Shard(2)]


def operands(ends: list[int]) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    offs = torch.tensor(ends, dtype=torch.int32)
    return torch.randn(9, 8), torch.randn(len(ends), 8, 16), offs


def operation(name: str) -> Any:
    if name == "aten":
        return lambda a, b, offs: torch.nn.functional.grouped_mm(a, b, offs=offs)
    pytest.importorskip("transformers.integrations.moe")
    return torch.ops.transformers.grouped_mm_fallback


@pytest.mark.parametrize("name", ["aten", "transformers"])
@pytest.mark.parametrize("ends", [[2, 5, 5, 9], [0, 0, 4, 9], [9, 9, 9, 9]])
def test_every_layout(name: str, ends: list[int]) -> None:
    call, (rows, matrices, offs) = operation(name), operands(ends)
    expected = call(rows, matrices, offs)
    for first, second in itertools.product(WAYS, WAYS):
        placed = dtorch.Tensor(matrices, device_mesh=GRID, placements=[first, second])
        for run in (call, dtorch.jit(call)):
            found = run(rows, placed, offs).to_torch()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["aten", "transformers"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_no_matrix_is_moved(name: str, dim: int) -> None:
    call, (rows, matrices, offs) = operation(name), operands([2, 5, 5, 9])
    placed = dtorch.Tensor(matrices, device_mesh=MESH, placements=[Shard(dim)])
    program = str(dtorch.jit(call).program(rows, placed, offs))
    assert "all_gather" not in program and "all_to_all" not in program
    result = "x=S(1)" if dim == 2 else "x=P(sum)"
    assert f"float32[9, 16] {result}" in program


@pytest.mark.parametrize("ends", [[2, 5, 5, 9], [0, 0, 4, 9], [9, 9, 9, 9]])
def test_the_backward_moves_no_matrix(ends: list[int]) -> None:
    pytest.importorskip("transformers.integrations.moe")
    call, (rows, matrices, offs) = (
        torch.ops.transformers.grouped_mm_fallback_backward,
        operands(ends),
    )
    grad = torch.randn(9, 16)
    for dim in range(3):
        placed = dtorch.Tensor(matrices, device_mesh=MESH, placements=[Shard(dim)])
        to_rows, to_matrices = call(rows, placed, offs, grad)
        assert to_matrices.placements == [Shard(dim)]
        expected = call(rows, matrices, offs, grad)
        for found, wanted in zip((to_rows, to_matrices), expected, strict=True):
            torch.testing.assert_close(found.to_torch(), wanted, rtol=1e-5, atol=1e-5)
        communications = dtorch.explain(call, rows, placed, offs, grad).communications
        assert all(c.before.shape != matrices.shape for c in communications)


def test_the_kernels_alignment_is_kept() -> None:
    """Halves of 8 bytes would be refused, so the matrices are gathered."""
    rows, _, offs = operands([2, 5, 5, 9])
    matrices = torch.randn(4, 6, 8).transpose(1, 2)[:, :, :4].contiguous()
    placed = dtorch.Tensor(matrices, device_mesh=MESH, placements=[Shard(2)])
    found = torch.nn.functional.grouped_mm(rows, placed, offs=offs).to_torch()
    torch.testing.assert_close(found, torch.nn.functional.grouped_mm(rows, matrices, offs=offs))
