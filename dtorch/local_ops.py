"""The operations that run a function of the user's on what each device holds.

A `LocalFunction` takes one device's tensors and gives that device's results; `local_call` runs it.
A program names it by a `FunctionNumber`, an integer to PyTorch, which keeps the function alive as
long as a program has it. `local_ready` agrees, before the devices run a function in which they
wait for each other, that all of them can: a device whose operands have failed must not be waited
for.

What the operations compute is in `runtime.local_calls`, how they are sharded in `rules.local`.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .mesh import DeviceMesh
from .spec import Spec


@dataclasses.dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class LocalFunction:
    """A function of one device's tensors, and the layouts of what it takes and gives.

    Attributes:
        name: What programs and messages call it.
        function: It, of a device's operands and the run-time scalars.
        mesh: The devices that run it.
        inputs: The spec of each operand, in the layout that it is brought to.
        outputs: The spec of each result.
        communicates: Whether devices wait for each other in it.
    """

    name: str
    function: Callable[[list[Tensor], list[float]], list[Tensor]]
    mesh: DeviceMesh
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    communicates: bool


class FunctionNumber(int):
    """The number of a local function, which it keeps alive."""

    function: LocalFunction

    def __repr__(self) -> str:
        return self.function.name


_functions: weakref.WeakValueDictionary[int, LocalFunction] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def numbered(function: LocalFunction) -> FunctionNumber:
    """Returns a new number of a function, by which the operations find it."""
    number = next(_numbers)
    _functions[number] = function
    named = FunctionNumber(number)
    named.function = function
    return named


def function_of(number: int) -> LocalFunction:
    """Returns the function of a number that a program has."""
    return _functions[number]


_library = torch.library.Library("dtorch", "FRAGMENT")
_library.define(
    "local_call(Tensor[] operands, int function, Scalar[]? scalars=None, int position=-1) "
    "-> Tensor[]"
)
_library.define("local_ready(Tensor[] operands, int function, int position=-1) -> Tensor")


def _results(
    operands: Sequence[Tensor],
    function: int,
    scalars: Sequence[float] | None = None,
    position: int = -1,
) -> list[Tensor]:
    """The global results, or what they are on one device."""
    specs = function_of(function).outputs
    if position < 0:
        return [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device="meta") for s in specs]
    return [torch.empty(s.local_shapes[position], dtype=s.dtype, device="meta") for s in specs]


def _ready(operands: Sequence[Tensor], function: int, position: int = -1) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="meta")


_library.impl("local_call", _results, "Meta")
_library.impl("local_ready", _ready, "Meta")

local_call = torch.ops.dtorch.local_call.default
"""The results of a local function on one device, the `position`-th of its mesh.

After the operands of one that communicates stands the sum of what `local_ready` gave.
"""

local_ready = torch.ops.dtorch.local_ready.default
"""The number of a run on the first device, zero on the others: their sum names the run."""
