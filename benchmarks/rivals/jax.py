"""JAX on host devices of one process; needs jax and numpy alone.

Shapes: B batch, L tokens, D hidden, H heads, K key/value heads, E head size.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

DEVICES = int(sys.argv[1])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from ..timing import Run, burst, looped  # noqa: E402
from .server import serve  # noqa: E402

MESH = Mesh(np.array(jax.devices()), ("x",))
LAYOUTS = {"S(0)": ("x", None), "S(1)": (None, "x"), "R": ()}
Tree = Any


def sharding(*axes: str | None) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*axes))


def awaited(call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(call(*args))


# -- one operation -------------------------------------------------------------------------


def operands(elements: int) -> tuple[jax.Array, jax.Array]:
    values = jnp.zeros(elements), jnp.ones(elements)
    return jax.device_put(values, sharding("x"))


def add(elements: int, operations: int) -> Run:
    x, y = operands(elements)

    def chain() -> jax.Array:
        z = x
        for _ in range(operations):
            z = z + y
        return z

    return looped(awaited(chain), operations)


def call(elements: int) -> Run:
    x, y = operands(elements)
    jitted = jax.jit(lambda x, y: x + y)
    return burst(lambda: jitted(x, y), jax.block_until_ready)


# -- redistribution ------------------------------------------------------------------------


def redistribute(rows: int, columns: int, source: str, target: str) -> Run:
    """The fastest of JAX's ways counts, in each repetition."""
    shape = (rows, columns)
    if source == "P":
        ways = _reductions(shape, target)
    else:
        ways = _moves(shape, LAYOUTS[source], LAYOUTS[target])
    runs = [looped(way) for way in ways]
    return lambda rounds: min(run(rounds) for run in runs)


def _moves(shape: tuple[int, int], source: Any, target: Any) -> list[Callable[[], Any]]:
    x = jax.device_put(jnp.ones(shape), sharding(*source))
    jitted = jax.jit(lambda x: x, out_shardings=sharding(*target))
    return [awaited(jax.device_put, x, sharding(*target)), awaited(jitted, x)]


def _reductions(shape: tuple[int, int], target: str) -> list[Callable[[], Any]]:
    """Partial sums are one whole addend a device, stacked."""
    x = jax.device_put(jnp.ones((DEVICES, *shape)), sharding("x", None, None))
    summed = jax.jit(lambda x: x.sum(0), out_shardings=sharding(*LAYOUTS[target]))

    def reduce(x: jax.Array) -> jax.Array:
        if target == "R":
            return jax.lax.psum(x[0], "x")
        return jax.lax.psum_scatter(x[0], "x", scatter_dimension=0, tiled=True)

    specs = {"in_specs": PartitionSpec("x"), "out_specs": PartitionSpec(*LAYOUTS[target])}
    mapped = jax.jit(jax.shard_map(reduce, mesh=MESH, **specs))
    return [awaited(summed, x), awaited(mapped, x)]


# -- Llama ---------------------------------------------------------------------------------


def llama(weights: str, head_dim: int, *, eps: float, theta: float, busy: bool = False) -> Run:
    """The model of the weights, split over the devices; `busy`: only the client's time."""
    stored = np.load(weights)
    params, ids = _placed(stored), jax.device_put(stored["ids"].astype(np.int32), sharding())
    forward = jax.jit(_forward(head_dim, eps, theta), out_shardings=sharding())
    np.testing.assert_allclose(forward(params, ids), stored["logits"], rtol=1e-3, atol=1e-3)
    if busy:
        return burst(lambda: forward(params, ids), jax.block_until_ready)
    return looped(awaited(forward, params, ids))


def _placed(stored: Any) -> Tree:
    """The weights as a tree, each linear one transposed and split as tensor parallelism does."""
    tree: Tree = {}
    for name in stored.files:
        *path, last = name.removesuffix(".weight").split(".")
        value, layout = stored[name], ()
        if last.endswith("_proj") or last == "lm_head":
            value = np.ascontiguousarray(value.T)
            layout = ("x", None) if last in ("o_proj", "down_proj") else (None, "x")
        elif last == "embed_tokens":
            layout = ("x", None)
        parent = tree
        for part in path:
            parent = parent.setdefault(part, {})
        parent[last] = jax.device_put(value, sharding(*layout))
    return {"model": tree["model"], "lm_head": tree["lm_head"]}


def _forward(head_dim: int, eps: float, theta: float) -> Callable[[Tree, jax.Array], jax.Array]:
    def norm(weight: jax.Array, x: jax.Array) -> jax.Array:
        return weight * (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps))

    def rotate(x_BLHE: jax.Array) -> jax.Array:
        frequency = theta ** -(jnp.arange(0, head_dim, 2) / head_dim)
        angle = jnp.tile(jnp.arange(x_BLHE.shape[1])[:, None] * frequency, 2)[:, None]
        first, second = jnp.split(x_BLHE, 2, -1)
        return x_BLHE * jnp.cos(angle) + jnp.concatenate((-second, first), -1) * jnp.sin(angle)

    def attention(layer: Tree, x: jax.Array) -> jax.Array:
        q, k, v = (
            (x @ layer[f"{n}_proj"]).reshape(*x.shape[:2], -1, head_dim) for n in ("q", "k", "v")
        )
        out = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return out.reshape(*x.shape[:2], -1) @ layer["o_proj"]

    def mlp(layer: Tree, x: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ layer["gate_proj"]) * (x @ layer["up_proj"])) @ layer["down_proj"]

    def forward(params: Tree, ids: jax.Array) -> jax.Array:
        model = params["model"]
        x = model["embed_tokens"][ids]
        for i in map(str, range(len(model["layers"]))):
            layer = model["layers"][i]
            x = x + attention(layer["self_attn"], norm(layer["input_layernorm"], x))
            x = x + mlp(layer["mlp"], norm(layer["post_attention_layernorm"], x))
        return norm(model["norm"], x) @ params["lm_head"]

    return forward


BUILDERS = {"add": add, "call": call, "redistribute": redistribute, "llama": llama}

if __name__ == "__main__":
    serve(lambda name, options: BUILDERS[name](**options))
