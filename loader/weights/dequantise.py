"""The values of quantised tensors, computed in float32 by the formulas of `docs/format/v1.md`.

All of it is plain torch on the tensors' device, one matrix at a time. An element's value takes one product of numbers
that float32 holds exactly (few bits and the scale), so it is rounded once; in NVFP4 the scale is a rounded product, or
quotient, of two scales itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from precast.ir.errors import WeightsError
from precast.ir.graph.schema import Dequantise
from precast.ir.weights.quantised import NVFP4_BLOCK, PACKED

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127
_GPTQ_SHIFTS = (0, 4, 8, 12, 16, 20, 24, 28)
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Where the eight values of an int32 begin, in bits: AWQ packs the even ones into the lower half."""


def dequantise(recipe: Dequantise, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The float32 tensor that `recipe` makes of its parts, by name, contiguous.

    Raises WeightsError (weights-mismatch) for groups without scales.
    """
    values, scales, zeros = parts["of"], parts["scales"], parts.get("zeros")
    if recipe.format in ("fp8", "int8"):
        assert recipe.block is not None
        return _in_blocks(values, scales, zeros, recipe.block)
    if recipe.format == "mxfp4":
        return _mxfp4(values, scales)
    if recipe.format in ("nvfp4", "nvfp4_divided"):
        return _nvfp4(values, scales, parts["global_scale"], divided=recipe.format == "nvfp4_divided")
    if recipe.format in PACKED:
        return _packed(recipe, parts)
    assert zeros is not None
    if recipe.format == "awq":
        unpacked = _unpacked(values, _AWQ_SHIFTS)
        rows = torch.arange(len(unpacked), device=values.device) // (len(unpacked) // len(scales))
        return _scaled(unpacked, _unpacked(zeros, _AWQ_SHIFTS) + recipe.zero_offset, scales, rows)
    groups = parts["groups"]
    unpacked = _unpacked(values.t(), _GPTQ_SHIFTS).t()
    _check_groups(groups, len(scales))
    return _scaled(unpacked, _unpacked(zeros, _GPTQ_SHIFTS) + recipe.zero_offset, scales, groups)


def _in_blocks(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, block: tuple[int, int]
) -> torch.Tensor:
    rows, columns = (torch.arange(size, device=values.device) for size in values.shape[-2:])
    rows, columns = rows // block[0], columns // block[1]
    made = values.float()
    if zeros is not None:
        made -= zeros.float()[..., rows, :][..., columns]
    return made.mul_(scales.float()[..., rows, :][..., columns])


def _mxfp4(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    exponents = scales.int() - _E8M0_BIAS
    made = torch.ldexp(_fp4(values), exponents.unsqueeze(-1))
    return made.flatten(-2)


def _nvfp4(values: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor, *, divided: bool) -> torch.Tensor:
    each = scales.float().div_(whole) if divided else scales.float().mul_(whole)
    blocks = _fp4(values).unflatten(-1, (each.shape[-1], NVFP4_BLOCK))
    return blocks.mul_(each.unsqueeze(-1)).flatten(-2)


def _fp4(values: torch.Tensor) -> torch.Tensor:
    """[.., b] bytes -> [.., 2 b] float32: of each byte the lower four bits, then the upper ones."""
    table = torch.tensor(_FP4, device=values.device)
    return torch.stack((table[(values & 15).int()], table[(values >> 4).int()]), -1).flatten(-2)


def _packed(recipe: Dequantise, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    bits = 32 // PACKED[recipe.format]
    shifts = tuple(range(0, 32, bits))
    values, scales, groups = _unpacked(parts["of"], shifts), parts["scales"], parts.get("groups")
    if groups is None:
        groups = torch.arange(values.shape[1], device=values.device) // (values.shape[1] // scales.shape[1])
    _check_groups(groups, scales.shape[1])
    zeros = parts.get("zeros")
    if zeros is None:
        values -= recipe.zero_offset
    else:
        # rows are packed together, and the last of them filled up
        unpacked = _unpacked(zeros.t(), shifts).t()[: len(values)] + recipe.zero_offset
        values -= unpacked[:, groups]
    return values.float().mul_(scales.float()[:, groups])


def _scaled(values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(values - zeros) * scales; row `i` of the values has row `groups[i]` of the others."""
    return (values - zeros[groups]).float().mul_(scales.float()[groups])


def _unpacked(packed: torch.Tensor, shifts: tuple[int, ...]) -> torch.Tensor:
    """[a, b] int32 with n values each -> [a, n * b] int32; `shifts`: where each of the n begins, in bits."""
    starts = torch.tensor(shifts, dtype=torch.int32, device=packed.device)
    return ((packed.unsqueeze(-1) >> starts) & ((1 << 32 // len(shifts)) - 1)).flatten(-2)


def _check_groups(groups: torch.Tensor, count: int) -> None:
    if groups.numel() and not (int(groups.min()) >= 0 and int(groups.max()) < count):
        message = f"g_idx has {int(groups.min())} to {int(groups.max())}, expected 0 to {count - 1}"
        raise WeightsError("weights-mismatch", message, fix="the checkpoint is damaged: download or copy it again")
