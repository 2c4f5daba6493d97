"""Operands on several stages: where operations and their backwards run, and what is sent."""

from typing import Any

import pytest
import torch

import dtorch
from dtorch.program import Apply, Redistribute
from dtorch.redistribution import Collective


def _stages() -> list[dtorch.DeviceMesh]:
    return dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)).unbind("pp")


def _transfers(program: dtorch.Program) -> list[tuple[int, int]]:
    moved = (i.step for i in program.instructions if isinstance(i, Redistribute))
    steps = [s for s in moved if s.kind is Collective.TRANSFER]
    return [(s.source.mesh.devices[0].id, s.target.mesh.devices[0].id) for s in steps]


def _two_layers(params: Any, x: Any) -> Any:
    h = torch.tanh(x @ params["a"])
    skip = h * 2
    return (torch.tanh(h @ params["b"]) + h + torch.where(skip > 0, skip, params["c"])).sum()


@pytest.mark.parametrize("wrap", [lambda f: f, dtorch.jit], ids=["eager", "jit"])
def test_the_backward_of_a_stage_runs_where_its_forward_ran(wrap: Any) -> None:
    first, last = _stages()
    plain = {name: torch.randn(4, 4) for name in "abc"}
    params = {
        name: dtorch.Tensor(value, device_mesh=first if name == "a" else last)
        for name, value in plain.items()
    }
    x = torch.randn(4, 4)
    value, grads = wrap(dtorch.value_and_grad(_two_layers))(params, x)
    expected, expected_grads = dtorch.value_and_grad(_two_layers)(plain, x)
    torch.testing.assert_close(value.to_torch(), expected)
    for name, leaf in params.items():
        torch.testing.assert_close(grads[name].to_torch(), expected_grads[name])
        assert grads[name].device_mesh == leaf.device_mesh
    program = dtorch.jit(dtorch.value_and_grad(_two_layers)).program(params, x)
    # h, skip and the mask go to the second stage; one gradient comes back for each of the first two
    assert sorted(_transfers(program)) == [(0, 1)] * 3 + [(1, 0)] * 2
    backward = [i for i in program.instructions if isinstance(i, Apply) and "tanh_b" in str(i.op)]
    assert [i.mesh for i in backward] == [last, first]


def test_what_is_changed_in_place_stays_on_its_stage() -> None:
    first, last = _stages()
    a = dtorch.ones(3, device_mesh=first)
    b = dtorch.ones(3, device_mesh=last)

    def changed(a: Any, b: Any) -> Any:
        x = a * 2
        x.add_(b)
        x[0] = b[0]
        return x.sum()

    value, grad = dtorch.jit(dtorch.value_and_grad(changed))(a, b)
    assert value.device_mesh == first
    assert value.item() == 7
    assert grad.tolist() == [0, 2, 2]


def test_plain_tensors_and_factories_are_on_the_earliest_stage() -> None:
    first, last = _stages()
    params = {"late": dtorch.ones(3, device_mesh=last), "wide": dtorch.ones(3, device_mesh=first)}

    def model(params: Any, x: Any) -> Any:
        h = x * params["wide"] + torch.arange(3)
        return h, h * params["late"]

    early, late = dtorch.jit(model)(params, torch.ones(3))
    assert (early.device_mesh, late.device_mesh) == (first, last)
    assert late.tolist() == [1, 2, 3]


def test_a_recorded_operation_knows_that_its_operand_was_sent() -> None:
    """Eagerly, with `backward`: each operation's backward is on the stage of its forward."""
    first, last = _stages()
    x = dtorch.ones(3, device_mesh=first).requires_grad_()
    w = dtorch.full((3,), 2.0, device_mesh=last).requires_grad_()
    for _ in range(2):  # a call that is known and one that is not
        x.grad = w.grad = None
        with dtorch.profile() as profile:
            h = torch.tanh(x)
            (torch.sigmoid(h * w) + h).sum().backward()
        places = {
            e.name: e.device.id
            for e in profile.events
            if e.device is not None and "_backward" in e.name
        }
        assert places == {"aten.sigmoid_backward.default": 1, "aten.tanh_backward.default": 0}
        assert x.grad is not None and x.grad.device_mesh == first
        assert w.grad is not None and w.grad.device_mesh == last
