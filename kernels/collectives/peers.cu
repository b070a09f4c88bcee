// All-reduce over GPUs that write each other's memory: out = sum over ranks of x, added in the order of ranks in
// float32 and rounded once, so that all ranks get the same bits. And the same with what stands after it in a layer, the
// sum with the residual stream and its norm.
//
// No flags, no barriers. A place that waits for data holds a word that no data has (EMPTY); whoever waits reads until
// all words of a vector are others, and makes them EMPTY again. Each word that arrives says so itself, so nothing has
// to be ordered, and one trip over the link is the whole latency.
//
// A rank's memory has two halves, which calls use in turn: by a counter in memory, so that a CUDA graph may be replayed
// as often as one likes. Two are enough. A rank writes to a half again two calls later, and when it does, its call in
// between has ended, so it had data from every rank's call in between, which began after that rank had read and emptied
// the half. All kernels here share the memory and the counter.
//
// one_shot: each rank writes its x to all others; each adds up all. RANKS slots a half.
// two_shot: each rank adds up one part of RANKS, and writes the sums to all others. 2 * RANKS slots a half, of parts; it
//           takes at least RANKS vectors, or rows: each rank waits for each other then.
// norm_one_shot, norm_two_shot: s = residual + the sum, rounded after each; y = s / root mean square(s) * weight. A
//           block has a row at a time.
//
// Programmatic dependent launch: the kernel lets the next one start at once, whose weights can then be on their way
// while this one waits for the other ranks, and waits for the one in front before it reads or writes anything.
//
// Defines:
//   RANK, RANKS    this rank, and how many there are: 2 to 8
//   FLOAT16, FLOAT32   elements are float16, float32; else bfloat16
//   DEPTH          vectors of a thread, or rows of a block, that are written ahead of the one that is waited for
//   WIDTH          vectors of a row, of the norm; it has at most 4 for each of THREADS threads
//   EPS, OFFSET    are added to the mean of squares, and to the weight
//   CAST_BEFORE_SCALE   what is normed is rounded before it is multiplied by the weight
//
// `calls` has the counter, and one word more: not 0, vectors are polled a few times and no longer, and what is computed
// then is worthless: the host, which has set it, throws it away. `half` is the vectors of a half.
// x and out are aligned to 16 bytes, and may be the same; they have `count` vectors of 16 bytes. -0.0 may become 0.0.

typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(16) Vector { u32 word[4]; };

constexpr u32 EMPTY = 0x80000000u;    // -0.0, or the 16-bit numbers 0.0 and -0.0
constexpr int POLLS = 256;            // of a vector, between two looks at `stop` and at the time

constexpr u32 TURN = 1 << 16;         // what a call adds to the counter: more than it has blocks

#ifndef DEPTH
#define DEPTH 2
#endif
#ifndef WIDTH
#define WIDTH 512
#define EPS 1e-5
#define OFFSET 0
#endif
#ifndef THREADS
#define THREADS 512
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

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ u32 counted(const u32* counter) {
  u32 found;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  return found;
}

__device__ __forceinline__ void count_more(u32* counter, u32 more) { atomicAdd(counter, more); }

__device__ __forceinline__ float inverse_root(float value) { return rsqrtf(value); }

// The sum over all threads of the block, in one order. `turn` is another one in each call.
__device__ __forceinline__ float block_sum(float value, u32 turn) {
  __shared__ float parts[2][32];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  if (threadIdx.x % 32 == 0) parts[turn & 1][threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; warp++) sum += parts[turn & 1][warp];
  return sum;
}

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

// How long to wait: `limit` ns, after which the kernel ends with an error; and no longer where `stop` is not 0.
struct Patience { const volatile u32* stop; u64 limit; };

// What arrives at a place of this rank, which is EMPTY afterwards.
__device__ __forceinline__ Vector taken(Vector* at, Patience patience) {
  Vector found = seen(at);
  u64 began = 0;
  for (u32 polls = 1; !has_arrived(found); polls++) {
    if (polls % POLLS == 0) {
      if (began == 0) began = nanoseconds();
      if (*patience.stop) return found;
      if (nanoseconds() - began > patience.limit) fail();
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

// The number of this call. No block has counted it twice, and not all have: the counter is still below the next TURN.
__device__ __forceinline__ u32 begun(const u32* calls) { return counted(calls) / TURN; }

__device__ __forceinline__ void ended(u32* calls) {
  __syncthreads();
  if (threadIdx.x == 0) count_more(calls, blockIdx.x == 0 ? TURN - (gridDim.x - 1) : 1);
}

extern "C" __global__ void __launch_bounds__(THREADS) one_shot(
    const Vector* x, Vector* out, u32 count, u32* calls, u64 half, u64 limit, PEERS) {
  wait_for_previous();
  Vector* const peers[8] = LISTED;
  const Patience patience = {calls + 1, limit};
  const u32 call = begun(calls), step = gridDim.x * blockDim.x, slot = half / RANKS;
  const u64 base = (call & 1) * half;
  u32 ahead = blockIdx.x * blockDim.x + threadIdx.x, next = ahead;

  const auto push = [&] {
    if (ahead >= count) return;
    const Vector value = sent(x[ahead]);
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++)
      if (rank != RANK) put(peers[rank] + base + (u64)RANK * slot + ahead, value);
    ahead += step;
  };
#pragma unroll
  for (int i = 0; i < DEPTH; i++) push();
  for (; next < count; next += step) {
    push();
    out[next] = total(sent(x[next]), peers[RANK] + base + next, slot, patience);
  }
  ended(calls);
}

extern "C" __global__ void __launch_bounds__(THREADS) two_shot(
    const Vector* x, Vector* out, u32 count, u32* calls, u64 half, u64 limit, PEERS) {
  wait_for_previous();
  Vector* const peers[8] = LISTED;
  const Patience patience = {calls + 1, limit};
  const u32 call = begun(calls), step = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 slot = half / (2 * RANKS);
  const u64 base = (call & 1) * half, sums = base + (u64)RANKS * slot;
  // The parts differ by one vector at most, so that none is empty.
  const auto start = [&](u32 rank) { return (u32)((u64)count * rank / RANKS); };

#pragma unroll
  for (int rank = 0; rank < RANKS; rank++)
    if (rank != RANK)
      for (u32 at = start(rank) + first; at < start(rank + 1); at += step)
        put(peers[rank] + base + (u64)RANK * slot + (at - start(rank)), sent(x[at]));
  for (u32 at = start(RANK) + first; at < start(RANK + 1); at += step) {
    const Vector value = sent(total(sent(x[at]), peers[RANK] + base + (at - start(RANK)), slot, patience));
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++)
      if (rank != RANK) put(peers[rank] + sums + (u64)RANK * slot + (at - start(RANK)), value);
    out[at] = value;
  }
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++)
    if (rank != RANK)
      for (u32 at = start(rank) + first; at < start(rank + 1); at += step)
        out[at] = taken(peers[RANK] + sums + (u64)rank * slot + (at - start(rank)), patience);
  ended(calls);
}

// --- with the residual stream and the norm ---------------------------------------------------------------------------

constexpr int HELD = (WIDTH + THREADS - 1) / THREADS;    // vectors of a row that a thread has
struct Row { Vector part[HELD]; };

// This thread's vectors of a row, which `of` gives by their places in it.
template <typename Of> __device__ __forceinline__ Row row_of(Of of) {
  Row row = {};
#pragma unroll
  for (int i = 0; i < HELD; i++)
    if (threadIdx.x + i * THREADS < WIDTH) row.part[i] = of(threadIdx.x + i * THREADS);
  return row;
}

template <typename To> __device__ __forceinline__ void put_row(const Row& row, To to) {
#pragma unroll
  for (int i = 0; i < HELD; i++)
    if (threadIdx.x + i * THREADS < WIDTH) to(threadIdx.x + i * THREADS, row.part[i]);
}

// `rounded` of one number for each of a word.
template <typename Number> __device__ __forceinline__ u32 word_of(Number number) {
  float value[PARTS];
#pragma unroll
  for (int j = 0; j < PARTS; j++) value[j] = number(j);
  return rounded(value);
}

__device__ __forceinline__ Vector added(const Vector& a, const Vector& b) {
  Vector sum;
#pragma unroll
  for (int i = 0; i < 4; i++) sum.word[i] = word_of([&](int j) { return part(a.word[i], j) + part(b.word[i], j); });
  return sum;
}

__device__ __forceinline__ Vector normed(const Vector& value, const Vector& weight, float scale) {
  Vector result;
#pragma unroll
  for (int i = 0; i < 4; i++) {
#ifdef CAST_BEFORE_SCALE
    const u32 first = word_of([&](int j) { return part(value.word[i], j) * scale; });
    const u32 by = OFFSET == 0 ? weight.word[i] : word_of([&](int j) { return part(weight.word[i], j) + (float)OFFSET; });
    result.word[i] = word_of([&](int j) { return part(by, j) * part(first, j); });
#else
    result.word[i] = word_of(
        [&](int j) { return (part(weight.word[i], j) + (float)OFFSET) * (part(value.word[i], j) * scale); });
#endif
  }
  return result;
}

// Writes s and y of a row, whose sum over ranks is given.
__device__ __forceinline__ void finish(
    const Row& sum, const Row& residual, const Row& weight, Vector* y, Vector* s, u32 turn) {
  Row stream;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    stream.part[i] = added(residual.part[i], sum.part[i]);
#pragma unroll
    for (int k = 0; k < 4 * PARTS; k++) {
      const float value = part(stream.part[i].word[k / PARTS], k % PARTS);
      squares += value * value;
    }
  }
  put_row(stream, [&](u32 at, Vector value) { s[at] = value; });
  const float mean = block_sum(squares, turn) / (WIDTH * 4 * PARTS);
  const float scale = inverse_root(mean + (float)EPS);
#pragma unroll
  for (int i = 0; i < HELD; i++) stream.part[i] = normed(stream.part[i], weight.part[i], scale);
  put_row(stream, [&](u32 at, Vector value) { y[at] = value; });
}

extern "C" __global__ void __launch_bounds__(THREADS) norm_one_shot(
    const Vector* x, Vector* y, Vector* s, const Vector* residual, const Vector* weight, u32 rows, u32* calls, u64 half,
    u64 limit, PEERS) {
  wait_for_previous();
  Vector* const peers[8] = LISTED;
  const Patience patience = {calls + 1, limit};
  const u32 call = begun(calls), slot = half / RANKS;
  const u64 base = (call & 1) * half;
  u32 ahead = blockIdx.x, turn = 0;

  const auto push = [&] {
    if (ahead >= rows) return;
    const u64 first = (u64)ahead * WIDTH;
    put_row(row_of([&](u32 at) { return sent(x[first + at]); }), [&](u32 at, Vector value) {
#pragma unroll
      for (int rank = 0; rank < RANKS; rank++)
        if (rank != RANK) put(peers[rank] + base + (u64)RANK * slot + first + at, value);
    });
    ahead += gridDim.x;
  };
#pragma unroll
  for (int i = 0; i < DEPTH; i++) push();
  const Row scale = row_of([&](u32 at) { return weight[at]; });
  for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
    push();
    const u64 first = (u64)row * WIDTH;
    const Row stream = row_of([&](u32 at) { return residual[first + at]; });
    const Row own = row_of([&](u32 at) { return sent(x[first + at]); });
    Row sum = {};
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (threadIdx.x + i * THREADS < WIDTH)
        sum.part[i] = total(own.part[i], peers[RANK] + base + first + threadIdx.x + i * THREADS, slot, patience);
    finish(sum, stream, scale, y + first, s + first, turn++);
  }
  ended(calls);
}

// Row r is added up by rank r % RANKS.
extern "C" __global__ void __launch_bounds__(THREADS) norm_two_shot(
    const Vector* x, Vector* y, Vector* s, const Vector* residual, const Vector* weight, u32 rows, u32* calls, u64 half,
    u64 limit, PEERS) {
  wait_for_previous();
  Vector* const peers[8] = LISTED;
  const Patience patience = {calls + 1, limit};
  const u32 call = begun(calls), slot = half / (2 * RANKS);
  const u64 base = (call & 1) * half, sums = base + (u64)RANKS * slot;
  u32 turn = 0;

  for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
    const u64 first = (u64)row * WIDTH, place = (u64)(row / RANKS) * WIDTH;
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++)
      if (rank != RANK && row % RANKS == rank)
        put_row(row_of([&](u32 at) { return sent(x[first + at]); }), [&](u32 at, Vector value) {
          put(peers[rank] + base + (u64)RANK * slot + place + at, value);
        });
  }
  const Row scale = row_of([&](u32 at) { return weight[at]; });
#pragma unroll
  for (int own = 1; own >= 0; own--)    // first what others wait for
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
      const u32 owner = row % RANKS;
      if ((owner == RANK) != own) continue;
      const u64 first = (u64)row * WIDTH, place = (u64)(row / RANKS) * WIDTH;
      const Row stream = row_of([&](u32 at) { return residual[first + at]; });
      const Row sum = row_of([&](u32 at) {
        if (!own) return taken(peers[RANK] + sums + (u64)owner * slot + place + at, patience);
        const Vector value = sent(total(sent(x[first + at]), peers[RANK] + base + place + at, slot, patience));
#pragma unroll
        for (int rank = 0; rank < RANKS; rank++)
          if (rank != RANK) put(peers[rank] + sums + (u64)RANK * slot + place + at, value);
        return value;
      });
      finish(sum, stream, scale, y + first, s + first, turn++);
    }
  ended(calls);
}
