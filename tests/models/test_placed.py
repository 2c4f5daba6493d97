"""Models of a pipeline in the place of the modules: what their holder does with them."""

import copy
import inspect
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch

import dtorch
from dtorch import P
from dtorch.errors import MeshError, PlacementError
from dtorch.models import diffusion

pytest.importorskip("diffusers")
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.controlnets.controlnet_sd3 import SD3ControlNetModel
from diffusers.pipelines.controlnet_sd3.pipeline_stable_diffusion_3_controlnet import (
    StableDiffusion3ControlNetPipeline,
)
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
    StableDiffusion3Pipeline,
)
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3_img2img import (
    StableDiffusion3Img2ImgPipeline,
)
from pipelines import ONE, flux_pipeline, images, make_mesh, pipeline, sd3

PAIR = make_mesh("tp=2")


class Scaled(StableDiffusion3Pipeline):
    """A pipeline with a setting that is no component."""

    scale = 1.0


def test_all_else_of_a_pipeline_is_kept() -> None:
    pipe = Scaled(**sd3.small_pipeline().components)
    pipe.scale = 3.0
    pipe.image_processor = VaeImageProcessor(vae_scale_factor=8, do_normalize=False)
    pipe.tokenizer_max_length = 20
    pipe.set_progress_bar_config(disable=True)
    config = dict(pipe.config)
    on_one = diffusion.shard(pipe, ONE)
    assert (on_one.scale, on_one.tokenizer_max_length) == (3.0, 20)
    assert on_one.image_processor is pipe.image_processor and dict(on_one.config) == config
    assert on_one._progress_bar_config == {"disable": True}
    assert torch.equal(images(on_one), images(pipe))
    assert isinstance(pipe.transformer.proj_out.weight.data, torch.Tensor)


def test_whoever_asks_is_told_of_the_own_class() -> None:
    pipe, on_pair = pipeline("sd3"), diffusion.shard(pipeline("sd3"), PAIR)
    for name, model in pipe.components.items():
        assert isinstance(getattr(on_pair, name), type(model))
    transformer = on_pair.transformer
    assert isinstance(transformer, torch.nn.Module) and transformer.device.type == "cpu"
    assert transformer.dtype == torch.float32 and transformer.config == pipe.transformer.config
    assert repr(transformer) == f"SD3Transformer2DModel on {PAIR!r}"
    named = dict(transformer.named_parameters())
    assert named.keys() == dict(pipe.transformer.named_parameters()).keys()
    assert all(isinstance(p, dtorch.Tensor) for p in transformer.parameters())
    assert transformer.state_dict().keys() == pipe.transformer.state_dict().keys()
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = transformer.no_such_name


def test_settings_may_be_changed_at_any_time() -> None:
    pipe = sd3.small_pipeline()
    on_pair = diffusion.shard(pipe, PAIR)
    size = {"height": 96, "width": 96}
    first, wanted = images(on_pair, **size), images(pipe, **size)
    torch.testing.assert_close(first, wanted, rtol=0, atol=1e-3)
    for holder in (pipe, on_pair):
        holder.vae.enable_tiling()
    tiled = images(pipe, **size)
    assert (tiled - wanted).abs().max() > 1e-2
    torch.testing.assert_close(images(on_pair, **size), tiled, rtol=0, atol=1e-3)
    on_pair.vae.use_tiling = False
    torch.testing.assert_close(images(on_pair, **size), wanted, rtol=0, atol=1e-3)


def test_a_processor_that_is_changed_in_place_is_noticed() -> None:
    class Weighed(JointAttnProcessor2_0):
        weight = 1.0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            image, text = super().__call__(*args, **kwargs)
            return image * self.weight, text

    pipe = sd3.small_pipeline()
    pipe.transformer.set_attn_processor(Weighed())
    on_one = diffusion.shard(pipe, ONE)
    for weight in (1.0, 0.5):
        for holder in (pipe, on_one):
            for processor in holder.transformer.attn_processors.values():
                processor.weight = weight
        assert torch.equal(images(on_one), images(pipe))
    traces = len(on_one.transformer._programs)
    assert torch.equal(images(on_one), images(pipe))
    assert len(on_one.transformer._programs) == traces


@torch.no_grad()
def test_hooks_of_a_model_run() -> None:
    pipe = sd3.small_pipeline()
    pipe.transformer.register_forward_hook(lambda m, a, r: (r[0] * 0.5,))
    pipe.transformer.register_forward_pre_hook(
        lambda m, a, k: (a, k | {"hidden_states": k["hidden_states"] * 2}), with_kwargs=True
    )
    on_one = diffusion.shard(pipe, ONE)
    assert torch.equal(images(on_one), images(pipe))
    assert (images(on_one) - images(pipeline("sd3"))).abs().max() > 1e-3


def test_a_replaced_forward_is_refused() -> None:
    pipe = sd3.small_pipeline()
    block = pipe.transformer.transformer_blocks[1]
    block.forward = lambda *args, **kwargs: type(block).forward(block, *args, **kwargs)
    with pytest.raises(ValueError, match=r"transformer\.transformer_blocks\.1, a JointTransf"):
        diffusion.shard(pipe, ONE)
    del block.forward
    on_one = diffusion.shard(pipe, ONE)
    images(on_one)
    on_one.transformer.transformer_blocks[0].forward = print
    with pytest.raises(RuntimeError, match=r"transformer_blocks\.0(.|\n)*Fix: remove it"):
        images(on_one)


def test_weights_that_are_changed_too_late_are_refused() -> None:
    on_one = diffusion.shard(sd3.small_pipeline(), ONE)
    images(on_one)
    on_one.transformer.fuse_qkv_projections()
    with pytest.raises(RuntimeError, match=r"were added(.|\n)*to_(added_)?qkv(.|\n)*Fix: change"):
        images(on_one)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.proj_out.weight.mul_(2),
        lambda t: t.apply(lambda m: [p.zero_() for p in m.parameters(recurse=False)]),
        lambda t: setattr(t, "proj_out", torch.nn.Linear(128, 64)),
        lambda t: t.load_state_dict(
            {n: torch.zeros(v.shape) for n, v in t.named_parameters()}, strict=False, assign=True
        ),
        lambda t: t.transformer_blocks.insert(0, t.transformer_blocks[1]),
    ],
)
@torch.no_grad()
def test_weights_that_are_written_to_too_late_are_refused(change: Any) -> None:
    on_one = diffusion.shard(sd3.small_pipeline(), ONE)
    images(on_one)
    change(on_one.transformer)
    with pytest.raises(RuntimeError, match=r"replaced or written to after it was placed"):
        images(on_one)


@torch.no_grad()
def test_weights_are_changed_through_the_distributed_tensors() -> None:
    pipe = sd3.small_pipeline()
    on_pair = diffusion.shard(pipe, PAIR)
    images(on_pair)
    for holder in (pipe, on_pair):
        dict(holder.transformer.named_parameters())["proj_out.weight"].mul_(2)
    torch.testing.assert_close(images(on_pair), images(pipe), rtol=0, atol=1e-3)


def test_idioms_of_modules() -> None:
    pipe = sd3.small_pipeline()
    on_one = diffusion.shard(pipe, ONE)
    model = on_one.transformer
    assert model.eval() is model and model.requires_grad_(False) is model
    on_one.vae = on_one.vae.eval()
    assert torch.equal(images(on_one), images(pipe))
    assert hasattr(model, "config") and not hasattr(model, "nothing")
    assert {"config", "forward", "named_parameters"} <= set(dir(model))
    found, wanted = (inspect.signature(m.forward) for m in (model, pipe.transformer))
    assert found == wanted
    for copied in (copy.copy(model), copy.deepcopy(model)):
        assert type(copied) is type(model) and isinstance(copied, type(pipe.transformer))
        vars(on_one)["transformer"] = copied
        assert torch.equal(images(on_one), images(pipe))
    with pytest.raises(TypeError, match=r"cannot be pickled(.|\n)*save_pretrained"):
        pickle.dumps(model)
    with pytest.raises(RuntimeError, match=r"decode of AutoencoderKL on .* cannot be replaced"):
        on_one.vae.decode = print
    on_one.vae.some_setting = 3
    del on_one.vae.some_setting
    assert not hasattr(on_one.vae, "some_setting")


def test_a_model_that_a_pipeline_has_twice_stays_one() -> None:
    pipe = sd3.small_pipeline()
    components = {**pipe.components, "text_encoder_2": pipe.text_encoder}
    transformer = sd3.small_pipeline(pooled_projection_dim=64).transformer
    twice = StableDiffusion3Pipeline(**{**components, "transformer": transformer})
    on_pair = diffusion.shard(twice, PAIR)
    assert on_pair.text_encoder_2 is on_pair.text_encoder
    torch.testing.assert_close(images(on_pair), images(twice), rtol=0, atol=1e-3)


def test_the_configuration_of_a_text_encoder_is_followed() -> None:
    pipe = sd3.small_pipeline()
    on_one = diffusion.shard(pipe, ONE)
    ids = torch.arange(10)[None] + 5
    for wanted in (False, True):
        for encoder in (pipe.text_encoder, on_one.text_encoder):
            encoder.config.output_hidden_states = wanted
        assert len(on_one.text_encoder(ids)) == len(pipe.text_encoder(ids))


def test_threads_that_share_a_model() -> None:
    on_pair, plain = diffusion.shard(sd3.small_pipeline(), PAIR), sd3.small_pipeline()
    encoder, errors = on_pair.text_encoder, list[BaseException]()
    _ = encoder.text_projection  # from now on settings are compared before each call

    def call(length: int) -> None:
        try:
            ids = torch.arange(length)[None] + 5
            found = encoder(ids).text_embeds.to_torch()
            torch.testing.assert_close(found, plain.text_encoder(ids).text_embeds)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(5 + i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_pipeline_sharded_in_inference_mode() -> None:
    with torch.inference_mode():
        on_one = diffusion.shard(pipeline("sd3"), ONE)
    assert torch.equal(images(on_one), images(pipeline("sd3")))


def test_variants_are_saved(tmp_path: Any) -> None:
    diffusion.shard(pipeline("sd3"), ONE).save_pretrained(tmp_path, variant="fp16")
    again = StableDiffusion3Pipeline.from_pretrained(tmp_path, variant="fp16")
    assert torch.equal(images(again), images(pipeline("sd3")))


def test_conversions() -> None:
    pipe = sd3.small_pipeline()
    on_pair = diffusion.shard(pipe, PAIR)
    images(on_pair)
    assert on_pair.to("cpu") is on_pair
    on_pair.vae.to(torch.bfloat16)
    assert on_pair.vae.dtype == torch.bfloat16 and on_pair.transformer.dtype == torch.float32
    assert {p.dtype for p in on_pair.vae.parameters()} == {torch.bfloat16}
    on_pair.to(torch.bfloat16)
    plain = copy.deepcopy(pipe).to(torch.bfloat16)
    assert images(on_pair).dtype == images(plain).dtype == torch.bfloat16
    on_pair.vae.float()
    assert on_pair.vae.dtype == torch.float32
    with pytest.raises(RuntimeError, match="cannot be moved to meta"):
        on_pair.transformer.to("meta")


def test_what_is_saved_is_what_was_placed(tmp_path: Any) -> None:
    pipe = pipeline("sd3")
    diffusion.shard(pipe, PAIR).save_pretrained(tmp_path)
    again = StableDiffusion3Pipeline.from_pretrained(tmp_path)
    assert torch.equal(images(again), images(pipe))


def test_pipelines_made_of_a_sharded_one() -> None:
    on_one, plain = diffusion.shard(pipeline("sd3"), ONE), pipeline("sd3")
    given = {
        "image": torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(3)),
        "prompt": "a red cat",
        "num_inference_steps": 3,
        "output_type": "pt",
    }
    found = []
    for holder in (on_one, plain):
        other = StableDiffusion3Img2ImgPipeline(**holder.components)
        other.set_progress_bar_config(disable=True)
        found.append(other(**given, generator=torch.Generator().manual_seed(0)).images)
    assert torch.equal(found[0].to_torch(), found[1])


def seeded(pipe: Any, given: dict[str, Any]) -> torch.Tensor:
    """What the pipeline makes of a control image, which it encodes with the global generator."""
    torch.manual_seed(5)
    return images(pipe, **given)


@torch.no_grad()
def test_a_controlnet() -> None:
    pipe = sd3.small_pipeline()
    torch.manual_seed(1)
    net = SD3ControlNetModel.from_transformer(
        pipe.transformer, num_layers=2, num_extra_conditioning_channels=0
    )
    for parameter in net.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.05)
    with_net = StableDiffusion3ControlNetPipeline(
        controlnet=net.eval().requires_grad_(False), **pipe.components
    )
    given = {"control_image": torch.rand(1, 3, 64, 64), "controlnet_conditioning_scale": 0.7}
    found, wanted = (
        seeded(holder, given)
        for holder in (diffusion.shard(with_net, make_mesh("cfg=2,tp=2")), with_net)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)
    assert (wanted - images(pipe)).abs().max() > 1e-2


def test_control_flow_by_values_runs_operation_by_operation() -> None:
    pipe = sd3.small_pipeline()
    encoder = pipe.text_encoder

    class Branching(type(encoder)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            result = super().forward(*args, **kwargs)
            if result[0].mean() > -1e9:
                result.text_embeds = result.text_embeds * 2
            return result

    encoder.__class__ = Branching
    on_pair = diffusion.shard(pipe, PAIR)
    with pytest.warns(UserWarning, match="runs __call__ operation by operation from now on"):
        found = images(on_pair)
    torch.testing.assert_close(found, images(pipe), rtol=0, atol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images(on_pair)


def test_what_cannot_be_sharded_is_refused_at_the_call() -> None:
    pipe = pipeline("sd3")
    with pytest.raises(
        TypeError, match=r"on meshes already: vae, text_enc(.|\n)*Fix: shard the pip"
    ):
        diffusion.shard(diffusion.shard(pipe, ONE), ONE)
    for mesh in (None, "tp=2", 2, (1, 2), {}, {"*": "tp=2"}):
        with pytest.raises(TypeError, match="Fix: a DeviceMesh"):
            diffusion.shard(pipe, mesh)  # pyright: ignore[reportArgumentType]
    with pytest.raises(MeshError, match=r"given by a pattern(.|\n)*mesh\.unbind\('pp'\)"):
        diffusion.shard(pipe, {"*": make_mesh("pp=2")})
    with pytest.raises(TypeError, match=r"activations\['transformer.pos_embed'\] is 'tp'"):
        diffusion.shard(pipe, ONE, activations={"transformer.pos_embed": "tp"})  # pyright: ignore[reportArgumentType]
    deep = {"transformer.pos_embed": P(None, None, None, None, "tp")}
    with pytest.raises(PlacementError, match=r"for what transformer\.pos_embed returns: .* 5 ent"):
        images(diffusion.shard(pipe, ONE, activations=deep))
    empty = sd3.small_pipeline()
    empty.vae.to("meta")
    with pytest.raises(ValueError, match="on the meta device: vae"):
        diffusion.shard(empty, ONE)


def test_axes_that_would_split_nothing_are_refused() -> None:
    class Own(torch.nn.Linear):
        """A transformer of which no layout is known."""

    pipe = copy.copy(flux_pipeline())
    vars(pipe)["transformer"] = Own(2, 2)
    with pytest.raises(MeshError, match="cfg, ring_cp, tp would split nothing of transformer, a O"):
        diffusion.shard(pipe, make_mesh("cfg=2,ring_cp=2,tp=2"))
    diffusion.shard(pipe, make_mesh("tp=2"), plan={})


@pytest.mark.parametrize("mesh", ["dp=2", "dp=3", "dp=2,pp=2"])
def test_one_image_for_each_device(mesh: str) -> None:
    for count in (2, 3):
        options = {"num_images_per_prompt": count}
        found = images(diffusion.shard(pipeline("sd3"), make_mesh(mesh)), **options)
        torch.testing.assert_close(found, images(pipeline("sd3"), **options), rtol=0, atol=1e-3)


def test_an_image_of_one_token() -> None:
    size = {"height": 16, "width": 16}
    on_one = diffusion.shard(pipeline("sd3"), ONE)
    assert torch.equal(images(on_one, **size), images(pipeline("sd3"), **size))
