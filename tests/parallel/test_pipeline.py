"""Pipelines: equal to the model on the whole batch, in the order of their schedule, overlapping."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo

import dtorch
from dtorch import P, Shard, nn, random
from dtorch.errors import MeshError, TraceError
from dtorch.parallel import (
    ColumnParallel,
    Pipeline,
    RowParallel,
    assign_layers_to_stages,
    constrain,
    pipeline,
    shard,
    stages_from_huggingface,
)
from dtorch.parallel.schedules import Action, Schedule, stage_order, submission_order

Tree = Any
PLAN = {"*up": ColumnParallel("tp"), "*down": RowParallel("tp")}


def stage(params: Tree, x: Any) -> Any:
    x = constrain(x, P("dp"))
    h = F.gelu(F.linear(x, params["up"]))
    return x + F.linear(h, params["down"]) * params["scale"]


def whole(params: Tree, x: Any) -> Any:
    for one in params:
        x = stage(one, x)
    return x


def case(num_stages: int = 2, batch: int = 8) -> tuple[Tree, torch.Tensor, torch.Tensor]:
    """Plain parameters for each stage, inputs and targets."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    params = [{"up": made(12, 6), "down": made(6, 12), "scale": made(6)} for _ in range(num_stages)]
    return params, made(batch, 3, 6), made(batch, 3, 6)


def meshes(num_stages: int = 2, **others: int) -> list[dtorch.DeviceMesh]:
    names = ("pp", *others)
    mesh = dtorch.init_device_mesh("cpu", (num_stages, *others.values()), mesh_dim_names=names)
    return mesh.unbind("pp")


def placed(params: Tree, stages: list[dtorch.DeviceMesh]) -> Tree:
    return [shard(one, mesh, PLAN) for one, mesh in zip(params, stages, strict=True)]


def check_gradients(found: Tree, expected: Tree, params: Tree) -> None:
    for ours, theirs, leaves in zip(found, expected, params, strict=True):
        assert ours.keys() == leaves.keys()
        for name, leaf in leaves.items():
            torch.testing.assert_close(ours[name].to_torch(), theirs[name])
            assert ours[name].device_mesh == leaf.device_mesh
            assert ours[name].placements == leaf.placements


# -- layers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7])
def test_layers_are_divided_evenly_in_their_order(num_stages: int) -> None:
    for num_layers in range(num_stages, 20):
        stages = assign_layers_to_stages(num_layers, num_stages)
        sizes = [stages.count(s) for s in range(num_stages)]
        assert len(stages) == num_layers
        assert stages == sorted(stages)
        assert min(sizes) >= max(max(sizes) - 1, 1)
        assert sizes == [len(part) for part in torch.arange(num_layers).tensor_split(num_stages)]


def test_layers_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_layers=3 is less than num_stages=4"):
        assign_layers_to_stages(3, 4)
    with pytest.raises(ValueError, match=r"num_stages=0: it must be at least 1"):
        assign_layers_to_stages(3, 0)
    with pytest.raises(TypeError, match=r"num_layers must be an integer, not 3\.0"):
        assign_layers_to_stages(3.0, 2)  # pyright: ignore[reportArgumentType]


# -- schedules -------------------------------------------------------------------------------


def text(actions: list[Action]) -> str:
    return " ".join(f"{'F' if a.is_forward else 'B'}{a.microbatch}" for a in actions)


def test_the_orders_of_the_schedules() -> None:
    assert text(stage_order(Schedule.GPIPE, 0, 2, 3)) == "F0 F1 F2 B0 B1 B2"
    one = [text(stage_order(Schedule.ONE_F_ONE_B, s, 3, 4)) for s in range(3)]
    assert one == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_submission_keeps_every_order(
    schedule: Schedule, num_stages: int, num_microbatches: int
) -> None:
    order = submission_order(schedule, num_stages, num_microbatches)
    place = {action: i for i, action in enumerate(order)}
    assert len(place) == len(order) == 2 * num_stages * num_microbatches
    for s in range(num_stages):
        own = [a for a in order if a.stage == s]
        assert own == stage_order(schedule, s, num_stages, num_microbatches)
        flying = most = 0
        for action in own:
            flying += 1 if action.is_forward else -1
            most = max(most, flying)
        ahead = num_microbatches if schedule is Schedule.GPIPE else num_stages - s
        assert most == min(ahead, num_microbatches)
    for s, m, forward in order:
        assert place[Action(s, m, True)] <= place[Action(s, m, forward)]
        if s:
            assert place[Action(s - 1, m, True)] < place[Action(s, m, True)]
            assert place[Action(s, m, False)] < place[Action(s - 1, m, False)]


# -- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [[stage, stage], whole], ids=["stages", "function"])
@pytest.mark.parametrize("axes", [{}, {"dp": 2, "tp": 2}], ids=["pp", "pp,dp,tp"])
def test_a_pipeline_equals_the_model_on_the_whole_batch(model: Any, axes: dict[str, int]) -> None:
    plain, x, y = case()
    params = placed(plain, meshes(**axes))
    expected, grads = dtorch.value_and_grad(lambda p: F.mse_loss(whole(p, x), y))(plain)
    output = whole(plain, x)
    for count in (1, 3, 4, 8):  # 3 is 3, 3, 2
        for schedule in ("gpipe", "1F1B"):
            step = pipeline(model, num_microbatches=count, schedule=schedule, loss_fn=F.mse_loss)
            loss, found = step.value_and_grad(params, x, target=y)
            torch.testing.assert_close(loss.to_torch(), expected)
            check_gradients(found, grads, params)
            torch.testing.assert_close(step(params, x, target=y).to_torch(), expected)
        forward = pipeline(model, num_microbatches=count)(params, x)
        torch.testing.assert_close(forward.to_torch(), output)
        assert forward.device_mesh == params[1]["up"].device_mesh


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_fewer_microbatches_than_stages(schedule: str) -> None:
    plain, x, y = case(num_stages=4, batch=2)
    params = placed(plain, meshes(4))
    step = pipeline([stage] * 4, num_microbatches=2, schedule=schedule, loss_fn=F.mse_loss)
    expected, grads = dtorch.value_and_grad(lambda p: F.mse_loss(whole(p, x), y))(plain)
    loss, found = step.value_and_grad(params, x, target=y)
    torch.testing.assert_close(loss.to_torch(), expected)
    check_gradients(found, grads, params)


def test_a_pipeline_is_a_differentiable_function() -> None:
    plain, x, y = case()
    params = placed(plain, meshes())
    step = pipeline([stage, stage], num_microbatches=3, loss_fn=F.mse_loss)
    expected, grads = dtorch.value_and_grad(lambda p: F.mse_loss(whole(p, x), y))(plain)
    loss, found = dtorch.value_and_grad(step)(params, x, target=y)
    torch.testing.assert_close(loss.to_torch(), expected)
    check_gradients(found, grads, params)
    jitted = dtorch.jit(pipeline([stage, stage], num_microbatches=3))
    torch.testing.assert_close(jitted(params, x).to_torch(), whole(plain, x))


def test_stages_pass_tuples_on_and_share_keyword_arguments() -> None:
    first, last = meshes()
    params = [dtorch.full((3,), 2.0, device_mesh=m) for m in (first, last)]

    def start(w: Any, x: Any, *, mask: Any, gain: float) -> Any:
        return x * w * gain, mask.sum(1)

    def end(w: Any, x: Any, count: Any, *, mask: Any, gain: float) -> Any:
        return {
            "x": (x * w).masked_fill(~mask, 0.0),
            "count": count,
            "gain": gain,
            "mean": x.mean(),
        }

    x, mask = torch.randn(5, 3), torch.rand(5, 3) > 0.5
    inputs = dtorch.Tensor(x, device_mesh=first)
    found = pipeline([start, end], num_microbatches=2)(params, inputs, mask=mask, gain=0.5)
    torch.testing.assert_close(found["x"].to_torch(), (x * 2).masked_fill(~mask, 0.0))
    assert torch.equal(found["count"].to_torch(), mask.sum(1))
    assert found["gain"] == 0.5
    torch.testing.assert_close(found["mean"].to_torch(), x.mean())
    assert {found[k].device_mesh for k in ("x", "count", "mean")} == {last}


def test_the_output_may_be_the_loss() -> None:
    plain, x, y = case()
    params = placed(plain, meshes())

    def loss(params: Tree, x: Any, y: Any) -> Any:
        return F.mse_loss(whole(params, x), y)

    step = pipeline(loss, num_microbatches=3, schedule="1f1b")
    expected, grads = dtorch.value_and_grad(loss)(plain, x, y)
    found = step.value_and_grad(params, x, y)
    torch.testing.assert_close(found[0].to_torch(), expected)
    check_gradients(found[1], grads, params)
    torch.testing.assert_close(step(params, x, y).to_torch(), expected)


def test_a_sharded_batch_stays_sharded() -> None:
    plain, x, y = case()
    stages = meshes(dp=2)
    params = placed(plain, stages)
    inputs = dtorch.Tensor(x, device_mesh=stages[0], placements=[Shard(0)])
    target = dtorch.Tensor(y, device_mesh=stages[1], placements=[Shard(0)])
    step = pipeline([stage, stage], num_microbatches=3, loss_fn=F.mse_loss)
    expected, grads = dtorch.value_and_grad(lambda p: F.mse_loss(whole(p, x), y))(plain)
    loss, found = step.value_and_grad(params, inputs, target=target)
    torch.testing.assert_close(loss.to_torch(), expected)
    check_gradients(found, grads, params)
    output = pipeline([stage, stage], num_microbatches=3)(params, inputs)
    torch.testing.assert_close(output.to_torch(), whole(plain, x))
    assert output.placements == [Shard(0)]


def test_parameters_shared_between_stages_and_parameters_without_effect() -> None:
    first, last = meshes()
    weight, other = torch.randn(7, 4), torch.randn(4, 4)

    def model(params: Tree, ids: Any) -> Any:
        h = torch.tanh(F.embedding(ids, params["table"]) @ params["w"])
        return F.linear(h, params["table"])

    def loss_fn(logits: Any, target: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    plain = {"table": weight, "w": other, "idle": torch.ones(2)}
    params = shard(plain, {"w": last, "idle": last, "*": first})
    ids, target = torch.randint(0, 7, (4, 5)), torch.randint(0, 7, (4, 5))
    step = pipeline(model, num_microbatches=2, schedule="1f1b", loss_fn=loss_fn)
    loss, grads = step.value_and_grad(params, ids, target=target)
    expected = dtorch.value_and_grad(lambda p: loss_fn(model(p, ids), target))(plain)
    torch.testing.assert_close(loss.to_torch(), expected[0])
    for name, grad in grads.items():
        torch.testing.assert_close(grad.to_torch(), expected[1][name])
        assert grad.device_mesh == params[name].device_mesh


def test_a_sequence_split_over_a_ring_inside_the_stages() -> None:
    stages = meshes(ring_cp=2)

    def attend(params: Tree, x: Any) -> Any:
        x = constrain(x, P(None, "ring_cp"))
        q, k, v = (F.linear(x, params[n]).unflatten(-1, (2, 4)).transpose(1, 2) for n in "qkv")
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    plain = [{n: torch.randn(8, 8) * 0.3 for n in "qkv"} for _ in stages]
    x, y = torch.randn(3, 12, 8), torch.randn(3, 12, 8)

    def both(params: Tree) -> Any:
        return F.mse_loss(attend(params[1], attend(params[0], x)), y)

    params = [shard(p, m) for p, m in zip(plain, stages, strict=True)]
    step = pipeline([attend, attend], num_microbatches=2, schedule="1f1b", loss_fn=F.mse_loss)
    expected, grads = dtorch.value_and_grad(both)(plain)
    loss, found = step.value_and_grad(params, x, target=y)
    torch.testing.assert_close(loss.to_torch(), expected)
    check_gradients(found, grads, params)
    output = pipeline([attend, attend], num_microbatches=2)(params, x)
    assert output.placements == [Shard(1)]


def test_a_transformer_is_trained_unmodified() -> None:
    pytest.importorskip("transformers")
    model = zoo.CASES["llama"].make()
    params, apply = nn.functionalize(model)
    placed = shard(params, stages_from_huggingface(model, meshes()))
    ids = torch.cat([zoo.ids(), zoo.ids().flip(1)])[:3]

    def loss_fn(output: Any) -> Any:
        return output.loss

    step = pipeline(apply, num_microbatches=2, schedule="1f1b", loss_fn=loss_fn)
    loss, grads = step.value_and_grad(placed, input_ids=ids, labels=ids)
    expected = model(input_ids=ids, labels=ids).loss
    expected.backward()
    torch.testing.assert_close(loss.to_torch(), expected.detach())
    for name, parameter in model.named_parameters():
        found = grads
        for part in name.split("."):
            found = found[part]
        torch.testing.assert_close(found.to_torch(), parameter.grad, rtol=1e-4, atol=1e-6)


# -- where and when it runs ------------------------------------------------------------------


def test_gradients_are_reduced_once_and_computed_where_the_parameters_are() -> None:
    plain, x, y = case()
    params = placed(plain, meshes(dp=2))
    step = pipeline([stage, stage], num_microbatches=4, loss_fn=F.mse_loss)
    step.value_and_grad(params, x, target=y)
    dtorch.synchronize()
    with dtorch.profile() as profile:
        step.value_and_grad(params, x, target=y)
    for device in range(4):
        mine = [e for e in profile.events if e.row == f"cpu:{device} compute"]
        computed = {e.program for e in mine if e.kind.value == "compute" and "stage" in e.program}
        number = device // 2
        assert computed == {f"forward of stage {number}", f"backward of stage {number}"}
        backward = [e for e in mine if e.program.startswith("backward")]
        assert not [e for e in backward if e.name == "all_reduce"]


HEAD_DIM = 32
LAYERS = 2


def llama_stage(params: Tree, x: Any) -> Any:
    cos, sin = nn.rotary_tables(torch.arange(x.shape[1]), HEAD_DIM)
    for layer in params:
        h = nn.rms_norm(layer["norm"], x)
        x = x + nn.attention(layer["attention"], h, cos, sin, head_dim=HEAD_DIM)[0]
        x = x + nn.swiglu(layer["mlp"], nn.rms_norm(layer["norm"], x))
    return x


def llama(params: Tree, x: Any) -> Any:
    for one in params:
        x = llama_stage(one, x)
    return x


def llama_case(num_stages: int) -> tuple[Tree, torch.Tensor]:
    """Layers on every stage, and hidden states of 8 sequences of 64 tokens."""
    size = 4 * HEAD_DIM

    def layer(number: int) -> Tree:
        first, second = random.split(random.key(number), 2)
        return {
            "norm": nn.rms_norm_init(first, size),
            "attention": nn.attention_init(first, size, 4, 2, HEAD_DIM),
            "mlp": nn.swiglu_init(second, size, 3 * size),
        }

    params = [
        shard([layer(LAYERS * s + i) for i in range(LAYERS)], mesh)
        for s, mesh in enumerate(meshes(num_stages))
    ]
    return params, torch.randn(8, 64, size)


def ran(profile: dtorch.Profile, device: str) -> list[int]:
    """The calls that a device computed something of, in order."""
    computed = [e for e in profile.events if str(e.device) == device and e.kind.value == "compute"]
    return list(dict.fromkeys(e.call for e in computed))


@pytest.mark.parametrize("model", [[llama_stage] * 2, llama], ids=["stages", "function"])
def test_a_stage_begins_before_the_one_before_it_has_ended(model: Any) -> None:
    params, x = llama_case(2)
    step = pipeline(model, num_microbatches=4)
    expected = step(params, x).to_torch()
    dtorch.synchronize()
    with dtorch.profile() as profile:
        found = step(params, x)
    # The second stage begins the second microbatch before the first stage has ended the last.
    layers = [c for c in ran(profile, "cpu:0") if c in ran(profile, "cpu:1")]
    assert len(layers) == 4
    assert layers == sorted(layers)
    first = min(e.start for e in profile.events if e.device and str(e.device) == "cpu:1")
    assert first < profile.busy("cpu:0")[-1][1]
    assert torch.equal(found.to_torch(), expected)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_computes_while_another_one_does(schedule: str) -> None:
    """The first begins the second microbatch and waits there until the second has had the first."""
    has_come = threading.Event()
    calls: list[str] = []

    def first() -> None:
        calls.append("first")
        assert calls.count("first") != 2 or has_come.wait(60), calls

    def second() -> None:
        calls.append("second")
        has_come.set()

    def noted(told: Callable[[], None]) -> Any:
        client = threading.get_ident()

        def note(x: torch.Tensor) -> torch.Tensor:
            if threading.get_ident() != client:  # which asks for the shape of the result
                told()
            return torch.zeros_like(x)

        def computed(params: Tree, x: Any) -> Any:
            return stage(params, x) + dtorch.shard_map(note, x.device_mesh, P(), P())(x.detach())

        return computed

    plain, x, y = case()
    stages = [noted(first), noted(second)]
    step = pipeline(stages, num_microbatches=4, schedule=schedule, loss_fn=F.mse_loss)
    loss, _ = step.value_and_grad(placed(plain, meshes()), x, target=y)
    torch.testing.assert_close(loss.to_torch(), F.mse_loss(whole(plain, x), y))
    assert calls.count("first") == calls.count("second") == 4


@pytest.mark.parametrize("model", [[llama_stage] * 2, llama], ids=["stages", "function"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_are_trained_in_the_order_of_the_schedule(model: Any, schedule: str) -> None:
    params, x = llama_case(2)
    step = pipeline(model, num_microbatches=4, schedule=schedule, loss_fn=F.mse_loss)
    step.value_and_grad(params, x, target=x)[0].to_torch()
    dtorch.synchronize()
    with dtorch.profile() as profile:
        step.value_and_grad(params, x, target=x)
    for number in range(2):
        kinds: dict[int, str] = {}
        for event in profile.events:
            if str(event.device) == f"cpu:{number}" and event.program.endswith(f"stage {number}"):
                kinds.setdefault(event.call, event.program[0].upper())
        wanted = stage_order(Schedule(schedule), number, 2, 4)
        assert list(kinds.values()) == ["F" if a.is_forward else "B" for a in wanted]


# -- what cannot be --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_microbatches": 0}, r"num_microbatches=0: it must be at least 1"),
        ({"num_microbatches": -2}, r"num_microbatches=-2: it must be at least 1"),
        ({"num_microbatches": 2, "schedule": "zb"}, r"schedule='zb': expected 'gpipe' or '1f1b'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline([stage, stage], **options)


def test_wrong_functions_are_refused() -> None:
    with pytest.raises(TypeError, match=r"num_microbatches must be an integer, not True"):
        pipeline(whole, num_microbatches=True)
    with pytest.raises(ValueError, match=r"a pipeline needs at least one stage"):
        pipeline([], num_microbatches=2)
    with pytest.raises(TypeError, match=r"stage 1 of a pipeline must be a function, not 3"):
        pipeline([stage, 3], num_microbatches=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"stages must be a function or several, not 3"):
        pipeline(3, num_microbatches=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"loss_fn must be a function, not 'mse'"):
        pipeline(whole, num_microbatches=2, loss_fn="mse")  # pyright: ignore[reportArgumentType]


def _step(count: int = 4, model: Any = None, **options: Any) -> Pipeline:
    return pipeline(model or [stage, stage], num_microbatches=count, **options)


def _calls() -> dict[str, tuple[Callable[[Tree, Any, Any], Any], type[Exception], str]]:
    def shifted(params: Tree, x: Any) -> Any:
        return x.sum() * params[0]["up"].sum(), torch.ones(1, dtype=torch.int64).sum()

    def noisy(params: Tree, x: Any) -> Any:
        return torch.dropout(whole(params, x), 0.5, True).sum()

    return {
        "batch": (
            lambda p, x, y: _step(9)(p, x),
            ValueError,
            r"num_microbatches=9 is more than the batch of 8",
        ),
        "empty": (
            lambda p, x, y: _step(2)(p, x[:0]),
            ValueError,
            r"more than the batch of 0.\n  Fix: take a larger batch\.$",
        ),
        "sizes": (
            lambda p, x, y: _step(loss_fn=F.mse_loss)(p, x, target=y[:7]),
            ValueError,
            r"differ in it:\n  args\[0\]: \[8, 3, 6\]\n  target\[0\]: \[7, 3, 6\]",
        ),
        "nothing": (lambda p, x, y: _step()(p), ValueError, r"it is given none with dims"),
        "trees": (
            lambda p, x, y: _step()(p[:1], x),
            ValueError,
            r"2 stage functions takes a list of as many parameter trees, not a list of 1",
        ),
        "scalar": (
            lambda p, x, y: _step().value_and_grad(p, x),
            TypeError,
            r"loss of a pipeline must be a scalar tensor, not \[2, 3, 6\]",
        ),
        "one element": (
            lambda p, x, y: _step(loss_fn=lambda o: o.sum()[None]).value_and_grad(p, x),
            TypeError,
            r"loss of a pipeline must be a scalar tensor, not \[1\]",
        ),
        "constant": (
            lambda p, x, y: _step(loss_fn=lambda o: torch.tensor(1.0)).value_and_grad(p, x),
            TypeError,
            r"does not depend on a parameter, so it has no gradient.\n  Fix: compute",
        ),
        "integer loss": (
            lambda p, x, y: _step(loss_fn=lambda o: o.sum().long()).value_and_grad(p, x),
            TypeError,
            r"the loss of a pipeline is torch\.int64, so it has no gradient",
        ),
        "integers": (
            lambda p, x, y: _step(model=whole).value_and_grad([{"n": torch.ones(1).int()}], x),
            TypeError,
            r"these are none:\n  0\.n: torch\.int32 tensor",
        ),
        "plain": (
            lambda p, x, y: _step()([{"up": torch.ones(2)}, p[1]], x),
            MeshError,
            r"the parameters of stage 0 live on no mesh",
        ),
        "same": (
            lambda p, x, y: _step(loss_fn=F.mse_loss).value_and_grad([p[0], p[0]], x, target=y),
            MeshError,
            r"two stages of a pipeline that is trained live on one mesh",
        ),
        "output": (
            lambda p, x, y: _step(model=shifted)(p, x),
            ValueError,
            r"cannot join an output of dtype torch\.int64 and shape \[\]",
        ),
        "random": (
            lambda p, x, y: _step(model=noisy).value_and_grad(p, x),
            TraceError,
            r"a pipeline's model draws from a generator",
        ),
        "jitted": (
            lambda p, x, y: dtorch.jit(_step(loss_fn=F.mse_loss).value_and_grad)(p, x, target=y),
            TraceError,
            r"value_and_grad is called inside a jitted function",
        ),
    }


@pytest.mark.parametrize("name", _calls())
def test_wrong_calls_are_refused(name: str) -> None:
    call, kind, message = _calls()[name]
    plain, x, y = case()
    with pytest.raises(kind, match=message):
        call(placed(plain, meshes()), x, y)


def test_unrelated_meshes_are_refused() -> None:
    plain, x, y = case()
    unrelated = [dtorch.DeviceMesh("cpu", [0]), dtorch.DeviceMesh("cpu", [1])]
    params = [shard(p, m) for p, m in zip(plain, unrelated, strict=True)]
    step = pipeline(whole, num_microbatches=2, loss_fn=F.mse_loss)
    with pytest.raises(MeshError, match=r"not the stages of one DeviceMesh\.unbind call"):
        step.value_and_grad(params, x, target=y)
    loss, _ = _step(loss_fn=F.mse_loss).value_and_grad(params, x, target=y)  # moved by name
    torch.testing.assert_close(loss.to_torch(), F.mse_loss(whole(plain, x), y))
