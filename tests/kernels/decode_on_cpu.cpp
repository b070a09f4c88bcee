// Runs kernels/attention/decode.cu on a CPU: one cluster after the other, a fiber for each of its threads.
//
// "decode.inc" is the kernel's source without the functions that are PTX, which are written here in C++. Shared memory
// is NaN before. What the kernel in front writes (`Written`) is NaN until all threads wait for that kernel. Copies
// arrive at once, or as late as they may: when they are waited for.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

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
struct Copy { u32 to; const Element* from; u32 bytes; };
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Index thread, block;
  std::vector<std::vector<Copy>> groups;    // the last one is not ended yet
  u32 given[8];                             // to the other lanes of the warp
  bool arrived, done;
};
struct Meeting { int arrived; unsigned turn; };

static std::vector<Fiber> fibers;
static Fiber* current;
static ucontext_t scheduler;
static std::vector<Meeting> of_warps, of_blocks;
static Meeting of_cluster, in_front;
static unsigned cluster_turn;
static std::vector<std::vector<unsigned char>> shared;    // of each CTA of the cluster
static bool copies_are_late;
static int num_threads;    // of a CTA
#define threadIdx (current->thread)
#define blockIdx (current->block)

static void let_others_run() { swapcontext(&current->context, &scheduler); }
static bool arrives(Meeting& meeting, int count) {
  if (++meeting.arrived < count) return false;
  meeting.arrived = 0;
  meeting.turn++;
  return true;
}
static void meet(Meeting& meeting, int count) {
  const unsigned turn = meeting.turn;
  if (!arrives(meeting, count))
    while (meeting.turn == turn) let_others_run();
}

static u32 lane() { return threadIdx.x % 32; }
static Fiber* warp() { return current - lane(); }
inline void __syncwarp() { meet(of_warps[(current - fibers.data()) / 32], 32); }
inline void __syncthreads() { meet(of_blocks[blockIdx.x], num_threads); }

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
inline float __shfl_xor_sync(u32, float value, int mask) { return exchanged(value, lane() ^ mask); }
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
inline void copy_piece(u32 to, const Element* from, u32 bytes, bool wanted) {
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

inline float widened(float value) { return value; }
#ifdef FLOAT16
inline float widened(Element value) {
  _Float16 narrow;
  memcpy(&narrow, &value, 2);
  return narrow;
}
static Element rounded(float value) {
  const _Float16 narrow = value;
  Element bits;
  memcpy(&bits, &narrow, 2);
  return bits;
}
#else
inline float widened(Element value) {
  const u32 bits = (u32)value << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}
static Element rounded(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return std::isnan(value) ? 0x7fff : (Element)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#endif
inline u32 rounded(float first, float second) { return rounded(first) | (u32)rounded(second) << 16; }
inline float power_of_2(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1 / x; }

inline void multiply_add(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  memcpy(current->given, a, sizeof a);
  current->given[4] = b0;
  current->given[5] = b1;
  __syncwarp();
  for (int j = 0; j < 4; j++) {
    const int row = lane() / 4 + j / 2 * 8, column = lane() % 4 * 2 + j % 2;
    for (int k = 0; k < 16; k++) {    // a pair of neighbouring k is a register
      const u32 from_a = warp()[row % 8 * 4 + k % 8 / 2].given[row / 8 + k / 8 * 2] >> k % 2 * 16;
      const u32 from_b = warp()[column * 4 + k % 8 / 2].given[4 + k / 8] >> k % 2 * 16;
      sums[j] += widened((Element)from_a) * widened((Element)from_b);
    }
  }
  __syncwarp();
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
  while (barriers[blockIdx.x].arrivals > 0 || barriers[blockIdx.x].bytes != 0) let_others_run();
}
inline void send(u32 to, u32 rank, float a, float b, float c, float d, u32) {
  const float x[4] = {a, b, c, d};
  CHECK(barriers[rank].arrivals > 0 || barriers[rank].bytes >= 16);
  CHECK(cluster_turn > 0);    // all CTAs have begun
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
  current->given[7] = cluster_turn;
  if (arrives(of_cluster, fibers.size())) cluster_turn++;
}
inline void wait_for_cluster() {
  CHECK(current->arrived);
  current->arrived = false;
  const u32 turn = current->given[7];
  while (cluster_turn == turn) let_others_run();
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
  if (arrives(in_front, fibers.size()))
    write_all();
  else
    while (in_front.turn == turn) let_others_run();
}

#include "decode.inc"

static const u64* arguments;
static void run_thread() {
  const u64* a = arguments;
  const auto list = [&](int i) { return (const int*)a[i]; };
  const auto elements = [&](int i) { return (const Element*)a[i]; };
  decode_attention((Element*)a[0], elements(1), elements(2), elements(3), (const Sink*)a[4], (const float*)a[5], list(6),
                   list(7), list(8), list(9), list(10), a[11], a[12], a[13], a[14], a[15], a[16], a[17], a[18], a[19],
                   a[20]);
  current->done = true;
  swapcontext(&current->context, &scheduler);
}

// `changed`: `count` times the address of what the kernel in front writes, of what is there afterwards, and its bytes.
extern "C" void run(const u64* args, const u32* grid, u32 threads, u32 shared_bytes, u32 late, const u64* changed,
                    u32 count) {
  arguments = args;
  copies_are_late = late;
  num_threads = threads;
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
      fibers.clear();
      fibers.resize(CLUSTER * threads);
      of_warps.assign(fibers.size() / 32, {});
      of_blocks.assign(CLUSTER, {});
      barriers.assign(CLUSTER, {-1, 0});
      of_cluster = in_front = {};
      cluster_turn = 0;
      for (u32 i = 0; i < fibers.size(); i++) {
        Fiber& fiber = fibers[i];
        fiber.thread = {i % threads, 0, 0};
        fiber.block = {i / threads, y, z};
        fiber.groups.resize(1);
        fiber.arrived = fiber.done = false;
        const size_t room = 64 << 10;
        fiber.stack = std::make_unique<char[]>(room);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = room;
        makecontext(&fiber.context, run_thread, 0);
      }
      for (bool left = true; left;) {
        left = false;
        for (Fiber& fiber : fibers)
          if (!fiber.done) {
            left = true;
            current = &fiber;
            swapcontext(&scheduler, &fiber.context);
          }
      }
      for (const Fiber& fiber : fibers) CHECK(!fiber.arrived);
      CHECK(in_front.turn == 1);    // all have waited
      for (const Barrier& each : barriers) CHECK(each.bytes == 0);
    }
}
