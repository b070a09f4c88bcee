"""quantised_experts@1: `precast.experts` of weights as they are stored.

An expert's matrices are dequantised by the formulas of `docs/format/v1.md` in float32 and rounded to `x`'s dtype; all
else is as in `precast.kernels.experts.experts`. So the result is that of weights which were dequantised beforehand.

With a `rounding` the rows that experts multiply are rounded to few bits first, as those do who publish such
checkpoints: a token's before the first product, and what stands between the products, rounded to `x`'s dtype, before
the second. Kinds are those of `precast.quantised_linear`'s `activation` whose scales are made of the row: `fp8_token`,
`fp8_group`, `fp8_group_e8m0`, `int8_token`. Weights are not rounded to `x`'s dtype then: all is computed in float32.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from precast.kernels.calls import implements
from precast.kernels.dequantise.dequantise import Quantised, dequantise
from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.experts.experts import Between, weighted_sum
from precast.kernels.quantised_linear.quantised_linear import quantise_input
from precast.kernels.spec import PRODUCT, OpSpec


class Stored(NamedTuple):
    """Both weights of all experts as they are stored, and their biases [E, 2F], [E, I].

    `up` is of [E, 2F, I], gate before values (ungated: [E, F, I]), `down` of [E, I, F]; what holds them by `format`,
    with all parts' leading axis that of experts, says `docs/format/v1.md`. Groups are inputs in order. A global scale
    is one of an expert, [E, 1, 1], or one of each row, [E, 2F, 1].
    """

    up: torch.Tensor
    down: torch.Tensor
    up_scales: torch.Tensor
    down_scales: torch.Tensor
    up_zeros: torch.Tensor | None
    down_zeros: torch.Tensor | None
    up_global_scale: torch.Tensor | None
    down_global_scale: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    format: str
    up_block: tuple[int, int] | None = None
    down_block: tuple[int, int] | None = None
    zero_offset: int = 0

    def matrix(self, name: Literal["up", "down"], expert: int, dtype: torch.dtype) -> torch.Tensor:
        """An expert's [2F, I] (ungated: [F, I]) or [I, F], rounded to `dtype`, contiguous."""

        def part(kind: str) -> torch.Tensor | None:
            given = getattr(self, name + kind)
            return None if given is None else given[expert]

        values, scales = getattr(self, name), getattr(self, f"{name}_scales")
        block, whole = getattr(self, f"{name}_block"), part("_global_scale")
        stored = Quantised(
            values[expert], scales[expert], part("_zeros"), None, whole, self.format, block, self.zero_offset
        )
        return dequantise(stored).to(dtype)


@implements("quantised_experts")
def quantised_experts(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, stored: Stored, between: Between,
    rounding: str,
) -> torch.Tensor:  # fmt: skip
    """The weighted sum of each token's experts: [T, I] in `x`'s dtype.

    `x` [T, I], `expert_ids` [T, K] int64, `expert_weights` [T, K]; biases have `x`'s dtype. Raises ValueError for an
    activation that `precast.kernels.experts.experts` doesn't name, and for a rounding that isn't known.
    """
    is_rounded, experts = rounding != "none", range(stored.up.shape[0])
    dtype = widened(x).dtype if is_rounded else x.dtype
    weights = ((stored.matrix("up", expert, dtype), stored.matrix("down", expert, dtype)) for expert in experts)
    biases = (stored.up_bias, stored.down_bias)
    rounded = (lambda rows: quantise_input(rows, rounding)) if is_rounded else None
    return weighted_sum(x, expert_ids, expert_weights, weights, biases, between, rounded)


_PARTS = [f"{name}{part}" for part in ("", "_scales", "_zeros", "_global_scale") for name in ("up", "down")]
_STORED = (torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32)
_SCALES = (torch.float8_e4m3fn, torch.uint8, *FLOAT)
_ZEROS = (torch.int8, torch.int32)

QUANTISED_EXPERTS = OpSpec(
    name="precast.quantised_experts",
    axes={
        "x": "T I",
        "expert_ids": "T K",
        "expert_weights": "T K",
        **dict.fromkeys(_PARTS, "*"),
        "up_bias": "E U",
        "down_bias": "E I",
    },
    results={"y": "T I"},
    dtypes={
        **dict.fromkeys(("x", "expert_weights", "up_bias", "down_bias"), FLOAT),
        **dict.fromkeys(("up", "down"), _STORED),
        **dict.fromkeys(("up_scales", "down_scales"), _SCALES),
        **dict.fromkeys(("up_zeros", "down_zeros"), _ZEROS),
        **dict.fromkeys(("up_global_scale", "down_global_scale"), FLOAT),
        "expert_ids": (torch.int64,),
    },
    reference=quantised_experts,
    tolerances=PRODUCT,
)
