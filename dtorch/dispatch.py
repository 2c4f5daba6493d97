"""Dispatch: from a torch call to the program that computes it, by way of one cache.

Takes a function and its arguments. The key is the function, the specs of the tensors, and the
values of what is static; on a hit the cached program and the handles go to the workers and new
tensors are returned at once. On a miss the function is traced. An eager torch call and a
jitted function go the same way.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from . import autograd, generator
from .errors import DataDependentError, MutationError, TraceError
from .lowering import lower
from .mesh import DeviceMesh
from .placement import Placements, Replicate
from .program import Apply, Program, refs
from .runtime import Call, Executable, Handle, submit
from .runtime.future import Failure, wait_all
from .runtime.worker import check_not_on_worker
from .scalars import Expression, evaluate, node_of, symbolic
from .source import user_line
from .spec import Spec
from .tensor import (
    AliasGroup,
    EntryPoints,
    Handles,
    Tensor,
    default_mesh,
    dense_stride,
    place,
    place_parts,
)
from .trace import NeedsAutograd, Source, Storage, SymbolicTensor, Tracer, current
from .tree import flatten, unflatten

DEFAULT_CAPACITY = 4096
_cache_lock = threading.Lock()
os.register_at_fork(
    before=_cache_lock.acquire,
    after_in_parent=_cache_lock.release,
    after_in_child=_cache_lock.release,
)


# -- the cache -----------------------------------------------------------------------------


class CacheInfo(NamedTuple):
    """What a cache has done: calls served, functions traced, and entries held."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class Cache:
    """Compiled calls by key, least recently used first; bounded."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[Any, Any] = OrderedDict()
        self._lock = _cache_lock
        self.hits = self.misses = 0

    def get(self, key: Hashable) -> Any:
        """Returns the entry of a key, or None; `count` keeps the score."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def count(self, hit: bool) -> None:
        """Counts one call that was served, or one function that was traced."""
        with self._lock:
            if hit:
                self.hits += 1
            else:
                self.misses += 1

    def put(self, key: Hashable, entry: Any) -> None:
        """Stores an entry and drops the least recently used beyond the capacity."""
        with self._lock:
            self._entries[key] = entry
            while len(self._entries) > self.capacity:
                self._entries.popitem(last=False)

    def rename(self, old: Hashable, new: Hashable) -> None:
        """Moves what is stored under a key, and under keys that begin with it, to another."""
        with self._lock:
            for key in [
                k for k in self._entries if k == old or (type(k) is tuple and k and k[0] == old)
            ]:
                entry = self._entries.pop(key)
                self._entries[new if key == old else (new, *key[1:])] = entry

    def clear(self) -> None:
        """Drops all entries and zeroes the counts."""
        with self._lock:
            self._entries.clear()
            self.hits = self.misses = 0

    def info(self) -> CacheInfo:
        """Returns the counts."""
        return CacheInfo(self.hits, self.misses, self.capacity, len(self._entries))


_eager_cache = Cache()


def cache_info() -> CacheInfo:
    """Returns the counts of the cache of eager calls."""
    return _eager_cache.info()


def cache_clear() -> None:
    """Empties the cache of eager calls."""
    _eager_cache.clear()


# -- arguments -----------------------------------------------------------------------------


_STATIC = (
    type(None),
    bool,
    str,
    bytes,
    complex,
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    DeviceMesh,
)


class Arguments:
    """The leaves of a call's arguments, sorted into what is a value and what is static.

    Attributes:
        leaves: The leaves, in the order of the tree.
        values: What the program reads of them: a reduced `Partial` in place of the tensor itself.
        key: What the key says of each leaf: a spec, a type, or a static value.
        tensors: The numbers of the leaves that are tensors.
        scalars: The numbers of the leaves that are run-time scalars.
    """

    __slots__ = ("key", "leaves", "mesh", "scalars", "tensors", "values")

    def __init__(self, leaves: list[Any], dynamic: tuple[type, ...], mesh: DeviceMesh | None):
        self.leaves = self.values = leaves
        self.tensors: list[int] = []
        self.scalars: list[int] = []
        self.mesh = mesh or _mesh_of(leaves)
        self.key = tuple(self._key_of(i, leaf, dynamic) for i, leaf in enumerate(leaves))

    def _key_of(self, number: int, leaf: Any, dynamic: tuple[type, ...]) -> Hashable:
        kind = type(leaf)
        if kind is Tensor:
            self.tensors.append(number)
            if (reduced := leaf._reduced) is not None:
                self.values = list(self.leaves) if self.values is self.leaves else self.values
                leaf = self.values[number] = reduced
            return leaf._spec
        if kind in dynamic:
            self.scalars.append(number)
            return kind
        if isinstance(leaf, numpy.generic):
            self.leaves[number] = self.values[number] = leaf.item()
            return self._key_of(number, self.leaves[number], dynamic)
        if kind is float or kind is complex:
            return exact(leaf)
        if kind is int or kind in _STATIC:
            return (kind, leaf)
        if isinstance(leaf, Tensor):  # of a trace, and none is active here
            raise leaf._outlived("a torch function")  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(leaf, torch.Tensor):
            self.tensors.append(number)
            return _torch_key(leaf, self.mesh)
        if isinstance(leaf, numpy.ndarray):
            self.leaves[number] = self.values[number] = torch.from_numpy(leaf)
            return self._key_of(number, self.leaves[number], dynamic)
        if isinstance(leaf, torch.Generator):
            return (torch.Generator, id(leaf), leaf)
        return (kind, leaf)


def exact(value: Any) -> Hashable:
    """Returns a key that tells apart what Python calls equal: 1, 1.0 and True; 0.0 and -0.0."""
    if isinstance(value, float):
        return (type(value), value.hex())
    if isinstance(value, complex):
        return (type(value), value.real.hex(), value.imag.hex())
    if isinstance(value, tuple):
        return (type(value), *map(exact, value))
    return (type(value), value)


def _mesh_of(leaves: list[Any]) -> DeviceMesh:
    for leaf in leaves:
        if type(leaf) is Tensor:
            return leaf._spec.mesh
    return default_mesh()


def _torch_key(tensor: torch.Tensor, mesh: DeviceMesh) -> Hashable:
    if tensor.layout != torch.strided:
        raise TraceError(f"dtorch does not support tensors of layout {tensor.layout}.")
    return ("torch", tensor.shape, tensor.dtype, dense_stride(tensor), mesh, mesh.stage)


def _torch_spec(tensor: torch.Tensor, mesh: DeviceMesh) -> Spec:
    replicated = (Replicate(),) * mesh.ndim
    return Spec.of(tensor.shape, tensor.dtype, mesh, replicated, dense_stride(tensor))


def modes() -> Hashable:
    """Returns the settings that a trace depends on, for the key."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        _autocast(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
    )


def _autocast() -> Hashable:
    if not torch._C._is_any_autocast_enabled():
        return None
    kinds = ("cpu", "cuda")
    return tuple(torch.is_autocast_enabled(k) and torch.get_autocast_dtype(k) for k in kinds)


# -- compiled calls --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """How one leaf of a result is made.

    Attributes:
        kind: ``"value"`` (a program output), ``"alias"`` (the same, aliasing a leaf or a captured
            tensor), ``"sibling"`` (aliasing an earlier result), ``"part"`` (a view, the first of
            several results in one storage), ``"leaf"`` (an argument itself), ``"again"`` (an
            earlier result itself), ``"scalar"`` (an expression), or ``"constant"``.
        item: The program output's index, the leaf's or the result's number, the expression, or
            the object.
        leaf: For ``"alias"`` and ``"sibling"``, the leaf, captured tensor or result whose storage
            it shares, and whether it is all of it.
    """

    kind: str
    item: Any
    leaf: tuple[int | Tensor, bool] | None = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Compiled:
    """A traced call: its program and what to pass in and out.

    Attributes:
        program: The global program.
        executable: Its local form.
        sources: Where each program input comes from.
        expressions: The run-time scalars, over the leaves.
        outputs: How each leaf of the result is made.
        treespec: The structure of the result.
        mutated: Program outputs that replace the value of a leaf or a captured tensor.
        reduced: Program outputs that are a partial leaf, reduced.
        states: Program outputs that are the next state of a generator.
        extra: Program outputs beyond those, which the caller of `run` asked for.
        untried: Not empty until the first run, where a kernel may refuse a dtype.
    """

    program: Program
    executable: Executable
    sources: tuple[Source, ...]
    expressions: tuple[Expression, ...]
    outputs: tuple[Output, ...]
    treespec: Any
    mutated: tuple[tuple[int, Source], ...]
    reduced: tuple[tuple[int, int], ...]
    states: tuple[tuple[int, torch.Generator | None], ...]
    extra: tuple[int, ...] = ()
    constants: dict[int, Handles] = dataclasses.field(default_factory=dict)
    untried: set[bool] = dataclasses.field(default_factory=set)

    def run(self, arguments: Arguments, check_aliases: bool) -> list[Any]:
        """Submits the program and returns the result's leaves, and after them the extra ones."""
        leaves, read = arguments.leaves, arguments.values
        if self.mutated:
            self._check_mutation(leaves, check_aliases or len(self.mutated) > 1)
        if not self.states:
            values = self._submit(read, {})
        else:
            with generator.lock:
                states = self._states()
                values = self._submit(read, states)
                for output, owner in self.states:
                    generator.advance(owner, values[output])
        if self.untried:
            _raise_if_refused(values)
            self.untried.clear()
        for output, source in self.mutated:
            _rebind(leaves[source.item] if source.kind == "leaf" else source.item, values[output])
        for output, leaf in self.reduced:
            leaves[leaf]._reduced = values[output]
        results: list[Any] = []
        for output in self.outputs:
            results.append(self._result(output, leaves, values, results))
        return [*results, *(values[i] for i in self.extra)]

    def _states(self) -> dict[torch.Generator | None, Tensor]:
        found = {}
        for source, value in zip(self.sources, self.program.inputs, strict=True):
            if source.kind == "generator":
                mesh = self.program.specs[value].mesh
                found[source.item] = generator.state_of(source.item, mesh)
        return found

    def _submit(
        self, leaves: list[Any], states: dict[torch.Generator | None, Tensor]
    ) -> list[Tensor]:
        inputs = [self._handles(i, s, leaves, states) for i, s in enumerate(self.sources)]
        scalars = [evaluate(e, leaves) for e in self.expressions]
        return submit_program(self.program, self.executable, inputs, scalars)

    def _handles(
        self,
        number: int,
        source: Source,
        leaves: list[Any],
        states: dict[torch.Generator | None, Tensor],
    ) -> Handles:
        if source.kind == "generator":
            return states[source.item]._handles
        if source.kind == "capture":
            return source.item._handles
        spec = self.program.specs[self.program.inputs[number]]
        if source.kind == "constant":
            return self._constant(number, source, spec)
        leaf = leaves[source.item]
        if isinstance(leaf, Tensor):
            return leaf._handles
        return place_parts(leaf.detach().resolve_conj().resolve_neg(), spec, copy=True)

    def _constant(self, number: int, source: Source, spec: Spec) -> Handles:
        if source.version is None:  # of inference mode: whether it has changed is not known
            return place_parts(source.item, spec, copy=True)
        if source.item._version != source.version:
            raise MutationError(
                f"a torch tensor of shape {list(source.item.shape)} that a jitted function "
                "captured was written to after it was handed over.\n  Fix: pass it as an argument."
            )
        if number not in self.constants:
            self.constants[number] = place_parts(source.item, spec, copy=False)
        return self.constants[number]

    def _result(
        self, output: Output, leaves: list[Any], values: list[Tensor], before: list[Any]
    ) -> Any:
        if output.kind == "value":
            return values[output.item]
        if output.kind == "leaf":
            return leaves[output.item]
        if output.kind == "scalar":
            return evaluate(output.item, leaves)
        if output.kind == "alias":
            assert output.leaf is not None
            owner, is_whole = output.leaf
            base = owner if isinstance(owner, Tensor) else leaves[owner]
            return _link(base, values[output.item], is_whole)
        if output.kind == "sibling":
            assert output.leaf is not None
            first, is_whole = output.leaf
            return _link(before[first], values[output.item], is_whole)
        if output.kind == "again":
            return before[output.item]
        if output.kind == "part":
            AliasGroup().add(values[output.item], False)
            return values[output.item]
        return output.item

    def _check_mutation(self, leaves: list[Any], check_aliases: bool) -> None:
        for _, source in self.mutated:
            target = leaves[source.item] if source.kind == "leaf" else source.item
            _check_writable(target)
            if check_aliases:
                captured = [s.item for s in self.sources if s.kind == "capture" and s != source]
                own = source.item if source.kind == "leaf" else -1
                others = [leaf for i, leaf in enumerate(leaves) if i != own]
                _check_unaliased(target, [*others, *captured])


def submit_program(
    program: Program,
    executable: Executable,
    inputs: Sequence[Handles],
    scalars: Sequence[Any],
) -> list[Tensor]:
    """Queues a program on its devices and returns its outputs, which are not yet computed."""
    specs = [program.specs[v] for v in program.outputs]
    handles = [tuple(Handle() for _ in s.mesh.devices) for s in specs]
    num_threads, count = torch.get_num_threads(), len(executable.program.devices)
    threads = num_threads if count <= 1 else max(1, num_threads // count)
    submit(Call(executable, inputs, handles, scalars, threads, user_line()))
    return [Tensor._of(s, h) for s, h in zip(specs, handles, strict=True)]


def _may_be_refused(program: Program) -> bool:
    """Whether an operation takes other dtypes than float32 or float64, or is for integers."""
    for instruction in program.instructions:
        if isinstance(instruction, Apply):
            operands = refs((instruction.args, instruction.kwargs))
            dtypes = {program.specs[r.id].dtype for r in operands}
            common = len(dtypes) < 2 and dtypes <= {torch.float32, torch.float64}
            if not common or any(w in instruction.op.name() for w in _FOR_INTEGERS):
                return True
    return False


_FOR_INTEGERS = ("bitwise", "shift", "__and__", "__or__", "__xor__", "gcd", "lcm")


def _raise_if_refused(values: Sequence[Tensor]) -> None:
    """Waits for the first run of a program and raises if a kernel lacks a dtype.

    Meta kernels let some dtypes pass that the real ones refuse; that is known at the first run,
    and then it is an error of the call. Other failures stay where they are until a fetch.
    """
    handles = [h for v in values for h in v._handles]
    wait_all(handles)
    for handle in handles:
        value = handle.value
        if isinstance(value, Failure) and _is_about_dtypes(value.cause):
            raise type(value.cause)(value.message) from value.cause


def _is_about_dtypes(error: BaseException) -> bool:
    words = ("not implemented for", "dtype", "data type", "scalar type", "boolean")
    named = any(word in str(error).lower() for word in words)
    return isinstance(error, (NotImplementedError, TypeError)) or named


def _check_writable(target: torch.Tensor) -> None:
    if not isinstance(target, Tensor):
        raise MutationError(
            f"an in-place call would change a torch tensor of shape {list(target.shape)}, which "
            "dtorch has only a copy of.\n  Fix: use the functional form, or make it a "
            "dtorch.Tensor first."
        )
    group = target._aliases
    others = [] if group is None else group.others(target)
    if group is None or not others:
        return
    if not group.is_whole(target):
        raise MutationError(
            f"an in-place call on a view (shape {list(target.shape)}) would have to change the "
            "tensor that it is a view of.\n  Fix: index the base in the same call "
            "(x[i] = value), or use a functional form such as torch.select_scatter, "
            "torch.slice_scatter or torch.where."
        )
    for other, is_whole in others:
        if not is_whole:
            raise MutationError(
                f"an in-place call on a tensor of shape {list(target.shape)} would have to "
                f"change a view of it (shape {list(other.shape)}) that is still in use.\n"
                "  Fix: clone() the view, drop it first, or use the functional form."
            )


def _check_unaliased(target: Tensor, others: Sequence[Any]) -> None:
    for other in others:
        if not isinstance(other, Tensor):
            continue
        related = target._aliases is not None and other._aliases is target._aliases
        if other is target or related or other._handles is target._handles:
            raise MutationError(
                "a jitted function changes an argument in place that it is also given under "
                f"another name (shape {list(target.shape)}).\n  Fix: pass it once, or a clone()."
            )


def _rebind(target: Tensor, value: Tensor) -> None:
    """Gives a tensor, and every other that is the same storage, a new value."""
    same = [target]
    if target._aliases is not None:
        same += [t for t, is_whole in target._aliases.others(target) if is_whole]
    spec = target._spec
    fits = spec.placements == value._spec.placements
    moved = value if fits else _redistributed(value, spec.mesh, spec.placements)
    for tensor in same:
        tensor._handles = moved._handles
        tensor._reduced = None if fits else value
    torch.autograd.graph.increment_version(target)


def _link(base: Tensor, view: Tensor, is_whole: bool) -> Tensor:
    """Remembers that a tensor shares the storage of another."""
    if base._aliases is None:
        AliasGroup().add(base, True)
    assert base._aliases is not None
    base._aliases.add(view, is_whole and base._aliases.is_whole(base))
    return view


# -- tracing -------------------------------------------------------------------------------


def compile_call(
    function: Callable[..., Any],
    arguments: Arguments,
    treespec: Any,
    static: set[int],
    name: str,
    with_autograd: bool = False,
) -> tuple[Compiled, set[int]]:
    """Traces a call.

    Returns:
        The compiled call, and the numbers of the scalar leaves whose values it depends on.
    """
    try:
        return _compile(function, arguments, treespec, static, name, with_autograd)
    except NeedsAutograd:
        return _compile(function, arguments, treespec, static, name, True)


def _compile(
    function: Callable[..., Any],
    arguments: Arguments,
    treespec: Any,
    static: set[int],
    name: str,
    with_autograd: bool,
) -> tuple[Compiled, set[int]]:
    tracer = Tracer(arguments.mesh, with_autograd)
    with tracer.active():
        leaves = symbolic_leaves(tracer, arguments, static)
        args, kwargs = unflatten(treespec, leaves)
        result = function(*args, **kwargs)
        found, result_tree = flatten(result)
        end = ending(tracer, found)
        program = tracer.builder.finish(end.values, name)
        compiled = compiled_from(tracer, program, end, result_tree)
    return compiled, tracer.reads | static


def symbolic_leaves(tracer: Tracer, arguments: Arguments, static: set[int]) -> list[Any]:
    """Returns the leaves of a call with tensors and run-time scalars made symbolic."""
    leaves = list(arguments.leaves)
    for number in arguments.tensors:
        leaf = arguments.values[number]
        spec = leaf._spec if isinstance(leaf, Tensor) else _torch_spec(leaf, arguments.mesh)
        leaves[number] = tracer.argument(spec, number)
    for number in arguments.scalars:
        if number not in static:
            leaves[number] = symbolic(number, leaves[number], tracer.reads.add)
    return leaves


class Ending(NamedTuple):
    """What a trace returns, before it is lowered: `Compiled` without its programs."""

    values: list[int]
    outputs: tuple[Output, ...]
    mutated: tuple[tuple[int, Source], ...]
    reduced: tuple[tuple[int, int], ...]
    states: tuple[tuple[int, torch.Generator | None], ...]


def ending(tracer: Tracer, found: Sequence[Any]) -> Ending:
    """Decides the program outputs of a trace whose function returned these leaves."""
    values: list[int] = []
    return Ending(
        values,
        _outputs(tracer, found, values),
        _mutated(tracer, values),
        _reduced(tracer, values),
        _next_states(tracer, values),
    )


def compiled_from(
    tracer: Tracer, program: Program, end: Ending, treespec: Any, extra: tuple[int, ...] = ()
) -> Compiled:
    """Lowers a program and returns the compiled call."""
    return Compiled(
        program=program,
        executable=Executable(lower(program)),
        sources=tuple(
            s
            for s, v in zip(tracer.sources, tracer.builder.inputs, strict=True)
            if v in program.inputs
        ),
        expressions=tuple(tracer.expressions),
        outputs=end.outputs,
        treespec=treespec,
        mutated=end.mutated,
        reduced=end.reduced,
        states=end.states,
        extra=extra,
        untried={True} if _may_be_refused(program) else set(),
    )


def _output(tracer: Tracer, item: Any, values: list[int]) -> Output:
    node = node_of(item)
    if node is not None:
        return Output("scalar", node.expression)
    if isinstance(item, Tensor) and not isinstance(item, SymbolicTensor):
        return Output("constant", item)
    if isinstance(item, torch.Tensor):
        symbol = tracer.lift(item)
        for tensor, value in tracer.arguments:
            if symbol is tensor:
                return Output("leaf", _leaf_of(tracer, value))
        for tensor, _, captured in tracer.captures:
            if symbol is tensor:
                return Output("constant", captured)
        values.append(tracer.read(symbol))
        return _alias_output(tracer, symbol, len(values) - 1)
    return Output("constant", item)


def _alias_output(tracer: Tracer, symbol: SymbolicTensor, output: int) -> Output:
    for tensor, value in tracer.arguments:
        if tensor._storage is symbol._storage:
            return Output("alias", output, (_leaf_of(tracer, value), not symbol._path))
    for tensor, _, captured in tracer.captures:
        if tensor._storage is symbol._storage:
            return Output("alias", output, (captured, not symbol._path))
    return Output("value", output)


def _outputs(tracer: Tracer, found: Sequence[Any], values: list[int]) -> tuple[Output, ...]:
    """How the results are made, those that share a storage knowing of each other."""
    counts = Counter(i._storage for i in dict.fromkeys(filter(_is_symbolic, found)))
    seen: dict[SymbolicTensor, int] = {}
    first: dict[Storage, int] = {}
    outputs: list[Output] = []
    for number, item in enumerate(found):
        if _is_symbolic(item) and item in seen:
            outputs.append(Output("again", seen[item]))
            continue
        output = _output(tracer, item, values)
        if _is_symbolic(item):
            seen[item] = number
            if output.kind == "value" and counts[item._storage] > 1:
                output = _shared(output, item, first, number)
        outputs.append(output)
    return tuple(outputs)


def _shared(output: Output, item: SymbolicTensor, first: dict[Storage, int], number: int) -> Output:
    at = first.setdefault(item._storage, number)
    if at != number:
        return Output("sibling", output.item, (at, not item._path))
    return output if not item._path else Output("part", output.item)


def _is_symbolic(item: Any) -> bool:
    return isinstance(item, SymbolicTensor)


def _leaf_of(tracer: Tracer, value: int) -> int:
    return tracer.sources[tracer.builder.inputs.index(value)].item


def _mutated(tracer: Tracer, values: list[int]) -> tuple[tuple[int, Source], ...]:
    found = []
    touched = [*tracer.arguments, *((t, v) for t, v, _ in tracer.captures), *tracer.constants]
    for tensor, before in touched:
        if tensor._storage.version:
            values.append(tensor._storage.value)
            source = tracer.sources[tracer.builder.inputs.index(before)]
            found.append((len(values) - 1, source))
    return tuple(found)


def _reduced(tracer: Tracer, values: list[int]) -> tuple[tuple[int, int], ...]:
    found = []
    for tensor, value in tracer.arguments:
        if tracer.builder.specs[value].partial_axes and not tensor._storage.version:
            complete = tracer.builder.reduced(value)
            if complete is not None:
                values.append(complete)
                found.append((len(values) - 1, _leaf_of(tracer, value)))
    return tuple(found)


def _next_states(
    tracer: Tracer, values: list[int]
) -> tuple[tuple[int, torch.Generator | None], ...]:
    found = []
    for owner, (_, last) in tracer.states.items():
        values.append(last)
        found.append((len(values) - 1, owner))
    return tuple(found)


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
    leaves, treespec = flatten((args, kwargs))
    if torch.is_grad_enabled() and any(
        isinstance(a, torch.Tensor) and a.requires_grad for a in leaves
    ):
        return _with_autograd(func, args, kwargs)
    return _run_eagerly(func, leaves, treespec)


def call_operation(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an ATen operation below autograd: the entry point of ``__torch_dispatch__``."""
    leaves, treespec = flatten((args, kwargs))
    if any(isinstance(leaf, SymbolicTensor) for leaf in leaves):
        return SymbolicTensor.__torch_dispatch__(op, (), args, kwargs)
    return _run_eagerly(op, leaves, treespec)


def _directly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _with_autograd(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lets autograd record the call; every operation below it is a program of its own."""
    leaves, treespec = flatten((args, kwargs))
    mesh = _mesh_of(leaves)
    leaves = [as_distributed(leaf, mesh) for leaf in leaves]
    args, kwargs = unflatten(treespec, leaves)
    substitute = autograd.SUBSTITUTES.get(func)
    with torch._C.DisableTorchFunctionSubclass():
        if substitute is not None:
            return substitute(*args, **kwargs)
        return func(*args, **kwargs)


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


def _set_data(target: Tensor, value: Any) -> None:
    """``target.data = value``, where the shapes agree: the tensor takes the value's shards."""
    if not isinstance(value, Tensor) or value.shape != target.shape or value.dtype != target.dtype:
        raise MutationError(
            f"x.data = ...: a distributed {target._spec!r} takes only a dtorch.Tensor of the same "
            f"shape and dtype, not {type(value).__name__} {list(getattr(value, 'shape', ()))}."
        )
    moved = value.detach().redistribute(target.device_mesh, target.placements)
    target._handles, target._reduced = moved._handles, None


def run_traced(function: Callable[..., Any], args: tuple[Any, ...], mesh: DeviceMesh) -> Any:
    """Runs one of dtorch's own functions as a program: inlined where a trace is active.

    Args:
        function: What to trace; it expects an active trace.
        args: Its arguments.
        mesh: The mesh of the trace.
    """
    if current() is not None:
        return function(*args)
    return _run_eagerly(function, *flatten((args, {})), mesh)


def _run_eagerly(
    func: Any, leaves: list[Any], treespec: Any, mesh: DeviceMesh | None = None
) -> Any:
    check_not_on_worker("calling a torch function")
    dynamic = (float, int) if isinstance(func, _BUILTIN) else (float,)
    arguments = Arguments(leaves, dynamic, mesh)
    key = (func, treespec, arguments.key, modes())
    entry = lookup(
        _eager_cache,
        key,
        arguments,
        lambda static: _compile_eagerly(func, arguments, treespec, static),
    )
    if entry is _ON_HOST:
        return _on_host(func, arguments, treespec)
    return unflatten(entry.treespec, entry.run(arguments, check_aliases=False))


def lookup(
    cache: Cache,
    key: Hashable,
    arguments: Arguments,
    build: Callable[[set[int]], tuple[Any, set[int]]],
) -> Any:
    """Returns the entry of a call, made by `build` if the cache has none.

    Scalars that a trace reads become part of the key: under the key that only has their types,
    the cache holds which ones they are.
    """
    static = () if not arguments.scalars else cache.get((key, "static")) or ()
    entry = cache.get((key, static, _values(arguments, static)))
    cache.count(hit=entry is not None)
    if entry is None:
        entry, reads = build(set(static))
        if reads - set(static):
            static = tuple(sorted(reads))
            cache.put((key, "static"), static)
        cache.put((key, static, _values(arguments, static)), entry)
    return entry


def _values(arguments: Arguments, static: Sequence[int]) -> Hashable:
    read = (arguments.leaves[i] for i in static)
    return tuple(v.hex() if type(v) is float else v for v in read)


def _compile_eagerly(
    func: Any, arguments: Arguments, treespec: Any, static: set[int]
) -> tuple[Any, set[int]]:
    name = getattr(func, "__name__", str(func))
    everything = set(arguments.scalars)
    try:
        compiled, reads = compile_call(func, arguments, treespec, static, name)
    except DataDependentError:
        return _ON_HOST, everything
    except Exception:
        if static == everything:
            raise
        compiled, reads = compile_call(func, arguments, treespec, everything, name)
    return compiled, reads


def _on_host(func: Any, arguments: Arguments, treespec: Any) -> Any:
    """Runs a call whose result depends on values: waits for them and computes on the client."""
    fetched = [leaf.to_torch() if isinstance(leaf, Tensor) else leaf for leaf in arguments.leaves]
    args, kwargs = unflatten(treespec, fetched)
    before = {id(t): t._version for t in fetched if isinstance(t, torch.Tensor)}
    result = func(*args, **kwargs)
    if any(isinstance(t, torch.Tensor) and t._version != before[id(t)] for t in fetched):
        raise MutationError(
            f"{getattr(func, '__name__', func)} changes a distributed tensor in place, to a result "
            "that depends on its values.\n  Fix: use the functional form."
        )
    mesh = arguments.mesh
    leaves, result_tree = flatten(result)
    placed = [
        place(t, mesh, (Replicate(),) * mesh.ndim) if isinstance(t, torch.Tensor) else t
        for t in leaves
    ]
    return unflatten(result_tree, placed)


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
        placements = tuple(Replicate() if p.is_partial() else p for p in placements)
        return redistribute(grad, mesh, placements), None, None


def redistribute(source: Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    """Returns a tensor in another layout; `placements` are normalised."""
    if mesh == source.device_mesh and placements == source._spec.placements:
        return source
    if source.requires_grad and torch.is_grad_enabled():
        return Redistribution.apply(source, mesh, placements)
    return _redistributed(source, mesh, placements)


def _redistributed(source: Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    if isinstance(source, SymbolicTensor):
        return _move(source, mesh, placements)
    return _run_eagerly(_move, *flatten(((source, mesh, placements), {})))


def _move(source: Any, mesh: DeviceMesh, placements: Placements) -> Any:
    tracer = source._tracer
    return tracer.wrap(tracer.builder.move(tracer.read(source), mesh, placements))


EntryPoints.function = call_function
EntryPoints.operation = call_operation
EntryPoints.redistribute = redistribute
