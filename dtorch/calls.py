"""`CallCache`: what is remembered of calls where the executor is the portable one.

Means the same as the C++ class (`runtime/native/eager.cpp`), with tuples for keys. A call that only
computes new tensors is submitted from here; any other runs the Python path's own code on its
leaves. What is not recognised (a plain torch tensor, an unusual container, an active mode) is not
looked up at all, nor is a partial tensor that has been reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .arguments import exact
from .infer import settings
from .runtime import submit, timeline
from .runtime.timeline import Doing
from .tensor import Tensor

MISSED: Any = object()
"""What a cache returns for a call that it does not know."""

_STATIC = {bool, int, complex, str, type(Ellipsis), torch.Size, torch.device}
_STATIC |= {torch.dtype, torch.layout, torch.memory_format}
_CONTAINERS = {tuple, list, dict, slice}
# Looked up once, since every call asks.
_is_grad_enabled = torch.is_grad_enabled
_has_function_mode = torch._C._is_torch_function_mode_enabled
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_any_requires_grad = torch._C._any_requires_grad

_Run = Callable[[list[Any]], Any]


class CallCache:
    """How to run calls again, by key.

    Args:
        ints_are_dynamic: Integers are run-time values; otherwise they belong to the key.
        below_autograd: The calls come from autograd, which has recorded them.
        capacity: How many entries it holds; then it starts anew.

    Attributes:
        hits: How many calls were known.
    """

    def __init__(self, ints_are_dynamic: bool, below_autograd: bool, capacity: int) -> None:
        self.hits = 0
        self._dynamic = {float, int} if ints_are_dynamic else {float}
        self._doing = Doing.EAGER if ints_are_dynamic else Doing.JIT
        self._below_autograd = below_autograd
        self._capacity = capacity
        # What runs a call on its leaves; or the places of those whose values belong to the key.
        self._entries: dict[Any, Any] = {}

    def call(self, token: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a call, or `MISSED`."""
        leaves: list[Any] = []
        key = self._key(token, args, kwargs, leaves)
        run = self._entries.get(key)
        if type(run) is tuple:
            run = self._entries.get(_with_values(key, leaves, run))
        if run is None:
            return MISSED
        self.hits += 1
        if timeline.recorder is None:
            return run(leaves)
        with timeline.noted(self._doing):
            return run(leaves)

    def wants(self, token: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether a call can be remembered."""
        return self._key(token, args, kwargs, []) is not None

    def remember(
        self,
        token: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        numbered: tuple[Any, ...],
        made: dict[str, Any],
    ) -> None:
        """Remembers a call.

        Args:
            token: What stands for the function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            numbered: Both, with the number that the Python path gives each leaf in its place.
            made: What to do on the leaves, as `memo` says it.
        """
        leaves: list[Any] = []
        numbers: list[int] = []
        key = self._key(token, args, kwargs, leaves)
        self._encode((*numbered[0], numbered[1]), [], numbers)
        place = {number: at for at, number in enumerate(numbers)}
        # Another thread may have reduced or changed a tensor since it was traced.
        if key is None or any(leaves[place[n]]._spec is not spec for n, spec in made["traced"]):
            return
        if len(self._entries) >= self._capacity:
            self._entries = {}
        if made["read"]:
            read = tuple(place[number] for number in made["read"])
            self._entries[key] = read  # a later trace may read more
            key = _with_values(key, leaves, read)
        self._entries[key] = _submission(made, place) or _again(made, place)

    def clear(self) -> None:
        """Forgets every call and zeroes the count."""
        self._entries = {}
        self.hits = 0

    def _key(
        self, token: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
    ) -> Any:
        """Returns the key, or None where the call has to take the Python path."""
        if _has_function_mode() or _num_dispatch_modes():
            return None
        words = [token, settings(), len(args)]
        if not self._encode(args, words, leaves):
            return None
        if kwargs and not self._encode((kwargs,), words, leaves):
            return None
        if not self._below_autograd and _is_grad_enabled() and _any_requires_grad(*leaves):
            return None  # autograd has to record it
        return tuple(words)

    def _encode(self, items: Iterable[Any], words: list[Any], leaves: list[Any]) -> bool:
        """Appends what tells items apart, and their leaves; returns whether all are recognised."""
        for item in items:
            kind = type(item)
            if kind is Tensor:
                if item._reduced is not None:
                    return False
                words.append(item._spec)
                leaves.append(item)
            elif kind in self._dynamic:
                words.append(kind)
                leaves.append(item)
            elif item is None:
                words.append(None)
            elif kind in _STATIC:
                words.append(exact(item))
                leaves.append(item)
            elif kind in _CONTAINERS:
                word, parts = _taken_apart(item)
                words.append(word)
                if not self._encode(parts, words, leaves):
                    return False
            else:
                return False
        return True


def _taken_apart(container: Any) -> tuple[Any, Sequence[Any]]:
    """Returns what tells a container apart, and its items."""
    kind = type(container)
    if kind is dict:
        names = sorted(container, key=str)
        return (kind, *map(exact, names)), [container[name] for name in names]
    if kind is slice:
        return kind, (container.start, container.stop, container.step)
    return (kind, len(container)), container


def _with_values(key: Any, leaves: list[Any], places: tuple[int, ...]) -> Any:
    return (key, *(exact(leaves[i]) for i in places))


def _again(made: dict[str, Any], place: dict[int, int]) -> _Run:
    """Returns what runs a call by the code of the Python path."""
    slow, order = made["slow"], [place[number] for number in range(len(place))]
    return lambda leaves: slow([leaves[i] for i in order])


def _submission(made: dict[str, Any], place: dict[int, int]) -> _Run | None:
    """Returns what submits a call, or None where it does more than compute new tensors."""
    if made["program"] is None or made["written"] or made["reduced"] or made["links"]:
        return None
    if not all(type(source) is int for source in made["inputs"]):  # it reads a captured tensor
        return None
    if not all(is_output for is_output, _ in made["results"]):
        return None
    executable, specs, unflatten = made["program"], made["specs"], made["unflatten"]
    inputs = [place[number] for number in made["inputs"]]
    scalars = [place[number] for number in made["scalars"]]

    def run(leaves: list[Any]) -> Any:
        read = [leaves[i]._shards for i in inputs]
        outputs = submit(executable, read, [leaves[i] for i in scalars] if scalars else ())
        if unflatten is None:
            return Tensor._of(specs[0], outputs[0])
        return unflatten(map(Tensor._of, specs, outputs))

    return run
