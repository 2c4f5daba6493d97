"""Recurrent layers and cells of accelerators, on stand-ins for the CPU."""

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from layouts import PAIR, SQUARE, TRIPLE, R, S, spread

import dtorch
from dtorch import accelerator_functions
from dtorch.errors import MutationError

aten = torch.ops.aten
ONE = dtorch.DeviceMesh("cpu", [0])
SIZES = (4, 3, 5)  # steps, samples, features
HIDDEN = 6
_LAYERS = (torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru)


def _layer(x: Any, weights: Any, hx: Any, cx: Any, *rest: Any) -> Any:
    mode, _, _, layers, batch_first, dropout, train, both, sizes, _ = rest
    states = hx if cx is None else (hx, cx)
    has_biases = any(w.ndim == 1 for w in weights)
    settings = has_biases, layers, dropout, train, both
    if sizes:
        return _LAYERS[mode](x, torch.tensor(sizes), states, weights, *settings)
    return _LAYERS[mode](x, states, weights, *settings, batch_first)


def _reserved(x: Any, hx: Any) -> torch.Tensor:
    """As many bytes as only the kernel knows, and what they say its backward checks."""
    return torch.cat([x.flatten(), hx.flatten()]).view(torch.uint8)


def _rnn(x: Any, weights: Any, stride: int, buffer: Any, hx: Any, cx: Any, *rest: Any) -> Any:
    assert buffer is not None
    assert hx.is_contiguous()
    assert cx is None or cx.is_contiguous()
    assert all(w.untyped_storage().data_ptr() == buffer.data_ptr() for w in weights)
    output, hy, *cy = _layer(x, weights, hx, cx, *rest)
    train = rest[6]
    reserve = _reserved(x, hx) if train else x.new_empty(0, dtype=torch.uint8)
    if rest[4] and not rest[8]:
        output = output.transpose(0, 1).contiguous().transpose(0, 1)
    return output, hy, *(cy or [hx.new_empty(0)]), reserve, buffer


def _gradients(inputs: Any, num_weights: int, grads: Any, settings: Any) -> Any:
    inputs = [t.clone().requires_grad_() for t in inputs]
    count = len(inputs) - num_weights
    states = (*inputs[1:count], None)[:2]
    found = _layer(inputs[0], inputs[count:], *states, *settings)
    pairs = [(f, g.clone()) for f, g in zip(found, grads, strict=False) if g is not None]
    outputs, of_outputs = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, inputs, of_outputs)


def _in_thread(function: Any, *args: Any) -> Any:
    """A kernel runs below autograd; another thread has it."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def _rnn_backward(
    x: Any, weights: Any, stride: int, buffer: Any, hx: Any, cx: Any, output: Any, *rest: Any
) -> Any:
    *grads, mode, hidden, proj, layers, batch_first, dropout, train, both = rest[:11]
    sizes, state, reserve, mask = rest[11:]
    assert train
    assert hx.is_contiguous()
    assert torch.equal(reserve, _reserved(x, hx))
    assert torch.equal(buffer[: weights[0].numel()], weights[0].flatten())
    reserve.zero_()
    inputs = [x, hx, *([] if cx is None else [cx]), *weights]
    settings = mode, hidden, proj, layers, batch_first, dropout, train, both, sizes, state
    results = _in_thread(_gradients, inputs, len(weights), grads, settings)
    count = len(inputs) - len(weights)
    of_states = (*results[1:count], None)[:2]
    of_x = results[0].transpose(0, 1).contiguous().transpose(0, 1) if batch_first else results[0]
    return of_x, *of_states, list(results[count:]) if mask[3] else []


def _flat(weights: Any, *rest: Any) -> torch.Tensor:
    buffer = torch.cat([w.flatten() for w in weights] + [weights[0].new_zeros(7)])
    start = 0
    for w in weights:
        w.set_(buffer[start : start + w.numel()].view(w.shape))
        start += w.numel()
    return buffer


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(accelerator_functions, "takes_cudnn", lambda x: True)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_cudnn_rnn", _rnn, "CPU")
        library.impl("_cudnn_rnn_backward", _rnn_backward, "CPU")
        library.impl("_cudnn_rnn_flatten_weight", _flat, "CPU")
        yield
        dtorch.synchronize()


LAYOUTS = [
    (ONE, None),
    (PAIR, R),
    (PAIR, "batch"),
    (TRIPLE, "batch"),
    (dtorch.DeviceMesh("cpu", list(range(4))), "batch"),  # one has no sample
    (SQUARE, "batch"),
    (PAIR, "steps"),
]


def _placed(x: torch.Tensor, mesh: Any, along: Any, batch_first: bool, samples: int) -> Any:
    if along == "batch":
        first = S(0) if batch_first else S(1)
        placements = [first] + [S(2)] * (mesh.ndim - 1)
    elif along == "steps":
        placements = [S(1) if batch_first else S(0)]
    else:
        placements = [R]
    return spread(x, mesh, placements)


def _leaves(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree)


@pytest.mark.parametrize("samples", [3, 4])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LSTM", {"num_layers": 2, "bidirectional": True}),
        ("LSTM", {"proj_size": 2}),
        ("LSTM", {"bias": False, "dropout": 0.5}),
        ("GRU", {"num_layers": 2}),
        ("RNN", {"nonlinearity": "relu"}),
        ("RNN", {"bidirectional": True}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:dropout option adds", "ignore:LSTM with projections")
def test_layers_equal_torch(
    layers: None, kind: str, settings: dict[str, Any], batch_first: bool, samples: int
) -> None:
    torch.manual_seed(0)
    module = getattr(torch.nn, kind)(5, HIDDEN, batch_first=batch_first, **settings)
    params, apply = dtorch.nn.functionalize(module)
    x = torch.randn(samples, 4, 5) if batch_first else torch.randn(4, samples, 5)
    (_, states) = module(x)
    given = torch.utils._pytree.tree_map(torch.randn_like, states)

    def loss(params: Any, x: Any, states: Any) -> Any:
        return sum(t.sin().sum() for t in _leaves(apply(params, x, states)))

    value, grads = _by_torch(module, x, given)
    expected = [*grads, value]
    # The stand-in's own sums depend on strides, which a batch that comes first has others of.
    same = _close if batch_first else torch.equal
    for mesh, along in LAYOUTS:
        ours = [
            dtorch.parallel.shard(params, mesh),
            _placed(x, mesh, along, batch_first, samples),
            torch.utils._pytree.tree_map(lambda t, m=mesh: spread(t, m, [R] * m.ndim), given),
        ]
        for wrap in (lambda f: f, dtorch.jit):
            value, grads = wrap(dtorch.value_and_grad(loss, argnums=(0, 1, 2)))(*ours)
            for mine, theirs in zip(_leaves((grads, value)), expected, strict=True):
                assert same(mine.to_torch(), theirs)
        same = _close


def _by_torch(module: Any, x: Any, states: Any) -> tuple[Any, Any]:
    leaves = [t.clone().requires_grad_() for t in _leaves((x, states))]
    results = module(leaves[0], tuple(leaves[1:]) if len(leaves) > 2 else leaves[1])
    value: Any = sum(t.sin().sum() for t in _leaves(results))
    return value.detach(), torch.autograd.grad(value, [*module.parameters(), *leaves])


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    return True


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_split_batch_is_not_gathered(layers: None, batch_first: bool) -> None:
    module = torch.nn.LSTM(5, HIDDEN, batch_first=batch_first)
    params, apply = dtorch.nn.functionalize(module)
    x = torch.randn(4, 4, 5)

    def loss(params: Any, x: Any) -> Any:
        return apply(params, x)[0].sin().sum()

    place = S(0) if batch_first else S(1)
    given = dtorch.parallel.shard(params, PAIR), spread(x, PAIR, [place])
    program = dtorch.jit(apply).program(*given)
    assert program.communication() == []
    assert [program.specs[o].placements for o in program.outputs] == [(place,), (S(1),), (S(1),)]
    program = dtorch.jit(dtorch.grad(loss)).program(*given)
    assert {s.step.kind.value for s in program.communication()} == {"all_reduce"}
    assert not program.fallbacks()


def test_a_gradient_twice(layers: None) -> None:
    """The kernel changes what has been reserved; PyTorch gives it a copy where it is kept."""
    x, state = torch.randn(4, 4, 5), torch.randn(1, 4, HIDDEN)
    module = torch.nn.GRU(5, HIDDEN)
    params, apply = dtorch.nn.functionalize(module)
    y = spread(x, PAIR, [S(1)]).requires_grad_()
    out, _ = apply(dtorch.parallel.shard(params, PAIR), y, spread(state, PAIR, [R]))
    (first,) = torch.autograd.grad(out.sin().sum(), y, retain_graph=True)
    (second,) = torch.autograd.grad(out.sin().sum(), y)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(module(x, state)[0].sin().sum(), x)
    for found in (first, second):
        assert _close(found.to_torch(), expected)


def test_packed_sequences_are_whole(layers: None) -> None:
    torch.manual_seed(0)
    data, sizes = torch.randn(6, 5), torch.tensor([3, 2, 1])
    module = torch.nn.LSTM(5, HIDDEN)
    states = [torch.randn(1, 3, HIDDEN) for _ in range(2)]
    weights = [w.detach() for w in module._flat_weights]
    settings = True, 1, 0.0, True, False
    theirs = [t.clone().requires_grad_() for t in (data, *states, *weights)]
    expected = torch.lstm(theirs[0], sizes, theirs[1:3], theirs[3:], *settings)
    sum(t.sin().sum() for t in expected).backward()
    for placement in (R, S(0)):
        ours = [spread(t, PAIR, [R]).requires_grad_() for t in (data, *states, *weights)]
        ours[0] = spread(data, PAIR, [placement]).requires_grad_()
        found = torch.lstm(ours[0], sizes, ours[1:3], ours[3:], *settings)
        sum(t.sin().sum() for t in found).backward()
        for mine, wanted in zip(ours, theirs, strict=True):
            assert _close(mine.grad.to_torch(), wanted.grad)


def test_dropout_is_refused_in_training(layers: None) -> None:
    module = torch.nn.LSTM(5, HIDDEN, 2, dropout=0.5)
    x = torch.randn(4, 3, 5)
    params, apply = dtorch.nn.functionalize(module)
    given = dtorch.parallel.shard(params, PAIR), spread(x, PAIR, [S(1)])
    with pytest.raises(MutationError, match="generator"):
        apply(*given)
    params, apply = dtorch.nn.functionalize(module.eval())
    assert _close(apply(*given)[0].to_torch(), module(x)[0].detach())


# -- cells -----------------------------------------------------------------------------------------


def _lstm_cell(of_input: Any, of_hidden: Any, cx: Any, *biases: Any) -> Any:
    gates = of_input + of_hidden + sum(b for b in biases if b is not None)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    of_hy: Any, of_cy: Any, cx: Any, cy: Any, workspace: Any, has_bias: bool
) -> Any:
    i, f, g, o = workspace.chunk(4, 1)
    of_hy = torch.zeros_like(cx) if of_hy is None else of_hy
    total = of_hy * o * (1 - cy.tanh() ** 2) + (0 if of_cy is None else of_cy)
    of_gates = [total * g * i * (1 - i), total * cx * f * (1 - f), total * i * (1 - g**2)]
    gates = torch.cat([*of_gates, of_hy * cy.tanh() * o * (1 - o)], 1)
    return gates, total * f, gates.sum(0) if has_bias else None


def _gru_cell(of_input: Any, of_hidden: Any, hx: Any, *biases: Any) -> Any:
    x, h = (
        g if b is None else g + b
        for g, b in zip((of_input, of_hidden), biases or (None, None), strict=True)
    )
    (rx, zx, nx), (rh, zh, nh) = x.chunk(3, 1), h.chunk(3, 1)
    r, z = (rx + rh).sigmoid(), (zx + zh).sigmoid()
    n = (nx + r * nh).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, nh], 1)


def _gru_cell_backward(grad: Any, workspace: Any, has_bias: bool) -> Any:
    r, z, n, hx, nh = workspace.chunk(5, 1)
    of_n = grad * (1 - z) * (1 - n**2)
    of_r, of_z = of_n * nh * r * (1 - r), grad * (hx - n) * z * (1 - z)
    of_input = torch.cat([of_r, of_z, of_n], 1)
    of_hidden = torch.cat([of_r, of_z, of_n * r], 1)
    biases = [g.sum(0) if has_bias else None for g in (of_input, of_hidden)]
    return of_input, of_hidden, grad * z, *biases


@pytest.fixture
def cells() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_thnn_fused_lstm_cell", _lstm_cell, "CPU")
        library.impl("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward, "CPU")
        library.impl("_thnn_fused_gru_cell", _gru_cell, "CPU")
        library.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward, "CPU")
        yield
        dtorch.synchronize()


@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        (ONE, [R]),
        (PAIR, [S(0)]),
        (PAIR, [S(1)]),
        (TRIPLE, [S(0)]),
        (SQUARE, [S(0), R]),
        (SQUARE, [S(0), S(0)]),
    ],
    ids=str,
)
def test_cells_equal_torch(
    cells: None, mesh: Any, placements: Any, kind: str, has_bias: bool, is_jitted: bool
) -> None:
    torch.manual_seed(0)
    num_gates = 4 if kind == "lstm" else 3
    gates = [torch.randn(5, num_gates * HIDDEN) for _ in range(2)]
    biases = [torch.randn(num_gates * HIDDEN) for _ in range(2)] if has_bias else []
    theirs: list[Any] = [t.requires_grad_() for t in (*gates, torch.randn(5, HIDDEN), *biases)]
    composed = _lstm_cell if kind == "lstm" else _gru_cell
    op = getattr(aten, f"_thnn_fused_{kind}_cell").default

    def call(*tensors: Any) -> Any:
        return op(*tensors)[:-1]

    expected = composed(*theirs)[:-1]
    sum(t.sin().sum() for t in expected).backward()
    ours: list[Any] = [
        spread(t.detach(), mesh, placements if t.ndim == 2 else [R] * mesh.ndim).requires_grad_()
        for t in theirs
    ]
    found = (dtorch.jit(call) if is_jitted else call)(*ours)
    for mine, wanted in zip(found, expected, strict=True):
        assert _close(mine.to_torch().detach(), wanted.detach())
        if placements[0] == S(0) and mesh is not ONE:
            assert mine.placements[0] == S(0)
    sum(t.sin().sum() for t in found).backward()
    for mine, wanted in zip(ours, theirs, strict=True):
        assert _close(mine.grad.to_torch(), wanted.grad)
