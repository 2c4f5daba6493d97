"""Schedules: which stage has which layers, and in which order stages run microbatches.

Takes the numbers of stages and microbatches and gives actions: for each stage the order in which
its devices run them, and for the client one order of submission that keeps all of those.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Action", "Schedule", "assign_layers_to_stages", "stage_order", "submission_order"]


class Schedule(enum.Enum):
    """What a stage does first: all the forwards, or each backward as soon as it can."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"


class Action(NamedTuple):
    """The forward or the backward of one microbatch on one stage."""

    stage: int
    microbatch: int
    is_forward: bool

    def __repr__(self) -> str:
        return f"{'F' if self.is_forward else 'B'}{self.microbatch} on {self.stage}"


def stage_order(
    schedule: Schedule, stage: int, num_stages: int, num_microbatches: int
) -> list[Action]:
    """Returns what one stage runs, in order.

    In `1f1b` a stage has at most `num_stages - stage` microbatches whose backward has not run; in
    `gpipe` it has all of them.
    """
    forward = [Action(stage, m, True) for m in range(num_microbatches)]
    backward = [Action(stage, m, False) for m in range(num_microbatches)]
    if schedule is Schedule.GPIPE:
        return forward + backward
    ahead = min(num_stages - stage, num_microbatches)
    order = forward[:ahead]
    for m, action in enumerate(backward):
        order += [action, *forward[ahead + m : ahead + m + 1]]
    return order


def submission_order(schedule: Schedule, num_stages: int, num_microbatches: int) -> list[Action]:
    """Returns all actions in an order that keeps each stage's own and what depends on what.

    The devices of a stage run what is submitted in that order, so nothing can wait for what comes
    after it. In every round a stage submits at most one action: then a device is given what it
    has to receive about when it needs it.
    """
    left = [stage_order(schedule, s, num_stages, num_microbatches)[::-1] for s in range(num_stages)]
    done: set[Action] = set()
    order: list[Action] = []
    while any(left):
        for remaining in left:
            if remaining and _needs(remaining[-1], num_stages) <= done:
                done.add(remaining[-1])
                order.append(remaining.pop())
    return order


def _needs(action: Action, num_stages: int) -> set[Action]:
    """The action on the neighbouring stage that another takes its input from."""
    stage, m, is_forward = action
    if is_forward:
        return {Action(stage - 1, m, True)} if stage else set()
    return {Action(stage + 1, m, False)} if stage < num_stages - 1 else {Action(stage, m, True)}


def assign_layers_to_stages(num_layers: int, num_stages: int) -> list[int]:
    """Returns the stage of each layer: contiguous, in order, as even as can be.

    Args:
        num_layers: How many layers the model has.
        num_stages: How many stages they are divided among; none may be empty.

    Returns:
        The stage of every layer, a list of `num_layers` numbers that never go down. The sizes of
        the stages differ by at most one; the first stages have the additional layers.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is not positive, or there are fewer layers than stages.

    Source: `numpy.array_split`, `torch.tensor_split`.

    Example:
        >>> assign_layers_to_stages(7, 3)
        [0, 0, 0, 1, 1, 2, 2]
    """
    for name, value in (("num_layers", num_layers), ("num_stages", num_stages)):
        check_count(name, value)
    if num_layers < num_stages:
        raise ValueError(
            f"num_layers={num_layers} is less than num_stages={num_stages}: a stage would be empty."
            f"\n  Fix: take at most {num_layers} stages, or split a layer."
        )
    size, more = divmod(num_layers, num_stages)
    return [s for s in range(num_stages) for _ in range(size + (s < more))]


def check_count(name: str, value: object) -> None:
    """Raises if a number of things is not a positive integer."""
    if type(value) is not int:
        raise TypeError(f"{name} must be an integer, not {value!r}.")
    if value < 1:
        raise ValueError(f"{name}={value}: it must be at least 1.")
