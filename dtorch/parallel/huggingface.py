"""Plans and stages from what the configurations of Hugging Face's `transformers` say of a model.

A configuration names styles of parallelism for modules (`base_model_tp_plan`, `_ep_plan`,
`_pp_plan`). In `transformers` a style stands for two things: how a parameter is split, and hooks
that move the activations. Here only the first is needed, since dtorch derives the second from the
layouts; so a style becomes the annotation of a parameter, or nothing.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import nn
from ..mesh import DeviceMesh
from ..placement import P
from ..tensor import Tensor
from .plan import Annotation, ColumnParallel, RowParallel
from .schedules import assign_layers_to_stages

__all__ = ["plan_from_huggingface", "stages_from_huggingface"]

# How a style splits a parameter; "whole" are the styles that only move activations or gradients.
_COLUMN = {"colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"}
_COLUMN |= {"local_colwise", "local_packed_colwise"}
_ROW = {"rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"}
_ROW |= {"local_rowwise", "local_packed_rowwise"}
_FIRST_DIM = {"embedding_rowwise", "vocab_parallel_rowwise"}
_LAST_DIM = {"embedding_colwise"}
_EXPERT = {"grouped_gemm"}
_WHOLE = {
    "all_reduce",
    "ep_dispatch_experts",
    "ep_router",
    "gather",
    "local",
    "local_params",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "moe_tp_experts",
    "replicate",
    "replicated_with_grad_allreduce",
    "sequence_parallel",
}
_STYLES = _COLUMN | _ROW | _FIRST_DIM | _LAST_DIM | _EXPERT | _WHOLE


def plan_from_huggingface(
    model: Any, *, axis: str = "tp", expert_axis: str = "ep"
) -> dict[str, Annotation]:
    """Returns the plan that a `transformers` model carries, as a plan for `shard` and `load`.

    Args:
        model: A `PreTrainedModel`, which may be on the meta device, or a `PreTrainedConfig`. Of a
            configuration the model is its first architecture, or else the causal language
            model, or else the base model, of its type.
        axis: The mesh axis of the tensor plan.
        expert_axis: The mesh axis of the expert plan, which splits the experts' weights by
            expert. A weight that both plans split is split over both axes; those that a mesh
            lacks are ignored, so the plan serves a mesh with either or both.

    Returns:
        Annotations by patterns over the tree of `dtorch.nn.functionalize(model)`. Each pattern
        matches the leaves that the style is meant for and no others. Tied weights are one leaf,
        with the style of the first of its names that has one.

    From then on the models' grouped experts (`experts_implementation="grouped_mm"`) run as
    `dtorch.nn.experts` where they are given distributed tensors, and as before where they are not.

    Communication: that of a style's hooks in `transformers` is derived from the layouts. Of a
        weight that packs two (`packed_colwise`: gate over up), each device holds a contiguous
        part, as of any other, rather than a part of both; the value is the same, and where
        the model takes the two apart the activation is communicated.

    Raises:
        TypeError: `model` is neither a model nor a configuration.
        ValueError: It carries neither a tensor nor an expert plan, or a plan has a style that is
            not known; the message names the configuration's class.

    Source: `transformers.distributed.tensor_parallel`, `expert_parallel`.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2)
        >>> plan_from_huggingface(config)["model.layers.*.self_attn.q_proj.weight"]
        ColumnParallel(axis='tp')
    """
    model = _as_model(model)
    _give_experts()
    tensor: dict[str, str] = model.tp_plan or {}
    expert: dict[str, str] = model.ep_plan or {}
    if not tensor and not expert:
        raise ValueError(
            f"{type(model.config).__name__} carries no tensor or expert plan.\n"
            "  Fix: write a plan by hand, patterns over the names of the parameters to P, "
            'ColumnParallel or RowParallel: {"*.fc1.*": ColumnParallel("tp"), ...}.'
        )
    _check_styles(model, {**tensor, **expert})
    styles: dict[str, tuple[str | None, str | None]] = {}
    ndims: dict[str, int] = {}
    for leaf, names, ndim in _leaves(model):
        found = [(_style(model, n, tensor), _style(model, n, expert)) for n in names]
        styles[leaf] = next((s for s in found if s != (None, None)), (None, None))
        ndims[leaf] = ndim
    annotations = {
        name: annotation
        for name, (by_tensor, by_expert) in styles.items()
        if (annotation := _annotation(name, ndims[name], by_tensor, by_expert, axis, expert_axis))
    }
    return _by_pattern(annotations, list(styles))


def stages_from_huggingface(model: Any, meshes: Sequence[DeviceMesh]) -> dict[str, DeviceMesh]:
    """Returns which mesh each parameter of a `transformers` model lies on, by its pipeline plan.

    The layers of the model are divided evenly among the stages, in their order; what comes before
    them lies on the first stage, what comes after them on the last, and parameters that the plan
    does not name (rotary frequencies) on the first.

    Args:
        model: As for `plan_from_huggingface`.
        meshes: The stages' meshes, in order: ``mesh.unbind("pp")``.

    Returns:
        Meshes by patterns over the tree of `dtorch.nn.functionalize(model)`, for the `mesh` of
        `shard` and `load`.

    Communication: where a layer lies on another stage than the one before it, its input is sent
        there.

    Raises:
        TypeError: As for `plan_from_huggingface`.
        ValueError: The model carries no pipeline plan, or has fewer layers than there are stages.

    Source: `base_model_pp_plan` of `transformers`' configurations.
    """
    model = _as_model(model)
    order = _pipeline_order(model)
    layers = [(name, i) for name in order for i in range(_length(model, name))]
    if not layers or len(layers) < len(meshes):
        raise ValueError(
            f"{type(model.config).__name__}: {len(layers)} layers in its pipeline plan "
            f"({', '.join(order) or 'it carries none'}) for {len(meshes)} stages."
        )
    first_list = next(i for i, name in enumerate(order) if _length(model, name))
    around = {
        f"{name}.*": meshes[0 if i < first_list else -1]
        for i, name in enumerate(order)
        if not _length(model, name)
    }
    homes = assign_layers_to_stages(len(layers), len(meshes))
    each = {f"{name}.{i}.*": meshes[home] for (name, i), home in zip(layers, homes, strict=True)}
    return {**each, **around, "*": meshes[0]}


def _as_model(model: Any) -> Any:
    from transformers import PreTrainedConfig, PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return model
    if not isinstance(model, PreTrainedConfig):
        raise TypeError(
            f"a transformers model or configuration is needed, not {type(model).__name__}."
        )
    with torch.device("meta"):
        return model_class(model)._from_config(model)


def model_class(config: Any) -> Any:
    """Returns the class of the model that a configuration is for."""
    import transformers
    from transformers.models.auto import modeling_auto

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for mapping in (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(f"transformers has no model for {type(config).__name__}.")


_ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "ReLU": "relu"}


@functools.cache
def _give_experts() -> None:
    """Lets the grouped experts of `transformers` compute distributed tensors as `nn.experts`."""
    from transformers.integrations import moe

    theirs = moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    @functools.wraps(theirs)
    def grouped_mm_experts_forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: Any, top_k_weights: Any
    ) -> torch.Tensor:
        activation = _ACTIVATIONS.get(type(getattr(self, "act_fn", None)).__name__)
        if not isinstance(hidden_states, Tensor) or activation is None or not _is_plain(self):
            return theirs(self, hidden_states, top_k_index, top_k_weights)
        params = {"gate_up_proj": self.gate_up_proj, "down_proj": self.down_proj}
        operands = (hidden_states, top_k_index, top_k_weights)
        return nn.experts(params, *operands, activation=activation)

    moe.ALL_EXPERTS_FUNCTIONS.register("grouped_mm", grouped_mm_experts_forward)


def _is_plain(experts: Any) -> bool:
    """Whether experts are gate over up, an activation of the gate, and down, without biases."""
    from transformers.integrations import moe

    is_gated = experts.has_gate and experts.is_concatenated
    more = experts.has_bias or experts.is_transposed or experts.has_post_expert_norm
    gate = type(experts)._apply_gate  # theirs, unless the model has its own
    return is_gated and not more and gate is moe._default_apply_gate


def _check_styles(model: Any, plan: Mapping[str, str]) -> None:
    unknown = [f"  {key}: {style!r}" for key, style in plan.items() if style not in _STYLES]
    if unknown:
        raise ValueError(
            f"the plan of {type(model.config).__name__} has styles that dtorch does not know:\n"
            + "\n".join(unknown)
            + f"\n  known: {', '.join(sorted(_STYLES))}\n  Fix: write a plan by hand."
        )


def _leaves(model: torch.nn.Module) -> list[tuple[str, list[str], int]]:
    """Each distinct parameter: its first name, all its names, and its number of dims."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [(found[0], found, tensors[key].ndim) for key, found in names.items()]


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _style(model: torch.nn.Module, name: str, plan: Mapping[str, str]) -> str | None:
    """The style of a parameter: that of its own name, or of the module that holds it."""
    generic = _generic(name)
    module = generic.rpartition(".")[0]
    style = plan.get(generic, plan.get(module))
    holder = model.get_submodule(name.rpartition(".")[0])
    if style in _ROW and isinstance(holder, torch.nn.Embedding):
        return "embedding_rowwise"  # as older plans call it
    return style


def _annotation(
    name: str, ndim: int, by_tensor: str | None, by_expert: str | None, axis: str, expert_axis: str
) -> Annotation | None:
    splits_experts = by_expert in _EXPERT
    style = by_tensor if splits_experts or by_tensor is not None else by_expert
    dim = _split_dim(name, ndim, style)
    if not splits_experts:
        if ndim <= 2 and style in _COLUMN:
            return ColumnParallel(axis)
        if ndim == 2 and style in _ROW:
            return RowParallel(axis)
        return None if dim is None else P(*[None] * dim, axis)
    if dim is None or dim == 0:
        return P((expert_axis, axis) if dim == 0 else expert_axis)
    return P(expert_axis, *[None] * (dim - 1), axis)


def _split_dim(name: str, ndim: int, style: str | None) -> int | None:
    """The dim that a style splits over the axis of the tensor plan."""
    if style in _COLUMN:
        return max(ndim - 2, 0)
    if style in _ROW:
        return None if ndim == 1 or name.rpartition(".")[2] == "bias" else ndim - 1
    if style in _FIRST_DIM:
        return 0
    return ndim - 1 if style in _LAST_DIM else None


def _by_pattern(annotations: Mapping[str, Annotation], names: Sequence[str]) -> dict[str, Any]:
    """The annotations by pattern where a pattern means the same leaves, else leaf by leaf.

    (`*` of `fnmatch` matches dots as well, that of `transformers` a layer's number alone.)
    """
    plan: dict[str, Annotation] = {}
    for name, annotation in annotations.items():
        pattern = _generic(name)
        if pattern in plan and plan[pattern] == annotation:
            continue
        matched = fnmatch.filter(names, pattern)
        same = all(_generic(n) == pattern and annotations.get(n) == annotation for n in matched)
        plan[pattern if same else name] = annotation
    return plan


def _pipeline_order(model: Any) -> list[str]:
    """The modules of the pipeline plan in the order of the computation: the head is last."""
    own = type(model)._pp_plan or {}
    return [name for name in model.pp_plan or {} if name not in own] + list(own)


def _length(model: torch.nn.Module, name: str) -> int:
    module = model.get_submodule(name)
    return len(module) if isinstance(module, torch.nn.ModuleList) else 0
