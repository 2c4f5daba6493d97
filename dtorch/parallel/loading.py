"""Checkpoints in safetensors files, read part by part into the layout that a plan gives them.

A file is read through slices: a device's part is copied out of the mapped file once, and nothing
holds a whole tensor that is sharded. What the checkpoint has to hold is said by a tree of tensors
of which only the shapes count, as `dtorch.nn.functionalize` gives for a module on the meta device.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..placement import Placements
from ..spec import Box, Spec
from ..tensor import Tensor, from_boxes
from ..tree import leaf_names, unflatten
from .plan import Meshes, Plan, layouts, placed

try:
    from tqdm import tqdm
except ImportError:  # the progress bar is an extra
    tqdm = None

__all__ = ["load"]


def load(
    folder: str | Path,
    mesh: Meshes,
    plan: Plan | None = None,
    *,
    like: Any = None,
    tied: Mapping[str, str] | None = None,
    rename: Callable[[str], str | None] | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Returns the tensors of a safetensors checkpoint, laid out over a mesh as a plan says.

    Each device's part is read from the file once; no device, and not the host either, holds a
    whole tensor that is sharded.

    Args:
        folder: A folder with ``model.safetensors``, or with several files and
            ``model.safetensors.index.json``, or the path of one file.
        mesh: The mesh; or meshes by path pattern, as for `shard`.
        plan: As for `shard`, over the names in the result.
        like: The tree that the checkpoint is to fill. A leaf on the meta device has to be in
            the checkpoint, in its shape; any other is taken as it is where the checkpoint lacks
            it, as are buffers that no checkpoint holds. Without it, the checkpoint decides.
        tied: Further names of leaves, to the names that they have in `like`: `Apply.tied`. A
            checkpoint may hold such a leaf under any of its names.
        rename: Gives the name in the result of a name in the checkpoint, or None to leave that
            tensor out.
        dtype: The dtype of the result's floating tensors; that of the checkpoint if None. (A leaf
            of `like` gives no dtype.)

    Returns:
        A tree in the structure of `like`; without it nested dicts, keyed by the parts of the
        names between dots.

    Blocking: until everything is read; with a progress bar on a terminal, where there are many
    tensors and tqdm is installed.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointError: The checkpoint lacks leaves of `like`, has others, or has them in another
            shape; one error lists them all.
        PlacementError: As for `shard`.
        MeshError: As for `shard`.
    """
    found = _shapes(_files(Path(folder)))
    names = _names(found, rename, tied or {})
    if like is None:
        wanted, kept, treespec = list(names), {}, None
    else:
        wanted, leaves, treespec = leaf_names(like)
        kept = dict(zip(wanted, leaves, strict=True))
        _check(Path(folder), found, names, kept)
    ndims = {n: len(found[names[n]][1]) if n in names else kept[n].ndim for n in wanted}
    where = layouts(ndims, mesh, plan or {})
    read = {
        name: _read(part, *where[name], dtype)
        for name, part in _parts(names, found, f"loading {folder}")
    }
    if treespec is None:
        return _nested({name: read[name] for name in wanted})
    results = [read[n] if n in read else placed(kept[n], *where[n]) for n in wanted]
    return unflatten(treespec, results)


_Shapes = dict[str, tuple[Path, list[int]]]  # by the checkpoint's names


def _shapes(files: Sequence[Path]) -> _Shapes:
    """Each tensor's file and shape."""
    from safetensors import safe_open

    found: _Shapes = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found |= {n: (file, opened.get_slice(n).get_shape()) for n in opened.keys()}  # noqa: SIM118
    return found


def _names(
    found: _Shapes, rename: Callable[[str], str | None] | None, tied: Mapping[str, str]
) -> dict[str, str]:
    """The checkpoint's name of each name in the result."""
    names: dict[str, str] = {}
    for stored in found:
        name = rename(stored) if rename else stored
        if name is not None and (name not in tied or tied[name] not in names):
            names[tied.get(name, name)] = stored
    return names


def _check(folder: Path, found: _Shapes, names: Mapping[str, str], like: Mapping[str, Any]) -> None:
    """Raises one error with everything that does not fit."""
    wrong = []
    for name, leaf in like.items():
        if name not in names:
            if leaf.is_meta:
                wrong.append(f"  {name} {list(leaf.shape)}: missing{_nearest(name, names)}")
        elif (shape := found[names[name]][1]) != list(leaf.shape):
            wrong.append(f"  {name} {list(leaf.shape)}: {shape} in the checkpoint")
    for name, stored in names.items():
        if name not in like:
            wrong.append(f"  {stored} {found[stored][1]}: not in the tree{_nearest(name, like)}")
    if wrong:
        raise CheckpointError(
            f"{folder} does not hold the expected tree:\n"
            + "\n".join(wrong)
            + "\n  Fix: load the checkpoint of this very model, or map its names with rename."
        )


def _nearest(name: str, names: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(names)[:2000], n=1, cutoff=0.8)
    return f" (the nearest is {near[0]})" if near else ""


def _parts(names: Mapping[str, str], found: _Shapes, what: str) -> Iterator[tuple[str, Any]]:
    """Yields the slices to read, file by file: one file at a time is mapped."""
    from safetensors import safe_open

    by_file: dict[Path, list[str]] = {}
    for name, stored in names.items():
        by_file.setdefault(found[stored][0], []).append(name)
    with _progress(what, len(names)) as advance:
        for file, inside in by_file.items():
            with safe_open(file, framework="pt") as opened:
                for name in inside:
                    yield name, opened.get_slice(names[name])
                    advance()


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


def _read(part: Any, mesh: Any, placements: Placements, dtype: torch.dtype | None) -> Tensor:
    shape = part.get_shape()
    probe = part[tuple(slice(0, 0) for _ in shape)] if shape else part[...]
    stored = probe.dtype
    wanted = dtype if dtype is not None and stored.is_floating_point else stored

    def box(bounds: Box) -> torch.Tensor:
        found = part[tuple(slice(*b) for b in bounds)] if bounds else part[...]
        # safetensors gives views of the mapped file; a shard is memory of its own.
        return found.to(wanted) if wanted != stored else found.clone()

    return from_boxes(Spec.of(shape, wanted, mesh, placements), box)


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in leaves.items():
        *parents, last = name.split(".")
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return result


@contextlib.contextmanager
def _progress(what: str, count: int) -> Iterator[Callable[[], Any]]:
    """A bar on a terminal where there are many tensors and tqdm is installed."""
    if tqdm is None or count < 100:
        yield lambda: None
        return
    with tqdm(total=count, desc=what, unit="tensor", disable=None) as bar:
        yield bar.update
