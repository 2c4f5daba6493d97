"""ATen operations that a trace treats in a way of their own: no sharding rule applies to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import functionalization
from .custom_ops import cudnn_batch_norm
from .errors import MutationError
from .program import Apply
from .scalars import concrete
from .tensor import Tensor

if TYPE_CHECKING:
    from .tracer import Tracer

aten = torch.ops.aten


def _alias(tracer: Tracer, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tracer.alias(args[0])


def _itself(tracer: Tracer, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _fresh(tracer: Tracer, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    return tensor if isinstance(tensor, Tensor) else tracer.constant(tensor)


def _copied(tracer: Tracer, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tracer.record(aten.clone.default, args, {})


def _item(tracer: Tracer, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = _constant_value(tracer, tracer.read(tracer.lift(args[0])))
    if value is None:
        raise tracer.lift(args[0])._no_value("the value")
    return op(value, *args[1:], **kwargs)


def _constant_value(tracer: Tracer, value: int) -> torch.Tensor | None:
    """The value of what depends on constants and factories only, or None for anything else."""
    if value in tracer.builder.inputs:
        source = tracer.sources[tracer.builder.inputs.index(value)]
        return source.item.detach() if source.kind == "constant" else None
    instruction = tracer.builder.producer(value)
    if not isinstance(instruction, Apply):
        return None if instruction is None else _constant_value(tracer, instruction.input)
    if instruction.draws is not None or len(instruction.outputs) != 1:
        return None
    operands = {v: _constant_value(tracer, v) for v in instruction.inputs()}
    if any(v is None for v in operands.values()):
        return None
    fill = functionalization.fill_refs(operands)
    with torch.device("cpu"):
        kwargs = {k: fill(v) for k, v in instruction.kwargs if k != "device"}
        return instruction.op(*fill(instruction.args), **kwargs)


def _choose_attention(
    tracer: Tracer, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Asks PyTorch which attention kernel it would pick for tensors of these shapes."""

    def unfilled(tensor: torch.Tensor) -> torch.Tensor:
        spec = tracer.lift(tensor)._spec
        device = spec.mesh.torch_device()
        made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        return made.requires_grad_(tensor.requires_grad)

    named = {k: functionalization.map_tensors(v, unfilled) for k, v in kwargs.items()}
    return op(*concrete(functionalization.map_tensors(args, unfilled)), **named)


def _yes(tracer: Tracer, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


def _batch_norm(tracer: Tracer, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The running statistics are changed in place, which the old operation's schema hides."""
    *operands, mean, variance, training, momentum, eps = args
    if not training or mean is None:
        return tracer.record(op, args, kwargs)
    _refuse_shared(tracer, operands, (mean, variance))
    legit = aten._native_batch_norm_legit.default
    return tracer.dispatch(legit, (*operands, mean, variance, training, momentum, eps), {})


def _cudnn_batch_norm(
    tracer: Tracer, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """As `_batch_norm`."""
    *operands, mean, variance, training, momentum, eps = args
    if not training:
        return tracer.record(op, args, kwargs)
    running = () if mean is None else (mean, variance)
    _refuse_shared(tracer, operands, running)
    *results, new_mean, new_variance = tracer.values(
        cudnn_batch_norm, (*operands, mean, variance, momentum, eps), {}
    )
    for tensor, value in zip(running, (new_mean, new_variance), strict=False):
        tracer.write(tracer.lift(tensor), value)
    return tuple(tracer.wrap(value) for value in results)


def _refuse_shared(tracer: Tracer, read: Sequence[Any], written: Sequence[Any]) -> None:
    """Refuses running statistics that are also read: a kernel may use them before or after."""
    held = [tracer.lift(t)._storage for t in (*written, *read) if t is not None]
    if any(held.count(storage) > 1 for storage in held[: len(written)]):
        raise MutationError(
            "batch normalisation changes running statistics in place that it is also given under "
            "another name.\n  Fix: pass them once, or a clone()."
        )


def _check_errors(tracer: Tracer, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Lets the devices check a factorization where it has run; PyTorch would wait for it."""
    info, name = args
    if not tracer.builder.check(tracer.read(tracer.lift(info)), name, kwargs["is_matrix"]):
        raise tracer.lift(info)._no_value("the value")


def _refuse_sparse(tracer: Tracer, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise NotImplementedError(
        f"a sparse tensor of shape {list(args[2])} would be made, and distributed tensors are "
        "dense.\n  Fix: if it is the gradient of an embedding, torch.nn.Embedding(..., "
        "sparse=False), which is the default; else the dense form."
    )


SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.detach_.default: _itself,
    aten.lift_fresh.default: _fresh,
    aten.lift.default: _fresh,
    aten.lift_fresh_copy.default: _copied,
    aten._local_scalar_dense.default: _item,
    aten.item.default: _item,
    aten.is_nonzero.default: _item,
    aten._fused_sdp_choice.default: _choose_attention,
    aten._has_compatible_shallow_copy_type.default: _yes,
    aten.native_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    aten._linalg_check_errors.default: _check_errors,
    aten._sparse_coo_tensor_with_dims_and_tensors.default: _refuse_sparse,
}
