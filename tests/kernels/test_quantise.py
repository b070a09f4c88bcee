"""Weights that are quantised while they are read: values and scales by the formulas, block by block."""

from __future__ import annotations

import pytest
import torch
from op_samples.draw import Draw
from quantised import part_of_fp8

from precast.kernels.dequantise.dequantise import Quantised, dequantise
from precast.kernels.dequantise.quantise import quantised

FLOAT8 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("shape", "block"),
    [((5, 7), (2, 3)), ((4, 6), (4, 6)), ((4, 6), (128, 128)), ((3, 9, 10), (1, 10)), ((2, 130, 129), (128, 128))],
)
def test_each_block_by_itself(
    shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype, draw: Draw, device: torch.device
) -> None:
    x = draw.normal(*shape, dtype=torch.float32).to(dtype)
    values, scales = (quantised(x, part, block) for part in ("values", "scales"))

    assert (values.dtype, scales.dtype) == (FLOAT8, torch.float32)
    assert values.is_contiguous()
    assert torch.equal(values.cpu().float(), part_of_fp8(x.cpu(), "values", block).float())
    assert torch.equal(scales.cpu(), part_of_fp8(x.cpu(), "scales", block))


def test_by_hand() -> None:
    """The largest of a block becomes 448, and a number halfway between two goes to the even one."""
    x = torch.tensor([[448.0, 17.0, -896.0, 0.0], [0.0, 19.0, 2.0, 1.0]])

    assert quantised(x, "scales", (2, 2)).tolist() == [[1.0, 2.0]]
    assert quantised(x, "values", (2, 2)).float().tolist() == [[448.0, 16.0, -448.0, 0.0], [0.0, 20.0, 1.0, 0.5]]


def test_a_block_of_zeros_stays_one() -> None:
    x = torch.zeros(2, 4)
    x[:, 2:] = 3.0
    values, scales = (quantised(x, part, (2, 2)) for part in ("values", "scales"))

    assert scales[0, 0] == torch.finfo(torch.float32).tiny
    assert torch.equal(dequantise(Quantised(values, scales, block=(2, 2)))[:, :2], torch.zeros(2, 2))


def test_a_row_of_zeros_stays_one() -> None:
    x = torch.tensor([[0.0, 0.0, 0.0], [448.0, -224.0, 1.0]])
    values, scales = (quantised(x, part, (1, 3)) for part in ("values", "scales"))

    assert scales.tolist() == [[torch.finfo(torch.float32).tiny], [1.0]]
    assert torch.equal(dequantise(Quantised(values, scales, block=(1, 3))), x)


def test_nan_and_infinity_are_not_hidden() -> None:
    for bad in (NAN, INF):
        x = torch.tensor([[1.0, bad, 1.0, 2.0]])
        values, scales = (quantised(x, part, (1, 2)) for part in ("values", "scales"))
        made = dequantise(Quantised(values, scales, block=(1, 2)))

        assert made[:, :2].isnan().any()
        torch.testing.assert_close(made[:, 2:], x[:, 2:])


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4)])
def test_nothing(shape: tuple[int, ...]) -> None:
    assert quantised(torch.zeros(shape), "values", (2, 2)).shape == shape
