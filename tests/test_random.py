"""`dtorch.random`: the generator itself, the distributions, the keys, values on a mesh."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import dtorch
from dtorch import Partial, Placement, Replicate, Shard, random
from dtorch.errors import PlacementError

WORD = 2**32


def hex_words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(
    ("counter", "key", "block"),
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_blocks(counter: str, key: str, block: str) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in hex_words(counter))
    k0, k1 = (torch.tensor(word) for word in hex_words(key))
    words = random._philox((c0, c1, c2, c3), (k0, k1))
    assert [word.item() for word in words] == hex_words(block)


def test_philox_agrees_with_python_integers() -> None:
    counters = torch.randint(0, WORD, (4, 50))
    key = torch.randint(0, WORD, (2,))
    words = random._philox(tuple(counters), (key[0], key[1]))
    for i in range(50):
        expected = philox_by_integers(counters[:, i].tolist(), key.tolist())
        assert [int(word[i]) for word in words] == expected


def philox_by_integers(counter: list[int], key: list[int]) -> list[int]:
    """The rounds as the paper writes them, on Python's unbounded integers."""
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * counter[0], WORD)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], WORD)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % WORD, (key[1] + 0xBB67AE85) % WORD]
    return counter


def test_bits_are_the_first_word_of_each_elements_block() -> None:
    key = random.key(1 + (2 << 32))
    values = random.bits(key, (3, 4)).flatten().tolist()
    assert values == [philox_by_integers([i, 0, 0, 0], [1, 2])[0] for i in range(12)]


DRAWS: dict[str, Callable[..., Tensor]] = {
    "bits": random.bits,
    "uniform": random.uniform,
    "uniform float64": partial(random.uniform, dtype=torch.float64),
    "uniform bfloat16": partial(random.uniform, dtype=torch.bfloat16, low=-2.0, high=3.0),
    "normal": random.normal,
    "normal float64": partial(random.normal, dtype=torch.float64),
    "normal float16": partial(random.normal, dtype=torch.float16),
    "randint": partial(random.randint, low=-5, high=12),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_shorter_shape_gives_a_prefix(draw: Callable[..., Tensor]) -> None:
    key = random.key(3)
    whole = draw(key, (500,))
    for size in (0, 1, 7, 16, 499):
        assert torch.equal(draw(key, (size,)), whole[:size])
    assert torch.equal(draw(key, (20, 25)), whole.reshape(20, 25))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize(("dim", "num_parts"), [(0, 3), (1, 2), (1, 7), (0, 41)])
def test_parts_of_the_counters_give_parts_of_the_values(
    monkeypatch: pytest.MonkeyPatch, draw: Callable[..., Tensor], dim: int, num_parts: int
) -> None:
    key, shape = random.key(4), (41, 37)
    whole = draw(key, shape)
    counters = random._counters(shape, None, None)
    parts = []
    for part in counters.chunk(num_parts, dim):
        monkeypatch.setattr(random, "_counters", lambda *_, part=part: part)
        parts.append(draw(key, shape))
    assert torch.equal(torch.cat(parts, dim), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_is_uniform_over_the_half_open_range(dtype: torch.dtype) -> None:
    values = random.uniform(random.key(5), (100_000,), dtype)
    assert values.dtype == dtype
    assert (values >= 0).all() and (values < 1).all()
    assert_counts_fit((values.double() * 8).long(), torch.full((8,), 1 / 8))


def test_uniform_scales_to_its_range() -> None:
    values = random.uniform(random.key(5), (10_000,), low=-3.0, high=5.0)
    unit = random.uniform(random.key(5), (10_000,))
    assert torch.equal(values, -3.0 + 8.0 * unit)


def test_uniform_uses_every_digit_of_its_dtype() -> None:
    for dtype, digits in ((torch.float32, 24), (torch.float64, 53)):
        values = random.uniform(random.key(6), (1000,), dtype)
        scaled = values.double() * 2.0**digits
        assert torch.equal(scaled, scaled.round())
        assert 400 < int((scaled % 2).sum()) < 600


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_normal_is_standard_normal(dtype: torch.dtype) -> None:
    values = random.normal(random.key(7), (100_000,), dtype)
    assert values.dtype == dtype
    assert values.isfinite().all()
    edges = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0], dtype=torch.float64)
    below = torch.special.ndtr(edges)
    share = torch.diff(below, prepend=torch.zeros(1), append=torch.ones(1))
    # The slack is for the 16-bit values that lie on an edge.
    assert_counts_fit(torch.bucketize(values.double(), edges), share.float(), slack=0.02)


def test_normal_reaches_into_the_tails() -> None:
    values = random.normal(random.key(8), (1_000_000,))
    assert 4.3 < values.abs().max() < 6.7
    expected = 1e6 * math.erfc(3 / math.sqrt(2))
    assert abs(int((values.abs() > 3).sum()) - expected) < 5 * math.sqrt(expected)


def test_neighbouring_values_are_uncorrelated() -> None:
    values = random.normal(random.key(9), (100_000,), torch.float64)
    for lag in (1, 2, 4, 16):
        correlation = (values[lag:] * values[:-lag]).mean()
        assert abs(correlation) < 5 / math.sqrt(100_000)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 4), (10, 27), (5, 5 + WORD)])
def test_randint_is_uniform_over_the_range(low: int, high: int) -> None:
    values = random.randint(random.key(10), (50_000,), low, high)
    assert values.dtype == torch.int64
    assert int(values.min()) >= low and int(values.max()) < high
    num_bins = min(high - low, 17)
    bins = (values - low) * num_bins // (high - low)
    shares = torch.full((num_bins,), 1 / num_bins)
    assert_counts_fit(bins, shares)


def test_randint_scales_64_bits_to_the_range() -> None:
    key = random.key(11)
    for span in (7, 2**31 - 1, 2**31 + 1, WORD):
        values = random.randint(key, (100,), 0, span).tolist()
        blocks = [philox_by_integers([i, 0, 0, 0], [11, 0]) for i in range(100)]
        assert values == [(b[0] * span + (b[1] * span >> 32)) >> 32 for b in blocks]


def test_randint_gives_the_dtype_asked_for() -> None:
    values = random.randint(random.key(12), (1000,), -128, 128, dtype=torch.int8)
    assert values.dtype == torch.int8
    assert values.min() == -128 and values.max() == 127


def test_categorical_draws_by_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -2.0, 3.0, -torch.inf])
    draws = random.categorical(random.key(13), logits.expand(20_000, 5))
    assert draws.shape == (20_000,)
    assert_counts_fit(draws, logits.softmax(0))


def test_categorical_takes_leading_dims_and_rare_categories() -> None:
    logits = torch.tensor([0.0, 100.0]).expand(3, 4, 2)
    assert torch.equal(random.categorical(random.key(14), logits), torch.ones(3, 4).long())
    assert random.categorical(random.key(14), torch.tensor([0.5])).item() == 0


def test_categorical_keeps_up_with_many_categories() -> None:
    draws = random.categorical(random.key(15), torch.zeros(40, 50_000))
    assert draws.unique().numel() > 37


def test_keys_differ_by_every_bit_of_the_seed() -> None:
    seeds = [0, 1, 2**31, 2**32, 2**63, 2**64 - 2, -1]
    assert len({tuple(random.key(seed).tolist()) for seed in seeds}) == len(seeds)
    assert torch.equal(random.key(-1), random.key(2**64 - 1))
    assert random.key(5).dtype == torch.int64


def test_split_and_fold_in_give_unrelated_keys() -> None:
    key = random.key(16)
    keys = [key, *random.split(key, 5), *(random.fold_in(key, i) for i in range(5))]
    draws = torch.stack([random.bits(k, (100,)) for k in keys])
    assert draws.unique().numel() == draws.numel()
    assert random.split(key).shape == (2, 2)
    assert random.split(key, 0).shape == (0, 2)
    assert torch.equal(random.split(key, 7)[:3], random.split(key, 3))


@pytest.mark.parametrize("data", [0, 7, -1, -(2**40), 2**63 - 1])
def test_fold_in_takes_the_same_number_as_int_and_as_tensor(data: int) -> None:
    key = random.key(17)
    assert torch.equal(random.fold_in(key, data), random.fold_in(key, torch.tensor(data)))
    assert not torch.equal(random.fold_in(key, data), random.fold_in(key, data ^ (1 << 40)))


def test_vmap_over_keys_draws_what_each_key_draws() -> None:
    keys = random.split(random.key(18), 3)
    drawn = torch.func.vmap(lambda k: random.normal(k, (4,)))(keys)
    assert torch.equal(drawn, torch.stack([random.normal(k, (4,)) for k in keys]))


PLACEMENTS = [Replicate(), Shard(0), Shard(1), Shard(-1)]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_shards_are_parts_of_the_same_values(
    draw: Callable[..., Tensor], placement: Placement, num_devices: int
) -> None:
    key, shape = random.key(20), (5, 4, 3)
    mesh = dtorch.DeviceMesh("cpu", list(range(num_devices)))
    values = draw(key, shape, device_mesh=mesh, placements=[placement])
    assert torch.equal(values.to_torch(), draw(key, shape))
    expected = Shard(2) if placement == Shard(-1) else placement
    assert values.placements == [expected]


@pytest.mark.parametrize("first", PLACEMENTS, ids=str)
@pytest.mark.parametrize("second", PLACEMENTS, ids=str)
def test_values_on_a_mesh_of_two_axes(first: Placement, second: Placement) -> None:
    key, mesh = random.key(21), dtorch.init_device_mesh("cpu", (2, 3))
    values = random.normal(key, (7, 4), device_mesh=mesh, placements=[first, second])
    assert torch.equal(values.to_torch(), random.normal(key, (7, 4)))


def test_no_device_makes_more_than_its_part() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    draw = dtorch.jit(
        lambda key: random.uniform(key, (8, 6), device_mesh=mesh, placements=[Shard(0)])
    )
    key = dtorch.Tensor(random.key(22), device_mesh=mesh)
    program = str(draw.program(key))
    assert "[8, 6] [S(0)]" in program and "[8, 6] [R]" not in program
    assert torch.equal(draw(key).to_torch(), random.uniform(random.key(22), (8, 6)))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_categorical_of_distributed_logits(placement: Placement) -> None:
    logits = torch.randn(6, 11)
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    spread = dtorch.Tensor(logits, device_mesh=mesh, placements=[placement])
    drawn = random.categorical(random.key(23), spread)
    assert torch.equal(drawn.to_torch(), random.categorical(random.key(23), logits))


def test_scalars_and_keys_on_a_mesh() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    key = dtorch.Tensor(random.key(24), device_mesh=mesh)
    value = random.normal(key, (), device_mesh=mesh)
    assert value.item() == random.normal(random.key(24), ()).item()
    assert torch.equal(random.split(key, 3).to_torch(), random.split(random.key(24), 3))
    step = dtorch.tensor(5, device_mesh=mesh)
    assert torch.equal(random.fold_in(key, step).to_torch(), random.fold_in(random.key(24), 5))


def test_partial_values_are_refused() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    with pytest.raises(PlacementError, match=r"whole or in shards, but got \[Partial"):
        random.uniform(random.key(0), (2,), device_mesh=mesh, placements=[Partial()])


def test_torchs_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    random.normal(random.key(19), (10,))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda k: random.key(1.5), TypeError, "A seed is an int, but got 1.5 of type float"),
        (lambda k: random.key(2**64), ValueError, "fits in 64 bits, but got 18446744073709551616"),
        (lambda k: random.bits(k.float(), (2,)), TypeError, "int64 tensor, but got torch.float32"),
        (lambda k: random.bits(3, (2,)), TypeError, "int64 tensor, but got int"),
        (lambda k: random.bits(random.split(k), (2,)), ValueError, r"\[2\], but got \[2, 2\]"),
        (lambda k: random.bits(k, (2, -1)), ValueError, r"not negative, but got shape \[2, -1\]"),
        (lambda k: random.split(k, -1), ValueError, "num=-1"),
        (lambda k: random.fold_in(k, 1.0), TypeError, "takes an integer, but got 1.0"),
        (lambda k: random.fold_in(k, torch.tensor(1.0)), TypeError, "got a torch.float32 tensor"),
        (lambda k: random.fold_in(k, torch.tensor([1])), ValueError, r"0-d tensor, .* \[1\]"),
        (lambda k: random.fold_in(k, 2**64), ValueError, "at most 64 bits, but got 184467"),
        (lambda k: random.uniform(k, (2,), torch.int64), TypeError, "but got torch.int64"),
        (lambda k: random.normal(k, (2,), torch.complex64), TypeError, "but got torch.complex64"),
        (lambda k: random.randint(k, (2,), 3, 3), ValueError, r"but got \[3, 3\)"),
        (lambda k: random.randint(k, (2,), 0, WORD + 1), ValueError, r"1 to 2\*\*32 values"),
        (lambda k: random.randint(k, (2,), 0, 300, dtype=torch.uint8), ValueError, r"\[0, 255\]"),
        (lambda k: random.randint(k, (2,), 0, 3, dtype=torch.bool), TypeError, "draws integers"),
        (lambda k: random.categorical(k, torch.zeros(3, 0)), ValueError, r"but got \[3, 0\]"),
    ],
)
def test_bad_arguments_raise(
    call: Callable[[Tensor], Tensor], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(random.key(0))


def assert_counts_fit(index: Tensor, share: Tensor, slack: float = 0.0) -> None:
    """Each index is as frequent as its share, within five standard deviations and the slack."""
    expected = share.double() * index.numel()
    allowed = 5 * (expected * (1 - share)).clamp(min=0).sqrt() + slack * expected
    off = (index.bincount(minlength=share.numel()) - expected).abs()
    assert (off <= allowed).all(), f"{off.tolist()} beyond {allowed.tolist()}"
