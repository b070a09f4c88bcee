"""Rounding to few bits in Triton's kernels, as `few_bits` of `quantised_linear` defines it."""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import os

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_SMALL, _UP = tl.constexpr(2.0**-60), tl.constexpr(2.0**80)
_LARGE, _DOWN = tl.constexpr(2.0**60), tl.constexpr(2.0**-80)
"""Divisors below and above these are multiplied by such powers of two, and what is divided as well, so that reciprocals
and remainders are normal numbers."""
_BEYOND = tl.constexpr(512.0)
"""A quotient that every kind takes for its largest value."""


@triton.jit
def _on_float8s_grid(x):  # type: ignore[no-untyped-def]
    """x, of magnitudes to 448, rounded to nearest even among the values of float8_e4m3fn, which have four digits."""
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)
    # what is added leaves the float32 no more digits than these
    more = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (x + more) - more


@triton.jit
def scales_of_groups(groups, KIND: tl.constexpr, POWERS_OF_TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """A scale for each row of `groups`, float32: the largest magnitude over that of KIND, `fp8` or `int8`, or the next
    of POWERS_OF_TWO.

    Magnitudes are compared as integers, whose order is the same, and of which NaN is the largest.
    """
    bits = groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits, 1).to(tl.float32, bitcast=True)
    most = tl.full((groups.shape[0],), 448.0 if KIND == "fp8" else 127.0, tl.float32)
    scales = tl.div_rn(largest, most)
    if POWERS_OF_TWO:
        # the exponent alone, one more if there are other digits; infinity stays so, and so does 0
        bits = scales.to(tl.int32, bitcast=True)
        bits = tl.where(bits > 0x7F800000, bits, (bits + 0x7FFFFF) & ~0x7FFFFF)
        scales = bits.to(tl.float32, bitcast=True)
    return scales


@triton.jit
def divided_groups(groups, scales):  # type: ignore[no-untyped-def]
    """Each row of `groups` over its scale, which `scales_of_groups` has made, and over 1 in place of 0."""
    return divided(groups, scales[:, None], False)


@triton.jit
def divided(x, scales, MAY_BE_LARGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """x over `scales`, which have its shape or 1 for an axis, and over 1 in place of 0.

    Quotients are rounded as those of float32 are, but for those below 2^-12, which stay below it. Where they
    MAY_BE_LARGE, the largest is 512.

    A division by itself has a branch, and a call for rare numbers. Here the reciprocal is made once for all that have a
    scale, and the quotient is corrected by what remains, which is exact: the same steps without the branch.
    """
    divisors = tl.where(scales == 0, 1.0, scales)
    if _INTERPRETED:  # its `fma` rounds twice
        return tl.div_rn(x, tl.broadcast_to(divisors, x.shape))
    size = tl.abs(divisors)
    power = tl.where(size < _SMALL, _UP, tl.where(size > _LARGE, _DOWN, 1.0))
    is_infinite = size == float("inf")
    divisors = tl.where(is_infinite, 0.0, divisors * power)
    near = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [divisors], dtype=tl.float32, is_pure=True, pack=1
    )
    negative = tl.where(is_infinite, -0.0, -tl.fma(tl.fma(-divisors, near, 1.0), near, near))
    less = x * -power  # so that -0.0 stays what it is
    if MAY_BE_LARGE:
        most = tl.broadcast_to(tl.abs(divisors) * _BEYOND, x.shape)
        less = tl.clamp(less, -most, most, propagate_nan=tl.PropagateNan.ALL)
    quotient = less * negative
    too_much = tl.fma(tl.broadcast_to(divisors, x.shape), quotient, less)
    return tl.fma(too_much, tl.broadcast_to(negative, x.shape), quotient)


@triton.jit
def in_few_bits(x, KIND: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """x, float32, rounded to the nearest value of KIND, as a number of `dtype`, which has these values.

    NaN stays NaN, but in int8, which has none: there the scale is.
    """
    if KIND == "fp8":
        if _INTERPRETED:  # it cuts digits off
            x = _on_float8s_grid(tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL))
        y = x.to(tl.float8e4nv)
        if dtype != tl.float8e4nv:
            y = y.to(dtype)
    else:
        # beyond 2^23 float32 has integers alone: what is added rounds to nearest even
        y = tl.clamp((x + 12582912.0) - 12582912.0, -128.0, 127.0).to(dtype)
    return y


@triton.jit
def store_where_made(pointers, values, mask):  # type: ignore[no-untyped-def]
    """Stores float32 numbers by the threads that have them, by all that have the same one. `tl.store` would bring them
    together by way of shared memory, and wait for all threads of the program twice."""
    if _INTERPRETED:
        tl.store(pointers, values, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.f32 [$1], $2; mov.u32 $0, 0; }", "=r,l,r,r",
            [pointers.to(tl.int64), values, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
