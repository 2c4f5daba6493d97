"""The operations that dtorch adds to PyTorch's.

PyTorch's backward of a linear layer flattens batch and sequence before it multiplies, which
would gather a tensor that is sharded over both. `fold_mm` is that product with its dims kept
apart; every device flattens its own shard.

`mkldnn_rnn_layer` is PyTorch's LSTM layer, whose kernel keeps what its backward reads only where
gradients are recorded, which workers never do.

`cudnn_batch_norm` and `cudnn_rnn` are kernels of cuDNN's without what they do to their arguments:
the one returns the running statistics instead of changing them, the other puts the weights into
the one piece of memory where cuDNN reads them, which PyTorch does to modules beforehand.

PyTorch checks what it has factored by an operation without results. `checked` gives what it has
checked, so that a failure is one of the values that are computed with it.

The gradient of what `masked_fill` fills with is the sum of the selected elements: `masked_sum`,
whose shape is known where that of the selection is not.

`attend_block` is one step of ring attention: every piece of the queries attends to one piece of
the keys and values, and what it gives is merged with what the earlier steps gave. Which piece that
is, and what of it a causal mask leaves, differs between devices: the rule writes what each runs.
"""

from __future__ import annotations

from typing import Any

import torch

_library = torch.library.Library("dtorch", "DEF")
_library.define("fold_mm(Tensor left, Tensor right) -> Tensor")


def _fold_mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.mm(left.flatten(0, -2).t(), right.flatten(0, -2))


_library.impl("fold_mm", _fold_mm, "CompositeImplicitAutograd")

fold_mm = torch.ops.dtorch.fold_mm.default
"""``... m, ... k -> m k``: the matrix product over all leading dims."""


_library.define(str(torch.ops.aten.mkldnn_rnn_layer.default._schema).removeprefix("aten::"))


def _mkldnn_rnn_layer(*args: Any) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


_library.impl("mkldnn_rnn_layer", _mkldnn_rnn_layer, "CompositeImplicitAutograd")

mkldnn_rnn_layer = torch.ops.dtorch.mkldnn_rnn_layer.default
"""The aten operation of that name, with its workspace."""


_library.define(
    "cudnn_batch_norm(Tensor input, Tensor weight, Tensor? bias, Tensor? running_mean, "
    "Tensor? running_var, float exponential_average_factor, float epsilon) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _cudnn_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    mean, var = (None if t is None else t.clone() for t in (mean, var))
    results = torch.ops.aten.cudnn_batch_norm(x, weight, bias, mean, var, True, momentum, eps)
    return *results, *(weight.new_empty(0) if t is None else t for t in (mean, var))


_library.impl("cudnn_batch_norm", _cudnn_batch_norm, "CompositeExplicitAutograd")

cudnn_batch_norm = torch.ops.dtorch.cudnn_batch_norm.default
"""The aten operation of that name in training, and after its results the running statistics."""


_library.define(str(torch.ops.aten._cudnn_rnn.default._schema).removeprefix("aten::_"))


def _cudnn_rnn(
    x: torch.Tensor, weight: list[torch.Tensor], stride: int, buffer: Any, *rest: Any
) -> tuple[torch.Tensor, ...]:
    # What is flattened becomes a view of the buffer: not the tensors that others hold.
    weight = [torch.ops.aten.set_(w.new_empty(0), w) for w in weight]
    _, _, mode, hidden_size, proj_size, num_layers, batch_first, _, _, bidirectional, *_ = rest
    sizes = x.shape[-1], mode, hidden_size, proj_size, num_layers, batch_first, bidirectional
    buffer = torch.ops.aten._cudnn_rnn_flatten_weight(weight, stride, *sizes)
    return torch.ops.aten._cudnn_rnn(x, weight, stride, buffer, *rest)


_library.impl("cudnn_rnn", _cudnn_rnn, "CompositeImplicitAutograd")

cudnn_rnn = torch.ops.dtorch.cudnn_rnn.default
"""``aten._cudnn_rnn`` of weights that lie anywhere."""


_library.define("checked(Tensor[] values, Tensor info, str name, bool is_matrix) -> Tensor[]")


def _checked(
    values: list[torch.Tensor], info: torch.Tensor, name: str, is_matrix: bool
) -> list[torch.Tensor]:
    torch.ops.aten._linalg_check_errors(info, name, is_matrix=is_matrix)
    return values


_library.impl("checked", _checked, "CompositeImplicitAutograd")

checked = torch.ops.dtorch.checked.default
"""The values, where `info` says that they have been computed; otherwise PyTorch's error."""

_library.define("masked_sum(Tensor input, Tensor mask) -> Tensor")


def _masked_sum(input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return input.masked_select(mask).sum()


_library.impl("masked_sum", _masked_sum, "CompositeExplicitAutograd")
_library.impl("masked_sum", lambda input, mask: input.new_empty(()), "Meta")

masked_sum = torch.ops.dtorch.masked_sum.default
"""The sum of the elements where the mask, which is broadcast, is true."""

_library.define(
    "attend_block(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? out, "
    "Tensor? logsumexp, int num_pieces, int step, str kernel, bool is_causal, float? scale, "
    "int[] query_ranges, int[] key_ranges) -> (Tensor, Tensor)"
)
_library.define(
    "attend_block_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, "
    "Tensor out, Tensor logsumexp, Tensor? grad_query, Tensor? grad_key, Tensor? grad_value, "
    "int num_pieces, int step, str kernel, bool is_causal, float? scale, int[] query_ranges, "
    "int[] key_ranges) -> (Tensor, Tensor, Tensor)"
)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, dtype = (*query.shape[:3], value.shape[3]), _wide(query.dtype)
    return query.new_empty(shape, dtype=dtype), query.new_empty(query.shape[:3], dtype=dtype)


def _attended_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(t.new_empty(t.shape, dtype=_wide(t.dtype)) for t in (query, key, value))


_library.impl("attend_block", _attended, "Meta")
_library.impl("attend_block_backward", _attended_backward, "Meta")

attend_block = torch.ops.dtorch.attend_block.default
"""One step of ring attention: what was attended to so far, and its log-sum-exp."""

attend_block_backward = torch.ops.dtorch.attend_block_backward.default
"""One step of its backward: the gradients so far of queries, and of the present keys and values."""
