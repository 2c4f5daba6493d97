"""`examples/llama.py` on the trained stories260K: the published text on every mesh, in parallel."""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import optree
import pytest
import torch
from layouts import sample, sampled
from llama_combinations import MORE, PROMPTS, SIZES, combinations, drawn, greedy, load_example

import dtorch
from dtorch.lowering import LocalCall, LocalShow, LocalStep, lower
from dtorch.program import Apply, Program
from dtorch.redistribution import Collective

pytest.importorskip("safetensors")
NUM_TOKENS = 255


@pytest.fixture(scope="module")
def llama() -> ModuleType:
    return load_example()


@pytest.fixture
def folder(shared: Callable[[str], Path]) -> Path:
    return shared("models/stories260K")


def mesh_of(dp: int, tp: int) -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


MESHES = [
    *drawn(combinations(SIZES), sampled(40)),
    *drawn([m for m in combinations(SIZES | MORE) if any(a in m for a in MORE)], sampled(8)),
]


@pytest.mark.parametrize(
    ("mesh", "length"), list(zip(MESHES, itertools.cycle(PROMPTS), strict=False))
)
def test_the_greedy_ids_on_a_mesh_of_any_axes(
    llama: ModuleType, folder: Path, mesh: str, length: int
) -> None:
    found, published = greedy(llama, folder, mesh, length, num_tokens=6)
    assert found == [published] * len(found)


@pytest.mark.parametrize(
    ("dp", "tp"), sample([(d, t) for d in (1, 2) for t in (1, 2, 3, 4, 8)], 10, 0)
)
def test_the_greedy_story(llama: ModuleType, folder: Path, dp: int, tp: int) -> None:
    expected = json.loads((folder / "expected_greedy.json").read_text())
    expected = expected["prompt_ids"] + expected["greedy_ids"][len(expected["prompt_ids"]) :]
    mesh = mesh_of(dp, tp)
    config, params = llama.load(folder, mesh)
    prompt = torch.full((dp, 1), config["bos_token_id"])
    tokens: Iterator[Any] = llama.generate(config, params, mesh, prompt, NUM_TOKENS, 0.0)
    found = [[config["bos_token_id"]] for _ in range(dp)]
    for ids in tokens:
        for text, (token,) in zip(found, ids.tolist(), strict=True):
            text.append(token)
    assert len(expected) == 1 + NUM_TOKENS
    assert found == [expected] * dp


def decode_program(llama: ModuleType, folder: Path, mesh: dtorch.DeviceMesh) -> tuple[Any, Program]:
    config, params = llama.load(folder, mesh)
    cache = {i: llama.nn.cache_init(1, config["num_key_value_heads"], 64, config["head_dim"])
             for i in params["model"]["layers"]}  # fmt: skip
    inputs = {
        "ids": torch.ones(1, 1, dtype=torch.int64),
        "position": torch.tensor([5]),
        "cache": cache,
    }
    plan = {k: v for k, v in llama.INPUT_PLAN.items() if k.split(".")[0] in inputs}
    placed = dtorch.parallel.shard(inputs, mesh, plan)

    def step(params: Any, ids: Any, position: Any, cache: Any) -> Any:
        return llama.decode(config, params, ids, position, cache)

    jitted = dtorch.jit(step)
    return config, jitted.program(params, placed["ids"], placed["position"], placed["cache"])


@pytest.mark.parametrize("tp", [2, 4])
def test_a_decode_step_is_truly_parallel(llama: ModuleType, folder: Path, tp: int) -> None:
    config, program = decode_program(llama, folder, mesh_of(1, tp))
    assert program.fallbacks() == []
    kinds = [i.step.kind for i in program.communication()]
    # One after the embedding, whose vocabulary is split; the logits are gathered.
    assert kinds.count(Collective.ALL_REDUCE) == 2 * config["num_hidden_layers"] + 1
    rest = [k for k in kinds if k is not Collective.ALL_REDUCE]
    assert len(rest) <= 1 and set(rest) <= {Collective.ALL_GATHER}
    products = [
        i for i in program.instructions
        if isinstance(i, Apply) and any(n in str(i.op) for n in ("linear", "mm", "matmul"))
    ]  # fmt: skip
    assert len(products) >= 7 * config["num_hidden_layers"]
    for product in products:
        weights = [program.specs[v] for v in product.inputs()]
        assert any(not s.is_replicated for s in weights), product


@pytest.mark.parametrize("tp", [2, 4])
def test_each_device_holds_its_share(llama: ModuleType, folder: Path, tp: int) -> None:
    mesh = mesh_of(1, tp)
    _, params = llama.load(folder, mesh)
    leaves = optree.tree_leaves(params)
    total = sum(t.numel() * t.element_size() for t in leaves)
    held = dict.fromkeys(range(tp), 0)
    for leaf in leaves:
        for device, part in leaf.local_shards().items():
            held[device] += part.numel() * part.element_size()
    for count in held.values():
        assert count <= 1.1 * total / tp
    assert math.isclose(max(held.values()), min(held.values()), rel_tol=0.1)


def test_one_device_is_pytorch_bit_for_bit(llama: ModuleType, folder: Path) -> None:
    """The whole forward, the prefill and a decode step are those on torch tensors."""
    config, params = llama.load(folder, dtorch.DeviceMesh("cpu", [[0]], ("dp", "tp")))
    plain = optree.tree_map(lambda t: t.to_torch(), params)
    ids = torch.tensor([[1, 403, 407, 261, 378]])
    sizes = 1, config["num_key_value_heads"], 16, config["head_dim"]
    caches = [{i: llama.nn.cache_init(*sizes) for i in plain["model"]["layers"]} for _ in range(2)]
    mesh = dtorch.DeviceMesh("cpu", [[0]], ("dp", "tp"))
    caches[1] = dtorch.parallel.shard(caches[1], mesh)
    with torch.inference_mode():
        expected = llama.forward(config, plain, ids)
        first, cache = llama.prefill(config, plain, ids, caches[0])
        second, _ = llama.decode(config, plain, ids[:, :1], torch.tensor([5]), cache)
    jitted = [
        dtorch.jit(f, static_argnums=0)
        for f in (forward_of(llama), prefill_of(llama), decode_of(llama))
    ]
    key = Frozen(config)
    assert torch.equal(jitted[0](key, params, ids).to_torch(), expected)
    found, cache = jitted[1](key, params, ids, caches[1])
    assert torch.equal(found.to_torch(), first)
    found, _ = jitted[2](key, params, ids[:, :1], torch.tensor([5]), cache)
    assert torch.equal(found.to_torch(), second)


class Frozen:
    """A configuration that can be a static argument."""

    def __init__(self, config: Any) -> None:
        self.config = config


def forward_of(llama: ModuleType) -> Callable[..., Any]:
    return lambda c, *args: llama.forward(c.config, *args)


def prefill_of(llama: ModuleType) -> Callable[..., Any]:
    return lambda c, *args: llama.prefill(c.config, *args)


def decode_of(llama: ModuleType) -> Callable[..., Any]:
    return lambda c, *args: llama.decode(c.config, *args)


def test_axes_that_a_mesh_lacks_are_ignored_by_the_plan(llama: ModuleType, folder: Path) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    _, params = llama.load(folder, mesh)
    assert all(t.placements == [dtorch.Replicate()] for t in optree.tree_leaves(params))


def prefill_program(
    llama: ModuleType, folder: Path, text: str, length: int
) -> tuple[Any, Any, Program]:
    mesh = llama.make_mesh(text, "cpu")
    config, params = llama.load(folder, mesh)
    prompt = torch.ones(mesh.size(), length, dtype=torch.int64)
    given = llama.inputs(config, mesh, prompt, 2 * length, torch.float32)
    return config, params, llama.steps(config, 0.0)[0].program(params, *given)


def test_sequence_parallelism_reduces_no_whole_activation(llama: ModuleType, folder: Path) -> None:
    config, _, program = prefill_program(llama, folder, "sp=4", 16)
    steps = [i.step for i in program.communication()]
    activations = [s.kind for s in steps if s.target.shape == (4, 16, config["hidden_size"])]
    count = 2 * config["num_hidden_layers"]
    # The embedding is reduced to the parts of the devices; the last token is taken from one.
    assert activations.count(Collective.REDUCE_SCATTER) == count + 1
    assert activations.count(Collective.ALL_GATHER) == count
    assert Collective.ALL_REDUCE not in activations


def test_a_layer_is_gathered_when_it_is_used_and_freed_after(
    llama: ModuleType, folder: Path
) -> None:
    config, params, program = prefill_program(llama, folder, "fsdp=2", 7)
    layer = optree.tree_leaves(params["model"]["layers"]["0"])
    local, names = lower(program), set(program.inputs)
    live: dict[int, int] = {}
    peak = num_gathered = 0
    for instruction in local.instructions:
        if isinstance(instruction, LocalStep) and instruction.input in names:
            spec = program.specs[instruction.output]
            if spec.is_replicated and spec.dtype == torch.float32:
                live[instruction.output] = spec.num_local_bytes
                num_gathered += 1
        peak = max(peak, sum(live.values()))
        for slot in instruction.frees:
            live.pop(slot, None)
    assert num_gathered == len(layer) * config["num_hidden_layers"] + 1
    assert peak == sum(t.numel() * t.element_size() for t in layer) and not live


def test_what_is_gathered_is_shown_before_anything_is_computed(
    llama: ModuleType, folder: Path
) -> None:
    *_, program = prefill_program(llama, folder, "fsdp=2", 7)
    local = lower(program).instructions
    shown = [
        n for n, i in enumerate(local) if isinstance(i, LocalShow) and i.input in program.inputs
    ]
    computed = [n for n, i in enumerate(local) if isinstance(i, LocalCall)]
    assert len(shown) > 40 and max(shown) < min(computed)


def test_an_axis_that_the_example_does_not_know_is_named(llama: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"dp=2,cp=2' is not as .*, each one of pp, dp, fsdp, ep"):
        llama.make_mesh("dp=2,cp=2", "cpu")


def with_experts(llama: ModuleType, params: Any) -> Any:
    """A model with experts that differ from each other."""
    params = llama.upcycled(params, 4)
    generator = torch.Generator().manual_seed(0)

    def changed(path: tuple[str, ...], leaf: Any) -> Any:
        if "experts" not in path:
            return leaf
        noise = torch.randn(leaf.shape, generator=generator) * leaf.to_torch().std()
        return leaf + dtorch.tensor(noise, device_mesh=leaf.device_mesh, placements=leaf.placements)

    return optree.tree_map_with_path(changed, params)


def story_of_experts(llama: ModuleType, folder: Path, text: str, count: int) -> list[list[int]]:
    mesh = llama.make_mesh(text, "cpu")
    config, params = llama.load(folder, mesh)
    params = with_experts(llama, params)
    num_texts = math.prod(mesh.size(a) for a in llama.BATCH if a in mesh.mesh_dim_names)
    prompt = torch.tensor([[1, 403, 407, 261, 378]] * num_texts)
    steps = llama.generate(config, params, mesh, prompt, count, 0.0)
    return torch.cat([ids.to_torch() for ids in steps], 1).tolist()


MIXED = ["ep=2", "ep=3", "ep=4,fsdp=2", "dp=2,ep=2,tp=2", "pp=2,ep=2,ring_cp=2", "ep=2,sp=2",
         "fsdp=2,ulysses_cp=2,ep=2"]  # fmt: skip


@pytest.mark.parametrize("mesh", sample(MIXED, len(MIXED), 0))
def test_a_mixture_of_experts_writes_the_same_on_every_mesh(
    llama: ModuleType, folder: Path, mesh: str
) -> None:
    count = 12
    (expected,) = story_of_experts(llama, folder, "dp=1", count)
    found = story_of_experts(llama, folder, mesh, count)
    assert found == [expected] * len(found)


SHAPES_OF_EXPERTS = [(288, 64), (64, 144)]


@pytest.mark.parametrize("mesh", ["ep=2,ring_cp=2", "ep=2,sp=2"])
def test_tokens_go_to_their_experts(llama: ModuleType, mesh: str) -> None:
    """Over the axis of the experts rows are passed on, and no expert is gathered."""
    made = llama.make_mesh(mesh, "cpu")
    config, params = llama.load(llama.OWN_MODEL, made)
    params = llama.upcycled(params, 4)
    prompt = torch.ones(2, 8, dtype=torch.int64)
    given = llama.inputs(config, made, prompt, 16, torch.float32)
    for step, ids in zip(llama.steps(config, 0.0), (given[0], given[0][:, :1]), strict=True):
        program = step.program(params, ids, *given[1:])
        assert program.fallbacks() == []
        moved = [(i.step.kind, i.step.source) for i in program.communication()]
        rows = [kind for kind, spec in moved if spec.shape[1:] == (config["hidden_size"],)]
        assert rows == [Collective.PERMUTE] * 2 * config["num_hidden_layers"]
        # The features of gate and up projection change places among the devices that split them.
        experts = {kind for kind, spec in moved if spec.shape[1:] in SHAPES_OF_EXPERTS}
        assert experts <= {Collective.PERMUTE}


def test_experts_begin_as_copies(llama: ModuleType, folder: Path) -> None:
    mesh = llama.make_mesh("ep=2", "cpu")
    config, params = llama.load(folder, mesh)
    ids = torch.tensor([[1, 403, 407, 261], [1, 378, 5, 7]])
    step = dtorch.jit(lambda p, i: llama.forward(config, p, i))
    dense, mixed = step(params, ids), step(llama.upcycled(params, 4), ids)
    torch.testing.assert_close(mixed.to_torch(), dense.to_torch(), rtol=1e-5, atol=1e-5)
