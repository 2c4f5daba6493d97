"""`Tensor`: a global tensor whose shards live on the devices of a mesh.

A `torch.Tensor` wrapper subclass that holds a `Spec` and, for each device, a handle to the
shard; it never holds data. Every torch function accepts it: `dispatch` installs its entry
points into this module, and they turn the call into a program.

It is over 500 lines because a class's public methods, with their docstrings, stay together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy
import torch

from . import printing
from .errors import DonatedError, PlacementError
from .mesh import DeviceMesh
from .parts import assembled, dense_stride, indices_to_fetch, place_parts, placed_parts
from .placement import Partial, Placement, Placements, Replicate, Shard, complete, normalized
from .runtime import (
    NATIVE,
    Failure,
    Shards,
    TensorFuture,
    check_not_on_worker,
    timeline,
    values_of,
)
from .runtime.timeline import Doing
from .spec import Box, Spec

if TYPE_CHECKING:
    from .aliases import AliasGroup


class EntryPoints:
    """What `dispatch` installs: how a call on tensors becomes a program that runs."""

    function: Callable[..., Any]
    operation: Callable[..., Any]
    redistribute: Callable[..., Any]
    put_back: Callable[..., Any]
    follow: Callable[..., Any]


_GRAD: Any = torch.Tensor.grad


class Tensor(torch.Tensor):
    """A tensor with a global value, laid out over a device mesh.

    Args:
        data: A torch tensor, a numpy array, or (nested lists of) numbers.
        dtype: The element type; that of `data` if not given.
        device: A device or device type; the tensor is on the one-device mesh of it.
        device_mesh: The mesh; not together with `device`.
        placements: One placement per mesh axis; replicated if not given.
        requires_grad: Whether autograd records operations on it.
        copy: Copy `data` now, each device its own part. With False the tensor reads the memory
            of a torch tensor later, and raises if it was written to meanwhile (CPU only). Other
            data, such as a numpy array, is always copied: writes to it cannot be noticed.

    Raises:
        PlacementError: The placements do not fit, or both `device` and `device_mesh` are given.

    Source: the arguments of `torch.tensor` and of PyTorch's `DTensor`.

    Example:
        >>> import dtorch
        >>> mesh = dtorch.DeviceMesh("cpu", [0, 1])
        >>> x = dtorch.Tensor(torch.ones(4, 2), device_mesh=mesh, placements=[dtorch.Shard(0)])
        >>> x.local_shards()[0].shape
        torch.Size([2, 2])
    """

    _spec: Spec
    _shards: Shards
    _aliases: AliasGroup | None = None
    _reduced: Tensor | None = None

    # Methods of torch that return a tensor of this class, which torch's types do not say.
    clone: Callable[..., Tensor]
    detach: Callable[[], Tensor]
    requires_grad_: Callable[..., Tensor]

    @staticmethod
    def __new__(  # noqa: D102 (the class says it)
        cls: type[Tensor],
        data: Any,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        requires_grad: bool = False,
        copy: bool = True,
    ) -> Tensor:
        if isinstance(data, Tensor):
            data = data.detach().clone() if copy else data
            return _converted(data, dtype, device, device_mesh, placements, requires_grad)
        mesh = resolve_mesh(device, device_mesh) or default_mesh()
        source = _as_torch(data, dtype)
        chosen = normalized(_default(placements, mesh), mesh, source.ndim)
        copy = copy or not isinstance(data, torch.Tensor)
        result = place(source, mesh, chosen, copy=copy)
        return result.requires_grad_(requires_grad) if requires_grad else result

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @staticmethod
    def _of(spec: Spec, shards: Shards) -> Tensor:
        """Returns the tensor of a spec and its shards."""
        if NATIVE is not None:
            return NATIVE.wrap(spec, shards, Tensor, 0)
        result = wrapper(Tensor, spec)
        result._spec = spec
        result._shards = shards
        return result

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return EntryPoints.function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return EntryPoints.operation(func, args, kwargs or {})

    def _donate(self) -> None:
        """Gives up the shards: the tensor must not be used again."""
        message = (
            f"a tensor of shape {list(self.shape)} was donated to a jitted call "
            "(donate_argnums) and is used again.\n  Fix: use the call's result, or do not donate."
        )
        gone = Failure(message, DonatedError(message))
        self._shards, self._reduced = Shards([gone] * len(self._shards)), None

    # -- layout ----------------------------------------------------------------------------

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the tensor is laid out over."""
        return self._spec.mesh

    @property
    def placements(self) -> list[Placement]:
        """One placement per axis of `device_mesh`."""
        return list(self._spec.placements)

    @property
    def grad(self) -> Tensor | None:
        """The gradient that `backward` has left: in this tensor's layout, never partial.

        Communication: on the first read after a backward that left it otherwise, as `redistribute`.
        """
        with torch._C.DisableTorchFunction():
            found: Any = _GRAD.__get__(self)
            wanted = self.device_mesh, complete(self._spec.placements)
            if found is None:
                return None
            if not isinstance(found, Tensor):  # PyTorch's own zeros, where no gradient flows
                found = place(found, *wanted)
            elif (found.device_mesh, found._spec.placements) == wanted:
                return found
            else:
                found = EntryPoints.redistribute(found, *wanted)
            _GRAD.__set__(self, found)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunction():
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        with torch._C.DisableTorchFunction():
            _GRAD.__delete__(self)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
    ) -> Tensor:
        """Returns the same global value in another layout. Differentiable.

        Args:
            device_mesh: The mesh; the tensor's own if not given.
            placements: One placement per axis; the tensor's own if not given and the mesh has
                the same shape, else replicated.

        Communication: the cheapest steps that `redistribution.plan` finds; none if the layout
        is the same or a slice of it.

        Raises:
            PlacementError: The placements do not fit the mesh or the tensor.
        """
        mesh = self.device_mesh if device_mesh is None else device_mesh
        if placements is None:
            alike = mesh.shape == self.device_mesh.shape
            placements = self.placements if alike else [Replicate()] * mesh.ndim
        return EntryPoints.redistribute(self, mesh, normalized(placements, mesh, self.ndim))

    def redistribute_like(self, other: Tensor) -> Tensor:
        """Returns the same global value in the layout of another tensor.

        Args:
            other: A tensor whose mesh and placements to take.

        Raises:
            PlacementError: The placements of `other` name a dim that this tensor lacks.
        """
        return self.redistribute(other.device_mesh, other.placements)

    def redistribute_by_dict(
        self,
        device_mesh: DeviceMesh | None = None,
        placements_dict: Mapping[str, Placement] | None = None,
        default_placement_mode: Literal["raise_error", "replicate", "keep"] = "raise_error",
    ) -> Tensor:
        """Returns the same global value with placements given by axis name.

        Args:
            device_mesh: The mesh; the tensor's own if not given. It must have axis names.
            placements_dict: A placement for each axis name; names that the mesh lacks are
                ignored.
            default_placement_mode: What an axis that the dict does not name gets: an error,
                `Replicate()`, or the placement of the axis of that name now.

        Raises:
            PlacementError: An axis has no placement, or the mode is unknown.
        """
        mesh = self.device_mesh if device_mesh is None else device_mesh
        given = placements_dict or {}
        default = functools.partial(self._default_placement, default_placement_mode)
        if mesh.mesh_dim_names is None:
            raise PlacementError(f"{mesh!r} has no axis names, which redistribute_by_dict needs.")
        placements = [given[n] if n in given else default(n, mesh) for n in mesh.mesh_dim_names]
        return self.redistribute(mesh, placements)

    def _default_placement(self, mode: str, name: str, mesh: DeviceMesh) -> Placement:
        names = self.device_mesh.mesh_dim_names or ()
        if mode == "replicate" or (mode == "keep" and name not in names):
            return Replicate()
        if mode == "keep":
            return self.placements[names.index(name)]
        if mode != "raise_error":
            raise PlacementError(
                f"default_placement_mode={mode!r}: expected 'raise_error', 'replicate' or 'keep'."
            )
        raise PlacementError(
            f"placements_dict has no placement for axis {name!r} of {mesh!r}.\n"
            "  Fix: name every axis, or pass default_placement_mode='replicate' or 'keep'."
        )

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the tensor with another dtype, device or mesh.

        Args:
            args: As for `torch.Tensor.to`; a `DeviceMesh` is accepted wherever a device is.
            kwargs: As for `torch.Tensor.to`, and ``device_mesh=``, ``placements=``.

        A device, or device type, other than the tensor's means the one-device mesh of it.
        """
        mesh = kwargs.pop("device_mesh", None)
        placements = kwargs.pop("placements", None)
        given = [a for a in args if isinstance(a, DeviceMesh)]
        args = tuple(a for a in args if not isinstance(a, DeviceMesh))
        mesh = given[0] if given else mesh
        args, device = _without_device(args, kwargs)
        if device is not None:
            if mesh is not None:
                raise PlacementError(f"to(): both device={device!r} and device_mesh={mesh!r}.")
            mesh = self._mesh_of_device(device)
        result = self if mesh is None and placements is None else self._moved(mesh, placements)
        return cast(Tensor, torch.Tensor.to(result, *args, **kwargs)) if args or kwargs else result

    def _mesh_of_device(self, device: str | torch.device | int) -> DeviceMesh | None:
        wanted = torch.device(device)
        own = self.device_mesh
        if wanted.type == own.device_type and wanted.index in (None, own.devices[0].id):
            return None
        return resolve_mesh(wanted, None)

    def _moved(self, mesh: DeviceMesh | None, placements: Sequence[Placement] | None) -> Tensor:
        return self.redistribute(mesh, placements)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the tensor on the CPU: itself, or on the one-device CPU mesh."""
        return self.to("cpu")

    def cuda(self, device: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the tensor on a CUDA device: itself, or on the one-device mesh of it."""
        return self.to("cuda" if device is None else device)

    # -- fetching --------------------------------------------------------------------------

    def to_torch(self) -> torch.Tensor:
        """Returns the global value, detached, as a new torch tensor on the mesh's first device.

        Communication: the shards are copied to the caller; a replicated value once.

        Blocking: until the value is computed.

        Raises:
            WorkerError: An operation that the value depends on failed.
        """
        check_not_on_worker("fetching a tensor")
        if timeline.recorder is None:
            return self._fetched()
        with timeline.noted(Doing.FETCH, "to_torch"):
            return self._fetched()

    def _fetched(self) -> torch.Tensor:
        wanted = indices_to_fetch(self._spec)
        if len(wanted) != 1:
            return self.to_torch_async().get()
        (index,) = wanted
        part = self._shards.copy(index)
        if type(part) is Failure:
            raise part.error()
        return part

    def to_torch_async(self, device: str | torch.device | None = None) -> TensorFuture:
        """Returns a future of the global value, detached; does not wait.

        Args:
            device: Where the value is to be; the mesh's first device if not given. With ``"cpu"``,
                accelerators copy it into pinned memory, beside what they compute, and the future
                is ready when it is there.

        Communication: as for `to_torch`, when the value is asked for; as for `to` if it is to be
        elsewhere.

        Example:
            >>> import dtorch
            >>> dtorch.ones(2).to_torch_async(device="cpu").get()
            tensor([1., 1.])
        """
        check_not_on_worker("fetching a tensor")
        if device is not None and self._mesh_of_device(device) is not None:
            return self.detach().to(device).to_torch_async()
        spec = self._spec
        wanted = indices_to_fetch(spec)
        return TensorFuture(self._shards, wanted, lambda parts: assembled(spec, wanted, parts))

    def local_shards(self) -> dict[int, torch.Tensor]:
        """Returns a copy of each device's local tensor, by device id.

        Blocking: until they are computed.

        Raises:
            WorkerError: An operation that a shard depends on failed.
        """
        check_not_on_worker("fetching a tensor")
        devices = self.device_mesh.devices
        self._shards.wait(range(len(devices)))
        parts = values_of(self._shards, range(len(devices)))
        return {d.id: p.detach().clone() for d, p in zip(devices, parts, strict=True)}

    def numpy(self, *, force: bool = False) -> numpy.ndarray[Any, Any]:
        """Returns the global value as a new numpy array.

        Args:
            force: As for `torch.Tensor.numpy`: also where the tensor requires grad, is
                conjugated, or is on another device.

        Blocking: until the value is computed.
        """
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. "
                "Use tensor.detach().numpy() instead."
            )
        return self.to_torch().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def tolist(self) -> Any:
        """Returns the global value as nested lists of Python numbers.

        Blocking: until the value is computed.
        """
        return self.to_torch().tolist()

    # -- memory that a distributed tensor does not have ------------------------------------

    def apply_(self, callable: Any) -> Any:
        """Refused: it would run Python on each element in place."""
        raise self._no_memory("apply_", TypeError)

    def map_(self, other: Any, callable: Any) -> Any:
        """Refused: it would run Python on each element in place."""
        raise self._no_memory("map_", TypeError)

    def map2_(self, x: Any, y: Any, callable: Any) -> Any:
        """Refused: it would run Python on each element in place."""
        raise self._no_memory("map2_", TypeError)

    def data_ptr(self) -> int:
        """Refused: there is no one address."""
        raise self._no_memory("data_ptr", RuntimeError)

    def _no_memory(self, name: str, kind: type[Exception]) -> Exception:
        return kind(
            f"{name}() needs the memory of the tensor, which a distributed tensor of shape "
            f"{list(self.shape)} on {self.device_mesh!r} does not have in one place.\n"
            "  Fix: use torch functions, or call it on to_torch(), a copy of the global value."
        )

    def __dlpack__(
        self,
        *,
        stream: Any = -1,
        max_version: tuple[int, int] | None = None,
        dl_device: Any = None,
        copy: bool | None = None,
    ) -> Any:
        """Exports a fresh copy of the global value. Blocking: until it is computed."""
        if copy is False:
            raise BufferError(
                f"a distributed tensor of shape {list(self.shape)} cannot be exported without a "
                "copy.\n  Fix: leave out copy=False."
            )
        value = self.detach().to_torch().resolve_conj().resolve_neg()
        return value.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    # -- Python protocols ------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return printing.format_tensor(self)

    def __format__(self, format_spec: str) -> str:
        if self.ndim == 0 and type(self) is Tensor:
            return format(self.item(), format_spec)
        return object.__format__(self, format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment.\n  Fix: detach() it first."
            )
        with torch.no_grad():
            copied = self.detach().clone()
        result = _with_python_state(copied, self)
        memo[id(self)] = result
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        value = self.detach().to_torch()
        is_parameter = isinstance(self, torch.nn.Parameter)
        layout = (self.device_mesh, self._spec.placements)
        return (_rebuild, (value, *layout, self.requires_grad, is_parameter))

    def __len__(self) -> int:
        if self.ndim == 0:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]


if NATIVE is not None:  # _spec, _shards and _reduced become fields of the C++ object
    NATIVE.install_fields(Tensor)

_Wrapper = TypeVar("_Wrapper", bound=Tensor)
_make_wrapper: Any = torch.Tensor._make_wrapper_subclass  # quickest with positional arguments


def wrapper(kind: type[_Wrapper], spec: Spec, offset: int = 0) -> _Wrapper:
    """Returns a new tensor object of a spec that holds nothing yet.

    Args:
        kind: Its class.
        spec: What torch shall see: shape, strides, dtype, device, conj and neg bits.
        offset: Its storage offset, in elements.
    """
    if NATIVE is not None:
        return NATIVE.wrap(spec, None, kind, offset)
    strided = torch.strided
    result = _make_wrapper(
        kind, spec.shape, spec.stride, offset, None, spec.dtype, strided, spec.torch_device
    )
    if spec.conj:
        torch._C._set_conj(result, True)
    if spec.neg:
        torch._C._set_neg(result, True)
    return result


def _with_python_state(copied: Tensor, original: Tensor) -> Tensor:
    if isinstance(original, torch.nn.Parameter):
        return torch.nn.Parameter(copied, original.requires_grad)  # pyright: ignore[reportReturnType]
    return copied.requires_grad_(original.requires_grad) if original.requires_grad else copied


def _rebuild(
    value: torch.Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    result = place(value, mesh, placements, copy=False)
    if is_parameter:
        return torch.nn.Parameter(result, requires_grad)  # pyright: ignore[reportReturnType]
    return result.requires_grad_(requires_grad) if requires_grad else result


# -- making tensors ------------------------------------------------------------------------


def resolve_mesh(
    device: str | torch.device | int | None, device_mesh: DeviceMesh | None
) -> DeviceMesh | None:
    """Returns the mesh that `device=` or `device_mesh=` asks for, or None if neither is given.

    Raises:
        PlacementError: Both are given.
    """
    if device is None:
        return device_mesh
    if device_mesh is not None:
        raise PlacementError(
            f"both device={device!r} and device_mesh={device_mesh!r} are given. "
            "Fix: pass one of them."
        )
    if isinstance(device, DeviceMesh):
        return device
    wanted = torch.device(device)
    return DeviceMesh(wanted.type, [wanted.index or 0])


@functools.cache
def default_mesh() -> DeviceMesh:
    """Returns the mesh of tensors that name none: the first CPU device."""
    return DeviceMesh("cpu")


def _default(placements: Sequence[Placement] | None, mesh: DeviceMesh) -> Sequence[Placement]:
    return (Replicate(),) * mesh.ndim if placements is None else placements


def _as_torch(data: Any, dtype: torch.dtype | None) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        source = data.detach()
        return source if dtype is None else source.to(dtype)
    return torch.as_tensor(data, dtype=dtype)


def _converted(
    data: Tensor,
    dtype: torch.dtype | None,
    device: Any,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    requires_grad: bool,
) -> Tensor:
    mesh = resolve_mesh(device, mesh) or data.device_mesh
    result = data.detach()
    if mesh != data.device_mesh or placements is not None:
        result = result.redistribute(mesh, placements)
    result = result.to(dtype) if dtype is not None else result
    return result.requires_grad_(requires_grad) if requires_grad else result


def place(
    source: torch.Tensor, mesh: DeviceMesh, placements: Placements, *, copy: bool = True
) -> Tensor:
    """Returns a tensor of a torch tensor's value, each device given its own part.

    Args:
        source: The global value.
        mesh: The mesh.
        placements: Normalised placements.
        copy: Copy the parts now; otherwise they alias `source`, guarded by its version.
    """
    _check_dense(source)
    source = source.detach().resolve_conj().resolve_neg()
    stride = dense_stride(source)
    spec = Spec.of(source.shape, source.dtype, mesh, placements, stride)
    return Tensor._of(spec, place_parts(source, spec, copy))


def _check_dense(source: torch.Tensor) -> None:
    if source.layout != torch.strided or source.is_nested:
        kind = "nested" if source.is_nested else str(source.layout).removeprefix("torch.")
        dense = "torch.nested.to_padded_tensor(x, 0)" if source.is_nested else "x.to_dense()"
        raise TypeError(
            f"a {kind} tensor cannot be distributed: dtorch holds dense tensors only.\n"
            f"  Fix: {dense}."
        )


def from_boxes(spec: Spec, read: Callable[[Box], torch.Tensor]) -> Tensor:
    """Returns a tensor whose parts are read box by box, each distinct one once.

    Args:
        spec: The spec of the tensor.
        read: Returns a box of the global value as a new torch tensor.
    """
    return Tensor._of(spec, placed_parts(spec, lambda box, device: read(box).to(device)))


def _without_device(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], str | torch.device | int | None]:
    if args and isinstance(args[0], (str, torch.device)):
        return args[1:], args[0]
    return args, kwargs.pop("device", None)


# So that `torch.load` reads tensors without weights_only=False.
torch.serialization.add_safe_globals([Shard, Replicate, Partial, _rebuild])
