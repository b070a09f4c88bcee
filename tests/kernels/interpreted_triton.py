"""The Triton kernels against the references, for Triton's interpreter: `test_triton.py` runs this file in a process of
its own, because Triton reads TRITON_INTERPRET when a kernel is defined.

float32 and float16 only: the interpreter holds bfloat16 as integers, and multiplies them as such. It reads float8 as it
should, but rounds to it wrongly, and so is asked to write what a float8 holds and what saturates.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import triton.language as tl
from op_samples.attention import paged_sample
from op_samples.draw import Draw, Sample
from op_samples.table import samples_of
from strided import with_strided_caches

from precast.kernels.attention import launches, triton_context, triton_split
from precast.kernels.attention.attention import ATTENTION
from precast.kernels.attention.paged import PAGED_ATTENTION, paged_attention
from precast.kernels.attention.write_kv import WRITE_KV
from precast.kernels.choices import records_of
from precast.kernels.launch import as_function
from precast.kernels.records import Record
from precast.kernels.spec import OpSpec
from precast.kernels.storage import rounded

assert os.environ.get("TRITON_INTERPRET") == "1"

CPU = torch.device("cpu")
FLOAT8 = torch.float8_e4m3fn


def made_anew(record: Record) -> Callable[..., torch.Tensor]:
    """The op, with launches that are made for each call: tests change what they are made of."""
    return lambda **arguments: as_function(record)(**arguments)


PAGED = {
    record.name: made_anew(record)
    for record in records_of("precast.paged_attention", 1)
    if record.name in ("triton.paged_attention.small", "triton.paged_attention")
}
"""Small tiles alone, and with large ones. Other records have other sizes of tiles, in half precision."""
(PACKED,) = (as_function(record) for record in records_of("precast.attention", 1) if record.kind == "triton")
(write_kv,) = (as_function(record) for record in records_of("precast.write_kv", 1) if record.kind == "triton")
MIXED = [(5, 5), (1, 33), (0, 4), (19, 71), (1, 1)]
DECODE = [(1, length) for length in (1, 17, 64, 75)]
STEPS = {
    "mixed": ("triton.paged_attention", MIXED),
    "mixed, small tiles": ("triton.paged_attention.small", MIXED),
    "decode": ("triton.paged_attention", DECODE),
}
each_step = pytest.mark.parametrize(
    ("attend", "sequences"), [(PAGED[name], step) for name, step in STEPS.values()], ids=STEPS
)
each_paged = pytest.mark.parametrize("attend", PAGED.values(), ids=PAGED)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take turns here. So there are few, but some with two tiles, and sequences of two parts."""
    monkeypatch.setattr(launches, "PROGRAMS", 3)
    monkeypatch.setattr(launches, "MOST_PARTS", 2)
    monkeypatch.setattr(launches, "LEAST_PARTS", 2)
    monkeypatch.setattr(launches, "MANY_KEYS", 16)
    monkeypatch.setattr(launches, "FEW_KEYS", 16)
    monkeypatch.setattr(launches, "WHOLE_KEYS", 20)
    monkeypatch.setattr(launches, "WHOLE_WIDE_KEYS", 20)
    for kernels in (triton_context, triton_split):
        monkeypatch.setattr(kernels, "SEQUENCES", tl.constexpr(4))


def has_cache_of(sample: Sample, dtype: torch.dtype) -> bool:
    return sample["k_cache"].dtype == dtype


def without_rounding(sample: Sample) -> Sample:
    """The sample with values that its cache of 8 bits holds, or that are too large for it; scales are powers of two."""
    if not has_cache_of(sample, FLOAT8):
        return sample
    scales = {"k_scale": torch.tensor([0.25]), "v_scale": torch.tensor([8.0])} if "k_scale" in sample else {}
    return sample | scales | {name: held(sample[name], scales.get(f"{name}_scale")) for name in "kv"}


def held(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    stored = x.float() if scale is None else x.float() / scale
    stored = torch.where(stored.abs() > 448, stored, rounded(stored, FLOAT8).float())
    return (stored if scale is None else stored * scale).to(x.dtype)


def taken(spec: OpSpec, dtype: torch.dtype) -> list[Sample]:
    """The samples that the records of these kernels take: none has a bias by distance."""
    return [sample for sample in samples_of(spec, Draw(dtype, CPU)) if sample.get("bias") is None]


@pytest.mark.parametrize(
    ("spec", "function", "dtype"),
    [
        (ATTENTION, PACKED, torch.float32),
        (ATTENTION, PACKED, torch.float16),
        (PAGED_ATTENTION, PAGED["triton.paged_attention.small"], torch.float32),
        (PAGED_ATTENTION, PAGED["triton.paged_attention"], torch.float16),
    ],
    ids=["attention float32", "attention float16", "small tiles float32", "paged float16"],
)
def test_samples(
    spec: OpSpec, function: Callable[..., torch.Tensor], dtype: torch.dtype, same: Callable[..., None]
) -> None:
    for sample in taken(spec, dtype):
        same(spec, function(**sample), spec.reference(**sample))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_write_kv_samples(dtype: torch.dtype, copied: Callable[[Sample], Sample]) -> None:
    count = 0
    for sample in samples_of(WRITE_KV, Draw(dtype, CPU)):
        if has_cache_of(sample, torch.bfloat16):
            continue  # the interpreter cuts where devices round
        count += 1
        sample = without_rounding(sample)
        expected = copied(sample)
        WRITE_KV.reference(**expected)
        write_kv(**sample)

        for name in ("k_cache", "v_cache"):
            assert torch.equal(sample[name].float(), expected[name].float())
    assert count > 5


@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("slots", [range(9, 17), range(33, 65)], ids=["in parts", "whole"])
def test_sequences_of_several_queries_beside_single_tokens(
    slots: range, padding: int, same: Callable[..., None]
) -> None:
    """Rows of sequences with one query are another kernel's, and one of padding is: nothing is written there."""
    sample = paged_sample(Draw(torch.float32, CPU), MIXED, heads=4, kv_heads=2, size=16, page_size=8, padding=padding)
    single = [token for token, (queries, _) in zip((0, 5, 6, 6, 25), MIXED, strict=True) if queries == 1]
    single += [26] if padding == 1 else []
    others = [token for token in range(26 + padding) if token not in single]
    record = Record(
        name="tried", op="precast.paged_attention", allocates=False, runs=partial(launches.few_queries, slots=slots),
        workspace=partial(launches.partial_bytes, is_small=True),
    )  # fmt: skip
    out = torch.full_like(sample["q"], torch.nan)

    as_function(record)(**sample, out=out)

    same(PAGED_ATTENTION, out[:, others], paged_attention(**sample)[:, others])
    assert out[:, single].isnan().all()


def test_pages_far_apart(copied: Callable[[Sample], Sample], same: Callable[..., None]) -> None:
    """Where a page is doesn't depend on the dtype."""
    for sample in taken(PAGED_ATTENTION, torch.float32)[::3]:
        spread, _ = with_strided_caches(sample)
        same(PAGED_ATTENTION, PAGED["triton.paged_attention"](**spread), paged_attention(**sample))
    for sample in samples_of(WRITE_KV, Draw(torch.float32, CPU)):
        if has_cache_of(sample, torch.bfloat16):
            continue
        sample = without_rounding(sample)
        spread, between = with_strided_caches(sample)
        expected = copied(sample)
        write_kv(**spread)
        WRITE_KV.reference(**expected)

        assert all(torch.equal(spread[name].float(), expected[name].float()) for name in ("k_cache", "v_cache"))
        assert all(bool((gap == 0xFF).all()) for gap in between)


def test_write_kv_saturates_and_leaves_the_activations() -> None:
    large = torch.tensor([449.0, -464.0, 480.0, 1e4, float("inf"), float("-inf"), 448.0, 2.0**-9]).view(1, 1, 1, 8)
    for dtype in (torch.float32, torch.float16):
        new = large.to(dtype)
        before, cache = new.clone(), torch.zeros(2, 2, 1, 8).to(FLOAT8)
        write_kv(k=new, v=new, k_cache=cache, v_cache=cache.clone(), slot_mapping=torch.tensor([2]))

        assert cache[1, 0, 0].float().tolist() == [448, -448, 448, 448, 448, -448, 448, 2.0**-9]
        assert not cache.view(torch.uint8)[[0, 0, 1], [0, 1, 1]].any()
        assert torch.equal(new, before)


def test_write_kv_stays_inside_the_cache(copied: Callable[[Sample], Sample]) -> None:
    draw = Draw(torch.float32, CPU)
    memory = draw.normal(3, 2, 1, 4)
    before = memory.clone()
    new = draw.normal(1, 3, 1, 4)
    slots = draw.of([2, -2, 1], torch.int64)
    # A cache of one page in the middle of other memory; slot 2 is the first behind it.
    write_kv(k=new, v=new, k_cache=memory[1:2], v_cache=memory[1:2], slot_mapping=slots)

    assert torch.equal(memory[[0, 2]], before[[0, 2]])
    assert torch.equal(memory[1, 1], new[0, 2])


@each_step
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "value", "page_size", "more"),
    [
        (4, 1, 64, 64, 16, {}),
        (7, 1, 80, 80, 5, {"window": 65, "cut": True}),
        (6, 2, 96, 40, 1, {"window": 20, "soft_cap": 4.0, "padding": 5}),
        (2, 2, 128, 128, 7, {"sinks": True, "soft_cap": 50.0}),
        (1, 1, 256, 256, 32, {"window": 33}),
        (3, 1, 8, 8, 4, {"window": 1, "sinks": True}),
        (7, 1, 80, 80, 5, {"chunk": 37, "cut": True}),
        (6, 2, 24, 40, 1, {"slopes": True, "soft_cap": 4.0, "padding": 5}),
        (2, 2, 16, 16, 32, {"slopes": True, "chunk": 64}),
        (4, 1, 64, 64, 7, {"slopes": True, "window": 20, "sinks": True, "cut": True}),
        (3, 3, 8, 8, 4, {"chunk": 1, "sinks": True, "cut": True}),
    ],
    ids=str,
)
def test_odd_sizes(
    attend: Callable[..., torch.Tensor],
    sequences: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    size: int,
    value: int,
    page_size: int,
    more: dict[str, Any],
    same: Callable[..., None],
) -> None:
    draw = Draw(torch.float32, CPU)
    if "sinks" in more:
        more = more | {"sinks": draw.normal(heads)}
    if "slopes" in more:
        more = more | {"slopes": draw.uniform(heads)}
    sample = paged_sample(
        draw, sequences, heads=heads, kv_heads=kv_heads, size=size, value=value, page_size=page_size, **more
    )

    same(PAGED_ATTENTION, attend(**sample), paged_attention(**sample))


@each_paged
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "size", "value", "page_size", "more"),
    [
        (torch.float16, 4, 1, 64, 64, 16, {}),
        (torch.float32, 7, 1, 80, 72, 5, {"window": 65, "cut": True}),
        (torch.float16, 6, 2, 24, 40, 1, {"slopes": True, "soft_cap": 4.0, "padding": 5}),
        (torch.float32, 1, 1, 256, 256, 32, {"chunk": 37, "sinks": True}),
        (torch.float16, 4, 1, 64, 64, 16, {"k_scale": 0.06, "v_scale": 3.1}),
        (torch.float32, 7, 1, 80, 72, 5, {"window": 65, "cut": True, "k_scale": 5.7, "v_scale": 0.4, "sinks": True}),
        (torch.float16, 6, 2, 24, 40, 1, {"slopes": True, "soft_cap": 4.0, "k_scale": 0.7, "v_scale": 1.2}),
        (torch.float32, 2, 2, 16, 16, 7, {"soft_cap": 4.0, "k_scale": 2.3, "v_scale": 0.2}),
    ],
    ids=str,
)
def test_odd_sizes_of_float8(
    attend: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    value: int,
    page_size: int,
    more: dict[str, Any],
    same: Callable[..., None],
) -> None:
    draw = Draw(dtype, CPU)
    if "sinks" in more:
        more = more | {"sinks": draw.normal(heads)}
    if "slopes" in more:
        more = more | {"slopes": draw.uniform(heads, dtype=torch.float32)}
    more = more | {name: draw.of([more[name]], torch.float32) for name in ("k_scale", "v_scale") if name in more}
    sample = paged_sample(
        draw, MIXED, heads=heads, kv_heads=kv_heads, size=size, value=value, page_size=page_size,
        cache_dtype=FLOAT8, **more,
    )  # fmt: skip

    same(PAGED_ATTENTION, attend(**sample), paged_attention(**sample))


@each_paged
def test_many_more_query_heads_than_rows(attend: Callable[..., torch.Tensor], same: Callable[..., None]) -> None:
    sample = paged_sample(Draw(torch.float32, CPU), [(1, 17), (2, 9)], heads=71, kv_heads=1, size=16)

    same(PAGED_ATTENTION, attend(**sample), paged_attention(**sample))


@each_paged
def test_results_are_written_into_what_is_given(attend: Callable[..., torch.Tensor], same: Callable[..., None]) -> None:
    sample = paged_sample(Draw(torch.float32, CPU), MIXED, heads=4, kv_heads=2, size=16, value=24, padding=3)
    out = torch.full((1, sample["q"].shape[1], 4, 24), float("nan"))
    found = attend(**sample, out=out)

    assert found is out
    same(PAGED_ATTENTION, out, paged_attention(**sample))
    assert not out[:, -3:].any()


ELSEWHERE = [(3, 7), (0, 9), (1, 130), (1, 20), (41, 77), (2, 2)]


@each_paged
@pytest.mark.parametrize("more", [{}, {"window": 70, "cut": True}, {"chunk": 50}], ids=str)
def test_a_sequence_gets_the_same_bits_in_any_company(
    attend: Callable[..., torch.Tensor], more: dict[str, Any]
) -> None:
    """In a step of as many slots, whatever is in the others, and whichever slot and pages it has."""
    draw = Draw(torch.float32, CPU)
    first, second = (
        paged_sample(draw, batch, heads=4, kv_heads=2, size=16, page_size=8, padding=2, **more)
        for batch in (ELSEWHERE, ELSEWHERE[3:] + ELSEWHERE[:3])
    )
    for slot in range(len(ELSEWHERE)):
        copy_sequence(first, slot, second, (slot + 3) % len(ELSEWHERE))
    found, other = attend(**first), attend(**second)

    for slot, (queries, _) in enumerate(ELSEWHERE):
        row, there = (int(x["cu_seqlens"][i]) for x, i in ((first, slot), (second, (slot + 3) % len(ELSEWHERE))))
        assert torch.equal(found[0, row : row + queries], other[0, there : there + queries])


def copy_sequence(source: Sample, slot: int, target: Sample, place: int) -> None:
    """A sequence's queries, keys and values, into the pages and rows that another step gives it."""
    row, there = int(source["cu_seqlens"][slot]), int(target["cu_seqlens"][place])
    count = int(source["cu_seqlens"][slot + 1]) - row
    target["q"][0, there : there + count] = source["q"][0, row : row + count]
    pages, others = (
        x["page_indices"][int(x["page_indptr"][i]) : int(x["page_indptr"][i + 1])].long()
        for x, i in ((source, slot), (target, place))
    )
    for name in ("k_cache", "v_cache"):
        target[name][others] = source[name][pages]


@each_step
def test_programs_that_end_before_they_wait_have_nothing_to_do(
    attend: Callable[..., torch.Tensor],
    sequences: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    same: Callable[..., None],
) -> None:
    """As on Hopper, where there is a kernel in front."""
    monkeypatch.setattr(launches, "overlaps", lambda use: True)
    sample = paged_sample(Draw(torch.float32, CPU), sequences, heads=4, kv_heads=2, size=16, page_size=8, padding=2)

    same(PAGED_ATTENTION, attend(**sample), paged_attention(**sample))


def test_more_parts_are_the_same_result(monkeypatch: pytest.MonkeyPatch, same: Callable[..., None]) -> None:
    sample = paged_sample(Draw(torch.float32, CPU), [(1, 300), (2, 200)], heads=2, kv_heads=2, size=16, page_size=8)
    expected = paged_attention(**sample)
    results = []
    for most in (1, 2, 9):
        monkeypatch.setattr(launches, "MOST_PARTS", most)
        monkeypatch.setattr(launches, "LEAST_PARTS", most)
        results.append(PAGED["triton.paged_attention.small"](**sample))
        same(PAGED_ATTENTION, results[-1], expected)

    # The parts exist: their sums are rounded in other places.
    assert not all(torch.equal(results[0], each) for each in results[1:])


@each_paged
def test_a_short_sequence_is_whole_beside_long_ones(
    attend: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    poisoned_workspace: list[torch.Tensor],
    same: Callable[..., None],
) -> None:
    """Its result never lies in the workspace, which is NaN at first, and is that of a step without parts."""
    monkeypatch.setattr(launches, "WHOLE_KEYS", 40)
    lengths = (40, 41, 120, 7)
    sample = paged_sample(
        Draw(torch.float32, CPU), [(1, length) for length in lengths], heads=2, kv_heads=1, size=16, page_size=8
    )
    found = attend(**sample)
    # Elements of two parts of the rows that have them; rows are tokens, or slots.
    partial = poisoned_workspace[-1].view(torch.float32)[: len(lengths) * 2 * 2 * 16].view(len(lengths), -1)
    written = [bool((~row.isnan()).all()) for row in partial]
    untouched = [bool(row.isnan().all()) for row in partial]
    monkeypatch.setattr(launches, "WHOLE_KEYS", 1000)
    whole = attend(**sample)

    same(PAGED_ATTENTION, found, paged_attention(**sample))
    assert written == [False, True, True, False]
    assert untouched == [True, False, False, True]
    assert [torch.equal(x, y) for x, y in zip(found[0], whole[0], strict=True)] == [True, False, False, True]


@pytest.fixture
def poisoned_workspace(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Workspaces are full of NaN when they are given to launches; here they are, the last one last."""
    made: list[torch.Tensor] = []

    def poisoned(*size: Any, **more: Any) -> torch.Tensor:
        found = empty(*size, **more)
        if found.dtype == torch.uint8:
            found.fill_(0xFF)
            made.append(found)
        return found

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", poisoned)
    return made


@each_paged
def test_many_slots_are_whole(attend: Callable[..., torch.Tensor], same: Callable[..., None]) -> None:
    """With more slots than `launches.SLOTS` tells apart; most of them are empty."""
    sequences = [(1, 60), (2, 50), (1, 5), *[(0, 0)] * 30]
    sample = paged_sample(Draw(torch.float32, CPU), sequences, heads=2, kv_heads=1, size=16, page_size=8, padding=1)

    same(PAGED_ATTENTION, attend(**sample), paged_attention(**sample))
