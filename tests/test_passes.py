"""Passes: what is folded runs once, and what must not be folded is not."""

import gc
import weakref

import torch
from layouts import PAIR, R, S, check, spread, values

import dtorch
from dtorch.builder import Builder
from dtorch.passes import MAX_VALUE_BYTES, fold_constants
from dtorch.program import Ref, verify
from dtorch.spec import Spec

aten = torch.ops.aten


def _folded(function, *arguments):
    """The program of a call without folding, and the two that it becomes."""
    jitted = dtorch.jit(function)
    jitted(*arguments)
    program = jitted.program(*arguments)
    verify(program)
    return program


def _ops(program):
    return [str(i.op).removeprefix("aten.") for i in program.instructions]


def test_what_depends_on_no_argument_runs_once():
    def function(x):
        return x * torch.arange(4.0).cos() + torch.arange(4.0).cos()

    x = spread(values((2, 4)), PAIR, [S(1)])
    program = _folded(function, x)
    assert _ops(program) == ["mul.Tensor", "add.Tensor"]
    assert len(program.inputs) == 2
    jitted = dtorch.jit(function)
    for _ in range(3):
        check(jitted(x), function(values((2, 4))))


def test_the_two_programs_make_up_the_whole():
    x = values((3,))
    builder = Builder(lambda: None)
    a = builder.add_input(Spec.of(x.shape, x.dtype, PAIR, (R,)))
    device = {"device": torch.device("cpu")}
    (b,) = builder.apply(aten.ones.default, ([3],), device, mesh=PAIR)
    (c,) = builder.apply(aten.exp.default, (Ref(b),), {})
    (d,) = builder.apply(aten.add.Tensor, (Ref(a), Ref(c)), {})
    whole = builder.finish([d, b], "f")
    constants, rest = fold_constants(whole)
    assert constants is None and rest is whole  # what is returned is made by every call
    constants, rest = fold_constants(builder.finish([d], "f"))
    verify(constants)
    verify(rest)
    assert (constants.inputs, constants.outputs) == ((), (c,))
    assert (rest.inputs, rest.outputs) == ((a, c), (d,))
    assert constants.name == "constants of f"


def test_returned_constants_are_new_each_time():
    jitted = dtorch.jit(lambda x: (x + 1, torch.zeros(3)))
    x = dtorch.ones(3)
    first, second = jitted(x)[1], jitted(x)[1]
    first.add_(5)
    assert second.tolist() == [0, 0, 0] and jitted(x)[1].tolist() == [0, 0, 0]


def test_a_constant_that_is_written_to_stays_constant():
    def function(x):
        mask = torch.zeros(4)
        mask[1] = 2
        mask += x
        return mask * 1

    jitted = dtorch.jit(function)
    x = dtorch.ones(4)
    for _ in range(3):
        assert jitted(x).tolist() == [1, 3, 1, 1]


def test_random_values_and_run_time_scalars_are_not_constant():
    def function(x, s):
        return x + torch.rand(3) + torch.full((3,), s)

    jitted = dtorch.jit(function)
    x = dtorch.zeros(3)
    for s in (1.0, 2.0):
        torch.manual_seed(3)
        found = jitted(x, s)
        torch.manual_seed(3)
        assert torch.equal(found.to_torch(), torch.rand(3) + s)
    assert not torch.equal(jitted(x, 1.0).to_torch(), jitted(x, 1.0).to_torch())


def test_large_constants_are_made_by_every_call():
    numel = MAX_VALUE_BYTES // 4
    small = _folded(lambda x: x + torch.ones(numel), dtorch.ones(numel))
    large = _folded(lambda x: x + torch.ones(numel + 1), dtorch.ones(numel + 1))
    assert _ops(small) == ["add.Tensor"] and _ops(large) == ["ones.default", "add.Tensor"]
    many = _folded(
        lambda x: sum((x * torch.full((numel,), float(i)) for i in range(40)), x),
        dtorch.ones(numel),
    )
    assert _ops(many).count("full.default") == 40 - 16


def test_folded_values_go_with_the_program():
    def make():
        jitted = dtorch.jit(lambda x: x + torch.arange(3.0))
        jitted(dtorch.ones(3))
        (entry,) = [e for e in jitted._traced.cache._entries.values() if hasattr(e, "sources")]
        return weakref.ref(entry.sources[-1].item)

    constant = make()
    gc.collect()
    assert constant() is None


def test_gradients_through_constants():
    def loss(x):
        return (x * torch.arange(4.0).exp()).square().sum()

    x = values((4,))
    expected = torch.func.grad(loss)(x)
    placed = spread(x, PAIR, [S(0)])
    for jitted in (dtorch.jit(dtorch.grad(loss)), dtorch.grad(dtorch.jit(loss))):
        for _ in range(2):
            torch.testing.assert_close(jitted(placed).to_torch(), expected)
