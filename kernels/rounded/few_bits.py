"""Rounding to few bits in Triton's kernels, as `few_bits` of `quantised_linear` defines it."""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _on_float8s_grid(x):  # type: ignore[no-untyped-def]
    """x, of magnitudes to 448, rounded to nearest even among the values of float8_e4m3fn, which have four digits."""
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)
    # what is added leaves the float32 no more digits than these
    more = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (x + more) - more


@triton.jit
def scales_of_groups(groups, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """A scale for each row of `groups`, float32: the largest magnitude over that of KIND, `fp8` or `int8`.

    Magnitudes are compared as integers, whose order is the same, and of which NaN is the largest.
    """
    bits = groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits, 1).to(tl.float32, bitcast=True)
    most = tl.full((groups.shape[0],), 448.0 if KIND == "fp8" else 127.0, tl.float32)
    return tl.div_rn(largest, most)


@triton.jit
def divided_groups(groups, scales):  # type: ignore[no-untyped-def]
    """Each row of `groups` over its scale, and over 1 in place of 0."""
    divisors = tl.where(scales == 0, 1.0, scales)
    return tl.div_rn(groups, tl.broadcast_to(divisors[:, None], groups.shape))


@triton.jit
def in_few_bits(x, KIND: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """x, float32, rounded to the nearest value of KIND, as a number of `dtype`, which has these values.

    NaN stays NaN, but in int8, which has none: there the scale is.
    """
    if KIND == "fp8":
        y = _on_float8s_grid(tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)).to(tl.float8e4nv)
        if dtype != tl.float8e4nv:
            y = y.to(dtype)
    else:
        # beyond 2^23 float32 has integers alone: what is added rounds to nearest even
        y = tl.clamp((x + 12582912.0) - 12582912.0, -128.0, 127.0).to(dtype)
    return y
