// Runs kernels/attention/decode.cu on a CPU: one cluster after the other, a fiber for each of its threads.
//
// "decode.inc" is the kernel's source without the functions that are PTX, which are written here in C++. Shared memory
// is NaN before. What the kernel in front writes (`Written`) is NaN until all threads wait for that kernel. Copies
// arrive at once, or as late as they may: when they are waited for.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fibers.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define CHECK(what) \
  ((what) ? (void)0 : (printf("line %d: %s does not hold\n", __LINE__, #what), fflush(stdout), abort()))

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef u16 Element;
using std::max;
using std::min;

struct float4 { float x, y, z, w; };
struct Index { unsigned x, y, z; };
struct Copy { u32 to; const void* from; u32 bytes; };
struct Thread {
  Index thread, block;
  std::vector<std::vector<Copy>> groups;    // the last one is not ended yet
  u32 given[8];                             // to the other lanes of the warp
  bool arrived;
};

static std::vector<Thread> threads;    // of the cluster
static std::vector<fibers::Meeting> of_warps, of_blocks;
static fibers::Meeting of_cluster, in_front;
static std::vector<std::vector<unsigned char>> shared;    // of each CTA of the cluster
static bool copies_are_late;
#define current (&threads[fibers::running])
#define threadIdx (current->thread)
#define blockIdx (current->block)

static u32 lane() { return threadIdx.x % 32; }
static Thread* warp() { return current - lane(); }
inline void __syncwarp() { of_warps[fibers::running / 32].arrive_and_wait(); }
inline void __syncthreads() { of_blocks[blockIdx.x].arrive_and_wait(); }

template <typename T>
static T exchanged(T value, u32 source) {
  memcpy(current->given, &value, sizeof value);
  __syncwarp();
  T found;
  memcpy(&found, warp()[source].given, sizeof found);
  __syncwarp();
  return found;
}
template <typename T>
inline T __shfl_sync(u32, T value, int source) { return exchanged(value, source); }
template <typename T>
inline T __shfl_xor_sync(u32, T value, int mask) { return exchanged(value, lane() ^ mask); }
inline u32 __ballot_sync(u32, bool value) {
  current->given[0] = value;
  __syncwarp();
  u32 found = 0;
  for (int i = 0; i < 32; i++) found |= warp()[i].given[0] << i;
  __syncwarp();
  return found;
}
inline int __popc(u32 x) { return __builtin_popcount(x); }

inline u32 shared_address(const void*) { return 0; }
inline unsigned char* at(u32 address, u32 bytes) {
  CHECK(address + bytes <= shared[blockIdx.x].size());
  return shared[blockIdx.x].data() + address;
}
static void arrive(const Copy& copy) {
  memset(at(copy.to, 16), 0, 16);
  memcpy(at(copy.to, 16), copy.from, copy.bytes);
}
inline void copy_piece(u32 to, const void* from, u32 bytes, bool wanted) {
  if (!wanted) return;
  CHECK((u64)from % 16 == 0 && to % 16 == 0);
  if (copies_are_late)
    current->groups.back().push_back({to, from, bytes});
  else
    arrive({to, from, bytes});
}
inline void end_group_of_copies() { current->groups.emplace_back(); }
template <int PENDING>
inline void wait_for_copies() {
  for (size_t i = 0; i + PENDING + 1 < current->groups.size(); i++) {
    for (const Copy& copy : current->groups[i]) arrive(copy);
    current->groups[i].clear();
  }
}

static Element element(u32 row_address, u32 column) {
  Element found;
  memcpy(&found, at(row_address + 2 * column, 2), 2);
  return found;
}
static void load_matrices(u32 (&to)[4], u32 from, bool transposes) {
  CHECK(from % 16 == 0);
  current->given[0] = from;
  __syncwarp();
  for (int i = 0; i < 4; i++) {
    to[i] = 0;
    for (u32 j = 0; j < 2; j++) {
      const u32 own = lane() / 4, other = lane() % 4 * 2 + j;
      const u32 row = transposes ? other : own, column = transposes ? own : other;
      to[i] |= (u32)element(warp()[8 * i + row].given[0], column) << 16 * j;
    }
  }
  __syncwarp();
}
inline void load_matrices(u32 (&to)[4], u32 from) { load_matrices(to, from, false); }
inline void load_matrices_transposed(u32 (&to)[4], u32 from) { load_matrices(to, from, true); }
inline u32 transposed(u32 matrix) {
  current->given[0] = matrix;
  __syncwarp();
  u32 found = 0;
  for (u32 j = 0; j < 2; j++) {
    const u32 row = lane() % 4 * 2 + j, column = lane() / 4;
    found |= (warp()[row * 4 + column / 2].given[0] >> column % 2 * 16 & 0xffff) << 16 * j;
  }
  __syncwarp();
  return found;
}

inline float __uint_as_float(u32 bits) {
  float number;
  memcpy(&number, &bits, 4);
  return number;
}
inline u32 __byte_perm(u32 a, u32 b, u32 places) {
  const u64 both = (u64)b << 32 | a;
  u32 made = 0;
  for (int i = 0; i < 4; i++) made |= (u32)(both >> (places >> 4 * i & 7) * 8 & 255) << 8 * i;
  return made;
}

inline float of_float16(u16 bits) {
  _Float16 narrow;
  memcpy(&narrow, &bits, 2);
  return narrow;
}
static u16 as_float16(float value) {
  const _Float16 narrow = value;
  u16 bits;
  memcpy(&bits, &narrow, 2);
  return bits;
}
static float of_float8(u32 bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float size = (bits & 127) == 127 ? NAN : exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return bits & 128 ? -size : size;
}
inline u32 rounded_to_float16(float first, float second) { return as_float16(first) | (u32)as_float16(second) << 16; }
inline u32 float16_of_float8(u32 word, int half) {
  const u32 pair = word >> 16 * half;
  return rounded_to_float16(of_float8(pair & 255), of_float8(pair >> 8 & 255));
}

inline float widened(float value) { return value; }
#ifdef FLOAT16
inline float widened(Element value) { return of_float16(value); }
static Element rounded(float value) { return as_float16(value); }
#else
inline float widened(Element value) { return __uint_as_float((u32)value << 16); }
static Element rounded(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return std::isnan(value) ? 0x7fff : (Element)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#endif
inline u32 rounded(float first, float second) { return rounded(first) | (u32)rounded(second) << 16; }
inline float power_of_2(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1 / x; }

static void multiply_add_of(float (*value)(u16), float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  memcpy(current->given, a, sizeof a);
  current->given[4] = b0;
  current->given[5] = b1;
  __syncwarp();
  for (int j = 0; j < 4; j++) {
    const int row = lane() / 4 + j / 2 * 8, column = lane() % 4 * 2 + j % 2;
    for (int k = 0; k < 16; k++) {    // a pair of neighbouring k is a register
      const u32 from_a = warp()[row % 8 * 4 + k % 8 / 2].given[row / 8 + k / 8 * 2] >> k % 2 * 16;
      const u32 from_b = warp()[column * 4 + k % 8 / 2].given[4 + k / 8] >> k % 2 * 16;
      sums[j] += value((u16)from_a) * value((u16)from_b);
    }
  }
  __syncwarp();
}
inline void multiply_add(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  multiply_add_of(widened, sums, a, b0, b1);
}
inline void multiply_add_float16(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  multiply_add_of(of_float16, sums, a, b0, b1);
}

struct Barrier { int arrivals; i64 bytes; };
static std::vector<Barrier> barriers;    // one of each CTA
inline void barrier_init(u32, u32 arrivals) { barriers[blockIdx.x] = {(int)arrivals, 0}; }
inline void barrier_init_fence() {}
inline void barrier_expect(u32, u32 bytes) {
  CHECK(barriers[blockIdx.x].arrivals-- == 1);
  barriers[blockIdx.x].bytes += bytes;
}
inline void barrier_wait(u32) {
  while (barriers[blockIdx.x].arrivals > 0 || barriers[blockIdx.x].bytes != 0) fibers::let_others_run();
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
inline void arrive_with_nothing_written() {
  CHECK(!current->arrived);
  current->arrived = true;
  current->given[7] = of_cluster.turn;
  (void)of_cluster.arrive();
}
inline void wait_for_cluster() {
  CHECK(current->arrived);
  current->arrived = false;
  const u32 turn = current->given[7];
  while (of_cluster.turn == turn) fibers::let_others_run();
}

struct Written { unsigned char* to; const unsigned char* after; u64 bytes; };
static std::vector<Written> written;
static std::vector<std::vector<unsigned char>> before;
static void write_all() {
  for (const Written& each : written) memcpy(each.to, each.after, each.bytes);
}
inline void let_next_kernel_start() {}
inline void wait_for_kernel_in_front() {
  const unsigned turn = in_front.turn;
  if (in_front.arrive())
    write_all();
  else
    while (in_front.turn == turn) fibers::let_others_run();
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
                   a[19], a[20], a[21], a[22]);
}

// `changed`: `count` times the address of what the kernel in front writes, of what is there afterwards, and its bytes.
extern "C" void run(const u64* args, const u32* grid, u32 num_threads, u32 shared_bytes, u32 late, const u64* changed,
                    u32 count) {
  arguments = args;
  copies_are_late = late;
  written.clear();
  before.clear();
  for (u32 i = 0; i < count; i++) {
    written.push_back({(unsigned char*)changed[3 * i], (const unsigned char*)changed[3 * i + 1], changed[3 * i + 2]});
    before.emplace_back(written[i].to, written[i].to + written[i].bytes);
  }
  CHECK(grid[0] == CLUSTER);
  for (u32 z = 0; z < grid[2]; z++)
    for (u32 y = 0; y < grid[1]; y++) {
      for (u32 i = 0; i < count; i++) memcpy(written[i].to, before[i].data(), written[i].bytes);
      shared.assign(CLUSTER, std::vector<unsigned char>(shared_bytes, 0xff));
      threads.assign(CLUSTER * num_threads, {});
      of_warps.assign(threads.size() / 32, fibers::Meeting(32));
      of_blocks.assign(CLUSTER, fibers::Meeting(num_threads));
      barriers.assign(CLUSTER, {-1, 0});
      of_cluster = in_front = fibers::Meeting(threads.size());
      for (u32 i = 0; i < threads.size(); i++) {
        threads[i].thread = {i % num_threads, 0, 0};
        threads[i].block = {i / num_threads, y, z};
        threads[i].groups.resize(1);
        fibers::add(run_thread);
      }
      fibers::run();
      for (const Thread& thread : threads) CHECK(!thread.arrived);
      CHECK(in_front.turn == 1);    // all have waited
      for (const Barrier& each : barriers) CHECK(each.bytes == 0);
    }
}
