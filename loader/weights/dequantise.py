"""The values of quantised tensors, computed in float32 by the formulas of `docs/format/v1.md`.

All of it is plain torch on the tensors' device, one matrix at a time. An element's value takes one product of numbers
that float32 holds exactly (four bits or float8, and the scale), so it is rounded once.
"""

from __future__ import annotations

import torch

from precast.ir.errors import WeightsError
from precast.ir.graph.schema import Dequantise

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127
_GPTQ_SHIFTS = (0, 4, 8, 12, 16, 20, 24, 28)
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Where the eight values of an int32 begin, in bits: AWQ packs the even ones into the lower half."""


def dequantise(
    recipe: Dequantise,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    groups: torch.Tensor | None,
) -> torch.Tensor:
    """The float32 tensor that `recipe` makes of its parts, contiguous.

    Raises WeightsError (weights-mismatch) for groups without scales.
    """
    if recipe.format == "fp8":
        assert recipe.block is not None
        return _fp8(values, scales, recipe.block)
    if recipe.format == "mxfp4":
        return _mxfp4(values, scales)
    assert zeros is not None
    if recipe.format == "awq":
        unpacked = _unpacked(values, _AWQ_SHIFTS)
        rows = torch.arange(len(unpacked), device=values.device) // (len(unpacked) // len(scales))
        return _scaled(unpacked, _unpacked(zeros, _AWQ_SHIFTS) + recipe.zero_offset, scales, rows)
    assert groups is not None
    unpacked = _unpacked(values.t(), _GPTQ_SHIFTS).t()
    _check_groups(groups, len(scales))
    return _scaled(unpacked, _unpacked(zeros, _GPTQ_SHIFTS) + recipe.zero_offset, scales, groups)


def _fp8(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = (torch.arange(size, device=values.device) for size in values.shape[-2:])
    each = scales.float()[..., rows // block[0], :][..., columns // block[1]]
    return values.float().mul_(each)


def _mxfp4(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(_FP4, device=values.device)
    pairs = torch.stack((table[(values & 15).int()], table[(values >> 4).int()]), -1)
    exponents = scales.int() - _E8M0_BIAS
    made = torch.ldexp(pairs.flatten(-2), exponents.unsqueeze(-1))
    return made.flatten(-2)


def _scaled(values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(values - zeros) * scales; row `i` of the values has row `groups[i]` of the others."""
    return (values - zeros[groups]).float().mul_(scales.float()[groups])


def _unpacked(packed: torch.Tensor, shifts: tuple[int, ...]) -> torch.Tensor:
    """[a, b] int32 with eight values each -> [a, 8 * b] int32."""
    starts = torch.tensor(shifts, dtype=torch.int32, device=packed.device)
    return ((packed.unsqueeze(-1) >> starts) & 15).flatten(-2)


def _check_groups(groups: torch.Tensor, count: int) -> None:
    if groups.numel() and not (int(groups.min()) >= 0 and int(groups.max()) < count):
        message = f"g_idx has {int(groups.min())} to {int(groups.max())}, expected 0 to {count - 1}"
        raise WeightsError("weights-mismatch", message, fix="the checkpoint is damaged: download or copy it again")
