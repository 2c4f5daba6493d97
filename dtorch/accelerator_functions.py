"""Functions of PyTorch that do on a GPU what a trace cannot follow, and what is called in place.

Around the recurrent layers of cuDNN, PyTorch looks where the weights lie in memory, and keeps a
generator of its own for each GPU. What is traced has no memory, so the operation of ATen's is
called with the weights as they are.

The kernels of attention draw what dropout drops themselves, from a generator that no program can
give them. So an attention with dropout is products, a softmax and a dropout, as on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def takes_cudnn(x: torch.Tensor) -> bool:
    """Returns whether PyTorch gives the recurrent layers of a tensor to cuDNN."""
    if not torch.cudnn_is_acceptable(x):
        return False
    return x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) >= (8, 0)


def _layer(function: Callable[..., Any], mode: int) -> Callable[..., Any]:
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or not takes_cudnn(x):
            return function(x, *args, **kwargs)
        is_packed = not isinstance(args[2], bool)  # whether there are weights
        sizes = args[0].tolist() if is_packed else []
        states, weights, has_biases, num_layers, dropout, train, both, *rest = args[is_packed:]
        states = list(states) if isinstance(states, (list, tuple)) else [states]
        x, weights, states = _as_autocast(x, list(weights), states)
        hx, cx = states if len(states) == 2 else (*states, None)
        hidden_size, proj_size = hx.shape[2], 0
        if cx is not None and cx.shape[2] != hidden_size:
            hidden_size, proj_size = cx.shape[2], hidden_size
        stride = (4 if has_biases else 2) + (proj_size != 0)
        settings = hidden_size, proj_size, num_layers, bool(rest and rest[0])
        dropout = dropout if num_layers > 1 else 0.0  # it is between layers
        with torch.autocast(x.device.type, enabled=False):
            output, hy, cy, *_ = aten._cudnn_rnn.default(
                x, weights, stride, None, hx, cx, mode, *settings, dropout, train, both, sizes, None
            )
        return (output, hy) if cx is None else (output, hy, cy)

    return call


def _as_autocast(x: Any, weights: list[Any], states: list[Any]) -> tuple[Any, list[Any], list[Any]]:
    """The operands in the dtype of autocast, where it is on."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weights, states
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), [w.to(dtype) for w in weights], [s.to(dtype) for s in states]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """With dropout, by products and a softmax, where a kernel would draw what it drops itself."""
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    if not dropout_p or not _has_fused_dropout(query):
        return torch.nn.functional.scaled_dot_product_attention(*given, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = zeros.masked_fill(attn_mask.logical_not(), -math.inf)
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    return aten._scaled_dot_product_attention_math.default(*given, **options)[0]


def _has_fused_dropout(query: torch.Tensor) -> bool:
    """Whether PyTorch may choose such a kernel: on the CPU it has none."""
    return query.device.type != "cpu"


SUBSTITUTES: dict[Any, Callable[..., Any]] = {
    torch.rnn_relu: _layer(torch.rnn_relu, 0),
    torch.rnn_tanh: _layer(torch.rnn_tanh, 1),
    torch.lstm: _layer(torch.lstm, 2),
    torch.gru: _layer(torch.gru, 3),
    torch.nn.functional.scaled_dot_product_attention: _attention,
}
"""What to call in place of a function; layers have the numbers that cuDNN has for them."""
