"""Images over HTTP: an asyncio service around the Stable Diffusion 3 of examples/sd3.py.

    python examples/serve_images.py
    python examples/serve_images.py --model DIR --mesh cfg=2,ulysses_cp=4 --device cuda --warmup
    curl -o cat.png localhost:8000/images -d '{"prompt": "A red cat", "seed": 7}'

Without --model it serves a small model with random weights. It needs the extra `serve`. It answers:
  POST /images  with a PNG, to {"prompt", "height", "width", "steps", "seed"}; only prompt must be
  POST /warmup  when it has made an image of each of --sizes, so that their programs are traced
  GET /queue    with how many images wait, run, are done, were cancelled and failed
  GET /health   with the mesh and the uptime
and with {"error": "..."} where it cannot.

Three kinds of threads share the work. The event loop talks to clients and waits for nothing else.
The pipeline is ordinary Python code that has a state, so one thread makes all its calls, one after
another: a call traces what is new and queues work onto the devices. The devices follow, and wake
the event loop when an image is there (`to_torch_async`); meanwhile the next call is under way.
Two bounds keep memory small, and let a client that disconnects save work: NUM_BEGUN images have
work on the devices, and each denoising loop is at most NUM_AHEAD steps ahead of them.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import io
import json
import logging
import math
import signal
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from aiohttp import web
from aiohttp.typedefs import Handler
from sd3 import StableDiffusion3Pipeline, make_mesh, small_pipeline

import dtorch
from dtorch.models import diffusion

NUM_BEGUN = 2  # one image that the devices compute, and one that is queued behind it
NUM_AHEAD = 4
CLOSING = "the service is shutting down."
MAX_SIDE, MAX_STEPS, MAX_PROMPT, MAX_BODY = 2048, 100, 2000, 2**16

Numbers = Mapping[str, tuple[int, range]]  # the fields that are numbers: default, allowed values
Sizes = list[dict[str, int]]  # each with height and width
log = logging.getLogger("serve_images")


class Stopped(Exception):
    """Nobody waits for the image any more."""


class Wanted(NamedTuple):
    prompt: str
    height: int
    width: int
    steps: int
    seed: int


@dataclasses.dataclass(eq=False)
class Job:
    """An image on its way."""

    wanted: Wanted
    answer: asyncio.Future[bytes]  # the PNG; cancelled when the client disconnects
    stopped: bool = False  # set by the event loop, read by the pipeline's thread between steps
    steps: deque[dtorch.TensorFuture] = dataclasses.field(default_factory=deque)  # the last latents

    def after_step(self, pipe: Any, step: int, time: Any, values: Any) -> dict[str, Any]:
        """Waits if the loop is too far ahead of the devices, and ends it if nobody waits for it."""
        self.steps.append(values["latents"].to_torch_async())
        if len(self.steps) > NUM_AHEAD:
            self.steps.popleft().get().cpu()  # a GPU may still compute what `get` returns
        if self.stopped:
            raise Stopped  # with `pipe._interrupt`, what there is would still be decoded
        return {}


class Service:
    """Makes images, one after another in the order in which they are asked for.

    Everything runs on the event loop, except for `_call` and `_encode`.
    """

    def __init__(
        self, pipe: Any, mesh: dtorch.DeviceMesh, sizes: Sizes, steps: int, max_queue: int
    ) -> None:
        pipe.set_progress_bar_config(disable=True)
        self._pipe, self._mesh, self._max_queue = pipe, mesh, max_queue
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pipeline")
        self._waiting: deque[Job] = deque()
        self._running: dict[Job, asyncio.Task[None]] = {}
        self._counts = {"done": 0, "cancelled": 0, "failed": 0}
        self._mean_seconds = 0.0
        self._began = self._last_end = time.monotonic()
        self._is_closed = False
        unit = pipe.patch_size * pipe.vae_scale_factor
        largest = min(MAX_SIDE, pipe.transformer.config.pos_embed_max_size * unit)
        side = pipe.default_sample_size * pipe.vae_scale_factor, range(unit, largest + 1, unit)
        more = {"steps": (steps, range(1, MAX_STEPS + 1)), "seed": (0, range(2**63))}
        self._numbers: Numbers = {"height": side, "width": side, **more}
        self._sizes = [check({"prompt": "-", **size}, self._numbers) for size in sizes]

    async def image(self, wanted: Wanted) -> bytes:
        """Returns a PNG; raises HTTPServiceUnavailable if too many wait or all is shut down."""
        if self._is_closed:
            raise web.HTTPServiceUnavailable(text=CLOSING)
        if len(self._running) >= NUM_BEGUN and len(self._waiting) >= self._max_queue:
            seconds = max(1, math.ceil(self._mean_seconds * len(self._waiting)))
            text = f"{len(self._waiting)} images wait, and no more may."
            raise web.HTTPServiceUnavailable(text=text, headers={"Retry-After": str(seconds)})
        job = Job(wanted, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._begin()
        try:
            return await job.answer
        finally:
            job.stopped = True
            self._counts["cancelled"] += job.answer.cancelled()
            if job in self._waiting:
                self._waiting.remove(job)

    async def warm_up(self) -> dict[str, float]:
        """Returns how many seconds an image of each size took."""
        took = {}
        for wanted in self._sizes:
            begin = time.monotonic()
            await self.image(wanted)
            took[f"{wanted.height}x{wanted.width}"] = round(time.monotonic() - begin, 2)
        return took

    async def post_images(self, request: web.Request) -> web.Response:
        wanted = parse(await request.read(), self._numbers)
        return web.Response(body=await self.image(wanted), content_type="image/png")

    async def post_warmup(self, request: web.Request) -> web.Response:
        return web.json_response({"seconds": await self.warm_up()})

    async def get_health(self, request: web.Request) -> web.Response:
        answer = {
            "status": "ok",
            "mesh": dict(zip(self._mesh.mesh_dim_names or (), self._mesh.shape, strict=True)),
            "device": self._mesh.device_type,
            "uptime": round(time.monotonic() - self._began, 2),
        }
        return web.json_response(answer)

    async def get_queue(self, request: web.Request) -> web.Response:
        now = {"waiting": len(self._waiting), "running": len(self._running)}
        return web.json_response({**now, **self._counts, "mean_seconds": self._mean_seconds})

    async def close(self) -> None:
        """Refuses what is not done; returns when no thread works on it any more."""
        self._is_closed = True
        for job in (*self._waiting, *self._running):
            job.stopped = True
            if not job.answer.done():
                job.answer.set_exception(web.HTTPServiceUnavailable(text=CLOSING))
        self._waiting.clear()
        await asyncio.gather(*self._running.values())
        self._thread.shutdown()

    def _begin(self) -> None:
        while self._waiting and len(self._running) < NUM_BEGUN:
            job = self._waiting.popleft()
            self._running[job] = asyncio.create_task(self._run(job))

    async def _run(self, job: Job) -> None:
        begin = time.monotonic()
        try:
            png = await self._png(job)
            if job.answer.done():
                raise Stopped
            job.answer.set_result(png)
            self._counts["done"] += 1
            # Of images that overlap, each counts from where the one before it was done.
            seconds = time.monotonic() - max(begin, self._last_end)
            self._mean_seconds += (seconds - self._mean_seconds) / self._counts["done"]
            self._last_end = time.monotonic()
        except Stopped:
            pass  # whoever stopped it has counted or answered it
        except Exception as error:
            if job.answer.done():
                log.exception("an image that nobody waits for failed")
            else:
                job.answer.set_exception(error)
                self._counts["failed"] += 1
        finally:
            del self._running[job]
            self._begin()

    async def _png(self, job: Job) -> bytes:
        call = asyncio.get_running_loop().run_in_executor(self._thread, self._call, job)
        try:
            image = await call
        except Stopped:
            for step in job.steps:  # its place is free when the devices are done with it
                await asyncio.to_thread((await step).cpu)
            raise
        pixels = await image.to_torch_async()
        return await asyncio.to_thread(self._encode, pixels)

    def _call(self, job: Job) -> dtorch.Tensor:
        """Queues an image onto the devices, on the pipeline's thread."""
        if job.stopped:
            raise Stopped
        return self._pipe(
            job.wanted.prompt,
            height=job.wanted.height,
            width=job.wanted.width,
            num_inference_steps=job.wanted.steps,
            generator=torch.Generator().manual_seed(job.wanted.seed),
            output_type="pt",
            callback_on_step_end=job.after_step,
        ).images

    def _encode(self, pixels: torch.Tensor) -> bytes:
        values = pixels.cpu().float().permute(0, 2, 3, 1).numpy()
        (image,) = self._pipe.image_processor.numpy_to_pil(values)
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()


def parse(body: bytes, numbers: Numbers) -> Wanted:
    """Returns what the body of a request asks for."""
    try:
        asked = json.loads(body)
        json.dumps(asked, ensure_ascii=False).encode()  # fails on half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise web.HTTPBadRequest(text=f"the body is not JSON: {error}.") from None
    if not isinstance(asked, dict):
        raise web.HTTPBadRequest(text='the body must be an object, as {"prompt": "A red cat"}.')
    return check(asked, numbers)


def check(asked: dict[str, Any], numbers: Numbers) -> Wanted:
    """Returns what the fields ask for; raises HTTPBadRequest with everything that is wrong."""
    asked = {"prompt": None, **{name: default for name, (default, _) in numbers.items()}, **asked}
    known = ("prompt", *numbers)
    wrong = [f"{n[:40]!r} is no field: {', '.join(known)} are." for n in asked if n not in known]
    prompt = asked["prompt"]
    if not isinstance(prompt, str) or not 1 <= len(prompt) <= MAX_PROMPT:
        given = f"{len(prompt)} characters" if isinstance(prompt, str) else json.dumps(prompt)[:40]
        wrong.append(f"prompt is {given}: a text of 1 to {MAX_PROMPT} characters is allowed.")
    for name, (_, allowed) in numbers.items():
        if type(asked[name]) is not int or asked[name] not in allowed:
            kind = "integers" if allowed.step == 1 else f"multiples of {allowed.step}"
            ends = f"from {allowed[0]} to {allowed[-1]}"
            wrong.append(f"{name} is {json.dumps(asked[name])[:40]}: {kind} {ends} are allowed.")
    if wrong:
        raise web.HTTPBadRequest(text=" ".join(wrong))
    return Wanted(**asked)


def sizes(text: str) -> Sizes:
    """Returns the sizes that "64x64,80x112" lists."""
    parts = (size.split("x") for size in text.split(","))
    return [dict(zip(("height", "width"), map(int, part), strict=True)) for part in parts]


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.RequestPayloadError as error:
        return web.json_response({"error": f"the body cannot be read: {error}"}, status=400)
    except web.HTTPException as error:
        kept = {k: error.headers[k] for k in ("Allow", "Retry-After") if k in error.headers}
        return web.json_response({"error": error.text}, status=error.status, headers=kept)
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)


def application(service: Service) -> web.Application:
    app = web.Application(middlewares=[errors_as_json], client_max_size=MAX_BODY)
    app.add_routes([web.post("/images", service.post_images)])
    app.add_routes([web.post("/warmup", service.post_warmup)])
    app.add_routes([web.get("/health", service.get_health), web.get("/queue", service.get_queue)])
    app.on_shutdown.append(lambda app: service.close())
    return app


async def serve(service: Service, args: argparse.Namespace) -> None:
    """Serves until a signal cancels it."""
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, this.cancel)
    runner = web.AppRunner(application(service), handler_cancellation=True, shutdown_timeout=5)
    await runner.setup()
    try:
        if args.warmup:
            print(f"warm-up, in seconds: {await service.warm_up()}", flush=True)
        try:
            await web.TCPSite(runner, args.host, args.port).start()
        except OSError as error:
            raise SystemExit(f"--host {args.host} --port {args.port}: {error}") from None
        host, port, *_ = runner.addresses[0]
        print(f"serving at http://{host}:{port}", flush=True)
        await loop.create_future()
    finally:
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves images of Stable Diffusion 3 over HTTP.")
    parser.add_argument("--model", help="a folder or hub name; a small random model if left out")
    parser.add_argument("--mesh", default="cfg=2,ulysses_cp=2,tp=2", help="axes and their sizes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--steps", type=int, help="by default: 4 for the small model, else 28")
    parser.add_argument("--sizes", type=sizes, default="64x64,80x112", help="for the warm-up")
    parser.add_argument("--warmup", action="store_true", help="warm up before serving")
    parser.add_argument("--max-queue", type=int, default=16, help="how many images may wait")
    args = parser.parse_args()
    if not 0 <= args.port < 2**16:
        parser.error(f"--port {args.port}: a number from 0 to 65535")
    if args.max_queue < 1:
        parser.error(f"--max-queue {args.max_queue}: at least 1")
    mesh = make_mesh(args.mesh, args.device)
    if args.model:
        dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        pipe: Any = StableDiffusion3Pipeline.from_pretrained(args.model, dtype=dtype)
    else:
        pipe = small_pipeline()
    steps = (28 if args.model else 4) if args.steps is None else args.steps
    pipe = diffusion.shard(pipe, mesh)
    try:
        service = Service(pipe, mesh, args.sizes, steps, args.max_queue)
    except web.HTTPBadRequest as error:
        parser.error(f"--sizes or --steps: {error.text}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(serve(service, args))


if __name__ == "__main__":
    main()
