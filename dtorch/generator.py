"""The state of random generators, as values that programs take and return.

dtorch's own generator continues PyTorch's: its state is that of `torch.default_generator`
whenever that has been seeded or drawn from since dtorch last looked, and the state that the
last drawing program returned otherwise. So `torch.manual_seed` seeds both, and on one device a
program draws what PyTorch would.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from .mesh import DeviceMesh
from .placement import Replicate
from .runtime import Failure, Shards
from .spec import Spec
from .tensor import Tensor
from .tracer import read_state

lock = threading.RLock()
"""Held from reading a state until the program that advances it has been submitted."""
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class _Default:
    state: Tensor | None = None
    seen: torch.Tensor | None = None


def manual_seed(seed: int) -> torch.Generator:
    """Seeds dtorch's generator and PyTorch's, and returns the latter.

    Args:
        seed: As for `torch.manual_seed`.
    """
    return torch.manual_seed(seed)


def state_of(generator: torch.Generator | None, mesh: DeviceMesh) -> Tensor:
    """Returns the present state of a generator, replicated over a mesh.

    Args:
        generator: A generator of the caller, or None for dtorch's own.
        mesh: The mesh of the program that draws.
    """
    replicated = (Replicate(),) * mesh.ndim
    if generator is not None:
        return _on_hosts(read_state(_checked(generator, mesh)), mesh)
    source = _torch_default(mesh)
    now = read_state(source)
    state, seen = _Default.state, _Default.seen
    if state is None or seen is None or _failed(state) or not torch.equal(now, seen):
        state = _on_hosts(now, mesh)
    if state.device_mesh != mesh:
        state = state.redistribute(mesh, replicated)
    _Default.state = state
    return state


def _on_hosts(state: torch.Tensor, mesh: DeviceMesh) -> Tensor:
    """A state as a value of a mesh; generators read it on the host, so it stays there."""
    spec = Spec.of(state.shape, state.dtype, mesh, (Replicate(),) * mesh.ndim)
    return Tensor._of(spec, Shards([state] * len(mesh.devices)))


def _failed(state: Tensor) -> bool:
    """Whether the program that returned a state is known to have failed, and the state with it."""
    shards = state._shards
    return any(
        shards.is_ready((i,)) and isinstance(shards.get(i), Failure) for i in range(len(shards))
    )


def advance(generator: torch.Generator | None, state: Tensor) -> None:
    """Remembers the state that a drawing program returned.

    Args:
        generator: As for `state_of`.
        state: The new state.

    Blocking: for a generator of the caller, until the program has run, because its state is
    written back into the generator.
    """
    if generator is not None:
        generator.set_state(state.to_torch())
        return
    source = _torch_default(state.device_mesh)
    # A draw marks the moment: seeding PyTorch again, even alike, can then be told apart.
    torch.empty((), dtype=torch.int64, device=source.device).random_(generator=source)
    _Default.state, _Default.seen = state, read_state(source)


def _torch_default(mesh: DeviceMesh) -> torch.Generator:
    if mesh.device_type == "cpu":
        return torch.default_generator
    device = mesh.torch_device()
    module: Any = torch.get_device_module(device.type)
    return module.default_generators[device.index]


def _checked(generator: torch.Generator, mesh: DeviceMesh) -> torch.Generator:
    if generator.device.type != mesh.device_type:
        raise ValueError(
            f"a generator of device {generator.device} cannot draw for {mesh!r}; "
            f"make it with torch.Generator({mesh.device_type!r})."
        )
    return generator
