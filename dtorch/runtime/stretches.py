"""`run_compiled` and `run_callable`: operations that run a compiled stretch on one device.

Code is a library that Inductor has compiled ahead of time, for the host, or a function of Python
that launches its kernels on an accelerator. Takes it with the layouts that it was compiled for;
gives each a number, which the operation takes. The native executor's kernel for libraries is in
native/compiled.cpp and runs without the interpreter lock; the portable executor's, and the one for
functions, are here. Generated code reads memory as it was compiled to: what is laid out differently
is copied first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
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
_library.define("run_callable(int number, Tensor[] inputs, float[] scalars) -> Tensor[]")

run_compiled = torch.ops.dtorch.run_compiled.default
"""Runs the library of a number on one device's tensors; floats become 0-dim tensors."""

run_callable = torch.ops.dtorch.run_callable.default
"""Runs the function of a number, likewise, on the calling thread and its current stream."""


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
    return _add(_libraries, _Code(runner.run, tuple(inputs), tuple(outputs)))


def add_callable(
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
) -> int:
    """Returns the number that `run_callable` knows a compiled function by.

    Args:
        function: It takes tensors and returns tensors. The first call tunes its kernels, and no
            other runs meanwhile.
        inputs: What it was compiled for, without its scalars.
        outputs: What its results are to be.
    """
    first = _First(function)
    return _add(_callables, _Code(first, tuple(inputs), tuple(outputs)))


class _First:
    """A function whose first call, on whatever thread, is the only one that runs."""

    def __init__(self, function: Callable[..., Sequence[torch.Tensor]]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._was_called = False

    def __call__(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._was_called:
            return self._function(*given)
        with self._lock:
            results = self._function(*given)
            self._was_called = True
        return results


class _Code(NamedTuple):
    run: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


_adding = threading.Lock()
_libraries: list[_Code] = []
_callables: list[_Code] = []


def _add(codes: list[_Code], code: _Code) -> int:
    with _adding:
        codes.append(code)
        return len(codes) - 1


# The portable kernel: as native/compiled.cpp.


def _run(
    code: _Code, inputs: Sequence[torch.Tensor], scalars: Sequence[float]
) -> list[torch.Tensor]:
    given = [_laid_out(t, layout) for t, layout in zip(inputs, code.inputs, strict=True)]
    given += [torch.tensor(s, dtype=torch.float64, device="cpu") for s in scalars]
    places = {t.untyped_storage().data_ptr() for t in given}
    results = []
    for result, layout in zip(code.run(given), code.outputs, strict=True):
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
    place = {"dtype": layout.dtype, "device": tensor.device}
    return torch.empty_strided(layout.shape, layout.stride, **place).copy_(tensor)


def _run_library(number: int, inputs: Any, scalars: Any) -> list[torch.Tensor]:
    return _run(_libraries[number], inputs, scalars)


def _run_callable(number: int, inputs: Any, scalars: Any) -> list[torch.Tensor]:
    return _run(_callables[number], inputs, scalars)


if NATIVE is None:
    _library.impl("run_compiled", _run_library, "CompositeImplicitAutograd")
_library.impl("run_callable", _run_callable, "CompositeImplicitAutograd")
