"""Recurrent layers: whole. Each step reads the one before, and the kernel has all steps in a call.

Of PyTorch's recurrent layers only the LSTM on CPUs has an operation of its own; the others are made
of matrix products and elementwise operations, step by step.
"""

from __future__ import annotations

import dataclasses

import torch

from ..custom_ops import mkldnn_rnn_layer
from ..lowering import LocalContext
from .sharding import OpCall, Sharding, replicated, rule

aten = torch.ops.aten


@rule(aten.mkldnn_rnn_layer)
def rnn_layer(call: OpCall) -> Sharding:
    """Whole."""
    return dataclasses.replace(replicated(call), localize=_with_workspace)


def _with_workspace(context: LocalContext) -> None:
    context.emit(mkldnn_rnn_layer, *context.args, outputs=context.outputs, **context.kwargs)
