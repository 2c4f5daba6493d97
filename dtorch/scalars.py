"""Run-time scalars: Python numbers that are arguments of a program instead of part of its key.

While a function is traced, such a number is a `torch.SymFloat` or `torch.SymInt` over a
`ScalarNode`. Arithmetic on it builds an expression, which the client evaluates at each call;
an operation that takes it as a scalar records a reference to it. Whoever needs its value while
tracing (a size, a dim, a branch) *reads* it: the number then becomes part of the key, and the
function is traced anew for each value.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

Expression = tuple[Any, ...]
"""``("argument", index)``, ``("constant", value)``, or ``(operation, *expressions)``."""

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "mod": operator.mod,
    "pow": operator.pow,
    "float_pow": operator.pow,
    "pow_by_natural": operator.pow,
    "truediv": operator.truediv,
    "float_truediv": operator.truediv,
    "int_truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "int_floordiv": operator.floordiv,
    "sym_min": min,
    "sym_max": max,
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "sym_float": float,
    "sym_int": int,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class ScalarNode:
    """The value behind a symbolic number: an expression over arguments, and its value now."""

    def __init__(self, expression: Expression, value: Any, read: Callable[[int], None]) -> None:
        self.expression = expression
        self.value = value
        self._read = read

    # What torch asks of the node of a SymInt, SymFloat or SymBool.

    def is_int(self) -> bool:
        return type(self.value) is int

    def is_float(self) -> bool:
        return type(self.value) is float

    def is_bool(self) -> bool:
        return type(self.value) is bool

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def maybe_as_int(self) -> int | None:
        return None

    def maybe_as_float(self) -> float | None:
        return None

    def maybe_as_bool(self) -> bool | None:
        return None

    def constant_int(self) -> int | None:
        return None

    def constant_bool(self) -> bool | None:
        return None

    def nested_int(self) -> int | None:
        return None

    def has_hint(self) -> bool:
        return True

    @property
    def hint(self) -> Any:
        return self.value

    @property
    def constant(self) -> None:
        return None

    def read(self) -> Any:
        """Returns the value, and makes the arguments that it depends on part of the key."""
        for index in arguments_of(self.expression):
            self._read(index)
        return self.value

    def guard_int(self, file: str, line: int) -> Any:
        return self.read()

    guard_float = guard_bool = guard_size_oblivious = expect_true = guard_int

    def guard_or_false(self, file: str, line: int) -> Any:
        return self.read()

    guard_or_true = guard_or_false

    def int_(self) -> Any:
        return self.read()

    bool_ = int_

    def wrap_int(self, value: Any) -> ScalarNode:
        return ScalarNode(("constant", value), value, self._read)

    wrap_float = wrap_bool = wrap_int

    def clone(self) -> ScalarNode:
        return self

    def __str__(self) -> str:
        return str(self.value)

    __repr__ = _graph_repr = __str__

    def apply(self, name: str, *others: ScalarNode) -> ScalarNode:
        """Returns the node of an arithmetic operation on this one and others."""
        nodes = (self, *others)
        value = _operation(name)(*(n.value for n in nodes))
        return ScalarNode((name, *(n.expression for n in nodes)), value, self._read)

    def compare(self, name: str, other: ScalarNode) -> ScalarNode:
        """Returns a known truth value: a comparison reads both sides."""
        value = getattr(operator, name)(self.read(), other.read())
        return self.wrap_bool(value)


def _operation(name: str) -> Callable[..., Any]:
    return _BINARY.get(name) or _UNARY[name]


def _bind_operations() -> None:
    def arithmetic(name: str) -> Callable[..., ScalarNode]:
        return lambda self, *others: self.apply(name, *others)

    def comparison(name: str) -> Callable[..., ScalarNode]:
        return lambda self, other: self.compare(name, other)

    for name in (*_BINARY, *_UNARY):
        setattr(ScalarNode, name, arithmetic(name))
    for name in _COMPARISONS:
        setattr(ScalarNode, name, comparison(name))


_bind_operations()


def symbolic(
    index: int, value: float | int, read: Callable[[int], None]
) -> torch.SymFloat | torch.SymInt:
    """Returns the symbolic number that stands for a run-time argument.

    Args:
        index: The argument's number.
        value: Its value in this call, which shows its type.
        read: Called with the number of each argument whose value is asked for.
    """
    node = ScalarNode(("argument", index), value, read)
    return torch.SymFloat(node) if type(value) is float else torch.SymInt(node)


def node_of(value: Any) -> ScalarNode | None:
    """Returns the node of a symbolic number, or None for anything else."""
    if isinstance(value, (torch.SymFloat, torch.SymInt, torch.SymBool)):
        node = value.node
        return node if isinstance(node, ScalarNode) else None
    return None


def arguments_of(expression: Expression) -> list[int]:
    """Returns the numbers of the arguments that an expression depends on."""
    if expression[0] == "argument":
        return [expression[1]]
    if expression[0] == "constant":
        return []
    return [i for part in expression[1:] for i in arguments_of(part)]


def evaluate(expression: Expression, arguments: Sequence[Any]) -> Any:
    """Returns the value of an expression for the arguments of a call."""
    if expression[0] == "argument":
        return arguments[expression[1]]
    if expression[0] == "constant":
        return expression[1]
    return _operation(expression[0])(*(evaluate(e, arguments) for e in expression[1:]))


def concrete(value: Any) -> Any:
    """Returns nested lists and tuples, as lists, with symbolic numbers replaced by their values."""
    if isinstance(value, (list, tuple)):
        return [concrete(v) for v in value]
    node = node_of(value)
    return value if node is None else node.value
