"""`python tests/llama_combinations.py`: the example's greedy text on every mesh of its axes.

For every combination and prompt it compares the ids with the published ones, and looks for
operations that are replicated for want of a rule, for caches that move, and for devices that hold
more than their share. ``--sample 40`` takes that many combinations; ``--tokens 255`` compares the
whole text; ``--more`` adds the axes fsdp, zigzag_cp and sp.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import optree
import torch

import dtorch
from dtorch.program import Program, verify

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "llama.py"
MODEL = Path("/work/shared/models/stories260K")
SIZES: dict[str, Sequence[int]] = {
    "pp": (1, 2, 5),
    "dp": (1, 2, 4),
    "ring_cp": (1, 2),
    "ulysses_cp": (1, 2),
    "tp": (1, 2, 4),
}
MORE: dict[str, Sequence[int]] = {"fsdp": (1, 2), "zigzag_cp": (1, 2), "sp": (1, 2)}
MAX_DEVICES = 16
NUM_KV_HEADS = 4
PROMPTS = (1, 7, 200)


def load_example() -> ModuleType:
    """Returns the example as a module."""
    spec = importlib.util.spec_from_file_location("llama_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def combinations(sizes: Mapping[str, Sequence[int]]) -> list[str]:
    """Returns all meshes of some axes that are not too large, as the example takes them.

    More devices than key/value heads would leave some without a part of the cache.
    """
    found = []
    for chosen in itertools.product(*sizes.values()):
        axes = dict(zip(sizes, chosen, strict=True))
        if math.prod(chosen) <= MAX_DEVICES and axes.get("sp", 1) * axes["tp"] <= NUM_KV_HEADS:
            found.append(",".join(f"{name}={n}" for name, n in axes.items() if n > 1) or "dp=1")
    return found


def drawn(meshes: Sequence[str], count: int) -> list[str]:
    """Returns a sample of some meshes, always the same one."""
    return random.Random(0).sample(list(meshes), min(count, len(meshes)))


def greedy(
    llama: ModuleType, folder: Path, text: str, length: int, num_tokens: int
) -> tuple[list[list[int]], list[int]]:
    """Returns the ids that follow a prompt, of each text of the batch, and the published ones.

    Raises:
        AssertionError: The programs or what the devices hold is not as it is to be.
    """
    mesh = llama.make_mesh(text, "cpu")
    config, params = llama.load(folder, mesh)
    published = json.loads((folder / "expected_greedy.json").read_text())["greedy_ids"]
    num_tokens = min(num_tokens, len(published) - length)
    num_texts = math.prod(mesh.size(a) for a in llama.BATCH if a in (mesh.mesh_dim_names or ()))
    prompt = torch.tensor([published[:length]] * num_texts)
    # Slots for the whole of the sequence, in equal parts for all devices that it can be split over.
    num_slots = -(-(length + num_tokens) // 8) * 8
    start, step = llama.steps(config, 0.0)
    ids, position, cache, key = llama.inputs(config, mesh, prompt, num_slots, torch.float32)
    check_shares(params, ("fsdp", *llama.MODEL))
    check_shares(cache, (*llama.BATCH, *llama.SEQUENCE, *llama.MODEL))
    programs = [start.program(params, ids, position, cache, key)]
    ids, position, cache = start(params, ids, position, cache, key)
    found = [ids]
    for number in range(num_tokens - 1):
        if not number:
            programs.append(step.program(params, ids, position, cache, key))
        ids, position, cache = step(params, ids, position, cache, key)
        found.append(ids)
    for program in programs:
        check_program(program, num_slots)
    return torch.cat([i.to_torch() for i in found], 1).tolist(), published[length:][:num_tokens]


def check_program(program: Program, num_slots: int) -> None:
    """Everything has a rule, and no cache moves."""
    verify(program)
    assert program.fallbacks() == []
    for instruction in program.communication():
        shape = program.specs[instruction.input].shape
        assert len(shape) < 4 or shape[2] != num_slots, f"a cache moves: {instruction}"


def check_shares(tree: Any, axes: Sequence[str]) -> None:
    """Each device holds its part of what is on its stage, within a tenth."""
    total: dict[dtorch.DeviceMesh, int] = {}
    held: dict[dtorch.DeviceMesh, dict[Any, int]] = {}
    for leaf in optree.tree_leaves(tree):
        mesh = leaf.device_mesh
        total[mesh] = total.get(mesh, 0) + leaf.numel() * leaf.element_size()
        for device, part in leaf.local_shards().items():
            of_stage = held.setdefault(mesh, {})
            of_stage[device] = of_stage.get(device, 0) + part.numel() * part.element_size()
    for mesh, everything in total.items():
        names = mesh.mesh_dim_names or ()
        share = everything / math.prod(mesh.size(a) for a in axes if a in names)
        for device, count in held[mesh].items():
            assert abs(count - share) <= share / 10, f"{device}: {count} bytes, its share {share}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares the example's text on all meshes.")
    parser.add_argument("--sample", type=int, help="how many combinations; all without it")
    parser.add_argument("--tokens", type=int, default=8, help="how many to compare")
    parser.add_argument("--more", action="store_true", help="with fsdp, zigzag_cp and sp")
    args = parser.parse_args()
    llama, meshes = load_example(), combinations(SIZES | MORE if args.more else SIZES)
    chosen = drawn(meshes, args.sample) if args.sample else meshes
    failures = 0
    for number, (mesh, length) in enumerate(itertools.product(chosen, PROMPTS), 1):
        begin = time.perf_counter()
        try:
            found, published = greedy(llama, MODEL, mesh, length, args.tokens)
            what = "equal" if all(ids == published for ids in found) else f"DIFFERENT {found}"
        except Exception as error:
            what = f"FAILED {type(error).__name__}: {error}"
        failures += what != "equal"
        seconds = time.perf_counter() - begin
        print(
            f"{number}/{len(chosen) * len(PROMPTS)} {mesh} prompt {length}: {what} {seconds:.1f} s",
            flush=True,
        )
    print(f"{len(chosen)} meshes, {len(PROMPTS)} prompts: {failures} not equal")
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
