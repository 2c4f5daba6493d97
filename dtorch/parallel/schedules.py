"""Schedules: in which order the stages of a pipeline run forwards and backwards of microbatches.

Takes the numbers of stages and microbatches and gives actions: for each stage the order in which
its devices run them, and for the client one order of submission that keeps all of those.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Action", "Schedule", "stage_order", "submission_order"]


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
