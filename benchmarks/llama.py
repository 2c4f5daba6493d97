"""Llama: a call with its fetch, and the client's time of a call.

"nn" are the functions of dtorch.nn, as examples/llama.py uses them; "transformers" is the
unmodified LlamaForCausalLM through torch.func.functional_call. Both are jitted, and compared with
PyTorch's result before they are timed. The model of 64 x 5 (hidden size x layers) takes one token,
that of 512 x 8 a batch of 2 x 128.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dtorch

from .example import LLAMA, Saved, placed, save, state, tensor_parallel
from .harness import Case, Options, drain, unmeasured
from .models.llama import SIZES, llama, token_ids
from .rivals import Rival, Unavailable
from .timing import Measure, burst, looped

Call = Callable[[], Any]
DTENSOR, JAX, JAX_2 = "DTensor, tp=2", "JAX jit", "JAX jit, tp=2"
TORCH = f"PyTorch, {torch.get_num_threads()} threads"
NUM_SLOTS, PROMPT = 256, 64


def cases(options: Options) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        yield from tiny(Setting(options, "tiny", Path(folder)))
        if not options.quick:
            yield small(Setting(options, "small", Path(folder)))
    yield from stories(options)


class Setting:
    """One size of the model, and everything that runs it."""

    def __init__(self, options: Options, size: str, folder: Path) -> None:
        self.options = options
        self.size = size
        self.module = llama(SIZES[size])
        self.ids = token_ids(SIZES[size])
        self.saved = save(SIZES[size], folder / size)

    def functions(self, num_devices: int, *, compile: bool = False) -> Call:
        """Returns a call of the example's forward."""
        mesh, config = tensor_parallel(num_devices), self.saved.config
        params, ids = self.saved.params(mesh), placed(self.ids, mesh)

        def forward(params: Any, ids: Tensor) -> Tensor:
            return LLAMA.forward(config, params, ids)

        jitted = dtorch.jit(forward, compile=compile)
        return self._checked(lambda: jitted(params, ids))

    def transformers(self, num_devices: int) -> Call:
        """Returns a call of transformers' own model."""
        mesh, ids = tensor_parallel(num_devices), placed(self.ids, tensor_parallel(num_devices))
        plan = LLAMA.PLAN | LLAMA.HEAD_PLAN
        params = dtorch.parallel.shard(dict(state(self.module)), mesh, plan)

        def forward(params: Mapping[str, Tensor], ids: Tensor) -> Tensor:
            return torch.func.functional_call(self.module, dict(params), (ids,)).logits

        jitted = dtorch.jit(forward)
        return self._checked(lambda: jitted(params, ids))

    def _checked(self, call: Call) -> Call:
        expected = self.module(self.ids).logits
        torch.testing.assert_close(call().to_torch(), expected, rtol=1e-4, atol=1e-4)
        return call

    def latency(self, call: Call) -> Measure:
        return self.options.timed(looped(lambda: call().to_torch()))

    def client(self, call: Call) -> Measure:
        return self.options.timed(burst(call, drain))

    def torch(self) -> Measure:
        return self.options.timed(looped(torch.inference_mode()(lambda: self.module(self.ids))))

    def dtensor(self) -> Measure:
        return Rival("dtensor", 2, self.options.rival_budget).measure("llama", size=self.size)

    def jax(self, num_devices: int, *, busy: bool = False) -> Measure:
        config = self.saved.config
        settings = {"eps": config["rms_norm_eps"], "theta": config["rotary"]["theta"]}
        weights = str(self.saved.folder / "weights.npz")
        rival = Rival("jax", num_devices, self.options.rival_budget)
        return rival.measure(
            "llama", weights=weights, head_dim=config["head_dim"], busy=busy, **settings
        )


def tiny(setting: Setting) -> Iterator[Case]:
    """Bound by overhead. The targets are those of the functions of dtorch.nn."""
    ways = {
        "nn": setting.functions,
        "nn, compile=True": functools.partial(setting.functions, compile=True),
        "transformers": setting.transformers,
    }
    if setting.options.quick:
        del ways["nn, compile=True"]  # compiling takes a minute, where nothing is cached
    for way, build in ways.items():
        one, two = build(1), build(2)
        title = f"Llama 64 x 5, {way}"
        found = [
            Case(
                title,
                setting.latency(one),
                {TORCH: setting.torch(), JAX: setting.jax(1)},
                {TORCH: 0.1, JAX: 1.0},
            ),
            Case(
                f"{title}, tp=2",
                setting.latency(two),
                {TORCH: setting.torch(), JAX_2: setting.jax(2), DTENSOR: setting.dtensor()},
                {JAX_2: 1.0, DTENSOR: 1 / 50},
            ),
            Case(
                f"{title}, client",
                setting.client(one),
                {TORCH: setting.torch(), JAX: setting.jax(1, busy=True)},
                {TORCH: 0.02},
            ),
            Case(
                f"{title}, tp=2, client",
                setting.client(two),
                {TORCH: setting.torch(), JAX_2: setting.jax(2, busy=True)},
                {TORCH: 0.02},
            ),
        ]
        yield from (
            found if way != "transformers" else (dataclasses.replace(c, targets={}) for c in found)
        )


def small(setting: Setting) -> Case:
    """Bound by arithmetic."""
    return Case(
        "Llama 512 x 8, nn, tp=2",
        setting.latency(setting.functions(2)),
        {TORCH: setting.torch(), JAX_2: setting.jax(2), DTENSOR: setting.dtensor()},
        {TORCH: 1.0, JAX_2: 1.0, DTENSOR: 0.7},
    )


def stories(options: Options) -> Iterator[Case]:
    """The trained stories260K, beside the same functions on torch tensors."""
    titles = {"prefill": f"stories260K, prefill of {PROMPT}", "decode": "stories260K, decode step"}
    for name, title in titles.items():
        if not options.model.exists():
            yield Case(title, unmeasured(Unavailable(f"no folder {options.model}")))
            continue
        saved = Saved(options.model)
        for num_devices in (1, 2):
            ours = options.timed(looped(story(name, saved, tensor_parallel(num_devices))))
            theirs = options.timed(looped(torch.inference_mode()(story(name, saved, None))))
            where = "" if num_devices == 1 else f", tp={num_devices}"
            yield Case(title + where, ours, {"PyTorch, same functions": theirs})


def story(name: str, saved: Saved, mesh: dtorch.DeviceMesh | None) -> Call:
    """Returns a prefill or a decode step with its fetch, in PyTorch where there is no mesh."""
    config, heads = saved.config, saved.config["num_key_value_heads"]
    sizes = 1, heads, NUM_SLOTS, config["head_dim"]
    inputs = {
        "ids": torch.ones(1, 1 if name == "decode" else PROMPT, dtype=torch.int64),
        "position": torch.tensor([PROMPT]),
        "cache": {str(i): LLAMA.nn.cache_init(*sizes) for i in range(config["num_hidden_layers"])},
    }
    plan = {k: v for k, v in LLAMA.INPUT_PLAN.items() if k.split(".")[0] in inputs}
    params = saved.plain() if mesh is None else saved.params(mesh)
    inputs = inputs if mesh is None else dtorch.parallel.shard(inputs, mesh, plan)
    return decode(config, params, inputs) if name == "decode" else prefill(config, params, inputs)


def prefill(config: Any, params: Any, inputs: Any) -> Call:
    def run(params: Any, ids: Tensor, cache: Any) -> Any:
        return LLAMA.prefill(config, params, ids, cache)

    run = jitted_if_placed(run, inputs["ids"])
    return lambda: fetched(run(params, inputs["ids"], inputs["cache"])[0])


def decode(config: Any, params: Any, inputs: Any) -> Call:
    """The cache of each step is the one that the step before gave."""

    def run(params: Any, ids: Tensor, position: Tensor, cache: Any) -> Any:
        return LLAMA.decode(config, params, ids, position, cache)

    run = jitted_if_placed(run, inputs["ids"], donate_argnums=(3,))
    cache = inputs["cache"]

    def step() -> Tensor:
        nonlocal cache
        logits, cache = run(params, inputs["ids"], inputs["position"], cache)
        return fetched(logits)

    return step


def jitted_if_placed(function: Callable[..., Any], x: Tensor, **options: Any) -> Callable[..., Any]:
    return dtorch.jit(function, **options) if isinstance(x, dtorch.Tensor) else function


def fetched(x: Tensor) -> Tensor:
    return x.to_torch() if isinstance(x, dtorch.Tensor) else x
