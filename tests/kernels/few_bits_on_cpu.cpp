// Compares what few_bits.cuh makes of all numbers of few bits with what they mean. "few_bits.inc" is that header
// without the functions that are PTX. Prints nothing if all are right.

#include <cstdio>
#include <cstdlib>

#include "halves_on_cpu.h"

#include "few_bits.inc"

static void check(const char* what, u32 word, int i, u32 found, double low, double high) {
  if (widened(found) == low && widened(found >> 16) == high) return;
  printf("%s %d of %08x: %g %g, not %g %g\n", what, i, word, widened(found), widened(found >> 16), low, high);
  exit(1);
}

int main() {
  for (u32 n = 0; n < 65536; n++) {
    const u32 word = n * 0x9e3779b1u ^ n;    // halves that have all values, beside others
    for (int i = 0; i < 4; i++) {
      const int low = word >> 4 * i & 15, high = word >> (4 * i + 16) & 15;
#ifdef FLOAT16
      constexpr int MORE = 1024;
#else
      constexpr int MORE = 128;
#endif
      check("raised nibbles", word, i, raised_nibbles(word, i), MORE + low, MORE + high);
      check("nibbles", word, i, elements_of_nibbles(word, i, 7), low - 7, high - 7);
      check("fp4", word, i, lowered_fp4(word, i), of_fp4(low) * FP4_LOWERED, of_fp4(high) * FP4_LOWERED);
#ifndef FLOAT16
      const double lowered = NIBBLES_LOWERED * (i % 2 ? 16 : 1);
      check("lowered nibbles", word, i, lowered_nibbles(word, i), low * lowered, high * lowered);
      const u32 x = word & 0x1fff1fff | 0x20002000;    // its exponents leave room
      check("x of nibbles", word, i, raised_x_of_nibbles(x, i), widened(x) * X_RAISED / (i % 2 ? 16 : 1),
            widened(x >> 16) * X_RAISED / (i % 2 ? 16 : 1));
#endif
      const u32 stored = word >> 1 & 0x7f7f7f7f, byte = stored >> 8 * i & 127;
      const double size = of_float8(byte) / FP4_SUMS;
      if (byte != 127)
        check("fp4 and float8", word, i, scaled_fp4(word, i, fp4_scale_of_float8(stored, i)), of_fp4(low) * size,
              of_fp4(high) * size);
#ifdef FLOAT16
      constexpr int LEAST = -23, MOST = 12;    // with the least and largest numbers
#else
      constexpr int LEAST = -62, MOST = 65;
#endif
      const int exponent = (int)(word >> 8 * i & 255) - 127;
      if (exponent >= LEAST && exponent <= MOST)
        check("fp4 and powers", word, i, scaled_fp4(word, i, fp4_scale_of_power(word, i)),
              ldexp(of_fp4(low), exponent) / FP4_SUMS, ldexp(of_fp4(high), exponent) / FP4_SUMS);
    }
    for (int half = 0; half < 2; half++) {
      const u32 pair = word >> 16 * half;
      const int low = pair & 255, high = pair >> 8 & 255;
      check("bytes", word, half, elements_of_bytes<false>(word, half), low - 128, high - 128);
      check("signed bytes", word, half, elements_of_bytes<true>(word, half), (signed char)low, (signed char)high);
    }
  }
}
