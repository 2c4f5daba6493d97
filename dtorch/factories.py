"""Factories: torch's, with ``device_mesh=`` and ``placements=``, or ``device=``.

Each runs torch's function of the same name as a program on the mesh; a device makes its own
part where the rule allows it. Random factories draw the whole tensor on every device and keep
a part, so their values do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from . import tracer
from .dispatch import run_traced
from .mesh import DeviceMesh
from .placement import Placement, Placements, Replicate, counted, normalized
from .tensor import Tensor, default_mesh, resolve_mesh


def tensor(data: Any, **kwargs: Any) -> Tensor:
    """Returns a tensor of some data; the arguments are those of `Tensor`.

    Source: `torch.tensor`.
    """
    return Tensor(data, **kwargs)


class Factory(Protocol):
    """One of torch's factories, which also takes where its result lives."""

    def __call__(
        self,
        *args: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Returns a new tensor."""
        ...


def factory(name: str) -> Factory:
    """Returns the distributed form of one of torch's factories."""
    function = getattr(torch, name)

    def create(
        *args: Any,
        device: str | torch.device | None = None,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        requires_grad: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        given = resolve_mesh(device, device_mesh)
        if given is None and placements is None and _has_tensor(args, kwargs):
            return function(*args, **kwargs)
        mesh = given or _home()
        wanted = (Replicate(),) * mesh.ndim if placements is None else counted(placements, mesh)
        result = run_traced(_created, (name, mesh, wanted, args, kwargs), mesh, name)
        return result.requires_grad_() if requires_grad else result

    create.__name__ = create.__qualname__ = name
    create.__doc__ = _documentation(name)
    return create


def _has_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(a, torch.Tensor) for a in (*args, *kwargs.values()))


def _home() -> DeviceMesh:
    """The mesh of a factory that names none: the trace's, else the first CPU device."""
    active = tracer.current()
    return default_mesh() if active is None else active.mesh


def _created(
    name: str, mesh: DeviceMesh, wanted: Placements, args: Any, kwargs: Any
) -> torch.Tensor:
    """Runs in a trace: the factory, then whatever its layout still lacks."""
    active = tracer.current()
    assert active is not None
    with active.factories(mesh, wanted):
        result: Any = getattr(torch, name)(*args, **kwargs)
    placements = normalized(wanted, mesh, result.ndim)
    return (
        result if tuple(result.placements) == placements else result.redistribute(mesh, placements)
    )


def _documentation(name: str) -> str:
    return f"""Returns `torch.{name}` of the same arguments, laid out over a mesh.

    Args:
        args: As for `torch.{name}`.
        device: A device or device type: the one-device mesh of it.
        device_mesh: The mesh; not together with `device`.
        placements: One placement per mesh axis; replicated if not given.
        requires_grad: Whether autograd records operations on the result.
        kwargs: As for `torch.{name}`.

    Raises:
        PlacementError: The placements do not fit, or both `device` and `device_mesh` are given.
    """


arange = factory("arange")
bartlett_window = factory("bartlett_window")
blackman_window = factory("blackman_window")
empty = factory("empty")
empty_strided = factory("empty_strided")
eye = factory("eye")
full = factory("full")
hamming_window = factory("hamming_window")
hann_window = factory("hann_window")
kaiser_window = factory("kaiser_window")
linspace = factory("linspace")
logspace = factory("logspace")
normal = factory("normal")
ones = factory("ones")
rand = factory("rand")
randint = factory("randint")
randn = factory("randn")
randperm = factory("randperm")
scalar_tensor = factory("scalar_tensor")
tril_indices = factory("tril_indices")
triu_indices = factory("triu_indices")
zeros = factory("zeros")
