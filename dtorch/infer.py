"""Inference: the shapes, dtypes and strides of an operation's results, from its meta kernel.

Takes an operation whose tensor arguments are `Spec`s; gives a `Meta` for each result. Errors
of the meta kernel (shapes that do not fit, a refused dtype) are the operation's own and reach
the caller at the call.
"""

from __future__ import annotations

from typing import Any

import torch

from .rules import Meta
from .spec import Spec


def infer(op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns the results of an operation, each tensor as a `Meta`.

    Args:
        op: The operation.
        args: Its positional arguments, tensors as `Spec`s.
        kwargs: Its keyword arguments, likewise.
    """
    names = [a.name for a in op._schema.arguments]
    kwargs = {k: _to_meta(v) for k, v in kwargs.items()}
    if "device" in names:
        kwargs["device"] = torch.device("meta")
        kwargs.pop("pin_memory", None)
    if "generator" in names[len(args) :]:
        kwargs["generator"] = None
    return _map_results(op(*_to_meta(args), **kwargs))


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
    if isinstance(value, (list, tuple)):
        return [_to_meta(v) for v in value]
    return torch.device("meta") if isinstance(value, torch.device) else value


def _map_results(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        conj = value.is_conj() if value.is_complex() else False
        return Meta(tuple(value.shape), value.dtype, value.stride(), conj, value.is_neg())
    if isinstance(value, (list, tuple)):
        return [_map_results(v) for v in value]
    return value
