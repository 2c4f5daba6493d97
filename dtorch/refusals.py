"""Why PyTorch refuses a call: the error of its CPU kernel, in place of that of the meta kernel.

Meta kernels, many of them in Python, refuse what the kernels refuse but with other types and words,
or not at all until a rule cannot make sense of the call. So a call that fails while it is planned
is made once on small tensors of zeros, for its error.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .errors import DTorchError
from .spec import Spec

_MOST = 1 << 20
"""How many elements the arguments have at most, so that a kernel that runs after all is quick."""


@contextlib.contextmanager
def as_torch_refuses(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """A context that raises what PyTorch does for a call, if it fails and PyTorch has an error.

    Args:
        op: The operation.
        args: Its positional arguments, tensors as `Spec`s.
        kwargs: Its keyword arguments, likewise.
    """
    try:
        yield
    except DTorchError:
        raise
    except Exception as error:
        refusal = _refusal(op, args, kwargs)
        if refusal is None:
            raise
        raise refusal from error


def _refusal(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Exception | None:
    given = [*args, *kwargs.values()]
    lists = (item for a in given if isinstance(a, (list, tuple)) for item in a)
    sizes = [math.prod(s.shape) for s in (*given, *lists) if isinstance(s, Spec)]
    draws = torch.Tag.nondeterministic_seeded in op.tags
    if not sizes or sum(sizes) > _MOST or draws or op.namespace != "aten":
        return None
    try:
        op(*map(_zeros, args), **{name: _zeros(a) for name, a in kwargs.items()})
    except Exception as error:
        return error.with_traceback(None)
    return None


def _zeros(value: Any) -> Any:
    if isinstance(value, Spec):
        return torch.zeros(value.shape, dtype=value.dtype, device="cpu")
    if isinstance(value, (list, tuple)):
        return [_zeros(v) for v in value]
    return torch.device("cpu") if isinstance(value, torch.device) else value
