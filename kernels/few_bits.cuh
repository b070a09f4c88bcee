// Weights in few bits as operands of the tensor cores: two elements at a time, in the halves of a register.
//
// After half.cuh, which has the types. Bits are put where a number of 16 bits has them, so that all is exact; what is
// made of a word of 32 bits is
//
//   nibbles   i and i + 4 of eight, for i from 0 to 3
//   bytes     0 and 1, or 2 and 3 with `half`
//
// and the first of both is in the lower half.

#pragma once

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

#ifdef FLOAT16
#define PAIR "f16x2"
#else
#define PAIR "bf16x2"
#endif

__device__ __forceinline__ u32 multiplied(u32 a, u32 b) {
  u32 pair;
  asm("mul." PAIR " %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

__device__ __forceinline__ u32 subtracted(u32 a, u32 b) {
  u32 pair;
  asm("sub." PAIR " %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

// (bits & mask) | others in one instruction, which the compiler does not make where both are constants.
__device__ __forceinline__ u32 masked_with(u32 bits, u32 mask, u32 others) {
  u32 made;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(made) : "r"(bits), "r"(mask), "r"(others));
  return made;
}

// Two float8_e4m3fn.
__device__ __forceinline__ u32 elements_of_float8(u32 word, int half) {
  u32 pair = float16_of_float8(word, half);
#ifndef FLOAT16
  asm("{ .reg .b16 lo, hi; .reg .f32 a, b; mov.b32 {lo, hi}, %0; cvt.f32.f16 a, lo; cvt.f32.f16 b, hi;"
      " cvt.rn.bf16x2.f32 %0, b, a; }" : "+r"(pair));
#endif
  return pair;
}

// --- pairs of elements ----------------------------------------------------------------------------------------------

// The same element in both halves.
__device__ __forceinline__ constexpr u32 twice(u32 element) { return element * 0x10001u; }

#ifdef FLOAT16
constexpr u32 ONES = twice(0x3c00);
#else
constexpr u32 ONES = twice(0x3f80);
#endif

// Numbers of four bits, and 128 more, in float16 1024, as the last digits of that.
__device__ __forceinline__ u32 raised_nibbles(u32 word, int i) {
#ifdef FLOAT16
  return masked_with(word >> 4 * i, 0x000f000f, twice(0x6400));
#else
  return masked_with(word >> 4 * i, 0x000f000f, twice(0x4300));
#endif
}

// The same less `offset`, which is 0 to 127.
__device__ __forceinline__ u32 elements_of_nibbles(u32 word, int i, int offset) {
#ifdef FLOAT16
  return subtracted(raised_nibbles(word, i), twice(0x6400 + offset));
#else
  return subtracted(raised_nibbles(word, i), twice(0x4300 + offset));
#endif
}

// Bytes from -128 to 127, or without SIGNED from 0 to 255 and less 128.
template <bool SIGNED>
__device__ __forceinline__ u32 elements_of_bytes(u32 word, int half) {
#ifdef FLOAT16    // 1024 + n is 0x6400 | n
  const u32 raised = __byte_perm(SIGNED ? word ^ 0x80808080 : word, 0x64646464, half ? 0x7372 : 0x7170);
  return subtracted(raised, twice(0x6480));
#else
  // 0x4300 is 128 and 0x4380 is 256: seven bits more than 128, less 128, or less 256 for the upper half of the range.
  const u32 raised = __byte_perm(word, 0x43434343, half ? 0x7372 : 0x7170);
  const u32 less = SIGNED ? raised & 0xff80ff80 : masked_with(~raised, 0x00800080, twice(0x4300));
  return subtracted(raised & 0xff7fff7f, less);
#endif
}

// Numbers of FP4 times 2^-126, or in float16 2^-14: of the bits s, e, e, m the first is the sign, the others are the
// last two of the exponent and the first of the mantissa. Where their exponent is 0, so is that of the larger format.
__device__ __forceinline__ u32 lowered_fp4(u32 word, int i) {
#ifdef FLOAT16
  const u32 rest = i < 3 ? word << (9 - 4 * i) : word >> 3;
  return masked_with(rest, 0x0e000e00, word << (12 - 4 * i) & 0x80008000);
#else
  // A nibble where the sign belongs, and once more 6 bits below, where the other bits belong: of each, these are kept.
  const u32 nibbles = (i < 2 ? word : word >> 8) & (i % 2 ? 0x00f000f0 : 0x000f000f);
  return nibbles * (i % 2 ? 0x104 : 0x1040) & 0x81c081c0;
#endif
}

// Scales for `scaled_fp4`, of byte i of a word: float8_e4m3fn without a sign; and E8M0, which are powers of two. In
// bfloat16 they are 2^62 times as large, of which powers above 2^65 are cut; in float16 those above 2^15 are.
__device__ __forceinline__ u32 fp4_scale_of_float8(u32 word, int i) {
#ifdef FLOAT16
  return float16_of_float8(__byte_perm(word, 0, 0x11 * i), 0);
#else
  const u32 lowered = __byte_perm(word, 0, 0x4040 | 0x101 * i) << 4;    // 2^-120 times the number
  return multiplied(multiplied(lowered, twice(0x6d00)), twice(0x6d00));    // 2^91, twice
#endif
}

__device__ __forceinline__ u32 fp4_scale_of_power(u32 word, int i) {
  const int exponent = (int)(word >> 8 * i & 255) - 127;
#ifdef FLOAT16
  const int most = exponent < 15 ? exponent : 15;
  return twice(most >= -14 ? (most + 15) << 10 : most >= -24 ? 0x400 >> (-14 - most) : 0);
#else
  const int shifted = exponent + 127 + 62;
  return twice((shifted < 254 ? shifted : 254) << 7);
#endif
}

// Numbers of FP4 times their scale; sums of them are to be multiplied with FP4_SUMS.
#ifdef FLOAT16
constexpr float FP4_SUMS = 1.0f;
#else
constexpr float FP4_SUMS = 18446744073709551616.0f;    // 2^64
#endif

__device__ __forceinline__ u32 scaled_fp4(u32 word, int i, u32 scale) {
#ifdef FLOAT16
  return multiplied(multiplied(lowered_fp4(word, i), twice(0x7400)), scale);    // 2^14: what is meant
#else
  return multiplied(lowered_fp4(word, i), scale);
#endif
}

// --- products of lowered numbers --------------------------------------------------------------------------------------
//
// The tensor cores take subnormal numbers as they take others. So numbers of four bits are masked, and need not be raised
// one by one: sums are, and x before, which must be below 2^88. Digits of products below 2^-56 are lost, or below 2^-63
// of FP4, as float32 has none there.

#ifdef FLOAT16
constexpr float X_RAISED = 1, FP4_LOWERED = 0x1p-14f;
#else
constexpr float X_RAISED = 0x1p40f, FP4_LOWERED = 0x1p-126f;
#endif

// Two elements of x.
__device__ __forceinline__ u32 raised_x(u32 pair) {
#ifdef FLOAT16
  return pair;
#else
  return multiplied(pair, twice(0x5380));
#endif
}

#ifndef FLOAT16
// Numbers of four bits, times 2^-133, as the last digits of a bfloat16; those of odd i are 16 times as large, and meet an
// x that is raised by so much less.
constexpr float NIBBLES_LOWERED = 0x1p-133f;

__device__ __forceinline__ u32 lowered_nibbles(u32 word, int i) {
  return (i < 2 ? word : word >> 8) & (i % 2 ? 0x00f000f0 : 0x000f000f);
}

__device__ __forceinline__ u32 raised_x_of_nibbles(u32 pair, int i) {
  return multiplied(pair, twice(i % 2 ? 0x5180 : 0x5380));
}
#endif

// Two to the power that a byte has, less 127. That of 0 is no power, but too small to matter.
__device__ __forceinline__ float power_of(u32 byte) { return __uint_as_float(byte << 23); }
