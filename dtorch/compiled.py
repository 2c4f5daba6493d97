"""`Compiled`: a traced call, ready to run on new arguments.

Holds the program and how its inputs are found and its outputs are used: as results, as the new
values of what was changed in place, as the next state of a generator. What would have to change a
tensor that cannot be reached raises here, before anything is submitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from . import aliases, generator
from .accelerator_results import opaque_values
from .aliases import AliasGroup, Path
from .arguments import Arguments
from .errors import DTorchError, MutationError
from .expert_ops import ragged_values
from .local_ops import local_call, local_ready
from .parts import place_parts
from .placement import Replicate, complete
from .program import Apply, Program, refs
from .runtime import Executable, Failure, Shards, submit
from .scalars import Expression, evaluate
from .spec import Spec
from .tensor import EntryPoints, Tensor, place
from .tracer import Source


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """How one leaf of a result is made.

    Attributes:
        kind: ``"value"`` (a program output), ``"alias"`` (the same, aliasing a leaf or a captured
            tensor), ``"sibling"`` (aliasing an earlier result), ``"part"`` (a view, the first of
            several results in one storage), ``"leaf"`` (an argument itself), ``"again"`` (an
            earlier result itself), ``"scalar"`` (an expression), or ``"constant"``.
        item: The program output's index, the leaf's or the result's number, the expression, or
            the object.
        leaf: For ``"alias"`` and ``"sibling"``, the leaf, captured tensor or result whose storage
            it shares, and its path in that storage.
    """

    kind: str
    item: Any
    leaf: tuple[int | Tensor, Path] | None = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Compiled:
    """A traced call: its program and what to pass in and out.

    Attributes:
        program: The global program.
        executable: Its local form.
        sources: Where each program input comes from.
        expressions: The run-time scalars, over the leaves.
        outputs: How each leaf of the result is made.
        treespec: The structure of the result.
        mutated: Program outputs that replace the value of a leaf or a captured tensor.
        reformed: Program outputs that a leaf becomes, whose shape differs: with the path if the
            leaf is now a view of what it was, or None.
        reduced: Program outputs that are a partial leaf, reduced.
        states: Program outputs that are the next state of a generator.
        wholes: The leaves and captured tensors that must not be views: an element is read by its
            place in the storage, of which a program sees no more than the view.
        extra: Program outputs beyond those, which the caller of `run` asked for.
        untried: Not empty until the first run, where a kernel may refuse a dtype.
    """

    program: Program
    executable: Executable
    sources: tuple[Source, ...]
    expressions: tuple[Expression, ...]
    outputs: tuple[Output, ...]
    treespec: Any
    mutated: tuple[tuple[int, Source], ...]
    reformed: tuple[tuple[int, int, Path | None], ...]
    reduced: tuple[tuple[int, int], ...]
    states: tuple[tuple[int, torch.Generator | None], ...]
    wholes: tuple[Source, ...] = ()
    extra: tuple[int, ...] = ()
    constants: dict[int, Shards] = dataclasses.field(default_factory=dict)
    untried: set[bool] = dataclasses.field(default_factory=set)

    def run(
        self, arguments: Arguments, check_aliases: bool, below_autograd: bool = False
    ) -> list[Any]:
        """Submits the program and returns the result's leaves, and after them the extra ones."""
        shared = self._shared(arguments.leaves)
        if not shared:
            return self._run(arguments, check_aliases, below_autograd)
        with aliases.held(shared):
            _read_again(arguments)
            return self._run(arguments, check_aliases, below_autograd)

    def _shared(self, leaves: list[Any]) -> list[Tensor]:
        """The tensors that are written to, or that a result shares its storage with."""
        owners = [source.item for _, source in self.mutated if source.kind != "leaf"]
        owners += [leaves[source.item] for _, source in self.mutated if source.kind == "leaf"]
        owners += [leaves[leaf] for _, leaf, _ in self.reformed]
        owners += [leaves[leaf] for _, leaf in self.reduced]
        for output in self.outputs:
            if output.kind == "alias":
                assert output.leaf is not None
                owner = output.leaf[0]
                owners.append(owner if isinstance(owner, Tensor) else leaves[owner])
        return [owner for owner in owners if isinstance(owner, Tensor)]

    def _run(self, arguments: Arguments, check_aliases: bool, below_autograd: bool) -> list[Any]:
        leaves, read = arguments.leaves, arguments.values
        for source in self.wholes:
            _check_whole(leaves[source.item] if source.kind == "leaf" else source.item)
        if self.mutated:
            self._check_mutation(leaves, check_aliases)
        if not self.states:
            values = self._submit(read, {})
        else:
            with generator.lock:
                states = self._states()
                values = self._submit(read, states)
                for output, owner in self.states:
                    generator.advance(owner, values[output])
        if self.untried:
            _raise_if_refused(values)
            unknown = ragged_values(self.program) | opaque_values(self.program)
            for number, tensor in zip(self.program.outputs, values, strict=True):
                if number not in unknown:
                    _check_as_inferred(tensor)
            self.untried.clear()
        for output, leaf in self.reduced:
            leaves[leaf]._reduced = values[output]
        for output, source in self.mutated:  # after it: a target may be among the reduced
            target = leaves[source.item] if source.kind == "leaf" else source.item
            if not isinstance(target, Tensor):
                _write(target, values[output])
                continue
            changed = _rebind(target, values[output])
            # Below autograd, PyTorch has counted the change itself, if it counts it at all.
            if not below_autograd:
                _count(changed)
        for output, leaf, path in self.reformed:
            _reform(leaves[leaf], values[output], path)
        results: list[Any] = []
        for output in self.outputs:
            results.append(self._result(output, leaves, values, results))
        return [*results, *(values[i] for i in self.extra)]

    def _states(self) -> dict[torch.Generator | None, Tensor]:
        found = {}
        for source, value in zip(self.sources, self.program.inputs, strict=True):
            if source.kind == "generator":
                mesh = self.program.specs[value].mesh
                found[source.item] = generator.state_of(source.item, mesh)
        return found

    def input(self, number: int, leaves: list[Any]) -> Shards:
        """Returns the shards of a program input that is no generator's state.

        Args:
            number: Which of the program's inputs.
            leaves: The leaves of the call.
        """
        return self._shards(number, self.sources[number], leaves, {})

    def _submit(
        self, leaves: list[Any], states: dict[torch.Generator | None, Tensor]
    ) -> list[Tensor]:
        inputs = [self._shards(i, s, leaves, states) for i, s in enumerate(self.sources)]
        scalars = [evaluate(e, leaves) for e in self.expressions]
        return submit_program(self.program, self.executable, inputs, scalars)

    def _shards(
        self,
        number: int,
        source: Source,
        leaves: list[Any],
        states: dict[torch.Generator | None, Tensor],
    ) -> Shards:
        if source.kind == "generator":
            return states[source.item]._shards
        if source.kind == "capture":
            return source.item._shards
        spec = self.program.specs[self.program.inputs[number]]
        if source.kind == "constant":
            return self._constant(number, source, spec)
        leaf = leaves[source.item]
        if isinstance(leaf, Tensor):
            return leaf._shards
        return place_parts(leaf.detach().resolve_conj().resolve_neg(), spec, copy=True)

    def _constant(self, number: int, source: Source, spec: Spec) -> Shards:
        if source.version is None:  # of inference mode: whether it has changed is not known
            return place_parts(source.item, spec, copy=True)
        if source.item._version != source.version:
            raise MutationError(
                f"a torch tensor of shape {list(source.item.shape)} that a jitted function "
                "captured was written to after it was handed over.\n  Fix: pass it as an argument."
            )
        if number not in self.constants:
            self.constants[number] = place_parts(source.item, spec, copy=False)
        return self.constants[number]

    def _result(
        self, output: Output, leaves: list[Any], values: list[Tensor], before: list[Any]
    ) -> Any:
        if output.kind == "value":
            return values[output.item]
        if output.kind == "leaf":
            return leaves[output.item]
        if output.kind == "scalar":
            return evaluate(output.item, leaves)
        if output.kind == "alias":
            assert output.leaf is not None
            owner, path = output.leaf
            base = owner if isinstance(owner, Tensor) else leaves[owner]
            return link(base, values[output.item], path)
        if output.kind == "sibling":
            assert output.leaf is not None
            first, path = output.leaf
            group = before[first]._aliases
            if group is None or group.whole is not None:
                return link(before[first], values[output.item], path)
            group.add(values[output.item], path)
            return values[output.item]
        if output.kind == "again":
            return before[output.item]
        if output.kind == "part":
            AliasGroup(None).add(values[output.item], ())
            return values[output.item]
        return output.item

    def _check_mutation(self, leaves: list[Any], check_aliases: bool) -> None:
        for _, source in self.mutated:
            target = leaves[source.item] if source.kind == "leaf" else source.item
            if isinstance(target, Tensor) or source.kind != "leaf" or check_aliases:
                _check_writable(target)
            if isinstance(target, Tensor) and (check_aliases or len(self.mutated) > 1):
                captured = [s.item for s in self.sources if s.kind == "capture" and s != source]
                own = source.item if source.kind == "leaf" else -1
                others = [leaf for i, leaf in enumerate(leaves) if i != own]
                _check_unaliased(target, [*others, *captured])


def _read_again(arguments: Arguments) -> None:
    """Replaces the reduced values of partial tensors that were written to since they were read."""
    for number, (leaf, value) in enumerate(zip(arguments.leaves, arguments.values, strict=True)):
        if value is not leaf and isinstance(leaf, Tensor) and leaf._reduced is not value:
            with torch.no_grad():
                now = leaf.redistribute(value._spec.mesh, value._spec.placements)
            arguments.values[number] = now


def submit_program(
    program: Program,
    executable: Executable,
    inputs: Sequence[Shards],
    scalars: Sequence[Any],
) -> list[Tensor]:
    """Queues a program on its devices and returns its outputs, which are not yet computed."""
    specs = [program.specs[v] for v in program.outputs]
    outputs = submit(executable, inputs, scalars)
    return [Tensor._of(s, o) for s, o in zip(specs, outputs, strict=True)]


def may_be_refused(program: Program) -> bool:
    """Whether an operation takes other dtypes than float32 or float64, or is for integers."""
    for instruction in program.instructions:
        if isinstance(instruction, Apply) and instruction.op not in _TAKE_ALL:
            operands = [r.id for r in refs((instruction.args, instruction.kwargs))]
            dtypes = {program.specs[v].dtype for v in operands or instruction.results()}
            settings = (*instruction.args, *dict(instruction.kwargs).values())
            dtypes.update(a for a in settings if isinstance(a, torch.dtype))
            common = len(dtypes) < 2 and dtypes <= {torch.float32, torch.float64}
            if not common or any(w in instruction.op.name() for w in _FOR_INTEGERS):
                return True
    return False


_TAKE_ALL = (torch.ops.aten.clone.default, local_call, local_ready)
_FOR_INTEGERS = ("bitwise", "shift", "__and__", "__or__", "__xor__", "gcd", "lcm")


def _raise_if_refused(values: Sequence[Tensor]) -> None:
    """Waits for the first run of a program and raises if a kernel lacks a dtype.

    Meta kernels let some dtypes pass that the real ones refuse; that is known at the first run,
    and then it is an error of the call. Other failures stay where they are until a fetch.
    """
    for tensor in values:
        everywhere = range(len(tensor._shards))
        tensor._shards.wait(everywhere)
        for index in everywhere:
            value = tensor._shards.get(index)
            if isinstance(value, Failure) and _is_about_dtypes(value.cause):
                raise type(value.cause)(value.message) from value.cause


def _check_as_inferred(tensor: Tensor) -> None:
    """Raises if what a kernel computed is not what its meta kernel had said."""
    spec = tensor._spec
    for index, shape in enumerate(spec.local_shapes):
        part = tensor._shards.get(index)
        if isinstance(part, torch.Tensor) and (part.dtype, tuple(part.shape)) != (
            spec.dtype,
            shape,
        ):
            raise DTorchError(
                f"a kernel gave {part.dtype} {list(part.shape)} where PyTorch's shape inference "
                f"says {spec.dtype} {list(shape)}.\n  Fix: cast the operands explicitly first."
            )


def _is_about_dtypes(error: BaseException) -> bool:
    words = ("not implemented for", "does not support", "dtype", "data type", "scalar type")
    words += ("output type", "boolean", "bool tensor")
    named = any(word in str(error).lower() for word in words)
    return isinstance(error, (NotImplementedError, TypeError)) or named


def _check_writable(target: torch.Tensor) -> None:
    if not isinstance(target, Tensor):
        raise MutationError(
            f"a jitted function would change a torch tensor of shape {list(target.shape)}, which "
            "dtorch has only a copy of.\n  Fix: use the functional form, or make it a "
            "dtorch.Tensor first."
        )
    group = target._aliases
    if group is not None and group.whole is None and group.others(target):
        raise MutationError(
            f"an in-place call on a view (shape {list(target.shape)}) may have to change another "
            "view of the same tensor, which a jitted function has not returned.\n"
            "  Fix: return that tensor too, or clone() the view."
        )


def _check_whole(tensor: torch.Tensor) -> None:
    if isinstance(tensor, Tensor):
        group = tensor._aliases
        if group is None or not (group.whole is None or group.is_part or group.path_of(tensor)):
            return
    elif tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return
    raise MutationError(
        "a jitted function calls as_strided, with an offset in the storage, on a tensor from "
        f"outside (shape {list(tensor.shape)}) that is only a view of its storage.\n"
        "  Fix: pass what it is a view of, or a clone()."
    )


def _check_unaliased(target: Tensor, others: Sequence[Any]) -> None:
    for other in others:
        if not isinstance(other, Tensor):
            continue
        related = target._aliases is not None and other._aliases is target._aliases
        if other is target or related or other._shards is target._shards:
            raise MutationError(
                "a call changes an argument in place that it is also given under another name "
                f"(shape {list(target.shape)}).\n  Fix: pass it once, or a clone()."
            )


def _write(target: torch.Tensor, value: Tensor) -> None:
    """Writes a value to a torch tensor of the caller's: an eager call waits for it."""
    with torch.no_grad():
        target.copy_(value.to_torch())


def _rebind(target: Tensor, value: Tensor) -> list[Tensor]:
    """Gives a tensor, and every other that shares its storage, a new value; returns them."""
    group = target._aliases
    others = [] if group is None else group.others(target)
    if group is None or not others:
        _give(target, value)
        if group is not None:
            _be_alone(target, group)
        return [target]
    assert group.whole is not None
    path = group.path_of(target)
    storage = Tensor._of(*group.whole)
    storage = EntryPoints.put_back(storage, path, value) if path else _in_layout(value, storage)
    changed = [(t, EntryPoints.follow(storage, p) if p else storage) for t, p in others]
    _give(target, value)
    group.whole = storage._spec, storage._shards
    for tensor, now in changed:
        _give(tensor, now)
    return [target, *(t for t, _ in others)]


def _be_alone(tensor: Tensor, group: AliasGroup) -> None:
    """Makes a tensor, the last of its group, a storage of its own: nobody sees the rest of it."""
    if group.is_part or group.whole is None or group.path_of(tensor):
        AliasGroup((tensor._spec, tensor._shards), is_part=True).add(tensor, ())
    else:
        group.whole = tensor._spec, tensor._shards


def overwrite(tensor: Tensor, value: torch.Tensor) -> None:
    """Gives a tensor the value, and if it differs the shape, of a torch tensor."""
    with aliases.held([tensor]):
        _overwrite(tensor, value)


def _overwrite(tensor: Tensor, value: torch.Tensor) -> None:
    _check_writable(tensor)
    spec = tensor._spec
    if tensor.shape == value.shape:
        changed = _rebind(tensor, place(value, spec.mesh, complete(spec.placements)))
    else:
        _reform(tensor, place(value, spec.mesh, (Replicate(),) * spec.mesh.ndim), None)
        changed = [tensor]
    _count(changed)


def _count(changed: list[Tensor]) -> None:
    """Counts a change, once where tensors share a counter, as views that autograd knows do."""
    counted = [(t, t._version) for t in changed if not t.is_inference()]
    for tensor, version in counted:
        if tensor._version == version:
            torch.autograd.graph.increment_version(tensor)


def _reform(tensor: Tensor, value: Tensor, path: Path | None) -> None:
    """Gives a tensor another shape: that of a view of what it was, or of a new value."""
    group = tensor._aliases
    if group is not None and path is None:
        group.remove(tensor)
    elif group is not None:
        assert path is not None
        group.add(tensor, (*group.path_of(tensor), *path))
    with torch._C.DisableTorchFunction():
        tensor.data = value
    tensor._spec, tensor._shards, tensor._reduced = value._spec, value._shards, None


def _give(tensor: Tensor, value: Tensor) -> None:
    moved = _in_layout(value, tensor)
    tensor._reduced = None  # of the old shards: first, for who reads it meanwhile
    tensor._shards = moved._shards
    if moved is not value:
        tensor._reduced = value


def _in_layout(value: Tensor, other: Tensor) -> Tensor:
    """A value in the layout of another, which may differ where one was made of a reduced one."""
    spec = other._spec
    if value._spec.mesh == spec.mesh and value._spec.placements == spec.placements:
        return value
    with torch.no_grad():
        return EntryPoints.redistribute(value, spec.mesh, spec.placements)


def link(base: Tensor, view: Tensor, path: Path) -> Tensor:
    """Remembers that a tensor shares the storage of another, and how it is a view of it."""
    with aliases.lock:
        group = aliases.grouped(base)
        if group.whole is None and not group.others(base):
            _be_alone(base, group)
            group = aliases.grouped(base)
        group.add(view, (*group.path_of(base), *path))
    return view


def refresh(view: Tensor) -> None:
    """Reads a view again, whose base was written to before the two were linked."""
    with aliases.lock:
        group = view._aliases
        if group is not None and group.whole is not None:
            _give(view, EntryPoints.follow(Tensor._of(*group.whole), group.path_of(view)))
