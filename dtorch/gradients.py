"""Autograd functions for what PyTorch differentiates otherwise when it is given a tensor subclass.

PyTorch would decompose `linear` and `matmul` above dtorch into flattening views and products.
These functions record each as one operation, and give it a backward made of PyTorch's own
kernels on unflattened tensors; on one device the gradients are bit for bit PyTorch's.

The gradient of a product of elements divides by them where none is zero, which PyTorch looks at;
of a subclass it never asks, and takes another way with other roundings. So does the gradient of
the value that a mask fills in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import accelerator_functions
from .custom_ops import fold_mm, masked_sum
from .expert_ops import expert_mlp, expert_mlp_backward, expert_mlp_forward
from .placement import complete
from .tensor import Tensor, place

aten = torch.ops.aten


def _whole(op: Any, *args: Any) -> torch.Tensor:
    """Calls a composite operation so that it is recorded whole, unless it is differentiated."""
    if torch.is_grad_enabled():
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _flattened(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """A copy of an operand where PyTorch makes one, for one product in place of many, or None.

    Source: `should_fold` in ATen's LinearAlgebra.cpp.
    """
    if x.ndim < 3 or not weight.requires_grad:
        return None
    stride, shape = x.stride(), x.shape
    if all(stride[d] == stride[d + 1] * shape[d + 1] for d in range(x.ndim - 2)):
        return None
    return x.clone(memory_format=torch.contiguous_format)


class Linear(torch.autograd.Function):
    """``x @ w.T + b`` with an unflattened backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any, weight: Any, bias: Any) -> Any:
        flattened = None
        if bias is None or not x.is_contiguous():  # with a bias, what is contiguous is one product
            flattened = _flattened(x, weight)
        if flattened is None:
            return _whole(aten.linear.default, x, weight, bias)
        product = _whole(aten.matmul.default, flattened, weight.t())
        return product if bias is None else product + bias

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = _whole(aten.matmul.default, grad, weight) if wants_x else None
        grad_weight = _whole(fold_mm, grad, x) if wants_weight else None
        grad_bias = None
        if ctx.has_bias and wants_bias:
            grad_bias = grad.sum(tuple(range(grad.ndim - 1))) if grad.ndim > 1 else grad
        return grad_x, grad_weight, grad_bias


class Matmul(torch.autograd.Function):
    """``a @ b`` of at least three dims in one of them, with an unflattened backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Any, b: Any) -> Any:
        flattened = _flattened(a, b) if b.ndim == 2 else None
        return _whole(aten.matmul.default, a if flattened is None else flattened, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        a, b = ctx.saved_tensors
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = _whole(aten.matmul.default, grad, b.mT.conj()).sum_to_size(a.shape)
        if ctx.needs_input_grad[1]:
            grad_b = _grad_of_right(a, b, grad)
        return grad_a, grad_b


def _grad_of_right(a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if b.ndim == 2:
        return _whole(fold_mm, a.conj(), grad)
    return _whole(aten.matmul.default, a.mT.conj(), grad).sum_to_size(b.shape)


class ExpertMlp(torch.autograd.Function):
    """A layer of experts that are split over devices, or whose tokens are."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, activation: str
    ) -> Any:
        out, *saved = expert_mlp_forward(x, ids, weights, gate_up, down, activation)
        ctx.save_for_backward(weights, gate_up, down, *saved)
        ctx.activation = activation
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weights, gate_up, down, *saved = ctx.saved_tensors
        found = expert_mlp_backward(*grads, saved, weights, gate_up, down, ctx.activation)
        to_x, to_weights, to_gate_up, to_down = found
        return to_x, None, to_weights, to_gate_up, to_down, None


def _expert_mlp(
    x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, activation: str
) -> torch.Tensor:
    operands = [x, ids, weights, gate_up, down]
    placed = all(isinstance(t, Tensor) for t in operands)
    if placed and len({t.device_mesh for t in operands}) == 1:
        axes = zip(*([p.is_shard() for p in t.placements] for t in operands), strict=True)
        if any(n > 1 and any(split) for n, split in zip(x.device_mesh.shape, axes, strict=True)):
            return ExpertMlp.apply(*operands, activation)
    return expert_mlp(*operands, activation)


class Prod(torch.autograd.Function):
    """The product of all elements, or over a dim."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any, dim: Any, keepdim: Any) -> Any:
        return torch.prod(x) if dim is None else torch.prod(x, dim, keepdim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.dim, ctx.keepdim = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, product = ctx.saved_tensors
        if ctx.dim is not None and not ctx.keepdim:
            grad, product = grad.unsqueeze(ctx.dim), product.unsqueeze(ctx.dim)
        is_zero = x == 0
        divided = grad * (product / torch.where(is_zero, 1, x)).conj()
        whole, dim = (x.reshape(-1), 0) if ctx.dim is None else (x, ctx.dim)
        multiplied = grad * _product_of_others(whole, dim).view_as(x).conj()
        return torch.where(is_zero.any(), multiplied, divided), None, None


def _product_of_others(x: torch.Tensor, dim: int) -> torch.Tensor:
    """For each element of a dim, the product of the others, as PyTorch takes it around zeros."""
    one, count = torch.ones_like(x.narrow(dim, 0, 1)), x.shape[dim] - 1
    before = torch.cat([one, x.narrow(dim, 0, count)], dim).cumprod(dim)
    after = torch.cat([one, x.narrow(dim, 1, count).flip(dim)], dim).cumprod(dim).flip(dim)
    return before * after


def _prod(
    input: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    x = input if dtype is None else input.to(dtype)
    if not x.ndim or not x.numel():
        return torch.prod(x) if dim is None else torch.prod(x, dim, keepdim)
    return Prod.apply(x, dim, keepdim)


class MaskedFill(torch.autograd.Function):
    """A tensor with the value of another, without dims, where a mask is true."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any, mask: Any, value: Any) -> Any:
        return torch.masked_fill(x, mask, value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, mask, _ = inputs
        ctx.save_for_backward(mask)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (mask,) = grads, ctx.saved_tensors
        to_x = grad.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        return to_x, None, MaskedSum.apply(grad, mask)


class MaskedSum(torch.autograd.Function):
    """The sum of the elements where a mask is true."""

    @staticmethod
    def forward(x: Any, mask: Any) -> Any:
        return masked_sum(x, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, mask = inputs
        ctx.shape = x.shape
        ctx.save_for_backward(mask)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (mask,) = grads, ctx.saved_tensors
        return torch.where(mask, grad, 0).expand(ctx.shape), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        (x, mask), (x_dim, mask_dim) = args, in_dims
        x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        if mask_dim is not None:
            mask = mask.movedim(mask_dim, 0)
            mask = mask.reshape(len(mask), *[1] * (x.ndim - mask.ndim), *mask.shape[1:])
        return torch.where(mask, x, 0).flatten(1).sum(1), 0


def _masked_fill(input: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    if not (isinstance(value, torch.Tensor) and value.requires_grad and not value.ndim):
        return torch.masked_fill(input, mask, value)
    return MaskedFill.apply(input, mask, value)


def _masked_fill_(input: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    if not (isinstance(value, torch.Tensor) and value.requires_grad and not value.ndim):
        return input.masked_fill_(mask, value)
    return input.copy_(_masked_fill(input, mask, value))


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
    if weight.ndim != 2 or input.ndim < 2 or _is_autocast(input):
        return torch.nn.functional.linear(input, weight, bias)
    return Linear.apply(input, weight, bias)


def _matmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if not isinstance(other, torch.Tensor) or _is_autocast(input):
        return torch.matmul(input, other)
    if min(input.ndim, other.ndim) < 2:
        return torch.matmul(input, other)
    if max(input.ndim, other.ndim) < 3 or input.ndim == 2:
        return torch.matmul(input, other)
    return Matmul.apply(input, other)


def _is_autocast(tensor: torch.Tensor) -> bool:
    """Whether autocast would cast operands below the function, which must save them cast."""
    return torch.is_autocast_enabled(tensor.device.type)


def _tensor_split(x: Any, indices: Any, dim: int = 0) -> Any:
    """Fetches indices that are a tensor: PyTorch would read the memory of the wrapper."""
    return torch.tensor_split(
        x, indices.to_torch() if isinstance(indices, Tensor) else indices, dim
    )


def in_layout_of(gradient: Any, owner: Any) -> Any:
    """Returns a gradient in the layout of what it belongs to, `Replicate` in place of `Partial`."""
    if not (isinstance(gradient, torch.Tensor) and isinstance(owner, Tensor)):
        return gradient
    layout = owner.device_mesh, complete(owner.placements)
    if not isinstance(gradient, Tensor):  # PyTorch's own zeros, where no gradient flows
        return place(gradient, *layout)
    return gradient.redistribute(*layout)


def _gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad`, each gradient in the layout of its input."""
    found: Any = torch.autograd.grad(outputs, inputs, *args, **kwargs)
    if kwargs.get("is_grads_batched"):
        return found
    if isinstance(inputs, dict):
        return {k: in_layout_of(found[k], v) for k, v in inputs.items()}
    owners = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    return tuple(map(in_layout_of, found, owners))


SUBSTITUTES: dict[Any, Callable[..., torch.Tensor]] = {
    torch.nn.functional.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    expert_mlp: _expert_mlp,
    torch.prod: _prod,
    torch.Tensor.prod: _prod,
    torch.masked_fill: _masked_fill,
    torch.Tensor.masked_fill: _masked_fill,
    torch.Tensor.masked_fill_: _masked_fill_,
    torch.tensor_split: _tensor_split,
    torch.Tensor.tensor_split: _tensor_split,
    **accelerator_functions.SUBSTITUTES,
}
"""What to call in place of a torch function when an argument requires grad."""

DIRECT_SUBSTITUTES: dict[Any, Callable[..., Any]] = {torch.autograd.grad: _gradients}
"""What to call in place of a function that does not compute with its arguments."""


def requires_grad(args: Iterable[Any]) -> bool:
    """Returns whether autograd would record a call on these arguments."""
    return torch.is_grad_enabled() and any(
        isinstance(a, torch.Tensor) and a.requires_grad for a in args
    )
