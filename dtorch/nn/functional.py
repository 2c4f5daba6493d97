"""`torch.nn.functional` under dtorch's name: every function accepts distributed tensors."""

from typing import Any

import torch.nn.functional as _functional


def __getattr__(name: str) -> Any:
    """Returns PyTorch's function of that name."""
    if name.startswith("_") or not hasattr(_functional, name):
        raise AttributeError(f"module 'dtorch.nn.functional' has no attribute {name!r}")
    return getattr(_functional, name)


def __dir__() -> list[str]:
    return [name for name in dir(_functional) if not name.startswith("_")]
