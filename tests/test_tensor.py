"""`Tensor`: making, laying out, converting, fetching, printing, copying. The oracle is PyTorch."""

import copy
import io
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.errors import MeshError, MutationError, PlacementError, WorkerError

ONE = dtorch.DeviceMesh("cpu", [0])
TWO = dtorch.DeviceMesh("cpu", [0, 1])
FOUR = dtorch.DeviceMesh("cpu", [0, 1, 2, 3])
GRID = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
LAYOUTS = [
    (ONE, [Replicate()]),
    (TWO, [Shard(0)]),
    (TWO, [Shard(-1)]),
    (TWO, [Partial()]),
    (TWO, [Partial("max")]),
    (FOUR, [Shard(0)]),
    (FOUR, [Shard(1)]),
    (FOUR, [Partial("avg")]),
    (GRID, [Shard(0), Shard(1)]),
    (GRID, [Shard(0), Shard(0)]),
    (GRID, [Shard(1), Partial()]),
    (GRID, [Replicate(), Shard(1)]),
    (GRID, [Partial("min"), Shard(0)]),
]


def values() -> list[torch.Tensor]:
    """Tensors that print in different ways."""
    torch.manual_seed(0)
    return [
        torch.randn(5, 3),
        torch.randn(2, 3) * 1e6,
        torch.tensor([[1.0, float("nan")], [float("inf"), -0.0]]),
        torch.arange(6).view(3, 2),
        torch.tensor([[True, False], [False, True], [True, True]]),
        torch.randn(3, 4, dtype=torch.complex64),
        torch.randn(3, 2, dtype=torch.float64),
        torch.randn(3, 2).half(),
        torch.randn(4, 2).bfloat16(),
        torch.randint(0, 255, (7, 2), dtype=torch.uint8),
        torch.empty(0, 3),
        torch.empty(2, 0, dtype=torch.int64),
        torch.randn(1, 1),
        torch.randn(2, 3, 4),
    ]


def reducible(value: torch.Tensor, placements: list[Any]) -> bool:
    """Partial bools and max of complex numbers have no meaning."""
    partial = [p for p in placements if p.is_partial()]
    if value.dtype == torch.bool or value.is_complex():
        return not partial
    integral = not value.is_floating_point()
    return not (integral and any(p.op == "avg" for p in partial))


# -- printing ------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS, ids=str)
def test_printing(mesh: dtorch.DeviceMesh, placements: list[Any]) -> None:
    for value in filter(lambda v: reducible(v, placements), values()):
        t = dtorch.Tensor(value, device_mesh=mesh, placements=placements)
        shown = [Shard(p.dim % value.ndim) if p.is_shard() else p for p in placements]
        tail = (
            f"shape={value.shape}, dtype={value.dtype},\ndevice_mesh={mesh!r}, placements={shown}"
        )
        assert repr(t) == str(t) == f"{t}" == f"{value!r}\n{tail}"


@pytest.mark.parametrize("value", [2.5, 7, True, 1 + 2j])
def test_printing_a_scalar(value: Any) -> None:
    t = torch.tensor(value)
    assert repr(dtorch.Tensor(t, device_mesh=TWO)).split("\n")[0] == repr(t)
    assert f"{dtorch.Tensor(t, device_mesh=TWO)}" == f"{t}"
    if value is not True and not isinstance(value, complex):
        assert f"{dtorch.Tensor(t, device_mesh=TWO):.2f}" == f"{t:.2f}"


@pytest.mark.parametrize("shape", [(2000,), (1001,), (40, 40), (3, 500), (500, 3), (11, 10, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_long_tensors_are_summarised_as_pytorch_does(shape: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    value = (torch.randn(shape) * 100).to(dtype)
    for mesh, placements in ((FOUR, [Shard(0)]), (GRID, [Shard(-1), Replicate()])):
        text = repr(dtorch.Tensor(value, device_mesh=mesh, placements=placements))
        assert text.startswith(f"{value!r}\nshape=") and "..." in text


def test_a_long_tensor_is_not_fetched_to_print_it(monkeypatch: pytest.MonkeyPatch) -> None:
    t = dtorch.zeros(300, 300, device_mesh=FOUR, placements=[Shard(0)])
    fetched: list[int] = []
    original = dtorch.Tensor.to_torch

    def to_torch(self: dtorch.Tensor) -> torch.Tensor:
        fetched.append(self.numel())
        return original(self)

    monkeypatch.setattr(dtorch.Tensor, "to_torch", to_torch)
    assert "..." in repr(t) and fetched == [49]


def test_printing_follows_print_options() -> None:
    value = torch.randn(12, 2)
    t = dtorch.Tensor(value, device_mesh=TWO, placements=[Shard(0)])
    try:
        torch.set_printoptions(precision=2, threshold=10, edgeitems=2)
        assert repr(t).startswith(f"{value!r}\nshape=")
    finally:
        torch.set_printoptions(profile="default")


def test_printing_what_autograd_knows() -> None:
    for value in (torch.randn(2, 2), torch.randn(3, 7), torch.randn(1, 8), torch.tensor(2.0)):
        plain = value.clone().requires_grad_()
        t = dtorch.Tensor(value, device_mesh=TWO, requires_grad=True)
        assert repr(t).startswith(f"{plain!r}\nshape=")
        assert repr(t * 2).startswith(f"{plain * 2!r}\nshape=")
        assert repr(torch.nn.Parameter(t)).startswith(f"{torch.nn.Parameter(value)!r}\nshape=")


def test_printing_a_failed_tensor_raises() -> None:
    weight = dtorch.ones(4, 2, device_mesh=TWO, placements=[Shard(0)])
    bad = torch.nn.functional.embedding(dtorch.tensor([9], device_mesh=TWO), weight)
    with pytest.raises(WorkerError, match="IndexError on cpu:"):
        repr(bad)


# -- making --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [dtorch.Tensor, dtorch.tensor])
@pytest.mark.parametrize(
    "data", [3, 2.5, True, 1j, [1, 2], [[1.0], [2.0]], [], [[True, False]], (1, 2.5)]
)
def test_data_like_torch_tensor(make: Callable[..., Any], data: Any) -> None:
    t, expected = make(data, device_mesh=TWO), torch.tensor(data)
    assert t.dtype == expected.dtype and torch.equal(t.to_torch(), expected)


def test_data_from_numpy_and_torch_is_copied() -> None:
    array, source = numpy.arange(6.0).reshape(2, 3), torch.arange(6.0)
    a = dtorch.Tensor(array, device_mesh=TWO, placements=[Shard(0)])
    b = dtorch.tensor(source, device_mesh=TWO, placements=[Shard(0)], dtype=torch.float64)
    array[:] = 0
    source.zero_()
    assert a.tolist() == [[0, 1, 2], [3, 4, 5]] and a.dtype == torch.float64
    assert b.tolist() == [0, 1, 2, 3, 4, 5] and b.dtype == torch.float64


def test_strides_are_those_of_a_copy() -> None:
    source = torch.randn(3, 4, 2).permute(2, 0, 1)
    assert dtorch.Tensor(source, device_mesh=TWO).stride() == source.clone().stride()
    sliced = torch.randn(4, 6)[:, ::2]
    assert dtorch.Tensor(sliced, device_mesh=TWO).stride() == sliced.clone().stride()


def test_memory_that_is_not_copied_is_guarded() -> None:
    source = torch.ones(4)
    t = dtorch.Tensor(source, device_mesh=TWO, placements=[Shard(0)], copy=False)
    assert t.local_shards()[0].tolist() == [1, 1]
    source.add_(1)
    with pytest.raises(MutationError, match="was written to after it was handed over"):
        (t + 1).to_torch()


WRITTEN_TO = "was written to after it was handed over"


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.view(4, 2),
        lambda x: x[1:],
        lambda x: x.detach().t(),
        lambda x: x.redistribute(dtorch.DeviceMesh("cpu", [2]), [Replicate()]),
        dtorch.jit(lambda x: x.view(8)),
    ],
)
def test_a_view_of_memory_that_is_not_copied_is_guarded(
    view: Callable[[dtorch.Tensor], dtorch.Tensor],
) -> None:
    for _ in range(3):
        source = torch.ones(2, 4)
        viewed = view(dtorch.Tensor(source, device_mesh=TWO, copy=False))
        computed = viewed + 1
        dtorch.synchronize()
        source.zero_()
        assert (computed == 2).all()
        for _ in range(2):
            with pytest.raises(MutationError, match=WRITTEN_TO):
                viewed.to_torch()
            with pytest.raises(MutationError, match=WRITTEN_TO):
                (viewed + 1).to_torch()


def test_memory_that_is_not_copied_is_guarded_until_it_has_been_read(
    operations: torch.library.Library,
) -> None:
    source = torch.ones(4)
    begun, written = threading.Event(), threading.Event()

    def kernel(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert written.wait(10)
        return x * 1

    operations.define("late(Tensor x) -> Tensor")
    operations.impl("late", kernel, "CPU")
    operations.impl("late", torch.empty_like, "Meta")
    for placement in (Replicate(), Shard(0)):
        begun.clear()
        written.clear()
        lent = dtorch.Tensor(source, device_mesh=TWO, placements=[placement], copy=False)
        late = torch.ops.dtorch_test.late(lent)
        assert begun.wait(10)
        source.add_(1)
        written.set()
        with pytest.raises(MutationError, match=WRITTEN_TO):
            late.to_torch()


def test_memory_that_cannot_be_guarded_is_copied() -> None:
    source = numpy.ones(4, dtype=numpy.float32)
    t = dtorch.Tensor(source, device_mesh=TWO, placements=[Shard(0)], copy=False)
    source[:] = 7
    assert t.tolist() == [1] * 4 and (t + 1).tolist() == [2] * 4


def test_memory_that_is_not_copied_may_be_of_inference_mode() -> None:
    with torch.inference_mode():
        source = torch.ones(4)
    t = dtorch.Tensor(source, device_mesh=TWO, placements=[Shard(0)], copy=False)
    assert (t + 1).tolist() == [2] * 4


def test_a_tensor_of_a_tensor() -> None:
    x = dtorch.Tensor(torch.arange(4.0), device_mesh=TWO, placements=[Shard(0)])
    y = dtorch.Tensor(x, dtype=torch.float64, placements=[Replicate()], requires_grad=True)
    assert y.dtype == torch.float64 and y.placements == [Replicate()] and y.requires_grad
    z = dtorch.tensor(x)
    assert z.placements == [Shard(0)]
    z.add_(1)
    assert x.tolist() == [0, 1, 2, 3] and z.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda **k: dtorch.Tensor([1.0], **k),
        lambda **k: dtorch.tensor([1.0], **k),
        lambda **k: dtorch.ones(4, **k),
        lambda **k: dtorch.rand(4, **k),
        lambda **k: dtorch.arange(4, **k),
        lambda **k: dtorch.Tensor(dtorch.ones(1), **k),
    ],
)
def test_both_device_and_mesh_is_an_error(make: Callable[..., Any]) -> None:
    expected = r"both device='cpu' and device_mesh=DeviceMesh\('cpu', \[0, 1\]\) are given"
    with pytest.raises(PlacementError, match=expected):
        make(device="cpu", device_mesh=TWO)
    with pytest.raises(PlacementError, match="both device="):
        dtorch.ones(2).to(device="cpu", device_mesh=TWO)


def test_a_device_means_its_mesh() -> None:
    assert dtorch.ones(2, device="cpu:3").device_mesh == dtorch.DeviceMesh("cpu", [3])
    assert dtorch.ones(2).device_mesh == dtorch.DeviceMesh("cpu", [0])
    assert dtorch.Tensor([1], device=torch.device("cpu")).device == torch.device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(MeshError, match=r"no 'cuda' device here|no backend 'cuda'"):
            dtorch.ones(2, device="cuda")


FACTORIES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("zeros", (5, 3), {}),
    ("ones", ((5, 3),), {"dtype": torch.int32}),
    ("full", ((5, 3), 7), {}),
    ("full", ((5, 3), 2.5), {"dtype": torch.float64}),
    ("full", ((5, 3), True), {}),
    ("eye", (5,), {}),
    ("eye", (5, 3), {"dtype": torch.bool}),
    ("arange", (10,), {}),
    ("arange", (2, 11, 3), {}),
    ("arange", (10, 0, -3), {}),
    ("arange", (0.0, 1.0, 0.125), {}),
    ("arange", (3,), {"dtype": torch.float32}),
    ("linspace", (0, 1, 7), {}),
    ("logspace", (0, 2, 5), {}),
    ("hann_window", (6,), {}),
    ("tril_indices", (3, 3), {}),
    ("triu_indices", (3, 4), {}),
    ("scalar_tensor", (3.0,), {}),
    ("rand", (5, 3), {}),
    ("randn", ((5, 3),), {"dtype": torch.float64}),
    ("randint", (10, (5, 3)), {}),
    ("randint", (-3, 10, (5,)), {"dtype": torch.int8}),
    ("randperm", (9,), {}),
    ("normal", (1.0, 2.0, (5, 3)), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), FACTORIES, ids=lambda v: str(v))
def test_factories_have_pytorchs_values(name: str, args: Any, kwargs: Any) -> None:
    torch.manual_seed(5)
    expected = getattr(torch, name)(*args, **kwargs)
    for mesh, placements in LAYOUTS:
        shards = [p for p in placements if p.is_shard()]
        fits = all(-expected.ndim <= p.dim < expected.ndim for p in shards)
        if not fits or not reducible(expected, placements):
            continue
        torch.manual_seed(5)
        t = getattr(dtorch, name)(*args, device_mesh=mesh, placements=placements, **kwargs)
        assert t.dtype == expected.dtype and torch.equal(t.to_torch(), expected), (mesh, placements)
        assert t.placements == [
            Shard(p.dim % expected.ndim) if p.is_shard() else p for p in placements
        ]
    t = getattr(dtorch, name)(*args, device="cpu", **kwargs)
    assert t.device_mesh == ONE and t.shape == expected.shape and t.stride() == expected.stride()


def test_factories_follow_the_default_dtype_and_requires_grad() -> None:
    assert dtorch.ones(2).dtype == torch.float32
    try:
        torch.set_default_dtype(torch.float64)
        assert dtorch.ones(2).dtype == torch.float64
        assert dtorch.full((2,), 1.5).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    t = dtorch.rand(3, device_mesh=TWO, placements=[Shard(0)], requires_grad=True)
    assert t.requires_grad and t.is_leaf


def test_a_factory_makes_only_what_a_device_holds() -> None:
    t = dtorch.zeros(8, 2, device_mesh=FOUR, placements=[Shard(0)])
    assert [tuple(p.shape) for p in t.local_shards().values()] == [(2, 2)] * 4
    program = dtorch.jit(
        lambda: dtorch.zeros(8, 2, device_mesh=FOUR, placements=[Shard(0)])
    ).program()
    assert program.communication() == [] and len(program.instructions) == 1


def test_like_factories_keep_the_layout() -> None:
    x = dtorch.ones(6, 2, device_mesh=TWO, placements=[Shard(0)])
    for make in (
        torch.zeros_like,
        torch.ones_like,
        torch.empty_like,
        lambda t: torch.full_like(t, 3),
    ):
        assert make(x).placements == [Shard(0)]
    assert x.new_zeros(3, 4).device_mesh == TWO and x.new_tensor([1.0]).tolist() == [1.0]


# -- layout --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([], r"placements=\[\] has 0 entries, but DeviceMesh\('cpu', \[0, 1\]\) has 1 axes"),
        (
            [Shard(0), Shard(1)],
            "has 2 entries, but .* has 1 axes. Give one placement per mesh axis",
        ),
        ([Shard(2)], r"Shard\(dim=2\) on axis 0 is out of range for a tensor of 2 dims"),
        ([Shard(-3)], r"Shard\(dim=-3\) .* Use a dim from -2 to 1"),
        ([0], r"placements\[0\] is 0; expected dtorch.Shard\(dim\)"),
        (["tp"], r"placements\[0\] is 'tp'; expected"),
    ],
)
def test_wrong_placements_raise_at_the_call(placements: Any, message: str) -> None:
    x = dtorch.ones(4, 2, device_mesh=TWO)
    for call in (
        lambda: dtorch.ones(4, 2, device_mesh=TWO, placements=placements),
        lambda: dtorch.Tensor(torch.ones(4, 2), device_mesh=TWO, placements=placements),
        lambda: x.redistribute(placements=placements),
        lambda: x.to(placements=placements),
        lambda: dtorch.jit(lambda t: t.redistribute(placements=placements))(x),
    ):
        with pytest.raises(PlacementError, match=message):
            call()


def test_a_scalar_cannot_be_sharded() -> None:
    with pytest.raises(PlacementError, match="a tensor without dims cannot be sharded"):
        dtorch.Tensor(1.0, device_mesh=TWO, placements=[Shard(0)])


def test_redistribute() -> None:
    value = torch.arange(12.0).view(4, 3)
    x = dtorch.Tensor(value, device_mesh=TWO, placements=[Shard(0)])
    assert x.redistribute(placements=[Shard(0)]) is x
    assert x.redistribute(placements=[Shard(-1)]).placements == [Shard(1)]
    other = dtorch.DeviceMesh("cpu", [4, 2])
    assert x.redistribute(other).placements == [Shard(0)]  # a mesh of the same shape
    assert x.redistribute(FOUR).placements == [Replicate()]
    assert x.redistribute(GRID).placements == [Replicate(), Replicate()]
    far = x.redistribute(dtorch.DeviceMesh("cpu", [[5, 9]]), [Shard(1), Partial()])
    assert torch.equal(far.to_torch(), value) and sorted(far.local_shards()) == [5, 9]
    like = x.redistribute_like(far)
    assert like.device_mesh == far.device_mesh and like.placements == far.placements
    assert torch.equal(like.to_torch(), value) and torch.equal(x.to_torch(), value)


def test_redistribute_by_dict() -> None:
    value = torch.arange(12.0).view(4, 3)
    x = dtorch.Tensor(value, device_mesh=GRID, placements=[Shard(0), Shard(1)])
    y = x.redistribute_by_dict(placements_dict={"dp": Replicate(), "tp": Shard(0), "pp": Shard(7)})
    assert y.placements == [Replicate(), Shard(0)] and torch.equal(y.to_torch(), value)
    kept = x.redistribute_by_dict(placements_dict={"dp": Shard(1)}, default_placement_mode="keep")
    assert kept.placements == [Shard(1), Shard(1)]
    whole = x.redistribute_by_dict(
        placements_dict={"dp": Shard(1)}, default_placement_mode="replicate"
    )
    assert whole.placements == [Shard(1), Replicate()]
    other = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ep"))
    moved = x.redistribute_by_dict(other, {}, default_placement_mode="keep")
    assert moved.placements == [Shard(1), Replicate()] and torch.equal(moved.to_torch(), value)
    message = r"no placement for axis 'tp' of .*\n  Fix: name every axis"
    with pytest.raises(PlacementError, match=message):
        x.redistribute_by_dict(placements_dict={"dp": Shard(0)})
    with pytest.raises(
        PlacementError, match="default_placement_mode='guess': expected 'raise_error'"
    ):
        x.redistribute_by_dict(placements_dict={}, default_placement_mode="guess")  # type: ignore[arg-type]
    with pytest.raises(PlacementError, match="has no axis names"):
        x.redistribute_by_dict(TWO, {"dp": Shard(0)})


def test_mixed_meshes_raise_at_the_call() -> None:
    x, y = dtorch.ones(4, device_mesh=TWO), dtorch.ones(4, device_mesh=FOUR)
    message = (
        r"unrelated meshes:\n  DeviceMesh\('cpu', \[0, 1\]\)"
        r"\n  DeviceMesh\('cpu', \[0, 1, 2, 3\]\)"
    )
    for call in (lambda: x + y, lambda: dtorch.jit(torch.add)(x, y), lambda: x.add_(y)):
        with pytest.raises(MeshError, match=message):
            call()


def test_to() -> None:
    value = torch.arange(6.0).view(3, 2)
    x = dtorch.Tensor(value, device_mesh=TWO, placements=[Shard(0)])
    assert x.to(torch.float64).dtype == torch.float64 and x.double().placements == [Shard(0)]
    assert x.to("cpu") is x and x.to(torch.float32) is x and x.cpu() is x
    assert x.to("cpu:3").device_mesh == dtorch.DeviceMesh("cpu", [3])
    assert x.to("cpu:3", torch.int64).tolist() == value.long().tolist()
    assert x.to(device="cpu", dtype=torch.half).dtype == torch.half
    y = x.to(GRID, placements=[Shard(0), Shard(1)])
    assert y.device_mesh == GRID and torch.equal(y.to_torch(), value)
    assert x.to(device_mesh=FOUR).device_mesh == FOUR
    assert x.to(FOUR, torch.float64).dtype == torch.float64
    assert x.to(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
    assert x.to(torch.float32, copy=True) is not x
    if not torch.cuda.is_available():
        with pytest.raises(MeshError, match="'cuda'"):
            x.cuda()


def test_conversions_are_differentiable() -> None:
    x = dtorch.ones(4, device_mesh=TWO, placements=[Shard(0)], requires_grad=True)
    y = x.to(FOUR, torch.float64).redistribute(placements=[Replicate()]) * torch.arange(4.0)
    y.sum().backward()
    assert (
        x.grad is not None and x.grad.tolist() == [0, 1, 2, 3] and x.grad.placements == [Shard(0)]
    )


def test_properties() -> None:
    x = dtorch.rand(5, 3, device_mesh=dtorch.DeviceMesh("cpu", [7, 9]), placements=[Shard(0)])
    assert (x.shape, x.ndim, x.dtype, x.device) == ((5, 3), 2, torch.float32, torch.device("cpu"))
    assert x.numel() == 15 and x.size(0) == 5 and x.stride() == (3, 1) and x.is_contiguous()
    assert isinstance(x, torch.Tensor) and torch.is_tensor(x) and x.is_leaf and not x.is_cuda
    assert x.element_size() == 4 and x.storage_offset() == 0 and x.T.shape == (3, 5)
    assert not hasattr(x, "no_such_attribute")


# -- fetching ------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS, ids=str)
def test_fetching(mesh: dtorch.DeviceMesh, placements: list[Any]) -> None:
    for value in filter(lambda v: reducible(v, placements), values()):
        t = dtorch.Tensor(value, device_mesh=mesh, placements=placements)
        equal = {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(t.to_torch(), value, **equal)
        torch.testing.assert_close(t.to_torch_async().get(), value, **equal)
        assert str(t.tolist()) == str(value.tolist())
        if value.dtype != torch.bfloat16:
            numpy.testing.assert_array_equal(t.numpy(), value.numpy())
            numpy.testing.assert_array_equal(numpy.asarray(t), value.numpy())


def test_what_is_fetched_is_the_callers() -> None:
    x = dtorch.Tensor(torch.ones(4), device_mesh=TWO)
    fetched = x.to_torch()
    fetched.zero_()
    x.numpy()[:] = 5
    x.local_shards()[0].zero_()
    assert x.tolist() == [1.0] * 4
    assert not fetched.is_inference() and not fetched.requires_grad
    (fetched.requires_grad_() * 2).sum().backward()


def test_local_shards() -> None:
    value = torch.arange(10.0).view(5, 2)
    x = dtorch.Tensor(
        value, device_mesh=dtorch.DeviceMesh("cpu", [3, 1, 2, 0]), placements=[Shard(0)]
    )
    shards = x.local_shards()
    assert list(shards) == [3, 1, 2, 0]
    assert [s.tolist() for s in shards.values()] == [
        value[:2].tolist(),
        value[2:4].tolist(),
        value[4:].tolist(),
        [],
    ]
    assert shards[0].shape == (0, 2)
    p = dtorch.Tensor(value, device_mesh=TWO, placements=[Partial()]).local_shards()
    assert torch.equal(p[0] + p[1], value)


def test_scalars_become_python_numbers() -> None:
    for value in (2.5, 3, True, 1 + 2j):
        for placements in ([Replicate()], [Partial()] if value is not True else [Replicate()]):
            t = dtorch.Tensor(torch.tensor(value), device_mesh=TWO, placements=placements)
            assert t.item() == value and type(t.item()) is type(value)
            assert t.tolist() == value and bool(t) is True
    t = dtorch.Tensor(torch.tensor([[2]]), device_mesh=TWO, placements=[Shard(0)])
    assert int(t) == 2 and float(t) == 2.0 and [10, 20, 30][t] == 30 and complex(t) == 2
    assert list(range(t)) == [0, 1]
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        dtorch.ones(2, device_mesh=TWO).item()
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value"):
        bool(dtorch.ones(2, device_mesh=TWO))


def test_iteration_and_membership() -> None:
    x = dtorch.Tensor(torch.arange(6).view(3, 2), device_mesh=TWO, placements=[Shard(0)])
    assert [row.tolist() for row in x] == [[0, 1], [2, 3], [4, 5]]
    _, _, c = x
    assert c.tolist() == [4, 5] and 5 in x and 7 not in x
    with pytest.raises(TypeError, match="len\\(\\) of a 0-d tensor"):
        len(dtorch.ones((), device_mesh=TWO))
    with pytest.raises(TypeError, match="iteration over a 0-d tensor"):
        iter(dtorch.ones((), device_mesh=TWO))


def test_numpy_refuses_what_pytorch_refuses() -> None:
    x = dtorch.ones(2, device_mesh=TWO, requires_grad=True)
    with pytest.raises(RuntimeError, match="Can't call numpy\\(\\) on Tensor that requires grad"):
        x.numpy()
    assert x.numpy(force=True).tolist() == [1, 1] and x.detach().numpy().tolist() == [1, 1]
    with pytest.raises(TypeError, match="BFloat16"):
        dtorch.ones(2, dtype=torch.bfloat16).numpy()


def test_conjugated_and_negative_views() -> None:
    value = torch.randn(4, 3, dtype=torch.complex64)
    x = dtorch.Tensor(value, device_mesh=TWO, placements=[Shard(0)])
    assert x.conj().is_conj() and torch.equal(x.conj().to_torch(), value.conj())
    assert torch.equal(x.conj().imag.to_torch(), value.conj().imag)
    assert torch.equal(x.mH.redistribute(placements=[Shard(0)]).to_torch(), value.mH)
    assert torch.equal(dtorch.Tensor(value.conj(), device_mesh=TWO).to_torch(), value.conj())
    assert repr(x.conj()).startswith(repr(value.conj().resolve_conj()))


# -- Python protocols ----------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS, ids=str)
def test_deepcopy_and_pickle(mesh: dtorch.DeviceMesh, placements: list[Any]) -> None:
    value = torch.randn(5, 3)
    x = dtorch.Tensor(value, device_mesh=mesh, placements=placements)
    for copied in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), x.clone()):
        assert type(copied) is dtorch.Tensor and torch.equal(copied.to_torch(), value)
        assert (copied.device_mesh, copied.placements) == (x.device_mesh, x.placements)
        copied.zero_()
        assert torch.equal(x.to_torch(), value)


def test_copies_of_parameters_and_modules() -> None:
    p = torch.nn.Parameter(dtorch.rand(4, 2, device_mesh=TWO, placements=[Shard(0)]))
    assert isinstance(p, torch.nn.Parameter) and isinstance(p, dtorch.Tensor)
    assert p.placements == [Shard(0)] and p.requires_grad and p.is_leaf
    for copied in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert isinstance(copied, torch.nn.Parameter) and copied.requires_grad
        assert copied.placements == [Shard(0)] and torch.equal(copied.to_torch(), p.to_torch())
    frozen = torch.nn.Parameter(p.detach(), requires_grad=False)
    assert not copy.deepcopy(frozen).requires_grad
    assert not torch.nn.Parameter(
        dtorch.ones(2, dtype=torch.int64), requires_grad=False
    ).requires_grad

    module = torch.nn.Linear(2, 3)
    module.weight = torch.nn.Parameter(
        dtorch.Tensor(module.weight, device_mesh=TWO, placements=[Shard(0)])
    )
    module.bias = torch.nn.Parameter(
        dtorch.Tensor(module.bias, device_mesh=TWO, placements=[Shard(0)])
    )
    twin = copy.deepcopy(module)
    twin.weight.data.zero_()
    assert [n for n, _ in module.named_parameters()] == ["weight", "bias"]
    assert module.weight.abs().sum().item() > 0 and twin.weight.abs().sum().item() == 0
    shared = copy.deepcopy([p, p])
    assert shared[0] is shared[1]


def test_deepcopy_keeps_a_view_and_a_result_of_autograd_apart() -> None:
    x = dtorch.ones(3, device_mesh=TWO, requires_grad=True)
    assert copy.deepcopy(x).requires_grad
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(x * 2)


def test_torch_save_and_load() -> None:
    x = dtorch.rand(3, 2, device_mesh=TWO, placements=[Shard(0)])
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    y = torch.load(file, weights_only=False)["x"]
    assert y.placements == [Shard(0)] and torch.equal(y.to_torch(), x.to_torch())


def test_a_state_dict_goes_through() -> None:
    module = torch.nn.Linear(2, 2)
    module.weight = torch.nn.Parameter(
        dtorch.Tensor(module.weight, device_mesh=TWO, placements=[Shard(0)])
    )
    saved = {k: v.clone() for k, v in module.state_dict().items()}
    with torch.no_grad():
        module.weight.zero_()
    module.load_state_dict(saved)
    assert torch.equal(module.weight.detach().to_torch(), saved["weight"].to_torch())


def test_methods_that_need_memory_are_refused() -> None:
    t = dtorch.Tensor(torch.ones(4), device_mesh=TWO, placements=[Shard(0)])
    for call in (
        lambda: t.apply_(lambda v: v + 1),
        lambda: t.map_(torch.ones(4), lambda a, b: a + b),
        lambda: t.map2_(t, t, lambda a, b, c: a),
    ):
        with pytest.raises(TypeError, match=r"apply_|map2?_\(\) needs the memory .*\n  Fix: use"):
            call()
    for holder in (t, torch.nn.Parameter(t), t.clone().requires_grad_() * 2):
        with pytest.raises(RuntimeError, match=r"data_ptr\(\) needs the memory of the tensor"):
            holder.data_ptr()
    assert t.tolist() == [1] * 4


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS, ids=str)
def test_dlpack_exports_a_copy(mesh: dtorch.DeviceMesh, placements: list[Any]) -> None:
    value = torch.arange(8.0).view(4, 2)
    t = dtorch.Tensor(value, device_mesh=mesh, placements=placements)
    for source in (t, torch.nn.Parameter(t)):
        assert source.__dlpack_device__() == value.__dlpack_device__()
        for copy_ in (None, True):
            got = torch.from_dlpack(source, copy=copy_)
            assert type(got) is torch.Tensor and torch.equal(got, value)
            got.zero_()
        numpy.testing.assert_array_equal(numpy.from_dlpack(source), value.numpy())
        with pytest.raises(BufferError, match="without a copy"):
            torch.from_dlpack(source, copy=False)
    assert torch.equal(t.to_torch(), value)


def test_hash_equality_and_sets() -> None:
    x, y = dtorch.ones(2, device_mesh=TWO), dtorch.ones(2, device_mesh=TWO)
    assert len({x, y, x}) == 2 and {x: 1}[x] == 1
    assert (x == y).tolist() == [True, True] and torch.equal(x, y) and torch.allclose(x, y)
    assert x.ne(y).any().item() is False


def test_a_donated_tensor_raises() -> None:
    from dtorch.errors import DonatedError

    x = dtorch.ones(4, device_mesh=TWO, placements=[Shard(0)])
    y = dtorch.jit(lambda t: t + 1, donate_argnums=0)(x)
    assert y.tolist() == [2.0] * 4
    expected = re.escape("a tensor of shape [4] was donated to a jitted call (donate_argnums)")
    with pytest.raises(DonatedError, match=expected):
        x.to_torch()
    with pytest.raises(DonatedError, match=expected):
        (x + 1).to_torch()


def test_torch_load_trusts_tensors_and_their_layouts() -> None:
    mesh = dtorch.DeviceMesh("cpu", [[0, 1]], ("dp", "tp"))
    x = dtorch.rand(4, 3, device_mesh=mesh, placements=[Replicate(), Shard(0)])
    stage = dtorch.ones(2, device_mesh=mesh.unbind("dp")[0])
    file = io.BytesIO()
    torch.save({"x": x, "parameter": torch.nn.Parameter(x), "stage": stage}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["x"].to_torch(), x.to_torch())
    assert loaded["x"].placements == x.placements
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    assert loaded["stage"].device_mesh.stage == stage.device_mesh.stage
