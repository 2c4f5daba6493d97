"""Run-time scalars: a traced float or int behaves as Python's, which is the oracle."""

import copy
import fractions
import math
import numbers
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import dtorch
from dtorch.scalars import RuntimeFloat, RuntimeInt, evaluate, node_of, symbolic

VALUES = (2.5, -1.75, 3.0, 0.25)


def runtime(value: float | int) -> tuple[Any, list[int]]:
    reads: list[int] = []
    return symbolic(0, value, reads.append), reads


def outcome(function: Callable[[Any], Any], value: Any) -> Any:
    try:
        return function(value)
    except Exception as error:
        return type(error)


def plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    node = node_of(value)
    return value if node is None else node.value


STAY: dict[str, Callable[[Any], Any]] = {
    "p + 1": lambda p: p + 1, "1 + p": lambda p: 1 + p, "p - 1.5": lambda p: p - 1.5,
    "2 - p": lambda p: 2 - p, "p * True": lambda p: p * True, "3 * p": lambda p: 3 * p,
    "p / 3": lambda p: p / 3, "3 / p": lambda p: 3 / p, "p // 2": lambda p: p // 2,
    "7 // p": lambda p: 7 // p, "p % 2": lambda p: p % 2, "7 % p": lambda p: 7 % p,
    "p ** 2": lambda p: p**2, "p ** -3": lambda p: p**-3, "p ** 2.0": lambda p: p**2.0,
    "0.9 ** p": lambda p: 0.9**p, "-p": lambda p: -p, "+p": lambda p: +p, "abs": abs,
    "divmod": lambda p: divmod(p, 2), "rdivmod": lambda p: divmod(7, p), "floor": math.floor,
    "ceil": math.ceil, "trunc": math.trunc, "real": lambda p: p.real, "imag": lambda p: p.imag,
    "conjugate": lambda p: p.conjugate(), "p * p": lambda p: p * p + p,
    "fraction": lambda p: fractions.Fraction(1, 2) * p,
    "copy": copy.deepcopy, "None": lambda p: (p == None, p != None),  # noqa: E711
    "float": lambda p: isinstance(p, float) and not isinstance(p, int),
    "real number": lambda p: isinstance(p, numbers.Real), "text": lambda p: p == "a",
    "null": lambda p: p / 0, "none + ": lambda p: p + None, "p < None": lambda p: p < None,
}  # fmt: skip
READ: dict[str, Callable[[Any], Any]] = {
    "str": str, "repr": repr, "f": lambda p: f"{p}", ".1f": lambda p: f"{p:.1f}",
    "%": lambda p: "%s %.2f %d" % (p, p, p), "hash": hash, "dict": lambda p: {2.5: 1}.get(p),  # noqa: UP031
    "set": lambda p: p in {2.5}, "in": lambda p: p in (1, 2.5), "bool": bool,
    "not": lambda p: not p,
    "or": lambda p: p or 3.0, "if": lambda p: 1 if p else 2, "round": round,
    "round 2": lambda p: round(p, 1), "is_integer": lambda p: p.is_integer(),
    "hex": lambda p: p.hex(), "ratio": lambda p: p.as_integer_ratio(), "sqrt": math.sqrt,
    "isnan": math.isnan, "isinf": math.isinf, "numpy.sqrt": numpy.sqrt, "float": float, "int": int,
    "numpy.multiply": lambda p: numpy.float32(2) * p, "complex": complex, "<": lambda p: p < 2,
    ">": lambda p: p > 2, "<=": lambda p: p <= 2.5, "==": lambda p: p == 3,
    "sorted": lambda p: sorted([3, p, 1.0]),
    "min": lambda p: min(p, 1), "max": lambda p: max(0, p), "p ** 0.5": lambda p: p**0.5,
    "2 ** p": lambda p: (-2.0) ** p, "+ 1j": lambda p: p + 1j, "1j *": lambda p: 1j * p,
    "array": lambda p: numpy.asarray(p).tolist(), "array *": lambda p: (numpy.ones(2) * p).tolist(),
    "* array": lambda p: (p * numpy.ones(2)).tolist(),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
}  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", [*STAY, *("read " + n for n in READ)])
def test_a_float_behaves_as_pythons(name: str, value: float) -> None:
    reading = name.startswith("read ")
    function = READ[name.removeprefix("read ")] if reading else STAY[name]
    p, reads = runtime(value)
    found, expected = outcome(function, p), outcome(function, value)
    assert repr(plain(found)) == repr(expected)
    assert isinstance(found, type(expected))
    assert bool(reads) == reading, reads


def test_the_type_that_python_and_torch_see() -> None:
    p, reads = runtime(2.5)
    n, _ = runtime(3)
    assert type(p) is RuntimeFloat and isinstance(p, float) and isinstance(p, torch.SymFloat)
    assert type(n) is RuntimeInt and isinstance(n, int) and isinstance(n, torch.SymInt)
    assert not isinstance(p, int) and not isinstance(n, (float, bool))
    for made in (p + 1, 1 / p, -p, abs(p), p**2, 2.0**p, p % 2, p // 2, n / 2, n * p, p - n):
        assert type(made) is RuntimeFloat
    for made in (n + 1, 7 // n, -n, n**2, n % 2, math.floor(p), n * n, n - True):
        assert type(made) is RuntimeInt
    for made in (torch.sym_float(n), torch.sym_max(p, 1.0), torch.sym_min(p, 3)):
        assert type(made) is RuntimeFloat
    assert reads == []
    assert [n & 1, n << 2, 1 << n, ~n, hash(n), range(n)] == [1, 12, 8, -4, 3, range(3)]
    assert [[7, 8, 9, 10][n], n.bit_length(), f"{n:03d}", n == 3, n**-1] == [
        10,
        2,
        "003",
        True,
        1 / 3,
    ]


def test_expressions_are_evaluated_for_the_values_of_a_call() -> None:
    p, _ = runtime(2.5)
    made = (*divmod(3 * p**2 - 0.9**p, 2), math.floor(p / 2), 7 % p)
    for value in (2.5, 4.0, 11.25):
        quotient, rest = divmod(3 * value**2 - 0.9**value, 2)
        expected = (quotient, rest, math.floor(value / 2), 7 % value)
        assert tuple(evaluate(m.node.expression, [value]) for m in made) == expected


# -- in jit --------------------------------------------------------------------------------

TABLE = {"0.5": 1.0, "0.25": 2.0}
BY_VALUE = {0.5: 1.0, 0.25: 2.0}
LOOKUPS: dict[str, Callable[[Any], Any]] = {
    "str": lambda p: TABLE[str(p)],
    "repr": lambda p: TABLE[repr(p)],
    "f": lambda p: TABLE[f"{p}"],
    "format": lambda p: TABLE[f"{p:.2f}".rstrip("0")],
    "dict": lambda p: BY_VALUE[p],
    "set": lambda p: 1.0 if p in {0.5} else 2.0,
    "in": lambda p: 1.0 if p in (0.5, 7) else 2.0,
    "int": lambda p: int(1 / p) / 2,
    "round": lambda p: round(1 / p) / 2,
    "sum": lambda p: str(p + 1) == "1.5",
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_value_that_is_looked_up_is_not_baked_in(name: str) -> None:
    lookup = LOOKUPS[name]
    f = dtorch.jit(lambda x, p: x * lookup(p))
    for p in (0.5, 0.25, 0.5, 0.25):
        assert f(dtorch.ones(2), p).tolist() == [float(lookup(p))] * 2
    assert f.cache_info().misses == 2


def test_isinstance_float_takes_the_branch_of_a_float() -> None:
    f = dtorch.jit(lambda x, p: x * p if isinstance(p, float) else x)
    for p in (2.0, 3.0, -0.5):
        assert f(dtorch.ones(2), p).tolist() == [p] * 2
    assert f.cache_info().misses == 1


def test_a_float_may_be_falsy() -> None:
    f = dtorch.jit(lambda x, p: x * (p or 3.0) if not p else x + p)
    assert f(dtorch.ones(1), 0.0).tolist() == [3.0] and f(dtorch.ones(1), 2.0).tolist() == [3.0]


SCALARS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, p: torch.add(x, x, alpha=p),
    "mul": lambda x, p: p * x / (p + 1) - p**2,
    "pow": lambda x, p: x.abs() ** p + p**x,
    "where": lambda x, p: torch.where(x > p, x, p),
    "compare": lambda x, p: (p < x) | (x == p),
    "clamp": lambda x, p: x.clamp(min=-p, max=p),
    "full": lambda x, p: torch.full((4,), p) + torch.full_like(x, p),
    "fill": lambda x, p: x.clone().fill_(p),
    "lerp": lambda x, p: x.lerp(x + 1, p),
    "masked_fill": lambda x, p: x.masked_fill(x > 0, p),
    "addcmul": lambda x, p: torch.addcmul(x, x, x, value=p % 2),
    "zeros": lambda x, p: (x * 0.0 * p, x * (p * -0.0), x * (p * 0.0)),
}
DOUBLES: dict[str, Callable[[Any, Any], Any]] = {
    "layer_norm": lambda x, p: torch.nn.functional.layer_norm(x, (4,), eps=p),
    "isclose": lambda x, p: torch.isclose(x, x + 1, atol=p),
    "tensor": lambda x, p: x + torch.tensor(p),
    "tensors": lambda x, p: x + torch.tensor([p, 1.0, p + 1, 2]),
    "as_tensor": lambda x, p: x + torch.as_tensor(p),
    "size": lambda x, p: x[: int(p * 2)],
}


@pytest.mark.parametrize("name", [*SCALARS, *DOUBLES])
def test_torch_functions_record_scalars_and_read_doubles(name: str) -> None:
    function = SCALARS.get(name) or DOUBLES[name]
    f = dtorch.jit(function)
    t = torch.tensor([0.5, -1.0, 2.0, 0.25])
    x = dtorch.Tensor(t, device="cpu")
    for p in (0.5, 1.0, 0.75):
        for found, expected in zip(
            torch.utils._pytree.tree_leaves(f(x, p)),
            torch.utils._pytree.tree_leaves(function(t, p)),
            strict=True,
        ):
            torch.testing.assert_close(found.to_torch(), expected)
            assert torch.equal(found.to_torch().signbit(), expected.signbit())
    assert f.cache_info().misses == (1 if name in SCALARS else 3)


def test_ints_in_eager_calls() -> None:
    x = dtorch.Tensor(torch.arange(4), device="cpu")
    for n in (1, 2, 3):
        assert (x * n).tolist() == [i * n for i in range(4)]
        assert (x**n).tolist() == [i**n for i in range(4)]
        assert (n - x).tolist() == [n - i for i in range(4)]
