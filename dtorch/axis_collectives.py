"""Collectives over mesh axes, for functions that `shard_map` runs on each device's shards.

Each is called by every device of the function's mesh, in the same order, on tensors of one shape
and dtype. A device shows its tensor to those along the axes and makes its result of theirs, adding
in the order of their index, so that replicas agree bit for bit. All are differentiable; the
backward of one is its transpose, a collective again.

Names, arguments and meaning are those of `jax.lax`; a tree of tensors stands wherever a tensor may.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import DTorchError
from .runtime.collectives import reduce_parts
from .runtime.local_calls import Place, here
from .spec import dtype_name
from .tree import map_leaves

AxisName = str | Sequence[str]
"""A mesh axis, or several, the first of which is major."""


def axis_index(axis_name: AxisName) -> int:
    """Returns the index of the device along an axis, or along several taken as one.

    Raises:
        DTorchError: It is called outside of a function that `shard_map` runs.
        MeshError: The mesh has no such axis.

    Source: `jax.lax.axis_index`; a Python integer.
    """
    place = _place("axis_index", axis_name)
    return place.index(place.axes(axis_name))


def axis_size(axis_name: AxisName) -> int:
    """Returns the number of devices along an axis, or along several taken as one.

    Raises:
        DTorchError: It is called outside of a function that `shard_map` runs.
        MeshError: The mesh has no such axis.

    Source: `jax.lax.axis_size`.
    """
    place = _place("axis_size", axis_name)
    return place.size(place.axes(axis_name))


def psum(x: Any, axis_name: AxisName) -> Any:
    """Returns the sum over the devices along an axis.

    Args:
        x: A tree of tensors; of a number, every device is taken to have the same. Booleans are
            added as integers.
        axis_name: The axis, or several.

    Communication: all-reduce of `x`.

    Raises:
        DTorchError: It is called outside of a function that `shard_map` runs.
        MeshError: The mesh has no such axis.
        CollectiveError: The devices along the axis do not all call the same.

    Source: `jax.lax.psum`.
    """

    def total(place: Place, axes: tuple[int, ...], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf * place.size(axes)
        return _Sum(axes)(place, leaf.long() if leaf.dtype == torch.bool else leaf)

    return _over("psum", axis_name, x, total)


def pmean(x: Any, axis_name: AxisName) -> Any:
    """Returns the mean over the devices along an axis, of integers as a floating-point number.

    Args:
        x: A tree of tensors or numbers.
        axis_name: The axis, or several.

    Communication: all-reduce of `x`.

    Raises:
        DTorchError: As `psum`; so do the other errors of it.

    Source: `jax.lax.pmean`.
    """
    size = axis_size(axis_name)
    return map_leaves(lambda leaf: leaf / size, psum(x, axis_name))


def pmax(x: Any, axis_name: AxisName) -> Any:
    """Returns the maximum over the devices along an axis.

    The gradient is shared out evenly among equal maxima, as that of `torch.amax`.

    Args:
        x: A tree of tensors or numbers.
        axis_name: The axis, or several.

    Communication: all-gather of `x`.

    Raises:
        DTorchError: As `psum`; so do the other errors of it.

    Source: `jax.lax.pmax`, which has no gradient.
    """
    return _extreme("pmax", axis_name, x, torch.amax)


def pmin(x: Any, axis_name: AxisName) -> Any:
    """Returns the minimum over the devices along an axis; otherwise as `pmax`.

    Args:
        x: A tree of tensors or numbers.
        axis_name: The axis, or several.

    Communication: all-gather of `x`.

    Raises:
        DTorchError: As `psum`; so do the other errors of it.

    Source: `jax.lax.pmin`, which has no gradient.
    """
    return _extreme("pmin", axis_name, x, torch.amin)


def all_gather(x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Any:
    """Returns what all devices along a mesh axis have, one after another.

    Args:
        x: A tree of tensors.
        axis_name: The mesh axis, or several.
        axis: The dim of the result along which they stand.
        tiled: Whether that is a dim of `x`, along which they are concatenated; otherwise they are
            stacked along a new one.

    Communication: all-gather of `x`.

    Raises:
        ValueError: There is no such dim.
        DTorchError: As `psum`; so do the other errors of it.

    Source: `jax.lax.all_gather`.
    """

    def gathered(place: Place, axes: tuple[int, ...], leaf: Any) -> Tensor:
        tensor = _tensor("all_gather", leaf)
        dim = _dim("all_gather", "axis", axis, tensor.ndim + (not tiled), tensor)
        return _Gather(axes, dim, tiled)(place, tensor)

    return _over("all_gather", axis_name, x, gathered)


def psum_scatter(
    x: Any, axis_name: AxisName, *, scatter_dimension: int = 0, tiled: bool = False
) -> Any:
    """Returns each device's piece of the sum over the devices along an axis.

    Args:
        x: A tree of tensors.
        axis_name: The axis, or several.
        scatter_dimension: The dim whose pieces the devices get.
        tiled: Whether a piece keeps that dim, which the number of devices must divide; otherwise
            it has as many elements as there are devices, and a piece is without it.

    Communication: reduce-scatter of `x`.

    Raises:
        ValueError: There is no such dim, or its size does not fit the number of devices.
        DTorchError: As `psum`; so do the other errors of it.

    Source: `jax.lax.psum_scatter`.
    """

    def scattered(place: Place, axes: tuple[int, ...], leaf: Any) -> Tensor:
        tensor = _tensor("psum_scatter", leaf)
        dim = _dim("psum_scatter", "scatter_dimension", scatter_dimension, tensor.ndim, tensor)
        _check_size("psum_scatter", place, axes, tensor, dim, tiled)
        return _Scatter(axes, dim, tiled)(place, tensor)

    return _over("psum_scatter", axis_name, x, scattered)


def ppermute(x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Any:
    """Returns what another device along an axis has; zeros where none sends.

    Args:
        x: A tree of tensors.
        axis_name: The axis, or several.
        perm: Pairs of a source and a destination, by their indices; no index is twice a source,
            or twice a destination.

    Communication: each source sends `x` to its destination.

    Raises:
        ValueError: `perm` names an index twice, or one that there is not.
        DTorchError: As `psum`; so do the other errors of it.

    Source: `jax.lax.ppermute`.
    """
    pairs = tuple((int(source), int(target)) for source, target in perm)

    def permuted(place: Place, axes: tuple[int, ...], leaf: Any) -> Tensor:
        _check_permutation(pairs, place, axes)
        return _Permute(axes, pairs)(place, _tensor("ppermute", leaf))

    return _over("ppermute", axis_name, x, permuted)


def all_to_all(
    x: Any, axis_name: AxisName, split_axis: int, concat_axis: int, *, tiled: bool = False
) -> Any:
    """Returns the pieces for this device of what all devices along a mesh axis have.

    Args:
        x: A tree of tensors.
        axis_name: The mesh axis, or several.
        split_axis: The dim of `x` whose pieces go to the devices, in the order of their index.
        concat_axis: The dim of the result along which the pieces that came stand.
        tiled: Whether pieces keep the split dim, which the number of devices must divide, and are
            concatenated along a dim that there is; otherwise the split dim has as many elements as
            there are devices, is dropped, and the pieces are stacked along a new one.

    Communication: all-to-all of `x`.

    Raises:
        ValueError: There is no such dim, or its size does not fit the number of devices.
        DTorchError: As `psum`; so do the other errors of it.

    Source: `jax.lax.all_to_all`.
    """

    def exchanged(place: Place, axes: tuple[int, ...], leaf: Any) -> Tensor:
        tensor = _tensor("all_to_all", leaf)
        split = _dim("all_to_all", "split_axis", split_axis, tensor.ndim, tensor)
        concat = _dim("all_to_all", "concat_axis", concat_axis, tensor.ndim, tensor)
        _check_size("all_to_all", place, axes, tensor, split, tiled)
        return _Exchange(axes, split, concat, tiled)(place, tensor)

    return _over("all_to_all", axis_name, x, exchanged)


# -- arguments -----------------------------------------------------------------------------


def _place(name: str, axis_name: Any) -> Place:
    place = here()
    if place is None:
        raise DTorchError(
            f"{name}({axis_name!r}) is for functions that shard_map runs, and none runs here.\n"
            "  Fix: call it in the function that dtorch.shard_map(fn, mesh, in_specs, out_specs) "
            "is given; outside, a global tensor needs no collectives."
        )
    return place


_OfLeaf = Callable[[Place, tuple[int, ...], Any], Any]


def _over(name: str, axis_name: AxisName, tree: Any, function: _OfLeaf) -> Any:
    place = _place(name, axis_name)
    axes = place.axes(axis_name)
    return map_leaves(lambda leaf: function(place, axes, leaf), tree)


def _extreme(name: str, axis_name: AxisName, tree: Any, reduce: Callable[..., Tensor]) -> Any:
    def extreme(place: Place, axes: tuple[int, ...], leaf: Any) -> Any:
        return reduce(_Gather(axes, 0, False)(place, leaf), 0) if isinstance(leaf, Tensor) else leaf

    return _over(name, axis_name, tree, extreme)


def _tensor(name: str, leaf: Any) -> Tensor:
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"{name} needs tensors, not {type(leaf).__name__} {leaf!r}.\n"
            "  Fix: torch.tensor(...) of it."
        )
    return leaf


def _dim(name: str, argument: str, dim: int, count: int, tensor: Tensor) -> int:
    if not -count <= dim < count:
        allowed = f"a dim from {-count} to {count - 1}" if count else "a tensor with dims"
        raise ValueError(
            f"{name}: {argument}={dim} is out of range for a tensor of shape "
            f"{list(tensor.shape)}.\n  Fix: pass {allowed}."
        )
    return dim % count


def _check_size(
    name: str, place: Place, axes: tuple[int, ...], tensor: Tensor, dim: int, tiled: bool
) -> None:
    size, count = tensor.shape[dim], place.size(axes)
    if size % count if tiled else size != count:
        needed = f"a multiple of {count}" if tiled else f"{count}, or tiled=True and a multiple"
        raise ValueError(
            f"{name} in {place.function} cuts dim {dim} of a tensor of shape "
            f"{list(tensor.shape)} for {count} devices along {place.names(axes)}, but its size is "
            f"{size}.\n  Fix: make it {needed}, for example with torch.nn.functional.pad."
        )


def _check_permutation(
    pairs: Sequence[tuple[int, int]], place: Place, axes: tuple[int, ...]
) -> None:
    size = place.size(axes)
    for kind, found in zip(("source", "destination"), zip(*pairs, strict=True), strict=False):
        wrong = [i for i in found if not 0 <= i < size]
        twice = sorted({i for i in found if found.count(i) > 1})
        if wrong or twice:
            what = f"{wrong[0]} is no index" if wrong else f"{twice[0]} is a {kind} twice"
            raise ValueError(
                f"ppermute in {place.function}: perm={list(pairs)}: {what} along "
                f"{place.names(axes)}, which has {size} devices.\n"
                f"  Fix: give pairs of indices from 0 to {size - 1}, each at most once a source "
                "and once a destination."
            )


# -- the collectives, each with its transpose ------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Collective(abc.ABC):
    """A linear collective over mesh axes."""

    axes: tuple[int, ...]

    def __call__(self, place: Place, x: Tensor) -> Tensor:
        return _Node.apply(self, place, x)

    def text(self, place: Place, x: Tensor) -> str:
        """Returns what a device calls, in words that are the same on every device."""
        name, *options = self._words()
        shown = f"{dtype_name(x.dtype)}{list(x.shape)}"
        return f"{name}({', '.join([shown, place.names(self.axes), *options])})"

    @abc.abstractmethod
    def _words(self) -> Sequence[str]: ...

    @abc.abstractmethod
    def joined(self, parts: list[Tensor], index: int) -> Tensor:
        """Returns the result of the device with an index, in new memory."""
        ...

    @abc.abstractmethod
    def transposed(self) -> _Collective:
        """Returns the collective that takes the result's gradient to that of the operand."""
        ...


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(collective: _Collective, place: Place, x: Tensor) -> Tensor:
        parts = place.exchange(collective.axes, collective.text(place, x), x)
        return collective.joined(parts, place.index(collective.axes))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.collective, ctx.place, _ = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return None, None, ctx.collective.transposed()(ctx.place, grad)


@dataclasses.dataclass(frozen=True)
class _Sum(_Collective):
    def _words(self) -> Sequence[str]:
        return ("psum",)

    def joined(self, parts: list[Tensor], index: int) -> Tensor:
        return reduce_parts(parts, "sum")

    def transposed(self) -> _Collective:
        return self


@dataclasses.dataclass(frozen=True)
class _Gather(_Collective):
    dim: int
    tiled: bool

    def _words(self) -> Sequence[str]:
        return "all_gather", f"axis={self.dim}", f"tiled={self.tiled}"

    def joined(self, parts: list[Tensor], index: int) -> Tensor:
        return (torch.cat if self.tiled else torch.stack)(parts, self.dim)

    def transposed(self) -> _Collective:
        return _Scatter(self.axes, self.dim, self.tiled)


@dataclasses.dataclass(frozen=True)
class _Scatter(_Collective):
    dim: int
    tiled: bool

    def _words(self) -> Sequence[str]:
        return "psum_scatter", f"scatter_dimension={self.dim}", f"tiled={self.tiled}"

    def joined(self, parts: list[Tensor], index: int) -> Tensor:
        return reduce_parts(
            [_piece(p, self.dim, len(parts), index, self.tiled) for p in parts], "sum"
        )

    def transposed(self) -> _Collective:
        return _Gather(self.axes, self.dim, self.tiled)


@dataclasses.dataclass(frozen=True)
class _Permute(_Collective):
    pairs: tuple[tuple[int, int], ...]

    def _words(self) -> Sequence[str]:
        return "ppermute", f"perm={list(self.pairs)}"

    def joined(self, parts: list[Tensor], index: int) -> Tensor:
        for source, target in self.pairs:
            if target == index:
                return parts[source]  # a copy that nobody else takes
        return torch.zeros_like(parts[index])

    def transposed(self) -> _Collective:
        return _Permute(self.axes, tuple((target, source) for source, target in self.pairs))


@dataclasses.dataclass(frozen=True)
class _Exchange(_Collective):
    split: int
    concat: int
    tiled: bool

    def _words(self) -> Sequence[str]:
        options = f"split_axis={self.split}", f"concat_axis={self.concat}", f"tiled={self.tiled}"
        return "all_to_all", *options

    def joined(self, parts: list[Tensor], index: int) -> Tensor:
        pieces = [_piece(p, self.split, len(parts), index, self.tiled) for p in parts]
        return (torch.cat if self.tiled else torch.stack)(pieces, self.concat)

    def transposed(self) -> _Collective:
        return _Exchange(self.axes, self.concat, self.split, self.tiled)


def _piece(part: Tensor, dim: int, count: int, index: int, tiled: bool) -> Tensor:
    """The piece of a part that a device gets."""
    length = part.shape[dim] // count
    return part.narrow(dim, index * length, length) if tiled else part.select(dim, index)
