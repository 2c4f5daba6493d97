"""From a stretch of local operations to compiled code, by PyTorch's Inductor.

Takes a `Stretch`, the plain data of operations on one device's tensors. For the host it gives the
path of a library that computes its results, compiled ahead of time. Libraries are kept in the
user's cache, so that a stretch that an earlier process has compiled costs a look-up and does not
even import Inductor. For an accelerator it gives what `torch.compile` would run: a function of
Python that launches the kernels, whose code Inductor keeps in its own cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import operator
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .program import Ref, ScalarRef
from .runtime import NATIVE
from .runtime.stretches import Layout


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a stretch.

    Attributes:
        op: The operation.
        args: Its positional arguments; `Ref` and `ScalarRef` count the stretch's own values.
        kwargs: Its keyword arguments, likewise, as pairs.
        outputs: The values that its results become.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Operations that one device runs one after another, with values numbered from 0.

    Attributes:
        operations: What runs.
        inputs: What the first values are laid out as.
        num_scalars: How many run-time scalars it takes.
        outputs: The values that it returns.
        results: What they are to be laid out as.
        num_threads: With how many threads it runs on the host.
        place: The accelerator that it runs on, which is written into its code; None for the host.
    """

    operations: tuple[Operation, ...]
    inputs: tuple[Layout, ...]
    num_scalars: int
    outputs: tuple[int, ...]
    results: tuple[Layout, ...]
    num_threads: int
    place: torch.device | None = None

    @functools.cached_property
    def key(self) -> str:
        """A hash of all that its library depends on."""
        settings = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
        machine = torch.__version__, torch.backends.cpu.get_cpu_capability(), _cpu()
        parts = self, settings, machine, _OPTIONS, _VERSION
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


_VERSION = 1  # of what this module makes of a stretch
_OPTIONS: dict[str, Any] = {
    "cpp.min_chunk_size": 32768,  # of a loop for each thread: the grain of torch's own kernels
    # Of small values within a stretch. Results that live there are kept for the next call by each
    # thread: the native kernel copies them, and a Python one could not end its thread with them.
    "aot_inductor.allow_stack_allocation": NATIVE is not None,
    "compile_threads": 1,  # no pool of compilers, which would outlive the call
}


@functools.cache
def _cpu() -> str:
    """The instructions that this machine has: a library built for more would crash."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def library_of(stretch: Stretch) -> Path:
    """Returns where the library of a stretch is, or will be."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "dtorch" / "compiled" / f"{stretch.key}.so"


def build(stretch: Stretch) -> None:
    """Compiles a stretch into `library_of` it.

    Blocking: while the compiler works, some seconds.

    Raises:
        Exception: Whatever Inductor raises, or the code is not fit to be run.
    """
    library = library_of(stretch)
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder, _compiler("cpu") as inductor:
        made = Path(folder) / library.name
        options = {**_OPTIONS, "cpp.threads": stretch.num_threads}
        options["aot_inductor.output_path"] = str(made)
        inductor.aot_compile(_graph(stretch), _examples(stretch), options=options)
        _check(Path(folder))
        os.replace(made, library)


def function_of(stretch: Stretch) -> Callable[..., Sequence[torch.Tensor]]:
    """Compiles a stretch for its accelerator and returns a function of its inputs and scalars.

    Blocking: while the compiler works, some seconds.

    Raises:
        Exception: Whatever Inductor raises.
    """
    assert stretch.place is not None
    with _compiler(stretch.place.type) as inductor:
        options = {"compile_threads": _OPTIONS["compile_threads"]}
        return inductor.compile(_graph(stretch), list(_examples(stretch)), options=options)


@contextlib.contextmanager
def _compiler(kind: str) -> Iterator[Any]:
    """A context in which Inductor, which it gives, compiles as it is told alone."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(kind, enabled=False),
        warnings.catch_warnings(action="ignore"),  # torch's own
    ):
        yield importlib.import_module("torch._inductor")  # late: it takes seconds


def _examples(stretch: Stretch) -> tuple[torch.Tensor, ...]:
    fake = importlib.import_module("torch._subclasses.fake_tensor")
    place = torch.device("cpu") if stretch.place is None else stretch.place
    with fake.FakeTensorMode():
        scalars = [torch.empty((), dtype=torch.float64) for _ in range(stretch.num_scalars)]
        inputs = [
            torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=place)
            for s in stretch.inputs
        ]
    return (*inputs, *scalars)


def _check(folder: Path) -> None:
    """Refuses code that would call Python, or whose loops in parallel could throw."""
    if any(not p.name.endswith("metadata.json") for p in folder.glob("**/*.json")):
        raise NotImplementedError("an operation that compiled code cannot call")
    for path in folder.glob("**/*.kernel.cpp"):
        source = path.read_text()
        if "#pragma omp" in source and "AOTI_TORCH_CHECK" in source:
            raise NotImplementedError("a check in a parallel loop, which would end the process")


def _graph(stretch: Stretch) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    nodes = {i: graph.placeholder(f"x{i}") for i in range(len(stretch.inputs))}
    scalars = [graph.placeholder(f"s{i}") for i in range(stretch.num_scalars)]

    def filled(value: Any) -> Any:
        if type(value) is Ref:
            return nodes[value.id]
        if type(value) is ScalarRef:
            return scalars[value.number]
        return [filled(v) for v in value] if type(value) in (tuple, list) else value

    for operation in stretch.operations:
        args, kwargs = filled(operation.args), {k: filled(v) for k, v in operation.kwargs}
        called = _better(operation) if stretch.place is None else operation.op
        result = graph.call_function(called, tuple(args), kwargs)
        returns = operation.op._schema.returns
        is_one = len(returns) == 1 and not isinstance(returns[0].type, torch.ListType)
        for i, value in enumerate(operation.outputs):
            if value is not None:
                nodes[value] = (
                    result if is_one else graph.call_function(operator.getitem, (result, i))
                )
    graph.output(tuple(nodes[v] for v in stretch.outputs))
    return torch.fx.GraphModule({}, graph)


# -- on the host, loops for products of one row: they fuse, and a call costs more ----------

_aten = torch.ops.aten


def _better(operation: Operation) -> Callable[..., Any]:
    """What to call for an operation on the host."""
    if operation.op is _aten.linear.default:
        return _linear
    attention = _aten._scaled_dot_product_flash_attention_for_cpu.default
    if operation.op is attention and operation.outputs[1] is None:
        return _attention
    return operation.op


def _is_exact(x: torch.Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    if x.numel() != x.shape[-1] or not _is_exact(x):
        return _aten.linear.default(x, weight, bias)
    product = (x.unsqueeze(-2) * weight).sum(-1)
    return product if bias is None else product + bias


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Any:
    (batch, heads, length, size), groups = query.shape, key.shape[1]
    if length != 1 or not _is_exact(query) or heads % groups or key.shape[2] == 0:
        op = _aten._scaled_dot_product_flash_attention_for_cpu.default
        return op(query, key, value, dropout, is_causal, attn_mask=attn_mask, scale=scale)
    if is_causal:  # of one row, it sees the first key
        key, value = key[:, :, :1], value[:, :, :1]
    # B batch, G groups, H heads of a group, S keys, E head size
    query_BGH1E = query.reshape(batch, groups, heads // groups, 1, size)
    scores_BGHS = (query_BGH1E * key.unsqueeze(2)).sum(-1) * (
        size**-0.5 if scale is None else scale
    )
    if attn_mask is not None:
        scores_BGHS = (scores_BGHS.reshape(batch, heads, 1, -1) + attn_mask).view_as(scores_BGHS)
    weights_BGHS1 = scores_BGHS.softmax(-1).unsqueeze(-1)
    result_BGHE = (weights_BGHS1 * value.unsqueeze(2)).sum(-2)
    return (result_BGHE.reshape(batch, 1, heads, -1).transpose(1, 2),)
