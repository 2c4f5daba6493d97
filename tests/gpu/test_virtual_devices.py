"""Several devices on one GPU: values, streams, fetches, random numbers, memory."""

import asyncio
from typing import Any

import pytest
import torch

import dtorch
from dtorch import P, Partial, Replicate, Shard

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _virtual_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTORCH_VIRTUAL_DEVICES", "8")


def mesh_of(*shape: int) -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh("cuda", shape, mesh_dim_names=("x", "y")[: len(shape)])


LAYOUTS = [(Shard(0),), (Shard(1),), (Replicate(),), (Partial(),)]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
@pytest.mark.parametrize("target", LAYOUTS, ids=str)
def test_every_redistribution(size: int, source: Any, target: Any) -> None:
    x = torch.randn(13, 7, device="cuda")
    y = dtorch.tensor(x, device_mesh=mesh_of(size), placements=source)
    for _ in range(20):
        y = y.redistribute(placements=target).redistribute(placements=source)
    torch.testing.assert_close(y.to_torch(), x)


def test_one_device_is_pytorch_bit_for_bit() -> None:
    def compute(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.nn.functional.gelu(x @ w), -1) @ w.mT

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, w = (torch.randn(s, device="cuda", dtype=dtype) for s in ((64, 128), (128, 256)))
        given = [dtorch.tensor(t, device_mesh=mesh_of(1)) for t in (x, w)]
        for call in (compute, dtorch.jit(compute)):
            found = call(*given).to_torch()
            assert found.device.type == "cuda" and torch.equal(found, compute(x, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2])
def test_attention_is_pytorch_s_kernel_for_its_batches(size: int, dtype: torch.dtype) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    whole = [torch.randn(4, 8, 128, 64, device="cuda", dtype=dtype) for _ in range(3)]
    ours = [dtorch.tensor(t, device_mesh=mesh_of(size), placements=[Shard(0)]) for t in whole]
    for call in (attend, dtorch.jit(attend)):
        found = call(*ours)
        assert found.placements == [Shard(0)]
        if size == 1:
            assert torch.equal(found.to_torch(), attend(*whole))
        else:
            torch.testing.assert_close(found.to_torch(), attend(*whole), rtol=2e-2, atol=1e-2)
    given = [t.detach().requires_grad_() for t in ours]
    theirs = [t.clone().requires_grad_() for t in whole]
    attend(*given).float().square().mean().backward()
    attend(*theirs).float().square().mean().backward()
    for mine, expected in zip(given, theirs, strict=True):
        assert mine.grad is not None and expected.grad is not None
        assert mine.grad.placements == [Shard(0)]
        largest = expected.grad.abs().max().item()
        torch.testing.assert_close(
            mine.grad.to_torch(), expected.grad, rtol=5e-2, atol=2e-2 * largest
        )


@pytest.mark.parametrize("axis", ["ring_cp", "zigzag_cp", "ulysses_cp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
@pytest.mark.parametrize("length", [512, 203])
def test_attention_over_a_split_sequence(
    axis: str, dtype: torch.dtype, kind: str, length: int
) -> None:
    whole = [torch.randn(2, 8, length, 64, device="cuda", dtype=dtype) for _ in range(3)]
    mask = torch.rand(length, length, device="cuda") > 0.4 if kind == "mask" else None
    mesh = dtorch.init_device_mesh("cuda", (4,), mesh_dim_names=(axis,))

    def attend(*tensors: Any) -> Any:
        q, k, v, *masks = tensors
        options: dict[str, Any] = {"attn_mask": masks[0] if masks else None}
        options |= {"is_causal": kind == "causal"}
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    ours = [dtorch.tensor(t, device_mesh=mesh, placements=[Shard(2)]) for t in whole]
    masks = [] if mask is None else [dtorch.tensor(mask, device_mesh=mesh)]
    wide = [t.double().requires_grad_() for t in whole]
    expected = attend(*wide, *([] if mask is None else [mask]))
    expected.square().mean().backward()
    found = dtorch.jit(attend)(*ours, *masks)
    assert found.placements == [Shard(2)]
    torch.testing.assert_close(found.to_torch().double(), expected, rtol=2e-2, atol=1e-2)
    given = [t.detach().requires_grad_() for t in ours]
    attend(*given, *masks).float().square().mean().backward()
    for mine, theirs in zip(given, wide, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        largest = theirs.grad.abs().max().item()
        torch.testing.assert_close(
            mine.grad.to_torch().double(), theirs.grad, rtol=5e-2, atol=2e-2 * largest
        )


@pytest.mark.parametrize("size", [1, 3])
def test_attention_drops_alike_in_every_layout(size: int) -> None:
    whole = [torch.randn(3, 2, 32, 16, device="cuda") for _ in range(3)]
    found = []
    for placement in (Replicate(), Shard(0)):
        ours = [dtorch.tensor(t, device_mesh=mesh_of(size), placements=[placement]) for t in whole]
        torch.manual_seed(5)
        attend = torch.nn.functional.scaled_dot_product_attention
        found.append(attend(*ours, dropout_p=0.5).to_torch())
    torch.testing.assert_close(*found)


def test_a_long_chain_over_devices_in_any_order_of_streams() -> None:
    mesh = mesh_of(2, 2)
    x = torch.randn(512, 512, device="cuda")

    @dtorch.jit
    def compute(x: Any) -> Any:
        for _ in range(10):
            whole = x.redistribute(placements=[Replicate(), Replicate()])
            x = torch.tanh(x @ whole * 0.05) + x
            x = x.redistribute(placements=[Shard(1), Shard(0)]).redistribute(
                placements=[Shard(0), Replicate()]
            )
        return x

    placed = dtorch.tensor(x, device_mesh=mesh, placements=[Shard(0), Replicate()])
    expected = x
    for _ in range(10):
        expected = torch.tanh(expected @ expected * 0.05) + expected
    for _ in range(5):
        torch.testing.assert_close(compute(placed).to_torch(), expected, rtol=1e-2, atol=1e-2)


def test_what_the_caller_has_launched_comes_first() -> None:
    mesh, stream = mesh_of(2), torch.cuda.Stream()
    for number in range(20):
        with torch.cuda.stream(stream):
            x = torch.zeros(1 << 22, device="cuda")
            for _ in range(20):
                x += 1
            found = (dtorch.tensor(x, device_mesh=mesh, placements=[Shard(0)]) + number).to_torch()
            x.zero_()  # after dtorch has read it
            assert found.min().item() == found.max().item() == 20 + number


def test_awaited_values_are_computed() -> None:
    async def run() -> None:
        x = dtorch.tensor(torch.randn(2048, 2048, device="cuda"), device_mesh=mesh_of(4))
        for _ in range(10):
            x = torch.tanh(x @ x * 0.01)
        future = x.to_torch_async()
        await future
        assert future.is_ready()

    asyncio.run(run())


def test_the_host_gets_values_through_pinned_memory() -> None:
    x = torch.randn(1000, 3, device="cuda")
    y = dtorch.tensor(x, device_mesh=mesh_of(3), placements=[Shard(0)])
    on_host = (y * 2).to("cpu")
    assert on_host.device.type == "cpu" and torch.equal(on_host.to_torch(), (x * 2).cpu())
    assert y.sum().item() == pytest.approx(x.sum().item(), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_random_numbers_are_those_of_pytorch(size: int) -> None:
    torch.manual_seed(7)
    expected = [torch.randn(11, 5, device="cuda") for _ in range(3)]
    torch.manual_seed(7)
    mesh = mesh_of(size)
    for value in expected:
        drawn = dtorch.randn(11, 5, device_mesh=mesh, placements=[Shard(0)])
        assert torch.equal(drawn.to_torch(), value)


def test_gradients() -> None:
    w, x = torch.randn(16, 8, device="cuda"), torch.randn(4, 16, device="cuda")
    mesh = mesh_of(2, 2)
    ours = dtorch.tensor(w, device_mesh=mesh, placements=[Replicate(), Shard(1)]).requires_grad_()
    given = dtorch.tensor(x, device_mesh=mesh, placements=[Shard(0), Replicate()])
    theirs = w.clone().requires_grad_()
    (given @ ours).sin().sum().backward()
    (x @ theirs).sin().sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad.to_torch(), theirs.grad, rtol=1e-4, atol=1e-4)


def test_shard_map_runs_on_the_worker_s_stream() -> None:
    mesh = mesh_of(4)
    x = torch.randn(8, 256, 256, device="cuda")

    def compute(part: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            part = torch.tanh(part @ part.mT * 0.01)
        return dtorch.psum(part.sum(0), "x")

    found = dtorch.shard_map(compute, mesh, P("x"), P())(x).to_torch()
    expected = x
    for _ in range(5):
        expected = torch.tanh(expected @ expected.mT * 0.01)
    torch.testing.assert_close(found, expected.sum(0), rtol=1e-3, atol=1e-3)


def test_memory_and_health() -> None:
    mesh = mesh_of(2)
    x = dtorch.zeros(1 << 20, device_mesh=mesh, placements=[Shard(0)])
    dtorch.synchronize()
    for memory in dtorch.memory_stats(mesh).values():
        assert memory.held == 1 << 21
        assert memory.total is not None and memory.allocated is not None
        assert memory.held <= memory.allocated <= memory.total
    assert set(dtorch.health(mesh).values()) == {"ok"}
    assert x.sum().item() == 0
