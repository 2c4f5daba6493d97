"""Random numbers from explicit keys: a value depends on its key and its index in the tensor only.

A key is a plain int64 tensor of two 32-bit words. Each element of a random tensor is the Philox
block of its own flat index under that key, so any part of the tensor can be generated alone, in
any order: a sharded counter tensor gives shards that are drawn on the devices that keep them, and
the global value is the same for every layout. Nothing here has state: use `split` or `fold_in` to
get a fresh key, and never use one key twice.

Takes keys, shapes and, for a distributed result, a mesh with placements; gives tensors. Everything
is made of elementwise int64 operations, so it also runs inside `dtorch.jit` and under `vmap`.

Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011, section 4 (Philox). The key interface follows `jax.random`; the values do not.
"""

import enum
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import PlacementError
from .factories import factory
from .mesh import DeviceMesh
from .placement import Placement, Replicate, Shard, normalized

__all__ = [
    "bits",
    "categorical",
    "fold_in",
    "key",
    "normal",
    "randint",
    "split",
    "uniform",
]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10

# Uniform values are k * 2**-digits, with as many digits as the dtype holds exactly.
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

_arange, _zeros = factory("arange"), factory("zeros")

_Words = tuple[Tensor, Tensor, Tensor, Tensor]


class _Stream(enum.IntEnum):
    """The last counter word: what a block is for, so that no two uses of a key share a block."""

    VALUES = 0
    SPLIT = 1
    FOLD_IN = 2


def key(seed: int) -> Tensor:
    """Returns the key of a seed.

    Args:
        seed: An integer in [-2**63, 2**64); its 64 bits are the key.

    Returns:
        The key, an int64 tensor [2] of two words in [0, 2**32), low word first.

    Raises:
        TypeError: If `seed` is not an int.
        ValueError: If `seed` does not fit in 64 bits.

    Source: the role of `jax.random.key`.

    Example:
        >>> key(7)
        tensor([7, 0])
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"A seed is an int, but got {seed!r} of type {type(seed).__name__}.")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"A seed fits in 64 bits, but got {seed}. Use one in [-2**63, 2**64).")
    return torch.tensor([seed & _WORD, seed >> 32 & _WORD])


def split(key: Tensor, num: int = 2) -> Tensor:
    """Returns `num` new keys, independent of each other and of every value drawn with `key`.

    Args:
        key: The key to split, int64 [2].
        num: How many keys to make.

    Returns:
        The keys, int64 [num, 2]; iterate over it, or index it, to get them.

    Raises:
        TypeError: If `key` is not an int64 tensor.
        ValueError: If `key` is not of shape [2], or `num` is negative.

    Source: the role of `jax.random.split`.
    """
    _check_key(key)
    if num < 0:
        raise ValueError(f"split makes a number of keys, but got num={num}.")
    return _derive(key, torch.arange(num, device=key.device), _Stream.SPLIT)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Returns the new key that `key` and the integer `data` (a step, a layer's index) determine.

    Args:
        key: The key, int64 [2].
        data: An integer of at most 64 bits, or a 0-d integer tensor, which may be on a mesh.

    Returns:
        The new key, int64 [2].

    Raises:
        TypeError: If `key` is not an int64 tensor, or `data` is not an integer.
        ValueError: If `key` is not of shape [2], or `data` needs more than 64 bits or has dims.

    Source: the role of `jax.random.fold_in`.
    """
    _check_key(key)
    if isinstance(data, Tensor):
        if data.is_floating_point() or data.is_complex():
            raise TypeError(f"fold_in takes an integer, but got a {data.dtype} tensor.")
        if data.ndim:
            raise ValueError(f"fold_in takes a 0-d tensor, but got shape {list(data.shape)}.")
        return _derive(key, data.to(torch.int64), _Stream.FOLD_IN)
    if not isinstance(data, int):
        raise TypeError(f"fold_in takes an integer, but got {data!r}.")
    if not -(2**63) <= data < 2**64:
        raise ValueError(f"fold_in takes an integer of at most 64 bits, but got {data}.")
    signed = data - 2**64 if data >= 2**63 else data
    return _derive(key, torch.tensor(signed, device=key.device), _Stream.FOLD_IN)


def bits(
    key: Tensor,
    shape: Sequence[int],
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> Tensor:
    """Returns uniformly random 32-bit words.

    Args:
        key: The key, int64 [2].
        shape: The shape of the result.
        device_mesh: The mesh of the result; a plain torch tensor if None.
        placements: The placements of the result on that mesh; replicated if None.

    Returns:
        int64 values in [0, 2**32), of that shape and layout.

    Communication: none; every device draws its own part.

    Raises:
        TypeError: If `key` is not an int64 tensor.
        ValueError: If `key` is not of shape [2], or a size is negative.
        PlacementError: If `placements` do not fit, or hold a `Partial`.

    Source: the first word of each element's Philox-4x32-10 block.
    """
    return _blocks(key, shape, device_mesh, placements)[0]


def uniform(
    key: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    low: float = 0.0,
    high: float = 1.0,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> Tensor:
    """Returns values drawn uniformly from [low, high).

    Args:
        key: The key, int64 [2].
        shape: The shape of the result.
        dtype: A floating-point dtype; torch's default dtype if None.
        low: The smallest value.
        high: The bound above; rounding can reach it unless the range is [0, 1).
        device_mesh: The mesh of the result; a plain torch tensor if None.
        placements: The placements of the result on that mesh; replicated if None.

    Returns:
        The values, of that shape, dtype and layout.

    Communication: none; every device draws its own part.

    Raises:
        TypeError: If `dtype` is not a floating-point dtype, or `key` is not an int64 tensor.
        ValueError: If `key` is not of shape [2], or a size is negative.
        PlacementError: If `placements` do not fit, or hold a `Partial`.

    Source: the role of `jax.random.uniform`.

    Example:
        >>> bool((uniform(key(0), (1000,)) < 1).all())
        True
    """
    dtype = _floating_dtype(dtype)
    words = _blocks(key, shape, device_mesh, placements)
    unit = _fraction(words[0], words[1], _DIGITS[dtype]).to(dtype)
    return unit if (low, high) == (0.0, 1.0) else low + (high - low) * unit


def normal(
    key: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> Tensor:
    """Returns values drawn from the standard normal distribution.

    Args:
        key: The key, int64 [2].
        shape: The shape of the result.
        dtype: A floating-point dtype; torch's default dtype if None. float16 and bfloat16 values
            are rounded from float32.
        device_mesh: The mesh of the result; a plain torch tensor if None.
        placements: The placements of the result on that mesh; replicated if None.

    Returns:
        The values, of that shape, dtype and layout. None is larger in size than 6.7 (8.6 in
        float64).

    Communication: none; every device draws its own part.

    Raises:
        TypeError: If `dtype` is not a floating-point dtype, or `key` is not an int64 tensor.
        ValueError: If `key` is not of shape [2], or a size is negative.
        PlacementError: If `placements` do not fit, or hold a `Partial`.

    Source: G. Box and M. Muller, "A Note on the Generation of Random Normal Deviates", 1958; one
    of the two deviates of each pair.
    """
    dtype = _floating_dtype(dtype)
    words = _blocks(key, shape, device_mesh, placements)
    if dtype == torch.float64:
        # In (0, 1], because the logarithm of zero is not a deviate.
        radius = _fraction(words[0], words[1], 53) + 2.0**-53
        turn = _fraction(words[2], words[3], 53)
    else:
        radius = (words[0] + 1).to(torch.float32) * 2.0**-32
        turn = words[1].to(torch.float32) * 2.0**-32
    return (torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * math.pi * turn)).to(dtype)


def randint(
    key: Tensor,
    shape: Sequence[int],
    low: int,
    high: int,
    *,
    dtype: torch.dtype = torch.int64,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> Tensor:
    """Returns integers drawn uniformly from [low, high).

    Args:
        key: The key, int64 [2].
        shape: The shape of the result.
        low: The smallest value.
        high: One above the largest value; at most `low + 2**32`.
        dtype: An integer dtype that holds the range.
        device_mesh: The mesh of the result; a plain torch tensor if None.
        placements: The placements of the result on that mesh; replicated if None.

    Returns:
        The integers, of that shape, dtype and layout. No value is off its probability by more
        than 2**-64.

    Communication: none; every device draws its own part.

    Raises:
        TypeError: If `dtype` is not an integer dtype, or `key` is not an int64 tensor.
        ValueError: If the range is empty, larger than 2**32, or does not fit `dtype`, if `key` is
            not of shape [2], or a size is negative.
        PlacementError: If `placements` do not fit, or hold a `Partial`.

    Source: 64 random bits scaled to the range, the high word of the product kept.
    """
    _check_range(low, high, dtype)
    words = _blocks(key, shape, device_mesh, placements)
    span = high - low
    # 64 bits times 33 bits, of which the top word is kept. Sums and products wrap modulo 2**64.
    scaled = words[0] * span + _high_word(words[1] * span)
    return (_high_word(scaled) + low).to(dtype)


def categorical(key: Tensor, logits: Tensor) -> Tensor:
    """Returns the index of one category for each row of logits.

    Args:
        key: The key, int64 [2].
        logits: Unnormalised log-probabilities, floating point [..., n]. A category of -inf is
            never drawn if another is finite.

    Returns:
        Indices in [0, n), int64 [...].

    Communication: whatever `argmax` over the last dim of `logits` needs.

    Raises:
        TypeError: If `key` is not an int64 tensor.
        ValueError: If `key` is not of shape [2], or `logits` has no categories.

    Source: the Gumbel-max method: C. Maddison, D. Tarlow, T. Minka, "A* Sampling", NeurIPS 2014,
    section 2.
    """
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"categorical needs [..., n] logits, but got {list(logits.shape)}.")
    mesh = getattr(logits, "device_mesh", None)
    placements = [p if p.is_shard() else Replicate() for p in getattr(logits, "placements", ())]
    word = _blocks(key, logits.shape, mesh, placements)[0]
    # A small `u` is a large Gumbel value, and float32 resolves small numbers best. The half keeps
    # `u` off zero; where `u` rounds to one the category is not drawn.
    u = (word.to(torch.float32) + 0.5) * 2.0**-32
    gumbel = -torch.log(-torch.log1p(-u))
    return torch.argmax(logits + gumbel, dim=-1)


def _counters(
    shape: Sequence[int], device_mesh: DeviceMesh | None, placements: Sequence[Placement] | None
) -> Tensor:
    """Returns the flat index of each element of a tensor of that shape and layout, int64."""
    if any(size < 0 for size in shape):
        raise ValueError(f"A size is not negative, but got shape {list(shape)}.")
    if device_mesh is None:
        return torch.arange(math.prod(shape)).reshape(tuple(shape))
    whole = (Replicate(),) * device_mesh.ndim
    layout = whole if placements is None else normalized(placements, device_mesh, len(shape))
    if any(p.is_partial() for p in layout):
        raise PlacementError(
            f"random values are drawn whole or in shards, but got {list(layout)}.\n"
            "  Fix: draw them with Replicate() in place of Partial, then redistribute."
        )
    # The sum of each dim's own counters, which are split where that dim is.
    counters = _zeros((), dtype=torch.int64, device_mesh=device_mesh)
    for dim, size in enumerate(shape):
        along = [Shard(0) if p.is_shard(dim) else Replicate() for p in layout]
        index = _arange(size, device_mesh=device_mesh, placements=along)
        step = math.prod(shape[dim + 1 :])
        counters = counters + (index * step).reshape((size,) + (1,) * (len(shape) - dim - 1))
    return counters


def _blocks(
    key: Tensor,
    shape: Sequence[int],
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> _Words:
    """Returns the four random words of each element."""
    _check_key(key)
    index = _counters(shape, device_mesh, placements)
    return _philox(_counter_words(index, _Stream.VALUES), (key[0], key[1]))


def _derive(key: Tensor, index: Tensor, stream: _Stream) -> Tensor:
    """Returns the key of each index in a stream of `key`, int64 [..., 2]."""
    words = _philox(_counter_words(index, stream), (key[0], key[1]))
    return torch.stack(words[:2], dim=-1)


def _counter_words(index: Tensor, stream: _Stream) -> _Words:
    zero = torch.zeros_like(index)
    return index & _WORD, _high_word(index), zero, zero + int(stream)


def _philox(counter: _Words, key: tuple[Tensor, Tensor]) -> _Words:
    """Returns the Philox-4x32-10 block of each counter.

    Words are int64 in [0, 2**32). A product of two words wraps to the int64 with the same 64 bits,
    of which `_high_word` takes the top half whatever the sign.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = _high_word(p1) ^ c1 ^ k0, p1 & _WORD, _high_word(p0) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _high_word(x: Tensor) -> Tensor:
    return (x >> 32) & _WORD


def _fraction(high: Tensor, low: Tensor, digits: int) -> Tensor:
    """Returns the first `digits` bits of the words as exact values in [0, 1)."""
    if digits <= 32:
        return (high >> (32 - digits)).to(torch.float32) * 2.0**-digits
    return ((high << (digits - 32)) | (low >> (64 - digits))).to(torch.float64) * 2.0**-digits


def _floating_dtype(dtype: torch.dtype | None) -> torch.dtype:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in _DIGITS:
        names = ", ".join(str(d) for d in _DIGITS)
        raise TypeError(f"Random real values are drawn as one of {names}, but got {dtype}.")
    return dtype


def _check_key(key: Tensor) -> None:
    if not isinstance(key, Tensor) or key.dtype != torch.int64:
        got = key.dtype if isinstance(key, Tensor) else type(key).__name__
        raise TypeError(f"A key is an int64 tensor, but got {got}. Make one with key(seed).")
    if tuple(key.shape) != (2,):
        raise ValueError(
            f"A key is of shape [2], but got {list(key.shape)}. Index the result of split to get "
            "one key, or map over it with vmap."
        )


def _check_range(low: int, high: int, dtype: torch.dtype) -> None:
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(f"randint draws integers, but got {dtype}.")
    if not 0 < high - low <= 2**32:
        raise ValueError(f"randint draws from 1 to 2**32 values, but got [{low}, {high}).")
    info = torch.iinfo(dtype)
    if low < info.min or high - 1 > info.max:
        raise ValueError(f"{dtype} holds [{info.min}, {info.max}], but got [{low}, {high}).")
