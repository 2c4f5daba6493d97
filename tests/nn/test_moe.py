"""`dtorch.nn.moe`: equal to transformers on one device, and expert parallelism on many."""

import functools
from typing import Any

import optree
import pytest
import torch
from layouts import sample

import dtorch
from dtorch import P, nn, random
from dtorch.parallel import shard

HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 16, 32, 5, 2
BY_EXPERT = {"experts.*": P("ep")}
BY_BOTH = {"experts.gate_up_proj": P("ep", "tp"), "experts.down_proj": P("ep", None, "tp")}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any], P]] = {
    "one device": ({"ep": 1}, BY_EXPERT, P("ep")),
    "tokens": ({"dp": 2}, {}, P("dp")),
    "experts": ({"ep": 2}, BY_EXPERT, P()),
    "features": ({"tp": 2}, BY_BOTH, P()),
    "exchange over 2": ({"ep": 2}, BY_EXPERT, P("ep")),
    "exchange over 3": ({"ep": 3}, BY_EXPERT, P("ep")),
    "exchange over 4, one without experts": ({"ep": 4}, BY_EXPERT, P("ep")),
    "tokens and exchange": ({"dp": 2, "ep": 2}, BY_EXPERT, P(("dp", "ep"))),
    "exchange and tokens": ({"ep": 2, "dp": 2}, BY_EXPERT, P(("ep", "dp"))),
    "tokens and experts": ({"dp": 2, "ep": 2}, BY_EXPERT, P("dp")),
    "exchange and features": ({"dp": 2, "ep": 2, "tp": 2}, BY_BOTH, P(("dp", "ep"))),
    "experts over two axes": ({"ep": 2, "tp": 2}, {"experts.*": P(("ep", "tp"))}, P("ep")),
    "hidden": ({"tp": 2}, {}, P(None, "tp")),
}
SEQUENCES: dict[str, tuple[dict[str, int], dict[str, Any], P]] = {
    "tokens by two dims": ({"dp": 2, "cp": 3}, {}, P("dp", "cp")),
    "exchange and sequence": ({"ep": 2, "cp": 2}, BY_EXPERT, P("ep", "cp")),
    "sequence and exchange": ({"dp": 3, "ep": 2}, BY_EXPERT, P("dp", "ep")),
    "experts over both": ({"ep": 2, "cp": 2}, {"experts.*": P(("ep", "cp"))}, P("ep", "cp")),
    "experts over both, tokens over one": (
        {"ep": 2, "cp": 2},
        {"experts.*": P(("ep", "cp"))},
        P(None, "cp"),
    ),
    "sequence and features": ({"cp": 2, "ep": 2, "tp": 2}, BY_BOTH, P("ep", "cp")),
}


def model(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return nn.moe_init(random.key(0), HIDDEN, INTERMEDIATE, EXPERTS, dtype=dtype)


def inputs(count: int = 13, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, HIDDEN, generator=generator).to(dtype)


def mesh_of(axes: dict[str, int]) -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def loss(params: Any, x: Any) -> Any:
    return nn.moe(params, x, CHOSEN).float().square().sum()


def assert_close(found: Any, expected: Any, **tolerance: float) -> None:
    for ours, theirs in zip(*map(optree.tree_leaves, (found, expected)), strict=True):
        torch.testing.assert_close(ours.to_torch(), theirs, **tolerance)


# -- one device --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_it_is_that_of_transformers(name: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOSEN}
    if name == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

        sizes |= {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS}
        config = transformers.MixtralConfig(**sizes)
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

        sizes |= {"moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS}
        config = transformers.Qwen3MoeConfig(**sizes, norm_topk_prob=True)
    config._experts_implementation = "grouped_mm"
    module, params = Block(config).to(dtype), model(dtype)
    names, leaves, _ = optree.tree_flatten_with_path(params)[0], *optree.tree_flatten(params)
    module.load_state_dict({".".join(n): t for n, t in zip(names, leaves, strict=True)})
    x = inputs(14, dtype).view(2, 7, HIDDEN)
    wide = torch.float32 if name == "mixtral" else None
    call = functools.partial(nn.moe, num_experts_per_token=CHOSEN, weights_dtype=wide)
    expected = module(x)
    assert torch.equal(call(params, x), expected)
    one = mesh_of({"ep": 1})
    placed = shard(params, one, BY_EXPERT)
    assert torch.equal(dtorch.jit(call)(placed, shard(x, one)).to_torch(), expected)
    expected.float().square().sum().backward()
    grads = dtorch.jit(dtorch.grad(lambda p, x: call(p, x).float().square().sum()))(placed, x)
    for path, grad in zip(names, optree.tree_leaves(grads), strict=True):
        assert torch.equal(grad.to_torch(), module.get_parameter(".".join(path)).grad)


def test_an_unknown_activation_is_refused() -> None:
    ids, weights = torch.zeros(13, 1, dtype=torch.int64), torch.ones(13, 1)
    with pytest.raises(ValueError, match=r"activation 'tanh' is not known.\n  Fix: one of silu"):
        nn.experts(model()["experts"], inputs(), ids, weights, activation="tanh")


@pytest.mark.parametrize(
    ("ids", "weights"),
    [((12, 2), (12, 2)), ((13, 2), (13, 1)), ((13, 2), (12, 2)), ((13,), (13,)), ((), ())],
)
def test_routing_that_does_not_fit_the_tokens_is_refused(ids: Any, weights: Any) -> None:
    params = shard(model()["experts"], mesh_of({"ep": 2}), {"*": P("ep")})
    given = torch.zeros(ids, dtype=torch.int64), torch.ones(weights)
    with pytest.raises(ValueError, match=r"but here\n  tokens   \[13, 16\]\n  ids   (.*\n)*  Fix:"):
        nn.experts(params, inputs(), *given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_ids_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    ids, weights = torch.zeros(13, 2, dtype=dtype), torch.ones(13, 2)
    with pytest.raises(ValueError, match=r"ids of experts are integers, not torch.*\n  Fix:"):
        nn.experts(model()["experts"], inputs(), ids, weights)


@pytest.mark.parametrize("wrong", [EXPERTS, -1])
def test_ids_of_no_expert_fail_on_the_devices(wrong: int) -> None:
    params = shard(model()["experts"], mesh_of({"ep": 2}), {"*": P("ep")})
    ids, weights = torch.full((13, 2), wrong), torch.ones(13, 2)
    with pytest.raises(dtorch.errors.WorkerError, match="expert_order"):
        nn.experts(params, inputs(), ids, weights).to_torch()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_grouped_product_is_inferred_in_every_dtype(dtype: torch.dtype) -> None:
    """Its meta kernel takes bfloat16 alone; the CPU kernel takes them all."""
    rows, matrices = inputs(8, dtype), torch.randn(3, HIDDEN, 8).to(dtype)
    ends = torch.tensor([2, 2, 8], dtype=torch.int32)
    call = torch.nn.functional.grouped_mm
    mesh = mesh_of({"ep": 2})
    for run in (call, dtorch.jit(call)):
        found = run(shard(rows, mesh), shard(matrices, mesh), offs=ends)
        assert torch.equal(found.to_torch(), call(rows, matrices, offs=ends))


# -- many devices ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sample(list(LAYOUTS), 20, 0))
def test_values_and_gradients_of_every_layout(name: str) -> None:
    axes, plan, placement = LAYOUTS[name]
    mesh, params, x = mesh_of(axes), model(), inputs()
    placed, tokens = shard(params, mesh, plan), shard(x, mesh, {"*": placement})
    found = dtorch.jit(functools.partial(nn.moe, num_experts_per_token=CHOSEN))(placed, tokens)
    torch.testing.assert_close(found.to_torch(), nn.moe(params, x, CHOSEN), rtol=1e-5, atol=1e-5)
    grads = dtorch.jit(dtorch.grad(loss, argnums=(0, 1)))(placed, tokens)
    expected = torch.func.grad(loss, argnums=(0, 1))(params, x)
    assert_close(grads, expected, rtol=1e-4, atol=1e-4)
    assert grads[0]["experts"]["down_proj"].placements == placed["experts"]["down_proj"].placements


@pytest.mark.parametrize("name", ["experts", "features", "exchange over 3", "hidden"])
def test_one_token(name: str) -> None:
    axes, plan, placement = LAYOUTS[name]
    mesh, params, x = mesh_of(axes), model(), inputs(1)[0]
    placed, token = shard(params, mesh, plan), shard(x, mesh, {"*": P(*placement[-1:])})
    found = nn.moe(placed, token, CHOSEN)
    torch.testing.assert_close(found.to_torch(), nn.moe(params, x, CHOSEN), rtol=1e-5, atol=1e-5)
    grads = dtorch.jit(dtorch.grad(loss, argnums=(0, 1)))(placed, token)
    expected = torch.func.grad(loss, argnums=(0, 1))(params, x)
    assert_close(grads, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sample(list(SEQUENCES), 20, 0))
def test_tokens_of_batches_of_sequences(name: str) -> None:
    """Tokens [B, L, D] stay split by both dims, whether the parts are even or not."""
    axes, plan, placement = SEQUENCES[name]
    mesh, params = mesh_of(axes), model()
    placed = shard(params, mesh, plan)
    step = dtorch.jit(lambda p, x: nn.moe(p, x, CHOSEN))
    for shape in ((3, 5, HIDDEN), (4, 6, HIDDEN), (1, 1, HIDDEN), (2, 0, HIDDEN)):
        x = inputs(shape[0] * shape[1]).view(shape)
        tokens = shard(x, mesh, {"*": placement})
        expected = nn.moe(params, x, CHOSEN)
        found = step(placed, tokens)
        torch.testing.assert_close(found.to_torch(), expected, rtol=1e-5, atol=1e-5)
        moved = [i.step for i in step.program(placed, tokens).communication()]
        assert not any("gather" in s.kind.value and s.source.shape[-1] == HIDDEN for s in moved)
        grads = dtorch.jit(dtorch.grad(loss, argnums=(0, 1)))(placed, tokens)
        assert_close(grads, torch.func.grad(loss, argnums=(0, 1))(params, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["exchange over 3", "exchange and features", "experts"])
def test_bfloat16(name: str) -> None:
    axes, plan, placement = LAYOUTS[name]
    params, x = model(torch.bfloat16), inputs(13, torch.bfloat16)
    mesh = mesh_of(axes)
    placed, tokens = shard(params, mesh, plan), shard(x, mesh, {"*": placement})
    found = dtorch.jit(nn.moe, static_argnums=(2,))(placed, tokens, CHOSEN).to_torch()
    torch.testing.assert_close(found, nn.moe(params, x, CHOSEN), rtol=2e-2, atol=2e-2)
    grads = dtorch.jit(dtorch.grad(loss))(placed, tokens)
    assert_close(grads, torch.func.grad(loss)(params, x), rtol=5e-2, atol=0.5)


ROUTES = {
    "all to the first expert": [[0]] * 9,
    "all to the last expert": [[4]] * 9,
    "experts without tokens": [[0, 3]] * 5 + [[3, 1]] * 4,
    "fewer tokens than devices": [[4, 2]],
    "the same expert twice": [[2, 2], [1, 1]],
    "no token": [],
}


@pytest.mark.parametrize("route", sample(list(ROUTES), 10, 0))
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_every_route(route: str, activation: str) -> None:
    ids = torch.tensor(ROUTES[route], dtype=torch.int64)
    ids = ids if ids.ndim == 2 else ids.view(0, 2)
    x, params = inputs(len(ids)), model()["experts"]
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2))

    def call(params: Any, x: Any, ids: Any, weights: Any) -> Any:
        return nn.experts(params, x, ids, weights, activation=activation).square().sum()

    expected = torch.func.grad(call, argnums=(0, 1, 3))(params, x, ids, weights)
    for axes, placement in (({"ep": 3}, P("ep")), ({"ep": 2}, P())):
        mesh = mesh_of(axes)
        tokens = [shard(t, mesh, {"*": placement}) for t in (x, ids, weights)]
        placed = shard(params, mesh, {"*": P("ep")})
        out = dtorch.jit(call)(placed, *tokens)
        torch.testing.assert_close(out.to_torch(), call(params, x, ids, weights))
        grads = dtorch.jit(dtorch.grad(call, argnums=(0, 1, 3)))(placed, *tokens)
        assert_close(grads, expected, rtol=1e-4, atol=1e-4)


def test_eager_calls_and_autograd_around_jit() -> None:
    axes, plan, placement = LAYOUTS["exchange over 2"]
    mesh, params, x = mesh_of(axes), model(), inputs()
    tokens = shard(x, mesh, {"*": placement})
    out = nn.moe(shard(params, mesh, plan), tokens, CHOSEN)
    torch.testing.assert_close(out.to_torch(), nn.moe(params, x, CHOSEN), rtol=1e-5, atol=1e-5)
    expected = torch.func.grad(loss)(params, x)
    for call in (loss, dtorch.jit(loss)):
        leaves = shard(optree.tree_map(lambda t: t.clone().requires_grad_(), params), mesh, plan)
        call(leaves, tokens).backward()
        assert_close(optree.tree_map(lambda t: t.grad, leaves), expected, rtol=1e-4, atol=1e-4)


def test_what_the_layout_asks_for_is_not_refused() -> None:
    for name in ("exchange and features", "experts"):
        axes, plan, placement = LAYOUTS[name]
        mesh, params, x = mesh_of(axes), model(), inputs()
        placed, tokens = shard(params, mesh, plan), shard(x, mesh, {"*": placement})
        with dtorch.strict():
            found = dtorch.jit(nn.moe, static_argnums=(2,))(placed, tokens, CHOSEN)
        torch.testing.assert_close(found.to_torch(), nn.moe(params, x, CHOSEN))


def test_compile_leaves_experts_as_they_are() -> None:
    axes, plan, placement = LAYOUTS["exchange over 2"]
    mesh, params, x = mesh_of(axes), model(), inputs()
    placed, tokens = shard(params, mesh, plan), shard(x, mesh, {"*": placement})
    grads = dtorch.jit(dtorch.grad(loss), compile=True)(placed, tokens)
    assert_close(grads, torch.func.grad(loss)(params, x), rtol=1e-4, atol=1e-4)


def test_a_device_gets_the_rows_of_its_experts_and_no_more() -> None:
    mesh, params = mesh_of({"ep": 2}), model()["experts"]
    ids = torch.tensor([[0], [0], [1], [4], [2], [0], [0]])
    operands = (inputs(7), ids, torch.ones(7, 1))
    tokens = (shard(t, mesh, {"*": P("ep")}) for t in operands)
    weights = (shard(params[n], mesh, {"*": P("ep")}) for n in ("gate_up_proj", "down_proj"))
    saved = torch.ops.dtorch.expert_mlp_forward(*tokens, *weights, "silu")
    rows = saved[-3]
    assert [rows._shards.get(i).shape[0] for i in range(2)] == [6, 1]


# -- communication -----------------------------------------------------------------------------


def communications(call: Any, *args: Any) -> list[Any]:
    return list(dtorch.explain(call, *args).communications)


def test_tokens_are_exchanged_and_weights_stay() -> None:
    """The rows that leave a device under even routing, there and back, in both directions."""
    mesh, x = mesh_of({"ep": 4}), inputs(64)
    params = nn.moe_init(random.key(0), HIDDEN, INTERMEDIATE, 4)
    placed, tokens = shard(params, mesh, BY_EXPERT), shard(x, mesh, {"*": P("ep")})
    found = communications(dtorch.grad(loss), placed, tokens)
    weights = {t.shape for t in params["experts"].values()}
    assert not any(c.before.shape in weights for c in found)
    passed = [c for c in found if c.collective.value == "permute"]
    rows = 64 * CHOSEN // 4 // 4
    assert [c.num_bytes for c in passed] == [rows * HIDDEN * 4] * 3 * 3  # not to the tokens
    (counts,) = (c for c in found if c.collective.value == "all_gather")
    assert counts.num_bytes == 3 * 4 * 8


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_models_of_transformers_add_up_once_a_layer(name: str) -> None:
    pytest.importorskip("transformers")
    import zoo

    case = zoo.CASES[name]
    module = case.make(experts_implementation="grouped_mm")
    params, apply = nn.functionalize(module)
    plan = dtorch.parallel.plan_from_huggingface(module)
    parameters, buffers = apply.split(shard(params, mesh_of({"ep": 2}), plan))
    given = case.inputs()

    def run(parameters: Any) -> Any:
        return apply(apply.join(parameters, buffers), **given)[0].square().mean()

    tokens, size = given["input_ids"].numel(), case.settings["hidden_size"]
    forward = communications(run, parameters)
    assert [c.num_bytes for c in forward] == [tokens * size * 4] * 2
    both = communications(dtorch.grad(run), parameters)
    large = [c.num_bytes for c in both if c.num_bytes > tokens * 2 * 4]
    assert large == [tokens * size * 4] * 4
    found = dtorch.jit(dtorch.grad(run))(parameters)
    expected = torch.func.grad(
        lambda p: apply(apply.join(p, apply.split(params)[1]), **given)[0].square().mean()
    )(apply.split(params)[0])
    assert_close(found, expected, rtol=1e-3, atol=1e-5)
