"""Plans: which layout each leaf of a parameter tree gets, by patterns over its path.

A plan maps path patterns (as of `fnmatch`, over the parts of the path joined with dots) to an
annotation: a `P`, `ColumnParallel`, `RowParallel`, or a list of placements. The first pattern
that matches a leaf decides; a leaf that none matches is replicated. Axis names that the mesh
lacks are ignored, so one plan serves every mesh.

Where a tree lies on several meshes, the stages of a pipeline, the mesh is given in the same way: by
patterns over the paths.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from ..errors import MeshError, PlacementError
from ..mesh import DeviceMesh
from ..placement import P, Placement, Placements, Replicate, normalized
from ..tensor import Tensor, place
from ..tree import leaf_names, unflatten

_T = TypeVar("_T")

__all__ = [
    "ColumnParallel",
    "Meshes",
    "Plan",
    "RowParallel",
    "constrain",
    "gathered",
    "layouts",
    "placed",
    "shard",
]


@dataclasses.dataclass(frozen=True, slots=True)
class ColumnParallel:
    """A linear layer whose output features are split over an axis: weight and bias by dim 0."""

    axis: str

    def spec(self, ndim: int) -> P:
        """Returns the partition spec of a leaf with that many dims."""
        return P(self.axis) if ndim else P()


@dataclasses.dataclass(frozen=True, slots=True)
class RowParallel:
    """A linear layer whose input features are split over an axis: the weight by dim 1.

    Its result is partial; the bias is replicated and added once.
    """

    axis: str

    def spec(self, ndim: int) -> P:
        """Returns the partition spec of a leaf with that many dims."""
        return P(None, self.axis) if ndim > 1 else P()


Annotation = P | ColumnParallel | RowParallel | Sequence[Placement]
Plan = Mapping[str, Annotation]
Meshes = DeviceMesh | Mapping[str, DeviceMesh]
Layout = tuple[DeviceMesh, Placements]


def shard(tree: Any, mesh: Meshes, plan: Plan | None = None) -> Any:
    """Returns a tree with every tensor laid out over a mesh as a plan says.

    Args:
        tree: A pytree of torch or dtorch tensors; other leaves are returned as they are.
        mesh: The mesh; or meshes by path pattern, the first that matches a leaf decides.
        plan: Annotations by path pattern; everything is replicated without one.

    Communication: each device is given its own part of a torch tensor; a dtorch tensor is
    redistributed.

    Raises:
        PlacementError: A pattern matches no leaf, or an annotation does not fit a leaf; all
            that do not are listed.
        MeshError: Meshes are given by patterns, and none matches a leaf; all are listed.
        TypeError: The mesh is no mesh and no meshes, or a pattern is no string.

    Example:
        >>> mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        >>> tree = shard({"up": {"weight": torch.ones(4, 2)}}, mesh, {"up.*": ColumnParallel("tp")})
        >>> tree["up"]["weight"].placements
        [Shard(dim=0)]
    """
    names, leaves, treespec = leaf_names(tree)
    ndims = {n: t.ndim for n, t in zip(names, leaves, strict=True) if isinstance(t, torch.Tensor)}
    found = layouts(ndims, mesh, plan or {})
    results = [
        placed(leaf, *found[name]) if name in found else leaf
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return unflatten(treespec, results)


def placed(leaf: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    """Returns one leaf in a layout, requiring grad if it did."""
    if isinstance(leaf, Tensor):
        return leaf.redistribute(mesh, placements)
    result = place(leaf, mesh, placements)
    return result.requires_grad_() if leaf.requires_grad else result


def constrain(
    x: torch.Tensor, annotation: Annotation, *, beside: torch.Tensor | None = None
) -> Any:
    """Returns a tensor in the layout that an annotation gives it on its own mesh.

    Args:
        x: A tensor; a plain torch tensor is returned as it is.
        annotation: A `P` (axes that the mesh lacks are ignored), or a list of placements.
        beside: A tensor on whose mesh the result is to be, such as another pipeline stage's.

    Communication: as for `Tensor.redistribute`.

    Raises:
        PlacementError: The annotation does not fit the tensor.

    Source: `jax.lax.with_sharding_constraint`.
    """
    if not isinstance(x, Tensor):
        return x
    mesh = (beside if isinstance(beside, Tensor) else x).device_mesh
    return x.redistribute(mesh, _placements(annotation, mesh, x.ndim))


def gathered(tree: Any, axis: str) -> Any:
    """Returns a tree in which no tensor is split over an axis.

    In a function that `jit` traces, called on the parameters of a layer just before they are used,
    this makes an axis one of fully sharded data parallelism: each device keeps a part of the
    parameters, has all of a layer while it computes it, and frees it after.

    Args:
        tree: A pytree; leaves that are no dtorch tensors are returned as they are.
        axis: The name of a mesh axis. Tensors on a mesh that lacks it stay as they are.

    Communication: an all-gather for each tensor that is split over the axis; its gradient is
    reduce-scattered.

    Example:
        >>> mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("fsdp",))
        >>> params = shard({"weight": torch.ones(4, 2)}, mesh, {"*": P("fsdp")})
        >>> gathered(params, "fsdp")["weight"].placements
        [Replicate()]
    """
    _, leaves, treespec = leaf_names(tree)
    return unflatten(treespec, [_unsplit(leaf, axis) for leaf in leaves])


def _unsplit(leaf: Any, axis: str) -> Any:
    names = leaf.device_mesh.mesh_dim_names or () if isinstance(leaf, Tensor) else ()
    if axis not in names:
        return leaf
    at = names.index(axis)
    placements = [Replicate() if a == at else p for a, p in enumerate(leaf.placements)]
    return leaf.redistribute(leaf.device_mesh, placements)


def layouts(ndims: Mapping[str, int], mesh: Meshes, plan: Plan) -> dict[str, Layout]:
    """Returns the layout of each leaf; raises one error with everything that is wrong."""
    for patterns, kind in ((mesh, DeviceMesh), (plan, None)):
        _check_mapping(patterns, kind)
    _check_patterns(plan, list(ndims))
    meshes = _meshes(mesh, list(ndims))
    found: dict[str, Layout] = {}
    wrong = []
    for name, ndim in ndims.items():
        annotation = _first_match(plan, name)
        try:
            chosen = _placements(P() if annotation is None else annotation, meshes[name], ndim)
            found[name] = meshes[name], chosen
        except PlacementError as error:
            wrong.append(f"  {name} ({ndim} dims): {error}")
    if wrong:
        raise PlacementError("the plan does not fit these leaves:\n" + "\n".join(wrong))
    return found


def _meshes(mesh: Meshes, names: Sequence[str]) -> dict[str, DeviceMesh]:
    if isinstance(mesh, DeviceMesh):
        return dict.fromkeys(names, mesh)
    matched = {name: _first_match(mesh, name) for name in names}
    found = {name: m for name, m in matched.items() if m is not None}
    without = [name for name in names if name not in found]
    if without:
        raise MeshError(
            "no pattern gives these leaves a mesh:\n  "
            + "\n  ".join(without)
            + "\n  Fix: add patterns for them, the last perhaps '*'."
        )
    return found


def _first_match(patterns: Mapping[str, _T], name: str) -> _T | None:
    return next((value for p, value in patterns.items() if fnmatch.fnmatchcase(name, p)), None)


def _check_mapping(given: Any, kind: type | None) -> None:
    """Refuses what is neither of a kind nor a mapping from path patterns, to it if it is given."""
    if kind is not None and isinstance(given, kind):
        return
    wanted = "a plan: annotations" if kind is None else "a mesh: a DeviceMesh, or meshes"
    wrong = (
        [repr(given)]
        if not isinstance(given, Mapping)
        else [
            f"{pattern!r}: {value!r}"
            for pattern, value in given.items()
            if not isinstance(pattern, str) or not isinstance(value, kind or object)
        ]
    )
    if wrong:
        raise TypeError(
            f"{', '.join(wrong)} is not {wanted} by path pattern.\n"
            "  Fix: the keys are patterns such as '*.weight'."
        )


def _check_patterns(plan: Plan, names: Sequence[str]) -> None:
    idle = [p for p in plan if not any(fnmatch.fnmatchcase(n, p) for n in names)]
    if not idle:
        return
    lines = []
    for pattern in idle:
        near = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.3)
        lines.append(f"  {pattern!r}; the nearest leaves: {', '.join(near) or 'none'}")
    raise PlacementError(
        "these patterns of the plan match no leaf:\n"
        + "\n".join(lines)
        + f"\n  Fix: correct or remove them. The tree has {len(names)} tensors."
    )


def _placements(annotation: Annotation, mesh: DeviceMesh, ndim: int) -> Placements:
    if isinstance(annotation, (ColumnParallel, RowParallel)):
        annotation = annotation.spec(ndim)
    if isinstance(annotation, str) or not isinstance(annotation, (Placement, Sequence)):
        raise PlacementError(
            f"{annotation!r} is no layout.\n"
            "  Fix: a P, a ColumnParallel, a RowParallel, or a list of placements."
        )
    if not isinstance(annotation, P):
        return normalized(annotation, mesh, ndim)
    if len(annotation) > ndim:
        raise PlacementError(f"{annotation!r} has {len(annotation)} entries.")
    return annotation.to_placements(mesh, ignore_missing=True)
