"""A `torch.nn.Module` as a pure function over an explicit tree of its parameters and buffers.

The tree has the form that the rest of dtorch takes: nested dicts whose paths, joined with dots,
are the names of the module's `state_dict`. So a plan of `dtorch.parallel` lays it out, and
`dtorch.parallel.load` fills it. Nothing here knows of meshes or layouts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from .. import aliases, generator, tracer
from ..tree import flatten, nested

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
        the call. Any other tensor that the module keeps (an attribute, a buffer that was None) is
        gone after the call: the module has in its place what it had before.

        Blocking: while another thread calls an `apply`, or traces: modules share tensors.

        Raises:
            ValueError: `params` has not the module's leaves; all that are missing or not known
                are listed. Or the module assigned a tensor of another shape or dtype to a name,
                or different tensors to names that are tied.
            RuntimeError: The module is differentiated and uses activation checkpointing, whose
                second computation would be with the module's own parameters.
        """
        return self.call("__call__", params, *args, **kwargs)

    def call(self, method: str, params: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
        """As a call, but of the method of the module with this name, such as ``"decode"``.

        Source: the argument `method` of `flax.linen.Module.apply`.
        """
        given = dict(_walk(params))
        self._check_names(given)
        values = {name: given[leaf] for name, leaf in self._leaf_of.items()}
        with alone(), _holding(self.module, values), _recomputing_refused(self.__name__):
            first = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]
            result = getattr(self.module, method)(*args, **kwargs)
            if _is_recomputed(result, first):
                raise RuntimeError(_recomputes(self.__name__))
        for name, value in self._assigned(given, values).items():
            _assign(name, given[name], value)
        return result

    def _assigned(self, given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """The leaves that have been assigned anew, and their values."""
        for name, leaf in self.tied.items():
            if values[name] is not values[leaf]:
                raise ValueError(
                    f"the module assigns different tensors to {leaf} and {name}, which are tied: "
                    "they are one leaf of the tree.\n"
                    "  Fix: register a copy, buffer.clone(), under one of the names."
                )
        return {n: values[n] for n in self.leaves if values[n] is not given[n]}

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
        return nested(parts), nested({n: given[n] for n in self.leaves if n in self.buffers})

    def join(self, parameters: Mapping[str, Any], buffers: Mapping[str, Any]) -> dict[str, Any]:
        """Returns one tree of two that `split` made; the leaves are the same tensors."""
        return nested({**dict(_walk(parameters)), **dict(_walk(buffers))})

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
        ValueError: Buffers share memory without being one tensor, as views of each other do. As
            leaves they would be copies, and a change of one would not be seen in the other.

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
    _check_memory({n: named[n] for n in apply.leaves if n in apply.buffers})
    leaves = {
        n: t.detach().clone() if n in apply.buffers else t.detach()
        for n, t in named.items()
        if n not in apply.tied
    }
    return nested(leaves), apply


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


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A context in which no other thread calls an `apply`.

    A trace holds the lock of tracing already. Without one, what the call does may need the locks
    that are taken before that one, so they are taken first.
    """
    if tracer.current() is not None:
        yield
        return
    with aliases.lock, generator.lock, tracer.lock:
        yield


@contextlib.contextmanager
def _holding(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    """A context in which a module has these tensors.

    At its end `values` has the tensors that the module has by then, and every slot and attribute
    of it that holds a tensor has what it had before.
    """
    parts = dict(module.named_modules(remove_duplicate=False))
    registered: list[dict[str, Any]] = []
    for part in module.modules():
        registered += [part._parameters, part._buffers]
    attributes = [vars(p) for p in module.modules()]
    before = [(d, dict(d)) for d in registered], [(d, dict(d)) for d in attributes]
    slots = {name: _slot(parts, name) for name in values}
    try:
        for name, (slot, own) in slots.items():
            slot[own] = values[name]
        yield
        values.update({name: slot.get(own) for name, (slot, own) in slots.items()})
    finally:
        for slot, held in before[0]:
            slot.clear()
            slot.update(held)
        for found, held in before[1]:
            _restore(found, held)


def _slot(parts: Mapping[str, nn.Module], name: str) -> tuple[dict[str, Any], str]:
    """The dict of a module that holds what has this name, and the key in it."""
    path, _, own = name.rpartition(".")
    part = parts[path]
    return (part._parameters if own in part._parameters else part._buffers), own


def _restore(attributes: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Puts back what attributes were that have become tensors, or other tensors."""
    for name, value in list(attributes.items()):
        if isinstance(value, torch.Tensor) and value is not before.get(name):
            del attributes[name]
            if name in before:
                attributes[name] = before[name]


def _recomputing_refused(name: str) -> contextlib.AbstractContextManager[None]:
    """A context that refuses hooks on what autograd saves: checkpointing recomputes by them.

    Not where the caller has put some around the call, since they would be off as well.
    """
    trace = tracer.current()
    records = torch.is_grad_enabled() and (trace is None or trace.with_autograd)
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    if not records or autograd._top_saved_tensors_default_hooks(True) is not None:
        return contextlib.nullcontext()
    return torch.autograd.graph.disable_saved_tensors_hooks(_recomputes(name))


def _recomputes(name: str) -> str:
    return (
        f"{name} uses activation checkpointing, or other hooks on saved tensors, while it is "
        "differentiated: the backward would compute it again when the module has its own "
        "parameters back, not those of the call.\n"
        "  Fix: module.gradient_checkpointing_disable() for a model of transformers, or call "
        "without torch.utils.checkpoint."
    )


def _is_recomputed(result: Any, first: int) -> bool:
    """Whether the graph of a result, from a sequence number on, has a reentrant checkpoint."""
    tensors = [t for t in flatten(result)[0] if isinstance(t, torch.Tensor)]
    nodes: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if isinstance(node, CheckpointFunction._backward_cls):
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                if following._sequence_nr() >= first:
                    nodes.append(following)
    return False


def _check_memory(buffers: Mapping[str, torch.Tensor]) -> None:
    """Raises if different buffers share memory."""
    spans: dict[int, list[tuple[str, tuple[Any, ...], int, int]]] = {}
    wrong = []
    for name, tensor in buffers.items():
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            continue
        start = int(tensor.storage_offset()) * tensor.itemsize
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (last + 1) * tensor.itemsize if tensor.numel() else start
        form = tensor.shape, tensor.stride(), start, tensor.dtype
        others = spans.setdefault(tensor.untyped_storage()._cdata, [])
        wrong += [
            f"  {other} and {name}"
            for other, known, low, high in others
            if known != form and low < end and start < high
        ]
        others.append((name, form, start, end))
    if wrong:
        raise ValueError(
            "these buffers share memory, and would be separate leaves of the tree:\n"
            + "\n".join(wrong)
            + "\n  Fix: register a copy, buffer.clone(), or take the view in forward."
        )


def _assign(name: str, leaf: torch.Tensor, value: Any) -> None:
    """Gives a leaf the value that the module has assigned to its name."""
    is_tensor = isinstance(value, torch.Tensor)
    if not is_tensor or (value.shape, value.dtype) != (leaf.shape, leaf.dtype):
        what = f"{value.dtype} {list(value.shape)}" if is_tensor else type(value).__name__
        raise ValueError(
            f"the module assigns {what} to {name}, which is {leaf.dtype} {list(leaf.shape)} in "
            "the tree.\n  Fix: keep the shape and the dtype, or return the value."
        )
    with torch.no_grad():
        leaf.copy_(value)
