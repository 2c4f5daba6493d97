"""Communication: what a program sends between devices, and what it gives up being sharded for.

Takes a `Program`; gives a `Summary` of it, plain data. Nothing is run.
"""

from __future__ import annotations

import dataclasses

import torch

from .placement import Shard
from .program import Apply, Instruction, Program, Redistribute, SourceLine
from .redistribution import Collective, Step
from .spec import Spec, format_layout


@dataclasses.dataclass(frozen=True, slots=True)
class Communication:
    """One collective of a program.

    Attributes:
        collective: Its kind.
        axes: The mesh axes that take part; empty for a transfer.
        before: The spec of the value that it takes.
        after: The spec of the value that it gives.
        num_bytes: The bytes that the busiest device receives.
        reader: The operation that the value is moved for; None where it is returned.
        source: The user's line.
    """

    collective: Collective
    axes: tuple[int, ...]
    before: Spec
    after: Spec
    num_bytes: int
    reader: torch._ops.OpOverload | None
    source: SourceLine | None

    @property
    def layouts(self) -> str:
        """The layouts before and after, and the meshes where they differ."""
        specs = (self.before, self.after)
        texts = [format_layout(s.mesh, s.placements) for s in specs]
        if self.before.mesh != self.after.mesh:
            texts = [f"{t} on {list(s.mesh.devices)}" for t, s in zip(texts, specs, strict=True)]
        return " -> ".join(texts)

    def row(self) -> tuple[str, ...]:
        """Returns the cells of a line in the table of a `Summary`."""
        dtype = str(self.before.dtype).removeprefix("torch.")
        return (
            self.source.short if self.source else "",
            str(self.reader) if self.reader else "the result",
            self.collective.value,
            self.layouts,
            f"{dtype}{list(self.before.shape)}",
            f"{self.num_bytes:,}",
        )

    def __str__(self) -> str:
        layouts = self.layouts
        reader = f" for {self.reader}" if self.reader else ""
        line = f"  {self.source.short}" if self.source else ""
        return f"{self.collective.value} {layouts}, {self.num_bytes} bytes{reader}{line}"


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What a program communicates.

    Attributes:
        communications: Its collectives, in order.
        gathers: The steps, local ones among them, after which an axis splits a value no longer.
        replicated: The operations that run replicated for want of a sharding rule.
    """

    communications: tuple[Communication, ...]
    gathers: tuple[Step, ...]
    replicated: tuple[Apply, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes that the busiest device of each collective receives, in all."""
        return sum(c.num_bytes for c in self.communications)

    def __repr__(self) -> str:
        return f"<{self._counts()}>"

    def __str__(self) -> str:
        rows = [_COLUMNS, *(c.row() for c in self.communications)] if self.communications else []
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        for apply in self.replicated:
            line = apply.source.short if apply.source else "unknown line"
            lines.append(f"{line}: {apply.op} has no sharding rule and runs replicated")
        return "\n".join([self._counts(), *lines])

    def _counts(self) -> str:
        count, replicated = len(self.communications), len(self.replicated)
        return (
            f"{count} communication{'s' * (count != 1)}, {self.num_bytes:,} bytes a device"
            f"; {replicated} operation{'s' * (replicated != 1)} replicated for want of a rule"
        )


_COLUMNS = ("line", "for", "collective", "layouts", "tensor", "bytes a device")


def summarize(program: Program) -> Summary:
    """Returns what a program communicates.

    Args:
        program: The program; it is not run.
    """
    steps = [i.step for i in program.instructions if isinstance(i, Redistribute)]
    readers = _readers(program)
    return Summary(
        tuple(_communication(i, readers) for i in program.communication()),
        tuple(s for s in steps if _splits_less(s)),
        tuple(program.fallbacks()),
    )


def _communication(moved: Redistribute, readers: dict[int, Instruction]) -> Communication:
    step = moved.step
    reader = readers.get(moved.output)
    while isinstance(reader, Redistribute):
        reader = readers.get(reader.output)
    return Communication(
        step.kind,
        step.axes,
        step.source,
        step.target,
        step.num_bytes,
        None if reader is None else reader.op,
        moved.source,
    )


def _readers(program: Program) -> dict[int, Instruction]:
    """The first instruction that reads each value."""
    readers: dict[int, Instruction] = {}
    for instruction in program.instructions:
        for value in instruction.inputs():
            readers.setdefault(value, instruction)
    return readers


def _splits_less(step: Step) -> bool:
    """Whether an axis splits the value before a step and not after it; moves count as split."""
    if step.source.mesh != step.target.mesh:
        return False
    pairs = zip(step.source.placements, step.target.placements, strict=True)
    counts = zip(step.source.mesh.shape, pairs, strict=True)
    return any(
        n > 1 and isinstance(before, Shard) and not isinstance(after, Shard)
        for n, (before, after) in counts
    )
