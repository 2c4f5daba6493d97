"""Spec: interned, and exact about which part of the tensor a device holds."""

import gc
import pickle

import pytest
import torch
from layouts import MESHES, OBLONG, PAIR, SQUARE, SUM, TRIPLE, R, S, placements_of

from dtorch.mesh import DeviceMesh
from dtorch.spec import Spec, chunk, contiguous_stride, format_layout


def test_equal_specs_are_one_object():
    a = Spec.of((2, 3), torch.float32, PAIR, (S(0),))
    assert Spec.of([2, 3], torch.float32, DeviceMesh("cpu", [0, 1]), (S(0),), (3, 1)) is a
    assert a.with_placements((S(0),)) is a
    assert a.with_layout(PAIR, (R,)).with_placements((S(0),)) is a
    assert pickle.loads(pickle.dumps(a)) is a


def test_what_makes_specs_differ():
    stages = DeviceMesh("cpu", [[0, 1], [2, 3]]).unbind(0)
    different = [
        Spec.of((2, 3), torch.float32, PAIR, (S(0),)),
        Spec.of((3, 2), torch.float32, PAIR, (S(0),)),
        Spec.of((2, 3), torch.float64, PAIR, (S(0),)),
        Spec.of((2, 3), torch.float32, PAIR, (S(1),)),
        Spec.of((2, 3), torch.float32, PAIR, (S(0),), stride=(1, 2)),
        Spec.of((2, 3), torch.float32, DeviceMesh("cpu", [1, 0]), (S(0),)),
        Spec.of((2, 3), torch.float32, stages[0], (S(0),)),
        Spec.of((2, 3), torch.complex64, PAIR, (S(0),)),
        Spec.of((2, 3), torch.complex64, PAIR, (S(0),), conj=True),
        Spec.of((2, 3), torch.float32, PAIR, (S(0),), neg=True),
    ]
    assert len(set(map(id, different))) == len(different)


def test_specs_are_forgotten_with_their_last_use():
    shape = (123, 457)
    first = id(Spec.of(shape, torch.float32, PAIR, (S(0),)))
    del first
    gc.collect()
    from dtorch import spec

    assert not any(key[0] == torch.Size(shape) for key in list(spec._interned))


@pytest.mark.parametrize("size", range(12))
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_chunks_are_those_of_torch(size, count):
    pieces = [chunk((0, size), count, i) for i in range(count)]
    lengths = [stop - start for start, stop in pieces]
    wanted = [len(c) for c in torch.arange(size).chunk(count)] if size else [0]
    assert lengths == wanted + [0] * (count - len(wanted))
    joined = [i for start, stop in pieces for i in range(start, stop)]
    assert joined == list(range(size))


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: str(m.shape))
def test_boxes_are_the_parts_of_the_tensor(mesh):
    value = torch.arange(35).reshape(5, 7)
    for placements in placements_of(2, mesh, (SUM,)):
        spec = Spec.of((5, 7), torch.int64, mesh, placements)
        assert len(spec.boxes) == mesh.size()
        for place, box, shape in zip(
            mesh.coordinates(), spec.boxes, spec.local_shapes, strict=True
        ):
            part = value
            for index, count, placement in zip(place, mesh.shape, placements, strict=True):
                if placement.is_shard():
                    found = part.chunk(count, placement.dim)
                    empty = part.narrow(placement.dim, 0, 0)
                    part = found[index] if index < len(found) else empty
            (i, j), (k, m) = box
            assert torch.equal(value[i:j, k:m], part) or part.numel() == 0
            assert shape == tuple(part.shape)


def test_uneven_and_empty_shards():
    spec = Spec.of((5,), torch.float32, DeviceMesh("cpu", [0, 1, 2, 3]), (S(0),))
    assert spec.local_shapes == ((2,), (2,), (1,), (0,))
    assert spec.num_local_bytes == 8
    assert Spec.of((), torch.float32, PAIR, (R,)).local_shapes == ((), ())


def test_two_axes_on_one_dim_split_in_mesh_order():
    spec = Spec.of((8,), torch.float32, SQUARE, (S(0), S(0)))
    assert [b[0] for b in spec.boxes] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert spec.shard_axes(0) == (0, 1)


def test_questions():
    spec = Spec.of((4, 6), torch.float32, OBLONG, (SUM, S(1)))
    assert (spec.ndim, spec.numel, spec.num_bytes, spec.num_local_bytes) == (2, 24, 96, 32)
    assert spec.partial_axes == (0,)
    assert not spec.is_replicated
    assert spec.replicated().is_replicated


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0, 3), (1, 4, 1)])
def test_contiguous_strides_are_those_of_torch(shape):
    assert contiguous_stride(shape) == torch.empty(shape, device="meta").stride()


def test_printed_forms():
    named = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
    assert format_layout(named, (S(0), SUM)) == "dp=S(0) tp=P(sum)"
    assert repr(Spec.of((4, 2), torch.bfloat16, TRIPLE, (R,))) == "bfloat16[4, 2] [R]"
    kinds = {repr(Spec.of((2,), torch.float32, PAIR, (p,))) for p in (R, S(0), SUM)}
    assert len(kinds) == 3
