"""Inference: the shapes, dtypes and strides of an operation's results, from its meta kernel.

Takes an operation whose tensor arguments are `Spec`s; gives a `Meta` for each result. What it
refuses (shapes that do not fit, a dtype) is an error of the call, with PyTorch's type and words.

A meta kernel depends on its arguments and on a few settings of torch, and nothing else: what it
has said is remembered for the next time it is asked the same `Question`.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .accelerator_results import ON_ACCELERATORS
from .cpu_results import (
    CONTIGUOUS_LIKE_ARGUMENT,
    LIKE_ARGUMENT,
    REPLACED,
    as_meta_kernel_takes,
    corrected,
)
from .elementwise import with_strides
from .errors import DataDependentError
from .program import Ref, ScalarRef
from .refusals import as_torch_refuses
from .rules import Meta
from .spec import Spec
from .strictness import is_strict

CAPACITY = 8192
"""How many answers are remembered."""


class Question(NamedTuple):
    """An operation and its arguments, tensors as `Spec`s, laid out flat to be a key.

    Attributes:
        op: The operation.
        leaves: The arguments and after them the keyword arguments, a list as its length and then
            its items.
        kinds: What tells leaves apart that are equal: the type, or the text of a float or complex.
        num_args: How many of the arguments are positional.
        names: The names of the keyword arguments.
        is_a_key: Whether equal questions have equal answers, as far as is known.
    """

    op: torch._ops.OpOverload
    leaves: tuple[Any, ...]
    kinds: tuple[Any, ...]
    num_args: int
    names: tuple[str, ...]
    is_a_key: bool

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments and the keyword arguments, with lists for tuples."""
        leaves = iter(zip(self.leaves, self.kinds, strict=True))
        args = [_next(leaves) for _ in range(self.num_args)]
        return args, {name: _next(leaves) for name in self.names}


_STATELESS = {"aten", "prims", "dtorch"}  # an operation of somebody else's may read what it likes
_PLAIN = {
    Spec,
    int,
    bool,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
}


def question(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    specs: Sequence[Spec] = (),
    scalars: Sequence[Any] = (),
) -> Question:
    """Returns the question of an operation's results.

    Args:
        op: The operation.
        args: Its positional arguments; tensors are `Spec`s or `Ref`s, run-time scalars `ScalarRef`.
        kwargs: Its keyword arguments, likewise.
        specs: What a `Ref` stands for.
        scalars: What a `ScalarRef` stands for: its value in this trace.
    """
    leaves: list[Any] = []
    kinds: list[Any] = []

    def lay_out(items: Iterable[Any]) -> None:
        for item in items:
            kind = type(item)
            if kind is Ref:
                item, kind = specs[item.id], Spec
            elif kind is ScalarRef:
                item = scalars[item.number]
                kind = type(item)
            if kind is float or kind is complex:
                kind = repr(item)
            elif isinstance(item, (list, tuple)):
                leaves.append(len(item))
                kinds.append(list)
                lay_out(item)
                continue
            leaves.append(item)
            kinds.append(kind)

    lay_out(args)
    lay_out(kwargs.values())
    is_a_key = op.namespace in _STATELESS and _PLAIN.issuperset(map(type, leaves))
    return Question(op, tuple(leaves), tuple(kinds), len(args), tuple(kwargs), is_a_key)


def _next(leaves: Any) -> Any:
    leaf, kind = next(leaves)
    return [_next(leaves) for _ in range(leaf)] if kind is list else leaf


@functools.lru_cache(maxsize=CAPACITY)
def argument_names(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Returns the names of an operation's arguments, in order."""
    return tuple(a.name for a in op._schema.arguments)


_C: Any = torch._C  # looked up once: every call asks for the settings


def settings() -> Hashable:
    """Returns the settings, of torch and `strict`, that a trace and meta kernels depend on."""
    return (
        _C.is_grad_enabled(),
        _C.is_inference_mode_enabled(),
        _C.get_default_dtype(),
        _C._get_deterministic_algorithms(),
        _C._is_any_autocast_enabled() and _autocast(),
        _C._get_flash_sdp_enabled(),
        _C._get_mem_efficient_sdp_enabled(),
        _C._get_math_sdp_enabled(),
        _C._get_cudnn_sdp_enabled(),
        tuple(_C._get_sdp_priority_order()),
        is_strict(),
    )


def _autocast() -> Hashable:
    kinds = ("cpu", "cuda")
    return tuple(torch.is_autocast_enabled(k) and torch.get_autocast_dtype(k) for k in kinds)


def infer(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the results of an operation, each tensor as a `Meta`.

    Args:
        op: The operation.
        args: Its positional arguments, tensors as `Spec`s.
        kwargs: Its keyword arguments, likewise.
    """
    return answer(question(op, args, kwargs))


def answer(asked: Question) -> Any:
    """Returns the results that a question asks for, as `infer`."""
    if asked.is_a_key:
        return _remembered(asked, settings())
    return _from_meta_kernel(asked)


@functools.lru_cache(maxsize=CAPACITY)
def _remembered(asked: Question, settings: Hashable) -> Any:
    return _from_meta_kernel(asked)


def _from_meta_kernel(asked: Question) -> Any:
    args, kwargs = asked.arguments()
    with as_torch_refuses(asked.op, args, kwargs):
        return _asked_of_meta_kernel(asked, args, kwargs)


def _asked_of_meta_kernel(asked: Question, args: list[Any], kwargs: dict[str, Any]) -> Any:
    op = asked.op
    names = argument_names(op)
    kwargs = {k: _to_meta(v) for k, v in kwargs.items()}
    if "device" in names:
        kwargs["device"] = torch.device("meta")
        kwargs.pop("pin_memory", None)
    if "generator" in names[len(args) :]:
        kwargs["generator"] = None
    args = as_meta_kernel_takes(op, _to_meta(args))
    try:
        if op in ON_ACCELERATORS:
            return _map_results(ON_ACCELERATORS[op](*args, **kwargs))
        if op in LIKE_ARGUMENT:
            return _map_results(torch.empty_like(args[LIKE_ARGUMENT[op]]))
        if op in CONTIGUOUS_LIKE_ARGUMENT:
            like = args[CONTIGUOUS_LIKE_ARGUMENT[op]]
            return _map_results(torch.empty_like(like, memory_format=torch.contiguous_format))
        on_cpu = "cuda" not in {s.mesh.device_type for s in asked.leaves if isinstance(s, Spec)}
        if on_cpu and op in REPLACED:
            return _map_results(REPLACED[op](*args, **kwargs))
        arguments = dict(zip(names, args, strict=False)) | kwargs
        results = with_strides(op, arguments, op(*args, **kwargs))
        return _map_results(corrected(op, arguments, results) if on_cpu else results)
    except NotImplementedError as error:
        if "meta" not in str(error).lower():
            raise
        raise DataDependentError(
            f"PyTorch cannot say what {op} returns before it has run: it has no meta kernel.\n"
            "  Fix: call it outside of the jitted function."
        ) from error


def meta_tensor(spec: Spec) -> torch.Tensor:
    """Returns a new meta tensor with the shape, strides, dtype and bits of a spec."""
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    if spec.conj:
        tensor = torch._conj(tensor)  # pyright: ignore[reportPrivateImportUsage]
    if spec.neg:
        tensor = torch._neg_view(tensor)  # pyright: ignore[reportPrivateImportUsage]
    return tensor


def _to_meta(value: Any) -> Any:
    if isinstance(value, Spec):
        return meta_tensor(value)
    if isinstance(value, list):
        return [_to_meta(v) for v in value]
    return torch.device("meta") if isinstance(value, torch.device) else value


def _map_results(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        conj = value.is_conj() if value.is_complex() else False
        offset = int(value.storage_offset())
        return Meta(tuple(value.shape), value.dtype, value.stride(), conj, value.is_neg(), offset)
    if isinstance(value, (list, tuple)):
        return [_map_results(v) for v in value]
    return value
