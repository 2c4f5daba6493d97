"""Plans over parameter trees, meshes by pattern, and constraints."""

from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, P, Replicate, Shard
from dtorch.errors import MeshError, PlacementError
from dtorch.parallel import ColumnParallel, RowParallel, constrain, gathered, shard

MESH = dtorch.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))


def layer() -> dict[str, Any]:
    return {
        "up": {"weight": torch.randn(7, 4), "bias": torch.randn(7)},
        "down": {"weight": torch.randn(4, 7), "bias": torch.randn(4)},
        "norm": {"weight": torch.randn(4)},
    }


PLAN = {
    "*up.*": ColumnParallel("tp"),
    "*down.*": RowParallel("tp"),
    "*norm.weight": P("missing"),
}


def test_a_plan_lays_out_every_leaf() -> None:
    tree = layer()
    placed = shard(tree, MESH, PLAN)
    whole, columns, rows = Replicate(), Shard(0), Shard(1)
    assert placed["up"]["weight"].placements == [whole, columns]
    assert placed["up"]["bias"].placements == [whole, columns]
    assert placed["down"]["weight"].placements == [whole, rows]
    assert placed["down"]["bias"].placements == [whole, whole]
    assert placed["norm"]["weight"].placements == [whole, whole]
    for name in ("up", "down", "norm"):
        assert torch.equal(placed[name]["weight"].to_torch(), tree[name]["weight"])


def test_the_first_pattern_that_matches_decides() -> None:
    placed = shard(layer(), MESH, {"up.weight": P(), "*.weight": P("dp"), "*": P()})
    assert placed["up"]["weight"].placements == [Replicate(), Replicate()]
    assert placed["down"]["weight"].placements == [Shard(0), Replicate()]


def test_a_list_of_placements_is_an_annotation() -> None:
    placed = shard({"w": torch.ones(4, 6)}, MESH, {"w": [Shard(0), Shard(-1)]})
    assert placed["w"].placements == [Shard(0), Shard(1)]


def test_leaves_keep_what_they_are() -> None:
    tree = {"w": torch.ones(3, requires_grad=True), "rate": 0.5, "name": "x", "none": None}
    placed = shard(tree, MESH, {"w": P("tp")})
    assert placed["rate"] == 0.5
    assert placed["name"] == "x"
    assert placed["none"] is None
    assert placed["w"].requires_grad
    assert placed["w"].is_leaf


def test_a_distributed_leaf_is_redistributed() -> None:
    first = shard(layer(), MESH, PLAN)
    second = shard(first, dtorch.DeviceMesh("cpu", [0, 1], ("tp",)), PLAN)
    weight = second["up"]["weight"]
    assert weight.placements == [Shard(0)]
    assert torch.equal(weight.to_torch(), first["up"]["weight"].to_torch())


def test_the_caller_may_change_what_it_passed() -> None:
    tree = {"w": torch.ones(6, 2)}
    placed = shard(tree, MESH, {"w": P("tp")})
    tree["w"].zero_()
    assert torch.equal(placed["w"].to_torch(), torch.ones(6, 2))


def test_a_pattern_without_a_leaf_lists_near_misses() -> None:
    with pytest.raises(PlacementError, match=r"match no leaf:\n  'up\.wieght'; the nearest .*up\."):
        shard(layer(), MESH, {"up.wieght": P("tp")})


def test_all_leaves_that_do_not_fit_are_listed_by_path() -> None:
    with pytest.raises(PlacementError) as error:  # noqa: PT011
        shard(layer(), MESH, {"*.bias": P(None, "tp"), "*.weight": P("tp")})
    message = str(error.value)
    assert "up.bias (1 dims)" in message
    assert "down.bias (1 dims)" in message
    assert "norm.weight" not in message


def test_constrain_sets_a_layout_inside_and_outside_jit() -> None:
    x = dtorch.arange(24, device_mesh=MESH).reshape(4, 6)

    def double(x: Any) -> Any:
        return constrain(x * 2, P("dp", "tp"))

    for function in (double, dtorch.jit(double)):
        y = function(x)
        assert y.placements == [Shard(0), Shard(1)]
        assert torch.equal(y.to_torch(), torch.arange(24).reshape(4, 6) * 2)
    assert constrain(x, P("elsewhere")).placements == [Replicate(), Replicate()]
    plain = torch.ones(2)
    assert constrain(plain, P("dp")) is plain
    with pytest.raises(PlacementError, match="has 3 entries"):
        constrain(x, P("dp", "tp", None))


def test_meshes_are_given_by_pattern() -> None:
    pipeline = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    first, last = pipeline.unbind("pp")
    placed = shard(layer(), {"up.*": first, "*": last}, PLAN)
    assert placed["up"]["weight"].device_mesh == first
    assert placed["up"]["weight"].placements == [Shard(0)]
    assert placed["down"]["weight"].device_mesh == last
    with pytest.raises(MeshError, match=r"leaves a mesh:\n  down.bias\n  down.weight\n  norm"):
        shard(layer(), {"up.*": first}, PLAN)


def test_constrain_takes_a_tensor_to_the_stage_of_another() -> None:
    first, last = DeviceMesh("cpu", [[0, 1], [2, 3]], ("pp", "tp")).unbind("pp")
    weight, x = dtorch.zeros(2, device_mesh=last), dtorch.zeros(4, 2, device_mesh=first)
    found = dtorch.jit(lambda x, w: constrain(x, P("tp"), beside=w))(x, weight)
    assert found.device_mesh == last and found.placements == [Shard(0)]
    assert constrain(x, P(), beside=torch.zeros(2)).device_mesh == first


def test_gathered_leaves_other_axes_and_other_leaves() -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], ("fsdp", "tp"))
    tree = shard({"w": torch.ones(4, 2), "name": "w"}, mesh, {"w": P("tp", "fsdp")})
    found = dtorch.parallel.gathered(tree, "fsdp")
    assert found["w"].placements == [Replicate(), Shard(0)] and found["name"] == "w"
    assert gathered(tree, "elsewhere")["w"] is tree["w"]


def test_the_gradient_of_what_was_gathered_is_a_part_on_each_device() -> None:
    mesh = DeviceMesh("cpu", [0, 1], ("fsdp",))
    params = shard({"w": torch.ones(4, 2)}, mesh, {"w": P("fsdp")})
    x = shard(torch.arange(12.0).view(6, 2), mesh, {"*": P("fsdp")})

    def loss(params, x):
        return torch.nn.functional.linear(x, gathered(params, "fsdp")["w"]).sum()

    gradient = dtorch.jit(dtorch.grad(loss))
    found = gradient(params, x)["w"]
    assert found.placements == [Shard(0)]
    assert torch.equal(found.to_torch(), torch.tensor([[30.0, 36.0]]).expand(4, 2))
    kinds = [i.step.kind.value for i in gradient.program(params, x).communication()]
    assert kinds == ["all_gather", "reduce_scatter"]


@pytest.mark.parametrize(
    ("mesh", "plan", "message"),
    [
        (None, {}, r"None is not a mesh: a DeviceMesh, or meshes by path pattern"),
        ({"*": 3}, {}, r"'\*': 3 is not a mesh"),
        (MESH, {3: P()}, r"3: P\(\) is not a plan: annotations by path pattern.\n  Fix:"),
        (MESH, "tp", r"'tp' is not a plan"),
        (MESH, [P()], r"\[P\(\)\] is not a plan"),
    ],
)
def test_what_is_no_plan_is_refused(mesh: Any, plan: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        shard({"w": torch.ones(2)}, mesh, plan)


@pytest.mark.parametrize("wrong", ["tp", None, 3])
def test_what_is_no_annotation_is_refused(wrong: Any) -> None:
    if wrong is not None:  # which in a plan is no annotation, and replicates
        with pytest.raises(PlacementError, match=rf"w \(1 dims\): {wrong!r} is no layout.\n  Fix:"):
            shard({"w": torch.ones(2)}, MESH, {"*": wrong})
    with pytest.raises(PlacementError, match=f"{wrong!r} is no layout"):
        constrain(dtorch.ones(2, device_mesh=MESH), wrong)
