"""Values on their way from accelerators to the host, which waits for them only to read them."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerators import Accelerators, installed

import dtorch
from dtorch import Shard
from dtorch.errors import WorkerError

pytestmark = pytest.mark.timeout(60)
HOST = dtorch.DeviceMesh("cpu", [0])
HOSTS = dtorch.DeviceMesh("cpu", [0, 1])


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerators]:
    with installed(monkeypatch) as made:
        yield made


def value_on(mesh: dtorch.DeviceMesh) -> tuple[torch.Tensor, dtorch.Tensor]:
    x = torch.randn(8, 3)
    return x, dtorch.tensor(x, device_mesh=mesh, placements=[Shard(0)]) * 1


def test_several_are_under_way_and_the_host_goes_on(accelerators: Accelerators) -> None:
    pairs = [value_on(accelerators.mesh(0, 1)) for _ in range(4)]
    accelerators.hold_arrivals()
    futures = [y.to(device_mesh=HOST).to_torch_async() for _, y in pairs]
    beside = dtorch.ones(3, device_mesh=HOST) + 1
    assert beside.tolist() == [2.0] * 3  # computed by the worker that receives them
    assert not any(future.is_ready() or future.wait_for(1) for future in futures)
    accelerators.arrive()
    for future, (x, _) in zip(futures, pairs, strict=True):
        assert torch.equal(future.get(), x) and future.is_ready()


def test_what_computes_with_a_value_waits_until_it_is_there(accelerators: Accelerators) -> None:
    x, y = value_on(accelerators.mesh(0))
    accelerators.hold_arrivals()
    there = y.to(device_mesh=HOST, placements=[Shard(0)])
    futures = [
        (there + 1).to_torch_async(),
        there.redistribute(HOSTS, [Shard(0)]).to_torch_async(),  # a peer on the host
        there.redistribute(accelerators.mesh(1), [Shard(0)]).to_torch_async(),
    ]
    assert not any(future.wait_for(50) for future in futures[:2])
    accelerators.arrive()
    assert torch.equal(futures[0].get(), x + 1)
    assert all(torch.equal(future.get(), x) for future in futures[1:])


def test_to_torch_waits(accelerators: Accelerators) -> None:
    x, y = value_on(accelerators.mesh(0))
    accelerators.hold_arrivals()
    there, found = y.to(device_mesh=HOST), list[torch.Tensor]()
    thread = threading.Thread(target=lambda: found.append(there.to_torch()))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    accelerators.arrive()
    thread.join(10)
    assert torch.equal(found[0], x)


def test_it_can_be_awaited(accelerators: Accelerators) -> None:
    x, y = value_on(accelerators.mesh(0, 1))
    accelerators.hold_arrivals()

    async def fetch() -> list[torch.Tensor]:
        futures = [y.to(device_mesh=HOST).to_torch_async() for _ in range(3)]
        waiting = [asyncio.ensure_future(_awaited(future)) for future in futures]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        accelerators.arrive()
        return await asyncio.wait_for(asyncio.gather(*waiting), 10)

    assert all(torch.equal(found, x) for found in asyncio.run(fetch()))


async def _awaited(future: Any) -> torch.Tensor:
    return await future


def test_a_driver_that_fails_meanwhile(accelerators: Accelerators) -> None:
    _, y = value_on(accelerators.mesh(0))
    accelerators.hold_arrivals()
    there = y.to(device_mesh=HOST)
    dtorch.synchronize(accelerators.mesh(1).devices)
    beside = (dtorch.ones(2, device_mesh=HOST) + 1).tolist()
    accelerators.break_driver(0)
    accelerators.arrive()
    for lost in (there, there + 1):
        with pytest.raises(WorkerError, match="a lane that is broken"):
            lost.to_torch()
    assert beside == [2.0, 2.0]
    assert set(dtorch.health(HOST).values()) == {"ok"}
    assert {s[:6] for s in dtorch.health(accelerators.mesh(0)).values()} == {"failed"}


def test_the_device_of_a_future() -> None:
    x, y = value_on(dtorch.DeviceMesh("cpu", [3, 4]))
    y = y.detach().requires_grad_()
    for device in (None, "cpu", torch.device("cpu"), "cpu:1", torch.device("cpu", 3)):
        found = y.to_torch_async(device=device).get()
        assert torch.equal(found, x) and not found.requires_grad
    with pytest.raises(RuntimeError, match="nowhere"):
        y.to_torch_async(device="nowhere")
