"""Small pipelines of diffusers with random weights, for tests."""

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from transformers import CLIPTextModel

import dtorch

ONE = dtorch.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))


def load_example() -> Any:
    path = Path(__file__).resolve().parents[1] / "examples" / "sd3.py"
    spec = importlib.util.spec_from_file_location("sd3_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sd3_example"] = module
    spec.loader.exec_module(module)
    return module


sd3 = load_example()


def make_mesh(text: str) -> dtorch.DeviceMesh:
    return sd3.make_mesh(text, "cpu")


def flux_pipeline() -> Any:
    base = sd3.small_pipeline()
    torch.manual_seed(1)
    transformer = FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=8,
        joint_attention_dim=96,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    models: dict[str, Any] = {
        "transformer": transformer.eval(),
        "scheduler": base.scheduler,
        "vae": base.vae,
        "text_encoder": CLIPTextModel(base.text_encoder.config).eval(),
        "tokenizer": base.tokenizer,
        "text_encoder_2": base.text_encoder_3,
        "tokenizer_2": base.tokenizer_3,
    }
    return FluxPipeline(**models)


@functools.cache
def pipeline(kind: str) -> Any:
    pipe = sd3.small_pipeline() if kind == "sd3" else flux_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def images(pipe: Any, height: int = 64, width: int = 64, **options: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    found = pipe(
        "a red cat",
        height=height,
        width=width,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        **{"output_type": "pt", **options},
    ).images
    return found.to_torch() if isinstance(found, dtorch.Tensor) else found
