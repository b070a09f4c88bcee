// What kernels of CUDA C++ that copy in bulk find on a CPU: a block's threads as fibers, its shared memory and barriers,
// copies, and matrix instructions of a warp. What they are given is checked.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "fibers.h"
#include "halves_on_cpu.h"

#define __global__
#define __launch_bounds__(...)
#define CHECK(what) \
  ((what) ? (void)0 : (printf("line %d: %s does not hold\n", __LINE__, #what), fflush(stdout), _Exit(1)))

typedef unsigned long long u64;
typedef long long i64;
using std::max;
using std::min;

struct Index { unsigned x, y; };
#define threadIdx (Index{(unsigned)fibers::running, 0})
inline Index blockIdx, gridDim;
alignas(128) inline unsigned char shared[256 << 10];    // dynamic shared memory; addresses count from here
inline u32 shared_bytes;
inline fibers::Meeting of_block, of_multiplying_warps, of_warp[32];

inline u32 warp_of() { return threadIdx.x / 32; }
inline u32 lane() { return threadIdx.x % 32; }
inline void __syncthreads() { of_block.arrive_and_wait(); }
inline void __syncwarp() { of_warp[warp_of()].arrive_and_wait(); }
inline void sync_multiplying_warps() { of_multiplying_warps.arrive_and_wait(); }
inline u32 __shfl_sync(u32, u32 value, int) { return value; }    // the source asks for a warp's number
inline float given_floats[32][32];
inline float __shfl_xor_sync(u32, float value, int other) {
  given_floats[warp_of()][lane()] = value;
  __syncwarp();
  const float found = given_floats[warp_of()][lane() ^ other];
  __syncwarp();
  return found;
}
inline float __expf(float a) { return expf(a); }
inline u32 shared_address(const void* at) { return (u32)((const char*)at - (const char*)shared); }
inline unsigned char* at(u32 address) { return shared + (int)address; }

struct Barrier { int count, pending; i64 bytes; u32 phase; };
inline std::map<u32, Barrier> barriers;

inline void barrier_init(u32 barrier, u32 count) {
  CHECK(barrier % 8 == 0 && barrier + 8 <= shared_bytes);
  barriers[barrier] = {(int)count, (int)count, 0, 0};
}
inline void barrier_init_fence() {}
inline void change(u32 barrier, int arrivals, i64 bytes) {
  Barrier& found = barriers.at(barrier);
  CHECK(found.pending >= arrivals);
  found.pending -= arrivals;
  found.bytes += bytes;
  CHECK(found.bytes >= 0);
  if (found.pending == 0 && found.bytes == 0) {
    found.phase ^= 1;
    found.pending = found.count;
  }
}
inline void barrier_arrive(u32 barrier) { change(barrier, 1, 0); }
inline void barrier_expect(u32 barrier, u32 bytes) { change(barrier, 1, bytes); }

// Copies that have been asked for: they end in any order, while threads wait.
struct Copy { u32 to; const void* from; u32 bytes, barrier; bool is_read_once; };
inline std::vector<Copy> on_their_way;
inline size_t most_on_their_way = -1;    // pieces of what is read once, each with a barrier
inline void end_a_copy() {
  static std::minstd_rand chance(1);
  if (on_their_way.empty()) return;
  std::swap(on_their_way[chance() / 64 % on_their_way.size()], on_their_way.back());
  const Copy ends = on_their_way.back();
  on_their_way.pop_back();
  memcpy(at(ends.to), ends.from, ends.bytes);
  change(ends.barrier, 0, -(i64)ends.bytes);
}
inline void barrier_wait(u32 barrier, u32 parity) {
  while (barriers.at(barrier).phase == parity) {
    end_a_copy();
    fibers::let_others_run();
  }
}

inline bool elected() { return lane() == 0; }
inline u64 read_once_policy() { return 0; }
inline void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  CHECK((u64)from % 16 == 0 && to % 16 == 0 && bytes % 16 == 0 && bytes > 0 && to + bytes <= shared_bytes);
  on_their_way.push_back({to, from, bytes, barrier, false});
}
inline void copy_once(u32 to, const unsigned char* from, u32 bytes, u32 barrier, u64) {
  copy(to, from, bytes, barrier);
  on_their_way.back().is_read_once = true;
  std::set<u32> pieces;
  for (const Copy& each : on_their_way)
    if (each.is_read_once) pieces.insert(each.barrier);
  CHECK(pieces.size() <= most_on_their_way);
}

inline unsigned char* at(u32 address, u32 bytes) {
  CHECK(address + bytes <= shared_bytes);
  return at(address);
}

inline u32 given_a[32][32][4], given_b[32][32][2];
// What each lane of the warp gives, until they meet again.
inline auto given_by_warp(const u32 (&x)[4]) {
  memcpy(given_a[warp_of()][lane()], x, sizeof x);
  __syncwarp();
  return [all = given_a[warp_of()]](int lane) -> const u32* { return all[lane]; };
}
inline void multiply_add_of(float (*value)(u16), float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 warp = warp_of(), lane = ::lane(), b[2] = {b0, b1};
  memcpy(given_a[warp][lane], a, sizeof a);
  memcpy(given_b[warp][lane], b, sizeof b);
  __syncwarp();
  for (int j = 0; j < 4; j++) {
    const int row = lane / 4 + j / 2 * 8, column = lane % 4 * 2 + j % 2;
    for (int k = 0; k < 16; k++) {    // a pair of neighbouring k is a register
      const u32 from_a = given_a[warp][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> k % 2 * 16;
      const u32 from_b = given_b[warp][column * 4 + k % 8 / 2][k / 8] >> k % 2 * 16;
      sums[j] += value((u16)from_a) * value((u16)from_b);
    }
  }
  __syncwarp();
}
inline void multiply_add(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  multiply_add_of(widened, sums, a, b0, b1);
}

inline int num_waiting;
inline void let_next_kernel_start() {}
inline void wait_for_kernel_in_front() { num_waiting++; }

// Memory that ends where it may not be read any more; of a `multiple` of bytes, or a few bytes before.
template <typename T>
inline T* at_the_end(size_t count, size_t multiple = 1) {
  const size_t page = 4096, bytes = (count * sizeof(T) + multiple - 1) / multiple * multiple;
  const size_t pages = (bytes + page - 1) / page * page;
  char* begin = (char*)mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(begin != MAP_FAILED && mprotect(begin + pages, page, PROT_NONE) == 0);
  return (T*)(begin + pages - bytes);
}
