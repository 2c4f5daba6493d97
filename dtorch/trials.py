"""Trials: what a function of shards gives, learned by running it on meta tensors.

Takes a `Body`, which is the user's function as one of a device's tensors, and the specs of its
operands; gives the specs of its results, and whether devices meet in it. It is run once for each
distinct set of local shapes, as if every peer showed what the device shows itself; where devices
that meet would not call the same collectives, that is known before anything runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .errors import DTorchError, PlacementError, TraceError
from .local_ops import LocalFunction
from .lowering import memory_order
from .mesh import DeviceMesh
from .placement import Placements, Replicate
from .runtime.local_calls import Place, differing, group_along, run
from .scalars import node_of
from .spec import Spec, dtype_name
from .tensor import Tensor
from .tracer import outside
from .tree import flatten, unflatten


class Body:
    """A function of trees as one of the tensors and run-time scalars in them.

    Args:
        name: What messages call it.
        fn: The function.
        treespec: The structure of its arguments.
        leaves: Their leaves, of which it keeps neither tensors nor run-time scalars.

    Attributes:
        name: What messages call it.
        result: The structure of the result, once it is known.
    """

    def __init__(
        self, name: str, fn: Callable[..., Any], treespec: Any, leaves: Sequence[Any]
    ) -> None:
        self.name = name
        self.result: Any = None
        self._fn = fn
        self._treespec = treespec
        self._tensors = [n for n, a in enumerate(leaves) if isinstance(a, torch.Tensor)]
        self._scalars = [n for n, a in enumerate(leaves) if node_of(a) is not None]
        given = {*self._tensors, *self._scalars}
        self._leaves = [None if n in given else a for n, a in enumerate(leaves)]

    def tensors_of(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns, of what there is for every leaf, what there is for tensors."""
        return [leaves[n] for n in self._tensors]

    def __call__(
        self, tensors: Sequence[torch.Tensor], scalars: Sequence[float]
    ) -> list[torch.Tensor]:
        """Returns the leaves of the result."""
        leaves = list(self._leaves)
        for number, tensor in zip(self._tensors, tensors, strict=False):
            leaves[number] = tensor
        for number, scalar in zip(self._scalars, scalars, strict=True):
            leaves[number] = scalar
        results, treespec = flatten(self._fn(*unflatten(self._treespec, leaves)))
        if self.result is None:
            self.result = treespec
        if treespec != self.result:
            raise DTorchError(
                f"{self.name} returned {treespec}, where its run on meta tensors, or out_shapes, "
                f"said {self.result}.\n  Fix: return the same structure whatever the values are."
            )
        for number, result in enumerate(results):
            self._check(result, number)
        return results

    def _check(self, result: Any, number: int) -> None:
        if isinstance(result, Tensor):
            raise TraceError(_captured(self.name, result))
        if not isinstance(result, torch.Tensor):
            raise TraceError(
                f"{self.name} returned {type(result).__name__} {result!r} as result {number}, "
                "which is no tensor.\n  Fix: return torch.tensor(...) of it."
            )


def _captured(name: str, tensor: torch.Tensor) -> str:
    return (
        f"{name} uses a distributed tensor of shape {list(tensor.shape)} that is none of its "
        "arguments: its function works on what one device holds.\n"
        "  Fix: pass it as an argument, with a P for it in in_specs."
    )


class _OnMeta(TorchFunctionMode):
    """Lets plain tensors that a function captures meet meta tensors; refuses distributed ones.

    Args:
        name: The function.
        is_recorded: Whether autograd records the call: then what it captures needs no gradient.
    """

    def __init__(self, name: str, is_recorded: bool) -> None:
        super().__init__()
        self._name = name
        self._is_recorded = is_recorded

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        leaves, treespec = flatten((args, kwargs or {}))
        tensors = [a for a in leaves if isinstance(a, torch.Tensor)]
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                raise TraceError(_captured(self._name, tensor))
            if self._is_recorded and tensor.requires_grad and not tensor.is_meta:
                raise TraceError(
                    f"{self._name} uses a tensor of shape {list(tensor.shape)} that requires grad "
                    "and is none of its arguments; its gradient would be lost.\n"
                    "  Fix: pass it as an argument, detach() it, or call under torch.no_grad()."
                )
        devices = {t.is_meta for t in tensors}
        if len(devices) > 1:
            leaves = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in leaves]
            args, kwargs = unflatten(treespec, leaves)
        return func(*args, **kwargs or {})


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What a function gave on the meta tensors of a device, and what it called there."""

    results: list[torch.Tensor]
    place: Place


def tried(
    body: Body, mesh: DeviceMesh, inputs: Sequence[Spec], scalars: list[float]
) -> list[Trial]:
    """Returns the trial of each device; those with equal local shapes share one.

    Args:
        body: The function.
        mesh: The devices.
        inputs: The spec of each operand.
        scalars: The values of the run-time scalars now.

    Raises:
        CollectiveError: Devices that meet would not call the same collectives.
    """
    trials: dict[Any, Trial] = {}
    found: list[Trial] = []
    function = LocalFunction(body.name, body, mesh, tuple(inputs), (), False)
    for position in range(len(mesh.devices)):
        shapes = tuple(spec.local_shapes[position] for spec in inputs)
        if shapes not in trials:
            place = Place(body.name, mesh, position, is_trial=True)
            trials[shapes] = Trial(_trial(function, shapes, scalars, place), place)
        found.append(trials[shapes])
    _check_collectives(body.name, mesh, found)
    return found


def _trial(
    function: LocalFunction, shapes: Sequence[Any], scalars: list[float], place: Place
) -> list[torch.Tensor]:
    is_recorded = torch.is_grad_enabled()
    with outside(), _OnMeta(function.name, is_recorded):
        dtypes = [spec.dtype for spec in function.inputs]
        operands = [
            torch.empty(shape, dtype=dtype, device="meta")
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        try:
            return run(function, operands, scalars, place)
        except DTorchError:
            raise
        except Exception as error:
            shown = ", ".join(f"{dtype_name(o.dtype)}{list(o.shape)}" for o in operands)
            error.add_note(
                f"raised by {function.name}, which was run on meta tensors, {shown}, to learn what "
                "it returns.\n  Fix: for a kernel that cannot run on meta tensors, pass "
                "out_shapes, or give it another for them (torch.library.register_fake)."
            )
            raise


def _check_collectives(name: str, mesh: DeviceMesh, trials: Sequence[Trial]) -> None:
    """Raises where devices that meet would not call the same, as their local shapes say."""
    for position, trial in enumerate(trials):
        for number, called in enumerate(trial.place.called):
            texts = {}
            for p in group_along(mesh, position, called.axes):
                theirs = trials[p].place.called
                texts[p] = theirs[number].text if number < len(theirs) else "ended before"
            if len(set(texts.values())) > 1:
                raise differing(name, mesh, number, texts)


def whole(
    name: str,
    number: int,
    parts: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    placements: Placements,
) -> Spec:
    """Returns the spec of a result, of which each device gives a part.

    Args:
        name: The function.
        number: Which of its results.
        parts: What each device gives.
        mesh: The devices.
        placements: The layout that the result is to have.

    Raises:
        PlacementError: They are not the parts of one tensor in that layout.
    """
    first = parts[0]
    shape = [
        sum(parts[p].shape[d] if d < parts[p].ndim else 0 for p in _along(mesh, placements, d))
        for d in range(first.ndim)
    ]
    like = Spec.of(first.shape, first.dtype, mesh, (Replicate(),) * mesh.ndim, first.stride())
    order, stride, step = memory_order(like), [0] * len(shape), 1
    for d in reversed(order):
        stride[d], step = step, step * max(shape[d], 1)
    spec = Spec.of(shape, first.dtype, mesh, placements, stride)
    for position, (part, wanted) in enumerate(zip(parts, spec.local_shapes, strict=True)):
        if tuple(part.shape) != wanted or part.dtype != first.dtype:
            shown = [f"{dtype_name(t.dtype)}{list(t.shape)}" for t in (first, part)]
            raise PlacementError(
                f"{name}: the local results of number {number} are no shards of one tensor.\n"
                f"  {mesh.devices[0]}  {shown[0]}\n"
                f"  {mesh.devices[position]}  {shown[1]}\n"
                f"  as {spec!r}, {mesh.devices[position]} would have {list(wanted)}.\n"
                "  Fix: another P in out_specs, or pieces as torch.chunk cuts them (5 over 4: "
                "2, 2, 1, 0)."
            )
    return spec


def _along(mesh: DeviceMesh, placements: Placements, dim: int) -> Iterator[int]:
    """The devices whose parts, one after another, make up a dim."""
    for position, coordinate in enumerate(mesh.coordinates()):
        if all(i == 0 or p.is_shard(dim) for i, p in zip(coordinate, placements, strict=True)):
            yield position
