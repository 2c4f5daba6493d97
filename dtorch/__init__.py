"""dtorch: global tensors over a mesh of devices, from one ordinary Python process.

Write a model as pure functions over explicit parameter trees, shard the tree with mesh axis
names, and run it on many devices. A tensor knows its `DeviceMesh` and its placements (`Shard`,
`Replicate`, `Partial`); dtorch derives what each device does and what is communicated, and one
worker thread per device runs it asynchronously, with PyTorch's kernels.

Every public function of torch is here under its own name. To read the source, follow the
layers: `mesh`, `placement`, `spec`, `rules`, `redistribution`, `program`, `runtime`, `tensor`,
`tracer` and `dispatch`, `transforms`, then `nn`, `parallel` and `models`.
"""

from typing import TYPE_CHECKING, Any

import torch as _torch

if TYPE_CHECKING:
    from torch import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
    from torch import fft as fft
    from torch import linalg as linalg
    from torch import special as special

from . import debug, errors, models, nn, parallel, random
from .axis_collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
)
from .dispatch import cache_clear, cache_info
from .factories import (
    arange,
    bartlett_window,
    blackman_window,
    empty,
    empty_strided,
    eye,
    full,
    hamming_window,
    hann_window,
    kaiser_window,
    linspace,
    logspace,
    normal,
    ones,
    rand,
    randint,
    randn,
    randperm,
    scalar_tensor,
    tensor,
    tril_indices,
    triu_indices,
    zeros,
)
from .generator import manual_seed
from .jit import JitFunction, jit
from .memory import DeviceMemory, empty_cache, memory_stats
from .mesh import DeviceMesh, init_device_mesh
from .placement import P, Partial, PartitionSpec, Placement, Replicate, Shard
from .profiling import Profile, profile
from .program import Program
from .runtime import TensorFuture, health, restart, synchronize
from .shard_map import shard_map
from .tensor import Tensor
from .transforms import eval_shape, explain, grad, strict, value_and_grad

__version__ = "0.1.0"

__all__ = [
    "DeviceMemory",
    "DeviceMesh",
    "JitFunction",
    "P",
    "Partial",
    "PartitionSpec",
    "Placement",
    "Profile",
    "Program",
    "Replicate",
    "Shard",
    "Tensor",
    "TensorFuture",
    "all_gather",
    "all_to_all",
    "arange",
    "axis_index",
    "axis_size",
    "bartlett_window",
    "blackman_window",
    "cache_clear",
    "cache_info",
    "debug",
    "empty",
    "empty_cache",
    "empty_strided",
    "errors",
    "eval_shape",
    "explain",
    "eye",
    "full",
    "grad",
    "hamming_window",
    "hann_window",
    "health",
    "init_device_mesh",
    "jit",
    "kaiser_window",
    "linspace",
    "logspace",
    "manual_seed",
    "memory_stats",
    "models",
    "nn",
    "normal",
    "ones",
    "parallel",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "profile",
    "psum",
    "psum_scatter",
    "rand",
    "randint",
    "randn",
    "random",
    "randperm",
    "restart",
    "scalar_tensor",
    "shard_map",
    "strict",
    "synchronize",
    "tensor",
    "tril_indices",
    "triu_indices",
    "value_and_grad",
    "zeros",
]


def __getattr__(name: str) -> Any:
    """Returns torch's public function, dtype or constant of that name."""
    if name.startswith("_") or not hasattr(_torch, name):
        raise AttributeError(f"module 'dtorch' has no attribute {name!r}")
    return getattr(_torch, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(n for n in dir(_torch) if not n.startswith("_"))})
