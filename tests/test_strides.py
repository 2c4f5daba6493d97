"""How results lie in memory: as in PyTorch, and never to the harm of a value.

Kernels choose strides by those of their operands. The parts of a tensor may have others than the
whole, so what takes the order of strides for granted has to be given it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layouts import PAIR, SUM, TRIPLE, R, S, sample, spread, values

import dtorch

ONE = dtorch.DeviceMesh("cpu", [0])
WEIGHT, SCALE, SHIFT = values((8, 8, 3, 3)), values((8,)), values((8,)) + 1
POINTS = torch.linspace(-1, 1, 64).reshape(2, 4, 4, 2)
CALLS: dict[str, Callable[[Any], Any]] = {
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 3),
    "adaptive_avg_pool2d_to_one": lambda x: F.adaptive_avg_pool2d(x, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, SCALE, SHIFT, training=True),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "cat": lambda x: torch.cat([x, x], 1),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "conv2d": lambda x: F.conv2d(x, WEIGHT, SHIFT, padding=1),
    "conv2d_depthwise": lambda x: F.conv2d(x, WEIGHT[:, :1], groups=8),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, WEIGHT, stride=2),
    "glu": lambda x: F.glu(x, 1),
    "grid_sample": lambda x: F.grid_sample(x, POINTS, align_corners=False),
    "group_norm": lambda x: F.group_norm(x, 4, SCALE, SHIFT),
    "group_norm_between": lambda x: F.group_norm(x * 2 + torch.ones(1), 2).transpose(2, 3) + 1,
    "instance_norm": lambda x: F.instance_norm(x, None, None, SCALE, SHIFT),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "mul_of_two_formats": lambda x: x.permute(0, 1, 3, 2) * x,
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "pad_circular": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
    "pad_constant": lambda x: F.pad(x, (1, 1, 1, 1)),
    "pad_reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "pad_replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "roll": lambda x: x.roll(1, 2),
    "softmax": lambda x: x.softmax(1),
}


def with_gradient(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        x = x.detach().requires_grad_()
        y = call(x)
        (grad,) = torch.autograd.grad((y * (y + 1)).sum(), x)
        return y.detach(), grad

    return run


def channels_last(shape: tuple[int, ...] = (2, 8, 6, 6)) -> torch.Tensor:
    return values(shape).contiguous(memory_format=torch.channels_last)


def placed(x: torch.Tensor, mesh: dtorch.DeviceMesh, placement: Any) -> Any:
    """A distributed tensor whose strides, and those of its parts, have the order of a tensor's."""
    order = sorted(range(x.ndim), key=x.stride, reverse=True)
    inverse = [order.index(d) for d in range(x.ndim)]
    if placement.is_shard():
        placement = S(order.index(placement.dim))
    found = spread(x.permute(order), mesh, [placement]).permute(inverse)
    assert found.stride() == x.stride()
    return found


@pytest.mark.parametrize("name", sample(list(CALLS), len(CALLS), 0))
def test_channels_last(name: str) -> None:
    """On one device, result and gradient have the bits and strides of PyTorch's."""
    run, x = with_gradient(CALLS[name]), channels_last()
    expected = run(x)
    for wrap in (lambda f: f, dtorch.jit):
        found = wrap(run)(placed(x, ONE, R))
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.to_torch(), theirs)
            assert ours.stride() == theirs.stride()
        for mesh in (PAIR, TRIPLE):
            for placement in (R, S(0), S(1), S(2), SUM):
                found = wrap(run)(placed(x, mesh, placement))
                for ours, theirs in zip(found, expected, strict=True):
                    torch.testing.assert_close(ours.to_torch(), theirs, rtol=1e-4, atol=1e-4)
                    assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ndim", [4, 5])
def test_convolutions_in_any_memory_format(ndim: int, transposed: bool, dtype: Any) -> None:
    spatial = (3,) * (ndim - 2)
    last = torch.channels_last if ndim == 4 else torch.channels_last_3d
    names = ("conv_transpose", "conv") if transposed else ("conv", "conv_transpose")
    convolve = getattr(F, f"{names[0]}{ndim - 2}d")
    for channels, x_format, w_format in (
        (4, last, torch.contiguous_format),
        (4, torch.contiguous_format, last),
        (1, last, last),
    ):
        x = values((2, channels, *spatial)).to(dtype).contiguous(memory_format=x_format)
        shape = (channels, 4) if transposed else (4, channels)
        w = values((*shape, *spatial)).to(dtype).contiguous(memory_format=w_format)

        def run(x: Any, w: Any) -> Any:
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            y = convolve(x, w, padding=1)
            return y.detach(), *torch.autograd.grad(y.square().sum(), (x, w))

        expected = run(x, w)
        found = dtorch.jit(run)(placed(x, ONE, R), placed(w, ONE, R))
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.to_torch(), theirs) and ours.stride() == theirs.stride()
        for placements in ((S(0), R), (S(1), S(0 if transposed else 1)), (R, S(transposed))):
            pair = (placed(t, PAIR, p) for t, p in zip((x, w), placements, strict=True))
            ours = F.group_norm(dtorch.jit(run)(*pair)[0], 2)
            torch.testing.assert_close(
                ours.to_torch(), F.group_norm(expected[0], 2), rtol=2e-2, atol=2e-2
            )


def test_a_determinant_of_parts_that_lie_otherwise() -> None:
    """The factorisation is of the transposed matrix or not, which the gradient has to know."""
    a = values((3, 4, 4)) + 3 * torch.eye(4)

    def run(a: Any) -> Any:
        a = a.detach().requires_grad_()
        # The sum of both orders has the first one's, of which the parts know nothing.
        b = a.sum(0, keepdim=True).expand(3, 4, 4) + a.mT.contiguous().mT
        return torch.autograd.grad((torch.linalg.det(b) + torch.linalg.slogdet(b)[1]).sum(), a)[0]

    expected = run(a)
    for placement in (R, S(0), S(1), S(2), SUM):
        for wrap in (lambda f: f, dtorch.jit):
            found = wrap(run)(placed(a, PAIR, placement))
            torch.testing.assert_close(found.to_torch(), expected, rtol=1e-3, atol=1e-3)


def test_strides_that_differ_for_dims_of_one_element_are_taken_over() -> None:
    for placement in (R, S(0), S(1)):
        x = spread(values((2, 8, 1, 1)), PAIR, [placement])
        x.as_strided_((2, 8, 1, 1), (8, 1, 8, 8))
        assert (x.stride(), x.placements) == ((8, 1, 8, 8), [placement])
        assert torch.equal(x.to_torch(), values((2, 8, 1, 1)))
    y = spread(values((3, 4)), PAIR, [S(0)])
    y.as_strided_((2, 2), (1, 4))
    assert torch.equal(y.to_torch(), values((3, 4)).as_strided((2, 2), (1, 4)))


WITH_A_DIM_OF_ONE = [
    ((1, 64, 8, 8), (64, 1, 512, 64)),  # as of a transposed view
    ((2, 1, 3, 3), (9, 1, 3, 1)),
    ((1, 3, 1, 5), (3, 1, 15, 3)),
    ((4, 1, 1), (1, 4, 4)),
    ((6, 1), (1, 6)),
    ((5, 4, 1), (1, 5, 1)),
]
ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "neg": torch.neg,
    "add_scalar": lambda x: x + 1,
    "div_scalar": lambda x: x / 2,
    "eq_scalar": lambda x: x == 1,
    "pow_scalar": lambda x: x**2,
    "add_contiguous": lambda x: x + torch.ones(x.shape),
    "add_row": lambda x: x + torch.ones(x.shape[-1]),
    "add_itself": lambda x: x + x,
    "where": lambda x: torch.where(torch.ones(x.shape, dtype=torch.bool), x, 2.0),
    "addcmul": lambda x: torch.addcmul(x, x, torch.ones(x.shape)),
    "lerp": lambda x: torch.lerp(x, torch.ones(x.shape), 0.5),
    "half": lambda x: x.half() + 1,
}


@pytest.mark.parametrize(("shape", "stride"), WITH_A_DIM_OF_ONE)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_strides_of_dims_of_one(name: str, shape: Any, stride: Any) -> None:
    x = torch.empty_strided(shape, stride).fill_(3)
    expected = ELEMENTWISE[name](x)
    for call in (ELEMENTWISE[name], dtorch.jit(ELEMENTWISE[name])):
        found = call(dtorch.Tensor(x, device_mesh=ONE, placements=[R]))
        assert found.stride() == expected.stride()
        assert torch.equal(found.to_torch(), expected)


def test_group_norm_of_what_only_nearly_is_channels_last() -> None:
    def call(x: Any, y: Any) -> Any:
        return F.group_norm((x.mT.reshape(1, 8, 4, 4) + y) / 1, 4)

    x, y = values((1, 16, 8)), values((1, 8, 4, 4))
    for mesh, layout in ((ONE, [R]), (PAIR, [S(1)]), (TRIPLE, [S(2)])):
        found = dtorch.jit(call)(spread(x, mesh, layout), spread(y, mesh, layout))
        torch.testing.assert_close(found.to_torch(), call(x, y))
