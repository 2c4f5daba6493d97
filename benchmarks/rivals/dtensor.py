"""PyTorch's DTensor over gloo: one process a device, each with its share of the cores.

Rank 0 answers the requests and has every rank run the same rounds; the slowest rank counts.
"""

import functools
import json
import multiprocessing
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from ..timing import Run, looped
from .server import serve

PLACEMENTS: dict[str, Placement] = {
    "S(0)": Shard(0), "S(1)": Shard(1), "R": Replicate(), "P": Partial(),
}  # fmt: skip


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def add(elements: int, operations: int) -> Run:
    x = distribute_tensor(torch.zeros(elements), mesh(), [Shard(0)])
    y = distribute_tensor(torch.ones(elements), mesh(), [Shard(0)])

    def chain() -> torch.Tensor:
        z: torch.Tensor = x
        for _ in range(operations):
            z = z + y
        return z

    return looped(chain, operations)


def redistribute(rows: int, columns: int, source: str, target: str) -> Run:
    value, layout = torch.randn(rows, columns), [PLACEMENTS[source]]
    if source == "P":
        x = DTensor.from_local(value, mesh(), layout)
    else:
        x = distribute_tensor(value, mesh(), layout)
    return looped(lambda: x.redistribute(mesh(), [PLACEMENTS[target]]).to_local())


def llama(size: str) -> Run:
    from torch.distributed.tensor.parallel import parallelize_module

    from ..models import llama as models

    model, ids = models.llama(models.SIZES[size]), models.token_ids(models.SIZES[size])
    expected = model(ids).logits
    parallelize_module(model, mesh(), _plan())
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-3, atol=1e-3)
    return looped(lambda: model(ids).logits)


def _plan() -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns += ("mlp.gate_proj", "mlp.up_proj")
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        **{f"model.layers.*.{name}": ColwiseParallel() for name in columns},
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }


@functools.cache
def run_of(name: str, options: str) -> Run:
    builders = {"add": add, "redistribute": redistribute, "llama": llama}
    return builders[name](**json.loads(options))


def together(name: str, options: str, rounds: int) -> float:
    """Runs the rounds, as every rank does at this moment; returns the slowest rank's time."""
    run = run_of(name, options)
    dist.barrier()
    seconds = torch.tensor(run(rounds), dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def lead(name: str, options: dict[str, Any]) -> Run:
    def run(rounds: int) -> float:
        wanted = name, json.dumps(options), rounds
        dist.broadcast_object_list([wanted])
        return together(*wanted)

    return run


def follow() -> None:
    message: list[Any] = [None]
    while True:
        dist.broadcast_object_list(message)
        if message[0] is None:
            break
        together(*message[0])


@torch.no_grad()
def work(rank: int, world: int, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, torch.get_num_threads() // world))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    if rank == 0:
        serve(lead)
        dist.broadcast_object_list([None])
    else:
        follow()
    dist.destroy_process_group()


def main() -> None:
    world = int(sys.argv[1])
    start = multiprocessing.get_context("spawn").Process
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        others = [start(target=work, args=(i, world, store), daemon=True) for i in range(1, world)]
        for process in others:
            process.start()
        work(0, world, store)
        for process in others:
            process.join()


if __name__ == "__main__":
    main()
