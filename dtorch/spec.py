"""`Spec`: everything about a tensor but its data, and which part of it each device holds.

Specs are interned: equal specs are one object, so a spec is a cache key that compares by
identity. The global strides are those that PyTorch would give the tensor on one device.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .mesh import DeviceMesh
from .placement import Partial, Placement, Placements, Replicate, Shard

Box = tuple[tuple[int, int], ...]
"""The part of a tensor that a device holds: a half-open range for each dim."""

_interned: weakref.WeakValueDictionary[tuple[Any, ...], Spec] = weakref.WeakValueDictionary()
_interning = threading.Lock()
os.register_at_fork(
    before=_interning.acquire, after_in_parent=_interning.release, after_in_child=_interning.release
)


class Spec:
    """The shape, dtype, strides, conj and neg bits, mesh and placements of a global tensor.

    Make one with `Spec.of`, which interns it.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "conj",
        "dtype",
        "mesh",
        "neg",
        "placements",
        "shape",
        "stride",
    )

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    mesh: DeviceMesh
    placements: Placements
    conj: bool
    neg: bool

    @staticmethod
    def of(
        shape: Sequence[int],
        dtype: torch.dtype,
        mesh: DeviceMesh,
        placements: Placements,
        stride: Sequence[int] | None = None,
        conj: bool = False,
        neg: bool = False,
    ) -> Spec:
        """Returns the one spec with these values (contiguous if no stride is given)."""
        shape = torch.Size(shape)
        stride = contiguous_stride(shape) if stride is None else tuple(stride)
        key = (shape, dtype, stride, conj, neg, mesh, mesh.stage, placements)
        with _interning:
            spec = _interned.get(key)
            if spec is None:
                spec = _interned[key] = object.__new__(Spec)
                spec.shape, spec.dtype, spec.stride = shape, dtype, stride
                spec.mesh, spec.placements, spec.conj, spec.neg = mesh, placements, conj, neg
            return spec

    def with_layout(self, mesh: DeviceMesh, placements: Placements) -> Spec:
        """Returns the same tensor in another layout."""
        return Spec.of(self.shape, self.dtype, mesh, placements, self.stride, self.conj, self.neg)

    def with_placements(self, placements: Placements) -> Spec:
        """Returns the same tensor with other placements on its mesh."""
        return self if placements == self.placements else self.with_layout(self.mesh, placements)

    def replicated(self) -> Spec:
        """Returns the same tensor, whole on every device of its mesh."""
        return self.with_placements((Replicate(),) * self.mesh.ndim)

    @functools.cached_property
    def ndim(self) -> int:
        return len(self.shape)

    @functools.cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @functools.cached_property
    def num_bytes(self) -> int:
        """The bytes of the global tensor."""
        return self.numel * self.dtype.itemsize

    @functools.cached_property
    def torch_device(self) -> torch.device:
        """The torch device that PyTorch takes the tensor to be on."""
        return self.mesh.torch_device()

    @functools.cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The part that each device holds, in the order of ``mesh.devices``."""
        return tuple(self._box(c) for c in self.mesh.coordinates())

    @functools.cached_property
    def local_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The local shape on each device, in the order of ``mesh.devices``."""
        return tuple(tuple(stop - start for start, stop in box) for box in self.boxes)

    @functools.cached_property
    def num_local_bytes(self) -> int:
        """The bytes that the fullest device holds."""
        return max(math.prod(shape) for shape in self.local_shapes) * self.dtype.itemsize

    @functools.cached_property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole value."""
        return all(p.is_replicate() for p in self.placements)

    @functools.cached_property
    def partial_axes(self) -> tuple[int, ...]:
        """The mesh axes over which the value awaits a reduction."""
        return tuple(a for a, p in enumerate(self.placements) if p.is_partial())

    def shard_axes(self, dim: int) -> tuple[int, ...]:
        """Returns the mesh axes that split a dim, major first."""
        return tuple(a for a, p in enumerate(self.placements) if p.is_shard(dim))

    def _box(self, coordinate: tuple[int, ...]) -> Box:
        ranges = [(0, size) for size in self.shape]
        for index, count, placement in zip(
            coordinate, self.mesh.shape, self.placements, strict=True
        ):
            if isinstance(placement, Shard):
                ranges[placement.dim] = chunk(ranges[placement.dim], count, index)
        return tuple(ranges)

    def __repr__(self) -> str:
        layout = format_layout(self.mesh, self.placements)
        return f"{dtype_name(self.dtype)}{list(self.shape)} {layout}"

    def __reduce__(self) -> tuple[Any, ...]:
        values = (self.shape, self.dtype, self.mesh, self.placements, self.stride)
        return (Spec.of, (*values, self.conj, self.neg))


def chunk(bounds: tuple[int, int], count: int, index: int) -> tuple[int, int]:
    """Returns the `index`-th of `count` pieces of a half-open range, split as `torch.chunk`.

    Every piece has ``ceil(length / count)`` elements until none are left, so later ones may be
    shorter or empty.
    """
    start, stop = bounds
    size = -(-(stop - start) // count)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def format_placement(placement: Placement) -> str:
    """Returns the short form that programs and messages print: ``S(0)``, ``R``, ``P(sum)``."""
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return f"P({placement.op})" if isinstance(placement, Partial) else "R"


def format_layout(mesh: DeviceMesh, placements: Placements) -> str:
    """Returns a layout in one line: ``dp=S(0) tp=R``, or ``[S(0), R]`` on an unnamed mesh."""
    short = [format_placement(p) for p in placements]
    if mesh.mesh_dim_names:
        return " ".join(f"{n}={p}" for n, p in zip(mesh.mesh_dim_names, short, strict=True))
    return f"[{', '.join(short)}]"
