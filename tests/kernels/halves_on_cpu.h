// What few_bits.cuh and stream.cu take from PTX, on a CPU: numbers of 16 bits, two in a register, and conversions.
//
// With FLOAT16 elements are float16, else bfloat16, as for the sources.

#pragma once

#include <cmath>
#include <cstring>

#define __device__
#define __forceinline__ inline

typedef unsigned short u16;
typedef unsigned int u32;
typedef u16 Element;

inline u32 __byte_perm(u32 a, u32 b, u32 places) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  u32 made = 0;
  for (int i = 0; i < 4; i++) made |= (u32)(both >> (places >> 4 * i & 7) * 8 & 255) << 8 * i;
  return made;
}
inline float __uint_as_float(u32 bits) {
  float number;
  memcpy(&number, &bits, 4);
  return number;
}

// A format of 16 bits: of how many digits, and the exponent of the least number's.
template <int DIGITS, int LEAST>
struct Half {
  static float wide(u16 bits) {
    if (DIGITS == 8) return __uint_as_float((u32)bits << 16);
    const int exponent = (bits & 0x7fff) >> (DIGITS - 1), rest = bits & ((1 << (DIGITS - 1)) - 1);
    const bool is_largest = exponent == 0x7fff >> (DIGITS - 1);    // infinity, and what is not a number
    const float size = is_largest ? (rest ? NAN : INFINITY)
                       : exponent ? ldexpf((1 << (DIGITS - 1)) + rest, exponent - 1 + LEAST) : ldexpf(rest, LEAST);
    return bits & 0x8000 ? -size : size;
  }
  static u16 narrow(double number) {    // to nearest, ties to even
    constexpr int infinity = (0x7fff >> (DIGITS - 1)) << (DIGITS - 1);
    const u16 sign = std::signbit(number) ? 0x8000 : 0;
    if (std::isnan(number)) return 0x7fff;
    if (number == 0) return sign;
    int exponent;
    (void)frexp(fabs(number), &exponent);
    const int unit = exponent - DIGITS > LEAST ? exponent - DIGITS : LEAST;
    const double digits = nearbyint(ldexp(fabs(number), -unit));
    const double bits = std::isinf(number) ? infinity : (double)(unit - LEAST) * (1 << (DIGITS - 1)) + digits;
    return sign | (bits < infinity ? (u16)bits : infinity);
  }
};
typedef Half<11, -24> Float16;
typedef Half<8, -133> Bfloat16;
#ifdef FLOAT16
typedef Float16 Elements;
#else
typedef Bfloat16 Elements;
#endif

inline float widened_float16(u16 value) { return Float16::wide(value); }
inline float widened(Element value) { return Elements::wide(value); }
inline Element rounded(float value) { return Elements::narrow(value); }

inline float of_float8(unsigned char bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return bits & 128 ? -size : size;
}
inline float of_fp4(int bits) {
  constexpr float sizes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return bits & 8 ? -sizes[bits & 7] : sizes[bits & 7];
}

// --- what is PTX in few_bits.cuh ------------------------------------------------------------------------------------

inline u32 of_pair(u16 low, u16 high) { return low | (u32)high << 16; }
inline u32 multiplied(u32 a, u32 b) {
  return of_pair(rounded(widened(a) * widened(b)), rounded(widened(a >> 16) * widened(b >> 16)));
}
inline u32 subtracted(u32 a, u32 b) {
  return of_pair(rounded(widened(a) - widened(b)), rounded(widened(a >> 16) - widened(b >> 16)));
}
inline u32 masked_with(u32 bits, u32 mask, u32 others) { return (bits & mask) | others; }
inline u32 float16_of_float8(u32 word, int half) {
  const u32 pair = word >> 16 * half;
  return of_pair(Float16::narrow(of_float8(pair)), Float16::narrow(of_float8(pair >> 8)));
}
inline u32 elements_of_float8(u32 word, int half) {
  const u32 pair = word >> 16 * half;
  return of_pair(rounded(of_float8(pair)), rounded(of_float8(pair >> 8)));
}
