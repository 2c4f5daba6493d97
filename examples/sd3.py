"""Stable Diffusion 3, the pipeline of diffusers as it is, on a mesh of devices.

    python examples/sd3.py
    python examples/sd3.py --mesh cfg=2,ring_cp=3 --height 80 --width 112
    python examples/sd3.py --model DIR --mesh cfg=2,ulysses_cp=4 --device cuda --prompt "A red cat"

Without --model a small model with random weights is built, of the classes of the real one: three
text encoders, transformer, autoencoder and scheduler. Its image, which shows nothing, is computed
by PyTorch, by dtorch on one device, and by dtorch on the mesh; the first two are the same bit for
bit, the third up to the order of sums. DIR is a folder, or a name on the Hugging Face hub, with the
weights of a `StableDiffusion3Pipeline`.

The mesh has any of these axes:
  cfg         the two halves of the batch under classifier-free guidance
  dp          splits the batch, one image for each of its devices
  ulysses_cp  splits the tokens of the image; attention exchanges them for heads
  ring_cp     splits the tokens of the image; attention passes keys on in a ring
  tp          splits the heads and the features of the linear layers
  pp          splits the layers of the transformer
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
    StableDiffusion3Pipeline,
)
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

import dtorch
from dtorch.models import diffusion

AXES = ("pp", "cfg", "dp", "ring_cp", "ulysses_cp", "tp")


def byte_tokenizer(length: int = 77) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes."""
    words = ["<pad>", "<s>", "</s>", *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    ends = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **names)


def clip(hidden: int) -> CLIPTextModelWithProjection:
    """Returns a small text encoder."""
    config = CLIPTextConfig(
        vocab_size=300,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        projection_dim=hidden,
        num_hidden_layers=3,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return CLIPTextModelWithProjection(config)


def small_pipeline(seed: int = 0, **settings: Any) -> StableDiffusion3Pipeline:
    """Returns a pipeline of 64 x 64 pixels with random weights.

    Args:
        seed: Of the weights.
        **settings: Changes to the configuration of the transformer.
    """
    torch.manual_seed(seed)
    transformer: dict[str, Any] = {
        "sample_size": 8,
        "num_layers": 4,
        "attention_head_dim": 16,
        "num_attention_heads": 8,
        "joint_attention_dim": 96,
        "caption_projection_dim": 128,
        "pooled_projection_dim": 96,
        "pos_embed_max_size": 32,
    }
    autoencoder: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (32, 32, 64, 64),
        "latent_channels": 16,
        "norm_num_groups": 8,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "shift_factor": 0.0609,
        "scaling_factor": 1.5305,
        "force_upcast": False,
    }
    t5 = T5Config(
        vocab_size=300,
        d_model=96,
        d_kv=16,
        d_ff=192,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    models: dict[str, Any] = {
        "transformer": SD3Transformer2DModel(**{**transformer, **settings}),
        "text_encoder": clip(32),
        "text_encoder_2": clip(64),
        "text_encoder_3": T5EncoderModel(t5),
        "vae": AutoencoderKL(**autoencoder),
    }
    others: dict[str, Any] = {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "tokenizer": byte_tokenizer(),
        "tokenizer_2": byte_tokenizer(),
        "tokenizer_3": byte_tokenizer(),
    }
    # PyTorch multiplies otherwise by a weight that requires grad, and then rounds otherwise.
    fixed = {name: model.eval().requires_grad_(False) for name, model in models.items()}
    return StableDiffusion3Pipeline(**fixed, **others)


def make_mesh(text: str, device: str) -> dtorch.DeviceMesh:
    """Returns the mesh that "cfg=2,tp=4" describes."""
    try:
        sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        sizes = {}
    if len(sizes) < text.count(",") + 1 or not sizes.keys() <= set(AXES) or min(sizes.values()) < 1:
        raise SystemExit(f"--mesh {text}: expected sizes of axes among {', '.join(AXES)}.")
    names = tuple(axis for axis in AXES if axis in sizes)
    return dtorch.init_device_mesh(device, tuple(sizes[n] for n in names), mesh_dim_names=names)


def positive(text: str) -> int:
    """Returns the positive number that an argument is."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def run(pipe: Any, args: argparse.Namespace, num_images: int) -> tuple[Any, float, float]:
    """Returns the images [B, 3, H, W], and when the call returned and when they were there."""
    torch.manual_seed(args.seed)
    begin = time.perf_counter()
    images = pipe(
        args.prompt,
        height=args.height,
        width=args.width,
        num_inference_steps=args.steps,
        num_images_per_prompt=num_images,
        output_type="pt",
    ).images
    returned = time.perf_counter()
    whole = images.to_torch() if isinstance(images, dtorch.Tensor) else images
    return whole.cpu(), returned - begin, time.perf_counter() - begin


def save(pipe: Any, images: torch.Tensor, path: Path) -> None:
    """Writes the first of some images [B, 3, H, W] as a PNG."""
    pixels = images[:1].float().permute(0, 2, 3, 1).numpy()
    (image,) = pipe.image_processor.numpy_to_pil(pixels)
    image.save(path)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes an image with Stable Diffusion 3.")
    parser.add_argument("--model", help="a folder or hub name; a small random model if left out")
    parser.add_argument(
        "--mesh", default="cfg=2,ulysses_cp=2,tp=2", help="the axes and their sizes"
    )
    parser.add_argument("--prompt", default="A red cat on a mat")
    parser.add_argument("--height", type=positive, help="in pixels; if left out, the model's")
    parser.add_argument("--width", type=positive)
    parser.add_argument("--steps", type=positive, help="4 for the small model, 28 for another")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of the images")
    args = parser.parse_args()
    if not args.out.is_dir():
        parser.error(f"--out {args.out}: no such folder")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed {args.seed}: at least 0 and less than 2**63")
    for name in ("height", "width"):
        if (getattr(args, name) or 16) % 16:
            parser.error(f"--{name} {getattr(args, name)}: a multiple of 16")
    args.steps = args.steps or (28 if args.model else 4)
    mesh = make_mesh(args.mesh, args.device)
    dp = mesh.size("dp") if "dp" in (mesh.mesh_dim_names or ()) else 1

    if args.model:
        dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        pipe = StableDiffusion3Pipeline.from_pretrained(args.model, dtype=dtype)
        pipe = diffusion.shard(pipe, mesh)
        images, returned, done = run(pipe, args, dp)
        print(f"{mesh}: returned after {returned:.2f} s, done after {done:.2f} s")
        save(pipe, images, args.out / "sd3.png")
        return

    pipe = small_pipeline(args.seed)
    one = dtorch.init_device_mesh(args.device, (1,), mesh_dim_names=("tp",))
    on_one, on_mesh = diffusion.shard(pipe, one), diffusion.shard(pipe, mesh)
    expected, *_ = run(pipe, args, dp)
    whole, *_ = run(on_one, args, dp)
    split, *_ = run(on_mesh, args, dp)  # the first call traces
    _, returned, done = run(on_mesh, args, dp)
    print(f"PyTorch and dtorch on one device: {_agreement(expected, whole)}")
    print(f"one device and {mesh}: {_agreement(whole, split)}")
    print(f"the second call on the mesh returned after {returned:.2f} s, done after {done:.2f} s")
    save(pipe, whole, args.out / "sd3-one-device.png")
    save(pipe, split, args.out / "sd3-mesh.png")
    if not math.isclose((whole - split).abs().max().item(), 0, abs_tol=1e-3):
        raise SystemExit("the images differ.")


def _agreement(a: torch.Tensor, b: torch.Tensor) -> str:
    if torch.equal(a, b):
        return "the images are the same, bit for bit"
    return f"the images differ by at most {(a - b).abs().max().item():.1e}"


if __name__ == "__main__":
    main()
