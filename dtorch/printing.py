"""How a tensor prints: PyTorch's form of the global value, then shape, dtype and layout.

Of a long tensor only the elements that PyTorch would show are fetched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._tensor_str import PRINT_OPTS, _add_suffixes, printoptions

if TYPE_CHECKING:
    from .tensor import Tensor


def format_tensor(tensor: Tensor) -> str:
    """Returns the text that `print` shows.

    Blocking: until the elements shown are computed.
    """
    spec = tensor._spec
    layout = (
        f"shape={spec.shape}, dtype={spec.dtype},\n"
        f"device_mesh={spec.mesh!r}, placements={list(spec.placements)}"
    )
    kind = "Parameter containing:\n" if isinstance(tensor, torch.nn.Parameter) else ""
    return f"{kind}{_format_value(tensor)}\n{layout}"


def _format_value(tensor: Tensor) -> str:
    with torch.no_grad():
        detached = tensor.detach()
        if tensor.numel() <= PRINT_OPTS.threshold:
            shown = detached.to_torch()
            text = repr(shown)
        else:
            shown = _corners(detached).to_torch()
            with printoptions(threshold=0):
                text = repr(shown)
    return _with_grad(text, tensor)


def _with_grad(text: str, tensor: Tensor) -> str:
    """Adds what autograd knows, where PyTorch writes it."""
    if tensor.grad_fn is not None:
        suffix = f"grad_fn=<{type(tensor.grad_fn).__name__}>"
    elif tensor.requires_grad:
        suffix = "requires_grad=True"
    else:
        return text
    return _add_suffixes(text[:-1], [suffix], len("tensor("), False)


def _corners(tensor: torch.Tensor) -> Tensor:
    """The elements that are shown, and one between them in each long dim that is not."""
    edge = PRINT_OPTS.edgeitems
    for dim, size in enumerate(tensor.shape):
        if size > 2 * edge:
            first = tensor.narrow(dim, 0, edge + 1)
            tensor = torch.cat([first, tensor.narrow(dim, size - edge, edge)], dim)
    return tensor  # pyright: ignore[reportReturnType]
