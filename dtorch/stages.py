"""Operands on several stages, brought to the latest above autograd.

An operation whose operands live on several stages runs on the latest of them. Where gradients flow,
autograd has to know of the transfer: then the gradient is sent back to the stage that the operand
came from, and the backward of everything before runs where its forward ran.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .mesh import in_stage_order
from .placement import Replicate, complete
from .tensor import Tensor
from .tree import flatten, unflatten

__all__ = ["Move", "moved", "on_latest_stage"]

Move = Callable[[Tensor, Any, Any], Tensor]
"""Brings a tensor to a mesh, with placements; autograd records it."""


def on_latest_stage(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], move: Move
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with its tensors on the latest of their stages.

    They stay as they are where their meshes are no stages of one call, and where the function
    would write to one of them.

    Args:
        func: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        move: Brings a tensor to another mesh.
    """
    leaves, treespec = flatten((args, kwargs))
    meshes = [leaf.device_mesh for leaf in leaves if isinstance(leaf, Tensor)]
    stages = in_stage_order(meshes) if len(meshes) > 1 else None
    if stages is None or len(stages) < 2 or _writes(func, kwargs):
        return args, kwargs
    home = stages[-1]

    def brought(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device_mesh == home:
            return leaf
        alike = leaf.device_mesh.shape == home.shape
        placements = complete(leaf.placements) if alike else (Replicate(),) * home.ndim
        return move(leaf, home, placements)

    return unflatten(treespec, [brought(leaf) for leaf in leaves])


def moved(tensor: Tensor, mesh: Any, placements: Any) -> Tensor:
    """Returns a tensor on another mesh."""
    return tensor.redistribute(mesh, placements)


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    name: str = getattr(func, "__name__", "")
    if name.startswith("__"):
        return (name.startswith("__i") and name not in _PLAIN) or name == "__setitem__"
    return name.endswith("_") or kwargs.get("out") is not None


_PLAIN = {"__index__", "__int__", "__invert__"}
