"""Operations along a split dim: the value is PyTorch's, and no large argument is moved."""

import pytest
import torch
import torch.nn.functional as F
from layouts import OBLONG, PAIR, SQUARE, TRIPLE, S, spread, values

import dtorch
from dtorch.program import Redistribute
from dtorch.redistribution import Collective

X = values((4, 12)) + torch.arange(48.0).view(4, 12) / 1000  # no two alike
TIES = torch.tensor([[1.0, 3, 3, 0, 3, 2], [5, 5, 5, 5, 5, 5], [0, 1, 2, 3, 4, 4]])
CALLS = {
    "softmax": lambda x: x.softmax(-1),
    "softmax_double": lambda x: x.softmax(-1, dtype=torch.float64),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "var": lambda x: x.var(-1),
    "std_mean": lambda x: torch.std_mean(x, -1, correction=0),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "norm_3": lambda x: torch.linalg.vector_norm(x, 3, dim=-1, keepdim=True),
    "norm_inf": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "norm_0": lambda x: torch.linalg.vector_norm(x, 0, dim=-1),
    "dist": lambda x: torch.dist(x, x.flip(0), 1),
    "nansum": lambda x: (x / (x != 0) * 0).nansum(-1),
    "count_nonzero": lambda x: x.count_nonzero(1),
    "max": lambda x: x.max(-1),
    "min": lambda x: x.min(-1, keepdim=True),
    "max_of_all": lambda x: x.max(),
    "aminmax": lambda x: x.aminmax(dim=-1),
    "argmax": lambda x: x.argmax(-1),
    "argmin_of_all": lambda x: x.argmin(),
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: (1 + x / 10).cumprod(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "prod": lambda x: (1 + x / 10).prod(-1),
    "topk": lambda x: x.topk(1, -1),
    "layer_norm": lambda x: F.layer_norm(x, (12,), x[0], x[1]),
    "rms_norm": lambda x: F.rms_norm(x, (12,), x[0]),
    "batch_norm": lambda x: F.batch_norm(x.t(), None, None, training=True),
    "group_norm": lambda x: F.group_norm(x.view(2, 2, 12), 2),
}  # fmt: skip


def large_moves(program, num_bytes):
    """The steps that move tensors of some size."""
    steps = [i.step for i in program.instructions if isinstance(i, Redistribute)]
    return [s for s in steps if not s.kind.is_local and s.source.num_bytes >= num_bytes]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mesh", [PAIR, TRIPLE, SQUARE, OBLONG], ids=repr)
def test_equals_torch_and_moves_nothing_large(name, mesh):
    call = CALLS[name]
    expected = call(X)
    x = spread(X, mesh, [S(1)] * mesh.ndim)
    f = dtorch.jit(call)
    if name != "topk" or len(mesh.devices) < 6:  # whose candidates are then as many as half of it
        assert not large_moves(f.program(x), X.nbytes)
    torch.testing.assert_close(_fetched(f(x)), _fetched(expected), rtol=1e-5, atol=1e-5)


def _fetched(result):
    if isinstance(result, tuple):
        return tuple(map(_fetched, result))
    return result.to_torch() if isinstance(result, dtorch.Tensor) else result


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "rms_norm", "batch_norm",
                                  "logsumexp", "var", "norm", "group_norm"])  # fmt: skip
def test_gradients_equal_torch(name):
    call = CALLS[name]

    def loss(x):
        result = call(x)
        return (result * torch.arange(result.numel()).view(result.shape).sin()).sum()

    expected = torch.func.grad(loss)(X)
    for mesh in (PAIR, TRIPLE, OBLONG):
        x = spread(X, mesh, [S(1)] * mesh.ndim)
        found = dtorch.jit(dtorch.grad(loss))(x)
        assert found.placements == [S(1)] * mesh.ndim
        torch.testing.assert_close(found.to_torch(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "rms_norm", "mean",
                                  "logsumexp", "norm"])  # fmt: skip
def test_half_precision_is_rounded_once(name, dtype):
    x = X.to(dtype)
    found = CALLS[name](spread(x, PAIR, [S(1)]))
    expected = CALLS[name](x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.to_torch(), expected)


@pytest.mark.parametrize("call", [lambda x: x.max(1), lambda x: x.argmax(1), lambda x: x.argmin(),
                                  lambda x: x.min(1), lambda x: x.argmax()])  # fmt: skip
def test_the_first_of_equal_values_is_found(call):
    for mesh in (PAIR, TRIPLE, OBLONG):
        found = _fetched(call(spread(TIES, mesh, [S(1)] * mesh.ndim)))
        torch.testing.assert_close(found, _fetched(call(TIES)))


def test_special_values():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[-inf] * 4, [1, inf, 2, 3], [nan, 1, 2, inf], [-inf, 0, 1, -inf]])
    calls = [
        lambda x: x.softmax(1),
        lambda x: x.log_softmax(1),
        lambda x: x.logsumexp(1),
        lambda x: torch.ops.aten._safe_softmax(x, 1),
        lambda x: x.max(1),
        lambda x: x.argmin(1),
        lambda x: x.cumsum(1),
        lambda x: x.nansum(1),
    ]
    for call in calls:
        found = _fetched(call(spread(x, PAIR, [S(1)])))
        torch.testing.assert_close(found, _fetched(call(x)), equal_nan=True)


def test_empty_tensors_take_the_kernel():
    x = torch.empty(3, 0)
    for call in (lambda x: x.softmax(1), lambda x: x.cumsum(1), lambda x: x.logsumexp(1)):
        torch.testing.assert_close(_fetched(call(spread(x, PAIR, [S(1)]))), call(x))


def test_one_device_runs_the_kernel():
    x = spread(X, dtorch.DeviceMesh("cpu", [0]), [S(1)])
    program = dtorch.jit(lambda x: x.softmax(-1)).program(x)
    assert [str(i.op) for i in program.instructions] == ["aten.softmax.int"]


def test_batch_norm_over_a_split_batch_updates_its_statistics():
    x, mean, var = values((6, 3, 4)), values((3,)), values((3,)).abs()
    expected_mean, expected_var = mean.clone(), var.clone()
    expected = F.batch_norm(x, expected_mean, expected_var, training=True)
    for mesh in (PAIR, SQUARE):
        running = [spread(t, mesh, [dtorch.Replicate()] * mesh.ndim) for t in (mean, var)]
        batch = [S(0)] * mesh.ndim
        found = F.batch_norm(spread(x, mesh, batch), *running, training=True)
        assert found.placements == batch
        torch.testing.assert_close(found.to_torch(), expected)
        torch.testing.assert_close(running[0].to_torch(), expected_mean)
        torch.testing.assert_close(running[1].to_torch(), expected_var)


def test_gathering_of_the_large_is_seen_by_the_test():
    """What has no form is moved: sorting along a split dim."""
    x = spread(X, PAIR, [S(1)])
    program = dtorch.jit(lambda x: x.sort(-1)).program(x)
    (step,) = large_moves(program, X.nbytes)
    assert step.kind in (Collective.ALL_GATHER, Collective.ALL_TO_ALL)


@pytest.mark.parametrize("mesh", [PAIR, TRIPLE, SQUARE], ids=repr)
def test_sums_of_float16_do_not_overflow_in_their_parts(mesh):
    x = torch.tensor([[6e4, 6e4, -5e4, -5e4, 1e3, 1e3]] * 4).half()
    assert torch.isfinite(x.sum(1)).all() and not torch.isfinite(x[:, :2].sum(1)).any()
    split = spread(x, mesh, [S(1)] * mesh.ndim)
    for call in (lambda x: x.sum(1), lambda x: x.t().sum(0, keepdim=True), lambda x: x.sum()):
        assert torch.equal(call(split).to_torch(), call(x))
    rows = spread(x, SQUARE, [S(0), S(1)]).sum(1)
    assert rows.placements == [S(0), dtorch.Replicate()] and torch.equal(rows.to_torch(), x.sum(1))
