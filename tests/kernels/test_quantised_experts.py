"""Experts in few bits: to the bit those of weights that were dequantised beforehand, and numbers by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_samples.draw import Draw, Sample
from op_samples.quantised_experts import FORMATS, experts, mxfp4, quantised_experts, rounded_experts
from plain_rounding import float8_groups, float8_groups_e8m0, float8_tokens, int8_tokens
from torch.nn.functional import linear

from precast.kernels.dequantise.dequantise import Quantised, dequantise
from precast.kernels.experts import experts as whole
from precast.kernels.experts import grouped
from precast.kernels.experts.experts import Between, activate
from precast.kernels.quantised_experts import one_by_one
from precast.kernels.quantised_experts import quantised_experts as reference

PAIRS = [(reference.quantised_experts, whole.experts), (one_by_one.quantised_experts, grouped.experts)]
each_pair = pytest.mark.parametrize(("found", "expected"), PAIRS, ids=["reference", "one by one"])
CPU = torch.device("cpu")
BETWEEN = ("activation", "gated", "alpha", "limit", "offset")


def dequantised(sample: Sample) -> Sample:
    """The arguments of `precast.experts`: whole matrices in `x`'s dtype, as a load would stack them."""
    kept = ("x", "expert_ids", "expert_weights", "up_bias", "down_bias", *BETWEEN)
    matrices = {name: torch.stack(list(_matrices(sample, name))) for name in ("up", "down")}
    return {name: sample[name] for name in kept if name in sample} | matrices


def _matrices(sample: Sample, name: str) -> Any:
    format = sample["format"]
    for expert in range(len(sample[name])):
        parts = [sample[f"{name}_{part}"] for part in ("scales", "zeros", "global_scale")]
        scales, zeros, total = (None if part is None else part[expert] for part in parts)
        of = sample[name][expert]
        made = dequantise(
            Quantised(of, scales, zeros, None, total, format, sample[f"{name}_block"], sample["zero_offset"])  # type: ignore[arg-type]
        )
        yield made.to(sample["x"].dtype)


@each_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_they_are_experts_that_were_dequantised_before(
    found: Callable[..., torch.Tensor], expected: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    samples = list(quantised_experts(Draw(dtype, CPU)))
    assert {sample["format"] for sample in samples} == set(FORMATS)
    for sample in samples:
        assert torch.equal(found(**sample), expected(**dequantised(sample))), sample["format"]


PLAIN = {
    "fp8_group": float8_groups, "fp8_group_e8m0": float8_groups_e8m0, "fp8_token": float8_tokens,
    "int8_token": int8_tokens,
}  # fmt: skip


@each_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_rounded_before_both_products(
    found: Callable[..., torch.Tensor], expected: object, dtype: torch.dtype
) -> None:
    """Against the plain definitions of their publishers, token by token: weights in float32, and what is between the
    products in the type of the activations."""
    samples = list(rounded_experts(Draw(dtype, CPU)))
    assert {sample["rounding"] for sample in samples} == set(PLAIN)
    for sample in samples:
        wide = dequantised({**sample, "x": sample["x"].float()})
        rounded, between = PLAIN[sample["rounding"]], Between(*(sample.get(name, default) for name, default in USUAL))

        def mlp(
            token: torch.Tensor, expert: int, wide: Sample = wide, rounded: Any = rounded, between: Between = between
        ) -> torch.Tensor:
            up_bias, down_bias = (
                None if wide[name] is None else wide[name][expert].float() for name in ("up_bias", "down_bias")
            )
            h = activate(linear(plain(rounded, token), wide["up"][expert], up_bias), between)
            return linear(plain(rounded, h.to(dtype).float()), wide["down"][expert], down_bias)

        shares = sample["expert_weights"].float()
        rows = [
            sum(
                (shares[t, j] * mlp(wide["x"][t], e) for j, e in enumerate(ids) if 0 <= e < len(wide["up"])),
                start=torch.zeros(wide["x"].shape[1]),
            )
            for t, ids in enumerate(sample["expert_ids"].tolist())
        ]
        plainly = torch.stack(rows) if rows else wide["x"]
        torch.testing.assert_close(found(**sample).float(), plainly.to(dtype).float(), rtol=2**-7, atol=1e-5)


USUAL = (("activation", "silu"), ("gated", True), ("alpha", 1.0), ("limit", None), ("offset", 0.0))


def plain(rounded: Callable[[torch.Tensor], torch.Tensor], row: torch.Tensor) -> torch.Tensor:
    """A row of zeros stays one: the publishers' formulas divide by its largest."""
    return rounded(row) if row.any() else row


@each_pair
def test_two_values_a_byte_and_a_power_of_two(found: Callable[..., torch.Tensor], expected: object) -> None:
    """Of one expert: 32 inputs, of which the first two are 3 and 5, and between the products 32 numbers, all 8."""
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([3.0, 5.0])
    up, down = torch.zeros(1, 32, 1, 16, dtype=torch.uint8), torch.zeros(1, 32, 1, 16, dtype=torch.uint8)
    up[0, :, 0, 0] = 0x2C  # -2 and 1
    down[0, 7] = 0x11  # sixteen times 0.5 and 0.5
    scales = torch.full((1, 32, 1), 130, dtype=torch.uint8)

    y = found(
        x, torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[2.0]]), up, down, scales, scales - 3, None, None, None,
        None, torch.full((1, 32), 16.0), None, format="mxfp4", activation="relu", gated=False,
    )  # fmt: skip

    assert y[0].tolist() == [0.0] * 7 + [2 * (32 * 0.5 * (8 * (-2 * 3 + 5) + 16))] + [0.0] * 24


@each_pair
def test_experts_that_nobody_goes_to_are_not_read(found: Callable[..., torch.Tensor], expected: object) -> None:
    sample = experts(Draw(torch.float32, CPU), FORMATS["nvfp4"], 7, 2, 4, 32, 32)
    sample["expert_ids"] = torch.where(sample["expert_ids"] == 2, -1, sample["expert_ids"])
    for name in ("up", "down"):
        sample[f"{name}_global_scale"][2] = float("nan")

    assert bool(found(**sample).isfinite().all())


def test_an_unknown_activation_is_refused() -> None:
    sample = experts(Draw(torch.float32, CPU), mxfp4, 1, 1, 2, 32, 32)
    with pytest.raises(ValueError, match=r"activation: expected one of silu, gelu, .* found 'swish'"):
        reference.quantised_experts(**{**sample, "activation": "swish"})
