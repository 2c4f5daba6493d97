"""The layers together: the Llama of `examples/llama.py` is transformers' bit for bit.

The reference's parameters do not require grad here. Where they do, even under `inference_mode`,
torch's `linear` of a three-dim strided input takes another path, whose sums round differently; the
last position of a prefill is such an input.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dtorch import nn, random

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUM_LAYERS, VOCAB_SIZE, NUM_SLOTS = 3, 131, 40
SIZES = {  # query heads, key/value heads, head size, tied embeddings, rotary base
    "groups of 2, tied": (8, 4, 8, True, 1e4),
    "no groups": (4, 4, 16, False, 1e4),
    "groups of 3": (6, 2, 32, False, 5e5),
    "one key/value head, tied": (8, 1, 8, True, 1e4),
}


@pytest.fixture(scope="module")
def llama() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llama_example", EXAMPLES / "llama.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Pair:
    """Transformers' model, and the same for the example: its configuration and parameters."""

    def __init__(self, llama: ModuleType, folder: Path, **config: Any) -> None:
        transformers = pytest.importorskip("transformers")
        config = {
            "intermediate_size": 100,
            "num_hidden_layers": NUM_LAYERS,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 128,
            "attn_implementation": "sdpa",
            **config,
        }
        torch.manual_seed(0)
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
        self.model.eval().requires_grad_(False)
        for parameter in self.model.parameters():  # large enough for the heads to differ
            parameter.mul_(3)
        self.model.config.save_pretrained(folder)
        self.config = llama.read_config(folder)
        self.params = tree_of(self.model.state_dict())
        self.static_cache = transformers.StaticCache(self.model.config, max_cache_len=NUM_SLOTS)

    def empty_cache(self, batch_size: int) -> dict[str, dict[str, Tensor]]:
        shape = batch_size, self.config["num_key_value_heads"], NUM_SLOTS, self.config["head_dim"]
        return {str(i): nn.cache_init(*shape) for i in range(NUM_LAYERS)}


@pytest.fixture(params=SIZES.values(), ids=SIZES)
def pair(llama: ModuleType, tmp_path: Path, request: pytest.FixtureRequest) -> Pair:
    num_heads, num_kv_heads, head_dim, is_tied, theta = request.param
    return Pair(
        llama,
        tmp_path,
        hidden_size=48,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=is_tied,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )


def tree_of(state: dict[str, Tensor]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, tensor in state.items():
        *path, leaf = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = tensor
    return tree


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 33])
def test_whole_sequences(llama: ModuleType, pair: Pair, batch_size: int, length: int) -> None:
    ids_BL = torch.randint(0, VOCAB_SIZE, (batch_size, length))
    with torch.inference_mode():
        expected = pair.model(ids_BL, use_cache=False).logits
        assert torch.equal(llama.forward(pair.config, pair.params, ids_BL), expected)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("length", [1, 17])
@torch.inference_mode()
def test_prefill_and_decode(llama: ModuleType, pair: Pair, batch_size: int, length: int) -> None:
    config, params, cache = pair.config, pair.params, pair.empty_cache(batch_size)
    ids_BL = torch.randint(0, VOCAB_SIZE, (batch_size, length))
    expected = pair.model(ids_BL, cache=pair.static_cache, logits_to_keep=1).logits[:, 0]
    logits_BV, cache = llama.prefill(config, params, ids_BL, cache)
    assert torch.equal(logits_BV, expected)
    for position in range(length, length + 4):
        ids_B1 = logits_BV.argmax(-1, keepdim=True)
        expected = pair.model(ids_B1, cache=pair.static_cache).logits[:, 0]
        logits_BV, cache = llama.decode(config, params, ids_B1, torch.tensor([position]), cache)
        assert torch.equal(logits_BV, expected)
    for i, layer in enumerate(pair.static_cache.layers):
        assert torch.equal(cache[str(i)]["key"], layer.keys)
        assert torch.equal(cache[str(i)]["value"], layer.values)


@torch.inference_mode()
def test_a_left_padded_batch(llama: ModuleType, pair: Pair) -> None:
    ids_BL = torch.randint(0, VOCAB_SIZE, (2, 9))
    attends_BL = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
    position_BL = (attends_BL.cumsum(1) - 1).clamp(min=0)
    mask_B1LL = torch.ones(9, 9, dtype=torch.bool).tril() & attends_BL[:, None, None].bool()
    expected = pair.model(
        ids_BL, attention_mask=attends_BL, position_ids=position_BL, use_cache=False
    ).logits
    x_BLD, _ = llama.hidden(pair.config, pair.params["model"], ids_BL, position_BL, mask_B1LL)
    logits_BLV = llama.head(pair.config, pair.params, x_BLD)
    assert torch.equal(logits_BLV[attends_BL.bool()], expected[attends_BL.bool()])


def test_gradients(llama: ModuleType, pair: Pair) -> None:
    ids_BL = torch.randint(0, VOCAB_SIZE, (2, 21))
    pair.model.requires_grad_(True)
    pair.model(ids_BL, use_cache=False).logits.square().mean().backward()
    expected = {name: p.grad for name, p in pair.model.named_parameters()}
    mine = {name: p.detach().clone().requires_grad_() for name, p in pair.model.named_parameters()}
    llama.forward(pair.config, tree_of(mine), ids_BL).square().mean().backward()
    for name, parameter in mine.items():
        assert torch.equal(parameter.grad, expected[name]), name


@torch.inference_mode()
def test_layers_run_in_the_order_of_their_numbers(llama: ModuleType, tmp_path: Path) -> None:
    pair = Pair(
        llama, tmp_path, hidden_size=16, num_attention_heads=2, head_dim=8, num_hidden_layers=12
    )
    layers = pair.params["model"]["layers"]
    pair.params["model"]["layers"] = {i: layers[i] for i in sorted(layers)}  # "10" before "2"
    ids_BL = torch.randint(0, VOCAB_SIZE, (2, 5))
    expected = pair.model(ids_BL, use_cache=False).logits
    assert torch.equal(llama.forward(pair.config, pair.params, ids_BL), expected)


@torch.inference_mode()
def test_biases_and_scaled_rotary_embedding(llama: ModuleType, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    pair = Pair(
        llama,
        tmp_path,
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=rope,
    )
    ids_BL = torch.randint(0, VOCAB_SIZE, (2, 50))
    expected = pair.model(ids_BL, use_cache=False).logits
    assert torch.equal(llama.forward(pair.config, pair.params, ids_BL), expected)


@torch.inference_mode()
def test_stories260k_tells_its_published_story(
    llama: ModuleType, shared: Callable[[str], Path]
) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    folder = shared("models/stories260K")
    expected = json.loads((folder / "expected_greedy.json").read_text())
    config, params = llama.read_config(folder), tree_of(load_file(folder / "model.safetensors"))
    ids, num_tokens = list(expected["prompt_ids"]), len(expected["greedy_ids"])
    sizes = (1, config["num_key_value_heads"], num_tokens, config["head_dim"])
    cache = {str(i): nn.cache_init(*sizes) for i in range(config["num_hidden_layers"])}
    logits_BV, cache = llama.prefill(config, params, torch.tensor([ids]), cache)
    while len(ids) < num_tokens:
        token_B1 = llama.pick(random.key(0), logits_BV, 0.0)
        position_1 = torch.tensor([len(ids)])
        ids.append(token_B1.item())
        logits_BV, cache = llama.decode(config, params, token_B1, position_1, cache)
    assert ids == expected["greedy_ids"]
    pytest.importorskip("tokenizers")
    encode, to_text = llama.read_tokenizer(folder, config)
    assert to_text(ids) == expected["text"]
    assert encode("") == encode("Once")[:1] == expected["prompt_ids"]


def test_a_folder_without_a_tokenizer_reads_bytes(llama: ModuleType, tmp_path: Path) -> None:
    encode, to_text = llama.read_tokenizer(tmp_path, {"bos_token_id": 2, "eos_token_id": [3]})
    assert encode("") == [2]
    assert encode("é") == [2, 0xC3, 0xA9]
    assert to_text([*encode("é"), 3]) == "é"
    assert to_text([2, 0xC3]) == "\ufffd"


def test_older_configurations_say_the_same(llama: ModuleType, tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    read = llama.read_config(tmp_path)
    assert read["rotary"] == {"theta": 5e5, "scaling": None}
    assert (read["head_dim"], read["num_key_value_heads"]) == (8, 4)
    assert read["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    "change", [{"model_type": "gemma"}, {"rope_parameters": {"rope_type": "yarn"}}]
)
def test_another_model_is_refused(
    llama: ModuleType, tmp_path: Path, change: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **change}))
    with pytest.raises(SystemExit, match=r"gemma|yarn"):
        llama.read_config(tmp_path)


def test_the_likeliest_token_at_temperature_zero(llama: ModuleType) -> None:
    logits_BV = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert llama.pick(random.key(0), logits_BV, 0.0).tolist() == [[1], [0]]
    drawn = torch.cat([llama.pick(random.key(i), logits_BV, 2.0) for i in range(50)], 1)
    assert drawn.shape == (2, 50) and drawn.unique().numel() == 3
