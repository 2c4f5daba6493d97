"""Generation with the causal language models of `transformers`, unmodified.

There are two programs: one for the prompt, and one for a further token, which serves every token.
A model keeps what it has attended to in a cache object that it changes as it goes. Here that is
explicit state: a program takes the cache's tensors, builds the object of them, calls the model,
and returns the object's tensors; the old ones are donated. Which tokens are chosen is decided
inside the programs too, so the host waits for nothing but the tokens themselves, and those it
fetches while the next step is already under way.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import types
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .. import random
from ..jit import JitFunction, jit
from ..nn import Apply
from ..parallel import shard
from ..tensor import Tensor
from ..tree import flatten

__all__ = ["generate", "stream"]

SLOTS = 64
"""The cache has a multiple of so many slots, so that calls of various lengths share programs."""


def generate(
    apply: Apply,
    params: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    max_new_tokens: int,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | torch.Generator | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
) -> torch.Tensor:
    """Returns prompts and what a causal language model of `transformers` continues them with.

    Args:
        apply: The model, of `functionalize`, in evaluation mode.
        params: Its parameters, laid out over a mesh.
        input_ids: The prompts, int64 [B, L]; plain, or distributed, with the batch split over an
            axis perhaps. Shorter prompts are padded on the left.
        attention_mask: 0 where `input_ids` is padding, else 1 [B, L]; all ones if None. (It is not
            guessed from a padding token.)
        max_new_tokens: How many tokens to add at the most.
        do_sample: Draw each token, instead of taking the likeliest.
        temperature: What the logits are divided by before a draw.
        top_k: Draw among so many of the likeliest tokens.
        top_p: Draw among the likeliest tokens that together have this probability.
        seed: Of the draws; from a generator, or torch's own if None, a seed is drawn. What is
            drawn does not depend on the layout, up to the rounding of the logits.
        eos_token_id: What ends a text; None for what the model's `generation_config` says, an
            empty sequence for nothing.
        pad_token_id: What follows the end of a text that is shorter than others; None for what
            `generation_config` says, or else the first of `eos_token_id`.

    Returns:
        int64 [B, L + T], a plain tensor, where T is `max_new_tokens`, or less where all texts
        have ended.

    Blocking: until the last token; the programs are traced at the first call with a shape.

    Communication: that of the model in this layout, a few bytes to choose a token, and the tokens
        to the host.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A count or probability is out of range, the texts would be longer than the
            model's table of positions, the parameters are not laid out over a mesh, or the model
            is none that has a cache of keys and values.

    Source: `transformers.GenerationMixin.generate`; without sampling the same tokens, up to the
        rounding of the logits.
    """
    request = _request(locals())
    tokens: list[torch.Tensor] = []
    ended = torch.zeros(input_ids.shape[0], dtype=torch.bool)
    for token in _steps(request):
        tokens.append(token.to_torch().cpu())
        ended |= torch.isin(tokens[-1][:, 0], request.eos)
        if ended.all():
            break
    prompt = input_ids.to_torch() if isinstance(input_ids, Tensor) else input_ids
    return torch.cat([prompt.cpu(), *tokens], 1)


async def stream(
    apply: Apply,
    params: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    max_new_tokens: int,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | torch.Generator | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
) -> AsyncIterator[torch.Tensor]:
    """Yields the tokens of `generate` one by one, as an async iterator.

    Args, Raises and Communication are those of `generate`.

    Yields:
        The next token of each text, int64 [B], a plain tensor; the last where all have ended.

    Blocking: never for a value, which is awaited; at the first call with a shape while the
        programs are traced.
    """
    request = _request(locals())
    ended = torch.zeros(input_ids.shape[0], dtype=torch.bool)
    for token in _steps(request):
        found = (await token.to_torch_async()).cpu()[:, 0]
        yield found
        ended |= torch.isin(found, request.eos)
        if ended.all():
            break


@dataclasses.dataclass(frozen=True)
class _Options:
    """What the programs depend on, beside their arguments."""

    num_slots: int
    do_sample: bool
    top_k: int | None
    has_top_p: bool


@dataclasses.dataclass(frozen=True, eq=False)
class _Request:
    """The arguments of `generate`, checked and complete."""

    apply: Apply
    params: Any
    ids: torch.Tensor
    mask: torch.Tensor | None
    max_new_tokens: int
    options: _Options
    temperature: float
    top_p: float
    key: Tensor
    eos: torch.Tensor
    pad: int


def _request(given: dict[str, Any]) -> _Request:
    _check(given)
    length = given["input_ids"].shape[1] + given["max_new_tokens"]
    eos, pad = _special(given["apply"].module, given["eos_token_id"], given["pad_token_id"])
    mesh = next(t.device_mesh for t in flatten(given["params"])[0] if isinstance(t, Tensor))
    mask = given["attention_mask"]

    def on_mesh(tensor: torch.Tensor) -> Tensor:
        return tensor if isinstance(tensor, Tensor) else shard(tensor, mesh)

    return _Request(
        apply=given["apply"],
        params=given["params"],
        ids=on_mesh(given["input_ids"]),
        mask=None if mask is None else on_mesh(mask),
        max_new_tokens=given["max_new_tokens"],
        options=_Options(
            num_slots=-(-length // SLOTS) * SLOTS,
            do_sample=given["do_sample"],
            top_k=given["top_k"],
            has_top_p=given["top_p"] is not None,
        ),
        temperature=float(given["temperature"]),
        top_p=1.0 if given["top_p"] is None else float(given["top_p"]),
        key=on_mesh(random.key(_seed(given["seed"]))),
        eos=torch.tensor(eos, dtype=torch.int64),
        pad=pad,
    )


def _check(given: dict[str, Any]) -> None:
    ids, mask, top_p = given["input_ids"], given["attention_mask"], given["top_p"]
    temperature = given["temperature"]
    _check_model(given["apply"], given["params"])
    _check_type("input_ids", ids, torch.Tensor, "a tensor, int64 [B, L]")
    if ids.ndim != 2 or ids.dtype != torch.int64 or not ids.numel():
        raise ValueError(
            f"input_ids is {ids.dtype} {list(ids.shape)}, not int64 [B, L] with B and L above 0.\n"
            "  Fix: torch.tensor([[1, 2, 3]]), for example."
        )
    if mask is not None:
        _check_type("attention_mask", mask, torch.Tensor, "a tensor [B, L]")
        if mask.shape != ids.shape:
            raise ValueError(
                f"attention_mask is {list(mask.shape)}, and input_ids is {list(ids.shape)}.\n"
                "  Fix: give both one shape."
            )
    for name in ("max_new_tokens", "top_k"):
        value = given[name]
        if name == "top_k" and value is None:
            continue
        _check_type(name, value, int, "an integer")
        if value < 1:
            raise ValueError(f"{name} is {value}, and must be at least 1.\n  Fix: {name}=1.")
    if top_p is not None:
        _check_type("top_p", top_p, (int, float), "a number")
        if not 0 < top_p <= 1:
            raise ValueError(
                f"top_p is {top_p}, and must be above 0 and at most 1.\n  Fix: top_p=None."
            )
    _check_type("temperature", temperature, (int, float), "a number")
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature is {temperature}, and must be above 0 and finite.\n"
            "  Fix: for the likeliest token leave do_sample at False."
        )
    eos, pad = given["eos_token_id"], given["pad_token_id"]
    if isinstance(eos, Sequence) and not isinstance(eos, str):
        for number, token in enumerate(eos):
            _check_type(f"eos_token_id[{number}]", token, int, "an integer")
    elif eos is not None:
        _check_type("eos_token_id", eos, int, "an integer, or a list of them")
    if pad is not None:
        _check_type("pad_token_id", pad, int, "an integer")
    _check_length(given["apply"].module, ids.shape[1], given["max_new_tokens"])


def _check_model(apply: Any, params: Any) -> None:
    _check_type("apply", apply, Apply, "an apply, of dtorch.nn.functionalize")
    module: Any = apply.module
    config = getattr(module, "config", None)
    if not hasattr(config, "is_encoder_decoder") or not hasattr(module, "generation_config"):
        raise ValueError(
            f"{type(module).__name__} is no causal language model of transformers.\n"
            "  Fix: functionalize one, such as transformers.LlamaForCausalLM."
        )
    if not any(isinstance(t, Tensor) for t in flatten(params)[0]):
        raise ValueError(
            "params holds no distributed tensor, so the mesh to generate on is not known.\n"
            "  Fix: params = dtorch.parallel.shard(params, mesh, plan)."
        )


def _check_type(name: str, value: Any, kinds: Any, what: str) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r:.80}, and must be {what}.\n  Fix: pass {what}.")


def _check_length(module: Any, length: int, new: int) -> None:
    """Refuses more tokens than a learned table of positions has."""
    limit = getattr(module.config, "max_position_embeddings", None)
    is_learned = any(
        isinstance(part, torch.nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES
        for name, part in module.named_modules()
    )
    # The last token is chosen, and given to the model no more.
    if is_learned and limit is not None and length + new - 1 > limit:
        raise ValueError(
            f"{length} tokens and max_new_tokens {new} need {length + new - 1} positions, and "
            f"{type(module).__name__} has learned {limit}.\n"
            f"  Fix: max_new_tokens={max(limit - length + 1, 0)}, or shorter prompts."
        )


_POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")


def _special(
    module: Any, eos_token_id: int | Sequence[int] | None, pad_token_id: int | None
) -> tuple[list[int], int]:
    """The tokens that end a text, and what follows them."""
    defaults = module.generation_config
    eos = defaults.eos_token_id if eos_token_id is None else eos_token_id
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    pad = defaults.pad_token_id if pad_token_id is None else pad_token_id
    return eos, pad if pad is not None else eos[0] if eos else 0


def _seed(seed: int | torch.Generator | None) -> int:
    if isinstance(seed, int):
        return seed
    return int(torch.randint(2**62, (), generator=seed))


def _steps(request: _Request) -> Iterator[Tensor]:
    """Yields the tokens [B, 1] of each step, with the next step already under way."""
    prefill, step = _programs(request.apply, request.options)
    # The end and the draws are inputs, so that the programs serve every value of them.
    eos = shard(request.eos, request.key.device_mesh)
    choice = (request.key, request.temperature, request.top_p, eos, request.pad)
    with torch.no_grad():
        cache, state = prefill(request.params, request.ids, request.mask, *choice)
    for number in range(request.max_new_tokens):
        token = state["ids"]
        if number + 1 < request.max_new_tokens:
            with torch.no_grad():
                cache, state = step(request.params, cache, state, *choice)
        yield token


@functools.lru_cache(maxsize=16)
def _programs(apply: Apply, options: _Options) -> tuple[JitFunction[..., Any], ...]:
    """The jitted functions for a prompt and for a further token."""
    model = _Model(apply, options)
    return jit(model.prefill), jit(model.step, donate_argnums=1)


class _Model:
    """A model of `transformers` with its cache as explicit state."""

    def __init__(self, apply: Apply, options: _Options) -> None:
        from transformers import StaticCache
        from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

        self._apply = apply
        self._options = options
        module: Any = apply.module
        config = module.config
        layers = StaticCache(config, max_cache_len=options.num_slots).layers
        known = (StaticLayer, StaticSlidingWindowLayer)
        other = {type(layer).__name__ for layer in layers if type(layer) not in known}
        if config.is_encoder_decoder or other:
            raise ValueError(
                f"{type(config).__name__} is of no model that dtorch can generate with: "
                + (f"its cache has {', '.join(sorted(other))}." if other else "it has an encoder.")
            )
        self._num_layers = len(layers)
        self._names = set(inspect.signature(module.forward).parameters)

    def prefill(self, params: Any, ids: Any, mask: Any, *choice: Any) -> Any:
        """Returns the cache with the prompt in it, and the state after the first token."""
        length = ids.shape[1]
        if mask is None:
            positions = torch.arange(length, device=ids.device).expand(ids.shape[0], -1)
        else:
            mask = mask.to(torch.int64)
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            mask = F.pad(mask, (0, self._options.num_slots - length), value=1)
        state = {
            "ids": ids,
            "positions": positions,
            "mask": mask,
            "ended": torch.zeros_like(ids[:, 0], dtype=torch.bool),
            "number": torch.zeros_like(choice[0][0]),
        }
        return self._next(params, [{} for _ in range(self._num_layers)], state, *choice)

    def step(self, params: Any, cache: Any, state: Any, *choice: Any) -> Any:
        """Returns the cache with one more token in it, and the state after the next one."""
        return self._next(params, cache, state, *choice)

    def _next(self, params: Any, kept: Any, state: Any, key: Any, *rest: Any) -> Any:
        temperature, top_p, eos, pad = rest
        cache = self._cache(kept)
        given = {"position_ids": state["positions"], "logits_to_keep": 1}
        given = {name: value for name, value in given.items() if name in self._names}
        logits = self._apply(
            params,
            input_ids=state["ids"],
            attention_mask=state["mask"],
            past_key_values=cache,
            use_cache=True,
            **given,
        ).logits[:, -1]
        drawn = random.fold_in(key, state["number"]) if self._options.do_sample else key
        token = _chosen(logits, drawn, temperature, top_p, self._options)
        token = torch.where(state["ended"], pad, token)
        after = {
            "ids": _like(token[:, None], state["ids"]),
            "positions": _like(state["positions"][:, -1:] + 1, state["positions"]),
            "mask": state["mask"],
            "ended": _like(state["ended"] | torch.isin(token, eos), state["ended"]),
            "number": state["number"] + 1,
        }
        names = ("keys", "values", "cumulative_length")
        return [{n: getattr(layer, n) for n in names} for layer in cache.layers], after

    def _cache(self, kept: Sequence[dict[str, Any]]) -> Any:
        """The model's cache object, of tensors that were kept, or empty.

        The layers that slide keep everything as well: the mask makes the window. (The sliding
        layer of `transformers` counts in Python, which would make each token a program.)
        """
        from transformers.cache_utils import Cache, StaticLayer

        layers = []
        for tensors in kept:
            layer = StaticLayer(self._options.num_slots)
            layer.update = types.MethodType(_update, layer)
            for name, tensor in tensors.items():
                setattr(layer, name, tensor)
            layer.is_initialized = bool(tensors)
            layers.append(layer)
        return Cache(layers=layers)


def _update(
    layer: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`StaticLayer.update`, but not in place: so the cache has the layout of what is put in it."""
    length = keys.shape[2]
    if layer.is_initialized:
        position = torch.arange(length, device=keys.device) + layer.cumulative_length
        layer.keys = layer.keys.index_copy(2, position, keys)
        layer.values = layer.values.index_copy(2, position, values)
    else:
        room = (0, 0, 0, layer.max_cache_len - length)
        layer.keys, layer.values = F.pad(keys, room), F.pad(values, room)
        layer.is_initialized = True
    layer.cumulative_length = layer.cumulative_length + length
    return layer.keys, layer.values


def _chosen(
    logits_BV: torch.Tensor, key: Any, temperature: Any, top_p: Any, options: _Options
) -> torch.Tensor:
    """The next token [B] by the logits [B, V]."""
    if not options.do_sample:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.float() / temperature
    never = float("-inf")
    if options.top_k is not None:
        count = min(options.top_k, logits_BV.shape[1])
        least = logits_BV.topk(count).values[:, -1:]
        logits_BV = torch.where(logits_BV < least, never, logits_BV)
    if options.has_top_p:
        ordered, order = logits_BV.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        ordered = torch.where(before < top_p, ordered, never)
        logits_BV = torch.empty_like(ordered).scatter(1, order, ordered)
    return random.categorical(key, logits_BV)


def _like(x: Any, other: Any) -> Any:
    """A tensor in the layout of another: that of a state does not change from step to step."""
    return x.redistribute(other.device_mesh, other.placements)
