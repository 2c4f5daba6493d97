"""The first things a user types: the quick start as written, and every public feature once."""

import asyncio
import copy
import pickle
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import P, Partial, Replicate, Shard, nn, random
from dtorch.distributed_spec import init_device_mesh
from dtorch.test.test_util import assert_tensor_allclose

ONES = "tensor([[1., 1.],\n        [1., 1.],\n        [1., 1.],\n        [1., 1.]])"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DTORCH_VIRTUAL_DEVICES", "4")
    return request.param


def on(device: str) -> str:
    """What PyTorch prints of the device inside ``tensor(...)``."""
    return "" if device == "cpu" else ", device='cuda:0'"


def test_the_first_snippet(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = (4, 3)
    mesh = dtorch.DeviceMesh(device, [0, 1])
    x = dtorch.rand(shape, device_mesh=mesh, placements=[dtorch.Shard(0)])
    print(f"{x=}")
    layout = f"device_mesh=DeviceMesh('{device}', [0, 1]), placements=[Shard(dim=0)]\n"
    head = f"x={x.to_torch()!r}\nshape=torch.Size([4, 3]), dtype=torch.float32,\n"
    assert capsys.readouterr().out == head + layout

    a = dtorch.rand((4, 2), device=device)
    assert a.device_mesh == dtorch.DeviceMesh(device, [0])
    a = dtorch.rand((4, 2), device_mesh=dtorch.DeviceMesh(device, [0]))
    assert a.placements == [Replicate()]
    for p in (dtorch.Shard(0), dtorch.Partial(), dtorch.Replicate()):
        a = dtorch.ones((4, 2), device_mesh=mesh, placements=[p])
        print(a)
        assert capsys.readouterr().out == (
            f"{ONES[:-1]}{on(device)})\nshape=torch.Size([4, 2]), dtype=torch.float32,\n"
            f"device_mesh=DeviceMesh('{device}', [0, 1]), placements=[{p!r}]\n"
        )
    mesh2 = dtorch.DeviceMesh(device, [[0, 1], [2, 3]])
    print(dtorch.ones((4, 2), device_mesh=mesh2, placements=[dtorch.Shard(0), dtorch.Shard(1)]))
    assert capsys.readouterr().out == (
        f"{ONES[:-1]}{on(device)})\nshape=torch.Size([4, 2]), dtype=torch.float32,\n"
        f"device_mesh=DeviceMesh('{device}', [[0, 1], [2, 3]]), "
        "placements=[Shard(dim=0), Shard(dim=1)]\n"
    )
    t = torch.rand((2, 2), dtype=torch.float16)
    fetched = dtorch.Tensor(t, device_mesh=mesh, placements=[dtorch.Shard(1)]).to_torch()
    assert fetched.device.type == device and torch.equal(fetched.cpu(), t)


def test_a_named_mesh_prints_its_names(device: str) -> None:
    mesh = dtorch.init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    assert str(dtorch.ones(1, device_mesh=mesh)).endswith(
        f"device_mesh=DeviceMesh('{device}', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp')), "
        "placements=[Replicate(), Replicate()]"
    )


class TestTensor(unittest.TestCase):
    def test_tensor(test_case):  # the snippet as written
        device_mesh = init_device_mesh(device_type="cpu", mesh_shape=(2,))
        torch_x, torch_y = torch.rand(3, 4, 5), torch.rand(4, 1)
        torch_z = torch_x + torch_y
        x = dtorch.Tensor(torch_x, device_mesh=device_mesh, placements=[Shard(1)])
        y = dtorch.Tensor(torch_y, device_mesh=device_mesh, placements=[Replicate()])
        z = x + y
        assert_tensor_allclose(test_case, torch_z, z)
        test_case.assertTrue(z.device_mesh == device_mesh and z.placements == [Shard(1)])
        x = x.redistribute(placements=[Shard(0)])
        z = x + y
        assert_tensor_allclose(test_case, torch_z, z)
        test_case.assertTrue(z.placements == [Shard(0)])


def test_the_asyncio_snippet() -> None:
    async def main() -> torch.Tensor:
        c = dtorch.matmul(dtorch.rand(1000, 1000), dtorch.rand(1000, 1000))
        future = c.to_torch_async()
        return await future

    assert asyncio.run(main()).shape == (1000, 1000)


def test_assert_tensor_allclose_can_fail() -> None:
    a = dtorch.ones(3)
    assert_tensor_allclose(None, torch.ones(3), a)
    with pytest.raises(AssertionError, match="Mismatched elements: 3 / 3"):
        assert_tensor_allclose(unittest.TestCase(), torch.zeros(3), a)
    with pytest.raises(AssertionError, match="dtype"):
        assert_tensor_allclose(None, torch.ones(3, dtype=torch.float64), a)
    assert_tensor_allclose(None, torch.full((3,), 1.01), a, rtol=0.1, atol=0.0)


def test_every_public_name_is_there() -> None:
    names = """DeviceMesh init_device_mesh Shard Replicate Partial P Tensor tensor TensorFuture jit
    grad value_and_grad eval_shape random nn parallel manual_seed synchronize cache_info
    cache_clear rand randn randint zeros ones full empty eye arange linspace matmul relu
    float32 float16 bfloat16 int64 pi no_grad inference_mode autocast cat stack where""".split()  # noqa: SIM905
    missing = [n for n in names if not hasattr(dtorch, n)]
    assert missing == []
    assert set(names) <= set(dir(dtorch)) and set(dtorch.__all__) <= set(dir(dtorch))
    assert dtorch.relu is torch.relu and dtorch.float32 is torch.float32
    with pytest.raises(AttributeError, match="module 'dtorch' has no attribute 'rleu'"):
        dtorch.rleu  # noqa: B018


def test_a_model_from_end_to_end(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file

    mesh = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    key, data_key = random.split(random.key(0))
    params = {"mlp": nn.swiglu_init(key, 8, 12), "norm": nn.rms_norm_init(key, 8)}
    flat = {f"mlp.{n}.weight": w["weight"] for n, w in params["mlp"].items()}
    save_file(flat | {"norm.weight": params["norm"]["weight"]}, tmp_path / "model.safetensors")
    plan = {
        "mlp.gate_proj.*": dtorch.parallel.ColumnParallel("tp"),
        "mlp.up_proj.*": P("tp", None),
        "mlp.down_proj.*": dtorch.parallel.RowParallel("tp"),
    }
    sharded = dtorch.parallel.load(tmp_path, mesh, plan)
    assert sharded["mlp"]["up_proj"]["weight"].placements == [Replicate(), Shard(0)]
    x = random.normal(data_key, (4, 8))

    def loss(params: Any, x: Any) -> Any:
        h = dtorch.parallel.constrain(nn.rms_norm(params["norm"], x), P("dp"))
        return nn.swiglu(params["mlp"], h).square().mean()

    expected, expected_grads = dtorch.value_and_grad(loss)(params, x)
    step = dtorch.jit(dtorch.value_and_grad(loss))
    value, grads = step(
        sharded, dtorch.Tensor(x, device_mesh=mesh, placements=[Shard(0), Replicate()])
    )
    assert_tensor_allclose(None, expected, value)
    for name, weight in sharded["mlp"].items():
        assert grads["mlp"][name]["weight"].placements == weight["weight"].placements
        assert_tensor_allclose(
            None, expected_grads["mlp"][name]["weight"], grads["mlp"][name]["weight"]
        )
    assert step.cache_info().currsize == 1


def test_programs_print() -> None:
    mesh = dtorch.init_device_mesh("cpu", 2, mesh_dim_names=("tp",))
    x = dtorch.ones(4, 6, device_mesh=mesh, placements=[Shard(1)])
    w = dtorch.ones(6, 3, device_mesh=mesh, placements=[Shard(0)])
    program = dtorch.jit(lambda x, w: torch.relu(x @ w)).program(x, w)
    text = str(program)
    assert "matmul" in text and "relu" in text and "all_reduce" in text
    assert len(program.communication()) == 1 and program.fallbacks() == []


def test_values_come_back_in_every_form() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = dtorch.tensor([[1.0, 2.0], [3.0, 4.0]], device_mesh=mesh, placements=[Shard(0)])
    assert x.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert x.numpy().shape == (2, 2) and x[1, 0].item() == 3.0
    assert float(x.sum()) == 10.0 and x.shape == (2, 2) and len(x) == 2
    assert {k: v.tolist() for k, v in x.local_shards().items()} == {
        0: [[1.0, 2.0]],
        1: [[3.0, 4.0]],
    }
    for copied in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert copied.tolist() == x.tolist() and copied.placements == x.placements
    total = x.redistribute(placements=[Partial()]).redistribute_like(x)
    assert total.tolist() == x.tolist() and total.placements == [Shard(0)]
    dtorch.synchronize()


def test_randomness_is_pytorchs() -> None:
    dtorch.manual_seed(3)
    a = dtorch.randn(5)
    torch.manual_seed(3)
    assert torch.equal(a.to_torch(), torch.randn(5))


def test_shapes_without_running() -> None:
    spec = dtorch.eval_shape(torch.matmul, dtorch.ones(2, 3), dtorch.ones(3, 4))
    assert spec.shape == (2, 4) and spec.dtype == torch.float32
