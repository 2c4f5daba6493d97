"""Decision: all of an operation's layouts, decided once for equal arguments."""

import torch
from layouts import PAIR, SUM, R, S, spread, values

import dtorch
from dtorch import decision as module
from dtorch.decision import decide
from dtorch.infer import question
from dtorch.mesh import DeviceMesh
from dtorch.spec import Spec

aten = torch.ops.aten
ONE = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))


def _spec(shape, *placements, mesh=PAIR):
    return Spec.of(shape, torch.float32, mesh, placements)


def _num_decided(function):
    before = module._remembered.cache_info().misses
    function()
    return module._remembered.cache_info().misses - before


def test_layouts_of_a_contraction():
    asked = question(aten.linear.default, (_spec((4, 8), R), _spec((6, 8), S(1))), {})
    found = decide(asked)
    assert [s.placements for s in found.inputs] == [(S(1),), (S(1),)]
    assert [s.placements for s in found.outputs if s] == [(SUM,)]
    assert not found.is_view and not found.is_fallback


def test_an_equal_question_is_decided_once():
    def ask():
        decide(question(aten.atan2.default, (_spec((4, 8), R), _spec((8,), R)), {}))

    assert _num_decided(ask) == 1
    assert _num_decided(ask) == 0


def test_a_repeated_layer_is_decided_once():
    def layers(x, w, count):
        for _ in range(count):
            x = torch.nn.functional.linear(torch.logit(x), w).sinc()
        return x

    x, w = spread(values((4, 6)), PAIR, [S(0)]), spread(values((6, 6)), PAIR, [R])
    few = _num_decided(lambda: dtorch.jit(lambda x, w: layers(x, w, 2)).program(x, w))
    many = _num_decided(lambda: dtorch.jit(lambda x, w: layers(x, w, 20)).program(x, w))
    assert few >= 3 and many == 0


def test_what_is_wanted_and_where_it_runs_are_part_of_the_question():
    asked = question(aten.ones.default, ([4, 4],), {"dtype": torch.float32})
    for mesh in (PAIR, DeviceMesh("cpu", [2, 3])):
        for wanted in ((S(0),), (S(1),), (R,)):
            found = decide(asked, mesh, wanted)
            assert found.mesh == mesh
            assert found.outputs[0] is Spec.of((4, 4), torch.float32, mesh, wanted)


def test_a_random_operation_is_replicated():
    asked = question(aten.bernoulli.p, (_spec((4, 4), S(0)), 0.5), {})
    assert decide(asked, draws=True).inputs[0].placements == (R,)


def test_an_axis_of_one_device_needs_no_redistribution():
    x = _spec((4, 8), SUM, R, mesh=ONE)
    found = decide(question(aten.exp.default, (x,), {}))
    assert found.inputs == (x,)
    assert found.outputs == (_spec((4, 8), R, R, mesh=ONE),)


def test_identity_is_a_view_that_changes_nothing():
    x = _spec((4, 8), S(0))

    def is_identity(op, *args):
        return decide(question(op, (x, *args), {})).is_identity

    assert is_identity(aten.view.default, [4, 8])
    assert is_identity(aten.expand.default, [-1, 8])
    assert is_identity(aten.slice.Tensor, 1, 0, 8)
    assert not is_identity(aten.slice.Tensor, 1, 1, 8)
    assert not is_identity(aten.view.default, [8, 4])
    assert not is_identity(aten.transpose.int, 0, 1)
    assert not is_identity(aten.clone.default)
    assert not is_identity(aten.view.dtype, torch.int32)
