"""Every function of `torch.nn.functional` under its own name, on distributed tensors.

torch's own functions take a `dtorch.Tensor`; they are found when they are asked for, so that those
of a new torch are here too.
"""

from typing import TYPE_CHECKING, Any

import torch.nn.functional as _functional

if TYPE_CHECKING:
    from torch.nn.functional import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]


def __getattr__(name: str) -> Any:
    """Returns torch's function of that name."""
    if name.startswith("_") or not hasattr(_functional, name):
        raise AttributeError(f"module 'dtorch.nn.functional' has no attribute {name!r}")
    return getattr(_functional, name)


def __dir__() -> list[str]:
    return sorted(n for n in dir(_functional) if not n.startswith("_"))
