"""Linear algebra that is recorded whole."""

from typing import Any

import pytest
import torch

import dtorch
from dtorch import Shard

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
