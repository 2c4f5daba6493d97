"""Tracing: runs a function once on symbolic tensors and records its program.

A `SymbolicTensor` is a `Tensor` without shards: a value of the program that is being built. A
dispatch mode receives every ATen operation. Without gradients, autograd is excluded, so that
PyTorch's composite operations arrive whole; one that has a rule is recorded as it is, any other
is decomposed. With gradients, autograd runs above and decomposes them itself.

In-place calls and views get their exact meaning here: symbolic tensors that alias share a
`Storage`, each with the path of views that leads to it. Writing through one puts the new values
back into the storage, and the others are read again through their paths. Nothing that is
recorded mutates or aliases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import autograd, functional
from .builder import Builder, has_rule
from .errors import DataDependentError, MutationError, TraceError
from .infer import infer
from .mesh import DeviceMesh
from .placement import Placements, Replicate, Shard
from .program import Apply, Ref, ScalarRef, refs
from .scalars import Expression, node_of
from .source import user_line
from .spec import Spec
from .tensor import Tensor, dense_stride

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_lock = threading.RLock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


class _Current(threading.local):
    tracer: Tracer | None = None


_current = _Current()


def current() -> Tracer | None:
    """Returns the trace that is active on this thread, or None."""
    return _current.tracer


class NeedsAutograd(BaseException):
    """A function that is traced without autograd turned out to use it."""


class Storage:
    """What symbolic tensors that alias each other share: the value of the whole."""

    __slots__ = ("cache", "value", "version")

    def __init__(self, value: int) -> None:
        self.value = value
        self.version = 0
        self.cache: dict[tuple[Any, ...], int] = {}

    def write(self, value: int) -> None:
        """Replaces the whole value; every view is read again."""
        self.value = value
        self.version += 1
        self.cache.clear()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ViewStep:
    """One view operation on the way from a storage to a symbolic tensor."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int


class SymbolicTensor(Tensor):
    """A value of the program that is being traced."""

    _tracer: Tracer
    _storage: Storage
    _path: tuple[ViewStep, ...]
    _offset: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @property
    def _spec(self) -> Spec:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._tracer.builder.specs[self._tracer.read(self)]

    @property
    def _handles(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise self._no_value("its shards")

    def _no_value(self, what: str) -> DataDependentError:
        return DataDependentError(
            f"{what} of a tensor exist at run time only, but the function is being traced "
            f"({user_line() or 'unknown line'}).\n"
            "  Fix: keep the computation in tensors (torch.where, masks), return the tensor and "
            "fetch it outside, or pass the value as a static argument."
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tensor = next(a for a in _flat_tensors((args, kwargs or {})) if isinstance(a, cls))
        raise tensor._outlived(str(func))

    def _outlived(self, what: str) -> TraceError:
        return TraceError(
            f"{what} got a tensor of a trace that has ended ({user_line() or 'unknown line'}).\n"
            "  Fix: return it from the traced function instead of storing it outside."
        )

    def to_torch_async(self) -> Any:
        raise self._no_value("the elements")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SymbolicTensor({self._spec!r})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where the caller finds an input of a program.

    Attributes:
        kind: ``"leaf"`` (of the arguments), ``"capture"`` (a dtorch tensor), ``"constant"`` (a
            torch tensor) or ``"generator"`` (the state of one).
        item: The leaf's number, the tensor, or the generator (None for dtorch's own).
        version: Of a torch tensor: its version when it was captured, if it has one.
    """

    kind: str
    item: Any
    version: int | None = None


class Tracer:
    """One trace: the program being built and what it refers to outside.

    Args:
        mesh: The mesh of factories and of plain torch tensors.
        with_autograd: Whether autograd records above the trace.
    """

    def __init__(self, mesh: DeviceMesh, with_autograd: bool) -> None:
        self.mesh = mesh
        self.with_autograd = with_autograd
        self.builder = Builder(user_line)
        self.sources: list[Source] = []
        self.expressions: list[Expression] = []
        self.reads: set[int] = set()
        self.arguments: list[tuple[SymbolicTensor, int]] = []
        self.captures: list[tuple[SymbolicTensor, int, Tensor]] = []
        self.constants: list[tuple[SymbolicTensor, int]] = []
        self.states: dict[torch.Generator | None, tuple[int, int]] = {}
        self._lifted: dict[int, tuple[Any, SymbolicTensor]] = {}
        self._scalars: dict[Any, int] = {}
        self._wanted: Placements | None = None
        self._mode = _DispatchMode(self)

    # -- running ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes this the trace that records operations on this thread."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_lock)
            stack.enter_context(_compiling())
            stack.enter_context(_FunctionMode(self))
            stack.enter_context(self._mode)
            if not self.with_autograd:
                stack.enter_context(torch._C._AutoDispatchBelowAutograd())
            outer, _current.tracer = _current.tracer, self
            try:
                yield
            finally:
                _current.tracer = outer

    @contextlib.contextmanager
    def factories(self, mesh: DeviceMesh, placements: Placements) -> Iterator[None]:
        """Makes factories create tensors on a mesh, with these placements where they can."""
        before = self.mesh, self._wanted
        self.mesh, self._wanted = mesh, placements
        try:
            yield
        finally:
            self.mesh, self._wanted = before

    # -- symbolic tensors ------------------------------------------------------------------

    def argument(self, spec: Spec, leaf: int) -> SymbolicTensor:
        """Returns the symbolic tensor of a tensor argument."""
        value = self.builder.add_input(spec)
        self.sources.append(Source("leaf", leaf))
        tensor = self.wrap(value)
        self.arguments.append((tensor, value))
        return tensor

    def wrap(
        self,
        value: int,
        storage: Storage | None = None,
        path: tuple[ViewStep, ...] = (),
        offset: int = 0,
    ) -> SymbolicTensor:
        """Returns a symbolic tensor of a value: of its own storage, or a view of another."""
        spec = self.builder.specs[value]
        result = torch.Tensor._make_wrapper_subclass(
            SymbolicTensor,
            spec.shape,
            strides=spec.stride,
            storage_offset=offset,
            dtype=spec.dtype,
            device=spec.mesh.torch_device(),
        )
        if spec.conj:
            torch._C._set_conj(result, True)
        if spec.neg:
            torch._C._set_neg(result, True)
        result._tracer = self
        result._storage = Storage(value) if storage is None else storage
        result._path = path
        result._offset = offset
        if path:
            result._storage.cache[path] = value
        return result

    def read(self, tensor: SymbolicTensor) -> int:
        """Returns the number of a symbolic tensor's present value."""
        return self._follow(tensor._storage, tensor._path)

    def _follow(self, storage: Storage, path: tuple[ViewStep, ...]) -> int:
        if not path:
            return storage.value
        value = storage.cache.get(path)
        if value is None:
            step = path[-1]
            base = self._follow(storage, path[:-1])
            results = self.builder.apply(step.op, (Ref(base), *step.args), step.kwargs)
            value = _flat(results)[step.output]
            storage.cache[path] = value
        return value

    def write(self, tensor: SymbolicTensor, value: int) -> None:
        """Gives a symbolic tensor, and with it its storage, a new value.

        The storage keeps its layout, and the value the tensor's dtype.
        """
        storage, path = tensor._storage, tensor._path
        found = self.builder.specs[value].shape
        if found != tensor.shape:
            raise MutationError(
                f"an in-place call would change a tensor's shape from {list(tensor.shape)} to "
                f"{list(found)}, which a distributed tensor cannot do.\n"
                "  Fix: use the functional form, or an out= tensor of the result's shape."
            )
        value = self._cast(value, tensor.dtype)
        for depth in range(len(path) - 1, -1, -1):
            base = self._follow(storage, path[:depth])
            value = functional.put_back(self.builder, path[depth], base, value)
        layout = self.builder.specs[storage.value]
        value = self._with_bits(value, layout)
        if self.builder.specs[value].stride != layout.stride:
            base = Ref(storage.value)
            (value,) = self.builder.apply(aten.copy.default, (base, Ref(value)), {})
        storage.write(self.builder.move(value, layout.mesh, layout.placements))
        if path:
            self.read(tensor)

    def _with_bits(self, value: int, wanted: Spec) -> int:
        """The same value with the conj and neg bits of what it is stored in."""
        found = self.builder.specs[value]
        if (found.conj, found.neg) == (wanted.conj, wanted.neg):
            return value
        ops = [aten.resolve_conj.default, aten.resolve_neg.default]
        ops += [aten.conj_physical.default, aten._conj.default] if wanted.conj else []
        ops += [aten.neg.default, aten._neg_view.default] if wanted.neg else []
        for op in ops:
            (value,) = self.builder.apply(op, (Ref(value),), {})
        return value

    def _cast(self, value: int, dtype: torch.dtype) -> int:
        found = self.builder.specs[value].dtype
        if found == dtype:
            return value
        if not torch.can_cast(found, dtype):
            raise RuntimeError(
                f"result type {found} can't be cast to the desired output type {dtype}"
            )
        (value,) = self.builder.apply(aten._to_copy.default, (Ref(value),), {"dtype": dtype})
        return value

    # -- what comes from outside -------------------------------------------------------------

    def lift(self, tensor: torch.Tensor) -> SymbolicTensor:
        """Returns the symbolic tensor of any tensor that a traced operation meets."""
        if isinstance(tensor, SymbolicTensor):
            if tensor._tracer is not self:
                raise TraceError(
                    f"a tensor of another trace is used here ({user_line()}).\n"
                    "  Fix: return it from the function that made it."
                )
            return tensor
        known = self._lifted.get(id(tensor))
        if known is None:
            known = self._lifted[id(tensor)] = (tensor, self._lift_new(tensor))
        return known[1]

    def _lift_new(self, tensor: torch.Tensor) -> SymbolicTensor:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise TraceError(
                f"a jitted function uses a tensor of shape {list(tensor.shape)} that requires "
                f"grad without taking it as an argument ({user_line()}); its gradient would be "
                "lost.\n  Fix: pass it as an argument, detach() it, or call under torch.no_grad()."
            )
        if isinstance(tensor, Tensor):
            value = self.builder.add_input(tensor._spec)
            self.sources.append(Source("capture", tensor))
            symbolic = self.wrap(value)
            self.captures.append((symbolic, value, tensor))
            return symbolic
        constant = self.constant(tensor)
        self.constants.append((constant, constant._storage.value))
        return constant

    def constant(self, tensor: torch.Tensor) -> SymbolicTensor:
        """Returns the symbolic tensor of a plain torch tensor, replicated."""
        replicated = (Replicate(),) * self.mesh.ndim
        spec = Spec.of(tensor.shape, tensor.dtype, self.mesh, replicated, dense_stride(tensor))
        value = self.builder.add_input(spec)
        version = None if tensor.is_inference() else tensor._version
        self.sources.append(Source("constant", tensor, version))
        return self.wrap(value)

    def draw_state(self, generator: torch.Generator | None) -> int:
        """Returns the number of a generator's present state."""
        if generator not in self.states:
            size = torch.Generator(self.mesh.torch_device()).get_state().numel()
            replicated = (Replicate(),) * self.mesh.ndim
            value = self.builder.add_input(Spec.of((size,), torch.uint8, self.mesh, replicated))
            self.sources.append(Source("generator", generator))
            self.states[generator] = (value, value)
        return self.states[generator][1]

    # -- dispatch --------------------------------------------------------------------------

    def dispatch(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Records one ATen operation and returns its symbolic results."""
        special = _SPECIAL.get(op)
        if special is not None:
            return special(self, op, args, kwargs)
        kind = functional.kind_of(op)
        decomposable = _can_decompose(op)
        if kind is functional.Kind.MUTATES:
            return (
                self._decompose(op, args, kwargs)
                if decomposable
                else self._mutate(op, args, kwargs)
            )
        if kind is functional.Kind.VIEWS:
            return (
                self._decompose(op, args, kwargs) if decomposable else self._view(op, args, kwargs)
            )
        if not decomposable and functional.draws(op, args, kwargs):
            return self._random(op, args, kwargs)
        if decomposable and (not has_rule(op) or functional.draws(op, args, kwargs)):
            return self._decompose(op, args, kwargs)
        return self.record(op, args, kwargs)

    def _decompose(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # The dispatcher's own kernel, not a Python decomposition that may be registered over it.
        with self._mode:
            return op._op_dk(_COMPOSITE, *args, **kwargs)

    def record(
        self,
        op: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Records an operation that neither mutates nor aliases; returns symbolic results."""
        return self._wrapped(op, self.values(op, args, kwargs))

    def values(
        self,
        op: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Any]:
        """As `record`, but returns the numbers of the results."""
        _refuse_data_dependent(op, args)
        lowered, named = self._lowered(op, args, kwargs)
        has_operands = next(refs((lowered, tuple(named.values()))), None) is not None
        named = _with_device(op, named, None if has_operands else self.mesh)
        if has_operands:
            return self.builder.apply(op, lowered, named)
        named = _with_dtype(op, self.builder.with_scalars(lowered), named)
        return self.builder.apply(op, lowered, named, self.mesh, self._fitting(op, lowered, named))

    def _fitting(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Placements | None:
        """The placements wanted of a factory, if its result has the dims that they name."""
        if self._wanted is None:
            return None
        (meta, *_) = _flat(infer(op, self.builder.with_scalars(args), kwargs))
        dims = (p.dim for p in self._wanted if isinstance(p, Shard))
        return self._wanted if all(d < len(meta.shape) for d in dims) else None

    def _wrapped(self, op: torch._ops.OpOverload, results: list[Any]) -> Any:
        returns = op._schema.returns
        wrapped = [self._wrap_result(r) for r in results]
        if len(returns) == 1 and isinstance(returns[0].type, torch.ListType):
            return wrapped
        return wrapped[0] if len(returns) == 1 else tuple(wrapped)

    def _wrap_result(self, result: Any) -> Any:
        if isinstance(result, list):
            return [self._wrap_result(r) for r in result]
        return self.wrap(result) if type(result) is int else result

    def _random(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        rewritten = functional.RANDOM_DECOMPOSITIONS.get(op.overloadpacket)
        if rewritten is not None:
            with self._mode:
                return rewritten(*args, **kwargs)
        return self._wrapped(op, self._draw(op, args, kwargs))

    def _draw(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        op = functional.with_generator(op)
        kwargs = dict(kwargs)
        generator = kwargs.pop("generator", None)
        lowered, named = self._lowered(op, args, kwargs)
        has_operands = next(refs((lowered, tuple(named.values()))), None) is not None
        named = _with_device(op, named, None if has_operands else self.mesh)
        if not has_operands:
            named = _with_dtype(op, self.builder.with_scalars(lowered), named)
        first, _ = self.states.get(generator) or (self.draw_state(generator), 0)
        state = self.draw_state(generator)
        *results, state = self.builder.apply(op, lowered, named, self.mesh, draws=state)
        self.states[generator] = (first, state)
        return results[0] if isinstance(results[0], list) else results

    def _view(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        base = self.lift(args[0])
        if op is aten.as_strided.default:
            base, args, kwargs = self._by_place_in_memory(base, *args[1:], **kwargs)
        lowered, named = self._lowered(op, args[1:], kwargs, skip=1)
        results = self.builder.apply(op, (Ref(self.read(base)), *lowered), named)
        offsets = functional.offsets(op, base._spec, lowered, named)
        views = []
        for number, value in enumerate(_flat(results)):
            step = ViewStep(op, tuple(lowered), named, number)
            offset = base._offset + offsets[number]
            views.append(self.wrap(value, base._storage, (*base._path, step), offset))
        return views if isinstance(op._schema.returns[0].type, torch.ListType) else views[0]

    def _by_place_in_memory(
        self, view: SymbolicTensor, size: Any, stride: Any, storage_offset: Any = None
    ) -> tuple[SymbolicTensor, tuple[Any, ...], dict[str, Any]]:
        """Makes `as_strided` of a view one of the whole storage: a shard's own would differ."""
        whole = self.builder.specs[view._storage.value]
        same_elements = (whole.dtype, whole.conj, whole.neg) == (
            view.dtype,
            view.is_conj(),
            view.is_neg(),
        )
        if same_elements:
            offset = view._offset if storage_offset is None else storage_offset
            base = self.wrap(view._storage.value, view._storage)
            return base, (base, size, stride, offset), {}
        return view, (view, size, stride, storage_offset), {}

    def alias(self, tensor: torch.Tensor) -> SymbolicTensor:
        """Returns another symbolic tensor of the same storage, seen the same way."""
        base = self.lift(tensor)
        result = self.wrap(self.read(base), base._storage, (), base._offset)
        result._path = base._path
        return result

    def _mutate(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        form = functional.functional_form(op)
        written = [self.lift(t) for t in form.written(args, kwargs)]
        self._check_writable(op, args, kwargs)
        if form.draws:
            results = self._draw(form.op, *form.arguments(args, kwargs))
        else:
            results = form.record(self, args, kwargs)
        # A functional form returns what the operation does, and after it the written arguments.
        count = sum(r.alias_info is None for r in op._schema.returns)
        for tensor, value in zip(written, results[count:], strict=False):
            self.write(tensor, value)
        if count:
            return self._wrapped(op, results[:count])
        return form.returns(args, kwargs)

    def _check_writable(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Lets PyTorch's own meta kernel refuse what the in-place call cannot do."""
        specs = functional.map_tensors(args, lambda t: self.lift(t)._spec)
        named = {
            k: functional.map_tensors(v, lambda t: self.lift(t)._spec) for k, v in kwargs.items()
        }
        infer(op, _concrete(specs), {k: _concrete(v) for k, v in named.items()})

    # -- arguments -------------------------------------------------------------------------

    def _lowered(
        self,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        skip: int = 0,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replaces tensors by `Ref`s and symbolic numbers by `ScalarRef`s or their values."""
        schema = op._schema.arguments
        by_name = {a.name: a for a in schema}
        lowered = tuple(self._lower(op, v, schema[i + skip]) for i, v in enumerate(args))
        return lowered, {k: self._lower(op, v, by_name[k]) for k, v in kwargs.items()}

    def _lower(self, op: torch._ops.OpOverload, value: Any, argument: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Ref(self.read(self.lift(value)))
        if isinstance(value, (list, tuple)):
            return [self._lower(op, v, argument) for v in value]
        node = node_of(value)
        if node is None:
            return value
        if not functional.may_stay_symbolic(op, argument):
            return node.read()
        key = (node.expression, type(node.value))
        if key not in self._scalars:
            self._scalars[key] = len(self.expressions)
            self.expressions.append(node.expression)
            self.builder.scalar_values.append(node.value)
        return ScalarRef(self._scalars[key])


class _DispatchMode(TorchDispatchMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spares torch wrapping each call for (and importing) its compiler."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._tracer.dispatch(func, args, kwargs or {})


class _FunctionMode(TorchFunctionMode):
    """Sees every torch function of a trace before any tensor subclass does."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._tracer.with_autograd and asks_for_autograd(func, args, kwargs):
            raise NeedsAutograd
        with torch._C.DisableTorchFunctionSubclass():
            if self._tracer.with_autograd:
                substitute = autograd.SUBSTITUTES.get(func)
                if substitute is not None and autograd.requires_grad(args):
                    return substitute(*args, **kwargs)
            return func(*args, **kwargs)


_GRADIENT_FUNCTIONS = {
    torch.Tensor.backward,
    torch.Tensor.register_hook,
    torch.Tensor.retain_grad,
    torch.autograd.grad,
    torch.autograd.backward,
}


def asks_for_autograd(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call only makes sense where autograd records."""
    if func in _GRADIENT_FUNCTIONS:
        return True
    if func is torch.Tensor.requires_grad_:
        return bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    setter = getattr(func, "__name__", "") == "__set__"
    return setter and func == torch.Tensor.requires_grad.__set__ and bool(args[1])  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Makes `torch.compiler.is_compiling()` true: model code then takes its traceable path."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@functools.lru_cache(maxsize=4096)
def _can_decompose(op: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _COMPOSITE)


def _flat_tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _flat_tensors(item)


def _flat(results: Any) -> list[Any]:
    if isinstance(results, list):
        return [r for item in results for r in _flat(item)]
    return [results]


def _concrete(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_concrete(v) for v in value]
    node = node_of(value)
    return value if node is None else node.value


def _with_device(
    op: torch._ops.OpOverload, kwargs: dict[str, Any], mesh: DeviceMesh | None
) -> dict[str, Any]:
    """Gives a factory the device of its mesh; other operations run where their operands are."""
    if not functional.takes_device(op):
        return kwargs
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    return kwargs if mesh is None else kwargs | {"device": mesh.torch_device()}


def _with_dtype(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Fixes a factory's dtype now, since the default dtype may differ when a worker runs it."""
    names = [a.name for a in op._schema.arguments]
    if "dtype" not in names or kwargs.get("dtype") is not None or names.index("dtype") < len(args):
        return kwargs
    (meta, *_) = _flat(infer(op, args, kwargs))
    return kwargs | {"dtype": meta.dtype}


def _refuse_data_dependent(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    dynamic = torch.Tag.dynamic_output_shape in op.tags
    if op is aten.where.default:
        dynamic = True
    if op is aten.index.Tensor:
        dynamic = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    if dynamic or torch.Tag.data_dependent_output in op.tags:
        raise DataDependentError(
            f"the result of {op} depends on the values of its arguments, which exist at run "
            f"time only, but the function is being traced ({user_line() or 'unknown line'}).\n"
            "  Fix: use torch.where or a mask, or compute it outside the jitted function."
        )


# -- operations with a meaning of their own --------------------------------------------------


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
    fill = functional.fill_refs(operands)
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

    named = {k: functional.map_tensors(v, unfilled) for k, v in kwargs.items()}
    return op(*_concrete(functional.map_tensors(args, unfilled)), **named)


_SPECIAL: dict[Any, Callable[..., Any]] = {
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
}
