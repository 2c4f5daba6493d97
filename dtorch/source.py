"""Which line of the user's code is running: the innermost frame outside of the libraries."""

from __future__ import annotations

import os
import sys
from types import CodeType

import optree
import torch

from .program import SourceLine

_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (__file__, torch.__file__ or "", optree.__file__ or "", os.__file__)
)
_is_library: dict[str, bool] = {}


Site = tuple[CodeType, int]
"""A line of a piece of code, which becomes text only where it is shown."""


def user_line() -> SourceLine | None:
    """Returns the innermost line that is not in dtorch, torch, optree or the standard library."""
    return line_at(user_site())


def user_site() -> Site | None:
    """Returns where `user_line` is."""
    frame = sys._getframe(2)  # the caller is of this package
    while frame is not None:
        code = frame.f_code
        if not _is_library.get(code.co_filename) and not is_library(code):
            return code, frame.f_lineno
        frame = frame.f_back
    return None


def line_at(site: Site | None) -> SourceLine | None:
    """Returns the line of a site."""
    return site and SourceLine(site[0].co_filename, site[1], site[0].co_name)


def is_library(code: CodeType) -> bool:
    """Returns whether code is in dtorch, torch, optree or the standard library."""
    file = code.co_filename
    hidden = _is_library.get(file)
    if hidden is None:
        hidden = _is_library[file] = _in_library(file)
    return hidden


def _in_library(file: str) -> bool:
    if file.startswith("<"):
        return file != "<stdin>" and not file.startswith("<ipython")
    inside = any(file.startswith(folder) for folder in _LIBRARIES)
    return inside and ("site-packages" not in file or _is_ours(file))


def _is_ours(file: str) -> bool:
    return any(file.startswith(folder) for folder in _LIBRARIES[:3])
