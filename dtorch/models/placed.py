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
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ..errors import DataDependentError
from ..jit import jit
from ..mesh import DeviceMesh
from ..nn import functionalize
from ..placement import Replicate
from ..tensor import Tensor, place
from ..tree import map_leaves, nested

COMPUTING = ("forward", "encode", "decode", "tiled_", "get_text_features", "get_image_features")
"""How the names of methods begin that compute with the parameters."""

UNCHANGING = {"config", "dtype", "cache_context"}
"""Attributes through which no setting is changed."""

_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, functools.partial, type)


class PlacedModule:
    """A module computed on meshes; whoever asks is told that it is of the module's own class.

    Args:
        skeleton: A copy of the module without data, of which this takes possession.
        params: The tree of `functionalize(skeleton)`, placed.
        home: The mesh on every device of which results are gathered; as they come if None.
        compile: As of `jit`.

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
    ) -> None:
        tree, function = functionalize(skeleton)
        self.__dict__.update(
            _skeleton=skeleton,
            _params=params,
            _leaves=_flat(tree).keys(),
            _function=function,
            _mesh=next(iter(_flat(params).values())).device_mesh,
            _home=home,
            _compile=compile,
            _programs={},
            _settings=_Settings(skeleton),
            _may_have_changed=False,
        )

    # -- computing -------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module returns, as distributed tensors."""
        return self._call("__call__", *args, **kwargs)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._may_have_changed:
            self._follow_settings()
        args, kwargs = map_leaves(self._brought, (args, kwargs))
        program = self._programs.get(method)
        if program is None:
            program = jit(self._function_of(method), compile=self._compile)
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
        settings = _Settings(self._skeleton)
        if settings == self._settings:
            return
        name = type(self._skeleton).__name__
        check_own_forward(name, self._skeleton, RuntimeError)
        tree, function = functionalize(self._skeleton)
        wanted, placed = _flat(tree), _flat(self._params)
        changed = [*(wanted.keys() - self._leaves), *(self._leaves - wanted.keys())]
        changed += [n for n in wanted.keys() & self._leaves if wanted[n].shape != placed[n].shape]
        if changed:
            raise RuntimeError(
                f"parameters of {name} were added, removed or replaced after it was placed on "
                f"{self._mesh!r}: {', '.join(sorted(changed)[:5])}.\n"
                "  Fix: change the module before it is placed."
            )
        converted = {n: t.to(wanted[n].dtype) for n, t in placed.items()}
        self.__dict__.update(
            _params=nested(converted), _function=function, _programs={}, _settings=settings
        )

    def __getattr__(self, name: str) -> Any:
        skeleton = self.__dict__.get("_skeleton")
        if skeleton is None or name.startswith("__"):
            raise AttributeError(name)
        found = getattr(skeleton, name)
        if name.startswith(COMPUTING) and inspect.ismethod(found):
            return functools.wraps(found)(functools.partial(self._call, name))
        if name not in UNCHANGING and type(found) not in _PLAIN:
            self.__dict__["_may_have_changed"] = True
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._skeleton, name, value)
        self.__dict__["_may_have_changed"] = True

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

    def state_dict(self) -> dict[str, Any]:
        """Returns the parameters and persistent buffers by name, as distributed tensors."""
        placed = _flat(self._params) | {}
        names = self._skeleton.state_dict().keys()
        return {name: placed[self._function.tied.get(name, name)] for name in names}

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Gives the name and the distributed tensor of each parameter."""
        for name, leaf in _flat(self._params).items():
            if name not in self._function.buffers:
                yield name, leaf

    def parameters(self) -> Iterator[Any]:
        """Gives the distributed tensor of each parameter."""
        return (leaf for _, leaf in self.named_parameters())

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """Saves the model in the format of its library.

        Args:
            save_directory: The folder.
            **options: Those of the module's own `save_pretrained`.

        Blocking: until the parameters are on the host, all of the model at once.
        """
        whole: Any = copy.deepcopy(self._skeleton)
        fetched = {name: leaf.to_torch() for name, leaf in self.state_dict().items()}
        whole.load_state_dict(fetched, assign=True)
        whole.save_pretrained(save_directory, **options)

    def __repr__(self) -> str:
        return f"{type(self._skeleton).__name__} on {self._mesh!r}"


def skeleton_of(module: nn.Module) -> nn.Module:
    """Returns a copy of a module without data."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
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


class _Settings:
    """What a trace of a module depends on beside its parameters: all attributes of its parts.

    Plain values are compared as such; other objects by what they are and hold, to a depth.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kept: list[Any] = []  # so that no other object gets the number of one of these
        self._found: list[Any] = []
        for part in module.modules():
            attributes = vars(part)
            self._found += (id(part), tuple(attributes))
            self._kept.append(part)
            for value in attributes.values():
                self._add(value, _DEPTH)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings) and self._found == other._found

    def _add(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._found.append(value)
        elif isinstance(value, (dict, list, tuple)):
            if value:
                self._found.append(tuple(value) if isinstance(value, dict) else len(value))
                for item in value.values() if isinstance(value, dict) else value:
                    self._add(item, depth)
        else:
            self._kept.append(value)
            self._found.append(id(value))
            if isinstance(value, torch.Tensor):
                self._found += (value.dtype, value._version)
            elif depth and not isinstance(value, (nn.Module, *_FUNCTIONS)):
                for item in getattr(value, "__dict__", {}).values():
                    self._add(item, depth - 1)


_DEPTH = 3
