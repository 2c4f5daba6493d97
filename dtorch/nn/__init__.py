"""Layers as pure functions over explicit parameter trees.

A layer is two functions: `layer_init(key, ...)` makes its parameters, a nested dict of tensors,
and `layer(params, x, ...)` computes it. A path in the dict, joined with dots, is the parameter's
name in a Hugging Face checkpoint, so a loaded checkpoint is a parameter tree as it stands. Nothing
here knows of meshes or layouts: the functions call torch, and run on plain and on distributed
tensors alike. `functionalize` makes the like of any `torch.nn.Module`: a tree and a function of it.
"""

from . import functional
from .attention import attention, attention_init, cache_init, grouped_attention
from .embedding import embedding, embedding_init
from .functionalize import Apply, functionalize
from .linear import linear, linear_init
from .mlp import swiglu, swiglu_init
from .moe import experts, moe, moe_init
from .norm import rms_norm, rms_norm_init
from .rotary import Llama3Scaling, rotary_frequencies, rotary_tables, rotate

__all__ = [
    "Apply",
    "Llama3Scaling",
    "attention",
    "attention_init",
    "cache_init",
    "embedding",
    "embedding_init",
    "experts",
    "functional",
    "functionalize",
    "grouped_attention",
    "linear",
    "linear_init",
    "moe",
    "moe_init",
    "rms_norm",
    "rms_norm_init",
    "rotary_frequencies",
    "rotary_tables",
    "rotate",
    "swiglu",
    "swiglu_init",
]
