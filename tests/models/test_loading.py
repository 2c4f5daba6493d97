"""Models of `transformers` from their folders: every value, and what is said of a wrong folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from layouts import sample

import dtorch
from dtorch.errors import CheckpointError
from dtorch.models import empty_model, from_pretrained
from dtorch.parallel import stages_from_huggingface
from dtorch.tree import leaf_names

transformers = pytest.importorskip("transformers")

MESH = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))


def saved(model: Any, folder: Path) -> Any:
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


def check(params: Any, model: Any) -> None:
    values = model.state_dict() | dict(model.named_buffers())
    names, leaves, _ = leaf_names(params)
    for name, leaf in zip(names, leaves, strict=True):
        assert torch.equal(leaf.to_torch(), values[name]), name


@pytest.mark.parametrize(
    "name", sample(["qwen2", "gemma3", "gpt2", "mixtral", "deepseek_v3", "clip_text"], 10, 0)
)
def test_a_folder_is_the_model(name: str, tmp_path: Path) -> None:
    """Tied weights, buffers that are not stored, fused experts, prefixes of old names."""
    case = zoo.CASES[name]
    model = saved(case.make(), tmp_path)
    params, apply = from_pretrained(tmp_path, MESH, case.plan)
    check(params, model)
    assert not apply.module.training
    assert all(p.is_meta for p in apply.module.parameters())


def test_a_model_runs_as_it_was_loaded(tmp_path: Path) -> None:
    case = zoo.CASES["qwen3_moe"]
    model = saved(case.make(), tmp_path)
    params, apply = from_pretrained(tmp_path, MESH, experts_implementation="grouped_mm")
    experts = params["model"]["layers"]["0"]["mlp"]["experts"]
    assert experts["gate_up_proj"].placements == [dtorch.Shard(0), dtorch.Shard(1)]
    with torch.no_grad():
        found = dtorch.jit(apply)(params, **case.inputs()).logits.to_torch()
        torch.testing.assert_close(found, model(**case.inputs()).logits, rtol=1e-4, atol=1e-5)


def test_a_base_model_fills_the_model_around_it(tmp_path: Path) -> None:
    model = zoo.CASES["gpt2"].make()
    saved(model.transformer, tmp_path)
    params, _ = from_pretrained(tmp_path, MESH, {}, model=transformers.GPT2LMHeadModel)
    check(params, model)


def test_a_dtype_and_stages(tmp_path: Path) -> None:
    model = saved(zoo.CASES["llama"].make(), tmp_path)
    stages = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")).unbind("pp")
    meshes = stages_from_huggingface(model, stages)
    params, _ = from_pretrained(tmp_path, meshes, dtype=torch.bfloat16)
    assert params["lm_head"]["weight"].device_mesh == stages[1]
    assert params["lm_head"]["weight"].dtype == torch.bfloat16
    assert params["model"]["rotary_emb"]["inv_freq"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_a_dtype_is_that_of_what_transformers_casts(
    tmp_path: Path, dtype: torch.dtype | None
) -> None:
    """The gates' weights and biases, a parameter and a buffer, stay in float32."""
    model = zoo.CASES["deepseek_v3"].make()
    saved(model if dtype else model.bfloat16(), tmp_path)
    expected = type(model).from_pretrained(tmp_path, dtype=dtype or "auto")
    params, _ = from_pretrained(tmp_path, MESH, dtype=dtype)
    gate = params["model"]["layers"]["1"]["mlp"]["gate"]
    assert {t.dtype for t in gate.values()} == {torch.float32}
    assert params["lm_head"]["weight"].dtype == (dtype or torch.bfloat16)
    check(params, expected)


def test_arguments_of_another_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model is 'LlamaModel'.*\n  Fix: .*transformers\.Llama"):
        from_pretrained(tmp_path, MESH, model="LlamaModel")
    with pytest.raises(ValueError, match=r"dtype is torch\.int8, which is not floating"):
        from_pretrained(tmp_path, MESH, dtype=torch.int8)


def test_an_empty_model_has_the_buffers_that_no_checkpoint_holds() -> None:
    model = zoo.CASES["gemma3"].make()
    empty = empty_model(model.config)
    buffers = dict(empty.named_buffers())
    assert set(buffers) == set(dict(model.named_buffers()))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    assert empty.lm_head.weight is empty.model.embed_tokens.weight


def test_a_folder_that_does_not_fit_is_one_error(tmp_path: Path) -> None:
    saved(zoo.CASES["llama"].make(), tmp_path)
    with pytest.raises(CheckpointError, match="does not hold the expected tree") as error:
        from_pretrained(tmp_path, MESH, num_hidden_layers=3, intermediate_size=95)
    lines = str(error.value).splitlines()[1:-1]
    assert len(lines) == 9 + 2 * 3
    assert any(
        line.startswith("  model.layers.2.mlp.up_proj.weight [95, 64]: missing") for line in lines
    )
    assert "  model.layers.1.mlp.up_proj.weight [95, 64]: [96, 64] in the checkpoint" in lines
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        from_pretrained(tmp_path / "elsewhere", MESH)


def test_a_conversion_that_is_not_known_is_said(tmp_path: Path) -> None:
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    class Turned(transformers.LlamaForCausalLM):
        pass

    saved(zoo.CASES["llama"].make(), tmp_path)
    converter = WeightConverter("o_proj.weight", "o_proj.weight", [Transpose(0, 1)])
    register_checkpoint_conversion_mapping("Turned", [converter])
    with pytest.raises(CheckpointError, match=r"transformers converts it by Transpose"):
        from_pretrained(tmp_path, MESH, model=Turned)
