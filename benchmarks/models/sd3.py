"""diffusers' SD3Transformer2DModel in two sizes."""

import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor

SIZES = {"small": (2, 16, 4, 16), "medium": (6, 64, 8, 32)}  # layers, head size, heads, latents


def transformer(num_layers: int, head_dim: int, num_heads: int, latents: int) -> torch.nn.Module:
    """Returns the model with random weights."""
    torch.manual_seed(0)
    hidden = num_heads * head_dim
    model = SD3Transformer2DModel(
        sample_size=latents,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=num_layers,
        attention_head_dim=head_dim,
        num_attention_heads=num_heads,
        joint_attention_dim=hidden,
        caption_projection_dim=hidden,
        pooled_projection_dim=hidden,
        pos_embed_max_size=96,
    )
    return model.eval().requires_grad_(False)


def inputs(head_dim: int, num_heads: int, latents: int) -> tuple[Tensor, ...]:
    """Returns latents, text, pooled text and time steps for a batch of 2."""
    hidden = num_heads * head_dim
    shapes = ((2, 4, latents, latents), (2, 33, hidden), (2, hidden))
    return *(torch.randn(shape) for shape in shapes), torch.tensor([1000.0, 500.0])
