"""Checkpoints in safetensors files, read part by part into the layout that a plan gives them.

A file is read through slices: a device's part is copied out of the mapped file once, and nothing
holds a whole tensor that is sharded. What the checkpoint has to hold is said by a tree of tensors
of which only the shapes count, as `dtorch.nn.functionalize` gives for a module on the meta device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..mesh import DeviceMesh
from ..placement import Placements
from ..spec import Box, Spec
from ..tensor import Tensor, from_boxes
from ..tree import leaf_names, nested, unflatten
from .plan import Meshes, Plan, layouts, placed

try:
    from tqdm import tqdm
except ImportError:  # the progress bar is an extra
    tqdm = None

__all__ = ["Joined", "load"]


@dataclasses.dataclass(frozen=True)
class Joined:
    """A tensor that a checkpoint holds in several: how they are put together.

    Attributes:
        parts: Names in the checkpoint (after `rename`), or further joins.
        dim: The dim along which they are put together.
        is_new: Whether that is a new dim (`torch.stack`), or one that they have (`torch.cat`).
    """

    parts: tuple[str | Joined, ...]
    dim: int
    is_new: bool


_Source = str | Joined


def load(
    folder: str | Path,
    mesh: Meshes,
    plan: Plan | None = None,
    *,
    like: Any = None,
    tied: Mapping[str, str] | None = None,
    rename: Callable[[str], str | None] | None = None,
    join: Callable[[Sequence[str]], Mapping[str, Joined]] | None = None,
    dtype: torch.dtype | Callable[[str], torch.dtype | None] | None = None,
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
        join: Given the names after `rename`, says which tensors of the result are put together
            from several of the checkpoint.
        dtype: The dtype of the result's floating tensors, or what gives it for a name in the
            result; that of the checkpoint if None. (A leaf of `like` gives no dtype.)

    Returns:
        A tree in the structure of `like`; without it nested dicts, keyed by the parts of the
        names between dots.

    Blocking: until everything is read; with a progress bar on a terminal, where there are many
        tensors and tqdm is installed.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: An argument is of another type.
        ValueError: `dtype` is not floating.
        CheckpointError: The checkpoint lacks leaves of `like`, has others, or has them in another
            shape; or two of its tensors have one name, or a name is that of a part of another; one
            error lists them all. Or a file is no safetensors file, or no index of such files.
        PlacementError: As for `shard`.
        MeshError: As for `shard`.
    """
    _check_arguments(mesh, plan, like, dtype)
    found = _renamed(_stored(_files(Path(folder))), rename)
    sources = _sources(found, tied or {}, join)
    shapes = {name: _shape(source, found) for name, source in sources.items()}
    if like is None:
        _check_nesting(Path(folder), sources)
        wanted, kept, treespec = list(sources), {}, None
    else:
        wanted, leaves, treespec = leaf_names(like)
        kept = dict(zip(wanted, leaves, strict=True))
        _check(Path(folder), shapes, kept)
    ndims = {n: len(shapes[n]) if n in shapes else kept[n].ndim for n in wanted}
    where = layouts(ndims, mesh, plan or {})
    read = {
        name: _read(part, shapes[name], *where[name], dtype(name) if callable(dtype) else dtype)
        for name, part in _parts(sources, found, f"loading {folder}")
    }
    if treespec is None:
        return nested({name: read[name] for name in wanted})
    results = [read[n] if n in read else placed(kept[n], *where[n]) for n in wanted]
    return unflatten(treespec, results)


def check_dtype(dtype: Any) -> None:
    """Raises if what is given for floating tensors is no floating dtype."""
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"dtype is {dtype!r}, and must be a torch.dtype.\n"
            "  Fix: dtype=torch.bfloat16, for example; None for that of the checkpoint."
        )
    if not dtype.is_floating_point:
        raise ValueError(
            f"dtype is {dtype}, which is not floating.\n"
            "  Fix: dtype=torch.bfloat16, for example; None for that of the checkpoint."
        )


def _check_arguments(mesh: Any, plan: Any, like: Any, dtype: Any) -> None:
    meshes = list(mesh.values()) if isinstance(mesh, Mapping) else [mesh]
    if not all(isinstance(m, DeviceMesh) for m in meshes):
        raise TypeError(
            f"mesh is {mesh!r}, and must be a DeviceMesh, or DeviceMeshes by path pattern.\n"
            '  Fix: dtorch.init_device_mesh("cuda", (8,), mesh_dim_names=("tp",)), for example.'
        )
    if plan is not None and not isinstance(plan, Mapping):
        raise TypeError(
            f"plan is {plan!r}, and must be annotations by path pattern.\n"
            '  Fix: plan={"*.weight": ColumnParallel("tp")}, for example.'
        )
    if not callable(dtype):
        check_dtype(dtype)
    names, leaves, _ = leaf_names({} if like is None else like)
    wrong = [
        f"  {name}: {type(leaf).__name__}"
        for name, leaf in zip(names, leaves, strict=True)
        if not isinstance(leaf, torch.Tensor)
    ]
    if wrong:
        raise TypeError(
            "these leaves of like are no tensors:\n"
            + "\n".join(wrong)
            + "\n  Fix: leave them out, or pass the tree of functionalize."
        )


class _Stored(NamedTuple):
    """A tensor of a checkpoint."""

    file: Path
    name: str
    shape: list[int]


def _stored(files: Sequence[Path]) -> list[_Stored]:
    found = []
    for file in files:
        with _opened(file) as opened:
            names = opened.keys()
            found += [_Stored(file, n, opened.get_slice(n).get_shape()) for n in names]
    return found


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist.\n  Fix: download the checkpoint again.")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} ({file.stat().st_size} bytes) is no whole safetensors file: {error}.\n"
            "  Fix: download or save it again."
        ) from error


def _renamed(
    stored: Sequence[_Stored], rename: Callable[[str], str | None] | None
) -> dict[str, _Stored]:
    by_name: dict[str, list[_Stored]] = {}
    for tensor in stored:
        name = rename(tensor.name) if rename else tensor.name
        if name is not None:
            by_name.setdefault(name, []).append(tensor)
    wrong = [
        f"  {name}: " + ", ".join(f"{t.name} ({t.file.name})" for t in tensors)
        for name, tensors in by_name.items()
        if len(tensors) > 1
    ]
    if wrong:
        raise CheckpointError(
            "several tensors of the checkpoint have one name in the result:\n"
            + "\n".join(wrong)
            + "\n  Fix: give each a name of its own in rename, or None to leave it out."
        )
    return {name: tensors[0] for name, tensors in by_name.items()}


def _check_nesting(folder: Path, names: Mapping[str, Any]) -> None:
    """Raises if a tensor has the name of a dict that holds others."""
    wrong = []
    for name in names:
        parts = name.split(".")
        parents = [".".join(parts[:n]) for n in range(1, len(parts))]
        wrong += [f"  {parent} and {name}" for parent in parents if parent in names]
    if wrong:
        raise CheckpointError(
            f"{folder} has tensors whose names are parts of others, so they make no tree:\n"
            + "\n".join(wrong)
            + "\n  Fix: map the names with rename, or pass the tree to fill as like."
        )


def _sources(
    found: Mapping[str, _Stored],
    tied: Mapping[str, str],
    join: Callable[[Sequence[str]], Mapping[str, Joined]] | None,
) -> dict[str, _Source]:
    """Where each tensor of the result comes from."""
    joined = dict(join(list(found))) if join else {}
    used = {name for source in joined.values() for name in _names(source)}
    sources: dict[str, _Source] = {}
    for name in [*(n for n in found if n not in used), *joined]:
        if name not in tied or tied[name] not in sources:
            sources[tied.get(name, name)] = joined.get(name, name)
    return sources


def _names(source: _Source) -> list[str]:
    if isinstance(source, str):
        return [source]
    return [name for part in source.parts for name in _names(part)]


def _shape(source: _Source, found: Mapping[str, _Stored]) -> list[int]:
    if isinstance(source, str):
        return found[source].shape
    shapes = [_shape(part, found) for part in source.parts]
    first, dim = shapes[0], source.dim
    if source.is_new:
        return [*first[:dim], len(shapes), *first[dim:]]
    return [*first[:dim], sum(s[dim] for s in shapes), *first[dim + 1 :]]


def _check(folder: Path, shapes: Mapping[str, list[int]], like: Mapping[str, Any]) -> None:
    """Raises one error with everything that does not fit."""
    wrong = []
    for name, leaf in like.items():
        if name not in shapes:
            if leaf.is_meta:
                wrong.append(f"  {name} {list(leaf.shape)}: missing{_nearest(name, shapes)}")
        elif shapes[name] != list(leaf.shape):
            wrong.append(f"  {name} {list(leaf.shape)}: {shapes[name]} in the checkpoint")
    wrong += [
        f"  {name} {shape}: not in the tree{_nearest(name, like)}"
        for name, shape in shapes.items()
        if name not in like
    ]
    if wrong:
        raise CheckpointError(
            f"{folder} does not hold the expected tree:\n"
            + "\n".join(wrong)
            + "\n  Fix: load the checkpoint of this very model, or map its names with rename."
        )


def _nearest(name: str, names: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(names)[:2000], n=1, cutoff=0.8)
    return f" (the nearest is {near[0]})" if near else ""


def _parts(
    sources: Mapping[str, _Source], found: Mapping[str, _Stored], what: str
) -> Iterator[tuple[str, Any]]:
    """Yields what to read slices of, file by file: only the files of one tensor are mapped."""
    opened: dict[Path, Any] = {}

    def part(source: _Source) -> Any:
        if isinstance(source, Joined):
            return _Join([part(p) for p in source.parts], source.dim, source.is_new)
        return opened[found[source].file].get_slice(found[source].name)

    by_file: dict[Path, list[str]] = {}
    for name, source in sources.items():
        by_file.setdefault(found[_names(source)[0]].file, []).append(name)
    with _progress(what, len(sources)) as advance:
        for name in itertools.chain.from_iterable(by_file.values()):
            files = {found[n].file for n in _names(sources[name])}
            for file in opened.keys() - files:
                del opened[file]  # unmaps it
            for file in files - opened.keys():
                opened[file] = _opened(file)
            yield name, part(sources[name])
            advance()


class _Join:
    """Slices put together of the slices of several tensors, in the manner of one."""

    def __init__(self, parts: list[Any], dim: int, is_new: bool) -> None:
        self._parts = parts
        self._dim = dim
        self._is_new = is_new

    def get_shape(self) -> list[int]:
        shape = self._parts[0].get_shape()
        if self._is_new:
            return [*shape[: self._dim], len(self._parts), *shape[self._dim :]]
        size = sum(p.get_shape()[self._dim] for p in self._parts)
        return [*shape[: self._dim], size, *shape[self._dim + 1 :]]

    def __getitem__(self, bounds: tuple[slice, ...]) -> torch.Tensor:
        before, own, after = bounds[: self._dim], bounds[self._dim], bounds[self._dim + 1 :]
        if self._is_new:
            pieces = [part[(*before, *after)] for part in self._parts[own]]
            return torch.stack(pieces, self._dim) if pieces else self._empty(bounds)
        pieces, start = [], 0
        for part in self._parts:
            end = start + part.get_shape()[self._dim]
            low, high = max(own.start, start), min(own.stop, end)
            if low < high:
                pieces.append(part[(*before, slice(low - start, high - start), *after)])
            start = end
        return torch.cat(pieces, self._dim) if pieces else self._empty(bounds)

    def _empty(self, bounds: tuple[slice, ...]) -> torch.Tensor:
        probe = _probe(self._parts[0])
        return probe.new_empty([b.stop - b.start for b in bounds])


def _probe(part: Any) -> torch.Tensor:
    """A tensor of a part's dtype."""
    shape = part.get_shape()
    return part[tuple(slice(0, 0) for _ in shape)] if shape else _whole(part)


def _whole(part: Any) -> torch.Tensor:
    return part[...]


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in dict.fromkeys(_weight_map(index).values())]
    single = folder / "model.safetensors"
    if not single.exists():
        raise FileNotFoundError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json."
        )
    return [single]


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index file has it."""
    try:
        found = json.loads(index.read_text())["weight_map"]
        if isinstance(found, dict) and all(isinstance(f, str) for f in found.values()):
            return found
        reason = "its weight_map does not map names to files"
    except KeyError:
        reason = "it has no weight_map"
    except (ValueError, TypeError) as error:
        reason = str(error)
    raise CheckpointError(
        f"{index} is no index of safetensors files: {reason}.\n  Fix: download or save it again."
    )


def _read(
    part: Any,  # a slice of safetensors, or a `_Join`
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None,
) -> Tensor:
    stored = _probe(part).dtype
    wanted = dtype if dtype is not None and stored.is_floating_point else stored
    is_view = wanted == stored and type(part) is not _Join

    def box(bounds: Box) -> torch.Tensor:
        found = _whole(part) if not bounds else part[tuple(slice(*b) for b in bounds)]
        # safetensors gives views of the mapped file; a shard is memory of its own.
        return found.clone() if is_view else found.to(wanted)

    return from_boxes(Spec.of(shape, wanted, mesh, placements), box)


@contextlib.contextmanager
def _progress(what: str, count: int) -> Iterator[Callable[[], Any]]:
    """A bar on a terminal where there are many tensors and tqdm is installed."""
    if tqdm is None or count < 100:
        yield lambda: None
        return
    with tqdm(total=count, desc=what, unit="tensor", disable=None) as bar:
        yield bar.update
