"""Sweep: one entry on its samples, in many layouts.

Takes the name of an entry and a `Plan`; gives a `Result`, which is plain data.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import dtorch

from . import entries
from .check import (
    MODES,
    SEED,
    Mode,
    Outcome,
    check_backward,
    check_factory,
    check_forward,
    expected_gradients,
    run,
)
from .compare import Expected, is_inexact, largest_size
from .entries import Call, Variant
from .layouts import MESHES, Layout, draw, whole


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is tried of every entry.

    Attributes:
        dtype: The name of the dtype, such as ``"float32"``.
        meshes: Names of `layouts.MESHES`, beside the mesh of one device.
        samples: How many samples of an entry at most.
        layouts: How many layouts of a sample on a mesh at most.
        backward: Compare gradients instead of results.
        variant: The function itself, its in-place variant, or the function with ``out=``.
        seed: What all choices depend on.
        modes: How every call runs.
    """

    dtype: str = "float32"
    meshes: tuple[str, ...] = ("2", "3", "2x2")
    samples: int = 8
    layouts: int = 5
    backward: bool = False
    variant: Variant = "function"
    seed: int = 0
    modes: tuple[Mode, ...] = MODES

    def to_json(self) -> str:
        """Returns the plan as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan of such a text."""
        values = json.loads(text)
        return cls(**values | {k: tuple(values[k]) for k in ("meshes", "modes")})

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return getattr(torch, self.dtype)

    def names(self, patterns: tuple[str, ...] = ("*",)) -> list[str]:
        """Returns the entries that the plan applies to.

        Args:
            patterns: Shell patterns for their names.
        """
        return entries.names(self.torch_dtype, patterns, self.backward, self.variant)


QUICK = Plan(samples=2, layouts=1)
"""What `tests/test_opinfo.py` tries of every entry."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A layout that did not come out right.

    Attributes:
        status: What came of it.
        where: The sample and the layout.
        how: ``"eager"`` or ``"jit"``.
        message: What was raised, or how the value is wrong.
    """

    status: str
    where: str
    how: str
    message: str


@dataclasses.dataclass
class Result:
    """What came of one entry.

    Attributes:
        name: The entry.
        tried: How many layouts were tried; 0 where no sample can be.
        right: How many were right.
        data_dependent: How many of those `jit` refused for a value that it would have to know.
        inner: How many had a tensor sharded on a dim other than 0.
        native: How many of those ran without gathering anything sharded.
        num_bytes: The bytes that the programs of the right ones communicate.
        has_matrix: Whether a sample has a tensor argument of two or more dims.
        refused: How many samples PyTorch itself refuses.
        failures: The layouts that were not right.
        seconds: How long it took.
    """

    name: str
    tried: int = 0
    right: int = 0
    data_dependent: int = 0
    inner: int = 0
    native: int = 0
    num_bytes: int = 0
    has_matrix: bool = False
    refused: int = 0
    failures: list[Failure] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """The worst that came of a layout."""
        found = {f.status for f in self.failures}
        order = ("crashed", "hung", "wrong", "raised", "inexact", "misplaced")
        return next((s for s in order if s in found), "right" if self.tried else "skipped")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        """Returns a result from what ``dataclasses.asdict`` made of it."""
        failures: Any = [Failure(**f) for f in values["failures"]]
        return cls(**values | {"failures": failures})

    def add(self, outcome: Outcome, where: str) -> None:
        """Counts what came of a layout."""
        self.tried += 1
        if outcome.status in ("right", "data-dependent"):
            self.right += 1
            self.data_dependent += outcome.status == "data-dependent"
        else:
            self.failures.append(Failure(outcome.status, where, outcome.how, outcome.message))
        self.inner += outcome.is_inner
        self.native += outcome.is_native
        self.num_bytes += outcome.num_bytes


def sweep_entry(
    name: str, plan: Plan, report: Callable[[str, Result], None] = lambda where, so_far: None
) -> Result:
    """Runs an entry on its samples, in the layouts of a plan.

    Args:
        name: Its full name.
        plan: What to try.
        report: Told each sample and layout before it runs, and what came of the ones before.

    Blocking: until all of it has run.
    """
    started, result = time.monotonic(), Result(name)
    op = entries.find(name)
    calls = entries.calls(
        op, plan.torch_dtype, plan.samples, plan.seed, plan.variant, plan.backward
    )
    for call in calls:
        try:
            leaves = _oracle(call, plan)
        except Exception:  # whatever PyTorch itself does not take is no question to dtorch
            leaves = None
        if leaves is None or any(_is_sparse(leaf) for leaf in leaves):
            result.refused += 1
            continue
        result.has_matrix |= any(t.ndim > 1 for t in call.tensors)
        _sweep_call(op, call, leaves, plan, result, report)
    result.seconds = time.monotonic() - started
    return result


def _is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided


def _oracle(call: Call, plan: Plan) -> list[Any]:
    """What PyTorch gives."""
    return expected_gradients(call) if plan.backward else torch_value(call)


def torch_value(call: Call, seed: int = SEED) -> list[Any]:
    """Returns the leaves of what PyTorch gives for a call, with its generator at a seed."""
    if call.is_factory:
        return run(lambda: call.function(torch), seed=seed)
    return run(call, [t.detach().clone() for t in call.tensors], seed)


def _sweep_call(
    op: Any,
    call: Call,
    leaves: list[Any],
    plan: Plan,
    result: Result,
    report: Callable[[str, Result], None],
) -> None:
    expected = Expected(
        leaves,
        entries.tolerance(op, plan.torch_dtype),
        op.full_name in entries.UNDEFINED,
        largest=max((largest_size(t) for t in call.tensors if is_inexact(t)), default=0.0),
    )
    check = _checker(call, plan)
    for layout in _layouts(op, call, leaves, plan):
        where = f"sample {call.number} {layout}"
        report(where, result)
        outcome = check(layout, expected)
        if len(layout.mesh.devices) == 1:
            if outcome.status == "inexact" and _varies(call, leaves, plan):
                expected = expected._replace(is_exact=False)
                outcome = check(layout, expected)
            if not plan.backward and is_random(call, leaves):
                expected = expected._replace(leaves=_one_device_value(call, layout, leaves))
        result.add(outcome, where)


def _checker(call: Call, plan: Plan) -> Callable[[Layout, Expected], Outcome]:
    if call.is_factory:
        return lambda layout, expected: check_factory(call, layout, expected, plan.modes)
    if plan.backward:
        return lambda layout, expected: check_backward(call, layout, expected, plan.modes)
    jitted = dtorch.jit(call)
    return lambda layout, expected: check_forward(call, jitted, layout, expected, plan.modes)


def _layouts(op: Any, call: Call, leaves: list[Any], plan: Plan) -> Iterator[Layout]:
    """The layout on one device, and then the drawn ones; of the result for a factory."""
    tensors = call.tensors
    if call.is_factory:
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    yield whole(MESHES["1"], len(tensors))
    yield from drawn_layouts(op.full_name, call.number, tensors, plan)


def drawn_layouts(
    name: str, number: int, tensors: Sequence[torch.Tensor], plan: Plan
) -> Iterator[Layout]:
    """Returns the layouts that a plan draws for the tensors of an entry's sample, by its number."""
    drawn = random.Random(f"{name} {number} {plan.seed}")
    for mesh in plan.meshes:
        yield from draw(tensors, MESHES[mesh], plan.layouts, drawn)


def is_random(call: Call, leaves: list[Any]) -> bool:
    """Returns whether another seed gives another value than the leaves of this one."""
    return not _are_equal(leaves, torch_value(call, SEED + 1))


def _varies(call: Call, leaves: list[Any], plan: Plan) -> bool:
    """Whether PyTorch itself gives other bits when it is asked again (`lstsq` does)."""
    return not all(_are_equal(leaves, _oracle(call, plan)) for _ in range(NUM_REPETITIONS))


NUM_REPETITIONS = 50


def _are_equal(some: list[Any], others: list[Any]) -> bool:
    pairs = zip(some, others, strict=True)
    tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor)]
    return all(a.shape == b.shape and _is_equal(a, b) for a, b in tensors)


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _one_device_value(call: Call, layout: Layout, leaves: list[Any]) -> list[Any]:
    """What dtorch itself gives on one device for the same seed; PyTorch's where that raises."""
    try:
        if call.is_factory:
            made = run(lambda: call.function(dtorch, device_mesh=layout.mesh))
        else:
            made = run(call, layout.spread(call.tensors))
        return [m.to_torch() if isinstance(m, dtorch.Tensor) else m for m in made]
    except Exception:
        return leaves
