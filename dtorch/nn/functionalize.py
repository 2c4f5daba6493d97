"""A `torch.nn.Module` as a pure function over an explicit tree of its parameters and buffers.

The tree has the form that the rest of dtorch takes: nested dicts whose paths, joined with dots,
are the names of the module's `state_dict`. So a plan of `dtorch.parallel` lays it out, and
`dtorch.parallel.load` fills it. Nothing here knows of meshes or layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["Apply", "functionalize"]


class Apply:
    """A module as a function of its parameters; made by `functionalize`.

    Attributes:
        module: The module. Its own parameters and buffers are never read.
        leaves: The names of the leaves of the tree, in the module's order.
        tied: Every further name of a leaf, to the name that the leaf has in the tree.
        buffers: The names of the leaves that are buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.__name__ = type(module).__name__
        self._leaf_of = dict(_first_names(module))
        self.tied = {name: leaf for name, leaf in self._leaf_of.items() if name != leaf}
        self.leaves = [name for name, leaf in self._leaf_of.items() if name == leaf]
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        self.buffers = frozenset(name for name in self.leaves if name not in parameters)

    def __call__(self, params: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module returns for these arguments, computed with these parameters.

        Args:
            params: A tree as of `functionalize`, of plain or distributed tensors.
            *args: The module's own arguments.
            **kwargs: The module's own keyword arguments.

        A buffer that the module changes, as batch normalisation in training mode does, is changed
        in `params`, in place; so is one that the module assigns anew. Inside `jit` that is what
        happens to every argument that is changed: the caller's tensor has the new value after
        the call.

        Raises:
            ValueError: `params` has not the module's leaves; all that are missing or not known
                are listed. Or the module assigned a tensor of another shape to a name.
        """
        given = dict(_walk(params))
        self._check_names(given)
        before = {name: given[leaf] for name, leaf in self._leaf_of.items()}
        values = dict(before)
        result = torch.func.functional_call(
            self.module, values, args, kwargs, tie_weights=False, strict=False
        )
        for name, value in values.items():
            if value is not before[name]:
                _assign(name, before[name], value)
        return result

    def __repr__(self) -> str:
        return f"<apply of {self.__name__}: {len(self.leaves)} leaves>"

    def split(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the parameters and the buffers, as two trees; `join` undoes it.

        So that `dtorch.grad` differentiates by the first alone: buffers may be integers.

        Raises:
            ValueError: As for a call.
        """
        given = dict(_walk(params))
        self._check_names(given)
        parts = {n: v for n, v in given.items() if n not in self.buffers}
        return _nested(parts), _nested({n: given[n] for n in self.leaves if n in self.buffers})

    def join(self, parameters: Mapping[str, Any], buffers: Mapping[str, Any]) -> dict[str, Any]:
        """Returns one tree of two that `split` made; the leaves are the same tensors."""
        return _nested({**dict(_walk(parameters)), **dict(_walk(buffers))})

    def _check_names(self, given: Mapping[str, Any]) -> None:
        if given.keys() == set(self.leaves):
            return
        missing = [n for n in self.leaves if n not in given]
        unknown = [n for n in given if n not in self.leaves]
        lines = [f"  {n}: missing" for n in missing]
        lines += [f"  {n}: not a leaf of {self.__name__}{self._hint(n)}" for n in unknown]
        raise ValueError(
            f"{self.__name__} cannot be computed with this tree:\n"
            + "\n".join(lines)
            + "\n  Fix: pass the tree of functionalize, with any tensors in the place of its own."
        )

    def _hint(self, name: str) -> str:
        return f", but tied to {self.tied[name]}" if name in self.tied else ""


def functionalize(module: nn.Module) -> tuple[dict[str, Any], Apply]:
    """Returns the parameters and buffers of a module as a tree, and the module as a function.

    Args:
        module: Any module; it may be on the meta device, and then so is the tree, which plans
            and `dtorch.parallel.load` take. It may be moved there afterwards, to free its memory.

    Returns:
        The tree: nested dicts, keyed by the parts of the names between dots, of every parameter
        and every buffer, not persistent ones included. Tensors that the module ties are one leaf,
        under the first of their names. The leaves do not require grad; parameters share the
        module's memory (`dtorch.parallel.shard` copies), buffers are copies, since a call may
        change them.

        The function, `apply(params, *args, **kwargs)`. It is computed in the module's mode at
        the time of the call (`train`, `eval`), which is part of the key of `jit`.

    Raises:
        TypeError: It is not a module.

    Source: `torch.func.functional_call`; the pair is that of `flax.linen.Module.init` and
        `apply`.

    Example:
        >>> params, apply = functionalize(torch.nn.Linear(3, 2))
        >>> sorted(params), apply(params, torch.ones(4, 3)).shape
        (['bias', 'weight'], torch.Size([4, 2]))
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"functionalize takes a torch.nn.Module, not {type(module).__name__}.")
    apply = Apply(module)
    named = dict(_named_tensors(module))
    leaves = {
        n: t.detach().clone() if n in apply.buffers else t.detach()
        for n, t in named.items()
        if n not in apply.tied
    }
    return _nested(leaves), apply


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _first_names(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Every name of a parameter or buffer, and the first name of the same tensor."""
    first: dict[int, str] = {}
    for name, tensor in _named_tensors(module):
        yield name, first.setdefault(id(tensor), name)


def _walk(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from _walk(value, name)
        else:
            yield name, value


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in leaves.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _assign(name: str, leaf: torch.Tensor, value: Any) -> None:
    """Gives a leaf the value that the module has assigned to its name."""
    if not isinstance(value, torch.Tensor) or value.shape != leaf.shape:
        what = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(
            f"the module assigns {what} to {name}, which is {list(leaf.shape)} in the tree.\n"
            "  Fix: keep the shape, or return the value."
        )
    with torch.no_grad():
        leaf.copy_(value)
