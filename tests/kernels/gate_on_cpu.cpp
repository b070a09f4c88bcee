// Runs kernels/rounded/gate.cu on a CPU: "gate.inc" is its source without the functions that are PTX.

#include "clusters_on_cpu.h"
#include "counted_bytes_on_cpu.h"

inline float __expf(float a) { return expf(a); }

// To nearest, ties to even; the largest, 448, in place of larger ones.
static u32 as_float8(float x) {
  const u32 sign = std::signbit(x) ? 128 : 0;
  if (std::isnan(x)) return sign | 127;
  int exponent;
  (void)frexpf(x, &exponent);    // |x| is 2^(exponent - 1) to 2^exponent
  const float step = ldexpf(1, max(exponent - 4, -9)), size = std::min(nearbyintf(fabsf(x) / step) * step, 448.0f);
  if (size < ldexpf(1, -6)) return sign | (u32)ldexpf(size, 9);
  (void)frexpf(size, &exponent);
  return sign | (u32)(exponent + 6) << 3 | ((u32)ldexpf(size, 4 - exponent) & 7);
}
inline u32 rounded_to_float8(float first, float second) { return as_float8(first) | as_float8(second) << 8; }

inline void send(u32 to, u32 rank, u32 word, u32) {
  CHECK(of_cluster.turn > 0 && barriers[rank].bytes >= 4);    // all CTAs have begun, and expect it
  CHECK(to % 4 == 0 && rank < shared.size() && to + 4 <= shared[rank].size());
  memcpy(shared[rank].data() + to, &word, 4);
  barriers[rank].bytes -= 4;
}
inline u32 load_near(u32 from) {
  u32 word;
  memcpy(&word, at(from, 4), 4);
  return word;
}
#include "gate.inc"

static const u64* arguments;
static void run_thread() {
  const u64* a = arguments;
  rounded_gate((u64*)a[0], (float*)a[1], (const Element*)a[2], a[3], a[4], a[5], a[6]);
}

extern "C" void run(const u64* args, const u32* grid, u32 num_threads, u32 shared_bytes, u32 late, const u64* changed,
                    u32 count) {
  arguments = args;
  run_clusters({grid, num_threads, shared_bytes, late, changed, count}, run_thread,
               make_barriers, check_barriers);
}
