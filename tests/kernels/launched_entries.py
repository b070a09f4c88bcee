"""Attention over entries in Triton against its references: attention, the selection of entries, their writes, and how
they are made.

`test_triton.py` runs this file twice, in processes of its own: in Triton's interpreter, which reads TRITON_INTERPRET
when a kernel is defined, and on a GPU, as it is compiled. The interpreter rounds to float8 wrongly, and so is asked to
write what a float8 holds and what saturates.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from op_samples import entries as samples
from op_samples.draw import Draw, Sample
from op_samples.sequences import LONG, MIXED, spoiled, state_sample, without_states
from op_samples.sparse_attention import whole_numbers
from op_samples.states import compress as samples_of_blocks
from strided import with_strided_caches

from precast.kernels.choices import records_of
from precast.kernels.compress.compress import COMPRESS, STATEFUL_COMPRESS
from precast.kernels.entries import launches
from precast.kernels.entries.paged_entry_attention import PAGED_ENTRY_ATTENTION
from precast.kernels.entries.paged_select_entries import PAGED_SELECT_ENTRIES
from precast.kernels.entries.write_entries import WRITE_ENTRIES
from precast.kernels.launch import as_function
from precast.kernels.sparse_attention import launches as selection_launches
from precast.kernels.sparse_attention import triton_attend, triton_select
from precast.kernels.spec import OpSpec
from precast.kernels.storage import rounded

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter holds bfloat16 as integers, and multiplies them as such.
HALVES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]
FLOAT8 = torch.float8_e4m3fn
Same = Callable[..., None]


def triton_of(spec: OpSpec) -> Callable[..., Any]:
    (record,) = (record for record in records_of(spec.name, 1) if record.kind == "triton")
    return as_function(record)


ATTEND, SELECT, WRITE = map(triton_of, (PAGED_ENTRY_ATTENTION, PAGED_SELECT_ENTRIES, WRITE_ENTRIES))


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of what is seen, programs with several rows, and more sequences than are looked at together."""
    monkeypatch.setattr(launches, "ATTEND_PARTS", (3, 2, 3, 1))
    monkeypatch.setattr(launches, "JOINED", 32)
    monkeypatch.setattr(selection_launches, "PROGRAMS", 3)
    monkeypatch.setattr(selection_launches, "SCORE_PARTS", (3, 3, 3, 2))
    monkeypatch.setattr(selection_launches, "NOTE_PARTS", (3, 3, 3, 2))
    monkeypatch.setattr(selection_launches, "SCANNED", 16 if IS_INTERPRETED else 128)
    monkeypatch.setattr(selection_launches, "GROUPS", 32 if IS_INTERPRETED else 256)
    if IS_INTERPRETED:  # compiled kernels have read it already
        for kernels in (triton_attend, triton_select):
            monkeypatch.setattr(kernels, "SEQUENCES", tl.constexpr(4))


def agrees(spec: OpSpec, sample: Sample, same: Same) -> None:
    at_home = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}
    found = SELECT(**sample) if spec is PAGED_SELECT_ENTRIES else ATTEND(**sample)
    found = tuple(each.cpu() for each in found) if isinstance(found, tuple) else found.cpu()

    same(spec, found, spec.reference(**at_home), sample["q"].dtype if spec.products_of else None)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("spec", [PAGED_ENTRY_ATTENTION, PAGED_SELECT_ENTRIES], ids=lambda spec: spec.name)
def test_samples(spec: OpSpec, dtype: torch.dtype, same: Same) -> None:
    count = 0
    for sample in samples.SAMPLES[spec.name, 1](Draw(dtype, DEVICE)):
        count += 1
        agrees(spec, with_strided_caches(sample)[0] if dtype == torch.float32 else sample, same)
    assert count > 5


# --- attention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [{"rate": 1}, {"rate": 1, "window": 37}, {"rate": 3}, {"rate": 2, "count": 50}], ids=str
)
def test_parts_of_what_is_seen(more: dict[str, Any], same: Same) -> None:
    for sequences in ([(1, 200)], [(1, 99), (1, 5), (2, 60)], [(6, 150), (1, 7), (3, 3), (2, 99)]):
        sample = samples.paged_entry_sample(
            Draw(torch.float32, DEVICE), sequences, heads=3, size=12, blocks=5, padding=2, **more
        )
        agrees(PAGED_ENTRY_ATTENTION, sample, same)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float32, None), (torch.float16, FLOAT8)] if IS_INTERPRETED
    else list(itertools.product([torch.float32, *HALVES], [None, FLOAT8])), ids=str,
)  # fmt: skip
@pytest.mark.parametrize("heads", [64] if IS_INTERPRETED else [1, 16, 20, 64, 128])
@pytest.mark.parametrize("more", [{"rate": 1, "window": 128}, {"rate": 128}, {"rate": 4, "count": 40}], ids=str)
def test_sizes_of_deepseek(
    more: dict[str, Any], heads: int, dtype: torch.dtype, cache_dtype: torch.dtype | None, same: Same
) -> None:
    sequences = [(1, 140), (2, 257), (1, 1)] if IS_INTERPRETED else [(1, 1000), (70, 3000), (1, 1), (4, 40)]
    sample = samples.paged_entry_sample(
        Draw(dtype, DEVICE), sequences, heads=heads, size=512, blocks=16, cache_dtype=cache_dtype, **more
    )

    agrees(PAGED_ENTRY_ATTENTION, sample, same)


def test_numbers_that_are_no_entries_are_passed_over(same: Same) -> None:
    sample = samples.paged_entry_sample(
        Draw(torch.float32, DEVICE), [(2, 30), (1, 9)], rate=4, heads=2, size=8, count=9
    )
    named = torch.tensor([0, 6, 7, 2**31 - 1, -(2**31), 0, 1, 6, -1], dtype=torch.int32, device=DEVICE)

    agrees(PAGED_ENTRY_ATTENTION, sample | {"selected": named.expand(1, 3, 9)}, same)


@pytest.mark.parametrize("parts", [1, 3])
def test_results_are_written_into_what_is_given(parts: int, monkeypatch: pytest.MonkeyPatch, same: Same) -> None:
    monkeypatch.setattr(launches, "ATTEND_PARTS", (parts,) * 4)
    sample = samples.paged_entry_sample(
        Draw(torch.float32, DEVICE), [(5, 300), (1, 9)], rate=2, heads=2, size=8, padding=2
    )
    expected = PAGED_ENTRY_ATTENTION.reference(**sample)
    out = tuple(torch.full_like(each, float("nan")) for each in expected)

    found = triton_of(PAGED_ENTRY_ATTENTION)(**sample, out=out)

    assert all(each is given for each, given in zip(found, out, strict=True))
    same(PAGED_ENTRY_ATTENTION, out, expected)
    assert not out[0][:, 6:].any()
    assert bool((out[1][:, 6:] == -torch.inf).all())


# --- the selection -----------------------------------------------------------------------------------------------


def scored_sample(sequences: list[tuple[int, int]], count: int, rate: int, heads: int = 3, size: int = 9) -> Sample:
    """Of whole numbers, scaled by a power of two: scores are exact in any order, and many entries have equal ones."""
    draw = Draw(torch.float32, DEVICE, seed=count)
    sample = samples.paged_entry_sample(draw, sequences, rate=rate, heads=heads, size=size, blocks=7, padding=3)
    del sample["selected"]
    for name in ("q", "cache"):
        numbers = whole_numbers(draw, *sample[name].shape)
        sample[name] = torch.where(sample[name].isnan(), sample[name], numbers)
    weights = whole_numbers(draw, *sample["q"].shape[:3], dtype=torch.float32)
    return sample | {"weights": weights, "count": count, "scale": 0.125}


@pytest.mark.parametrize("rate", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 80])
def test_counts_near_those_of_entries(count: int, rate: int, same: Same) -> None:
    sequences = [(9, 80 * rate + 1), (1, 33 * rate), (1, 33 * rate - 1), (1, 32 * rate), (0, 7), (1, 101 * rate)]

    agrees(PAGED_SELECT_ENTRIES, scored_sample(sequences, count, rate), same)


@pytest.mark.parametrize("heads", [16, 64] if IS_INTERPRETED else [1, 16, 32, 64, 100, 128])
def test_tiles_of_several_queries(heads: int, same: Same) -> None:
    sequences = [(11, 90), (1, 70), (5, 5)] if IS_INTERPRETED else [(130, 3000), (1, 5000), (77, 77), (1, 1)]

    agrees(PAGED_SELECT_ENTRIES, scored_sample(sequences, 9, 4, heads, 128), same)


def test_a_selection_is_written_into_what_is_given() -> None:
    sample = scored_sample([(5, 40), (1, 9)], 4, 2)
    out = torch.full((1, 9, 4), 77, dtype=torch.int32, device=DEVICE)

    assert SELECT(**sample, out=out) is out
    assert torch.equal(out, PAGED_SELECT_ENTRIES.reference(**sample))
    assert bool((out[:, 6:] == -1).all())


# --- writes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_entries_are_written(dtype: torch.dtype) -> None:
    count = 0
    for sample in samples.write_entries(Draw(dtype, DEVICE)):
        stored = sample["cache"].dtype
        if IS_INTERPRETED and stored == torch.bfloat16:
            continue  # the interpreter cuts where devices round
        if IS_INTERPRETED and stored == FLOAT8:
            entries = sample["entries"]
            sample["entries"] = torch.where(entries.abs() > 448, entries, rounded(entries, FLOAT8).to(dtype))
        count += 1
        for given in (sample, with_strided_caches(sample)[0]):
            expected = given | {"cache": given["cache"].clone()}
            WRITE_ENTRIES.reference(**expected)
            WRITE(**given)

            assert torch.equal(given["cache"].float(), expected["cache"].float())
    assert count > 5


# --- the entries of blocks ---------------------------------------------------------------------------------------


def compresses(sample: Sample, same: Same) -> None:
    """Both forms give the references' results and states; states that nobody writes stay as they are, bit by bit."""
    for spec, given in ((COMPRESS, without_states(sample)), (STATEFUL_COMPRESS, sample)):
        at_home = {name: x.cpu().clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        expected = spec.reference(**at_home)
        found = triton_of(spec)(**given, out=torch.full_like(expected, torch.nan, device=DEVICE))

        same(spec, found.cpu(), expected)
        if "state" in given:
            # Copies: nothing is rounded.
            assert torch.equal(given["state"].cpu().nan_to_num(7.5), at_home["state"].nan_to_num(7.5))


def blocks(draw: Draw, sequences: Any, rate: int, series: int, size: int, nameless: tuple[int, ...] = ()) -> Sample:
    end = sum(tokens for tokens, _ in sequences)
    shape = (1, end + 2, size * series)
    return {
        "kv": spoiled(draw.normal(*shape), end),
        "gate": spoiled(draw.normal(*shape), end),
        "bias": draw.normal(rate * series, size, dtype=torch.float32),
        **state_sample(draw, sequences, nameless, (2, rate * series, size * series), draw.dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_samples_of_blocks(dtype: torch.dtype, same: Same) -> None:
    for sample in samples_of_blocks(Draw(dtype, DEVICE)):
        compresses(with_strided_caches(sample)[0] if dtype == torch.float32 else sample, same)


@pytest.mark.parametrize(("rate", "series", "size"), [(5, 1, 70), (3, 2, 33), (128, 1, 40), (4, 2, 130)])
def test_blocks_of_all_sizes(rate: int, series: int, size: int, same: Same) -> None:
    """Of DeepSeek-V4's rates, among others."""
    for sequences in (LONG[1:], MIXED):
        compresses(blocks(Draw(HALVES[-1], DEVICE), sequences, rate, series, size, (1,)), same)


def test_many_sequences_that_decode(same: Same) -> None:
    """More of them than are looked at together; at some of the tokens a block ends."""
    sequences = [(1, context) for context in range(1, 12)]
    for rate, series in ((4, 1), (4, 2)):
        compresses(blocks(Draw(torch.float32, DEVICE), sequences, rate, series, 6), same)
