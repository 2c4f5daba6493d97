"""Small random models of `transformers`, unmodified, one of each architecture tried.

A `Case` says how to make the model and its inputs, and has a plan where the model carries none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dtorch import P
from dtorch.parallel import ColumnParallel, RowParallel

COLUMN, ROW = ColumnParallel("tp"), RowParallel("tp")
VOCAB = 131


@dataclass(frozen=True)
class Case:
    """One architecture.

    Attributes:
        config: The configuration's class in `transformers`.
        model: The model's class in `transformers`, and the part of it that is taken.
        settings: The configuration's arguments.
        plan: A plan by hand, for the architectures that carry none.
        inputs: Makes the inputs.
        experts: Whether the model has routed experts.
    """

    config: str
    model: str
    settings: Mapping[str, Any]
    plan: Mapping[str, Any] | None = None
    inputs: Callable[[], dict[str, Any]] = field(default=lambda: {"input_ids": ids()})
    experts: bool = False

    def make(self, **extra: Any) -> Any:
        """Returns the model in evaluation mode."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings, **extra)
        kind, _, part = self.model.partition(".")
        model = getattr(transformers, kind)._from_config(config).eval().get_submodule(part)
        with torch.no_grad():
            for parameter in model.parameters():  # away from the ones and zeros of a fresh norm
                parameter.add_(torch.randn_like(parameter) * 0.02)
        return model


def ids() -> torch.Tensor:
    """Returns token ids [2, 11]."""
    return torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))


def images(*shape: int) -> Callable[[], torch.Tensor]:
    """Returns a maker of random images."""
    return lambda: torch.randn(*shape, generator=torch.Generator().manual_seed(1))


DECODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ENCODER = {**DECODER}
del ENCODER["num_key_value_heads"]

CASES: dict[str, Case] = {
    "llama": Case("LlamaConfig", "LlamaForCausalLM", DECODER),
    "mistral": Case("MistralConfig", "MistralForCausalLM", {**DECODER, "sliding_window": 6}),
    "qwen2": Case("Qwen2Config", "Qwen2ForCausalLM", {**DECODER, "tie_word_embeddings": True}),
    "qwen3": Case("Qwen3Config", "Qwen3ForCausalLM", {**DECODER, "head_dim": 16}),
    "gemma2": Case(
        "Gemma2Config", "Gemma2ForCausalLM", {**DECODER, "head_dim": 16, "sliding_window": 6}
    ),
    "gemma3": Case(
        "Gemma3TextConfig", "Gemma3ForCausalLM", {**DECODER, "head_dim": 16, "sliding_window": 6}
    ),
    "gpt2": Case(
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": VOCAB,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        plan={  # Conv1D: weights [in, out]
            "*.c_fc.weight": P(None, "tp"),
            "*.c_fc.bias": P("tp"),
            "*.mlp.c_proj.weight": P("tp"),
            "*.c_attn.weight": P(None, "tp"),
            "*.c_attn.bias": P("tp"),
            "*.attn.c_proj.weight": P("tp"),
            "transformer.wte.weight": P("tp"),
        },
    ),
    "gpt_neox": Case("GPTNeoXConfig", "GPTNeoXForCausalLM", ENCODER),
    "mixtral": Case(
        "MixtralConfig", "MixtralForCausalLM", {**DECODER, "num_local_experts": 4}, experts=True
    ),
    "qwen3_moe": Case(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**DECODER, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32}
        | {"num_experts_per_tok": 2},
        experts=True,
    ),
    "deepseek_v3": Case(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**DECODER, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2}
        | {"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
        experts=True,
    ),
    "bert": Case(
        "BertConfig",
        "BertModel",
        ENCODER,
        plan={
            "*.query.*": COLUMN,
            "*.key.*": COLUMN,
            "*.value.*": COLUMN,
            "*.attention.output.dense.*": ROW,
            "*.intermediate.dense.*": COLUMN,
            "*.output.dense.*": ROW,
            "embeddings.word_embeddings.weight": P("tp"),
        },
    ),
    "clip_text": Case(
        "CLIPTextConfig",
        "CLIPTextModel",
        ENCODER,
        plan={"*.[qkv]_proj.*": COLUMN, "*.out_proj.*": ROW, "*.fc1.*": COLUMN, "*.fc2.*": ROW},
    ),
    "t5_encoder": Case(
        "T5Config",
        "T5EncoderModel",
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
        | {"vocab_size": VOCAB, "eos_token_id": 2, "pad_token_id": 0},
        plan={
            "*.SelfAttention.[qkv].weight": COLUMN,
            "*.SelfAttention.o.weight": ROW,
            "*.wi.weight": COLUMN,
            "*.wo.weight": ROW,
            "shared.weight": P("tp"),
        },
    ),
    "vit": Case(
        "ViTConfig",
        "ViTModel",
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "image_size": 32, "patch_size": 8},
        plan={"*.[qkv]_proj.*": COLUMN, "*.o_proj.*": ROW, "*.fc1.*": COLUMN, "*.fc2.*": ROW},
        inputs=lambda: {"pixel_values": images(2, 3, 32, 32)()},
    ),
    "whisper_encoder": Case(
        "WhisperConfig",
        "WhisperModel.encoder",
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4}
        | {"decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
        | {"num_mel_bins": 16, "max_source_positions": 20, "vocab_size": VOCAB}
        | {"max_target_positions": 20, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        | {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
        plan={"*.[qkv]_proj.*": COLUMN, "*.out_proj.*": ROW, "*.fc1.*": COLUMN, "*.fc2.*": ROW},
        inputs=lambda: {"input_features": images(2, 16, 40)()},
    ),
}
