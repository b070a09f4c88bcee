// Runs kernels/linear/stream.cu on a CPU: a thread for each of a block's, one block or cluster after the other.
//
// "stream.inc" is the kernel's source without the functions that are PTX, which are written here in C++. What they are
// given is checked (alignment, room in shared memory, arrivals at barriers), w and x end in front of a page that may
// not be read, and shared memory and results are NaN before. Arguments: rows, outputs, inputs, how x lies (0 in
// row-major order, 1 with gaps of 16 bytes between rows, 2 every second element), and a plan: `Plan` in records.py.
// Prints the largest error relative to 1 + |expected|, and a checksum of the first row.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#ifndef CLUSTER
#define CLUSTER 1
#endif
#define __cluster_dims__(...)
#define CHECK(what) \
  ((what) ? (void)0 : (printf("line %d: %s does not hold\n", __LINE__, #what), fflush(stdout), _Exit(1)))

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef u16 Element;
using std::min;

struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim;
static thread_local u32 rank_of_block;    // in its cluster
alignas(128) static unsigned char all_shared[CLUSTER][256 << 10];    // dynamic shared memory; addresses count from here
static u32 shared_bytes;
static std::atomic<int> num_running[CLUSTER], num_waiting[CLUSTER];
static std::unique_ptr<std::barrier<>> of_start, of_multiplying_warps[CLUSTER], of_warp[CLUSTER][10];

static unsigned char* own_shared() { return all_shared[rank_of_block]; }
static u32 warp_of() { return threadIdx.x / 32; }
static u32 lane_of() { return threadIdx.x % 32; }
inline void __syncwarp() { of_warp[rank_of_block][warp_of()]->arrive_and_wait(); }
inline u32 __shfl_sync(u32, u32 value, int) { return value; }    // the source asks for a warp's number
inline float __expf(float a) { return expf(a); }
inline u32 shared_address(const void* at) { return (u32)((const char*)at - (const char*)own_shared()); }
inline unsigned char* at(u32 address) { return own_shared() + address; }

struct Barrier { int count, pending; i64 bytes; u32 phase; };
static std::map<u32, Barrier> barriers[CLUSTER];
static std::mutex lock;

inline void barrier_init(u32 barrier, u32 count) {
  std::lock_guard held(lock);
  CHECK(count > 0 && barrier + 8 <= shared_bytes && barrier % 8 == 0);
  barriers[rank_of_block][barrier] = {(int)count, (int)count, 0, 0};
}
inline void barrier_init_fence() {}
// Bytes may come before they are expected: from another block of the cluster.
static void change(u32 rank, u32 barrier, int arrivals, i64 bytes) {
  std::lock_guard held(lock);
  CHECK(num_running[rank] > 0);
  Barrier& found = barriers[rank].at(barrier);
  CHECK(found.pending >= arrivals);
  found.pending -= arrivals;
  found.bytes += bytes;
  CHECK(found.bytes >= 0 || CLUSTER > 1);
  if (found.pending == 0 && found.bytes == 0) {
    found.phase ^= 1;
    found.pending = found.count;
  }
}
inline void barrier_arrive(u32 barrier) { change(rank_of_block, barrier, 1, 0); }
inline void barrier_arrive_at(u32 barrier, u32 rank) { change(rank, barrier, 1, 0); }
inline void barrier_expect(u32 barrier, u32 bytes) { change(rank_of_block, barrier, 1, bytes); }
inline void barrier_wait(u32 barrier, u32 parity) {
  for (;; std::this_thread::yield()) {
    std::lock_guard held(lock);
    if (barriers[rank_of_block].at(barrier).phase != parity) return;
  }
}

inline bool elected() { return lane_of() == 0; }
inline u64 read_once_policy() { return 0; }
static void copy_into(u32 rank, u32 to, const Element* from, u32 bytes, u32 barrier) {
  CHECK((u64)from % 16 == 0 && to % 16 == 0 && bytes % 16 == 0 && bytes > 0 && to + bytes <= shared_bytes);
  memcpy(all_shared[rank] + to, from, bytes);
  change(rank, barrier, 0, -(i64)bytes);
}
inline void copy(u32 to, const Element* from, u32 bytes, u32 barrier) {
  copy_into(rank_of_block, to, from, bytes, barrier);
}
inline void copy_to_all(u32 to, const Element* from, u32 bytes, u32 barrier) {
  for (u32 rank = 0; rank < CLUSTER; rank++) copy_into(rank, to, from, bytes, barrier);
}
inline void copy_once(u32 to, const Element* from, u32 bytes, u32 barrier, u64) { copy(to, from, bytes, barrier); }
inline void store_shared(u32 to, Element value) {
  CHECK(to + sizeof(Element) <= shared_bytes);
  memcpy(at(to), &value, sizeof(Element));
}

static float widened(Element value) {
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

struct Exchanged { u32 addresses[10][32], a[10][32][4], b[10][32][2]; };
static Exchanged exchanged[CLUSTER];
inline void load_matrices(u32 (&to)[4], u32 from) {
  CHECK(from % 16 == 0 && from + 16 <= shared_bytes);
  auto& addresses = exchanged[rank_of_block].addresses[warp_of()];
  addresses[lane_of()] = from;
  __syncwarp();
  for (int i = 0; i < 4; i++) memcpy(&to[i], at(addresses[8 * i + lane_of() / 4]) + lane_of() % 4 * 4, 4);
  __syncwarp();
}
inline void multiply_add(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 warp = warp_of(), lane = lane_of(), b[2] = {b0, b1};
  auto& given_a = exchanged[rank_of_block].a[warp];
  auto& given_b = exchanged[rank_of_block].b[warp];
  memcpy(given_a[lane], a, sizeof a);
  memcpy(given_b[lane], b, sizeof b);
  __syncwarp();
  for (int j = 0; j < 4; j++) {
    const int row = lane / 4 + j / 2 * 8, column = lane % 4 * 2 + j % 2;
    for (int k = 0; k < 16; k++) {    // a pair of neighbouring k is a register
      const u32 from_a = given_a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> k % 2 * 16;
      const u32 from_b = given_b[column * 4 + k % 8 / 2][k / 8] >> k % 2 * 16;
      sums[j] += widened((Element)from_a) * widened((Element)from_b);
    }
  }
  __syncwarp();
}

inline void let_next_kernel_start() {}
inline void wait_for_kernel_in_front() { num_waiting[rank_of_block]++; }
inline void arrive_at_start() {
  __syncwarp();
  (void)of_start->arrive();
}
inline void sync_at_start() { of_start->arrive_and_wait(); }
inline u32 rank_in_cluster() { return rank_of_block; }
inline void sync_multiplying_warps() { of_multiplying_warps[rank_of_block]->arrive_and_wait(); }

#include "stream.inc"

// Normal numbers that end where memory does.
static Element* drawn(size_t count, float scale) {
  static std::mt19937 generator(1);
  const size_t page = 4096, bytes = count * sizeof(Element), pages = (bytes + page - 1) / page * page;
  char* begin = (char*)mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(begin != MAP_FAILED && mprotect(begin + pages, page, PROT_NONE) == 0);
  Element* made = (Element*)(begin + pages - bytes);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < count; i++) made[i] = rounded(normal(generator) * scale);
  return made;
}

int main(int, char** given) {
  const int rows = atoi(given[1]), outputs = atoi(given[2]), inputs = atoi(given[3]), lies = atoi(given[4]);
  int plan[8];
  for (int i = 0; i < 8; i++) plan[i] = atoi(given[5 + i]);
  const int columns = outputs / HALVES, residual_stride = columns + 5;
  gridDim.x = atoi(given[13]);
  shared_bytes = atoi(given[14]);
  const i64 stride = lies == 2 ? 2 : 1, row_stride = lies == 0 ? inputs : lies == 1 ? inputs + 8 : 2 * inputs + 3;
  const Element* w = drawn((size_t)outputs * inputs, 1 / sqrtf(inputs));
  const Element* bias = drawn(outputs, 1);
  const Element* x = drawn((rows - 1) * row_stride + (inputs - 1) * stride + 1, 1);
  const Element* residual = drawn((size_t)rows * residual_stride, 1);
  const size_t beyond = 64;
  std::vector<Element> y((size_t)rows * columns + beyond, 0x7fff);
  for (unsigned first = 0; first < gridDim.x; first += CLUSTER) {
    memset(all_shared, 0xff, sizeof all_shared);
    of_start = std::make_unique<std::barrier<>>(CLUSTER * THREADS);
    for (int rank = 0; rank < CLUSTER; rank++) {
      barriers[rank].clear();
      num_waiting[rank] = 0;
      num_running[rank] = THREADS;
      of_multiplying_warps[rank] = std::make_unique<std::barrier<>>(32 * WARPS);
      for (auto& each : of_warp[rank]) each = std::make_unique<std::barrier<>>(32);
    }
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < CLUSTER * THREADS; i++)
      threads.emplace_back([=, &y] {
        rank_of_block = i / THREADS;
        blockIdx.x = first + rank_of_block;
        threadIdx.x = i % THREADS;
        stream_linear(
            y.data(), x, w, bias, residual, row_stride, stride, residual_stride, rows, outputs, inputs, plan[0],
            plan[1], plan[2], plan[3], plan[4], plan[5], plan[6], plan[7]);
        num_running[rank_of_block]--;
      });
    for (auto& each : threads) each.join();
    for (const auto& each : num_waiting) CHECK(each == THREADS - 32);    // all but the warp that asks for weights
  }

  const auto product = [&](int m, int n) {
    double sum = 0;
    for (int k = 0; k < inputs; k++)
      sum += (double)widened(x[m * row_stride + k * stride]) * widened(w[(i64)n * inputs + k]);
#ifdef BIAS
    sum += widened(bias[n]);
#endif
    return (float)sum;
  };
  double largest = 0;
  u64 checksum = 0;
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < columns; n++) {
      float expected = product(m, n);
#ifdef GATE
      expected = GATE(widened(rounded(expected))) * widened(rounded(product(m, columns + n)));
#endif
#ifdef RESIDUAL
      expected = widened(rounded(expected)) + widened(residual[m * residual_stride + n]);
#endif
      const double error = fabs(widened(y[(size_t)m * columns + n]) - expected) / (1 + fabs(expected));
      largest = std::isnan(error) ? INFINITY : std::max(largest, error);
      if (m == 0) checksum = checksum * 1099511628211u + y[n];
    }
  for (size_t i = 0; i < beyond; i++) CHECK(y[(size_t)rows * columns + i] == 0x7fff);
  printf("%g %llu\n", largest, checksum);
}
