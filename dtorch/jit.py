"""`jit`: the unit that becomes a program widened from one call to a whole function.

A jitted call whose arguments require grad is one autograd node: its backward is a second program,
traced together with the first.

It is over 500 lines for the checks of `jit`'s options, which name the function's parameters.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

import numpy
import torch

from . import memo, tracer
from .arguments import Arguments, exact
from .cache import Cache, CacheInfo, lookup
from .compilation import compile_stretches
from .compiled import Compiled, submit_program
from .dispatch import as_distributed
from .errors import TraceError
from .graphs import capture_parts
from .infer import settings
from .lowering import LocalProgram, lower
from .memo import MISSED
from .mesh import DeviceMesh
from .placement import complete
from .program import Program
from .recording import compile_call, compiled_from, ending, returned, symbolic_leaves
from .runtime import Executable, timeline
from .runtime.graph_calls import NUM_WARM_UPS
from .runtime.timeline import Doing
from .scalars import evaluate
from .spec import Spec
from .symbolic import SymbolicTensor
from .tensor import Tensor, place
from .tracer import Source, Tracer
from .tree import argument_path, flatten, unflatten

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ACCEPTED = (torch.Tensor, torch.Generator)


class Static:
    """A static argument: a part of the key."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and exact(self.value) == exact(other.value)

    def __hash__(self) -> int:
        return hash(exact(self.value))


@dataclasses.dataclass(frozen=True, slots=True)
class _Passes:
    """What is done with a traced program before it runs: the options of `jit` of these names."""

    compile: bool = False
    cuda_graph: bool = False

    def __bool__(self) -> bool:
        return self.compile or self.cuda_graph

    def __call__(
        self, local: LocalProgram, program: Program, donated: Collection[int] = ()
    ) -> LocalProgram:
        """Returns a local program as it is to run, whose caller gives up some inputs."""
        local = compile_stretches(local, program) if self.compile else local
        return capture_parts(local, donated) if self.cuda_graph else local


class _Traced:
    """What every `jit` of one function with the same options shares.

    Attributes:
        cache: The programs.
        modules: The modules that the function has been seen to call.
        passes: What is done with the programs.
    """

    def __init__(self, capacity: int, passes: _Passes) -> None:
        self.cache = Cache(capacity)
        self.calls = memo.call_cache(ints_are_dynamic=False, capacity=capacity)
        self.modules: list[weakref.ref[torch.nn.Module]] = []
        self.passes = passes
        self._known: dict[Hashable, Hashable] = {}
        self._num_runs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def is_settled(self, entry: Any) -> bool:
        """Counts a run of a traced call; returns whether its graphs have been captured before."""
        if not self.passes.cuda_graph:
            return True
        self._num_runs[entry] = count = self._num_runs.get(entry, 0) + 1
        return count > NUM_WARM_UPS + 1

    def flags(self) -> Hashable:
        """Returns what a program depends on beside its arguments; equal flags are one object.

        They are the training flags of the modules, and for compiled code the number of threads.
        """
        if not self.modules and not self.passes.compile:
            return ()
        flags = tuple(m.training for r in self.modules if (m := r()) is not None)
        if self.passes.compile:
            flags = (*flags, torch.get_num_threads())
        return self._known.setdefault(flags, flags)


_traced: weakref.WeakKeyDictionary[Any, dict[Hashable, _Traced]] = weakref.WeakKeyDictionary()


_traced_lock = threading.Lock()


def _traced_of(
    function: Callable[..., Any], options: Hashable, capacity: int, passes: _Passes
) -> _Traced:
    try:
        with _traced_lock:
            shared = _traced.setdefault(function, {})
            return shared.setdefault((options, passes), _Traced(capacity, passes))
    except TypeError:  # not hashable, or no weak references to it
        return _Traced(capacity, passes)


class JitFunction(Generic[_P, _R]):
    """A function that runs as one program; made by `jit` and `shard_map`."""

    def __init__(
        self,
        function: Callable[_P, _R],
        static_argnums: int | Sequence[int],
        static_argnames: str | Sequence[str],
        donate_argnums: int | Sequence[int],
        maxsize: int,
        compile: bool,
        cuda_graph: bool = False,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"jit needs a function, not {type(function).__name__} {function!r}.")
        functools.update_wrapper(self, function)
        self._function = function
        self._static_argnums = _checked_numbers(function, "static_argnums", static_argnums)
        self._static_argnames = _checked_names(function, static_argnames)
        self._donated = _checked_numbers(function, "donate_argnums", donate_argnums)
        self._mesh = mesh  # where plain tensors go, if that does not follow from the others
        options = (self._static_argnums, self._static_argnames, self._donated, maxsize)
        self._traced = _traced_of(function, options, maxsize, _Passes(compile, cuda_graph))
        # Of a static argument, a `CallCache` would take a float to be a run-time value.
        self._is_remembered = not (self._static_argnums or self._static_argnames)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Runs the function on the arguments, traced once for each kind of them.

        Blocking: on the first call with a new key, while tracing; never for the values.
        """
        if tracer.current() is not None:
            return self._function(*args, **kwargs)
        result = MISSED
        if self._is_remembered:
            result = self._traced.calls.call(self._traced.flags(), args, kwargs)
        if result is MISSED:
            result = self._call_new(args, kwargs)
        if self._donated:
            self._give_away(args, flatten(result)[0])
        return result

    def _call_new(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with timeline.noted(Doing.JIT, self._name):
            return self._run_new(args, kwargs)

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", "program")

    def _run_new(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, treespec, arguments = self._prepare(args, kwargs)
        if torch.is_grad_enabled() and any(
            isinstance(a, torch.Tensor) and a.requires_grad for a in leaves
        ):
            leaves = [as_distributed(leaf, arguments.mesh) for leaf in leaves]
            arguments = Arguments(leaves, (float,), arguments.mesh)
            entry, _ = self._entry("grad", arguments, treespec)
            is_settled = self._traced.is_settled(entry)
            results = entry.run(arguments)
        else:
            entry, static = self._entry("plain", arguments, treespec)
            is_settled = self._traced.is_settled(entry)
            if self._is_remembered and is_settled:
                cache, call = self._traced.calls, memo.NamedCall(self._traced.flags(), args, kwargs)
                memo.remember(
                    cache, call, treespec, arguments, static, entry, _run, check_aliases=True
                )
            results = _run(entry, arguments)
        if not is_settled:  # a caller that synchronizes a GPU would break a capture on it
            for result in results:
                if isinstance(result, Tensor):
                    result._shards.wait(range(len(result._shards)))
        return unflatten(entry.treespec, results)

    def program(self, *args: _P.args, **kwargs: _P.kwargs) -> Program:
        """Returns the program that a call with these arguments runs; runs nothing."""
        return self.traced(*args, **kwargs)[0].program

    def traced(self, *args: _P.args, **kwargs: _P.kwargs) -> tuple[Compiled, Arguments]:
        """Returns a call as it has been traced, without gradients, and its arguments.

        It runs nothing; who runs it in another way than a call does takes it apart.
        """
        _, treespec, arguments = self._prepare(args, kwargs)
        return self._entry("plain", arguments, treespec)[0], arguments

    def cache_info(self) -> CacheInfo:
        """Returns how many calls were served from the cache, and how often it was traced."""
        info = self._traced.cache.info()
        return info._replace(hits=info.hits + self._traced.calls.hits)

    def cache_clear(self) -> None:
        """Forgets every traced program."""
        self._traced.cache.clear()
        self._traced.calls.clear()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"dtorch.jit({getattr(self._function, '__name__', self._function)!s})"

    def _prepare(self, args: Any, kwargs: Any) -> tuple[list[Any], Any, Arguments]:
        tree = self._with_static(args, kwargs)
        leaves, treespec = flatten(tree)
        _check_leaves(tree, leaves)
        return leaves, treespec, Arguments(leaves, (float,), self._mesh)

    def _with_static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._static_argnums and not self._static_argnames:
            return args, kwargs
        given = _from_start(self._static_argnums, len(args))
        names = self._static_argnames | self._names_of(given, len(args))
        numbers = given | self._numbers_of(self._static_argnames)
        fixed = tuple(_static(a, str(i)) if i in numbers else a for i, a in enumerate(args))
        return fixed, {k: _static(v, k) if k in names else v for k, v in kwargs.items()}

    @functools.cached_property
    def _parameters(self) -> list[str]:
        return _positional(_parameters_of(self._function) or [])

    def _names_of(self, numbers: frozenset[int], count: int) -> frozenset[str]:
        names = self._parameters
        return frozenset(names[i] for i in numbers if count <= i < len(names))

    def _numbers_of(self, names: frozenset[str]) -> frozenset[int]:
        return frozenset(i for i, n in enumerate(self._parameters) if n in names)

    def _entry(self, kind: str, arguments: Arguments, treespec: Any) -> tuple[Any, tuple[int, ...]]:
        wants = _wants_grad(arguments) if kind == "grad" else ()
        key = (kind, wants, treespec, arguments.key, settings(), self._traced.flags())

        def build(static: set[int]) -> tuple[Any, set[int]]:
            with _ModulesSeen(self._traced.modules), timeline.noted(Doing.TRACE, self._name):
                if kind == "grad":
                    built = _compile_with_grad(self._call, arguments, treespec, static, wants)
                else:
                    built = compile_call(self._call, arguments, treespec, static, self._name)
            if not self._traced.passes:
                return built
            with timeline.noted(Doing.COMPILE, self._name):
                donated = self._donated_leaves(treespec)
                return _passed(built[0], self._traced.passes, donated), built[1]

        before = self._traced.flags()
        entry, static = lookup(self._traced.cache, key, arguments, build)
        after = self._traced.flags()
        if before != after:
            self._traced.cache.rename(key, (*key[:-1], after))
        return entry, static

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _without_static(args), {k: _plain(v) for k, v in kwargs.items()}
        return self._function(*args, **kwargs)

    def _donated_leaves(self, treespec: Any) -> set[int]:
        """The numbers of the leaves of a call that are donated."""
        first, donated = 0, set[int]()
        children = treespec.children()[0].children()  # of the positional arguments
        for number, child in enumerate(children):
            if number in _from_start(self._donated, len(children)):
                donated |= set(range(first, first + child.num_leaves))
            first += child.num_leaves
        return donated

    def _give_away(self, args: tuple[Any, ...], results: Sequence[Any]) -> None:
        returned = {id(r) for r in results}
        for number in _from_start(self._donated, len(args)):
            if 0 <= number < len(args):
                for leaf in flatten(args[number])[0]:
                    if type(leaf) is Tensor and id(leaf) not in returned:
                        leaf._donate()


def _run(compiled: Compiled, arguments: Arguments) -> list[Any]:
    return compiled.run(arguments, check_aliases=True)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function, or None if it does not say."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _positional(parameters: list[inspect.Parameter]) -> list[str]:
    return [p.name for p in parameters if p.kind in _POSITIONAL]


def _from_start(numbers: frozenset[int], count: int) -> frozenset[int]:
    """Positions without negative ones, which only a function of unknown parameters still has."""
    return frozenset(n + count if n < 0 else n for n in numbers)


def _checked_numbers(function: Callable[..., Any], option: str, value: Any) -> frozenset[int]:
    """The positions that an option gives, from the start if the function's parameters are known.

    Raises:
        TypeError: They are not integers.
        ValueError: The function has no such parameter.
    """
    numbers = tuple(value) if isinstance(value, Iterable) else (value,)
    if any(isinstance(n, bool) or not isinstance(n, (int, numpy.integer)) for n in numbers):
        raise TypeError(f"{option} must be an integer or integers, not {value!r}.")
    parameters = _parameters_of(function)
    if parameters is None or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return frozenset(map(int, numbers))
    names = _positional(parameters)
    for number in numbers:
        if not -len(names) <= number < len(names):
            raise ValueError(
                f"{option}={value!r}: {_name_of(function)} has no positional parameter {number}; "
                f"it has {len(names)}: ({', '.join(names)}).\n"
                "  Fix: count its parameters from 0, or name it in static_argnames."
            )
    return _from_start(frozenset(map(int, numbers)), len(names))


def _checked_names(function: Callable[..., Any], value: str | Iterable[str]) -> frozenset[str]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(n, str) for n in names):
        raise TypeError(f"static_argnames must be a string or strings, not {value!r}.")
    parameters = _parameters_of(function)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return frozenset(names)
    known = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    for name in names:
        if name not in known:
            raise ValueError(
                f"static_argnames={value!r}: {_name_of(function)} has no parameter {name!r}; "
                f"it has ({', '.join(known)}).\n  Fix: name one of its parameters."
            )
    return frozenset(names)


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or repr(function)


def _without_static(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_plain(a) for a in args)


def _plain(value: Any) -> Any:
    return value.value if type(value) is Static else value


def _static(value: Any, name: str) -> Static:
    try:
        hash(value)
    except TypeError:
        raise TraceError(
            f"the static argument {name} is an unhashable {type(value).__name__}.\n"
            "  Fix: pass a tuple or a frozen dataclass, or do not declare it static."
        ) from None
    return Static(value)


_STATIC_LEAVES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    type(Ellipsis),
    Static,
)


def _check_leaves(tree: Any, leaves: list[Any]) -> None:
    import_error = "pass tensors, numbers, strings and containers of them, or declare it static"
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, (*_ACCEPTED, *_STATIC_LEAVES)) or _is_value(leaf):
            continue
        path = argument_path(("args", "kwargs"), tree, number)
        raise TraceError(
            f"a jitted function cannot take {type(leaf).__name__} {leaf!r} at {path}.\n"
            f"  Fix: {import_error} (static_argnums, static_argnames)."
        )


def _is_value(leaf: Any) -> bool:
    """Whether a leaf is an array, or one of dtorch's own frozen values or an enum."""
    kind = type(leaf)
    known = kind.__module__.startswith("dtorch.") or issubclass(kind, (enum.Enum, numpy.ndarray))
    return known


class _ModulesSeen:
    """Collects the modules that are called while it is active."""

    def __init__(self, into: list[weakref.ref[torch.nn.Module]]) -> None:
        self._into = into
        self._known = {id(m) for r in into if (m := r()) is not None}

    def __enter__(self) -> None:
        register = torch.nn.modules.module.register_module_forward_pre_hook
        self._hook = register(self._see)

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()

    def _see(self, module: torch.nn.Module, args: Any) -> None:
        if tracer.current() is not None and id(module) not in self._known:
            self._known.add(id(module))
            self._into.append(weakref.ref(module))


@overload
def jit(
    function: Callable[_P, _R],
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    maxsize: int = 256,
    compile: bool = False,
    cuda_graph: bool = False,
) -> JitFunction[_P, _R]: ...


@overload
def jit(
    function: None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    maxsize: int = 256,
    compile: bool = False,
    cuda_graph: bool = False,
) -> Callable[[Callable[_P, _R]], JitFunction[_P, _R]]: ...


def jit(
    function: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    maxsize: int = 256,
    compile: bool = False,
    cuda_graph: bool = False,
) -> Any:
    """Returns a function that runs as one program, traced at its first call.

    The function should be pure: it is run once on symbolic tensors for each new kind of
    arguments (their structure, shapes, dtypes and layouts, and the values of all that is not a
    tensor or a float). Floats are run-time values unless the function reads them. In-place
    calls on arguments and on captured distributed tensors take effect as without `jit`.

    Args:
        function: The function; without it, a decorator is returned.
        static_argnums: Positions of arguments that are part of the key, whatever they are;
            negative ones count from the end of the function's positional parameters.
        static_argnames: Names of such arguments.
        donate_argnums: Positions of arguments whose tensors the call may consume: they must
            not be used again.
        maxsize: How many programs are kept.
        compile: Compile what lies between communications into loops over the data, by PyTorch's
            Inductor, which fuses operations. The first call with a new key then takes seconds to
            minutes; code is kept on disk, and repeated layers are compiled once. Floating-point
            results may differ in their last places; other results, shapes and strides do not. What
            cannot be compiled runs as it is, and a warning says so.
        cuda_graph: On CUDA devices, capture what lies between points that the host sees (devices
            that meet, random numbers, run-time numbers) and launch it as one graph. The first two
            calls with a key run as usual, the third captures, and all three wait until that is
            done. Tensors that are in the same memory in these calls, as parameters are, are read
            where they are; others are copied in, and results out, but for donated tensors that are
            only changed, which are updated in place. What cannot be captured runs as it is, and a
            line on the standard error output says so once. `torch.cuda.synchronize` in another
            thread breaks a capture; `dtorch.synchronize` does not.

    Raises:
        TypeError: `function` cannot be called, or an option is of another type.
        ValueError: An option names a parameter that the function lacks, or `maxsize` is not
            positive.
        TraceError: At the call: an argument is no tensor, number, string or container of them.
        DataDependentError: At the call: Python control flow needs a tensor's value.

    Source: `jax.jit`; functionalised mutation as in `torch.compile`.

    Example:
        >>> f = jit(lambda x, y: x @ y)
        >>> f(torch.ones(2, 3), torch.ones(3, 2)).shape
        torch.Size([2, 2])
    """
    if maxsize < 1:
        raise ValueError(f"maxsize must be at least 1, not {maxsize}.")

    def wrap(f: Callable[_P, _R]) -> JitFunction[_P, _R]:
        return JitFunction(
            f, static_argnums, static_argnames, donate_argnums, maxsize, compile, cuda_graph
        )

    return wrap if function is None else wrap(function)


def _passed(entry: Any, passes: _Passes, donated: Collection[int] = ()) -> Any:
    """Returns a traced call with its programs as they are to run, some leaves being donated."""
    if isinstance(entry, _Differentiable):
        return entry.passed(passes)
    kept = {o.item for o in entry.outputs if o.kind == "leaf"}
    kept |= {o.leaf[0] for o in entry.outputs if o.kind == "alias" and type(o.leaf[0]) is int}
    kept |= {source.item for _, source in entry.mutated if source.kind == "leaf"}
    inputs = zip(entry.program.inputs, entry.sources, strict=True)
    given = {v for v, s in inputs if s.kind == "leaf" and s.item in set(donated) - kept}
    given -= set(entry.program.outputs)
    executable = Executable(passes(entry.executable.program, entry.program, given))
    return dataclasses.replace(entry, executable=executable)


def _wants_grad(arguments: Arguments) -> tuple[int, ...]:
    return tuple(i for i in arguments.tensors if arguments.leaves[i].requires_grad)


@dataclasses.dataclass(frozen=True, slots=True)
class _Backward:
    """A backward program, for cotangents of certain specs, or none for some results.

    Attributes:
        program: It takes what the forward program saves, and then the cotangents there are.
        executable: Its local form.
        grads_of: For each input that wants a gradient, the program's output, or -1 for none.
    """

    program: Program
    executable: Executable
    grads_of: tuple[int, ...]


class _Graph:
    """The graph of a traced call, from which its backward programs are traced.

    Kernels choose by strides, and the cotangent of a sum has none; a result that is not used has
    no cotangent, which PyTorch does not treat as zeros. A backward program is for cotangents as
    they come.

    Args:
        tracer: The trace; all of the forward is recorded.
        outs: The differentiable results.
        sources: The inputs that want a gradient.
    """

    def __init__(self, tracer: Tracer, outs: list[Any], sources: list[Any]) -> None:
        self.specs = [_grad_spec(o._spec) for o in outs]
        self._tracer = tracer
        self._outs = outs
        self._sources = sources
        self._boundary = len(tracer.builder)
        self._saved: tuple[int, ...] = ()

    def first(self, results: Sequence[int]) -> tuple[Program, Program, tuple[int, ...], int]:
        """Returns the forward and the backward program, its gradients, and the number saved.

        Args:
            results: The outputs of the forward program, after which it returns what it saves.
        """
        grads_out, later, grads_of = self._traced(self.specs)
        builder = self._tracer.builder
        before, after, self._saved = builder.finish_apart(self._boundary, results, later, grads_out)
        return before, after, grads_of, len(self._saved)

    def again(self, specs: Sequence[Spec | None]) -> tuple[Program, tuple[int, ...]] | None:
        """Returns the backward program for other cotangents, or None where that differs more."""
        tracer = self._tracer
        known = len(tracer.reads), len(tracer.expressions), len(tracer.states)
        with tracer.active():
            grads_out, later, grads_of = self._traced(specs)
            inputs = (*self._saved, *grads_out)
            after = tracer.builder.finish_after(self._boundary, later, inputs)
        if known != (len(tracer.reads), len(tracer.expressions), len(tracer.states)):
            return None
        return None if after is None else (after, grads_of)

    def _traced(self, specs: Sequence[Spec | None]) -> tuple[list[int], list[int], tuple[int, ...]]:
        """The values of the cotangents, those of the gradients, and the latter's inputs."""
        builder = self._tracer.builder
        grads_out = [builder.add_input(s) for s in specs if s is not None]
        outs = [o for o, s in zip(self._outs, specs, strict=True) if s is not None]
        self._tracer.sources += [Source("leaf", -1)] * len(grads_out)
        given = [self._tracer.wrap(v) for v in grads_out]
        grads: Sequence[Any] = [None] * len(self._sources)
        if given:
            grads = torch.autograd.grad(
                outs, self._sources, given, allow_unused=True, retain_graph=True
            )
        later: list[int] = []
        grads_of = tuple(
            -1 if g is None else _grad_output(self._tracer, g, s._spec, later)
            for g, s in zip(grads, self._sources, strict=True)
        )
        return grads_out, later, grads_of


class _Differentiable:
    """A jitted call whose arguments require grad: a forward program and backward ones."""

    def __init__(
        self,
        forward: Compiled,
        backward: _Backward,
        graph: _Graph,
        wants: tuple[int, ...],
        differentiable: tuple[int, ...],
        spent: frozenset[int],
    ) -> None:
        self.forward = forward
        self.wants = wants
        self.differentiable = differentiable
        self._spent = spent
        self.treespec = forward.treespec
        self._specs = tuple(graph.specs)
        self._first = backward
        self._backwards: dict[tuple[Spec | None, ...], _Backward | None] = {self._specs: backward}
        # One result without dims has no strides to differ in, so its graph is not kept.
        self._graph = graph if len(graph.specs) > 1 or any(s.shape for s in graph.specs) else None
        self._passes = _Passes()

    def passed(self, passes: _Passes) -> _Differentiable:
        """Returns the call with its programs as they are to run."""
        self.forward = _passed(self.forward, passes)
        self._passes = passes
        self._first = self._lowered(self._first.program, self._first.grads_of)
        self._backwards = {self._specs: self._first}
        return self

    def _lowered(self, program: Program, grads_of: tuple[int, ...]) -> _Backward:
        local = self._passes(lower(program), program)
        return _Backward(program, Executable(local), grads_of)

    def run(self, arguments: Arguments) -> list[Any]:
        """Runs the forward program as an autograd node; returns the result's leaves."""
        inputs = [arguments.leaves[i] for i in self.wants]
        rest: list[Any] = []
        outs = _Node.apply(self, arguments, rest, *inputs)
        results = list(rest)
        for number, out in zip(self.differentiable, outs or (), strict=True):
            results[number] = out
        for number, output in enumerate(self.forward.outputs):
            if output.kind == "again":
                results[number] = results[output.item]
        return results

    def gradients(
        self, saved: Sequence[Tensor], grads: Sequence[torch.Tensor | None], scalars: Sequence[Any]
    ) -> list[Tensor | None]:
        """Runs a backward program; returns the gradient of each input, None for no effect."""
        numbered = list(zip(self.differentiable, grads, strict=True))
        if any(number in self._spent and grad is not None for number, grad in numbered):
            raise RuntimeError(
                f"{_FREED}: the jitted function has taken a gradient through this result itself, "
                "which frees its graph.\n"
                "  Fix: pass retain_graph=True inside the function, or detach() the result."
            )
        alive = [grad for number, grad in numbered if number not in self._spent]
        pairs = list(zip(alive, self._specs, strict=True))
        placed = [None if g is None else _placed_grad(g, s) for g, s in pairs]
        backward = self._backward(tuple(None if t is None else t._spec for t in placed))
        if backward is None:
            placed = [_dense_grad(g, s) for g, s in zip(placed, self._specs, strict=True)]
            backward = self._first
        shards = [t._shards for t in (*saved, *placed) if t is not None]
        values = submit_program(backward.program, backward.executable, shards, scalars)
        return [None if i < 0 else values[i] for i in backward.grads_of]

    def _backward(self, specs: tuple[Spec | None, ...]) -> _Backward | None:
        """The backward program for cotangents of these specs, if there can be one."""
        if specs not in self._backwards and self._graph is not None:
            try:
                found = self._graph.again(specs)
            except Exception:  # of a node that lets its backward be taken only once
                found = None
            self._backwards[specs] = None if found is None else self._lowered(*found)
        return self._backwards.get(specs)


def _placed_grad(grad: torch.Tensor, spec: Spec) -> Tensor:
    """A cotangent in its layout."""
    if isinstance(grad, Tensor):
        return grad.redistribute(spec.mesh, spec.placements)
    return place(grad, spec.mesh, spec.placements)


def _dense_grad(grad: Tensor | None, spec: Spec) -> Tensor:
    """A cotangent with the strides of a spec, zeros where there is none."""
    if grad is None:
        return place(torch.zeros(spec.shape, dtype=spec.dtype), spec.mesh, spec.placements)
    if grad._spec is spec:
        return grad
    unfilled = grad.new_empty_strided(spec.shape, spec.stride)
    filled = torch.ops.aten.copy.default(unfilled, grad)
    return cast(Tensor, filled).redistribute(spec.mesh, spec.placements)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Any, arguments: Any, rest: Any, *inputs: Any) -> Any:
        results = call.forward.run(arguments, check_aliases=True)
        count = len(call.forward.outputs)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.scalars = [evaluate(e, arguments.values) for e in call.forward.expressions]
        ctx.save_for_backward(*results[count:])
        rest.extend(results[:count])
        return tuple(results[i] for i in call.differentiable)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            # `once_differentiable` would only notice a second derivative by the incoming gradient.
            raise TraceError(
                "the gradient of a jitted call cannot be differentiated again (create_graph=True)."
                "\n  Fix: take both derivatives inside one jitted function, with dtorch.grad or "
                "torch.autograd.grad, or call the function without jit."
            )
        return None, None, None, *ctx.call.gradients(ctx.saved_tensors, grads, ctx.scalars)


def _compile_with_grad(
    function: Callable[..., Any],
    arguments: Arguments,
    treespec: Any,
    static: set[int],
    wants: tuple[int, ...],
) -> tuple[_Differentiable, set[int]]:
    tracer = Tracer(arguments.mesh, with_autograd=True)
    with tracer.active():
        leaves = symbolic_leaves(tracer, arguments, static)
        sources = [leaves[i].requires_grad_() for i in wants]
        args, kwargs = unflatten(treespec, leaves)
        found, result_tree = returned(tracer, function(*args, **kwargs))
        _check_changed(tracer, found)
        firsts = {id(o): i for i, o in reversed(list(enumerate(found)))}
        places = tuple(
            i for i, o in enumerate(found) if firsts[id(o)] == i and _is_differentiable(o, sources)
        )
        end = ending(tracer, found)
        graph, spent = _Graph(tracer, [found[i] for i in places], sources), frozenset[int]()
        try:
            first = graph.first(end.values)
        except RuntimeError as error:
            if _FREED not in str(error):
                raise
            spent = frozenset(i for i in places if _is_spent(found[i], sources))
            graph = _Graph(tracer, [found[i] for i in places if i not in spent], sources)
            first = graph.first(end.values)
        before, after, grads_of, num_saved = first
        extra = tuple(range(len(end.values), len(end.values) + num_saved))
        forward = compiled_from(tracer, before, end, result_tree, extra)
    backward = _Backward(after, Executable(lower(after)), grads_of)
    call = _Differentiable(forward, backward, graph, wants, places, spent)
    return call, tracer.reads | static


_FREED = "Trying to backward through the graph a second time"


def _is_spent(out: Any, sources: Sequence[Any]) -> bool:
    """Whether the function has taken a gradient through a result, which frees its graph.

    PyTorch refuses that only where the gradient is asked for: a training step returns its loss.
    """
    try:
        torch.autograd.grad(
            out, sources, torch.zeros_like(out), allow_unused=True, retain_graph=True
        )
    except RuntimeError as error:
        if _FREED not in str(error):
            raise
        return True
    return False


def _check_changed(tracer: Tracer, found: Sequence[Any]) -> None:
    """Refuses to lose the graph of an argument that was changed in place and is not returned."""
    for tensor, _ in tracer.arguments:
        returned = any(tensor is o for o in found)
        if tensor._storage.version and tensor.grad_fn is not None and not returned:
            raise TraceError(
                f"a jitted function changes an argument of shape {list(tensor.shape)} in place to "
                "a value that requires grad, and does not return it; its gradient would be lost."
                "\n  Fix: return the new value, or detach() what is written."
            )


def _is_differentiable(out: Any, sources: Sequence[Any]) -> bool:
    fresh = isinstance(out, SymbolicTensor) and not any(out is s for s in sources)
    return fresh and out.requires_grad


def _grad_spec(spec: Spec) -> Spec:
    return spec.with_placements(complete(spec.placements))


def _grad_output(tracer: Tracer, grad: Any, spec: Spec, later: list[int]) -> int:
    value = tracer.read(tracer.lift(grad))
    later.append(tracer.builder.move(value, spec.mesh, complete(spec.placements)))
    return len(later) - 1
