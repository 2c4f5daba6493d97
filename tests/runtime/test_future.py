"""`TensorFuture`: every way to wait, many at once, and what failure looks like in each."""

import asyncio
import gc
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.errors import DTorchError, WorkerError
from dtorch.runtime import Failure, Shards, TensorFuture

pytestmark = pytest.mark.timeout(60)
TWO = dtorch.DeviceMesh("cpu", [0, 1])
FOUR = dtorch.DeviceMesh("cpu", [0, 1, 2, 3])


def slow(mesh: dtorch.DeviceMesh = TWO, size: int = 700, times: int = 4) -> dtorch.Tensor:
    """A tensor of ones that takes a while to compute."""
    x = dtorch.ones(size, size, device_mesh=mesh, placements=[Shard(0)]) / size
    w = dtorch.ones(size, size, device_mesh=mesh)
    for _ in range(times):
        x = (x @ w) / size
    return x * size


def failed() -> dtorch.Tensor:
    weight = dtorch.ones(4, 2, device_mesh=TWO, placements=[Shard(0)])
    return torch.nn.functional.embedding(dtorch.tensor([1, 9], device_mesh=TWO), weight)


def blocked(mesh: dtorch.DeviceMesh) -> tuple[dtorch.Tensor, Callable[[], None]]:
    """A tensor that is not ready until the returned function is called."""
    shards = Shards.pending(len(mesh.devices))
    spec = dtorch.ones(2, device_mesh=mesh)._spec

    def release() -> None:
        for index in range(len(shards)):
            shards.set(index, torch.ones(2))

    return dtorch.Tensor._of(spec, shards), release


def test_get() -> None:
    future = slow().to_torch_async()
    assert isinstance(future, dtorch.TensorFuture)
    value = future.get()
    assert value.shape == (700, 700) and future.is_ready() and repr(future) == "TensorFuture(ready)"
    assert future.get() is value


def test_a_pending_future_waits_as_long_as_asked() -> None:
    x, release = blocked(TWO)
    future = x.to_torch_async()
    assert not future.is_ready() and repr(future) == "TensorFuture(pending)"
    begin = time.monotonic()
    assert future.wait_for(50) is False
    assert 0.04 < time.monotonic() - begin < 5
    assert future.wait_for(0) is False
    release()
    assert future.wait_for(0) is True and future.is_ready()
    assert future.get().tolist() == [1.0, 1.0]


def test_wait_for_returns_when_ready() -> None:
    x, release = blocked(TWO)
    future = x.to_torch_async()
    threading.Timer(0.05, release).start()
    begin = time.monotonic()
    assert future.wait_for(30_000) is True
    assert time.monotonic() - begin < 10


def test_submission_does_not_wait() -> None:
    begin = time.monotonic()
    future = slow(size=1200, times=10).to_torch_async()
    submitted = time.monotonic() - begin
    future.get()
    assert submitted < (time.monotonic() - begin) / 2


@pytest.mark.parametrize("placements", [[Shard(0)], [Partial()], [Replicate()]])
def test_every_layout(placements: list[Any]) -> None:
    value = torch.arange(10.0)
    x = dtorch.Tensor(value, device_mesh=FOUR, placements=placements)
    assert torch.equal(x.to_torch_async().get(), value)


def test_fetches_in_any_order() -> None:
    futures = [
        (dtorch.full((3,), float(i), device_mesh=TWO) + 1).to_torch_async() for i in range(50)
    ]
    for i in reversed(range(50)):
        assert futures[i].get().tolist() == [i + 1.0] * 3


def test_one_future_asked_from_many_threads() -> None:
    future = slow().to_torch_async()
    results: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(future.get())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 8 and all(r is results[0] for r in results)


def test_waiting_in_vain_leaves_nothing_behind() -> None:
    x, release = blocked(TWO)
    future = x.to_torch_async()
    for _ in range(20):
        future.wait_for(0.1)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(300):
        future.wait_for(0.1)
    gc.collect()
    assert len(gc.get_objects()) - before < 300
    release()


# -- callbacks -----------------------------------------------------------------------------


def collect(future: dtorch.TensorFuture) -> tuple[list[Any], threading.Event]:
    seen: list[Any] = []
    done = threading.Event()

    def callback(f: dtorch.TensorFuture) -> None:
        seen.append((f, threading.current_thread().name))
        done.set()

    future.add_done_callback(callback)
    return seen, done


def test_a_callback_runs_on_its_own_thread() -> None:
    x, release = blocked(TWO)
    future = x.to_torch_async()
    seen, done = collect(future)
    assert seen == []
    release()
    assert done.wait(10)
    assert seen == [(future, "dtorch-callbacks")]


def test_a_callback_of_a_ready_future_runs_too() -> None:
    future = dtorch.ones(2).to_torch_async()
    future.get()
    seen, done = collect(future)
    assert done.wait(10) and seen[0][0] is future


def test_a_callback_may_fetch_and_submit() -> None:
    results: list[Any] = []
    done = threading.Event()

    def callback(f: dtorch.TensorFuture) -> None:
        results.append((dtorch.Tensor(f.get(), device_mesh=TWO) + 1).tolist())
        done.set()

    (dtorch.ones(2, device_mesh=TWO) * 2).to_torch_async().add_done_callback(callback)
    assert done.wait(10) and results == [[3.0, 3.0]]


def test_a_callback_that_raises_does_not_stop_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)

    def raises(f: dtorch.TensorFuture) -> None:
        raise ValueError("from a callback")

    future = dtorch.ones(2).to_torch_async()
    future.add_done_callback(raises)
    _, done = collect(future)
    assert done.wait(10)
    (report,) = reported
    assert report.exc_type is ValueError and report.thread.name == "dtorch-callbacks"


def test_a_callback_sees_failure() -> None:
    future = failed().to_torch_async()
    seen, done = collect(future)
    assert done.wait(10) and seen[0][0] is future
    with pytest.raises(WorkerError, match="IndexError"):
        future.get()


# -- asyncio -------------------------------------------------------------------------------


def test_await() -> None:
    async def main() -> torch.Tensor:
        return await slow().to_torch_async()

    assert asyncio.run(main()).shape == (700, 700)


def test_await_what_is_ready_and_twice() -> None:
    async def main() -> list[torch.Tensor]:
        future = dtorch.ones(2).to_torch_async()
        future.get()
        return [await future, await future]

    first, second = asyncio.run(main())
    assert first is second


def test_many_awaited_at_once() -> None:
    async def main() -> list[torch.Tensor]:
        futures = [(slow(size=60, times=1) + i).to_torch_async() for i in range(100)]
        return await asyncio.gather(*futures)

    for i, value in enumerate(asyncio.run(main())):
        torch.testing.assert_close(value, torch.full((60, 60), i + 60 / 60.0))


def test_one_awaited_by_many() -> None:
    async def main() -> list[torch.Tensor]:
        x, release = blocked(TWO)
        future = x.to_torch_async()

        async def wait() -> torch.Tensor:
            return await future

        tasks = [asyncio.create_task(wait()) for _ in range(10)]
        await asyncio.sleep(0)
        threading.Thread(target=release).start()
        return await asyncio.gather(*tasks)

    assert all(v.tolist() == [1.0, 1.0] for v in asyncio.run(main()))


def test_the_loop_turns_meanwhile_and_is_woken() -> None:
    async def main() -> tuple[int, float]:
        x, release = blocked(TWO)
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        other = asyncio.create_task(turn())
        threading.Timer(0.2, release).start()
        await x.to_torch_async()
        other.cancel()
        # Nothing else is scheduled now: only the worker can wake the loop.
        y, release = blocked(TWO)
        threading.Timer(0.1, release).start()
        begin = time.monotonic()
        await y.to_torch_async()
        return turns, time.monotonic() - begin

    turns, seconds = asyncio.run(main())
    assert turns > 10 and seconds < 5


def test_await_can_be_cancelled_and_time_out() -> None:
    async def main() -> list[float]:
        x, release = blocked(TWO)
        future = x.to_torch_async()

        async def wait() -> torch.Tensor:
            return await future

        with pytest.raises(TimeoutError, match=r"^$"):
            await asyncio.wait_for(wait(), 0.05)
        task = asyncio.create_task(wait())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError, match=r"^$"):
            await task
        release()
        return (await future).tolist()

    assert asyncio.run(main()) == [1.0, 1.0]


def test_a_loop_that_has_ended_is_not_woken() -> None:
    x, release = blocked(TWO)
    future = x.to_torch_async()

    async def main() -> None:
        async def wait() -> torch.Tensor:
            return await future

        with pytest.raises(TimeoutError, match=r"^$"):
            await asyncio.wait_for(wait(), 0.01)

    asyncio.run(main())
    release()
    assert future.get().tolist() == [1.0, 1.0]


def test_await_raises_failure() -> None:
    async def main() -> None:
        await failed().to_torch_async()

    with pytest.raises(WorkerError, match="IndexError on cpu:"):
        asyncio.run(main())


def test_gather_with_a_failure_among_them() -> None:
    async def main() -> list[Any]:
        ok = [slow(size=30, times=1).to_torch_async() for _ in range(3)]
        return await asyncio.gather(*ok, failed().to_torch_async(), return_exceptions=True)

    *fine, error = asyncio.run(main())
    assert isinstance(error, WorkerError) and all(isinstance(v, torch.Tensor) for v in fine)


def test_two_loops_in_two_threads() -> None:
    results: list[Any] = []

    async def main() -> None:
        results.append((await slow(size=50, times=1).to_torch_async()).shape)

    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [(50, 50)] * 2


# -- failures ------------------------------------------------------------------------------


def test_a_failed_future_is_ready_and_raises_each_time() -> None:
    future = failed().to_torch_async()
    assert future.wait_for(10_000) and future.is_ready()
    for _ in range(2):
        with pytest.raises(WorkerError, match="IndexError on cpu:") as caught:
            future.get()
        assert isinstance(caught.value.__cause__, IndexError)


def test_each_raise_is_a_new_exception() -> None:
    future = failed().to_torch_async()
    errors = []
    for _ in range(2):
        with pytest.raises(WorkerError, match="index out of range") as caught:
            future.get()
        errors.append(caught.value)
    assert errors[0] is not errors[1]


# -- shards --------------------------------------------------------------------------------


def test_shards_wake_each_waiter_once() -> None:
    shards = Shards.pending(2)
    woken: queue.SimpleQueue[int] = queue.SimpleQueue()
    shards.when_ready((0,), lambda: woken.put(1))
    shards.when_ready((0, 1), lambda: woken.put(2))
    assert woken.empty() and not shards.is_ready((0,))
    shards.set(0, torch.ones(1))
    assert woken.get(timeout=10) == 1
    shards.set(1, torch.ones(1))
    assert woken.get(timeout=10) == 2
    shards.when_ready((1, 0), lambda: woken.put(3))
    assert woken.get(timeout=10) == 3
    assert woken.empty()


def test_a_waiter_that_was_taken_back_is_not_woken() -> None:
    shards, woken = Shards.pending(1), threading.Event()
    forget = shards.when_ready((0,), woken.set)
    forget()
    forget()
    shards.set(0, torch.ones(1))
    assert not woken.wait(0.05)


def test_shards_set_while_others_register_miss_nobody() -> None:
    for _ in range(200):
        shards, woken = Shards.pending(4), threading.Event()
        threads = [threading.Thread(target=shards.set, args=(i, torch.ones(1))) for i in range(4)]
        for thread in threads[:2]:
            thread.start()
        shards.when_ready(range(4), woken.set)
        for thread in threads[2:]:
            thread.start()
        assert shards.wait(range(4), 10)
        for thread in threads:
            thread.join()
        assert woken.wait(10)


def test_a_failure_keeps_the_type_of_dtorchs_own_errors() -> None:
    assert type(Failure("x", DTorchError("y")).error()) is DTorchError
    assert type(Failure("x", ValueError("y")).error()) is WorkerError


def test_no_time_to_wait_is_no_wait() -> None:
    future = slow().to_torch_async()
    assert not future.wait_for(-1)
    assert future.get().shape == (700, 700)


def test_a_loop_that_closes_meanwhile_does_not_stop_the_waker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def await_it(shards: Shards) -> None:
        await TensorFuture(shards, (0,), lambda parts: parts[0])

    loop, shards = asyncio.new_event_loop(), Shards.pending(1)
    task = loop.create_task(await_it(shards))
    loop.run_until_complete(asyncio.sleep(0.01))
    task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
    loop.close()
    with monkeypatch.context() as patched:
        patched.setattr(loop, "is_closed", lambda: False)  # as it was a moment ago
        shards.set(0, torch.ones(1))
        other, woken = Shards.pending(1), threading.Event()
        other.when_ready((0,), woken.set)
        other.set(0, torch.ones(1))
        assert woken.wait(10)
