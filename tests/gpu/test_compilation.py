"""jit(compile=True) on a GPU computes what jit computes."""

import threading
import warnings
from typing import Any

import optree
import pytest
import torch

import dtorch
from dtorch import Replicate, Shard

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _virtual_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTORCH_VIRTUAL_DEVICES", "8")


def elementwise(x: torch.Tensor, w: torch.Tensor, s: float) -> Any:
    y = (x * s + 1).relu()
    return y.T[1:] * 2, y.sum(0), (x > 0).long() + 3, x > s, x.T, x.clone()


def layer(x: torch.Tensor, w: torch.Tensor, s: float) -> Any:
    h = torch.nn.functional.gelu(x @ w) * s
    h = torch.softmax(h, -1) + torch.nn.functional.layer_norm(h, h.shape[-1:])
    return (h @ w.mT).redistribute(placements=[Replicate()])


def placed(dtype: torch.dtype, size: int) -> list[Any]:
    mesh = dtorch.DeviceMesh("cuda", list(range(size)))
    x, w = torch.randn(13, 32, device="cuda", dtype=dtype), torch.randn(32, 64, device="cuda")
    return [
        dtorch.tensor(x, device_mesh=mesh, placements=[Shard(0)]),
        dtorch.tensor(w.to(dtype), device_mesh=mesh),
    ]


@pytest.mark.parametrize("function", [elementwise, layer])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_it_is_the_same(function: Any, dtype: torch.dtype, size: int) -> None:
    jitted, plain = dtorch.jit(function, compile=True), dtorch.jit(function)
    x, w = placed(dtype, size)
    rtol, atol = (2e-2, 0.3) if dtype == torch.bfloat16 else (1e-3, 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that it could not be compiled
        for s in (0.5, 0.1, -2.0):
            found, expected = (optree.tree_leaves(f(x, w, s)) for f in (jitted, plain))
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.dtype == theirs.dtype and ours.placements == theirs.placements
                torch.testing.assert_close(ours.to_torch(), theirs.to_torch(), rtol=rtol, atol=atol)


def test_results_stay_and_threads_do_not_disturb_each_other() -> None:
    jitted, plain = dtorch.jit(layer, compile=True), dtorch.jit(layer)
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            kept = []
            for i in range(10):
                x, w = placed(torch.float32, 4)
                kept.append((jitted(x, w, 0.1 * i + seed), plain(x, w, 0.1 * i + seed)))
            for ours, theirs in kept:
                torch.testing.assert_close(ours.to_torch(), theirs.to_torch(), rtol=1e-3, atol=1e-3)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
