"""Placements, and PartitionSpec."""

import pickle

import pytest

from dtorch.errors import PlacementError
from dtorch.mesh import DeviceMesh
from dtorch.placement import P, Partial, PartitionSpec, Replicate, Shard, normalized

MESH = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
CUBE = DeviceMesh("cpu", [[[0, 1]], [[2, 3]]], mesh_dim_names=("dp", "cp", "tp"))


def test_values_hash_compare_and_print():
    assert Shard(0) == Shard(0) != Shard(1)
    assert Partial() == Partial("sum") != Partial("max")
    assert len({Shard(0), Shard(0), Replicate(), Replicate(), Partial(), Partial("sum")}) == 3
    assert repr([Shard(0), Replicate(), Partial()]) == "[Shard(dim=0), Replicate(), Partial(sum)]"
    for value in (Shard(1), Replicate(), Partial("max")):
        assert pickle.loads(pickle.dumps(value)) == value


def test_questions():
    assert Shard(1).is_shard()
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert not Shard(1).is_replicate()
    assert Replicate().is_replicate()
    assert Partial("max").is_partial("max")
    assert not Partial("max").is_partial("sum")
    assert Partial("avg").reduce_op == "avg"


def test_an_unknown_reduction_is_refused():
    with pytest.raises(PlacementError, match=r"Partial\('product'\)"):
        Partial("product")


def test_normalized_counts_negative_dims_from_the_end():
    assert normalized([Shard(-1), Replicate()], MESH, 3) == (Shard(2), Replicate())
    assert normalized((Shard(0), Partial()), MESH, 1) == (Shard(0), Partial())


@pytest.mark.parametrize(
    ("placements", "ndim", "match"),
    [
        ([Shard(0)], 2, "has 1 entries.*2 axes"),
        ([Shard(2), Replicate()], 2, "axis 'dp' is out of range for a tensor of 2 dims"),
        ([Replicate(), Shard(-3)], 2, "axis 'tp' is out of range"),
        ([Shard(0), Replicate()], 0, "without dims"),
        ([0, Replicate()], 2, r"placements\[0\] is 0"),
        (["dp", Replicate()], 2, r"placements\[0\] is 'dp'"),
    ],
)
def test_placements_that_do_not_fit_are_refused(placements, ndim, match):
    with pytest.raises(PlacementError, match=match):
        normalized(placements, MESH, ndim)


def test_reductions_that_do_not_commute_are_refused():
    with pytest.raises(PlacementError, match="do not commute"):
        normalized([Partial("sum"), Partial("max")], MESH, 1)
    assert normalized([Partial("sum"), Partial("avg")], MESH, 1)


@pytest.mark.parametrize(
    ("spec", "placements"),
    [
        (P("dp"), (Shard(0), Replicate())),
        (P(None, "tp"), (Replicate(), Shard(1))),
        (P("tp", "dp"), (Shard(1), Shard(0))),
        (P(("dp", "tp")), (Shard(0), Shard(0))),
        (P(), (Replicate(), Replicate())),
    ],
)
def test_partition_specs_and_placements_say_the_same(spec, placements):
    assert spec.to_placements(MESH) == placements
    assert PartitionSpec.from_placements(placements, MESH) == spec


def test_trailing_and_grouped_entries():
    assert P("dp", None).to_placements(MESH) == (Shard(0), Replicate())
    assert P(("dp", "cp"), "tp").to_placements(CUBE) == (Shard(0), Shard(0), Shard(1))
    assert P(["dp"]).to_placements(MESH) == (Shard(0), Replicate())
    assert P("dp", ("tp", "cp")).axes() == ("dp", "tp", "cp")


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (P("pp"), "names the axis 'pp'"),
        (P(("tp", "dp")), "mesh-axis order"),
        (P("dp", "dp"), "uses the axis 'dp' twice"),
        (P(("dp", "dp")), "twice|order"),
    ],
)
def test_partition_specs_that_do_not_fit_are_refused(spec, match):
    with pytest.raises(PlacementError, match=match):
        spec.to_placements(MESH)


def test_missing_axes_may_be_ignored():
    spec = P(("dp", "pp"), "pp", "tp")
    assert spec.to_placements(MESH, ignore_missing=True) == (Shard(0), Shard(2))


def test_what_a_partition_spec_cannot_say():
    with pytest.raises(PlacementError, match="Partial"):
        P.from_placements((Partial(), Replicate()), MESH)
    with pytest.raises(PlacementError, match="no axis names"):
        P.from_placements((Replicate(),), DeviceMesh("cpu", [0, 1]))
    with pytest.raises(PlacementError, match="expected an axis name"):
        P(("dp", 1))
    with pytest.raises(PlacementError, match="P entry 3: expected"):
        P(3)  # pyright: ignore[reportArgumentType]


def test_partition_specs_print_and_pickle():
    spec = P("dp", None, ("tp", "cp"))
    assert repr(spec) == "P('dp', None, ('tp', 'cp'))"
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(spec) == hash(P("dp", None, ("tp", "cp")))
