// Runs kernels/attention/decode.cu on a CPU: "decode.inc" is its source without the functions that are PTX.

#ifdef ONE_QUERY
#define MAY_LEAVE true
#endif
#include "clusters_on_cpu.h"
#include "counted_bytes_on_cpu.h"

struct float4 { float x, y, z, w; };
inline u32 __byte_perm(u32 a, u32 b, u32 places) {
  const u64 both = (u64)b << 32 | a;
  u32 made = 0;
  for (int i = 0; i < 4; i++) made |= (u32)(both >> (places >> 4 * i & 7) * 8 & 255) << 8 * i;
  return made;
}

static float of_float8(u32 bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float size = (bits & 127) == 127 ? NAN : exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return bits & 128 ? -size : size;
}
inline u32 float16_of_float8(u32 word, int half) {
  const u32 pair = word >> 16 * half;
  return rounded_to_float16(of_float8(pair & 255), of_float8(pair >> 8 & 255));
}

inline void send(u32 to, u32 rank, float a, float b, float c, float d, u32) {
  const float x[4] = {a, b, c, d};
  CHECK(barriers[rank].arrivals > 0 || barriers[rank].bytes >= 16);
  CHECK(of_cluster.turn > 0);    // all CTAs have begun
  CHECK(to % 16 == 0 && rank < shared.size() && to + 16 <= shared[rank].size());
  memcpy(shared[rank].data() + to, x, 16);
  barriers[rank].bytes -= 16;
}
inline void store_near(u32 to, float a, float b, float c, float d) {
  const float x[4] = {a, b, c, d};
  memcpy(at(to, 16), x, 16);
}
inline float4 load_near(u32 from) {
  CHECK(from % 16 == 0);
  float4 x;
  memcpy(&x, at(from, 16), 16);
  return x;
}
#include "decode.inc"

static const u64* arguments;
static void run_thread() {
  const u64* a = arguments;
  const auto list = [&](int i) { return (const int*)a[i]; };
  const auto cache = [&](int i) { return (const Stored*)a[i]; };
  const auto numbers = [&](int i) { return (const float*)a[i]; };
  decode_attention((Element*)a[0], (const Element*)a[1], cache(2), cache(3), numbers(4), numbers(5), (const Sink*)a[6],
                   numbers(7), list(8), list(9), list(10), list(11), list(12), a[13], a[14], a[15], a[16], a[17], a[18],
                   a[19], a[20], a[21], a[22], a[23]);
}

extern "C" void run(const u64* args, const u32* grid, u32 num_threads, u32 shared_bytes, u32 late, const u64* changed,
                    u32 count) {
  arguments = args;
  run_clusters({grid, num_threads, shared_bytes, late, changed, count}, run_thread,
               make_barriers, check_barriers);
}
