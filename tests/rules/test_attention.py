"""Scaled dot product attention over batch and heads."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from attention_standins import KERNELS, on_the_cpu
from layouts import PAIR, SQUARE, TRIPLE, R, S, case, spread, sweep, values

import dtorch
from dtorch import accelerator_functions

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


@pytest.fixture(params=KERNELS)
def kernel(request):
    """An attention of an accelerator, with a kernel on the CPU; flash takes no mask."""
    with on_the_cpu(request.param) as attention:
        yield attention
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


@pytest.mark.parametrize("placement", [R, S(0), S(1)])
@pytest.mark.parametrize("size", [32, 33])
def test_the_gradient_of_a_mask(placement, size):
    mesh = dtorch.init_device_mesh("cpu", (2,))
    whole = [torch.randn(4, 4, size, 8, requires_grad=True) for _ in range(3)]
    mask = torch.randn(size, size, requires_grad=True)
    F.scaled_dot_product_attention(*whole, attn_mask=mask).square().sum().backward()
    ours = [spread(t.detach(), mesh, [placement]) for t in whole]
    given = spread(mask.detach(), mesh, [S(1)]).requires_grad_()
    with on_the_cpu("efficient") as attention:
        ours = [t.requires_grad_() for t in ours]
        attention(*ours, given).square().sum().backward()
        for mine, theirs in zip((*ours, given), (*whole, mask), strict=True):
            torch.testing.assert_close(mine.grad.to_torch(), theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("placement", [R, S(0), S(1), S(2)])
@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "float", "causal", "grouped"])
def test_dropout_is_drawn_apart_where_a_kernel_would_draw_it(
    placement, is_jitted, kind, monkeypatch
):
    """On the CPU PyTorch draws it apart, too: the values are equal."""
    asked = []
    monkeypatch.setattr(
        accelerator_functions, "_has_fused_dropout", lambda q: asked.append(q) or True
    )
    mesh = dtorch.init_device_mesh("cpu", (2,))
    shapes = [(4, 4, 6, 8), *[(4, 2 if kind == "grouped" else 4, 6, 8)] * 2]
    whole = [torch.randn(s, requires_grad=True) for s in shapes]
    mask = {"bool": torch.rand(6, 6) > 0.3, "float": torch.randn(4, 1, 6, 6)}.get(kind)
    options = {"dropout_p": 0.4, "is_causal": kind == "causal", "enable_gqa": kind == "grouped"}

    def attention(q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, value=v, attn_mask=mask, **options)

    def loss(*tensors):
        return attention(*tensors).square().sum()

    def draw(call, *tensors):
        torch.manual_seed(3)
        return call(*tensors)

    ours = [dtorch.tensor(t.detach(), device_mesh=mesh, placements=[placement]) for t in whole]
    masks = [] if mask is None else [dtorch.tensor(mask, device_mesh=mesh, placements=[R])]
    wrap = dtorch.jit if is_jitted else lambda f: f
    found = draw(wrap(attention), *ours, *masks)
    torch.testing.assert_close(found.to_torch(), draw(attention, *whole, mask).detach())
    gradients_of = wrap(dtorch.grad(loss, argnums=(0, 1, 2)))
    draw(loss, *whole, mask).backward()
    for grad, theirs in zip(draw(gradients_of, *ours, *masks), whole, strict=True):
        torch.testing.assert_close(grad.to_torch(), theirs.grad)
    asked.clear()
    attention(*(t.requires_grad_() for t in ours), *masks)
    assert asked
