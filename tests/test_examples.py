"""Every example runs as a user would run it: with no argument, or with those of the README."""

import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from llama_combinations import load_example

pytestmark = pytest.mark.once
ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SECONDS = 110
MESHES = ["", "dp", "dp=", "dp=x", "dp:2", "dp=2,", "dp=2,dp=3", "dp=0", "dp=-1", "foo=2"]


def run(*arguments: str | Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_each_says_what_it_shows_and_how_to_run_it(example: Path) -> None:
    text = example.read_text()
    assert text.startswith('"""') and f"python examples/{example.name}" in text.split('"""')[1]
    assert len(text.splitlines()) < 350


def test_llama_with_its_own_model() -> None:
    pytest.importorskip("safetensors")
    out = run("examples/llama.py", "--max-new-tokens", "40")
    text, _, rest = out.partition("\n\n")
    assert len(text) > 20 and "tokens/s" in rest
    assert "DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))" in rest
    assert "Shard(dim=0)" in rest and "Shard(dim=1)" in rest


def test_llama_prints_the_same_text_on_every_mesh() -> None:
    pytest.importorskip("safetensors")
    texts = {
        run("examples/llama.py", "--max-new-tokens", "30", "--mesh", mesh).partition("\n\n")[0]
        for mesh in ("tp=1", "dp=2,tp=2")
    }
    assert len(texts) == 1


def test_llama_with_a_model_a_prompt_and_a_temperature(shared: Callable[[str], Path]) -> None:
    pytest.importorskip("safetensors")
    pytest.importorskip("tokenizers")
    folder = shared("models/stories260K")
    arguments = ["examples/llama.py", "--model", folder, "--mesh", "tp=2", "--max-new-tokens", "24"]
    begin = time.monotonic()
    out = run(*arguments, "--prompt", "Once upon a time", "--temperature", "0.8")
    assert out.startswith("Once upon a time") and time.monotonic() - begin < 60
    assert (
        run(*arguments, "--prompt", "Once upon a time", "--temperature", "0.8").split("\n\n")[0]
        == (out.split("\n\n")[0])
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        *((f"--mesh={mesh}", "is not as dp=2,tp=2, each one of pp, dp") for mesh in MESHES),
        *((f"--experts={n}", "two of them see each token") for n in (-1, 0, 1)),
        *((f"--temperature={t}", "at least 0 and finite") for t in ("-1", "nan", "inf")),
        ("--max-new-tokens=0", "at least 1"),
        (f"--prompt={'long ' * 1000}", "5001 tokens leave this model no room for more"),
        ("--model=/nowhere", "--model /nowhere: there is no config.json."),
    ],
)
def test_llama_says_what_is_wrong_with_an_argument(
    argument: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if argument.startswith("--prompt"):  # only then is the model read
        pytest.importorskip("safetensors")
    llama = load_example()
    monkeypatch.setattr(sys, "argv", ["llama.py", argument])
    with pytest.raises(SystemExit, match=r".") as found:
        llama.main()
    shown = capsys.readouterr().err if isinstance(found.value.code, int) else str(found.value)
    assert message in shown.splitlines()[-1]


def test_llama_takes_spaces_in_a_mesh() -> None:
    assert load_example().make_mesh(" tp = 2, dp=3 ", "cpu").shape == (3, 2)


def test_train_llama_starts(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    assert "usage" in run("examples/train_llama.py", "--help")


def test_sd3_makes_the_same_image_on_a_mesh(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    out = run("examples/sd3.py", "--out", tmp_path)
    assert "PyTorch and dtorch on one device: the images are the same, bit for bit" in out
    assert re.search(
        r"'cfg', 'ulysses_cp', 'tp'\)\): the images differ by at most \d\.\de-0[5-9]", out
    )
    for name in ("sd3-one-device.png", "sd3-mesh.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_sd3_reads_a_pipeline_from_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        importlib.import_module("sd3").small_pipeline().save_pretrained(tmp_path / "model")
    finally:
        sys.path.remove(str(ROOT / "examples"))
    arguments = ["--model", tmp_path / "model", "--mesh", "cfg=2,tp=2", "--steps", "2"]
    out = run("examples/sd3.py", *arguments, "--height", "48", "--width", "64", "--out", tmp_path)
    assert "mesh_dim_names=('cfg', 'tp')): returned after" in out
    assert (tmp_path / "sd3.png").read_bytes().startswith(b"\x89PNG")
