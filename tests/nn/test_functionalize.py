"""Modules as functions of their parameters: names, ties, modes, buffers that change."""

import copy
from typing import Any

import pytest
import torch

import dtorch
from dtorch.nn import functionalize
from dtorch.parallel import ColumnParallel, shard

ONE = dtorch.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
TP2 = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
PLAN = {"0.*": ColumnParallel("tp")}


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout())


class Shared(torch.nn.Module):
    """One layer under two names, and a buffer that is assigned anew at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = self.first
        self.register_buffer("total", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + x.sum(0)
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("mesh", [ONE, TP2])
def test_apply_is_the_module(mesh: dtorch.DeviceMesh, jitted: bool) -> None:
    module = network().eval()
    params, apply = functionalize(module)
    x = torch.randn(8, 3)
    out = (dtorch.jit(apply) if jitted else apply)(shard(params, mesh, PLAN), x).to_torch()
    assert torch.equal(out, module(x)) if mesh is ONE else torch.allclose(out, module(x), atol=1e-6)


def test_the_tree_has_the_names_of_the_state_dict() -> None:
    module = network()
    params, apply = functionalize(module)
    state = module.state_dict()
    names = [f"{a}.{b}" for a, inner in params.items() for b in inner]
    assert sorted(names) == sorted(state)
    assert apply.buffers == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert params["0"]["weight"].data_ptr() == module[0].weight.data_ptr()
    assert not any(t.requires_grad for inner in params.values() for t in inner.values())


@pytest.mark.parametrize("jitted", [False, True])
def test_buffers_change_in_the_tree_alone(jitted: bool) -> None:
    module = network()[:2].train()
    params, apply = functionalize(module)
    twin = copy.deepcopy(module)
    placed = shard(params, ONE, PLAN)
    call = dtorch.jit(apply) if jitted else apply
    for _ in range(2):
        x = torch.randn(8, 3)
        assert torch.equal(call(placed, x).to_torch(), twin(x))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(placed["1"][name].to_torch(), getattr(twin[1], name))
    assert module[1].num_batches_tracked == 0
    assert params["1"]["num_batches_tracked"] == 0
    apply(params, torch.randn(8, 3))
    assert module[1].num_batches_tracked == 0, "a plain tree has buffers of its own"


@pytest.mark.parametrize("jitted", [False, True])
def test_a_buffer_assigned_anew_changes_in_the_tree(jitted: bool) -> None:
    module = Shared()
    params, apply = functionalize(module)
    placed = shard(params, ONE)
    call = dtorch.jit(apply) if jitted else apply
    x = torch.ones(2, 3)
    call(placed, x)
    call(placed, x)
    assert torch.equal(placed["total"].to_torch(), torch.full((3,), 4.0))
    assert torch.equal(module.total, torch.zeros(3))


def test_tied_names_are_one_leaf() -> None:
    module = Shared()
    params, apply = functionalize(module)
    assert set(params) == {"first", "total"}
    assert apply.tied == {"second.weight": "first.weight", "second.bias": "first.bias"}
    x = torch.randn(2, 3)
    doubled = {**params, "first": {n: 2 * t for n, t in params["first"].items()}}
    layer = copy.deepcopy(module.first)
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.bias.mul_(2)
    assert torch.equal(apply(doubled, x), layer(torch.relu(layer(x))))


def test_the_mode_is_that_of_the_call() -> None:
    module = network().eval()
    params, apply = functionalize(module)
    call, x = dtorch.jit(apply), torch.ones(64, 3)
    placed = shard(params, ONE)
    whole = call(placed, x).to_torch()
    module.train()
    assert (call(placed, x).to_torch() == 0).any(), "dropout"
    module.eval()
    call(placed, x)
    assert torch.equal(call(shard(params, ONE), x).to_torch(), whole)
    assert call.cache_info().misses == 2


def test_the_module_may_be_on_the_meta_device() -> None:
    module = network().eval()
    x = torch.randn(2, 3)
    expected = module(x)
    params, apply = functionalize(module)
    placed = shard(params, ONE)
    module.to("meta")
    assert torch.equal(dtorch.jit(apply)(placed, x).to_torch(), expected)
    empty, again = functionalize(module)
    assert all(t.is_meta for inner in empty.values() for t in inner.values())
    assert torch.equal(again(placed, x).to_torch(), expected)


def test_gradients_by_the_parameters() -> None:
    module = network()[:2].train()
    params, apply = functionalize(module)
    weights, buffers = apply.split(shard(params, ONE, PLAN))
    x = torch.randn(8, 3)

    def loss(weights: Any, buffers: Any, x: Any) -> Any:
        return apply(apply.join(weights, buffers), x).square().sum()

    value, grads = dtorch.jit(dtorch.value_and_grad(loss))(weights, buffers, x)
    expected = module(x).square().sum()
    expected.backward()
    assert torch.equal(value.to_torch(), expected.detach())
    for name, parameter in module.named_parameters():
        layer, _, own = name.partition(".")
        torch.testing.assert_close(grads[layer][own].to_torch(), parameter.grad)
    assert buffers["1"]["num_batches_tracked"].item() == 1


def test_a_tree_that_does_not_fit_is_one_error() -> None:
    params, apply = functionalize(Shared())
    tree = {"first": {"weight": params["first"]["weight"]}, "second": params["first"]}
    with pytest.raises(ValueError, match="cannot be computed with this tree") as error:
        apply(tree, torch.ones(2, 3))
    assert str(error.value).splitlines()[1:-1] == [
        "  first.bias: missing",
        "  total: missing",
        "  second.weight: not a leaf of Shared, but tied to first.weight",
        "  second.bias: not a leaf of Shared, but tied to first.bias",
    ]
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not dict"):
        functionalize({})  # type: ignore[arg-type]


def test_an_assignment_of_another_shape_is_refused() -> None:
    class Grows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, x])
            return x

    params, apply = functionalize(Grows())
    with pytest.raises(ValueError, match=r"assigns \[3\] to seen, which is \[1\] in the tree"):
        apply(params, torch.ones(2))
