"""Inference: what a meta kernel says, and that it is remembered only where that is right."""

import contextlib

import pytest
import torch
from layouts import PAIR, R, S
from torch.nn.attention import SDPBackend, sdpa_kernel

import dtorch
from dtorch import infer as module
from dtorch.infer import infer, question, settings
from dtorch.program import Ref, ScalarRef
from dtorch.spec import Spec

aten = torch.ops.aten
X = Spec.of((4, 2), torch.float32, PAIR, (R,))


def _num_asked(function):
    """How often a meta kernel was asked while a function ran, not counting what was known."""
    before = module._remembered.cache_info().misses
    function()
    return module._remembered.cache_info().misses - before


def test_results_have_strides_and_offsets():
    (first, second) = infer(aten.split.Tensor, (X, 1, 1), {})
    assert (first.shape, first.stride, first.offset) == ((4, 1), (2, 1), 0)
    assert (second.shape, second.stride, second.offset) == ((4, 1), (2, 1), 1)


def test_the_same_question_is_asked_once():
    args = (X, Spec.of((2,), torch.float64, PAIR, (R,)))
    assert _num_asked(lambda: infer(aten.hypot.default, args, {})) == 1
    assert _num_asked(lambda: infer(aten.hypot.default, args, {})) == 0


@pytest.mark.parametrize(
    "values", [(1, 1.0, True), (0.0, -0.0), (0j, complex(0.0, -0.0), complex(-0.0, 0.0), 0.0, 0)]
)
def test_numbers_that_are_equal_are_not_the_same(values):
    asked = {question(aten.mul.Scalar, (X, v), {}) for v in values}
    assert len(asked) == len(values)
    nested = {question(aten.mul.Scalar, (X, [v]), {}) for v in values}
    assert len(nested) == len(values)


def test_lists_keep_their_bounds():
    asked = [([1, 2], [3]), ([1], [2, 3]), ([1, 2, 3],), (1, 2, 3), ([], [1, 2, 3])]
    assert len({question(aten.mul.Scalar, args, {}) for args in asked}) == len(asked)


def test_positional_and_keyword_arguments_differ():
    asked = [
        question(aten.mul.Scalar, (X, 2), {}),
        question(aten.mul.Scalar, (X,), {"other": 2}),
        question(aten.mul.Scalar, (X,), {"self": 2}),
    ]
    assert len(set(asked)) == 3


def test_arguments_come_back():
    asked = question(aten.sum.dim_IntList, (X, (0, -0.0), [[1], None]), {"dtype": torch.int8})
    args, kwargs = asked.arguments()
    assert args == [X, [0, -0.0], [[1], None]]
    assert str(args[1][1]) == "-0.0"
    assert kwargs == {"dtype": torch.int8}


def test_references_are_replaced():
    asked = question(aten.mul.Scalar, (Ref(1), ScalarRef(0)), {}, [None, X], [2.5])
    assert asked == question(aten.mul.Scalar, (X, 2.5), {})


def test_the_default_dtype_is_part_of_the_question():
    def dtype():
        return infer(aten.ones.default, ([3],), {}).dtype

    assert dtype() == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert dtype() == torch.float32


@contextlib.contextmanager
def _deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


_REVERSED = [SDPBackend(number) for number in reversed(torch._C._get_sdp_priority_order())]
SETTINGS = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "order": lambda: sdpa_kernel(_REVERSED, set_priority=True),
    "deterministic": _deterministic,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_part_of_the_key(name):
    x = Spec.of((3, 5), torch.float32, PAIR, (S(0),))

    def ask():
        infer(aten.hypot.default, (x, x), {})

    ask()
    assert _num_asked(ask) == 0
    before = settings()
    with SETTINGS[name]():
        assert settings() != before
        assert _num_asked(ask) == 1
    assert settings() == before
    assert _num_asked(ask) == 0


def test_errors_are_not_remembered():
    bad = (X, Spec.of((3,), torch.float32, PAIR, (R,)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match the size of tensor b"):
            infer(aten.add.Tensor, bad, {})


def test_an_operation_of_others_is_asked_every_time():
    sizes = iter([3, 5])

    @torch.library.custom_op("dtorch_test_infer::grown", mutates_args=())
    def grown(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(7)

    @grown.register_fake
    def _(x):
        return x.new_empty(next(sizes))

    op = torch.ops.dtorch_test_infer.grown.default
    assert infer(op, (X,), {}).shape == (3,)
    assert infer(op, (X,), {}).shape == (5,)


def test_a_read_scalar_stays_part_of_the_key():
    """The second trace meets only known questions, and reads the run-time number all the same."""

    def rolled(x, shift):
        return x * shift + torch.full((2,), 1.0, dtype=x.dtype) * int(shift)

    x = dtorch.tensor([[1.0, 2.0]], device_mesh=PAIR)
    for function in (dtorch.jit(rolled), dtorch.jit(lambda x, shift: rolled(x, shift))):
        for shift in (1.0, 2.0, 1.0):
            expected = rolled(torch.tensor([[1.0, 2.0]]), shift)
            assert torch.equal(function(x, shift).to_torch(), expected)
        assert function.cache_info().misses == 2
