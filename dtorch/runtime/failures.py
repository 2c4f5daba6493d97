"""What a value is that could not be computed: the message names operation, device and line."""

from __future__ import annotations

import torch

from ..errors import ShutdownError
from ..lowering import LocalProgram, live_before
from ..program import SourceLine
from .shards import Failure


def failure_of(
    program: LocalProgram, origin: int, device: str, site: SourceLine | None, error: BaseException
) -> Failure:
    """Returns the failure of an instruction.

    Args:
        program: The program that ran.
        origin: The number of its global instruction.
        device: Where it ran.
        site: The user's line that made the call.
        error: What the kernel raised.
    """
    instruction, source = program.texts[origin], program.sources[origin]
    lines = [f"{type(error).__name__} on {device}: {error}"]
    lines.append(f"  instruction  {instruction}")
    if source is not None:
        lines.append(f"  written at   {source}")
    if site is not None and site != source:
        lines.append(f"  called at    {site}")
    if isinstance(error, torch.OutOfMemoryError):
        lines += _largest_values(program, origin)
    lines.append("  Every value that depends on it is lost; the workers go on.")
    return Failure("\n".join(lines), error)


def _largest_values(program: LocalProgram, origin: int) -> list[str]:
    """What a device holds while an instruction runs, for the message that its memory is full."""
    live = live_before(program, origin)
    sizes = {value: program.specs[value].num_local_bytes for value in live}
    largest = sorted(live, key=lambda value: -sizes[value])[:_NUM_LARGEST]
    lines = [f"  held there   {_mib(sum(sizes.values()))} in {len(live)} values of this program"]
    for value in largest:
        made = live[value]
        what = f"an input, {program.specs[value]!r}" if made is None else program.texts[made]
        source = None if made is None else program.sources[made]
        lines.append(f"    {_mib(sizes[value])}  {what}" + (f"  {source}" if source else ""))
    return lines


_NUM_LARGEST = 5


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def stopped_failure() -> Failure:
    """Returns the failure of values that were pending when the workers were stopped."""
    message = "the dtorch workers were stopped before this value was computed."
    return Failure(message, ShutdownError(message))
