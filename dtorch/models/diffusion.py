"""Pipelines of Hugging Face's `diffusers` on a mesh, their models and their own code unmodified.

A pipeline is Python code around a few models. `shard` gives a pipeline of the same class with the
same tokenizers, scheduler and image processor, in which each model has its parameters on devices
and is called through `jit`. What it returns goes on through the pipeline's own code as a
distributed tensor, so the whole denoising loop is queued without waiting for a value.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch import nn

from ..errors import MeshError, PlacementError
from ..jit import jit
from ..mesh import DeviceMesh
from ..nn import functionalize
from ..parallel import ColumnParallel, RowParallel, assign_layers_to_stages, constrain
from ..parallel import shard as shard_tree
from ..parallel.plan import Annotation, Meshes, Plan
from ..placement import P, Replicate
from ..tensor import Tensor, place
from ..tree import flatten, map_leaves

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

    Returns:
        A pipeline of the same class, to be called as `diffusers` documents it. Its results are
        distributed tensors where its own code does not fetch them. Its models take part in no
        gradient, and have the settings (attention processors, tiling) that they had at this call.

    Communication: each device is given its own part of the parameters. At each call of a model its
        arguments are brought to its mesh, and what a text encoder or a transformer returns is
        gathered onto every device of the transformer's mesh. Between stages, the activations.

    Raises:
        TypeError: `pipe` is no pipeline of diffusers.
        MeshError: The mesh has an axis without a name, or with one that means nothing here (and
            neither `plan` nor `activations` is given).
        ValueError: The transformer's heads do not divide over the axes; the message says over how
            many they do. Or it has fewer layers than there are stages.
        PlacementError: As for `dtorch.parallel.shard`; or a pattern of `activations` matches no
            module.
    """
    models = _models(pipe)
    if plan is None and activations is None:
        _check_axes([mesh] if isinstance(mesh, DeviceMesh) else list(mesh.values()))
    mesh = _with_stages(models.get("transformer"), mesh)
    plan = plan_of(pipe, mesh) if plan is None else plan
    activations = activations_of(pipe) if activations is None else activations
    skeletons = {name: _skeleton(model) for name, model in models.items()}
    _mark(skeletons, activations)
    trees = {name: functionalize(model)[0] for name, model in models.items()}
    placed = shard_tree(trees, mesh, plan)
    main = next((n for n in ("transformer", "unet") if n in models), next(iter(models)))
    home = _first_mesh(placed[main])
    wrapped = {
        name: _Model(skeletons[name], placed[name], home, compile=compile) for name in models
    }
    return type(pipe)(**{**pipe.components, **wrapped})


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
    for name, model in _models(pipe).items():
        size = _size_of("tp", name, mesh)
        if name == "transformer":
            _check_heads(name, model, size, _size_of("ulysses_cp", name, mesh))
        heads = _num_heads(model)
        patterns = _FEATURES if heads is None or heads % size else {**_HEADS, **_FEATURES}
        leaves = [f".{n}" for n, _ in model.named_parameters()]
        for pattern, annotation in patterns.items():
            anchored = pattern if pattern.startswith("*") else f".{pattern}"
            if not isinstance(model, _autoencoder()) and fnmatch.filter(leaves, anchored):
                plan[f"{name}{anchored}"] = annotation
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


class _Model(nn.Module):
    """A model of a pipeline: called as that, computed on a mesh.

    What it is asked for beside calls (its configuration, its dtype) it has from a copy without
    data.
    """

    def __init__(
        self, skeleton: nn.Module, params: Mapping[str, Any], home: DeviceMesh, *, compile: bool
    ) -> None:
        super().__init__()
        self._skeleton = [skeleton]  # in a list, so that it is no submodule
        self._params = params
        self._function = functionalize(skeleton)[1]
        self._mesh = _first_mesh(params)
        self._home = None if isinstance(skeleton, _autoencoder()) else home
        self._programs = functools.cache(functools.partial(self._program, compile=compile))

    def _program(self, method: str, *, compile: bool) -> Callable[..., Any]:
        def run(params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = self._function.call(method, params, *args, **kwargs)
            return result if self._home is None else map_leaves(self._gathered, result)

        run.__name__ = f"{self._function.__name__}.{method}"
        return jit(run, compile=compile)

    def _gathered(self, leaf: Any) -> Any:
        home = self._home
        if not isinstance(leaf, Tensor) or home is None:
            return leaf
        return leaf.redistribute(home, [Replicate()] * home.ndim)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = map_leaves(self._brought, (args, kwargs))
        with torch.no_grad():
            return self._programs(method)(self._params, args, kwargs)

    def _brought(self, leaf: Any) -> Any:
        """A leaf on the mesh: a program for torch tensors is none for what they are replaced by."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not isinstance(leaf, Tensor):
            return place(leaf, self._mesh, (Replicate(),) * self._mesh.ndim)
        if leaf.device_mesh == self._mesh:
            return leaf
        return leaf.redistribute(self._mesh, [Replicate()] * self._mesh.ndim)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns."""
        return self._call("forward", args, kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the `encode` of an autoencoder returns."""
        return self._call("encode", args, kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the `decode` of an autoencoder returns."""
        return self._call("decode", args, kwargs)

    @property
    def device(self) -> torch.device:
        """The device of its tensors, as PyTorch sees it."""
        return self._mesh.torch_device()

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__.get("_skeleton")
        if found is None:
            raise AttributeError(name)
        return getattr(found[0], name)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: the parameters stay where they are."""
        raise RuntimeError(
            f"{self!r} cannot be moved or converted.\n"
            "  Fix: pipe.to(dtype) before dtorch.models.diffusion.shard(pipe, mesh)."
        )

    def __repr__(self) -> str:
        return f"{type(self._skeleton[0]).__name__} on {self._mesh!r}"


def _models(pipe: Any) -> dict[str, nn.Module]:
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    if not isinstance(pipe, DiffusionPipeline):
        raise TypeError(
            f"a pipeline of diffusers is needed, not {type(pipe).__name__}.\n"
            "  Fix: diffusers.StableDiffusion3Pipeline.from_pretrained(...), for example."
        )
    _register(DiagonalGaussianDistribution)
    return {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}


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


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy of a model without data."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


def _mark(skeletons: Mapping[str, nn.Module], activations: Mapping[str, P]) -> None:
    """Has modules lay out what they return."""
    modules = {
        f"{name}.{path}": part
        for name, model in skeletons.items()
        for path, part in model.named_modules()
    }

    def hook(annotation: P) -> Callable[..., Any]:
        return lambda module, args, result: constrain(result, annotation)

    for pattern, annotation in activations.items():
        found = fnmatch.filter(modules, pattern)
        if not found:
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.3)
            raise PlacementError(
                f"the pattern {pattern!r} of activations matches no module of the pipeline; the "
                f"nearest are {', '.join(near) or 'none'}.\n  Fix: correct or remove it."
            )
        for path in found:
            modules[path].register_forward_hook(hook(annotation))


def _with_stages(transformer: nn.Module | None, mesh: Meshes) -> Meshes:
    """Meshes by path pattern that spread the layers of a transformer over an axis ``pp``."""
    names = mesh.mesh_dim_names or () if isinstance(mesh, DeviceMesh) else ()
    if not isinstance(mesh, DeviceMesh) or "pp" not in names:
        return mesh
    meshes = mesh.unbind("pp")
    children = [] if transformer is None else transformer.named_children()
    lists = {name: part for name, part in children if isinstance(part, nn.ModuleList)}
    layers = [f"transformer.{name}.{i}.*" for name, part in lists.items() for i in range(len(part))]
    if len(layers) < len(meshes):
        raise ValueError(
            f"the transformer has {len(layers)} layers for {len(meshes)} stages.\n"
            f"  Fix: an axis pp of at most {len(layers)}."
        )
    homes = assign_layers_to_stages(len(layers), len(meshes))
    where = {layer: meshes[home] for layer, home in zip(layers, homes, strict=True)}
    after = dict.fromkeys(("transformer.norm_out.*", "transformer.proj_out.*"), meshes[-1])
    return {**where, **after, "vae.*": meshes[-1], "*": meshes[0]}


def _first_mesh(tree: Any) -> DeviceMesh:
    return next(leaf.device_mesh for leaf in flatten(tree)[0] if isinstance(leaf, Tensor))


def _check_axes(meshes: Sequence[DeviceMesh]) -> None:
    for mesh in meshes:
        names = mesh.mesh_dim_names
        if names is None or not set(names) <= set(AXES):
            raise MeshError(
                f"{mesh!r} has axes {'without names' if names is None else list(names)}, and "
                f"those that mean something to a pipeline are {', '.join(AXES)}.\n"
                "  Fix: name the axes so, or pass plan and activations."
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
