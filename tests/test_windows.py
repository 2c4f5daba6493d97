"""Convolution, pooling and resampling over split spatial dims: halos are exchanged, no more."""

import pytest
import torch
import torch.nn.functional as F
from layouts import PAIR, QUAD, SQUARE, TRIPLE, R, S, sample, spread, values

import dtorch
from dtorch.program import Redistribute
from dtorch.redistribution import Collective

CONVOLUTIONS = {  # kernel, stride, padding, dilation, groups
    "same": (3, 1, 1, 1, 1),
    "wide": (7, 2, 3, 1, 1),
    "point": (1, 1, 0, 1, 1),
    "dilated_groups": (3, 1, 2, 2, 2),
    "depthwise": (2, 2, 0, 1, 4),
    "apart": (3, 3, 1, 1, 1),
}
CALLS = {
    "max": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_dilated": lambda x: F.max_pool2d(x, 2, 1, 1, 2),
    "max_ceil": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max_unbatched": lambda x: F.max_pool2d(x[0], 2),
    "max3d": lambda x: F.max_pool3d(x.unsqueeze(2), (1, 3, 3), (1, 2, 2), (0, 1, 1)),
    "avg": lambda x: F.avg_pool2d(x, 2),
    "avg_padded": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "avg_without_padding": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "avg3d": lambda x: F.avg_pool3d(x.unsqueeze(2), (1, 2, 3), (1, 2, 1)),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest_to_size": lambda x: F.interpolate(x, size=(x.shape[2] * 3, x.shape[3] * 2)),
    "nearest_uneven": lambda x: F.interpolate(x, size=(x.shape[2] + 3, x.shape[3])),
}
SIZES = [(2, 4, 12, 8), (2, 4, 13, 7), (1, 4, 5, 3)]
LAYOUTS = [
    (PAIR, [S(2)]),
    (TRIPLE, [S(3)]),
    (QUAD, [S(2)]),
    (SQUARE, [S(2), S(2)]),
    (SQUARE, [S(0), S(2)]),
    (SQUARE, [S(3), S(2)]),
    (SQUARE, [S(1), S(2)]),
]


def _compare(call, inputs, mesh, layouts):
    wanted = [t.clone().requires_grad_() for t in inputs]
    given = [spread(t, mesh, p).requires_grad_() for t, p in zip(inputs, layouts, strict=True)]
    expected, found = call(*wanted), call(*given)
    torch.testing.assert_close(found.detach().to_torch(), expected.detach(), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        compiled = dtorch.jit(call)(*(t.detach() for t in given))
    torch.testing.assert_close(compiled.to_torch(), expected.detach(), rtol=1e-4, atol=1e-4)
    cotangent = values(expected.shape, seed=5)
    grads = torch.autograd.grad(expected, wanted, cotangent)
    ours = torch.autograd.grad(found, given, spread(cotangent, mesh, [R] * mesh.ndim))
    for grad, our, t in zip(grads, ours, given, strict=True):
        torch.testing.assert_close(our.to_torch(), grad, rtol=1e-4, atol=1e-4)
        assert our.placements == t.placements


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_convolution_equals_torch(name, size):
    kernel, stride, padding, dilation, groups = CONVOLUTIONS[name]
    if min(size[2:]) + 2 * padding < dilation * (kernel - 1) + 1:
        pytest.skip("the kernel is larger than the input")
    outputs = 4 if groups > 2 else 6
    weight = values((outputs, 4 // groups, kernel, kernel), seed=1) / kernel
    inputs = (values(size), weight, values((outputs,), seed=2))

    def call(x, weight, bias):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)

    for mesh, placements in sample(LAYOUTS, 3, len(name) + size[2]):
        whole = [R] * mesh.ndim
        _compare(call, inputs, mesh, [placements, whole, whole])


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", SIZES)
def test_pooling_and_resampling_equal_torch(name, size):
    for mesh, placements in sample(LAYOUTS, 3, len(name) + size[2]):
        _compare(CALLS[name], (values(size),), mesh, [placements])


def test_the_places_of_the_largest_are_those_of_the_whole_plane():
    x = values((2, 4, 12, 8))
    _, expected = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    for mesh, placements in LAYOUTS:
        given = spread(x, mesh, placements)
        _, found = F.max_pool2d(given, 3, 2, 1, return_indices=True)
        assert torch.equal(found.to_torch(), expected)


@pytest.mark.parametrize("dims", [1, 3])
def test_other_numbers_of_dims(dims):
    size = (9, 5, 4)[:dims]
    conv = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    inputs = (values((2, 3, *size)), values((4, 3, *(3,) * dims), seed=1))
    _compare(lambda x, w: conv(x, w, padding=1), inputs, TRIPLE, [[S(2)], [R]])


def test_batch_and_rows_split_exchange_only_halos():
    x, weight = torch.zeros(2, 4, 64, 16), torch.zeros(4, 4, 3, 3)

    def call(x, weight):
        x = F.conv2d(x, weight, padding=1)
        return F.conv2d(F.interpolate(F.max_pool2d(x, 2), scale_factor=2), weight, padding=1)

    given = spread(x, SQUARE, [S(0), S(2)]), spread(weight, SQUARE, [R, R])
    program = dtorch.jit(call).program(*given)
    steps = [i.step for i in program.instructions if isinstance(i, Redistribute)]
    assert {s.kind for s in steps} <= {Collective.PERMUTE, Collective.SLICE}
    assert max(s.num_bytes for s in steps) <= 4 * 16 * 4  # one row of one image
    assert program.specs[program.outputs[0]].placements == (S(0), S(2))
