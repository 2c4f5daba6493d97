"""Redistribution: values survive, sources are unchanged, and the steps are the cheapest."""

import itertools

import pytest
import torch
from layouts import (
    AVG,
    MAX,
    MESHES,
    MIN,
    OBLONG,
    PAIR,
    SQUARE,
    SUM,
    TRIPLE,
    R,
    S,
    check,
    placements_of,
    sample,
    spread,
    values,
)

import dtorch
from dtorch import redistribution
from dtorch.mesh import DeviceMesh
from dtorch.redistribution import Collective, cost, group_of, pieces, plan
from dtorch.spec import Spec

AG, AR, RS, A2A = (
    Collective.ALL_GATHER,
    Collective.ALL_REDUCE,
    Collective.REDUCE_SCATTER,
    Collective.ALL_TO_ALL,
)
SLICE, TO_PARTIAL, TRANSFER, RELABEL = (
    Collective.SLICE,
    Collective.TO_PARTIAL,
    Collective.TRANSFER,
    Collective.RELABEL,
)
SHAPES = [(4, 6), (5, 3), (1, 2), (0, 3)]


def _survives(value, before, after):
    """Moves a value from one (mesh, placements) to another, twice, and checks both ends."""
    source = spread(value, *before, seed=len(after[1]))
    kept = {d: t.clone() for d, t in source.local_shards().items()}
    for _ in range(2):
        moved = source.redistribute(*after)
        assert moved.device_mesh == after[0]
        assert tuple(moved.placements) == tuple(after[1])
        check(moved, value)
    assert source.local_shards().keys() == kept.keys()
    for device, shard in source.local_shards().items():
        assert torch.equal(shard, kept[device]), f"the source changed on {device}"


# -- values --------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: str(m.shape))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_of_layouts_keeps_the_value(mesh, shape):
    layouts = placements_of(2, mesh, (SUM,))
    for before, after in sample(list(itertools.product(layouts, repeat=2)), 100, len(shape)):
        _survives(values(shape), (mesh, before), (mesh, after))


def test_all_256_pairs_on_two_axes():
    layouts = placements_of(2, SQUARE, (SUM,))
    pairs = list(itertools.product(layouts, repeat=2))
    assert len(pairs) == 256
    value = values((3, 5))
    for before, after in pairs:
        _survives(value, (SQUARE, before), (SQUARE, after))


@pytest.mark.parametrize("op", [SUM, AVG, MAX, MIN])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool],
    ids=str,
)
@pytest.mark.parametrize("mesh", [TRIPLE, SQUARE], ids=["3", "2x2"])
def test_every_reduction_and_dtype_keeps_the_value(op, dtype, mesh):
    value = values((5, 3), torch.int64).abs().to(dtype)
    if dtype in (torch.float16, torch.uint8):
        value[0, 0] = 250 if dtype == torch.uint8 else 60000
    start = dtorch.Tensor(value, device_mesh=mesh)
    for other in (R, S(0), S(1)):
        partial = start.redistribute(placements=[op] * mesh.ndim)
        assert partial.dtype == dtype
        check(partial, value)
        check(partial.redistribute(placements=[other] * mesh.ndim), value)


@pytest.mark.parametrize("op", [SUM, AVG, MAX, MIN])
def test_different_addends_are_reduced(op):
    value = values((5, 3))
    for mesh in (PAIR, TRIPLE, SQUARE, OBLONG):
        for others in itertools.product((R, S(0), S(1)), repeat=mesh.ndim - 1):
            for after in (R, S(0), S(1)):
                _survives(value, (mesh, (op, *others)), (mesh, (after, *others)))
                _survives(value, (mesh, (*others, op)), (mesh, (*others, after)))


def test_reductions_that_do_not_commute_are_done_in_order():
    value = values((4, 3))
    for before in itertools.permutations((SUM, MAX, MIN, AVG), 2):
        check(spread(value, SQUARE, before).clone(), value)
        steps = plan(_spec((4, 3), SQUARE, before), _spec((4, 3), SQUARE, (R, R)))
        if {"max", "min"} & {p.op for p in before}:
            assert [s.axes for s in steps] == [(1,), (0,)]


def test_large_partial_values_are_reduced_in_two_rounds():
    value = values((70, 301))
    for op in (SUM, AVG, MAX):
        _survives(value, (TRIPLE, (op,)), (TRIPLE, (R,)))


def test_conjugated_values_move():
    value = values((4, 3), torch.complex64)
    x = spread(value, PAIR, [S(0)]).conj()
    check(x.redistribute(placements=[R]), value.conj().resolve_conj())
    check(x.redistribute(placements=[S(1)]), value.conj().resolve_conj())


def test_transposed_values_move():
    value = values((4, 6))
    x = spread(value, TRIPLE, [S(0)]).t()
    for after in (R, S(0), S(1), SUM):
        check(x.redistribute(placements=[after]), value.t())


OTHERS = [
    DeviceMesh("cpu", [2, 3]),
    DeviceMesh("cpu", [1, 0]),
    DeviceMesh("cpu", [1, 2]),
    DeviceMesh("cpu", [3]),
    DeviceMesh("cpu", 0),
    DeviceMesh("cpu", [2, 0, 1]),
    DeviceMesh("cpu", [[2, 3], [0, 5]]),
    DeviceMesh("cpu", [[0, 2, 4], [1, 3, 5]]),
    DeviceMesh("cpu", [[0], [1]]),
]


@pytest.mark.parametrize("shape", [(4, 6), (5, 3), (1, 2), (0, 3)], ids=str)
def test_between_meshes_the_value_survives(shape):
    value = values(shape)
    layouts = [(m, p) for m in (*MESHES, *OTHERS) for p in placements_of(2, m, (SUM,))]
    pairs = [(a, b) for a, b in itertools.product(layouts, repeat=2) if a[0] != b[0]]
    for before, after in sample(pairs, 120, sum(shape)):
        _survives(value, before, after)


# -- steps ---------------------------------------------------------------------------------


def _spec(shape, mesh, placements, dtype=torch.float32):
    return Spec.of(shape, dtype, mesh, tuple(placements))


def _kinds(before, after, mesh=PAIR, shape=(8, 12), to=None):
    steps = plan(_spec(shape, mesh, before), _spec(shape, to or mesh, after))
    return [s.kind for s in steps]


ONE_AXIS = [
    (S(0), R, [AG]),
    (S(1), R, [AG]),
    (SUM, R, [AR]),
    (MAX, R, [AR]),
    (SUM, S(0), [RS]),
    (AVG, S(1), [RS]),
    (S(0), S(1), [A2A]),
    (S(1), S(0), [A2A]),
    (R, S(0), [SLICE]),
    (R, SUM, [TO_PARTIAL]),
    (S(0), SUM, [TO_PARTIAL]),
    (S(1), MAX, [AG, TO_PARTIAL]),
    (SUM, AVG, [AR, TO_PARTIAL]),
    (SUM, SUM, []),
    (S(0), S(0), []),
    (R, R, []),
]


@pytest.mark.parametrize(("before", "after", "kinds"), ONE_AXIS, ids=str)
@pytest.mark.parametrize(
    "mesh",
    [PAIR, TRIPLE, DeviceMesh("cpu", [0, 1, 2, 3])],
    ids=lambda v: getattr(v, "shape", None) and str(v.shape),
)
def test_the_classic_collectives(before, after, kinds, mesh):
    assert _kinds([before], [after], mesh) == kinds


@pytest.mark.parametrize(("before", "after", "kinds"), ONE_AXIS, ids=str)
def test_an_axis_of_one_device_does_nothing(before, after, kinds):
    steps = plan(
        _spec((8, 12), DeviceMesh("cpu", [0]), [before]),
        _spec((8, 12), DeviceMesh("cpu", [0]), [after]),
    )
    assert all(s.kind is RELABEL and s.num_bytes == 0 for s in steps)


def test_an_axis_of_one_device_does_nothing_beside_others():
    mesh = DeviceMesh("cpu", [[0, 1]])
    for first, second, third in itertools.product((R, S(0), S(1), SUM), repeat=3):
        steps = plan(_spec((8, 12), mesh, [first, third]), _spec((8, 12), mesh, [second, third]))
        assert all(s.kind is RELABEL for s in steps), (first, second, third, steps)


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        ((S(0), S(1)), (R, S(1)), [AG]),
        ((S(0), S(0)), (S(0), R), [AG]),
        ((SUM, SUM), (R, R), [AR]),
        ((SUM, S(0)), (R, S(0)), [AR]),
        ((SUM, S(0)), (S(1), S(0)), [RS]),
        ((R, R), (S(0), S(0)), [SLICE, SLICE]),
        ((R, R), (S(0), S(1)), [SLICE, SLICE]),
        ((S(0), S(1)), (S(0), R), [AG]),
        ((S(0), R), (S(0), S(1)), [SLICE]),
        ((S(0), R), (S(0), S(0)), [SLICE]),
        ((S(0), R), (R, S(0)), [AG, SLICE]),
        ((R, S(0)), (S(0), S(0)), [TRANSFER]),
        ((S(0), S(1)), (S(1), S(0)), [TRANSFER]),
        ((S(0), SUM), (S(0), S(0)), [RS]),
        ((S(0), SUM), (R, R), [AR, AG]),
        ((S(0), S(1)), (SUM, S(1)), [TO_PARTIAL]),
    ],
    ids=str,
)
def test_two_axes(before, after, kinds):
    found = _kinds(before, after, SQUARE)
    assert [k for k in found if k is not RELABEL] == kinds


def test_costs_are_the_bytes_of_the_busiest_device():
    whole = 8 * 12 * 4

    def bytes_of(before, after, mesh=PAIR):
        return cost(_spec((8, 12), mesh, before), _spec((8, 12), mesh, after))

    assert bytes_of([S(0)], [R]) == whole // 2
    assert bytes_of([SUM], [R]) == whole
    assert bytes_of([SUM], [S(0)]) == whole // 2
    assert bytes_of([S(0)], [S(1)]) == whole // 4
    assert bytes_of([R], [S(0)]) == 0
    assert bytes_of([R], [SUM]) == 0
    assert bytes_of([S(0)], [R], TRIPLE) == (8 - 2) * 12 * 4


def test_no_path_costs_more_than_gathering_everything():
    for mesh, shape in itertools.product((PAIR, TRIPLE, SQUARE, OBLONG), ((8, 12), (5, 3))):
        layouts = placements_of(2, mesh, (SUM,))
        whole = _spec(shape, mesh, [R] * mesh.ndim)
        for before, after in itertools.product(layouts, repeat=2):
            a, b = _spec(shape, mesh, before), _spec(shape, mesh, after)
            assert cost(a, b) <= cost(a, whole) + cost(whole, b)


def test_a_step_starts_where_the_one_before_ends():
    for mesh in (SQUARE, OBLONG):
        layouts = placements_of(2, mesh, (SUM, MAX))
        for before, after in itertools.product(layouts, repeat=2):
            source, target = _spec((8, 12), mesh, before), _spec((8, 12), mesh, after)
            steps = plan(source, target)
            ends = [source, *(s.target for s in steps)]
            assert all(s.source is e for s, e in zip(steps, ends, strict=False))
            assert ends[-1] is target


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        ([R], [R], [TRANSFER]),
        ([S(0)], [S(0)], [TRANSFER]),
        ([SUM], [R], [RS, TRANSFER]),
        ([R], [SUM], [TRANSFER, TO_PARTIAL]),
    ],
    ids=str,
)
def test_another_mesh_takes_one_transfer(before, after, kinds):
    assert _kinds(before, after, to=DeviceMesh("cpu", [4, 5])) == kinds


def test_a_transfer_to_where_the_value_is_moves_nothing():
    steps = plan(_spec((8, 12), PAIR, [R]), _spec((8, 12), DeviceMesh("cpu", [1, 0]), [R]))
    assert sum(s.num_bytes for s in steps) == 0


def test_a_mesh_that_differs_in_its_stage_alone_is_relabelled():
    stages = DeviceMesh("cpu", [[0, 1], [2, 3]]).unbind(0)
    steps = plan(_spec((8, 12), PAIR, [S(0)]), _spec((8, 12), stages[0], [S(0)]))
    assert [s.kind for s in steps] == [RELABEL]


# -- pieces and groups ---------------------------------------------------------------------


def test_pieces_cover_each_part_once():
    value = torch.arange(35).reshape(5, 7)
    layouts = [(m, p) for m in (*MESHES, *OTHERS) for p in placements_of(2, m, ())]
    for (a, p), (b, q) in sample(list(itertools.product(layouts, repeat=2)), 300, 5):
        source, target = _spec((5, 7), a, p), _spec((5, 7), b, q)
        for box, found in zip(target.boxes, pieces(source, target), strict=True):
            covered = torch.zeros_like(value)
            for giver, piece in found:
                (i, j), (k, m) = piece
                assert redistribution.intersection(piece, source.boxes[giver]) == piece
                covered[i:j, k:m] += 1
            wanted = torch.zeros_like(value)
            (i, j), (k, m) = box
            wanted[i:j, k:m] = 1
            assert torch.equal(covered, wanted)


def test_a_device_keeps_what_it_has():
    source = _spec((4, 4), PAIR, [R])
    target = _spec((4, 4), DeviceMesh("cpu", [1, 5]), [R])
    assert pieces(source, target)[0] == ((1, ((0, 4), (0, 4))),)


def test_groups_differ_on_the_axes_alone():
    assert group_of(OBLONG, (0,)) == ((0, 3), (1, 4), (2, 5), (0, 3), (1, 4), (2, 5))
    assert group_of(OBLONG, (1,)) == ((0, 1, 2),) * 3 + ((3, 4, 5),) * 3
    assert group_of(OBLONG, (0, 1)) == ((0, 1, 2, 3, 4, 5),) * 6


def test_steps_print():
    (step,) = plan(_spec((8, 12), PAIR, [S(0)]), _spec((8, 12), PAIR, [R]))
    assert repr(step) == "all_gather: [S(0)] -> [R] (192 bytes)"
