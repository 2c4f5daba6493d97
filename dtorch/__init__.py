"""dtorch: global tensors over a mesh of devices, from one ordinary Python process.

Write a model as pure functions over explicit parameter trees, shard the tree with mesh axis
names, and run it on many devices. A tensor knows its `DeviceMesh` and its placements (`Shard`,
`Replicate`, `Partial`); dtorch derives what each device does and what is communicated, and one
worker thread per device runs it asynchronously, with PyTorch's kernels.

Every public function of torch is here under its own name. To read the source, follow the
layers: `mesh`, `placement`, `spec`, `rules`, `redistribution`, `program`, `runtime`, `tensor`,
`trace` and `dispatch`, `transforms`, then `nn` and `parallel`.
"""

from typing import Any

import torch as _torch

from . import errors, nn, parallel, random
from .dispatch import cache_clear, cache_info
from .factories import NAMES as _FACTORIES
from .factories import factory as _factory
from .factories import tensor
from .generator import manual_seed
from .jit import JitFunction, jit
from .mesh import DeviceMesh, init_device_mesh
from .placement import P, Partial, PartitionSpec, Placement, Replicate, Shard
from .program import Program
from .runtime import TensorFuture, empty_cache, synchronize
from .tensor import Tensor
from .transforms import eval_shape, grad, value_and_grad

__version__ = "0.1.0"

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "DeviceMesh",
    "JitFunction",
    "P",
    "Partial",
    "PartitionSpec",
    "Placement",
    "Program",
    "Replicate",
    "Shard",
    "Tensor",
    "TensorFuture",
    "cache_clear",
    "cache_info",
    "empty_cache",
    "errors",
    "eval_shape",
    "grad",
    "init_device_mesh",
    "jit",
    "manual_seed",
    "nn",
    "parallel",
    "random",
    "synchronize",
    "tensor",
    "value_and_grad",
    *_FACTORIES,
]

globals().update({name: _factory(name) for name in _FACTORIES if hasattr(_torch, name)})


def __getattr__(name: str) -> Any:
    """Returns torch's public function, dtype or constant of that name."""
    if name.startswith("_") or not hasattr(_torch, name):
        raise AttributeError(f"module 'dtorch' has no attribute {name!r}")
    return getattr(_torch, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(n for n in dir(_torch) if not n.startswith("_"))})
