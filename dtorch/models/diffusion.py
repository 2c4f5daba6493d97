"""Pipelines of Hugging Face's `diffusers` on a mesh, their models and their own code unmodified.

A pipeline is Python code around a few models. `shard` gives a copy of a pipeline in which each
model has its parameters on devices and is called through `jit`; all else of it is the pipeline's
own. What a model returns goes on through the pipeline's code as a distributed tensor, so the whole
denoising loop is queued without waiting for a value.

The names of the mesh's axes say what they do:

- ``cfg``: the two halves of the batch under classifier-free guidance;
- ``dp``: the batch;
- ``ulysses_cp``, ``ring_cp``: the sequence of image tokens, by these kinds of attention; the rows
  of the image in the autoencoder;
- ``tp``: heads and features;
- ``pp``: the layers of the transformer.

It needs `diffusers` and the extra `models`; nothing is imported from there before it is used.
"""

from __future__ import annotations

import copy
import difflib
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.utils._pytree as torch_pytree
from torch import nn

from ..errors import MeshError, PlacementError
from ..mesh import DeviceMesh
from ..nn import functionalize
from ..parallel import ColumnParallel, RowParallel, assign_layers_to_stages, constrain
from ..parallel import shard as shard_tree
from ..parallel.plan import Annotation, Meshes, Plan
from ..placement import P, PartitionSpec
from ..tensor import Tensor
from ..tree import flatten
from .placed import PlacedModule, check_own_forward, skeleton_of

__all__ = ["activations_of", "plan_of", "shard"]

BATCH = ("cfg", "dp")
SEQUENCE = ("ring_cp", "ulysses_cp")
AXES = (*BATCH, *SEQUENCE, "tp", "pp")

_COLUMN, _ROW = ColumnParallel("tp"), RowParallel("tp")
# Of the models of SD3 and Flux: CLIP, T5 and the transformers. What needs whole heads is apart.
_HEADS: dict[str, Annotation] = {
    **dict.fromkeys(("*.to_[qkv].*", "*.add_[qkv]_proj.*", "*.[qkv]_proj.*"), _COLUMN),
    **dict.fromkeys(("*.SelfAttention.[qkv].*",), _COLUMN),
    **dict.fromkeys(("*.to_out.0.*", "*.to_add_out.*", "*.out_proj.*"), _ROW),
    "*.SelfAttention.o.*": _ROW,
    "*.relative_attention_bias.*": P(None, "tp"),
}
_FEATURES: dict[str, Annotation] = {
    **dict.fromkeys(("*.net.0.proj.*", "*.proj_mlp.*", "*.fc1.*", "*.wi*.*"), _COLUMN),
    **dict.fromkeys(("*.net.2.*", "*.fc2.*", "*.wo.*"), _ROW),
    "single_transformer_blocks.*.proj_out.*": _ROW,
    **dict.fromkeys(("*.norm*.linear.*", "norm_out.linear.*", "context_embedder.*"), _COLUMN),
    "*_embedder.linear_1.*": _COLUMN,
    "*_embedder.linear_2.*": _ROW,
    **dict.fromkeys(("*token_embedding.*", "shared.*"), P("tp")),
}
# What all blocks are modulated by is whole before they take it apart.
_MODULATED = dict.fromkeys(
    ("context_embedder", "time_text_embed", "*.norm*.linear", "norm_out.linear", "proj_out"),
    P(BATCH),
)
_ACTIVATIONS: dict[str, dict[str, P]] = {
    "SD3Transformer2DModel": {"pos_embed": P(BATCH, SEQUENCE), **_MODULATED},
    "FluxTransformer2DModel": {"x_embedder": P(BATCH, SEQUENCE), **_MODULATED},
    "AutoencoderKL": {
        "encoder.conv_in": P("dp", None, ("cfg", *SEQUENCE, "tp")),
        "decoder.conv_in": P("dp", None, ("cfg", *SEQUENCE, "tp")),
    },
}


def shard(
    pipe: Any,
    mesh: Meshes,
    plan: Plan | None = None,
    *,
    activations: Mapping[str, P] | None = None,
    compile: bool = False,
    cuda_graph: bool = False,
) -> Any:
    """Returns a pipeline of `diffusers` whose models run on a mesh.

    Args:
        pipe: A `DiffusionPipeline`, such as `StableDiffusion3Pipeline` or `FluxPipeline`. It stays
            as it is; delete it to free its parameters.
        mesh: The mesh; or meshes by path pattern, so that models live on different devices:
            ``{"vae.*": first, "*": second}``. Paths begin with the name that a model has in the
            pipeline. Along an axis ``pp`` of a mesh, the layers of the transformer are divided
            evenly, in their order; the text encoders lie on the first stage, with what comes before
            the layers, and the autoencoder on the last.
        plan: Annotations of the parameters by path pattern; those of `plan_of` if None.
        activations: Annotations of what modules return, by path pattern; those of
            `activations_of` if None.
        compile: As of `jit`.
        cuda_graph: As of `jit`.

    Returns:
        A pipeline of the same class with the same settings, to be called as `diffusers` documents
        it, whose models are `dtorch.models.placed.PlacedModule`. Its results are distributed
        tensors where its own code does not fetch them. Its models take part in no gradient.
        Settings of theirs (attention processors, tiling, scales) may be changed at any time; a call
        after that traces again. Weights (LoRA, IP-adapter, textual inversion) are loaded before.

    Communication: each device is given its own part of the parameters. At each call of a model its
        arguments are brought to its mesh, and what a text encoder or a transformer returns is
        gathered onto every device of the transformer's mesh. Between stages, the activations.

    Raises:
        TypeError: `pipe` is no pipeline of diffusers, or has been through this already; `mesh` or
            an annotation of `activations` is something else.
        MeshError: The mesh has an axis without a name, or with one that means nothing here; or
            one that would split nothing, since `plan_of` and `activations_of` do not know the
            model. None of it where `plan` or `activations` is given.
        ValueError: The pipeline has no models, or one of them has no data, or the forward of a
            part has been replaced (`PlacedModule` cannot follow that). The transformer's heads do
            not divide over the axes; the message says over how many they do. Or it has fewer
            layers than there are stages.
        PlacementError: As for `dtorch.parallel.shard`; or a pattern of `activations` matches no
            module.
    """
    models = _models(pipe)
    meshes = _meshes_of(mesh)
    for name, model in models.items():
        check_own_forward(name, model, ValueError)
    staged = _with_stages(models, mesh)
    if plan is None and activations is None:
        _check_axes(meshes)
        _check_known(models, staged)
    plan = plan_of(pipe, staged) if plan is None else plan
    activations = activations_of(pipe) if activations is None else activations
    skeletons = {name: skeleton_of(model) for name, model in models.items()}
    _mark(skeletons, activations)
    trees = {name: functionalize(model)[0] for name, model in models.items()}
    placed = shard_tree(trees, staged, plan)
    home = _first_mesh(placed[_main(models)])
    made = copy.copy(pipe)
    in_place: dict[int, PlacedModule] = {}
    for name, skeleton in skeletons.items():
        gathers = None if isinstance(skeleton, _autoencoder()) else home
        model = PlacedModule(
            skeleton, placed[name], gathers, compile=compile, cuda_graph=cuda_graph
        )
        in_place[id(models[name])] = model
    for name, component in pipe.components.items():
        if _is_module(component):
            # Past `setattr`, by which a pipeline would note another class in its configuration.
            vars(made)[name] = in_place[id(component)]
    return made


def plan_of(pipe: Any, mesh: Meshes) -> dict[str, Annotation]:
    """Returns the plan that `shard` lays a pipeline's parameters out by.

    Linear layers of transformers and text encoders are split over ``tp`` as Megatron-LM splits
    them, and so are the modulations; those of an attention whose heads do not divide are not. The
    autoencoder is replicated.

    Args:
        pipe: The pipeline.
        mesh: As for `shard`.

    Returns:
        Annotations by patterns over the paths of all parameters, to be changed and passed on.

    Raises:
        TypeError: As for `shard`.
        ValueError: As for `shard`.
    """
    plan: dict[str, Annotation] = {}
    _meshes_of(mesh)
    for name, model in _models(pipe).items():
        size = _size_of("tp", name, mesh)
        if name == "transformer":
            _check_heads(name, model, size, _size_of("ulysses_cp", name, mesh))
        plan |= _patterns(name, model, size)
    return plan


def activations_of(pipe: Any) -> dict[str, P]:
    """Returns the layouts that `shard` gives activations: what modules return, by path pattern.

    For the transformers of SD3 and Flux: the batch is split over ``cfg`` and ``dp``, and the
    image's tokens over ``ring_cp`` and ``ulysses_cp``. For `AutoencoderKL`: the rows of the image
    over all axes but ``dp``.
    """
    return {
        f"{name}.{path}": annotation
        for name, model in _models(pipe).items()
        for path, annotation in _ACTIVATIONS.get(type(model).__name__, {}).items()
    }


def _models(pipe: Any) -> dict[str, nn.Module]:
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    if not isinstance(pipe, DiffusionPipeline):
        raise TypeError(
            f"a pipeline of diffusers is needed, not {type(pipe).__name__}.\n"
            "  Fix: diffusers.StableDiffusion3Pipeline.from_pretrained(...), for example."
        )
    _register(DiagonalGaussianDistribution)
    found = {id(m): (n, m) for n, m in reversed(pipe.components.items()) if _is_module(m)}
    models = dict(reversed(found.values()))  # each once, by its first name
    kind = type(pipe).__name__
    if not models:
        raise ValueError(f"this {kind} has no models, only {', '.join(pipe.components)}.")
    placed = [name for name, model in models.items() if type(model) is PlacedModule]
    if placed:
        raise TypeError(
            f"models of this {kind} are on meshes already: {', '.join(placed)}.\n"
            "  Fix: shard the pipeline that it was made of."
        )
    empty = [n for n, m in models.items() if any(p.is_meta for p in m.parameters())]
    if empty:
        raise ValueError(
            f"models of this {kind} have no data, they are on the meta device: {', '.join(empty)}."
            "\n  Fix: from_pretrained, without a device_map."
        )
    return models


def _patterns(name: str, model: nn.Module, size: int) -> dict[str, Annotation]:
    """The patterns for the parameters of a model, over so many devices of the axis ``tp``."""
    if isinstance(model, _autoencoder()):
        return {}
    heads = _num_heads(model)
    patterns = _FEATURES if heads is None or heads % size else {**_HEADS, **_FEATURES}
    leaves = [f".{n}" for n, _ in model.named_parameters()]
    anchored = {p if p.startswith("*") else f".{p}": a for p, a in patterns.items()}
    return {f"{name}{p}": a for p, a in anchored.items() if fnmatch.filter(leaves, p)}


def _is_module(component: Any) -> bool:
    return isinstance(component, nn.Module)


def _main(models: Mapping[str, nn.Module]) -> str:
    """The model that makes the image."""
    return next((n for n in ("transformer", "unet") if n in models), next(iter(models)))


@functools.cache
def _register(kind: type) -> None:
    """Lets a distribution of an autoencoder be the result of a program."""
    torch_pytree.register_pytree_node(
        kind,
        lambda made: ([made.parameters], made.deterministic),
        lambda leaves, deterministic: kind(*leaves, deterministic),
    )


def _autoencoder() -> type:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    return AutoencoderKL


def _mark(skeletons: Mapping[str, nn.Module], activations: Mapping[str, P]) -> None:
    """Has modules lay out what they return."""
    modules = {
        f"{name}.{path}": part
        for name, model in skeletons.items()
        for path, part in model.named_modules()
    }

    def hook(path: str, pattern: str, annotation: P) -> Callable[..., Any]:
        def lay_out(module: nn.Module, args: Any, result: Any) -> Any:
            try:
                return constrain(result, annotation)
            except PlacementError as error:
                message = f"activations[{pattern!r}], for what {path} returns: {error}"
                raise PlacementError(message) from error

        return lay_out

    for pattern, annotation in activations.items():
        if not isinstance(annotation, PartitionSpec):
            raise TypeError(
                f"activations[{pattern!r}] is {annotation!r}.\n"
                "  Fix: dtorch.P with the axes of each dim, such as P('dp', 'ring_cp')."
            )
        found = fnmatch.filter(modules, pattern)
        if not found:
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.3)
            raise PlacementError(
                f"the pattern {pattern!r} of activations matches no module of the pipeline; the "
                f"nearest are {', '.join(near) or 'none'}.\n  Fix: correct or remove it."
            )
        for path in found:
            modules[path].register_forward_hook(hook(path, pattern, annotation))


def _with_stages(models: Mapping[str, nn.Module], mesh: Meshes) -> Meshes:
    """Meshes by path pattern that spread the layers of transformers over an axis ``pp``."""
    if not isinstance(mesh, DeviceMesh):
        if any("pp" in (m.mesh_dim_names or ()) for m in mesh.values()):
            raise MeshError(
                "layers are not divided over the axis pp of a mesh that is given by a pattern.\n"
                "  Fix: pass one mesh, or the meshes of its stages, mesh.unbind('pp'), by pattern."
            )
        return mesh
    if "pp" not in (mesh.mesh_dim_names or ()):
        return mesh
    meshes = mesh.unbind("pp")
    where: dict[str, DeviceMesh] = {}
    for name in [n for n in models if n.startswith("transformer")] or [_main(models)]:
        parts = models[name].named_children()
        lists = {part: found for part, found in parts if isinstance(found, nn.ModuleList)}
        layers = [
            f"{name}.{part}.{i}.*" for part, found in lists.items() for i in range(len(found))
        ]
        if not name.startswith("transformer") and len(meshes) > 1:
            raise MeshError(
                f"the {name} of this pipeline, a {type(models[name]).__name__}, is no row of "
                "layers that an axis pp could divide.\n  Fix: a mesh without the axis pp."
            )
        if len(layers) < len(meshes):
            raise ValueError(
                f"the {name} has {len(layers)} layers for {len(meshes)} stages.\n"
                f"  Fix: an axis pp of at most {max(1, len(layers))}."
            )
        homes = assign_layers_to_stages(len(layers), len(meshes))
        where |= {layer: meshes[home] for layer, home in zip(layers, homes, strict=True)}
        where |= dict.fromkeys((f"{name}.norm_out.*", f"{name}.proj_out.*"), meshes[-1])
    return {**where, "vae.*": meshes[-1], "*": meshes[0]}


def _first_mesh(tree: Any) -> DeviceMesh:
    return next(leaf.device_mesh for leaf in flatten(tree)[0] if isinstance(leaf, Tensor))


def _meshes_of(mesh: Any) -> list[DeviceMesh]:
    found = list(mesh.values()) if isinstance(mesh, Mapping) else [mesh]
    if not found or not all(isinstance(m, DeviceMesh) for m in found):
        raise TypeError(
            f"mesh is {mesh!r}.\n  Fix: a DeviceMesh, such as dtorch.init_device_mesh('cpu', (2,), "
            "mesh_dim_names=('tp',)), or a dict of them by path pattern."
        )
    return found


def _check_axes(meshes: Iterable[DeviceMesh]) -> None:
    for mesh in meshes:
        names = mesh.mesh_dim_names
        if names is None or not set(names) <= set(AXES):
            raise MeshError(
                f"{mesh!r} has axes {'without names' if names is None else list(names)}, and "
                f"those that mean something to a pipeline are {', '.join(AXES)}.\n"
                "  Fix: name the axes so, or pass plan and activations."
            )


def _check_known(models: Mapping[str, nn.Module], mesh: Meshes) -> None:
    """Raises where axes would split nothing of the model that makes the image."""
    name = _main(models)
    kind = type(models[name]).__name__
    idle = [
        axis
        for axis in (*BATCH, *SEQUENCE, "tp")
        if _size_of(axis, name, mesh) > 1
        and (kind not in _ACTIVATIONS if axis != "tp" else not _patterns(name, models[name], 1))
    ]
    if idle:
        known = ", ".join(_ACTIVATIONS)
        raise MeshError(
            f"the mesh's {', '.join(idle)} would split nothing of {name}, a {kind}: the layouts "
            f"that dtorch knows are those of {known}.\n"
            "  Fix: leave those axes out, or pass plan and activations, such as "
            f"activations={{'{name}.conv_in': P(('cfg', 'dp'))}}."
        )


def _size_of(axis: str, name: str, mesh: Meshes) -> int:
    """The devices along an axis of the mesh of a model."""
    meshes = {"*": mesh} if isinstance(mesh, DeviceMesh) else mesh
    of_model = (m for p, m in meshes.items() if fnmatch.fnmatchcase(f"{name}.", p))
    of_part = (m for p, m in meshes.items() if p.startswith(f"{name}."))
    sizes = [
        m.shape[m.mesh_dim_names.index(axis)]
        for m in (*of_model, *of_part)
        if m.mesh_dim_names is not None and axis in m.mesh_dim_names
    ]
    return next(iter(sizes), 1)


def _num_heads(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_heads"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    return None


def _check_heads(name: str, model: nn.Module, tp: int, ulysses: int) -> None:
    heads = _num_heads(model)
    if heads is None or heads % (tp * ulysses) == 0:
        return
    fitting = [n for n in range(1, heads + 1) if heads % n == 0]
    raise ValueError(
        f"the {heads} heads of {name} do not divide over tp={tp} times ulysses_cp={ulysses}.\n"
        f"  Fix: axes whose product is one of {', '.join(map(str, fitting))}; ring_cp may have "
        "any size."
    )
