"""transformers' own `LlamaForCausalLM`, unmodified, through `functional_call`."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch.parallel import ColumnParallel, RowParallel
from dtorch.tracing_modes import compiling

transformers = pytest.importorskip("transformers")

PLAN = {
    "*.q_proj.weight": ColumnParallel("tp"),
    "*.k_proj.weight": ColumnParallel("tp"),
    "*.v_proj.weight": ColumnParallel("tp"),
    "*.o_proj.weight": RowParallel("tp"),
    "*.gate_proj.weight": ColumnParallel("tp"),
    "*.up_proj.weight": ColumnParallel("tp"),
    "*.down_proj.weight": RowParallel("tp"),
    "model.embed_tokens.weight": dtorch.P("tp", None),
    "lm_head.weight": ColumnParallel("tp"),
}
ONE = dtorch.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
TP2 = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=129,
        max_position_embeddings=64,
        use_cache=False,
        attn_implementation=request.param,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 129, (2, 11))


def parameters(model: Any, mesh: dtorch.DeviceMesh) -> dict[str, Any]:
    """The parameters by name, sharded, not requiring grad."""
    named = {k: v.detach() for k, v in model.named_parameters()}
    assert set(PLAN) and mesh.mesh_dim_names == ("tp",)
    return dtorch.parallel.shard(named, mesh, PLAN)


def logits(model: Any) -> Callable[..., Any]:
    def function(params: Any, **inputs: Any) -> Any:
        return torch.func.functional_call(model, params, (), inputs)

    return function


def padded(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return mask


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
def test_logits(model: Any, ids: torch.Tensor, with_mask: bool, jitted: bool) -> None:
    inputs = {"input_ids": ids} | ({"attention_mask": padded(ids)} if with_mask else {})
    with torch.no_grad():
        expected = model(**inputs).logits
        for mesh in (ONE, TP2):
            function = dtorch.jit(logits(model)) if jitted else logits(model)
            placed = dtorch.parallel.shard(inputs, mesh)
            out = function(parameters(model, mesh), **placed)
            found = out.logits.to_torch()
            rows = (padded(ids) if with_mask else torch.ones_like(ids)).bool()
            if mesh is ONE:
                assert torch.equal(found, expected)
            torch.testing.assert_close(found[rows], expected[rows], rtol=1e-5, atol=1e-5)
            if jitted:
                assert type(out).__name__ == "CausalLMOutputWithPast"


def test_plain_inputs_are_accepted(model: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        out = dtorch.jit(logits(model))(parameters(model, TP2), input_ids=ids)
        torch.testing.assert_close(out.logits.to_torch(), model(ids).logits, rtol=1e-5, atol=1e-5)


def loss_of(model: Any) -> Callable[..., Any]:
    def loss(params: Any, ids: Any) -> Any:
        inputs = {"input_ids": ids, "labels": ids}
        return torch.func.functional_call(model, params, (), inputs).loss

    return loss


def by_backward(loss: Callable[..., Any], params: Any, ids: Any) -> tuple[Any, Any]:
    leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
    value = loss(leaves, ids)
    value.backward()
    return value.detach(), {k: v.grad for k, v in leaves.items()}


WAYS: dict[str, Callable[..., Any]] = {
    "eager": lambda loss, params, ids: by_backward(loss, params, ids),
    "inside jit": lambda loss, params, ids: dtorch.jit(dtorch.value_and_grad(loss))(params, ids),
    "through jit": lambda loss, params, ids: by_backward(dtorch.jit(loss), params, ids),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_the_loss(model: Any, ids: torch.Tensor, way: str) -> None:
    model.zero_grad()
    # Models ask whether they are traced, and may then compute the same in another order.
    with contextlib.nullcontext() if way == "eager" else compiling():
        expected = model(input_ids=ids, labels=ids).loss
    expected.backward()
    for mesh in (ONE, TP2):
        params = parameters(model, mesh)
        value, grads = WAYS[way](loss_of(model), params, dtorch.parallel.shard(ids, mesh))
        torch.testing.assert_close(value.to_torch(), expected.detach(), rtol=1e-5, atol=1e-5)
        assert set(grads) == {k for k, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            found = grads[name].to_torch()
            if mesh is ONE:
                assert torch.equal(found, parameter.grad), name
            torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-5)
    model.zero_grad()


def test_one_program_serves_all_calls(model: Any, ids: torch.Tensor) -> None:
    function = dtorch.jit(logits(model))
    params = parameters(model, TP2)
    with torch.no_grad():
        for shift in range(3):
            function(params, input_ids=(ids + shift) % 129)
    assert function.cache_info().currsize == 1 and function.cache_info().misses == 1
