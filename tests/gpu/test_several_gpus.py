"""Several GPUs: collectives through NCCL and through copies, client threads, blocking launches."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch import P, Partial, Replicate, Shard
from dtorch.runtime import collectives, communicators

TYPE = "cuda"
COUNT = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT < 2, reason="torch.cuda.device_count() is below 2"),
]
LAYOUTS = [(Shard(0),), (Shard(1),), (Replicate(),), (Partial(),), (Partial("max"),)]


def mesh_of(*shape: int) -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh(TYPE, shape, mesh_dim_names=("dp", "tp")[: len(shape)])


@pytest.fixture(params=["1", "0"], ids=["nccl", "copies"])
def launches(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Any]]:
    """The collectives that are launched through NCCL, which is on or off."""
    made: list[Any] = []
    real = communicators._call

    def call(kind: Any, *others: Any) -> None:
        made.append(kind)
        real(kind, *others)

    def forget() -> None:
        dtorch.synchronize()
        dtorch.cache_clear()
        collectives.meeting.cache_clear()

    forget()
    monkeypatch.setenv(communicators.VARIABLE, request.param)
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    monkeypatch.setattr(communicators, "_call", call)
    yield made
    forget()
    assert bool(made) == (request.param == "1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_redistribution(launches: list[Any], dtype: torch.dtype) -> None:
    mesh = mesh_of(COUNT)
    for shape in ((2 * COUNT, 4 * COUNT), (2 * COUNT + 1, 4 * COUNT), (7, 5), (512, 512 * COUNT)):
        x = torch.randint(-9, 9, shape, device=TYPE).to(dtype)
        for source, target in itertools.product(LAYOUTS, repeat=2):
            y = dtorch.tensor(x, device_mesh=mesh, placements=source)
            for _ in range(5):
                y = y.redistribute(placements=target)
                y = y.redistribute(placements=source)
            y = y.redistribute(placements=[Replicate()])
            for shard in y.local_shards().values():
                assert torch.equal(shard.cpu(), x.cpu()), (shape, source, target)


def test_partial_sums_that_differ(launches: list[Any]) -> None:
    """Each device has other addends, from a product whose contracted dim is split."""
    mesh = mesh_of(COUNT)
    a, b = (
        torch.randint(-4, 4, s, device=TYPE).float() for s in ((64, 32 * COUNT), (32 * COUNT, 64))
    )
    x = dtorch.tensor(a, device_mesh=mesh, placements=[Shard(1)])
    y = dtorch.tensor(b, device_mesh=mesh, placements=[Shard(0)])
    for placements in ([Replicate()], [Shard(0)], [Shard(1)]):
        found = (x @ y).redistribute(placements=placements)
        assert torch.equal(found.to_torch().cpu(), (a @ b).cpu())


def test_a_maximum_keeps_nan(launches: list[Any]) -> None:
    mesh = mesh_of(COUNT)
    x = torch.arange(4.0 * COUNT, device=TYPE)
    x[0] = torch.nan
    y = dtorch.tensor(x, device_mesh=mesh, placements=[Shard(0)])
    for shard in y.amax().redistribute(placements=[Replicate()]).local_shards().values():
        assert shard.isnan().item()
    assert y.redistribute(placements=[Replicate()]).to_torch().isnan().sum().item() == 1


def test_groups_of_a_grid_from_two_threads(launches: list[Any]) -> None:
    mesh = mesh_of(2, COUNT // 2)
    x = torch.randn(8 * COUNT, 8 * COUNT, device=TYPE)

    @dtorch.jit
    def turn(x: Any) -> Any:
        x = x.redistribute(placements=[Replicate(), Shard(1)])
        x = x.redistribute(placements=[Shard(0), Shard(1)])
        x = x.redistribute(placements=[Shard(0), Replicate()])
        x = x.redistribute(placements=[Shard(0), Shard(1)])
        return torch.tanh(x)

    expected = x
    for _ in range(50):
        expected = torch.tanh(expected)
    found: list[Any] = [None, None]

    def client(number: int) -> None:
        y = dtorch.tensor(x, device_mesh=mesh, placements=[Shard(0), Shard(1)])
        for _ in range(50):
            y = turn(y)
        found[number] = y.to_torch()

    threads = [threading.Thread(target=client, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for value in found:
        torch.testing.assert_close(value.cpu(), expected.cpu())


def test_transfers_and_work_of_the_user_s_own(launches: list[Any]) -> None:
    """Copies from a peer do not wait for the peer's default stream, nor are they early."""
    first, last = (dtorch.DeviceMesh(TYPE, [i]) for i in (0, COUNT - 1))
    busy = torch.randn(4096, 4096, device=f"{TYPE}:0" if TYPE == "cuda" else TYPE)
    x = dtorch.tensor(torch.ones(1 << 20, device=TYPE), device_mesh=first)
    for number in range(20):
        busy = torch.tanh(busy @ busy * 0.01)
        x = (x + 1).redistribute(last, [Replicate()]) + 1
        x = x.redistribute(first, [Replicate()])
        assert x.to_torch().unique().tolist() == [2.0 * number + 3]
    whole = dtorch.ones(4 * COUNT, device_mesh=mesh_of(COUNT), placements=[Shard(0)])
    assert whole.redistribute(placements=[Replicate()]).to_torch().sum().item() == 4 * COUNT


def test_shard_map_s_own_collectives(launches: list[Any]) -> None:
    x = torch.randn(COUNT, 128, 128, device=TYPE)
    mapped = dtorch.shard_map(
        lambda part: dtorch.psum(part.sum(0), "dp"), mesh_of(COUNT), P("dp"), P()
    )
    torch.testing.assert_close(mapped(x).to_torch().cpu(), x.sum(0).cpu(), rtol=1e-4, atol=1e-4)


def test_launches_that_block() -> None:
    """Under CUDA_LAUNCH_BLOCKING=1 one thread's launches for several GPUs would never end."""
    code = f"""
    import torch, dtorch
    from dtorch import Replicate, Shard
    mesh = dtorch.init_device_mesh({TYPE!r}, ({COUNT},))
    x = torch.ones({4 * COUNT}, 4, device={TYPE!r})
    y = dtorch.tensor(x, device_mesh=mesh, placements=[Shard(0)])
    for _ in range(20):
        y = y.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)])
    print(y.sum().item())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"CUDA_LAUNCH_BLOCKING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"the process hangs: {process.communicate()}")
    assert out == f"{16.0 * COUNT}\n", err
