"""Gradients where autograd needs help: index assignment, autocast, hidden mutation, jit."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import sample

import dtorch
from dtorch import Replicate, Shard
from dtorch.errors import MutationError, TraceError, WorkerError

F = torch.nn.functional
PAIR = dtorch.DeviceMesh("cpu", [0, 1])
INDICES: list[Any] = [
    1,
    slice(1, 3),
    (slice(None), 1),
    torch.tensor([0, 2]),
    (Ellipsis, 0),
    torch.tensor([True, False, True, False]),
    (None, 1),
]
VALUES: list[Any] = [0, torch.tensor(3.0), torch.ones(1, 1)]


def plain(value: Any) -> Any:
    return value.detach().to_torch() if isinstance(value, dtorch.Tensor) else value


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_index_assignment_to_a_tracked_tensor(placement: Any, index: Any, value: Any) -> None:
    def run(place: Any) -> list[Any]:
        x = place(torch.arange(12.0).reshape(4, 3) + 1, placement).requires_grad_()
        v = value
        if isinstance(value, torch.Tensor):
            v = place(value, Replicate()).requires_grad_()
        y = x * 2
        y[index] = v
        (y * y).sum().backward()
        return [plain(t) for t in (y.detach(), x.grad, getattr(v, "grad", None))]

    expected = run(lambda t, _: t.clone())
    found = run(lambda t, p: dtorch.Tensor(t, device_mesh=PAIR, placements=[p]))
    for a, b in zip(expected, found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_index_assignment_to_a_leaf_is_refused_as_in_torch() -> None:
    x = dtorch.ones(2).requires_grad_()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        x[0] = 1


@pytest.mark.parametrize("size", [1, 2])
def test_linear_trains_under_autocast(size: int) -> None:
    mesh = dtorch.DeviceMesh("cpu", list(range(size)))
    x, w = torch.randn(6, 4), torch.randn(3, 4)

    def grad(x: Any, w: Any) -> Any:
        w = w.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, w) @ torch.ones(3, 2)
        y.float().square().sum().backward()
        return w.grad

    expected = grad(x, w.clone())
    mine = dtorch.Tensor(x, device_mesh=mesh, placements=[Shard(0)])
    found = grad(mine, dtorch.Tensor(w, device_mesh=mesh))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.to_torch(), expected, rtol=0.02, atol=0.02)
    assert size > 1 or torch.equal(found.to_torch(), expected)


def test_a_module_trains_under_autocast_in_jit() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    x = torch.randn(2, 4)

    def loss(params: Any, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.func.functional_call(module, params, (x,))
        return y.float().square().mean()

    named = dict(module.named_parameters())
    expected = torch.autograd.grad(loss(named, x), list(named.values()))
    mine = {k: dtorch.Tensor(v).requires_grad_() for k, v in named.items()}
    found = torch.autograd.grad(dtorch.jit(loss)(mine, x), list(mine.values()))
    assert all(torch.equal(f.to_torch(), e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("size", [1, 3])
def test_batch_norm_updates_its_statistics_once(size: int) -> None:
    mesh = dtorch.DeviceMesh("cpu", list(range(size)))
    x = torch.randn(6, 2)
    reference = torch.nn.BatchNorm1d(2)
    mine = copy.deepcopy(reference)
    for name, value in list(mine.named_parameters()):
        parameter = torch.nn.Parameter(dtorch.Tensor(value, device_mesh=mesh))
        setattr(mine, name, parameter)
    for name, value in list(mine.named_buffers()):
        setattr(mine, name, dtorch.Tensor(value, device_mesh=mesh))
    for _ in range(2):
        expected, found = reference(x), mine(dtorch.Tensor(x, device_mesh=mesh))
        expected.square().sum().backward()
        found.square().sum().backward()
    torch.testing.assert_close(plain(found), expected.detach())
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(plain(getattr(mine, name)), getattr(reference, name))
    torch.testing.assert_close(plain(mine.weight.grad), reference.weight.grad)


def test_batch_norm_does_not_lose_the_statistics_of_the_caller() -> None:
    x = torch.randn(6, 2)
    theirs, given = ((torch.zeros(2), torch.ones(2)) for _ in range(2))
    for _ in range(2):
        F.batch_norm(x, *theirs, training=True)
        F.batch_norm(dtorch.Tensor(x), *given, training=True)
    assert all(map(torch.equal, given, theirs))
    with pytest.raises(MutationError, match="which dtorch has only a copy of"):
        jitted = dtorch.jit(lambda x, *given: F.batch_norm(x, *given, training=True))
        jitted(dtorch.Tensor(x), *given)


class Scattered(torch.autograd.Function):
    """Indexing whose backward allocates memory and writes to it."""

    @staticmethod
    def forward(ctx: Any, x: Any, index: Any) -> Any:
        ctx.save_for_backward(index)
        ctx.size = x.shape
        return x[index]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (index,) = ctx.saved_tensors
        made = torch.zeros(ctx.size)
        made[:2] += grads[0][:2]
        return torch.mul(made.index_add_(0, index, grads[0]), 2, out=made), None


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_a_backward_may_write_to_torch_tensors(placement: Any) -> None:
    x, index = torch.randn(4, 3), torch.tensor([2, 0, 2])
    expected, mine = x.clone().requires_grad_(), dtorch.Tensor(x, device_mesh=PAIR)
    mine = mine.redistribute(PAIR, [placement]).requires_grad_()
    Scattered.apply(expected, index).square().sum().backward()
    Scattered.apply(mine, dtorch.Tensor(index, device_mesh=PAIR)).square().sum().backward()
    assert mine.grad is not None and mine.grad.placements == [placement]
    assert torch.equal(mine.grad.to_torch(), expected.grad)


def test_a_write_to_a_torch_tensor_is_seen() -> None:
    target = base = torch.zeros(3, 2)
    target += dtorch.ones(3, 2, device_mesh=PAIR, placements=[Shard(0)])
    assert target is base and base.tolist() == [[1.0, 1.0]] * 3
    base[:, 1].mul_(dtorch.full((3,), 4.0))
    torch.add(dtorch.ones(2), 1, out=base[0])
    assert base.tolist() == [[2.0, 2.0], [1.0, 4.0], [1.0, 4.0]]


def test_the_gradient_of_a_jitted_call_is_not_silently_constant() -> None:
    cube = dtorch.jit(lambda x: (x**3).sum())
    x = dtorch.Tensor(torch.tensor([1.0, 2.0]), requires_grad=True)
    with pytest.raises(TraceError, match="cannot be differentiated again"):
        torch.autograd.grad(cube(x) + (x**4).sum(), x, create_graph=True)
    second = dtorch.jit(dtorch.grad(lambda x: dtorch.grad(lambda y: (y**3).sum())(x).sum()))
    assert second(x.detach()).tolist() == [6.0, 12.0]


def test_a_changed_argument_does_not_lose_its_graph() -> None:
    def change(x: Any, b: Any) -> Any:
        b.add_(x * x)
        return (b * x).sum()

    x = dtorch.ones(2).requires_grad_()
    with pytest.raises(TraceError, match="and does not return it"):
        dtorch.jit(change)(x, dtorch.zeros(2))


def test_a_changed_capture_does_not_lose_its_graph() -> None:
    x, total = dtorch.ones(2).requires_grad_(), dtorch.zeros(2)

    def change(x: Any) -> Any:
        total.add_(x * x)
        return (total * x).sum()

    with pytest.raises(TraceError, match="changes a captured tensor"):
        dtorch.jit(change)(x)
    assert total.tolist() == [0.0, 0.0]
    assert not total.requires_grad

    def count(x: Any) -> Any:
        total.add_((x * x).detach())
        return (total * x).sum()

    dtorch.jit(count)(x).backward()
    assert total.tolist() == [1.0, 1.0]
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]


def test_a_changed_argument_that_is_returned_keeps_its_graph() -> None:
    def change(x: Any, b: Any) -> Any:
        b.add_(x * x)
        return (b * x).sum(), b

    x, b = dtorch.ones(2).requires_grad_(), dtorch.zeros(2)
    value, changed = dtorch.jit(change)(x, b)
    assert changed is b
    (value + b.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0]


def test_backward_inside_jit_is_refused_where_its_result_would_be_lost() -> None:
    x = dtorch.ones(2).requires_grad_()
    with pytest.raises(TraceError, match=r"whose \.grad it cannot set"):
        dtorch.jit(lambda x: (x * x).sum().backward())(x)

    def inner(x: Any) -> Any:
        y = x.detach().requires_grad_()
        (y * y).sum().backward()
        return y.grad

    assert dtorch.jit(inner)(dtorch.ones(2)).tolist() == [2.0, 2.0]


def test_data_cannot_be_set_inside_jit() -> None:
    def set_data(x: Any) -> Any:
        x = x.clone()
        x.data = x * 2
        return x

    with pytest.raises(TraceError, match=r"x\.data = \.\.\. cannot be traced"):
        dtorch.jit(set_data)(dtorch.ones(2))


def test_a_write_through_another_dtype_keeps_the_base() -> None:
    def magnitude(x: Any) -> Any:
        x = x.clone()
        x.view(torch.int32).bitwise_and_(0x7FFFFFFF)
        return x

    assert dtorch.jit(magnitude)(dtorch.Tensor(torch.tensor([-1.0, 2.0]))).tolist() == [1.0, 2.0]


def test_one_hot_checks_its_classes() -> None:
    ids = dtorch.Tensor(torch.tensor([1, 3, 0]), device_mesh=PAIR, placements=[Shard(0)])
    found = F.one_hot(ids, 5)
    assert found.placements == [Shard(0)]
    assert torch.equal(found.to_torch(), F.one_hot(torch.tensor([1, 3, 0]), 5))
    assert torch.equal(F.one_hot(ids).to_torch(), F.one_hot(torch.tensor([1, 3, 0])))
    with pytest.raises(WorkerError, match="Class values must be smaller than num_classes"):
        F.one_hot(dtorch.Tensor(torch.tensor([7])), 5).to_torch()


def test_linalg_checks_run() -> None:
    a = torch.rand(3, 3) + 3 * torch.eye(3)
    mine = dtorch.Tensor(a).requires_grad_()
    inverse = torch.linalg.inv(mine)
    assert torch.equal(inverse.detach().to_torch(), torch.linalg.inv(a))
    inverse.sum().backward()
    with pytest.raises(WorkerError, match="singular"):
        torch.linalg.inv(dtorch.zeros(3, 3)).to_torch()


def test_fused_optimizers_step() -> None:
    start = torch.rand(3)
    mine, reference = torch.nn.Parameter(dtorch.Tensor(start)), torch.nn.Parameter(start.clone())
    for parameter in (mine, reference):
        optimizer = torch.optim.AdamW([parameter], fused=True)
        (parameter * parameter).sum().backward()
        optimizer.step()
    assert torch.equal(plain(mine.detach()), reference.detach())


def test_gradients_have_the_layout_of_what_they_belong_to() -> None:
    """Also where autograd leaves them otherwise: replicated, partial, or on a later stage."""
    value = torch.rand(4, 6)
    x = dtorch.Tensor(value, device_mesh=PAIR, placements=[Shard(1)]).requires_grad_()
    y = dtorch.Tensor(value, device_mesh=PAIR, placements=[Shard(0)])
    w = dtorch.Tensor(torch.rand(6, 3), device_mesh=PAIR).requires_grad_()
    (found,) = torch.autograd.grad((x + y).sum(), x)
    assert found.placements == [Shard(1)]
    for _ in range(2):
        (y @ w).sum().backward()
    assert w.grad is not None
    assert w.grad.placements == [dtorch.Replicate()]
    assert w.grad is w.grad
    torch.testing.assert_close(w.grad.to_torch(), 2 * value.sum(0)[:, None].expand(6, 3))
    first, second = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)).unbind("pp")
    early = dtorch.ones(3, device_mesh=first).requires_grad_()
    (early * dtorch.ones(3, device_mesh=second)).sum().backward()
    assert early.grad is not None
    assert early.grad.device_mesh == first
    early.grad = None
    assert early.grad is None


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"dim": 1}, {"dim": -2, "keepdim": True}], ids=str)
@pytest.mark.parametrize("wrap", [lambda f: f, dtorch.jit])
def test_the_gradient_of_a_product_is_pytorchs(wrap: Any, options: Any, zeros: int) -> None:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    x.view(-1)[:zeros] = 0

    def grads(x: torch.Tensor, f: Any) -> list[Any]:
        x.requires_grad_()
        loss = f(x).sin().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=f is product)
        if f is not product:
            return [first]
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return [first, second]

    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.prod(x, **options) if options else x.prod()

    expected = grads(x.clone(), product)
    for place in (Replicate(), Shard(0), Shard(1)):
        mesh = dtorch.DeviceMesh("cpu", [0]) if place.is_replicate() else PAIR
        f = wrap(product)
        found = grads(dtorch.Tensor(x, device_mesh=mesh, placements=[place]), f)
        for mine, theirs in zip(found, expected, strict=False):
            torch.testing.assert_close(plain(mine), theirs.detach(), rtol=1e-5, atol=1e-5)
        assert len(mesh.devices) > 1 or torch.equal(plain(found[0]), expected[0].detach())


# -- writes through views and to torch tensors ---------------------------------------------------


def _written_through_views(draw: Any, make: Callable[[torch.Tensor, bool], Any]) -> list[Any]:
    """Views of tensors that require no grad, and writes to them of what does."""
    a, b = make(torch.arange(12.0).reshape(3, 4) + 1, True), make(torch.arange(6.0) + 0.5, True)
    tensors = [make(torch.zeros(3, 4), False), make(torch.ones(4, 6), False)]
    for _ in range(draw.randint(2, 6)):
        t, value = draw.choice(tensors), draw.choice((a, b))
        value = value.sum() if draw.random() < 0.5 else value.reshape(-1)[0]
        match draw.randrange(9):
            case 0:
                tensors.append(t[..., : t.shape[-1] // 2 + 1])
            case 1 if t.is_contiguous():
                tensors.append(t.view(-1))
            case 2 if t.ndim > 1:
                tensors.append(t.transpose(0, 1))
            case 3 if t.ndim > 1:
                tensors.append(t[0])
            case 4:
                tensors.append(t.narrow(0, 0, max(t.shape[0] - 1, 1)))
            case 5:
                t.add_(value)
            case 6:
                t.mul_(value)
            case 7:
                t[0] = value
            case _:
                t.add_(draw.choice(tensors).sum())
    loss = sum((t * (i + 1)).sum() for i, t in enumerate(tensors))
    if not loss.requires_grad:
        return [t.detach() for t in tensors]
    grads = torch.autograd.grad(loss, (a, b), allow_unused=True)
    return [*(t.detach() for t in tensors), *grads, *(t.requires_grad for t in tensors)]


def _outcome(seed: int, make: Callable[[torch.Tensor, bool], Any]) -> list[Any]:
    try:
        return _written_through_views(random.Random(seed), make)
    except RuntimeError as error:  # PyTorch refuses some writes
        return [str(error)]


@pytest.mark.parametrize("seed", sample(range(200), 40, 0))
def test_what_is_written_through_a_view_has_its_gradient(seed: int) -> None:
    expected = _outcome(seed, lambda t, g: t.clone().requires_grad_(g))
    for placement in (Replicate(), Shard(0), Shard(-1)):

        def make(t: torch.Tensor, requires_grad: bool, placement: Any = placement) -> Any:
            made = dtorch.tensor(t, device_mesh=PAIR, placements=[placement])
            return made.requires_grad_(requires_grad)

        for ours, theirs in zip(_outcome(seed, make), expected, strict=True):
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(ours.to_torch(), theirs)
            else:
                assert ours == theirs


def test_a_torch_tensor_that_is_written_to_twice_has_both_writes() -> None:
    def run(d: Any) -> list[Any]:
        w = torch.full((4,), 2.0, requires_grad=True)
        fresh, made = torch.zeros(4), w * 1
        for target in (fresh, made):
            assert target.add_(d) is target
            target.mul_(d * 3)
            target[1:].add_(d[1:])
        (fresh * made).sum().backward()
        return [fresh.detach(), made.detach(), w.grad]

    d = torch.arange(4.0) + 1
    plain = d.clone().requires_grad_()
    distributed = dtorch.tensor(d, device_mesh=PAIR, placements=[Shard(0)])
    distributed.requires_grad_()
    for ours, theirs in zip(run(distributed), run(plain), strict=True):
        assert type(ours) is torch.Tensor
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(distributed.grad.to_torch(), plain.grad)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("wrap", [lambda f: f, dtorch.jit])
def test_the_gradient_of_what_a_mask_fills_in_is_pytorchs(
    wrap: Any, in_place: bool, size: int
) -> None:
    x, weight, mask = torch.randn(5, 7, 3), torch.randn(5, 7, 3), torch.rand(7, 1) > 0.5

    def grads(x: Any, weight: Any, mask: Any, value: Any) -> tuple[Any, ...]:
        base = x * 2
        filled = base.masked_fill_(mask, value) if in_place else base.masked_fill(mask, value)
        found = torch.autograd.grad((filled * filled * weight).sum(), (x, value), create_graph=True)
        return *found, *torch.autograd.grad(found[0].sum() + found[1] * value, (x, value))

    def given(place: Callable[[torch.Tensor, int], Any]) -> list[Any]:
        tensors = [place(x, 1), place(weight, 1), place(mask, 0), place(torch.tensor(0.7), -1)]
        return [t.requires_grad_() if i in (0, 3) else t for i, t in enumerate(tensors)]

    mesh = dtorch.DeviceMesh("cpu", range(size))

    def spread(tensor: torch.Tensor, dim: int) -> Any:
        placement = Replicate() if dim < 0 else Shard(dim)
        return dtorch.Tensor(tensor, device_mesh=mesh, placements=[placement])

    expected = grads(*given(lambda t, _: t.clone()))
    found = [g.detach().to_torch() for g in wrap(grads)(*given(spread))]
    for ours, theirs in zip(found, expected, strict=True):
        if size == 1:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs)


def test_batched_gradients_of_what_a_mask_fills_in() -> None:
    x, mask, batch = torch.randn(4, 5), torch.rand(4, 1) > 0.3, torch.randn(3, 4, 5)

    def batched(x: Any, mask: Any, value: Any, batch: Any) -> Any:
        return torch.autograd.grad(
            x.masked_fill(mask, value), (x, value), batch, is_grads_batched=True
        )

    value = torch.tensor(0.5, requires_grad=True)
    expected = batched(x.clone().requires_grad_(), mask, value, batch)
    given = [dtorch.tensor(t.detach(), device_mesh=PAIR) for t in (x, mask, value, batch)]
    found = batched(given[0].requires_grad_(), given[1], given[2].requires_grad_(), given[3])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.to_torch(), theirs)


def test_a_result_of_a_jitted_call_that_is_not_used_has_no_gradient() -> None:
    """PyTorch's kernels take another way where a gradient is missing than where it is zero."""
    x = torch.randn(5, 3)
    expected = x.clone().requires_grad_()
    torch.linalg.svd(expected, full_matrices=False)[2].abs().sum().backward()

    seen: list[Any] = []

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.set_materialize_grads(False)
            return x * 1, x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            seen.append([g is not None for g in grads])
            return next(g for g in grads if g is not None)

    given = dtorch.tensor(x, device_mesh=dtorch.DeviceMesh("cpu", [0])).requires_grad_()
    jitted = dtorch.jit(lambda x: torch.linalg.svd(x, full_matrices=False))
    jitted(given)[2].abs().sum().backward()
    assert given.grad is not None
    assert expected.grad is not None and torch.equal(given.grad.to_torch(), expected.grad)
    both = dtorch.jit(Both.apply)
    given.grad = None
    for used in (0, 1, 0):
        both(given)[used].sum().backward()
    assert [True, False] in seen and [False, True] in seen
    assert torch.equal(given.grad.to_torch(), torch.full((5, 3), 3.0))


@pytest.mark.parametrize("wrap", [lambda f: f, dtorch.jit])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_weight_that_requires_grad_multiplies_strided_values_as_in_pytorch(
    wrap: Any, has_bias: bool
) -> None:
    made = torch.Generator().manual_seed(0)
    base, weight, bias = (torch.randn(s, generator=made) for s in ((2, 334, 128), (128, 128), 128))
    views: list[Any] = [lambda t: t[:, :1], lambda t: t[:, ::2], lambda t: t.mT @ t]
    views += [lambda t: t.transpose(0, 1), lambda t: t[:1].transpose(0, 1), lambda t: t]

    def forward(base: Any, weight: Any, bias: Any) -> list[Any]:
        given = [view(base) for view in views]
        return [F.linear(x, weight, bias) for x in given] + [x @ weight.T for x in given]

    one = dtorch.DeviceMesh("cpu", [0])
    tensors = [base, weight.requires_grad_(), bias.requires_grad_() if has_bias else None]
    placed = [
        None if t is None else dtorch.tensor(t.detach(), device_mesh=one).requires_grad_()
        for t in tensors
    ]
    found = wrap(forward)(placed[0].detach(), *placed[1:])
    for ours, theirs in zip(found, forward(*tensors), strict=True):
        assert torch.equal(ours.detach().to_torch(), theirs.detach())
