"""The kernel of fused ops against the reference, in Triton's interpreter and on GPUs: `test_triton.py` runs this file
in a process of its own, because Triton reads TRITON_INTERPRET when a kernel is defined.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from fused_cases import CASES, Case, sample

from precast.kernels.fused.fused import fused
from precast.kernels.fused.records import RECORDS
from precast.kernels.launch import as_function

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter holds bfloat16 as integers, and multiplies them as such.
HALVES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]
EPSILON = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}

# Where there are no columns, the kernel computes with zeros, and numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

launched = as_function(RECORDS[0])


def results(of: Any) -> tuple[torch.Tensor, ...]:
    return of if isinstance(of, tuple) else (of,)


@pytest.mark.parametrize("half", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_is_the_reference(case: Case, half: torch.dtype) -> None:
    at_home = sample(case, half, torch.device("cpu"))

    found = results(launched(**sample(case, half, DEVICE)))

    for one, expected in zip(found, results(fused(**at_home)), strict=True):
        assert (one.dtype, one.shape, one.is_contiguous()) == (expected.dtype, expected.shape, True)
        # Some units in the last place: sums have an order of their own, and functions differ from library to library.
        step = 0.0 if case.exact else 4 * EPSILON[expected.dtype]
        torch.testing.assert_close(one.cpu(), expected, rtol=step, atol=step, equal_nan=True)


def test_nothing_is_written_past_the_results() -> None:
    case = CASES["norm and sum"]
    given = sample(case, torch.float16, DEVICE)
    held = [torch.full((8, 48), 7.0, dtype=torch.float16, device=DEVICE) for _ in range(2)]

    launched(**given, out=tuple(each[:7].unsqueeze(0) for each in held))

    assert all((each[7:] == 7).all() for each in held)
    assert not any((each[:7] == 7).any() for each in held)
