"""`run_compiled`: the operation that runs a compiled stretch of a program on one device.

Takes libraries that Inductor has compiled ahead of time, with the layouts that they were compiled
for; gives each a number, which the operation takes. The native executor's kernel is in
native/compiled.cpp and runs without the interpreter lock; the portable executor's is here.
Generated code reads memory as it was compiled to: what is laid out differently is copied first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .backend import NATIVE


class Layout(NamedTuple):
    """What compiled code takes a tensor to be.

    Attributes:
        shape: Its local shape.
        stride: Its local strides.
        dtype: Its dtype.
        is_fresh: Of a result: it must not share memory with an input.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_fresh: bool = False

    @property
    def overlaps(self) -> bool:
        """Whether several elements are at the same place, so that it cannot be written to."""
        pairs = zip(self.shape, self.stride, strict=True)
        return any(size > 1 and step == 0 for size, step in pairs)


_library = torch.library.Library("dtorch", "FRAGMENT")
_library.define("run_compiled(int number, Tensor[] inputs, float[] scalars) -> Tensor[]")

run_compiled = torch.ops.dtorch.run_compiled.default
"""Runs the compiled stretch of a number on one device's tensors; floats become 0-dim tensors."""


def add_compiled(
    library: str, num_models: int, inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> int:
    """Loads a library and returns the number that `run_compiled` knows it by.

    Args:
        library: Its path.
        num_models: How many devices can run it at the same time; more wait for each other.
        inputs: What it was compiled for, without its scalars.
        outputs: What its results are to be.

    Raises:
        RuntimeError: It cannot be loaded.
    """
    if NATIVE is not None:
        return NATIVE.add_compiled(library, num_models, inputs, outputs)
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(library, num_models)  # pyright: ignore[reportAttributeAccessIssue]
    _compiled.append((runner, tuple(inputs), tuple(outputs)))
    return len(_compiled) - 1


# The portable kernel: as native/compiled.cpp.
_compiled: list[tuple[Any, tuple[Layout, ...], tuple[Layout, ...]]] = []


def _run(
    number: int, inputs: Sequence[torch.Tensor], scalars: Sequence[float]
) -> list[torch.Tensor]:
    runner, wanted, promised = _compiled[number]
    given = [_laid_out(t, layout) for t, layout in zip(inputs, wanted, strict=True)]
    given += [torch.tensor(s, dtype=torch.float64) for s in scalars]
    places = {t.untyped_storage().data_ptr() for t in given}
    results = []
    for result, layout in zip(runner.run(given), promised, strict=True):
        shared = layout.is_fresh and result.untyped_storage().data_ptr() in places
        results.append(_laid_out(result.clone() if shared else result, layout))
    return results


def _laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    if tensor.dtype != layout.dtype or tensor.shape != layout.shape:
        raise RuntimeError(
            f"compiled code for {layout.dtype} {list(layout.shape)} met {tensor.dtype} "
            f"{list(tensor.shape)}.\n  Fix: report it, and use jit without compile=True."
        )
    if (tensor.stride() == layout.stride and not tensor.is_neg()) or layout.overlaps:
        return tensor
    made = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype)
    return made.copy_(tensor)


if NATIVE is None:
    _library.impl("run_compiled", _run, "CompositeImplicitAutograd")
