"""Tracing: runs a function once on symbolic tensors and records its program.

A `SymbolicTensor` is a `Tensor` without shards: a value of the program that is being built. A
dispatch mode receives every ATen operation. Without gradients, autograd is excluded, so that
PyTorch's composite operations arrive whole; one that has a rule is recorded as it is, any other
is decomposed. With gradients, autograd runs above and decomposes them itself.

In-place calls and views get their exact meaning here: symbolic tensors that alias share a
`Storage`, each with the path of views that leads to it. Writing through one puts the new values
back into the storage, and the others are read again through their paths. Nothing that is
recorded mutates or aliases.

It is over 500 lines because the tracer is one class: each of its parts reads the others' state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import functionalization
from .builder import Builder, Known
from .decision import flattened, has_rule
from .errors import DataDependentError, MutationError, TraceError
from .handlers import SPECIAL
from .infer import infer, meta_tensor
from .lowering import memory_order
from .mesh import DeviceMesh
from .parts import dense_stride
from .placement import Placements, Replicate, Shard
from .program import Ref, ScalarRef, refs
from .redistribution import Movement
from .scalars import Expression, concrete, node_of
from .sharded_forms import is_always_taken, is_asked_for, sharded_form
from .source import user_line
from .spec import Spec
from .stages import moved, on_latest_stage
from .strictness import is_strict
from .symbolic import Storage, SymbolicTensor, ViewStep
from .tensor import Tensor, wrapper
from .tracing_modes import (
    DispatchMode,
    FunctionMode,
    compiling,
    left,
    refusing_seeds,
    replaying_views,
)

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
lock = threading.RLock()
"""Held while a thread traces, or has the tensors of a module exchanged (`nn.functionalize`)."""
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
_reading = threading.RLock()
os.register_at_fork(
    before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release
)


class _Current(threading.local):
    tracer: Tracer | None = None


_current = _Current()


def current() -> Tracer | None:
    """Returns the trace that is active on this thread, or None."""
    return _current.tracer


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Leaves the trace that is active on this thread: torch is as on any other thread."""
    with left(), contextlib.ExitStack() as stack:
        outer, _current.tracer = _current.tracer, None
        stack.callback(setattr, _current, "tracer", outer)
        yield


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
        self.reformed: list[tuple[SymbolicTensor, Storage]] = []  # with what they were
        self.states: dict[torch.Generator | None, tuple[int, int]] = {}
        self.read_by_place: list[Storage] = []
        self.has_stages = False  # whether a value lives on a stage of a pipeline
        self._on_stages: dict[Any, tuple[Any, int, Tensor]] = {}
        self._lifted: dict[int, tuple[Any, SymbolicTensor]] = {}
        self._scalars: dict[Any, int] = {}
        self._wanted: Placements | None = None
        self._mode = DispatchMode(self)

    # -- running ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes this the trace that records operations on this thread."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock)
            stack.enter_context(refusing_seeds())
            stack.enter_context(compiling())
            stack.enter_context(replaying_views())
            stack.enter_context(FunctionMode(self))
            stack.enter_context(self._mode)
            if not self.with_autograd:
                stack.enter_context(torch._C._AutoDispatchBelowAutograd())
            outer, _current.tracer = _current.tracer, self
            try:
                yield
            finally:
                _current.tracer = outer

    @contextlib.contextmanager
    def factories(self, mesh: DeviceMesh, placements: Placements | None) -> Iterator[None]:
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
        self.has_stages = self.has_stages or spec.mesh.stage is not None
        result = wrapper(SymbolicTensor, spec, offset)
        result._tracer = self
        result._storage = Storage(value) if storage is None else storage
        result._path = path
        result._offset = offset
        if path:
            result._storage.cache[path] = value
        return result

    def read(self, tensor: SymbolicTensor) -> int:
        """Returns the number of a symbolic tensor's present value."""
        return self.follow(tensor._storage, tensor._path)

    def follow(self, storage: Storage, path: tuple[ViewStep, ...]) -> int:
        """Returns the number of the present value of a view."""
        if not path:
            return storage.value
        value = storage.cache.get(path)
        if value is None:
            step = path[-1]
            base = self.follow(storage, path[:-1])
            results = self.builder.apply(step.op, (Ref(base), *step.args), step.kwargs)
            value = flattened(results)[step.output]
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
        storage.write(self.put_back(storage, path, self._cast(value, tensor.dtype)))
        if path:
            self.read(tensor)

    def put_back(self, storage: Storage, path: tuple[ViewStep, ...], value: int) -> int:
        """Returns the number of a storage's value with a new one in the place of a view."""
        for depth in range(len(path) - 1, -1, -1):
            base = self.follow(storage, path[:depth])
            value = functionalization.put_back(self.builder, path[depth], base, value)
        layout = self.builder.specs[storage.value]
        value = self._with_bits(value, layout)
        if self.builder.specs[value].stride != layout.stride:
            whole = Ref(storage.value)
            (value,) = self.builder.apply(aten.copy.default, (whole, Ref(value)), {})
        return self.builder.move(value, layout.mesh, layout.placements)

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

    def on_latest_stage(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a torch function on the latest of their stages.

        Where nothing is differentiated, the builder brings operands there.
        """
        if not self.with_autograd or not torch.is_grad_enabled() or is_strict():
            return args, kwargs
        return on_latest_stage(func, args, kwargs, self._moved_once)

    def _moved_once(self, tensor: Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
        """A tensor on another stage; asked again, the same, so that one gradient is sent back."""
        if not isinstance(tensor, SymbolicTensor):
            tensor = self.lift(tensor)
        key, version = (id(tensor), tensor.requires_grad, mesh), tensor._storage.version
        known = self._on_stages.get(key)
        if known is None or known[1] != version:
            known = tensor, version, moved(tensor, mesh, placements)
            self._on_stages[key] = known
        return known[2]

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
        self.builder.constants.add(value)
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
        special = SPECIAL.get(op)
        if special is not None:
            return special(self, op, args, kwargs)
        if functionalization.is_about_shapes(args, kwargs):
            return self._on_meta(op, args, kwargs)
        return _handler(op, functionalization.draws(op, args, kwargs))(self, op, args, kwargs)

    def _as_it_is(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return op(*args, **kwargs)

    def _on_meta(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs what PyTorch computes on meta tensors, for the shapes alone, as it is."""

        def shape_of(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.is_meta else meta_tensor(self.lift(tensor)._spec)

        named = {k: functionalization.map_tensors(v, shape_of) for k, v in kwargs.items()}
        return op(*concrete(functionalization.map_tensors(args, shape_of)), **named)

    def _decompose(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        _refuse_data_dependent(op, args)
        form = sharded_form(op)
        if form is not None and is_always_taken(op):
            results = self._formed(form, args, kwargs)
            if results is not NotImplemented:
                return results
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
        is_always = is_always_taken(op)
        form = sharded_form(op) if is_always or not is_strict() or self._asks(op, args) else None
        home = form and self.builder.common_home(op, lowered, named)
        if home is not None:
            args, kwargs = self._brought((args, kwargs), home)
            lowered, named = self._lowered(op, args, kwargs)
        if form and (is_always or self.builder.moves_shards(op, lowered, named)):
            results = self._formed(form, args, kwargs)
            if results is not NotImplemented:
                found = flattened(_as_list(results))
                wanted = None if is_always else self.builder.results(op, lowered, named)
                metas = [None] * len(found) if wanted is None else wanted
                return [self._number(r, meta) for r, meta in zip(found, metas, strict=True)]
        if not functionalization.takes_device(op):
            return self.builder.apply(op, lowered, named, self.mesh)
        has_operands = bool(refs((lowered, tuple(named.values()))))
        named = functionalization.with_device(op, named, self.mesh, has_operands)
        if has_operands:
            return self.builder.apply(op, lowered, named)
        named = functionalization.with_dtype(op, self.builder.with_scalars(lowered), named)
        return self.builder.apply(op, lowered, named, self.mesh, self._fitting(op, lowered, named))

    def _asks(self, op: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
        return is_asked_for(op, functionalization.map_tensors(args, self.lift))

    def _brought(self, arguments: Any, home: DeviceMesh) -> Any:
        """Returns arguments with all tensors on one of the stages that they are on."""

        def brought(x: torch.Tensor) -> SymbolicTensor:
            return self.wrap(self.builder.brought(self.read(self.lift(x)), home))

        args, kwargs = arguments
        args = functionalization.map_tensors(args, brought)
        return args, {k: functionalization.map_tensors(v, brought) for k, v in kwargs.items()}

    def _formed(
        self, form: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the sharded form of an operation, on the mesh of its first tensor."""
        args = functionalization.map_tensors(args, self.lift)
        kwargs = {k: functionalization.map_tensors(v, self.lift) for k, v in kwargs.items()}
        operands: list[torch.Tensor] = []
        functionalization.map_tensors([list(args), list(kwargs.values())], operands.append)
        with self._mode, self.factories(self.lift(operands[0]).device_mesh, None):
            return form(*args, **kwargs)

    def permute(self, x: torch.Tensor, movement: Movement, size: int) -> SymbolicTensor:
        """Returns a tensor whose ranges of a split dim have moved; see `redistribution.permute`.

        Args:
            x: The tensor.
            movement: What moves where.
            size: The size of the dim afterwards.
        """
        with self._mode:
            plain = self.lift(x.resolve_conj().resolve_neg())
        value, spec = self.read(plain), plain._spec
        shape = (*spec.shape[: movement.dim], size, *spec.shape[movement.dim + 1 :])
        target = Spec.of(shape, spec.dtype, spec.mesh, spec.placements)
        return self.wrap(self.builder.permute(value, movement, target))

    def _number(self, result: torch.Tensor | int | None, meta: Any) -> int | Known | None:
        """The number of what a form gives, with the strides that the operation would give it."""
        if isinstance(result, int):
            return Known(result)
        value = None if result is None else self.read(self.lift(result))
        return (
            value if value is None or meta is None else self.builder.with_stride(value, meta.stride)
        )

    def _fitting(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Placements | None:
        """The placements wanted of a factory, if its result has the dims that they name."""
        if self._wanted is None:
            return None
        (meta, *_) = flattened(infer(op, self.builder.with_scalars(args), kwargs))
        dims = (p.dim for p in self._wanted if isinstance(p, Shard))
        return self._wanted if all(d < len(meta.shape) for d in dims) else None

    def _wrapped(self, op: torch._ops.OpOverload, results: list[Any]) -> Any:
        wrapped = [self._wrap_result(r) for r in results]
        if _returns_list(op):
            return wrapped
        return wrapped[0] if _num_returns(op) == 1 else tuple(wrapped)

    def _wrap_result(self, result: Any) -> Any:
        if isinstance(result, list):
            return [self._wrap_result(r) for r in result]
        if type(result) is Known:
            return result.value
        return self.wrap(result) if type(result) is int else result

    def _random(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        rewritten = functionalization.RANDOM_DECOMPOSITIONS.get(op.overloadpacket)
        if rewritten is not None:
            with self._mode:
                return rewritten(*args, **kwargs)
        return self._wrapped(op, self._draw(op, args, kwargs))

    def _draw(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        op = functionalization.with_generator(op)
        kwargs = dict(kwargs)
        generator = kwargs.pop("generator", None)
        lowered, named = self._lowered(op, args, kwargs)
        has_operands = bool(refs((lowered, tuple(named.values()))))
        named = functionalization.with_device(op, named, self.mesh, has_operands)
        if not has_operands:
            named = functionalization.with_dtype(op, self.builder.with_scalars(lowered), named)
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
        form = None if is_strict() else sharded_form(op)
        if form and self.builder.moves_shards(op, (Ref(self.read(base)), *lowered), named):
            views = self._formed(form, (base, *args[1:]), kwargs)
            if views is not NotImplemented:
                return views
        results = self.builder.apply(op, (Ref(self.read(base)), *lowered), named)
        metas = flattened(infer(op, (base._spec, *lowered), named))
        views = []
        for number, value in enumerate(flattened(results)):
            step = ViewStep(op, tuple(lowered), named, number)
            offset = base._offset + metas[number].offset
            views.append(self.wrap(value, base._storage, (*base._path, step), offset))
        return views if _returns_list(op) else views[0]

    def view_along(self, tensor: SymbolicTensor, path: tuple[ViewStep, ...]) -> SymbolicTensor:
        """Returns the view that a path leads to."""
        for step in path:
            found = self._view(step.op, (tensor, *step.args), step.kwargs)
            tensor = found[step.output] if isinstance(found, list) else found
        return tensor

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
            if storage_offset is not None:
                self.read_by_place.append(view._storage)
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
        view_form = functionalization.view_form(op)
        if view_form is not None:
            return self._reshape_in_place(view_form, args, kwargs)
        form = functionalization.functional_form(op)
        targets = form.written(args, kwargs)
        if op.overloadpacket.__name__.endswith("_"):  # else autograd does not track the target
            self._refuse_tracked_capture(targets, args, kwargs)
        written = [self.lift(t) for t in targets]
        self._check_writable(op, args, kwargs)
        if form.draws:
            args = self._filled_anew(form, written, args)
            results = self._drawn(form, args, kwargs)
        else:
            results = form.record(self, args, kwargs)
        # A functional form returns what the operation does, and after it the written arguments.
        count = sum(r.alias_info is None for r in op._schema.returns)
        for tensor, value in zip(written, results[count:], strict=False):
            is_same = self.builder.specs[value].shape == tensor.shape
            if form.dropped and not (is_same or tensor.numel()):
                self._resize(tensor, value)
            else:
                self.write(tensor, value)
        if count:
            return self._wrapped(op, results[:count])
        return form.returns(args, kwargs)

    def _filled_anew(
        self, form: functionalization.Form, written: Sequence[SymbolicTensor], args: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Spares the shards of a tensor whose values a draw replaces from being gathered."""
        fills = form.op.overloadpacket in functionalization.FILLS and not form.dropped
        if not fills or not _is_split(written[0]._spec):
            return args
        target = written[0]
        with self._mode, self.factories(target.device_mesh, None):
            # A kernel draws in the order of memory.
            stride = torch.empty_like(meta_tensor(target._spec)).stride()
            return (torch.empty_strided(target.shape, stride, dtype=target.dtype), *args[1:])

    def _drawn(
        self, form: functionalization.Form, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Draws in the order of memory, as an operation in place does.

        Of those that return a new tensor, `bernoulli` does not: it is contiguous.
        """
        order = memory_order(self.lift(args[0])._spec)
        if form.op.overloadpacket is not aten.bernoulli or order == sorted(order):
            return self._draw(form.op, *form.arguments(args, kwargs))
        with self._mode:
            args = tuple(a.permute(order) if _has_dims(a, order) else a for a in args)
        first, *rest = self._draw(form.op, *form.arguments(args, kwargs))
        inverse = [order.index(d) for d in range(len(order))]
        return [*self.builder.apply(aten.permute.default, (Ref(first), inverse), {}), *rest]

    def _refuse_tracked_capture(
        self, targets: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuses before autograd would tie a tensor of the caller to the graph of this trace."""
        if all(isinstance(t, SymbolicTensor) for t in targets) or not torch.is_grad_enabled():
            return
        tensors: list[torch.Tensor] = []
        functionalization.map_tensors([list(args), list(kwargs.values())], tensors.append)
        if any(t.requires_grad for t in tensors):
            raise TraceError(
                f"a jitted function changes a captured tensor of shape {list(targets[0].shape)} "
                f"in place to a value that requires grad ({user_line() or 'unknown line'}); its "
                "gradient would be lost.\n  Fix: pass it as an argument and return it, or "
                "detach() what is written."
            )

    def _reshape_in_place(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Makes a tensor its own view: it takes the view's shape and path."""
        tensor = args[0]
        if not isinstance(tensor, SymbolicTensor):  # a captured one, whose trace would not see it
            raise functionalization.changes_shape(op, op.overloadpacket.__name__)
        self._become(tensor, self._view(op, args, kwargs))
        return tensor

    def _resize(self, tensor: SymbolicTensor, value: int) -> None:
        """Gives an empty tensor that an ``out=`` call fills the result's shape, and memory."""
        self._become(tensor, self.wrap(self._cast(value, tensor.dtype)))

    def _become(self, tensor: SymbolicTensor, other: SymbolicTensor) -> None:
        is_argument = any(tensor is t for t, _ in self.arguments)
        if is_argument and not any(tensor is t for t, _ in self.reformed):
            self.reformed.append((tensor, tensor._storage))
        with torch._C.DisableTorchFunction(), self._mode:
            tensor.data = other
        tensor._storage, tensor._path = other._storage, other._path
        tensor._offset = other._offset

    def _check_writable(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Lets PyTorch's own meta kernel refuse what the in-place call cannot do."""
        specs = functionalization.map_tensors(args, lambda t: self.lift(t)._spec)
        named = {
            k: functionalization.map_tensors(v, lambda t: self.lift(t)._spec)
            for k, v in kwargs.items()
        }
        infer(op, concrete(specs), {k: concrete(v) for k, v in named.items()})

    # -- arguments -------------------------------------------------------------------------

    def _lowered(
        self,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        skip: int = 0,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replaces tensors by `Ref`s and symbolic numbers by `ScalarRef`s or their values."""
        lowered = tuple([self._lower(op, v, i + skip) for i, v in enumerate(args)])
        return lowered, {k: self._lower(op, v, k) for k, v in kwargs.items()}

    def _lower(self, op: torch._ops.OpOverload, value: Any, place: int | str) -> Any:
        if isinstance(value, torch.Tensor):
            return Ref(self.read(self.lift(value)))
        if isinstance(value, (list, tuple)):
            return [self._lower(op, v, place) for v in value]
        node = node_of(value)
        if node is None:
            return value
        if not functionalization.may_stay_symbolic(op, place):
            return node.read()
        key = (node.expression, type(node.value))
        if key not in self._scalars:
            self._scalars[key] = len(self.expressions)
            self.expressions.append(node.expression)
            self.builder.scalar_values.append(node.value)
        return ScalarRef(self._scalars[key])


def _is_split(spec: Spec) -> bool:
    return any(p.is_shard() for p in spec.placements)


def _as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple) else [results]


def _has_dims(value: Any, dims: Sequence[int]) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == len(dims)


@functools.lru_cache(maxsize=4096)
def _handler(op: torch._ops.OpOverload, draws: bool) -> Callable[..., Any]:
    """The method that records an operation which is not special."""
    if op.namespace == "profiler":
        return Tracer._as_it_is
    kind = functionalization.kind_of(op)
    if functionalization.is_composite(op):
        if kind is functionalization.Kind.MUTATES and functionalization.fills_out(op):
            return Tracer._mutate
        pure = kind is functionalization.Kind.PURE and not draws
        whole = pure and (has_rule(op) or _has_own_kernel(op))
        return Tracer.record if whole else Tracer._decompose
    if kind is functionalization.Kind.MUTATES:
        return Tracer._mutate
    if kind is functionalization.Kind.VIEWS:
        return Tracer._view
    return Tracer._random if draws else Tracer.record


def _has_own_kernel(op: torch._ops.OpOverload) -> bool:
    """Whether a device runs an operation as a whole although it could be decomposed."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(op.name(), key) for key in ("CPU", "CUDA"))


@functools.lru_cache(maxsize=4096)
def _num_returns(op: torch._ops.OpOverload) -> int:
    return len(op._schema.returns)


@functools.lru_cache(maxsize=4096)
def _returns_list(op: torch._ops.OpOverload) -> bool:
    returns = op._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)


def read_state(generator: torch.Generator) -> torch.Tensor:
    """Returns the state of a generator that several threads may read.

    PyTorch makes the tensor with the interpreter and the generator locked. A collection there would
    let go of the interpreter, to a thread that then waits for the generator and keeps it.
    """
    with _reading:
        collects = gc.isenabled()
        gc.disable()
        try:
            return generator.get_state()
        finally:
            if collects:
                gc.enable()


def _refuse_data_dependent(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    dynamic = _may_depend_on_data(op)
    if op is _ONE_HOT:
        dynamic = not any(type(a) is int and a >= 0 for a in args[1:])
    if op is _INDEX:
        (indices,) = args[1:]
        dynamic = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices)
    if dynamic:
        raise DataDependentError(
            f"the result of {op} depends on the values of its arguments, which exist at run "
            f"time only, but the function is being traced ({user_line() or 'unknown line'}).\n"
            "  Fix: use torch.where or a mask, or compute it outside the jitted function."
        )


_ONE_HOT, _INDEX = aten.one_hot.default, aten.index.Tensor
_DEPENDENT = (
    aten.where.default,
    aten.tensor_split.tensor_indices_or_sections,
)


@functools.lru_cache(maxsize=4096)
def _may_depend_on_data(op: torch._ops.OpOverload) -> bool:
    """Whether the shapes of an operation's results depend on the values of its arguments."""
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    return op in _DEPENDENT or any(tag in op.tags for tag in tags)
