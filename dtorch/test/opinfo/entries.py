"""Entries: PyTorch's OpInfo database as calls on tensors.

Gives, for an entry and a dtype, a bounded and seeded number of `Call`s: functions of nothing but
tensors, in which a sample's other arguments are fixed. Samples with sparse tensors are left out.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ... import factories
from ...tree import flatten, unflatten

Variant = Literal["function", "inplace", "out"]

UNDEFINED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)
"""Entries whose values are whatever lies in memory."""

_TOLERANT_CLASSES = (None, "TestCommon", "TestCompositeCompliance")
_OTHER_REFERENCES = ("reference", "numpy")


class Tolerance(NamedTuple):
    """How far a value may be from PyTorch's."""

    rtol: float
    atol: float


@functools.cache
def database() -> tuple[Any, ...]:
    """Returns PyTorch's entries, each an ``OpInfo``.

    They are imported here, because importing them changes settings of the whole process: it
    freezes the flags of ``torch.backends``, for one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("torch.testing._internal.common_methods_invocations")
    for name, other in list(sys.modules.items()):
        if name.startswith("torch.testing._internal.") and hasattr(other, _SEEDING):
            setattr(other, _SEEDING, _unseeded)
    return tuple(module.op_db)


_SEEDING = "wrapper_set_seed"
"""What random entries call their function through, which seeds PyTorch inside the call: in a
traced one that is a side effect, so that seeds are set around the call instead."""


def _unseeded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def names(
    dtype: torch.dtype,
    patterns: Sequence[str] = ("*",),
    requires_grad: bool = False,
    variant: Variant = "function",
) -> list[str]:
    """Returns the full names of the entries that support a dtype on the CPU.

    Args:
        dtype: The dtype.
        patterns: Shell patterns; an entry is taken if one fits its name or its full name.
        requires_grad: Whether they shall be differentiable.
        variant: The variant that they shall have.
    """
    return [
        op.full_name
        for op in database()
        if dtype in (op.backward_dtypes if requires_grad else op.dtypes)
        and (op.supports_autograd or not requires_grad)
        and (op.inplace_variant is not None or variant != "inplace")
        and (op.supports_out or variant != "out")
        and any(fnmatch.fnmatchcase(n, p) for p in patterns for n in (op.name, op.full_name))
    ]


def find(name: str) -> Any:
    """Returns the entry of a full name."""
    return next(op for op in database() if op.full_name == name)


def tolerance(op: Any, dtype: torch.dtype) -> Tolerance:
    """Returns what the entry's own tests against itself allow, or `torch.testing`'s default.

    Args:
        op: The entry.
        dtype: The dtype of its inputs.
    """
    inexact = dtype.is_floating_point or dtype.is_complex
    computed = dtype if inexact else torch.get_default_dtype()
    rtol, atol = torch.testing._comparison.default_tolerances(computed)
    for info in op.decorators or ():
        if _concerns_values(info):
            for override in info.decorators:
                if type(override).__name__ == "toleranceOverride" and dtype in override.d:
                    atol = max(atol, override.d[dtype].atol)
                    rtol = max(rtol, override.d[dtype].rtol)
    return Tolerance(rtol, atol)


def _concerns_values(info: Any) -> bool:
    """Whether a decorator is for tests that compare an entry with itself on the CPU."""
    if type(info).__name__ != "DecorateInfo":
        return False
    name = info.test_name or ""
    known = info.cls_name in _TOLERANT_CLASSES and info.device_type in (None, "cpu")
    return known and not any(word in name for word in _OTHER_REFERENCES)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A torch function of tensors: a sample of an entry with everything else fixed.

    Attributes:
        number: Which sample of the entry.
        tensors: The sample's tensors.
        function: Called with other tensors in their place, and keyword arguments for a factory.
        process: What the entry's gradient tests apply to the result, to make it unique.
        is_factory: Whether `function` takes ``device_mesh=`` and ``placements=`` instead.
    """

    number: int
    tensors: tuple[torch.Tensor, ...]
    function: Callable[..., Any]
    process: Callable[[Any], Any]
    is_factory: bool = False

    def __call__(self, *tensors: Any) -> Any:
        """Calls the function."""
        return self.function(*tensors)


def calls(
    op: Any,
    dtype: torch.dtype,
    count: int,
    seed: int,
    variant: Variant = "function",
    requires_grad: bool = False,
) -> list[Call]:
    """Returns some of an entry's samples as calls.

    Args:
        op: The entry.
        dtype: The dtype of its inputs.
        count: How many samples to take at most: the first, and then half of them from those
            with a tensor of two dims or more.
        seed: What the choice depends on.
        variant: The function itself, its in-place variant, or the function with ``out=``.
        requires_grad: Whether the sample's differentiable tensors shall require grad.
    """
    torch.manual_seed(seed)
    random.seed(seed)  # some samples have numbers of Python's
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=requires_grad))
    found = [_call(op, number, s, variant) for number, s in enumerate(samples)]
    usable = [c for c in found if c is not None]
    return _chosen(usable, count, random.Random(f"{op.full_name} {seed}"))


def _chosen(usable: list[Call], count: int, drawn: random.Random) -> list[Call]:
    if len(usable) <= count:
        return usable
    first, rest = usable[0], usable[1:]
    drawn.shuffle(rest)
    large = [c for c in rest if any(t.ndim > 1 and t.numel() > 1 for t in c.tensors)]
    preferred = large[: count // 2]
    others = [c for c in rest if c not in preferred]
    chosen = [first, *preferred, *others][:count]
    return sorted(chosen, key=lambda c: c.number)


def _call(op: Any, number: int, sample: Any, variant: Variant) -> Call | None:
    leaves, treespec = flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = tuple(leaves[i] for i in places)
    if any(t.layout is not torch.strided for t in tensors):
        return None
    process = sample.output_process_fn_grad

    def arguments(given: Sequence[Any]) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, given, strict=True):
            filled[place] = tensor
        return unflatten(treespec, filled)

    if not tensors:
        return _factory(op, number, sample, variant)
    if variant == "inplace":
        return _in_place(op, number, tensors, arguments, process)
    if variant == "out":
        return _with_out(op, number, tensors, arguments, process)

    def function(*given: Any) -> Any:
        first, args, kwargs = arguments(given)
        return op.op(first, *args, **kwargs)

    return Call(number, tensors, function, process)


def _factory(op: Any, number: int, sample: Any, variant: Variant) -> Call | None:
    if not hasattr(factories, op.full_name) or variant != "function":
        return None
    kwargs = {k: v for k, v in sample.kwargs.items() if k != "device"}

    def function(module: Any, **layout: Any) -> Any:
        return getattr(module, op.name)(sample.input, *sample.args, **kwargs, **layout)

    return Call(number, (), function, sample.output_process_fn_grad, is_factory=True)


def _in_place(
    op: Any, number: int, tensors: Any, arguments: Callable[..., Any], process: Any
) -> Call | None:
    if op.inplace_variant is None:
        return None

    def function(*given: Any) -> Any:
        first, args, kwargs = arguments(given)
        target = first.clone()
        return op.inplace_variant(target, *args, **kwargs), target

    return Call(number, tensors, function, process)


def _with_out(
    op: Any, number: int, tensors: Any, arguments: Callable[..., Any], process: Any
) -> Call | None:
    if not op.supports_out:
        return None
    first, args, kwargs = arguments([t.detach() for t in tensors])
    try:
        result = op.op(first, *args, **kwargs)
    except Exception:
        return None
    leaves, treespec = flatten(result)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None

    def function(*given: Any) -> Any:
        first, args, kwargs = arguments(given[: len(tensors)])
        targets = [t.clone() for t in given[len(tensors) :]]
        op.op(first, *args, **kwargs, out=unflatten(treespec, targets))
        return targets

    outs = tuple(torch.zeros_like(leaf) for leaf in leaves)
    return Call(number, (*tensors, *outs), function, process)
