// Runs kernels/quantised_linear/float8_tiles.cu on a CPU: "float8.inc" is the source without the functions that are PTX.

#include "clusters_on_cpu.h"
#include "barriers_on_cpu.h"

// float8_e4m3fn.
static float of_float8(unsigned char bits) {
  const int exponent = bits >> 3 & 15, digits = bits & 7;
  const float size = exponent ? ldexpf(8 + digits, exponent - 10) : ldexpf(digits, -9);
  return (bits & 0x7f) == 0x7f ? NAN : bits & 0x80 ? -size : size;
}
#define FLOAT8_PRODUCTS
#include "warp_group_on_cpu.h"

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct alignas(16) uint4 { u32 x, y, z, w; };

inline u64 read_once_policy() { return 0; }
inline void copy_once(u32 to, const unsigned char* from, u64) { copy_piece(to, from, 16, true); }
inline void copy_piece(u32 to, const unsigned char* from) { copy_piece(to, from, 16, true); }
inline void copy_scale(u32 to, const float* from) {
  CHECK((u64)from % 4 == 0 && to % 4 == 0);
  current->groups.back().push_back({to, from, 4});    // arrives with the copies that follow
}
inline float load_scale(u32 from) {
  float x;
  memcpy(&x, at(from, 4), 4);
  return x;
}
inline float2 load_scales(u32 from) {
  CHECK(from % 8 == 0);
  float2 x;
  memcpy(&x, at(from, 8), 8);
  return x;
}
static std::vector<fibers::Meeting> of_multiplying;    // of each block
inline void store_scale(u32 to, float x) { memcpy(at(to, 4), &x, 4); }
inline void sync_multiplying() { of_multiplying[current->rank].arrive_and_wait(); }
inline float4 load_four(u32 from) {
  CHECK(from % 16 == 0);
  float4 x;
  memcpy(&x, at(from, 16), 16);
  return x;
}
inline void give_four(u32 to, u32 rank, const float* x) {
  CHECK(of_cluster.turn > 0 && rank != current->rank && rank < shared.size() && to % 16 == 0);
  CHECK(to + 16 <= shared[rank].size());
  memcpy(shared[rank].data() + to, x, 16);
}

#include "float8.inc"

static const u64* arguments;
static void run_thread() {
  const u64* a = arguments;
  const auto bytes = [&](int i) { return (const unsigned char*)a[i]; };
  product_float8((Element*)a[0], bytes(1), bytes(2), (const float*)a[3], (const float*)a[4], (const Element*)a[5], a[6],
                 a[7], a[8]);
}

static void begin() {
  barriers.clear();
  of_multiplying.assign(CLUSTER, fibers::Meeting(MULTIPLYING));
  in_front = fibers::Meeting(CLUSTER * (MULTIPLYING + 64));    // warps that bring w don't wait
}

extern "C" void run(const u64* args, const u32* grid, u32 num_threads, u32 shared_bytes, u32 late, const u64* changed,
                    u32 count) {
  arguments = args;
  run_clusters({grid, num_threads, shared_bytes, late, changed, count}, run_thread, begin, [] {});
}
