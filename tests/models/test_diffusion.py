"""Pipelines of diffusers on a mesh: PyTorch's image on one device, the same image on every mesh."""

import functools
import random
from typing import Any

import pytest
import torch
from layouts import sampled

import dtorch
from dtorch import P
from dtorch.errors import MeshError, PlacementError
from dtorch.nn import functionalize
from dtorch.parallel import ColumnParallel, shard

pytest.importorskip("diffusers")
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from pipelines import ONE, flux_pipeline, images, make_mesh, pipeline, sd3

from dtorch.models import diffusion


@functools.cache
def expected(kind: str, height: int, width: int, num_images: int) -> torch.Tensor:
    options = {"output_type": "latent", "num_images_per_prompt": num_images}
    return images(pipeline(kind), height, width, **options)


@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_on_one_device_every_bit_is_pytorchs(kind: str) -> None:
    on_one = diffusion.shard(pipeline(kind), ONE)
    assert type(on_one) is type(pipeline(kind))
    for size in ((64, 64), (80, 112)):
        assert torch.equal(images(on_one, *size), images(pipeline(kind), *size))


MESHES = [
    "cfg=2",
    "dp=2",
    "tp=2",
    "ulysses_cp=2",
    "ring_cp=2",
    "pp=2",
    "ring_cp=3",
    "dp=3",
    "tp=4",
    "ulysses_cp=4",
    "cfg=2,tp=2",
    "ring_cp=2,ulysses_cp=2",
    "pp=2,cfg=2",
    "cfg=2,ulysses_cp=2,tp=2",
    "dp=2,cfg=2,ring_cp=2",
    "pp=2,ring_cp=2,tp=2",
    "ring_cp=4,tp=2",
    "tp=8",
]


@pytest.mark.parametrize("number", range(sampled(len(MESHES))))
def test_the_same_image_on_every_mesh(number: int) -> None:
    drawn = random.Random(number)
    mesh = MESHES[number if sampled(len(MESHES)) == len(MESHES) else drawn.randrange(len(MESHES))]
    kind = drawn.choice(["sd3", "flux"])
    size, count = drawn.choice([(64, 64), (80, 80), (48, 112)]), drawn.choice([1, 2])
    pipe = diffusion.shard(pipeline(kind), make_mesh(mesh))
    options = {"output_type": "latent", "num_images_per_prompt": count}
    found = images(pipe, *size, **options)
    torch.testing.assert_close(found, expected(kind, *size, count), rtol=0, atol=1e-3)
    assert images(pipe, *size).shape == (1, 3, *size)


def test_models_on_meshes_of_their_own() -> None:
    devices = {
        name: dtorch.DeviceMesh("cpu", numbers, mesh_dim_names=("tp",))
        for name, numbers in {"text_encoder*": [0, 1], "vae.*": [4, 5, 6], "*": [2, 3]}.items()
    }
    pipe = diffusion.shard(pipeline("sd3"), devices)
    result = pipe("a red cat", num_inference_steps=2, output_type="pt").images
    assert result.device_mesh == devices["vae.*"]
    found, wanted = images(pipe), images(pipeline("sd3"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)


CONFIGURATIONS = {
    "sd3": (SD3Transformer2DModel, {}),
    "sd3.5": (
        SD3Transformer2DModel,
        {"dual_attention_layers": (0, 1), "qk_norm": "rms_norm", "attention_head_dim": 8},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_transformer_of_sd3_is_pytorchs(name: str, dtype: torch.dtype) -> None:
    kind, settings = CONFIGURATIONS[name]
    torch.manual_seed(2)
    config = {
        "sample_size": 16,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 48,
        "caption_projection_dim": 64,
        "pooled_projection_dim": 32,
        "pos_embed_max_size": 24,
    }
    config["caption_projection_dim"] = 4 * settings.get("attention_head_dim", 16)
    model = kind(**{**config, **settings}).eval().to(dtype)
    given = [torch.randn(s, dtype=dtype) for s in ((2, 16, 14, 18), (2, 11, 48), (2, 32))]
    _compare(model, *given, torch.tensor([900.0, 30.0]), return_dict=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_transformer_of_flux_is_pytorchs(dtype: torch.dtype) -> None:
    model = flux_pipeline().transformer.to(dtype)
    given = {
        "hidden_states": torch.randn(2, 35, 64, dtype=dtype),
        "encoder_hidden_states": torch.randn(2, 11, 96, dtype=dtype),
        "pooled_projections": torch.randn(2, 32, dtype=dtype),
        "timestep": torch.tensor([0.9, 0.1], dtype=dtype),
        "img_ids": torch.randint(9, (35, 3)).to(dtype),
        "txt_ids": torch.zeros(11, 3, dtype=dtype),
        "guidance": torch.tensor([3.5, 1.0], dtype=torch.float32),
    }
    _compare(model, return_dict=False, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_text_encoders_are_pytorchs(dtype: torch.dtype) -> None:
    pipe = sd3.small_pipeline()
    ids = torch.randint(3, 250, (2, 77))
    for model in (pipe.text_encoder, pipe.text_encoder_2):
        _compare(model.to(dtype), ids, output_hidden_states=True)
    _compare(pipe.text_encoder_3.to(dtype), ids)


@torch.no_grad()
def _compare(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    params, apply = functionalize(model)
    wanted = model(*args, **kwargs)
    found = dtorch.jit(apply)(shard(params, ONE), *args, **kwargs)
    pairs = zip(dtorch.tree.flatten(found)[0], dtorch.tree.flatten(wanted)[0], strict=True)
    for a, b in pairs:
        assert torch.equal(a.to_torch(), b) and a.dtype == b.dtype


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_autoencoder_is_pytorchs(dtype: torch.dtype) -> None:
    pipe = sd3.small_pipeline().to(dtype)
    on_one = diffusion.shard(pipe, ONE)
    for shape in ((1, 16, 8, 8), (2, 16, 5, 9)):
        latents = torch.randn(shape, dtype=dtype)
        (image,) = on_one.vae.decode(latents, return_dict=False)
        assert torch.equal(image.to_torch(), pipe.vae.decode(latents).sample)
        picture = pipe.vae.decode(latents).sample
        found = on_one.vae.encode(picture).latent_dist
        wanted = pipe.vae.encode(picture).latent_dist
        assert torch.equal(found.mean.to_torch(), wanted.mean)
        assert torch.equal(found.std.to_torch(), wanted.std)
        assert torch.equal(found.mode().to_torch(), wanted.mode())


@torch.no_grad()
@pytest.mark.parametrize("mesh", ["cfg=2", "ring_cp=3", "tp=2,ulysses_cp=2"])
def test_no_device_has_the_whole_image(mesh: str) -> None:
    pipe = sd3.small_pipeline()
    on_mesh = diffusion.shard(pipe, make_mesh(mesh))
    latents = torch.randn(1, 16, 9, 8)
    (image,) = on_mesh.vae.decode(latents, return_dict=False)
    rows = [stop - start for start, stop in (box[2] for box in image._spec.boxes)]
    assert max(rows) == -(-72 // on_mesh.vae._mesh.size())
    torch.testing.assert_close(image.to_torch(), pipe.vae.decode(latents).sample)


def test_nothing_moves_before_everything_is_known_to_fit() -> None:
    pipe = pipeline("sd3")
    with pytest.raises(ValueError, match=r"8 heads of transformer.*tp=3(.|\n)*one of 1, 2, 4, 8;"):
        diffusion.shard(pipe, make_mesh("tp=3"))
    with pytest.raises(ValueError, match="tp=4 times ulysses_cp=4"):
        diffusion.shard(pipe, make_mesh("tp=4,ulysses_cp=4"))
    with pytest.raises(ValueError, match="4 layers for 5 stages"):
        diffusion.shard(pipe, make_mesh("pp=5"))
    with pytest.raises(MeshError, match=r"\['sp'\](.|\n)*cfg, dp, ring_cp, ulysses_cp, tp, pp"):
        diffusion.shard(pipe, dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("sp",)))
    with pytest.raises(MeshError, match="without names"):
        diffusion.shard(pipe, dtorch.DeviceMesh("cpu", [0, 1]))
    with pytest.raises(TypeError, match="a pipeline of diffusers is needed, not Linear"):
        diffusion.shard(torch.nn.Linear(1, 1), ONE)
    with pytest.raises(PlacementError, match="match no leaf"):
        diffusion.shard(pipe, ONE, {"transformer.nothing.*": ColumnParallel("tp")})
    with pytest.raises(PlacementError, match=r"pos_embd'(.|\n)*transformer\.pos_embed"):
        diffusion.shard(pipe, ONE, activations={"transformer.pos_embd": P("dp")})


def test_a_plan_and_activations_of_ones_own() -> None:
    pipe, mesh = pipeline("sd3"), dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    plan = {"transformer.*.ff.net.0.proj.*": ColumnParallel("x")}
    on_mesh = diffusion.shard(pipe, mesh, plan, activations={"transformer.pos_embed": P(None, "x")})
    block = on_mesh.transformer._params["transformer_blocks"]["0"]
    assert block["ff"]["net"]["0"]["proj"]["weight"].placements == [dtorch.Shard(0)]
    assert block["attn"]["to_q"]["weight"].placements == [dtorch.Replicate()]
    torch.testing.assert_close(images(on_mesh), images(pipe), rtol=0, atol=1e-3)


def test_four_devices_have_a_quarter_of_the_parameters_each() -> None:
    on_mesh = diffusion.shard(pipeline("sd3"), make_mesh("tp=4"))
    leaves = dtorch.tree.flatten(on_mesh.transformer._params)[0]
    own = sum(leaf._spec.num_local_bytes for leaf in leaves)
    assert own <= 0.3 * sum(leaf._spec.num_bytes for leaf in leaves)


@pytest.mark.parametrize("mesh", ["foo=2", "cfg", "cfg=0", ""])
def test_the_example_refuses_meshes(mesh: str) -> None:
    with pytest.raises(SystemExit, match="expected sizes of axes among pp, cfg, dp"):
        make_mesh(mesh)
