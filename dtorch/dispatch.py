"""Dispatch: from a torch call to the program that computes it, by way of one cache.

Takes a function and its arguments. The key is the function, the specs of the tensors, and the
values of what is static; on a hit the cached program and the handles go to the workers and new
tensors are returned at once. On a miss the function is traced. An eager torch call and a
jitted function go the same way.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import aliases, gradients, memo
from .arguments import Arguments, mesh_of
from .cache import Cache, CacheInfo, lookup
from .compiled import Compiled, link, overwrite
from .errors import DataDependentError, MutationError
from .infer import settings
from .mesh import DeviceMesh
from .placement import Placements, Replicate, complete
from .recording import compile_call
from .runtime import NATIVE, check_not_on_worker, timeline
from .runtime.timeline import Doing
from .spec import Spec
from .stages import moved, on_latest_stage
from .storages import STORAGE_FUNCTIONS, follow, in_its_storage, put_back
from .strictness import is_strict
from .symbolic import SymbolicTensor
from .tensor import (
    EntryPoints,
    Tensor,
    place,
)
from .tracer import current
from .tracing_modes import replaying_views
from .tree import flatten, unflatten

_eager_cache = Cache()
_calls = memo.call_cache(ints_are_dynamic=True, capacity=_eager_cache.capacity)
_operations = memo.call_cache(
    ints_are_dynamic=True, capacity=_eager_cache.capacity, below_autograd=True
)


def cache_info() -> CacheInfo:
    """Returns the counts of the cache of eager calls."""
    info = _eager_cache.info()
    return info._replace(hits=info.hits + _calls.hits + _operations.hits)


def cache_clear() -> None:
    """Empties the cache of eager calls."""
    for cache in (_eager_cache, _calls, _operations):
        cache.clear()


# -- eager calls ---------------------------------------------------------------------------

_DIRECT_NAMES = {"__get__", "__set__", "__delete__"}
_DIRECT = {
    torch.Tensor.backward,
    torch.Tensor.requires_grad_,
    torch.Tensor.register_hook,
    torch.Tensor.retain_grad,
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.is_contiguous,
    torch.Tensor.storage_offset,
    torch.Tensor.element_size,
    torch.Tensor.nelement,
    torch.Tensor.__hash__,
    torch.Tensor.__len__,
    torch.autograd.grad,
    torch.autograd.backward,
}
# Called unbound, these would reach for memory that a distributed tensor does not have.
_OWN = {
    torch.Tensor.apply_,
    torch.Tensor.map_,
    torch.Tensor.map2_,
    torch.Tensor.data_ptr,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__dlpack__,
    torch.Tensor.__dlpack_device__,
}
_DATA_SETTER = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    torch._ops.OpOverload,
)


class _OnHost:
    """Marks a call whose result's shape or value is only known at run time."""


_ON_HOST = _OnHost()


def call_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a torch function on distributed tensors: the entry point of ``__torch_function__``."""
    if func in _DIRECT or getattr(func, "__name__", None) in _DIRECT_NAMES:
        if func == _DATA_SETTER:
            return _set_data(*args)
        return _directly(func, args, kwargs)
    if func in _OWN:
        return getattr(args[0], func.__name__)(*args[1:], **kwargs)
    if NATIVE is None and (known := _calls.call(func, args, kwargs)) is not memo.MISSED:
        return known
    leaves, treespec = flatten((args, kwargs))
    if torch.is_grad_enabled() and _any_requires_grad(leaves):
        return _with_autograd(func, args, kwargs)
    is_builtin = isinstance(func, _BUILTIN)  # the ints of other functions are static
    call = memo.NamedCall(func, args, kwargs) if is_builtin else None
    return _run_eagerly(func, leaves, treespec, call=call)


def _any_requires_grad(leaves: list[Any]) -> bool:
    # Reading the attribute of a subclass would come back here as a call of its own.
    with torch._C.DisableTorchFunctionSubclass():
        return any(isinstance(a, torch.Tensor) and a.requires_grad for a in leaves)


def call_operation(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an ATen operation below autograd: the entry point of ``__torch_dispatch__``."""
    if NATIVE is None and (known := _operations.call(op, args, kwargs)) is not memo.MISSED:
        return known
    leaves, treespec = flatten((args, kwargs))
    if any(isinstance(leaf, SymbolicTensor) for leaf in leaves):
        return SymbolicTensor.__torch_dispatch__(op, (), args, kwargs)
    call = memo.NamedCall(op, args, kwargs)
    return _run_eagerly(op, leaves, treespec, below_autograd=True, call=call)


def _directly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        substitute = gradients.DIRECT_SUBSTITUTES.get(func)
        return func(*args, **kwargs) if substitute is None else substitute(*args, **kwargs)


def _with_autograd(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lets autograd record the call; every operation below it is a program of its own."""
    given, treespec = flatten((args, kwargs))
    mesh = mesh_of(given)
    leaves = [as_distributed(leaf, mesh) for leaf in given]
    copies = [pair for pair in zip(given, leaves, strict=True) if pair[0] is not pair[1]]
    before = [copy._version for _, copy in copies]
    args, kwargs = unflatten(treespec, leaves)
    if mesh.stage is not None and not is_strict():
        args, kwargs = on_latest_stage(func, args, kwargs, moved)
    substitute = gradients.SUBSTITUTES.get(func)
    with torch._C.DisableTorchFunctionSubclass(), replaying_views():
        result = (substitute or func)(*args, **kwargs)
        for (plain, copy), version in zip(copies, before, strict=True):
            if copy._version != version:
                plain.copy_(ToTorch.apply(copy))
                result = plain if result is copy else result
    return result


def as_distributed(leaf: Any, mesh: DeviceMesh) -> Any:
    """Returns a leaf, or where it is a plain torch tensor that requires grad, its replicas."""
    plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, Tensor)
    if plain and leaf.requires_grad:
        return FromTorch.apply(leaf, mesh)
    return leaf


class FromTorch(torch.autograd.Function):
    """A torch tensor replicated on a mesh; its gradient comes back as a torch tensor."""

    @staticmethod
    def forward(ctx: Any, source: Any, mesh: Any) -> Any:
        ctx.device = source.device
        return place(source, mesh, (Replicate(),) * mesh.ndim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad.to_torch().to(ctx.device), None


class ToTorch(torch.autograd.Function):
    """The value of a tensor as a torch tensor; its gradient comes back on the mesh."""

    @staticmethod
    def forward(ctx: Any, source: Any) -> Any:
        ctx.mesh = source.device_mesh
        return source.to_torch()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return place(grad, ctx.mesh, (Replicate(),) * ctx.mesh.ndim)


def _set_data(target: Tensor, value: Any) -> None:
    """``target.data = value``, where the shapes agree: the tensor takes the value's shards."""
    if not isinstance(value, Tensor) or value.shape != target.shape or value.dtype != target.dtype:
        raise MutationError(
            f"x.data = ...: a distributed {target._spec!r} takes only a dtorch.Tensor of the same "
            f"shape and dtype, not {type(value).__name__} {list(getattr(value, 'shape', ()))}."
        )
    with aliases.held([target, value]):
        moved = value.detach().redistribute(target.device_mesh, target.placements)
        if target._aliases is not None:
            target._aliases.remove(target)
        target._shards, target._reduced = moved._shards, None
        link(value, target, ())


def run_traced(
    function: Callable[..., Any], args: tuple[Any, ...], mesh: DeviceMesh, name: str = ""
) -> Any:
    """Runs one of dtorch's own functions as a program: inlined where a trace is active.

    Args:
        function: What to trace; it expects an active trace.
        args: Its arguments.
        mesh: The mesh of the trace.
        name: What messages and profiles call it, where that is not the function's name.
    """
    if current() is not None:
        return function(*args)
    return _run_eagerly(function, *flatten((args, {})), mesh, name=name)


def _run_eagerly(
    func: Any,
    leaves: list[Any],
    treespec: Any,
    mesh: DeviceMesh | None = None,
    below_autograd: bool = False,
    call: memo.NamedCall | None = None,
    name: str = "",
) -> Any:
    name = name or _name_of(func)
    with timeline.noted(Doing.EAGER, name):
        return _run_new(func, leaves, treespec, mesh, below_autograd, call, name)


def _run_new(
    func: Any,
    leaves: list[Any],
    treespec: Any,
    mesh: DeviceMesh | None,
    below_autograd: bool,
    call: memo.NamedCall | None,
    name: str,
) -> Any:
    check_not_on_worker("calling a torch function")
    asked = func
    func, leaves = in_its_storage(func, leaves)
    dynamic = (float, int) if isinstance(func, _BUILTIN) else (float,)
    arguments = Arguments(leaves, dynamic, mesh)
    key = (func, treespec, arguments.key, settings())
    entry, static = lookup(
        _eager_cache,
        key,
        arguments,
        lambda static: _compile_eagerly(func, arguments, treespec, static, name),
    )
    if entry is _ON_HOST:
        return _on_host(func, arguments, treespec)
    cache, run = (_operations, _run_below) if below_autograd else (_calls, _run_above)
    is_plain = func is asked and func not in STORAGE_FUNCTIONS
    if is_plain and not below_autograd and _is_of_autograd(entry):
        if call is not None:
            memo.remember(cache, call, treespec, arguments, static, entry, run, False, _directly)
        return _directly(func, *unflatten(treespec, leaves))
    if call is not None and is_plain:
        memo.remember(cache, call, treespec, arguments, static, entry, run, check_aliases=False)
    return unflatten(entry.treespec, run(entry, arguments))


def _is_of_autograd(compiled: Compiled) -> bool:
    """Whether autograd has to see a call of which nothing requires grad: it makes views.

    A write to a view, of what requires grad, is a write to its base.
    """
    tracked = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return tracked and any(output.kind == "alias" for output in compiled.outputs)


_RESIZES = {
    torch.Tensor.resize_,
    torch.Tensor.resize_as_,
    torch.resize_as_,
}  # elements may be new, of any value


def _run_above(compiled: Compiled, arguments: Arguments) -> list[Any]:
    return compiled.run(arguments, check_aliases=False)


def _run_below(compiled: Compiled, arguments: Arguments) -> list[Any]:
    return compiled.run(arguments, check_aliases=False, below_autograd=True)


def _compile_eagerly(
    func: Any, arguments: Arguments, treespec: Any, static: set[int], name: str
) -> tuple[Any, set[int]]:
    if func in _RESIZES:
        return _ON_HOST, set(arguments.scalars)
    everything = set(arguments.scalars)
    with timeline.noted(Doing.TRACE, name):
        try:
            compiled, reads = compile_call(func, arguments, treespec, static, name)
        except DataDependentError:
            return _ON_HOST, everything
        except Exception:
            if static == everything:
                raise
            compiled, reads = compile_call(func, arguments, treespec, everything, name)
    return compiled, reads


def _name_of(func: Any) -> str:
    if type(func) is _Move:
        return "redistribute"
    return getattr(func, "__name__", None) or type(func).__name__.strip("_").lower()


def _on_host(func: Any, arguments: Arguments, treespec: Any) -> Any:
    """Runs a call whose result depends on values: waits for them and computes on the client."""
    fetched = [leaf.to_torch() if isinstance(leaf, Tensor) else leaf for leaf in arguments.leaves]
    args, kwargs = unflatten(treespec, fetched)
    before = [t._version if isinstance(t, torch.Tensor) else 0 for t in fetched]
    result = func(*args, **kwargs)
    owners: dict[int, Any] = {}
    for leaf, value, version in zip(arguments.leaves, fetched, before, strict=True):
        if isinstance(leaf, Tensor):
            owners[id(value)] = leaf
            if value._version != version:
                overwrite(leaf, value)
    mesh = arguments.mesh
    leaves, result_tree = flatten(result)

    def placed(leaf: Any) -> Any:
        if id(leaf) in owners or not isinstance(leaf, torch.Tensor):
            return owners.get(id(leaf), leaf)
        return place(leaf, mesh, (Replicate(),) * mesh.ndim)

    return unflatten(result_tree, list(map(placed, leaves)))


# -- redistribution ------------------------------------------------------------------------


class Redistribution(torch.autograd.Function):
    """The identity on the global value, in another layout.

    The gradient comes back in the layout of the source, with `Replicate` in place of `Partial`.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(ctx: Any, source: Any, mesh: Any, placements: Any) -> Any:
        ctx.layout = (source.device_mesh, tuple(source.placements))
        return _redistributed(source, mesh, placements)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        mesh, placements = ctx.layout
        return redistribute(grad, mesh, complete(placements)), None, None


def redistribute(source: Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    """Returns a tensor in another layout; `placements` are normalised."""
    if mesh == source.device_mesh and placements == source._spec.placements:
        return source
    target = source._spec.with_layout(mesh, placements)
    result = _calls.call(target, (source,), {})  # knows nothing of what autograd has to record
    if result is not memo.MISSED:
        return result
    if source.requires_grad and torch.is_grad_enabled():
        return Redistribution.apply(source, mesh, placements)
    return _redistributed(source, mesh, placements)


def _redistributed(source: Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    if isinstance(source, SymbolicTensor):
        return _move(source, mesh, placements)
    target = source._spec.with_layout(mesh, placements)
    call = memo.NamedCall(target, (source,), {})
    return _run_eagerly(_Move(target), *flatten(((source,), {})), call=call)


class _Move(NamedTuple):
    """Redistribution to a spec, as a function."""

    target: Spec

    def __call__(self, source: SymbolicTensor) -> SymbolicTensor:
        return _move(source, self.target.mesh, self.target.placements)


def _move(source: Any, mesh: DeviceMesh, placements: Placements) -> Any:
    tracer = source._tracer
    return tracer.wrap(tracer.builder.move(tracer.read(source), mesh, placements))


# -- writes through views --------------------------------------------------------------------


def _run_whole(function: Any, *tensors: Tensor) -> Tensor:
    """Runs a function of whole tensors, of which autograd knows nothing."""
    call = memo.NamedCall(function, tensors, {})
    with torch.no_grad():
        result = _operations.call(*call)
        if result is memo.MISSED:
            leaves, treespec = flatten((tensors, {}))
            result = _run_eagerly(function, leaves, treespec, below_autograd=True, call=call)
    return result


EntryPoints.follow = lambda storage, path: _run_whole(follow(path), storage)
EntryPoints.put_back = lambda storage, path, value: _run_whole(put_back(path), storage, value)
EntryPoints.function = call_function
EntryPoints.operation = call_operation
EntryPoints.redistribute = redistribute


# -- the way in through the caches ---------------------------------------------------------


class _Probe(torch.Tensor):
    """Tells which function torch names when one of its methods is called."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func


_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul"),
    *("pow", "rpow", "mod", "floordiv", "neg", "abs", "invert", "and", "or", "xor"),
    *("eq", "ne", "lt", "le", "gt", "ge", "getitem"),
    *("iadd", "isub", "imul", "itruediv"),
)


def _in_order(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operator; of a reflected one, the operator itself where a torch tensor is left.

    Python asks a subclass for its reflected operator first, and torch's ``a / x`` is not its
    ``x.__rtruediv__(a)``, which multiplies by the reciprocal.
    """
    forward = getattr(torch.Tensor, f"__{name[1:]}__", None) if name.startswith("r") else None
    if forward is None:
        return original

    @functools.wraps(original)
    def reflected(self: Any, other: Any) -> Any:
        return forward(other, self) if type(other) is torch.Tensor else original(self, other)

    return reflected


def _cached_method(original: Callable[..., Any], func: Any) -> Callable[..., Any]:
    """Returns a method of a tensor: the cache first, then torch's own, as ``NATIVE.method``."""
    is_enabled, call = torch._C._is_torch_function_enabled, _calls.call

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        result = call(func, args, kwargs) if is_enabled() else memo.MISSED
        return original(*args, **kwargs) if result is memo.MISSED else result

    return method


def _install_methods(cached: Callable[..., Any]) -> None:
    """Puts the cache before torch's operators and methods on a `Tensor`."""
    probe = torch.empty(1).as_subclass(_Probe)
    for name in _OPERATORS:
        original = getattr(torch.Tensor, f"__{name}__")
        operands = () if name in ("neg", "abs", "invert") else (1,)
        func = original(probe, *operands)
        setattr(Tensor, f"__{name}__", cached(_in_order(name, original), func))
    for name, original in vars(torch._C.TensorBase).items():
        is_method = type(original) is types.MethodDescriptorType and not name.startswith("_")
        is_torchs = getattr(torch.Tensor, name) is original and name not in vars(Tensor)
        if is_method and is_torchs and original not in _DIRECT:
            setattr(Tensor, name, cached(original, original))


def _install_native() -> None:
    """Puts the C++ caches before torch's functions on a `Tensor`."""
    substitutes = dict(gradients.SUBSTITUTES)
    special = {*_OWN, *gradients.DIRECT_SUBSTITUTES, _DATA_SETTER}
    NATIVE.install_entrances(
        _calls, call_function, _operations, call_operation, substitutes, special
    )
    Tensor.__torch_function__ = NATIVE.torch_function
    Tensor.__torch_dispatch__ = NATIVE.torch_dispatch


if NATIVE is not None:
    _install_native()
_install_methods(_cached_method if NATIVE is None else NATIVE.method)
