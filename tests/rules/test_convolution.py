"""Convolutions, forward and backward, over batch, channels and groups."""

import pytest
import torch
import torch.nn.functional as F
from layouts import PAIR, R, S, case, spread, sweep, values

import dtorch

aten = torch.ops.aten


def _gradients(forward):
    """The gradients of a convolution's arguments for a fixed gradient of its result."""

    def run(*tensors):
        def loss(*given):
            result = forward(*given)
            return (result * (torch.arange(result.numel()).view(result.shape) % 5)).sum()

        return torch.func.grad(loss, tuple(range(len(tensors))))(*tensors)

    return run


CALLS = {
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b), (2, 3, 8), (4, 3, 3), (4,)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, 2, 1), (3, 4, 5, 6), (2, 4, 3, 3), (2,)),
    "conv2d_plain": (lambda x, w: F.conv2d(x, w, padding="same"), (2, 2, 4, 4), (6, 2, 3, 3)),
    "conv2d_groups": (
        lambda x, w, b: F.conv2d(x, w, b, groups=2), (2, 4, 4, 4), (6, 2, 3, 3), (6,),
    ),
    "conv2d_depthwise": (lambda x, w: F.conv2d(x, w, groups=6), (1, 6, 4, 4), (6, 1, 2, 2)),
    "conv2d_one_image": (lambda x, w: F.conv2d(x, w), (3, 4, 4), (2, 3, 2, 2)),
    "conv3d": (lambda x, w: F.conv3d(x, w, dilation=2), (2, 2, 5, 4, 3), (3, 2, 2, 1, 1)),
    "transposed": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2), (2, 4, 3, 3), (4, 3, 2, 2), (3,),
    ),
    "transposed_groups": (
        lambda x, w: F.conv_transpose1d(x, w, groups=2), (3, 4, 5), (4, 3, 2),
    ),
}  # fmt: skip
FORWARD = [case(name, *call, exact=False, count=16) for name, call in CALLS.items()]
BACKWARD = [
    case(name, _gradients(call), *shapes, exact=False, partials=(), count=10)
    for name, (call, *shapes) in CALLS.items()
    if name not in ("conv2d_plain", "conv2d_one_image")
]


@pytest.mark.parametrize("which", FORWARD, ids=str)
def test_forward_equals_torch_in_every_layout(which):
    sweep(which)


@pytest.mark.parametrize("which", BACKWARD, ids=str)
def test_gradients_equal_torch_in_every_layout(which):
    sweep(which)


def test_a_split_batch_needs_no_communication():
    """A kernel of 7, stride 2, padding 3: the stem of a ResNet."""
    x, w = values((4, 3, 14, 14)), values((8, 3, 7, 7))
    f = dtorch.jit(lambda x, w: F.conv2d(x, w, stride=2, padding=3))
    tensors = spread(x, PAIR, [S(0)]), spread(w, PAIR, [R])
    assert [str(i.op) for i in f.program(*tensors).instructions] == ["aten.convolution.default"]
    found = f(*tensors)
    assert found.placements == [S(0)]
    torch.testing.assert_close(found.to_torch(), F.conv2d(x, w, stride=2, padding=3))


@pytest.mark.parametrize(("groups", "placements"), [(2, [S(1)]), (1, [S(1)])])
def test_split_channels_stay_split(groups, placements):
    """By groups the result is split as the input is; without, it is a partial sum."""
    x, w = values((2, 4, 5, 5)), values((4, 4 // groups, 3, 3))
    tensors = spread(x, PAIR, placements), spread(w, PAIR, [S(0) if groups > 1 else S(1)])
    f = dtorch.jit(lambda x, w: F.conv2d(x, w, groups=groups))
    assert len(f.program(*tensors).instructions) == 1
    assert f(*tensors).placements[0].is_partial() == (groups == 1)
