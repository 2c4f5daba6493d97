"""Linear algebra that is recorded whole."""

from typing import Any

import optree
import pytest
import torch

import dtorch
from dtorch import Shard
from dtorch.errors import WorkerError

aten = torch.ops.aten

CALLS: list[Any] = [torch.linalg.eigvalsh, torch.linalg.svdvals, torch.linalg.cond]


@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_values_of_matrices(call: Any) -> None:
    x = torch.rand(3, 4, 4)
    x = x + x.mT
    assert torch.equal(call(dtorch.Tensor(x)).to_torch(), call(x))
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    for dim in (0, 1):  # a split matrix is exchanged for a split batch
        found = call(dtorch.Tensor(x, device_mesh=mesh, placements=[Shard(dim)]))
        assert found.placements == [Shard(0)]
        torch.testing.assert_close(found.to_torch(), call(x))


@pytest.mark.parametrize("name", ["cholesky", "linalg_matrix_sqrth", "linalg_polar"])
def test_what_not_every_torch_has(name: str) -> None:
    if not hasattr(aten, name):
        pytest.skip(f"torch {torch.__version__} has no aten.{name}")
    call = getattr(aten, name)
    x = torch.rand(4, 3, 3)
    x = x @ x.mT + torch.eye(3)
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    for dim in (0, 1):
        found = call(dtorch.Tensor(x, device_mesh=mesh, placements=[Shard(dim)]))
        results = optree.tree_leaves(found)
        assert [r.placements for r in results] == [[Shard(0)]] * len(results)
        torch.testing.assert_close(
            tuple(r.to_torch() for r in results), tuple(optree.tree_leaves(call(x)))
        )


CHECKED: list[Any] = [
    lambda a: torch.linalg.inv(a),
    lambda a: torch.linalg.solve(a, a + 1),
    lambda a: torch.linalg.cholesky(a @ a.mT),
    lambda a: torch.linalg.lu_factor(a)[0],
    lambda a: torch.linalg.inv(a).sum() * 0 + a,  # what is computed with it fails, too
]


@pytest.mark.parametrize("function", CHECKED)
@pytest.mark.parametrize("wants_grad", [False, True])
def test_a_singular_matrix_fails_where_it_is_fetched(function: Any, wants_grad: bool) -> None:
    call = dtorch.jit(function)
    good = torch.rand(2, 3, 3) + 3 * torch.eye(3)
    for mesh in (dtorch.DeviceMesh("cpu", [0]), dtorch.DeviceMesh("cpu", [0, 1])):

        def placed(value: torch.Tensor, mesh: Any = mesh) -> dtorch.Tensor:
            x = dtorch.Tensor(value, device_mesh=mesh, placements=[Shard(0)])
            return x.requires_grad_(wants_grad)

        found = call(placed(good)).detach().to_torch()
        torch.testing.assert_close(found, function(good))
        bad = call(placed(torch.stack([torch.eye(3), -torch.zeros(3, 3)])))
        with pytest.raises(WorkerError, match=r"linalg\.\w+: (.|\n)*test_linalg.py"):
            bad.to_torch()


def test_a_check_makes_no_gradient_wrong() -> None:
    a = (torch.rand(3, 3) + 3 * torch.eye(3)).requires_grad_()
    mine = dtorch.Tensor(a.detach()).requires_grad_()
    f = dtorch.jit(torch.linalg.inv)
    torch.linalg.inv(a).square().sum().backward()
    f(mine).square().sum().backward()
    assert a.grad is not None and mine.grad is not None
    assert torch.equal(mine.grad.to_torch(), a.grad)
    assert "dtorch.checked" in str(dtorch.jit(dtorch.grad(lambda x: f(x).sum())).program(mine))
