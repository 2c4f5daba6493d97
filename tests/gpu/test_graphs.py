"""jit(cuda_graph=True) on a GPU: values, memory, caches in place, and what cannot be captured."""

from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, graphs

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _virtual_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTORCH_VIRTUAL_DEVICES", "24")  # PyTorch has 32 streams, and these 48 lanes


def mesh_of(size: int) -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh("cuda", (size,), mesh_dim_names=("x",))


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


@pytest.mark.parametrize("size", [1, 2, 4, 24])
def test_values(size: int, capfd: pytest.CaptureFixture[str]) -> None:
    def compute(w: Any, x: Any) -> Any:
        h = torch.softmax(torch.nn.functional.gelu(x @ w), -1)
        return h, (h @ w.mT).mT, h.sum(0), torch.nn.functional.layer_norm(h, h.shape[-1:])

    mesh, w = mesh_of(size), on_gpu(64, 64)
    ours = dtorch.tensor(w, device_mesh=mesh, placements=[Replicate()])
    jitted = dtorch.jit(compute, cuda_graph=True)
    results = []
    for _ in range(20):
        x = on_gpu(32, 64)
        given = dtorch.tensor(x, device_mesh=mesh, placements=[Shard(0)])
        results.append((jitted(ours, given), compute(w, x)))
    for found, expected in results:
        for a, b in zip(found, expected, strict=True):
            if size == 1:
                assert torch.equal(a.to_torch(), b)
            else:  # products of fewer rows
                torch.testing.assert_close(a.to_torch(), b, rtol=1e-3, atol=1e-3)
    assert "without a CUDA graph" not in capfd.readouterr().err


@pytest.mark.parametrize("size", [1, 2])
def test_attention_and_gradients(size: int, capfd: pytest.CaptureFixture[str]) -> None:
    def loss(w: Any, x: Any) -> Any:
        q, k, v = (x @ w).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4).unbind(0)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).square().mean()

    mesh = mesh_of(size)
    step = dtorch.jit(dtorch.value_and_grad(loss), cuda_graph=True)
    w = on_gpu(64, 384).bfloat16()
    ours = dtorch.tensor(w, device_mesh=mesh, placements=[Replicate()])
    for _ in range(8):
        x = on_gpu(8, 128, 64).bfloat16()
        value, grad = step(ours, dtorch.tensor(x, device_mesh=mesh, placements=[Shard(0)]))
        theirs = w.clone().requires_grad_()
        expected = loss(theirs, x)
        expected.backward()
        assert theirs.grad is not None
        torch.testing.assert_close(value.to_torch(), expected.detach())
        # Halves of the batch are rounded to bfloat16 before they are added; gradients reach 0.3.
        torch.testing.assert_close(grad.to_torch(), theirs.grad, rtol=5e-2, atol=5e-3)
    assert "without a CUDA graph" not in capfd.readouterr().err


@pytest.mark.parametrize("size", [1, 2])
def test_donated_caches_are_updated_in_place(size: int) -> None:
    def step(cache: Any, x: Any, at: Any) -> Any:
        cache = cache.index_copy(1, at, x)
        return cache, torch.tanh(cache.sum(1)) @ torch.ones(64, 64, device=x.device)

    mesh = mesh_of(size)
    jitted = dtorch.jit(step, donate_argnums=0, cuda_graph=True)
    expected = torch.zeros(8, 4096, 64, device="cuda")
    cache = dtorch.tensor(expected, device_mesh=mesh, placements=[Shard(0)])
    fetched, before = [], 0
    for number in range(30):
        x, at = on_gpu(8, 1, 64), torch.tensor([number], device="cuda")
        given = dtorch.tensor(x, device_mesh=mesh, placements=[Shard(0)])
        cache, out = jitted(cache, given, dtorch.tensor(at, device_mesh=mesh))
        expected, theirs = step(expected, x, at)
        torch.testing.assert_close(out.to_torch(), theirs)
        if number % 7 == 3:
            fetched.append((cache.to_torch(), expected))
        if number == 10:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        elif 10 < number < 17:  # until more is fetched, and kept
            # The eager step has two caches of 8 MiB at a time, ours none beside its own.
            assert torch.cuda.memory_allocated() <= before + (16 << 20)
    torch.testing.assert_close(cache.to_torch(), expected)
    for ours, wanted in fetched:
        assert torch.equal(ours, wanted)


def test_a_reader_on_another_stream_is_waited_for() -> None:
    def step(cache: Any) -> Any:
        cache = cache + 1
        return cache, cache[:1] * 2

    mesh, jitted = mesh_of(1), dtorch.jit(step, donate_argnums=0, cuda_graph=True)
    cache = dtorch.tensor(torch.zeros(1 << 24, device="cuda"), device_mesh=mesh)
    stream = torch.cuda.Stream()
    for number in range(1, 20):
        cache, _ = jitted(cache)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            value = cache.to_torch()  # copied on this stream, after the sleep
        cache, _ = jitted(cache)
        stream.synchronize()
        assert value.min().item() == value.max().item() == 2 * number - 1


def test_a_graph_that_goes_leaves_the_others_right() -> None:
    def compute(w: Any, x: Any) -> Any:
        return torch.tanh(x @ w) @ w.mT

    mesh, w = mesh_of(1), on_gpu(4096, 64).bfloat16()  # products in parts, which are added
    ours = dtorch.tensor(w, device_mesh=mesh)
    stays, goes = (dtorch.jit(compute, cuda_graph=True) for _ in range(2))
    for _ in range(6):
        x = on_gpu(64, 4096).bfloat16()
        given, expected = dtorch.tensor(x, device_mesh=mesh), compute(w, x)
        for jitted in (stays, goes):
            assert torch.equal(jitted(ours, given).to_torch(), expected)
    goes.cache_clear()
    dtorch.synchronize()
    torch.cuda.empty_cache()
    others = [torch.zeros(1 << 20, device="cuda") for _ in range(64)]
    for _ in range(4):
        x = on_gpu(64, 4096).bfloat16()
        found = stays(ours, dtorch.tensor(x, device_mesh=mesh)).to_torch()
        assert torch.equal(found, compute(w, x))
    assert not any(other.any() for other in others)


def test_what_cannot_be_captured_runs(capfd: pytest.CaptureFixture[str]) -> None:
    @torch.library.custom_op("dtorch_tests::synchronizes", mutates_args=())
    def synchronizes(x: torch.Tensor) -> torch.Tensor:
        return x + x.sum().item()

    @synchronizes.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    graphs._OWN.add("dtorch_tests::synchronizes")
    try:
        jitted = dtorch.jit(lambda x: synchronizes(x * 2 + 1).tanh(), cuda_graph=True)
        mesh = mesh_of(1)
        for _ in range(5):
            x = on_gpu(7) * 0.01
            found = jitted(dtorch.tensor(x, device_mesh=mesh)).to_torch()
            torch.testing.assert_close(found, synchronizes(x * 2 + 1).tanh())
    finally:
        graphs._OWN.discard("dtorch_tests::synchronizes")
    assert capfd.readouterr().err.count("runs without a CUDA graph") == 1
    assert set(dtorch.health(mesh_of(1)).values()) == {"ok"}
