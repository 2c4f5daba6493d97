"""Every public name of torch is dtorch's too, and can be discovered."""

import types

import pytest
import torch

import dtorch

OWN = {"Tensor", "jit", "manual_seed", "nn", "random"}


def public(module: types.ModuleType) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")]


def test_every_public_name_of_torch_is_there() -> None:
    missing = [n for n in public(torch) if not hasattr(dtorch, n)]
    hidden = set(public(torch)) - set(dir(dtorch))
    assert (missing, hidden) == ([], set())


def test_a_name_is_torchs_unless_dtorch_has_its_own() -> None:
    """No module of dtorch stands in the place of a function or a module of torch."""
    others = {n for n in public(torch) if getattr(dtorch, n) is not getattr(torch, n)}
    factories = {
        n for n in others if getattr(getattr(dtorch, n), "__module__", "") == "dtorch.factories"
    }
    assert others - factories == OWN


@pytest.mark.parametrize("path", ["linalg", "fft", "special", "nn.functional"])
def test_the_modules_of_functions_are_whole(path: str) -> None:
    own, torchs = dtorch, torch
    for part in path.split("."):
        own, torchs = getattr(own, part), getattr(torchs, part)
    assert set(public(torchs)) <= set(dir(own))
    for name in public(torchs):
        assert getattr(own, name) is getattr(torchs, name)


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="'dtorch' has no attribute 'sofmax'"):
        dtorch.sofmax  # noqa: B018
    with pytest.raises(AttributeError, match=r"'dtorch\.nn\.functional' has no attribute 'sofmax'"):
        dtorch.nn.functional.sofmax  # noqa: B018
