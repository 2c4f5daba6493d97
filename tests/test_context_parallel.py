"""Attention over a split sequence: equal to PyTorch's whole attention, and nothing is gathered."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_standins import KERNELS, on_the_cpu
from layouts import R, S, sampled, spread, values

import dtorch
from dtorch import DeviceMesh, init_device_mesh
from dtorch.program import Apply, Redistribute
from dtorch.redistribution import Collective
from dtorch.rules.ring import Block, block
from dtorch.sharded_forms.attention import _balanced

AXES = ("ring_cp", "ulysses_cp", "ulysess_cp", "zigzag_cp", "cp")


def _grids() -> list[tuple[DeviceMesh, list[Any]]]:
    lines = [(init_device_mesh("cpu", (n,), mesh_dim_names=(a,)), [S(2)])
             for n in (1, 2, 3, 4, 8) for a in AXES]  # fmt: skip
    squares = [
        (("ring_cp", "ulysses_cp"), [S(2), S(2)]),
        (("ulysses_cp", "ring_cp"), [S(2), S(2)]),
        (("ulysses_cp", "zigzag_cp"), [S(2), S(2)]),
        (("dp", "ring_cp"), [S(0), S(2)]),
        (("dp", "zigzag_cp"), [S(0), S(2)]),
        (("tp", "ring_cp"), [S(1), S(2)]),
        (("ulysses_cp", "tp"), [S(2), S(1)]),
        (("a", "b"), [S(2), S(2)]),
    ]
    grids = [(init_device_mesh("cpu", (2, 2), mesh_dim_names=n), p) for n, p in squares]
    names = ("dp", "ring_cp", "ulysses_cp")
    return [*lines, *grids, (init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names),
                             [S(0), S(2), S(2)])]  # fmt: skip


GRIDS = _grids()
MASKS = ("none", "none", "causal", "causal", "bool", "float", "rows", "unseeing")


def _mask(kind, shape, seed):
    batch, heads, rows, keys = shape
    made = torch.Generator().manual_seed(seed)
    match kind:
        case "bool":
            return torch.rand(rows, keys, generator=made) > 0.4
        case "float":
            return torch.randn(batch, 1, rows, keys, generator=made)
        case "rows":
            return torch.rand(batch, heads, 1, keys, generator=made) > 0.3
        case "unseeing":
            seen = torch.rand(rows, keys, generator=made) > 0.6
            return torch.where(seen, 0.0, -torch.inf).index_fill(0, torch.tensor([0]), -torch.inf)
    return None


@pytest.mark.parametrize("seed", range(sampled(60)))
def test_equals_torch_forward_and_backward(seed):
    draw = random.Random(seed)
    mesh, split = draw.choice(GRIDS)
    kind, keys = draw.choice(MASKS), draw.choice([1, 2, 3, 4])
    heads, length = keys * draw.choice([1, 1, 2, 4]), draw.choice([1, 2, 5, 7, 8, 16, 33])
    num_keys = draw.choice([length, length, length, 1, 3, 17])
    batch, whole = draw.choice([1, 2, 3]), [R] * mesh.ndim
    shapes = [(batch, heads, length, 8), *[(batch, keys, num_keys, 8)] * 2]
    made = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(s, generator=made) for s in shapes]
    mask = _mask(kind, (batch, heads, length, num_keys), seed)
    layouts = [draw.choice([split, split, split, whole]), *[draw.choice([split] * 3 + [whole])] * 2]

    def call(q, k, v, mask=None):
        options = {"is_causal": kind == "causal", "enable_gqa": heads > keys}
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)

    wanted = [t.clone().requires_grad_() for t in inputs]
    given = [spread(t, mesh, p).requires_grad_() for t, p in zip(inputs, layouts, strict=True)]
    masks = () if mask is None else (spread(mask, mesh, whole),)
    expected, found = call(*wanted, mask), call(*given, *masks)
    compiled = dtorch.jit(call)(*(t.detach() for t in given), *masks)
    for ours in (found.detach(), compiled):
        torch.testing.assert_close(ours.to_torch(), expected.detach(), rtol=2e-5, atol=2e-5)
    cotangent = values(expected.shape)
    grads = torch.autograd.grad(expected, wanted, cotangent)
    ours = torch.autograd.grad(found, given, spread(cotangent, mesh, whole))
    for our, grad in zip(ours, grads, strict=True):
        torch.testing.assert_close(our.to_torch(), grad, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("axis", ["ring_cp", "ulysses_cp", "zigzag_cp"])
@pytest.mark.parametrize("length", [4097, 1031])
def test_long_uneven_sequences(axis, length):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=(axis,))
    q, k, v = torch.randn(3, 1, 4, length, 8).unbind()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    given = [spread(t, mesh, [S(2)]) for t in (q, k, v)]
    found = F.scaled_dot_product_attention(*given, is_causal=True)
    torch.testing.assert_close(found.to_torch(), expected, rtol=2e-5, atol=2e-5)


def test_half_precision_is_merged_in_float32():
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("ring_cp",))
    q, k, v = torch.randn(3, 1, 2, 64, 8).bfloat16().unbind()
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    found = F.scaled_dot_product_attention(*(spread(t, mesh, [S(2)]) for t in (q, k, v)))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.to_torch().double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("axis", ["ring_cp", "zigzag_cp"])
@pytest.mark.parametrize(("rows", "keys"), [(1, 8), (2, 5), (3, 3), (3, 7), (2, 8)])
def test_few_causal_queries_against_split_keys(axis, rows, keys):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=(axis,))
    inputs = torch.randn(1, 2, rows, 4), *torch.randn(2, 1, 2, keys, 4).unbind()
    wanted = [t.clone().requires_grad_() for t in inputs]
    given = [spread(t, mesh, p) for t, p in zip(inputs, ([R], [S(2)], [S(2)]), strict=True)]
    given = [t.requires_grad_() for t in given]
    expected = F.scaled_dot_product_attention(*wanted, is_causal=True)
    found = F.scaled_dot_product_attention(*given, is_causal=True)
    torch.testing.assert_close(found.detach().to_torch(), expected.detach())
    grads = torch.autograd.grad(expected.square().sum(), wanted)
    for our, grad in zip(torch.autograd.grad(found.square().sum(), given), grads, strict=True):
        torch.testing.assert_close(our.to_torch(), grad)


@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize("masked", [None, [S(0), R], [S(1), S(1)], [S(0), S(1)], [R, S(0)]])
@pytest.mark.parametrize("split", [[R, S(2)], [S(3), S(2)], [S(0), S(2)]])
def test_only_the_axes_of_the_ring_split_its_pieces(rows, masked, split):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "cp"))
    q, k, v = torch.randn(4, 1, rows, 4), *torch.randn(2, 4, 1, 8, 4).unbind()
    mask = None if masked is None else torch.rand(rows, 8) < 0.7
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    given = [spread(t, mesh, p) for t, p in ((q, [R, R]), (k, split), (v, [R, S(2)]))]
    masks = [] if mask is None else [spread(mask, mesh, masked)]
    found = F.scaled_dot_product_attention(*given, *masks)
    torch.testing.assert_close(found.to_torch(), expected)


@pytest.mark.parametrize("split", [R, S(2)])
def test_fewer_values_than_keys_are_refused_at_the_call(split):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring_cp",))
    q, v = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 4, 4)
    given = [spread(t, mesh, [split]) for t in (q, q, v)]
    with pytest.raises(ValueError, match=r"cannot combine these shapes:\n  query .*\n  Fix:"):
        F.scaled_dot_product_attention(*given)


def test_keys_split_over_the_axis_of_the_heads():
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    q, k, v = torch.randn(3, 3, 3, 8), *torch.randn(2, 3, 3, 40, 8).unbind()
    mask = torch.rand(3, 1, 1, 40) < 0.7
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    given = [spread(t, mesh, [p]) for t, p in ((q, S(1)), (k, S(2)), (v, R), (mask, S(0)))]
    torch.testing.assert_close(F.scaled_dot_product_attention(*given).to_torch(), expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows", [1, 6])
def test_infinite_and_nearly_infinite_values(rows, is_causal):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring_cp",))
    q, k, v = torch.randn(1, 1, rows, 4), *torch.randn(2, 1, 1, 6, 4).unbind()
    k.fill_(0.1)
    v[..., 0], v[..., 3:, 0] = 1e38, -1e38  # which add up to less than what overflows
    v[..., 0, 1] = torch.inf
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    given = [spread(t, mesh, [S(2) if t.shape[2] > 1 else R]) for t in (q, k, v)]
    found = F.scaled_dot_product_attention(*given, is_causal=is_causal).to_torch()
    torch.testing.assert_close(found[..., 1:], expected[..., 1:])
    torch.testing.assert_close(found[..., 0], expected[..., 0], rtol=1e-5, atol=1e33)


# -- kernels of accelerators, on the CPU -------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", range(sampled(40)))
def test_kernels_of_accelerators_equal_torch(kernel, seed):
    draw = random.Random(seed)
    mesh, split = draw.choice(GRIDS)
    kind = draw.choice(MASKS if kernel != "flash" else ("none", "causal"))
    keys = draw.choice([2, 4])
    grouped = 1 if kernel == "efficient" else draw.choice([1, 1, 2])  # which repeats keys before
    heads, length = keys * grouped, draw.choice([1, 2, 7, 8, 16, 33, 64])
    num_keys = length if kernel == "flash" and kind == "causal" else draw.choice([length, 5, 17])
    num_keys = max(num_keys, 2 if kernel == "cudnn" else 1)
    batch, whole = draw.choice([2, 3]), [R] * mesh.ndim
    shapes = [(batch, heads, length, 8), *[(batch, keys, num_keys, 8)] * 2]
    made = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(s, generator=made).requires_grad_() for s in shapes]
    mask = _mask(kind, (batch, heads, length, num_keys), seed)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    options = {"is_causal": kind == "causal"}
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True, **options)
    layouts = [draw.choice([split, split, split, whole]), *[draw.choice([split] * 3 + [whole])] * 2]
    placed = zip(inputs, layouts, strict=True)
    given = [spread(t.detach(), mesh, p).requires_grad_() for t, p in placed]
    masks = () if mask is None else (spread(mask, mesh, whole),)
    cotangent = values(expected.shape)
    with on_the_cpu(kernel) as attention:
        found = attention(*given, *masks, **options)
        compiled = dtorch.jit(attention)(*(t.detach() for t in given), *masks, **options)
        ours = torch.autograd.grad(found, given, spread(cotangent, mesh, whole))
        results = [t.detach().to_torch() for t in (found, compiled, *ours)]
    wanted = expected.detach(), expected.detach(), *torch.autograd.grad(expected, inputs, cotangent)
    for our, theirs in zip(results, wanted, strict=True):
        torch.testing.assert_close(our, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_rows_that_see_nothing_of_a_piece(kernel):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ring_cp",))
    inputs = [t.requires_grad_() for t in torch.randn(3, 1, 2, 16, 8)]
    mask = torch.full((16, 16), -torch.inf)
    mask[:, 5] = mask[3:9, 14] = 0.0
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    with on_the_cpu(kernel, of_nothing=torch.nan) as attention:
        _compare(attention, expected, inputs, mesh, [S(2)], spread(mask, mesh, [R]))


def _compare(attention, expected, inputs, mesh, placements, *masks, **options):
    """Values and gradients of an attention over devices, and those of one as PyTorch has it."""
    given = [spread(t.detach(), mesh, placements).requires_grad_() for t in inputs]
    found = attention(*given, *masks, **options)
    found.square().sum().backward()
    results = [found.detach().to_torch(), *(t.grad.to_torch() for t in given)]
    wanted = expected.detach(), *torch.autograd.grad(expected.square().sum(), inputs)
    for our, theirs in zip(results, wanted, strict=True):
        torch.testing.assert_close(our, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("axis", ["ring_cp", "zigzag_cp", "ulysses_cp"])
def test_odd_lengths_are_no_implicit_communication(kernel, axis):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    inputs = [t.requires_grad_() for t in torch.randn(3, 2, 4, 33, 8)]
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True)
    with on_the_cpu(kernel) as attention, dtorch.strict():
        _compare(attention, expected, inputs, mesh, [S(2)], is_causal=True)


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_a_mask_that_is_alike_for_all_keys(kernel):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring_cp",))
    inputs = [t.requires_grad_() for t in torch.randn(3, 2, 4, 16, 8)]
    mask = torch.randn(2, 1, 16, 1)
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default
    masked = spread(mask, mesh, [R]).expand(2, 4, 16, 16)
    with on_the_cpu(kernel):
        _compare(lambda *t: op(*t, masked, True)[0], expected, inputs, mesh, [S(2)])


@pytest.mark.parametrize("axis", ["ring_cp", "zigzag_cp"])
@pytest.mark.parametrize("rows", [4, 8])
def test_the_diagonal_of_flash_ends_with_the_last_key(axis, rows):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    inputs = [torch.randn(1, 2, n, 8, requires_grad=True) for n in (rows, 8, 8)]
    mask = torch.ones(rows, 8, dtype=torch.bool).tril(8 - rows)
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    with on_the_cpu("flash") as attention:
        _compare(attention, expected, inputs, mesh, [S(2)], is_causal=True)


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
@pytest.mark.parametrize("axis", ["ring_cp", "zigzag_cp", "ulysses_cp"])
@pytest.mark.parametrize("keys", [6, 8])
def test_a_mask_and_a_diagonal(kernel, axis, keys):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    inputs = [torch.randn(1, 2, n, 8, requires_grad=True) for n in (8, keys, keys)]
    mask = torch.randn(8, keys)
    hidden = torch.ones(8, keys, dtype=torch.bool).triu(1)
    both = mask.masked_fill(hidden, -torch.inf)
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=both)
    with on_the_cpu(kernel) as attention:
        _compare(attention, expected, inputs, mesh, [S(2)], spread(mask, mesh, [R]), is_causal=True)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("number", [torch.finfo(torch.float32).min, -1e9, -torch.inf])
@pytest.mark.parametrize("rows", [1, 13])
def test_rows_masked_whole_by_a_huge_number(size, number, rows):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ring_cp",))
    q, k, v = torch.randn(1, 2, rows, 8), *torch.randn(2, 1, 2, 13, 8)
    mask = torch.zeros(rows, 13).index_fill(0, torch.tensor([0, rows - 1]), number)
    mask[rows // 2, 4:] = number
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    given = [spread(t, mesh, [S(2) if t.shape[2] > 1 else R]) for t in (q, k, v)]
    found = F.scaled_dot_product_attention(*given, attn_mask=spread(mask, mesh, [R]))
    torch.testing.assert_close(found.to_torch(), expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("axis", "kind"),
    [("ring_cp", Collective.PERMUTE), ("zigzag_cp", Collective.PERMUTE),
     ("ulysses_cp", Collective.ALL_TO_ALL)],
)  # fmt: skip
def test_kernels_of_accelerators_gather_nothing(kernel, axis, kind):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=(axis,))
    given = [spread(torch.zeros(1, 8, 128, 8), mesh, [S(2)]) for _ in range(3)]

    def loss(attention, *tensors):
        return attention(*tensors, is_causal=True).square().sum()

    with on_the_cpu(kernel) as attention:
        forward = dtorch.jit(lambda q, k, v: attention(q, k, v, is_causal=True)).program(*given)
        gradients = dtorch.jit(dtorch.grad(lambda *t: loss(attention, *t), argnums=(0, 1, 2)))
        backward = gradients.program(*given)
        with dtorch.strict():
            assert attention(*given, is_causal=True).placements == [S(2)]
    assert {k for k in _kinds(forward) if not k.is_local} == {kind}
    assert {k for k in _kinds(backward) if not k.is_local} - {Collective.ALL_REDUCE} == {kind}
    assert [backward.specs[o].placements for o in backward.outputs] == [(S(2),)] * 3


# -- what is communicated --------------------------------------------------------------------


def _program(axis, length=64, heads=8, keys=8, **options):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=(axis,))
    given = [spread(torch.zeros(1, n, length, 4), mesh, [S(2)]) for n in (heads, keys, keys)]
    call = dtorch.jit(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options))
    return call.program(*given)


def _kinds(program):
    steps = [i.step for i in program.instructions if isinstance(i, Redistribute)]
    return [s.kind for s in steps]


@pytest.mark.parametrize("axis", ["ring_cp", "zigzag_cp"])
def test_a_ring_passes_keys_on_and_no_device_holds_all(axis):
    program = _program(axis, length=16384)
    assert _kinds(program) == [Collective.PERMUTE] * 6
    everything = 16384 * 8 * 4
    for spec in program.specs:
        assert max(map(torch.Size.numel, map(torch.Size, spec.local_shapes))) <= everything // 4


def test_the_next_keys_are_asked_for_before_these_are_attended_to():
    program = _program("ring_cp")
    order = [
        "pass" if isinstance(i, Redistribute) else "attend"
        for i in program.instructions
        if isinstance(i, Redistribute) or i.op.name() == "dtorch::attend_block"
    ]
    assert order == ["pass", "pass", "attend"] * 3 + ["attend"]


def test_a_causal_ring_balances():
    moved = _program("zigzag_cp", is_causal=True)
    assert set(_kinds(moved)) == {Collective.PERMUTE}
    work = {}
    orders = {"zigzag": _balanced(64, 4), "contiguous": [((i * 16, 16),) for i in range(4)]}
    for order, pieces in orders.items():
        work[order] = [
            [_area(block(pieces[i], pieces[(i - s) % 4], True)) for i in range(4)] for s in range(4)
        ]
    assert all(len(set(step)) == 1 for step in work["zigzag"])
    assert max(map(sum, zip(*work["contiguous"], strict=True))) == 16 * 16 // 2 + 3 * 16 * 16


def _area(one):
    if one is None:
        return 0
    area = one.queries[1] * one.keys[1]
    return area if one.diagonal is None else area // 2


def test_ulysses_exchanges_heads():
    assert _kinds(_program("ulysses_cp")) == [Collective.ALL_TO_ALL] * 4


def test_another_axis_takes_what_is_cheaper():
    assert Collective.PERMUTE in _kinds(_program("cp", heads=8, keys=1, enable_gqa=True))
    assert Collective.ALL_TO_ALL in _kinds(_program("cp", heads=8, keys=8))
    assert Collective.PERMUTE in _kinds(_program("cp", heads=3, keys=3))  # heads do not divide


def test_a_replicated_prefix_joins_a_split_sequence():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ring_cp",))
    text, image = torch.randn(3, 1, 4, 33, 8), torch.randn(3, 1, 4, 101, 8)

    def joint(text, image):
        q, k, v = torch.cat([text, image], 3).unbind()
        return F.scaled_dot_product_attention(q, k, v)[:, :, 33:]

    given = spread(text, mesh, [R]), spread(image, mesh, [S(3)])
    found = dtorch.jit(joint)
    torch.testing.assert_close(found(*given).to_torch(), joint(text, image), rtol=2e-5, atol=2e-5)
    assert found(*given).placements == [S(2)]
    assert set(_kinds(found.program(*given))) <= {Collective.PERMUTE, Collective.SLICE}


def test_queries_alone_split_need_nothing():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring_cp",))
    given = [spread(torch.zeros(1, 2, n, 4), mesh, [p]) for n, p in ((8, S(2)), (5, R), (5, R))]
    assert not dtorch.jit(F.scaled_dot_product_attention).program(*given).communication()


def test_keys_alone_split_are_attended_to_where_they_are():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ring_cp"))
    query = spread(torch.zeros(1, 8, 1, 4), mesh, [S(1), R])
    keys = spread(torch.zeros(1, 2, 64, 4), mesh, [S(1), S(2)])

    def call(query, keys):
        return F.scaled_dot_product_attention(query, keys, keys, enable_gqa=True)

    program = dtorch.jit(call).program(query, keys)
    assert max(c.step.num_bytes for c in program.communication()) <= 8 * 4 * 4
    assert any(isinstance(i, Apply) and "attend_block" in str(i.op) for i in program.instructions)


# -- the plan of a step ----------------------------------------------------------------------


def test_blocks_of_contiguous_pieces():
    def piece(number):
        return ((number * 4, 4),)

    assert block(piece(1), piece(0), False) == Block((0, 4), (0, 4), None)
    assert block(piece(1), piece(0), True) == Block((0, 4), (0, 4), None)
    assert block(piece(1), piece(1), True) == Block((0, 4), (0, 4), 0)
    assert block(piece(0), piece(1), True) is None
    assert block(((4, 2),), ((5, 3),), True) == Block((0, 2), (0, 3), -1)
    assert block(((4, 2),), ((3, 3),), True) == Block((0, 2), (0, 3), 1)
    assert block(((0, 0),), piece(0), False) is None
    assert block(piece(0), ((8, 0),), False) is None


@pytest.mark.parametrize("size", [16, 13, 5, 1])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_blocks_of_balanced_pieces_see_what_a_causal_mask_leaves(size, count):
    pieces = _balanced(size, count)
    seen = torch.zeros(size, size, dtype=torch.bool)
    for queries in pieces:
        for keys in pieces:
            found = block(queries, keys, True)
            if found is None:
                continue
            rows = [r for start, length in queries for r in range(start, start + length)]
            columns = [c for start, length in keys for c in range(start, start + length)]
            (row, num_rows), (column, num_columns), diagonal = found
            for i, r in enumerate(rows[row : row + num_rows]):
                for j, c in enumerate(columns[column : column + num_columns]):
                    assert not seen[r, c]
                    seen[r, c] = diagonal is None or j <= i + diagonal
    assert torch.equal(seen, torch.ones(size, size).tril().bool())


@pytest.mark.parametrize("keys", [16, 15, 3])
def test_keys_on_a_later_stage_stay_where_they_are(keys):
    stages = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "ring_cp")).unbind("pp")
    q, k, v = (torch.randn(1, 2, n, 8) for n in (1, keys, keys))
    mask = torch.arange(keys)[None] < 3
    keys_and_values = [spread(t, stages[1], [S(2)]) for t in (k, v)]
    given = spread(q, stages[1], [R]), *keys_and_values, spread(mask, stages[0], [R])

    def call(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    program = dtorch.jit(call).program(*given)
    moved = [i.step.target.shape for i in program.communication()]
    assert all(len(shape) < 4 or shape[2] != keys for shape in moved)
    torch.testing.assert_close(call(*given).to_torch(), call(q, k, v, mask), rtol=2e-5, atol=2e-5)
