"""The memory that a graph reads and writes at each replay.

Takes tensors as a call is given them; says how they are laid out, and gives buffers for such.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import lent


def place(tensor: Tensor | None) -> Any:
    """Returns what is equal for tensors that are the same to a graph.

    Those without elements are in no memory: `data_ptr` is 0.
    """
    return None if tensor is None else (tensor.data_ptr(), layout(tensor))


def layout(tensor: Tensor | None) -> Any:
    """Returns what is equal for tensors that can be copied to the same memory."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def storage(tensor: Tensor) -> int:
    """Returns what identifies the memory that a tensor is in."""
    return tensor.untyped_storage()._cdata


class Buffer:
    """Memory for tensors of one layout, in which a dim that is repeated is there once.

    Args:
        tensor: The first of them, which is copied.
        counts_writes: Whether its version is watched.

    Attributes:
        view: The memory as a tensor of that layout.
        storage: What identifies it.
    """

    def __init__(self, tensor: Tensor, counts_writes: bool = False) -> None:
        first = once(tensor)
        with torch.inference_mode(not counts_writes):
            self._memory = torch.empty_strided(
                first.shape, first.stride(), dtype=first.dtype, device=first.device
            )
            self.view = self._memory.as_strided(tensor.shape, tensor.stride())
        self._memory.copy_(first)
        self.storage = storage(self.view)
        self._num_holders = 0
        self._is_as_given = not (tensor.is_conj() or tensor.is_neg())  # else it has been resolved

    def fill(self, tensor: Tensor | None) -> None:
        """Copies a tensor into the memory, unless it is there."""
        assert tensor is not None
        if not self.holds(tensor):
            self._memory.copy_(once(tensor))

    def holds(self, tensor: Tensor | None) -> bool:
        """Whether a tensor of the layout is in the memory, at the beginning."""
        if tensor is None or not self._is_as_given:
            return False
        return tensor.data_ptr() == self.view.data_ptr() != 0

    def may_write(self, tensor: Tensor) -> bool:
        """Whether a tensor on loan is in the memory, and nothing else that the call was given."""
        return self.holds(tensor) and not lent.is_shared(self.view)

    def note_holders(self) -> None:
        """Counts who has the memory now, beside whom there is nobody."""
        self._num_holders = torch._C._storage_Use_Count(self.storage)

    def is_held(self) -> bool:
        """Whether somebody else has the memory."""
        return torch._C._storage_Use_Count(self.storage) > self._num_holders

    def begin_write(self) -> None:
        """Says that the memory is written to, and waits on the stream for those that use it.

        In this order: who reads it notes that it does, reads, and then looks whether it has been
        written to, so that a reader that is not waited for knows.
        """
        torch.autograd.graph.increment_version(self.view)
        wait_for(lent.take_users(self.view), self.view.device)


def wait_for(streams: Sequence[Any], device: torch.device) -> None:
    """Has the current stream wait for what other streams have to do now."""
    if streams:
        current = torch.accelerator.current_stream(device)
        for stream in streams:
            if stream != current:
                current.wait_event(stream.record_event())


def once(tensor: Tensor) -> Tensor:
    """Returns a view in which a dim that is repeated is there once."""
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def copy_of(tensor: Tensor) -> Tensor:
    """Returns a copy with the same strides."""
    if tensor.is_conj():
        return copy_of(tensor.conj()).conj()
    return Buffer(tensor).view
