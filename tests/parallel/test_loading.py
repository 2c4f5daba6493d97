"""Checkpoints: what is read, by which device, and what is said of one that does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import P, Replicate, Shard
from dtorch.errors import CheckpointError
from dtorch.nn import functionalize
from dtorch.parallel import ColumnParallel, RowParallel, load, loading, shard

MESH = dtorch.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))


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
    read: list[Any] = []
    original = loading.from_boxes
    monkeypatch.setattr(
        loading,
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


class Tied(torch.nn.Module):
    """An embedding that is also the head, and a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.arange(4.0), persistent=False)


def on_meta() -> tuple[Any, Any]:
    """The tree of a module on the meta device, but for the buffer that no checkpoint holds."""
    module = Tied()
    scale = module.scale
    module = module.to("meta")
    module.scale = scale
    module.head.weight = module.embed.weight
    return functionalize(module)


@pytest.mark.parametrize("stored", ["embed.weight", "head.weight", "both"])
def test_a_tied_leaf_is_found_under_any_name(tmp_path: Path, stored: str) -> None:
    module = Tied()
    tensors = dict(module.state_dict())
    if stored == "both":
        tensors["head.weight"] = tensors["head.weight"].clone()
    else:
        tensors = {n: t for n, t in tensors.items() if "norm" in n or n == stored}
    checkpoint(tmp_path, tensors, 2)
    like, apply = on_meta()
    tree = load(tmp_path, MESH, {"embed.weight": P("tp")}, like=like, tied=apply.tied)
    assert set(tree) == {"embed", "norm", "scale"}
    assert torch.equal(tree["embed"]["weight"].to_torch(), module.embed.weight)
    assert tree["embed"]["weight"].placements == [Replicate(), Shard(0)]
    assert torch.equal(tree["scale"].to_torch(), torch.arange(4.0))
    assert tree["norm"]["num_batches_tracked"].item() == 0


def test_all_that_does_not_fit_is_one_error(tmp_path: Path) -> None:
    tensors = dict(Tied().norm.state_dict(prefix="norm."))
    tensors |= {"embed.weigth": torch.zeros(6, 4), "norm.bias": torch.zeros(5)}
    checkpoint(tmp_path, tensors, 1)
    like, apply = on_meta()
    with pytest.raises(CheckpointError, match="does not hold the expected tree") as error:
        load(tmp_path, MESH, like=like, tied=apply.tied)
    lines = str(error.value).splitlines()[1:-1]
    assert lines == [
        "  embed.weight [6, 4]: missing (the nearest is embed.weigth)",
        "  norm.bias [4]: [5] in the checkpoint",
        "  embed.weigth [6, 4]: not in the tree (the nearest is embed.weight)",
    ]


def test_names_can_be_mapped_and_left_out(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"old.w": torch.ones(2), "junk": torch.zeros(1)}, 1)

    def rename(name: str) -> str | None:
        return None if name == "junk" else name.replace("old.", "new.")

    tree = load(tmp_path, MESH, rename=rename)
    assert set(tree) == {"new"}
    assert torch.equal(tree["new"]["w"].to_torch(), torch.ones(2))


def test_dtypes_are_the_checkpoints_unless_asked(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(6, 4), "h": torch.randn(3).half(), "n": torch.tensor(7)}
    checkpoint(tmp_path, tensors, 1)
    like = {n: torch.empty(t.shape, device="meta", dtype=torch.float64) for n, t in tensors.items()}
    tree = load(tmp_path, MESH, {"w": P("tp")}, like=like)
    assert [tree[n].dtype for n in tensors] == [t.dtype for t in tensors.values()]
    tree = load(tmp_path, MESH, {"w": P("tp")}, dtype=torch.bfloat16)
    assert [tree[n].dtype for n in ("w", "h", "n")] == [torch.bfloat16] * 2 + [torch.int64]
    assert torch.equal(tree["w"].to_torch(), tensors["w"].bfloat16())


def test_load_onto_the_stages_of_a_pipeline(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"0.w": torch.ones(4, 2), "1.w": torch.zeros(4, 2)}, 2)
    stages = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")).unbind("pp")
    tree = load(tmp_path, {"0.*": stages[0], "1.*": stages[1]}, {"*": P("tp")})
    assert [tree[i]["w"].device_mesh for i in "01"] == stages
    assert tree["1"]["w"].placements == [Shard(0)]


def test_a_dtype_by_name(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)}, 1)
    tree = load(tmp_path, MESH, dtype=lambda name: torch.bfloat16 if name == "a" else None)
    assert (tree["a"].dtype, tree["b"].dtype) == (torch.bfloat16, torch.float32)


def test_names_that_rename_makes_one_are_an_error(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"x.a": torch.ones(2), "y.a": torch.zeros(2), "b": torch.ones(1)}, 2)
    with pytest.raises(CheckpointError, match="have one name in the result") as error:
        load(tmp_path, MESH, rename=lambda name: name[-1])
    (line,) = str(error.value).splitlines()[1:-1]
    assert line.startswith("  a: ")
    assert {"x.a", "y.a"} <= set(line.replace("(", " ").split())


def test_a_name_that_is_part_of_another_is_an_error(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"norm": torch.ones(2), "norm.weight": torch.zeros(2)}, 1)
    with pytest.raises(CheckpointError, match=r"make no tree:\n  norm and norm\.weight\n  Fix:"):
        load(tmp_path, MESH)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"mesh": None}, TypeError, "mesh is None, and must be a DeviceMesh"),
        ({"mesh": "cpu"}, TypeError, "mesh is 'cpu', and must be a DeviceMesh"),
        ({"plan": [("*", P())]}, TypeError, r"plan is \[.*, and must be annotations"),
        ({"dtype": "bfloat16"}, TypeError, "dtype is 'bfloat16', and must be a torch.dtype"),
        ({"dtype": torch.int32}, ValueError, "dtype is torch.int32, which is not floating"),
        ({"like": {"a": [3, None]}}, TypeError, r"like are no tensors:\n  a\.0: int"),
    ],
)
def test_arguments_of_another_type_are_refused(
    tmp_path: Path, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    checkpoint(tmp_path, {"a": torch.ones(2)}, 1)
    with pytest.raises(kind, match=message):
        load(tmp_path, **{"mesh": MESH, **arguments})


@pytest.mark.parametrize("length", [0, 10, 70, 120])
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, length: int) -> None:
    checkpoint(tmp_path, {"a": torch.ones(20)}, 1)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=rf"model.safetensors \({length} bytes\) is no whole"):
        load(tmp_path, MESH)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "list indices"),
        ("{}", "it has no weight_map"),
        ('{"weight_map": ["a"]}', "does not map names to files"),
        ('{"weight_map": {"a": 3}}', "does not map names to files"),
    ],
)
def test_an_index_that_is_none_is_named(tmp_path: Path, text: str, reason: str) -> None:
    pytest.importorskip("safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"index.json is no index .*: .*{reason}"):
        load(tmp_path, MESH)


def test_a_file_of_the_index_that_is_missing_is_named(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors does not exist"):
        load(tmp_path, MESH)
