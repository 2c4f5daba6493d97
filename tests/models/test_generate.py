"""Generation with the models of `transformers`: the same tokens as by its own `generate`."""

import asyncio
from typing import Any

import pytest
import torch
import zoo
from layouts import sample

import dtorch
from dtorch import P
from dtorch.models import generate, stream
from dtorch.models.generation import SLOTS, _Options, _programs
from dtorch.nn import Apply, functionalize
from dtorch.parallel import plan_from_huggingface, shard

transformers = pytest.importorskip("transformers")

ONE = dtorch.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
TP2 = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
DP2TP2 = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
NEVER = 10**6  # a token that no model has
NEW = 9


def model_of(name: str, mesh: dtorch.DeviceMesh) -> tuple[Any, Any, Apply]:
    case = zoo.CASES[name]
    model = case.make(**({"experts_implementation": "grouped_mm"} if case.experts else {}))
    params, apply = functionalize(model)
    plan = plan_from_huggingface(model) if case.plan is None else case.plan
    return model, shard(params, mesh, plan), apply


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of 7 and of 11 tokens, the first padded on the left."""
    ids, mask = zoo.ids(), torch.ones(2, 11, dtype=torch.int64)
    ids[0, :4] = mask[0, :4] = 0
    return ids, mask


def expected(model: Any, ids: torch.Tensor, **settings: Any) -> torch.Tensor:
    settings = {"max_new_tokens": NEW, "eos_token_id": NEVER, "pad_token_id": 0} | settings
    return model.generate(ids, do_sample=False, **settings)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any, Apply]:
    return model_of("llama", TP2)


@pytest.mark.parametrize("mesh", [ONE, TP2])
@pytest.mark.parametrize(
    "name", sample(["llama", "mistral", "gemma3", "gpt2", "mixtral", "deepseek_v3"], 10, 0)
)
def test_greedy_tokens_of_padded_prompts(name: str, mesh: dtorch.DeviceMesh) -> None:
    model, params, apply = model_of(name, mesh)
    ids, mask = padded()
    found = generate(apply, params, ids, mask, max_new_tokens=NEW, eos_token_id=())
    assert torch.equal(found, expected(model, ids, attention_mask=mask))


def test_one_program_serves_every_token_and_call(llama: Any) -> None:
    model, params, apply = llama
    for shift in range(3):
        ids = (zoo.ids() + shift) % zoo.VOCAB
        ids[ids == 0] = 1  # transformers takes a padding token for padding
        found = generate(apply, params, ids, max_new_tokens=NEW + shift, eos_token_id=())
        assert torch.equal(found, expected(model, ids, max_new_tokens=NEW + shift))
    prefill, step = _programs(apply, _Options(SLOTS, False, None, False))
    assert (prefill.cache_info().misses, step.cache_info().misses) == (1, 1)


def test_the_cache_is_split_as_the_heads_are(llama: Any) -> None:
    _, params, apply = llama
    prefill, step = _programs(apply, _Options(SLOTS, False, None, False))
    choice = (dtorch.random.key(0), 1.0, 1.0, torch.tensor([5]), 0)
    cache, state = prefill(params, shard(zoo.ids(), TP2), None, *choice)
    assert cache[0]["keys"].shape == (2, 2, SLOTS, 16)
    assert cache[0]["keys"].placements == [dtorch.Shard(1)]
    after, _ = step(params, cache, state, *choice)
    assert after[1]["values"].placements == [dtorch.Shard(1)]
    with pytest.raises(dtorch.errors.DonatedError, match="donated"):
        cache[0]["keys"].to_torch()
    moved = [
        i for i in step.program(params, after, state, *choice).instructions if "gather" in str(i)
    ]
    assert moved == []


@pytest.mark.parametrize("number", [0, 3])
def test_a_text_ends(llama: Any, number: int) -> None:
    model, params, apply = llama
    ids = zoo.ids()
    whole = expected(model, ids)
    eos = [int(whole[0, 11 + number]), int(whole[1, 11 + number + 2])]
    found = generate(apply, params, ids, max_new_tokens=NEW, eos_token_id=eos, pad_token_id=0)
    assert torch.equal(found, expected(model, ids, eos_token_id=eos))
    assert found.shape[1] <= 11 + number + 3


def test_the_batch_may_be_split(llama: Any) -> None:
    model, _, _ = llama
    params, apply = functionalize(model)
    params = shard(params, DP2TP2, plan_from_huggingface(model))
    ids, mask = padded()
    placed = shard({"ids": ids, "mask": mask}, DP2TP2, {"*": P("dp")})
    found = generate(
        apply, params, placed["ids"], placed["mask"], max_new_tokens=NEW, eos_token_id=()
    )
    assert torch.equal(found, expected(model, ids, attention_mask=mask))


def test_streaming_gives_the_same_tokens(llama: Any) -> None:
    model, params, apply = llama
    ids = zoo.ids()

    async def collect() -> list[torch.Tensor]:
        tokens = stream(apply, params, ids, max_new_tokens=NEW, eos_token_id=())
        return [token async for token in tokens]

    found = asyncio.run(collect())
    assert torch.equal(torch.stack(found, 1), expected(model, ids)[:, 11:])


def test_a_stream_may_be_left(llama: Any) -> None:
    _, params, apply = llama

    async def first() -> torch.Tensor:
        async for token in stream(apply, params, zoo.ids(), max_new_tokens=NEW, eos_token_id=()):
            return token
        raise AssertionError

    assert asyncio.run(first()).shape == (2,)


def draws(llama: Any, count: int = 512, **settings: Any) -> torch.Tensor:
    """The first token of many copies of a prompt."""
    _, params, apply = llama
    ids = zoo.ids()[:1].expand(count, -1)
    settings = {"seed": 0, "eos_token_id": ()} | settings
    return generate(apply, params, ids, max_new_tokens=1, do_sample=True, **settings)[:, 11]


@pytest.mark.parametrize(
    ("settings", "filters"),
    [
        ({"temperature": 0.25}, {}),
        ({"temperature": 0.25, "top_k": 3}, {"top_k": 3}),
        ({"temperature": 0.25, "top_p": 0.6}, {"top_p": 0.6}),
        ({"temperature": 0.25, "top_k": 20, "top_p": 0.5}, {"top_k": 20, "top_p": 0.5}),
    ],
)
def test_draws_have_the_probabilities(llama: Any, settings: Any, filters: Any) -> None:
    """Against the probabilities that the filters of transformers leave."""
    from transformers.generation import logits_process as processors

    model = llama[0]
    with torch.no_grad():
        logits = model(zoo.ids()[:1]).logits[:, -1] / settings["temperature"]
    if "top_k" in filters:
        logits = processors.TopKLogitsWarper(filters["top_k"])(None, logits)
    if "top_p" in filters:
        logits = processors.TopPLogitsWarper(filters["top_p"])(None, logits)
    probabilities = logits.softmax(-1)[0]
    counts = torch.bincount(draws(llama, **settings), minlength=zoo.VOCAB)
    assert counts[probabilities == 0].sum() == 0
    deviation = (512 * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - 512 * probabilities).abs() <= 4.5 * deviation + 1).all()


def test_draws_depend_on_the_seed_and_not_on_the_layout(llama: Any) -> None:
    model = llama[0]
    params, apply = functionalize(model)
    alone = (model, shard(params, ONE), apply)
    first = draws(llama, 64, seed=1)
    assert torch.equal(first, draws(alone, 64, seed=1))
    assert not torch.equal(first, draws(llama, 64, seed=2))
    generator = torch.Generator().manual_seed(5)
    drawn = draws(llama, 64, seed=generator)
    assert not torch.equal(drawn, draws(llama, 64, seed=generator)), "the generator moves on"
    assert torch.equal(drawn, draws(llama, 64, seed=generator.manual_seed(5)))


def test_what_cannot_be_generated_is_said(llama: Any) -> None:
    _, params, apply = llama
    ids = zoo.ids()
    for wrong, message in (
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": 0.0}, r"temperature is 0\.0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 1.5}, r"top_p is 1\.5"),
        (
            {"attention_mask": ids[:, 1:]},
            r"attention_mask is \[2, 10\], and input_ids is \[2, 11\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            generate(apply, params, ids, **({"max_new_tokens": 2} | wrong))
    with pytest.raises(ValueError, match=r"input_ids is torch\.int64 \[11\]"):
        generate(apply, params, ids[0], max_new_tokens=2)
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    params, apply = functionalize(transformers.T5ForConditionalGeneration(config))
    with pytest.raises(ValueError, match=r"T5Config is of no model .* it has an encoder"):
        generate(apply, shard(params, ONE), ids, max_new_tokens=2)


def test_arguments_of_another_type_are_refused(llama: Any) -> None:
    model, params, apply = llama
    ids = zoo.ids()
    for wrong, message in (
        ({"apply": model}, r"apply is LlamaForCausalLM\((.|\n)* must be an apply"),
        ({"input_ids": [[1, 2]]}, r"input_ids is \[\[1, 2\]\], and must be a tensor"),
        ({"attention_mask": [[1, 1]]}, "attention_mask is .* must be a tensor"),
        ({"max_new_tokens": 2.0}, r"max_new_tokens is 2\.0, and must be an integer"),
        ({"top_k": 1.5}, r"top_k is 1\.5, and must be an integer"),
        ({"top_p": "all"}, "top_p is 'all', and must be a number"),
        ({"temperature": None}, "temperature is None, and must be a number"),
        ({"eos_token_id": 2.0}, r"eos_token_id is 2\.0, and must be an integer"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', and must be an integer"),
        ({"eos_token_id": [1, 2.0]}, r"eos_token_id\[1\] is 2\.0, and must be an integer"),
        ({"pad_token_id": "x"}, "pad_token_id is 'x', and must be an integer"),
    ):
        given: Any = {"apply": apply, "params": params, "input_ids": ids, "max_new_tokens": 2}
        with pytest.raises(TypeError, match=message):
            generate(**(given | wrong))


def test_values_that_cannot_be_are_refused(llama: Any) -> None:
    model, params, apply = llama
    ids = zoo.ids()
    plain, _ = functionalize(model)
    other, linear = functionalize(torch.nn.Linear(3, 3))
    for wrong, message in (
        ({"params": plain}, "params holds no distributed tensor"),
        ({"apply": linear, "params": shard(other, TP2)}, "Linear is no causal language model"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"input_ids": ids[:0]}, r"input_ids is torch\.int64 \[0, 11\]"),
    ):
        given: Any = {"apply": apply, "params": params, "input_ids": ids, "max_new_tokens": 2}
        with pytest.raises(ValueError, match=message):
            generate(**(given | wrong))


def test_a_table_of_positions_is_not_overrun() -> None:
    model, params, apply = model_of("gpt2", ONE)
    ids, room = zoo.ids(), model.config.n_positions - 11
    found = generate(apply, params, ids, max_new_tokens=room + 1, eos_token_id=())
    assert found.shape == (2, model.config.n_positions + 1)
    with pytest.raises(ValueError, match=rf"11 tokens and max_new_tokens {room + 2} need"):
        generate(apply, params, ids, max_new_tokens=room + 2)
