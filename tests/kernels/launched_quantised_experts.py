"""Experts in few bits in Triton against their definition. `test_triton.py` runs this file twice, in processes of its
own: in Triton's interpreter, which reads TRITON_INTERPRET when a kernel is defined, and on a GPU, as they are compiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import pytest
import torch
from op_samples.draw import Draw, Sample
from op_samples.quantised import fp8, int8, mxfp4, nvfp4, packed
from op_samples.quantised_experts import CLAMPED, Make, experts, quantised_experts, rounded_experts

from precast.kernels.choices import records_of
from precast.kernels.launch import as_function, use_of_tensors
from precast.kernels.quantised_experts.launches import few, grouped_workspace, is_taken
from precast.kernels.quantised_experts.quantised_experts import QUANTISED_EXPERTS
from precast.kernels.records import Record

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
RECORDS = [record for record in records_of("precast.quantised_experts", 1) if record.kind == "triton"]
FEW = RECORDS[0]
if IS_INTERPRETED:
    # It is slow: of few tokens, and of the largest tiles, which are multiplied as smaller ones, too.
    RECORDS = [RECORDS[0], RECORDS[-1]]
each_record = pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
# The interpreter holds bfloat16 as integers, and multiplies them as such.
DTYPES = [torch.float16] if IS_INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
MAKES: dict[str, Make] = {
    "fp8 in blocks": partial(fp8, block=(32, 64)), "fp8 in rows": partial(fp8, block=(1, 512)),
    "fp8 of a matrix": partial(fp8, block=(512, 512)), "mxfp4": mxfp4, "nvfp4": nvfp4,
    "nvfp4 in rows": partial(nvfp4, rows=True), "nvfp4_divided": partial(nvfp4, divided=True),
    "packed4": partial(packed, size=32), "packed4 with zeros": partial(packed, size=16, zeros=True),
    "packed8": partial(packed, bits=8), "packed8 with zeros": partial(packed, bits=8, size=32, zeros=True),
    "int8": int8, "int8 with zeros": partial(int8, block=(8, 32), zeros=True),
}  # fmt: skip
each_format = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
PER_TOKEN = ("x", "expert_ids", "expert_weights")
# numpy's, for what a GPU computes without a word.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def fitting(record: Record, sample: Sample) -> Sample:
    """The sample; in the interpreter its first 3 tokens, where the record computes each of them by itself."""
    if not IS_INTERPRETED or record is not FEW:
        return sample
    return {**sample, **{name: sample[name][:3] for name in PER_TOKEN}}


def agrees(record: Record, sample: Sample, same: Callable[..., None]) -> None:
    """The record's launches give what the definition does."""
    at_home = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}

    found = as_function(record)(**sample)

    same(QUANTISED_EXPERTS, found.cpu(), QUANTISED_EXPERTS.reference(**at_home))


@each_format
@each_record
@each_dtype
def test_odd_sizes(record: Record, make: Make, dtype: torch.dtype, same: Callable[..., None]) -> None:
    """Rows that fill no tile, columns that fill no block, tokens that share experts, with biases."""
    tokens = 2 if record is FEW else 9
    agrees(record, {**experts(Draw(dtype, DEVICE), make, tokens, 2, 3, 160, 32, bias=True), **CLAMPED}, same)


@each_record
def test_groups_of_several_blocks(record: Record, same: Callable[..., None]) -> None:
    """Of 96 columns, of which blocks have 32."""
    make = partial(packed, size=96, zeros=True)
    agrees(record, experts(Draw(DTYPES[0], DEVICE), make, 2, 2, 3, 192, 96), same)


@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("asks_ahead", [False, True])
def test_sums_in_parts(splits: int, asks_ahead: bool, same: Callable[..., None]) -> None:
    """Of rows that have no such number of whole blocks, with biases, which are added once."""
    record = msgspec.structs.replace(
        FEW, runs=few(splits=splits, asks_ahead=asks_ahead), workspace=lambda use: 3 * grouped_workspace(None)(use)
    )
    sample = experts(Draw(DTYPES[0], DEVICE), mxfp4, 2, 2, 3, 32, 416, bias=True)
    sample["expert_ids"][1, 0] = -1

    agrees(record, sample, same)


@each_record
def test_samples(record: Record, same: Callable[..., None]) -> None:
    for sample in quantised_experts(Draw(torch.float32, DEVICE)):
        if is_taken(use_of_tensors("precast.quantised_experts", 1, sample)):
            agrees(record, fitting(record, sample), same)


def in_turns(samples: Iterable[Sample], first: int) -> list[Sample]:
    """All of them; in the interpreter, which is slow, every second one: what one is about is the same in all types."""
    return list(samples)[first::2] if IS_INTERPRETED else list(samples)


@each_record
@each_dtype
def test_rows_that_are_rounded(record: Record, dtype: torch.dtype, same: Callable[..., None]) -> None:
    """Multiplied as numbers of 8 bits in half precision, by the weights that are such."""
    for sample in in_turns(rounded_experts(Draw(dtype, DEVICE)), 0):
        assert is_taken(use_of_tensors("precast.quantised_experts", 1, sample))
        agrees(record, fitting(record, sample), same)


@each_record
def test_rows_that_are_rounded_in_float32(record: Record, same: Callable[..., None]) -> None:
    for sample in in_turns(rounded_experts(Draw(torch.float32, DEVICE)), 1):
        agrees(record, fitting(record, sample), same)


@each_record
def test_all_tokens_to_one_expert(record: Record, same: Callable[..., None]) -> None:
    sample = experts(Draw(torch.float32, DEVICE), mxfp4, 40 if IS_INTERPRETED else 300, 1, 4, 32, 32)
    sample["expert_ids"].fill_(2)

    agrees(record, fitting(record, sample), same)


@each_record
def test_experts_that_nobody_goes_to_are_not_read(record: Record) -> None:
    sample = experts(Draw(torch.float32, DEVICE), nvfp4, 9, 2, 5, 64, 32)
    sample["expert_ids"] = torch.where(sample["expert_ids"] == 3, -1, sample["expert_ids"])
    for name in ("up", "down"):
        sample[f"{name}_global_scale"][3] = float("nan")

    assert bool(as_function(record)(**sample).isfinite().all())


@pytest.mark.skipif(IS_INTERPRETED, reason="there numpy multiplies, in an order of its own")
@each_format
@each_record
def test_numbers_do_not_depend_on_the_batch(record: Record, make: Make) -> None:
    sample = experts(Draw(torch.bfloat16, DEVICE), make, 150, 4, 16, 256, 128)
    whole = as_function(record)(**sample)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(1)).to(DEVICE)[:67]

    part = as_function(record)(**{**sample, **{name: sample[name][order] for name in PER_TOKEN}})

    assert torch.equal(part, whole[order])
    assert torch.equal(as_function(record)(**sample), whole)


@pytest.mark.skipif(IS_INTERPRETED, reason="takes minutes in the interpreter")
@each_format
@each_record
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
def test_sizes_of_models(record: Record, make: Make, tokens: int, same: Callable[..., None]) -> None:
    sample = experts(Draw(torch.bfloat16, DEVICE), make, tokens, 4, 8, 1024, 512)
    sample["x"] *= 0.2

    agrees(record, sample, same)
