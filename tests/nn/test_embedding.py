"""`dtorch.nn.embedding`."""

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import nn, random


def test_embedding_is_torchs() -> None:
    params = nn.embedding_init(random.key(0), 11, 5)
    ids = torch.randint(0, 11, (2, 3))
    assert torch.equal(nn.embedding(params, ids), F.embedding(ids, params["weight"]))


def test_embedding_init_has_the_deviation_asked_for() -> None:
    params = nn.embedding_init(random.key(1), 300, 100, std=0.1, dtype=torch.float64)
    assert params["weight"].shape == (300, 100)
    assert params["weight"].dtype == torch.float64
    assert abs(params["weight"].std() - 0.1) < 0.005


def test_an_id_out_of_range_raises() -> None:
    params = nn.embedding_init(random.key(0), 11, 5)
    with pytest.raises(IndexError, match="out of range"):
        nn.embedding(params, torch.tensor([11]))


@pytest.mark.parametrize("jitted", [False, True])
def test_a_sparse_gradient_is_refused_at_the_call(jitted: bool) -> None:
    params, apply = dtorch.nn.functionalize(torch.nn.Embedding(5, 3, sparse=True))
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    gradient = dtorch.grad(lambda p, ids: apply(p, ids).sum())
    gradient = dtorch.jit(gradient) if jitted else gradient
    with pytest.raises(NotImplementedError, match=r"shape \[5, 3\].*\n  Fix: .*sparse=False"):
        gradient(dtorch.parallel.shard(params, mesh), torch.tensor([1, 2]))
