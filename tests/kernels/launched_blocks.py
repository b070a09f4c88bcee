"""Attention to selected blocks in Triton against its references: the selection, and attention to what is selected.

`test_triton.py` runs this file twice, in processes of its own: in Triton's interpreter, which reads TRITON_INTERPRET
when a kernel is defined, and on a GPU, as it is compiled.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from op_samples import block_sparse_attention as samples
from op_samples.draw import Draw, Sample
from strided import with_strided_caches

from precast.kernels.block_sparse_attention import launches, triton_select
from precast.kernels.block_sparse_attention.paged_block_sparse_attention import PAGED_BLOCK_SPARSE_ATTENTION
from precast.kernels.block_sparse_attention.paged_select_blocks import PAGED_SELECT_BLOCKS
from precast.kernels.choices import records_of
from precast.kernels.launch import as_function
from precast.kernels.sparse_attention import triton_attend
from precast.kernels.spec import OpSpec

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter holds bfloat16 as integers, and multiplies them as such.
HALVES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]
FLOAT8 = torch.float8_e4m3fn
TINY: dict[str, Any] = {"heads": 6, "kv_heads": 3, "groups": 3, "size": 12, "value": 14}
Same = Callable[..., None]


def triton_of(spec: OpSpec) -> dict[str, Callable[..., Any]]:
    records = [record for record in records_of(spec.name, 1) if record.kind == "triton"]
    return {record.name: as_function(record) for record in records}


FUNCTIONS = {spec.name: triton_of(spec) for spec in (PAGED_SELECT_BLOCKS, PAGED_BLOCK_SPARSE_ATTENTION)}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of a sequence, several parts, and more sequences than are looked at together."""
    monkeypatch.setattr(launches, "SELECT_PARTS", 4)
    monkeypatch.setattr(launches, "ROWS", 16)
    monkeypatch.setattr(launches, "ATTEND_PARTS", (3, 2, 3, 1))
    monkeypatch.setattr(launches, "JOINED", 32)
    if IS_INTERPRETED:  # compiled kernels have read it already
        for kernels in (triton_attend, triton_select):
            monkeypatch.setattr(kernels, "SEQUENCES", tl.constexpr(4))


def agrees(spec: OpSpec, sample: Sample, same: Same) -> None:
    """Every record of the op, whatever steps it is for."""
    at_home = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}
    expected = spec.reference(**at_home)

    for function in FUNCTIONS[spec.name].values():
        same(spec, function(**sample).cpu(), expected)


def test_both_kinds_of_steps_are_tried() -> None:
    assert [len(functions) for functions in FUNCTIONS.values()] == [2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("spec", [PAGED_SELECT_BLOCKS, PAGED_BLOCK_SPARSE_ATTENTION], ids=lambda spec: spec.name)
def test_samples(spec: OpSpec, dtype: torch.dtype, same: Same) -> None:
    drawn = list(samples.SAMPLES[spec.name, 1](Draw(dtype, DEVICE)))
    # What a sample is about is the same in all types.
    for sample in drawn[::2] if IS_INTERPRETED and dtype != torch.float32 else drawn:
        agrees(spec, with_strided_caches(sample)[0] if dtype == torch.float32 else sample, same)
    assert len(drawn) > 10


# --- the selection -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True], ids=["scores that differ", "equal scores"])
@pytest.mark.parametrize("count", [1, 7, 8, 9])
def test_counts_near_those_of_blocks(count: int, whole: bool, same: Same) -> None:
    sequences = [(5, 44), (1, 44), (1, 33), (1, 32), (1, 28), (2, 2), (0, 7)]
    draw = Draw(torch.float32, DEVICE, seed=count)
    sample = samples.paged_blocks_sample(
        draw, sequences, heads=3, size=9, count=count, block_size=4, page_size=7, padding=3, whole=whole
    )

    agrees(PAGED_SELECT_BLOCKS, sample, same)


@pytest.mark.parametrize("block_size", [1, 15, 16, 17, 130])
@pytest.mark.parametrize("local", [0, 1, 3])
def test_blocks_of_all_sizes(block_size: int, local: int, same: Same) -> None:
    sequences = [(5, 2 * block_size + 30), (1, block_size + 1), (1, block_size), (3, 3)]
    sample = samples.paged_blocks_sample(
        Draw(torch.float32, DEVICE), sequences, heads=2, size=5, count=2, block_size=block_size, local=local,
        page_size=16, whole=True,
    )  # fmt: skip

    agrees(PAGED_SELECT_BLOCKS, sample, same)


@pytest.mark.parametrize("heads", [1, 4, 16] if IS_INTERPRETED else [1, 4, 16, 64])
def test_tiles_of_several_queries(heads: int, same: Same) -> None:
    """MiniMax-M3 has 4 heads, of which ranks have 1."""
    sequences = [(5, 70), (1, 50), (3, 3)] if IS_INTERPRETED else [(130, 3000), (1, 5000), (77, 77), (1, 1)]
    sample = samples.paged_blocks_sample(
        Draw(HALVES[-1], DEVICE), sequences, heads=heads, size=128, count=5 if IS_INTERPRETED else 16, block_size=4,
        page_size=16, whole=True,
    )  # fmt: skip

    agrees(PAGED_SELECT_BLOCKS, sample, same)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in the interpreter
def test_scores_of_all_kinds(same: Same) -> None:
    """Zeros of both signs, infinities, NaN, numbers that differ in their last bit, and far apart ones."""
    near = torch.tensor(1.0).nextafter(torch.tensor(2.0)).item()
    values = [0.0, near, 1.0, float("inf"), -3.0, 1e-42, float("nan"), 1e38, near, 2.0, 1e-30, 1.0, -0.0, 7e-46, 3.0]
    values += [float("-inf")] * 3
    keys = torch.tensor(values, device=DEVICE).view(1, 18, 1)
    call = {
        "q": torch.tensor([1.0, -1.0], device=DEVICE).view(1, 2, 1, 1), "cache": keys, "cu_seqlens": [0, 1, 2],
        "kv_lens": [18, 18], "page_indices": [0, 0], "page_indptr": [0, 1, 2], "page_start": [0, 0],
    }  # fmt: skip
    call = {key: torch.tensor(x, dtype=torch.int32, device=DEVICE) if isinstance(x, list) else x
            for key, x in call.items()}  # fmt: skip
    for count, block_size in itertools.product((1, 3, 9, 18), (1, 2)):
        agrees(PAGED_SELECT_BLOCKS, call | {"count": count, "block_size": block_size, "local": 0}, same)


def test_a_selection_is_written_into_what_is_given() -> None:
    sample = samples.paged_blocks_sample(
        Draw(torch.float32, DEVICE), [(5, 30), (1, 9)], heads=2, size=8, count=3, block_size=4, padding=2
    )
    for function in FUNCTIONS[PAGED_SELECT_BLOCKS.name].values():
        out = torch.full((1, 8, 2, 3), 77, dtype=torch.int32, device=DEVICE)

        assert function(**sample, out=out) is out
        assert torch.equal(out, PAGED_SELECT_BLOCKS.reference(**sample))
        assert bool((out[:, 6:] == -1).all())


# --- attention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_parts_of_what_is_selected(count: int, same: Same) -> None:
    for sequences in ([(1, 200)], [(1, 99), (1, 5), (2, 60)], [(3, 150), (1, 7), (2, 2), (1, 99)]):
        sample = samples.paged_block_sparse_sample(
            Draw(torch.float32, DEVICE), sequences, count=count, block_size=4, page_size=5, padding=2, **TINY
        )
        agrees(PAGED_BLOCK_SPARSE_ATTENTION, sample, same)


@pytest.mark.parametrize("block_size", [1, 15, 17, 130])
def test_attention_to_blocks_of_all_sizes(block_size: int, same: Same) -> None:
    sample = samples.paged_block_sparse_sample(
        Draw(torch.float32, DEVICE),
        [(5, 160), (1, 131), (1, 130)],
        count=2,
        block_size=block_size,
        page_size=16,
        **TINY,
    )

    agrees(PAGED_BLOCK_SPARSE_ATTENTION, sample, same)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float32, None), (torch.float16, FLOAT8)] if IS_INTERPRETED
    else list(itertools.product([torch.float32, *HALVES], [None, FLOAT8])), ids=str,
)  # fmt: skip
def test_sizes_of_minimax(dtype: torch.dtype, cache_dtype: torch.dtype | None, same: Same) -> None:
    sequences = [(1, 400), (3, 270), (1, 1)] if IS_INTERPRETED else [(1, 5000), (70, 3000), (1, 1), (4, 40)]
    sample = samples.paged_block_sparse_sample(
        Draw(dtype, DEVICE), sequences, count=2 if IS_INTERPRETED else 16, block_size=128, heads=32, kv_heads=2,
        groups=2, size=128, page_size=16, cache_dtype=cache_dtype,
    )  # fmt: skip

    agrees(PAGED_BLOCK_SPARSE_ATTENTION, sample, same)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("block_size", [4, 5])
def test_entries_that_are_no_blocks_are_passed_over(block_size: int, tail: bool, same: Same) -> None:
    sample = samples.paged_block_sparse_sample(
        Draw(torch.float32, DEVICE), [(2, 30), (1, 9)], count=8, block_size=block_size, tail=tail, **TINY
    )
    entries = torch.tensor([0, 7, 8, 2**31 - 1, -(2**31), 0, 2, 7], dtype=torch.int32, device=DEVICE)

    agrees(PAGED_BLOCK_SPARSE_ATTENTION, sample | {"selected": entries.expand(1, 3, 3, 8)}, same)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("block_size", [4, 5])
def test_page_lists_that_are_too_short(block_size: int, tail: bool, same: Same) -> None:
    sample = samples.paged_block_sparse_sample(
        Draw(torch.float32, DEVICE), [(2, 30)], count=4, block_size=block_size, page_size=3, tail=tail, **TINY
    )
    bounds = torch.tensor([0, 6], dtype=torch.int32, device=DEVICE)
    entries = torch.tensor([0, 5, 1, 2], dtype=torch.int32, device=DEVICE)
    short = {"page_indices": sample["page_indices"][:6], "page_indptr": bounds, "selected": entries.expand(1, 2, 3, 4)}

    agrees(PAGED_BLOCK_SPARSE_ATTENTION, sample | short, same)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("block_size", [4, 8])
def test_sizes_of_qwen(dtype: torch.dtype, block_size: int, same: Same) -> None:
    """Hundreds of small blocks, and the tail."""
    sequences = [(1, 90), (3, 70), (1, 1)] if IS_INTERPRETED else [(1, 9000), (70, 3000), (1, 1), (4, 40)]
    sample = samples.paged_block_sparse_sample(
        Draw(dtype, DEVICE), sequences, count=9 if IS_INTERPRETED else 512, block_size=block_size, heads=16,
        kv_heads=2, groups=1, size=256, page_size=16, tail=True,
    )  # fmt: skip

    agrees(PAGED_BLOCK_SPARSE_ATTENTION, sample, same)


def test_results_are_written_into_what_is_given(same: Same) -> None:
    sample = samples.paged_block_sparse_sample(
        Draw(torch.float32, DEVICE), [(5, 30), (1, 9)], count=3, block_size=4, padding=2, **TINY
    )
    (function,) = FUNCTIONS[PAGED_BLOCK_SPARSE_ATTENTION.name].values()
    expected = PAGED_BLOCK_SPARSE_ATTENTION.reference(**sample)
    out = torch.full_like(expected, float("nan"))

    assert function(**sample, out=out) is out
    same(PAGED_BLOCK_SPARSE_ATTENTION, out, expected)
    assert not out[:, 6:].any()
