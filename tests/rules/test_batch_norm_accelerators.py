"""Batch normalisation by cuDNN, on stand-ins for the CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layouts import PAIR, SQUARE, TRIPLE, R, S, spread

import dtorch
from dtorch.errors import MutationError, PlacementError

aten = torch.ops.aten
ONE = dtorch.DeviceMesh("cpu", [0])
SHAPE = (6, 6, 2, 3)
EPS = 1e-5


def _kernel(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any) -> Any:
    found = aten.native_batch_norm(x, weight, bias, mean, var, training, *rest)
    if not training:
        return *found, x.new_empty(0, dtype=torch.uint8)
    # As many bytes as only the kernel knows, and what they say its backward checks.
    return *found, x.mean((0, 2, 3)).repeat(3).view(torch.uint8)


def _backward(x: Any, grad: Any, weight: Any, *rest: Any) -> Any:
    *statistics, eps, reserve = rest
    assert torch.equal(reserve, x.mean((0, 2, 3)).repeat(3).view(torch.uint8))
    return aten.native_batch_norm_backward(grad, x, weight, *statistics, True, eps, [True] * 3)


@pytest.fixture
def kernels() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("cudnn_batch_norm", _kernel, "CPU")
        library.impl("cudnn_batch_norm_backward", _backward, "CPU")
        yield
        dtorch.synchronize()


def _normed(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool = True) -> Any:
    return aten.cudnn_batch_norm.default(x, weight, bias, mean, var, training, 0.1, EPS)[0]


def _operands() -> list[Any]:
    torch.manual_seed(0)
    channels = SHAPE[1]
    return [torch.randn(SHAPE), torch.rand(channels) + 0.5, torch.randn(channels)]


def _running() -> list[Any]:
    return [torch.randn(SHAPE[1]), torch.rand(SHAPE[1]) + 0.5]


LAYOUTS = [
    (ONE, [R], R),
    (PAIR, [R], R),
    (PAIR, [S(0)], R),
    (PAIR, [S(1)], S(0)),
    (PAIR, [S(2)], R),
    (TRIPLE, [S(1)], R),
    (dtorch.DeviceMesh("cpu", list(range(4))), [S(1)], R),  # uneven, so whole
    (dtorch.DeviceMesh("cpu", list(range(4))), [S(0)], R),  # uneven, one is empty
    (SQUARE, [S(0), S(1)], R),
    (SQUARE, [S(1), S(0)], R),
    (SQUARE, [S(1), R], R),
]


def _spread(mesh: Any, placements: Any, channels: Any, tensors: Any) -> list[Any]:
    x, *vectors = tensors
    along = [channels] * mesh.ndim
    return [spread(x, mesh, placements), *(spread(v, mesh, along) for v in vectors)]


@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("has_running", [False, True])
@pytest.mark.parametrize(("mesh", "placements", "channels"), LAYOUTS, ids=str)
def test_equals_torch_in_training(
    kernels: None, mesh: Any, placements: Any, channels: Any, has_running: bool, is_jitted: bool
) -> None:
    theirs = [t.requires_grad_() for t in _operands()]
    their_running: Any = _running() if has_running else [None, None]
    ours = [t.detach().requires_grad_() for t in _spread(mesh, placements, channels, theirs)]
    running: list[Any] = [
        t if t is None else spread(t, mesh, [channels] * mesh.ndim) for t in their_running
    ]
    call = dtorch.jit(_normed) if is_jitted else _normed
    for _ in range(2):
        expected = F.batch_norm(theirs[0], *their_running, *theirs[1:], True, 0.1, EPS)
        found = call(*ours, *running)
    same = torch.equal if mesh is ONE else _close
    assert same(found.to_torch(), expected.detach())
    for mine, wanted in zip(running, their_running, strict=True):
        assert wanted is None or same(mine.to_torch(), wanted)
    expected.sin().sum().backward()
    found.sin().sum().backward()
    for mine, wanted in zip(ours, theirs, strict=True):
        assert same(mine.grad.to_torch(), wanted.grad)


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    return True


@pytest.mark.parametrize(("mesh", "placements", "channels"), LAYOUTS, ids=str)
def test_equals_torch_in_evaluation(
    kernels: None, mesh: Any, placements: Any, channels: Any
) -> None:
    theirs, running = _operands(), _running()
    ours = _spread(mesh, placements, channels, [*theirs, *running])
    expected = F.batch_norm(theirs[0], *running, *theirs[1:], False, 0.1, EPS)
    for call in (_normed, dtorch.jit(_normed, static_argnums=5)):
        found = call(*ours, False)
        assert torch.equal(found.to_torch(), expected)


def _loss(*args: Any) -> torch.Tensor:
    return _normed(*args).sin().sum()


def test_split_channels_and_split_batches_are_not_gathered(kernels: None) -> None:
    operands = _operands()
    for placement in (S(0), S(1)):
        given = [spread(operands[0], PAIR, [placement])]
        given += [spread(t, PAIR, [S(0) if placement == S(1) else R]) for t in operands[1:]]
        program = dtorch.jit(dtorch.grad(_loss, argnums=0)).program(*given, None, None)
        (gradient,) = program.outputs
        assert program.specs[gradient].placements == (placement,)
        shapes = [program.specs[s.output].shape for s in program.communication()]
        assert placement == S(0) or not shapes
        assert all(len(shape) < 4 or shape[0] == 1 for shape in shapes)
        assert not program.fallbacks()


def test_split_channels_are_not_gathered_in_evaluation(kernels: None) -> None:
    operands = [spread(t, PAIR, [S(0)]) for t in [*_operands()[1:], *_running()]]
    x = spread(_operands()[0], PAIR, [S(1)])
    for call in (
        lambda x, w, b, m, v: _normed(x, w, b, m, v, False),
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b),
    ):
        program = dtorch.jit(call).program(x, *operands)
        assert program.communication() == []
        assert program.specs[program.outputs[0]].placements == (S(1),)


@pytest.mark.parametrize("placement", [R, S(0), S(1)])
@pytest.mark.parametrize("of_gradient", [R, S(0), S(1)])
def test_a_gradient_of_any_layout_meets_what_is_reserved(
    kernels: None, placement: Any, of_gradient: Any
) -> None:
    theirs = [t.requires_grad_() for t in _operands()]
    ours = [t.detach().requires_grad_() for t in _spread(PAIR, [placement], R, theirs)]
    grad = torch.randn(SHAPE)
    F.batch_norm(theirs[0], None, None, *theirs[1:], True, 0.1, EPS).backward(grad)
    _normed(*ours, None, None).backward(spread(grad, PAIR, [of_gradient]), retain_graph=True)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert _close(mine.grad.to_torch(), wanted.grad)


def test_a_backward_by_a_kernel_after_a_forward_by_none_needs_no_reserve(kernels: None) -> None:
    """The bias alone has to move, and the gradient needs no bias."""
    x, weight, bias = (t.requires_grad_() for t in _operands())
    grad = torch.randn(SHAPE)
    F.batch_norm(x, None, None, weight, bias, True, 0.1, EPS).backward(grad)
    mesh = dtorch.DeviceMesh("cpu", list(range(4)))
    ours = [spread(t.detach(), mesh, [p]) for t, p in ((x, R), (weight, R), (bias, S(0)))]

    def gradients(x: Any, weight: Any, bias: Any, grad: Any) -> Any:
        _, *saved, reserve = aten.cudnn_batch_norm(x, weight, bias, None, None, True, 0.1, EPS)
        return aten.cudnn_batch_norm_backward(x, grad, weight, None, None, *saved, EPS, reserve)

    given = [*ours, spread(grad, mesh, [R])]
    program = str(dtorch.jit(gradients).program(*given))
    assert "cudnn_batch_norm_backward" in program
    assert "dtorch.cudnn_batch_norm" not in program
    for mine, theirs in zip(gradients(*given), (x, weight, bias), strict=True):
        assert _close(mine.to_torch(), theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("placement", [R, S(0), S(1)])
def test_dtypes(kernels: None, dtype: torch.dtype, placement: Any) -> None:
    x, *vectors = _operands()
    others = torch.float64 if dtype == torch.float64 else torch.float32
    theirs = [x.to(dtype), *(t.to(others) for t in (*vectors, *_running()))]
    ours = _spread(PAIR, [placement], R, theirs)
    found = _normed(*ours)
    expected = F.batch_norm(theirs[0], *theirs[3:], *theirs[1:3], True, 0.1, EPS)
    torch.testing.assert_close(found.to_torch(), expected)
    for mine, wanted in zip(ours[3:], theirs[3:], strict=True):
        torch.testing.assert_close(mine.to_torch(), wanted)
    program = dtorch.jit(lambda *operands: operands[0] + _normed(*operands)).program(*ours)
    assert program.specs[program.outputs[0]].dtype == dtype


def test_shared_statistics_are_refused(kernels: None) -> None:
    x, weight, bias = (dtorch.Tensor(t) for t in _operands())
    with pytest.raises(MutationError, match="under another name"):
        _normed(x, weight, bias, weight, bias)


def test_a_split_batch_is_refused_where_communication_is(kernels: None) -> None:
    operands = [spread(t, PAIR, [S(0)]) for t in _operands()]
    with dtorch.strict(), pytest.raises(PlacementError, match="cudnn_batch_norm"):
        _normed(*operands, None, None)
