"""sample@2 in Triton against the definition, for Triton's interpreter: `test_triton_sampling.py` runs this file in a
process of its own, because Triton reads TRITON_INTERPRET when a kernel is defined.

With tiles of 128 tokens and lists of 16, so that short rows have several parts, and lists overflow. The interpreter
takes exp and log from numpy, of which the last bit may differ from PyTorch's; it decides next to never.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_samples.draw import Draw
from op_samples.table import samples_of
from sampled_parts import parts_of
from sampling_cases import FILTERS, arguments, logits_of

from precast.kernels import registry
from precast.kernels.choices import fastest
from precast.kernels.launch import Launched
from precast.kernels.sampling import launches, limits, noise
from precast.kernels.sampling.sample import SAMPLE_2, sample_2
from precast.kernels.sampling.triton_numbers import keys, uniform
from precast.kernels.use import GPU

assert os.environ.get("TRITON_INTERPRET") == "1"

SMALL = {
    "BLOCK": 128, "PROGRAMS": 16, "MIN_SPLITS": 2, "MAX_SPLITS": 4, "OWN_GROUPS": 32, "GROUPS": 64, "SHORT": 8,
    "CAPACITY": 16,
}  # fmt: skip
drawn = registry.function_of(fastest("precast.sample", 2, GPU))


@pytest.fixture(autouse=True)
def silent_numpy() -> Iterator[None]:
    """Infinities are meant, and what nobody takes may be the largest of NaN; numpy warns of them, GPUs don't."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.fixture(autouse=True)
def full_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is new: what no pass has written is NaN, and -1."""
    empty = torch.empty

    def full(*sizes: Any, **kinds: Any) -> torch.Tensor:
        made = empty(*sizes, **kinds)
        return made.fill_(255) if made.dtype == torch.uint8 else made

    monkeypatch.setattr(torch, "empty", full)


@pytest.fixture(scope="module", autouse=True)
def small_sizes() -> Iterator[None]:
    """Sizes under which a few hundred tokens are many."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in SMALL.items():
            patch.setattr(limits, name, size)
        yield


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (7, torch.float16), (300, torch.float32)], ids=str)
def test_tokens_are_the_definitions(size: int, dtype: torch.dtype) -> None:
    for seed, (name, logits) in enumerate(logits_of(7, size, dtype)):
        # Each kind of logits with a third of the filters, another one for each size.
        first = 7 * (seed + size)
        given = arguments(logits, [FILTERS[(first + row) % len(FILTERS)] for row in range(7)], seed=seed)

        assert drawn(**given).tolist() == sample_2(**given).tolist(), name


def test_samples() -> None:
    for sample in samples_of(SAMPLE_2, Draw(torch.float16, torch.device("cpu"))):
        assert drawn(**sample).tolist() == sample_2(**sample).tolist()


# Multiples of a quarter: many equals, and none nearer than roundings are.
@settings(max_examples=12)
@given(
    quarters=st.lists(st.integers(-30, 30), min_size=1, max_size=140),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 4.0]),
    top_k=st.integers(0, 150),
    top_p=st.sampled_from([1.0, 0.9713, 0.8713, 0.5137, 0.0931]),
    min_p=st.sampled_from([0.0, 0.0471, 0.3319, 1.0]),
    seed=st.integers(0, 1000),
)
def test_sets_are_the_definitions(quarters: list[int], seed: int, **filters: Any) -> None:
    """Three seeds draw from one set."""
    logits = torch.tensor(quarters).div(4).expand(3, -1)
    given = arguments(logits, [filters], seed=seed)
    with np.errstate(all="ignore"):
        found = drawn(**given)

    assert found.tolist() == sample_2(**given).tolist()


def test_extremes_of_temperature() -> None:
    for name, logits in logits_of(4, 40, torch.float32):
        for temperature in (1e-38, 1e30):
            rows = [{**row, "temperature": temperature} for row in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5})]
            given = arguments(logits, rows)

            assert drawn(**given).tolist() == sample_2(**given).tolist(), name


def test_the_most_of_a_list_and_one_more() -> None:
    """16 tokens fit a list: of so many equals, and of more, all but the last few pass."""
    for equals in (16, 17, 60):
        logits = torch.cat([torch.tensor([9.0, 5.0]), torch.zeros(equals), torch.tensor([-3.0, -4.0])]).expand(4, -1)
        for filters in ({"top_k": 3}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.97}):
            given = arguments(logits, [{**filters, "temperature": 6.0}], seed=equals)

            assert drawn(**given).tolist() == sample_2(**given).tolist()


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.05}, {"top_k": 5, "top_p": 0.5}], ids=str)
def test_the_edge_among_close_numbers(filters: dict[str, Any]) -> None:
    """Three tokens pass; 14 rows draw each of them, and not one of the many that are nearly as likely."""
    cluster = 20 - 0.001 * torch.randperm(59, generator=torch.Generator().manual_seed(5))
    logits = torch.cat([torch.tensor([30.0]), cluster]).expand(14, -1)
    given = arguments(logits, [{"temperature": 50.0, **filters}])
    found = drawn(**given).tolist()

    assert set(found) == set(logits[0].topk(3).indices.tolist())
    assert found == sample_2(**given).tolist()


def test_what_cannot_pass_still_counts_for_the_share() -> None:
    """1 of 1 + 0.8 + 0.4 is less than half, and 1 of 1 + 0.8 more: the second token passes because of the last 98."""
    logits = torch.tensor([1.0, 0.8, *[0.4 / 98] * 98]).log().expand(12, -1)
    given = arguments(logits, [{"top_p": 0.5}])
    found = drawn(**given).tolist()

    assert set(found) == {0, 1}
    assert found == sample_2(**given).tolist()


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.02}, {"top_k": 290, "top_p": 0.01}, {"top_p": 0.3, "min_p": 0.9}], ids=str
)
def test_small_shares_of_flat_rows_take_more_passes_than_are_launched(filters: dict[str, Any]) -> None:
    """The last kernel goes on by itself, over the row or over more than a list holds; of equals by index."""
    levels = torch.randint(0, 3, (300,), generator=torch.Generator().manual_seed(4)).div(64)
    for logits in (torch.zeros(300), levels):
        given = arguments(logits.expand(8, -1), [filters])

        assert drawn(**given).tolist() == sample_2(**given).tolist()


def test_parameters_may_lie_anywhere() -> None:
    given = arguments(dict(logits_of(6, 40, torch.float32))["normal"], FILTERS[5:])
    apart = {name: x if name == "logits" else torch.stack((x, x * 0), 1)[:, 0] for name, x in given.items()}

    assert drawn(**apart).tolist() == sample_2(**given).tolist()


def test_a_row_is_drawn_alone() -> None:
    logits = dict(logits_of(len(FILTERS), 200, torch.float32))["normal"]
    given = arguments(logits, FILTERS)
    together = drawn(**given).tolist()

    for row in range(1, len(FILTERS), 4):
        alone = {name: value[row : row + 1] for name, value in given.items()}
        assert drawn(**alone).tolist() == together[row : row + 1]


def test_uniform_numbers_are_those_of_the_noise() -> None:
    import triton as compiler
    import triton.language as tl

    @compiler.jit
    def kernel(out_ptr, seed_ptr, step_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        first, second = keys(tl.load(seed_ptr), tl.load(step_ptr))
        index = tl.arange(0, SIZE)
        tl.store(out_ptr + index, uniform(first, second, index))

    for seed, step in ((0, 0), (42, 7), (-(2**63), 2**40), (2**63 - 1, 2**63 - 1), (-1, 2**32 - 1)):
        seeds, steps, out = torch.tensor([seed]), torch.tensor([step]), torch.empty(256)
        kernel[1,](out, seeds, steps, SIZE=256)
        expected = ((noise.words(seeds, steps, 256)[0].float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)

        assert out.tolist() == expected.tolist(), (seed, step)


# --- ranks with parts of the vocabulary: what kernels/sampling/parts.cu does is written here in torch ----------------


def drawn_by_ranks(ranks: int, asked: dict[str, torch.Tensor]) -> list[list[int]]:
    """The tokens of each of so many ranks, whose launches run in turn."""
    logits, others = asked["logits"], {name: x for name, x in asked.items() if name != "logits"}
    (count, size), columns = logits.shape, -(-logits.shape[1] // ranks)
    made = [launches.sample_part(count, size, columns, rank, ranks, pdl=False) for rank in range(ranks)]
    tensors = [
        {"logits": part, "held": torch.full((limits.row_bytes() * count,), 0x55, dtype=torch.uint8),
         "whole": torch.full_like(logits, float("nan")), "out": torch.full((count,), -7), **others}
        for part in parts_of(logits, ranks)
    ]  # fmt: skip

    def run(stage: str) -> None:
        for each, held in zip(made, tensors, strict=True):
            Launched(getattr(each, stage))(**held)

    helds = [each["held"] for each in tensors]
    run("scan")
    for name, width in (("tops", 1), ("least", 1), ("places", 1), ("maxima", limits.OWN_GROUPS)):
        put_together([view(held, name, torch.int32, count, limits.MAX_SPLITS * width) for held in helds],
                     made[0].splits * width)  # fmt: skip
    run("list")
    kinds = view(helds[0], "plan", torch.int32, count, limits.PLAN)[:, 0]
    for row, kind in enumerate(kinds.tolist()):
        is_whole = kind == 2 or (kind == 3 and not lists_together(helds, row, count))
        if kind == 1:
            for name in ("scores", "drawn"):
                rows = [view(held, name, torch.int32, count, limits.PASSES * limits.MAX_SPLITS) for held in helds]
                put_together([each[row : row + 1] for each in rows], made[0].splits)
        for each in tensors if is_whole else ():
            each["whole"][row] = logits[row]
    run("finish")
    return [each["out"].tolist() for each in tensors]


def view(held: torch.Tensor, name: str, dtype: torch.dtype, rows: int, width: int) -> torch.Tensor:
    start = launches.held_offsets(rows)[name]
    return held[start : start + rows * width * dtype.itemsize].view(dtype).view(rows, width)


def put_together(arrays: list[torch.Tensor], width: int) -> None:
    """Each rank's columns, `width` of them, to all others."""
    whole = torch.cat([each[:, rank * width : (rank + 1) * width] for rank, each in enumerate(arrays)], 1)
    for each in arrays:
        each[:, : whole.shape[1]] = whole


def lists_together(helds: list[torch.Tensor], row: int, count: int) -> bool:
    """Each rank's list to all others; whether they fit."""
    plans = [view(held, "plan", torch.int32, count, limits.PLAN)[row] for held in helds]
    keys = [view(held, "maxima", torch.int64, count, launches.row_keys())[row] for held in helds]
    counts = [int(plan[1]) for plan in plans]
    lists = [each[limits.CAPACITY :][: min(n, limits.CAPACITY)] for each, n in zip(keys, counts, strict=True)]
    listed, total = torch.cat(lists)[: limits.CAPACITY], sum(counts)
    for each, plan in zip(keys, plans, strict=True):
        each[: len(listed)] = listed
        plan[1] = total
    return total <= limits.CAPACITY


@pytest.mark.parametrize(("ranks", "size"), [(2, 301), (4, 130)])
def test_ranks_draw_the_definitions_tokens(ranks: int, size: int) -> None:
    for seed, (name, logits) in list(enumerate(logits_of(7, size, torch.float32)))[ranks // 4 :: 3]:
        first = 7 * (seed + ranks)
        given = arguments(logits, [FILTERS[(first + row) % len(FILTERS)] for row in range(7)], seed=seed)

        assert drawn_by_ranks(ranks, given) == [sample_2(**given).tolist()] * ranks, name


def test_lists_of_ranks_that_are_too_long_together() -> None:
    """16 fit: 8 of each rank do, and 9 of each don't."""
    for equals in (8, 9, 40):
        half = torch.cat([torch.zeros(equals), torch.full((5,), -9.0)])
        logits = torch.cat([half, half]).expand(4, -1)
        given = arguments(logits, [{"top_k": 3}, {"top_k": 5, "top_p": 0.97}], seed=equals)

        assert drawn_by_ranks(2, given) == [sample_2(**given).tolist()] * 2
