"""Cases from the field, the upper half: randomness, mutation, models and use.

Each is a small input on which another distributed tensor library went wrong; the numbers are those
of the list that they come from.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import P, Partial, Replicate, Shard
from dtorch.errors import WorkerError
from dtorch.parallel import ColumnParallel, RowParallel

F = torch.nn.functional
TWO = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
EIGHT = dtorch.init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))


def axis(size: int) -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def place(value: torch.Tensor, mesh: dtorch.DeviceMesh, *placements: Any) -> dtorch.Tensor:
    return dtorch.Tensor(value, device_mesh=mesh, placements=list(placements))


# -- 12, 13: randomness and mutation -------------------------------------------------------


@pytest.mark.parametrize("rows", [6, 496])
def test_12_one_seed_gives_the_same_values_in_every_layout(rows: int) -> None:
    found = set()
    for size in (1, 2, 4, 16):
        for placement in (Replicate(), Shard(0), Shard(1)):
            torch.manual_seed(42)
            mesh = axis(size)
            x = dtorch.randn(rows, 4, device_mesh=mesh, placements=[placement])
            y = F.dropout(x, 0.4)
            assert y.placements == [placement]
            found.add(
                (tuple(x.to_torch().flatten().tolist()), tuple(y.to_torch().flatten().tolist()))
            )
    torch.manual_seed(42)
    x = torch.randn(rows, 4)
    assert found == {(tuple(x.flatten().tolist()), tuple(F.dropout(x, 0.4).flatten().tolist()))}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()])
def test_13_writing_through_a_slice_or_a_view_changes_the_base(placement: Any) -> None:
    value = torch.arange(12.0).view(4, 3)
    x = place(value, TWO, placement)
    for write in (
        lambda t: t[1:3].zero_(),
        lambda t: t.view(-1).add_(1),
        lambda t: t.t().mul_(2),
        lambda t: t[0].copy_(torch.ones(3)),
        lambda t: torch.add(t[1], 1, out=t[1]),
        lambda t: t.unbind(1)[0].fill_(9),
        lambda t: t.view(2, 6)[0].fill_(9),
    ):
        eagerly, plain = place(value, TWO, placement), value.clone()
        write(plain)
        write(eagerly)
        assert torch.equal(eagerly.to_torch(), plain) and eagerly.placements == [placement]

        def inside(t: Any, write: Callable[..., Any] = write) -> None:
            write(t)

        mine = place(value, TWO, placement)
        dtorch.jit(inside)(mine)
        assert torch.equal(mine.to_torch(), plain) and mine.placements == [placement]
    x[:, 1] += 5
    x[1:3] = 0
    x[:, 1] = x[:, 1] + 5
    expected = value.clone()
    expected[:, 1] += 5
    expected[1:3] = 0
    expected[:, 1] += 5
    assert torch.equal(x.to_torch(), expected)


def test_13a_an_element_is_the_global_one() -> None:
    x = place(torch.zeros(4), TWO, Shard(0))
    x[1] = 5
    x[-1] = 7
    assert x.tolist() == [0, 5, 0, 7] and x.local_shards()[1].tolist() == [0, 7]


# -- 14: vocabularies ----------------------------------------------------------------------


def language_loss(params: Any, ids: Any, targets: Any) -> Any:
    h = F.embedding(ids, params["embed"])
    h = torch.tanh(F.linear(h, params["mix"]))
    logits = F.linear(h, params["head"])
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


@pytest.mark.parametrize(("vocabulary", "size"), [(50257, 2), (17, 8)])
def test_14_embedding_and_cross_entropy_over_a_split_vocabulary(vocabulary: int, size: int) -> None:
    torch.manual_seed(0)
    params = {
        "embed": torch.randn(vocabulary, 8),
        "mix": torch.randn(8, 8),
        "head": torch.randn(vocabulary, 8),
    }
    ids = torch.randint(0, vocabulary, (2, 6))
    ids[0, 0], ids[0, 1] = 0, vocabulary - 1
    targets = ids.roll(-1, 1).masked_fill(torch.rand(2, 6) < 0.3, -100)
    targets[0, 0] = vocabulary - 1
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    expected = language_loss(leaves, ids, targets)
    expected.backward()
    mesh = axis(size)
    plan = {"embed": dtorch.P("tp"), "head": dtorch.P("tp")}
    mine = dtorch.parallel.shard(params, mesh, plan)
    shards = mine["embed"].local_shards()
    assert sum(len(s) for s in shards.values()) == vocabulary  # not silently replicated
    for wrap in (lambda f: f, dtorch.jit):
        value, grads = wrap(dtorch.value_and_grad(language_loss))(mine, ids, targets)
        torch.testing.assert_close(value.to_torch(), expected.detach())
        for name, leaf in leaves.items():
            torch.testing.assert_close(grads[name].to_torch(), leaf.grad, rtol=1e-4, atol=1e-6)
            assert grads[name].placements == mine[name].placements


# -- 15: replicas counted once -------------------------------------------------------------


def test_15_gradients_of_a_replicated_norm_before_tensor_parallel_products() -> None:
    torch.manual_seed(0)
    params = {"norm": torch.rand(8), "up": torch.randn(12, 8), "down": torch.randn(8, 12)}
    x = torch.randn(2, 6, 8)

    def loss(params: Any, x: Any) -> Any:
        h = F.rms_norm(x, (8,), params["norm"])
        h = F.linear(F.gelu(F.linear(h, params["up"])), params["down"])
        return ((x + h) ** 2).sum()

    def norm_of(grads: Any) -> Any:
        return torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()

    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    loss(leaves, x).backward()
    expected = {k: v.grad for k, v in leaves.items()}
    plan = {"up": ColumnParallel("tp"), "down": RowParallel("tp")}
    for size in (2, 3, 4):
        mesh = axis(size)
        mine = dtorch.parallel.shard(params, mesh, plan)
        for placement in (Shard(1), Replicate(), Shard(0)):
            y = place(x, mesh, placement)
            for wrap in (lambda f: f, dtorch.jit):
                grads = wrap(dtorch.grad(loss))(mine, y)
                for name, grad in expected.items():
                    torch.testing.assert_close(grads[name].to_torch(), grad, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(norm_of(grads).to_torch(), norm_of(expected))
        leaves = {k: torch.nn.Parameter(v) for k, v in mine.items()}
        loss(leaves, place(x, mesh, Shard(1))).backward()
        total = torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
        torch.testing.assert_close(total.to_torch(), norm_of(expected))
        clipped = norm_of({k: v.grad for k, v in leaves.items()})
        assert clipped.item() == pytest.approx(1.0, rel=1e-4)


# -- 16: heads -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(32, 4, 8), (28, 4, 8), (40, 40, 3), (8, 2, 4), (6, 3, 2)]
)
def test_16_any_number_of_heads_on_any_number_of_devices(
    heads: int, kv_heads: int, size: int
) -> None:
    from dtorch import nn

    head_dim, hidden = 4, 16
    key = dtorch.random.key(0)
    params = nn.attention_init(
        key, hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim
    )
    torch.manual_seed(0)
    x = torch.randn(2, 5, hidden)
    cos, sin = nn.rotary_tables(torch.arange(5), head_dim)

    def loss(params: Any, x: Any) -> Any:
        out, _ = nn.attention(params, x, head_dim=head_dim, cos=cos, sin=sin)
        return out.square().sum(), out

    (expected, out), grads = dtorch.value_and_grad(loss, has_aux=True)(params, x)
    plan = {"[qkv]_proj.*": ColumnParallel("tp"), "o_proj.*": RowParallel("tp")}
    mine = dtorch.parallel.shard(params, axis(size), plan)
    (value, found), mine_grads = dtorch.jit(dtorch.value_and_grad(loss, has_aux=True))(mine, x)
    torch.testing.assert_close(found.to_torch(), out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value.to_torch(), expected, rtol=1e-4, atol=1e-5)
    for name, leaf in grads.items():
        torch.testing.assert_close(
            mine_grads[name]["weight"].to_torch(), leaf["weight"], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 4, 8), (28, 4, 8), (40, 40, 3)])
@pytest.mark.parametrize("axes", [("tp",), ("ring_cp", "tp"), ("ulysses_cp", "tp")])
def test_16_and_in_a_cache(heads: int, kv_heads: int, size: int, axes: tuple[str, ...]) -> None:
    from dtorch import nn

    head_dim, hidden, num_slots = 4, 16, 11
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    params = nn.attention_init(dtorch.random.key(0), hidden, **sizes)
    torch.manual_seed(0)
    prompt, token = torch.randn(2, 7, hidden), torch.randn(2, 1, hidden)
    tables = [nn.rotary_tables(torch.arange(a, b), head_dim) for a, b in ((0, 7), (7, 8))]
    slots, mask = (torch.arange(7), torch.tensor([7])), torch.arange(num_slots) <= 7

    def run(params: Any, prompt: Any, token: Any, cache: Any) -> Any:
        given = {"head_dim": head_dim, "cache": cache, "slot_L": slots[0]}
        first, cache = nn.attention(params, prompt, *tables[0], **given)
        given |= {"cache": cache, "slot_L": slots[1]}
        second, cache = nn.attention(params, token, *tables[1], mask=mask[None], **given)
        return first, second, cache["key"], cache["value"]

    cache = nn.cache_init(2, kv_heads, num_slots, head_dim)
    expected = run(params, prompt, token, cache)
    shape = (size,) if len(axes) == 1 else (2, size)
    mesh = dtorch.init_device_mesh("cpu", shape, mesh_dim_names=axes)
    plan = {"[qkv]_proj.*": ColumnParallel("tp"), "o_proj.*": RowParallel("tp")}
    split = axes[:-1]
    mine = [
        dtorch.parallel.shard(params, mesh, plan),
        dtorch.parallel.shard(prompt, mesh, {"*": P(None, split)}),
        dtorch.parallel.shard(token, mesh),
        dtorch.parallel.shard(cache, mesh, {"*": P(None, "tp", split)}),
    ]
    found = dtorch.jit(run)(*mine)
    for ours, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.to_torch(), whole, rtol=1e-4, atol=1e-5)


# -- 21: speed of small things -------------------------------------------------------------


def test_21_stack_twice_does_no_propagation_the_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dtorch import builder

    a, b = (place(torch.ones(3, 5), TWO, Shard(0)) for _ in range(2))
    torch.stack([a, b])
    monkeypatch.setattr(builder, "decide", lambda *_: pytest.fail("propagated again"))
    assert torch.stack([a, b]).shape == (2, 3, 5)


def test_21_an_adam_step_costs_little_more_than_pytorchs() -> None:
    """Within three times, once the clock is not at the mercy of the machine: the best of many."""

    def steps(model: torch.nn.Module, x: Any) -> float:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        best = float("inf")
        for _ in range(60):
            model(x).sum().backward()
            begin = time.perf_counter()
            optimizer.step()
            dtorch.synchronize()
            best = min(best, time.perf_counter() - begin)
            optimizer.zero_grad()
        return best

    plain = torch.nn.Linear(32, 5)
    mine = torch.nn.Linear(32, 5)
    for name in ("weight", "bias"):
        value = dtorch.Tensor(getattr(plain, name), device="cpu")
        setattr(mine, name, torch.nn.Parameter(value))
    x = torch.randn(4, 32)
    gc.collect()
    ratio = min(steps(mine, dtorch.Tensor(x, device="cpu")) / steps(plain, x) for _ in range(3))
    print(f"Adam step: {ratio:.2f} times PyTorch's")
    assert ratio < 30  # the claim of 3 is the benchmarks'; this catches a step that retraces


# -- 23: failure ---------------------------------------------------------------------------


@pytest.mark.timeout(30)
def test_23_an_id_out_of_range_on_one_worker() -> None:
    weight = place(torch.ones(4, 2), TWO, Replicate())
    ids = place(torch.tensor([0, 1, 2, 99]), TWO, Shard(0))
    begin = time.monotonic()
    result = F.embedding(ids, weight).sum()
    with pytest.raises(WorkerError, match="index out of range") as caught:
        result.item()
    assert time.monotonic() - begin < 5
    message = str(caught.value)
    assert "cpu:1" in message and "aten.embedding" in message and f"{__file__}:" in message
    assert F.embedding(ids.clamp(max=3), weight).sum().item() == 8


# -- 24: creation under grad ---------------------------------------------------------------


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()])
def test_24_a_gradient_of_a_function_that_creates_a_tensor(placement: Any) -> None:
    def f(x: Any) -> Any:
        made = dtorch.arange(4, dtype=torch.float32, device_mesh=TWO, placements=[placement])
        given = dtorch.Tensor(torch.ones(4), device_mesh=TWO, placements=[placement])
        return (x * made + x * given + torch.zeros_like(x) + torch.rand(4) * 0).sum()

    x = place(torch.ones(4), TWO, Shard(0))
    for g in (dtorch.grad(f), dtorch.jit(dtorch.grad(f)), dtorch.grad(dtorch.jit(f))):
        found = g(x)
        assert found.tolist() == [1.0, 2.0, 3.0, 4.0] and found.placements == [Shard(0)]
