"""What inference says where meta kernels are wrong or missing: compared with the CPU kernels."""

import random
from typing import Any

import optree
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtorch.errors import DataDependentError
from dtorch.infer import infer
from dtorch.mesh import DeviceMesh
from dtorch.placement import Replicate
from dtorch.spec import Spec
from dtorch.test.opinfo import entries

aten = torch.ops.aten
ONE = DeviceMesh("cpu", [0])


def spec_of(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return Spec.of(value.shape, value.dtype, ONE, (Replicate(),), value.stride())


def agrees(op: Any, *args: Any) -> None:
    results = op(*args)
    found = infer(op, [spec_of(a) for a in args], {})
    results = results if isinstance(results, tuple) else (results,)
    found = found if isinstance(found, list) else [found]
    for meta, result in zip(found, results, strict=True):
        assert (meta.shape, meta.dtype) == (tuple(result.shape), result.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("parameters", [None, torch.float32, torch.bfloat16])
def test_statistics_of_normalisations(dtype: Any, training: bool, parameters: Any) -> None:
    if parameters not in (None, dtype) and dtype != torch.bfloat16:
        pytest.skip("PyTorch takes no such mixture")
    x = torch.rand(2, 3, 4).to(dtype)
    p = None if parameters is None else torch.rand(3).to(parameters)
    running = torch.rand(3).to(parameters or dtype)
    agrees(aten.native_batch_norm.default, x, p, p, running, running, training, 0.1, 1e-5)
    agrees(aten._native_batch_norm_legit.no_stats, x, p, p, True, 0.1, 1e-5)
    q = None if parameters is None else torch.rand(4).to(parameters)
    agrees(aten.native_layer_norm.default, x, [4], q, q, 1e-5)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("padding", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_embedding_bags_keep(mode: int, padding: int, dtype: Any) -> None:
    weight, indices = torch.rand(5, 3).to(dtype), torch.tensor([0, 1, 2, 3])
    for op in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default):
        args = (weight, indices, torch.tensor([0, 2]), False, mode, False, None, False, padding)
        agrees(op, *args)


def test_gradients_have_the_shape_of_their_argument() -> None:
    x, target = torch.rand(3, 4), torch.tensor([0, 3, 1])
    agrees(aten.multi_margin_loss_backward.default, torch.tensor(1.0), x, target, 1, 1.0, None, 1)
    agrees(aten._standard_gamma_grad.default, x, x)
    agrees(aten.binomial.default, torch.full((2, 3), 4.0), torch.rand(2, 3))


@pytest.mark.parametrize("kind", ["c2c", "r2c", "c2r"])
def test_strides_of_fourier_transforms(kind: str) -> None:
    drawn, op = random.Random(0), getattr(aten, f"_fft_{kind}").default
    dtype = torch.float32 if kind == "r2c" else torch.complex64
    for _ in range(200):
        shape = [drawn.choice([1, 1, 2, 3, 4]) for _ in range(drawn.randint(1, 5))]
        x = torch.zeros(shape, dtype=dtype).permute(drawn.sample(range(len(shape)), len(shape)))
        dims = drawn.sample(range(x.ndim), drawn.randint(1, x.ndim))
        last: Any = 2 * x.shape[dims[-1]] - 1 if kind == "c2r" else drawn.random() < 0.5
        result = op(x, dims, 0, last)
        assert described(infer(op, [spec_of(x), dims, 0, last], {})) == described(result)


class Recorded(TorchDispatchMode):
    """Records each operation that is called with what its kernel gives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = optree.tree_map(spec_of, (args, kwargs), none_is_leaf=True)
        result = op(*args, **kwargs)
        tensors = [t for t in leaves_of((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        if not op._schema.is_mutable and all(t.layout is torch.strided for t in tensors):
            self.calls.append((op, *given, [described(t) for t in leaves_of(result)]))
        return result


def leaves_of(value: Any) -> list[Any]:
    is_leaf = lambda x: not isinstance(x, (list, tuple, dict)) or hasattr(x, "dtype")  # noqa: E731
    return optree.tree_leaves(value, is_leaf=is_leaf, none_is_leaf=True)


def described(tensor: Any) -> Any:
    """Shape, dtype and strides."""
    if not hasattr(tensor, "dtype"):
        return None
    stride = tensor.stride() if isinstance(tensor, torch.Tensor) else tuple(tensor.stride)
    return tuple(tensor.shape), tensor.dtype, stride if 0 not in tensor.shape else None


def other_strides(value: Any) -> Any:
    """A tensor of at least two dims with the last two laid out the other way round."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.ndim < 2:
        return value
    return value.detach().mT.contiguous().mT.requires_grad_(value.requires_grad)


def channels_last(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.ndim != 4:
        return value
    laid_out = value.detach().contiguous(memory_format=torch.channels_last)
    return laid_out.requires_grad_(value.requires_grad)


@pytest.mark.timeout(360)  # a minute on a core of its own
@pytest.mark.filterwarnings("ignore")  # what PyTorch says of its own samples
def test_inference_agrees_with_every_kernel_of_the_operator_database() -> None:
    drawn, recorded = random.Random(0), Recorded()
    for entry in entries.database():
        if torch.float32 not in entry.dtypes:
            continue
        grad = entry.supports_autograd
        samples = list(entry.sample_inputs("cpu", torch.float32, requires_grad=grad))
        for sample in drawn.sample(samples, min(len(samples), 1)):
            for change in (lambda value: value, other_strides, channels_last):
                given = (sample.input, sample.args, sample.kwargs)
                x, args, kwargs = optree.tree_map(change, given, none_is_leaf=True)
                run_with_gradients(recorded, entry, x, args, kwargs)
    compared, wrong = set(), {}
    for op, args, kwargs, results in recorded.calls:
        try:
            found = [described(meta) for meta in leaves_of(infer(op, args, kwargs))]
        except (DataDependentError, RuntimeError):  # it depends on data; that is tested elsewhere
            continue
        compared.add(op)
        if found != results:
            wrong[op] = args, kwargs, found, results
    assert len(compared) > 450
    assert wrong == {}


def run_with_gradients(mode: Recorded, entry: Any, x: Any, args: Any, kwargs: Any) -> None:
    try:
        with mode:
            out = entry(x, *args, **kwargs)
            outs = [t for t in leaves_of(out) if getattr(t, "requires_grad", False)]
            sources = [t for t in leaves_of((x, args, kwargs)) if is_source(t)]
            if entry.supports_autograd and outs and sources:
                ones = [torch.ones_like(t) for t in outs]
                torch.autograd.grad(outs, sources, ones, allow_unused=True)
    except Exception:
        return  # PyTorch itself does not take the sample


def is_source(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
