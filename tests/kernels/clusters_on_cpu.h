// What kernels whose warps fill rings by themselves find on a CPU, and those of clusters: the threads of one cluster after
// the other as fibers, their shared memory, copies, and matrix instructions of a warp.
//
// The kernel's source is included without the functions that are PTX, which are written here in C++. Shared memory is
// NaN before. What the kernel in front writes (`Written`) is what was there before until all threads wait for that
// kernel. Copies arrive at once, or as late as they may: when they are waited for.
//
// Define CLUSTER, 1 where there are none; and FLOAT16 as for the sources. Where threads wait for what others do after they
// have waited for the kernel in front, define TURNS_IN_FRONT: it ends after so many turns of the first one that waits.
// Where all but the first cluster may end without having waited for it, define MAY_LEAVE as true.

#pragma once

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
inline float max(float a, float b) { return fmaxf(a, b); }    // of a NaN and a number these give the number
inline float min(float a, float b) { return fminf(a, b); }

struct Index { unsigned x, y, z; };
struct Copy { u32 to; const void* from; u32 bytes; };
struct Thread {
  Index thread, block;
  u32 rank;                                 // of its CTA in the cluster
  std::vector<std::vector<Copy>> groups;    // the last one is not ended yet
  u32 given[8];                             // to the other lanes of the warp
  bool arrived;
};

static std::vector<Thread> threads;    // of the cluster
static Index gridDim;
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
inline void __syncthreads() { of_blocks[current->rank].arrive_and_wait(); }

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
inline bool __any_sync(u32, bool value) { return __ballot_sync(~0u, value) != 0; }
inline int __popc(u32 x) { return __builtin_popcount(x); }

inline u32 shared_address(const void*) { return 0; }
inline unsigned char* at(u32 address, u32 bytes) {
  CHECK(address + bytes <= shared[current->rank].size());
  return shared[current->rank].data() + address;
}
static void arrive(const Copy& copy) {
  if (copy.bytes == 0) memset(at(copy.to, 16), 0, 16);
  memcpy(at(copy.to, copy.bytes), copy.from, copy.bytes);
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
inline u32 rounded_to_float16(float first, float second) { return as_float16(first) | (u32)as_float16(second) << 16; }

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

// What each lane of the warp gives, until they meet again.
static auto given_by_warp(const u32 (&x)[4]) {
  memcpy(current->given, x, sizeof x);
  __syncwarp();
  return [all = warp()](int lane) -> const u32* { return all[lane].given; };
}

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

inline void arrive_at_cluster() {
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
#ifndef TURNS_IN_FRONT
#define TURNS_IN_FRONT -1
#endif
#ifndef MAY_LEAVE
#define MAY_LEAVE false
#endif
static bool has_ended_in_front;
inline void wait_for_kernel_in_front() {
  const bool is_last = in_front.arrive();
  for (int turns = 0; !is_last && !has_ended_in_front && turns != TURNS_IN_FRONT; turns++) fibers::let_others_run();
  if (!has_ended_in_front) write_all();
  has_ended_in_front = true;
}

// `changed`: `count` times the address of what the kernel in front writes, of what is there afterwards, and its bytes.
struct Launch { const u32 *grid; u32 num_threads, shared_bytes, late; const u64* changed; u32 count; };
static void run_clusters(const Launch& launch, void (*thread)(), void (*begin)(), void (*end)()) {
  const auto [grid, num_threads, shared_bytes, late, changed, count] = launch;
  copies_are_late = late;
  gridDim = {grid[0], grid[1], grid[2]};
  written.clear();
  before.clear();
  for (u32 i = 0; i < count; i++) {
    written.push_back({(unsigned char*)changed[3 * i], (const unsigned char*)changed[3 * i + 1], changed[3 * i + 2]});
    before.emplace_back(written[i].to, written[i].to + written[i].bytes);
  }
  CHECK(grid[0] % CLUSTER == 0);
  for (u32 cluster = 0; cluster < grid[0] * grid[1] * grid[2] / CLUSTER; cluster++) {
    for (u32 i = 0; i < count; i++) memcpy(written[i].to, before[i].data(), written[i].bytes);
    shared.assign(CLUSTER, std::vector<unsigned char>(shared_bytes, 0xff));
    threads.assign(CLUSTER * num_threads, {});
    of_warps.assign(threads.size() / 32, fibers::Meeting(32));
    of_blocks.assign(CLUSTER, fibers::Meeting(num_threads));
    of_cluster = in_front = fibers::Meeting(threads.size());
    has_ended_in_front = false;
    begin();
    for (u32 i = 0; i < threads.size(); i++) {
      const u32 rank = i / num_threads, block = cluster * CLUSTER + rank;
      threads[i].thread = {i % num_threads, 0, 0};
      threads[i].block = {block % grid[0], block / grid[0] % grid[1], block / grid[0] / grid[1]};
      threads[i].rank = rank;
      threads[i].groups.resize(1);
      fibers::add(thread);
    }
    fibers::run();
    for (const Thread& each : threads) CHECK(!each.arrived);
    CHECK(in_front.turn == 1 || (MAY_LEAVE && cluster > 0 && !in_front.has_begun()));    // all have waited
    end();
  }
}
