"""PyTorch's kernels of scaled dot product attention, called alike.

There is one for the CPU, and three for GPUs. Each has its own order of arguments, keeps the
log-sum-exp of the rows in its own shape, and has its own demands on a mask. A `Kernel` knows them,
so that Ulysses and the ring are written once.

A kernel is called on whole tensors while a sharded form is traced, or written into the programs of
devices by a rule: a `Site` is either.

Shapes: queries [B, H, L, E], keys [B, K, S, E], values [B, K, S, V] where H is a multiple of K; the
result [B, H, L, V], and the log-sum-exp [B, H, L].
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

aten = torch.ops.aten


class Sizes(NamedTuple):
    """The sizes of an attention: of its batch, heads, rows (queries), and keys."""

    batch: int
    heads: int
    rows: int
    keys: int


class Layouts(Protocol):
    """Where layouts are changed: on whole tensors, or on the shards of each device."""

    def one(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the only result of an operation."""
        ...

    def sizes(self, value: Callable[[Sizes], Any]) -> Any:
        """Returns an argument that follows from the sizes here."""
        ...


class Site(Layouts, Protocol):
    """Where a kernel is called, likewise."""

    def several(self, count: int, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the first `count` results of an operation."""
        ...

    def zeros(self, shape: list[int], dtype: torch.dtype) -> Any:
        """Returns zeros on the device."""
        ...


class Whole(NamedTuple):
    """A `Site` of whole tensors."""

    here: Sizes

    @classmethod
    def of(cls, query: Any, key: Any) -> Whole:
        """Returns that of these queries and keys."""
        batch, heads, rows, _ = query.shape
        return cls(Sizes(batch, heads, rows, key.shape[2]))

    def one(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """As in `Layouts`."""
        return op(*args, **kwargs)

    def sizes(self, value: Callable[[Sizes], Any]) -> Any:
        """As in `Layouts`."""
        return value(self.here)

    def several(self, count: int, op: Any, *args: Any, **kwargs: Any) -> Any:
        """As in `Site`."""
        return op(*args, **kwargs)[:count]

    def zeros(self, shape: list[int], dtype: torch.dtype) -> Any:
        """As in `Site`."""
        return torch.zeros(shape, dtype=dtype)


class Kernel(abc.ABC):
    """One of PyTorch's kernels, without dropout.

    Attributes:
        name: How operations of dtorch name it.
        forward_op: The operation.
        backward_op: That of its gradients.
        takes_mask: Whether it takes a mask, and so also a triangle of another diagonal than 0.
        least_keys: How many keys it wants at least.
    """

    name: ClassVar[str]
    forward_op: ClassVar[torch._ops.OpOverload]
    backward_op: ClassVar[torch._ops.OpOverload]
    takes_mask: ClassVar[bool] = True
    least_keys: ClassVar[int] = 1

    @abc.abstractmethod
    def forward(
        self, site: Site, operands: tuple[Any, ...], mask: Any, is_causal: bool, scale: Any
    ) -> tuple[Any, Any]:
        """Returns the result and the log-sum-exp.

        Args:
            site: Where.
            operands: Queries, keys and values.
            mask: What is added to the scores, as `fitted` gives it, or None.
            is_causal: Whether row r sees the keys up to r only.
            scale: By what scores are multiplied; None for ``E ** -0.5``.
        """

    @abc.abstractmethod
    def backward(
        self, site: Site, operands: tuple[Any, ...], mask: Any, is_causal: bool, scale: Any
    ) -> Any:
        """Returns the gradients of queries, keys and values.

        Args:
            site: Where.
            operands: The gradient of the result, queries, keys, values, result, log-sum-exp.
            mask: As forward.
            is_causal: As forward.
            scale: As forward.
        """

    @abc.abstractmethod
    def results(self, site: Site, out: Any, sums: Any, given: dict[str, Any]) -> tuple[Any, ...]:
        """Returns what the operation gives, of its arguments by name: `backward` reads the sums."""

    def sums_of(self, site: Layouts, kept: Any) -> Any:
        """Returns the log-sum-exp of what the operation gives for it."""
        return kept

    def laid_out(self, site: Layouts, out: Any, sums: Any, order: list[int]) -> tuple[Any, Any]:
        """Returns result and log-sum-exp as `backward` reads them on a device: unasked, by place.

        Args:
            site: The shards of devices.
            out: The result, with any strides.
            sums: The log-sum-exp, in the shape that `backward_op` takes, or [B, H, L].
            order: The dims of the queries, that with the largest stride first.
        """
        return out, sums

    def gradients(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns what the operation of the gradients gives."""
        return found

    def fitted(self, site: Layouts, mask: Any) -> Any:
        """Returns a mask as the kernel takes it: [B, H, L, S], some dims broadcast."""
        return mask


class _OfTheCPU(Kernel):
    name = "cpu"
    forward_op = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward_op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def forward(
        self, site: Site, operands: tuple[Any, ...], mask: Any, is_causal: bool, scale: Any
    ) -> tuple[Any, Any]:
        options = {"attn_mask": mask, "scale": scale}
        return site.several(2, self.forward_op, *operands, 0.0, is_causal, **options)

    def backward(
        self, site: Site, operands: tuple[Any, ...], mask: Any, is_causal: bool, scale: Any
    ) -> Any:
        options = {"attn_mask": mask, "scale": scale}
        return site.several(3, self.backward_op, *operands, 0.0, is_causal, **options)

    def results(self, site: Site, out: Any, sums: Any, given: dict[str, Any]) -> tuple[Any, ...]:
        return out, sums


class _Flash(Kernel):
    name = "flash"
    forward_op = aten._scaled_dot_product_flash_attention.default
    backward_op = aten._scaled_dot_product_flash_attention_backward.default
    takes_mask = False

    def forward(
        self, site: Site, operands: tuple[Any, ...], mask: Any, is_causal: bool, scale: Any
    ) -> tuple[Any, Any]:
        options = (0.0, is_causal, False)
        return site.several(2, self.forward_op, *operands, *options, scale=scale)

    def backward(
        self, site: Site, operands: tuple[Any, ...], mask: Any, is_causal: bool, scale: Any
    ) -> Any:
        rows, keys = site.sizes(lambda s: s.rows), site.sizes(lambda s: s.keys)
        lengths = (None, None, rows, keys)
        options = (*lengths, 0.0, is_causal, *self._seeds(site))
        return site.several(3, self.backward_op, *operands, *options, scale=scale)

    def results(self, site: Site, out: Any, sums: Any, given: dict[str, Any]) -> tuple[Any, ...]:
        lengths = (None, None, given["query"].shape[2], given["key"].shape[2])
        debug = site.zeros([0], given["query"].dtype)
        return out, sums, *lengths, *self._seeds(site), debug

    def laid_out(self, site: Layouts, out: Any, sums: Any, order: list[int]) -> tuple[Any, Any]:
        return out, site.one(aten.contiguous.default, sums)

    @staticmethod
    def _seeds(site: Site) -> tuple[Any, Any]:
        """What dropout would have drawn with."""
        return site.zeros([2], torch.uint64), site.zeros([], torch.uint64)


class _Efficient(Kernel):
    name = "efficient"
    forward_op = aten._scaled_dot_product_efficient_attention.default
    backward_op = aten._scaled_dot_product_efficient_attention_backward.default

    def forward(
        self, site: Site, operands: tuple[Any, ...], mask: Any, is_causal: bool, scale: Any
    ) -> tuple[Any, Any]:
        options = (mask, True, 0.0, is_causal)
        out, kept = site.several(2, self.forward_op, *operands, *options, scale=scale)
        return out, self.sums_of(site, kept)

    def backward(
        self, site: Site, operands: tuple[Any, ...], mask: Any, is_causal: bool, scale: Any
    ) -> Any:
        *first, out, sums = operands
        wanted = (*_seeds(site), 0.0, [True, True, True, False], is_causal)
        operands = (*first, mask, out, sums, *wanted)
        return site.several(3, self.backward_op, *operands, scale=scale)

    def results(self, site: Site, out: Any, sums: Any, given: dict[str, Any]) -> tuple[Any, ...]:
        """The sums in [B, H, L], which the rule of the backward takes too."""
        return out, sums if given["compute_log_sumexp"] else sums[..., :0], *_seeds(site)

    def sums_of(self, site: Layouts, kept: Any) -> Any:
        return site.one(aten.narrow.default, kept, 2, 0, site.sizes(lambda s: s.rows))

    def laid_out(self, site: Layouts, out: Any, sums: Any, order: list[int]) -> tuple[Any, Any]:
        """The result as [B, L, H, V] in memory, the sums filled up to a multiple of 32 rows."""
        kept = self.sums_of(site, sums)
        padding = site.sizes(lambda s: [0, -s.rows % 32])
        kept = site.one(aten.constant_pad_nd.default, kept, padding, math.inf)
        return _dense(site, out, [0, 2, 1, 3]), kept

    def gradients(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        return *found, None

    def fitted(self, site: Layouts, mask: Any) -> Any:
        rows = _in_aligned_rows(site, mask)
        return site.one(aten.expand.default, rows, site.sizes(list))


class _CuDNN(Kernel):
    name = "cudnn"
    forward_op = aten._scaled_dot_product_cudnn_attention.default
    backward_op = aten._scaled_dot_product_cudnn_attention_backward.default
    least_keys = 2

    def forward(
        self, site: Site, operands: tuple[Any, ...], mask: Any, is_causal: bool, scale: Any
    ) -> tuple[Any, Any]:
        options = (mask, True, 0.0, is_causal, False)
        out, kept = site.several(2, self.forward_op, *operands, *options, scale=scale)
        return out, self.sums_of(site, kept)

    def backward(
        self, site: Site, operands: tuple[Any, ...], mask: Any, is_causal: bool, scale: Any
    ) -> Any:
        rows, keys = site.sizes(lambda s: s.rows), site.sizes(lambda s: s.keys)
        lengths = (None, None, rows, keys)
        *first, sums = operands
        sums = site.one(aten.unsqueeze.default, sums, -1)
        operands = (*first, sums, *_seeds(site), mask, *lengths, 0.0, is_causal)
        return site.several(3, self.backward_op, *operands, scale=scale)

    def results(self, site: Site, out: Any, sums: Any, given: dict[str, Any]) -> tuple[Any, ...]:
        lengths = (None, None, given["query"].shape[2], given["key"].shape[2])
        kept = site.one(aten.unsqueeze.default, sums, -1)
        return out, kept, *lengths, *_seeds(site), None

    def sums_of(self, site: Layouts, kept: Any) -> Any:
        return site.one(aten.squeeze.dim, kept, -1)

    def laid_out(self, site: Layouts, out: Any, sums: Any, order: list[int]) -> tuple[Any, Any]:
        """The result in the order of the queries, with which cuDNN keeps what it has built."""
        return _dense(site, out, order), site.one(aten.contiguous.default, sums)

    def fitted(self, site: Layouts, mask: Any) -> Any:
        """One for all heads stays one."""
        rows = _in_aligned_rows(site, mask)
        sizes = site.sizes(lambda s: [s.batch, -1, s.rows, s.keys])
        return site.one(aten.expand.default, rows, sizes)


def _seeds(site: Site) -> tuple[Any, Any]:
    """What dropout would have drawn with, and from where on."""
    return site.zeros([], torch.int64), site.zeros([], torch.int64)


def _dense(site: Layouts, x: Any, order: list[int]) -> Any:
    """A tensor without gaps, its dims in this order in memory; it is copied only if it must be."""
    x = site.one(aten.contiguous.default, site.one(aten.permute.default, x, order))
    return site.one(aten.permute.default, x, [order.index(d) for d in range(len(order))])


def _in_aligned_rows(site: Layouts, mask: Any) -> Any:
    """A mask whose rows begin at multiples of eight elements."""
    padding = site.sizes(lambda s: [0, -s.keys % 8])
    filled = site.one(aten.constant_pad_nd.default, mask, padding, 0.0)
    return site.one(aten.narrow.default, filled, -1, 0, site.sizes(lambda s: s.keys))


KERNELS = {kernel.name: kernel for kernel in (_OfTheCPU(), _Flash(), _Efficient(), _CuDNN())}
"""Every kernel, by its name."""
