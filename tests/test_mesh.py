"""DeviceMesh: a frozen grid of devices with named axes."""

import copy
import pickle

import numpy
import pytest
import torch

from dtorch.errors import MeshError
from dtorch.mesh import Device, DeviceMesh, init_device_mesh


def test_ids_may_be_lists_arrays_tensors_or_numbers():
    grid = [[0, 1], [2, 3]]
    meshes = [DeviceMesh("cpu", i) for i in (grid, numpy.array(grid), torch.tensor(grid))]
    assert meshes[0] == meshes[1] == meshes[2]
    assert meshes[0].shape == (2, 2)
    assert meshes[0].devices == tuple(Device("cpu", i) for i in range(4))
    assert torch.equal(meshes[0].mesh, torch.tensor(grid))


def test_one_device_and_no_axes():
    assert DeviceMesh("cpu") == DeviceMesh("cpu", [0])
    single = DeviceMesh("cpu", 3)
    assert (single.shape, single.ndim, single.size()) == ((), 0, 1)
    assert single.coordinates() == [()]
    assert repr(single) == "DeviceMesh('cpu', 3)"


def test_sizes_and_axes():
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    assert (mesh.ndim, mesh.size(), mesh.size(0), mesh.size("tp"), mesh.size(-1)) == (2, 6, 2, 3, 3)
    assert mesh.axis("tp") == 1
    assert mesh.axis(-2) == 0
    assert mesh.axis_name(0) == "'dp'"
    assert mesh.coordinates() == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert init_device_mesh("cpu", 2) == DeviceMesh("cpu", [0, 1])


def test_repr():
    assert repr(DeviceMesh("cpu", [[0, 1], [2, 3]])) == "DeviceMesh('cpu', [[0, 1], [2, 3]])"
    named = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    expected = "DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))"
    assert repr(named) == expected
    assert eval(expected) == named


@pytest.mark.parametrize(
    ("args", "kwargs", "match"),
    [
        (([[0, 1], [2]],), {}, "not a rectangular grid"),
        (([0, 0],), {}, r"repeat \[0\]"),
        (([-1],), {}, "negative id -1"),
        (([0.5],), {}, "not integers"),
        (([],), {}, "hold no device"),
        ((["a"],), {}, "not a rectangular grid"),
        (([0, 1], ("a", "b")), {}, "2 names for 1 axes"),
        (([[0, 1]], ("a", "a")), {}, "name of its own"),
        (([[0, 1]], ("a", 1)), {}, "name of its own"),
    ],
)
def test_malformed_meshes_are_refused(args, kwargs, match):
    with pytest.raises(MeshError, match=match):
        DeviceMesh("cpu", *args, **kwargs)


def test_unknown_backends_are_refused():
    with pytest.raises(MeshError, match="nonsense"):
        DeviceMesh("nonsense", [0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch sees a CUDA device")
def test_absent_backends_are_refused():
    with pytest.raises(MeshError, match="cuda"):
        DeviceMesh("cuda", [0])


def test_a_mesh_shape_needs_devices():
    with pytest.raises(MeshError, match="at least one device"):
        init_device_mesh("cpu", (2, 0))


def test_unknown_axes_name_the_ones_there_are():
    mesh = DeviceMesh("cpu", [[0, 1]], ("dp", "tp"))
    with pytest.raises(MeshError, match=r"no axis 'pp'.*'dp', 'tp'"):
        mesh.axis("pp")
    with pytest.raises(MeshError, match="no axis 2"):
        mesh.size(2)
    with pytest.raises(MeshError, match="have no names"):
        DeviceMesh("cpu", [0, 1]).axis("dp")


def test_submeshes_by_name():
    mesh = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("pp", "dp", "tp"))
    assert mesh["tp"] == DeviceMesh("cpu", [0, 1], ("tp",))
    assert mesh["dp"] == DeviceMesh("cpu", [0, 2, 4], ("dp",))
    assert mesh["tp", "dp"] == DeviceMesh("cpu", [[0, 2, 4], [1, 3, 5]], ("tp", "dp"))
    with pytest.raises(MeshError, match="twice"):
        mesh["tp", "tp"]


@pytest.mark.parametrize(
    ("axes", "kind", "message"),
    [
        (None, TypeError, "an axis is a name or an index, not None.\n  Fix: Its axes"),
        (("pp", 1.5), TypeError, "not 1.5"),
        (5, MeshError, "has no axis 5"),
    ],
)
def test_unbind_refuses_what_is_no_axis(axes, kind, message):
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("pp", "tp"))
    with pytest.raises(kind, match=message):
        mesh.unbind(axes)


def test_unbind():
    mesh = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("pp", "dp", "tp"))
    stages = mesh.unbind("pp")
    assert [s.shape for s in stages] == [(3, 2)] * 2
    assert stages[1].mesh.flatten().tolist() == list(range(6, 12))
    assert stages[0].mesh_dim_names == ("dp", "tp")
    assert [s.stage.index for s in stages] == [0, 1]
    assert mesh.unbind("absent") == [mesh]
    assert mesh.unbind(("absent", 0)) == stages
    both = mesh.unbind(("pp", "tp"))
    assert [b.mesh.tolist() for b in both[:2]] == [[0, 2, 4], [1, 3, 5]]
    everything = DeviceMesh("cpu", [0, 1]).unbind(0)
    assert [e.shape for e in everything] == [(), ()]


def test_equality_and_hash_are_those_of_the_value():
    a, b = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1])
    assert a == b
    assert hash(a) == hash(b)
    assert a != DeviceMesh("cpu", [1, 0])
    assert a != DeviceMesh("cpu", [0, 1], ("dp",))
    assert a != DeviceMesh("cpu", [[0, 1]])
    assert a != [0, 1]


def test_pickle_and_copy_keep_value_and_stage():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    for value in (mesh, mesh.unbind("pp")[1], DeviceMesh("cpu", 3)):
        for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
            assert other == value
            assert other.stage == value.stage
            assert other.devices == value.devices


def test_a_cpu_mesh_may_name_any_ids():
    assert DeviceMesh("cpu", [1000, 7]).torch_device(0) == torch.device("cpu")
