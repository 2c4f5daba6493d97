"""Pipelines: a batch in microbatches through stages that live on different devices, all at once.

Takes a model, as one function for each stage or as one function whose parameters live on several
stage meshes, and gives a function of the whole batch. Nothing here makes two stages work at the
same time: calls return at once, and a device runs only its own instructions, so while a stage
computes one microbatch the one before it goes on to the next. What is decided here is the order in
which the work is submitted, which for gradients is that of a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import tracer
from ..arguments import Arguments
from ..compiled import Compiled
from ..errors import MeshError, TraceError
from ..gradients import in_layout_of
from ..jit import jit
from ..mesh import DeviceMesh, in_stage_order
from ..placement import Placements, Replicate, complete
from ..runtime import Shards, submit
from ..scalars import evaluate
from ..tensor import Tensor, default_mesh
from ..tracer import Source
from ..tree import flatten, leaf_names, map_leaves, unflatten
from .microbatches import Part, joined, parts_of, total
from .pieces import pieces_of
from .schedules import Schedule, check_count, submission_order

__all__ = ["Pipeline", "pipeline"]

Stages = Callable[..., Any] | Sequence[Callable[..., Any]]


def pipeline(
    stages: Stages,
    *,
    num_microbatches: int,
    schedule: str = "gpipe",
    loss_fn: Callable[..., Any] | None = None,
) -> Pipeline:
    """Returns a function that runs a model on a batch in microbatches, its stages all at once.

    Args:
        stages: One function for each stage, ``stage(params, *args, **kwargs)``: the first is given
            the batch, each other what the one before it returns (a tuple as several arguments),
            and all are given the keyword arguments. Or one function of the whole model,
            ``model(params, *args, **kwargs)``, unchanged, whose parameters live on several
            stages: an operation runs on the latest stage of its operands.
        num_microbatches: Into how many parts the batch is split along dim 0, as by `torch.chunk`: 8
            in 3 is 3, 3, 2, and 5 in 4 is 2, 2, 1, three microbatches.
        schedule: The order of a stage's work where gradients are computed. ``"gpipe"``: the
            forwards of all microbatches, then their backwards. ``"1f1b"``: each backward as soon as
            it can be, which takes as long and keeps the activations of at most
            `num_stages - stage` microbatches on a stage.
        loss_fn: ``loss_fn(output, target)``, a mean over the batch; ``loss_fn(output)`` where the
            call has no target. Without it the output of the last stage is the loss, where one is
            needed.

    Returns:
        ``step``. ``step(params, *args, **kwargs)`` returns the output for the whole batch, or with
        a `loss_fn` the loss. ``step.value_and_grad(params, *args, **kwargs)`` returns the loss and
        its gradient, by the schedule.

    Raises:
        TypeError: `num_microbatches` is not an integer, or what should be a function is none.
        ValueError: `num_microbatches` is not positive, there is no stage, or no such schedule.

    Source: `torch.distributed.pipelining` (`ScheduleGPipe`, `Schedule1F1B`), without processes;
    GPipe (Huang et al., 2019), PipeDream-Flush (Narayanan et al., 2021, section 2.2).

    Example:
        >>> import torch, dtorch
        >>> mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        >>> params = [dtorch.ones(3, 3, device_mesh=m) for m in mesh.unbind("pp")]
        >>> stage = lambda weight, x: torch.relu(x @ weight)
        >>> step = pipeline([stage, stage], num_microbatches=2)
        >>> step(params, torch.ones(4, 3)).device_mesh
        DeviceMesh('cpu', 1)
    """
    return Pipeline(stages, num_microbatches, schedule, loss_fn)


class Pipeline:
    """A model that runs in microbatches; made by `pipeline`."""

    def __init__(
        self,
        stages: Stages,
        num_microbatches: int,
        schedule: str,
        loss_fn: Callable[..., Any] | None,
    ) -> None:
        _check_functions(stages, loss_fn)
        check_count("num_microbatches", num_microbatches)
        self._num_microbatches = num_microbatches
        self._schedule = _checked_schedule(schedule)
        self._num_stages = None if callable(stages) else len(stages)
        self._has_loss = loss_fn is not None
        model = _whole(stages, loss_fn) if callable(stages) else _chain(tuple(stages), loss_fn)
        self._run = jit(model)
        self._run_with_grad = jit(_with_gradient(model))

    def __call__(self, params: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns for the whole batch.

        Tensors are joined along dim 0; those without dims are averaged, a microbatch counting by
        its size. What is no tensor is that of the first microbatch. Differentiable.

        Args:
            params: The parameters, for a list of stages a sequence of one tree for each.
            *args: The model's arguments. Their tensors are split along dim 0, those without dims
                are given to every microbatch whole.
            **kwargs: The model's keyword arguments, likewise, and ``target`` for a `loss_fn`.

        Communication: between stages, what one returns and the next takes; of a batch that is
            sharded along dim 0, what a microbatch takes from other devices.

        Raises:
            ValueError: The tensors differ in dim 0, there are more microbatches than that, or the
                parameters are not as many trees as there are stages.
            MeshError: A stage's parameters live on no mesh or on several.
        """
        self._check_params(params)
        parts = self._split(args, kwargs)
        outputs = [self._run(params, *part.arguments) for part in parts]
        return outputs[0] if len(outputs) == 1 else joined(outputs, parts)

    def value_and_grad(self, params: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Returns the loss of the whole batch and its gradient by the parameters.

        The loss is the mean over the microbatches, each counting by its size: where it is a mean
        over the batch, both are those of the whole batch. Gradients are summed on their stage as
        they come, and what is partial is reduced once, at the end.

        Args:
            params: As for a call; floating-point tensors.
            *args: As for a call.
            **kwargs: As for a call.

        Returns:
            The loss, on the last stage; and a tree like `params`, each leaf in the layout of what
            it belongs to.

        Raises:
            TypeError: The loss is no scalar of floating point that depends on a parameter, or a
                parameter no floating-point tensor.
            ValueError: As for a call.
            MeshError: As for a call; or the stages are not in the order of one `unbind` call, or
                two of them are the same.
            TraceError: The model draws from a generator, or changes a tensor in place.
        """
        self._check_params(params)
        _check_not_traced()
        meshes = self._meshes(params)
        leaves, treespec = flatten(params)
        parts = [
            _Microbatch(*self._run_with_grad.traced(part.weight, params, *part.arguments), meshes)
            for part in self._split(args, kwargs)
        ]
        losses: list[Any] = [None] * len(parts)
        sums: list[Any] = [None] * len(leaves)
        for stage, number, is_forward in submission_order(self._schedule, len(meshes), len(parts)):
            found = parts[number].run(stage if is_forward else -1 - stage)
            losses[number] = found.pop(_LOSS, losses[number])
            _accumulate(sums, found)
        return total(losses), unflatten(treespec, _laid_out(sums, leaves))

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Part]:
        targets = (kwargs.pop("target"),) if self._has_loss and "target" in kwargs else ()
        return parts_of((args, kwargs, targets), self._num_microbatches)

    def _check_params(self, params: Any) -> None:
        if self._num_stages is None:
            return
        if not isinstance(params, (list, tuple)) or len(params) != self._num_stages:
            shown = type(params).__name__
            shown += f" of {len(params)}" if isinstance(params, (list, tuple)) else ""
            raise ValueError(
                f"a pipeline of {self._num_stages} stage functions takes a list of as many "
                f"parameter trees, not a {shown}."
            )
        for number, tree in enumerate(params):
            _mesh_of(tree, number)

    def _meshes(self, params: Any) -> tuple[DeviceMesh, ...]:
        """The meshes of the stages, in order."""
        if self._num_stages is None:
            return _ordered(_meshes_in(params))
        meshes = tuple(_mesh_of(tree, stage) for stage, tree in enumerate(params))
        if len(set(meshes)) < len(meshes):
            raise MeshError(
                "two stages of a pipeline that is trained live on one mesh:"
                + "".join(f"\n  stage {s}: {m!r}" for s, m in enumerate(meshes))
                + "\n  Fix: give each its own of mesh.unbind('pp'), or make one stage of them."
            )
        return meshes


# -- the functions that are traced ----------------------------------------------------------

_Model = Callable[[Any, tuple[Any, ...], dict[str, Any], tuple[Any, ...]], Any]
"""A model of its parameters, arguments, keyword arguments and targets (one or none)."""


def _whole(function: Callable[..., Any], loss_fn: Callable[..., Any] | None) -> _Model:
    def run(params: Any, args: Any, kwargs: Any, targets: Any) -> Any:
        output = function(params, *args, **kwargs)
        return output if loss_fn is None else loss_fn(output, *targets)

    return _named(run, getattr(function, "__name__", "pipeline"))


def _chain(stages: Sequence[Callable[..., Any]], loss_fn: Callable[..., Any] | None) -> _Model:
    """The stages as one function: each on the mesh of its parameters, the loss on the last."""

    def run(params: Any, args: Any, kwargs: Any, targets: Any) -> Any:
        mesh, output = _mesh_of(params[0], 0), args
        for number, stage in enumerate(stages):
            mesh = _mesh_of(params[number], number)
            given = output if isinstance(output, tuple) else (output,)
            given, named = _moved((given, kwargs), mesh)
            with _at(mesh):
                output = stage(params[number], *given, **named)
        if loss_fn is None:
            return output
        with _at(mesh):
            return loss_fn(output, *_moved(targets, mesh))

    return _named(run, "pipeline")


def _with_gradient(model: _Model) -> Callable[..., Any]:
    """A model as a function of its weight in the mean, to the weighted loss and its gradients."""

    def run(weight: float, params: Any, args: Any, kwargs: Any, targets: Any) -> Any:
        leaves, treespec = flatten(params)
        _check_floating(params)
        fresh = [leaf.detach().requires_grad_() for leaf in leaves]
        with torch.enable_grad():
            loss = model(unflatten(treespec, fresh), args, kwargs, targets)
            _check_scalar(loss)
            loss = loss * weight
            # A trace would lay out each gradient here; what is partial is reduced once, at the end.
            with torch._C.DisableTorchFunction():
                grads = torch.autograd.grad(loss, fresh, allow_unused=True)
        pairs = zip(grads, leaves, strict=True)
        return loss.detach(), [torch.zeros_like(leaf) if g is None else g for g, leaf in pairs]

    return _named(run, getattr(model, "__name__", "pipeline"))


def _named(function: Any, name: str) -> Any:
    function.__name__ = name
    return function


def _check_floating(params: Any) -> None:
    names, leaves, _ = leaf_names(params)
    wrong = [
        f"  {name}: {f'{leaf.dtype} tensor' if isinstance(leaf, torch.Tensor) else repr(leaf)}"
        for name, leaf in zip(names, leaves, strict=True)
        if not (isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()))
    ]
    if wrong:
        raise TypeError(
            "a pipeline needs floating-point parameters to differentiate by, but these are none:\n"
            + "\n".join(wrong)
            + "\n  Fix: let the function capture them instead."
        )


def _check_scalar(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        shown = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(
            f"the loss of a pipeline must be a scalar tensor, not {shown}.\n"
            "  Fix: pass a loss_fn that reduces the output of the last stage, or reduce it there."
        )
    if not loss.requires_grad:
        shown = "does not depend on a parameter" if loss.is_floating_point() else f"is {loss.dtype}"
        raise TypeError(
            f"the loss of a pipeline {shown}, so it has no gradient.\n"
            "  Fix: compute it in floating point from the parameters, without detach()."
        )


# -- meshes ----------------------------------------------------------------------------------


def _meshes_in(tree: Any) -> list[DeviceMesh]:
    found = (leaf.device_mesh for leaf in flatten(tree)[0] if isinstance(leaf, Tensor))
    return list(dict.fromkeys(found))


def _mesh_of(tree: Any, stage: int) -> DeviceMesh:
    meshes = _meshes_in(tree)
    if len(meshes) != 1:
        where = ", ".join(map(repr, meshes)) if meshes else "no mesh: none is distributed"
        raise MeshError(
            f"the parameters of stage {stage} live on {where}; they say where the stage runs.\n"
            f"  Fix: dtorch.parallel.shard(params[{stage}], mesh.unbind('pp')[{stage}], ...)."
        )
    return meshes[0]


def _ordered(meshes: list[DeviceMesh]) -> tuple[DeviceMesh, ...]:
    """The meshes of a function's parameters as stages."""
    stages = in_stage_order(meshes)
    if stages is None:
        raise MeshError(
            "the parameters of a pipeline live on meshes that are not the stages of one "
            f"DeviceMesh.unbind call: {', '.join(map(repr, meshes))}.\n"
            "  Fix: dtorch.parallel.shard(params, {pattern: mesh, ...}) with meshes of one call."
        )
    return tuple(stages) or (default_mesh(),)


def _moved(tree: Any, mesh: DeviceMesh) -> Any:
    """A tree with its distributed tensors on a mesh, split over the axes of the same names."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device_mesh == mesh:
            return leaf
        return leaf.redistribute(mesh, _alike(leaf, mesh))

    return map_leaves(move, tree)


def _alike(tensor: Tensor, mesh: DeviceMesh) -> Placements:
    before, placements = tensor.device_mesh, complete(tensor.placements)
    if before.mesh_dim_names and mesh.mesh_dim_names:
        known = dict(zip(before.mesh_dim_names, placements, strict=True))
        return tuple(known.get(name, Replicate()) for name in mesh.mesh_dim_names)
    return placements if before.shape == mesh.shape else (Replicate(),) * mesh.ndim


@contextmanager
def _at(mesh: DeviceMesh) -> Iterator[None]:
    """Makes what a traced function creates live on a mesh."""
    active = tracer.current()
    if active is None:
        yield
    else:
        with active.factories(mesh, None):
            yield


def _check_not_traced() -> None:
    if tracer.current() is not None:
        raise TraceError(
            "a pipeline's value_and_grad is called inside a jitted function, but it is many "
            "programs in an order of its own.\n  Fix: call it outside; it is compiled already."
        )


# -- gradients by a schedule -----------------------------------------------------------------

_LOSS = -1


class _Microbatch:
    """A traced loss with gradients that is run piece by piece.

    Args:
        compiled: The traced call, of `_with_gradient`.
        arguments: Its arguments.
        meshes: The stages' meshes.
    """

    def __init__(
        self, compiled: Compiled, arguments: Arguments, meshes: tuple[DeviceMesh, ...]
    ) -> None:
        _check_pure(compiled)
        program = compiled.program
        self._compiled = compiled
        self._leaves = arguments.values
        self._wanted = {n - 1: _result(compiled, n) for n in range(len(compiled.outputs))}
        self._pieces = pieces_of(compiled, meshes, self._wanted[_LOSS])
        self._inputs = {value: number for number, value in enumerate(program.inputs)}
        self._scalars = [evaluate(e, arguments.values) for e in compiled.expressions]
        self._values: dict[int, Shards] = {}

    def run(self, number: int) -> dict[int, Tensor]:
        """Submits a piece; returns the loss (-1) and the gradients (by leaf) that it gives."""
        piece = self._pieces[number]
        if piece.program.instructions:
            inputs = [self._value(v) for v in piece.program.inputs]
            outputs = submit(piece.executable, inputs, self._scalars)
            self._values.update(zip(piece.program.outputs, outputs, strict=True))
        found = {n: v for n, v in self._wanted.items() if v in self._values}
        results = {n: Tensor._of(piece.program.specs[v], self._values[v]) for n, v in found.items()}
        self._wanted = {n: v for n, v in self._wanted.items() if n not in found}
        for value in (*piece.last, *found.values()):
            if value not in piece.later:
                self._values.pop(value, None)
        return results

    def _value(self, value: int) -> Shards:
        if value not in self._values:
            self._values[value] = self._compiled.input(self._inputs[value], self._leaves)
        return self._values[value]


def _result(compiled: Compiled, number: int) -> int:
    """The value of a result: the loss, or a gradient."""
    output = compiled.outputs[number]
    if output.kind == "again":
        return _result(compiled, output.item)
    if output.kind == "leaf":  # the gradient is an argument itself
        source = Source("leaf", output.item)
        return compiled.program.inputs[compiled.sources.index(source)]
    return compiled.program.outputs[output.item]


def _check_pure(compiled: Compiled) -> None:
    if compiled.states or compiled.mutated or compiled.reformed:
        does = "draws from a generator" if compiled.states else "changes a tensor in place"
        raise TraceError(
            f"a pipeline's model {does}: then each microbatch would have to wait for the one "
            "before it.\n  Fix: pass keys of dtorch.random in the batch; return what is changed."
        )


def _accumulate(sums: list[Any], found: Mapping[int, Tensor]) -> None:
    """Adds gradients to those of the microbatches before, as one program."""
    known = [n for n in found if sums[n] is not None]
    if known:
        added = _plus([sums[n] for n in known], [found[n] for n in known])
        for number, value in zip(known, added, strict=True):
            sums[number] = value
    for number, value in found.items():
        sums[number] = value if number not in known else sums[number]


@jit
def _plus(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x + y for x, y in zip(a, b, strict=True)]


@jit
def _laid_out(grads: list[Any], leaves: list[Any]) -> list[Any]:
    return list(map(in_layout_of, grads, leaves))


# -- checks ----------------------------------------------------------------------------------


def _check_functions(stages: Any, loss_fn: Any) -> None:
    if not callable(stages) and not isinstance(stages, (list, tuple)):
        raise TypeError(f"stages must be a function or several, not {stages!r}.")
    functions = () if callable(stages) else stages
    for number, stage in enumerate(functions):
        if not callable(stage):
            raise TypeError(f"stage {number} of a pipeline must be a function, not {stage!r}.")
    if not callable(stages) and not functions:
        raise ValueError("a pipeline needs at least one stage, not an empty list.")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, not {loss_fn!r}.")


def _checked_schedule(name: str) -> Schedule:
    known = {schedule.value: schedule for schedule in Schedule}
    if not isinstance(name, str) or name.lower() not in known:
        raise ValueError(f"schedule={name!r}: expected {' or '.join(map(repr, known))}.")
    return known[name.lower()]
