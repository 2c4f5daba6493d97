"""A Llama that generates text on a mesh of devices, as pure functions over its parameters.

    python examples/llama.py --mesh dp=2,tp=2
    python examples/llama.py --mesh pp=2,ring_cp=2,fsdp=2 --prompt "Once upon a time"
    python examples/llama.py --model DIR --mesh tp=4 --temperature 0.8
    python examples/llama.py --experts 4 --mesh ep=2,tp=2

DIR is a Hugging Face folder: config.json, safetensors and, unless the model reads bytes,
tokenizer.json. Without --model the project's own small model is used. The first text is printed as
it is generated, the others after it if they can differ. --experts turns each feed-forward layer
into a mixture of experts, two of which see each token; they begin as copies of the layer ("sparse
upcycling", arXiv:2212.05055), so the text stays the same.

The mesh has any of these axes; the model is the same on all of them.
  dp          splits the batch, which has one text for each of its devices
  fsdp        splits the batch too, and the parameters, which are gathered layer by layer
  tp          splits the heads and the features of the linear layers, as `PLAN` says
  sp          as tp; what is between the layers is split over it too, along the prompt
  ring_cp     splits prompt and cache along the sequence; attention passes keys on in a ring
  zigzag_cp   as ring_cp, with as much to do for each device under a causal mask
  ulysses_cp  as ring_cp; attention exchanges sequence for heads
  ep          splits the batch, and the experts, to which it sends the tokens
  pp          splits the layers

Shapes: B batch, L new tokens, S cache slots, D hidden, V vocabulary, E head size.
"""

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

import dtorch
from dtorch import P, nn, random
from dtorch.parallel import constrain, gathered

OWN_MODEL = Path(__file__).parent / "data"
AXES = ("pp", "dp", "fsdp", "ep", "ring_cp", "zigzag_cp", "ulysses_cp", "sp", "tp")  # in this order
BATCH, SEQUENCE, MODEL = AXES[1:4], AXES[4:7], AXES[7:]
PLAN = {
    "*.embed_tokens.weight": P(MODEL, "fsdp"),
    "*.q_proj.weight": P(MODEL, "fsdp"),
    "*.k_proj.weight": P(MODEL, "fsdp"),
    "*.v_proj.weight": P(MODEL, "fsdp"),
    "*.o_proj.weight": P("fsdp", MODEL),
    "*.gate_proj.weight": P(MODEL, "fsdp"),
    "*.up_proj.weight": P(MODEL, "fsdp"),
    "*.down_proj.weight": P("fsdp", MODEL),
    "*norm.weight": P("fsdp"),
}
EXPERTS_PLAN = {
    "gate.weight": P(None, "fsdp"),
    "experts.gate_up_proj": P("ep", MODEL, "fsdp"),
    "experts.down_proj": P("ep", "fsdp", MODEL),
}
HEAD_PLAN = {"lm_head.weight": P(MODEL, "fsdp")}  # where the embedding is not also the head
INPUT_PLAN = {"ids": P(BATCH, SEQUENCE), "cache.*": P(BATCH, MODEL, SEQUENCE)}

Tree = Any  # nested dicts of tensors, keyed by the parts of a checkpoint's names


def inside(x_BL: Tensor, **options: Any) -> Tensor:
    """Lays out ids, or what a layer works on; a single token is not split."""
    return constrain(x_BL, P(BATCH, SEQUENCE if x_BL.shape[1] > 1 else None), **options)


def between(x_BLD: Tensor, **options: Any) -> Tensor:
    """Lays out what is between the layers."""
    split = (*SEQUENCE, "sp") if x_BLD.shape[1] > 1 else None
    return constrain(x_BLD, P(BATCH, split), **options)


def feed_forward(config: Tree, params: Tree, x_BLD: Tensor) -> Tensor:
    if "experts" in params:
        return nn.moe(params, x_BLD, config["num_experts_per_tok"])
    return nn.swiglu(params, x_BLD)


def block(config: Tree, params: Tree, x_BLD: Tensor, **attend: Any) -> tuple[Tensor, Tree | None]:
    eps, params = config["rms_norm_eps"], gathered(params, "fsdp")
    x_BLD = between(x_BLD, beside=params["input_layernorm"]["weight"])
    h_BLD = inside(nn.rms_norm(params["input_layernorm"], x_BLD, eps=eps))
    h_BLD, cache = nn.attention(params["self_attn"], h_BLD, head_dim=config["head_dim"], **attend)
    x_BLD = x_BLD + between(h_BLD)
    h_BLD = inside(nn.rms_norm(params["post_attention_layernorm"], x_BLD, eps=eps))
    return x_BLD + between(feed_forward(config, params["mlp"], h_BLD)), cache


def hidden(
    config: Tree,
    params: Tree,
    ids_BL: Tensor,
    position_L: Tensor,
    mask_LS: Tensor | None = None,
    cache: Tree | None = None,
) -> tuple[Tensor, Tree]:
    """Returns the last hidden states [B, L, D], and the new cache if one was given."""
    table = params["embed_tokens"]
    x_BLD = between(nn.embedding(table, inside(ids_BL, beside=table["weight"])))
    tables = nn.rotary_tables(position_L, config["head_dim"], dtype=x_BLD.dtype, **config["rotary"])
    attend = dict(zip(("cos", "sin"), tables, strict=True), mask=mask_LS)
    new_cache: Tree = {}
    for i in map(str, range(config["num_hidden_layers"])):  # the dict may be in another order
        kept = {"cache": cache[i], "slot_L": position_L} if cache else {}
        x_BLD, new_cache[i] = block(config, params["layers"][i], x_BLD, **attend, **kept)
    norm, eps = gathered(params["norm"], "fsdp"), config["rms_norm_eps"]
    return nn.rms_norm(norm, x_BLD, eps=eps), new_cache


def head(config: Tree, params: Tree, x_BLD: Tensor) -> Tensor:
    tied = config["tie_word_embeddings"]
    weights = params["model"]["embed_tokens"] if tied else params["lm_head"]
    return nn.linear(weights, inside(x_BLD, beside=weights["weight"]))


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


def inputs(config: Tree, mesh: Any, prompt_BL: Tensor, num_slots: int, dtype: Any) -> list[Any]:
    """Returns the ids, the position after them, an empty cache and a key, on their devices."""
    sizes = len(prompt_BL), config["num_key_value_heads"], num_slots, config["head_dim"]
    layers = map(str, range(config["num_hidden_layers"]))
    tree = {
        "ids": prompt_BL,
        "position": torch.tensor([prompt_BL.shape[1]]),
        "cache": {i: nn.cache_init(*sizes, dtype=dtype) for i in layers},
        "key": random.key(0),
    }
    return list(dtorch.parallel.shard(tree, stages(config, mesh), INPUT_PLAN).values())


def steps(config: Tree, temperature: float, **options: Any) -> list[Any]:
    """Returns two jitted functions that give the next token, its position and the new cache.

    They take the parameters and `inputs`; the second, with options of `jit`, a token as prompt.
    """

    def sample(logits_BV: Tensor, position_1: Tensor, key: Tensor) -> Tensor:
        token_B1 = pick(random.fold_in(key, position_1[0]), logits_BV, temperature)
        return constrain(token_B1, P(BATCH))

    def start(params: Tree, ids_BL: Tensor, position_1: Tensor, cache: Tree, key: Tensor) -> Any:
        logits_BV, cache = prefill(config, params, ids_BL, cache)
        return sample(logits_BV, position_1, key), position_1, cache

    def step(params: Tree, ids_B1: Tensor, position_1: Tensor, cache: Tree, key: Tensor) -> Any:
        logits_BV, cache = decode(config, params, ids_B1, position_1, cache)
        return sample(logits_BV, position_1 + 1, key), position_1 + 1, cache

    jit = partial(dtorch.jit, donate_argnums=(3,))
    return [jit(start), jit(step, **options)]


def generate(
    config: Tree,
    params: Tree,
    mesh: Any,
    prompt_BL: Tensor,
    num_tokens: int,
    temperature: float,
    **options: Any,
) -> Iterator[Tensor]:
    """Yields the tokens [B, 1] of each step, with the next step already under way."""
    num_slots, dtype = prompt_BL.shape[1] + num_tokens, params["model"]["norm"]["weight"].dtype
    start, step = steps(config, temperature, **options)
    ids, position, cache, key = inputs(config, mesh, prompt_BL, num_slots, dtype)
    ids, position, cache = start(params, ids, position, cache, key)
    for _ in range(num_tokens - 1):
        following = step(params, ids, position, cache, key)
        yield ids
        ids, position, cache = following
    yield ids


def stages(config: Tree, mesh: dtorch.DeviceMesh) -> Tree:
    """Returns the mesh of each parameter and cache by name: a part of the axis "pp"."""
    meshes, num_layers = mesh.unbind("pp"), config["num_hidden_layers"]
    layers = {f"*.{i}.*": meshes[i * len(meshes) // num_layers] for i in range(num_layers)}
    return {**layers, "model.norm.*": meshes[-1], "lm_head.*": meshes[-1], "*": meshes[0]}


def make_mesh(text: str, device: str) -> dtorch.DeviceMesh:
    """Returns the mesh that "dp=2,tp=2" means."""
    axes = [re.fullmatch(r" *(\w+) *= *([1-9]\d*) *", part) for part in text.split(",")]
    sizes = {axis[1]: int(axis[2]) for axis in axes if axis and axis[1] in AXES}
    if len(sizes) < len(axes):
        raise SystemExit(f"--mesh {text!r} is not as dp=2,tp=2, each one of {', '.join(AXES)}.")
    names = tuple(name for name in AXES if name in sizes)
    return dtorch.init_device_mesh(device, [sizes[n] for n in names], mesh_dim_names=names)


def load(folder: Path, mesh: dtorch.DeviceMesh) -> tuple[Tree, Tree]:
    """Returns the configuration and the parameters, on their devices."""
    config = read_config(folder)
    plan = PLAN if config["tie_word_embeddings"] else PLAN | HEAD_PLAN
    return config, dtorch.parallel.load(folder, stages(config, mesh), plan)


def upcycled(params: Tree, num_experts: int) -> Tree:
    """Returns parameters whose feed-forward layers are mixtures of copies, with random routers."""
    layers = dict(params["model"]["layers"])
    keys = random.split(random.key(0), len(layers))
    for (i, layer), key in zip(layers.items(), keys, strict=True):
        gate, up, down = (layer["mlp"][f"{name}_proj"]["weight"] for name in ("gate", "up", "down"))
        mlp = {
            "gate": nn.linear_init(key, gate.shape[1], num_experts, dtype=gate.dtype),
            "experts": {
                "gate_up_proj": torch.cat((gate, up)).repeat(num_experts, 1, 1),
                "down_proj": down.repeat(num_experts, 1, 1),
            },
        }
        mlp = dtorch.parallel.shard(mlp, gate.device_mesh, EXPERTS_PLAN)
        layers[i] = {**layer, "mlp": mlp}
    return {**params, "model": {**params["model"], "layers": layers}}


def read_config(folder: Path) -> Tree:
    """Returns config.json with what older files leave out, and the settings of `rotary_tables`."""
    if not (folder / "config.json").is_file():
        raise SystemExit(f"--model {folder}: there is no config.json.")
    config: Tree = json.loads((folder / "config.json").read_text())
    rope: Tree = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", "default")
    if config["model_type"] != "llama" or kind not in ("default", "llama3"):
        raise SystemExit(f"{folder}: a {config['model_type']} with {kind} rotary embedding.")
    heads, eos = config["num_attention_heads"], config.get("eos_token_id")
    scaling = {name: rope[name] for name in nn.Llama3Scaling.__annotations__ if name in rope}
    defaults = {
        "num_experts_per_tok": 2,
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
    parser.add_argument("--experts", type=int, help="how many each feed-forward layer becomes")
    parser.add_argument("--prompt", default="", help="begins the text")
    parser.add_argument("--max-new-tokens", type=int, default=440)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cuda-graph", action="store_true", help="one launch a device and token")
    args = parser.parse_args()
    if args.experts is not None and args.experts < 2:
        parser.error(f"--experts {args.experts}: two of them see each token.")
    if args.max_new_tokens < 1 or not 0 <= args.temperature < math.inf:
        parser.error("--max-new-tokens is at least 1, --temperature at least 0 and finite.")

    mesh = make_mesh(args.mesh, args.device)
    config, params = load(args.model, mesh)
    params = upcycled(params, args.experts) if args.experts else params
    encode, to_text = read_tokenizer(args.model, config)
    num_texts = math.prod(mesh.size(a) for a in BATCH if a in (mesh.mesh_dim_names or ()))
    texts = [encode(args.prompt) for _ in range(num_texts)]
    prompt_BL = torch.tensor(texts)
    num_tokens = min(args.max_new_tokens, config["max_position_embeddings"] - len(texts[0]))
    if num_tokens < 1:
        raise SystemExit(f"--prompt: {len(texts[0])} tokens leave this model no room for more.")

    printed, times = "", [time.perf_counter()]
    sampling = num_tokens, args.temperature
    for ids in generate(config, params, mesh, prompt_BL, *sampling, cuda_graph=args.cuda_graph):
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
