"""`dtorch.strict()`: implicit communication raises, and says what would be legal."""

import threading
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.errors import PlacementError

MESH = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
UNNAMED = dtorch.DeviceMesh("cpu", [0, 1])


def make(*placements: Any, shape: tuple[int, ...] = (4, 8), mesh: Any = MESH) -> dtorch.Tensor:
    value = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return dtorch.Tensor(value, device_mesh=mesh, placements=placements)


def test_the_message_names_layouts_and_legal_placements() -> None:
    x = make(Shard(0), Shard(2), shape=(4, 128, 64))
    weight = make(Replicate(), Shard(0), shape=(96, 64))
    with pytest.raises(PlacementError, match="cannot keep") as error, dtorch.strict():
        torch.nn.functional.linear(x, weight)
    assert str(error.value) == (
        """\
strict: aten.linear.default cannot keep S(0) on axis 'tp' of its argument 'weight'.
  input   [4, 128, 64]  dp=S(0) tp=S(2)
  weight  [96, 64]  dp=R tp=S(0)
  legal for axis 'tp', in this order: (R, R), (S(0), R), (S(1), R), (S(2), S(1)), (R, S(0))
  Fix: weight.redistribute_by_dict(None, {'tp': Shard(dim=1)}, "keep") before the call, or give \
the arguments legal placements."""
    )


def test_what_needs_no_communication_is_allowed() -> None:
    x = make(Shard(0), Shard(1))
    expected = torch.relu(x + 1).sum(1, keepdim=True) + 0
    for f in (lambda x: torch.relu(x + 1), dtorch.jit(lambda x: torch.relu(x + 1))):
        with dtorch.strict():
            y = f(x)
            z = x * torch.ones(8)  # a replicated operand is cut
            total = y.sum(1, keepdim=True)
        assert total.placements == [Shard(0), Partial()]
        torch.testing.assert_close(total.to_torch(), expected.to_torch())
        assert torch.equal(z.to_torch(), x.to_torch())


def test_what_is_asked_for_is_allowed() -> None:
    x = make(Shard(0), Shard(1))
    with dtorch.strict():
        y = x.redistribute_by_dict(None, {"tp": Replicate()}, "keep").sort(1)[0]
        z = dtorch.jit(lambda x: dtorch.parallel.constrain(x, dtorch.P("dp", None)).sort(1)[0])(x)
        assert torch.equal(y.to_torch(), x.to_torch())
    assert torch.equal(z.to_torch(), x.to_torch())


def _attention(q: Any, k: Any, v: Any) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("axis", ["ring_cp", "zigzag_cp", "ulysses_cp"])
def test_context_parallelism_is_asked_for_by_name(axis: str, jitted: bool) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", axis))
    torch.manual_seed(0)
    given = [torch.randn(2, 4, 9, 8, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(_attention(*given), given)
    parts = [
        dtorch.Tensor(x.detach(), device_mesh=mesh, placements=[Shard(0), Shard(2)]) for x in given
    ]
    grads = dtorch.grad(_attention, argnums=(0, 1, 2))
    with dtorch.strict():
        found = (dtorch.jit(grads) if jitted else grads)(*parts)
    for grad, wanted in zip(found, expected, strict=True):
        assert grad.placements == [Shard(0), Shard(2)]
        torch.testing.assert_close(grad.to_torch(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("axis", "of_queries", "of_keys"),
    [
        ("cp", Shard(2), Shard(2)),
        ("ring_cp", Shard(2), Replicate()),
        ("ring_cp", Replicate(), Shard(2)),
        ("ring_cp", Partial(), Partial()),
    ],
)
def test_attention_communicates_nothing_else(axis: str, of_queries: Any, of_keys: Any) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    q = make(of_queries, shape=(1, 2, 8, 4), mesh=mesh)
    k = make(of_keys, shape=(1, 2, 8, 4), mesh=mesh)
    with pytest.raises(PlacementError, match=r"strict: aten\._scaled"), dtorch.strict():
        _attention(q, k, k)


CALLS = [
    lambda x: x.sort(1),
    lambda x: x.softmax(1),
    lambda x: torch.relu(x.sum(1)),
    lambda x: x.reshape(2, 16).view(32),
    lambda x: x @ x.redistribute(placements=[Shard(0), Replicate()]).mT,
]


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_implicit_communication_raises_however_often(call: Any, jitted: bool) -> None:
    x = make(Shard(1), Shard(1))
    f = dtorch.jit(call) if jitted else call
    before = f(x)  # remembered, and still refused
    for _ in range(2):
        with pytest.raises(PlacementError, match="strict: aten"), dtorch.strict():
            f(x)
    after = f(x)
    for a, b in zip(_tensors(before), _tensors(after), strict=True):
        assert torch.equal(a.to_torch(), b.to_torch())


def _tensors(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def test_partial_values_and_unnamed_meshes() -> None:
    x = make(Partial(), shape=(4,), mesh=UNNAMED)
    with dtorch.strict():
        y = x + x
        with pytest.raises(PlacementError, match=r"keep P\(sum\) on axis 0 of its argument 'self'"):
            torch.exp(x)
        with pytest.raises(PlacementError, match=r"redistribute\(placements=\[Replicate\(\)\]\)"):
            torch.exp(x)
    assert y.placements == [Partial()]


def test_the_backward_is_checked_as_well() -> None:
    weight = make(Shard(0), shape=(6, 4), mesh=UNNAMED)
    x = make(Replicate(), shape=(3, 4), mesh=UNNAMED)

    def loss(weight: Any) -> Any:
        return torch.nn.functional.linear(x, weight).sort(1)[0].sum()

    dtorch.jit(dtorch.grad(loss))(weight)
    with pytest.raises(PlacementError, match="strict"), dtorch.strict():
        dtorch.jit(dtorch.grad(loss))(weight)


def test_it_ends_with_the_block_and_is_of_one_thread() -> None:
    x = make(Shard(1), Shard(1))
    found = []
    with dtorch.strict():
        thread = threading.Thread(target=lambda: found.append(x.softmax(1)))
        thread.start()
        thread.join()
        with pytest.raises(PlacementError, match="strict"):
            x.softmax(1)
    torch.testing.assert_close(found[0].to_torch(), x.softmax(1).to_torch())


def test_stages_are_moved_between_by_name_only() -> None:
    first, second = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)).unbind("pp")
    x = dtorch.ones(3, device_mesh=first)
    y = dtorch.ones(3, device_mesh=second)
    assert (x + y).device_mesh == second
    with pytest.raises(PlacementError, match=r"would move its argument 'self'"), dtorch.strict():
        x + y
