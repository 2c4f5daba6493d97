"""Run-time scalars: Python numbers that are arguments of a program instead of part of its key.

While a function is traced, such a number is a `RuntimeFloat` or `RuntimeInt` over a
`ScalarNode`: to PyTorch a `torch.SymFloat` or `torch.SymInt`, to Python a float or an int.
Arithmetic on it builds an expression, which the client evaluates at each call; an operation that
takes it as a scalar records a reference to it. Whoever needs its value while tracing (a size, a
dim, a branch, a text) *reads* it: the number then becomes part of the key, and the function is
traced anew for each value.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

Expression = tuple[Any, ...]
"""``("argument", index)``, ``("constant", value, repr)``, or ``(operation, *expressions)``.

The repr tells 0.0 from -0.0, which are equal.
"""

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
_MATH = ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2")
_READING = ("is_integer", "hex", "as_integer_ratio", "bit_length", "bit_count", "to_bytes")
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

    def bool_(self) -> bool:
        return bool(self.read())

    def wrap_int(self, value: Any) -> ScalarNode:
        return ScalarNode(("constant", value, repr(value)), value, self._read)

    wrap_float = wrap_bool = wrap_int

    def clone(self) -> ScalarNode:
        return self

    def __repr__(self) -> str:
        return f"ScalarNode({self.value!r})"

    def __str__(self) -> str:
        return str(self.read())

    _graph_repr = __str__

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


# -- the numbers that a traced function sees -------------------------------------------------


class _Number:
    """What a float and an int have in common. In front of PyTorch's class, whose methods it hides.

    Arithmetic stays symbolic; everything else reads the value.
    """

    node: ScalarNode

    def __bool__(self) -> bool:
        return bool(self.node.read())

    def __int__(self) -> int:
        return int(self.node.read())

    def __float__(self) -> float:
        return float(self.node.read())

    def __complex__(self) -> complex:
        return complex(self.node.read())

    def __hash__(self) -> int:
        return hash(self.node.read())

    def __repr__(self) -> str:
        return repr(self.node.read())

    __str__ = __repr__

    def __invert__(self) -> Any:
        return ~self.node.read()

    def __format__(self, spec: str) -> str:
        return format(self.node.read(), spec)

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self.node.read(), ndigits)

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        if modulus is not None:
            return pow(self.node.read(), concrete(other), modulus)
        node = _operand(self.node, other)
        return _foreign(operator.pow, self, other) if node is None else _power(self.node, node)

    def __rpow__(self, other: Any) -> Any:
        node = _operand(self.node, other)
        return _rforeign(operator.pow, self, other) if node is None else _power(node, self.node)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return operator.floordiv(self, other), operator.mod(self, other)

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return operator.floordiv(other, self), operator.mod(other, self)

    @property
    def real(self) -> Any:
        return self

    @property
    def imag(self) -> Any:
        return type(self.node.value)(0)

    def conjugate(self) -> Any:
        return self

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self.node.value), (self.node.read(),)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return numpy.array(self.node.read(), dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        read = (i.node.read() if isinstance(i, _Number) else i for i in inputs)
        return getattr(ufunc, method)(*read, **kwargs)


class RuntimeFloat(_Number, torch.SymFloat):
    """A run-time float."""

    __class__: Any = property(lambda self: float)  # what isinstance looks at besides the type


class RuntimeInt(_Number, torch.SymInt):
    """A run-time int."""

    __class__: Any = property(lambda self: int)

    def __index__(self) -> int:
        return self.node.read()

    @property
    def numerator(self) -> Any:
        return self

    @property
    def denominator(self) -> int:
        return 1


def _number(node: ScalarNode) -> Any:
    """The number of a node; a value of another type (a complex power) is read."""
    kind = type(node.value)
    if kind is float:
        return RuntimeFloat(node)
    return RuntimeInt(node) if kind is int else node.read()


def _operand(node: ScalarNode, other: Any) -> ScalarNode | None:
    """The node of the other operand, or None if it is no real number."""
    found = node_of(other)
    if found is not None:
        return found
    if isinstance(other, float):
        return node.wrap_float(float(other))
    return node.wrap_int(int(other)) if isinstance(other, int) else None


def _power(base: ScalarNode, exponent: ScalarNode) -> Any:
    """A power; reads what decides its type, which is to be the same at every call."""
    if type(base.value) is not float and type(exponent.value) is not float:
        exponent.read()
    elif arguments_of(exponent.expression) or exponent.value % 1 != 0:
        base.read()
        if base.value < 0:
            exponent.read()
    return _number(base.apply("pow", exponent))


def _foreign(operation: Callable[[Any, Any], Any], number: _Number, other: Any) -> Any:
    if isinstance(other, complex):
        return operation(number.node.read(), other)
    return NotImplemented


def _rforeign(operation: Callable[[Any, Any], Any], number: _Number, other: Any) -> Any:
    if isinstance(other, torch.Tensor):
        return NotImplemented
    return operation(other, number.node.read())


_NEVER_EQUAL = (type(None), str, bytes, list, tuple, dict, torch.Tensor)  # or compare themselves


def _bind_methods() -> None:
    def binary(name: str, operation: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
        def forward(self: _Number, other: Any) -> Any:
            node = _operand(self.node, other)
            if node is None:
                return _foreign(operation, self, other)
            return _number(self.node.apply(name, node))

        def reflected(self: _Number, other: Any) -> Any:
            node = _operand(self.node, other)
            if node is None:
                return _rforeign(operation, self, other)
            return _number(node.apply(name, self.node))

        return forward, reflected

    def bitwise(operation: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
        def forward(self: _Number, other: Any) -> Any:
            node = _operand(self.node, other)
            return NotImplemented if node is None else operation(self.node.read(), node.read())

        def reflected(self: _Number, other: Any) -> Any:
            return operation(other, self.node.read())

        return forward, reflected

    def unary(name: str) -> Callable[..., Any]:
        return lambda self: _number(self.node.apply(name))

    def comparison(operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def compare(self: _Number, other: Any) -> Any:
            if isinstance(other, _NEVER_EQUAL):
                return NotImplemented
            node = node_of(other)
            return operation(self.node.read(), other if node is None else node.read())

        return compare

    def reading(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: function(self.node.read(), *args, **kwargs)

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
        methods = binary(name, getattr(operator, name))
        setattr(_Number, f"__{name}__", methods[0])
        setattr(_Number, f"__r{name}__", methods[1])
    for name in ("and", "or", "xor", "lshift", "rshift"):
        methods = bitwise(getattr(operator, f"__{name}__"))
        setattr(_Number, f"__{name}__", methods[0])
        setattr(_Number, f"__r{name}__", methods[1])
    for name in ("neg", "pos", "abs", "floor", "ceil", "trunc", "sym_float"):
        setattr(_Number, f"__{name}__", unary(name))
    for name in ("sym_min", "sym_max"):
        setattr(_Number, f"__{name}__", binary(name, _BINARY[name])[0])
    for name in _MATH:
        setattr(_Number, f"__sym_{name}__", reading(getattr(math, name)))
    for name in _COMPARISONS:
        setattr(_Number, f"__{name}__", comparison(getattr(operator, name)))
    for runtime, kind in ((RuntimeFloat, float), (RuntimeInt, int)):
        for name in _READING:
            if hasattr(kind, name):
                setattr(runtime, name, reading(getattr(kind, name)))


_bind_methods()


def symbolic(
    index: int, value: float | int, read: Callable[[int], None]
) -> RuntimeFloat | RuntimeInt:
    """Returns the symbolic number that stands for a run-time argument.

    Args:
        index: The argument's number.
        value: Its value in this call, which shows its type.
        read: Called with the number of each argument whose value is asked for.
    """
    node = ScalarNode(("argument", index), value, read)
    return RuntimeFloat(node) if type(value) is float else RuntimeInt(node)


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
