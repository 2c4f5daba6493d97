"""`shard_map`: a function of the user's, run on each device's shards.

Takes a function of plain torch tensors; gives one of global tensors. A call records one instruction
(`local_ops.local_call`), whose results are laid out as the caller says; their local shapes are
learned by a trial on meta tensors. The worker of each device runs the function itself, so it may
hold kernels of any kind, and meets its peers in the collectives of `axis_collectives`.

The backward is again a function of the user's: the vector-Jacobian product of the first, which
recomputes the forward on each device. A cotangent is divided over the devices that have replicas of
its result, and the gradients of an operand's replicas are to be added up. That is right whatever
collectives are inside, each of which has its transpose.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from .errors import DTorchError, PlacementError
from .jit import JitFunction
from .local_ops import LocalFunction, local_call, local_ready, numbered
from .mesh import DeviceMesh
from .placement import Partial, PartitionSpec, Placement, Placements, Replicate, complete
from .runtime.local_calls import here
from .scalars import concrete, node_of
from .spec import Spec, dtype_name
from .strictness import is_strict
from .symbolic import SymbolicTensor
from .tracer import Tracer, current
from .tree import argument_path, flatten, map_leaves, spread, unflatten
from .trials import Body, tried, whole


def shard_map(
    fn: Callable[..., Any],
    mesh: DeviceMesh,
    in_specs: Any,
    out_specs: Any,
    *,
    out_shapes: Any = None,
) -> JitFunction[..., Any]:
    """Returns a function of global tensors that runs `fn` on each device's shards.

    `fn` gets plain `torch.Tensor`s, the parts of its arguments that a device holds, and returns the
    device's parts of the results. It runs on the device's worker thread when the call's turn comes.
    It should be pure; it must not write to its arguments in place, and gets distributed tensors as
    arguments only. `axis_index`, `psum` and their relatives may be called in it.

    Before that, `fn` is run on meta tensors, once for each distinct set of local shapes, to learn
    what it returns, when a call with new shapes is traced. Plain tensors that it captures take part
    as meta tensors.

    Dims that the number of devices does not divide are split as everywhere, as `torch.chunk` would,
    so that local shapes may differ. Collectives need equal ones.

    What is returned is a jitted function: it holds its traced calls, so make it once and keep it;
    inside another jitted function it becomes one instruction. Floats are run-time values.

    Args:
        fn: The function of local tensors. It takes no keyword arguments.
        mesh: The devices that run it.
        in_specs: For each argument a `P`, or a tree of them that is a prefix of the argument; one
            for all arguments is a prefix too. Arguments in another layout are brought to it.
        out_specs: Likewise for the result. Along an axis that a spec leaves out, every device must
            return the same value, which is not checked.
        out_shapes: What `fn` returns, for one that cannot run on meta tensors: a tree of *global*
            tensors, such as ``torch.empty(8, 4, device="meta")``, or of anything with a shape and
            a dtype. The local shapes follow by `out_specs`.

    Returns:
        A function of the same positional arguments. It is differentiable: the backward recomputes
        `fn` on each device.

    Communication: what brings the arguments to their layouts, an error under `strict`. Where `fn`
    communicates, an all-reduce of one number before it, so that either all devices run it or none.

    Raises:
        TypeError: `fn` cannot be called, or a spec is no `P`.
        PlacementError: A spec names an axis that the mesh lacks. At the call: specs do not fit the
            arguments or the result, or the local results are no shards of one tensor.
        TraceError: At the call: `fn` uses a distributed tensor that is no argument, or returns
            something else than tensors. What `fn` raises on meta tensors is raised as it is.
        MutationError: At the call: `fn` writes to an argument.
        CollectiveError: At the call, or at the fetch: devices do not call the same collectives.
        DTorchError: At the fetch: a local result is not what the trial, or `out_shapes`, has said.

    Source: `jax.shard_map` with ``check_vma=False``.

    Example:
        >>> import torch, dtorch
        >>> from dtorch import P
        >>> mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        >>> total = shard_map(lambda a: dtorch.psum(a.sum(), "x"), mesh, P("x"), P())
        >>> total(torch.arange(5.0)).to_torch()
        tensor(10.)
    """
    if not callable(fn):
        raise TypeError(
            f"shard_map needs a function, not {type(fn).__name__} {fn!r}.\n"
            "  Fix: shard_map(fn, mesh, in_specs, out_specs) returns the function to call."
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"shard_map needs a mesh, not {type(mesh).__name__} {mesh!r}.\n"
            "  Fix: pass a dtorch.DeviceMesh as its second argument."
        )
    mapped = _Mapped(fn, mesh, in_specs, out_specs, out_shapes)
    return JitFunction(mapped, (), (), (), 256, compile=False, mesh=mesh)


class _Mapped:
    """What a call of a mapped function records."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: DeviceMesh,
        in_specs: Any,
        out_specs: Any,
        out_shapes: Any,
    ) -> None:
        inner = getattr(fn, "func", fn)  # of a partial function
        self.__name__ = f"shard_map({getattr(inner, '__name__', type(inner).__name__)})"
        self.__doc__ = getattr(fn, "__doc__", None)
        self._fn = fn
        self._mesh = mesh
        self._in = _Specs("in_specs", in_specs, self.__name__, mesh)
        self._out = _Specs("out_specs", out_specs, self.__name__, mesh)
        self._out_shapes = out_shapes

    def __call__(self, *args: Any) -> Any:
        """Records the call in the trace that is active on this thread."""
        tracer = current()
        assert tracer is not None
        if here() is not None:
            raise DTorchError(
                f"{self.__name__} is called in a function that shard_map runs.\n"
                "  Fix: call its function directly; it is given the local tensors already."
            )
        leaves, treespec = flatten(args)
        leaves = [torch.from_numpy(a) if isinstance(a, numpy.ndarray) else a for a in leaves]
        placements = self._in.placements(args, [_ndim(leaf) for leaf in leaves])
        body = Body(self.__name__, self._fn, treespec, leaves)
        tensors, layouts = body.tensors_of(leaves), body.tensors_of(placements)
        scalars = [leaf for leaf in leaves if node_of(leaf) is not None]
        if not tensors:  # what stands for the mesh where nothing else does
            with tracer.factories(self._mesh, None):
                tensors, layouts = [torch.zeros(())], [(Replicate(),) * self._mesh.ndim]
        tensors = [tracer.lift(t) for t in tensors]
        pairs = zip(tensors, layouts, strict=True)
        inputs = tuple(t._spec.with_layout(self._mesh, p) for t, p in pairs)
        outputs, communicates = self._learned(body, inputs, concrete(scalars))
        function = LocalFunction(self.__name__, body, self._mesh, inputs, outputs, communicates)
        return unflatten(body.result, list(_called(tracer, function, tensors, scalars)))

    def _learned(
        self, body: Body, inputs: Sequence[Spec], scalars: list[float]
    ) -> tuple[tuple[Spec, ...], bool]:
        """The specs of the results, and whether devices wait for each other."""
        if self._out_shapes is not None:
            shapes, body.result = _described(self._out_shapes)
            layouts = self._out.placements(self._out_shapes, [len(s.shape) for s in shapes])
            specs = zip(shapes, layouts, strict=True)
            outputs = tuple(Spec.of(s.shape, s.dtype, self._mesh, p) for s, p in specs)
            return outputs, len(self._mesh.devices) > 1
        trials = tried(body, self._mesh, inputs, scalars)
        first = trials[0].results
        tree = unflatten(body.result, first)
        layouts = self._out.placements(tree, [r.ndim for r in first])
        outputs = tuple(
            whole(body.name, number, [t.results[number] for t in trials], self._mesh, layout)
            for number, layout in enumerate(layouts)
        )
        return outputs, any(len(c.group) > 1 for t in trials for c in t.place.called)


def _ndim(leaf: Any) -> int:
    return leaf.ndim if isinstance(leaf, torch.Tensor) else 0


def _described(out_shapes: Any) -> tuple[list[Any], Any]:
    """The leaves of `out_shapes`, and its structure."""
    shapes, treespec = flatten(out_shapes)
    for shape in shapes:
        if not (hasattr(shape, "shape") and isinstance(getattr(shape, "dtype", None), torch.dtype)):
            raise TypeError(
                f"out_shapes has {type(shape).__name__} {shape!r}, which has no shape and dtype.\n"
                '  Fix: torch.empty(..., dtype=..., device="meta") of the global shape.'
            )
    return shapes, treespec


class _Specs:
    """The `in_specs` or `out_specs` of a mapped function.

    Args:
        argument: Which of them.
        tree: A tree of `P`.
        name: The function.
        mesh: Its mesh.
    """

    def __init__(self, argument: str, tree: Any, name: str, mesh: DeviceMesh) -> None:
        self._argument = argument
        self._tree = tree
        self._name = name
        self._mesh = mesh
        names = mesh.mesh_dim_names or ()
        for spec in flatten(tree)[0]:
            if not isinstance(spec, PartitionSpec):
                raise TypeError(
                    f"{name}: {argument} has {type(spec).__name__} {spec!r} where a P stands.\n"
                    '  Fix: P("axis", None), an axis name or None for each dim; P() for whole.'
                )
            unknown = [n for n in spec.axes() if n not in names]
            if unknown:
                raise PlacementError(
                    f"{name}: {argument} has {spec!r}, whose axis {unknown[0]!r} {mesh!r} lacks.\n"
                    f"  Fix: name its axes {names}, or give the mesh mesh_dim_names."
                )
            try:
                spec.to_placements(mesh)
            except PlacementError as error:
                raise PlacementError(
                    f"{name}: {argument}: {error}\n"
                    f"  Fix: name each axis once, those of one dim in the order of {names}."
                ) from error

    def placements(self, tree: Any, ndims: Sequence[int]) -> list[Placements]:
        """Returns the placements of each leaf of a tree.

        Args:
            tree: The arguments, or the result.
            ndims: The number of dims of each leaf.
        """
        try:
            specs = spread(self._tree, tree)
        except ValueError as error:
            what = "arguments" if self._argument == "in_specs" else "result"
            raise PlacementError(
                f"{self._name}: {self._argument} is no prefix of the {what}: {error}\n"
                f"  {self._argument}  {self._tree!r}\n"
                f"  {what}  {map_leaves(_brief, tree)!r}\n"
                f"  Fix: give {self._argument} the structure of the {what}, or one P for all."
            ) from error
        for number, (spec, ndim) in enumerate(zip(specs, ndims, strict=True)):
            if len(spec) > ndim:
                path = self._path(tree, number)
                raise PlacementError(
                    f"{self._name}: {self._argument} has {spec!r} for {path}, which has "
                    f"{ndim} dim{'s' * (ndim != 1)}.\n"
                    f"  Fix: a P of at most {ndim} entr{'ies' if ndim != 1 else 'y'}."
                )
        return [spec.to_placements(self._mesh) for spec in specs]

    def _path(self, tree: Any, number: int) -> str:
        if self._argument == "in_specs":
            return argument_path([f"args[{i}]" for i in range(len(tree))], tree, number)
        return argument_path(["result"], (tree,), number)


def _brief(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return _Text(f"{dtype_name(leaf.dtype)}{list(leaf.shape)}")


class _Text(str):
    def __repr__(self) -> str:
        return str(self)


# -- recording ---------------------------------------------------------------------------------


def _called(
    tracer: Tracer, function: LocalFunction, tensors: Sequence[Any], scalars: Sequence[Any]
) -> Sequence[SymbolicTensor]:
    """Records a call of a local function, above autograd if it is on."""
    tensors = [_brought(tracer.lift(t), function) for t in tensors]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _Node.apply(tracer, function, scalars, *tensors)
    return _recorded(tracer, function, tensors, scalars)


def _brought(tensor: SymbolicTensor, function: LocalFunction) -> Any:
    """A tensor on the function's mesh."""
    mesh = tensor.device_mesh
    if mesh == function.mesh:
        return tensor
    if is_strict():
        raise PlacementError(
            f"strict: {function.name} would move an argument of shape {list(tensor.shape)} from "
            f"{mesh!r} to {function.mesh!r}.\n"
            "  Fix: redistribute(device_mesh=...) it before the call."
        )
    alike = mesh.shape == function.mesh.shape
    whole = [Replicate()] * function.mesh.ndim
    return tensor.redistribute(function.mesh, complete(tensor.placements) if alike else whole)


def _recorded(
    tracer: Tracer, function: LocalFunction, tensors: Sequence[Any], scalars: Sequence[Any]
) -> list[SymbolicTensor]:
    number, operands = numbered(function), list(tensors)
    if function.communicates:
        ready = tracer.record(local_ready, (operands, number), {})
        operands.append(ready.redistribute(placements=[Replicate()] * function.mesh.ndim))
    more = (list(scalars),) if scalars else ()
    return tracer.record(local_call, (operands, number, *more), {})


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tracer: Tracer, function: LocalFunction, scalars: Any, *tensors: Any
    ) -> Any:
        ctx.tracer, ctx.function, ctx.scalars = tracer, function, scalars
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        results = _recorded(tracer, function, tensors, scalars)
        ctx.mark_non_differentiable(*(r for r in results if not _is_differentiable(r.dtype)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given = tuple(i for i, grad in enumerate(grads) if grad is not None)
        wanted = tuple(i for i, wants in enumerate(ctx.needs_input_grad[3:]) if wants)
        operands = [*ctx.saved_tensors, *(grads[i] for i in given)]
        product = _transposed(ctx.function, given, wanted)
        found = dict(zip(wanted, _called(ctx.tracer, product, operands, ctx.scalars), strict=True))
        return None, None, None, *(found.get(i) for i in range(len(ctx.saved_tensors)))


def _is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _transposed(
    function: LocalFunction, given: tuple[int, ...], wanted: tuple[int, ...]
) -> LocalFunction:
    """The vector-Jacobian product of a local function, as a local function.

    Args:
        function: The function.
        given: The results of which there are cotangents, operands after the function's own.
        wanted: The operands whose gradients it returns.
    """
    outputs = [function.outputs[i] for i in given]
    cotangents = [s.with_placements(complete(s.placements)) for s in outputs]
    shares = [_num_replicas(s) for s in outputs]
    inputs = [function.inputs[i] for i in wanted]
    return LocalFunction(
        f"gradient of {function.name}",
        _Product(function, given, wanted, tuple(shares)),
        function.mesh,
        (*function.inputs, *cotangents),
        tuple(Spec.of(s.shape, s.dtype, s.mesh, _summed(s)) for s in inputs),
        function.communicates,
    )


def _num_replicas(spec: Spec) -> int:
    axes = zip(spec.mesh.shape, spec.placements, strict=True)
    return math.prod(count for count, placement in axes if placement.is_replicate())


def _summed(spec: Spec) -> Placements:
    """The placements of a gradient, of which each replica gives an addend."""

    def summed(count: int, placement: Placement) -> Placement:
        return Partial("sum") if count > 1 and not placement.is_shard() else placement

    return tuple(map(summed, spec.mesh.shape, complete(spec.placements)))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Product:
    """The vector-Jacobian product of a function of one device's tensors.

    Attributes:
        function: The function.
        given: The results of which there are cotangents.
        wanted: The operands whose gradients are returned.
        shares: For each cotangent, how many replicas of the result there are.
    """

    function: LocalFunction
    given: tuple[int, ...]
    wanted: tuple[int, ...]
    shares: tuple[int, ...]

    def __call__(
        self, operands: Sequence[torch.Tensor], scalars: list[float]
    ) -> list[torch.Tensor]:
        """Returns the gradients, given the function's operands and then the cotangents."""
        count = len(self.function.inputs)
        again = torch.is_grad_enabled()  # this is itself differentiated
        with torch.enable_grad():
            inputs = [t.view_as(t) if again else t.detach() for t in operands[:count]]
            sources = [inputs[i] for i in self.wanted]
            for source in sources:
                if not source.requires_grad:
                    source.requires_grad_()
            results = self.function.function(inputs, scalars)
            outs = [results[i] for i in self.given]
            shares = [g / n for g, n in zip(operands[count:], self.shares, strict=True)]
            live = [i for i, out in enumerate(outs) if out.requires_grad]
            found: Sequence[torch.Tensor | None] = [None] * len(sources)
            if live:
                found = torch.autograd.grad(
                    [outs[i] for i in live],
                    sources,
                    [shares[i] for i in live],
                    create_graph=again,
                    allow_unused=True,
                )
        pairs = zip(sources, found, strict=True)
        return [torch.zeros_like(s) if g is None else g for s, g in pairs]
