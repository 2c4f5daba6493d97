"""The cache of host memory: reused blocks never alias what is alive, and the limit holds."""

import gc
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard
from dtorch.runtime import EXECUTOR

pytestmark = pytest.mark.skipif(EXECUTOR != "native", reason="the Python executor keeps no memory")
TWO = dtorch.DeviceMesh("cpu", [0, 1])
NUMEL = 1 << 18  # 1 MiB of float32


def run(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "import torch, dtorch\n" + textwrap.dedent(code)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_fetched_values_do_not_change_when_memory_is_reused() -> None:
    x = dtorch.Tensor(torch.arange(float(NUMEL)), device_mesh=TWO, placements=[Shard(0)])
    kept = []
    for i in range(20):
        y = x.redistribute(placements=[Replicate()]) + float(i)
        kept.append((y.to_torch(), float(i)))
        if i % 3 == 0:
            kept.pop(0)
        del y
    dtorch.synchronize()
    for value, i in kept:
        assert torch.equal(value, torch.arange(float(NUMEL)) + i)


def test_a_fetched_value_may_be_written_to() -> None:
    x = dtorch.ones(NUMEL, device_mesh=TWO)
    first = x.to_torch()
    first.fill_(7)
    assert x.sum().item() == NUMEL
    address = first.data_ptr()
    array = first.numpy()
    del first
    gc.collect()
    others = [(dtorch.zeros(NUMEL) + i).to_torch() for i in range(4)]
    assert (array == 7).all() and all(o.data_ptr() != address for o in others)


def test_the_memory_that_was_freed_last_is_used_first() -> None:
    many = [(dtorch.ones(NUMEL) * i).to_torch() for i in range(12)]
    del many

    def addresses(count: int) -> set[int]:
        found = set()
        for _ in range(count):
            value = (dtorch.ones(NUMEL) * 2).to_torch()
            found.add(value.data_ptr())
            del value
            dtorch.synchronize()
        return found

    addresses(2)
    assert len(addresses(20)) <= 4


def test_what_has_been_free_for_longest_makes_room() -> None:
    code = """
    def addresses(numel):
        found = set()
        for _ in range(8):
            value = (dtorch.ones(numel) * 2).to_torch()
            found.add(value.data_ptr())
            del value
            dtorch.synchronize()
        return len(found)
    print(max(addresses(numel) for numel in range(1 << 18, 1 << 19, 1 << 15)) <= 4)
    """
    assert run(code, DTORCH_HOST_CACHE_MB="8") == "True\n"


def test_memory_of_nearly_equal_sizes_keeps_its_own_size() -> None:
    for numel in (NUMEL + 1, NUMEL + 17, NUMEL - 5, NUMEL * 2 - 1, NUMEL):
        value = (dtorch.ones(numel) * 3).to_torch()
        assert value.numel() == numel and value.sum().item() == 3 * numel
        assert value.untyped_storage().nbytes() == 4 * numel


def test_the_cache_can_be_emptied_and_turned_off() -> None:
    code = """
    import resource
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20
    x = dtorch.ones(1 << 24)   # 64 MiB
    (x * 2).sum().item()
    dtorch.synchronize()
    before = resident()
    for _ in range(3):
        a, b = x * 2, x * 3
        (a + b).sum().item()
        del a, b
    dtorch.synchronize()
    kept = resident() - before
    dtorch.empty_cache()
    print(kept >= 32, resident() - before <= 32)
    """
    assert run(code) == "True True\n"
    off = run(code, DTORCH_HOST_CACHE_MB="0").split()
    assert off[1] == "True"


def test_allocations_of_the_client_are_torchs_own() -> None:
    x = torch.ones(NUMEL)
    address = x.data_ptr()
    del x
    with dtorch.runtime.host_cache():
        y = torch.ones(NUMEL)
    assert y.sum().item() == NUMEL and isinstance(address, int)
    dtorch.empty_cache()
    assert y.sum().item() == NUMEL  # what is alive is not given back


def test_a_resized_tensor_on_a_reused_block() -> None:
    value = (dtorch.ones(NUMEL) * 2).to_torch()
    value.resize_(2 * NUMEL)
    value[NUMEL:] = 5
    assert value[:NUMEL].sum().item() == 2 * NUMEL and value[-1].item() == 5


def test_what_the_tensors_of_the_caller_take() -> None:
    mesh = dtorch.DeviceMesh("cpu", [71, 72])

    def held() -> list[int]:
        dtorch.synchronize()
        return [memory.held for memory in dtorch.memory_stats(mesh).values()]

    assert held() == [0, 0]
    x = dtorch.tensor(torch.ones(3), device_mesh=mesh, placements=[dtorch.Shard(0)])
    y = x + 1
    view = y.view(3, 1)
    assert held() == [16, 8]
    del x
    assert held() == [8, 4]
    del y
    assert held() == [8, 4]
    del view
    assert held() == [0, 0]
    (memory, _) = dtorch.memory_stats(mesh).values()
    assert memory == dtorch.DeviceMemory(held=0)
