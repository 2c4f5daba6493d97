"""Check: one call in one layout, eagerly and under `jit`, compared with PyTorch."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch

import dtorch

from ...communication import summarize
from ...errors import DataDependentError
from ...placement import Replicate, complete
from ...program import Program
from ...tensor import Tensor
from ...tree import flatten
from .compare import Expected, FarError, InexactError, WrongError, compare, largest_size
from .entries import Call
from .layouts import Layout, splits_inner_dim

SEED = 20
Status = Literal["right", "data-dependent", "misplaced", "inexact", "raised", "wrong"]
"""From best to worst. Data-dependent: right eagerly, and `jit` raised `DataDependentError`.
Misplaced: a gradient in another layout. Inexact: on one device, close but not equal."""
Mode = Literal["eager", "jit"]
MODES: tuple[Mode, ...] = ("eager", "jit")
_ORDER: tuple[Status, ...] = get_args(Status)


_IS_COTANGENT = "is_cotangent"


class MisplacedError(AssertionError):
    """A gradient's layout is not that of what it belongs to."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one call in one layout.

    Attributes:
        status: The worse of the two ways to run it.
        how: ``"eager"`` or ``"jit"``: where it failed.
        message: The first line of what was raised, or how the value is wrong.
        num_bytes: The bytes that the recorded program communicates.
        is_inner: Whether a dim other than 0 was sharded.
        is_native: Whether that ran without gathering anything sharded.
    """

    status: Status
    how: str = ""
    message: str = ""
    num_bytes: int = 0
    is_inner: bool = False
    is_native: bool = False


def run(call: Callable[..., Any], arguments: Sequence[Any] = (), seed: int = SEED) -> list[Any]:
    """Returns the leaves of a call's result, with PyTorch's generator at a fixed seed."""
    torch.manual_seed(seed)
    return _leaves(call, arguments)


def _leaves(call: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return flatten(call(*arguments))[0]


def check_forward(
    call: Call, jitted: Any, layout: Layout, expected: Expected, modes: Sequence[Mode] = MODES
) -> Outcome:
    """Runs a call in a layout and compares its results.

    On one device it runs twice, the second time out of the caches.

    Args:
        call: The call.
        jitted: The same, by `dtorch.jit`.
        layout: The layout of its tensors.
        expected: What it shall give.
        modes: How it runs.
    """
    times = 2 if len(layout.mesh.devices) == 1 else 1
    program = _program(jitted, layout.spread(call.tensors))
    if program is not None and _adds_over_devices(program):
        expected = expected.over_devices()

    def attempt(function: Callable[..., Any]) -> None:
        for _ in range(times):
            compare(run(function, layout.spread(call.tensors)), layout, expected)

    outcome = _worst(modes, lambda: attempt(call), lambda: attempt(jitted))
    return _measured(outcome, program, layout, call.tensors)


def check_factory(
    call: Call, layout: Layout, expected: Expected, modes: Sequence[Mode] = MODES
) -> Outcome:
    """Makes a tensor in a layout by dtorch's factory and compares it.

    Args:
        call: A call of a factory.
        layout: The layout that the result shall have.
        expected: What it shall give.
        modes: How it runs.
    """
    (wanted,) = layout.placements

    def make() -> Any:
        return call.function(dtorch, device_mesh=layout.mesh, placements=wanted)

    def attempt(function: Callable[..., Any]) -> None:
        leaves = run(function)
        compare(leaves, layout, expected)
        if tuple(leaves[0].placements) != wanted:
            raise WrongError(f"made in {leaves[0].placements}, not in {list(wanted)}")

    jitted = dtorch.jit(make)
    outcome = _worst(modes, lambda: attempt(make), lambda: attempt(jitted))
    made = [leaf for leaf in expected.leaves if isinstance(leaf, torch.Tensor)]
    return _measured(outcome, _program(jitted, ()), layout, made)


def check_backward(
    call: Call, layout: Layout, expected: Expected, modes: Sequence[Mode] = MODES
) -> Outcome:
    """Runs a call in a layout and compares the gradients of its arguments.

    Args:
        call: The call.
        layout: The layout of its tensors.
        expected: The gradients, as `gradients` gives them.
        modes: How it runs.
    """
    jitted = dtorch.jit(call)
    program = _program(_whole_backward(call), layout.spread(call.tensors))
    if program is None or _adds_over_devices(program):
        expected = expected.over_devices()

    def attempt(function: Callable[..., Any]) -> None:
        tensors = _leaves_of_graph(call, layout.spread(call.tensors))
        grads = gradients(call, function, tensors)
        try:
            compare(grads, layout, expected)
        except FarError:
            if not _is_nearer(call, grads, expected):
                raise
        sources = [t for t in tensors if t.requires_grad] * 2
        for grad, source in zip(grads, sources, strict=True):
            _check_layout(grad, source)

    outcome = _worst(modes, lambda: attempt(call), lambda: attempt(jitted))
    return _measured(outcome, program, layout, call.tensors)


def _is_nearer(call: Call, grads: Sequence[Any], expected: Expected) -> bool:
    """Whether gradients are about as near to those in double precision as PyTorch's are.

    Where a small change of the input changes the result more than the tolerance, or large terms
    cancel, two kernels that round differently, such as on another number of threads, differ by
    more than it. Ours may be off by twice what PyTorch's are; those by ten times the tolerance, or
    a hundred times where ours are within it.
    """
    if any(t.dtype != torch.float32 for t in call.tensors if t.requires_grad):
        return False
    doubles = [t.double() if t.is_floating_point() else t for t in call.tensors]
    try:
        exact = gradients(call, call, _leaves_of_graph(call, doubles))
    except (RuntimeError, NotImplementedError):  # there is no such kernel
        return False
    for grad, theirs, true in zip(grads, expected.leaves, exact, strict=True):
        if isinstance(grad, Tensor):
            ours, other = (largest_size(t.double() - true) for t in (grad.to_torch(), theirs))
            rtol, atol = expected.tolerance
            allowed = atol + rtol * largest_size(true)
            is_close = ours <= allowed
            if ours > max(allowed, 2 * other) or other > (100 if is_close else 10) * allowed:
                return False
    return True


def _check_layout(grad: Any, source: Tensor) -> None:
    # An identity gives the cotangent on as it is.
    if grad is None or getattr(grad, _IS_COTANGENT, False):
        return
    if tuple(grad.placements) != complete(source.placements):
        raise MisplacedError(f"{source.placements} has a gradient in {grad.placements}")


def expected_gradients(call: Call) -> list[Any]:
    """Returns PyTorch's gradients of a call."""
    tensors = _leaves_of_graph(call, call.tensors)
    return gradients(call, call, tensors)


def gradients(call: Call, function: Callable[..., Any], tensors: Sequence[Any]) -> list[Any]:
    """Returns the gradients of the tensors that require grad, for two fixed cotangents.

    The first is random. The second is one number, expanded without a copy, as the gradient of a
    sum is: a backward pass may not take it to be contiguous.

    Args:
        call: The call, which says how its result becomes unique.
        function: The call itself, or another form of it.
        tensors: Its tensors.
    """
    torch.manual_seed(SEED)
    return _gradients(call, function, tensors)


def _gradients(call: Call, function: Callable[..., Any], tensors: Sequence[Any]) -> list[Any]:
    result = _leaves(lambda *given: call.process(function(*given)), tensors)
    outs = [r for r in result if isinstance(r, torch.Tensor) and r.requires_grad]
    if any(r.layout is not torch.strided for r in outs):
        raise TypeError("a result is sparse")
    sources = [t for t in tensors if t.requires_grad]
    made = torch.Generator().manual_seed(SEED)
    some = [_cotangent(out, made) for out in outs]
    first = torch.autograd.grad(outs, sources, some, allow_unused=True, retain_graph=True)
    second = torch.autograd.grad(outs, sources, list(map(_expanded, outs)), allow_unused=True)
    return [*first, *second]


def _cotangent(out: torch.Tensor, made: torch.Generator) -> torch.Tensor:
    # In double precision the same numbers as in single.
    dtype = torch.float32 if out.dtype == torch.float64 else out.dtype
    return _like(out, torch.randn(out.shape, dtype=dtype, generator=made).to(out.dtype))


def _expanded(out: torch.Tensor) -> torch.Tensor:
    expanded = _like(out, torch.tensor(0.75, dtype=out.dtype)).expand(out.shape)
    setattr(expanded, _IS_COTANGENT, True)
    return expanded


def _like(out: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value in the layout of a result; on each device whole where it has fewer dims."""
    if not isinstance(out, Tensor):
        return value
    whole = (Replicate(),) * out.device_mesh.ndim
    placements = complete(out.placements) if value.ndim == out.ndim else whole
    return Tensor(value, device_mesh=out.device_mesh, placements=placements)


def _leaves_of_graph(call: Call, tensors: Sequence[Any]) -> list[Any]:
    pairs = zip(tensors, call.tensors, strict=True)
    return [t.detach().clone().requires_grad_(model.requires_grad) for t, model in pairs]


def _whole_backward(call: Call) -> Any:
    """The call and its gradients as one jitted function."""

    def whole(*tensors: Any) -> list[Any]:
        return _gradients(call, call, _leaves_of_graph(call, tensors))

    return dtorch.jit(whole)


def _program(jitted: Any, tensors: Sequence[Any]) -> Program | None:
    """The program of a call, None where it raises: then running it says so."""
    try:
        torch.manual_seed(SEED)
        return jitted.program(*tensors)
    except Exception:
        return None


def _adds_over_devices(program: Program) -> bool:
    """Whether values of several devices are added up, by the program or by who fetches it."""
    moved = [c.before for c in summarize(program).communications]
    specs = [*moved, *(program.specs[v] for v in program.outputs)]
    return any(p.is_partial("sum") or p.is_partial("avg") for s in specs for p in s.placements)


# -- outcomes ------------------------------------------------------------------------------


def _worst(modes: Sequence[Mode], eager: Callable[[], None], jitted: Callable[[], None]) -> Outcome:
    ways: dict[Mode, Callable[[], None]] = {"eager": eager, "jit": jitted}
    return max((_attempt(m, ways[m]) for m in modes), key=lambda o: _ORDER.index(o.status))


def _attempt(how: Mode, function: Callable[[], None]) -> Outcome:
    try:
        function()
    except WrongError as error:
        return Outcome("wrong", how, str(error))
    except MisplacedError as error:
        return Outcome("misplaced", how, str(error))
    except InexactError as error:
        return Outcome("inexact", how, str(error))
    except DataDependentError as error:
        status: Status = "data-dependent" if how == "jit" else "raised"
        return Outcome(status, how, _first_line(error))
    except Exception as error:
        return Outcome("raised", how, _first_line(error))
    return Outcome("right")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _measured(
    outcome: Outcome, program: Program | None, layout: Layout, tensors: Sequence[torch.Tensor]
) -> Outcome:
    """An outcome with what the program communicates, where it is right and there is one."""
    is_inner = splits_inner_dim(layout, tensors)
    if program is None or outcome.status not in ("right", "misplaced"):
        return dataclasses.replace(outcome, is_inner=is_inner)
    summary = summarize(program)
    is_native = is_inner and not summary.gathers and not summary.replicated
    return dataclasses.replace(
        outcome, num_bytes=summary.num_bytes, is_inner=is_inner, is_native=is_native
    )
