"""examples/serve_images.py: what it answers, what runs beside what, and how it ends."""

import argparse
import asyncio
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import dtorch
from dtorch.models import diffusion

aiohttp = pytest.importorskip("aiohttp", minversion="3.9")
test_utils = pytest.importorskip("aiohttp.test_utils")
pytest.importorskip("diffusers")
image = pytest.importorskip("PIL.Image")

pytestmark = pytest.mark.once
ROOT = Path(__file__).resolve().parents[1]
SECONDS = 60
STEPS = 2
LONG = {"prompt": "long", "steps": 100}
ODD = {"height": 80, "width": 112}


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The example as a module, found as it finds the example beside it."""
    sys.path.insert(0, str(ROOT / "examples"))
    yield importlib.import_module("serve_images")
    sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(scope="module")
def mesh() -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cfg", "tp"))


@pytest.fixture(scope="module")
def pipe(example: Any, mesh: dtorch.DeviceMesh) -> Any:
    return diffusion.shard(example.small_pipeline(), mesh)


class Watched:
    """A pipeline whose calls wait for a gate and fail on demand; it counts their steps."""

    def __init__(self, pipe: Any, *, is_open: bool = True) -> None:
        self._pipe = pipe
        self.gate = threading.Event()
        self.stepped = threading.Event()
        self.steps = 0
        if is_open:
            self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def __call__(self, prompt: str, callback_on_step_end: Any, **options: Any) -> Any:
        assert self.gate.wait(SECONDS)
        if prompt == "fails in a call":
            raise RuntimeError("no such prompt")
        if prompt == "fails on a device":
            flat = dtorch.zeros(3, 3, device_mesh=dtorch.DeviceMesh("cpu", [0]))
            return SimpleNamespace(images=torch.linalg.cholesky(flat))

        def step(*args: Any) -> Any:
            self.steps += 1
            self.stepped.set()
            return callback_on_step_end(*args)

        return self._pipe(prompt, callback_on_step_end=step, **options)


Conversation = Callable[[Any], Awaitable[None]]


@pytest.fixture
def talk(example: Any, mesh: dtorch.DeviceMesh) -> Callable[..., None]:
    """``talk(pipe, conversation)`` runs a conversation between a client and a new service."""

    def run(pipe: Any, conversation: Conversation, *, max_queue: int = 16) -> None:
        async def main() -> None:
            service = example.Service(pipe, mesh, [{"height": 64, "width": 64}], STEPS, max_queue)
            server = test_utils.TestServer(example.application(service))
            async with test_utils.TestClient(server) as client:
                await asyncio.wait_for(conversation(client), SECONDS)

        asyncio.run(main())

    return run


async def png(client: Any, **fields: Any) -> bytes:
    async with client.post("/images", json={"prompt": "A red cat", **fields}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "image/png"
        return await answer.read()


async def queue(client: Any, **expected: int) -> dict[str, Any]:
    """Returns what the queue holds, once that is what is expected."""
    while True:
        found = await (await client.get("/queue")).json()
        if expected.items() <= found.items():
            return found
        await asyncio.sleep(0.01)


def computed(pipe: Any, height: int = 64, width: int = 64, seed: int = 0) -> numpy.ndarray:
    """Returns the pixels [H, W, 3] that the pipeline itself gives."""
    options = {"height": height, "width": width, "num_inference_steps": STEPS}
    generator = torch.Generator().manual_seed(seed)
    made = pipe("A red cat", generator=generator, output_type="pt", **options).images
    return (made.to_torch()[0].permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()


def pixels(data: bytes) -> numpy.ndarray:
    return numpy.asarray(image.open(io.BytesIO(data)))


def test_images_are_the_same_one_by_one_and_at_once(pipe: Any, talk: Any) -> None:
    wanted = [{"seed": 0}, {"seed": 1}, {**ODD, "seed": 2}, {"seed": 0, "prompt": "Rain"}]

    async def conversation(client: Any) -> None:
        first = [await png(client, **fields) for fields in wanted]
        again = await asyncio.gather(*(png(client, **fields) for fields in wanted))
        assert first == again and len(set(first)) == len(wanted)
        for fields, data in zip(wanted[:3], first[:3], strict=True):
            numpy.testing.assert_array_equal(pixels(data), computed(pipe, **fields))
        assert (await queue(client))["done"] == 2 * len(wanted)

    talk(pipe, conversation)


def test_a_size_is_traced_once(pipe: Any, talk: Any) -> None:
    async def conversation(client: Any) -> None:
        await png(client)
        program = pipe.transformer._programs["__call__"]
        before = program.cache_info().misses
        await png(client, height=96, width=48, steps=3)
        assert program.cache_info().misses == before + 1
        await png(client, height=96, width=48, steps=2, seed=5)
        assert program.cache_info().misses == before + 1

    talk(pipe, conversation)


def test_the_warm_up_traces_its_sizes(pipe: Any, talk: Any) -> None:
    async def conversation(client: Any) -> None:
        answer = await (await client.post("/warmup")).json()
        assert list(answer["seconds"]) == ["64x64"]
        misses = pipe.transformer._programs["__call__"].cache_info().misses
        await png(client)
        assert pipe.transformer._programs["__call__"].cache_info().misses == misses

    talk(pipe, conversation)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON: Expecting property name"),
        (b"\xff{}", "the body is not JSON: "),
        (b"[" * 50_000, "the body is not JSON: maximum recursion depth"),
        (b'{"prompt": "\\ud800"}', "surrogates not allowed"),
        ([], 'the body must be an object, as {"prompt": "A red cat"}.'),
        ({}, "prompt is null: a text of 1 to 2000 characters is allowed."),
        ({"prompt": 3}, "prompt is 3: a text of 1 to 2000 characters is allowed."),
        ({"prompt": ""}, "prompt is 0 characters: "),
        ({"prompt": "x" * 2001}, "prompt is 2001 characters: "),
        ({"size": 3}, "'size' is no field: prompt, height, width, steps, seed are."),
        ({"height": 72}, "height is 72: multiples of 16 from 16 to 512 are allowed."),
        ({"height": 0}, "height is 0: multiples of 16 from 16 to 512 are allowed."),
        ({"width": 528}, "width is 528: multiples of 16 from 16 to 512 are allowed."),
        ({"width": 64.0}, "width is 64.0: multiples"),
        ({"width": None}, "width is null: multiples"),
        ({"steps": 101}, "steps is 101: integers from 1 to 100 are allowed."),
        ({"steps": True}, "steps is true: integers"),
        ({"seed": -1}, "seed is -1: integers from 0 to 9223372036854775807 are allowed."),
        ({"seed": "7"}, 'seed is "7": integers'),
        ({"height": 1, "seed": []}, "are allowed. seed is []: integers"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_request_says_what_is_allowed(body: Any, message: str, pipe: Any, talk: Any) -> None:
    async def conversation(client: Any) -> None:
        whole = {"prompt": "x", **body} if body and isinstance(body, dict) else body
        data = whole if isinstance(whole, bytes) else json.dumps(whole).encode()
        async with client.post("/images", data=data) as answer:
            assert answer.status == 400
            assert message in (await answer.json())["error"]

    talk(pipe, conversation)


def test_what_is_not_there_is_json_too(pipe: Any, talk: Any) -> None:
    async def conversation(client: Any) -> None:
        for method, path, status, message in (
            ("GET", "/", 404, "Not Found"),
            ("GET", "/images", 405, "Method Not Allowed"),
            ("POST", "/images", 413, "65536"),
        ):
            data = b"x" * 70_000 if status == 413 else None
            async with client.request(method, path, data=data) as answer:
                assert answer.status == status
                assert message in (await answer.json())["error"]
                assert answer.headers.get("Allow") == ("POST" if status == 405 else None)

    talk(pipe, conversation)


def test_health_and_queue(pipe: Any, talk: Any) -> None:
    async def conversation(client: Any) -> None:
        health = await (await client.get("/health")).json()
        assert health.pop("uptime") >= 0
        assert health == {"status": "ok", "mesh": {"cfg": 2, "tp": 2}, "device": "cpu"}
        before = await queue(client)
        nothing = dict.fromkeys(("waiting", "running", "done", "cancelled", "failed"), 0)
        assert before == {**nothing, "mean_seconds": 0}
        await png(client)
        after = await queue(client)
        assert after.pop("mean_seconds") > 0 and after == {**nothing, "done": 1}

    talk(pipe, conversation)


def test_a_full_queue_refuses_and_a_disconnect_frees_it(pipe: Any, talk: Any) -> None:
    watched = Watched(pipe, is_open=False)

    async def conversation(client: Any) -> None:
        tasks = []
        for seed in range(3):
            tasks.append(asyncio.create_task(png(client, seed=seed)))
            await queue(client, running=min(seed + 1, 2), waiting=max(seed - 1, 0))
        async with client.post("/images", json={"prompt": "x"}) as answer:
            assert answer.status == 503 and int(answer.headers["Retry-After"]) >= 1
            assert (await answer.json())["error"] == "1 images wait, and no more may."
        tasks.pop().cancel()
        await queue(client, running=2, waiting=0, cancelled=1)
        tasks.append(asyncio.create_task(png(client, seed=3)))
        await queue(client, running=2, waiting=1, cancelled=1)
        watched.gate.set()
        for seed, data in zip((0, 1, 3), await asyncio.gather(*tasks), strict=True):
            numpy.testing.assert_array_equal(pixels(data), computed(pipe, seed=seed))
        assert watched.steps == 3 * STEPS  # nothing was computed for who left
        await queue(client, running=0, waiting=0, done=3, cancelled=1, failed=0)

    talk(watched, conversation, max_queue=1)


def test_a_disconnect_stops_what_has_begun(pipe: Any, talk: Any) -> None:
    watched = Watched(pipe)

    async def conversation(client: Any) -> None:
        task = asyncio.create_task(png(client, **LONG))
        assert await asyncio.to_thread(watched.stepped.wait, SECONDS)
        task.cancel()
        await queue(client, cancelled=1)
        await queue(client, running=0)
        assert watched.steps < 50
        numpy.testing.assert_array_equal(pixels(await png(client)), computed(pipe))
        await queue(client, done=1, cancelled=1, failed=0)

    talk(watched, conversation)


def test_a_disconnect_before_the_call_costs_no_step(pipe: Any, talk: Any) -> None:
    watched = Watched(pipe, is_open=False)

    async def conversation(client: Any) -> None:
        tasks = [asyncio.create_task(png(client, seed=seed)) for seed in range(2)]
        await queue(client, running=2)
        tasks[1].cancel()
        await queue(client, cancelled=1)
        watched.gate.set()
        numpy.testing.assert_array_equal(pixels(await tasks[0]), computed(pipe))
        await queue(client, running=0, done=1)
        assert watched.steps == STEPS

    talk(watched, conversation)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("fails in a call", "RuntimeError: no such prompt"),
        ("fails on a device", "WorkerError: _LinAlgError on cpu:0: linalg.cholesky"),
    ],
)
def test_a_failure_is_answered_and_the_service_goes_on(
    prompt: str, message: str, pipe: Any, talk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def conversation(client: Any) -> None:
        async with client.post("/images", json={"prompt": prompt}) as answer:
            assert answer.status == 500
            assert message in (await answer.json())["error"]
        numpy.testing.assert_array_equal(pixels(await png(client)), computed(pipe))
        await queue(client, running=0, done=1, failed=1)

    talk(Watched(pipe), conversation)
    assert "POST /images failed" in caplog.text and "Traceback" in caplog.text


def test_a_signal_refuses_what_waits_and_what_runs(
    example: Any, pipe: Any, mesh: dtorch.DeviceMesh
) -> None:
    watched = Watched(pipe)
    port = test_utils.unused_port()
    args = argparse.Namespace(host="localhost", port=port, warmup=True)

    async def main() -> None:
        service = example.Service(watched, mesh, [{"height": 64, "width": 64}], STEPS, 16)
        serving = asyncio.create_task(example.serve(service, args))
        assert await asyncio.to_thread(watched.stepped.wait, SECONDS)
        async with aiohttp.ClientSession(f"http://localhost:{port}") as client:
            while True:
                try:
                    await queue(client, done=1)  # the warm-up
                    break
                except OSError:
                    await asyncio.sleep(0.01)
            tasks = [asyncio.create_task(client.post("/images", json=LONG)) for _ in range(4)]
            await queue(client, running=2, waiting=2)
            os.kill(os.getpid(), signal.SIGTERM)
            for answer in await asyncio.gather(*tasks):
                assert answer.status == 503
                assert await answer.json() == {"error": "the service is shutting down."}
            with pytest.raises(asyncio.CancelledError, match=r"^$"):
                await serving

    asyncio.run(asyncio.wait_for(main(), SECONDS))
    assert watched.steps < 50


def test_ctrl_c_ends_the_process(tmp_path: Path) -> None:
    port = test_utils.unused_port()
    command = [sys.executable, "-W", "error", "examples/serve_images.py", "--mesh", "tp=2"]
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            cwd=ROOT,
        )
    assert process.stdout is not None
    try:
        url = f"http://127.0.0.1:{port}"
        assert process.stdout.readline() == f"serving at {url}\n", errors.read_text()
        body = json.dumps(LONG).encode()

        def left() -> None:
            with pytest.raises(TimeoutError, match="timed out"):
                urllib.request.urlopen(f"{url}/images", data=body, timeout=0.5)

        left()
        assert _until(url, "cancelled", 1) and _until(url, "running", 0)
        answers: list[Any] = []

        def ask() -> None:
            with pytest.raises(urllib.error.HTTPError, match="503") as found:
                urllib.request.urlopen(f"{url}/images", data=body, timeout=SECONDS)
            answers.append(json.load(found.value))

        thread = threading.Thread(target=ask)
        thread.start()
        assert _until(url, "running", 1)
        process.send_signal(signal.SIGINT)
        thread.join(SECONDS)
        assert answers == [{"error": "the service is shutting down."}]
        assert process.wait(SECONDS) == 0 and process.stdout.read() == ""
        assert "Traceback" not in errors.read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _until(url: str, name: str, count: int) -> bool:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with urllib.request.urlopen(f"{url}/queue") as answer:
            if json.load(answer)[name] == count:
                return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--sizes=64", "argument --sizes: invalid sizes value: '64'"),
        ("--sizes=64x72", "width is 72: multiples of 16 from 16 to 512 are allowed."),
        ("--steps=0", "steps is 0: integers from 1 to 100 are allowed."),
    ],
)
def test_a_bad_argument_is_named(
    argument: str,
    message: str,
    example: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve_images.py", "--mesh=tp=1", argument])
    with pytest.raises(SystemExit, match="2"):
        example.main()
    assert message in capsys.readouterr().err
