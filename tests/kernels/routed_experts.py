"""Routers and experts in Triton against the references. `test_triton.py` runs this file twice, in processes of its own:
in Triton's interpreter, which reads TRITON_INTERPRET when a kernel is defined, and on a GPU, as they are compiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_samples.draw import Draw, Sample
from op_samples.table import samples_of

from precast.ir.ops.rows_experts import CHOICES, GROUP_SCORES, SCORINGS
from precast.kernels.choices import records_of
from precast.kernels.experts.experts import EXPERTS
from precast.kernels.experts.grouped_linear import GROUPED_LINEAR
from precast.kernels.launch import as_function
from precast.kernels.records import Record
from precast.kernels.route.route import ROUTE

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter holds bfloat16 as integers, and multiplies them as such.
HALVES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)


def in_triton(op: str) -> list[Record]:
    return [record for record in records_of(op, 1) if record.kind == "triton"]


RECORDS = in_triton("precast.experts")
if IS_INTERPRETED:
    # It is slow: of few tokens, and of the smallest and the largest tiles.
    RECORDS = [RECORDS[0], RECORDS[1], RECORDS[-1]]
each_record = pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
PER_TOKEN = ("x", "expert_ids", "expert_weights")
# numpy's, for what a GPU computes without a word.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def at_home(sample: Sample) -> Sample:
    return {name: x.cpu().clone() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}


def fitting(record: Record, sample: Sample) -> Sample:
    """The sample; in the interpreter its first 5 tokens, where the record computes each of them by itself."""
    if not IS_INTERPRETED or record is not RECORDS[0]:
        return sample
    return {**sample, **{name: sample[name][:5] for name in PER_TOKEN}}


def agrees(spec: Any, record: Record, sample: Sample, same: Callable[..., None]) -> None:
    """The record's launches give what the reference does."""
    found = as_function(record)(**sample)

    moved = tuple(x.cpu() for x in found) if isinstance(found, tuple) else found.cpu()
    same(spec, moved, spec.reference(**at_home(sample)))


def layer(draw: Draw, tokens: int, top_k: int, num: int, width: int, inner: int, *, bias: bool = False) -> Sample:
    """Gated experts of a layer, each token's drawn without repetition."""
    ids = (
        torch.stack([draw.permutation(num)[:top_k] for _ in range(tokens)]) if tokens else draw.integers(0, 1, 0, top_k)
    )
    return {
        "x": draw.normal(tokens, width), "expert_ids": ids, "expert_weights": draw.uniform(tokens, top_k),
        "up": draw.normal(num, 2 * inner, width, scale=0.2), "down": draw.normal(num, width, inner, scale=0.2),
        "up_bias": draw.normal(num, 2 * inner) if bias else None,
        "down_bias": draw.normal(num, width) if bias else None, "activation": "silu", "gated": True,
    }  # fmt: skip


# --- experts -----------------------------------------------------------------------------------------------------


@each_record
@pytest.mark.parametrize("dtype", [torch.float32] if IS_INTERPRETED else [torch.float32, *HALVES], ids=str)
def test_samples(record: Record, dtype: torch.dtype, same: Callable[..., None]) -> None:
    for sample in samples_of(EXPERTS, Draw(dtype, DEVICE)):
        agrees(EXPERTS, record, fitting(record, sample), same)


@each_record
@each_dtype
@pytest.mark.parametrize(
    ("tokens", "top_k", "num", "width", "inner", "bias"),
    [(1, 3, 5, 72, 40, False), (5, 3, 6, 33, 17, True), (19, 1, 1, 10, 70, False)],
    ids=str,
)
def test_odd_sizes(
    record: Record, dtype: torch.dtype, tokens: int, top_k: int, num: int, width: int, inner: int, bias: bool,
    same: Callable[..., None],
) -> None:  # fmt: skip
    sample = layer(Draw(dtype, DEVICE), tokens, top_k, num, width, inner, bias=bias)

    agrees(EXPERTS, record, fitting(record, sample), same)


@pytest.mark.skipif(IS_INTERPRETED, reason="takes minutes in the interpreter")
@each_record
@each_dtype
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
def test_sizes_of_models(record: Record, dtype: torch.dtype, tokens: int, same: Callable[..., None]) -> None:
    sample = layer(Draw(dtype, DEVICE), tokens, 8, 128, 2048, 768)
    sample["x"] *= 0.05

    agrees(EXPERTS, record, sample, same)


@each_record
def test_all_tokens_to_one_expert(record: Record, same: Callable[..., None]) -> None:
    sample = layer(Draw(torch.float32, DEVICE), 40 if IS_INTERPRETED else 300, 1, 6, 6, 8)
    sample["expert_ids"].fill_(4)

    agrees(EXPERTS, record, fitting(record, sample), same)


@each_dtype
@pytest.mark.parametrize(("width", "inner"), [(700, 9), (2100, 9), (9, 1100)])
def test_long_rows(dtype: torch.dtype, width: int, inner: int, same: Callable[..., None]) -> None:
    sample = layer(Draw(dtype, DEVICE), 1, 2, 4, width, inner, bias=True)
    sample["x"] *= 0.05

    agrees(EXPERTS, RECORDS[0], sample, same)


@each_record
@each_dtype
def test_tiles_of_all_numbers_of_rows(record: Record, dtype: torch.dtype, same: Callable[..., None]) -> None:
    """Some experts fill a tile and begin another; others have a half, a quarter or less of one."""
    if record is RECORDS[0]:
        pytest.skip("it has no tiles of several rows")
    rows = torch.tensor([133, 71, 33, 17, 16, 0, 1])
    sample = layer(Draw(dtype, DEVICE), int(rows.sum()), 1, len(rows), 24, 12, bias=True)
    drawn = torch.randperm(int(rows.sum()), generator=torch.Generator().manual_seed(0))
    sample["expert_ids"] = torch.repeat_interleave(torch.arange(len(rows)), rows)[drawn, None].to(DEVICE)

    agrees(EXPERTS, record, sample, same)


@each_record
def test_experts_that_nobody_goes_to_are_not_read(record: Record) -> None:
    sample = layer(Draw(torch.float32, DEVICE), 9, 2, 7, 10, 6, bias=True)
    sample["expert_ids"] = torch.where(sample["expert_ids"] == 3, -1, sample["expert_ids"])
    for name in ("up", "down", "up_bias", "down_bias"):
        sample[name][3] = float("nan")

    assert bool(as_function(record)(**sample).isfinite().all())


@each_record
def test_a_token_does_not_see_others(record: Record) -> None:
    """Nor what padding holds, whatever experts that goes to: a token's numbers are the same, bit by bit."""
    sample = layer(Draw(torch.float32, DEVICE), 21, 2, 5, 10, 6)
    alone = as_function(record)(**sample)
    sample["x"][13:] = float("nan")
    sample["expert_ids"][13:] = torch.tensor([[0, 1], [2, -1]] * 4, device=DEVICE)

    found = as_function(record)(**sample)

    assert torch.equal(found[:13], alone[:13])


@pytest.mark.skipif(IS_INTERPRETED, reason="there numpy multiplies, in an order of its own")
@each_record
@each_dtype
def test_numbers_do_not_depend_on_the_batch(record: Record, dtype: torch.dtype) -> None:
    sample = layer(Draw(dtype, DEVICE), 150, 4, 16, 264, 136)
    whole = as_function(record)(**sample)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(1)).to(DEVICE)[:67]

    part = as_function(record)(**{**sample, **{name: sample[name][order] for name in PER_TOKEN}})

    assert torch.equal(part, whole[order])
    assert torch.equal(as_function(record)(**sample), whole)


# --- products alone ----------------------------------------------------------------------------------------------


@each_dtype
def test_grouped_linear(dtype: torch.dtype, same: Callable[..., None]) -> None:
    (record,) = in_triton("precast.grouped_linear")
    draw = Draw(dtype, DEVICE)
    many = {
        "x": draw.normal(150, 40), "weight": draw.normal(3, 70, 40, scale=0.2), "bias": draw.normal(3, 70),
        "expert_ids": draw.integers(-1, 4, 150),
    }  # fmt: skip
    # More than are put into order at a time.
    thousands = {
        "x": draw.normal(8500, 16), "weight": draw.normal(3, 4, 16, scale=0.2), "bias": None,
        "expert_ids": draw.integers(-1, 4, 8500),
    }  # fmt: skip
    for sample in (*samples_of(GROUPED_LINEAR, draw), many, thousands):
        agrees(GROUPED_LINEAR, record, sample, same)


# --- routers -----------------------------------------------------------------------------------------------------


def routed(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    (record,) = in_triton("precast.route")
    weights, ids = as_function(record)(**given)
    return weights.cpu(), ids.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_route_samples(dtype: torch.dtype, same: Callable[..., None]) -> None:
    for sample in samples_of(ROUTE, Draw(dtype, DEVICE)):
        same(ROUTE, routed(**sample), ROUTE.reference(**at_home(sample)))


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "top_groups"),
    [(128, 8, 1, 1), (256, 8, 8, 4), (60, 4, 1, 1), (160, 6, 8, 3), (512, 10, 1, 1), (42, 16, 3, 2)],
    ids=str,
)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_routers_of_models(
    experts: int, top_k: int, groups: int, top_groups: int, scoring: str, same: Callable[..., None]
) -> None:
    draw = Draw(torch.float32, DEVICE)
    logits, bias = draw.normal(4, experts, scale=3.0), draw.normal(experts)
    for choice in CHOICES:
        for group_score in GROUP_SCORES if groups > 1 else GROUP_SCORES[:1]:
            rule = {"scoring": scoring, "choice": choice, "group_score": group_score, "num_groups": groups,
                    "top_groups": top_groups, "top_k": top_k, "normalise": True, "dtype": torch.float32}  # fmt: skip
            for each in (bias, None):
                sample = {"logits": logits, "bias": each, **rule}
                same(ROUTE, routed(**sample), ROUTE.reference(**at_home(sample)))


def test_of_equal_scores_the_first_is_taken() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0], [0.0, -0.0, 0.0, -0.0, 0.0, -0.0], [200.0, 300.0, 99.0] * 2])
    given = {"bias": None, "scoring": "sigmoid", "top_k": 5, "normalise": False, "dtype": torch.float32}

    assert routed(logits=logits.to(DEVICE), **given)[1].tolist() == [[1, 2, 4, 0, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("rule", [{}, {"choice": "logits"}, {"num_groups": 3, "top_groups": 2}], ids=str)
def test_what_is_no_number_still_gives_experts(rule: dict[str, Any]) -> None:
    logits = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    logits[0, 3], logits[1], logits[2] = float("nan"), float("nan"), float("-inf")
    given = {"bias": None, "scoring": "softmax", "top_k": 5, "normalise": True, "dtype": torch.float32, **rule}

    _, ids = routed(logits=logits.to(DEVICE), **given)

    assert all(len(set(row)) == 5 and set(row) <= set(range(12)) for row in ids.tolist())
