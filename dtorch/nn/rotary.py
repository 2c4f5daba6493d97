"""Rotary position embedding, in the half-split order of Hugging Face checkpoints.

Element e of a head is paired with element e + E/2, and each pair turns by an angle that is the
token's position times the pair's frequency.

Shapes: B batch, H heads, L tokens, E head size.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Llama3Scaling", "rotary_frequencies", "rotary_tables", "rotate"]


@dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3.1 and later lower the slow frequencies to reach a longer context.

    Attributes:
        factor: By how much the slowest frequencies are divided.
        low_freq_factor: Pairs that turn fewer times than this in the original context are divided
            in full.
        high_freq_factor: Pairs that turn more often than this are kept.
        original_max_position_embeddings: The context length before the change.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def apply(self, frequency: Tensor) -> Tensor:
        """Returns the lowered frequencies.

        Args:
            frequency: Radians a position, float32 [E/2].

        Returns:
            Radians a position, float32 [E/2].

        Source: transformers' rotary type "llama3", equal bit for bit.
        """
        wavelength = 2 * math.pi / frequency
        num_turns = self.original_max_position_embeddings / wavelength
        kept = (num_turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        between = (1 - kept) * frequency / self.factor + kept * frequency
        low = self.original_max_position_embeddings / self.low_freq_factor
        high = self.original_max_position_embeddings / self.high_freq_factor
        scaled = torch.where(wavelength > low, frequency / self.factor, frequency)
        return torch.where((wavelength >= high) & (wavelength <= low), between, scaled)


def rotary_frequencies(
    head_dim: int,
    *,
    theta: float = 10000.0,
    scaling: Llama3Scaling | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Returns the angle by which each pair turns from one position to the next.

    Args:
        head_dim: The size of a head, even.
        theta: The base of the geometric sequence of frequencies.
        scaling: How the frequencies are lowered for long contexts, if they are.
        device: Where the result lives.

    Returns:
        Radians a position, float32 [E/2].

    Raises:
        ValueError: If `head_dim` is odd.

    Source: J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
    section 3.2.2.
    """
    if head_dim % 2:
        raise ValueError(f"Rotary embedding turns pairs, but head_dim={head_dim} is odd.")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequency = 1.0 / theta**exponent
    return frequency if scaling is None else scaling.apply(frequency)


def rotary_tables(
    position: Tensor,
    head_dim: int,
    *,
    theta: float = 10000.0,
    scaling: Llama3Scaling | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines that `rotate` takes.

    Args:
        position: The position of each token, integers [L] or [B, L].
        head_dim: The size of a head, even.
        theta: The base of the geometric sequence of frequencies.
        scaling: How the frequencies are lowered for long contexts, if they are.
        dtype: The dtype of the result; the angles are computed in float32.

    Returns:
        Cosines and sines, each [..., L, E].

    Raises:
        ValueError: If `head_dim` is odd.

    Source: equal bit for bit to transformers' `LlamaRotaryEmbedding` in float32.
    """
    frequency = rotary_frequencies(head_dim, theta=theta, scaling=scaling, device=position.device)
    half_angle = position[..., None].to(torch.float32) * frequency
    angle = torch.cat((half_angle, half_angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_BHLE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the heads with each pair turned by its token's angle.

    Args:
        x_BHLE: Queries or keys [B, H, L, E].
        cos: Cosines from `rotary_tables`, [L, E] or [B, L, E].
        sin: Sines from `rotary_tables`, of the same shape.

    Returns:
        The turned heads [B, H, L, E].

    Source: transformers' `apply_rotary_pos_emb`.
    """
    first, second = x_BHLE.chunk(2, dim=-1)
    crossed = torch.cat((-second, first), dim=-1)
    return x_BHLE * cos.unsqueeze(-3) + crossed * sin.unsqueeze(-3)
