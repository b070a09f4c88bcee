"""Numbers of weights in few bits, as matrix instructions take them, in Triton.

Two values lie in a byte: those of the lower halves make one operand, those of the upper halves another, and each meets
every second number of a row of activations. So a value goes from its byte to a register and stays there: no value
changes its thread, and no operand goes by way of shared memory.

In bfloat16 two values are made at once, by instructions of PTX. A number of FP4, whose bits are s, e, e, m, becomes the
bfloat16 of the same sign with them as the last of its exponent and the first of its mantissa, which is 2^-126 times the
number, for numbers without exponent too; a product with the scale makes it right. As that is out of bfloat16's range
where a scale is large, scales are `2^FP4_SHIFT` times as large, and sums as much smaller afterwards.
"""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

# Nor that a constant of a kernel is what it holds.
# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

FP4_SHIFT = tl.constexpr(62)
"""Scales of 2^-62 to 2^65 are exact: 126 of these make up for where a number's bits lie, and -64 for large scales."""
_TWO_TO_64 = tl.constexpr(18446744073709551616.0)

_FP4_LOWER = tl.constexpr("""{
.reg .b32 pair, sign, rest;
prmt.b32 pair, $2, 0, 0x4140;
shl.b32 sign, pair, 12;
shl.b32 rest, pair, 6;
and.b32 sign, sign, 0x80008000;
lop3.b32 rest, rest, 0x01C001C0, sign, 0xEA;
mul.bf16x2 $0, rest, $3;
prmt.b32 pair, $2, 0, 0x4342;
shl.b32 sign, pair, 12;
shl.b32 rest, pair, 6;
and.b32 sign, sign, 0x80008000;
lop3.b32 rest, rest, 0x01C001C0, sign, 0xEA;
mul.bf16x2 $1, rest, $4;
}""")
_FP4_UPPER = tl.constexpr("""{
.reg .b32 pair, sign, rest;
prmt.b32 pair, $2, 0, 0x4140;
shl.b32 sign, pair, 8;
shl.b32 rest, pair, 2;
and.b32 sign, sign, 0x80008000;
lop3.b32 rest, rest, 0x01C001C0, sign, 0xEA;
mul.bf16x2 $0, rest, $3;
prmt.b32 pair, $2, 0, 0x4342;
shl.b32 sign, pair, 8;
shl.b32 rest, pair, 2;
and.b32 sign, sign, 0x80008000;
lop3.b32 rest, rest, 0x01C001C0, sign, 0xEA;
mul.bf16x2 $1, rest, $4;
}""")
_INT4_LOWER = tl.constexpr("""{
.reg .b32 pair;
prmt.b32 pair, $2, 0, 0x4140;
lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA;
sub.bf16x2 $0, pair, $3;
prmt.b32 pair, $2, 0, 0x4342;
lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA;
sub.bf16x2 $1, pair, $4;
}""")
_INT4_UPPER = tl.constexpr("""{
.reg .b32 pair;
prmt.b32 pair, $2, 0, 0x4140;
shr.b32 pair, pair, 4;
lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA;
sub.bf16x2 $0, pair, $3;
prmt.b32 pair, $2, 0, 0x4342;
shr.b32 pair, pair, 4;
lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA;
sub.bf16x2 $1, pair, $4;
}""")
_FLOAT8 = tl.constexpr("""{
.reg .b32 pair, sign, power;
mov.b32 power, 0x7B807B80;
prmt.b32 pair, $2, 0, 0x1404;
and.b32 sign, pair, 0x80008000;
shr.b32 pair, pair, 4;
lop3.b32 pair, pair, 0x07F007F0, sign, 0xEA;
mul.bf16x2 $0, pair, power;
prmt.b32 pair, $2, 0, 0x3424;
and.b32 sign, pair, 0x80008000;
shr.b32 pair, pair, 4;
lop3.b32 pair, pair, 0x07F007F0, sign, 0xEA;
mul.bf16x2 $1, pair, power;
}""")
"""Of four bytes four values: $2 are the bytes, $3 and $4 the scales of the first two and of the others, or what is
taken from integers. `0xEA` is (a & b) | c. In bfloat16 an integer below 16 is the last bits of 128 and it; the bits of
a float8 are those of a bfloat16 that is 2^-120 times the number."""


@triton.jit
def _fp4(half):  # type: ignore[no-untyped-def]
    """The float32 number of four bits."""
    half = half.to(tl.int32)
    bits = ((half & 8) << 28) | ((half & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def fp4_halves(values, scale, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of bytes [N, K] the values of the lower halves and of the upper ones, times their scales of the same shape."""
    if IN_PAIRS:
        low = tl.inline_asm_elementwise(
            _FP4_LOWER, "=r,=r,r,r,r", [values, scale], dtype=tl.bfloat16, is_pure=True, pack=4
        )
        high = tl.inline_asm_elementwise(
            _FP4_UPPER, "=r,=r,r,r,r", [values, scale], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        low, high = (_fp4(values & 15) * scale).to(DTYPE), (_fp4(values >> 4) * scale).to(DTYPE)
    return low, high


@triton.jit
def int4_halves(values, zero, scale, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr, IS_SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of bytes [N, K] the integers of the lower halves and of the upper ones, less `zero` of the same shape, int32; if
    they are scaled, times `scale`."""
    if IN_PAIRS:
        zero = (zero + 128).to(tl.bfloat16)
        low = tl.inline_asm_elementwise(
            _INT4_LOWER, "=r,=r,r,r,r", [values, zero], dtype=tl.bfloat16, is_pure=True, pack=4
        )
        high = tl.inline_asm_elementwise(
            _INT4_UPPER, "=r,=r,r,r,r", [values, zero], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        whole = values.to(tl.int32)
        low, high = ((whole & 15) - zero).to(tl.float32), ((whole >> 4) - zero).to(tl.float32)
    return _scaled(low, scale, DTYPE, IN_PAIRS, IS_SCALED), _scaled(high, scale, DTYPE, IN_PAIRS, IS_SCALED)


@triton.jit
def byte_values(  # type: ignore[no-untyped-def]
    values, zero, scale, KIND: tl.constexpr, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr, IS_SCALED: tl.constexpr
):
    """Numbers of a byte each, "float8" or integers less `zero`; if they are scaled, times `scale`.

    A float8 has no infinity; what isn't a number becomes 480 where they are made in pairs.
    """
    if KIND == "float8":
        if IN_PAIRS:
            bits = values.to(tl.uint8, bitcast=True)
            made = tl.inline_asm_elementwise(_FLOAT8, "=r,=r,r", [bits], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            made = values.to(tl.float32)
    else:
        made = (values.to(tl.int32) - zero).to(tl.float32)
        if IN_PAIRS:
            made = made.to(tl.bfloat16)
    return _scaled(made, scale, DTYPE, IN_PAIRS, IS_SCALED)


@triton.jit
def _scaled(values, scale, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr, IS_SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values, of bfloat16 if they are in pairs and else float32, times scales of the same shape, if they are scaled."""
    if IS_SCALED:
        if IN_PAIRS:
            values = tl.inline_asm_elementwise(
                "mul.bf16x2 $0, $1, $2;", "=r,r,r", [values, scale.to(tl.bfloat16)], dtype=tl.bfloat16, is_pure=True,
                pack=2,
            )  # fmt: skip
        else:
            values *= scale.to(tl.float32)
    return values.to(DTYPE)


@triton.jit
def fp4_scale(scale, KIND: tl.constexpr, IN_PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `fp4_halves` takes of the stored scales: `e8m0`, two to the power of an integer less 127, or `e4m3`."""
    if KIND == "e8m0":
        exponent = scale.to(tl.int32)
        if IN_PAIRS:
            exponent = tl.minimum(exponent + FP4_SHIFT, 254).to(tl.int16)
            made = (exponent << 7).to(tl.bfloat16, bitcast=True)
        else:
            made = tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
    else:
        made = scale.to(tl.float32)
        if IN_PAIRS:
            made = (made * 4611686018427387904.0).to(tl.bfloat16)  # 2^62
    return made


@triton.jit
def fp4_unshifted(total, IN_PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of `fp4_halves` as they are meant."""
    if IN_PAIRS:
        total *= _TWO_TO_64
    return total


@triton.jit
def halves_of_pairs(pairs, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of int32 that hold two neighbours of `DTYPE` each, those with even places and those with odd ones."""
    even = (pairs & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
    odd = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return even, odd
