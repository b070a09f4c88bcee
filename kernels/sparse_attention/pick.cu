// pick_keys: of each row's scores the places of the COUNT largest, in ascending order, without a sort.
//
// A cluster of CTAs takes a row. Each of them has a part of its scores, in order, in shared memory if there is room.
// They count together how many scores are in each of BINS bins, and go on with those of the bin that has the COUNT-th
// largest, until all of that bin are wanted, or it is a single number:
//
//   first     bins of equal width between the least and the largest score: few scores are in the same one
//   then      bins of equally many integers (`in_order`), which end after four rounds, whatever the scores are
//
// Then each warp counts what it has above that bin and in it, and writes its places behind those of the warps before.
// So what is selected says nothing of how it was found: of equal scores it is the first ones.
//
// Programmatic dependent launch: the kernel lets the next one start at once, and reads the lists of the step before it
// waits for the kernel in front.
//
// Defines, beside those of rows.cuh:
//   CLUSTER, WARPS    CTAs of a cluster, and warps of a CTA, of which each thread has a bin
//   NEAR              scores that a CTA has in shared memory; it reads more of them again and again

#include "half.cuh"
#include "sparse_attention/rows.cuh"

constexpr int THREADS = 32 * WARPS, BINS = THREADS;
constexpr int LEAST = -0x7fffffff - 1, MOST = 0x7fffffff;

extern __shared__ __align__(16) unsigned char memory[];

// Where things are in it, in bytes.
constexpr u32 COUNTS = 0;                           // of bins: two of them, of this round and of the one before
constexpr u32 OF_WARPS = COUNTS + 2 * BINS * 4;     // two numbers of each warp
constexpr u32 OF_CTA = OF_WARPS + WARPS * 8;        // two numbers that other CTAs read; and two more
constexpr u32 FOUND = OF_CTA + 16;                  // three numbers
constexpr u32 SCORES = FOUND + 16;

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

// Places in shared memory count from its first byte.
__device__ __forceinline__ int load_near(u32 from) {
  int x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared_address(memory) + from) : "memory");
  return x;
}

__device__ __forceinline__ void store_near(u32 to, int x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(memory) + to), "r"(x) : "memory");
}

__device__ __forceinline__ void count_near(u32 at) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(shared_address(memory) + at) : "memory");
}

// Of a CTA of the cluster.
__device__ __forceinline__ int load_far(u32 from, u32 rank) {
  int x;
  asm volatile("{ .reg .u32 far; mapa.shared::cluster.u32 far, %1, %2; ld.shared::cluster.u32 %0, [far]; }"
               : "=r"(x) : "r"(shared_address(memory) + from), "r"(rank) : "memory");
  return x;
}

// What a thread wrote before it arrives, others read after they have waited.
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// --- bins ------------------------------------------------------------------------------------------------------------

// Bins of the scores from `low` to `high`. By value, bin i begins about where (value - origin) * factor is i; else at
// the integer low + i * 2^shift.
struct Bins {
  int low, high;
  bool are_by_value;
  float origin, factor;
  int shift;
};

__device__ __forceinline__ Bins bins_of(int low, int high, bool may_be_by_value) {
  Bins bins = {low, high, false, value_of(low), 0, 0};
  const u32 width = (u32)high - (u32)low;
  bins.shift = max(0, 32 - __clz(width) - (31 - __clz(BINS)));
  bins.factor = (BINS - 1) / (value_of(high) - bins.origin);
  // Neither is there for an infinity, a NaN or equal scores; with a factor so small all would be in one bin.
  bins.are_by_value = may_be_by_value && bins.factor > 1e-30f && bins.factor < 1e30f;
  return bins;
}

// Ascends with the score, which is one from low to high.
__device__ __forceinline__ int bin_of(int score, const Bins& bins) {
  if (bins.are_by_value) return min((int)((value_of(score) - bins.origin) * bins.factor), BINS - 1);
  return ((u32)score - (u32)bins.low) >> bins.shift;
}

// The least score of this bin or of one above; high + 1 (as an unsigned number) if there is none. All lanes of a warp
// look for it: each time at 32 numbers, between two of which it is then.
__device__ __forceinline__ u32 least_of(int bin, const Bins& bins) {
  const u32 width = (u32)bins.high - (u32)bins.low;
  u32 base = 0;
#pragma unroll
  for (int bit = 27; bit >= 0; bit = bit > 5 || bit == 0 ? bit - 5 : 0) {
    const u64 own = base + ((u64)(threadIdx.x % 32) << bit);
    const bool is_below = own <= width && bin_of((int)((u32)bins.low + (u32)own), bins) < bin;
    const int below = __popc(__ballot_sync(0xffffffff, is_below));
    if (below > 0) base += ((below - 1) << bit) + 1;
  }
  return (u32)bins.low + base;
}

// The bins of what is in this bin.
__device__ __forceinline__ Bins within(int bin, const Bins& bins) {
  if (bins.are_by_value) return bins_of((int)least_of(bin, bins), (int)(least_of(bin + 1, bins) - 1), false);
  const u32 low = (u32)bins.low + ((u32)bin << bins.shift);
  const u32 left = min((u32)bins.high - low, (1u << bins.shift) - 1);
  return bins_of((int)low, (int)(low + left), false);
}

// --- what threads tell each other ------------------------------------------------------------------------------------

template <typename Of>
__device__ __forceinline__ int over_warp(int own, Of of) {
#pragma unroll
  for (int far = 16; far > 0; far /= 2) own = of(own, __shfl_xor_sync(0xffffffff, own, far));
  return own;
}

__device__ __forceinline__ int sum_of(int a, int b) { return a + b; }
__device__ __forceinline__ int least_of_two(int a, int b) { return min(a, b); }
__device__ __forceinline__ int most_of_two(int a, int b) { return max(a, b); }

// Two numbers of each warp, which it has in all lanes: put together over the CTA, they are OF_CTA.
template <typename First, typename Second>
__device__ __forceinline__ void tell(int first, int second, int no_first, int no_second, First of, Second and_of) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane < 2) store_near(OF_WARPS + warp * 8 + lane * 4, lane ? second : first);
  __syncthreads();
  if (warp > 0) return;
  first = over_warp(lane < WARPS ? load_near(OF_WARPS + lane * 8) : no_first, of);
  second = over_warp(lane < WARPS ? load_near(OF_WARPS + lane * 8 + 4) : no_second, and_of);
  if (lane < 2) store_near(OF_CTA + lane * 4, lane ? second : first);
}

__device__ __forceinline__ void meet_cluster() {
  arrive_at_cluster();
  wait_for_cluster();
}

// --- a row -----------------------------------------------------------------------------------------------------------

// What one CTA has of a row.
struct Part {
  const int* scores;    // of the row
  int first, count;
  bool are_near;
};

__device__ __forceinline__ int score_of(const Part& part, int i) {
  return part.are_near ? load_near(SCORES + 4 * i) : part.scores[part.first + i];
}

// Writes the number of keys that are seen, or -1: all are selected.
__device__ __forceinline__ void write_all(int* to, const Row& row, int rank) {
  for (int i = rank * THREADS + threadIdx.x; i < COUNT; i += CLUSTER * THREADS)
    to[i] = i < row.num_keys ? row.kept + i : -1;
}

// Brings the part near, and gives the least and the largest score of all parts.
__device__ __forceinline__ void load_part(const Part& part, int& low, int& high) {
  low = MOST;
  high = LEAST;
#pragma unroll 8
  for (int i = threadIdx.x; i < part.count; i += THREADS) {
    const int score = part.scores[part.first + i];
    if (part.are_near) store_near(SCORES + 4 * i, score);
    low = min(low, score);
    high = max(high, score);
  }
  tell(over_warp(low, least_of_two), over_warp(high, most_of_two), MOST, LEAST, least_of_two, most_of_two);
  meet_cluster();
  const int lane = threadIdx.x % 32;
  low = over_warp(lane < CLUSTER ? load_far(OF_CTA, lane) : MOST, least_of_two);
  high = over_warp(lane < CLUSTER ? load_far(OF_CTA + 4, lane) : LEAST, most_of_two);
}

// Scores above `high` are selected, and the first `wanted` of those from `low` to `high`.
struct Bound {
  int low, high, wanted;
};

__device__ __forceinline__ Bound bound_of(const Part& part, int low, int high) {
  Bins bins = bins_of(low, high, true);
  int above = 0;
#pragma unroll 1
  for (int round = 0;; round++) {
    const u32 counts = COUNTS + round % 2 * BINS * 4;
    store_near(counts + threadIdx.x * 4, 0);
    __syncthreads();
#pragma unroll 8
    for (int i = threadIdx.x; i < part.count; i += THREADS) {
      const int score = score_of(part, i);
      if (score >= bins.low && score <= bins.high) count_near(counts + bin_of(score, bins) * 4);
    }
    meet_cluster();
    int own = 0;    // scores in the thread's bin
#pragma unroll
    for (int rank = 0; rank < CLUSTER; rank++) own += load_far(counts + threadIdx.x * 4, rank);
    // And in those above it: of its warp, then of the warps behind.
    int more = own;
#pragma unroll
    for (int far = 1; far < 32; far *= 2) {
      const int other = __shfl_down_sync(0xffffffff, more, far);
      if (threadIdx.x % 32 + far < 32) more += other;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) store_near(OF_WARPS + warp * 8, more);
    __syncthreads();
    more += over_warp(lane > warp && lane < WARPS ? load_near(OF_WARPS + lane * 8) : 0, sum_of) + above - own;
    if (more < COUNT && more + own >= COUNT) {
      store_near(FOUND, threadIdx.x);
      store_near(FOUND + 4, more);
      store_near(FOUND + 8, own);
    }
    __syncthreads();
    above = load_near(FOUND + 4);
    const int in_bin = load_near(FOUND + 8);
    bins = within(load_near(FOUND), bins);
    if (bins.low == bins.high || above + in_bin == COUNT) return {bins.low, bins.high, COUNT - above};
  }
}

// Each warp has a part of the CTA's part.
__device__ __forceinline__ void write_places(int* to, const Row& row, const Part& part, const Bound& bound, u32 rank) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int each = (part.count + THREADS - 1) / THREADS * 32;
  const int first = warp * each, end = min(part.count, first + each);
  int above = 0, equal = 0;
#pragma unroll 4
  for (int i = first + lane; i < end; i += 32) {
    const int score = score_of(part, i);
    above += score > bound.high;
    equal += score >= bound.low && score <= bound.high;
  }
  tell(over_warp(above, sum_of), over_warp(equal, sum_of), 0, 0, sum_of, sum_of);
  meet_cluster();
  const bool is_before = lane < rank, is_warp_before = lane < warp;    // other CTAs, and warps of this one
  above = (is_before ? load_far(OF_CTA, lane) : 0) + (is_warp_before ? load_near(OF_WARPS + lane * 8) : 0);
  equal = (is_before ? load_far(OF_CTA + 4, lane) : 0) + (is_warp_before ? load_near(OF_WARPS + lane * 8 + 4) : 0);
  arrive_at_cluster();    // has read all of theirs
  above = over_warp(above, sum_of);
  equal = over_warp(equal, sum_of);
  const u32 before = (1u << lane) - 1;
  for (int start = first; start < end; start += 32) {
    const int i = start + lane, score = i < end ? score_of(part, i) : LEAST;
    const bool is_above = i < end && score > bound.high;
    const bool is_equal = i < end && score >= bound.low && score <= bound.high;
    const u32 all_above = __ballot_sync(0xffffffff, is_above), all_equal = __ballot_sync(0xffffffff, is_equal);
    const int own_equal = equal + __popc(all_equal & before);
    const int place = above + __popc(all_above & before) + min(bound.wanted, own_equal);
    if (is_above || (is_equal && own_equal < bound.wanted)) to[place] = row.kept + part.first + i;
    above += __popc(all_above);
    equal += __popc(all_equal);
  }
  wait_for_cluster();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 2048 / THREADS) pick_keys(
    int* out, const int* scores, const int* cu_seqlens, const int* kv_lens, const int* page_indptr,
    const int* page_start, i64 num_rows, i64 num_seqs, i64 num_slots) {
  let_next_kernel_start();
  const Lists lists = {cu_seqlens, kv_lens, nullptr, page_indptr, page_start, (int)num_seqs, (int)num_rows, num_slots};
  const Row row = row_of(blockIdx.y, lists);
  wait_for_kernel_in_front();
  if (row.num_keys < 0) return;
  int* to = out + (i64)row.token * COUNT;
  const u32 rank = blockIdx.x;
  if (row.num_keys <= COUNT) {
    write_all(to, row, rank);
    return;
  }
  const int each = (row.num_keys + CLUSTER - 1) / CLUSTER, first = min((int)rank * each, row.num_keys);
  const int count = min(each, row.num_keys - first);
  const Part part = {scores + place_of(row, lists), first, count, count <= NEAR};
  int low, high;
  load_part(part, low, high);
  write_places(to, row, part, bound_of(part, low, high), rank);
}
