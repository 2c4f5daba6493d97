"""The pass that compiles a local program: each stretch between communications becomes one call.

Takes a `LocalProgram` and gives one that computes the same with fewer instructions. A stretch is a
run of operations on one mesh that Inductor can take; it becomes a `LocalCall` of `run_compiled`, or
of `run_callable` on accelerators, which finds a device's code by its number. Equal stretches
(repeated layers, devices with equal shapes) are compiled once, on accelerators once for each of
them. What cannot be compiled stays as it was.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import numpy
import torch

from . import inductor
from .accelerator_results import ON_ACCELERATORS
from .custom_ops import fold_mm
from .expert_ops import ragged_values
from .inductor import Operation, Stretch
from .local_specs import LocalSpecs, for_device
from .lowering import (
    LocalCall,
    LocalInstruction,
    LocalProgram,
    LocalShow,
    LocalStep,
    PerDevice,
    slots_read,
    slots_written,
    with_instructions,
)
from .program import Program, Ref, ScalarRef
from .runtime import streams
from .runtime.stretches import Layout, add_callable, add_compiled, run_callable, run_compiled
from .spec import contiguous_stride

LONGEST = 1024
"""Operations that are compiled as one; a longer stretch is cut, where it repeats itself if so."""
PIECE = 512
"""Operations between such cuts, at least, if they are not the only repetition."""
_NUM_MODELS = max(8, os.cpu_count() or 1)  # of devices that run the same code at the same time


def compile_stretches(local: LocalProgram, program: Program) -> LocalProgram:
    """Returns a local program with its stretches compiled.

    Args:
        local: The program.
        program: The global one that it comes from. One that exchanges or splits experts stays as
            it is.

    Blocking: while the compiler works, unless it has seen the stretches before.
    """
    if ragged_values(program):  # compiled with gradients, one of them has crashed
        return local
    specs = LocalSpecs(local, program)
    items = list(_grouped(local, specs))
    kept = _last_uses(local, items)
    threads = max(1, torch.get_num_threads() // max(1, len(local.devices)))
    parts = {i: _Part(g, specs, kept, i, threads) for i, g in enumerate(items) if len(g) > 1}
    numbers = _numbered(parts.values())
    made: list[LocalInstruction] = []
    texts, sources = list(local.texts), list(local.sources)
    for i, group in enumerate(items):
        codes = [numbers[s.key] for s in parts[i].stretches] if i in parts else [None]
        if None in codes:
            made += group
            continue
        made.append(parts[i].call(codes, len(texts)))
        texts.append(_text(parts[i].calls, local.texts))
        sources.append(local.sources[parts[i].calls[0].origin])
    return with_instructions(local, made, texts, sources)


def _text(calls: Sequence[LocalCall], texts: Sequence[str]) -> str:
    found = list(dict.fromkeys(texts[c.origin] for c in calls))
    if len(found) > 8:
        found[4:-3] = [f"... {len(found) - 7} more ..."]
    return "\n    ".join(["one of these, which are compiled as one:", *found])


# -- which operations ------------------------------------------------------------------------

_UNFIT = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
_aten = torch.ops.aten
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default  # it has no dropout
_WITH_SCALARS = {_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor}


def _fits(instruction: LocalInstruction, specs: LocalSpecs) -> TypeGuard[LocalCall]:
    """Whether Inductor can take an instruction."""
    if not isinstance(instruction, LocalCall) or instruction.draws is not None:
        return False
    op, touched = instruction.op, (*slots_read(instruction), *slots_written(instruction))
    return (
        (op.namespace == "aten" or op is fold_mm)
        and not op._schema.is_mutable
        and op not in ON_ACCELERATORS  # whose meta kernels Inductor would ask
        and (_UNFIT.isdisjoint(op.tags) or op is _ATTENTION)
        and all(slot in specs and _is_plain(specs[slot]) for slot in touched)
        and all(len(specs[slot]) == len(instruction.mesh.devices) for slot in touched)
        and not _reads_indices(instruction, specs)
        and not _is_power_of_bools(instruction, specs)
        and not _may_divide_by_zero(instruction, specs)
        and (not _scalars(instruction) or _takes_scalar(instruction, specs))
    )


def _is_plain(shards: Sequence[Any]) -> bool:
    return not any(s.dtype.is_complex or s.conj or s.neg for s in shards)


def _reads_indices(call: LocalCall, specs: LocalSpecs) -> bool:
    """Whether integers may say where to read or write.

    The code that checks them throws, which ends the process if several threads run it; that of an
    accelerator stops the accelerator, and so does PyTorch's kernel, which can be named for it.
    """
    operands = slots_read(call)
    if len(operands) < 2 or torch.Tag.pointwise in call.op.tags:
        return False
    dtypes = [s.dtype for slot in operands for s in specs[slot]]
    return any(not d.is_floating_point and d != torch.bool for d in dtypes)


def _is_power_of_bools(call: LocalCall, specs: LocalSpecs) -> bool:
    """Whether Inductor would compute floats where the kernel computes integers."""
    dtypes = {s.dtype for slot in slots_read(call) for s in specs[slot]}
    return call.op.overloadpacket is _aten.pow and torch.bool in dtypes


_DIVISIONS = {
    _aten.div.Tensor_mode,
    _aten.div.Scalar_mode,
    _aten.fmod.Tensor,
    _aten.fmod.Scalar,
    _aten.remainder.Tensor,
    _aten.remainder.Scalar,
    _aten.remainder.Scalar_Tensor,
}


def _may_divide_by_zero(call: LocalCall, specs: LocalSpecs) -> bool:
    """Whether it divides by integers that may be zero, which would end the process.

    Not all of Inductor's code, and none of torch 2.11's, looks first. On an accelerator nobody
    looks, and the results of PyTorch's kernels and of others differ.
    """
    if call.op not in _DIVISIONS or (type(call.args[1]) is int and call.args[1] != 0):
        return False
    dtypes = [s.dtype for slot in slots_read(call) for s in specs[slot]]
    return not any(d.is_floating_point for d in dtypes)


def _takes_scalar(call: LocalCall, specs: LocalSpecs) -> bool:
    """Whether a tensor of float64 without dims in the place of a float gives the same."""
    first = call.args[0]
    return (
        call.op in _WITH_SCALARS
        and type(first) is Ref
        and len(_scalars(call)) == (type(call.args[1]) is ScalarRef)
        and all(s.ndim > 0 and s.dtype.is_floating_point for s in specs[first.id])
    )


def _scalars(call: LocalCall) -> list[int]:
    found: list[int] = []

    def collect(value: Any) -> None:
        if type(value) is ScalarRef:
            found.append(value.number)
        elif type(value) in (tuple, list, PerDevice):
            for item in value:
                collect(item)

    collect((call.args, call.kwargs))
    return found


def _is_view(call: LocalCall) -> bool:
    return all(r.alias_info is not None for r in call.op._schema.returns)


# -- stretches -------------------------------------------------------------------------------


def _grouped(local: LocalProgram, specs: LocalSpecs) -> Iterator[Sequence[LocalInstruction]]:
    """Yields the instructions, those that are to be one together."""
    pending: list[LocalCall] = []
    written: set[int] = set()
    for instruction in local.instructions:
        if isinstance(instruction, LocalShow):
            continue  # they are placed anew
        if _fits(instruction, specs):
            if pending and instruction.mesh != pending[0].mesh:
                yield from _pieces(pending, specs)
                pending, written = [], set()
            pending.append(instruction)
            written.update(slots_written(instruction))
            continue
        if not _may_go_ahead(instruction, written):
            yield from _pieces(pending, specs)
            pending, written = [], set()
        yield [instruction]
    yield from _pieces(pending, specs)


def _may_go_ahead(instruction: LocalInstruction, written: set[int]) -> bool:
    """Whether a step without communication need not end the stretch that it stands in."""
    if not isinstance(instruction, LocalStep) or not instruction.step.kind.is_local:
        return False
    return instruction.input not in written


def _pieces(calls: list[LocalCall], specs: LocalSpecs) -> Iterator[Sequence[LocalInstruction]]:
    """Yields a stretch, or its pieces if it is long, or its calls if there is nothing to gain."""
    if sum(not _is_view(c) for c in calls) < 2:
        yield from ([c] for c in calls)
    elif len(calls) <= LONGEST:
        yield calls
    else:
        cuts = _cuts([_signature(c, specs) for c in calls])
        for start, stop in zip([0, *cuts], [*cuts, len(calls)], strict=True):
            yield from _pieces(calls[start:stop], specs)


def _signature(call: LocalCall, specs: LocalSpecs) -> Any:
    """What is equal for operations that do the same to tensors of equal layouts."""
    shards = [specs[s] for s in (*slots_read(call), *slots_written(call))]

    def unnamed(value: Any) -> Any:
        if type(value) in (tuple, list):
            return [unnamed(v) for v in value]
        return "%" if type(value) is Ref else value

    return repr((call.op, unnamed(call.args), unnamed(call.kwargs))), tuple(shards)


def _cuts(signatures: Sequence[Any]) -> list[int]:
    """Where to cut so that as many pieces as possible are equal."""
    known: dict[Any, int] = {}
    numbers = numpy.array([known.setdefault(s, len(known)) for s in signatures])
    length, best = len(numbers), (0, 0, 0)
    for period in range(1, min(LONGEST, length // 2) + 1):
        differ = numpy.flatnonzero(numbers[period:] != numbers[:-period])
        ends = numpy.concatenate([[-1], differ, [length - period]])
        start = int(numpy.argmax(numpy.diff(ends)))
        covered = int(ends[start + 1] - ends[start] - 1)
        if covered >= period and covered + period > best[0] * 1.1:
            best = (covered + period, period, int(ends[start]) + 1)
    covered, period, start = best
    if not covered:
        return list(range(LONGEST, length, LONGEST))
    piece = min(-(-PIECE // period), covered // period) * period
    return [c for c in range(start, start + covered + 1, piece) if 0 < c < length]


def _last_uses(local: LocalProgram, items: Sequence[Sequence[LocalInstruction]]) -> dict[int, int]:
    """For each slot, the number of the last item that reads it."""
    found = {}
    for i, group in enumerate(items):
        for instruction in group:
            step = isinstance(instruction, LocalStep)
            found.update(dict.fromkeys([instruction.input] if step else slots_read(instruction), i))
    return found | {slot: len(items) for slot, _ in local.outputs}


class _Part:
    """Calls that are to be one.

    Attributes:
        calls: The calls.
        inputs: The slots that they read and do not write.
        scalars: The numbers of the run-time scalars that they read.
        outputs: The slots that they write and somebody else reads.
        stretches: What each device runs.
    """

    def __init__(
        self,
        calls: Sequence[Any],
        specs: LocalSpecs,
        last_uses: dict[int, int],
        place: int,
        num_threads: int,
    ) -> None:
        self.calls: Sequence[LocalCall] = calls
        written = [s for c in calls for s in slots_written(c)]
        self.inputs = list(dict.fromkeys(s for c in calls for s in slots_read(c)))
        self.inputs = [s for s in self.inputs if s not in set(written)]
        self.scalars = list(dict.fromkeys(n for c in calls for n in _scalars(c)))
        self.outputs = [s for s in written if last_uses.get(s, -1) > place]
        read = [s for s in written if s in last_uses]
        self._values = {s: i for i, s in enumerate([*self.inputs, *read])}
        devices = range(len(calls[0].mesh.devices))
        self.stretches = [self._stretch(specs, i, num_threads) for i in devices]

    def _stretch(self, specs: LocalSpecs, index: int, num_threads: int) -> Stretch:
        mesh = self.calls[0].mesh
        is_on_host = streams.place_of(mesh.devices[index]) is None
        fresh = {s for c in self.calls for s in slots_written(c) if not _is_view(c)}
        inputs = (specs[s][index] for s in self.inputs)
        outputs = (specs[s][index] for s in self.outputs)
        return Stretch(
            tuple(self._operation(c, index) for c in self.calls),
            tuple(_expected(s.shape, s.stride, s.dtype) for s in inputs),
            len(self.scalars),
            tuple(self._values[s] for s in self.outputs),
            tuple(
                Layout(tuple(s.shape), s.stride, s.dtype, slot in fresh)
                for slot, s in zip(self.outputs, outputs, strict=True)
            ),
            num_threads if is_on_host else 0,
            None if is_on_host else mesh.torch_device(index),
        )

    def _operation(self, call: LocalCall, index: int) -> Operation:
        def renumbered(value: Any) -> Any:
            if type(value) is Ref:
                return Ref(self._values[value.id])
            if type(value) is ScalarRef:
                return ScalarRef(self.scalars.index(value.number))
            if type(value) in (tuple, list):
                return type(value)(renumbered(v) for v in value)
            return value

        args, kwargs = for_device((call.args, call.kwargs), index)
        outputs = tuple(None if s is None else self._values.get(s) for s in call.outputs)
        return Operation(call.op, renumbered(args), renumbered(kwargs), outputs)

    def call(self, numbers: Sequence[Any], origin: int) -> LocalCall:
        """Returns the call that they become, given the number of each device's code."""
        number = numbers[0] if len(set(numbers)) == 1 else PerDevice(numbers)
        inputs = [Ref(s) for s in self.inputs]
        scalars = [ScalarRef(n) for n in self.scalars]
        args, mesh = (number, inputs, scalars), self.calls[0].mesh
        run = run_compiled if self.stretches[0].place is None else run_callable
        return LocalCall(run, args, (), tuple(self.outputs), mesh, origin)


def _expected(shape: Sequence[int], stride: tuple[int, ...], dtype: torch.dtype) -> Layout:
    """The layout to compile for: one that a copy can be made in."""
    layout = Layout(tuple(shape), stride, dtype)
    return layout._replace(stride=contiguous_stride(shape)) if layout.overlaps else layout


# -- their code ------------------------------------------------------------------------------

_known: dict[str, int | None] = {}  # the numbers of stretches, by their keys; None if it failed
_compiling = threading.RLock()  # Inductor serves one thread at a time


def _numbered(parts: Iterable[_Part]) -> dict[str, int | None]:
    """Returns the number of each stretch's code, by its key; None for what cannot be compiled."""
    stretches = {s.key: s for part in parts for s in part.stretches}
    with _compiling:
        new = {k: s for k, s in stretches.items() if k not in _known}
        functions: dict[str, Any] = {}
        failed = _build([s for s in new.values() if not _is_built(s)], functions)
        for key, stretch in new.items():
            if key not in failed:
                try:
                    _known[key] = _added(stretch, functions.get(key))
                except RuntimeError as error:
                    failed[key] = error
        _known.update(dict.fromkeys(failed))
    if failed:
        error = next(iter(failed.values()))
        warnings.warn(
            f"{len(failed)} of {len(stretches)} stretches of a jitted program could not be "
            f"compiled and run as they are; the first: {_summary(error)}",
            stacklevel=2,
        )
    return {key: _known[key] for key in stretches}


def _is_built(stretch: Stretch) -> bool:
    return stretch.place is None and inductor.library_of(stretch).exists()


def _added(stretch: Stretch, function: Any) -> int:
    """The number of a stretch's code: a function, or the library on the disk."""
    if function is not None:
        return add_callable(function, stretch.inputs, stretch.results)
    path = str(inductor.library_of(stretch))
    return add_compiled(path, _NUM_MODELS, stretch.inputs, stretch.results)


def _build(stretches: Sequence[Stretch], functions: dict[str, Any]) -> dict[str, Exception]:
    """Compiles stretches, counting them on the standard error output; returns what failed.

    Libraries lie on the disk then; functions are in a table by the keys of their stretches.
    """
    failed: dict[str, Exception] = {}
    begin = time.monotonic()
    for number, stretch in enumerate(stretches, 1):
        line = f"\rdtorch: compiling {number} of {len(stretches)} stretches ..."
        print(line, end="", file=sys.stderr, flush=True)
        try:
            if stretch.place is None:
                inductor.build(stretch)
            else:
                functions[stretch.key] = inductor.function_of(stretch)
        except Exception as error:  # Inductor raises what it likes
            failed[stretch.key] = error
    if stretches:
        print(f" {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return failed


def _summary(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
