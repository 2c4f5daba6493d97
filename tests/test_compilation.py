"""jit(compile=True) computes what jit computes, and with fewer instructions.

Inductor takes seconds for each stretch, so that a test compiles one or two.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import dtorch
from dtorch import Shard, Tensor, compilation, inductor
from dtorch.compilation import compile_stretches
from dtorch.lowering import LocalCall, LocalProgram, LocalShow, lower
from dtorch.runtime.stretches import Layout, run_compiled

MESH = dtorch.DeviceMesh("cpu", [0, 1])


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No stretch has been compiled before, in this process or another."""
    monkeypatch.setattr(compilation, "_known", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The stretches of programs that are only planned: each is its own number."""
    stretches: list[Any] = []

    def numbered(parts: Any) -> dict[str, int]:
        stretches.extend(s for part in parts for s in part.stretches)
        return {s.key: i for i, s in enumerate(stretches)}

    monkeypatch.setattr(compilation, "_numbered", lambda parts: numbered(list(parts)))
    return stretches


def sharded(x: torch.Tensor, dim: int = 0) -> Tensor:
    return dtorch.tensor(x).redistribute(MESH, [Shard(dim)])


def planned(f: Callable[..., Any], *args: Any) -> LocalProgram:
    program = dtorch.jit(f).program(*args)
    return compile_stretches(lower(program), program)


def instructions(program: LocalProgram) -> list[str]:
    """The names of the instructions."""
    found = [i for i in program.instructions if not isinstance(i, LocalShow)]
    return [
        i.op._schema.name.split("::")[1] if isinstance(i, LocalCall) else i.step.kind.value
        for i in found
    ]


def compiled_calls(jitted: Any, *args: Any) -> int:
    """How many stretches a call runs."""
    _, treespec, arguments = jitted._prepare(args, {})
    entry, _ = jitted._entry("plain", arguments, treespec)
    return instructions(entry.executable.program).count("run_compiled")


def check(f: Callable[..., Any], *args: Any, stretches: int = 1) -> None:
    """Compares values, dtypes, and each device's shapes and strides with those of plain jit."""
    jitted = dtorch.jit(f, compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = optree.tree_leaves(jitted(*args))
    assert compiled_calls(jitted, *args) == stretches
    for ours, theirs in zip(found, optree.tree_leaves(dtorch.jit(f)(*args)), strict=True):
        exact = not ours.dtype.is_floating_point
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(ours.to_torch(), theirs.to_torch(), **tolerance)
        for index in range(len(ours._shards)):
            assert layout(ours, index) == layout(theirs, index)


def layout(x: Tensor, index: int) -> Any:
    """A part's layout: of a dim of one element or of none the stride says nothing."""
    part = x._shards.get(index)
    steps = zip(part.shape, part.stride(), strict=True)
    return part.dtype, part.shape, [s for n, s in steps if n > 1 and part.numel()]


# -- what is computed ------------------------------------------------------------------------


@pytest.mark.once
def test_a_chain_with_views_integers_and_scalars() -> None:
    def f(x: torch.Tensor, s: float) -> Any:
        whole = (x * s + 1).relu()
        return whole.T[1:] * 2, whole.sum(0), (x.abs() * 10).long() + 3, x > s, x.T, x.clone()

    x = dtorch.tensor(torch.randn(5, 6))
    check(f, x, 0.5)
    jitted = dtorch.jit(f, compile=True)
    for s in (0.5, -2.0):  # the same code
        torch.testing.assert_close(jitted(x, s)[0].to_torch(), f(x.to_torch(), s)[0])
    assert jitted.cache_info().misses == 1


def wave(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * 2).exp() - x


@pytest.mark.once
def test_results_stay_as_they_are_when_it_runs_again() -> None:
    function = dtorch.jit(lambda x: ((x * 2 + 1).relu() * x, x.exp() + x), compile=True)
    inputs = [torch.randn(5, 5) for _ in range(5)]
    results = [function(dtorch.Tensor(x, device_mesh=MESH)) for x in inputs]
    for x, (first, second) in zip(inputs, results, strict=True):
        torch.testing.assert_close(first.to_torch(), (x * 2 + 1).relu() * x)
        torch.testing.assert_close(second.to_torch(), x.exp() + x)


@pytest.mark.once
def test_uneven_shards() -> None:
    check(wave, sharded(torch.randn(5, 5)))


def test_a_part_that_is_laid_out_otherwise_is_copied() -> None:
    part = torch.randn(5, 3).T
    (found,) = run_compiled(wave_code(), [part], [])
    torch.testing.assert_close(found, wave(part))
    assert found.is_contiguous()


def wave_code() -> int:
    """The number of the code for a part of 3 x 5."""
    program = dtorch.jit(wave).program(sharded(torch.ones(5, 5)))
    (call,) = compile_stretches(lower(program), program).instructions
    assert isinstance(call, LocalCall)
    return call.args[0][0]


def test_a_training_step_with_mutation() -> None:
    def step(w: torch.Tensor, x: torch.Tensor, rate: float) -> torch.Tensor:
        loss, grad = dtorch.value_and_grad(lambda w: torch.tanh(x * w + 1).pow(2).mean())(w)
        w.sub_(grad * rate)
        return loss

    first, x = torch.randn(4, 4), torch.randn(4, 4)
    ours, theirs = dtorch.tensor(first), dtorch.tensor(first)
    jitted, plain = dtorch.jit(step, compile=True), dtorch.jit(step)
    for rate in (0.1, 0.3):
        loss, expected = jitted(ours, x, rate), plain(theirs, x, rate)
        torch.testing.assert_close(loss.to_torch(), expected.to_torch())
        torch.testing.assert_close(ours.to_torch(), theirs.to_torch())


@pytest.mark.once
def test_gradients_pass_through() -> None:
    w = dtorch.tensor(torch.randn(3, 4)).requires_grad_()
    results = []
    for options in ({}, {"compile": True}):
        # Of these programs, only the backward has enough operations to be compiled.
        jitted = dtorch.jit(torch.sin, **options)
        for cotangent in (dtorch.tensor(2.0).expand(3, 4), dtorch.full((3, 4), 2.0)):
            jitted(w).backward(cotangent)
            assert w.grad is not None
            results.append(w.grad.to_torch())
            w.grad = None
    for result in results[1:]:
        torch.testing.assert_close(results[0], result)


@pytest.mark.once
def test_one_row_of_a_linear_layer_and_attention() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        query = torch.nn.functional.linear(x, w).view(1, 1, 4, 8).transpose(1, 2)
        result = torch.nn.functional.scaled_dot_product_attention(
            query, key, key + 1, enable_gqa=True
        )
        return result * 2

    check(f, *(dtorch.tensor(torch.randn(s)) for s in ((1, 1, 16), (32, 16), (1, 2, 5, 8))))


# -- what goes wrong -------------------------------------------------------------------------


def test_a_failure_names_the_operations_and_the_line() -> None:
    def f(x: torch.Tensor, size: int) -> torch.Tensor:
        return (x + 1).expand(size) * 2 - 1

    jitted = dtorch.jit(f, compile=True)
    one = dtorch.ones(1)
    assert jitted(one, 3).tolist() == [3, 3, 3]
    with pytest.raises(dtorch.errors.WorkerError, match="compiled as one") as raised:
        jitted(one, 2**50).to_torch()
    for part in ("aten.add.Tensor", "aten.mul.Tensor", "test_compilation.py", "RuntimeError"):
        assert part in str(raised.value)
    assert jitted(one, 3).tolist() == [3, 3, 3]


DIVISIONS = {
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "remainder of a number": lambda x, y: torch.remainder(5, y),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_a_division_of_integers_by_zero_raises(name: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return DIVISIONS[name](x + 1, y * 2) - 1

    jitted, plain = dtorch.jit(f, compile=True), torch.ones(3, dtype=torch.int64)
    ones = dtorch.tensor(plain)
    assert torch.equal(jitted(ones, ones).to_torch(), f(plain, plain))
    with pytest.raises(dtorch.errors.WorkerError, match="ZeroDivision"):
        jitted(ones, ones * 0).to_torch()


@pytest.mark.usefixtures("fresh")
def test_what_inductor_refuses_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(stretch: Any) -> None:
        raise NotImplementedError("not this\nnor that")

    monkeypatch.setattr(inductor, "build", refuse)
    x = dtorch.ones(3)
    with pytest.warns(UserWarning, match="1 of 1 stretches .* NotImplementedError: not this$"):
        assert dtorch.jit(lambda x: x * 2 + 1, compile=True)(x).tolist() == [3, 3, 3]
    assert "dtorch: compiling 1 of 1 stretches" in capfd.readouterr().err


@pytest.mark.usefixtures("fresh")
def test_ctrl_c_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(stretch: Any) -> None:
        raise KeyboardInterrupt

    x = dtorch.ones(3)
    jitted = dtorch.jit(lambda x: x * 2 + 1, compile=True)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt, match=r"^$"):
        patched.setattr(inductor, "build", interrupt)
        jitted(x)
    assert dtorch.jit(lambda x: x + 1)(x).tolist() == [2, 2, 2]


def test_a_part_of_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)compiled code for .* met .* Fix: "):
        run_compiled(wave_code(), [torch.ones(9, 1)], [])


# -- what is compiled ------------------------------------------------------------------------


def test_communication_ends_a_stretch_and_equal_ones_are_one(built: list[Any]) -> None:
    def layer(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(x @ w) @ v

    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return layer(layer(layer(x, w, v), w, v), w, v).redistribute(MESH, [dtorch.Replicate()])

    x = dtorch.tensor(torch.randn(3, 4)).redistribute(MESH, [dtorch.Replicate()])
    program = planned(f, x, sharded(torch.randn(4, 6), 1), sharded(torch.randn(6, 4), 0))
    each = ["to_partial", "run_compiled", "all_reduce"]
    assert instructions(program) == each * 3
    assert len({s.key for s in built}) == 1


def test_what_may_fail_by_its_indices_or_draws_stays_apart(built: list[Any]) -> None:
    def f(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        x = (x + 1) * 2
        x = torch.nn.functional.embedding(i, x)
        x = x.sin().cos()
        x = torch.nn.functional.dropout(x, 0.5)
        return x.exp() + 1

    names = instructions(planned(f, dtorch.ones(4, 4), dtorch.zeros(2, dtype=torch.int64)))
    assert names[:4] == ["run_compiled", "embedding", "run_compiled", "bernoulli"]
    assert names[-1] == "run_compiled"


def test_a_single_operation_or_views_are_not_compiled(built: list[Any]) -> None:
    program = planned(lambda x: (x.T.unsqueeze(0) + 1).squeeze(0), dtorch.ones(2, 3))
    assert "run_compiled" not in instructions(program)
    assert not built


def test_scalars_whose_dtype_would_count_stay_apart(built: list[Any]) -> None:
    def f(n: torch.Tensor, s: float) -> torch.Tensor:
        return ((n + 1) * 2) * s  # integers and a float: float32, not float64

    names = instructions(planned(f, dtorch.ones(3, dtype=torch.int64), 0.5))
    assert names == ["run_compiled", "mul"]


def test_powers_of_bools_are_left_to_the_kernel(built: list[Any]) -> None:
    """Inductor computes floats there, and writes them where integers belong."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return (2**x + 1) * 3

    names = instructions(planned(f, dtorch.ones(3, dtype=torch.bool)))
    assert names == ["pow", "run_compiled"]


def test_a_long_stretch_is_cut_where_it_repeats_itself(
    built: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "LONGEST", 30)
    monkeypatch.setattr(compilation, "PIECE", 8)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.sin().cos() - 1
        for _ in range(20):
            x = (x * y).relu() + y
        return x.exp() * 3

    program = planned(f, dtorch.ones(3), dtorch.ones(3))
    sizes = [len(s.operations) for s in built]
    assert sizes[0] == 3
    assert sizes[1:7] == [9] * 6
    assert len({s.key for s in built[1:7]}) == 1
    assert sum(sizes) == 65
    assert set(instructions(program)) == {"run_compiled"}


def test_the_number_of_threads_belongs_to_the_key(built: list[Any]) -> None:
    jitted = dtorch.jit(lambda x: x * 2 + 1, compile=True)
    x, before = dtorch.ones(3), torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            jitted.program(x)
    finally:
        torch.set_num_threads(before)
    assert [s.num_threads for s in built] == [1, 3]


def test_layouts_that_overlap() -> None:
    assert Layout((2, 3), (0, 1), torch.float32).overlaps
    assert not Layout((1, 3), (0, 1), torch.float32).overlaps
