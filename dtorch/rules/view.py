"""Views: dims that are renamed, permuted, split, merged, added or dropped.

Code instead of notation, because the correspondence of dims follows from the shapes. A merged
or split group of dims keeps a sharding that lies on its outermost dim and divides evenly, since
only then are the pieces of both shapes the same elements. A view runs as `reshape` on the
shard, whose strides need not be those of the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..errors import PlacementError
from ..lowering import LocalContext, memory_order
from ..redistribution import Movement, Segment
from ..spec import Spec
from .sharding import ANY_REDUCTION, Dims, OpCall, Sharding, dim_names, moved, replicated, rule

aten = torch.ops.aten
_PASS = {"linear": (frozenset({0}),), "partial_ops": ANY_REDUCTION}


@rule(
    aten.view.default, aten._unsafe_view, aten.reshape, aten._reshape_copy, aten.view_copy.default
)
def view(call: OpCall) -> Sharding:
    """Any change of shape that keeps the order of the elements."""
    before, after = call.tensors[0].shape, call.results[0].shape
    inputs, outputs, even = _match(before, after)
    return Sharding((inputs,), (outputs,), even=even, localize=_reshape_locally, **_PASS)


def _reshape_locally(context: LocalContext) -> None:
    shapes = context.output_spec().local_shapes
    size = context.per_device(lambda i: shapes[i])
    context.emit(aten.reshape.default, context.args[0], size, outputs=context.outputs)


def _match(before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims, frozenset[str]]:
    """Names the dims of two shapes with the same elements; also says which must divide."""
    if tuple(before) == tuple(after):
        names = dim_names(before)
        return names, names, frozenset()
    inputs: list[str | None] = [None] * len(before)
    outputs: list[str | None] = [None] * len(after)
    even: set[str] = set()
    if 0 in before:
        return tuple(inputs), tuple(outputs), frozenset()
    for ins, outs in _groups(before, after):
        name = f"d{ins[0]}"
        inputs[ins[0]] = outputs[outs[0]] = name
        if len(ins) > 1 or len(outs) > 1:
            even.add(name)
    return tuple(inputs), tuple(outputs), frozenset(even)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of dims, sizes of one left out, that hold the same elements."""
    ins = [d for d, size in enumerate(before) if size != 1]
    outs = [d for d, size in enumerate(after) if size != 1]
    groups = []
    while ins and outs:
        left, right = [ins.pop(0)], [outs.pop(0)]
        m, n = before[left[0]], after[right[0]]
        while m != n:
            if m < n:
                left.append(ins.pop(0))
                m *= before[left[-1]]
            else:
                right.append(outs.pop(0))
                n *= after[right[-1]]
        groups.append((left, right))
    return groups


@rule(aten.as_strided, aten.as_strided_copy, aten.as_strided_scatter)
def as_strided(call: OpCall) -> Sharding:
    """Elements by their place in memory, which only a whole tensor of known strides has.

    Strides that differ for dims of size one alone, as `adaptive_avg_pool2d` sets them, are a name.
    """
    source = call.tensors[0]
    if call.op is aten.as_strided.default and _is_as_before(source, call):
        names = dim_names(source.shape)
        return Sharding((names,), (names,), localize=_keep)
    if len(source.mesh.devices) > 1 and not _is_dense(source):
        raise PlacementError(
            f"{call.op} of a tensor with gaps or overlaps in memory: shape {list(source.shape)}, "
            f"strides {source.stride}, over {len(source.mesh.devices)} devices.\n"
            "  Fix: call contiguous() on it first, and stride over the result."
        )
    return dataclasses.replace(replicated(call), localize=_stride_locally)


def _is_as_before(source: Spec, call: OpCall) -> bool:
    shape, strides, offset = call["size"], call["stride"], call["storage_offset"]
    given = zip(source.shape, source.stride, strides, strict=False)
    return (
        tuple(shape) == tuple(source.shape)
        and not offset
        and all(before == after for size, before, after in given if size != 1)
    )


def _keep(context: LocalContext) -> None:
    context.emit(aten.alias.default, context.args[0], outputs=context.outputs)


def _is_dense(spec: Spec) -> bool:
    unfilled = torch.empty_strided(spec.shape, spec.stride, device="meta")
    return aten.is_non_overlapping_and_dense(unfilled)


def _stride_locally(context: LocalContext) -> None:
    """Gives the tensor the memory that PyTorch's has, whatever the strides of the local one."""
    source = context.spec(context.args[0])
    if not _is_dense(source):
        context.emit_default()
        return
    order = memory_order(source)
    inverse = [order.index(d) for d in range(source.ndim)]
    permuted = context.emit(aten.permute.default, context.args[0], order)
    dense = context.emit(aten.clone.default, permuted, memory_format=torch.contiguous_format)
    restored = context.emit(aten.permute.default, dense, inverse)
    rest = context.args[1:]
    context.emit(context.op, restored, *rest, outputs=context.outputs, **context.kwargs)


@rule(aten.permute, aten.permute_copy)
def permute(call: OpCall) -> Sharding:
    """Dims in another order."""
    names = dim_names(call.tensors[0].shape)
    return Sharding((names,), (tuple(names[d] for d in call["dims"]),), **_PASS)


@rule(aten.transpose, aten.transpose_copy)
def transpose(call: OpCall) -> Sharding:
    """Two dims exchanged."""
    names = list(dim_names(call.tensors[0].shape))
    swapped = names.copy()
    if names:
        a, b = call["dim0"], call["dim1"]
        swapped[a], swapped[b] = names[b], names[a]
    return Sharding((tuple(names),), (tuple(swapped),), **_PASS)


@rule(aten.t, aten.t_copy, aten.numpy_T, aten.mT, aten.matrix_H, aten.adjoint)
def reverse(call: OpCall) -> Sharding:
    """The last two dims exchanged (or all reversed, which is the same for a matrix)."""
    names = dim_names(call.tensors[0].shape)
    if call.op.overloadpacket in (aten.numpy_T,):
        return Sharding((names,), (names[::-1],), **_PASS)
    return Sharding((names,), ((*names[:-2], *names[-2:][::-1]),), **_PASS)


@rule(aten.unsqueeze, aten.unsqueeze_copy)
def unsqueeze(call: OpCall) -> Sharding:
    """A dim of size one added."""
    names = dim_names(call.tensors[0].shape)
    at = call["dim"] % (len(names) + 1)
    return Sharding((names,), ((*names[:at], None, *names[at:]),), **_PASS)


@rule(aten.squeeze, aten.squeeze_copy)
def squeeze(call: OpCall) -> Sharding:
    """Dims of size one dropped."""
    shape = call.tensors[0].shape
    names = dim_names(shape)
    dims = call.arguments.get("dim")
    chosen = range(len(shape)) if dims is None else dims if isinstance(dims, Sequence) else (dims,)
    dropped = {d % len(shape) for d in chosen} if shape else set()
    kept = [d for d in range(len(shape)) if d not in dropped or shape[d] != 1]
    whole = frozenset(n for d, n in enumerate(names) if d not in kept and n)
    return Sharding(
        (names,),
        (tuple(names[d] for d in kept),),
        whole=whole,
        localize=_reshape_locally,
        **_PASS,
    )


@rule(aten.expand, aten.expand_copy)
def expand(call: OpCall) -> Sharding:
    """Dims of size one repeated, and new dims in front."""
    shape, result = call.tensors[0].shape, call.results[0].shape
    offset = len(result) - len(shape)
    names = tuple(
        None if size == 1 and result[d + offset] != 1 else f"d{d + offset}"
        for d, size in enumerate(shape)
    )
    return Sharding((names,), (dim_names(result),), sizes=(("size", 0),), **_PASS)


@rule(aten.select, aten.select_copy)
def select(call: OpCall) -> Sharding:
    """One index of a dim, which must be whole."""
    names = dim_names(call.tensors[0].shape)
    at = call["dim"] % len(names)
    return Sharding((names,), (names[:at] + names[at + 1 :],), whole=_only(names[at]), **_PASS)


@rule(aten.narrow_copy)
def narrow_copy(call: OpCall) -> Sharding:
    """A range of a dim, which moves where the dim is split."""
    return _range(call, call["dim"], call["start"])


@rule(aten.unfold, aten.unfold_copy)
def unfold(call: OpCall) -> Sharding:
    """Windows of a dim, which must be whole, in a new last dim."""
    names = dim_names(call.tensors[0].shape)
    if not names:
        return Sharding(((),), ((None,),), **_PASS)
    whole = _only(names[call["dimension"]])
    return Sharding((names,), ((*names, None),), whole=whole, **_PASS)


@rule(aten.view_as_real, aten.view_as_real_copy)
def view_as_real(call: OpCall) -> Sharding:
    """The real and the imaginary part in a new last dim."""
    names = dim_names(call.tensors[0].shape)
    return Sharding((names,), ((*names, None),))


@rule(aten.view_as_complex, aten.view_as_complex_copy)
def view_as_complex(call: OpCall) -> Sharding:
    """The last dim, of the real and the imaginary part, dropped."""
    *names, last = dim_names(call.tensors[0].shape)
    return Sharding(((*names, last),), (tuple(names),), whole=_only(last))


@rule(aten.diag_embed)
def diag_embed(call: OpCall) -> Sharding:
    """The last dim, which must be whole, as the diagonal of two dims."""
    *names, last = dim_names(call.tensors[0].shape)
    ndim = len(names) + 2
    places = {call["dim1"] % ndim, call["dim2"] % ndim}
    kept = iter(names)
    result = tuple(None if d in places else next(kept) for d in range(ndim))
    return Sharding(((*names, last),), (result,), whole=_only(last), **_PASS)


@rule(aten.slice, aten.slice_copy)
def slice_(call: OpCall) -> Sharding:
    """A range of a dim, which moves where the dim is split; with gaps the dim must be whole."""
    names = dim_names(call.tensors[0].shape)
    if call["step"] != 1 and call.results[0].shape != call.tensors[0].shape:
        return Sharding((names,), (names,), whole=_only(names[call["dim"]]), **_PASS)
    return _range(call, call["dim"], call["start"] or 0)


def _range(call: OpCall, dim: int, start: int) -> Sharding:
    """A range of a dim of the argument is the result."""
    (source, *_), (result, *_) = call.tensors, call.results
    names = dim_names(source.shape)
    dim = dim % len(names)
    size, length = source.shape[dim], result.shape[dim]
    if size == length:
        return Sharding((names,), (names,), **_PASS)
    start = max(start + size, 0) if start < 0 else start
    movement = Movement(dim, (Segment(0, start, length),))
    return moved(call, names, movement, **_PASS)


@rule(aten.diagonal, aten.diagonal_copy)
def diagonal(call: OpCall) -> Sharding:
    """The diagonal of two dims, which must be whole."""
    names = dim_names(call.tensors[0].shape)
    a, b = call["dim1"] % len(names), call["dim2"] % len(names)
    kept = tuple(n for d, n in enumerate(names) if d not in (a, b))
    whole = _only(names[a]) | _only(names[b])
    return Sharding((names,), ((*kept, None),), whole=whole, **_PASS)


@rule(aten.unbind, aten.unbind_copy)
def unbind(call: OpCall) -> Sharding:
    """Each index of a dim, which must be whole."""
    names = dim_names(call.tensors[0].shape)
    at = call["dim"] % len(names)
    kept = names[:at] + names[at + 1 :]
    return Sharding((names,), (kept,) * len(call.results), whole=_only(names[at]), **_PASS)


@rule(
    aten.split.Tensor,
    aten.split_with_sizes,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes,
    aten.chunk,
    aten.split_copy,
    aten.split_with_sizes_copy,
)
def split(call: OpCall) -> Sharding:
    """Ranges of a dim, which must be whole."""
    names = dim_names(call.tensors[0].shape)
    whole = _only(names[call["dim"]])
    return Sharding((names,), (names,) * len(call.results), whole=whole, **_PASS)


@rule(aten.cat, aten.concat)
def cat(call: OpCall) -> Sharding:
    """Tensors joined along a dim, which must be whole; legacy empty vectors join with any."""
    ndim = len(call.results[0].shape)
    names = dim_names(call.results[0].shape)
    inputs = tuple(names if t.ndim == ndim else (None,) * t.ndim for t in call.tensors)
    together = _together(call)
    whole = _only(names[call["dim"]])
    return Sharding(inputs, (names,), whole=whole, linear=together, partial_ops=ANY_REDUCTION)


@rule(aten.stack)
def stack(call: OpCall) -> Sharding:
    """Tensors joined along a new dim."""
    names = dim_names(call.tensors[0].shape)
    at = call["dim"] % (len(names) + 1)
    return Sharding(
        (names,) * len(call.tensors),
        ((*names[:at], None, *names[at:]),),
        linear=_together(call),
        partial_ops=ANY_REDUCTION,
    )


def _together(call: OpCall) -> tuple[frozenset[int], ...]:
    """All arguments may be partial together, unless one is converted to a wider dtype."""
    alike = all(t.dtype == call.results[0].dtype for t in call.tensors)
    return (frozenset(range(len(call.tensors))),) if alike else ()


@rule(aten.repeat)
def repeat(call: OpCall) -> Sharding:
    """Dims repeated: those repeated more than once must be whole."""
    shape, repeats = call.tensors[0].shape, call["repeats"]
    offset = len(repeats) - len(shape)
    names = dim_names(shape)
    kept = [n if repeats[d + offset] == 1 else None for d, n in enumerate(names)]
    whole = frozenset(n for n, k in zip(names, kept, strict=True) if k is None and n)
    return Sharding((names,), ((*(None,) * offset, *kept),), whole=whole, **_PASS)


@rule(aten.tril, aten.triu)
def triangle(call: OpCall) -> Sharding:
    """A triangle of the last two dims, which must be whole."""
    names = dim_names(call.tensors[0].shape)
    whole = frozenset(n for n in names[-2:] if n)
    return Sharding((names,), (names,), whole=whole, linear=(frozenset({0}),))


@rule(aten.select_backward, aten.slice_backward)
def range_backward(call: OpCall) -> Sharding:
    """The gradient of a range of one dim, in zeros; a range moves where the dim is split."""
    names = dim_names(call.results[0].shape)
    at = call["dim"] % len(names)
    selects = call.op is aten.select_backward.default
    if not selects and call["step"] == 1:
        size, length = call.results[0].shape[at], call.tensors[0].shape[at]
        start = call["start"] or 0
        start = min(max(start + size, 0) if start < 0 else start, size - length)
        movement = Movement(at, (Segment(start, 0, length),), 0.0)
        return moved(call, names, movement, sizes=(("input_sizes", 0),), **_PASS)
    given = names[:at] + names[at + 1 :] if selects else (*names[:at], None, *names[at + 1 :])
    kept = (*names[:at], None, *names[at + 1 :])
    return Sharding((given,), (kept,), sizes=(("input_sizes", 0),), **_PASS)


@rule(aten.diagonal_backward)
def diagonal_backward(call: OpCall) -> Sharding:
    """The gradient of a diagonal, in zeros; its two dims must be whole."""
    names = dim_names(call.results[0].shape)
    a, b = call["dim1"] % len(names), call["dim2"] % len(names)
    kept = tuple(None if d in (a, b) else n for d, n in enumerate(names))
    given = (*(n for d, n in enumerate(names) if d not in (a, b)), None)
    return Sharding((given,), (kept,), sizes=(("input_sizes", 0),), **_PASS)


@rule(aten.unfold_backward)
def unfold_backward(call: OpCall) -> Sharding:
    """The gradient of windows, added up; the dim must be whole."""
    names = dim_names(call.results[0].shape)
    at = call["dim"] % len(names) if names else 0
    kept = tuple(None if d == at else n for d, n in enumerate(names))
    given = (*kept, None) if names else (None,)
    return Sharding((given,), (kept,), sizes=(("input_sizes", 0),), **_PASS)


def _only(name: str | None) -> frozenset[str]:
    return frozenset() if name is None else frozenset({name})
