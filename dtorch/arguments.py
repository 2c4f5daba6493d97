"""The arguments of a call, and the key that they make.

Takes the leaves of a call; says which are tensors and run-time scalars, and what of the rest is in
the key: specs, types, and the exact values of what is static, with the settings of torch that a
trace depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy
import torch

from .errors import TraceError
from .mesh import DeviceMesh, in_stage_order
from .parts import dense_stride
from .placement import Replicate
from .spec import Spec
from .tensor import (
    Tensor,
    default_mesh,
)

_STATIC = (
    type(None),
    bool,
    str,
    bytes,
    complex,
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    DeviceMesh,
)


class Arguments:
    """The leaves of a call's arguments, sorted into what is a value and what is static.

    Attributes:
        leaves: The leaves, in the order of the tree.
        values: What the program reads of them: a reduced `Partial` in place of the tensor itself.
        key: What the key says of each leaf: a spec, a type, or a static value.
        tensors: The numbers of the leaves that are tensors.
        scalars: The numbers of the leaves that are run-time scalars.
    """

    __slots__ = ("key", "leaves", "mesh", "scalars", "tensors", "values")

    def __init__(self, leaves: list[Any], dynamic: tuple[type, ...], mesh: DeviceMesh | None):
        self.leaves = self.values = leaves
        self.tensors: list[int] = []
        self.scalars: list[int] = []
        self.mesh = mesh or mesh_of(leaves)
        self.key = tuple(self._key_of(i, leaf, dynamic) for i, leaf in enumerate(leaves))

    def kind(self) -> Callable[[list[Any]], Arguments]:
        """Returns what makes the arguments of another call with the same key from its leaves."""
        tensors, scalars, mesh, key = self.tensors, self.scalars, self.mesh, self.key

        def like(leaves: list[Any]) -> Arguments:
            other = object.__new__(Arguments)
            other.leaves = other.values = leaves
            other.tensors, other.scalars, other.mesh, other.key = tensors, scalars, mesh, key
            for number in tensors:
                # Not whether it is reduced by now: another thread may have reduced it meanwhile.
                if leaves[number]._spec is not key[number]:
                    other.values = list(leaves) if other.values is leaves else other.values
                    other.values[number] = leaves[number]._reduced
            return other

        return like

    def _key_of(self, number: int, leaf: Any, dynamic: tuple[type, ...]) -> Hashable:
        kind = type(leaf)
        if kind is Tensor:
            self.tensors.append(number)
            if (reduced := leaf._reduced) is not None:
                self.values = list(self.leaves) if self.values is self.leaves else self.values
                leaf = self.values[number] = reduced
            return leaf._spec
        if kind in dynamic:
            self.scalars.append(number)
            return kind
        if isinstance(leaf, numpy.generic):
            self.leaves[number] = self.values[number] = leaf.item()
            return self._key_of(number, self.leaves[number], dynamic)
        if kind is float or kind is complex:
            return exact(leaf)
        if kind is int or kind in _STATIC:
            return (kind, leaf)
        if isinstance(leaf, Tensor):  # of a trace, and none is active here
            raise leaf._outlived("a torch function")  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(leaf, torch.Tensor):
            self.tensors.append(number)
            return _torch_key(leaf, self.mesh)
        if isinstance(leaf, numpy.ndarray):
            self.leaves[number] = self.values[number] = torch.from_numpy(leaf)
            return self._key_of(number, self.leaves[number], dynamic)
        if isinstance(leaf, torch.Generator):
            return (torch.Generator, id(leaf), leaf)
        return (kind, leaf)


def exact(value: Any) -> Hashable:
    """Returns a key that tells apart what Python calls equal: 1, 1.0 and True; 0.0 and -0.0."""
    if isinstance(value, float):
        return (type(value), value.hex())
    if isinstance(value, complex):
        return (type(value), value.real.hex(), value.imag.hex())
    if isinstance(value, tuple):
        return (type(value), *map(exact, value))
    return (type(value), value)


def mesh_of(leaves: list[Any]) -> DeviceMesh:
    """Returns the mesh of the first distributed tensor, or the default one.

    Of stages it is the earliest, so that what is made there need not draw the rest to a later one.
    """
    meshes = [leaf._spec.mesh for leaf in leaves if type(leaf) is Tensor]
    if not meshes:
        return default_mesh()
    stages = None if meshes[0].stage is None else in_stage_order(meshes)
    return stages[0] if stages else meshes[0]


def _torch_key(tensor: torch.Tensor, mesh: DeviceMesh) -> Hashable:
    if tensor.layout != torch.strided:
        raise TraceError(f"dtorch does not support tensors of layout {tensor.layout}.")
    return ("torch", tensor.shape, tensor.dtype, dense_stride(tensor), mesh, mesh.stage)


def torch_spec(tensor: torch.Tensor, mesh: DeviceMesh) -> Spec:
    """Returns the spec of a plain torch tensor that is replicated on a mesh."""
    replicated = (Replicate(),) * mesh.ndim
    return Spec.of(tensor.shape, tensor.dtype, mesh, replicated, dense_stride(tensor))
