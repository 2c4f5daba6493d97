"""What kernels of accelerators return where PyTorch's meta kernels do not say, as meta tensors.

Some have no meta kernel, or one that refuses what the kernel takes. Others of cuDNN's return bytes
that only their backward reads and whose number only cuDNN knows, and meta kernels say that there
are none. Here they are as many as the channels or the samples of a batch: then their layout says
with what they go, and the backward is run on the devices where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from .custom_ops import cudnn_batch_norm
from .program import Apply, Program, refs

aten = torch.ops.aten
_Results = tuple[Any, ...]


def _in_format(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=suggest_memory_format(x))


def _batch_norm(
    x: Tensor, weight: Tensor, bias: Any, mean: Any, var: Any, training: bool, *rest: Any
) -> _Results:
    """In evaluation nothing is saved."""
    saved = x.shape[1] if training else 0
    statistics = (weight.new_empty(saved) for _ in range(2))
    return _in_format(x), *statistics, x.new_empty(saved, dtype=torch.uint8)


def _updating_batch_norm(
    x: Tensor, weight: Tensor, bias: Any, mean: Any, var: Any, *rest: Any
) -> _Results:
    running = (weight.new_empty(0) if t is None else torch.empty_like(t) for t in (mean, var))
    return *_batch_norm(x, weight, bias, mean, var, True), *running


def _batch_norm_backward(x: Tensor, grad: Tensor, weight: Tensor, *rest: Any) -> _Results:
    return _in_format(x), torch.empty_like(weight), torch.empty_like(weight)


def _rnn(
    x: Tensor,
    weight: Sequence[Tensor],
    stride: int,
    buffer: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    state: Any = None,
) -> _Results:
    size = (proj_size or hidden_size) * (2 if bidirectional else 1)
    batch = hx.shape[1]
    if batch_sizes or not batch_first:
        output = x.new_empty(*x.shape[:-1], size)
    else:
        output = x.new_empty(x.shape[1], x.shape[0], size).transpose(0, 1)
    if buffer is None:
        buffer = weight[0].new_empty(sum(math.prod(w.shape) for w in weight))
    cy = hx.new_empty(0) if cx is None else hx.new_empty(cx.shape)
    reserve = x.new_empty(batch if train else 0, dtype=torch.uint8)
    return output, hx.new_empty(hx.shape), cy, reserve, buffer


def _rnn_backward(*args: Any) -> _Results:
    x, weight, _, _, hx, cx, *_ = args
    batch_first, batch_sizes, (*_, wants_weight) = args[14], args[18], args[-1]
    if batch_first and not batch_sizes:
        grad = x.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1)
    else:
        grad = x.new_empty(x.shape)
    of_weight = [w.new_empty(w.shape) for w in weight] if wants_weight else []
    return grad, hx.new_empty(hx.shape), None if cx is None else cx.new_empty(cx.shape), of_weight


def _lstm_cell(of_input: Tensor, of_hidden: Tensor, cx: Tensor, *biases: Any) -> _Results:
    """PyTorch's asks for biases."""
    _check_gates(of_input, of_hidden, cx, 4)
    return cx.new_empty(cx.shape), cx.new_empty(cx.shape), of_input.new_empty(of_input.shape)


def _gru_cell(of_input: Tensor, of_hidden: Tensor, hx: Tensor, *biases: Any) -> _Results:
    _check_gates(of_input, of_hidden, hx, 3)
    return hx.new_empty(hx.shape), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _check_gates(of_input: Tensor, of_hidden: Tensor, state: Tensor, count: int) -> None:
    if not of_input.shape == of_hidden.shape == (state.shape[0], count * state.shape[1]):
        raise RuntimeError(
            f"gates of shapes {list(of_input.shape)} and {list(of_hidden.shape)} do not fit a "
            f"state of shape {list(state.shape)}"
        )


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> _Results:
    batch, size = grad.shape
    gates = [workspace.new_empty(batch, 3 * size) for _ in range(2)]
    biases = [workspace.new_empty(3 * size) if has_bias else None for _ in range(2)]
    return *gates, grad.new_empty(grad.shape), *biases


ON_ACCELERATORS: dict[torch._ops.OpOverload, Callable[..., _Results]] = {
    aten.cudnn_batch_norm.default: _batch_norm,
    cudnn_batch_norm: _updating_batch_norm,
    aten.cudnn_batch_norm_backward.default: _batch_norm_backward,
    aten._cudnn_rnn.default: _rnn,
    aten._cudnn_rnn_backward.default: _rnn_backward,
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}
"""Operations that only accelerators have, and what says the results."""

# The arguments and results whose shapes only kernels know.
_OPAQUE: dict[torch._ops.OpOverload, tuple[tuple[int, ...], slice]] = {
    cudnn_batch_norm: ((), slice(3, 4)),
    aten.cudnn_batch_norm_backward.default: ((8,), slice(0)),
    aten._cudnn_rnn.default: ((), slice(3, None)),
    aten._cudnn_rnn_backward.default: ((3, 20), slice(0)),
}


def opaque_values(program: Program) -> set[int]:
    """Returns the values of a program that only kernels read, in shapes that only they know."""
    found: set[int] = set()
    for instruction in program.instructions:
        if not isinstance(instruction, Apply):
            continue
        if instruction.op is aten.clone.default:
            found.update(instruction.results() if found.issuperset(instruction.inputs()) else ())
        args, results = _OPAQUE.get(instruction.op, ((), slice(0)))
        found.update(r.id for r in refs([instruction.args[i] for i in args]))
        found.update(v for v in instruction.outputs[results] if v is not None)
    return found
