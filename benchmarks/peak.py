"""`python -m benchmarks.peak SUBJECT LIBRARY ROUNDS`: runs a subject and reports its peaks.

PyTorch's CPU allocator reports every allocation, of every thread, on standard error, with the
bytes that are then in use. A mark begins each round; the parameters are in place by then, and count
but for a subject whose name ends in ``activations``, which has been called once before.
"""

import contextlib
import ctypes
import gc
import json
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ACTIVATIONS = ", activations"
MARK = "--- from here ---"
CHAIN_SHAPE = (2048, 2048)
RING_SHAPE = (16384, 32)
Call = Callable[[], Any]


def report_allocations() -> None:
    """Has libc10 log what it allocates (PyTorch has no Python name for these two flags)."""
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(c10, "FLAGS_caffe2_report_cpu_memory_usage").value = True
    ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level").value = 0


def chain() -> torch.Tensor:
    """Keeps a, b and c until it returns. So does a client of dtorch, but it returns first."""
    a = torch.rand(CHAIN_SHAPE)
    b = torch.sin(a)
    c = torch.sin(b)
    d = torch.sin(c)
    return d


def chain_call(library: str, *, jitted: bool) -> Call:
    if library == "torch":
        return chain
    import dtorch

    mesh = dtorch.DeviceMesh("cpu", [0])

    def ours() -> torch.Tensor:
        a = dtorch.rand(CHAIN_SHAPE, device_mesh=mesh)
        b = torch.sin(a)
        c = torch.sin(b)
        d = torch.sin(c)
        return d

    run = dtorch.jit(ours) if jitted else ours

    def call() -> torch.Tensor:
        result = run()
        dtorch.synchronize()
        return result

    return call


def model_call(
    library: str, module: torch.nn.Module, args: tuple[torch.Tensor, ...], fetch: bool
) -> Call:
    """Returns a forward of a module, which moves to dtorch one parameter at a time."""
    if library == "torch":
        return torch.inference_mode()(lambda: module(*args, return_dict=False)[0])
    import dtorch

    from .example import state

    mesh = dtorch.DeviceMesh("cpu", [0])
    params = {name: dtorch.Tensor(value, device_mesh=mesh) for name, value in state(module)}
    module.to("meta")

    @dtorch.jit
    def forward(params: Any, *args: torch.Tensor) -> Any:
        keywords = {"return_dict": False}
        return torch.func.functional_call(module, dict(params), args, keywords)[0]

    placed = [dtorch.Tensor(x, device_mesh=mesh) for x in args]

    def call() -> Any:
        result = forward(params, *placed)
        dtorch.synchronize()
        return result.to_torch() if fetch else result

    return call


def ring_call(*, gathers: bool) -> Call:
    """Returns attention over a sequence split over 8 devices: a ring, or keys on every device."""
    import dtorch
    from dtorch import Replicate, Shard

    mesh = dtorch.init_device_mesh("cpu", (8,), mesh_dim_names=("ring_cp",))
    qkv = torch.randn(3, 1, 1, *RING_SHAPE).unbind()
    placed = [dtorch.tensor(x, device_mesh=mesh, placements=[Shard(2)]) for x in qkv]

    @dtorch.jit
    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv
        if gathers:
            k, v = (x.redistribute(placements=[Replicate()]) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def call() -> torch.Tensor:
        result = attend(*placed)
        dtorch.synchronize()
        return result

    return call


def split_call(size: str, num_devices: int) -> Call:
    """Returns a forward of the transformer of SD3 with the tokens of its image split."""
    from diffusers.pipelines.stable_diffusion_3 import pipeline_stable_diffusion_3 as of_sd3

    import dtorch
    from dtorch.models import diffusion

    from .models import sd3

    others = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    others = (*others, "text_encoder_3", "tokenizer_3", "scheduler")
    pipe = of_sd3.StableDiffusion3Pipeline(sd3.transformer(size), **dict.fromkeys(others))
    mesh = dtorch.init_device_mesh("cpu", (num_devices,), mesh_dim_names=("ulysses_cp",))
    transformer, args = diffusion.shard(pipe, mesh).transformer, sd3.inputs(size)

    def call() -> torch.Tensor:
        result = transformer(*args, return_dict=False)[0]
        dtorch.synchronize()
        return result

    return call


def subject_call(subject: str, library: str) -> Call:
    if subject.startswith("chain"):
        return chain_call(library, jitted=subject.endswith("jit"))
    if subject.endswith(ACTIVATIONS):
        size, num_devices = re.findall(r"(\w+), (\d+) devices", subject)[0]
        return split_call(size, int(num_devices))
    if subject.startswith("ring"):
        return ring_call(gathers=subject.endswith("gathered"))
    fetch = subject.endswith("fetched")
    if subject.startswith("llama"):
        from .models import llama

        size = llama.SIZES["small"]
        return model_call(library, llama.llama(size), (llama.token_ids(size),), fetch)
    from .models import sd3

    size = subject.partition(", ")[2]
    return model_call(library, sd3.transformer(size), sd3.inputs(size), fetch)


def release() -> None:
    """Gives back to the system what loading has left."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # in glibc
        ctypes.CDLL(None).malloc_trim(0)


def resident_peak(call: Call) -> int:
    """Runs a call; returns the largest resident set, in bytes, since it began."""
    with contextlib.suppress(OSError):  # on Linux; elsewhere since the process began
        Path("/proc/self/clear_refs").write_text("5")
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(subject: str, library: str, rounds: str) -> None:
    parameters_count = not subject.endswith(ACTIVATIONS)
    if parameters_count:
        report_allocations()
    call = subject_call(subject, library)
    if not parameters_count:
        call()  # what is constant is computed once and kept
        report_allocations()
    release()
    resident = []
    for _ in range(int(rounds)):
        print(MARK, file=sys.stderr, flush=True)
        resident.append(resident_peak(call))
    print(json.dumps(resident))


if __name__ == "__main__":
    main(*sys.argv[1:])
