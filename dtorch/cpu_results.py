"""What PyTorch's CPU kernels return where its meta kernels say otherwise, or nothing.

Shape inference asks meta kernels. Those of a few operations describe the CUDA kernel, or do not
exist; here is what the CPU kernel of torch 2.13 gives, as meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .elementwise import strides

aten = torch.ops.aten
_Results = tuple[Any, ...]

LIKE_ARGUMENT = {
    aten._standard_gamma_grad.default: 0,
    aten._dirichlet_grad.default: 0,
    aten._masked_softmax.default: 0,
    aten._masked_softmax_backward.default: 0,
    aten.binomial.default: 0,
}
"""Operations that have no meta kernel, and the argument that the result is like."""

CONTIGUOUS_LIKE_ARGUMENT = {
    aten.multi_margin_loss_backward.default: 1,
    aten.multilabel_margin_loss_backward.default: 1,
    aten.fractional_max_pool3d_backward.default: 1,
    aten._ctc_loss_backward.default: 1,
    aten._ctc_loss_backward.Tensor: 1,
}
"""The same, and the result is contiguous."""


def as_meta_kernel_takes(op: torch._ops.OpOverload, args: list[Any]) -> list[Any]:
    """Returns arguments that a meta kernel takes, for those that only the CPU kernel does.

    Args:
        op: The operation.
        args: Its positional arguments, meta tensors among them.

    Raises:
        TypeError: The CPU kernel does not take them, although the meta kernel may.
    """
    change = _CHANGES.get(op)
    return args if change is None else change(*args)


def _with_long_target(x: Tensor, target: Tensor, *rest: Any) -> list[Any]:
    """The classes may be bytes."""
    return [x, target.long() if target.dtype == torch.uint8 else target, *rest]


def _with_long_target_after(grad: Tensor, *rest: Any) -> list[Any]:
    return [grad, *_with_long_target(*rest)]


def _with_whole_indices(weight: Tensor, indices: Tensor, *rest: Any) -> list[Any]:
    """The meta kernel of torch 2.11 takes any."""
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices are int32 or int64, not {indices.dtype}")
    return [weight, indices, *rest]


def _norm_of_some(x: Tensor, ord: float = 2, dim: Any = None, *rest: Any) -> list[Any]:
    """A norm that no elements have is one of none if only the other dims are empty."""
    dims = [] if dim is None else dim if isinstance(dim, (list, tuple)) else [dim]
    is_of_some = bool(dims) and all(x.shape[d] for d in dims if -x.ndim <= d < x.ndim)
    return [x, 2 if ord < 0 and is_of_some else ord, dim, *rest]


def _with_scalars_on_cpu(x: Any, first: Any, second: Any, scalars: Tensor) -> list[Any]:
    """The scalars are read, whatever the device of the tensors."""
    return [x, first, second, torch.ones(scalars.shape, dtype=scalars.dtype, device="cpu")]


_CHANGES: dict[torch._ops.OpOverload, Callable[..., list[Any]]] = {
    aten.linalg_vector_norm.default: _norm_of_some,
    aten._foreach_addcdiv.Tensor: _with_scalars_on_cpu,
    aten._foreach_addcdiv_.Tensor: _with_scalars_on_cpu,
    aten._foreach_addcmul.Tensor: _with_scalars_on_cpu,
    aten._foreach_addcmul_.Tensor: _with_scalars_on_cpu,
    aten.embedding.default: _with_whole_indices,
    aten.nll_loss_forward.default: _with_long_target,
    aten.nll_loss2d_forward.default: _with_long_target,
    aten.nll_loss_backward.default: _with_long_target_after,
    aten.nll_loss2d_backward.default: _with_long_target_after,
}


def grouped_mm(rows: Tensor, matrices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Returns the result of `aten._grouped_mm`, whose meta kernel takes bfloat16 alone.

    The last dim is padded to 16 bytes.
    """
    shape = [*rows.shape[:-1], matrices.shape[-1]]
    if matrices.ndim == 2:
        groups = (args[0] if args else kwargs["offs"]).shape[0]
        shape = [groups, *shape] if rows.ndim == 2 else shape[1:]
    unit = 16 // rows.element_size()
    padded = -(-shape[-1] // unit) * unit
    stride = [shape[-2] * padded, padded, 1][-len(shape) :]
    return rows.new_empty_strided(shape, stride)


def _fft_c2c(x: Tensor, dims: list[int], *args: Any, **kwargs: Any) -> Tensor:
    if not dims:
        return torch.empty_like(x)
    return _transformed(x.dtype, x.shape, x.stride(), _by_stride(x, dims))


def _fft_r2c(x: Tensor, dims: list[int], normalization: int, onesided: bool) -> Tensor:
    *others, last = dims
    shape = list(x.shape)
    if onesided:
        shape[last] = shape[last] // 2 + 1
    return _transformed(x.dtype.to_complex(), shape, x.stride(), [*_by_stride(x, others), last])


def _fft_c2r(x: Tensor, dims: list[int], normalization: int, last_dim_size: int) -> Tensor:
    """The last dim is transformed after the others."""
    *others, last = dims
    between = _fft_c2c(x, others) if others else x
    shape = list(x.shape)
    shape[last] = last_dim_size
    return _transformed(x.dtype.to_real(), shape, between.stride(), [last])


def _by_stride(x: Tensor, dims: Sequence[int]) -> list[int]:
    return sorted(dims, key=x.stride, reverse=True)


def _transformed(
    dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], dims: Sequence[int]
) -> Tensor:
    """A Fourier transform of a tensor of some strides: MKL puts its dims, in order, innermost.

    The others are in the order of their strides. What std::partition does to those whose strides
    are alike is done here too.
    """
    if not torch.backends.mkl.is_available():
        return torch.empty(shape, dtype=dtype, device="meta")
    num_others = len(shape) - len(dims)
    moved = (d for d in reversed(range(num_others, len(shape))) if d not in dims)
    others = [next(moved) if d in dims else d for d in range(num_others)]
    order = [*sorted(others, key=lambda d: stride[d], reverse=True), *dims]
    in_order = torch.empty([shape[d] for d in order], dtype=dtype, device="meta")
    return in_order.permute([order.index(d) for d in range(len(shape))])


REPLACED: dict[torch._ops.OpOverload, Callable[..., Tensor]] = {
    aten._fft_c2c.default: _fft_c2c,
    aten._fft_c2r.default: _fft_c2r,
    aten._fft_r2c.default: _fft_r2c,
    aten._grouped_mm.default: grouped_mm,
}
"""Operations whose meta kernels refuse what the CPU kernel takes, and what says the result.

Those of Fourier transforms do in torch 2.11.
"""


def corrected(op: torch._ops.OpOverload, arguments: dict[str, Any], results: Any) -> Any:
    """Returns the results of an operation's meta kernel as its CPU kernel gives them.

    Args:
        op: The operation.
        arguments: Its arguments by name, meta tensors among them.
        results: What the meta kernel has returned.
    """
    correction = _CORRECTIONS.get(op)
    if correction is None:
        return results
    if isinstance(results, Tensor):
        return correction(arguments, (results,))[0]
    return correction(arguments, tuple(results))


_PARAMETERS = ("weight", "bias", "running_mean", "running_var")


def _statistics_dtype(arguments: dict[str, Any]) -> torch.dtype:
    """The dtype of the input, unless a parameter has another: then float32."""
    given = [arguments[n] for n in _PARAMETERS if arguments.get(n) is not None]
    dtype = arguments["input"].dtype
    half = dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half and any(p.dtype != dtype for p in given) else dtype


def _batch_norm(arguments: dict[str, Any], results: _Results) -> _Results:
    """In evaluation no statistics are saved."""
    dtype = _statistics_dtype(arguments)
    first, mean, scale, *rest = results
    first = _in_format(first, arguments["input"])
    saved = [s if arguments.get("training", True) else s.new_empty(0) for s in (mean, scale)]
    return (first, *(s.to(dtype) for s in saved), *rest)


def _batch_norm_backward(arguments: dict[str, Any], results: _Results) -> _Results:
    """What is not asked for is no tensor."""
    return tuple(
        r if wanted else None for r, wanted in zip(results, arguments["output_mask"], strict=True)
    )


def _layer_norm(arguments: dict[str, Any], results: _Results) -> _Results:
    first, *statistics = results
    return (first, *(s.to(_statistics_dtype(arguments)) for s in statistics))


def _embedding_bag(arguments: dict[str, Any], results: _Results) -> _Results:
    """A plain sum needs no map from rows to bags; the last offset may be no bag."""
    rows, bags, sizes, maxima = results
    sizes = sizes.new_empty(rows.shape[:1])
    sums, weight = arguments.get("mode", 0) == 0, arguments["weight"]
    is_fast = weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
    is_fast = is_fast and weight.stride(1) == 1
    if sums and is_fast and arguments.get("padding_idx", -1) < 0:
        bags = bags.new_empty(0)
    return rows, bags, sizes, maxima if maxima.ndim == 2 else maxima.new_empty(sizes.shape)


def _asked_for_cpu(op: torch._ops.OpOverload) -> Callable[[dict[str, Any], _Results], _Results]:
    """The meta kernel knows of the CPU's strides, and tells a tensor that says it is there."""

    def with_strides(arguments: dict[str, Any], results: _Results) -> _Results:
        with FakeTensorMode() as mode:

            def on_cpu(value: Any) -> Any:
                is_tensor = isinstance(value, Tensor)
                return FakeTensor(mode, value, torch.device("cpu")) if is_tensor else value

            found = op(**{name: on_cpu(value) for name, value in arguments.items()})
        given = found if isinstance(found, tuple) else (found,)
        return tuple(
            f if f is None else r.new_empty_strided(f.shape, f.stride())
            for r, f in zip(results, given, strict=True)
        )

    return with_strides


def _normalized(arguments: dict[str, Any], results: _Results) -> _Results:
    """What is normalised keeps its memory format."""
    first, *statistics = results
    return (_in_format(first, arguments["input"]), *statistics)


def _in_format(result: Tensor, model: Tensor) -> Tensor:
    """A result with the strides of the memory format of a tensor, also in dims of size one."""
    return torch.empty_like(result, memory_format=suggest_memory_format(model))


def _in_format_of(place: int) -> Callable[[dict[str, Any], _Results], _Results]:
    """The result has the memory format of an argument, by its place."""

    def with_strides(arguments: dict[str, Any], results: _Results) -> _Results:
        model = list(arguments.values())[place]
        return tuple(_in_format(r, model) for r in results)

    return with_strides


def _like_first(arguments: dict[str, Any], results: _Results) -> _Results:
    """A dense tensor's strides are kept, also in dims of size one."""
    model = next(iter(arguments.values()))
    if not aten.is_non_overlapping_and_dense.default(model):
        return results
    return tuple(r.new_empty_strided(r.shape, model.stride()) for r in results)


def _ones_like(arguments: dict[str, Any], results: _Results) -> _Results:
    kept = arguments.get("memory_format") in (None, torch.preserve_format)
    return _like_first(arguments, results) if kept else results


def _elementwise(*operands: str) -> Callable[[dict[str, Any], _Results], _Results]:
    """The strides are those of an elementwise kernel on contiguous copies of some operands."""

    def with_strides(arguments: dict[str, Any], results: _Results) -> _Results:
        given = [
            a.contiguous() if name in operands else a
            for name, a in arguments.items()
            if isinstance(a, Tensor)
        ]
        return tuple(r.new_empty_strided(r.shape, strides(given)) for r in results)

    return with_strides


def _contiguous(arguments: dict[str, Any], results: _Results) -> _Results:
    return tuple(r.contiguous() for r in results)


def _roll(arguments: dict[str, Any], results: _Results) -> _Results:
    """Without dims it is one of the elements in a row; with them a concatenation for each."""
    if not arguments.get("dims"):
        return _contiguous(arguments, results)
    return _in_format_of(0)(arguments, results)


_CORRECTIONS: dict[torch._ops.OpOverload, Callable[[dict[str, Any], _Results], _Results]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._batch_norm_with_update_functional.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_group_norm.default: _normalized,
    aten.flip.default: _like_first,
    aten.ones_like.default: _ones_like,
    aten.sort.default: _like_first,
    aten.sort.stable: _like_first,
    aten.convolution.default: _asked_for_cpu(aten.convolution.default),
    aten.convolution_backward.default: _asked_for_cpu(aten.convolution_backward.default),
    aten._linalg_svd.default: _asked_for_cpu(aten._linalg_svd.default),
    aten.linalg_eig.default: _asked_for_cpu(aten.linalg_eig.default),
    aten.nonzero_static.default: _asked_for_cpu(aten.nonzero_static.default),
    aten._softmax_backward_data.default: _contiguous,
    aten._log_softmax_backward_data.default: _contiguous,
    aten.glu_backward.default: _contiguous,
    aten.huber_loss_backward.default: _contiguous,
    aten.log_sigmoid_forward.default: _contiguous,
    aten.mse_loss_backward.default: _contiguous,
    aten.nll_loss2d_forward.default: _contiguous,
    aten.normal.Tensor_Tensor: _contiguous,
    aten.normal.Tensor_float: _contiguous,
    aten.normal.float_Tensor: _contiguous,
    aten.pow.Scalar: _contiguous,
    aten.smooth_l1_loss_backward.default: _contiguous,
    aten.floor_divide.default: _elementwise(),
    aten.ldexp.Tensor: _elementwise("other"),
    aten.roll.default: _roll,
    aten.max_unpool2d.default: _in_format_of(0),
    aten.pixel_shuffle.default: _in_format_of(0),
    aten.pixel_unshuffle.default: _in_format_of(0),
    aten.channel_shuffle.default: _in_format_of(0),
    aten.native_channel_shuffle.default: _in_format_of(0),
    aten.reflection_pad2d.default: _in_format_of(0),
    aten.reflection_pad3d.default: _in_format_of(0),
    aten.replication_pad2d.default: _in_format_of(0),
    aten.replication_pad3d.default: _in_format_of(0),
    aten.reflection_pad2d_backward.default: _in_format_of(1),
    aten.reflection_pad3d_backward.default: _in_format_of(1),
    aten.replication_pad2d_backward.default: _in_format_of(1),
    aten.replication_pad3d_backward.default: _in_format_of(1),
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
}
