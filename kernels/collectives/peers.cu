// All-reduce over GPUs that write each other's memory: out = sum over ranks of x, added in the order of ranks in
// float32 and rounded once, so that all ranks get the same bits.
//
// No flags, no barriers. A place that waits for data holds a word that no data has (EMPTY); whoever waits reads until
// all words of a vector are others, and makes them EMPTY again. Each word that arrives says so itself, so nothing has
// to be ordered, and one trip over the link is the whole latency.
//
// A rank's memory has two halves, which calls use in turn: by a counter in memory, one for each block, so that a CUDA
// graph may be replayed as often as one likes. Two are enough. A rank writes to a half again two calls later, and when
// it does, its call in between has ended, so it had data from every rank's call in between, which began after that
// rank had read and emptied the half. Every call has the same grid: each block counts all calls.
//
// one_shot: each rank writes its x to all others; each adds up all. RANKS slots of `capacity` vectors a half.
// two_shot: each rank adds up one part of RANKS, and writes the sums to all others. 2 * RANKS slots a half, of parts.
//
// Defines:
//   RANK, RANKS    this rank, and how many there are: 2 to 8
//   FLOAT16, FLOAT32   elements are float16, float32; else bfloat16
//   DEPTH          vectors that a thread writes ahead of the one that it waits for
//
// `calls` has a counter for each block, and one word more: not 0, it ends whoever waits.
// x and out are aligned to 16 bytes, and may be the same; they have `count` vectors of 16 bytes. -0.0 may become 0.0.

typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(16) Vector { u32 word[4]; };

constexpr u32 EMPTY = 0x80000000u;    // -0.0, or the 16-bit numbers 0.0 and -0.0
constexpr int POLLS = 4096;           // after which the time is looked at

#ifndef DEPTH
#define DEPTH 2
#endif

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

// Words may arrive one by one, and are seen in any order.
__device__ __forceinline__ Vector seen(const Vector* at) {
  Vector found;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.word[0]), "=r"(found.word[1]), "=r"(found.word[2]), "=r"(found.word[3])
               : "l"(at) : "memory");
  return found;
}

__device__ __forceinline__ void put(Vector* at, Vector value) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(at), "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3]) : "memory");
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ void fail() { asm volatile("trap;"); }

#ifdef FLOAT32
constexpr int PARTS = 1;              // numbers in a word
__device__ __forceinline__ float part(u32 word, int) { return __uint_as_float(word); }
__device__ __forceinline__ u32 rounded(const float* value) { return __float_as_uint(value[0]); }
#elif defined(FLOAT16)
constexpr int PARTS = 2;
__device__ __forceinline__ float part(u32 word, int i) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)(i ? word >> 16 : word)));
  return value;
}
__device__ __forceinline__ u32 rounded(const float* value) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(value[1]), "f"(value[0]));
  return word;
}
#else
constexpr int PARTS = 2;
__device__ __forceinline__ float part(u32 word, int i) { return __uint_as_float(i ? word & 0xffff0000u : word << 16); }
__device__ __forceinline__ u32 rounded(const float* value) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(value[1]), "f"(value[0]));
  return word;
}
#endif

// --- words -----------------------------------------------------------------------------------------------------------

// What stands for the vector on the way: a word that would say EMPTY is 0.0.
__device__ __forceinline__ Vector sent(Vector value) {
#pragma unroll
  for (int i = 0; i < 4; i++) value.word[i] = value.word[i] == EMPTY ? 0 : value.word[i];
  return value;
}

__device__ __forceinline__ bool has_arrived(const Vector& value) {
  return value.word[0] != EMPTY && value.word[1] != EMPTY && value.word[2] != EMPTY && value.word[3] != EMPTY;
}

// How long to wait: `limit` ns, and no longer where `stop` is not 0. The kernel ends with an error then.
struct Patience { const volatile u32* stop; u64 limit; };

// What arrives at a place of this rank, which is EMPTY afterwards.
__device__ __forceinline__ Vector taken(Vector* at, Patience patience) {
  Vector found = seen(at);
  u64 began = 0;
  for (u32 polls = 1; !has_arrived(found); polls++) {
    if (polls % POLLS == 0) {
      if (began == 0) began = nanoseconds();
      if (*patience.stop || nanoseconds() - began > patience.limit) fail();
    }
    found = seen(at);
  }
  put(at, Vector{{EMPTY, EMPTY, EMPTY, EMPTY}});
  return found;
}

// The sum of what all ranks have of a vector: `own`, and what arrives at slots of `stride` vectors.
__device__ __forceinline__ Vector total(Vector own, Vector* slots, u32 stride, Patience patience) {
  float sum[4][PARTS];
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++) {
    const Vector value = rank == RANK ? own : taken(slots + (u64)rank * stride, patience);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < PARTS; j++) sum[i][j] = part(value.word[i], j) + (rank == 0 ? 0.0f : sum[i][j]);
  }
  Vector result;
#pragma unroll
  for (int i = 0; i < 4; i++) result.word[i] = rounded(sum[i]);
  return result;
}

#define PEERS Vector *p0, Vector *p1, Vector *p2, Vector *p3, Vector *p4, Vector *p5, Vector *p6, Vector *p7
#define LISTED {p0, p1, p2, p3, p4, p5, p6, p7}

// --- the kernels -----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(512) one_shot(
    const Vector* x, Vector* out, u32 count, u32* calls, u32 capacity, u64 limit, PEERS) {
  Vector* const peers[8] = LISTED;
  const Patience patience = {calls + gridDim.x, limit};
  const u32 call = calls[blockIdx.x], step = gridDim.x * blockDim.x;
  const u64 half = (u64)(call & 1) * RANKS * capacity;
  Vector* const arriving = peers[RANK] + half;
  u32 ahead = blockIdx.x * blockDim.x + threadIdx.x, next = ahead;

  const auto push = [&] {
    if (ahead >= count) return;
    const Vector value = sent(x[ahead]);
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++)
      if (rank != RANK) put(peers[rank] + half + (u64)RANK * capacity + ahead, value);
    ahead += step;
  };
#pragma unroll
  for (int i = 0; i < DEPTH; i++) push();
  for (; next < count; next += step) {
    push();
    out[next] = total(sent(x[next]), arriving + next, capacity, patience);
  }
  __syncthreads();
  if (threadIdx.x == 0) calls[blockIdx.x] = call + 1;
}

extern "C" __global__ void __launch_bounds__(512) two_shot(
    const Vector* x, Vector* out, u32 count, u32* calls, u32 capacity, u64 limit, PEERS) {
  Vector* const peers[8] = LISTED;
  const Patience patience = {calls + gridDim.x, limit};
  const u32 call = calls[blockIdx.x], step = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
  const u64 half = (u64)(call & 1) * 2 * RANKS * capacity, sums = half + (u64)RANKS * capacity;
  const u32 size = (count + RANKS - 1) / RANKS;    // of a part; the last ones may be shorter, or empty

  for (u32 at = first; at < size; at += step) {
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++)
      if (rank != RANK && rank * size + at < count)
        put(peers[rank] + half + (u64)RANK * capacity + at, sent(x[rank * size + at]));
  }
  for (u32 at = first; at < size && RANK * size + at < count; at += step) {
    const Vector value = sent(total(sent(x[RANK * size + at]), peers[RANK] + half + at, capacity, patience));
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++)
      if (rank != RANK) put(peers[rank] + sums + (u64)RANK * capacity + at, value);
    out[RANK * size + at] = value;
  }
  for (u32 at = first; at < size; at += step) {
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++)
      if (rank != RANK && rank * size + at < count)
        out[rank * size + at] = taken(peers[RANK] + sums + (u64)rank * capacity + at, patience);
  }
  __syncthreads();
  if (threadIdx.x == 0) calls[blockIdx.x] = call + 1;
}
