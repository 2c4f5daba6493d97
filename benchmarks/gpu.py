"""One GPU: adds, attention, a Llama and the models of SD3, beside PyTorch. Only if it is named.

Adds and attention are chains of calls in half precision: the time of one, with one wait at the end.
Models are in bfloat16 and made on the device: "client" is the time until a call returns, "latency"
until the device is done, "peak" what the allocator has given out at most, while only one of the two
libraries has the parameters. Every result is first compared with PyTorch's, bit for bit.

``--device cpu --quick`` runs the same cases in small sizes, where there is no GPU.
"""

import contextlib
import functools
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import dtorch
from dtorch.nn import functionalize
from dtorch.parallel import shard

from . import STARTED, adds, attention
from .example import LLAMA
from .harness import Case, Options, guarded, unmeasured
from .models import llama, sd3
from .rivals import Unavailable
from .timing import Measure, burst, each, looped

Call = Callable[[], Any]
RIVAL = "PyTorch"
GIB = 2**30
SECONDS = 480.0
"""What the family may take."""

ADD_SHAPES = (
    (1,), (1, 1, 1024), (1, 256, 1024), (1, 512, 1024),
    *((2**i, 1024, 1024) for i in range(11)),
)  # fmt: skip
ADD_TARGETS = {"eager": 1.37, "jit": 0.7}  # of (1,)
ATTENTION_SHAPES_BHLE = (
    (4, 4, 64, 32), (4, 8, 128, 64), (8, 16, 256, 64), (8, 256, 128, 64), (8, 1024, 128, 64),
    (8, 4096, 128, 64), (8, 8192, 128, 64),
)  # fmt: skip
SD3_TARGETS = {"client": 0.1, "latency": 1.0, "peak": 1.0}
TEXT_GIB = {"CLIP-L": 2, "CLIP-bigG": 6, "T5": 22}
DECODE_SLOTS = 2048


def cases(options: Options) -> Iterator[Case]:
    setting = Setting(options)
    for name, group in groups(setting):
        yield from guarded(name, group)
        setting.release()
    limit = None if options.quick else SECONDS
    yield Case("all of this", lambda: time.monotonic() - STARTED, limit=limit, warm_ups=0)


def groups(setting: "Setting") -> Iterator[tuple[str, Callable[[], Iterator[Case]]]]:
    """What is made, measured and freed together."""
    quick = setting.options.quick
    for shape in ADD_SHAPES[:3] if quick else ADD_SHAPES:
        yield f"add {shape}", functools.partial(add, setting, shape)
    for shape in ATTENTION_SHAPES_BHLE[:2] if quick else ATTENTION_SHAPES_BHLE:
        yield f"attention {shape}", functools.partial(attend, setting, shape)
    wide, full = (llama.SIZES["tiny"], "small") if quick else (llama.SIZES["wide"], "full")

    def of(
        name: str, gib: float, make: Callable[[], Subject], targets: dict[str, float]
    ) -> tuple[str, Callable[[], Iterator[Case]]]:
        return name, functools.partial(model, setting, name, gib, make, targets)

    yield of("Llama", 12, lambda: whole_llama(wide), {})
    yield of("Llama, decode step", 14, lambda: Decoding(wide), {})
    yield of("SD3 transformer", 12, lambda: transformer(full), SD3_TARGETS)
    for name, gib in TEXT_GIB.items():
        yield of(name, gib, functools.partial(encoder, name, full), {})


class Setting:
    """The device, and how things are made, timed and freed on it."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.device = torch.device(options.device, 0)
        self.mesh = dtorch.DeviceMesh(options.device, [0])
        self.on_gpu = options.device == "cuda"

    def synchronize(self) -> None:
        """Waits for what PyTorch has launched."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Frees what nobody has any more, and what libraries work in."""
        dtorch.synchronize()
        dtorch.cache_clear()
        gc.collect()
        dtorch.empty_cache()
        if self.on_gpu:
            self.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def require(self, gib: float) -> None:
        """Raises `Unavailable` if the device has less memory left."""
        if self.on_gpu and not self.options.quick:
            free, total = (size / GIB for size in torch.cuda.mem_get_info(self.device))
            if free < gib:
                raise Unavailable(f"takes {gib:.3g} GiB; {free:.3g} of {total:.3g} GiB are free")

    def modes(self) -> dict[str, Callable[..., Any]]:
        """The ways to run a function as one program."""
        graph = {"graph": functools.partial(dtorch.jit, cuda_graph=True)} if self.on_gpu else {}
        return {"jit": dtorch.jit} | graph

    def without_graph(self, name: str) -> Iterator[Case]:
        """A case that says why there are no CUDA graphs, if there are none."""
        if not self.on_gpu:
            yield Case(f"{name}, graph", unmeasured(Unavailable("CUDA graphs are for GPUs")))

    def peak(self, call: Call) -> Measure:
        """Returns a measure of the bytes that are given out at most while a call runs."""

        def measure() -> float:
            if not self.on_gpu:
                raise Unavailable("counted on GPUs")
            dtorch.synchronize()
            gc.collect()
            self.synchronize()
            torch.cuda.reset_peak_memory_stats(self.device)
            result = call()
            dtorch.synchronize()
            self.synchronize()
            del result
            return torch.cuda.max_memory_allocated(self.device)

        return measure


@contextlib.contextmanager
def made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Makes tensors, parameters among them, on a device in a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def settled(call: Callable[..., Any], *args: Any) -> Any:
    """Calls until what is traced has been traced, and what is captured is replayed."""
    for _ in range(3):
        call(*args)
    return call(*args)


def compared(name: str, ours: Tensor, theirs: Tensor) -> Iterator[Case]:
    """A case that fails and says how much two results differ, if they do."""
    if not torch.equal(ours, theirs):
        finite = bool(theirs.isfinite().all())
        apart = f"{(ours - theirs).abs().max().item():.3g}" if finite else "not finite"
        error = ValueError(f"{name}: not torch.equal; the largest difference is {apart}.")
        yield Case(f"{name}, torch.equal", unmeasured(error))


# -- chains --------------------------------------------------------------------------------


def add(setting: Setting, shape: tuple[int, ...]) -> Iterator[Case]:
    numel = torch.Size(shape).numel()
    setting.require(12 * numel * 2 / GIB)
    length = 20 if setting.options.quick else max(4, min(1000, 2**28 // numel))
    function = functools.partial(adds.chain, length=length)
    targets = ADD_TARGETS if shape == (1,) else {}
    yield from chain(setting, f"add {shape}", function, length, shape, 2, targets)


def attend(setting: Setting, shape: tuple[int, ...]) -> Iterator[Case]:
    setting.require(14 * torch.Size(shape).numel() * 2 / GIB)
    function = functools.partial(attention.chain)  # whose programs go when it does
    yield from chain(setting, f"attention {shape}", function, attention.LENGTH, shape, 3, {})


def chain(
    setting: Setting,
    name: str,
    function: Callable[..., Tensor],
    length: int,
    shape: tuple[int, ...],
    num_tensors: int,
    targets: dict[str, float],
) -> Iterator[Case]:
    """A chain of calls on tensors of a shape, in eager mode and as one program."""
    torch.manual_seed(0)
    with made_on(setting.device, torch.float16):
        given = [torch.rand(shape) for _ in range(num_tensors)]
    placed = [dtorch.Tensor(x, device_mesh=setting.mesh) for x in given]
    theirs = torch.inference_mode()(lambda: function(*given))
    rival = looped(lambda: (theirs(), setting.synchronize()), length)
    for mode, jit in {"eager": lambda f: f, **setting.modes()}.items():
        title = f"{name}, {mode}"
        yield from compared(title, settled(call := jit(function), *placed).to_torch(), theirs())
        run = looped(lambda call=call: (call(*placed), dtorch.synchronize()), length)
        bound = {RIVAL: targets[mode]} if mode in targets else {}
        measure, beside = setting.options.timed(run), setting.options.timed(rival)
        yield Case(title, measure, {RIVAL: beside}, bound)
    yield from setting.without_graph(name)


# -- models --------------------------------------------------------------------------------


class Subject(Protocol):
    """A model with its arguments, in both libraries."""

    def theirs(self) -> Call:
        """Returns PyTorch's call."""
        ...

    def place(self, mesh: dtorch.DeviceMesh) -> None:
        """Gives dtorch parameters of its own."""
        ...

    def ours(self, jit: Callable[..., Any]) -> Call:
        """Returns dtorch's call."""
        ...

    def forget(self) -> None:
        """Frees PyTorch's parameters and arguments."""
        ...


class Whole:
    """A module and its positional arguments."""

    def __init__(self, module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        self._module = module
        self._args = args
        self._apply = functionalize(module)[1]
        self._placed: Any = None

    def theirs(self) -> Call:
        return torch.inference_mode()(lambda: self._module(*self._args, return_dict=False)[0])

    def place(self, mesh: dtorch.DeviceMesh) -> None:
        self._placed = shard((functionalize(self._module)[0], *self._args), mesh)

    def ours(self, jit: Callable[..., Any]) -> Call:
        forward = jit(lambda params, *args: self._apply(params, *args, return_dict=False)[0])
        return lambda: forward(*self._placed)

    def forget(self) -> None:
        self._module.to("meta")
        self._args = ()


class Decoding:
    """One more token after a prompt, by the functions of dtorch.nn in both libraries.

    The cache of each step is the one that the step before gave; the token and its position stay.
    """

    def __init__(self, size: llama.Size) -> None:
        self._module = llama.llama(size)
        with tempfile.TemporaryDirectory() as folder:
            self._module.config.save_pretrained(folder)
            self._config = LLAMA.read_config(Path(folder))
        self._size = size
        self._device = self._module.device
        self._mesh: Any = None
        self._placed: Any = None

    def _inputs(self) -> tuple[Tensor, Tensor, Any]:
        """The token of each text, its position, and a cache that a prompt has filled."""
        size = self._size
        torch.manual_seed(1)
        shape = (size.batch, size.kv_heads, DECODE_SLOTS, self._config["head_dim"])
        with made_on(self._device, torch.bfloat16):
            cache = {
                str(i): {"key": torch.randn(shape), "value": torch.randn(shape)}
                for i in range(size.layers)
            }
            ids = torch.ones(size.batch, 1, dtype=torch.int64)
            position = torch.tensor([size.tokens])
        return ids, position, cache

    def _steps(self, run: Callable[..., Any], params: Any, inputs: tuple[Any, ...]) -> Call:
        ids, position, cache = inputs

        def step() -> Any:
            nonlocal cache
            logits, cache = run(params, ids, position, cache)
            return logits

        return step

    def _run(self, params: Any, ids: Tensor, position: Tensor, cache: Any) -> Any:
        return LLAMA.decode(self._config, params, ids, position, cache)

    def theirs(self) -> Call:
        run = torch.inference_mode()(self._run)
        return self._steps(run, functionalize(self._module)[0], self._inputs())

    def place(self, mesh: dtorch.DeviceMesh) -> None:
        self._mesh = mesh
        self._placed = shard(functionalize(self._module)[0], mesh)

    def ours(self, jit: Callable[..., Any]) -> Call:
        def run(params: Any, ids: Tensor, position: Tensor, cache: Any) -> Any:
            return self._run(params, ids, position, cache)

        inputs = shard(self._inputs(), self._mesh)
        return self._steps(jit(run, donate_argnums=(3,)), self._placed, inputs)

    def forget(self) -> None:
        self._module.to("meta")


def whole_llama(size: llama.Size) -> Subject:
    return Whole(made := llama.llama(size), (llama.token_ids(size).to(made.device),))


def transformer(size: str) -> Subject:
    return Whole(sd3.transformer(size), sd3.inputs(size))


def encoder(name: str, size: str) -> Subject:
    made: Any = sd3.text_encoder(name, size)
    return Whole(made, (sd3.token_ids(name)[:1].to(made.device),))


def once(measure: Measure) -> Measure:
    """Returns a measure that gives what another one gives now."""
    try:
        value = measure()
    except Unavailable as reason:
        return unmeasured(reason)
    return lambda: value


def model(
    setting: Setting, name: str, gib: float, make: Callable[[], Subject], targets: dict[str, float]
) -> Iterator[Case]:
    """The client's time, the latency and the peak of memory of a model."""
    setting.require(gib)
    with made_on(setting.device, torch.bfloat16):
        subject = make()
    theirs = subject.theirs()
    theirs()  # what libraries work in is there from now on
    their_peak = once(setting.peak(theirs))
    expected = theirs()
    subject.place(setting.mesh)
    bounds = {kind: {RIVAL: target} for kind, target in targets.items()}

    def time_of(run: Any, rival: Any, kind: str, title: str) -> Case:
        measure, beside = setting.options.timed(run), setting.options.timed(rival)
        return Case(f"{title}, {kind}", measure, {RIVAL: beside}, bounds.get(kind, {}))

    for mode, jit in setting.modes().items():
        call, title = subject.ours(jit), f"{name}, {mode}"
        yield from compared(title, settled(call).to_torch(), expected)
        ours = burst(call, lambda _: dtorch.synchronize(), length=1)
        rival = burst(theirs, lambda _: setting.synchronize(), length=1)
        yield time_of(ours, rival, "client", title)
        ours, rival = each(call, dtorch.synchronize), each(theirs, setting.synchronize)
        yield time_of(ours, rival, "latency", title)
        del call, ours, rival
    del theirs, expected
    subject.forget()
    setting.release()
    for mode, jit in setting.modes().items():
        call = subject.ours(jit)
        settled(call)
        measure, beside, bound = setting.peak(call), {RIVAL: their_peak}, bounds.get("peak", {})
        yield Case(f"{name}, {mode}, peak", measure, beside, bound, unit="B", warm_ups=0)
        del call, measure
    yield from setting.without_graph(name)
