"""Builds and loads the native executor: once for a torch, a Python and a version of the sources.

The library goes into the user's cache, ``$XDG_CACHE_HOME/dtorch`` or ``~/.cache/dtorch``.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import torch

_NAME = "dtorch_native"
_FOLDER = Path(__file__).parent


class BuildError(ImportError):
    """The native executor cannot be built here."""


@functools.cache
def load(again: bool = False) -> ModuleType:
    """Returns the native module, built if the cache does not have it.

    Args:
        again: Build it also where an earlier build failed.

    Blocking: while it is built, about a minute; one line on the standard error output says so.

    Raises:
        BuildError: There is no compiler, or it failed.
    """
    folder = _cache_folder()
    library = folder / f"{_NAME}.so"
    log = folder / "build.log"
    if log.exists() and not again:
        raise BuildError(f"an earlier build failed, see {log}; python -m dtorch.build tries again")
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "building", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may build it meanwhile
            if not library.exists():
                _build(folder)
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{library} cannot be loaded: {error}") from error
    return module


def _sources() -> list[Path]:
    return sorted(p for p in _FOLDER.iterdir() if p.suffix in (".cpp", ".h"))


def _cache_folder() -> Path:
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    return root / "dtorch" / f"torch-{torch.__version__}-py{version}-{digest.hexdigest()[:12]}"


def _build(folder: Path) -> None:
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise BuildError("there is no C++ compiler (c++, or $CXX)")
    # Imported late: it takes half a second, and is needed once.
    cpp_extension = importlib.import_module("torch.utils.cpp_extension")
    if not cpp_extension.is_ninja_available():
        raise BuildError("there is no ninja (pip install ninja)")
    print(
        f"dtorch: building the native executor for torch {torch.__version__}, once, in about a "
        "minute ...",
        end="",
        file=sys.stderr,
        flush=True,
    )
    begin = time.monotonic()
    work = folder / "work"
    (folder / "build.log").unlink(missing_ok=True)
    shutil.rmtree(work, ignore_errors=True)  # of a build that was interrupted
    work.mkdir()
    try:
        cpp_extension.load(
            _NAME,
            [str(p) for p in _sources() if p.suffix == ".cpp"],
            build_directory=str(work),
            extra_cflags=["-O2", "-fvisibility=hidden"],
            is_python_module=False,
            is_standalone=False,
        )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        (folder / "build.log").write_text(str(error))
        print(" failed", file=sys.stderr, flush=True)
        raise BuildError(f"the build failed, see {folder / 'build.log'}") from error
    os.replace(work / f"{_NAME}.so", folder / f"{_NAME}.so")
    shutil.rmtree(work, ignore_errors=True)
    print(f" {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
