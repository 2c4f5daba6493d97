"""Recurrent layers: each step reads the one before, so at most the batch is split.

On CPUs only the LSTM has an operation of its own, which is whole; the others are made of matrix
products and elementwise operations, step by step. On GPUs cuDNN has all layers and all steps of any
of them in a call, and what is not cuDNN's has a kernel for each cell.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..custom_ops import cudnn_rnn as cudnn_rnn_of_weights
from ..custom_ops import mkldnn_rnn_layer
from ..lowering import LocalContext
from .sharding import Dims, OpCall, Sharding, assign, replicated, rule, split_axes

aten = torch.ops.aten


@rule(aten.mkldnn_rnn_layer)
def rnn_layer(call: OpCall) -> Sharding:
    """Whole."""
    return dataclasses.replace(replicated(call), localize=_with_workspace)


def _with_workspace(context: LocalContext) -> None:
    context.emit(mkldnn_rnn_layer, *context.args, outputs=context.outputs, **context.kwargs)


@rule(aten._cudnn_rnn)
def cudnn_rnn(call: OpCall) -> Sharding:
    """``b`` of input, states and output, whose place `batch_first` says; packed sequences whole.

    What cuDNN has reserved for its backward is of the same samples.
    """
    if call["batch_sizes"]:
        return dataclasses.replace(replicated(call), localize=_with_flat_weights)
    steps = _steps(call)
    outputs = [steps, _STATE, _STATE, ("b",) if call["train"] else (None,), (None,)]
    inputs = {"input": steps, "hx": _STATE, "cx": _STATE}
    return assign(call, inputs, outputs, filled=frozenset({"b"}), localize=_with_flat_weights)


@rule(aten._cudnn_rnn_backward)
def cudnn_rnn_backward(call: OpCall) -> Sharding:
    """The gradients of input and states, and of the weights, partial sums over ``b``."""
    if call["batch_sizes"]:
        return dataclasses.replace(replicated(call), localize=_with_contiguous_states)
    steps = _steps(call)
    inputs: dict[str, Dims] = dict.fromkeys(("input", "output", "grad_output"), steps)
    inputs |= dict.fromkeys(("hx", "cx", "grad_hy", "grad_cy"), _STATE)
    inputs["reserve"] = ("b",)
    states = [_STATE] if call["cx"] is None else [_STATE, _STATE]
    return assign(
        call,
        inputs,
        [steps, *states],
        reduce={"b": "sum"},
        filled=frozenset({"b"}),
        fixed={"b": split_axes(call["reserve"])},
        localize=_with_contiguous_states,
    )


_STATE: Dims = (None, "b", None)


def _steps(call: OpCall) -> Dims:
    return ("b", None, None) if call["batch_first"] else _STATE


def _with_flat_weights(context: LocalContext) -> None:
    context.emit_with(cudnn_rnn_of_weights, **_contiguous_states(context))


def _with_contiguous_states(context: LocalContext) -> None:
    context.emit_with(**_contiguous_states(context))


def _contiguous_states(context: LocalContext) -> dict[str, Any]:
    """The states, which the kernel asks to be contiguous: a part of a whole that is may not be."""
    states = {name: context.argument(name) for name in ("hx", "cx")}
    return {
        name: context.emit(aten.contiguous.default, state)
        for name, state in states.items()
        if state is not None
    }


_BY_SAMPLE: Dims = ("b", None)


@rule(aten._thnn_fused_lstm_cell, aten._thnn_fused_gru_cell)
def fused_cell(call: OpCall) -> Sharding:
    """``b 1`` of gates, states and workspace."""
    names = ("input_gates", "hidden_gates", "cx", "hx")
    return assign(call, dict.fromkeys(names, _BY_SAMPLE), [_BY_SAMPLE] * 3, filled=frozenset({"b"}))


@rule(aten._thnn_fused_lstm_cell_backward_impl, aten._thnn_fused_gru_cell_backward)
def fused_cell_backward(call: OpCall) -> Sharding:
    """The gradients of gates and states, and of the biases, partial sums over ``b``."""
    names = ("grad_hy", "grad_cy", "cx", "cy", "workspace")
    outputs = [_BY_SAMPLE if len(m.shape) == 2 else (None,) for m in call.results]
    return assign(
        call,
        dict.fromkeys(names, _BY_SAMPLE),
        outputs,
        reduce={"b": "sum"},
        filled=frozenset({"b"}),
    )
