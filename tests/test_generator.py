"""Randomness: PyTorch's own values on one device, and the same global values in every layout."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard

F = torch.nn.functional
ONE = dtorch.DeviceMesh("cpu", [0])
TWO = dtorch.DeviceMesh("cpu", [0, 1])
FOUR = dtorch.DeviceMesh("cpu", [0, 1, 2, 3])
GRID = dtorch.DeviceMesh("cpu", [[0, 1], [2, 3]])
SIXTEEN = dtorch.DeviceMesh("cpu", list(range(16)))
LAYOUTS: list[tuple[dtorch.DeviceMesh, list[Any]]] = [
    (ONE, [Replicate()]),
    *((m, [p]) for m in (TWO, FOUR, SIXTEEN) for p in (Replicate(), Shard(0), Shard(1))),
    (TWO, [Partial()]),
    (GRID, [Shard(0), Shard(1)]),
    (GRID, [Shard(0), Shard(0)]),
    (GRID, [Replicate(), Shard(1)]),
]

CREATORS: dict[str, Callable[..., Any]] = {
    "rand": lambda m, **k: m.rand(31, 6, **k),
    "randn": lambda m, **k: m.randn(31, 6, **k),
    "randn of float64": lambda m, **k: m.randn(31, 6, dtype=torch.float64, **k),
    "rand of bfloat16": lambda m, **k: m.rand(31, 6, dtype=torch.bfloat16, **k),
    "randint": lambda m, **k: m.randint(-5, 100, (31, 6), **k),
    "normal": lambda m, **k: m.normal(1.0, 2.0, (31, 6), **k),
    "496 rows": lambda m, **k: m.randn(496, 3, **k),
}
ON_TENSORS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of everything": lambda x: F.dropout(x, 1.0),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "dropout2d": lambda x: F.dropout2d(x[None, :, :, None], 0.5),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of p": lambda x: torch.bernoulli(x, 0.25),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randn_like of float64": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 3, 50),
    "randint_like without low": lambda x: torch.randint_like(x, 50),
    "normal of tensors": lambda x: torch.normal(x, x.abs() + 1),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 2),
    "multinomial again": lambda x: torch.multinomial(x.softmax(-1), 3, replacement=True),
    "poisson": lambda x: torch.poisson(x.exp()),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 3),
    "normal_": lambda x: torch.empty_like(x).normal_(2, 3),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "random_": lambda x: torch.empty_like(x).random_(3, 9),
    "cauchy_ and geometric_": lambda x: torch.empty_like(x).cauchy_() + x.clone().geometric_(0.3),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "kaiming_uniform_": lambda x: torch.nn.init.kaiming_uniform_(torch.empty_like(x)),
    "randperm": lambda x: x[torch.randperm(x.shape[0])],
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "of the transposed, normal_": lambda x: torch.empty_like(x.T).normal_(),
    "of the transposed, bernoulli_": lambda x: x.clone().T.bernoulli_(0.3),
    "of the transposed, bernoulli_ of a tensor": lambda x: x.clone().T.bernoulli_(x.T.sigmoid()),
    "of the transposed, dropout": lambda x: F.dropout(x.T, 0.4),
    "of every second, uniform_": lambda x: x.clone()[:, ::2].uniform_(),
    "two draws": lambda x: torch.rand_like(x) - torch.randn_like(x),
}


def allowed(placements: list[Any], dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or not any(p.is_partial() for p in placements)


@pytest.mark.parametrize("name", CREATORS)
def test_creators(name: str) -> None:
    create = CREATORS[name]
    torch.manual_seed(11)
    expected, following = create(torch), torch.rand(3)
    for mesh, placements in LAYOUTS:
        if not allowed(placements, expected.dtype):
            continue
        torch.manual_seed(11)
        found = create(dtorch, device_mesh=mesh, placements=placements)
        after = dtorch.rand(3, device_mesh=mesh)
        assert torch.equal(found.to_torch(), expected), (mesh, placements)
        assert torch.equal(after.to_torch(), following)


@pytest.mark.parametrize("name", ON_TENSORS)
def test_draws_on_tensors(name: str) -> None:
    function = ON_TENSORS[name]
    torch.manual_seed(0)
    value = torch.randn(17, 6)
    torch.manual_seed(12)
    expected, following = function(value), torch.rand(3)
    for number, (mesh, placements) in enumerate(LAYOUTS):
        x = dtorch.Tensor(value, device_mesh=mesh, placements=placements)
        for call in (function, dtorch.jit(function)) if number < 4 else (function,):
            torch.manual_seed(12)
            found = call(x)
            after = torch.rand_like(dtorch.empty(3, device_mesh=mesh))
            assert found.dtype == expected.dtype
            if mesh is ONE:
                assert torch.equal(found.to_torch(), expected)
            torch.testing.assert_close(found.to_torch(), expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(after.to_torch(), following), (mesh, placements)


def test_randperm() -> None:
    for mesh in (ONE, TWO, SIXTEEN):
        for placements in ([Shard(0)], [Replicate()]):
            torch.manual_seed(3)
            found = dtorch.randperm(37, device_mesh=mesh, placements=placements)
            torch.manual_seed(3)
            assert torch.equal(found.to_torch(), torch.randperm(37))


def test_dropout_keeps_the_mask_in_the_backward() -> None:
    value = torch.randn(31, 6)
    torch.manual_seed(4)
    t = value.clone().requires_grad_()
    F.dropout(t, 0.4).sum().backward()
    for mesh, placements in LAYOUTS:
        for wrap in (lambda f: f, dtorch.jit):
            torch.manual_seed(4)
            x = dtorch.Tensor(value, device_mesh=mesh, placements=placements, requires_grad=True)
            wrap(lambda a: F.dropout(a, 0.4).sum())(x).backward()
            assert torch.equal(x.grad.to_torch(), t.grad)


def test_attention_with_dropout_is_reproducible() -> None:
    q = torch.randn(2, 4, 8, 4)
    torch.manual_seed(5)
    expected = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    for mesh, placements in ((ONE, [Replicate()]), (TWO, [Shard(1)]), (FOUR, [Shard(0)])):
        x = dtorch.Tensor(q, device_mesh=mesh, placements=placements)
        torch.manual_seed(5)
        found = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        torch.testing.assert_close(found.to_torch(), expected)


def test_both_ways_to_seed() -> None:
    for seed in (dtorch.manual_seed, torch.manual_seed, torch.random.manual_seed):
        assert isinstance(seed(9), torch.Generator)
        first = dtorch.rand(4, device_mesh=TWO)
        second = dtorch.rand(4, device_mesh=TWO)
        seed(9)
        assert torch.equal(first.to_torch(), dtorch.rand(4, device_mesh=FOUR).to_torch())
        assert torch.equal(second.to_torch(), dtorch.rand(4, device_mesh=ONE).to_torch())
        assert not torch.equal(first.to_torch(), second.to_torch())
    torch.manual_seed(9)
    torch.manual_seed(9)
    assert torch.equal(dtorch.rand(4).to_torch(), first.to_torch())


def test_a_state_that_was_saved_can_be_restored() -> None:
    torch.manual_seed(1)
    dtorch.rand(2)
    state = torch.get_rng_state()
    first = dtorch.rand(4).tolist()
    torch.set_rng_state(state)
    again = dtorch.rand(4).tolist()
    torch.set_rng_state(state)
    assert dtorch.rand(4).tolist() == again
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        seeded = dtorch.rand(4).tolist()
    torch.manual_seed(7)
    assert dtorch.rand(4).tolist() == seeded
    assert len(first) == 4


def test_draws_twice_in_a_jitted_function_called_twice() -> None:
    f = dtorch.jit(lambda: (torch.randn(4), torch.randn(4)))
    torch.manual_seed(0)
    expected = [torch.randn(4) for _ in range(4)]
    torch.manual_seed(0)
    found = [t.to_torch() for _ in range(2) for t in f()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len({tuple(t.tolist()) for t in found}) == 4 and f.cache_info().currsize == 1


def test_jitted_and_eager_draws_continue_each_other() -> None:
    f = dtorch.jit(lambda x: torch.rand(3) + x)
    torch.manual_seed(0)
    expected = [torch.rand(3) for _ in range(6)]
    torch.manual_seed(0)
    found = []
    for mesh in (ONE, TWO, FOUR):
        found.append(dtorch.rand(3, device_mesh=mesh))
        found.append(f(dtorch.zeros(3, device_mesh=mesh)))
    assert [t.tolist() for t in found] == [t.tolist() for t in expected]


def test_a_generator_argument_is_read_and_written_back() -> None:
    mine, plain = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    x = dtorch.zeros(6, device_mesh=TWO, placements=[Shard(0)])
    f = dtorch.jit(lambda x, g: torch.bernoulli(x + 0.5, generator=g))
    torch.manual_seed(2)
    for _ in range(2):
        found = [
            dtorch.rand(6, device_mesh=TWO, placements=[Shard(0)], generator=mine),
            torch.randint(9, (6,), generator=mine),
            x.clone().normal_(generator=mine),
            f(x, mine),
            dtorch.randperm(6, generator=mine, device_mesh=FOUR),
        ]
        expected = [
            torch.rand(6, generator=plain),
            torch.randint(9, (6,), generator=plain),
            torch.zeros(6).normal_(generator=plain),
            torch.bernoulli(torch.full((6,), 0.5), generator=plain),
            torch.randperm(6, generator=plain),
        ]
        assert [t.tolist() for t in found] == [t.tolist() for t in expected]
        assert torch.equal(mine.get_state(), plain.get_state())
    torch_now = dtorch.rand(2).tolist()
    torch.manual_seed(2)
    assert torch.rand(2).tolist() == torch_now  # the default generator was not drawn from


def test_two_generators_in_one_function() -> None:
    def f(x: Any, g: Any, h: Any) -> Any:
        return (
            torch.rand(3, generator=g) + x,
            torch.rand(3, generator=h),
            torch.rand(3, generator=g),
        )

    mine = [torch.Generator().manual_seed(i) for i in (1, 2)]
    plain = [torch.Generator().manual_seed(i) for i in (1, 2)]
    found = dtorch.jit(f)(dtorch.zeros(3, device_mesh=TWO), *mine)
    expected = f(torch.zeros(3), *plain)
    assert [t.tolist() for t in found] == [t.tolist() for t in expected]
    for a, b in zip(mine, plain, strict=True):
        assert torch.equal(a.get_state(), b.get_state())


def test_a_trace_draws_nothing() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    f = dtorch.jit(lambda x: F.dropout(torch.rand_like(x)))
    f.program(dtorch.zeros(3, device_mesh=TWO))
    dtorch.eval_shape(lambda x: torch.rand_like(x), dtorch.zeros(3))
    assert torch.equal(dtorch.rand(3).to_torch(), expected)


def test_dropout_that_is_off_draws_nothing() -> None:
    x = dtorch.ones(8, device_mesh=TWO, placements=[Shard(0)])
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    assert F.dropout(x, 0.5, training=False).tolist() == [1.0] * 8
    assert F.dropout(x, 0.0).tolist() == [1.0] * 8
    assert dtorch.rand(2).tolist() == expected.tolist()


def test_modules_initialise_as_in_pytorch() -> None:
    torch.manual_seed(6)
    expected = torch.nn.Linear(4, 3)

    def init() -> Any:
        module = torch.nn.Linear(4, 3)
        return module.weight.detach(), module.bias.detach()

    torch.manual_seed(6)
    weight, bias = dtorch.jit(init)()
    assert torch.equal(weight.to_torch(), expected.weight) and torch.equal(
        bias.to_torch(), expected.bias
    )


def test_a_forked_child_draws_what_its_parent_would() -> None:
    """The state is a value, so it survives the fork."""
    torch.manual_seed(8)
    expected = torch.rand(3)
    torch.manual_seed(8)
    dtorch.synchronize()
    read, write = os.pipe()
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        os.write(write, repr(dtorch.rand(3).tolist()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).decode() == repr(expected.tolist())


def test_draws_on_two_stages_continue_one_stream() -> None:
    first, second = dtorch.init_device_mesh("cpu", (2, 2), ("pp", "tp")).unbind("pp")
    x, y = dtorch.ones(4, 4, device_mesh=first), dtorch.ones(4, 4, device_mesh=second)

    def dropped(x: Any, y: Any) -> Any:
        return torch.nn.functional.dropout(x, 0.5), torch.nn.functional.dropout(y, 0.5)

    torch.manual_seed(0)
    expected = dropped(torch.ones(4, 4), torch.ones(4, 4))
    for function in (dropped, dtorch.jit(dropped)):
        torch.manual_seed(0)
        found = function(x, y)
        assert found[1].device_mesh == second
        assert all(torch.equal(f.to_torch(), e) for f, e in zip(found, expected, strict=True))


def test_a_collection_while_a_state_is_read_holds_up_no_other_thread() -> None:
    """PyTorch reads it with the interpreter and the generator locked: two threads would wait."""
    code = """if True:
        import gc, sys, threading, torch, dtorch
        from dtorch.tracer import read_state
        sys.setswitchinterval(1e-6)
        base = dtorch.ones(3, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]))
        gc.set_threshold(1, 1, 1)
        def client():
            for _ in range(400):
                made = [base + 1]
                made.append(made)
                del made
                read_state(torch.default_generator)
        threads = [threading.Thread(target=client) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    """
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
