"""`PlacedModule`: a module whose parameters are on devices, in the place of the module itself.

Code that holds a model, such as a pipeline of `diffusers`, calls it, reads its configuration, asks
for its class and changes its settings. A `PlacedModule` does all of that with a copy of the module
without data, and computes with the placed parameters, by one program for each kind of call. What
the programs depend on, the settings of the copy, is compared before a call as soon as somebody has
had the chance to change it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from ..errors import DataDependentError
from ..jit import jit
from ..mesh import DeviceMesh
from ..nn import functionalize
from ..nn.functionalize import alone
from ..placement import Replicate
from ..tensor import Tensor, place
from ..tree import map_leaves, nested

COMPUTING = ("forward", "encode", "decode", "tiled_", "get_text_features", "get_image_features")
"""How the names of methods begin that compute with the parameters."""

UNCHANGING = {"config", "dtype", "cache_context"}
"""Attributes through which no setting is changed."""

_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}


class PlacedModule:
    """A module computed on meshes; whoever asks is told that it is of the module's own class.

    Args:
        skeleton: A copy of the module without data, of which this takes possession.
        params: The tree of `functionalize(skeleton)`, placed.
        home: The mesh on every device of which results are gathered; as they come if None.
        compile: As of `jit`.
        cuda_graph: As of `jit`.

    Communication: arguments are brought to the mesh of the first parameter; results are gathered
    on `home`.

    Raises:
        RuntimeError: At a call: settings have been changed to what cannot be computed; see
            `check_own_forward`. At `to`: the device is another.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        params: Mapping[str, Any],
        home: DeviceMesh | None,
        *,
        compile: bool,
        cuda_graph: bool,
    ) -> None:
        self.__dict__.update(
            _skeleton=skeleton,
            _params=params,
            _tensors=_tensors_of(skeleton),
            _function=functionalize(skeleton)[1],
            _mesh=next(iter(_flat(params).values())).device_mesh,
            _home=home,
            _options={"compile": compile, "cuda_graph": cuda_graph},
            _programs={},
            _settings=_Settings(skeleton),
            _may_have_changed=False,
        )

    # -- computing -------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module returns, as distributed tensors."""
        return self._call("__call__", *args, **kwargs)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._follow_settings()
        args, kwargs = map_leaves(self._brought, (args, kwargs))
        program = self._programs.get(method)
        if program is None:
            program = jit(self._function_of(method), **self._options)
            self._programs[method] = program
        with torch.no_grad():
            try:
                return program(self._params, args, kwargs)
            except DataDependentError as error:
                warnings.warn(
                    f"{self!r} runs {method} operation by operation from now on, since its "
                    f"control flow depends on values: {error}",
                    stacklevel=3,
                )
                self._programs[method] = self._function_of(method)
                return self._programs[method](self._params, args, kwargs)

    def _function_of(self, method: str) -> Callable[..., Any]:
        def run(params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = self._function.call(method, params, *args, **kwargs)
            return result if self._home is None else map_leaves(self._gathered, result)

        name = self._function.__name__
        run.__name__ = name if method == "__call__" else f"{name}.{method}"
        return run

    def _gathered(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.redistribute(self._home, [Replicate()] * self._home.ndim)

    def _brought(self, leaf: Any) -> Any:
        """A leaf on the mesh: a program for torch tensors is none for what they are replaced by."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        whole = (Replicate(),) * self._mesh.ndim
        if not isinstance(leaf, Tensor):
            return place(leaf, self._mesh, whole)
        return leaf if leaf.device_mesh == self._mesh else leaf.redistribute(self._mesh, whole)

    # -- settings --------------------------------------------------------------------------

    def _follow_settings(self) -> None:
        """Has calls see what somebody may have changed; another thread's trace is waited for."""
        if not self._may_have_changed:
            return
        with alone():
            settings = _Settings(self._skeleton)
            if settings != self._settings:
                self._take(settings)

    def _take(self, settings: _Settings) -> None:
        name = type(self._skeleton).__name__
        check_own_forward(name, self._skeleton, RuntimeError)
        now, before = _tensors_of(self._skeleton), self._tensors
        changed = [*(now.keys() - before.keys()), *(before.keys() - now.keys())]
        for path in now.keys() & before.keys():
            (tensor, dtype, version), (earlier, known, since) = now[path], before[path]
            is_converted = dtype != known  # then the version says nothing, and buffers are new
            is_same = tensor is earlier or (is_converted and not isinstance(tensor, nn.Parameter))
            if not is_same or (version != since and not is_converted):
                changed.append(path)
        if changed:
            raise RuntimeError(
                f"parameters or buffers of {name} were added, removed, replaced or written to "
                f"after it was placed on {self._mesh!r}: {', '.join(sorted(changed)[:5])}.\n"
                "  Fix: change the module before it is placed; or write to the distributed tensors "
                "of named_parameters()."
            )
        tree, function = functionalize(self._skeleton)
        wanted = _flat(tree)
        converted = {n: t.to(wanted[n].dtype) for n, t in _flat(self._params).items()}
        self.__dict__.update(
            _params=nested(converted),
            _tensors=now,
            _function=function,
            _programs={},
            _settings=settings,
        )

    def __getattr__(self, name: str) -> Any:
        skeleton = self.__dict__.get("_skeleton")
        if skeleton is None or name.startswith("__"):
            raise AttributeError(name)
        found: Any = getattr(skeleton, name)
        if isinstance(found, torch.Tensor):
            return _flat(self._params)[self._function.tied.get(name, name)]
        is_method = inspect.ismethod(found) and found.__self__ is skeleton
        is_frozen = name in UNCHANGING and (is_method or isinstance(found, Mapping))
        if type(found) not in _PLAIN and not is_frozen and not name.startswith(COMPUTING):
            self.__dict__["_may_have_changed"] = True
        return self._method(name, found) if is_method else found

    def _method(self, name: str, method: Any) -> Callable[..., Any]:
        """A method of the module, with its signature, as one of this."""
        does = functools.partial(self._set_by, method)
        if name == "save_pretrained":
            does = functools.partial(self._save_pretrained)
        elif name.startswith(COMPUTING):
            does = functools.partial(self._call, name)
        return functools.wraps(method)(does)

    def _set_by(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a method for settings returns, this in place of the module without data."""
        result = method(*args, **kwargs)
        return self if result is self._skeleton else result

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(COMPUTING) or name == "__call__":
            raise RuntimeError(
                f"{name} of {self!r} cannot be replaced: what is computed with its parameters is "
                "one program.\n  Fix: replace it before the module is placed, or use a hook."
            )
        setattr(self._skeleton, name, value)
        self.__dict__["_may_have_changed"] = True

    def __delattr__(self, name: str) -> None:
        delattr(self._skeleton, name)
        self.__dict__["_may_have_changed"] = True

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self._skeleton)})

    def __copy__(self) -> PlacedModule:
        made = object.__new__(PlacedModule)
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedModule:
        self._follow_settings()
        with alone():
            skeleton = copy.deepcopy(self._skeleton, memo)
        params = map_leaves(torch.clone, self._params)
        return PlacedModule(skeleton, params, self._home, **self._options)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be pickled: its parameters are on devices of this process.\n"
            "  Fix: save_pretrained(folder), and place it again where it is loaded."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._skeleton)

    # -- what else is asked of a module ----------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of its tensors, as PyTorch sees it."""
        return self._mesh.torch_device()

    def to(self, *args: Any, **kwargs: Any) -> PlacedModule:
        """Converts the parameters to a dtype; the arguments are those of `torch.nn.Module.to`.

        Raises:
            RuntimeError: The device is of another type than the mesh.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if device is not None and device.type != self.device.type:
            raise RuntimeError(
                f"{self!r} cannot be moved to {device}: its parameters are on a mesh.\n"
                "  Fix: place the original module on another mesh."
            )
        if dtype is not None:
            with alone():
                self._skeleton.to(dtype=dtype)
            self.__dict__["_may_have_changed"] = True
            self._follow_settings()
        return self

    def half(self) -> PlacedModule:
        """As ``to(torch.float16)``."""
        return self.to(torch.float16)

    def bfloat16(self) -> PlacedModule:
        """As ``to(torch.bfloat16)``."""
        return self.to(torch.bfloat16)

    def float(self) -> PlacedModule:
        """As ``to(torch.float32)``."""
        return self.to(torch.float32)

    def cpu(self) -> PlacedModule:
        """As ``to("cpu")``."""
        return self.to("cpu")

    def cuda(self, device: Any = None) -> PlacedModule:
        """As ``to("cuda")``."""
        return self.to("cuda" if device is None else torch.device("cuda", device))

    def double(self) -> PlacedModule:
        """As ``to(torch.float64)``."""
        return self.to(torch.float64)

    def state_dict(self, *, prefix: str = "") -> dict[str, Any]:
        """Returns the parameters and persistent buffers by name, as distributed tensors."""
        self._follow_settings()
        placed, tied = _flat(self._params), self._function.tied
        names = self._skeleton.state_dict().keys()
        return {f"{prefix}{name}": placed[tied.get(name, name)] for name in names}

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Any]]:
        """Gives the name and the distributed tensor of each parameter."""
        self._follow_settings()
        for name, leaf in _flat(self._params).items():
            if name not in self._function.buffers and (recurse or "." not in name):
                yield f"{prefix}.{name}" if prefix else name, leaf

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Gives the distributed tensor of each parameter."""
        return (leaf for _, leaf in self.named_parameters(recurse=recurse))

    def _save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Saves the model in the format of its library, by its own method.

        Blocking: until the parameters are on the host, all of the model at once.
        """
        state = self.state_dict()
        fetched = {id(leaf): leaf.to_torch() for leaf in state.values()}
        whole: Any = copy.deepcopy(self._skeleton)
        whole.load_state_dict({n: fetched[id(leaf)] for n, leaf in state.items()}, assign=True)
        return whole.save_pretrained(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self._skeleton).__name__} on {self._mesh!r}"


def skeleton_of(module: nn.Module) -> nn.Module:
    """Returns a copy of a module without data."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    for part in module.modules():
        for value in vars(part).values():  # what a hook computes anew, as `weight_norm`
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo.setdefault(id(value), torch.empty_like(value, device="meta"))
    return copy.deepcopy(module, memo)


def check_own_forward(name: str, module: nn.Module, error: type[Exception]) -> None:
    """Raises where a part of a module computes otherwise than by its class.

    A function in the place of `forward` (`torch.compile`, the hooks of `accelerate` and of
    `diffusers`, which offload and cache) holds the module that it was made for, and would compute
    with that one's parameters.

    Args:
        name: What the module is called.
        module: The module.
        error: What is raised.
    """
    for path, part in module.named_modules():
        if "forward" in vars(part):
            where = f"{name}.{path}" if path else name
            raise error(
                f"the forward of {where}, a {type(part).__name__}, has been replaced, by "
                "torch.compile or by a hook that offloads, casts or caches; such a function "
                "computes with the module that it was made for.\n"
                "  Fix: remove it (disable_cache, remove_all_hooks, ...); to compile, pass "
                "compile=True."
            )


def _flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{path}{key}"
        found.update(_flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return found


def _tensors_of(module: nn.Module) -> dict[str, tuple[torch.Tensor, torch.dtype, int]]:
    """The parameters and buffers of a module, and how often each has been written to."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named |= dict(module.named_buffers(remove_duplicate=False))
    return {name: (tensor, tensor.dtype, _version(tensor)) for name, tensor in named.items()}


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class _Settings:
    """What a trace of a module depends on beside its parameters: all attributes of its parts.

    Plain values are compared as such; other objects by what they are and hold, to a depth. What is
    not seen: attributes of classes, and what functions have captured.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kept: list[Any] = []  # so that no other object gets the number of one of these
        self._found: list[Any] = []
        self._seen = {id(part) for part in module.modules()}
        for part in module.modules():
            self._add_object(part, _DEPTH)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings) and self._found == other._found

    def _add_object(self, value: Any, depth: int) -> None:
        attributes = vars(value)
        self._kept.append(value)
        self._found += (id(value), type(value), tuple(attributes))
        for item in attributes.values():
            self._add(item, depth)

    def _add(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._found.append(value)
        elif isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            if value:
                keyed = isinstance(value, (dict, set, frozenset))
                self._found.append(tuple(value) if keyed else len(value))
                for item in value.values() if isinstance(value, dict) else value:
                    self._add(item, depth)
        elif isinstance(value, torch.Tensor):
            self._kept.append(value)
            self._found += (id(value), value.dtype, _version(value))
        elif isinstance(value, numpy.ndarray):
            self._found += (value.shape, value.tobytes())
        elif isinstance(value, functools.partial):
            for item in (value.func, value.args, value.keywords):
                self._add(item, depth)
        elif isinstance(value, MethodType):
            self._add(value.__func__, depth)
            self._add(value.__self__, depth)
        elif not depth or id(value) in self._seen or not _has_attributes(value):
            self._kept.append(value)
            self._found.append(id(value))
        else:
            self._seen.add(id(value))
            self._add_object(value, depth - 1)


def _has_attributes(value: Any) -> bool:
    is_code = isinstance(value, (FunctionType, BuiltinFunctionType, type, ModuleType))
    return not is_code and hasattr(value, "__dict__")


_DEPTH = 6
