"""Plans over parameter trees, constraints, and loading of checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import P, Replicate, Shard
from dtorch.errors import PlacementError
from dtorch.parallel import ColumnParallel, RowParallel, constrain, load, shard

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


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], files: int) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    if files == 1:
        safetensors.save_file(tensors, str(folder / "model.safetensors"))
        return
    where = {name: f"part-{i % files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        part = {n: t for n, t in tensors.items() if where[n] == file}
        safetensors.save_file(part, str(folder / file))
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("files", [1, 3])
def test_load_gives_the_checkpoint_laid_out(tmp_path: Path, files: int) -> None:
    tensors = {
        "model.up.weight": torch.randn(7, 4),
        "model.down.weight": torch.randn(4, 7).bfloat16(),
        "model.steps": torch.tensor(3),
        "model.empty": torch.empty(0, 2),
    }
    checkpoint(tmp_path, tensors, files)
    tree = load(
        tmp_path, MESH, {"*.up.weight": ColumnParallel("tp"), "*.down.*": RowParallel("tp")}
    )
    found = tree["model"]
    assert found["up"]["weight"].placements == [Replicate(), Shard(0)]
    assert [s.shape[0] for s in found["up"]["weight"].local_shards().values()] == [3, 3, 1] * 2
    for name, value in (("up", "model.up.weight"), ("down", "model.down.weight")):
        assert torch.equal(found[name]["weight"].to_torch(), tensors[value])
    assert found["steps"].item() == 3
    assert found["empty"].shape == (0, 2)


def test_load_reads_each_part_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path, {"w": torch.arange(24.0).reshape(12, 2)}, 1)
    from dtorch.parallel import plan

    read: list[Any] = []
    original = plan.from_boxes
    monkeypatch.setattr(
        plan,
        "from_boxes",
        lambda spec, box: original(spec, lambda bounds: (read.append(bounds), box(bounds))[1]),
    )
    tree = load(tmp_path, MESH, {"w": ColumnParallel("tp")})
    assert sorted(read) == [((0, 4), (0, 2)), ((4, 8), (0, 2)), ((8, 12), (0, 2))]
    assert torch.equal(tree["w"].to_torch(), torch.arange(24.0).reshape(12, 2))


def test_a_device_holds_the_memory_of_its_part_alone(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"w": torch.zeros(1 << 12)}, 1)
    mesh = dtorch.DeviceMesh("cpu", [0, 1, 2, 3], ("tp",))
    loaded = load(tmp_path, mesh, {"w": P("tp")})["w"]
    placed = shard({"w": torch.zeros(1 << 12)}, mesh, {"w": P("tp")})["w"]
    for tensor in (loaded, placed):
        sizes = [
            tensor._shards.get(i).untyped_storage().nbytes() for i in range(len(tensor._shards))
        ]
        assert sizes == [4 << 10] * 4


def test_load_says_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load(tmp_path, MESH)
