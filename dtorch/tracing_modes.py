"""What is active while a function is traced: the modes through which every torch call comes.

The function mode sees torch functions before any tensor subclass does; the dispatch mode receives
every ATen operation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.overrides import _pop_mode_temporarily as without_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _pop_mode_temporarily as without_dispatch_mode

from . import accelerator_functions, gradients
from .errors import TraceError
from .source import user_line

if TYPE_CHECKING:
    from .tracer import Tracer


class NeedsAutograd(BaseException):
    """A function that is traced without autograd turned out to use it."""


class DispatchMode(TorchDispatchMode):
    """Hands every ATen operation of a trace to its tracer."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spares torch wrapping each call for (and importing) its compiler."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._tracer.dispatch(func, args, kwargs or {})


class FunctionMode(TorchFunctionMode):
    """Sees every torch function of a trace before any tensor subclass does."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._tracer.with_autograd and asks_for_autograd(func, args, kwargs):
            raise NeedsAutograd
        if func == _DATA_SETTER:
            raise TraceError(
                f"x.data = ... cannot be traced ({user_line() or 'unknown line'}).\n"
                "  Fix: x.copy_(...) under torch.no_grad()."
            )
        if func in _WHOLE:
            with torch._C.DisableTorchFunctionSubclass(), torch._C._AutoDispatchBelowAutograd():
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if self._tracer.has_stages and func not in _GRADIENT_FUNCTIONS:
                args, kwargs = self._tracer.on_latest_stage(func, args, kwargs)
            if func in gradients.DIRECT_SUBSTITUTES:
                return gradients.DIRECT_SUBSTITUTES[func](*args, **kwargs)
            substitute = gradients.SUBSTITUTES.get(func)
            if substitute is not None and self._is_substituted(func, args, kwargs):
                return substitute(*args, **kwargs)
            return func(*args, **kwargs)

    def _is_substituted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = (*args, *kwargs.values())
        needs_gradients = self._tracer.with_autograd and gradients.requires_grad(given)
        return needs_gradients or func in accelerator_functions.SUBSTITUTES


_DATA_SETTER = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
# Not differentiable, and recorded whole so that the kernel checks the values.
_WHOLE = {torch.nn.functional.one_hot}
_GRADIENT_FUNCTIONS = {
    torch.Tensor.backward,
    torch.Tensor.register_hook,
    torch.Tensor.retain_grad,
    torch.autograd.grad,
    torch.autograd.backward,
}
_REQUIRES_GRAD_FUNCTIONS = {
    torch.Tensor.requires_grad_,
    torch.Tensor.requires_grad.__set__,  # pyright: ignore[reportAttributeAccessIssue]
}


def asks_for_autograd(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call only makes sense where autograd records."""
    if func in _REQUIRES_GRAD_FUNCTIONS:
        return bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    return func in _GRADIENT_FUNCTIONS


@contextlib.contextmanager
def left() -> Iterator[None]:
    """Leaves every mode for a while, and whatever else a trace sets for its thread."""
    compiling = torch.compiler._is_compiling_flag
    with contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(without_function_mode())
        for _ in range(torch._C._len_torch_dispatch_stack()):
            stack.enter_context(without_dispatch_mode())
        stack.enter_context(torch.inference_mode(False))  # autograd is at hand, too
        stack.enter_context(torch._C._DisableAutocast())
        torch.compiler._is_compiling_flag = False
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = compiling


@contextlib.contextmanager
def replaying_views() -> Iterator[None]:
    """Lets autograd write through a view by its operations: a wrapper has no strided memory."""
    before = torch._C._is_view_replay_enabled()
    torch._C._set_view_replay_enabled(True)
    try:
        yield
    finally:
        torch._C._set_view_replay_enabled(before)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Makes `torch.compiler.is_compiling()` true: model code then takes its traceable path."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def refusing_seeds() -> Iterator[None]:
    """Raises where this thread seeds PyTorch's generator, which only a run can do."""
    module: Any = torch.random
    watched = module.default_generator
    watching = _Watched(watched, threading.get_ident())
    before = watched.initial_seed()
    module.default_generator = watching
    try:
        yield
    finally:
        module.default_generator = watched
    now = watched.initial_seed()
    if now not in (before, *watching.seeds):  # a method of the generator has been called
        _refuse(now)


class _Watched:
    """Stands for a generator in `torch.random`, and tells the threads that seed it apart."""

    def __init__(self, generator: torch.Generator, thread: int) -> None:
        self._generator = generator
        self._thread = thread
        self.seeds: set[int] = set()  # given by other threads

    def manual_seed(self, seed: int) -> torch.Generator:
        if threading.get_ident() == self._thread:
            _refuse(seed)
        made = self._generator.manual_seed(seed)
        self.seeds.add(self._generator.initial_seed())
        return made

    def seed(self) -> int:
        made = self._generator.seed()
        self.seeds.add(made)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def _refuse(seed: int) -> None:
    raise TraceError(
        f"a traced function calls torch.manual_seed({seed}), which would seed the generator once, "
        f"when it is traced, and not in each call ({user_line() or 'unknown line'}).\n"
        "  Fix: seed before the call, or draw with dtorch.random and an explicit key."
    )
