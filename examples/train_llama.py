"""Trains the small byte-level Llama in examples/data, on stories that a grammar below makes up.

    python examples/train_llama.py --mesh dp=1 [--steps N] [--out DIR]

The result is a function of the constants below: the stories, the first parameters and the batches
come from keys of `dtorch.random`, and a training step is a pure function from parameters, optimizer
state and a batch to the next ones. On a mesh with the axes "dp" and "tp" the parameters are split
as for inference, and the batch over "dp". At the end the model writes a story, and the grammar
checks it.

Shapes: B batch, L tokens, V vocabulary, N stories, C choices a story takes.
"""

import argparse
import json
import math
import re
import time
from functools import partial
from pathlib import Path

import optree
import torch
import torch.nn.functional as F
from llama import OWN_MODEL, PLAN, Tree, forward, generate, read_config, read_tokenizer
from safetensors.torch import save_file
from torch import Tensor

import dtorch
from dtorch import P, nn, random

BATCH_SIZE, ROW_LENGTH, NUM_STEPS = 8, 424, 1800
PEAK_RATE, NUM_WARMUP_STEPS, WEIGHT_DECAY, MAX_NORM = 8e-3, 100, 0.05, 1.0
BETA_1, BETA_2, EPS = 0.9, 0.98, 1e-8
BOS, EOS = 2, 3  # the ASCII characters "start of text" and "end of text"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}

# A story draws one row of each table and one sentence of each group.
TABLES = {
    "hero/she": ("Mina/she", "Ada/she", "Rosa/she", "Otto/he", "Hugo/he", "Ben/he"),
    "kind": ("fox", "mouse", "bear", "rabbit", "otter", "hedgehog"),
    "nature": ("little", "clever", "shy", "merry", "sleepy", "brave"),
    "home": ("in the forest", "by the river", "on a hill", "near the old mill", "in a garden"),
    "day": ("One sunny morning", "One rainy day", "One windy evening", "One winter night"),
    "colour": ("red", "blue", "yellow", "green", "silver"),
    "thing/play": (
        "kite/flew it over the fields",
        "boat/sailed it on the pond",
        "drum/played every song they knew",
        "lamp/read stories by its light",
        "ball/rolled it down the path",
        "bell/rang it for all to hear",
    ),
    "place": ("under a tree", "behind a stone", "on the path", "in the tall grass"),
    "state/care": (
        "dirty/washed it with care",
        "broken/mended it with string",
        "wet/dried it in the wind",
        "heavy/pulled it on a sledge",
    ),
    "friend": ("Lily", "Nora", "Pip", "Max", "Sam"),
    "other": ("goose", "badger", "cat", "squirrel", "goat"),
}
SENTENCES = (
    (
        "{hero} was a {nature} {kind} who lived {home}.",
        "There once was a {nature} {kind} called {hero}, who lived {home}.",
    ),
    (
        "{day}, {she} found a {colour} {thing} {place}.",
        "{day}, {hero} saw a {colour} {thing} lying {place}.",
    ),
    ("It was {state}, so {she} {care}.", "The {thing} was {state}, so {hero} {care}."),
    ("Then {friend} the {other} came by.", "Soon {she} met a {other} whose name was {friend}."),
    (
        '"What a fine {colour} {thing}!" said {friend}. "May I play too?"',
        '"Is that your {colour} {thing}?" asked {friend}.',
    ),
    ('"We can share it," said {hero}.', '"It is more fun with two," said {hero}, and smiled.'),
    ("They {play} until it was dark.", "So {hero} and {friend} {play}, and laughed."),
    (
        "From that day on they were friends.",
        "That night {hero} dreamed of the {colour} {thing}.",
        "And {friend} never forgot {hero} the {kind}.",
    ),
)
ROWS = {table: [row.split("/") for row in rows] for table, rows in TABLES.items()}


def make_stories(key: Tensor, num_stories: int) -> list[str]:
    """Returns stories of the grammar, each choice drawn from the key."""
    draws_NC = random.randint(key, (num_stories, len(ROWS) + len(SENTENCES)), 0, 2**32)
    stories = []
    for draws in draws_NC.tolist():
        words: dict[str, str] = {}
        for table, rows in ROWS.items():
            words.update(zip(table.split("/"), rows[draws.pop() % len(rows)], strict=True))
        sentences = (group[draws.pop() % len(group)] for group in SENTENCES)
        stories.append(" ".join(sentences).format(**words))
    return stories


def is_story(text: str) -> bool:
    """Returns whether the grammar has this story, with the same words all through it."""
    rows = dict(ROWS)
    for group in SENTENCES:
        match = next(filter(None, (re.match(pattern(s, rows), text) for s in group)), None)
        if match is None:
            return False
        for table in rows:
            said = [match.groupdict().get(field) for field in table.split("/")]
            rows[table] = [
                row
                for row in rows[table]
                if all(s in (None, r) for s, r in zip(said, row, strict=True))
            ]
        text = text[match.end() :].removeprefix(" ")
    return not text


def pattern(sentence: str, rows: dict[str, list[list[str]]]) -> str:
    """Returns the regular expression of a sentence whose words stand in those rows."""
    expression = re.escape(sentence)
    for table, found in rows.items():
        for field, words in zip(table.split("/"), zip(*found, strict=True), strict=True):
            options = "|".join(map(re.escape, dict.fromkeys(words)))
            expression = expression.replace(rf"\{{{field}\}}", f"(?P<{field}>{options})")
    return expression


def make_rows(key: Tensor, num_rows: int) -> Tensor:
    """Returns one story a row, as bytes between its marks, int64 [B, L + 1]."""
    rows = [[BOS, *story.encode(), EOS] for story in make_stories(key, num_rows)]
    return torch.tensor([(row + [EOS] * ROW_LENGTH)[: ROW_LENGTH + 1] for row in rows])


def init(key: Tensor) -> Tree:
    keys = iter(random.split(key, 1 + 2 * CONFIG["num_hidden_layers"]))
    size = CONFIG["hidden_size"]
    heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]
    embed_key = next(keys)
    layers = {
        str(i): {
            "input_layernorm": nn.rms_norm_init(key, size),
            "self_attn": nn.attention_init(next(keys), size, *heads),
            "post_attention_layernorm": nn.rms_norm_init(key, size),
            "mlp": nn.swiglu_init(next(keys), size, CONFIG["intermediate_size"]),
        }
        for i in range(CONFIG["num_hidden_layers"])
    }
    embed = nn.embedding_init(embed_key, CONFIG["vocab_size"], size)
    return {"model": {"embed_tokens": embed, "layers": layers, "norm": nn.rms_norm_init(key, size)}}


def loss(config: Tree, params: Tree, ids_BL: Tensor) -> Tensor:
    """Returns the mean cross-entropy of each byte but the first."""
    logits_BLV = forward(config, params, ids_BL[:, :-1])
    return F.cross_entropy(logits_BLV.flatten(0, 1), ids_BL[:, 1:].flatten())


def adamw_init(params: Tree) -> Tree:
    zeros = partial(optree.tree_map, torch.zeros_like)
    return {"count": torch.zeros(()), "mean": zeros(params), "square": zeros(params)}


def adamw(num_steps: int, params: Tree, grads: Tree, state: Tree) -> tuple[Tree, Tree]:
    """Returns the next parameters and optimizer state (Loshchilov and Hutter, 2019)."""
    count = state["count"] + 1
    warm = (count / NUM_WARMUP_STEPS).clamp(max=1.0)
    rate = PEAK_RATE * warm * (0.525 + 0.475 * torch.cos(math.pi / num_steps * count))
    norm = sum(g.square().sum() for g in optree.tree_leaves(grads)) ** 0.5
    shrink = (MAX_NORM / norm).clamp(max=1.0)

    def new_mean(mean: Tensor, grad: Tensor) -> Tensor:
        return BETA_1 * mean + (1 - BETA_1) * (shrink * grad)

    def new_square(square: Tensor, grad: Tensor) -> Tensor:
        return BETA_2 * square + (1 - BETA_2) * (shrink * grad).square()

    def new_param(param: Tensor, mean: Tensor, square: Tensor) -> Tensor:
        scale = (square / (1 - BETA_2**count)).sqrt() + EPS
        return param - rate * (mean / (1 - BETA_1**count) / scale + WEIGHT_DECAY * param)

    mean = optree.tree_map(new_mean, state["mean"], grads)
    square = optree.tree_map(new_square, state["square"], grads)
    params = optree.tree_map(new_param, params, mean, square)
    return params, {"count": count, "mean": mean, "square": square}


def train_step(
    config: Tree, num_steps: int, params: Tree, state: Tree, ids_BL: Tensor
) -> tuple[Tree, Tree, Tensor]:
    value, grads = dtorch.value_and_grad(partial(loss, config))(params, ids_BL)
    return *adamw(num_steps, params, grads, state), value


def write_story(config: Tree, folder: Path, params: Tree, mesh: dtorch.DeviceMesh) -> str:
    _, to_text = read_tokenizer(folder, config)
    ids: list[int] = []
    for ids_11 in generate(config, params, mesh, torch.tensor([[BOS]]), ROW_LENGTH, 0.0):
        ids.append(int(ids_11.item()))
        if ids[-1] == EOS:
            break
    return to_text(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the Llama in examples/data.")
    parser.add_argument("--mesh", default="dp=1", help="the axes and their sizes")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--out", type=Path, default=OWN_MODEL)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    axes = {name: int(size) for name, size in (axis.split("=") for axis in args.mesh.split(","))}
    mesh = dtorch.init_device_mesh(args.device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    config = read_config(args.out)

    init_key, story_key = random.split(random.key(0))
    params = dtorch.parallel.shard(init(init_key), mesh, PLAN)
    state = adamw_init(params)
    step = dtorch.jit(partial(train_step, config, args.steps), donate_argnums=(0, 1))
    start = time.perf_counter()
    for i in range(args.steps):
        batch = {"ids": make_rows(random.fold_in(story_key, i), BATCH_SIZE)}
        ids_BL = dtorch.parallel.shard(batch, mesh, {"ids": P("dp", None)})["ids"]
        params, state, value = step(params, state, ids_BL)
        if i % 100 == 0 or i == args.steps - 1:
            shown = f"step {i:5}  loss {value.item():.4f}"  # waits for the step
            print(f"{shown}  {time.perf_counter() - start:6.1f} s", flush=True)

    paths, leaves, _ = optree.tree_flatten_with_path(params)
    tensors = {".".join(p): t.to_torch() for p, t in zip(paths, leaves, strict=True)}
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    story = write_story(config, args.out, params, mesh)
    print(f"{story}\nThe grammar has this story: {is_story(story)}")


if __name__ == "__main__":
    main()
