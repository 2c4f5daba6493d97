"""A model of `transformers` from its folder onto a mesh, without ever being whole on the host."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..nn import Apply, functionalize
from ..parallel import Joined, load, plan_from_huggingface
from ..parallel.huggingface import model_class
from ..parallel.loading import check_dtype
from ..parallel.plan import Meshes, Plan

__all__ = ["empty_model", "from_pretrained"]


def from_pretrained(
    folder: str | Path,
    mesh: Meshes,
    plan: Plan | None = None,
    *,
    dtype: torch.dtype | None = None,
    model: Any = None,
    **settings: Any,
) -> tuple[Any, Apply]:
    """Returns the parameters of a Hugging Face model, laid out over a mesh, and its function.

    Each device's part is read from the files once; see `dtorch.parallel.load`.

    Args:
        folder: A local folder with config.json and safetensors files.
        mesh: The mesh; or meshes by path pattern, as of `stages_from_huggingface`.
        plan: A plan over the names of the parameters; that which the model carries, of
            `plan_from_huggingface`, if None.
        dtype: The dtype of the floating parameters; that of the checkpoint if None. Buffers keep
            theirs, and what the model's class keeps in float32 beside it is in float32.
        model: The model's class in `transformers`; that which config.json names if None.
        **settings: Changes to the configuration, `attn_implementation` and
            `experts_implementation` among them.

    Returns:
        The tree of parameters and buffers, and `apply(params, *args, **kwargs)`, as of
        `functionalize`. The module, in evaluation mode, is `apply.module`.

    Blocking: until everything is read.

    Raises:
        FileNotFoundError: The folder lacks config.json or the weights.
        CheckpointError: The checkpoint does not hold the model's parameters; all that do not fit
            are listed. Or it holds some in a form that only `transformers` can convert.
        TypeError: An argument is of another type.
        PlacementError: As for `dtorch.parallel.shard`.
        ValueError: As for `plan_from_huggingface`, if there is no `plan`. Or `dtype` is not
            floating.

    Source: `transformers.PreTrainedModel.from_pretrained`.
    """
    from transformers import AutoConfig, GenerationConfig

    check_dtype(dtype)
    if isinstance(model, str):
        raise TypeError(
            f"model is {model!r}, and must be a class.\n  Fix: model=transformers.{model}."
        )
    path = Path(folder)
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"{path} has no config.json.")
    config = AutoConfig.from_pretrained(path, **settings)
    module = empty_model(config, model)
    if (path / "generation_config.json").exists() and module.can_generate():
        module.generation_config = GenerationConfig.from_pretrained(path)
    params, apply = functionalize(module)
    plan = plan_from_huggingface(module) if plan is None else plan
    conversion = _Conversion(module, apply)
    loaded = load(
        path,
        mesh,
        plan,
        like=params,
        tied=apply.tied,
        rename=conversion.rename,
        join=conversion.join,
        dtype=functools.partial(_dtype_of, module, apply, dtype),
    )
    return loaded, apply


def _dtype_of(
    module: Any, apply: Apply, dtype: torch.dtype | None, name: str
) -> torch.dtype | None:
    """The dtype of a leaf, or None for that of the checkpoint."""
    plan: dict[str, torch.dtype] = module._get_dtype_plan(dtype or module.config.dtype)
    for pattern, kept in plan.items():
        if re.search(pattern.replace("*", ".*"), name):
            return kept
    return None if name in apply.buffers else dtype


def empty_model(config: Any, model: Any = None) -> Any:
    """Returns a model of `transformers` on the meta device, in evaluation mode.

    Only the buffers that no checkpoint holds (rotary frequencies, say) have values; those are
    computed by the model's own code.

    Args:
        config: The configuration.
        model: The model's class; that which the configuration names if None.

    Source: `PreTrainedModel._move_missing_keys_from_meta_to_device`, and what follows it.
    """
    with torch.device("meta"):
        module = (model or model_class(config))._from_config(config).eval()
    for tensor in (*module.parameters(), *module.buffers()):
        tensor._is_hf_initialized = True  # what `initialize_weights` leaves alone
    for name, buffer in list(module.named_non_persistent_buffers(remove_duplicate=False)):
        owner, _, own = name.rpartition(".")
        module.get_submodule(owner)._buffers[own] = torch.empty_like(buffer, device="cpu")
    for part in module.modules():
        part._is_hf_initialized = False
    module.initialize_weights()
    return module


class _Conversion:
    """How the names and tensors of a model's checkpoints become those of the model.

    `transformers` says it with `WeightRenaming`s and `WeightConverter`s; of the converters those
    are known here that put tensors together, as the experts of a layer.
    """

    def __init__(self, module: Any, apply: Apply) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        transforms = get_model_conversion_mapping(module)
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
        self._known = {*apply.leaves, *apply.tied}
        self._prefix = f"{module.base_model_prefix}."
        patterns = module._keys_to_ignore_on_load_unexpected or ()
        # Buffers that checkpoints used to hold, as `_adjust_missing_and_unexpected_keys` has it.
        old = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
        self._ignored = [re.compile(p) for p in (*patterns, *old)]

    def rename(self, name: str) -> str | None:
        """The name of a tensor in the model, or None for one that the model leaves out."""
        renamed = name
        for renaming in self._renamings:
            renamed = renaming.rename_source_key(renamed)[0]
        renamed = self._in_model(renamed)
        if renamed not in self._known and any(p.search(renamed) for p in self._ignored):
            return None
        return renamed

    def _in_model(self, name: str) -> str:
        """The name with or without the prefix of the base model, whichever the model has."""
        variants = (name, self._prefix + name, name.removeprefix(self._prefix))
        return next((v for v in variants if v in self._known), name)

    def join(self, names: Sequence[str]) -> dict[str, Joined]:
        """What is put together of several of the names."""
        groups: dict[str, tuple[Any, dict[str, list[str]]]] = {}
        for name in names:
            for converter in self._converters:
                target, pattern = converter.rename_source_key(name)
                if pattern is not None:
                    _, by_pattern = groups.setdefault(self._in_model(target), (converter, {}))
                    by_pattern.setdefault(pattern, []).append(name)
                    break
        return {
            target: _joined(converter, [by_pattern.get(p, []) for p in converter.source_patterns])
            for target, (converter, by_pattern) in groups.items()
        }


def _joined(converter: Any, names: Sequence[Sequence[str]]) -> Joined:
    """The join that a converter's operations amount to, on the names of each of its patterns."""
    kinds = [type(operation).__name__ for operation in converter.operations]
    dims: list[Any] = [getattr(operation, "dim", None) for operation in converter.operations]
    ordered = [sorted(found, key=_by_number) for found in names if found]
    if kinds == ["MergeModulelist"] and len(ordered) == 1:
        return Joined(tuple(ordered[0]), dims[0], is_new=True)
    if kinds == ["MergeModulelist", "Concatenate"]:
        stacks = tuple(Joined(tuple(found), dims[0], is_new=True) for found in ordered)
        return Joined(stacks, dims[1], is_new=False)
    if kinds == ["Concatenate"]:
        return Joined(tuple(n for found in ordered for n in found), dims[0], is_new=False)
    raise CheckpointError(
        f"the checkpoint holds {ordered[0][0]} in a form that dtorch cannot read: transformers "
        f"converts it by {', '.join(kinds)}.\n"
        "  Fix: load the model with transformers, and lay out the tree of functionalize with "
        "dtorch.parallel.shard."
    )


def _by_number(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
