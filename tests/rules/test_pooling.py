"""Pooling, resampling and padding: batch and channels pass, the spatial dims are whole."""

import pytest
import torch
import torch.nn.functional as F
from layouts import OBLONG, PAIR, S, case, spread, sweep, values

import dtorch

aten = torch.ops.aten
GRID = (values((2, 3, 2, 2)) / 3).clamp(-1, 1)
SAMPLES = torch.rand(2, 3, 2, generator=torch.Generator().manual_seed(1))

CASES = [
    case("avg_pool1d", lambda x: F.avg_pool1d(x, 2), (2, 3, 6)),
    case("avg_pool2d", lambda x: F.avg_pool2d(x, 2, 1, 1), (3, 2, 4, 5)),
    case("avg_pool3d", lambda x: F.avg_pool3d(x, 2), (2, 2, 4, 4, 2)),
    case("max_pool1d", lambda x: F.max_pool1d(x, 2, return_indices=True), (2, 3, 6)),
    case("max_pool2d", lambda x: F.max_pool2d(x, 2, return_indices=True), (3, 2, 4, 4)),
    case("max_pool2d_of_one", lambda x: F.max_pool2d(x, 3, 2, 1), (3, 5, 5)),
    case("max_pool3d", lambda x: F.max_pool3d(x, 2, return_indices=True), (2, 3, 4, 2, 2)),
    case("adaptive_avg", lambda x: F.adaptive_avg_pool2d(x, (2, 3)), (2, 3, 5, 5)),
    case("adaptive_max", lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True), (2, 3, 5, 5)),
    case("max_unpool", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
         (2, 4, 4, 4)),
    case("fractional", lambda x: F.fractional_max_pool2d(x, 2, 2, _random_samples=SAMPLES),
         (2, 3, 4, 4)),
    case("nearest", lambda x: F.interpolate(x, scale_factor=2), (2, 3, 4)),
    case("bilinear", lambda x: F.interpolate(x, size=(5, 6), mode="bilinear"), (2, 3, 4, 4)),
    case("bicubic", lambda x: F.interpolate(x, size=(3, 3), mode="bicubic"), (3, 2, 4, 4)),
    case("trilinear", lambda x: F.interpolate(x, size=(2, 3, 4), mode="trilinear"),
         (2, 2, 3, 3, 3)),
    case("antialias", lambda x: F.interpolate(x, size=(2, 2), mode="bilinear", antialias=True),
         (2, 3, 5, 5)),
    case("pad", lambda x: F.pad(x, (1, 2), value=3.0), (5, 3)),
    case("pad_two", lambda x: F.pad(x, (1, -1, 0, 2)), (2, 3, 4)),
    case("reflect", lambda x: F.pad(x, (1, 1), mode="reflect"), (2, 3, 4)),
    case("replicate", lambda x: F.pad(x, (1, 0, 2, 1), mode="replicate"), (2, 3, 4, 4)),
    case("grid_sample", lambda x: F.grid_sample(x, GRID, align_corners=False), (2, 3, 4, 4)),
    case("unfold", lambda x: F.unfold(x, 2), (3, 2, 4, 4)),
    case("fold", lambda x: F.fold(x, (4, 4), 2, stride=2), (3, 8, 4)),
    case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (2, 8, 3, 4)),
    case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (1, 2, 4, 6)),
    case("channel_shuffle", lambda x: F.channel_shuffle(x, 2), (3, 4, 2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("which", CASES, ids=str)
def test_equals_torch_in_every_layout(which):
    sweep(which)


@pytest.mark.parametrize("which", CASES, ids=str)
def test_gradients_equal_torch(which):
    """On a mesh whose axes split batch and channels unevenly."""

    def loss(x):
        result = which.function(x)
        result = result[0] if isinstance(result, tuple) else result
        return (result * (torch.arange(result.numel()).view(result.shape) % 7)).sum()

    (x,) = which.inputs
    expected = torch.func.grad(loss)(x)
    distributed = spread(x, OBLONG, [S(1), S(0)])
    for grad in (dtorch.grad(loss), dtorch.jit(dtorch.grad(loss))):
        found = grad(distributed)
        assert found.placements == [S(1), S(0)]
        torch.testing.assert_close(found.to_torch(), expected)


def test_split_batch_and_channels_need_no_communication():
    f = dtorch.jit(lambda x: F.max_pool2d(F.interpolate(x, scale_factor=2), 2))
    for dim in (0, 1):
        program = f.program(spread(values((2, 4, 4, 4)), PAIR, [S(dim)]))
        assert not [i for i in program.instructions if not hasattr(i, "op")]
