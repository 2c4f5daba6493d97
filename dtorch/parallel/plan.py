"""Plans: which layout each leaf of a parameter tree gets, by patterns over its path.

A plan maps path patterns (as of `fnmatch`, over the parts of the path joined with dots) to an
annotation: a `P`, `ColumnParallel`, `RowParallel`, or a list of placements. The first pattern
that matches a leaf decides; a leaf that none matches is replicated. Axis names that the mesh
lacks are ignored, so one plan serves every mesh.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import PlacementError
from ..mesh import DeviceMesh
from ..placement import P, Placement, Placements, normalized
from ..spec import Box, Spec
from ..tensor import Tensor, from_boxes, place
from ..tree import leaf_names, unflatten

try:
    from tqdm import tqdm
except ImportError:  # the progress bar is an extra
    tqdm = None

__all__ = ["ColumnParallel", "Plan", "RowParallel", "constrain", "load", "shard"]


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


def shard(tree: Any, mesh: DeviceMesh, plan: Plan | None = None) -> Any:
    """Returns a tree with every tensor laid out over a mesh as a plan says.

    Args:
        tree: A pytree of torch or dtorch tensors; other leaves are returned as they are.
        mesh: The mesh.
        plan: Annotations by path pattern; everything is replicated without one.

    Communication: each device is given its own part of a torch tensor; a dtorch tensor is
    redistributed.

    Raises:
        PlacementError: A pattern matches no leaf, or an annotation does not fit a leaf; all
            that do not are listed.

    Example:
        >>> mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        >>> tree = shard({"up": {"weight": torch.ones(4, 2)}}, mesh, {"up.*": ColumnParallel("tp")})
        >>> tree["up"]["weight"].placements
        [Shard(dim=0)]
    """
    names, leaves, treespec = leaf_names(tree)
    ndims = {n: t.ndim for n, t in zip(names, leaves, strict=True) if isinstance(t, torch.Tensor)}
    layouts = _layouts(ndims, mesh, plan or {})
    placed = [
        _placed(leaf, mesh, layouts[name]) if name in layouts else leaf
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return unflatten(treespec, placed)


def _placed(leaf: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.redistribute(mesh, placements)
    result = place(leaf, mesh, placements)
    return result.requires_grad_() if leaf.requires_grad else result


def constrain(x: torch.Tensor, annotation: Annotation) -> Any:
    """Returns a tensor in the layout that an annotation gives it on its own mesh.

    Args:
        x: A tensor; a plain torch tensor is returned as it is.
        annotation: A `P` (axes that the mesh lacks are ignored), or a list of placements.

    Communication: as for `Tensor.redistribute`.

    Raises:
        PlacementError: The annotation does not fit the tensor.

    Source: `jax.lax.with_sharding_constraint`.
    """
    if not isinstance(x, Tensor):
        return x
    mesh = x.device_mesh
    return x.redistribute(mesh, _placements(annotation, mesh, x.ndim))


def _layouts(ndims: Mapping[str, int], mesh: DeviceMesh, plan: Plan) -> dict[str, Placements]:
    """The placements of each leaf; raises one error with everything that is wrong."""
    _check_patterns(plan, list(ndims))
    layouts: dict[str, Placements] = {}
    wrong = []
    for name, ndim in ndims.items():
        annotation = next((a for p, a in plan.items() if fnmatch.fnmatchcase(name, p)), None)
        try:
            layouts[name] = _placements(P() if annotation is None else annotation, mesh, ndim)
        except PlacementError as error:
            wrong.append(f"  {name} ({ndim} dims): {error}")
    if wrong:
        raise PlacementError("the plan does not fit these leaves:\n" + "\n".join(wrong))
    return layouts


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
    if not isinstance(annotation, P):
        return normalized(annotation, mesh, ndim)
    if len(annotation) > ndim:
        raise PlacementError(f"{annotation!r} has {len(annotation)} entries.")
    return annotation.to_placements(mesh, ignore_missing=True)


# -- loading ---------------------------------------------------------------------------------


def load(folder: str | Path, mesh: DeviceMesh, plan: Plan | None = None) -> Any:
    """Returns the tensors of a safetensors checkpoint, laid out over a mesh as a plan says.

    Each device's part is read from the file once; no device, and not the host either, holds a
    whole tensor that is sharded.

    Args:
        folder: A folder with ``model.safetensors``, or with several files and
            ``model.safetensors.index.json``, or the path of one file.
        mesh: The mesh.
        plan: As for `shard`, over the checkpoint's names.

    Returns:
        Nested dicts, keyed by the parts of the names between dots.

    Raises:
        FileNotFoundError: There is no such file.
        PlacementError: As for `shard`.
    """
    from safetensors import safe_open

    tree: dict[str, Any] = {}
    files = _files(Path(folder))
    opened = [safe_open(file, framework="pt") for file in files]
    slices = {n: f.get_slice(n) for f in opened for n in f.keys()}  # noqa: SIM118
    layouts = _layouts({n: len(s.get_shape()) for n, s in slices.items()}, mesh, plan or {})
    for name in _with_progress(slices, f"loading {folder}"):
        _insert(tree, name.split("."), _read(slices[name], mesh, layouts[name]))
    return tree


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text())["weight_map"].values()
        return [folder / name for name in dict.fromkeys(names)]
    single = folder / "model.safetensors"
    if not single.exists():
        raise FileNotFoundError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json."
        )
    return [single]


def _read(part: Any, mesh: DeviceMesh, placements: Placements) -> Tensor:
    def box(bounds: Box) -> torch.Tensor:
        # safetensors gives views of the mapped file; a shard is memory of its own.
        return (part[tuple(slice(*b) for b in bounds)] if bounds else part[...]).clone()

    shape = part.get_shape()
    probe = part[tuple(slice(0, 0) for _ in shape)] if shape else part[...]
    return from_boxes(Spec.of(shape, probe.dtype, mesh, placements), box)


def _insert(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _with_progress(items: Mapping[str, Any], what: str) -> Iterator[str]:
    """Yields the names, with a bar on a terminal where there are many and tqdm is installed."""
    if tqdm is None or len(items) < 100:
        return iter(items)
    return iter(tqdm(items, desc=what, unit="tensor", disable=None))
