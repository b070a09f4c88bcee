"""The values of quantised tensors, computed in float32 by the formulas of `docs/format/v1.md`.

All of it is plain torch on the tensors' device. An element's value takes one product of numbers that float32 holds
exactly (few bits and the scale), so it is rounded once; in NVFP4 the scale is a rounded product, or quotient, of two
scales itself, and where there are biases the sum is rounded, too. Nothing is read back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from precast.ir.weights.quantised import NVFP4_BLOCK, PACKED

_E8M0_BIAS = 127
_GPTQ_SHIFTS = (0, 4, 8, 12, 16, 20, 24, 28)
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Where the eight values of an int32 begin, in bits: AWQ packs the even ones into the lower half."""


class Quantised(NamedTuple):
    """A tensor in few bits: its parts, and how `format` reads them, as in a recipe's `Dequantise`.

    `global_scale` may have one value for each row, [.., R, 1], and `gptq` may have no `groups`: they are in order then.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    format: str = "fp8"
    block: Sequence[int] | None = None
    zero_offset: int = 0


def dequantise(parts: Quantised, biases: torch.Tensor | None = None) -> torch.Tensor:
    """The float32 tensor that the parts mean, contiguous. A value whose group has no scales is 0.

    `biases` [R, G]: of `packed4` and `packed8`, what is added to each group of a row. Recipes have it, and no op.
    """
    values, scales, zeros, format = parts.weight, parts.scales, parts.zeros, parts.format
    if format in ("fp8", "int8"):
        assert parts.block is not None
        return _in_blocks(values, scales, zeros, parts.block)
    if format == "mxfp4":
        return _mxfp4(values, scales)
    if format in ("nvfp4", "nvfp4_divided"):
        assert parts.global_scale is not None
        return _nvfp4(values, scales, parts.global_scale, divided=format == "nvfp4_divided")
    if format in PACKED:
        return _packed(parts, biases)
    assert zeros is not None
    if format == "awq":
        unpacked, points = _unpacked(values, _AWQ_SHIFTS), _unpacked(zeros, _AWQ_SHIFTS)
    else:
        unpacked, points = _unpacked(values.t(), _GPTQ_SHIFTS).t(), _unpacked(zeros, _GPTQ_SHIFTS)
    groups = _groups_in_order(unpacked, len(scales)) if parts.groups is None else parts.groups
    return _scaled(unpacked, points + parts.zero_offset, scales, groups)


def _in_blocks(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, block: Sequence[int]
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
    """[.., b] bytes -> [.., 2 b] float32: of each byte the lower four bits, then the upper ones.

    Of four bits the first is the sign, two are the exponent, whose bias is 1, and the last is the mantissa; 0.5 is the
    one number below those with a leading 1.
    """
    bits = torch.stack((values & 15, values >> 4), -1).flatten(-2).int()
    exponent = (bits >> 1) & 3
    mantissa = (bits & 1) + 2 * (exponent > 0)
    return torch.ldexp((1.0 - 2.0 * (bits >> 3)) * mantissa, exponent.clamp_(min=1) - 2)


def _packed(parts: Quantised, biases: torch.Tensor | None) -> torch.Tensor:
    bits = 32 // PACKED[parts.format]
    shifts = tuple(range(0, 32, bits))
    values, scales = _unpacked(parts.weight, shifts).t(), parts.scales.t()
    groups = _groups_in_order(values, len(scales)) if parts.groups is None else parts.groups
    points: torch.Tensor | int = parts.zero_offset
    if parts.zeros is not None:  # rows are packed together, and the last of them filled up
        points = _unpacked(parts.zeros.t(), shifts)[:, : values.shape[1]] + parts.zero_offset
    made = _scaled(values, points, scales, groups)
    if biases is not None:
        made += biases.t().float()[groups]
    return made.t().contiguous()


def _groups_in_order(values: torch.Tensor, count: int) -> torch.Tensor:
    """The group of each row, of `count` groups of neighbours."""
    return torch.arange(len(values), device=values.device) // max(1, len(values) // count)


def _scaled(
    values: torch.Tensor, zeros: torch.Tensor | int, scales: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """(values - zeros) * scales; row `i` of the values has row `groups[i]` of the others, 0 if there is none."""
    has_scales = (groups >= 0) & (groups < len(scales))
    known = torch.where(has_scales, groups, 0)
    made = (values - (zeros if isinstance(zeros, int) else zeros[known])).float()
    return made.mul_(scales.float()[known]).masked_fill_(~has_scales.unsqueeze(1), 0.0)


def _unpacked(packed: torch.Tensor, shifts: tuple[int, ...]) -> torch.Tensor:
    """[a, b] int32 with n values each -> [a, n * b] int32; `shifts`: where each of the n begins, in bits."""
    each = [(packed >> start) & ((1 << 32 // len(shifts)) - 1) for start in shifts]
    return torch.stack(each, -1).flatten(-2)
