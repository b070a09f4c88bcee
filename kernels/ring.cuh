// A place in a ring of stages, each with a barrier: whoever walks it meets each barrier in one phase after the other.

#pragma once

struct Place {
  int at;
  u32 parity;

  __device__ __forceinline__ void advance(int length) {
    if (++at == length) {
      at = 0;
      parity ^= 1;
    }
  }
};
