"""The model in `examples/data`, and the functions of `examples/train_llama.py` that made it."""

import math
from pathlib import Path
from types import ModuleType

import optree
import pytest
import torch
from torch import Tensor

from dtorch import nn, random

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DATA = EXAMPLES / "data"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("safetensors")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_llama

    return train_llama


def test_it_is_small_and_all_named_as_transformers_names_it() -> None:
    transformers = pytest.importorskip("transformers")
    assert (DATA / "model.safetensors").stat().st_size <= 2**20
    _, loading = transformers.LlamaForCausalLM.from_pretrained(DATA, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys"))


@torch.inference_mode()
def test_it_writes_a_story_of_its_grammar(train: ModuleType) -> None:
    import llama
    from safetensors.torch import load_file

    config = llama.read_config(DATA)
    state = load_file(DATA / "model.safetensors")
    treespec = optree.tree_structure(train.init(random.key(0)))
    params = optree.tree_unflatten(treespec, [state[".".join(p)] for p in treespec.paths()])
    sizes = (1, config["num_key_value_heads"], train.ROW_LENGTH, config["head_dim"])
    cache = {str(i): nn.cache_init(*sizes) for i in range(config["num_hidden_layers"])}
    ids = [train.BOS]
    logits_BV, cache = llama.prefill(config, params, torch.tensor([ids]), cache)
    while ids[-1] != train.EOS and len(ids) < train.ROW_LENGTH:
        token_B1 = llama.pick(random.key(0), logits_BV, 0.0)
        position_1 = torch.tensor([len(ids)])
        ids.append(token_B1.item())
        logits_BV, cache = llama.decode(config, params, token_B1, position_1, cache)
    _, to_text = llama.read_tokenizer(DATA, config)
    assert train.is_story(to_text(ids)), to_text(ids)


def test_the_grammar_knows_its_own_stories(train: ModuleType) -> None:
    stories = train.make_stories(random.key(0), 100)
    assert len(set(stories)) == 100
    assert all(map(train.is_story, stories))
    assert all(len(story.encode()) <= train.ROW_LENGTH - 2 for story in stories)


@pytest.mark.parametrize(
    "change",
    [
        ("Mina was", "Ada was"),  # another name than later
        ("she", "he"),
        ("friends.", "friends. And"),
        (" The kite was wet, so Mina dried it in the wind.", ""),
        ("flew it over the fields", "sailed it on the pond"),
    ],
)
def test_the_grammar_refuses_other_stories(train: ModuleType, change: tuple[str, str]) -> None:
    story = (
        "Mina was a shy fox who lived on a hill. One rainy day, she found a red kite on the path. "
        "The kite was wet, so Mina dried it in the wind. Then Pip the goat came by. "
        '"Is that your red kite?" asked Pip. "It is more fun with two," said Mina, and smiled. '
        "They flew it over the fields until it was dark. From that day on they were friends."
    )
    assert train.is_story(story)
    assert change[0] in story
    assert not train.is_story(story.replace(*change))


def test_a_row_is_a_story_between_its_marks(train: ModuleType) -> None:
    row = train.make_rows(random.key(1), 3)[1].tolist()
    assert len(row) == train.ROW_LENGTH + 1
    (story,) = (part for part in bytes(row[1:]).decode().split("\x03") if part)
    assert row[0] == train.BOS and story == train.make_stories(random.key(1), 3)[1]


def test_the_optimizer_is_torchs(train: ModuleType) -> None:
    params = {"a": torch.randn(4, 3), "b": {"c": torch.randn(5)}}
    leaves = [p.clone().requires_grad_() for p in optree.tree_leaves(params)]
    reference = torch.optim.AdamW(
        leaves, betas=(train.BETA_1, train.BETA_2), weight_decay=train.WEIGHT_DECAY
    )
    state = train.adamw_init(params)
    for i in range(1, 6):
        grads = optree.tree_map(torch.randn_like, params)
        warm, decay = i / train.NUM_WARMUP_STEPS, 0.525 + 0.475 * math.cos(math.pi * i / 50)
        reference.param_groups[0]["lr"] = train.PEAK_RATE * warm * decay
        for leaf, grad in zip(leaves, optree.tree_leaves(grads), strict=True):
            leaf.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_(leaves, train.MAX_NORM)
        reference.step()
        params, state = train.adamw(50, params, grads, state)
    assert_trees_close(params, leaves)


def test_the_loss_of_random_parameters_is_that_of_a_guess(train: ModuleType) -> None:
    import llama

    rows = train.make_rows(random.key(2), 2)
    value = train.loss(llama.read_config(DATA), train.init(random.key(3)), rows)
    assert abs(value.item() - math.log(256)) < 0.1


def assert_trees_close(tree: dict[str, Tensor], leaves: list[Tensor]) -> None:
    for actual, expected in zip(optree.tree_leaves(tree), leaves, strict=True):
        torch.testing.assert_close(actual, expected.detach())
