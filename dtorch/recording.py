"""From a function and the kinds of its arguments to a `Compiled` call, by one trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .aliases import Path
from .arguments import Arguments, torch_spec
from .compiled import Compiled, Output, may_be_refused, submit_program
from .errors import TraceError
from .lowering import lower
from .passes import fold_constants
from .program import Program
from .runtime import Executable
from .scalars import node_of, symbolic
from .symbolic import Storage, SymbolicTensor
from .tensor import (
    Tensor,
)
from .tracer import Source, Tracer
from .tracing_modes import NeedsAutograd
from .tree import flatten, unflatten


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
        found, result_tree = returned(tracer, function(*args, **kwargs))
        end = ending(tracer, found)
        program = tracer.builder.finish(end.values, name)
        compiled = compiled_from(tracer, program, end, result_tree)
    return compiled, tracer.reads | static


def symbolic_leaves(tracer: Tracer, arguments: Arguments, static: set[int]) -> list[Any]:
    """Returns the leaves of a call with tensors and run-time scalars made symbolic."""
    leaves = list(arguments.leaves)
    for number in arguments.tensors:
        leaf = arguments.values[number]
        spec = leaf._spec if isinstance(leaf, Tensor) else torch_spec(leaf, arguments.mesh)
        leaves[number] = tracer.argument(spec, number)
    for number in arguments.scalars:
        if number not in static:
            leaves[number] = symbolic(number, leaves[number], tracer.reads.add)
    return leaves


def returned(tracer: Tracer, result: Any) -> tuple[list[Any], Any]:
    """Returns the leaves and the structure of what a traced function returned.

    An object that is no tree and holds tensors of the trace becomes `Unusable`.
    """
    leaves, treespec = flatten(result)
    for number, leaf in enumerate(leaves):
        inner = _path_to_traced(tracer, leaf, set(), 0)
        if inner is not None:
            outer = ".".join(["result", *map(str, treespec.paths()[number])])
            leaves[number] = Unusable(type(leaf), outer, inner)
    return leaves, treespec


class Unusable:
    """What a jitted function returns in the place of an object that it cannot return.

    A program's results are tensors: the object would hold those of the trace, which have no value.
    Much that a model returns nobody asks for, so the error is raised where it is used.
    """

    def __init__(self, kind: type, path: str, inner: str) -> None:
        self._message = (
            f"{path} of a jitted function is a {kind.__module__}.{kind.__qualname__}, which is no "
            f"tree of tensors, and holds tensors of the trace ({path}{inner}), which have no "
            "value.\n  Fix: return the tensors themselves, in lists and dicts. For the cache of a "
            "model of transformers: use_cache=False, or dtorch.models.generate."
        )

    def _refuse(self, *_: Any) -> Any:
        raise TraceError(self._message)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and its libraries ask of any object
            raise AttributeError(name)
        raise TraceError(self._message)

    __getitem__ = __iter__ = __len__ = __bool__ = __call__ = _refuse


def _path_to_traced(tracer: Tracer, value: Any, seen: set[int], depth: int) -> str | None:
    """The path from an object to a tensor of the trace, or None if it is found to hold none."""
    if isinstance(value, SymbolicTensor) and value._tracer is tracer:
        return "" if depth else None
    if isinstance(value, (torch.Tensor, type)) or id(value) in seen or depth > _DEPTH:
        return None
    seen.add(id(value))
    inside: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        inside += [(f"[{k!r}]", v) for k, v in value.items()]
    elif isinstance(value, (list, tuple)):
        inside += [(f"[{i}]", v) for i, v in enumerate(value)]
    inside += [(f".{k}", v) for k, v in getattr(value, "__dict__", {}).items()]
    for step, item in inside:
        path = _path_to_traced(tracer, item, seen, depth + 1)
        if path is not None:
            return step + path
    return None


_DEPTH = 5


class Ending(NamedTuple):
    """What a trace returns, before it is lowered: `Compiled` without its programs."""

    values: list[int]
    outputs: tuple[Output, ...]
    mutated: tuple[tuple[int, Source], ...]
    reformed: tuple[tuple[int, int, Path | None], ...]
    reduced: tuple[tuple[int, int], ...]
    states: tuple[tuple[int, torch.Generator | None], ...]
    wholes: tuple[Source, ...]


def ending(tracer: Tracer, found: Sequence[Any]) -> Ending:
    """Decides the program outputs of a trace whose function returned these leaves."""
    _check_no_gradient_left(tracer)
    values: list[int] = []
    return Ending(
        values,
        _outputs(tracer, found, values),
        _mutated(tracer, values),
        _reformed(tracer, values, found),
        _reduced(tracer, values),
        _next_states(tracer, values),
        _wholes(tracer),
    )


def _check_no_gradient_left(tracer: Tracer) -> None:
    for tensor, _ in tracer.arguments:
        if tensor.is_leaf and tensor.grad is not None:
            raise TraceError(
                "a jitted function calls backward() on its arguments, whose .grad it cannot set.\n"
                "  Fix: use dtorch.grad or torch.autograd.grad inside it, or call backward() on "
                "its result outside."
            )


def compiled_from(
    tracer: Tracer, program: Program, end: Ending, treespec: Any, extra: tuple[int, ...] = ()
) -> Compiled:
    """Lowers a program and returns the compiled call; what is constant in it runs now."""
    inputs = set(program.inputs)
    sources = [s for s, v in zip(tracer.sources, tracer.builder.inputs, strict=True) if v in inputs]
    constants, program = fold_constants(program)
    if constants is not None:
        folded = submit_program(constants, Executable(lower(constants)), (), ())
        sources += [Source("capture", tensor) for tensor in folded]
    return Compiled(
        program=program,
        executable=Executable(lower(program)),
        sources=tuple(sources),
        expressions=tuple(tracer.expressions),
        outputs=end.outputs,
        treespec=treespec,
        mutated=end.mutated,
        reformed=end.reformed,
        reduced=end.reduced,
        states=end.states,
        wholes=end.wholes,
        extra=extra,
        untried={True} if may_be_refused(program) else set(),
    )


def _output(tracer: Tracer, item: Any, values: list[int]) -> Output:
    node = node_of(item)
    if node is not None:
        return Output("scalar", node.expression)
    if isinstance(item, Tensor) and not isinstance(item, SymbolicTensor):
        return Output("constant", item)
    if isinstance(item, torch.Tensor) and not item.is_meta:
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
            return Output("alias", output, (_leaf_of(tracer, value), symbol._path))
    for tensor, _, captured in tracer.captures:
        if tensor._storage is symbol._storage:
            return Output("alias", output, (captured, symbol._path))
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
        return Output("sibling", output.item, (at, item._path))
    return output if not item._path else Output("part", output.item)


def _is_symbolic(item: Any) -> bool:
    return isinstance(item, SymbolicTensor)


def _leaf_of(tracer: Tracer, value: int) -> int:
    return tracer.sources[tracer.builder.inputs.index(value)].item


def _wholes(tracer: Tracer) -> tuple[Source, ...]:
    """Where the tensors come from whose storage is read by the place of its elements."""
    touched = [*tracer.arguments, *((t, v) for t, v, _ in tracer.captures), *tracer.constants]
    return tuple(
        tracer.sources[tracer.builder.inputs.index(value)]
        for tensor, value in touched
        if any(tensor._storage is storage for storage in tracer.read_by_place)
    )


def _mutated(tracer: Tracer, values: list[int]) -> tuple[tuple[int, Source], ...]:
    found = []
    touched = [*tracer.arguments, *((t, v) for t, v, _ in tracer.captures), *tracer.constants]
    for tensor, before in touched:
        replaced = any(t is tensor and t._storage is not s for t, s in tracer.reformed)
        if tensor._storage.version and not replaced:
            values.append(tensor._storage.value)
            source = tracer.sources[tracer.builder.inputs.index(before)]
            found.append((len(values) - 1, source))
    return tuple(found)


def _reformed(
    tracer: Tracer, values: list[int], found: Sequence[Any]
) -> tuple[tuple[int, int, Path | None], ...]:
    """The arguments that have another shape now, with their path if they are their own view."""
    reformed = []
    for tensor, storage in tracer.reformed:
        if any(
            _is_symbolic(t) and t is not tensor and t._storage is tensor._storage for t in found
        ):
            raise TraceError(
                "a function changes the shape of an argument in place and returns another view of "
                "it.\n  Fix: use the functional form, such as unsqueeze(0) for unsqueeze_(0)."
            )
        before = next(value for t, value in tracer.arguments if t is tensor)
        path = tensor._path if tensor._storage is storage else None
        values.append(tracer.read(tensor))
        reformed.append((len(values) - 1, _leaf_of(tracer, before), path))
    return tuple(reformed)


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
