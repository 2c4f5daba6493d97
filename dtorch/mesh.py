"""`DeviceMesh`: devices arranged in a grid with named axes.

A mesh is a frozen value: a device type, a grid of device ids, and optionally a name for each
axis. An *axis* always belongs to a mesh; a *dim* always belongs to a tensor. A device is the
pair ``(device_type, id)``; its *coordinate* is its place in the grid. On the CPU any id is a
virtual device with a worker of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from .errors import MeshError

VIRTUAL_DEVICES_VARIABLE = "DTORCH_VIRTUAL_DEVICES"


class Device(NamedTuple):
    """One device of a mesh: its type and its id."""

    type: str
    id: int

    def __str__(self) -> str:
        return f"{self.type}:{self.id}"


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """The place of a mesh among the stages of one `DeviceMesh.unbind` call."""

    parent: DeviceMesh
    axes: tuple[int, ...]
    index: int


class DeviceMesh:
    """A grid of devices with one (optional) name per axis.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, or another backend of this torch.
        ids: Nested lists, a numpy array or a torch tensor of distinct device ids. One integer
            makes a mesh without axes; nothing makes the one-device mesh ``[0]``.
        mesh_dim_names: One distinct name per axis.

    Raises:
        MeshError: The ids are ragged, repeated or negative, the names do not fit, or this
            torch has no such backend or device.

    Source: `torch.distributed.device_mesh.DeviceMesh`, without processes or ranks.

    Example:
        >>> DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))
    """

    __slots__ = ("_hash", "device_type", "devices", "mesh_dim_names", "shape", "stage")

    device_type: str
    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None
    devices: tuple[Device, ...]
    stage: Stage | None

    def __init__(
        self,
        device_type: str,
        ids: Any = (0,),
        mesh_dim_names: Sequence[str] | None = None,
    ) -> None:
        shape, flat = _grid(ids)
        names = _checked_names(mesh_dim_names, len(shape))
        _check_available(device_type, flat)
        self._set(device_type, shape, flat, names, None)

    def _set(
        self,
        device_type: str,
        shape: tuple[int, ...],
        flat: Sequence[int],
        names: tuple[str, ...] | None,
        stage: Stage | None,
    ) -> None:
        self.device_type = device_type
        self.shape = shape
        self.mesh_dim_names = names
        self.devices = tuple(Device(device_type, i) for i in flat)
        self.stage = stage
        self._hash = hash((device_type, shape, self.devices, names))

    @classmethod
    def _derived(
        cls,
        source: DeviceMesh,
        shape: tuple[int, ...],
        flat: Sequence[int],
        names: tuple[str, ...] | None,
        stage: Stage | None = None,
    ) -> DeviceMesh:
        mesh = object.__new__(cls)
        mesh._set(source.device_type, shape, flat, names, stage)
        return mesh

    # -- what it looks like ----------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def mesh(self) -> torch.Tensor:
        """The device ids as an int64 tensor of shape `shape`."""
        return torch.tensor([d.id for d in self.devices], dtype=torch.int64).reshape(self.shape)

    @property
    def _ids(self) -> numpy.ndarray[Any, Any]:
        """As `mesh`, but no torch operation: a function that is being traced may ask for it."""
        return numpy.array([d.id for d in self.devices], dtype=numpy.int64).reshape(self.shape)

    def size(self, axis: int | str | None = None) -> int:
        """Returns the number of devices, or the length of one axis (an index or a name)."""
        return len(self.devices) if axis is None else self.shape[self.axis(axis)]

    def axis(self, axis: int | str) -> int:
        """Returns the index of an axis given by name or by (possibly negative) index."""
        found = self._find_axis(axis)
        if found is None:
            raise MeshError(f"{self!r} has no axis {axis!r}. {self._axes_hint()}")
        return found

    def _find_axis(self, axis: int | str) -> int | None:
        if isinstance(axis, str):
            names = self.mesh_dim_names or ()
            return names.index(axis) if axis in names else None
        if not hasattr(axis, "__index__"):
            raise TypeError(
                f"an axis is a name or an index, not {axis!r}.\n  Fix: {self._axes_hint()}"
            )
        return axis % self.ndim if -self.ndim <= axis < self.ndim else None

    def _axes_hint(self) -> str:
        if self.mesh_dim_names:
            return f"Its axes are {', '.join(map(repr, self.mesh_dim_names))}."
        return f"Its {self.ndim} axes have no names; pass mesh_dim_names=(...) to name them."

    def axis_name(self, axis: int) -> str:
        """Returns how messages call an axis: its name, or its index where it has none."""
        return repr(self.mesh_dim_names[axis]) if self.mesh_dim_names else str(axis)

    def coordinates(self) -> list[tuple[int, ...]]:
        """Returns each device's coordinate, in the order of `devices` (row-major)."""
        return list(itertools.product(*(range(n) for n in self.shape)))

    def torch_device(self, index: int = 0) -> torch.device:
        """Returns the torch device that holds the data of the mesh's `index`-th device."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        count = torch.get_device_module(self.device_type).device_count()
        return torch.device(self.device_type, self.devices[index].id % count)

    # -- sub-meshes ------------------------------------------------------------------------

    def unbind(self, axes: int | str | Sequence[int | str]) -> list[DeviceMesh]:
        """Returns the sub-meshes along one axis or several, in order, without those axes.

        The result's meshes are the *stages* of this call: their order is remembered, and an
        operation whose operands live on several stages runs on the latest of them. Names that
        the mesh lacks are ignored; if it has none of them the result is ``[self]``.

        Raises:
            MeshError: The mesh has no axis of an index.
            TypeError: An axis is neither a name nor an index.

        Example:
            >>> DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("pp", "tp")).unbind("pp")
            [DeviceMesh('cpu', [0, 1], mesh_dim_names=('tp',)), DeviceMesh('cpu', [2, 3], mesh_dim_names=('tp',))]
        """  # noqa: E501
        wanted = list(axes) if isinstance(axes, Sequence) and not isinstance(axes, str) else [axes]
        found = [self._find_axis(a) if isinstance(a, str) else self.axis(a) for a in wanted]
        cut = tuple(dict.fromkeys(a for a in found if a is not None))
        if not cut:
            return [self]
        kept = tuple(a for a in range(self.ndim) if a not in cut)
        grid = self._ids.transpose(*cut, *kept).reshape(-1, *(self.shape[a] for a in kept))
        names = self.mesh_dim_names and tuple(self.mesh_dim_names[a] for a in kept)
        shape = tuple(self.shape[a] for a in kept)
        return [
            DeviceMesh._derived(self, shape, ids.flatten().tolist(), names, Stage(self, cut, i))
            for i, ids in enumerate(grid)
        ]

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """Returns the sub-mesh of the named axes, at index 0 of every other axis.

        Example:
            >>> DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))["tp"]
            DeviceMesh('cpu', [0, 1], mesh_dim_names=('tp',))
        """
        wanted = (axes,) if isinstance(axes, str) else tuple(axes)
        kept = tuple(self.axis(a) for a in wanted)
        if len(set(kept)) != len(kept):
            raise MeshError(f"{self!r}[{axes!r}] names an axis twice; name each once.")
        others = tuple(a for a in range(self.ndim) if a not in kept)
        grid = self._ids.transpose(*others, *kept).reshape(-1, *(self.shape[a] for a in kept))[0]
        names = self.mesh_dim_names and tuple(self.mesh_dim_names[a] for a in kept)
        return DeviceMesh._derived(self, tuple(grid.shape), grid.flatten().tolist(), names)

    # -- value semantics -------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.devices == other.devices
            and self.shape == other.shape
            and self.mesh_dim_names == other.mesh_dim_names
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        names = f", mesh_dim_names={self.mesh_dim_names}" if self.mesh_dim_names else ""
        return f"DeviceMesh({self.device_type!r}, {self._ids.tolist()}{names})"

    def __reduce__(self) -> tuple[Any, ...]:
        flat = [d.id for d in self.devices]
        return (_rebuild, (self.device_type, self.shape, flat, self.mesh_dim_names, self.stage))


def init_device_mesh(
    device_type: str,
    mesh_shape: int | Sequence[int],
    mesh_dim_names: Sequence[str] | None = None,
) -> DeviceMesh:
    """Returns a mesh of the first ``prod(mesh_shape)`` devices of a type, in row-major order.

    Args:
        device_type: As for `DeviceMesh`.
        mesh_shape: The length of each axis; an integer means one axis.
        mesh_dim_names: One distinct name per axis.

    Raises:
        MeshError: A length is not positive, or as for `DeviceMesh`.

    Source: `torch.distributed.device_mesh.init_device_mesh`.

    Example:
        >>> init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))
    """
    shape = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(mesh_shape)
    if any(not isinstance(n, int) or n < 1 for n in shape):
        raise MeshError(f"mesh_shape={mesh_shape!r}: every axis needs at least one device.")
    return DeviceMesh(device_type, numpy.arange(math.prod(shape)).reshape(shape), mesh_dim_names)


def in_stage_order(meshes: Iterable[DeviceMesh]) -> list[DeviceMesh] | None:
    """Returns the distinct meshes in their order as stages, or None if they are of several calls.

    Args:
        meshes: Any meshes; one alone need not be a stage.
    """
    distinct = list(dict.fromkeys(meshes))
    if len(distinct) < 2:
        return distinct
    stages = [m.stage for m in distinct if m.stage is not None]
    if len(stages) < len(distinct) or len({(s.parent, s.axes) for s in stages}) > 1:
        return None
    return sorted(distinct, key=lambda m: m.stage.index if m.stage else 0)


def _rebuild(
    device_type: str,
    shape: tuple[int, ...],
    flat: list[int],
    names: tuple[str, ...] | None,
    stage: Stage | None,
) -> DeviceMesh:
    _check_available(device_type, flat)
    mesh = object.__new__(DeviceMesh)
    mesh._set(device_type, shape, flat, names, stage)
    return mesh


def _grid(ids: Any) -> tuple[tuple[int, ...], list[int]]:
    try:
        grid = numpy.asarray(ids.tolist() if isinstance(ids, torch.Tensor) else ids)
        if grid.dtype.kind not in "iufcb":
            raise TypeError(f"they hold {grid.dtype.type.__name__}")
    except (ValueError, TypeError, RuntimeError) as e:
        raise MeshError(
            f"device ids {ids!r} are not a rectangular grid of integers ({e}). "
            "Pass nested lists of equal lengths, such as [[0, 1], [2, 3]]."
        ) from e
    if not grid.size:
        raise MeshError(f"device ids {ids!r} hold no device; a mesh needs at least one.")
    if grid.dtype.kind not in "iu":
        raise MeshError(f"device ids {ids!r} are not integers.")
    flat = grid.flatten().tolist()
    repeated = sorted({i for i in flat if flat.count(i) > 1}) if len(set(flat)) < len(flat) else []
    if repeated:
        raise MeshError(f"device ids {ids!r} repeat {repeated}; each device may appear once.")
    if min(flat) < 0:
        raise MeshError(f"device ids {ids!r} hold the negative id {min(flat)}.")
    return tuple(grid.shape), flat


def _checked_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    names = (names,) if isinstance(names, str) else tuple(names)
    if len(names) != ndim:
        raise MeshError(f"mesh_dim_names={names} has {len(names)} names for {ndim} axes.")
    if len(set(names)) != ndim or not all(isinstance(n, str) for n in names):
        raise MeshError(f"mesh_dim_names={names}: every axis needs a string name of its own.")
    return names


def _check_available(device_type: str, flat: Sequence[int]) -> None:
    if device_type == "cpu":
        return
    try:
        module = torch.get_device_module(device_type)
        count = module.device_count() if module.is_available() else 0
    except (RuntimeError, AttributeError) as e:
        raise MeshError(
            f"torch {torch.__version__} has no backend {device_type!r} ({e}). "
            "Use 'cpu', or a torch that was built for it."
        ) from e
    if count == 0:
        raise MeshError(
            f"torch {torch.__version__} sees no {device_type!r} device here. "
            "Use DeviceMesh('cpu', ...), or a torch build for that device."
        )
    available = max(count, int(os.environ.get(VIRTUAL_DEVICES_VARIABLE, "0") or 0))
    if max(flat) >= available:
        raise MeshError(
            f"device id {max(flat)} is not one of the {count} {device_type!r} devices here. "
            f"Set {VIRTUAL_DEVICES_VARIABLE}={max(flat) + 1} to map several to one device."
        )


# So that `torch.load` reads meshes without weights_only=False.
torch.serialization.add_safe_globals([DeviceMesh, Stage, _rebuild])
