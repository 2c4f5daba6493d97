"""Workers: failures that stay where they belong, an exit that never hangs, many client threads."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.errors import DTorchError, WorkerError
from dtorch.runtime import EXECUTOR, Executable

pytestmark = pytest.mark.timeout(60)
TWO = dtorch.DeviceMesh("cpu", [0, 1])
FOUR = dtorch.DeviceMesh("cpu", [0, 1, 2, 3])
GRID = dtorch.DeviceMesh("cpu", [[0, 1], [2, 3]])
SECONDS = 10.0
embed = torch.nn.functional.embedding


def line_of(function: Callable[..., Any], text: str) -> int:
    """The line of this file on which the body of a function holds a text."""
    first = function.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if n >= first and text in line)


def test_what_nobody_waits_for_is_computed() -> None:
    x = dtorch.ones(4, device_mesh=TWO)
    for _ in range(3):
        future = (x + 1).to_torch_async()
        end = time.monotonic() + SECONDS
        while not future.is_ready():
            assert time.monotonic() < end
            time.sleep(0.001)


# -- failures ------------------------------------------------------------------------------


def failing_on_one(mesh: dtorch.DeviceMesh) -> dtorch.Tensor:
    """Rows read from a whole table, by indices of which only the last device has a bad one."""
    weight = dtorch.ones(4, 8, device_mesh=mesh)
    ids = torch.zeros(8, dtype=torch.int64)
    ids[-1] = 99
    ids = dtorch.Tensor(ids, device_mesh=mesh, placements=[Shard(0)] * mesh.ndim)
    return embed(ids, weight)  # the line that fails


@pytest.mark.parametrize("mesh", [TWO, FOUR, GRID], ids=str)
@pytest.mark.parametrize(
    "through",
    [
        lambda x: x.redistribute(placements=[Replicate()] * x.device_mesh.ndim),
        lambda x: x.sum(),
        lambda x: x.redistribute(placements=[Shard(1)] * x.device_mesh.ndim).sum(0).exp(),
        lambda x: x.redistribute(dtorch.DeviceMesh("cpu", [7, 8, 9]), [Shard(1)]),
        lambda x: torch.matmul(x, dtorch.ones(8, 600, device_mesh=x.device_mesh)).sum(0),
    ],
)
def test_one_device_fails_while_its_peers_wait_in_a_collective(
    mesh: dtorch.DeviceMesh, through: Callable[..., Any]
) -> None:
    begin = time.monotonic()
    result = through(failing_on_one(mesh))
    with pytest.raises(WorkerError, match="IndexError on cpu:") as caught:
        result.to_torch()
    assert time.monotonic() - begin < SECONDS
    message = str(caught.value)
    number = line_of(failing_on_one, "return embed(ids, weight)")
    assert f"IndexError on {mesh.devices[-1]}: index out of range" in message
    assert "embedding" in message and f"{__file__}:{number} in failing_on_one" in message
    assert isinstance(caught.value.__cause__, IndexError)
    if dtorch.runtime.EXECUTOR == "python":  # the native one has no Python frames
        assert caught.value.__cause__.__traceback__ is not None
    assert (
        dtorch.ones(4, device_mesh=mesh, placements=[Shard(0)] * mesh.ndim) + 1
    ).sum().item() == 8


def test_a_large_all_reduce_survives_a_failure() -> None:
    """The reduction in two phases: no peer waits for a second round that nobody starts."""
    weight = dtorch.ones(4, 40_000, device_mesh=FOUR, placements=[Shard(0)])
    for bad in (7, -1):
        ids = dtorch.tensor([bad], device_mesh=FOUR)
        with pytest.raises(WorkerError, match="IndexError"):
            embed(ids, weight).redistribute(placements=[Replicate()]).to_torch()
    value = embed(dtorch.tensor([3], device_mesh=FOUR), weight)
    assert value.placements == [Partial()] and value.sum().item() == 40_000


def test_a_failure_inside_jit_names_the_line_in_the_function_and_the_call() -> None:
    def model(ids: Any, weight: Any) -> Any:
        h = embed(ids, weight)  # inside the function
        return h.sum(0).redistribute(placements=[Replicate()])

    weight = dtorch.ones(4, 2, device_mesh=TWO, placements=[Shard(0)])
    ids = dtorch.tensor([0, 9], device_mesh=TWO)
    result = dtorch.jit(model)(ids, weight)  # the call
    with pytest.raises(WorkerError, match="IndexError on cpu:") as caught:
        result.to_torch()
    here = test_a_failure_inside_jit_names_the_line_in_the_function_and_the_call
    message = str(caught.value)
    assert f"written at   {__file__}:{line_of(here, '# inside the function')} in model" in message
    assert f"called at    {__file__}:{line_of(here, '# the call')} in " in message


def test_what_does_not_depend_on_a_failure_is_computed() -> None:
    def two(ids: Any, weight: Any) -> Any:
        return embed(ids, weight), weight * 2

    weight = dtorch.ones(4, 2, device_mesh=TWO, placements=[Shard(0)])
    bad, good = dtorch.jit(two)(dtorch.tensor([9], device_mesh=TWO), weight)
    later = bad + good[:1]
    assert good.sum().item() == 16
    for poisoned in (bad, later, later.sum()):
        with pytest.raises(WorkerError, match="IndexError"):
            poisoned.to_torch()
    dtorch.synchronize()  # does not raise


def test_a_failure_of_a_draw_does_not_lose_the_generator() -> None:
    weight = dtorch.ones(4, 2, device_mesh=TWO)
    bad = embed(dtorch.tensor([9], device_mesh=TWO), weight)
    torch.manual_seed(0)
    with pytest.raises(WorkerError, match="IndexError"):
        torch.nn.functional.dropout(bad, 0.5).to_torch()
    torch.manual_seed(0)
    again = dtorch.rand(3, device_mesh=TWO)
    torch.manual_seed(0)
    assert torch.equal(again.to_torch(), torch.rand(3))


def test_a_gradient_of_a_failure_fails() -> None:
    weight = dtorch.ones(4, 2, device_mesh=TWO, placements=[Shard(0)], requires_grad=True)
    embed(dtorch.tensor([9], device_mesh=TWO), weight).sum().backward()
    assert weight.grad is not None
    with pytest.raises(WorkerError, match="IndexError"):
        weight.grad.to_torch()


def test_a_hundred_failures_leave_no_threads() -> None:
    failing_on_one(TWO)
    dtorch.synchronize()
    before = threading.active_count()
    results = [failing_on_one(TWO).sum() for _ in range(100)]
    for result in results:
        with pytest.raises(WorkerError, match="IndexError"):
            result.item()
    assert threading.active_count() == before


# -- threads -------------------------------------------------------------------------------


def on_threads(functions: list[Callable[[], Any]], seconds: float = 60) -> list[Any]:
    """Results of functions that run at the same time, each on a thread; raises what one raises."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = functions[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(t.is_alive() for t in threads), "a client thread hangs"
    if errors:
        raise errors[0]
    return results


def test_many_client_threads() -> None:
    def client(number: int) -> Any:
        mesh = (TWO, FOUR, GRID)[number % 3]
        x = dtorch.Tensor(
            torch.arange(12.0).view(4, 3) + number,
            device_mesh=mesh,
            placements=[Shard(0)] * mesh.ndim,
        )
        f = dtorch.jit(lambda x, s: (x.T @ x * s).sum(0))
        total = 0.0
        for step in range(20):
            y = x * float(step) + number
            total += y.redistribute(placements=[Partial()] * mesh.ndim).sum().item()
            total += f(x, float(step)).sum().item()
        return total

    def expected(number: int) -> float:
        x = torch.arange(12.0).view(4, 3) + number
        steps = [float(s) for s in range(20)]
        return sum((x * s + number).sum().item() + (x.T @ x * s).sum().item() for s in steps)

    found = on_threads([lambda i=i: client(i) for i in range(8)])
    assert found == pytest.approx([expected(i) for i in range(8)], rel=1e-5)


def test_many_threads_trace_one_jitted_function() -> None:
    count = 0

    def f(x: Any) -> Any:
        nonlocal count
        count += 1
        time.sleep(0.01)
        return torch.relu(x) * 2

    jitted = dtorch.jit(f)
    x = dtorch.ones(4, device_mesh=TWO, placements=[Shard(0)])
    results = on_threads([lambda: jitted(x).tolist() for _ in range(8)])
    assert results == [[2.0] * 4] * 8 and count <= 8 and jitted.cache_info().currsize == 1


def test_many_threads_train() -> None:
    def train() -> list[float]:
        w = dtorch.ones(4, device_mesh=TWO, placements=[Shard(0)], requires_grad=True)
        for _ in range(5):
            (w * w).sum().backward()
            with torch.no_grad():
                w.sub_(w.grad, alpha=0.1)
            w.grad = None
        return w.tolist()

    w = torch.ones(4, requires_grad=True)
    for _ in range(5):
        (w * w).sum().backward()
        with torch.no_grad():
            w.sub_(w.grad, alpha=0.1)
        w.grad = None
    assert on_threads([train] * 4) == [w.tolist()] * 4


def test_draws_of_many_threads_are_a_sequence_of_pytorchs() -> None:
    torch.manual_seed(7)
    expected = {tuple(torch.rand(3).tolist()) for _ in range(40)}
    torch.manual_seed(7)

    def draw() -> list[tuple[float, ...]]:
        return [
            tuple(dtorch.rand(3, device_mesh=TWO, placements=[Shard(0)]).tolist())
            for _ in range(10)
        ]

    found = {v for values in on_threads([draw] * 4) for v in values}
    assert found == expected


def test_submitting_from_a_callback_thread_works() -> None:
    done, results = threading.Event(), []

    def callback(future: Any) -> None:
        x = dtorch.Tensor(future.get(), device_mesh=TWO, placements=[Shard(0)])
        results.append(dtorch.jit(lambda t: t.sum())(x).item())
        done.set()

    dtorch.ones(4, device_mesh=TWO).to_torch_async().add_done_callback(callback)
    assert done.wait(20) and results == [4.0]


def test_submitting_and_fetching_from_a_worker_raises() -> None:
    """A worker that waits for itself would wait for ever."""
    x, errors = dtorch.ones(2, device_mesh=TWO), []

    def on_worker(t: torch.Tensor) -> torch.Tensor:
        for call in (lambda: x + 1, x.to_torch, x.local_shards, dtorch.synchronize):
            with pytest.raises(
                DTorchError, match="from a dtorch worker thread would wait"
            ) as caught:
                call()
            errors.append(caught.value)
        return t.clone()

    library = torch.library.Library("dtorch_test_submit", "DEF")
    library.define("call(Tensor x) -> Tensor")
    library.impl("call", on_worker, "CPU")
    library.impl("call", torch.empty_like, "Meta")
    try:
        assert torch.ops.dtorch_test_submit.call(dtorch.ones(2)).tolist() == [1.0, 1.0]
    finally:
        library._destroy()
    assert len(errors) == 4


def test_collectives_of_two_threads_are_in_one_order() -> None:
    """Without one order of submission, two workers would wait for each other's peers."""
    xs = [dtorch.rand(64, 64, device_mesh=m, placements=[Shard(0)]) for m in (TWO, FOUR)]

    def client(x: Any) -> float:
        for _ in range(60):
            y = x.redistribute(placements=[Shard(1)]).redistribute(placements=[Shard(0)])
        return y.sum().item()

    found = on_threads([lambda x=x: client(x) for x in (*xs, *xs)])
    for value, x in zip(found, (*xs, *xs), strict=True):
        assert value == pytest.approx(x.to_torch().sum().item(), rel=1e-5)


# -- number of threads ---------------------------------------------------------------------


def test_num_threads_changes_between_calls() -> None:
    """Sums, layer norm and convolution differ in the last bits between numbers of threads."""
    torch.manual_seed(0)
    value = torch.randn(300_000) * 1000
    weight = torch.randn(8, 3, 5, 5)
    image = torch.randn(4, 3, 40, 40)
    x, w, i = (dtorch.Tensor(t, device="cpu") for t in (value, weight, image))
    f = dtorch.jit(lambda t: t.sum())
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 1, 3, 2):
            torch.set_num_threads(count)
            assert torch.equal(x.sum().to_torch(), value.sum()), count
            assert torch.equal(f(x).to_torch(), value.sum()), count
            convolved = torch.nn.functional.conv2d(i, w).to_torch()
            assert torch.equal(convolved, torch.nn.functional.conv2d(image, weight)), count
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


def test_threads_are_shared_out_between_devices() -> None:
    library = torch.library.Library("dtorch_test_worker", "DEF")
    library.define("threads(Tensor x) -> Tensor")
    library.impl("threads", lambda x: torch.full_like(x, torch.get_num_threads()), "CPU")
    library.impl("threads", torch.empty_like, "Meta")
    probe = torch.ops.dtorch_test_worker.threads
    before = torch.get_num_threads()
    try:
        for count, mesh, expected in (
            (4, TWO, 2),
            (4, FOUR, 1),
            (3, TWO, 1),
            (4, dtorch.DeviceMesh("cpu", [0]), 4),
        ):
            torch.set_num_threads(count)
            x = probe(dtorch.ones(1, device_mesh=mesh))
            assert {int(s) for s in x.local_shards().values()} == {expected}, (count, mesh)
    finally:
        torch.set_num_threads(before)
        library._destroy()


# -- the end of a process ------------------------------------------------------------------

PRELUDE = """
import os, signal, sys, threading, time
import torch, dtorch
from dtorch import Partial, Replicate, Shard
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
mesh = dtorch.DeviceMesh("cpu", [0, 1, 2])
def queue_work(times=400):
    x = dtorch.ones(600, 600, device_mesh=mesh, placements=[Shard(0)])
    for _ in range(times):
        x = (x @ x.redistribute(placements=[Replicate()])) / 600
    return x
"""


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a hanging child of its own ends with it
    )


def finish(process: subprocess.Popen[str], seconds: float = 30) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"the process hangs; it wrote:\n{out}\n{err}")
    return process.returncode, out, err


def run(code: str) -> str:
    status, out, err = finish(start(code))
    assert status == 0, err
    assert err == ""
    return out


def test_exit_with_work_queued() -> None:
    begin = time.monotonic()
    assert run("x = queue_work(); print('queued')") == "queued\n"
    assert time.monotonic() - begin < 25


def test_exit_with_an_exception_and_work_queued() -> None:
    status, _, err = finish(start("x = queue_work(); raise ValueError('of the user')"))
    assert status == 1 and err.rstrip().endswith("ValueError: of the user")


def test_exit_with_a_failure_that_nobody_fetched() -> None:
    code = """
    w = dtorch.ones(4, 2, device_mesh=mesh, placements=[Shard(0)])
    y = torch.nn.functional.embedding(dtorch.tensor([9], device_mesh=mesh), w).sum()
    print("done")
    """
    assert run(code) == "done\n"


def test_exit_while_another_thread_waits() -> None:
    code = """
    x = queue_work()
    def wait():
        try:
            x.to_torch()
        except dtorch.errors.ShutdownError:
            pass
    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.1)
    print("done")
    """
    assert run(code) == "done\n"


def test_ctrl_c_while_fetching() -> None:
    code = """
    x = queue_work(1500)
    print("fetching", flush=True)
    x.to_torch()
    """
    process = start(code)
    assert process.stdout is not None and process.stdout.readline() == "fetching\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    status, _, err = finish(process)
    assert status in (1, -signal.SIGINT, 130) and err.rstrip().endswith("KeyboardInterrupt")
    assert time.monotonic() - begin < 15


def test_the_process_goes_on_after_ctrl_c() -> None:
    code = """
    x = queue_work(40)
    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        x.to_torch(); time.sleep(1)
    except KeyboardInterrupt:
        print("interrupted")
    print((dtorch.ones(4, device_mesh=mesh, placements=[Shard(0)]) + 1).sum().item())
    """
    assert run(code) == "interrupted\n8.0\n"


def test_a_forked_child_works_and_its_parent_too() -> None:
    code = """
    import warnings
    warnings.simplefilter("ignore")
    x = dtorch.ones(6, device_mesh=mesh, placements=[Shard(0)])
    assert (x + 1).sum().item() == 12
    child = os.fork()
    if child == 0:
        ok = (x + 2).sum().item() == 18 and dtorch.rand(3, device_mesh=mesh).shape == (3,)
        dtorch.synchronize()
        os._exit(7 if ok else 1)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), (x + 3).sum().item())
    """
    assert run(code) == "7 24.0\n"


def test_what_was_pending_at_a_fork_raises_in_the_child() -> None:
    code = """
    import warnings
    warnings.simplefilter("ignore")
    x = queue_work(200)
    child = os.fork()
    if child == 0:
        try:
            x.to_torch()
        except dtorch.errors.ShutdownError as error:
            os._exit(7 if "fork" in str(error) else 3)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), x.shape)
    """
    assert run(code) == "7 torch.Size([600, 600])\n"


def test_a_fork_while_another_thread_submits() -> None:
    code = """
    import warnings
    warnings.simplefilter("ignore")
    stop = threading.Event()
    x = dtorch.ones(6, device_mesh=mesh, placements=[Shard(0)])
    def client():
        while not stop.is_set():
            (x + 1).sum().item()
            dtorch.jit(lambda t: t * 2)(x)
    threads = [threading.Thread(target=client) for _ in range(3)]
    [t.start() for t in threads]
    codes = []
    for _ in range(10):
        child = os.fork()
        if child == 0:
            y = dtorch.jit(lambda t: t * 3)(x * 2)
            os._exit(7 if y.sum().item() == 36 else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    stop.set()
    [t.join() for t in threads]
    print(codes)
    """
    assert run(code) == f"{[7] * 10}\n"


def test_submitting_after_the_end_fails_at_the_fetch() -> None:
    code = """
    import atexit
    def late():
        try:
            (x + 1).to_torch()
        except dtorch.errors.ShutdownError as error:
            print("late:", str(error)[:33])
    x = dtorch.ones(3, device_mesh=mesh)
    import dtorch.runtime
    dtorch.runtime.stop()
    late()
    """
    assert run(code) == "late: the dtorch workers were stopped b\n"


@pytest.mark.skipif(EXECUTOR != "python", reason="the C++ executor runs")
def test_nothing_is_kept_of_what_devices_have_shown_each_other() -> None:
    for mesh in (TWO, FOUR, GRID):
        for x in (failing_on_one(mesh), dtorch.ones(8, 8, device_mesh=mesh, placements=None)):
            for placements in ([Shard(1)] * mesh.ndim, [Shard(0)] * mesh.ndim):
                moved = x.redistribute(placements=placements).sum(0)
                _ = moved.redistribute(placements=[Replicate()] * mesh.ndim)
    dtorch.synchronize()
    executables = [e for e in gc.get_objects() if type(e) is Executable]
    assert executables and not any(e.exchanges for e in executables)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_data_loader_with_workers_beside_dtorch() -> None:
    code = """
    import warnings
    warnings.simplefilter("ignore")
    x = dtorch.ones(6, device_mesh=mesh, placements=[Shard(0)])
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, num_workers=2)
    print([(x[:4] * batch).sum().item() for batch in loader])
    """
    assert run(code) == "[6.0, 22.0]\n"
