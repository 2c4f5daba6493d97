"""`run_graph`: the operation that runs a part of a program by replaying a CUDA graph.

Takes a `Part`, the local operations of one device with slots of their own, and what is in its first
slots; gives what they compute. The first calls run the operations one by one, and so let libraries
make what they need; the next is captured, and from then on a call is one launch on the worker's
current stream. A graph reads and writes the same memory at each replay:

- an input that came in the same memory in every call so far, as a model's weights do, is read where
  it is; another is copied into a buffer of the graph's;
- a result that other parts alone read stays in the graph's memory, where they find it again;
  another is copied out, since the caller may keep it;
- what is donated, and then only changed by operations that PyTorch has in place, is changed in a
  buffer of the graph's. The result is that buffer, on loan (`lent`) until it is donated to the next
  call, which then copies nothing;
- all of it is launched on one stream, whose order is that of the calls.

What cannot be captured runs operation by operation, and a line on the standard error output says
why, once. A call whose operations fail is none of the first calls, and says nothing of captures.
Captures are made in the mode "thread_local", one at a time: other threads go on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DonatedError
from ..lowering import LocalCall
from ..program import Ref, map_refs, refs
from . import collectives, lent
from .captures import capture, have_graphs
from .collectives import Meeting
from .graph_memory import Buffer, copy_of, layout, place, storage
from .shards import Failure

NUM_WARM_UPS = 2
"""Calls before a capture, which show what comes in the same memory every time."""
_MOST_CAPTURES = 8  # of one part on one device; what has moved until then is copied from then on


@dataclasses.dataclass(frozen=True, slots=True)
class LocalJoin:
    """What one device does in a step of a redistribution that is within the device."""

    meeting: Meeting
    input: int
    outputs: tuple[int]
    frees: tuple[int, ...]


Operation = LocalCall | LocalJoin


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Operations that each device of a mesh runs one after another.

    Attributes:
        operations: For each device, its operations, with slots that count from 0.
        num_inputs: How many of the slots, the first, are given.
        num_slots: How many there are.
        outputs: The slots that are returned.
        inside: Which of the outputs other parts alone read.
        from_parts: Which of the inputs are such outputs of other parts.
        donated: Which of the inputs the caller has given up.
        text: What it is called in messages.
    """

    operations: tuple[tuple[Operation, ...], ...]
    num_inputs: int
    num_slots: int
    outputs: tuple[int, ...]
    inside: frozenset[int]
    from_parts: frozenset[int]
    donated: frozenset[int]
    text: str


_library = torch.library.Library("dtorch", "FRAGMENT")
_library.define("run_graph(int number, int position, Tensor?[] inputs) -> Tensor?[]")

run_graph = torch.ops.dtorch.run_graph.default
"""Runs the part of a number on the tensors of the device at a position of its mesh."""


def add_part(part: Part) -> int:
    """Returns the number that `run_graph` knows a part by, until it is removed."""
    number = next(_numbers)
    _runs[number] = [_Run(part, position) for position in range(len(part.operations))]
    return number


def remove_parts(numbers: Sequence[int]) -> None:
    """Frees the graphs of parts that no program runs any more."""
    for number in numbers:
        for run in _runs.pop(number, ()):
            run.drop()


def _run(number: int, position: int, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    return _runs[number][position](inputs)


_library.impl("run_graph", _run, "CompositeExplicitAutograd")
_numbers = itertools.count()
_capturing = threading.Lock()


class _Run:
    """A part on one device, whose worker alone calls it."""

    def __init__(self, part: Part, position: int) -> None:
        self._part = part
        self._operations = part.operations[position]
        self._donated = part.donated
        self._num_warm_ups = 0
        self._num_captures = 0
        self._seen: list[Tensor | None] = []  # the inputs of the call before, until the capture
        self._results: list[Any] = []  # how results were laid out then, operation by operation
        self._copied: set[int] = set()
        self._replayed: _Replayed | None = None
        self._is_refused = False

    def __call__(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        if self._is_refused:
            return self._one_by_one(inputs)
        if self._replayed is None:
            self._note_moved(self._seen, inputs, range(len(self._seen)))
            if self._num_warm_ups < NUM_WARM_UPS:
                self._seen = list(inputs)
                results = self._one_by_one(inputs)
                self._num_warm_ups += 1  # one that fails is none
                return results
            return self._captured(inputs)
        new = self._replayed.new(inputs)
        if not self._replayed.fits(inputs, new):
            return self._one_by_one(inputs)
        if self._note_moved(self._replayed.given, inputs, new):
            return self._captured(inputs)
        if self._replayed.is_held(inputs):
            self._donated = self._donated if self._num_captures < _MOST_CAPTURES else frozenset()
            return self._captured(inputs)
        return self._replayed(inputs)

    def drop(self) -> None:
        """Frees the graph."""
        if self._replayed is not None:
            self._replayed.drop()
            self._replayed = None

    def _note_moved(
        self, before: Sequence[Tensor | None], now: Sequence[Tensor | None], which: Iterable[int]
    ) -> bool:
        """Notes which inputs are in other memory than before; returns whether a graph has to."""
        moved = {i for i in which if i not in self._copied and place(before[i]) != place(now[i])}
        settled = self._num_captures >= _MOST_CAPTURES
        self._copied |= moved if settled else moved - self._part.from_parts
        return bool(moved)

    def _captured(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Captures a graph for these inputs and replays it; without one, runs the operations."""
        self._seen = []
        self.drop()
        self._num_captures += 1
        try:
            self._replayed = _Replayed(
                self._part, self._operations, inputs, self._copied, self._donated, self._results
            )
        except Exception as error:  # whatever an operation raises that cannot be captured
            line = f"{self._part.text} runs without a CUDA graph: {_first_line(error)}"
        else:
            return self._replayed(inputs)
        results = self._one_by_one(inputs)  # if this fails too, a later call is captured
        self._is_refused = True
        say(line)
        return results

    def _one_by_one(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        slots = [*inputs, *[None] * (self._part.num_slots - len(inputs))]
        self._results = [_run_one(operation, slots) for operation in self._operations]
        return [slots[s] for s in self._part.outputs]


_runs: dict[int, list[_Run]] = {}


class _Replayed:
    """A graph, and the memory that it reads and writes.

    Args:
        part: What it computes.
        operations: Those of the device.
        inputs: What it is captured with.
        copied: Which of them it copies into buffers of its own.
        donated: Which of those it may write to.
        results: How the results of each operation are laid out.

    Attributes:
        given: The inputs that it reads where they are; None for the others.
    """

    def __init__(
        self,
        part: Part,
        operations: Sequence[Operation],
        inputs: Sequence[Tensor | None],
        copied: set[int],
        donated: frozenset[int],
        results: Sequence[Any],
    ) -> None:
        if any(t is not None and not have_graphs(t.device.type) for t in inputs):
            raise RuntimeError("it reads a value on the host")
        self.given = [None if i in copied else t for i, t in enumerate(inputs)]
        self._layouts = [layout(t) for t in inputs]
        self._buffers = {
            i: Buffer(t, counts_writes=i in donated)
            for i, t in enumerate(inputs)
            if i in copied and t is not None
        }
        self._updated: dict[int, Buffer] = {}
        self._results: list[Any] = []
        with _capturing:
            self._graph = capture(lambda: self._launch(part, operations, donated, results))
        self._lent = {b.storage: b for b in self._updated.values()}
        for buffer in self._lent.values():
            buffer.note_holders()
        outside = [t for i, t in enumerate(self.given) if i not in part.from_parts]
        kept = {storage(t) for t in outside if t is not None}
        self._stays = [
            t is None or s in part.inside or storage(t) in kept
            for s, t in zip(part.outputs, self._results, strict=True)
        ]

    def _launch(
        self,
        part: Part,
        operations: Sequence[Operation],
        donated: frozenset[int],
        results: Sequence[Any],
    ) -> None:
        """Launches the operations, in place where they only change what is donated."""
        read = [
            self._buffers[i].view if i in self._buffers else t for i, t in enumerate(self.given)
        ]
        slots = [*read, *[None] * (part.num_slots - len(read))]
        owned = {i: self._buffers[i] for i in donated & self._buffers.keys()}
        now: dict[Any, Buffer] = dict(owned)
        for operation, expected in zip(operations, results, strict=True):
            in_place = _in_place(operation, slots, now, expected)
            if in_place is not None:
                (output,), first = in_place.outputs, in_place.args[0]
                now[output] = now.pop(first.id)
            _run_one(in_place or operation, slots)
        self._updated = {i: b for i, b in owned.items() if i not in now}
        self._results = [slots[s] for s in part.outputs]

    def new(self, inputs: Sequence[Tensor | None]) -> list[int]:
        """Returns which inputs are not the very tensors that the graph reads where they are."""
        pairs = zip(inputs, self.given, strict=True)
        return [i for i, (ours, theirs) in enumerate(pairs) if ours is not theirs]

    def fits(self, inputs: Sequence[Tensor | None], new: Sequence[int]) -> bool:
        """Whether a replay computes what the operations would.

        Inputs are laid out as at the capture, and none is in memory that the graph writes to, but
        for what it left there and is given back once.
        """
        if any(self._layouts[i] != layout(inputs[i]) for i in new):
            return False
        return not self._lent or all(
            (t := inputs[i]) is None
            or storage(t) not in self._lent
            or (i in self._updated and self._updated[i].may_write(t))
            for i in new
        )

    def is_held(self, inputs: Sequence[Tensor | None]) -> bool:
        """Whether somebody has what the graph left in memory that it is to write something else."""
        return any(b.is_held() for i, b in self._updated.items() if not b.holds(inputs[i]))

    def __call__(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        for buffer in self._lent.values():
            buffer.begin_write()
        for i, buffer in self._buffers.items():
            buffer.fill(inputs[i])
        self._graph.replay()
        for buffer in self._lent.values():
            lent.lend(buffer.view, _GONE)
        pairs = zip(self._results, self._stays, strict=True)
        return [t if stays else self._given_out(t) for t, stays in pairs]

    def _given_out(self, tensor: Tensor | None) -> Tensor:
        assert tensor is not None
        if storage(tensor) in self._lent:
            return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return copy_of(tensor)

    def drop(self) -> None:
        """Frees the graph, and leaves the memory that is on loan to those who have it."""
        for buffer in self._lent.values():
            lent.withdraw(buffer.view)
        self._graph.drop()


_GONE_MESSAGE = (
    "a tensor was donated (donate_argnums) to a jitted call with cuda_graph=True, which has "
    "written to its memory since.\n  Fix: fetch or clone() it before, or do not donate."
)
_GONE = Failure(_GONE_MESSAGE, DonatedError(_GONE_MESSAGE))


# -- operations ----------------------------------------------------------------------------


def _run_one(operation: Operation, slots: list[Any]) -> Any:
    """Runs an operation; returns how its results are laid out."""
    try:
        results = list(_flat(_result(operation, slots)))
    except Exception as error:
        what = operation.op if isinstance(operation, LocalCall) else operation
        error.add_note(f"dtorch: in {what}, of a part that is captured as one graph")
        raise
    for slot, value in zip(operation.outputs, results, strict=True):
        if slot is not None:
            slots[slot] = value
    for slot in operation.frees:
        slots[slot] = None
    return [layout(t) for t in results]


def _result(operation: Operation, slots: Sequence[Any]) -> Any:
    if isinstance(operation, LocalJoin):
        (round,) = operation.meeting.rounds
        return collectives.join(round, operation.meeting, [slots[operation.input]])
    args, kwargs = operation.args, operation.kwargs
    args, kwargs = map_refs((args, kwargs), lambda ref: slots[ref.id])
    return operation.op(*args, **dict(kwargs))


def _in_place(
    operation: Operation,
    slots: Sequence[Any],
    owned: Mapping[int, Buffer],
    expected: Sequence[Any],
) -> LocalCall | None:
    """The form of an operation that writes its result over its first operand, if that may be.

    The operand is in memory of the graph's that nothing else in it is in, and nothing reads later.
    """
    if not isinstance(operation, LocalCall) or not operation.args:
        return None
    first, form = operation.args[0], _in_place_form(operation.op)
    if form is None or type(first) is not Ref or first.id not in owned:
        return None
    tensor = slots[first.id]
    others = [t for i, t in enumerate(slots) if i != first.id and isinstance(t, Tensor)]
    read = [ref.id for ref in refs((operation.args, operation.kwargs))]
    may_be = (
        first.id in operation.frees
        and read.count(first.id) == 1
        and list(expected) == [layout(tensor)]
        and not any(storage(t) == storage(tensor) for t in others)
    )
    return dataclasses.replace(operation, op=form) if may_be else None


@functools.cache
def _in_place_form(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    packet = getattr(torch.ops.aten, f"{op.overloadpacket.__name__}_", None)
    found = getattr(packet, op._overloadname, None)
    if op.namespace != "aten" or found is None:
        return None
    ours, theirs = op._schema.arguments, found._schema.arguments
    alike = [(a.name, str(a.type)) for a in ours] == [(a.name, str(a.type)) for a in theirs]
    writes = [a.is_write for a in theirs]
    return found if alike and writes[0] and not any(writes[1:]) else None


def _flat(result: Any) -> Iterator[Any]:
    if isinstance(result, (tuple, list)):
        for item in result:
            yield from _flat(item)
    else:
        yield result


# -- messages ------------------------------------------------------------------------------

_said: set[str] = set()


def say(line: str) -> None:
    """Prints a line on the standard error output, the first time."""
    if line not in _said:
        _said.add(line)
        print(f"dtorch: {line}", file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
