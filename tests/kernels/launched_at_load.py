"""What quantises matrices while weights are read, against its definition, exactly; in Triton's interpreter and on
GPUs. `test_triton.py` runs this file in a process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch

from precast.ir.graph.schema import Dtype
from precast.kernels.dequantise.launches import PARTS, STORED, Part, quantising, quantising_arguments
from precast.kernels.dequantise.quantise import quantised
from precast.kernels.dequantise.triton import quantise_kernel
from precast.kernels.dtypes import BY_NAME

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def draw(rows: int, columns: int) -> torch.Tensor:
    """The same in each run."""
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(rows))


def made(x: torch.Tensor, part: Part, block: tuple[int, int]) -> torch.Tensor:
    launch, (grid, numbers) = quantising(part, block), quantising_arguments(*x.shape, block)
    found = torch.empty_like(quantised(x, part, block), device=DEVICE)
    quantise_kernel[grid](x.to(DEVICE), found, *numbers, **launch.constants, num_warps=launch.num_warps)
    return found.cpu()


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [(130, 259, (128, 128)), (5, 40, (128, 128)), (3, 2100, (1, 2100)), (7, 1, (1, 1)), (1500, 3, (1500, 1))],
)
def test_matrices_are_quantised(rows: int, columns: int, block: tuple[int, int], part: Part, dtype: Dtype) -> None:
    x = (draw(rows, columns) * 10.0 ** draw(rows, 1)).to(BY_NAME[dtype])
    x[rows // 2] = 0

    assert torch.equal(made(x, part, block).float(), quantised(x, part, block).float())


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_the_scale_of_no_number_is_none(number: float) -> None:
    x = draw(2, 70)
    x[1, 3] = number

    found = made(x, "scales", (1, 70))

    torch.testing.assert_close(found, quantised(x, "scales", (1, 70)), rtol=0, atol=0, equal_nan=True)
