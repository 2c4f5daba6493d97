"""How one repetition is timed. Standard library only: rivals in other environments import it too.

A `Run` runs a number of rounds and returns the seconds that one operation took; `calibrated`
makes of it a `Measure`, which is one repetition of a fixed number of rounds.
"""

import functools
import statistics
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

Run = Callable[[int], float]
Measure = Callable[[], float]


def seconds_of(call: Callable[[], object]) -> float:
    """Returns how long one call takes."""
    start = perf_counter_ns()
    call()
    return (perf_counter_ns() - start) * 1e-9


def looped(call: Callable[[], object], operations: int = 1) -> Run:
    """Times calls in a row; each makes that many operations."""

    def calls(rounds: int) -> None:
        for _ in range(rounds):
            call()

    return lambda rounds: seconds_of(lambda: calls(rounds)) / (rounds * operations)


def prepared(prepare: Callable[[], Any], call: Callable[[Any], object]) -> Run:
    """Times calls, each on a value that is made outside of the time. The median round counts."""

    def once() -> float:
        value = prepare()
        return seconds_of(lambda: call(value))

    return lambda rounds: statistics.median(once() for _ in range(rounds))


def each(call: Callable[[], object], drain: Callable[[], object]) -> Run:
    """Times calls, each with the wait for its result. The median round counts."""

    def done(_: object) -> None:
        call()
        drain()

    return prepared(drain, done)


def burst(call: Callable[[], Any], drain: Callable[[list[Any]], object], length: int = 10) -> Run:
    """Times how long the client is busy: a few calls in a row, whose results are kept and awaited
    outside of the time. The median round counts.
    """

    def once() -> float:
        results: list[Any] = []
        seconds = looped(lambda: results.append(call()))(length)
        drain(results)
        return seconds

    return lambda rounds: statistics.median(once() for _ in range(rounds))


def calibrated(run: Run, budget: float) -> Measure:
    """Returns a measure that takes about `budget` seconds, after a warm-up."""
    run(1)
    measure = functools.partial(run, rounds := 1)
    while seconds_of(measure) < budget / 2:
        measure = functools.partial(run, rounds := 2 * rounds)
    return measure
