"""Matrices as values of 8 bits with a scale for each block, for weights that are quantised while they are read.

    s[i, j] = max(max_block |x| / 448, 2^-126)          in float32, of the block of rows i * b0 .. and columns j * b1 ..
    q[r, c] = x[r, c] / s[r / b0, c / b1]               in float32, rounded to the nearest float8_e4m3fn, ties to even

448 is the largest finite value of float8_e4m3fn. A block of zeros has the least scale that float32 holds as any other
number, and so its values are zeros. NaN makes NaN of its block: of its scale, and so of all that is computed with it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from precast.kernels.storage import rounded

FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FLOAT8).max
_LEAST_SCALE = torch.finfo(torch.float32).tiny


def divided(x: torch.Tensor, number: float) -> torch.Tensor:
    """`x / number`, rounded once on every device: by a plain number, GPUs multiply with its inverse."""
    return x / x.new_full((), number)


def quantised(x: torch.Tensor, part: Literal["values", "scales"], block: tuple[int, int]) -> torch.Tensor:
    """Of matrices `x` [.., R, C] of any floating type the `values` [.., R, C] in float8_e4m3fn, or the `scales`
    [.., ceil(R / b0), ceil(C / b1)] in float32; `block` is (b0, b1). Blocks at the ends may be smaller. Contiguous."""
    rows, columns = x.shape[-2:]
    b0, b1 = min(block[0], max(rows, 1)), min(block[1], max(columns, 1))
    wide = functional.pad(x.to(torch.float32), (0, -columns % b1, 0, -rows % b0))
    blocks = wide.unflatten(-1, (-1, b1)).unflatten(-3, (-1, b0))  # [.., R / b0, b0, C / b1, b1]
    scales = divided(blocks.abs().amax((-3, -1)), _LARGEST).clamp(min=_LEAST_SCALE)
    if part == "scales":
        return scales
    values = (blocks / scales[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    return rounded(values[..., :rows, :columns].contiguous(), FLOAT8)
