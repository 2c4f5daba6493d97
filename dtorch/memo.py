"""What is remembered of calls, so that the next one like them is a look-up.

Takes a call that the Python path has run and its `Compiled` form; tells the `CallCache` of the
executor, in C++ or in `calls`, how to run it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import calls
from .arguments import Arguments
from .compiled import Compiled, Output, link, refresh
from .runtime import NATIVE
from .tracer import Source
from .tree import unflatten

MISSED: Any = calls.MISSED if NATIVE is None else NATIVE.MISSED
"""What a cache returns for a call that it does not know."""


class NamedCall(NamedTuple):
    """A call as a cache knows it.

    Attributes:
        token: What stands for the function, by identity: it, or the flags that it depends on.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    token: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_cache(ints_are_dynamic: bool, capacity: int, below_autograd: bool = False) -> Any:
    """Returns a cache of calls.

    Args:
        ints_are_dynamic: Integers are run-time values; otherwise they belong to the key.
        capacity: How many calls it holds; then it starts anew.
        below_autograd: The calls come from autograd, which has recorded them.
    """
    kind = calls.CallCache if NATIVE is None else NATIVE.CallCache
    return kind(ints_are_dynamic, below_autograd, capacity)


@contextlib.contextmanager
def bypassed() -> Iterator[None]:
    """A context of this thread whose calls are not looked up, but traced for its settings."""
    if NATIVE is None:  # whose keys have the settings in them
        yield
        return
    NATIVE.bypass_caches(1)
    try:
        yield
    finally:
        NATIVE.bypass_caches(-1)


def remember(
    cache: Any,
    call: NamedCall,
    treespec: Any,
    arguments: Arguments,
    static: tuple[int, ...],
    compiled: Compiled,
    run: Callable[[Compiled, Arguments], list[Any]],
    check_aliases: bool,
    through_autograd: Callable[..., Any] | None = None,
) -> None:
    """Tells a cache how to run a call again; before it runs, which may change its arguments.

    Args:
        cache: The cache.
        call: The call.
        treespec: Their structure.
        arguments: Their leaves.
        static: The numbers of the scalars whose values belong to the key.
        compiled: The traced call.
        run: Runs it on the leaves, for a call that does more than the cache can.
        check_aliases: A write to an argument is refused where it is also given otherwise.
        through_autograd: Makes the call, where autograd has to see it.
    """
    if compiled.untried or not cache.wants(*call):
        return
    numbered = unflatten(treespec, list(range(len(arguments.leaves))))
    if through_autograd is None:
        made = _made(arguments, static, compiled, run, check_aliases)
    else:
        made = _made_by_autograd(call.token, treespec, arguments, static, through_autograd)
    cache.remember(*call, numbered, made)


def _made_by_autograd(
    function: Any,
    treespec: Any,
    arguments: Arguments,
    static: tuple[int, ...],
    through_autograd: Callable[..., Any],
) -> dict[str, Any]:
    def slow(leaves: list[Any]) -> Any:
        return through_autograd(function, *unflatten(treespec, leaves))

    return _made_in_python(slow, arguments, static) | {"is_autograds": True}


def _made_in_python(
    slow: Callable[[list[Any]], Any], arguments: Arguments, static: tuple[int, ...]
) -> dict[str, Any]:
    return {
        "slow": slow,
        "read": static,
        "traced": [(number, arguments.key[number]) for number in arguments.tensors],
        "program": None,
        "is_autograds": False,
    }


def _made(
    arguments: Arguments,
    static: tuple[int, ...],
    compiled: Compiled,
    run: Callable[[Compiled, Arguments], list[Any]],
    check_aliases: bool,
) -> dict[str, Any]:
    again = arguments.kind()

    def slow(leaves: list[Any]) -> Any:
        return unflatten(compiled.treespec, run(compiled, again(leaves)))

    made = _made_in_python(slow, arguments, static)
    if not _is_simple(compiled, check_aliases):
        return made
    specs, outputs = compiled.program.specs, compiled.outputs
    is_leaf = compiled.treespec.is_leaf()
    return made | {
        "program": getattr(compiled.executable, "native", compiled.executable),
        "inputs": [source.item for source in compiled.sources],
        "scalars": [expression[1] for expression in compiled.expressions],
        "specs": [specs[value] for value in compiled.program.outputs],
        "results": [(output.kind != "leaf", output.item) for output in outputs],
        "reduced": list(compiled.reduced),
        "written": next(((output, source.item) for output, source in compiled.mutated), None),
        "links": [(i, *o.leaf) for i, o in enumerate(outputs) if o.leaf is not None],
        "link": link,
        "refresh": refresh,
        "unflatten": None if is_leaf else compiled.treespec.unflatten,
    }


def _is_simple(compiled: Compiled, check_aliases: bool) -> bool:
    """Whether a call only computes tensors, views and one new value of those that it is given."""
    written = [source for _, source in compiled.mutated]
    return (
        not (compiled.states or compiled.extra or compiled.reformed or compiled.wholes)
        and (not written or (not check_aliases and len(written) == 1 and _is_leaf(*written)))
        and all(source.kind in ("leaf", "capture") for source in compiled.sources)
        and all(expression[0] == "argument" for expression in compiled.expressions)
        and all(map(_is_simple_output, compiled.outputs))
    )


def _is_leaf(source: Source) -> bool:
    return source.kind == "leaf"


def _is_simple_output(output: Output) -> bool:
    is_view = output.kind == "alias" and output.leaf is not None and type(output.leaf[0]) is int
    return is_view or output.kind in ("value", "leaf")
