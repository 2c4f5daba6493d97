"""transformers' LlamaForCausalLM in three sizes."""

import dataclasses

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


@dataclasses.dataclass(frozen=True)
class Size:
    """A Llama and its input."""

    hidden: int
    layers: int
    intermediate: int
    vocabulary: int
    batch: int
    tokens: int
    heads: int = 8
    kv_heads: int = 4


SIZES = {
    "tiny": Size(64, 5, 172, 512, 1, 1),  # bound by overhead
    "small": Size(512, 8, 1376, 32000, 2, 128),  # bound by arithmetic
    "wide": Size(4096, 10, 11008, 32000, 2, 1024, 32, 32),  # for a GPU
}


def llama(size: Size) -> LlamaForCausalLM:
    """Returns the model; the same size has the same weights in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        intermediate_size=size.intermediate,
        vocab_size=size.vocabulary,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def token_ids(size: Size) -> Tensor:
    """Returns its input [batch, tokens]."""
    generator = torch.Generator().manual_seed(1)
    shape = (size.batch, size.tokens)
    return torch.randint(3, size.vocabulary, shape, generator=generator, device="cpu")
