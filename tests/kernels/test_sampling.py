"""sample: its filters against a naive one, its distribution, and that a row is drawn alone."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from precast.kernels import registry
from precast.kernels.sampling import noise, on_host
from precast.kernels.sampling.limits import MAX_SORTED
from precast.kernels.sampling.sample import greedy, passed, sample, sample_2, scaled

each_sample = pytest.mark.parametrize("function", [sample, on_host.sample], ids=["reference", "on_host"])


def call(function: Callable[..., torch.Tensor], logits: torch.Tensor, **parameters: Any) -> torch.Tensor:
    """`function` with one value or a list a parameter, all filters off unless given."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "steps": 0}
    types = {"top_k": torch.int32, "seeds": torch.int64, "steps": torch.int64}
    rows = {}
    for name, default in defaults.items():
        value = torch.as_tensor(parameters.get(name, default)).to(types.get(name, torch.float32))
        rows[name] = value.expand(logits.shape[0]).to(logits.device)
    return function(logits=logits, **rows)


def naive_kept(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that pass the filters, one by one in double precision."""
    top = max(logits)
    weight = [math.exp((x - top) / temperature) for x in logits]
    kept = [i for i in range(len(logits)) if weight[i] >= min_p]
    if 0 < top_k < len(kept):
        last = sorted((weight[i] for i in kept), reverse=True)[top_k - 1]
        kept = [i for i in kept if weight[i] >= last]
    if top_p < 1:
        total, reached, passed_ = sum(weight[i] for i in kept), 0.0, []
        for i in sorted(kept, key=lambda i: (-weight[i], i)):
            if passed_ and reached >= top_p * total:
                break
            passed_.append(i)
            reached += weight[i]
        kept = passed_
    return set(kept)


# Logits a quarter apart, and top_p between two of their sums: no rounding can decide.
@given(
    logits=st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=1, max_size=12),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.8713, 0.5137, 0.0931]),
    min_p=st.sampled_from([0.0, 0.0471, 0.3319, 1.0]),
)
def test_filters_are_the_naive_ones(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    x = scaled(torch.tensor([logits]), torch.tensor([temperature]))
    found = passed(x, torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]), torch.tensor([min_p]))

    assert set(found[0].nonzero()[:, 0].tolist()) == naive_kept(logits, temperature, top_k, top_p, min_p)


def test_equals_at_the_edge_of_top_p_are_kept_by_index() -> None:
    x = scaled(torch.zeros(1, 5000), torch.tensor([1.0]))
    found = passed(x, torch.tensor([0], dtype=torch.int32), torch.tensor([0.25]), torch.tensor([0.0]))

    assert found[0].nonzero()[:, 0].tolist() == list(range(1250))


def test_filters_that_are_off_keep_the_most_unlikely_token() -> None:
    x = scaled(torch.tensor([[0.0, -200.0, -90.0]]), torch.tensor([1.0]))
    found = passed(x, torch.tensor([3], dtype=torch.int32), torch.tensor([1.0]), torch.tensor([0.0]))

    assert found.tolist() == [[True, True, True]]


def test_scaled_logits_are_at_most_0_and_never_nan() -> None:
    inf = float("inf")
    logits = torch.tensor([[-inf, -inf], [inf, inf], [inf, -inf], [3e38, -3e38], [7.0, 5.0]])
    found = scaled(logits, torch.full((5,), 0.5))

    assert found.tolist() == [[-inf, -inf], [0.0, 0.0], [0.0, -inf], [0.0, -inf], [0.0, -4.0]]


@each_sample
def test_temperature_0_is_the_first_largest(function: Callable[..., torch.Tensor]) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, -1.0], [0.0, -2.0, 0.0, 0.0], [float("-inf"), -3.0, -3.0, -9.0]])
    found = call(function, logits, temperature=0.0, top_k=2, top_p=0.1, seeds=[1, 2, 3])

    assert found.tolist() == [1, 0, 1]


@each_sample
def test_each_row_has_its_own_parameters(function: Callable[..., torch.Tensor]) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(800, -1)
    rows = torch.arange(800)
    found = call(
        function,
        logits,
        temperature=[0.0, 1.0, 1.0, 50.0] * 200,
        top_k=[0, 2, 0, 0] * 200,
        top_p=[1.0, 1.0, 0.01, 1.0] * 200,
        seeds=rows,
    ).view(200, 4)

    assert set(found[:, 0].tolist()) == {3}
    assert set(found[:, 1].tolist()) == {2, 3}
    assert set(found[:, 2].tolist()) == {3}
    assert set(found[:, 3].tolist()) == {0, 1, 2, 3}


@each_sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_minus_infinity_and_of_extremes_stay_in_range(
    function: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    inf = float("inf")
    logits = torch.tensor([[-inf] * 3, [-inf, 2.0, -inf], [inf, 0.0, -inf], [-1e4, -1e4, 1e4]]).to(dtype)
    for temperature in (0.0, 1e-38, 1.0, 1e30):
        for filters in ({}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_p": 0.0}):
            found = call(function, logits, temperature=temperature, seeds=[1, 2, 3, 4], **filters).tolist()

            assert found[:2] == [0, 1]
            assert all(0 <= token < 3 for token in found)
            if temperature < 1e30:
                assert found[2:] == [0, 2]


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


# Chi-square of 6 degrees of freedom is below 27.9 with a probability of 0.9999, of 48 below 95.
@each_sample
@pytest.mark.parametrize("vary", ["seeds", "steps"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_distribution_is_softmax(function: Callable[..., torch.Tensor], vary: str, temperature: float) -> None:
    logits = torch.tensor([2.0, -1.0, 0.0, 1.0, 1.5, -2.0, 0.3])
    numbers = torch.arange(30_000) - 1000
    fixed = {"seeds": 12345678901234567, "steps": 3} | {vary: numbers}
    found = call(function, logits.expand(30_000, -1), temperature=temperature, **fixed)

    assert chi_square(found.bincount(minlength=7), (logits / temperature).softmax(0)) < 27.9


def test_distribution_among_kept_tokens_is_renormalised() -> None:
    logits = torch.tensor([2.0, -1.0, 0.0, 1.0, 1.5, -2.0, 0.3])
    found = call(sample, logits.expand(30_000, -1), top_k=4, seeds=torch.arange(30_000))
    counts = found.bincount(minlength=7)
    kept = [0, 3, 4, 6]

    assert counts[[1, 2, 5]].tolist() == [0, 0, 0]
    assert chi_square(counts[kept], logits[kept].softmax(0)) < 21.1  # 3 degrees of freedom


@pytest.mark.parametrize("vary", ["seeds", "steps"])
def test_next_to_each_other_is_independent(vary: str) -> None:
    logits = torch.tensor([2.0, -1.0, 0.0, 1.0, 1.5, -2.0, 0.3])
    numbers = torch.arange(30_001)
    found = call(sample, logits.expand(30_001, -1), **{vary: numbers})
    pairs = (found[:-1] * 7 + found[1:]).bincount(minlength=49)
    p = logits.softmax(0)

    assert chi_square(pairs, torch.outer(p, p).flatten()) < 95


def test_words_are_uniform_in_every_bit_and_over_a_vocabulary() -> None:
    words = noise.words(torch.tensor([0, 1, -1]), torch.tensor([0, 0, 7]), 1 << 17)
    ones = ((words[..., None] >> torch.arange(32)) & 1).double().mean(1)

    assert words.min() >= 0
    assert words.max() < 1 << 32
    assert (ones - 0.5).abs().max() < 5 * 0.5 / (1 << 17) ** 0.5
    assert all(len(row.unique()) > (1 << 17) - 20 for row in words)


def test_one_bit_of_seed_step_or_index_turns_half_of_all_bits() -> None:
    base = noise.words(torch.tensor([77]), torch.tensor([5]), 2048)
    for bit in range(0, 63, 7):
        for seed, step in ((77 ^ (1 << bit), 5), (77, 5 ^ (1 << bit))):
            other = noise.words(torch.tensor([seed]), torch.tensor([step]), 2048)
            turned = (((base ^ other)[..., None] >> torch.arange(32)) & 1).double().mean()
            assert abs(float(turned) - 0.5) < 0.02
    turned = (((base[:, 0::2] ^ base[:, 1::2])[..., None] >> torch.arange(32)) & 1).double().mean()
    assert abs(float(turned) - 0.5) < 0.02


def test_noise_is_finite_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "words_of", lambda *_: torch.tensor([[0, 1, 2**32 - 2, 2**32 - 1]]))
    found = noise.gumbel(torch.tensor([0]), torch.tensor([0]), 4)[0]

    # -log(-log(1 - u)): u next to 0 gives the largest values, about -log(u).
    assert found.isfinite().all()
    torch.testing.assert_close(
        found[:2], torch.tensor([33 * math.log(2), -math.log(1.5 * 2.0**-32)], dtype=torch.float32)
    )


def test_words_are_these_on_every_device(device: torch.device) -> None:
    seeds, steps = torch.tensor([0, 42, -(2**63)], device=device), torch.tensor([0, 7, 2**40], device=device)

    assert noise.words(seeds, steps, 3).tolist() == WORDS


# Changing the noise changes what every seed draws: that is a new version of the op.
WORDS = [
    [1664782795, 2751642156, 2781318556],
    [3152637113, 3189475918, 1170099980],
    [190121450, 2469545800, 3215755275],
]


def test_words_are_those_of_unbounded_integers() -> None:
    mask = 2**32 - 1

    def mix(x: int) -> int:
        x = ((x ^ x >> 16) * 0x21F0AAAD) & mask
        x = ((x ^ x >> 15) * 0x735A2D97) & mask
        return x ^ x >> 15

    def word(seed: int, step: int, index: int) -> int:
        a, b = 0x9E3779B9, 0x85EBCA6B
        for half in (seed & mask, seed >> 32 & mask, step & mask, step >> 32 & mask):
            a, b = mix(a ^ half), mix(b + half & mask)
        return mix(mix(index ^ a) ^ b)

    seeds, steps = [0, 42, -(2**63), 2**63 - 1, -1], [0, 7, 2**40, 2**63 - 1, 2**32 - 1]
    found = noise.words(torch.tensor(seeds), torch.tensor(steps), 300).tolist()

    assert found == [[word(s, t, i) for i in range(300)] for s, t in zip(seeds, steps, strict=True)]
    assert [row[:3] for row in found[:3]] == WORDS


@each_sample
def test_a_row_is_drawn_alone(function: Callable[..., torch.Tensor]) -> None:
    rows, size = 13, 1031
    torch.manual_seed(3)
    logits = torch.randn(rows, size).bfloat16()
    parameters: dict[str, list[Any]] = {
        "temperature": [(1.0, 0.0, 0.7, 2.0)[r % 4] for r in range(rows)],
        "top_k": [(0, 5, 50)[r % 3] for r in range(rows)],
        "top_p": [(1.0, 0.9)[r % 2] for r in range(rows)],
        "min_p": [(0.0, 0.05, 0.0, 0.0, 0.2)[r % 5] for r in range(rows)],
        "seeds": list(range(rows)),
        "steps": [100 - r for r in range(rows)],
    }
    together = call(function, logits, **parameters).tolist()
    order = torch.randperm(rows).tolist()
    shuffled = call(function, logits[order], **{n: [v[r] for r in order] for n, v in parameters.items()}).tolist()

    assert [together[r] for r in order] == shuffled
    for r in range(rows):
        alone = call(function, logits[r : r + 1], **{name: [values[r]] for name, values in parameters.items()})
        assert alone.tolist() == [together[r]]


each_second = pytest.mark.parametrize("function", [sample_2, on_host.sample_2], ids=["reference", "on_host"])
NAN, INF = float("nan"), float("inf")


@each_second
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("row", "is_marked"),
    [
        ([1.0, NAN, 9.0], True),
        ([NAN, NAN, NAN], True),
        ([-INF, NAN, INF], True),
        ([-INF, -INF, -INF], True),
        ([INF, INF, INF], True),
        ([-INF, INF, -INF], True),
        ([-INF, -INF, -3.0], False),
        ([INF, -INF, 0.0], False),
        ([0.0, 0.0, 0.0], False),
    ],
)
def test_version_2_marks_rows_from_which_nothing_can_be_drawn(
    function: Callable[..., torch.Tensor], temperature: float, dtype: torch.dtype, row: list[float], is_marked: bool
) -> None:
    logits = torch.tensor([[0.5, 0.0, 4.0], row, [3.0, 0.0, 0.0]], dtype=dtype)
    found, first = (call(each, logits, temperature=temperature, top_k=1).tolist() for each in (function, sample))

    assert (found[1] == -1) is is_marked
    assert found[::2] == first[::2] == [2, 0]
    if not is_marked:
        assert found[1] == first[1]


@each_second
def test_version_2_draws_what_version_1_does(function: Callable[..., torch.Tensor]) -> None:
    logits = torch.randn(40, 300) * 3
    rows = {"temperature": [0.0, 0.8, 1.5, 1.0] * 10, "top_p": [1.0, 0.7] * 20, "seeds": list(range(40)), "steps": 7}

    assert call(function, logits, **rows).tolist() == call(sample, logits, **rows).tolist()


def test_same_seed_and_step_draw_the_same_and_others_do_not() -> None:
    logits = torch.zeros(1, 50_000)
    first = call(sample, logits, seeds=9, steps=4)

    assert call(sample, logits, seeds=9, steps=4) == first
    assert call(sample, logits, seeds=9, steps=5) != first
    assert call(sample, logits, seeds=10, steps=4) != first


def test_sample_on_each_device_is_the_hosts(device: torch.device) -> None:
    logits = torch.randn(64, 513) * 2
    parameters = {"temperature": [0.0, 0.8] * 32, "top_k": [0, 9, 40, 0] * 16, "seeds": torch.arange(64)}
    function = registry.resolve("precast.sample", 1, device)
    found = call(function, logits.to(device), **parameters).cpu()

    # Elementary functions differ between devices in their last bit, which decides next to never.
    assert (found != call(sample, logits, **parameters)).sum() <= 1


def test_reference_reads_nothing_back() -> None:
    # A fake tensor has no values: looking at one, or making a shape of them, raises.
    with FakeTensorMode(allow_non_fake_inputs=False):
        real, whole = torch.empty(3), torch.empty(3, dtype=torch.int64)
        found = sample(torch.empty(3, 9), real, whole.int(), real, real, whole, whole)

    assert found.shape == (3,)


def test_rows_are_drawn_as_one_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(11, 50)
    rows = {
        "temperature": [0.0, 0.8, 1.5, 1.0] * 2 + [1.0, 0.0, 1.2], "top_k": [0, 5, 30] * 3 + [1, 0],
        "top_p": [1.0, 0.7] * 5 + [0.4], "seeds": list(range(11)), "steps": 3,
    }  # fmt: skip
    whole = call(sample, logits, **rows)
    sorted_together = []

    def noted(x: torch.Tensor, *filters: torch.Tensor) -> torch.Tensor:
        sorted_together.append(len(x))
        return passed(x, *filters)

    module = importlib.import_module("precast.kernels.sampling.sample")
    monkeypatch.setattr(module, "passed", noted)
    monkeypatch.setattr(module, "MAX_SORTED", 4 * 50 + 49)

    assert call(sample, logits, **rows).tolist() == whole.tolist()
    assert sorted_together == [4, 4, 3]
    monkeypatch.setattr(module, "MAX_SORTED", 1)
    assert call(sample, logits, **rows).tolist() == whole.tolist()


def test_greedy_rows_are_taken_part_by_part() -> None:
    logits = torch.zeros(3, MAX_SORTED // 2 + 1)  # a part has one row
    logits[0, 7] = logits[1, -1] = 1.0
    logits[2, 5] = float("nan")

    assert greedy(logits).tolist() == [7, MAX_SORTED // 2, -1]
    assert greedy(logits[:0]).tolist() == []
