"""Loading a checkpoint onto four devices: the peak of the process's memory, and the time.

A checkpoint of about 1 GiB in four files, a Llama of `transformers`, is loaded in processes of its
own: by dtorch onto four devices that split it, and by `from_pretrained` of `transformers` onto the
one device that it knows, where each parameter is then read once, since it is the mapped file.
Memory is what the process grows by beyond the parameters themselves; "anonymous" is without the
mapped pages of the files, which the system can drop.
"""

import functools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .harness import Case, Options
from .timing import Measure

LIMIT = 1.3 * 10**9
"""How many bytes more than the parameters may be resident."""
RIVAL = "transformers"
FILES = 4


def cases(options: Options) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as folder:
        size = save(Path(folder), layers=1 if options.quick else 20)
        ours, theirs = (Loads(Path(folder), name, size, options) for name in ("dtorch", RIVAL))
        name = f"load {size / 2**30:.2f} GiB"
        for kind, unit in (("resident", "B"), ("anonymous", "B"), ("seconds", "s")):
            rivals = {} if options.quick else {RIVAL: theirs.measure(kind)}
            limit = LIMIT if kind == "resident" else None
            yield Case(f"{name}, {kind}", ours.measure(kind), rivals, {}, limit, unit, 0)


def save(folder: Path, layers: int) -> int:
    """Writes a Llama; returns how many bytes its parameters take."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 16384}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes, **heads))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // FILES + 2**26)
    return size


class Loads:
    """What loading takes, a process for each repetition."""

    def __init__(self, folder: Path, library: str, size: int, options: Options) -> None:
        self._command = [sys.executable, "-m", __name__, str(folder), library]
        self._size = size
        self._repetitions = options.repetitions

    def measure(self, kind: str) -> Measure:
        """Returns a measure of one kind."""
        found = self._kind(kind)
        return lambda: next(found)

    def _kind(self, kind: str) -> Iterator[float]:
        beyond = 0 if kind == "seconds" else self._size
        yield from (run[kind] - beyond for run in self._runs)

    @functools.cached_property
    def _runs(self) -> list[dict[str, float]]:
        return [self._run() for _ in range(self._repetitions)]

    def _run(self) -> dict[str, float]:
        root = Path(__file__).parents[1]
        done = subprocess.run(self._command, cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        return json.loads(done.stdout.splitlines()[-1])


def load_call(folder: Path, library: str) -> Callable[[], Any]:
    """Returns what loads the folder; what it imports is imported."""
    if library == RIVAL:
        from transformers import LlamaForCausalLM

        def theirs() -> Any:
            model = LlamaForCausalLM.from_pretrained(folder)
            for parameter in model.parameters():  # which are the mapped file until then
                parameter.detach().sum()
            return model

        return theirs
    import dtorch

    mesh = dtorch.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    dtorch.ones(4, device_mesh=mesh, placements=[dtorch.Shard(0)]).to_torch()
    import transformers.models.llama.modeling_llama  # noqa: F401

    return lambda: dtorch.models.from_pretrained(folder, mesh)


def status(name: str) -> int:
    """Returns a figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(text.split()[1]) * 1024 for text in lines if text.startswith(f"{name}:"))


def main(folder: str, library: str) -> None:
    call = load_call(Path(folder), library)
    before = {name: status(name) for name in ("VmRSS", "RssAnon")}
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    peak, done = before["RssAnon"], threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, status("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    resident = status("VmHWM") - before["VmRSS"]
    found = {"resident": resident, "anonymous": peak - before["RssAnon"], "seconds": seconds}
    print(json.dumps(found))
    del kept


if __name__ == "__main__":
    main(*sys.argv[1:])
