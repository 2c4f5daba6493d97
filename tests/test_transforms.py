"""`jit`, `grad`, `value_and_grad`, `eval_shape`. The oracles are the plain call and autograd."""

import dataclasses
import enum
import gc
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.utils._pytree as torch_pytree

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.errors import DonatedError, TraceError

ONE = dtorch.DeviceMesh("cpu", [0])
TWO = dtorch.DeviceMesh("cpu", [0, 1])
GRID = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
LAYOUTS = [
    (ONE, [Replicate()]),
    (TWO, [Shard(0)]),
    (TWO, [Shard(1)]),
    (TWO, [Partial()]),
    (GRID, [Shard(0), Shard(1)]),
]
Pair = namedtuple("Pair", "first second")
F = torch.nn.functional


@dataclasses.dataclass
class Output(OrderedDict):
    """As Hugging Face's outputs: a dict with attributes, registered with torch."""

    logits: Any = None
    cache: Any = None

    def __post_init__(self) -> None:
        self.update({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})


@pytest.fixture(autouse=True, scope="module")
def registered() -> Any:
    torch_pytree.register_pytree_node(
        Output,
        lambda o: (list(o.values()), list(o.keys())),
        lambda values, keys: Output(**dict(zip(keys, values, strict=True))),
        serialized_type_name="dtorch_tests.Output",
    )
    yield
    torch_pytree._deregister_pytree_node(Output)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def place(value: Any, mesh: dtorch.DeviceMesh = TWO, placements: Any = None) -> dtorch.Tensor:
    chosen = [Shard(0)] if placements is None else placements
    chosen = [p if not p.is_shard() or p.dim < value.ndim else Replicate() for p in chosen]
    return dtorch.Tensor(value, device_mesh=mesh, placements=chosen)


def ones(*shape: int, **kwargs: Any) -> dtorch.Tensor:
    return dtorch.ones(*shape, device_mesh=TWO, placements=[Shard(0)], **kwargs)


# -- jit: trees ----------------------------------------------------------------------------


def test_trees_in_and_out() -> None:
    @dtorch.jit
    def f(tree: Any, *rest: Any, scale: float = 2.0, **named: Any) -> Any:
        total = tree["a"][0] + tree["b"].first + tree["b"].second * scale + sum(rest)
        return {"total": total, "rest": list(rest), "named": named, "n": None, "p": Pair(1, total)}

    x = ones(4)
    tree = {"a": [x], "b": Pair(x, x * 2)}
    out = f(tree, x, x, scale=0.5, extra=(x, "text"))
    assert out["total"].tolist() == [5.0] * 4 and out["p"].first == 1 and type(out["p"]) is Pair
    assert (
        out["n"] is None and out["named"]["extra"][1] == "text" and list(out) == list(f(tree, x, x))
    )
    assert out["rest"][0] is x and out["named"]["extra"][0] is x
    assert f(tree).keys() == out.keys() and f.cache_info().currsize == 3


def test_containers_registered_with_torch() -> None:
    @dtorch.jit
    def f(out: Output) -> Output:
        return Output(logits=out.logits * 2, cache=(out.cache[0] + 1,))

    result = f(Output(logits=ones(4), cache=(ones(2),)))
    assert type(result) is Output and type(result.cache) is tuple
    assert result.logits.tolist() == [2.0] * 4 and result["cache"][0].tolist() == [2.0] * 2


class Unknown:
    def __repr__(self) -> str:
        return "<unknown>"


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        ((Unknown(),), {}, r"args\[0\]"),
        ((1, Unknown()), {}, r"args\[1\]"),
        (({"a": [1, Unknown()]},), {}, r"args\[0\]\['a'\]\[1\]"),
        ((), {"key": (Unknown(),)}, r"kwargs\['key'\]\[0\]"),
        ((Pair(1, {2: Unknown()}),), {}, r"args\[0\]\[1\]\[2\]"),
    ],
)
def test_an_unknown_object_raises_with_its_path(args: Any, kwargs: Any, path: str) -> None:
    f = dtorch.jit(lambda *a, **k: ones(1))
    with pytest.raises(
        TraceError, match=rf"cannot take Unknown <unknown> at {path}\.\n(.|\n)*Fix: "
    ) as e:
        f(*args, **kwargs)
    assert "static_argnums" in str(e.value)


def test_known_values_are_part_of_the_key() -> None:
    seen: list[Any] = []
    f = dtorch.jit(lambda x, v: seen.append(v) or x + 1)
    x = ones(2)
    values = [
        1, True, "a", None, torch.float32, torch.device("cpu"), torch.Size([1]), Color.RED,
        Color.BLUE, TWO, Shard(0), Replicate(), 1j, b"x", ..., slice(1, 2), dtorch.P("dp"),
    ]  # fmt: skip
    for v in values * 2:
        f(x, v)
    assert len(seen) == len(values)
    assert seen[0] == 1 and seen[7] is Color.RED and seen[9] is TWO and seen[15] == slice(1, 2)


def test_numpy_arrays_and_generators_are_arguments() -> None:
    f = dtorch.jit(lambda a, g: torch.rand(3, generator=g) + a)
    array = numpy.ones(3, dtype="float32")
    generator, expected = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for _ in range(2):
        found = f(array, generator)
        assert torch.equal(found.to_torch(), torch.rand(3, generator=expected) + 1)


# -- jit: options --------------------------------------------------------------------------


def test_static_arguments() -> None:
    def f(x: Any, mode: Any, *, config: Any = None) -> Any:
        return x * 2 if mode == "double" else x + 1

    for options in (
        {"static_argnums": 1},
        {"static_argnums": (1,)},
        {"static_argnames": ("mode", "config")},
    ):
        jitted = dtorch.jit(f, **options)
        assert jitted(ones(2), "double").tolist() == [2.0] * 2
        assert jitted(ones(2), mode="double").tolist() == [2.0] * 2
        assert jitted(ones(2), "other").tolist() == [2.0] * 2
    jitted = dtorch.jit(f, static_argnames="mode")
    with pytest.raises(TraceError, match="the static argument mode is an unhashable list"):
        jitted(ones(2), mode=[1])
    with pytest.raises(TraceError, match="the static argument 1 is an unhashable dict"):
        dtorch.jit(f, static_argnums=1)(ones(2), {})

    class Config:
        n = 3

    config = Config()
    g = dtorch.jit(lambda x, c: x * c.n, static_argnums=1)
    assert g(ones(2), config).tolist() == [3.0] * 2


def test_as_a_decorator_with_options_and_on_methods() -> None:
    class Model:
        def __init__(self) -> None:
            self.w = ones(2) * 3

        @dtorch.jit(static_argnums=0)
        def static(self, x: Any) -> Any:
            return self.w * x

    model = Model()
    assert model.static(ones(2)).tolist() == [3.0] * 2

    @dtorch.jit(donate_argnums=0)
    def f(x: Any) -> Any:
        """A docstring."""
        return x + 1

    assert f.__name__ == "f" and f.__doc__ == "A docstring." and repr(f) == "dtorch.jit(f)"


def test_options_are_checked_when_the_function_is_wrapped() -> None:
    def f(x: Any, mode: Any, *, scale: Any = 1) -> Any:
        return x * 2 if mode == "double" else x + 1

    for numbers in (-1, [numpy.int64(-1)], {1, -1}):
        jitted = dtorch.jit(f, static_argnums=numbers)  # type: ignore[arg-type]
        assert jitted(ones(2), "double").tolist() == [2.0] * 2
        assert jitted(ones(2), mode=Unknown()).tolist() == [2.0] * 2
    wrapped: Any = dtorch.jit
    for option in ("static_argnums", "donate_argnums"):
        for number in (2, -3, (0, 5)):
            with pytest.raises(ValueError, match=rf"{option}=.*f has no .*it has 2: \(x, mode\)"):
                wrapped(f, **{option: number})
        for value in (1.0, "1", None, True, (0, 1.5)):
            with pytest.raises(TypeError, match=f"{option} must be an integer or integers"):
                wrapped(f, **{option: value})
    with pytest.raises(ValueError, match=r"f has no parameter 'mod'; it has \(x, mode, scale\)"):
        dtorch.jit(f, static_argnames="mod")
    with pytest.raises(TypeError, match="static_argnames must be"):
        wrapped(f, static_argnames=(1,))
    for maxsize in (0, -1):
        with pytest.raises(ValueError, match="maxsize must be at least 1"):
            dtorch.jit(f, maxsize=maxsize)
        with pytest.raises(ValueError, match="maxsize must be at least 1"):
            dtorch.jit(maxsize=maxsize)
    with pytest.raises(TypeError, match="jit needs a function, not int 3"):
        wrapped(3)


def test_options_of_functions_whose_parameters_are_unknown() -> None:
    def f(x: Any, *rest: Any, **named: Any) -> Any:
        return x + len(rest) + (rest[-1].n if rest else 0)

    class Config:
        n = 3

    jitted = dtorch.jit(f, static_argnums=-1, static_argnames="any")
    assert jitted(ones(2), 1, Config()).tolist() == [6.0] * 2
    assert dtorch.jit(f, static_argnums=7)(ones(2)).tolist() == [1.0] * 2
    assert dtorch.jit(torch.add, static_argnums=1)(ones(2), 1).tolist() == [2.0] * 2
    donating = dtorch.jit(lambda *a: a[-1] + 1, donate_argnums=-1)
    kept, given = ones(2), ones(2)
    donating(kept, given)
    assert kept.tolist() == [1.0] * 2
    with pytest.raises(DonatedError, match="was donated"):
        given.sum().item()


def test_donation() -> None:
    f = dtorch.jit(lambda a, b: {"sum": a["x"] + b, "same": a["y"]}, donate_argnums=(0,))
    x, y, b = ones(4), ones(4), ones(4)
    out = f({"x": x, "y": y}, b)
    assert out["sum"].tolist() == [2.0] * 4 and out["same"] is y and y.tolist() == [1.0] * 4
    assert b.tolist() == [1.0] * 4
    with pytest.raises(DonatedError, match="was donated to a jitted call"):
        x.sum().item()
    for _ in range(3):  # the usual loop
        state = f({"x": out["sum"], "y": y}, b)
        out = state
    assert out["sum"].tolist() == [5.0] * 4


def test_a_donated_partial_value_that_was_reduced_is_given_up() -> None:
    f = dtorch.jit(lambda a: a * 2, donate_argnums=0)
    for _ in range(3):
        x = dtorch.ones(4, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]), placements=[Partial()])
        assert (x * x).tolist() == [1.0] * 4  # remembers it reduced
        assert f(x).tolist() == [2.0] * 4
        with pytest.raises(DonatedError, match="was donated"):
            (x * 3).tolist()


def test_donated_memory_is_given_back() -> None:
    f = dtorch.jit(lambda a: a.sum(), donate_argnums=0)
    x = ones(1000)
    dtorch.synchronize()
    shard = weakref.ref(x._shards.get(0))
    f(x)
    dtorch.synchronize()
    assert shard() is None


def test_retracing_is_counted() -> None:
    f = dtorch.jit(lambda x, s: x * s)
    for _ in range(3):
        f(ones(4), 2.0)
        f(ones(4), 3.5)
    assert f.cache_info().misses == 1 and f.cache_info().hits == 5 and f.cache_info().currsize == 1
    f(ones(5), 2.0)
    f(ones(4), 2)
    f(ones(4).to(torch.float64), 2.0)
    f(ones(4).redistribute(placements=[Replicate()]), 2.0)
    assert f.cache_info().misses == 5 and f.cache_info().currsize == 5
    with torch.no_grad():
        f(ones(4), 2.0)
    f.cache_clear()
    assert f.cache_info()[:2] == (0, 0) and f.cache_info().currsize == 0


def test_model_train_after_tracing() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4)
    )
    params = {k: dtorch.Tensor(v, device="cpu") for k, v in model.state_dict().items()}
    x = torch.randn(6, 4)

    @dtorch.jit
    def f(params: Any, x: Any) -> Any:
        return torch.func.functional_call(model, params, (x,))

    with torch.no_grad():
        for train in (False, True, False, True):
            model.train(train)
            torch.manual_seed(3)
            found = f(params, dtorch.Tensor(x, device="cpu")).to_torch()
            torch.manual_seed(3)
            assert torch.equal(found, model(x)), train
        model.eval()
        model[1].train()
        torch.manual_seed(3)
        found = f(params, dtorch.Tensor(x, device="cpu")).to_torch()
        torch.manual_seed(3)
        assert torch.equal(found, model(x))
    for name, value in model.state_dict().items():
        assert torch.equal(params[name].to_torch(), value), name


def test_jit_equals_the_plain_call_in_every_layout() -> None:
    def f(x: Any, w: Any, s: float) -> Any:
        h = F.gelu(x @ w) * s
        return F.layer_norm(h, (4,)).softmax(-1), h.argmax(1), h.sum() > 0

    x, w = torch.randn(6, 4), torch.randn(4, 4)
    for mesh, placements in LAYOUTS:
        a, b = place(x, mesh, placements), place(w, mesh, placements)
        for found, eager, plain in zip(
            dtorch.jit(f)(a, b, 0.5), f(a, b, 0.5), f(x, w, 0.5), strict=True
        ):
            torch.testing.assert_close(found.to_torch(), plain)
            torch.testing.assert_close(eager.to_torch(), plain)
            if mesh is ONE:
                assert torch.equal(found.to_torch(), plain)


def test_no_tensors_and_no_results() -> None:
    assert dtorch.jit(lambda: None)() is None
    assert dtorch.jit(lambda x: [])(ones(2)) == []
    assert dtorch.jit(lambda n: n * 2)(2) == 4 and dtorch.jit(lambda s: s * 2)(1.5) == 3.0
    assert dtorch.jit(lambda: torch.ones(3))().tolist() == [1.0] * 3


def test_jit_of_what_cannot_be_referred_to_weakly() -> None:
    f = dtorch.jit(torch.add)
    assert f(ones(2), 1).tolist() == [2.0] * 2

    class Callable_:
        __slots__ = ()

        def __call__(self, x: Any) -> Any:
            return x + 1

    assert dtorch.jit(Callable_())(ones(2)).tolist() == [2.0] * 2


def test_a_jitted_function_does_not_keep_itself_alive() -> None:
    def f(x: Any) -> Any:
        return x + 1

    jitted = dtorch.jit(f)
    jitted(ones(2))
    gone = weakref.ref(f)
    del f, jitted
    gc.collect()
    assert gone() is None


# -- gradients -----------------------------------------------------------------------------


def loss(params: Any, x: Any) -> Any:
    h = torch.tanh(F.linear(x, params["w"], params["b"]))
    h = F.layer_norm(h, (h.shape[-1],), params["scale"])
    return (h @ params["out"]).square().mean()


def problem() -> tuple[
    dict[str, torch.Tensor], torch.Tensor, torch.Tensor, dict[str, torch.Tensor]
]:
    torch.manual_seed(0)
    params = {
        "w": torch.randn(6, 4),
        "b": torch.randn(6),
        "scale": torch.rand(6),
        "out": torch.randn(6, 2),
    }
    x = torch.randn(3, 5, 4)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    value = loss(leaves, x)
    value.backward()
    return params, x, value.detach(), {k: v.grad for k, v in leaves.items()}  # type: ignore[misc]


def eager_backward(params: Any, x: Any) -> Any:
    leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
    value = loss(leaves, x)
    value.backward()
    return value.detach(), {k: v.grad for k, v in leaves.items()}


def through_jit(params: Any, x: Any) -> Any:
    leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
    value = dtorch.jit(loss)(leaves, x)
    assert value.requires_grad and value.grad_fn is not None
    value.backward()
    return value.detach(), {k: v.grad for k, v in leaves.items()}


WAYS: dict[str, Callable[..., Any]] = {
    "backward": eager_backward,
    "through jit": through_jit,
    "value_and_grad": dtorch.value_and_grad(loss),
    "jit of value_and_grad": dtorch.jit(dtorch.value_and_grad(loss)),
    "value_and_grad of jit": dtorch.value_and_grad(dtorch.jit(loss)),
    "jit of value_and_grad of jit": dtorch.jit(dtorch.value_and_grad(dtorch.jit(loss))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS, ids=str)
def test_gradients_are_autograds(way: str, mesh: dtorch.DeviceMesh, placements: Any) -> None:
    params, x, value, grads = problem()
    mine = {k: place(v, mesh, placements) for k, v in params.items()}
    found_value, found = WAYS[way](mine, place(x, mesh, [Replicate()] * mesh.ndim))
    compare = torch.equal if mesh is ONE else torch.allclose
    assert compare(found_value.to_torch(), value)
    for name, expected in grads.items():
        if mesh is ONE:
            assert torch.equal(found[name].to_torch(), expected), name
        torch.testing.assert_close(found[name].to_torch(), expected, rtol=1e-5, atol=1e-6)
        if way not in ("backward",):
            whole = [Replicate() if p.is_partial() else p for p in mine[name].placements]
            assert found[name].placements == whole, name


def test_a_batch_sharded_gradient() -> None:
    params, x, value, grads = problem()
    mine = {k: place(v, TWO, [Replicate()]) for k, v in params.items()}
    for way in WAYS.values():
        found_value, found = way(mine, place(x, TWO, [Shard(0)]))
        torch.testing.assert_close(found_value.to_torch(), value)
        for name, expected in grads.items():
            torch.testing.assert_close(found[name].to_torch(), expected, rtol=1e-5, atol=1e-6)


def test_plain_torch_tensors_have_gradients_too() -> None:
    params, x, value, grads = problem()
    for function in (dtorch.value_and_grad(loss), dtorch.value_and_grad(lambda p, t: loss(p, t))):
        found_value, found = function(params, x)
        assert torch.equal(found_value, value) and all(
            torch.equal(found[k], grads[k]) for k in grads
        )
    t = torch.ones(4, requires_grad=True)
    (t * ones(4)).sum().backward()
    assert type(t.grad) is torch.Tensor and t.grad.tolist() == [1.0] * 4
    t.grad = None
    dtorch.jit(lambda a, b: (a * b).sum())(t, ones(4) * 2).backward()
    assert type(t.grad) is torch.Tensor and t.grad.tolist() == [2.0] * 4


def test_argnums_has_aux_and_keywords() -> None:
    def f(a: Any, b: Any, *, scale: float) -> Any:
        return (a * b["x"] * scale).sum(), {"aux": a + 1}

    a, b = ones(4) * 3, {"x": ones(4) * 2}
    for wrap in (lambda g: g, dtorch.jit):
        (value, aux), grads = wrap(dtorch.value_and_grad(f, argnums=(0, 1), has_aux=True))(
            a, b, scale=0.5
        )
        assert (
            value.item() == 12 and aux["aux"].tolist() == [4.0] * 4 and not aux["aux"].requires_grad
        )
        assert grads[0].tolist() == [1.0] * 4 and grads[1]["x"].tolist() == [1.5] * 4
        gradient, aux = wrap(dtorch.grad(f, argnums=1, has_aux=True))(a, b, scale=1.0)
        assert gradient["x"].tolist() == [3.0] * 4
    assert not value.requires_grad


def test_argnums_are_checked() -> None:
    def f(a: Any, b: Any) -> Any:
        return (a * a * b).sum()

    for wrap in (lambda g: g, dtorch.jit):
        assert wrap(dtorch.grad(f, argnums=-1))(ones(2), ones(2)).tolist() == [1.0] * 2
        found = wrap(dtorch.grad(f, argnums=(-2, 1)))(ones(2), ones(2))
        assert [g.tolist() for g in found] == [[2.0] * 2, [1.0] * 2]
        for argnums in (2, -3, (0, 2)):
            with pytest.raises(TypeError, match="the call has 2 positional arguments"):
                wrap(dtorch.grad(f, argnums=argnums))(ones(2), ones(2))
        with pytest.raises(TypeError, match="the call has 1 positional argument\\."):
            wrap(dtorch.grad(f, argnums=1))(ones(2), b=ones(2))
        with pytest.raises(ValueError, match="names an argument twice"):
            wrap(dtorch.grad(f, argnums=(0, -2)))(ones(2), ones(2))
        with pytest.raises(TypeError, match=r"leaf at args\[1\] is a 3"):
            wrap(dtorch.grad(f, argnums=(0, -1)))(ones(2), 3)
    for transform in (dtorch.grad, dtorch.value_and_grad):
        with pytest.raises(ValueError, match="names an argument twice"):
            transform(f, argnums=(0, 0))
        with pytest.raises(TypeError, match="argnums must be"):
            transform(f, argnums=(0.0,))  # type: ignore[arg-type]


def test_an_unused_argument_has_a_zero_gradient() -> None:
    f = dtorch.grad(lambda p: (p["a"] * 2).sum())
    for g in (f, dtorch.jit(f)):
        found = g({"a": ones(4), "b": ones(3)})
        assert found["a"].tolist() == [2.0] * 4 and found["b"].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("leaf", "shown"),
    [
        (torch.arange(3), "torch.int64 tensor"),
        (1.5, "1.5"),
        ("text", "'text'"),
        (torch.ones(2, dtype=torch.bool), "torch.bool tensor"),
    ],
)
def test_what_has_no_gradient_is_a_type_error(leaf: Any, shown: str) -> None:
    if isinstance(leaf, torch.Tensor):
        leaf = place(leaf)
    f = dtorch.grad(lambda p: p["a"].sum())
    for g in (f, dtorch.jit(f)):
        with pytest.raises(TypeError, match=rf"leaf at args\[0\]\['b'\] is a {shown}(.|\n)*Fix: "):
            g({"a": ones(3), "b": leaf})


def test_a_value_that_is_no_scalar_is_a_type_error() -> None:
    for f in (dtorch.grad(lambda x: x * 2), dtorch.jit(dtorch.grad(lambda x: x * 2))):
        with pytest.raises(TypeError, match=r"returned \[4\]\.\n  Fix: reduce it"):
            f(ones(4))
    with pytest.raises(TypeError, match="returned float"):
        dtorch.grad(lambda x: 1.0)(ones(4))


def test_nested_gradients() -> None:
    def f(x: Any) -> Any:
        return (x**3).sum()

    def second(x: Any) -> Any:
        return dtorch.grad(lambda y: dtorch.grad(f)(y).sum())(x)

    def third(x: Any) -> Any:
        return dtorch.grad(lambda y: second(y).sum())(x)

    x = place(torch.tensor([1.0, 2.0, 3.0]))
    for wrap in (lambda g: g, dtorch.jit):
        assert wrap(second)(x).tolist() == [6.0, 12.0, 18.0]
        assert wrap(third)(x).tolist() == [6.0] * 3


def test_grad_under_autograd_records() -> None:
    x = place(torch.tensor([1.0, 2.0]))
    x.requires_grad_()
    g = dtorch.grad(lambda y: (y**3).sum())(x)
    assert g.requires_grad
    g.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [6.0, 12.0]


def test_a_function_that_makes_a_distributed_tensor_inside() -> None:
    def f(x: Any) -> Any:
        mask = dtorch.Tensor(
            torch.tensor([1.0, 0.0, 2.0, 0.0]), device_mesh=TWO, placements=[Shard(0)]
        )
        more = dtorch.arange(4, device_mesh=TWO, placements=[Shard(0)])
        return (x * mask + x * more + dtorch.ones(4, device_mesh=TWO) * torch.ones(4)).sum()

    for g in (dtorch.grad(f), dtorch.jit(dtorch.grad(f)), dtorch.grad(dtorch.jit(f))):
        assert g(ones(4)).tolist() == [1.0, 1.0, 4.0, 3.0]


def test_a_jitted_call_is_never_silently_detached() -> None:
    w = ones(4, requires_grad=True)
    f = dtorch.jit(lambda p, x: {"out": p["w"] * x, "int": (x > 0).long(), "n": 3, "x": x})
    out = f({"w": w}, ones(4))
    assert out["out"].requires_grad and not out["int"].requires_grad and out["n"] == 3
    out["out"].sum().backward()
    assert w.grad is not None and w.grad.tolist() == [1.0] * 4
    with torch.no_grad():
        assert not f({"w": w}, ones(4))["out"].requires_grad
    with pytest.raises(TraceError, match="requires grad without taking it as an argument"):
        dtorch.jit(lambda x, p: x * w * p)(ones(4), w)
    with pytest.raises(TraceError, match="requires grad without taking it as an argument"):
        dtorch.jit(lambda x: x * w)(ones(4))


def test_a_partial_argument_that_was_reduced_keeps_its_gradient() -> None:
    p = dtorch.Tensor(torch.ones(4), device_mesh=TWO, placements=[Partial()], requires_grad=True)
    f = dtorch.jit(lambda t: (torch.relu(t) * 3).sum())
    with torch.no_grad():
        f(p), torch.relu(p)
    f(p).backward()
    assert p.grad is not None and p.grad.tolist() == [3.0] * 4


def test_backward_twice_and_retained_graphs() -> None:
    w = ones(4, requires_grad=True)
    y = dtorch.jit(lambda t: (t * t).sum())(w)
    y.backward(retain_graph=True)
    y.backward()
    assert w.grad is not None and w.grad.tolist() == [4.0] * 4
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


SHAPE = (4, 4, 6, 5)
COTANGENTS: list[Any] = [
    lambda made: made(torch.tensor(0.75)).expand(SHAPE),
    lambda made: made(torch.arange(5.0)).expand(SHAPE),
    lambda made: made(torch.arange(480.0).sin().reshape(SHAPE[::-1])).permute(3, 2, 1, 0),
    lambda made: made(torch.arange(480.0).sin().reshape(SHAPE)),
]


@pytest.mark.parametrize("cotangent", COTANGENTS)
@pytest.mark.parametrize("norm", [F.instance_norm, lambda x: F.group_norm(x, 2)])
def test_kernels_get_cotangents_with_their_strides(norm: Any, cotangent: Any) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    f = dtorch.jit(norm)
    for _ in range(2):
        given, mine = x.clone().requires_grad_(), dtorch.Tensor(x).requires_grad_()
        norm(given).backward(cotangent(torch.clone))
        f(mine).backward(cotangent(dtorch.Tensor))
        assert given.grad is not None and mine.grad is not None
        assert torch.equal(mine.grad.to_torch(), given.grad)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_cotangents_of_several_strides_over_devices(placement: Any) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    w = x.t() @ x

    def f(x: Any, w: Any) -> Any:
        return torch.tanh(x @ w), (x + 1).t()

    def loss(y: Any, z: Any) -> Any:
        return y.sum() + z[0].sum() + (y * 2).t().square().sum()

    given = x.clone().requires_grad_()
    loss(*f(given, w)).backward()
    jitted = dtorch.jit(f)
    for part in (lambda y, z: y.sum(), lambda y, z: z.square().sum(), loss):
        mine = place(x, TWO, [placement]).requires_grad_()
        part(*jitted(mine, dtorch.Tensor(w, device_mesh=TWO))).backward()
    assert mine.grad is not None and given.grad is not None
    torch.testing.assert_close(mine.grad.to_torch(), given.grad)


class Once(torch.autograd.Function):
    """Twice its argument; the backward consumes what it needs."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.factor = [2.0]
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor.pop()


def test_a_backward_that_can_be_taken_once_takes_any_cotangent() -> None:
    f = dtorch.jit(lambda x: Once.apply(x).sin())
    for _ in range(2):
        given, mine = torch.ones(4, 3, requires_grad=True), ones(4, 3, requires_grad=True)
        (given * 2).sin().sum().backward()
        f(mine).sum().backward()
        assert given.grad is not None and mine.grad is not None
        assert torch.equal(mine.grad.to_torch(), given.grad)


def test_changing_floats_through_jit_under_autograd() -> None:
    f = dtorch.jit(lambda x, s: (x * s).pow(2).sum() / (s + 1))
    g = dtorch.jit(dtorch.grad(lambda x, s: (x * s).pow(2).sum() / (s + 1)))
    for step in range(5):
        s = step / 3
        t = torch.ones(4, requires_grad=True)
        ((t * s).pow(2).sum() / (s + 1)).backward()
        w = ones(4, requires_grad=True)
        f(w, s).backward()
        assert torch.equal(w.grad.to_torch(), t.grad) and torch.equal(
            g(ones(4), s).to_torch(), t.grad
        )
    assert f.cache_info().currsize == 1 and g.cache_info().currsize == 1


def test_several_results_used_in_part() -> None:
    w, v = ones(4, requires_grad=True), ones(4, requires_grad=True)
    f = dtorch.jit(lambda a, b: (a * 2, b * 3, a * b, a * 2 + 0))
    first, second, third, _ = f(w, v)
    first.sum().backward(retain_graph=True)
    assert w.grad.tolist() == [2.0] * 4 and (v.grad is None or v.grad.tolist() == [0.0] * 4)
    (second.sum() + third.sum()).backward()
    assert w.grad.tolist() == [3.0] * 4 and v.grad.tolist() == [4.0] * 4


def test_the_same_result_twice_through_jit() -> None:
    w = ones(4, requires_grad=True)

    def f(t: Any) -> Any:
        y = t * 2
        return y, y, [y]

    a, b, (c,) = dtorch.jit(f)(w)
    assert a is b and b is c
    (a + b + c).sum().backward()
    assert w.grad.tolist() == [6.0] * 4


def test_an_argument_returned_through_jit_keeps_its_graph() -> None:
    w = ones(4, requires_grad=True)
    h = w * 2
    same, out = dtorch.jit(lambda t: (t, t * 3))(h)
    assert same is h
    (same.sum() + out.sum()).backward()
    assert w.grad.tolist() == [8.0] * 4


def test_mutation_inside_a_differentiated_function() -> None:
    def f(x: Any) -> Any:
        y = x * 2
        y[1:3] *= 3
        y.view(2, 2)[0] += x[:2]
        return (y * y).sum()

    t = torch.arange(4.0, requires_grad=True)
    f(t).backward()
    x = place(t.detach())
    for g in (dtorch.jit(dtorch.grad(f)), dtorch.grad(dtorch.jit(f))):
        assert torch.equal(g(x).to_torch(), t.grad)


def test_backward_inside_a_jitted_function() -> None:
    def f(x: Any) -> Any:
        y = x.detach().requires_grad_()
        (y * y).sum().backward()
        (z,) = torch.autograd.grad((y**3).sum(), y)
        return y.grad, z

    for g in (f, dtorch.jit(f)):
        grad, z = g(ones(4))
        assert grad.tolist() == [2.0] * 4 and z.tolist() == [3.0] * 4


def test_detach_and_no_grad_inside() -> None:
    def f(x: Any) -> Any:
        with torch.no_grad():
            scale = x.sum()
        return (x * scale).sum() + (x.detach() * x).sum()

    x = place(torch.tensor([1.0, 2.0]))
    for g in (dtorch.grad(f), dtorch.jit(dtorch.grad(f)), dtorch.grad(dtorch.jit(f))):
        assert g(x).tolist() == [4.0, 5.0]


def test_gradients_of_redistribution_and_constraints() -> None:
    def f(x: Any) -> Any:
        y = x.redistribute(placements=[Replicate()]) * torch.arange(4.0)
        return dtorch.parallel.constrain(y, [Shard(0)]).sum()

    for g in (dtorch.grad(f), dtorch.jit(dtorch.grad(f)), dtorch.grad(dtorch.jit(f))):
        found = g(ones(4))
        assert found.tolist() == [0, 1, 2, 3] and found.placements == [Shard(0)]


def test_hooks_and_retained_grads() -> None:
    seen: list[Any] = []
    w = ones(4, requires_grad=True)
    y = w * 2
    y.retain_grad()
    w.register_hook(lambda g: seen.append(g.tolist()))
    (y * 3).sum().backward()
    assert seen == [[6.0] * 4] and y.grad.tolist() == [3.0] * 4


# -- eval_shape ----------------------------------------------------------------------------


def test_eval_shape_runs_nothing() -> None:
    def f(x: Any, w: Any, *, n: int) -> Any:
        return {"y": (x @ w)[:n], "n": n, "z": torch.rand(3, device=x.device)}

    x = ones(8, 4)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    out = dtorch.eval_shape(f, x, torch.ones(4, 6), n=3)
    assert out["y"].shape == (3, 6) and out["y"].dtype == torch.float32 and out["n"] == 3
    assert out["y"].mesh == TWO and torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError, match=r"\S"):
        dtorch.eval_shape(torch.matmul, ones(2, 3), ones(2, 3))


def test_eval_shape_of_a_gradient() -> None:
    spec = dtorch.eval_shape(dtorch.grad(lambda x: (x * x).sum()), ones(4))
    assert spec.shape == (4,) and spec.placements == (Shard(0),)


def test_a_result_whose_graph_the_function_used_up() -> None:
    def step(p: Any, x: Any) -> Any:
        loss, other = (x @ p).sin().sum(), p * 2
        (grad,) = torch.autograd.grad(loss, p, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), p)
        return loss, grad, second, other

    p, x = torch.randn(3, 4, requires_grad=True), torch.randn(2, 3)
    mine = dtorch.tensor(p.detach()).requires_grad_()
    jitted = dtorch.jit(step)
    for _ in range(2):
        found = jitted(mine, dtorch.tensor(x))
        for ours, theirs in zip(found, step(p, x), strict=True):
            assert torch.equal(ours.detach().to_torch(), theirs.detach())
            assert ours.requires_grad == theirs.requires_grad
        mine.grad = None
        found[3].sum().backward(retain_graph=True)
        assert mine.grad is not None and mine.grad.tolist() == [[2.0] * 4] * 3
        for spent in found[:2]:
            with pytest.raises(RuntimeError, match=r"second time: the jitted .*\n  Fix: pass"):
                spent.sum().backward()


def test_a_training_step_with_its_own_gradient_returns_its_loss() -> None:
    mine = dtorch.ones(3).requires_grad_()

    @dtorch.jit
    def step(p: Any) -> Any:
        loss = p.square().sum()
        return loss, torch.autograd.grad(loss, p)[0]

    loss, grad = step(mine)
    assert loss.item() == 3.0 and grad.tolist() == [2.0] * 3
    assert step.cache_info().misses == 1
