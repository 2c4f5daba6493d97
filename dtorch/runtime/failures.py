"""What a value is that could not be computed: the message names operation, device and line."""

from __future__ import annotations

import torch

from ..errors import DTorchError, ShutdownError, WorkerError
from ..lowering import LocalProgram, live_before, slots_read, slots_written
from ..program import SourceLine


class Failure:
    """Why a value could not be computed; it stands in the value's place and passes on."""

    __slots__ = ("cause", "message")

    def __init__(self, message: str, cause: BaseException) -> None:
        self.message = message
        self.cause = cause

    def error(self) -> DTorchError:
        """Returns a new exception to raise, with the kernel's own as its cause."""
        if isinstance(self.cause, DTorchError):
            return type(self.cause)(self.message)
        error = WorkerError(self.message)
        error.__cause__ = self.cause
        return error


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
        lines += _own_values(program, origin) + _largest_values(program, origin)
    lines.append("  Every value that depends on it is lost; the workers go on.")
    return Failure("\n".join(lines), error)


def _own_values(program: LocalProgram, origin: int) -> list[str]:
    """What an instruction reads and gives, for the message that memory is full."""
    own = [i for i in program.instructions if i.origin == origin]
    given = dict.fromkeys(s for i in own for s in slots_written(i))
    read = dict.fromkeys(s for i in own for s in slots_read(i) if s not in given)
    return [
        f"  {what:<11}  {', '.join(f'%{s}: {program.specs[s]!r}' for s in known)}"
        for what, slots in (("reads", read), ("gives", given))
        if (known := [s for s in slots if s < len(program.specs)])
    ]


def _largest_values(program: LocalProgram, origin: int) -> list[str]:
    """What a device holds while an instruction runs, for the message that its memory is full."""
    live = live_before(program, origin)
    sizes = {value: program.specs[value].num_local_bytes for value in live}
    largest = sorted(live, key=lambda value: -sizes[value])[:_NUM_LARGEST]
    lines = [f"  held there   {_mib(sum(sizes.values()))} in {len(live)} values of this program"]
    for value in largest:
        made = live[value]
        what = "an input, " if made is None else f"{program.texts[made]}: "
        what += repr(program.specs[value])
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


def driver_failure(place: str, error: BaseException) -> Failure:
    """Returns the failure of what was launched on an accelerator, where no instruction is known.

    Args:
        place: The accelerator.
        error: What its driver says.
    """
    return Failure(
        f"{type(error).__name__} on {place}: {error}\n"
        "  It may be of anything that was launched there before, whose values are lost.",
        error,
    )


def untrusted_failure(device: str, first: Failure) -> Failure:
    """Returns the failure of all that a device is given once the driver of its accelerator failed.

    Args:
        device: The device.
        first: The first failure there.
    """
    message = "\n".join(
        [
            f"{device} computes nothing any more, as its driver has failed and no value of it can "
            "be trusted. The first error:",
            *(f"    {line}" for line in first.message.splitlines()),
            f"  Fix: dtorch.restart({device!r}), which says whether it can be used again.",
        ]
    )
    return Failure(message, first.cause)
