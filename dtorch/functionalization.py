"""What turns mutating and aliasing operations into functional ones.

Knows, from PyTorch's schemas: which operations mutate or alias, the functional counterpart of
a mutating one, how to put a changed view back into its base, and how random operations that
take no generator are made of ones that do.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .errors import MeshError, MutationError
from .infer import argument_names, infer
from .mesh import DeviceMesh
from .program import Ref, map_refs
from .spec import Spec

if TYPE_CHECKING:
    from .builder import Builder
    from .tracer import Tracer, ViewStep

aten = torch.ops.aten


class Kind(enum.Enum):
    """What an operation does to the storages of its arguments."""

    PURE = enum.auto()
    VIEWS = enum.auto()
    MUTATES = enum.auto()


@functools.lru_cache(maxsize=4096)
def kind_of(op: torch._ops.OpOverload) -> Kind:
    """Returns what an operation does to its arguments' storages, by its schema."""
    schema = op._schema
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return Kind.MUTATES
    if any(r.alias_info is not None for r in schema.returns):
        return Kind.VIEWS
    return Kind.PURE


def map_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Returns nested lists and tuples with every tensor replaced."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(item, change) for item in tree)
    return tree


def fill_refs(values: Mapping[int, Any]) -> Callable[[Any], Any]:
    """Returns a function that replaces `Ref`s in nested lists by values."""
    return lambda tree: map_refs(tree, lambda ref: values[ref.id])


def takes_device(op: torch._ops.OpOverload) -> bool:
    """Returns whether an operation has a device argument."""
    return "device" in argument_names(op)


def may_stay_symbolic(op: torch._ops.OpOverload, place: int | str) -> bool:
    """Returns whether a run-time scalar may be passed here without anybody reading it.

    Scalars that operations on tensors compute with do; sizes, dims and the bounds of factories
    do not, nor what padding fills up with, which becomes part of a communication.

    Args:
        op: The operation.
        place: The argument's number or name.
    """
    if op is aten.constant_pad_nd.default:
        return False
    schema = op._schema.arguments
    (argument,) = [a for i, a in enumerate(schema) if place in (i, a.name)]
    kind = argument.type
    while isinstance(kind, (torch.OptionalType, torch.ListType)):
        kind = kind.getElementType()
    if not isinstance(kind, (torch.NumberType, torch.TensorType)):
        return False
    on_tensors = any("Tensor" in str(a.type) for a in op._schema.arguments)
    return on_tensors or argument.name == "fill_value"


def is_about_shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call makes a meta tensor, or computes on one."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return True
    for item in (*args, *kwargs.values()):
        for value in item if isinstance(item, (list, tuple)) else (item,):
            if isinstance(value, torch.Tensor) and value.is_meta:
                return True
    return False


# -- factories -----------------------------------------------------------------------------


def with_device(
    op: torch._ops.OpOverload, kwargs: dict[str, Any], mesh: DeviceMesh, has_operands: bool
) -> dict[str, Any]:
    """Gives a factory the device of its mesh; other operations run where their operands are."""
    if not takes_device(op):
        return kwargs
    device = kwargs.get("device")
    if has_operands and device is not None and torch.device(device).type != mesh.device_type:
        raise MeshError(
            f"{op} asks for device {str(device)!r}, but its tensors live on {mesh!r}.\n"
            "  Fix: x.redistribute(device_mesh=...) to a mesh of that device first."
        )
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    return kwargs if has_operands else kwargs | {"device": mesh.torch_device()}


def with_dtype(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Fixes a factory's dtype now, since the default dtype may differ when a worker runs it."""
    names = argument_names(op)
    if "dtype" not in names or kwargs.get("dtype") is not None or names.index("dtype") < len(args):
        return kwargs
    meta = infer(op, args, kwargs)
    return kwargs | {"dtype": meta.dtype}


# -- mutation ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """The functional counterpart of a mutating operation."""

    original: torch._ops.OpOverload
    op: torch._ops.OpOverload
    mutated: tuple[str, ...]
    dropped: frozenset[str]

    @property
    def draws(self) -> bool:
        """Whether it is random."""
        return is_seeded(self.op)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        names = [a.name for a in self.original._schema.arguments]
        return dict(zip(names, args, strict=False)) | kwargs

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Returns the tensors that the operation writes to."""
        bound = self._bound(args, kwargs)
        found = [bound[n] for n in self.mutated if bound.get(n) is not None]
        return [t for item in found for t in (item if isinstance(item, (list, tuple)) else [item])]

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of the functional operation, by name if their order differs."""
        bound = self._bound(args, kwargs)
        names = [n for n in bound if n not in self.dropped]
        if names != [n for n in argument_names(self.op) if n in names]:
            return (), {n: bound[n] for n in names}
        positional = [a.name for a in self.original._schema.arguments][: len(args)]
        kept = tuple(v for n, v in zip(positional, args, strict=True) if n not in self.dropped)
        named = {k: v for k, v in kwargs.items() if k not in self.dropped}
        return kept, self._defaults({*positional, *kwargs}) | named

    def _defaults(self, given: set[str]) -> dict[str, Any]:
        """The defaults that torch leaves out of a call, where the functional form has none."""
        required = {a.name for a in self.op._schema.arguments if not a.has_default_value()}
        schema = self.original._schema.arguments
        missing = [a for a in schema if a.name in required - given and a.has_default_value()]
        return {a.name: a.default_value for a in missing}

    def record(self, tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Records the functional operation and returns the values to write."""
        packet = self.original.overloadpacket
        if packet is aten.copy_:
            return [_as_written(tracer, args[0], args[1])]
        if packet is aten.fill_ and isinstance(args[1], torch.Tensor):
            return [_as_written(tracer, args[0], args[1])]
        if packet in (aten.fill_, aten.zero_):
            value = args[1] if packet is aten.fill_ else 0
            return tracer.values(aten.full_like.default, (args[0], value), {})
        lowered, named = self.arguments(args, kwargs)
        if is_composite(self.op):
            found = tracer.dispatch(self.op, lowered, named)
            found = found if isinstance(found, (list, tuple)) else [found]
            return [tracer.read(tracer.lift(t)) for t in found]
        results = tracer.values(self.op, lowered, named)
        return results[0] if isinstance(results[0], list) else results

    def returns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the mutating operation returns: the tensors that it wrote to."""
        count = len(self.original._schema.returns)
        if count == 0:
            return None
        written = self.written(args, kwargs)
        return written[0] if count == 1 else tuple(written)


def _as_written(tracer: Tracer, target: torch.Tensor, source: Any) -> int:
    """The value of `source` with the dtype and shape that a copy into `target` gives it."""
    wanted = tracer.lift(target)._spec
    value = tracer.read(tracer.lift(source))
    builder = tracer.builder
    if builder.specs[value].dtype != wanted.dtype:
        (value,) = builder.apply(aten._to_copy.default, (Ref(value),), {"dtype": wanted.dtype})
    if builder.specs[value].shape != wanted.shape:
        (value,) = builder.apply(aten.expand.default, (Ref(value), list(wanted.shape)), {})
    return value


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Returns whether PyTorch makes an operation of others."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), composite)


@functools.lru_cache(maxsize=4096)
def fills_out(op: torch._ops.OpOverload) -> bool:
    """Returns whether an operation only writes to its ``out=``, what a functional one returns."""
    try:
        form = functional_form(op)
    except MutationError:
        return False
    return form.dropped == frozenset(form.mutated)


_RESHAPES = ("resize", "resize_as", "resize_as_sparse", "set")


@functools.lru_cache(maxsize=4096)
def functional_form(op: torch._ops.OpOverload) -> Form:
    """Returns the functional counterpart of a mutating operation.

    Raises:
        MutationError: It has none, because it changes the shape or the storage of a tensor.
    """
    schema = op._schema
    mutated = tuple(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
    outs = frozenset(a.name for a in schema.arguments if a.name in mutated and a.is_out)
    wanted = [(a.name, str(a.type)) for a in schema.arguments if a.name not in outs]
    name = op.overloadpacket.__name__.removesuffix("_")
    if op.overloadpacket in (aten.copy_, aten.fill_, aten.zero_):
        return Form(op, aten.full_like.default, mutated, outs)
    for packet in () if name in _RESHAPES else (name, f"{name}_functional"):
        for candidate in _overloads(packet):
            pure = kind_of(candidate) is Kind.PURE
            found = [(a.name, str(a.type)) for a in candidate._schema.arguments]
            if pure and sorted(found) == sorted(wanted):
                return Form(op, candidate, mutated, outs)
    raise changes_shape(op, name)


def changes_shape(op: torch._ops.OpOverload, name: str) -> MutationError:
    """Returns the error of an in-place call that a distributed tensor cannot follow."""
    return MutationError(
        f"{op} changes a tensor's shape or storage in place, which a distributed tensor "
        f"cannot do.\n  Fix: use the functional form, x = x.{name}(...)."
    )


def _overloads(packet: str) -> list[torch._ops.OpOverload]:
    found = getattr(aten, packet, None)
    if found is None:
        return []
    overloads = []
    for name in found.overloads():
        try:
            overloads.append(getattr(found, name))
        except (
            RuntimeError,
            AttributeError,
        ):  # TorchScript-only overloads have no dispatcher entry
            continue
    return overloads


_RESHAPED = (aten.transpose_, aten.t_, aten.squeeze_, aten.unsqueeze_, aten.as_strided_)


@functools.lru_cache(maxsize=64)
def view_form(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Returns the view operation of one that gives a tensor another shape in place, or None."""
    if op.overloadpacket not in _RESHAPED:
        return None
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    for candidate in _overloads(op.overloadpacket.__name__.removesuffix("_")):
        if [(a.name, str(a.type)) for a in candidate._schema.arguments] == wanted:
            return candidate
    return None


# -- views ---------------------------------------------------------------------------------


def put_back(builder: Builder, step: ViewStep, base: int, value: int) -> int:
    """Records the base of a view with the view's elements replaced, and returns its number.

    Args:
        builder: The program being built.
        step: The view operation.
        base: The base's present value.
        value: The view's new value.

    Raises:
        MutationError: The view shows an element twice, or its inverse is not known.
    """
    spec = builder.specs[base]
    inverse = _INVERSES.get(step.op) or _INVERSES.get(step.op.overloadpacket)
    if inverse is None:
        raise MutationError(
            f"writing through the view made by {step.op} is not supported.\n"
            "  Fix: use the functional form (torch.where, *_scatter, index_put), or write "
            "to the base."
        )
    op, args = inverse(spec, step)
    operands = (Ref(base), Ref(value)) if op in _SCATTERS else (Ref(value),)
    (result,) = builder.apply(op, (*operands, *args), {})
    return result


_Inverse = Callable[[Spec, "ViewStep"], tuple[Any, tuple[Any, ...]]]
_SCATTERS = {
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
}


def _reshape(base: Spec, step: ViewStep) -> tuple[Any, tuple[Any, ...]]:
    return aten._reshape_copy.default, (list(base.shape),)


def _permute(base: Spec, step: ViewStep) -> tuple[Any, tuple[Any, ...]]:
    dims = [d % base.ndim for d in step.args[0]]
    return aten.permute.default, ([dims.index(d) for d in range(base.ndim)],)


def _same(base: Spec, step: ViewStep) -> tuple[Any, tuple[Any, ...]]:
    return step.op, step.args


def _scatter(op: torch._ops.OpOverload) -> _Inverse:
    return lambda base, step: (op, step.args)


def _unbind(base: Spec, step: ViewStep) -> tuple[Any, tuple[Any, ...]]:
    dim = step.args[0] if step.args else 0
    return aten.select_scatter.default, (dim, step.output)


def _split(base: Spec, step: ViewStep) -> tuple[Any, tuple[Any, ...]]:
    sizes, *rest = step.args
    dim = (rest[0] if rest else 0) % base.ndim
    length = base.shape[dim]
    if isinstance(sizes, int):
        start = sizes * step.output
        stop = min(start + sizes, length)
    else:
        start = sum(sizes[: step.output])
        stop = start + sizes[step.output]
    return aten.slice_scatter.default, (dim, start, stop)


_INVERSES: dict[Any, _Inverse] = {
    aten.view.dtype: lambda base, step: (aten.view.dtype, (base.dtype,)),
    aten.view: _reshape,
    aten._unsafe_view: _reshape,
    aten.unsqueeze: _reshape,
    aten.squeeze: _reshape,
    aten.permute: _permute,
    aten.transpose: _same,
    aten.t: _same,
    aten._conj: _same,
    aten._neg_view: _same,
    aten.select: _scatter(aten.select_scatter.default),
    aten.slice: _scatter(aten.slice_scatter.default),
    aten.diagonal: _scatter(aten.diagonal_scatter.default),
    aten.as_strided: _scatter(aten.as_strided_scatter.default),
    aten.unbind: _unbind,
    aten.split: _split,
    aten.split_with_sizes: _split,
    aten.view_as_real: lambda base, step: (aten.view_as_complex.default, ()),
    aten.view_as_complex: lambda base, step: (aten.view_as_real.default, ()),
}


# -- randomness ----------------------------------------------------------------------------


def draws(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call draws random numbers: it is seeded and its dropout is not zero.

    Recurrent layers drop out in training only.
    """
    if not is_seeded(op):
        return False
    names = argument_names(op)
    given = dict(zip(names, args, strict=False)) | kwargs
    if "dropout_p" in names:
        return given.get("dropout_p", 0.0) != 0
    return "dropout" not in names or (given["dropout"] != 0 and given["train"])


@functools.lru_cache(maxsize=4096)
def is_seeded(op: torch._ops.OpOverload) -> bool:
    """Returns whether an operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


@functools.lru_cache(maxsize=256)
def with_generator(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Returns the overload of a random operation that takes a generator."""
    if any(a.name == "generator" for a in op._schema.arguments):
        return op
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    for candidate in _overloads(op.overloadpacket.__name__):
        arguments = [(a.name, str(a.type)) for a in candidate._schema.arguments]
        without = [a for a in arguments if a[0] != "generator"]
        if len(without) < len(arguments) and without == wanted:
            return candidate
    raise MutationError(f"{op} draws from a generator that dtorch cannot pass to it.")


FILLS = {
    aten.uniform,
    aten.normal,
    aten.normal_functional,
    aten.exponential,
    aten.cauchy,
    aten.log_normal,
    aten.geometric,
    aten.random,
    aten.bernoulli,
}
"""What draws into a tensor whatever its values are."""


def _like(fill: Callable[[torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
    def made(self: torch.Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> torch.Tensor:
        kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        result = torch.empty_like(self, **kwargs)
        return fill(result, *args, generator=generator)  # pyright: ignore[reportCallIssue]

    return made


def _integers(result: torch.Tensor, *bounds: int, generator: Any = None) -> torch.Tensor:
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return result.random_(low, high, generator=generator)


def _native_dropout(
    input: torch.Tensor, p: float, train: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's CPU kernel: a mask drawn in the input's dtype, then scaled."""
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(input), torch.zeros_like(input, dtype=torch.bool)
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p)
    return input * mask * (1.0 / (1 - p)), mask


RANDOM_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.rand_like: _like(torch.Tensor.uniform_),
    aten.randn_like: _like(torch.Tensor.normal_),
    aten.randint_like: _like(_integers),
    aten.native_dropout: _native_dropout,
}
"""Random operations that take no generator, made of ones that do."""
