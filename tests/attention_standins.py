"""The attention kernels of accelerators, on the CPU.

Each gives what the real one gives, computed by the CPU's, and asserts what the real one demands.
"""

import contextlib
import math

import torch
import torch.nn.functional as F

aten = torch.ops.aten
_forward = aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _heads_first(sums, query):
    return sums if sums.shape == query.shape[:3] else sums.transpose(1, 2).contiguous()


def _as_on_cpu(sums):
    """The log-sum-exp as the CPU's kernel of this version of PyTorch takes it."""
    made = torch.zeros(1, 2, 3, 8)
    return sums if _forward(made, made, made)[1].shape == (1, 2, 3) else sums.transpose(1, 2)


_of_nothing = [0.0]


def _unseeing(out, bias):
    if bias is None:
        return out
    return out.masked_fill((bias == -math.inf).all(-1).unsqueeze(-1), _of_nothing[0])


def _check(q, k, bias):
    """Keys and queries that the kernel takes, and a mask whose rows are aligned."""
    assert min(*q.shape, *k.shape) > 0 and q.shape[0] == k.shape[0]
    assert q.shape[1] % k.shape[1] == 0
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.stride(-1) == 1 or bias.shape[-1] == 1
        assert all(bias.stride(d) % 8 == 0 for d in range(3) if bias.shape[d] > 1)


def _flash(q, k, v, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    _check(q, k, None)
    assert not is_causal or q.shape[2] == k.shape[2]  # its diagonal begins at the other end
    out, sums = _forward(q, k, v, dropout_p, is_causal, scale=scale)
    drawn = (torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64))
    return out, _heads_first(sums, q), None, None, q.shape[2], k.shape[2], *drawn, q.new_empty(0)


def _flash_backward(g, q, k, v, out, sums, *rest, scale=None):
    cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset = rest
    assert (cum_q, cum_k, max_q, max_k) == (None, None, q.shape[2], k.shape[2])
    assert (seed.shape, offset.shape, seed.dtype) == ((2,), (), torch.uint64)
    return _backward(g, q, k, v, out, _as_on_cpu(sums), dropout, causal, scale=scale)


def _efficient(q, k, v, bias, compute_sums, dropout_p=0.0, is_causal=False, *, scale=None):
    _check(q, k, bias)
    out, sums = _forward(q, k, v, dropout_p, is_causal, attn_mask=bias, scale=scale)
    sums = _heads_first(sums, q)
    padded = F.pad(sums, (0, -sums.shape[-1] % 32), value=math.inf)
    padded = padded if compute_sums else sums[..., :0].contiguous()
    seeds = (torch.zeros((), dtype=torch.int64) for _ in range(2))
    return _unseeing(out, bias), padded, *seeds


def _efficient_backward(g, q, k, v, bias, out, sums, *rest, scale=None):
    _, _, dropout, (*wanted, wants_bias), *causal = rest
    _check(q, k, bias)
    assert all(wanted) and not wants_bias
    rows = q.shape[2]
    assert sums.shape[2] == rows + -rows % 32 and sums[..., rows:].isposinf().all()
    sums = _as_on_cpu(sums[..., :rows].contiguous())
    options = {"attn_mask": bias, "scale": scale}
    return *_backward(g, q, k, v, out, sums, dropout, *causal or (False,), **options), None


def _cudnn(q, k, v, bias, compute_sums, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    _check(q, k, bias)
    out, sums = _forward(q, k, v, dropout_p, is_causal, attn_mask=bias, scale=scale)
    drawn = (torch.zeros((), dtype=torch.int64) for _ in range(2))
    sums, sizes = _heads_first(sums, q)[..., None], (q.shape[2], k.shape[2])
    return _unseeing(out, bias), sums, None, None, *sizes, *drawn, None


def _cudnn_backward(g, q, k, v, out, sums, seed, offset, bias, *rest, scale=None):
    cum_q, cum_k, max_q, max_k, dropout, causal = rest
    _check(q, k, bias)
    assert (cum_q, cum_k, max_q, max_k) == (None, None, q.shape[2], k.shape[2])
    sums, options = _as_on_cpu(sums[..., 0]), {"attn_mask": bias, "scale": scale}
    return _backward(g, q, k, v, out, sums, dropout, causal, **options)


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
            shape = (*q.shape[:3], k.shape[2])
            mask = F.pad(mask, (0, -mask.shape[-1] % 8))[..., : mask.shape[-1]].expand(shape)
        return op(q, k, v, mask, True, 0.0, is_causal, scale=scale)[0]

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(f"_scaled_dot_product_{name}_attention", forward, "CPU")
        library.impl(f"_scaled_dot_product_{name}_attention_backward", backward, "CPU")
        yield attention
