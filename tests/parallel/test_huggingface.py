"""Plans from `transformers`, and its models under them: unmodified, eager and jitted."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
import zoo
from layouts import sample

import dtorch
from dtorch import P
from dtorch.nn import functionalize
from dtorch.parallel import (
    ColumnParallel,
    RowParallel,
    plan_from_huggingface,
    shard,
    stages_from_huggingface,
)
from dtorch.program import Apply

transformers = pytest.importorskip("transformers")

ONE = dtorch.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
TP2 = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
EXPERTS = [name for name, case in zoo.CASES.items() if case.experts]


def plan_of(case: zoo.Case, model: Any) -> Any:
    return plan_from_huggingface(model) if case.plan is None else case.plan


def check(model: Any, case: zoo.Case, jitted: bool) -> None:
    """Compares the first result, bit for bit on one device."""
    params, apply = functionalize(model)
    inputs, plan = case.inputs(), plan_of(case, model)
    call = dtorch.jit(apply) if jitted else apply
    with torch.no_grad():
        expected = model(**inputs)[0]
        for mesh in (ONE, TP2):
            found = call(shard(params, mesh, plan), **shard(inputs, mesh))[0].to_torch()
            if mesh is ONE:
                assert torch.equal(found, expected)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sample(list(zoo.CASES), 20, 0))
def test_models_under_jit(name: str) -> None:
    case = zoo.CASES[name]
    extra = {"experts_implementation": "grouped_mm"} if case.experts else {}
    check(case.make(**extra), case, jitted=True)


@pytest.mark.parametrize("name", sample(["gemma3", "gpt2", *EXPERTS], 10, 0))
def test_models_eagerly(name: str) -> None:
    case = zoo.CASES[name]
    extra = {"experts_implementation": "eager"} if case.experts else {}
    check(case.make(**extra), case, jitted=False)


def test_grouped_experts_eagerly() -> None:
    check(zoo.CASES["mixtral"].make(), zoo.CASES["mixtral"], jitted=False)


@pytest.mark.parametrize("axes", [("ep",), ("ep", "tp")])
def test_experts_are_split_by_the_expert_plan(axes: tuple[str, ...]) -> None:
    case = zoo.CASES["qwen3_moe"]
    model = case.make(experts_implementation="grouped_mm")
    params, apply = functionalize(model)
    mesh = dtorch.init_device_mesh("cpu", (2,) * len(axes), mesh_dim_names=axes)
    placed = shard(params, mesh, plan_from_huggingface(model))
    experts = placed["model"]["layers"]["1"]["mlp"]["experts"]
    assert experts["down_proj"].placements[0] == dtorch.Shard(0)
    inputs = case.inputs()
    with torch.no_grad():
        expected = model(**inputs)[0]
        call = dtorch.jit(apply)
        found = call(placed, **inputs)[0].to_torch()
        program = str(call.program(placed, **inputs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weights = [line for line in program.splitlines() if "float32[4, " in line]
    assert weights
    assert not any("all_gather" in line for line in weights), "the experts stay where they are"


def test_a_pipeline_by_the_models_own_plan() -> None:
    case = zoo.CASES["llama"]
    model = case.make()
    params, apply = functionalize(model)
    mesh = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    first, last = mesh.unbind("pp")
    stages = stages_from_huggingface(model, [first, last])
    placed = shard(params, stages, plan_from_huggingface(model))
    layers = placed["model"]["layers"]
    assert [layers[i]["mlp"]["up_proj"]["weight"].device_mesh for i in "01"] == [first, last]
    assert placed["model"]["embed_tokens"]["weight"].device_mesh == first
    assert placed["lm_head"]["weight"].device_mesh == last
    inputs = case.inputs()
    with torch.no_grad():
        found = dtorch.jit(apply)(placed, **shard(inputs, first))[0].to_torch()
        torch.testing.assert_close(found, model(**inputs)[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"LlamaConfig: 2 layers in its pipeline plan"):
        stages_from_huggingface(model, [first] * 3)


@pytest.mark.parametrize("name", sample(list(zoo.CASES), 20, 0))
def test_models_on_two_stages_under_jit(name: str) -> None:
    case = zoo.CASES[name]
    model = case.make(**({"experts_implementation": "grouped_mm"} if case.experts else {}))
    params, apply = functionalize(model)
    first, last = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)).unbind("pp")
    try:
        stages = stages_from_huggingface(model, [first, last])
    except ValueError:  # it carries no pipeline plan: the second of two layers, and what ends it
        late = re.compile(r"\.1\.|^[^0]*(ln_f|pooler|final_layer_norm|layer_?norm)\.(?!.*\.0\.)")
        stages = {n: last if late.search(n) else first for n in apply.leaves}
    placed = shard(params, stages)
    call, inputs = dtorch.jit(apply), case.inputs()
    with torch.no_grad():
        found = call(placed, **inputs)[0]
        torch.testing.assert_close(found.to_torch(), model(**inputs)[0], rtol=1e-4, atol=1e-4)
    assert found.device_mesh == last
    ran = Counter(i.mesh for i in call.program(placed, **inputs).instructions if is_apply(i))
    assert min(ran[first], ran[last]) > 20  # the layer of each is computed there


def is_apply(instruction: Any) -> bool:
    return isinstance(instruction, Apply)


def test_the_plan_of_a_configuration_is_that_of_its_model() -> None:
    model = zoo.CASES["llama"].make()
    plan = plan_from_huggingface(model.config)
    assert plan == plan_from_huggingface(model)
    assert plan["model.layers.*.self_attn.o_proj.weight"] == RowParallel("tp")
    assert plan["model.embed_tokens.weight"] == P("tp")
    assert plan["lm_head.weight"] == ColumnParallel("tp")
    assert plan_from_huggingface(model, axis="x")["lm_head.weight"] == ColumnParallel("x")
    base = plan_from_huggingface(model.model)
    assert base["layers.*.self_attn.o_proj.weight"] == RowParallel("tp")
    assert "lm_head.weight" not in base


def test_experts_have_both_axes() -> None:
    plan = plan_from_huggingface(zoo.CASES["mixtral"].make(), expert_axis="e")
    assert plan["model.layers.*.mlp.experts.gate_up_proj"] == P("e", "tp")
    assert plan["model.layers.*.mlp.experts.down_proj"] == P("e", None, "tp")


def test_tied_weights_have_the_style_of_either_name() -> None:
    plan = plan_from_huggingface(zoo.CASES["qwen2"].make())
    assert plan["model.embed_tokens.weight"] == P("tp")
    assert "lm_head.weight" not in plan
    assert plan["model.layers.*.self_attn.q_proj.bias"] == ColumnParallel("tp")


def test_a_pattern_that_means_other_leaves_is_written_out() -> None:
    model = zoo.CASES["llama"].make()
    model.model.layers[1].mlp.up_proj = torch.nn.ModuleDict({"0": torch.nn.Linear(2, 2)})
    model.tp_plan["model.layers.*.mlp"] = "colwise"
    model.model.layers[0].mlp.own = torch.nn.Parameter(torch.ones(2, 2))
    model.model.layers[0].mlp.more = torch.nn.ParameterList([torch.ones(2)])
    plan = plan_from_huggingface(model)
    assert plan["model.layers.*.mlp.own"] == ColumnParallel("tp")
    shard(functionalize(model)[0], TP2, plan)


def test_what_cannot_be_planned_is_said() -> None:
    with pytest.raises(ValueError, match=r"GPT2Config carries no tensor or expert plan"):
        plan_from_huggingface(zoo.CASES["gpt2"].make())
    model = zoo.CASES["llama"].make()
    model._tp_plan["lm_head"] = "spiral"
    with pytest.raises(ValueError, match=r"LlamaConfig has styles .*\n  lm_head: 'spiral'"):
        plan_from_huggingface(model)
    with pytest.raises(TypeError, match="a transformers model or configuration is needed, not int"):
        plan_from_huggingface(3)


def test_every_style_of_transformers_is_known() -> None:
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    from dtorch.parallel import huggingface

    assert set(ALL_PARALLEL_STYLES) <= huggingface._STYLES
