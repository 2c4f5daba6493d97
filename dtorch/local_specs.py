"""What every device holds in every slot of a local program, by inference.

Takes a `LocalProgram` and the specs of the global one. A local layout is a `Spec` on a mesh of one
device. Strides are what is likely: kernels may give, and callers may pass, other ones.
"""

from __future__ import annotations

from typing import Any

from .accelerator_results import opaque_values
from .expert_ops import is_ragged, ragged_values
from .infer import answer, question
from .lowering import LocalCall, LocalProgram, LocalStep, PerDevice
from .mesh import DeviceMesh
from .program import Program, refs
from .rules import Meta
from .spec import Spec, contiguous_stride

_HERE = DeviceMesh("cpu", 0)


class LocalSpecs(dict[int, tuple[Spec, ...]]):
    """For each slot, what each device of its mesh holds; nothing where that is not known."""

    def __init__(self, local: LocalProgram, program: Program) -> None:
        unknown = ragged_values(program) | opaque_values(program)
        super().__init__(
            (slot, _shards(program.specs[slot])) for slot, _ in local.inputs if slot not in unknown
        )
        for instruction in local.instructions:
            if isinstance(instruction, LocalStep):
                if instruction.output not in unknown:
                    self[instruction.output] = _shards(instruction.step.target)
            elif isinstance(instruction, LocalCall):
                self._add(instruction, program)
        for slot in unknown:
            self.pop(slot, None)

    def _add(self, call: LocalCall, program: Program) -> None:
        slots = [(i, slot) for i, slot in enumerate(call.outputs) if slot is not None]
        try:
            if is_ragged(program.instructions[call.origin]):
                raise LookupError
            self._check_devices(call)
            results = [self._results(call, i) for i in range(len(call.mesh.devices))]
        except Exception:  # of a kernel, which raises it when it runs, or a value is not known
            known = [slot for _, slot in slots if slot < len(program.specs)]
            self.update((slot, _shards(program.specs[slot])) for slot in known)
        else:
            self.update((slot, tuple(_local(r[i]) for r in results)) for i, slot in slots)

    def _check_devices(self, call: LocalCall) -> None:
        """What only some of the devices run is left unknown: the tables are of all of them."""
        count = len(call.mesh.devices)
        if any(len(self[r.id]) != count for r in refs((call.args, call.kwargs))):
            raise LookupError

    def _results(self, call: LocalCall, index: int) -> list[Meta]:
        args, kwargs = for_device(call.args, index), dict(for_device(call.kwargs, index))
        specs: Any = {r.id: self[r.id][index] for r in refs((args, list(kwargs.values())))}
        result = answer(question(call.op, args, kwargs, specs, _ANY_SCALAR))
        return [result] if isinstance(result, Meta) else list(result)


class _AnyScalar(list[float]):
    def __getitem__(self, number: Any) -> Any:
        return 1.0


_ANY_SCALAR = _AnyScalar()  # no shape and no dtype depends on the value of a run-time scalar


def for_device(value: Any, index: int) -> Any:
    """Returns arguments with every `PerDevice` table replaced by one device's entry."""
    if type(value) is PerDevice:
        return value[index]
    if type(value) in (tuple, list):
        return type(value)(for_device(v, index) for v in value)
    return value


def _local(meta: Meta) -> Spec:
    return Spec.of(meta.shape, meta.dtype, _HERE, (), meta.stride, meta.conj, meta.neg)


def _shards(spec: Spec) -> tuple[Spec, ...]:
    """Dense shards, with their dims in the order of the whole tensor's in memory."""
    made = []
    order = sorted(range(spec.ndim), key=lambda d: -spec.stride[d])
    for shape in spec.local_shapes:
        dense = contiguous_stride([shape[d] for d in order])
        stride = tuple(dense[order.index(d)] for d in range(spec.ndim))
        made.append(_local(Meta(shape, spec.dtype, stride, spec.conj, spec.neg)))
    return tuple(made)
