"""The benchmarks run: small sizes, one repetition, no rival processes. Numbers are not judged."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from layouts import TIMES

ROOT = Path(__file__).parents[1]
SECONDS = 240
pytest.importorskip("transformers")


pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(TIMES < 1, reason="fewer layouts, and no benchmarks"),
    pytest.mark.timeout(SECONDS + 10),
]


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_every_family_runs() -> None:
    done = run("-m", "benchmarks", "--quick")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for family in ("adds", "attention", "training", "client", "llama", "redistribution", "memory"):
        assert f"### {family}" in done.stdout
    assert "### gpu" not in done.stdout
    assert "failed" not in done.stdout


def test_the_cases_of_gpus_run_on_the_cpu() -> None:
    pytest.importorskip("diffusers")
    done = run("-m", "benchmarks", "gpu", "--quick", "--device", "cpu")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "failed" not in done.stdout
    chains = ("add (1,)", "add (1, 1, 1024)", "attention (4, 4, 64, 32)")
    models = ("Llama", "Llama, decode step", "SD3 transformer", "CLIP-L", "CLIP-bigG", "T5")
    expected = {f"{name}, {mode}" for name in chains for mode in ("eager", "jit", "graph")}
    for name in models:
        expected |= {f"{name}, jit, {kind}" for kind in ("client", "latency", "peak")}
        expected.add(f"{name}, graph")
    assert expected <= {line.split(" | ")[0].strip("| ") for line in done.stdout.splitlines()}


def test_without_a_gpu_its_cases_are_refused() -> None:
    done = run("-m", "benchmarks", "gpu", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        "There is no GPU: torch.cuda.is_available() is False. "
        "Fix: --device cpu --quick sees whether the same cases run."
    )


FAKED = """
    import itertools
    from pathlib import Path
    import torch
    import dtorch
    from benchmarks import __main__, gpu, harness
    from benchmarks.rivals import Unavailable

    def jit(function, *, cuda_graph=False, **options):
        jitted = real_jit(function, **options)
        wrong = cuda_graph and getattr(function, "keywords", None) == {"length": 20}
        return (lambda *args: jitted(*args) + 2) if wrong else jitted

    class Setting(gpu.Setting):
        def __init__(self, options):
            super().__init__(options)
            self.on_gpu = True

    def attend(setting, shape):
        raise RuntimeError("a planted fault")

    real_jit, dtorch.jit = dtorch.jit, jit
    gpu.Setting, gpu.attend, gpu.ADD_SHAPES, gpu.TEXT_GIB = Setting, attend, ((1,),), {}
    peaks = itertools.count(1 << 20, 1 << 20)
    torch.cuda.max_memory_allocated = lambda device: next(peaks)
    torch.cuda.mem_get_info = lambda device: (8 << 30, 80 << 30)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        setattr(torch.cuda, name, lambda *args: None)
    torch._C._cuda_clearCublasWorkspaces = lambda: None
    print("good:", __main__.run_here(["gpu"], harness.Options(True, Path()), None))
    setting = Setting(harness.Options(False, Path()))
    try:
        setting.require(12)
    except Unavailable as reason:
        print(reason)
    print(torch.get_default_dtype())
"""


def test_cases_go_on_after_a_failure_and_see_the_memory_of_a_gpu() -> None:
    """With CUDA's functions faked, a fault planted, and a wrong result of a graph."""
    pytest.importorskip("diffusers")
    done = run("-c", textwrap.dedent(FAKED))
    assert done.returncode == 0, done.stderr[-3000:]
    table = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    rows = {cells[0].strip("| "): [cell.strip("| ") for cell in cells[1:]] for cells in table}
    failed = [name for name, cells in rows.items() if cells[0].startswith("failed")]
    assert failed == [
        "add (1,), graph, torch.equal",
        *(f"attention {s}: the next case" for s in ("(4, 4, 64, 32)", "(4, 8, 128, 64)")),
    ]
    assert "not torch.equal; the largest difference is 2." in done.stderr
    assert "a planted fault" in done.stderr
    for name in ("Llama", "Llama, decode step", "SD3 transformer"):
        for mode in ("jit", "graph"):
            ours, _, theirs, ratio = rows[f"{name}, {mode}, peak"][:4]
            assert ours.split()[1] == theirs.split()[1] == "MiB"
            assert float(ratio) > 1  # PyTorch's is measured first, and the fake counts up
            assert rows[f"{name}, {mode}, client"][3] and rows[f"{name}, {mode}, latency"][3]
    assert done.stdout.splitlines()[-3:] == [
        "good: False",
        "takes 12 GiB; 8 of 80 GiB are free",
        "torch.float32",
    ]
