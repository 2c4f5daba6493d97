"""The order of launches on devices with streams, on streams that record it."""

import pytest
import streams as recorded_streams

import dtorch
from dtorch.lowering import lower
from dtorch.runtime import EXECUTOR
from dtorch.runtime.streams import Lane, plan

pytestmark = pytest.mark.skipif(EXECUTOR != "python", reason="the Python executor's lanes")


def test_random_programs_have_no_unordered_access() -> None:
    with recorded_streams.recorded() as (world, ids):
        for seed in range(40):
            recorded_streams.run_program(ids, seed)
        dtorch.synchronize()
        assert world.num_accesses > 1000
        assert world.faults == []


@pytest.mark.parametrize("fault", ["wait", "keep", "record", "lane"])
def test_what_is_left_out_is_found(fault: str) -> None:
    with recorded_streams.recorded(fault) as (world, ids):
        for seed in range(40):
            recorded_streams.run_program(ids, seed)
            if world.faults:
                break
        dtorch.synchronize()
        assert world.faults


def test_the_plan_of_a_program() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = dtorch.zeros(4, 4, device_mesh=mesh, placements=[dtorch.Shard(0)])

    def compute(x: dtorch.Tensor) -> dtorch.Tensor:
        whole = (x + 1).redistribute(placements=[dtorch.Replicate()])
        return (x * 2).sin() @ whole

    program = lower(dtorch.jit(compute).program(x))
    launches = plan(program, mesh.devices[0])
    text = [f"{i}".split(" = ")[-1] for i in str(program).splitlines()[1:-1]]
    lanes = dict(zip(text, launches, strict=True))
    gathers = [launch for name, launch in lanes.items() if name.startswith("all_gather")]
    assert [g.lane for g in gathers if g] == [Lane.COMMUNICATION]
    assert gathers[0] is not None and len(gathers[0].marks) == 1
    product = next(launch for name, launch in lanes.items() if "mat" in name or "mm" in name)
    assert product is not None and product.lane is Lane.COMPUTE
    assert product.waits == gathers[0].marks and set(gathers[0].marks) <= set(product.keeps)
    waiting = [launch for launch in launches if launch is not None and launch.waits]
    inputs = {slot for slot, _ in program.inputs}
    assert all(launch is product or set(launch.waits) <= inputs for launch in waiting)
