"""Pytrees: optree's, extended by the containers that are registered with torch.

Containers that `torch.utils._pytree` knows (the outputs of Hugging Face models among them) are
registered with optree when they are first met.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
import torch.utils._pytree as torch_pytree

from .placement import Placement

NAMESPACE = "dtorch"
_register_node: Any = optree.register_pytree_node  # its types ask for collections of leaves


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of a tree and its structure."""
    leaves, treespec = optree.tree_flatten(tree, is_leaf=_is_leaf, namespace=NAMESPACE)
    if any(_register(type(leaf)) for leaf in leaves):
        return flatten(tree)
    return leaves, treespec


def unflatten(treespec: Any, leaves: list[Any]) -> Any:
    """Returns the tree of a structure and its leaves."""
    return optree.tree_unflatten(treespec, leaves)


def map_leaves(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Returns a tree with a function applied to every leaf."""
    return optree.tree_map(function, tree, *rest, is_leaf=_is_leaf, namespace=NAMESPACE)


def spread(prefix: Any, tree: Any) -> list[Any]:
    """Returns, for each leaf of a tree, the leaf of a prefix of the tree that stands for it.

    Raises:
        ValueError: It is no prefix.
    """
    return optree.broadcast_prefix(prefix, tree, is_leaf=_is_leaf, namespace=NAMESPACE)


def leaf_names(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Returns the paths of the leaves (parts joined with dots), the leaves, and the structure."""
    flatten(tree)  # registers containers on the way
    paths, leaves, treespec = optree.tree_flatten_with_path(
        tree, is_leaf=_is_leaf, namespace=NAMESPACE
    )
    return [".".join(map(str, path)) for path in paths], leaves, treespec


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts, keyed by the parts of the names of their leaves between dots."""
    tree: dict[str, Any] = {}
    for name, value in leaves.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def argument_path(names: Sequence[str], values: Any, number: int) -> str:
    """Returns the path of a leaf of several values with names, as it would be written in Python."""
    paths, _, _ = optree.tree_flatten_with_path(values, is_leaf=_is_leaf, namespace=NAMESPACE)
    first: int = paths[number][0]
    return names[first] + "".join(f"[{p!r}]" for p in paths[number][1:])


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (torch.Size, torch.Tensor))


_unregistered: set[type] = set()


def _register(kind: type) -> bool:
    """Registers a container that torch knows; returns whether it is now a node."""
    if kind in _LEAVES or kind in _unregistered:
        return False
    node = torch_pytree.SUPPORTED_NODES.get(kind)
    if node is None or issubclass(kind, torch.Size):
        _unregistered.add(kind) if len(_unregistered) < 10_000 else None
        return False
    _register_node(
        kind,
        lambda value, node=node: tuple(node.flatten_fn(value)),
        lambda context, children, node=node: node.unflatten_fn(list(children), context),
        namespace=NAMESPACE,
    )
    return True


_LEAVES: set[type] = {
    torch.Tensor,
    torch.nn.Parameter,
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    torch.Size,
    enum.Enum,
    Placement,
}

_register_node(
    slice,
    lambda s: ((s.start, s.stop, s.step), None),
    lambda _, children: slice(*children),
    namespace=NAMESPACE,
)
