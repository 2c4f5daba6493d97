"""Modules as functions of their parameters: names, ties, modes, buffers that change."""

import copy
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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
    with pytest.raises(ValueError, match=r"float32 \[3\] to seen, which is torch.float32 \[1\]"):
        apply(params, torch.ones(2))


def test_an_assignment_of_another_dtype_is_refused() -> None:
    class Widens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 0.5
            return x

    params, apply = functionalize(Widens())
    with pytest.raises(ValueError, match=r"float32 \[\] to count, which is torch.int64 \[\]"):
        apply(params, torch.ones(2))


def test_tied_names_that_are_assigned_different_tensors_are_refused() -> None:
    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.zeros(2))
            self.register_buffer("b", self.a)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.b = self.b + x
            return x

    params, apply = functionalize(Parts())
    with pytest.raises(ValueError, match="different tensors to a and b, which are tied"):
        apply(params, torch.ones(2))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_buffers_that_are_views_of_each_other_are_refused(device: str) -> None:
    module = torch.nn.Module()
    whole = torch.zeros(6, device=device)
    module.register_buffer("whole", whole)
    module.register_buffer("again", whole.view(6))
    module.register_buffer("last", whole[4:])
    module.register_buffer("first", whole[:3])
    with pytest.raises(ValueError, match="share memory") as error:
        functionalize(module)
    assert str(error.value).splitlines()[1:-1] == [
        "  whole and last",
        "  again and last",
        "  whole and first",
        "  again and first",
    ]


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_switches")
def test_threads_share_an_apply() -> None:
    """Two call it, one calls that of a part, and one traces; a buffer and draws take locks too."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), network()[1]).train()
    before = dict(module.named_parameters())
    params, apply = functionalize(module)
    part, inner = functionalize(module[0])
    dropout = functionalize(torch.nn.Dropout())[1]
    twins = [[copy.deepcopy(module) for _ in range(12)] for _ in range(4)]
    wrong: list[Any] = []

    def client(number: int) -> None:
        torch.manual_seed(number)
        call = dtorch.jit(apply) if number == 3 else apply
        try:
            for size, own in enumerate(twins[number]):
                x = torch.randn(5 + (size if number == 3 else 0), 4)
                for parameter in own.parameters():
                    torch.nn.init.normal_(parameter)
                used, tree = (inner, own[0]) if number == 2 else (call, own)
                found = used(shard(functionalize(tree)[0], TP2), x).to_torch()
                dropout({}, shard(x, TP2))
                if not torch.allclose(found, tree(x), atol=1e-4):
                    wrong.append((number, size))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=client, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    assert all(p is before[n] for n, p in module.named_parameters())
    assert params.keys() >= {"0"}
    assert part.keys() == {"weight", "bias"}


class Recomputing(torch.nn.Module):
    """A layer in a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(lambda x: self.layer(x).relu(), x, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_refused(reentrant: bool, jitted: bool) -> None:
    params, apply = functionalize(Recomputing(reentrant))
    call = dtorch.jit(apply) if jitted else apply
    placed = shard(params, TP2)
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"activation checkpointing.*\n  Fix: module.gradient"):
        call(placed, x)
    with torch.no_grad():
        expected = apply.module(x)
        torch.testing.assert_close(call(placed, x).to_torch(), expected)


def test_hooks_on_saved_tensors_around_a_call_are_used() -> None:
    params, apply = functionalize(torch.nn.Linear(3, 3))
    packed: list[torch.Tensor] = []
    x = torch.randn(2, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        apply(params, x).sum().backward()
    assert packed
    assert x.grad is not None


class Keeping(torch.nn.Module):
    """It keeps tensors in every way that a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("seen", None)
        self.before: Any = None
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        self.count += 1
        self.before = self.seen = self.made = y
        self.register_buffer("new", y)
        if x.shape[0] > 2:
            raise KeyError("too many")
        return y


@pytest.mark.parametrize("jitted", [False, True])
def test_a_module_keeps_no_tensor_of_a_call(jitted: bool) -> None:
    module = Keeping()
    params, apply = functionalize(module)
    call = dtorch.jit(apply) if jitted else apply
    before = dict(vars(module))
    placed = shard(params, ONE)
    call(placed, torch.ones(2, 3))
    with pytest.raises(KeyError, match="too many"):
        call(placed, torch.ones(3, 3))
    assert vars(module) == before | {"count": 2}
    assert module._buffers == {"seen": None}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_a_hook_computes_is_of_the_call_alone() -> None:
    module = torch.nn.utils.weight_norm(torch.nn.Linear(3, 2))
    own, x = module.weight, torch.randn(4, 3)
    expected = module(x)
    own = module.weight
    params, apply = functionalize(module)
    assert torch.allclose(dtorch.jit(apply)(shard(params, TP2), x).to_torch(), expected)
    assert module.weight is own
