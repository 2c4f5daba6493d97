"""A Llama that generates text on a mesh of devices, as pure functions over its parameters.

    python examples/llama.py --mesh dp=2,tp=2
    python examples/llama.py --model DIR --mesh tp=4 --prompt "Once upon a time" --temperature 0.8

DIR is a Hugging Face folder: config.json, safetensors and, unless the model reads bytes,
tokenizer.json. Without --model the project's own small model is used. The mesh axis "tp" splits
the model, as `PLAN` says; the axis "dp" splits the batch, which has one text for each of its
devices. The first text is printed as it is generated, the others after it if they can differ.

Shapes: B batch, L new tokens, S cache slots, D hidden, V vocabulary, E head size.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

import dtorch
from dtorch import P, nn, random
from dtorch.parallel import ColumnParallel, RowParallel

OWN_MODEL = Path(__file__).parent / "data"
PLAN = {
    "*.embed_tokens.weight": P("tp", None),
    "*.q_proj.weight": ColumnParallel("tp"),
    "*.k_proj.weight": ColumnParallel("tp"),
    "*.v_proj.weight": ColumnParallel("tp"),
    "*.o_proj.weight": RowParallel("tp"),
    "*.gate_proj.weight": ColumnParallel("tp"),
    "*.up_proj.weight": ColumnParallel("tp"),
    "*.down_proj.weight": RowParallel("tp"),
}
HEAD_PLAN = {"lm_head.weight": ColumnParallel("tp")}  # where the embedding is not also the head
INPUT_PLAN = {"ids": P("dp", None), "position": P(), "cache.*": P("dp", "tp"), "key": P()}

Tree = Any  # nested dicts of tensors, keyed by the parts of a checkpoint's names


def block(config: Tree, params: Tree, x_BLD: Tensor, **attend: Any) -> tuple[Tensor, Tree | None]:
    eps = config["rms_norm_eps"]
    h_BLD = nn.rms_norm(params["input_layernorm"], x_BLD, eps=eps)
    h_BLD, cache = nn.attention(params["self_attn"], h_BLD, head_dim=config["head_dim"], **attend)
    x_BLD = x_BLD + h_BLD
    h_BLD = nn.rms_norm(params["post_attention_layernorm"], x_BLD, eps=eps)
    return x_BLD + nn.swiglu(params["mlp"], h_BLD), cache


def hidden(
    config: Tree,
    params: Tree,
    ids_BL: Tensor,
    position_L: Tensor,
    mask_LS: Tensor | None = None,
    cache: Tree | None = None,
) -> tuple[Tensor, Tree]:
    """Returns the last hidden states [B, L, D], and the new cache if one was given."""
    x_BLD = nn.embedding(params["embed_tokens"], ids_BL)
    tables = nn.rotary_tables(position_L, config["head_dim"], dtype=x_BLD.dtype, **config["rotary"])
    attend = dict(zip(("cos", "sin"), tables, strict=True), mask=mask_LS)
    new_cache: Tree = {}
    for i in map(str, range(config["num_hidden_layers"])):  # the dict may be in another order
        kept = {"cache": cache[i], "slot_L": position_L} if cache else {}
        x_BLD, new_cache[i] = block(config, params["layers"][i], x_BLD, **attend, **kept)
    return nn.rms_norm(params["norm"], x_BLD, eps=config["rms_norm_eps"]), new_cache


def head(config: Tree, params: Tree, x_BLD: Tensor) -> Tensor:
    tied = config["tie_word_embeddings"]
    return nn.linear(params["model"]["embed_tokens"] if tied else params["lm_head"], x_BLD)


def forward(config: Tree, params: Tree, ids_BL: Tensor) -> Tensor:
    """Returns the logits [B, L, V] of whole sequences."""
    position_L = torch.arange(ids_BL.shape[1], device=ids_BL.device)
    return head(config, params, hidden(config, params["model"], ids_BL, position_L)[0])


def prefill(config: Tree, params: Tree, ids_BL: Tensor, cache: Tree) -> tuple[Tensor, Tree]:
    """Returns the logits [B, V] after the prompt, and the cache with the prompt in it."""
    position_L = torch.arange(ids_BL.shape[1], device=ids_BL.device)
    x_BLD, cache = hidden(config, params["model"], ids_BL, position_L, cache=cache)
    return head(config, params, x_BLD[:, -1:]).squeeze(1), cache


def decode(
    config: Tree, params: Tree, ids_B1: Tensor, position_1: Tensor, cache: Tree
) -> tuple[Tensor, Tree]:
    """Returns the logits [B, V] after one more token, and the cache with that token in it."""
    num_slots = cache["0"]["key"].shape[2]
    mask_1S = torch.arange(num_slots, device=ids_B1.device) <= position_1[:, None]
    x_B1D, cache = hidden(config, params["model"], ids_B1, position_1, mask_1S, cache)
    return head(config, params, x_B1D).squeeze(1), cache


def pick(key: Tensor, logits_BV: Tensor, temperature: float) -> Tensor:
    """Returns the next token of each text [B, 1]: the likeliest one at temperature 0."""
    if temperature == 0:
        return logits_BV.argmax(-1, keepdim=True)
    return random.categorical(key, logits_BV / temperature)[:, None]


def generate(
    config: Tree, params: Tree, mesh: Any, prompt_BL: Tensor, num_tokens: int, temperature: float
) -> Iterator[Tensor]:
    """Yields the tokens [B, 1] of each step, with the next step already under way."""

    def sample(logits_BV: Tensor, position_1: Tensor, key: Tensor) -> Tensor:
        token_B1 = pick(random.fold_in(key, position_1[0]), logits_BV, temperature)
        return dtorch.parallel.constrain(token_B1, INPUT_PLAN["ids"])

    def start(params: Tree, ids_BL: Tensor, position_1: Tensor, cache: Tree, key: Tensor) -> Any:
        logits_BV, cache = prefill(config, params, ids_BL, cache)
        return sample(logits_BV, position_1, key), position_1, cache

    def step(params: Tree, ids_B1: Tensor, position_1: Tensor, cache: Tree, key: Tensor) -> Any:
        logits_BV, cache = decode(config, params, ids_B1, position_1, cache)
        return sample(logits_BV, position_1 + 1, key), position_1 + 1, cache

    batch_size, length = prompt_BL.shape
    sizes = batch_size, config["num_key_value_heads"], length + num_tokens, config["head_dim"]
    dtype = params["model"]["norm"]["weight"].dtype
    inputs = {
        "ids": prompt_BL,
        "position": torch.tensor([length]),
        "cache": {i: nn.cache_init(*sizes, dtype=dtype) for i in params["model"]["layers"]},
        "key": random.key(0),
    }
    inputs = dtorch.parallel.shard(inputs, mesh, INPUT_PLAN)
    run_start = dtorch.jit(start, donate_argnums=(3,))
    run_step = dtorch.jit(step, donate_argnums=(3,))
    ids, position, cache, key = (inputs[name] for name in ("ids", "position", "cache", "key"))
    ids, position, cache = run_start(params, ids, position, cache, key)
    for _ in range(num_tokens - 1):
        following = run_step(params, ids, position, cache, key)
        yield ids
        ids, position, cache = following
    yield ids


def read_config(folder: Path) -> Tree:
    """Returns config.json with what older files leave out, and the settings of `rotary_tables`."""
    config: Tree = json.loads((folder / "config.json").read_text())
    rope: Tree = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", "default")
    if config["model_type"] != "llama" or kind not in ("default", "llama3"):
        raise SystemExit(f"{folder}: a {config['model_type']} with {kind} rotary embedding.")
    heads, eos = config["num_attention_heads"], config.get("eos_token_id")
    scaling = {name: rope[name] for name in nn.Llama3Scaling.__annotations__ if name in rope}
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": config["hidden_size"] // heads,
        "tie_word_embeddings": False,
    }
    rotary = {
        "theta": rope.get("rope_theta") or config.get("rope_theta", 10000.0),
        "scaling": nn.Llama3Scaling(**scaling) if kind == "llama3" else None,
    }
    eos = eos if isinstance(eos, list) else [eos]
    return {**defaults, **config, "eos_token_id": eos, "rotary": rotary}


def read_tokenizer(folder: Path, config: Tree) -> tuple[Callable[..., Any], Callable[..., str]]:
    """Returns text to ids and ids to text, which are bytes where there is no tokenizer.json."""
    bos, special = config["bos_token_id"], {config["bos_token_id"], *config["eos_token_id"]}
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda text: tokenizer.encode(text).ids if text else [bos], tokenizer.decode

    def to_text(ids: list[int]) -> str:
        return bytes(i for i in ids if i not in special).decode(errors="replace")

    return lambda text: [bos, *text.encode()], to_text


def layouts(params: Tree) -> str:
    """Returns a line for each kind of parameter, with its shape and placements."""
    paths, leaves, _ = optree.tree_flatten_with_path(params)
    names = (".".join("*" if part.isdigit() else part for part in path) for path in paths)
    kinds = dict(zip(names, leaves, strict=True))
    return "\n".join(f"{n:45} {list(t.shape)!s:12} {t.placements}" for n, t in kinds.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="Generates text with a Llama on a mesh.")
    parser.add_argument("--model", type=Path, default=OWN_MODEL, help="a Hugging Face folder")
    parser.add_argument("--mesh", default="dp=2,tp=2", help="the axes and their sizes")
    parser.add_argument("--prompt", default="", help="begins the text")
    parser.add_argument("--max-new-tokens", type=int, default=440)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    axes = {name: int(size) for name, size in (axis.split("=") for axis in args.mesh.split(","))}
    mesh = dtorch.init_device_mesh(args.device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    config = read_config(args.model)
    plan = PLAN if config["tie_word_embeddings"] else PLAN | HEAD_PLAN
    params = dtorch.parallel.load(args.model, mesh, plan)
    encode, to_text = read_tokenizer(args.model, config)
    texts = [encode(args.prompt) for _ in range(axes.get("dp", 1))]
    prompt_BL = torch.tensor(texts)
    num_tokens = min(args.max_new_tokens, config["max_position_embeddings"] - len(texts[0]))

    printed, times = "", [time.perf_counter()]
    for ids in generate(config, params, mesh, prompt_BL, num_tokens, args.temperature):
        for text, (token,) in zip(texts, ids.tolist(), strict=True):
            text += [token] if text[-1] not in config["eos_token_id"] else []
        times.append(time.perf_counter())
        shown = to_text(texts[0]).rstrip("\ufffd")  # the bytes of a character so far
        print(shown[len(printed) :], end="", flush=True)
        printed = shown
        if all(text[-1] in config["eos_token_id"] for text in texts):
            break
    dtorch.synchronize()
    for text in texts[1:] if args.temperature else []:
        print(f"\n\n{to_text(text)}", end="")

    rate = len(texts) * (len(times) - 2) / max(times[-1] - times[1], 1e-9)
    print(f"\n\n{rate:.1f} tokens/s after the first token, which took {times[1] - times[0]:.2f} s")
    print(f"{mesh}\n{layouts(params)}")


if __name__ == "__main__":
    main()
