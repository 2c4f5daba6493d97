"""The models of Stable Diffusion 3 in three sizes: diffusers' transformer and the text encoders.

``realistic`` has the width of SD3 medium, in its latents of 512 x 512 pixels, and 4 layers of each
model; ``full`` is SD3 medium, at 1024 x 1024 pixels.
"""

from typing import Any

import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "sample_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 4,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "caption_projection_dim": 64,
        "pooled_projection_dim": 32,
        "pos_embed_max_size": 96,
    },
    "realistic": {
        "sample_size": 64,
        "num_layers": 4,
        "attention_head_dim": 64,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 96,
    },
}
SIZES["full"] = SIZES["realistic"] | {
    "sample_size": 128,
    "num_layers": 24,
    "pos_embed_max_size": 192,
}
NUM_TEXT_TOKENS = {"small": 33, "realistic": 333, "full": 333}
TEXT_ENCODERS = ("CLIP-L", "CLIP-bigG", "T5")
# Of each: hidden size, size of the feed-forward layer, heads, layers.
TEXT_SIZES = {
    "small": ((32, 64, 4, 2), (64, 128, 4, 2), (64, 128, 4, 2)),
    "realistic": ((768, 3072, 12, 4), (1280, 5120, 20, 4), (4096, 10240, 64, 4)),
    "full": ((768, 3072, 12, 12), (1280, 5120, 20, 32), (4096, 10240, 64, 24)),
}


def transformer(size: str) -> torch.nn.Module:
    """Returns the transformer with random weights."""
    torch.manual_seed(0)
    return SD3Transformer2DModel(**SIZES[size]).eval().requires_grad_(False)


def inputs(size: str) -> tuple[Tensor, ...]:
    """Returns latents, text, pooled text and time steps for a batch of 2."""
    config, side = SIZES[size], SIZES[size]["sample_size"]
    shapes = (
        (2, config.get("in_channels", 16), side, side),
        (2, NUM_TEXT_TOKENS[size], config["joint_attention_dim"]),
        (2, config["pooled_projection_dim"]),
    )
    times = torch.tensor([1000.0, 500.0], dtype=torch.float32)
    return *(torch.randn(shape) for shape in shapes), times


def text_encoder(name: str, size: str) -> torch.nn.Module:
    """Returns one of the text encoders with random weights."""
    torch.manual_seed(0)
    hidden, inner, heads, num_layers = TEXT_SIZES[size][TEXT_ENCODERS.index(name)]
    if name == "T5":
        config = T5Config(
            d_model=hidden,
            d_ff=inner,
            d_kv=hidden // heads,
            num_heads=heads,
            num_layers=num_layers,
            feed_forward_proj="gated-gelu",
        )
        return T5EncoderModel(config).eval().requires_grad_(False)
    config = CLIPTextConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        projection_dim=hidden,
    )
    return CLIPTextModelWithProjection(config).eval().requires_grad_(False)


def token_ids(name: str) -> Tensor:
    """Returns tokens for a text encoder: two texts of 77 tokens, or 256 for T5."""
    made = torch.Generator().manual_seed(0)
    shape = (2, 256 if name == "T5" else 77)
    return torch.randint(3, 30_000, shape, generator=made, device="cpu")
