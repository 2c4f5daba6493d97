"""A sharded form takes the dtypes that PyTorch's kernel takes, and no others."""

import pytest
import torch
from layouts import PAIR, S, spread

import dtorch
from dtorch.sharded_forms.registry import _FORMS

aten = torch.ops.aten
DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
MODULES = ("losses", "normalization", "reduction", "scan", "softmax")
X = torch.tensor([[1, 2, 0, 3], [2, 1, 4, 0], [0, 3, 1, 2], [3, 0, 2, 5]])
CLASSES = torch.tensor([2, 0, 3, 1])
# Each takes the tensor and a second dtype, that of what is not the first argument.
CALLS = {
    aten._softmax.default: lambda x, _: aten._softmax(x, 0, False),
    aten._log_softmax.default: lambda x, _: aten._log_softmax(x, 0, False),
    aten.softmax.int: lambda x, d: aten.softmax(x, 0, d),
    aten.log_softmax.int: lambda x, d: aten.log_softmax(x, 0, d),
    aten._safe_softmax.default: lambda x, d: aten._safe_softmax(x, 0, d),
    aten._softmax_backward_data.default: lambda x, d: aten._softmax_backward_data(
        x, x.to(d), 0, x.dtype
    ),
    aten._log_softmax_backward_data.default: lambda x, d: aten._log_softmax_backward_data(
        x, x.to(d), 0, x.dtype
    ),
    aten.logsumexp.default: lambda x, _: aten.logsumexp(x, [0]),
    aten.sum.dim_IntList: lambda x, d: aten.sum(x, [0], dtype=d),
    aten.sum.default: lambda x, d: aten.sum(x, dtype=d),
    aten.mean.dim: lambda x, d: aten.mean(x, [0], dtype=d),
    aten.mean.default: lambda x, _: aten.mean(x),
    aten.var_mean.correction: lambda x, _: aten.var_mean(x, [0]),
    aten.var.correction: lambda x, _: aten.var(x, [0]),
    aten.std_mean.correction: lambda x, _: aten.std_mean(x, [0]),
    aten.std.correction: lambda x, _: aten.std(x, [0]),
    aten.linalg_vector_norm.default: lambda x, d: aten.linalg_vector_norm(x, 3, [0], dtype=d),
    aten.dist.default: lambda x, d: aten.dist(x, x.to(d).flip(0), 1),
    aten.nansum.default: lambda x, d: aten.nansum(x, [0], dtype=d),
    aten.count_nonzero.dim_IntList: lambda x, _: aten.count_nonzero(x, [0]),
    aten.count_nonzero.default: lambda x, _: aten.count_nonzero(x),
    aten.trace.default: lambda x, _: aten.trace(x),
    aten.max.dim: lambda x, _: aten.max(x, 0),
    aten.min.dim: lambda x, _: aten.min(x, 0),
    aten.max.default: lambda x, _: aten.max(x),
    aten.min.default: lambda x, _: aten.min(x),
    aten.aminmax.default: lambda x, _: aten.aminmax(x, dim=0),
    aten.argmax.default: lambda x, _: aten.argmax(x, 0),
    aten.argmin.default: lambda x, _: aten.argmin(x),
    aten.cumsum.default: lambda x, d: aten.cumsum(x, 0, dtype=d),
    aten.cumprod.default: lambda x, d: aten.cumprod(x, 0, dtype=d),
    aten.logcumsumexp.default: lambda x, _: aten.logcumsumexp(x, 0),
    aten.prod.dim_int: lambda x, d: aten.prod(x, 0, dtype=d),
    aten.prod.default: lambda x, d: aten.prod(x, dtype=d),
    aten.topk.default: lambda x, _: aten.topk(x, 1, 0),
    aten.native_layer_norm.default: lambda x, d: aten.native_layer_norm(
        x, [4, 4], x.to(d), x.to(d), 1e-5
    ),
    aten.layer_norm.default: lambda x, d: aten.layer_norm(x, [4, 4], x.to(d), x.to(d)),
    aten.rms_norm.default: lambda x, d: aten.rms_norm(x, [4, 4], x.to(d)),
    aten.native_group_norm.default: lambda x, d: aten.native_group_norm(
        x.view(1, 4, 4), row(x, d), row(x, d), 1, 4, 4, 1, 1e-5
    ),
    aten._native_batch_norm_legit.no_stats: lambda x, d: aten._native_batch_norm_legit(
        x, row(x, d), row(x, d), True, 0.1, 1e-5
    ),
    aten.native_batch_norm.default: lambda x, d: aten.native_batch_norm(
        x, row(x, d), row(x, d), None, None, True, 0.1, 1e-5
    ),
    aten._native_batch_norm_legit_functional.default: (
        lambda x, d: aten._native_batch_norm_legit_functional(
            x, row(x, d), row(x, d), row(x, d), row(x, d), True, 0.1, 1e-5
        )
    ),
    aten.nll_loss_forward.default: lambda x, d: aten.nll_loss_forward(
        x.t(), classes(x).to(d), None, 1, -100
    ),
    aten.mse_loss.default: lambda x, d: aten.mse_loss(x, x.to(d).flip(0)),
    aten.smooth_l1_loss.default: lambda x, d: aten.smooth_l1_loss(x, x.to(d).flip(0)),
    aten.huber_loss.default: lambda x, d: aten.huber_loss(x, x.to(d).flip(0)),
    aten.soft_margin_loss.default: lambda x, d: aten.soft_margin_loss(x, x.to(d).flip(0)),
    aten.binary_cross_entropy.default: lambda x, d: aten.binary_cross_entropy(
        x.clamp(0, 1), x.to(d).clamp(0, 1)
    ),
    aten.binary_cross_entropy_with_logits.default: lambda x, d: (
        aten.binary_cross_entropy_with_logits(x, x.to(d))
    ),
    aten.multi_margin_loss.default: lambda x, d: aten.multi_margin_loss(
        x.t(), classes(x).to(d)
    ),
}  # fmt: skip

HALF, WHOLE = {torch.float16, torch.bfloat16}, {torch.uint8, torch.int32, torch.int64}
# Of each, what the kernel of torch 2.11 does not take yet, and the same by what it does take.
NEWER = {
    aten.trace.default: (lambda d, _: d in HALF, lambda x, _: x.diagonal().sum()),
    aten.nansum.default: (
        lambda d, to: to in WHOLE and not d.is_complex,
        lambda x, d: aten.sum(x, [0], dtype=d),
    ),
}


def row(x, dtype):
    return x.select(0, 1).clone().to(dtype)


def classes(x):
    where = {} if not isinstance(x, dtorch.Tensor) else {"device_mesh": x.device_mesh}
    return dtorch.Tensor(CLASSES, **where) if where else CLASSES.clone()


def outcome(call, x, dtype):
    try:
        result = call(x, dtype)
        results = result if isinstance(result, tuple) else (result,)
        return [r.to_torch() if isinstance(r, dtorch.Tensor) else r for r in results]
    except Exception as error:
        return error


def test_each_form_has_a_call_here():
    forms = {op for op, f in _FORMS.items() if f.__module__.rsplit(".", 1)[-1] in MODULES}
    apart = ("backward", "2d", "cudnn")  # the last has no kernel on the CPU
    assert {op for op in forms if not any(word in str(op) for word in apart)} <= set(CALLS)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # given once in a process
@pytest.mark.parametrize("op", CALLS, ids=str)
def test_raises_or_equals_as_torch(op):
    differing = []
    for dtype in DTYPES:
        others = {dtype, torch.int64, torch.int32, torch.float32, torch.float64, torch.uint8}
        for other in sorted(others, key=str):
            expected = outcome(CALLS[op], X.to(dtype), other)
            if op in NEWER and isinstance(expected, NotImplementedError):
                is_newer, same = NEWER[op]
                expected = outcome(same, X.to(dtype), other) if is_newer(dtype, other) else expected
            got = outcome(CALLS[op], spread(X.to(dtype), PAIR, [S(0)]), other)
            if not _agree(got, expected):
                differing.append((dtype, other, got, expected))
    assert not differing, "\n".join(map(str, differing))


def _agree(got, expected):
    if isinstance(expected, BaseException):
        return type(got) is type(expected)
    if isinstance(got, BaseException):  # the kernel is not what its own meta kernel says
        return "shape inference says" in str(got)
    for a, b in zip(got, expected, strict=True):
        eps = torch.finfo(b.dtype).eps if b.is_floating_point() or b.is_complex() else 0
        same = {"rtol": 8 * eps, "atol": 16 * eps, "equal_nan": True}
        if a.dtype != b.dtype or not torch.allclose(a, b, **same):
            return False
    return True
