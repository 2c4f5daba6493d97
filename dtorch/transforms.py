"""Transformations of functions: `grad`, `value_and_grad`, `eval_shape`; `explain` and `strict`.

Each takes a pure function of pytrees; what it is called with may be traced by `jit` or not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import memo
from .arguments import Arguments
from .communication import Summary, summarize
from .jit import JitFunction, jit
from .placement import complete
from .recording import symbolic_leaves
from .strictness import strictly
from .symbolic import SymbolicTensor
from .tensor import Tensor
from .tracer import Tracer
from .tracing_modes import NeedsAutograd
from .tree import argument_path, flatten, map_leaves, unflatten

# -- a jitted call as one autograd node ------------------------------------------------------


# -- grad ------------------------------------------------------------------------------------


def value_and_grad(
    function: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns a function that computes a scalar function's value and its gradient.

    Args:
        function: Returns a scalar tensor, or a pair of it and anything else (`has_aux`).
        argnums: The argument, or arguments, to differentiate by: pytrees of floating tensors.
            Negative numbers count from the end of the positional arguments of the call.
        has_aux: Whether `function` returns such a pair.

    Returns:
        A function with the same arguments that returns ``(value, gradient)``, or
        ``((value, aux), gradient)``. The gradient has the structure of the argument (a tuple
        of them for a sequence of argnums), each leaf in the layout of what it belongs to.

    Raises:
        TypeError: `argnums` has something else than integers. At the call: a leaf is not a
            floating tensor, the value is not a scalar tensor, or there is no such argument.
        ValueError: `argnums` names an argument twice.

    Source: `jax.value_and_grad`; the derivatives are PyTorch's autograd's.
    """
    single = isinstance(argnums, int)
    asked = (argnums,) if single else tuple(argnums)
    if not all(type(n) is int for n in asked):
        raise TypeError(f"argnums must be an integer or integers, not {argnums!r}.")
    _check_distinct(asked, argnums)

    @functools.wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        numbers = _positions(asked, len(args), argnums)
        chosen = tuple(args[i] for i in numbers)
        leaves, treespec = flatten(chosen)
        _check_floating(numbers, chosen, leaves)
        outer = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
        fresh = [_tracked(leaf, outer) for leaf in leaves]
        replaced = dict(zip(numbers, unflatten(treespec, fresh), strict=True))
        with torch.enable_grad():
            out = function(*(replaced.get(i, a) for i, a in enumerate(args)), **kwargs)
            value, aux = out if has_aux else (out, None)
            _check_scalar(value)
            grads = torch.autograd.grad(value, fresh, create_graph=outer, allow_unused=True)
        pairs = zip(leaves, grads, strict=True)
        tree = unflatten(treespec, [_gradient(leaf, g) for leaf, g in pairs])
        gradient = tree[0] if single else tree
        value = value if outer else value.detach()
        aux = map_leaves(_detached, aux) if has_aux and not outer else aux
        return ((value, aux), gradient) if has_aux else (value, gradient)

    return compute


def grad(
    function: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns a function that computes the gradient of a scalar function.

    Args:
        function: As for `value_and_grad`.
        argnums: As for `value_and_grad`.
        has_aux: As for `value_and_grad`; then ``(gradient, aux)`` is returned.

    Raises:
        TypeError: As for `value_and_grad`.
        ValueError: As for `value_and_grad`.

    Source: `jax.grad`.

    Example:
        >>> grad(lambda x: (x * x).sum())(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """
    compute = value_and_grad(function, argnums, has_aux)

    @functools.wraps(function)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, result = compute(*args, **kwargs)
        return (result, value[1]) if has_aux else result

    return gradient


def _positions(asked: Sequence[int], count: int, argnums: Any) -> tuple[int, ...]:
    if not all(-count <= n < count for n in asked):
        raise TypeError(
            f"grad by argnums={argnums!r} needs these positional arguments, but the call has "
            f"{count} positional argument{'' if count == 1 else 's'}.\n"
            "  Fix: pass what is differentiated by position, or change argnums."
        )
    numbers = tuple(n % count for n in asked)
    _check_distinct(numbers, argnums)
    return numbers


def _check_distinct(numbers: Sequence[int], argnums: Any) -> None:
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"argnums={argnums!r} names an argument twice.\n  Fix: give each argument once."
        )


def _tracked(leaf: torch.Tensor, outer: bool) -> torch.Tensor:
    return leaf.view_as(leaf) if outer else leaf.detach().requires_grad_()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _gradient(leaf: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    if grad is None:
        return torch.zeros_like(leaf).detach()
    if isinstance(grad, Tensor) and isinstance(leaf, Tensor):
        return grad.redistribute(leaf.device_mesh, complete(leaf.placements))
    return grad


def _check_floating(numbers: Sequence[int], chosen: tuple[Any, ...], leaves: Sequence[Any]) -> None:
    for number, leaf in enumerate(leaves):
        floating = isinstance(leaf, torch.Tensor) and (
            leaf.is_floating_point() or leaf.is_complex()
        )
        if not floating:
            shown = f"{leaf.dtype} tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)
            path = argument_path([f"args[{n}]" for n in numbers], chosen, number)
            raise TypeError(
                f"grad needs floating-point tensors, but the leaf at {path} "
                f"is a {shown}.\n  Fix: take it out of the differentiated argument (argnums)."
            )


def _check_scalar(value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shown = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(
            f"grad needs a function that returns a scalar tensor, but it returned {shown}.\n"
            "  Fix: reduce it (.sum(), .mean()), or pass has_aux=True for a (value, aux) pair."
        )


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Summary:
    """Prints what a call would communicate, and which operations it would run replicated.

    A line for each collective: the user's line, the operation that it is for, the layouts before
    and after, the tensor, and the bytes that the busiest device receives. Nothing is run.

    Args:
        function: A pure function, jitted or not.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        The same as data.

    Example:
        >>> import torch, dtorch
        >>> mesh = dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        >>> x = dtorch.ones(4, 6, device_mesh=mesh, placements=[dtorch.Shard(1)])
        >>> summary = dtorch.explain(lambda x: torch.relu(x.sum(1)), x)  # doctest: +ELLIPSIS
        1 communication, 16 bytes a device; 0 operations replicated for want of a rule
        line...  for                collective  layouts            tensor      bytes a device
        ...      aten.relu.default  all_reduce  tp=P(sum) -> tp=R  float32[4]  16
    """
    jitted = function if isinstance(function, JitFunction) else jit(function)
    summary = summarize(jitted.program(*args, **kwargs))
    print(summary)
    return summary


def eval_shape(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns the result of a function as `Spec`s, without running anything.

    Args:
        function: A pure function.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Source: `jax.eval_shape`.
    """
    leaves, treespec = flatten((args, kwargs))
    arguments = Arguments(leaves, (), None)

    def traced(with_autograd: bool) -> Any:
        tracer = Tracer(arguments.mesh, with_autograd)
        with tracer.active():
            args, kwargs = unflatten(treespec, symbolic_leaves(tracer, arguments, set()))
            result = function(*args, **kwargs)
            return map_leaves(lambda t: t._spec if isinstance(t, SymbolicTensor) else t, result)

    try:
        return traced(with_autograd=False)
    except NeedsAutograd:
        return traced(with_autograd=True)


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """A context in which an operation that would communicate implicitly raises.

    What is asked for by name stays allowed: `Tensor.redistribute` and its relatives,
    `parallel.constrain`, and a fetch. Cutting a replicated tensor into shards needs no
    communication.

    Communication: none but what is asked for.

    Raises:
        PlacementError: At a call in the context, with the arguments' layouts and the legal ones.

    Example:
        >>> import dtorch
        >>> mesh = dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        >>> x = dtorch.ones(4, 6, device_mesh=mesh, placements=[dtorch.Shard(1)])
        >>> with dtorch.strict():
        ...     y = x + 1
        ...     z = x.sort(1)
        Traceback (most recent call last):
        dtorch.errors.PlacementError: strict: aten.sort.default cannot keep S(1) ...
    """
    with strictly(), memo.bypassed():
        yield
