"""The attention kernels of accelerators, on the CPU.

Each gives what the real one gives, in its shapes and strides, asserts what the real one demands,
and what it reads without asking for strides must lie as it reads it.

Sources: `flash_api.cpp`, `attention.cu`, `attention_backward.cu`, `kernel_backward.h` and `MHA.cpp`
of ATen, and `torch/_meta_registrations.py`.
"""

import contextlib
import math

import torch
import torch.nn.functional as F

import dtorch

aten = torch.ops.aten
_of_nothing = [0.0]


# -- what they compute -----------------------------------------------------------------------


_LAST = "last"
"""Of a causal mask: the last query sees all keys."""


def _probabilities(q, k, bias, is_causal, scale, sums=None):
    """The weights of the keys, and the log-sum-exp of the scores."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.float()
    if is_causal:
        rows, keys = scores.shape[-2:]
        begin = keys - rows if is_causal is _LAST else 0
        above = torch.ones(rows, keys, dtype=torch.bool).triu(1 + begin)
        scores = scores.masked_fill(above, -math.inf)
    sums = scores.logsumexp(-1) if sums is None else sums
    return (scores - sums.unsqueeze(-1)).exp(), sums


def _attended(q, k, v, bias, is_causal, scale):
    weights, sums = _probabilities(q, k, bias, is_causal, scale)
    out = weights @ v.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    unseeing = sums == -math.inf
    sums = sums.masked_fill(unseeing, _of_nothing[0])
    return out.masked_fill(unseeing.unsqueeze(-1), _of_nothing[0]).to(q.dtype), sums


def _gradients(grad, q, k, v, bias, out, sums, is_causal, scale):
    weights, _ = _probabilities(q, k, bias, is_causal, scale, sums)
    groups, grad = q.shape[1] // k.shape[1], grad.float()
    of_weights = grad @ v.float().repeat_interleave(groups, 1).mT
    of_scores = weights * (of_weights - (grad * out.float()).sum(-1, keepdim=True))
    scaled = of_scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    to_query = scaled @ k.float().repeat_interleave(groups, 1)
    to_key, to_value = scaled.mT @ q.float(), weights.mT @ grad
    to_key, to_value = (
        t.unflatten(1, (k.shape[1], groups)).sum(2).to(k.dtype) for t in (to_key, to_value)
    )
    return to_query.to(q.dtype), to_key, to_value, of_scores


# -- what they demand and give ---------------------------------------------------------------


def _in_layout_of(x, other):
    order = sorted(range(4), key=lambda d: -other.stride(d))
    return torch.empty_permuted(x.shape, order, dtype=x.dtype).copy_(x)


def _rows_first(x):
    """As [B, L, H, E] in memory."""
    return torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype).copy_(x)


def _has_rows_first(x):
    _, heads, rows, size = x.shape
    return (size == 1 or x.stride(3) == 1) and (rows == 1 or x.stride(2) == heads * size)


def _strides(x):
    """Those that say where something lies."""
    return [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]


def _check(q, k, v, bias, has_all_heads=True):
    """What all demand; cuDNN alone takes one mask for all heads."""
    for x in (q, k, v):
        assert x.numel() > 0 and (x.shape[-1] == 1 or x.stride(-1) == 1)
        assert x.shape[-1] % 8 or all(x.stride(d) % 8 == 0 for d in range(3) if x.shape[d] > 1)
    assert q.dtype == k.dtype == v.dtype and q.shape[0] == k.shape[0] == v.shape[0]
    assert k.shape[1:3] == v.shape[1:3] and q.shape[1] % k.shape[1] == 0
    if bias is not None:
        heads = q.shape[1] if has_all_heads or bias.shape[1] > 1 else 1
        assert bias.shape == (q.shape[0], heads, q.shape[2], k.shape[2])
        assert bias.dtype == q.dtype and bias.stride(-1) == 1 and bias.data_ptr() % 16 == 0
        assert all(bias.stride(d) % 8 == 0 for d in range(3) if bias.shape[d] > 1)
        assert has_all_heads or heads == 1 or bias.stride(1) > 0


def _flash(q, k, v, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    _check(q, k, v, None)
    assert q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
    out, sums = _attended(q, k, v, None, _LAST if is_causal else False, scale)
    drawn = (torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64))
    out = _in_layout_of(out, q)
    return out, sums, None, None, q.shape[2], k.shape[2], *drawn, q.new_empty(0)


def _flash_backward(g, q, k, v, out, sums, *rest, scale=None):
    cum_q, cum_k, max_q, max_k, dropout, is_causal, seed, offset = rest
    _check(q, k, v, None)
    assert (cum_q, cum_k, max_q, max_k, dropout) == (None, None, q.shape[2], k.shape[2], 0)
    assert (seed.shape, offset.shape, seed.dtype) == ((2,), (), torch.uint64)
    assert sums.shape == q.shape[:3] and sums.is_contiguous() and g.dtype == out.dtype == q.dtype
    *found, _ = _gradients(g, q, k, v, None, out, sums, _LAST if is_causal else False, scale)
    return tuple(_in_layout_of(t, x) for t, x in zip(found, (q, k, v), strict=True))


def _efficient(q, k, v, bias, compute_sums, dropout_p=0.0, is_causal=False, *, scale=None):
    _check(q, k, v, bias)
    assert q.shape[1] == k.shape[1]
    out, sums = _attended(q, k, v, bias, is_causal, scale)
    padded = F.pad(sums, (0, -sums.shape[-1] % 32), value=math.inf)
    padded = padded if compute_sums else sums[..., :0].contiguous()
    return _rows_first(out), padded, *(torch.zeros((), dtype=torch.int64) for _ in range(2))


def _efficient_backward(g, q, k, v, bias, out, sums, *rest, scale=None):
    _, _, dropout, (*wanted, wants_bias), *causal = rest
    _check(q, k, v, bias)
    rows = q.shape[2]
    assert all(wanted) and not dropout and g.dtype == out.dtype == q.dtype
    assert sums.shape == (*q.shape[:2], rows + -rows % 32) and sums.stride(-1) == 1
    assert all(sums.stride(d) % 8 == 0 for d in range(2) if sums.shape[d] > 1)
    assert sums[..., rows:].isposinf().all() and _has_rows_first(out)
    causal = causal[0] if causal else False
    *found, of_scores = _gradients(g, q, k, v, bias, out, sums[..., :rows], causal, scale)
    of_bias = of_scores.to(q.dtype) if wants_bias and bias is not None else None
    return *map(_rows_first, found), of_bias


def _cudnn(q, k, v, bias, compute_sums, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    _check(q, k, v, bias, has_all_heads=False)
    assert k.shape[2] > 1
    out, sums = _attended(q, k, v, bias, is_causal, scale)
    drawn = (torch.zeros((), dtype=torch.int64) for _ in range(2))
    sums, sizes = sums[..., None] if compute_sums else None, (q.shape[2], k.shape[2])
    return _in_layout_of(out, q), sums, None, None, *sizes, *drawn, None


def _cudnn_backward(g, q, k, v, out, sums, seed, offset, bias, *rest, scale=None):
    cum_q, cum_k, max_q, max_k, dropout, is_causal = rest
    _check(q, k, v, bias, has_all_heads=False)
    assert (cum_q, cum_k, max_q, max_k, dropout) == (None, None, q.shape[2], k.shape[2], 0)
    assert sums.shape == (*q.shape[:3], 1) and sums.is_contiguous() and k.shape[2] > 1
    # What it has built for a call is used again for strides that are alike but for the result's.
    assert _strides(out) == _strides(_in_layout_of(out, q)) and g.dtype == out.dtype == q.dtype
    *found, _ = _gradients(g, q, k, v, bias, out, sums[..., 0], is_causal, scale)
    return tuple(_in_layout_of(t, x) for t, x in zip(found, (q, k, v), strict=True))


KERNELS = {
    "flash": (_flash, _flash_backward),
    "efficient": (_efficient, _efficient_backward),
    "cudnn": (_cudnn, _cudnn_backward),
}


@contextlib.contextmanager
def on_the_cpu(name, of_nothing=0.0):
    """Gives an attention by the kernel of that name, which stands on the CPU meanwhile.

    Its mask is one of numbers, as PyTorch gives it to the kernels. A row that sees no key gets
    `of_nothing`.
    """
    _of_nothing[0] = of_nothing
    forward, backward = KERNELS[name]
    op = getattr(aten, f"_scaled_dot_product_{name}_attention").default

    def attention(q, k, v, mask=None, is_causal=False, scale=None):
        if name == "flash":
            return op(q, k, v, 0.0, is_causal, scale=scale)[0]
        if mask is not None:
            heads = mask.shape[-3] if name == "cudnn" and mask.ndim > 2 else 1
            heads = q.shape[1] if name == "efficient" else heads
            shape = (q.shape[0], heads, q.shape[2], k.shape[2])
            mask = F.pad(mask, (0, -mask.shape[-1] % 8))[..., : mask.shape[-1]].expand(shape)
        return op(q, k, v, mask, True, 0.0, is_causal, scale=scale)[0]

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(f"_scaled_dot_product_{name}_attention", forward, "CPU")
        library.impl(f"_scaled_dot_product_{name}_attention_backward", backward, "CPU")
        try:
            yield attention
        finally:
            dtorch.synchronize()
