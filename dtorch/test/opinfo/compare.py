"""Compare: a result of dtorch with what PyTorch gives.

It is compared shard by shard: each has the shape that its layout says, replicas agree bit for bit,
and the fetched value is PyTorch's: equal on one device, and in other layouts within the entry's own
tolerance. Where the program adds up what several devices hold, so that the order of a sum differs,
`NUM_ROUNDINGS` units in the last place of the largest value are allowed as well: sums that cancel
have no smaller error. Integers and truth values are always equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ...tensor import Tensor
from .entries import Tolerance
from .layouts import Layout


class WrongError(AssertionError):
    """A value is not PyTorch's."""


class FarError(WrongError):
    """A value is further from PyTorch's than the tolerance; all else about it is right."""


class InexactError(AssertionError):
    """A value on one device is PyTorch's within the tolerance, but not bit for bit."""


NUM_ROUNDINGS = 4


class Expected(NamedTuple):
    """What a call shall give.

    Attributes:
        leaves: The leaves of the result: tensors and other values.
        tolerance: How far the value may be off in a layout of several devices.
        only_metadata: Whether the values are undefined.
        is_exact: Whether they are PyTorch's bit for bit on one device.
        largest: The largest size of a finite floating-point value in the arguments.
    """

    leaves: list[Any]
    tolerance: Tolerance
    only_metadata: bool = False
    is_exact: bool = True
    largest: float = 0.0

    def over_devices(self) -> Expected:
        """Returns the same for a program that adds up what several devices hold."""
        floating = [t for t in self.leaves if isinstance(t, torch.Tensor) and is_inexact(t)]
        if not floating:
            return self
        largest = max(self.largest, *map(largest_size, floating))
        eps = max(torch.finfo(t.dtype).eps for t in floating)
        rtol, atol = self.tolerance
        return self._replace(tolerance=Tolerance(rtol, atol + NUM_ROUNDINGS * eps * largest))


def is_inexact(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor holds rounded values."""
    return tensor.is_floating_point() or tensor.is_complex()


def largest_size(tensor: torch.Tensor) -> float:
    """Returns the largest size of a finite value of a tensor; 0 where it has none."""
    sizes = tensor.detach().abs().double()
    return float(sizes[sizes.isfinite()].max()) if sizes.isfinite().any() else 0.0


def compare(found: list[Any], layout: Layout, expected: Expected) -> None:
    """Compares the leaves of a result.

    Args:
        found: The leaves.
        layout: The layout of the arguments.
        expected: What they shall be.

    Raises:
        FarError: They are further from it than the tolerance.
        WrongError: They are something else.
        InexactError: They are only close, on one device.
    """
    if len(found) != len(expected.leaves):
        raise WrongError(f"{len(found)} results, not {len(expected.leaves)}")
    for result, value in zip(found, expected.leaves, strict=True):
        if not isinstance(value, torch.Tensor):
            _compare_other(result, value)
        elif not isinstance(result, Tensor):
            raise WrongError(f"a {type(result).__name__} instead of a dtorch.Tensor")
        else:
            _compare_tensor(result, value.detach(), layout, expected)


def _compare_other(result: Any, value: Any) -> None:
    numbers = (float, complex)
    if isinstance(value, numbers) and isinstance(result, numbers):
        _assert_close(torch.tensor(result), torch.tensor(value), Tolerance(1.3e-6, 1e-5))
    elif type(result) is not type(value) or result != value:
        raise WrongError(f"{str(result)[:60]!r} instead of {str(value)[:60]!r}")


def _compare_tensor(
    result: Tensor, value: torch.Tensor, layout: Layout, expected: Expected
) -> None:
    if result.shape != value.shape:
        raise WrongError(f"shape {list(result.shape)} instead of {list(value.shape)}")
    if result.dtype != value.dtype:
        raise WrongError(f"{result.dtype} instead of {value.dtype}")
    shards = list(result.detach().local_shards().values())
    for place, shard, shape in zip(
        result.device_mesh.coordinates(), shards, result._spec.local_shapes, strict=True
    ):
        if tuple(shard.shape) != shape or shard.dtype != result.dtype:
            raise WrongError(f"{shard.dtype} {list(shard.shape)} at {place}, not {list(shape)}")
    if expected.only_metadata:
        return
    for replica, first in _replicas(result, shards):
        _assert_close(replica, first, Tolerance(0, 0), "replicas differ: ")
    found = result.detach().to_torch()
    try:
        _assert_close(found, value, expected.tolerance)
    except WrongError as error:
        raise FarError(str(error)) from None
    if len(layout.mesh.devices) == 1 and expected.is_exact:
        try:
            _assert_close(found, value, Tolerance(0, 0))
        except WrongError as error:
            raise InexactError(str(error)) from None


def _replicas(
    tensor: Tensor, shards: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every replica with the first one of its part."""
    firsts: dict[tuple[int, ...], torch.Tensor] = {}
    for place, shard in zip(tensor.device_mesh.coordinates(), shards, strict=True):
        axes = zip(place, tensor.placements, strict=True)
        own = tuple(0 if p.is_replicate() else c for c, p in axes)
        if own in firsts:
            yield shard, firsts[own]
        firsts.setdefault(own, shard)


def _assert_close(
    result: torch.Tensor, value: torch.Tensor, tolerance: Tolerance, prefix: str = ""
) -> None:
    rtol, atol = tolerance
    rtol, atol = (rtol, atol) if is_inexact(value) else (0, 0)
    try:
        torch.testing.assert_close(
            result, value, rtol=rtol, atol=atol, equal_nan=True, check_stride=False
        )
    except AssertionError as error:
        text = " ".join(str(error).split())
        raise WrongError(f"{prefix}{text[:300]}") from None
