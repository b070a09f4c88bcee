"""Sparse attention in Triton against its references: the selection of keys, attention to these, and the write of keys.

`test_triton.py` runs this file twice, in processes of its own: in Triton's interpreter, which reads TRITON_INTERPRET
when a kernel is defined, and on a GPU, as it is compiled. The interpreter rounds to float8 wrongly, and so is asked to
write what a float8 holds and what saturates.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import triton.language as tl
from captured_steps import STEPS, TOKENS, sparse_steps
from op_samples import sparse_attention as samples
from op_samples.draw import Draw, Sample
from strided import with_strided_caches

from precast.kernels.choices import records_of
from precast.kernels.launch import as_function
from precast.kernels.sparse_attention import launches, triton_attend, triton_select
from precast.kernels.sparse_attention.paged_select_keys import PAGED_SELECT_KEYS
from precast.kernels.sparse_attention.paged_sparse_latent_attention import PAGED_SPARSE_LATENT_ATTENTION
from precast.kernels.sparse_attention.write_index_keys import WRITE_INDEX_KEYS
from precast.kernels.spec import OpSpec
from precast.kernels.storage import rounded

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter holds bfloat16 as integers, and multiplies them as such.
HALVES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]
FLOAT8 = torch.float8_e4m3fn
TINY: dict[str, Any] = {"heads": 3, "nope": 12, "rope": 8, "latent": 16, "value": 14}
Same = Callable[..., None]
CHOSEN = {name: getattr(launches, name) for name in ("PROGRAMS", "SCORE_PARTS", "NOTE_PARTS", "SCANNED", "GROUPS")}
"""How selections are divided, but in these tests."""


def triton_of(spec: OpSpec) -> Callable[..., Any]:
    (record,) = (record for record in records_of(spec.name, 1) if record.kind == "triton")
    return as_function(record)


SELECT, ATTEND, WRITE = map(triton_of, (PAGED_SELECT_KEYS, PAGED_SPARSE_LATENT_ATTENTION, WRITE_INDEX_KEYS))


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with several rows and tiles, several parts of rows, and more sequences than are looked at together."""
    monkeypatch.setattr(launches, "PROGRAMS", 3)
    monkeypatch.setattr(launches, "SCORE_PARTS", (3, 3, 3, 2))
    monkeypatch.setattr(launches, "NOTE_PARTS", (3, 3, 3, 2))
    monkeypatch.setattr(launches, "SCANNED", 16 if IS_INTERPRETED else 128)
    monkeypatch.setattr(launches, "GROUPS", 32 if IS_INTERPRETED else 256)
    monkeypatch.setattr(launches, "ATTEND_PARTS", (3, 2, 3, 1))
    monkeypatch.setattr(launches, "JOINED", 64)
    if IS_INTERPRETED:  # compiled kernels have read it already
        for kernels in (triton_attend, triton_select):
            monkeypatch.setattr(kernels, "SEQUENCES", tl.constexpr(4))


def agrees(spec: OpSpec, sample: Sample, same: Same) -> None:
    at_home = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}
    function = SELECT if spec is PAGED_SELECT_KEYS else ATTEND

    same(spec, function(**sample).cpu(), spec.reference(**at_home))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("spec", [PAGED_SELECT_KEYS, PAGED_SPARSE_LATENT_ATTENTION], ids=lambda spec: spec.name)
def test_samples(spec: OpSpec, dtype: torch.dtype, same: Same) -> None:
    drawn = list(samples.SAMPLES[spec.name, 1](Draw(dtype, DEVICE)))
    # What a sample is about is the same in all types.
    for sample in drawn[::2] if IS_INTERPRETED and dtype != torch.float32 else drawn:
        agrees(spec, with_strided_caches(sample)[0] if dtype == torch.float32 else sample, same)


@pytest.mark.parametrize("step", STEPS)
def test_steps_of_one_shape(step: str, same: Same) -> None:
    for spec, sample in zip(
        (PAGED_SELECT_KEYS, PAGED_SPARSE_LATENT_ATTENTION), sparse_steps(Draw(torch.float32, DEVICE), step), strict=True
    ):
        agrees(spec, sample, same)


# --- the selection -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True], ids=["scores that differ", "equal scores"])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 40])
def test_counts_near_those_of_keys(count: int, whole: bool, same: Same) -> None:
    sequences = [(17, 40), (1, 40), (1, 17), (1, 16), (1, 15), (2, 2), (0, 7)]
    draw = Draw(torch.float32, DEVICE, seed=count)
    sample = samples.paged_select_sample(
        draw, sequences, heads=3, size=9, count=count, page_size=7, padding=3, whole=whole
    )

    agrees(PAGED_SELECT_KEYS, sample, same)


@pytest.mark.parametrize("heads", [1, 16, 64] if IS_INTERPRETED else [1, 16, 32, 64, 100, 128])
def test_tiles_of_several_queries(heads: int, same: Same) -> None:
    """Of the sizes of DeepSeek's index and of GLM's, among others."""
    sequences = [(5, 70), (1, 50), (3, 3)] if IS_INTERPRETED else [(130, 700), (1, 3000), (77, 77), (1, 1)]
    draw, dtype = Draw(HALVES[-1], DEVICE), HALVES[-1]
    sample = samples.paged_select_sample(draw, sequences, heads=heads, size=128, count=20, page_size=16, whole=True)

    assert sample["q"].dtype == dtype
    agrees(PAGED_SELECT_KEYS, sample, same)


@pytest.mark.parametrize("places", [0, 170, 2000])
def test_few_programs_have_room_for_scores(places: int, monkeypatch: pytest.MonkeyPatch, same: Same) -> None:
    """Of one tile, whatever is allowed; of two programs' tiles; of all."""
    monkeypatch.setattr(launches, "OWN_SCORES", places * 8)
    sequences = [(9, 80), (30, 60), (1, 70)]
    sample = samples.paged_select_sample(
        Draw(torch.float32, DEVICE), sequences, heads=3, size=5, count=6, page_size=4, whole=True
    )

    agrees(PAGED_SELECT_KEYS, sample, same)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("times", [1, 3])
def test_scores_of_all_kinds(times: int, same: Same) -> None:
    """Zeros of both signs, infinities, NaN, numbers that differ in their last bit, and far apart ones; in one part, and
    in several."""
    near = torch.tensor(1.0).nextafter(torch.tensor(2.0)).item()
    values = [0.0, near, 1.0, float("inf"), -3.0, 1e-42, float("nan"), 1e38, near, 2.0, 1e-30, 1.0, 0.0, 7e-46, 3.0]
    sample = of_one_query([values * times] * 2, 1)
    sample["weights"][0, 1] = -1.0
    for count in (1, 2, 3, 4, 7, 8, 13, 14, 15 * times - 1):
        agrees(PAGED_SELECT_KEYS, sample | {"count": count}, same)


# Of sequences with one query, whose keys are shared by several programs.


def of_one_query(rows: Sequence[Sequence[float]], count: int) -> Sample:
    """A query for each sequence, and the scores of its keys: a head of one element, which is 1, as is its weight."""
    pages = [-(-len(row) // 4) for row in rows]
    cache = torch.full((sum(pages), 4, 1), float("nan"))
    order = torch.arange(len(cache)).flip(0)
    for first, row in zip(itertools.accumulate(pages, initial=0), rows, strict=False):
        places = torch.arange(len(row))
        cache[order[first + places // 4], places % 4, 0] = torch.tensor(row, dtype=torch.float32)
    lists = {
        "cu_seqlens": torch.arange(len(rows) + 1), "kv_lens": torch.tensor([len(row) for row in rows]),
        "page_indices": order, "page_indptr": torch.tensor([0, *itertools.accumulate(pages)]),
        "page_start": torch.zeros(len(rows)),
    }  # fmt: skip
    tensors = {"q": torch.ones(1, len(rows), 1, 1), "cache": cache, "weights": torch.ones(1, len(rows), 1)}
    tensors |= {name: x.int() for name, x in lists.items()}
    return {**{name: x.to(DEVICE) for name, x in tensors.items()}, "scale": 1.0, "count": count}


@pytest.mark.parametrize("high", [[0], [1], [2], [0, 1], [0, 2], [1, 2]], ids=str)
def test_large_scores_in_some_of_three_parts(high: list[int], same: Same) -> None:
    """Nothing is noted of the others."""
    row = [float(1 + i % 7 + 100 * (i // 16 in high)) for i in range(48)]
    for count in (1, 5, 16):
        agrees(PAGED_SELECT_KEYS, of_one_query([row], count), same)


@pytest.mark.parametrize("count", [3, 5, 14, 17, 31])
def test_equal_scores_in_several_parts(count: int, same: Same) -> None:
    """The first of them are selected: of the first part, of two, and of the third, where that is all keys but a few."""
    rows = [[9.0 if i % 16 == 5 else 4.0 if i % 2 else 1.0 for i in range(length)] for length in (32, 33, 47, 48)]

    agrees(PAGED_SELECT_KEYS, of_one_query(rows, count), same)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_more_scores_reach_the_bound_than_there_is_room_for(count: int, same: Same) -> None:
    """Since they are equal, the least that are selected among them or above these; or since the largest ones are all in
    one group, in whose maxima one is seen."""
    period = 6 * 48
    equal = [2.0] * 90
    some_above = [5.0 if i in (33, 80) else 2.0 for i in range(90)]
    a_group = [100.0 + i // period % 5 if i % period == 0 else float(i % 11) for i in range(8 * period + 1)]

    agrees(PAGED_SELECT_KEYS, of_one_query([equal, some_above, a_group, [3.0] * count], count), same)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_sequences_of_mixed_lengths(parts: int, monkeypatch: pytest.MonkeyPatch, same: Same) -> None:
    """With programs that have several strands, and strands of several tiles; in memory that has large scores at
    first."""
    monkeypatch.setattr(launches, "SCORE_PARTS", (parts,) * 4)
    monkeypatch.setattr(launches, "NOTE_PARTS", (parts + 1,) * 4)
    monkeypatch.setattr(launches, "GROUPS", 64)
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *size, **more: empty(*size, **more).fill_(0x7E if more.get("dtype") == torch.uint8 else 0),
    )
    lengths = (301, 12, 1, 64, 65, 190, 13, 333, 7)
    generator = torch.Generator().manual_seed(parts)
    rows = [(torch.randperm(length, generator=generator) + 1.0).tolist() for length in lengths]
    for count in (12, 40):
        agrees(PAGED_SELECT_KEYS, of_one_query(rows, count), same)


def test_as_many_keys_as_deepseeks() -> None:
    """In the parts and groups that are chosen."""
    with pytest.MonkeyPatch.context() as chosen:
        for name, value in CHOSEN.items():
            chosen.setattr(launches, name, value)
        rows = [torch.randperm(length, generator=torch.Generator().manual_seed(0)) + 1.0 for length in (9000, 2049)]
        sample = of_one_query([row.tolist() for row in rows], 2048)

        found = SELECT(**sample)[0].cpu()

    for row, selected in zip(rows, found, strict=True):
        assert torch.equal(selected, row.topk(2048).indices.sort().values.int())


def test_a_selection_is_written_into_what_is_given() -> None:
    sample, _ = sparse_steps(Draw(torch.float32, DEVICE), "mixed")
    out = torch.full((1, TOKENS, sample["count"]), 77, dtype=torch.int32, device=DEVICE)

    assert SELECT(**sample, out=out) is out
    assert torch.equal(out, PAGED_SELECT_KEYS.reference(**sample))
    assert bool((out[:, TOKENS - 2 :] == -1).all())


# --- attention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 16, 17, 40, 90])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_parts_of_what_is_selected(count: int, sinks: bool, same: Same) -> None:
    for sequences in ([(1, 200)], [(1, 99), (1, 5), (2, 60)], [(7, 150), (1, 7), (3, 3), (5, 99)]):
        sample = samples.paged_sparse_sample(
            Draw(torch.float32, DEVICE), sequences, count=count, sinks=sinks, page_size=5, padding=2, **TINY
        )
        agrees(PAGED_SPARSE_LATENT_ATTENTION, sample, same)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float32, None), (torch.float16, FLOAT8)] if IS_INTERPRETED
    else list(itertools.product([torch.float32, *HALVES], [None, FLOAT8])), ids=str,
)  # fmt: skip
@pytest.mark.parametrize("heads", [16] if IS_INTERPRETED else [1, 16, 20, 128])
def test_sizes_of_deepseek(heads: int, dtype: torch.dtype, cache_dtype: torch.dtype | None, same: Same) -> None:
    sequences = [(1, 60), (3, 35), (1, 1)] if IS_INTERPRETED else [(1, 1000), (70, 3000), (1, 1), (4, 40)]
    sample = samples.paged_sparse_sample(
        Draw(dtype, DEVICE), sequences, count=40 if IS_INTERPRETED else 512, heads=heads, nope=128, rope=64, latent=512,
        value=128, page_size=16, cache_dtype=cache_dtype,
    )  # fmt: skip

    agrees(PAGED_SPARSE_LATENT_ATTENTION, sample, same)


def test_results_are_written_into_what_is_given(same: Same) -> None:
    _, sample = sparse_steps(Draw(torch.float32, DEVICE), "mixed")
    expected = PAGED_SPARSE_LATENT_ATTENTION.reference(**sample)
    out = torch.full_like(expected, float("nan"))

    assert ATTEND(**sample, out=out) is out
    same(PAGED_SPARSE_LATENT_ATTENTION, out, expected)
    assert not out[:, TOKENS - 2 :].any()


# --- writes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_keys_are_written(dtype: torch.dtype) -> None:
    count = 0
    for sample in samples.write_index_keys(Draw(dtype, DEVICE)):
        stored = sample["cache"].dtype
        if IS_INTERPRETED and stored == torch.bfloat16:
            continue  # the interpreter cuts where devices round
        if IS_INTERPRETED and stored == FLOAT8:
            k = sample["k"]
            sample["k"] = torch.where(k.abs() > 448, k, rounded(k, FLOAT8).to(dtype))
        count += 1
        for given in (sample, with_strided_caches(sample)[0]):
            expected = given | {"cache": given["cache"].clone()}
            WRITE_INDEX_KEYS.reference(**expected)
            WRITE(**given)

            assert torch.equal(given["cache"].float(), expected["cache"].float())
    assert count > 5
