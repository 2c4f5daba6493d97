"""The Llama of examples/llama.py, with the weights of another model, on a mesh."""

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import optree
import torch
from safetensors.torch import save_file
from torch import Tensor

import dtorch

from .models.llama import Size, llama, token_ids

Tree = Any


def example() -> ModuleType:
    """Returns examples/llama.py as a module."""
    path = Path(__file__).parents[1] / "examples" / "llama.py"
    spec = importlib.util.spec_from_file_location("llama_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LLAMA = example()


def tensor_parallel(size: int) -> dtorch.DeviceMesh:
    """Returns the mesh of the example with one text."""
    return dtorch.init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))


@dataclasses.dataclass(frozen=True)
class Saved:
    """A model in a Hugging Face folder, as the example reads it."""

    folder: Path

    @property
    def config(self) -> Tree:
        return LLAMA.read_config(self.folder)

    def params(self, mesh: dtorch.DeviceMesh) -> Tree:
        tied = self.config["tie_word_embeddings"]
        plan = LLAMA.PLAN if tied else LLAMA.PLAN | LLAMA.HEAD_PLAN
        return dtorch.parallel.load(self.folder, mesh, plan)

    def plain(self) -> Tree:
        """Returns the parameters as torch tensors, for the same functions in PyTorch."""
        tree = self.params(dtorch.DeviceMesh("cpu", [[0]], ("dp", "tp")))
        return optree.tree_map(lambda t: t.to_torch(), tree)


def save(size: Size, folder: Path) -> Saved:
    """Writes a model with random weights, and for JAX the same as weights.npz with the logits."""
    model, ids = llama(size), token_ids(size)
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors")
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    numpy.savez(folder / "weights.npz", ids=ids.numpy(), logits=model(ids).logits.numpy(), **arrays)
    return Saved(folder)


def placed(value: Tensor, mesh: dtorch.DeviceMesh) -> dtorch.Tensor:
    """Returns a value with a copy on each device."""
    return dtorch.Tensor(value, device_mesh=mesh)


def state(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields a module's parameters and buffers by name."""
    yield from ((name, value.detach()) for name, value in module.named_parameters())
    yield from module.named_buffers()
