"""Scaled dot product attention over batch and heads."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from layouts import PAIR, SQUARE, TRIPLE, R, S, case, spread, sweep, values

import dtorch

Q = (2, 4, 3, 8)
KV = (2, 4, 5, 8)


def _causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


MASK = values((3, 5)) > 0

CASES = [
    case("plain", F.scaled_dot_product_attention, Q, KV, KV),
    case("causal", _causal, KV, KV, KV),
    case("mask", F.scaled_dot_product_attention, Q, KV, KV, (3, 5)),
    case("mask_of_batch", F.scaled_dot_product_attention, Q, KV, KV, (2, 1, 3, 5)),
    case("mask_of_heads", F.scaled_dot_product_attention, Q, KV, KV, (1, 4, 3, 5)),
    case("bool_mask", F.scaled_dot_product_attention, Q, KV, KV, values((2, 1, 3, 5)).abs() < 1.8),
    case("grouped", _grouped, Q, (2, 2, 5, 8), (2, 2, 5, 8)),
    case("uneven_heads", F.scaled_dot_product_attention, (1, 3, 2, 8), (1, 3, 4, 8), (1, 3, 4, 8)),
    case("three_dims", F.scaled_dot_product_attention, (4, 3, 8), (4, 5, 8), (4, 5, 8)),
    case("bf16", F.scaled_dot_product_attention, *[(s, torch.bfloat16) for s in (Q, KV, KV)]),
]


@pytest.mark.parametrize("which", CASES, ids=str)
def test_equals_torch_in_every_layout(which):
    sweep(dataclasses.replace(which, exact=False, fallback=True))


@pytest.mark.parametrize("grad_of", [(0,), (0, 1, 2), (1, 2)])
@pytest.mark.parametrize("mesh", [PAIR, TRIPLE], ids=["2", "3"])
@pytest.mark.parametrize("placement", [R, S(0), S(1)])
@pytest.mark.parametrize("heads", [4, 2])
def test_gradients_equal_torch(mesh, placement, grad_of, heads):
    keys = (2, heads, 5, 8)
    inputs = [values(s, seed=i) for i, s in enumerate((Q, keys, keys))]

    def loss(*tensors):
        return _grouped(*tensors).square().sum()

    wanted = [t.clone().requires_grad_(i in grad_of) for i, t in enumerate(inputs)]
    loss(*wanted).backward()
    spread_out = [spread(t, mesh, [placement]) for t in inputs]
    found = dtorch.grad(loss, argnums=grad_of)(*spread_out)
    for i, g in zip(grad_of, found, strict=True):
        torch.testing.assert_close(g.to_torch(), wanted[i].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [4, 2])
def test_batch_and_heads_do_not_communicate(heads):
    q, kv = values((2, 4, 3, 8)), values((2, heads, 5, 8))
    tensors = [spread(t, SQUARE, [S(0), S(1)]) for t in (q, kv, kv)]
    program = dtorch.jit(_grouped).program(*tensors)
    assert program.communication() == []
    assert not program.fallbacks()
    assert program.specs[program.outputs[0]].placements == (S(0), S(1))


# -- kernels of accelerators, on the CPU -----------------------------------------------------------

aten = torch.ops.aten
_forward = aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _heads_first(sums, query):
    return sums if sums.shape == query.shape[:3] else sums.transpose(1, 2).contiguous()


def _as_on_cpu(sums):
    """The log-sum-exp as the CPU's kernel of this version of PyTorch takes it."""
    made = torch.zeros(1, 2, 3, 8)
    return sums if _forward(made, made, made)[1].shape == (1, 2, 3) else sums.transpose(1, 2)


def _flash(q, k, v, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    out, sums = _forward(q, k, v, dropout_p, is_causal, scale=scale)
    drawn = (torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64))
    return out, _heads_first(sums, q), None, None, q.shape[2], k.shape[2], *drawn, q.new_empty(0)


def _flash_backward(g, q, k, v, out, sums, *rest, scale=None):
    cum_q, cum_k, max_q, max_k, dropout, causal, *_ = rest
    assert (cum_q, cum_k, max_q, max_k) == (None, None, q.shape[2], k.shape[2])
    return _backward(g, q, k, v, out, _as_on_cpu(sums), dropout, causal, scale=scale)


def _efficient(q, k, v, bias, compute_sums, dropout_p=0.0, is_causal=False, *, scale=None):
    out, sums = _forward(q, k, v, dropout_p, is_causal, attn_mask=bias, scale=scale)
    sums = _heads_first(sums, q)
    padded = F.pad(sums, (0, -sums.shape[-1] % 32)) if compute_sums else sums[..., :0].contiguous()
    return out, padded, *(torch.zeros((), dtype=torch.int64) for _ in range(2))


def _efficient_backward(g, q, k, v, bias, out, sums, *rest, scale=None):
    _, _, dropout, (*wanted, wants_bias), *causal = rest
    assert all(wanted) and not wants_bias
    sums = _as_on_cpu(sums[..., : q.shape[2]].contiguous())
    options = {"attn_mask": bias, "scale": scale}
    return *_backward(g, q, k, v, out, sums, dropout, *causal or (False,), **options), None


def _cudnn(q, k, v, bias, compute_sums, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    out, sums = _forward(q, k, v, dropout_p, is_causal, attn_mask=bias, scale=scale)
    drawn = (torch.zeros((), dtype=torch.int64) for _ in range(2))
    sizes = q.shape[2], k.shape[2]
    return out, _heads_first(sums, q)[..., None], None, None, *sizes, *drawn, None


def _cudnn_backward(g, q, k, v, out, sums, seed, offset, bias, *rest, scale=None):
    cum_q, cum_k, max_q, max_k, dropout, causal = rest
    assert (cum_q, cum_k, max_q, max_k) == (None, None, q.shape[2], k.shape[2])
    sums, options = _as_on_cpu(sums[..., 0]), {"attn_mask": bias, "scale": scale}
    return _backward(g, q, k, v, out, sums, dropout, causal, **options)


_KERNELS = {
    "flash": (_flash, _flash_backward),
    "efficient": (_efficient, _efficient_backward),
    "cudnn": (_cudnn, _cudnn_backward),
}


@pytest.fixture(params=_KERNELS)
def kernel(request):
    """An attention of an accelerator, with kernels on the CPU; flash takes no mask."""
    forward, backward = _KERNELS[request.param]
    name = f"_scaled_dot_product_{request.param}_attention"
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(name, forward, "CPU")
        library.impl(f"{name}_backward", backward, "CPU")
        op = getattr(aten, name).default
        if request.param == "flash":
            yield lambda q, k, v, mask=None: op(q, k, v)[0]
        else:
            yield lambda q, k, v, mask=None: op(q, k, v, mask, True)[0]
        dtorch.synchronize()


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize(
    ("shape", "placements"), [((1,), [R]), ((2,), [S(0)]), ((2,), [S(1)]), ((2, 2), [S(0), S(1)])]
)
@pytest.mark.parametrize("has_mask", [False, True])
def test_kernels_of_accelerators_are_split_over_batch_and_heads(
    kernel, shape, placements, is_jitted, has_mask, request
):
    has_mask = has_mask and request.node.callspec.params["kernel"] != "flash"
    mesh = dtorch.init_device_mesh("cpu", shape)
    whole = [torch.randn(4, 4, length, 8, requires_grad=True) for length in (3, 5, 5)]
    ours = [
        dtorch.tensor(t.detach(), device_mesh=mesh, placements=placements).requires_grad_()
        for t in whole
    ]
    mask = torch.randn(4, 1, 3, 5).expand(4, 4, 3, 5) if has_mask else None
    masks = [dtorch.tensor(mask, device_mesh=mesh, placements=[R] * len(shape))] if has_mask else []
    expected = F.scaled_dot_product_attention(*whole, attn_mask=mask)
    expected.square().sum().backward()
    call = dtorch.jit(kernel) if is_jitted else kernel
    for _ in range(2):
        found = call(*ours, *masks)
        assert found.placements == placements
        torch.testing.assert_close(found.to_torch().detach(), expected.detach())
    found.square().sum().backward()
    for mine, theirs in zip(ours, whole, strict=True):
        assert mine.grad.placements == placements
        torch.testing.assert_close(mine.grad.to_torch(), theirs.grad)
