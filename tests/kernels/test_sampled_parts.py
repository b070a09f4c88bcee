"""precast.sample@2 over ranks that have parts of the vocabulary: simulated ranks, and processes over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampled_parts import ODD, part_of, parts_of, sampled, tokens_of_gpus, tokens_of_processes
from sampling_cases import FILTERS, arguments, logits_of
from torch import multiprocessing

from precast.ir.graph.schema import Dtype
from precast.kernels import cuda_source
from precast.kernels.collectives.together import run_ranks
from precast.kernels.sampling.launches import constants_of
from precast.kernels.sampling.parts import sample_parts, whole
from precast.kernels.sampling.sample import greedy, sample_2


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("size", "dtype"), [(11, torch.float32), (7, torch.bfloat16), (302, torch.float16)], ids=str)
def test_ranks_give_the_tokens_of_one_process(ranks: int, size: int, dtype: torch.dtype) -> None:
    for seed, (name, logits) in enumerate(logits_of(len(FILTERS), size, dtype)):
        asked = arguments(logits, FILTERS, seed=seed)

        found = sampled(ranks, asked)

        assert [each.tolist() for each in found] == [sample_2(**asked).tolist()] * ranks, name


# Multiples of a quarter: many equals, in one part and in several.
@settings(max_examples=30, deadline=None)
@given(
    quarters=st.lists(st.integers(-30, 30), min_size=4, max_size=60),
    ranks=st.sampled_from([2, 4]),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 4.0]),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([1.0, 0.9713, 0.5137, 0.0931]),
    min_p=st.sampled_from([0.0, 0.0471, 0.3319, 1.0, 1.5]),
    seed=st.integers(0, 1000),
)
def test_equals_and_filters(quarters: list[int], ranks: int, seed: int, **filters: Any) -> None:
    assume(
        (ranks - 1) * -(-len(quarters) // ranks) < len(quarters)
    )  # else a rank has no token: such worlds are refused
    asked = arguments(torch.tensor(quarters).div(4).expand(3, -1), [filters], seed=seed)

    for found in sampled(ranks, asked):
        assert found.tolist() == sample_2(**asked).tolist()


def test_without_parameters_all_rows_take_their_likeliest() -> None:
    for name, logits in logits_of(6, 31, torch.float32):
        parts = parts_of(logits, 4)

        found = run_ranks(4, lambda group: sample_parts(parts[group.rank], None, part_of(group, 31)))  # noqa: B023

        assert found[3].tolist() == greedy(logits).tolist(), name


def test_parts_are_put_together_without_what_is_no_token() -> None:
    logits = torch.arange(14.0).view(2, 7)
    parts = parts_of(logits, 4)

    found = run_ranks(4, lambda group: whole(parts[group.rank], part_of(group, 7)))

    assert found[2].tolist() == logits.tolist()


@pytest.mark.skipif(not cuda_source.is_installed(), reason="cuda-bindings are not installed")
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("size", "dtype"), [(128_256, "bfloat16"), (301, "float32")])
def test_what_gpus_tell_each_other_compiles(ranks: int, size: int, dtype: Dtype) -> None:
    columns = -(-size // ranks)

    compiled = cuda_source.compiled("sampling/parts.cu", constants_of(ranks - 1, ranks, size, columns, dtype), (9, 0))

    assert compiled.startswith(b"\x7fELF")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_give_the_tokens_of_one(tmp_path: Path) -> None:
    multiprocessing.spawn(tokens_of_gpus, (2, tmp_path), 2)

    for rank in range(2):
        for name, rows, size, found, expected in torch.load(tmp_path / f"{rank}.pt"):
            assert found == expected, f"rank {rank}, {name}, {rows} rows of {size}"


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_give_the_tokens_of_one(ranks: int, tmp_path: Path) -> None:
    multiprocessing.spawn(tokens_of_processes, (ranks, tmp_path), ranks)

    for rank in range(ranks):
        found = torch.load(tmp_path / f"{rank}.pt")
        for (name, logits), tokens in zip(logits_of(len(FILTERS), ODD, torch.bfloat16), found, strict=True):
            assert tokens.tolist() == sample_2(**arguments(logits, FILTERS)).tolist(), name
