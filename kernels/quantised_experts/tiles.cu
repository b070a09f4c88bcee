// product_experts: y[row, n] = sum over k of x[row, k] * w[expert of the row, n, k], for the pairs of a step's tokens and
// their experts, in the order of experts, and weights w in few bits.
//
// few_bits_tiles.cuh says how values are multiplied as they are stored. The kernels, one after the other:
//
//   lay_rows          the rows of tokens in the order in which the products take them, in eights of an expert's rows
//   product_experts   the first product; with LAYS its activated rows lie in that order, too
//   product_experts   the second one: a row for each pair, where the pair is
//
// An expert's rows fill eights of their own: those of expert e begin at the eight starts[e] / 8 + e, which no other
// expert's reach. What of an eight is no row is never written, and no result is made of it: columns of a product don't
// meet.
//
// What a block does. Units of work are a tile of an expert's weight and up to COLUMNS of its rows, numbered expert by
// expert, those with the same weights one after the other; a block takes every gridDim.x-th, and all k of it. So a row of
// y depends on its row of x and on the weights alone, bit for bit. A multiprocessor has two blocks: while one makes values
// of w, the other's are multiplied. Or it has one, and tiles of more rows: it reads less to make as many products.
//
// Programmatic dependent launch: weights, scales and bias must not be written by a kernel in front. With STARTS_ARE_NEW
// a kernel in front may still write where experts' rows start: the kernel waits for it, and then lets the next one start.
// Without, they were there before this one was let start: its first weights are requested before the one in front ends.
//
// Rows of x are read in 16 bytes, and begin at multiples of that.
//
// Defines, besides those of few_bits_tiles.cuh:
//   SIZE_N=n, SIZE_K=n    columns of y, a multiple of 8, and of x and w; a row of w has a multiple of 16 bytes
//   EXPERTS=n, TOP_K=n    an expert's pairs, from starts[expert] to starts[expert + 1] of `pairs`, are of tokens
//                         pair / TOP_K
//   STARTS_ARE_NEW        as above
//   LAYS=n                y is laid in eights, in rows of n windows; without it y[pair] is a row, WIDE in float32
//   BIAS                  bias[experts, ROWS] is added
//   ACTIVATION=f          y is activated, as expert_activation.cuh says
//   GATED                 w has ROWS = 2 * SIZE_N rows, gates before values; else ROWS is SIZE_N
//   SCALED_ROWS=n         so many rows have the same scales: scales[experts, ROWS / SCALED_ROWS rounded up, groups or 1]
//   WHOLE=n               sums are multiplied with whole[experts, n], float32, n being 1 or ROWS, or DIVIDED by it
//   STAGES=n, X_STAGES=n  of the rings of w and of x
// and of lay_rows
//   SIZE_H=n              columns of the rows that the first product lays

#define X_IN_EIGHTS

#include "half.cuh"
#include "few_bits.cuh"
#include "ring.cuh"
#include "warp_group.cuh"
#include "few_bits_tiles.cuh"
#include "expert_activation.cuh"

#ifdef GATED
constexpr int HALVES = 2;    // rows 0 to 7 of 16 of a tile are gates, rows 8 to 15 their values
#else
constexpr int HALVES = 1;
#endif
constexpr int ROWS = HALVES * SIZE_N;
constexpr int TILE_N = TILE / HALVES;                             // columns of y that a tile makes
constexpr int TILES = (SIZE_N + TILE_N - 1) / TILE_N;             // of an expert
constexpr int SCALE_ROWS = (ROWS + SCALED_ROWS - 1) / SCALED_ROWS;
#ifdef GROUP
constexpr int GROUPS = (SIZE_K + GROUP - 1) / GROUP;
#else
constexpr int GROUPS = 1;
#endif
constexpr int W_BYTES = SIZE_K / 8 * BITS;                        // of a row of w
constexpr int STEPS_OF_K = (W_BYTES + ROW_BYTES - 1) / ROW_BYTES; // stages of a tile
constexpr int LAID_WINDOWS = STEPS_OF_K * WINDOWS;                // of a row of x: what is beyond SIZE_K is 0
constexpr int EIGHT = 8 * WINDOW;                                 // elements of a window of eight rows

#ifdef WIDE
typedef float Result;
#else
typedef Element Result;
#endif

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

// So many of 16 bytes; the others are 0.
__device__ __forceinline__ void copy_some(u32 to, const unsigned char* from, int bytes, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes),
               "l"(policy) : "memory");
}

__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// --- the order of rows -----------------------------------------------------------------------------------------------

// The first eight of an expert whose first row is `start`.
__device__ __forceinline__ int first_eight(int expert, int start) { return start / 8 + expert; }

// Where the element k of row `m` of an eight lies, in windows of eight rows.
__device__ __forceinline__ int place_of(int k, int m) {
  const int own = k % WINDOW;
  const int product = BITS == 4 ? own / 8 % 4 * 2 + own / 2 % 2 : own / 64 * 4 + own / 4 % 4;
  const int half = BITS == 4 ? own % 2 : own / 2 % 2;
  const int thread = BITS == 4 ? own / 32 : own / 16 % 4, element = BITS == 4 ? own / 4 % 2 : own % 2;
  return k / WINDOW * EIGHT + (product * 2 + half) * 64 + m * 8 + thread * 2 + element;
}

struct alignas(16) Eight {
  Element each[8];
};

// x_laid[eights, LAID_WINDOWS, 8 * WINDOW], of tokens' rows; and zeros where h_laid[eights, h_windows, 8 * WINDOW] has
// no columns. A block has an eight, and eight windows of it. A thread takes eight neighbours of a row for each of the
// four threads that will have them, and so has all elements of four halves of products.
extern "C" __global__ void __launch_bounds__(256) lay_rows(
    Element* x_laid, Element* h_laid, const int* starts, const int* pairs, const Element* x, i64 h_windows) {
  __shared__ int found[3];    // the expert, its first row here, and where its rows end
  let_next_kernel_start();
  wait_for_kernel_in_front();
  const int eight = blockIdx.x;
  if (threadIdx.x == 0) found[0] = -1;
  __syncthreads();
  for (int expert = threadIdx.x; expert < EXPERTS; expert += 256) {
    const int start = starts[expert], end = starts[expert + 1], first = first_eight(expert, start);
    if (eight >= first && (eight - first) * 8 < end - start)
      found[0] = expert, found[1] = start + (eight - first) * 8, found[2] = end;
  }
  __syncthreads();
  if (found[0] < 0) return;
  const int m = threadIdx.x % 8, part = threadIdx.x / 8 % 4, row = found[1] + m;
  if (blockIdx.y == 0)
    for (i64 i = (i64)(SIZE_H / WINDOW) * EIGHT / 8 + threadIdx.x; i < h_windows * EIGHT / 8; i += 256)
      ((Eight*)h_laid)[(i64)eight * h_windows * EIGHT / 8 + i] = Eight{};
  const int window = blockIdx.y * 8 + threadIdx.x / 32;
  if (row >= found[2] || window >= LAID_WINDOWS) return;
  const Element* from = x + (i64)(pairs[row] / TOP_K) * SIZE_K;
  Eight taken[4];
#pragma unroll
  for (int t = 0; t < 4; t++) {
    const int k = window * WINDOW + (BITS == 4 ? 32 * t + 8 * part : part / 2 * 64 + 16 * t + part % 2 * 8);
    taken[t] = k < SIZE_K ? *(const Eight*)(from + k) : Eight{};
  }
  // Of its eight neighbours, those that the halves of two products have.
  const auto place = [](int product, int half, int e) {
    return BITS == 4 ? 2 * product + half + 4 * e : 4 * product + 2 * half + e;
  };
  Element* to = x_laid + ((i64)eight * LAID_WINDOWS + window) * EIGHT + m * 8;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    Eight made;
#pragma unroll
    for (int t = 0; t < 4; t++) made.each[2 * t] = taken[t].each[place(i / 2, i % 2, 0)],
                                made.each[2 * t + 1] = taken[t].each[place(i / 2, i % 2, 1)];
    *(Eight*)(to + (part * 4 + i) * 64) = made;
  }
}

// --- who does what ---------------------------------------------------------------------------------------------------

// What lies in front of the rings.
struct alignas(128) Head {
  u64 w_full[MAX_STAGES], w_empty[MAX_STAGES], x_full[MAX_STAGES], x_empty[MAX_STAGES];
  int starts[EXPERTS + 1], first_unit[EXPERTS + 1];
};

// All threads: where experts' rows and units start.
__device__ __forceinline__ void number_units(Head& head, const int* starts) {
  for (int expert = threadIdx.x; expert <= EXPERTS; expert += THREADS) head.starts[expert] = starts[expert];
  __syncthreads();
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) head.first_unit[0] = 0;
    __syncwarp();
    for (int first = 0; first < EXPERTS; first += 32) {
      const int expert = first + threadIdx.x, before = head.first_unit[first];
      const int rows = expert < EXPERTS ? head.starts[expert + 1] - head.starts[expert] : 0;
      int sum = (rows + COLUMNS - 1) / COLUMNS * TILES;
#pragma unroll
      for (int apart = 1; apart < 32; apart *= 2) {
        const int other = __shfl_up_sync(0xffffffff, sum, apart);
        if ((int)threadIdx.x >= apart) sum += other;
      }
      if (expert < EXPERTS) head.first_unit[expert + 1] = before + sum;
      __syncwarp();
    }
  }
  __syncthreads();
}

// A block's units, one after the other.
struct Unit {
  const Head* head;
  int number, expert, tile, row, count;    // `count` rows from `row` on, in the order of experts

  __device__ __forceinline__ Unit(const Head& head) : head(&head), number(blockIdx.x), expert(0) { find(); }

  __device__ __forceinline__ bool is_there() const { return number < head->first_unit[EXPERTS]; }

  __device__ __forceinline__ void advance() {
    number += gridDim.x;
    find();
  }

  __device__ __forceinline__ void find() {
    if (!is_there()) return;
    while (number >= head->first_unit[expert + 1]) expert++;
    const int start = head->starts[expert], end = head->starts[expert + 1], columns = (end - start + COLUMNS - 1) / COLUMNS;
    const int own = number - head->first_unit[expert];
    tile = own / columns;
    row = start + own % columns * COLUMNS;
    count = min(COLUMNS, end - row);
  }

  // Of the row i of the tile: its row in the expert's weight, which may not be there, and its column in y.
  __device__ __forceinline__ int column(int i) const {
    return tile * TILE_N + (HALVES == 2 ? i / 16 * 8 + i % 8 : i);
  }
  __device__ __forceinline__ int weight_row(int i) const { return column(i) + (HALVES == 2 ? i / 8 % 2 * SIZE_N : 0); }

  __device__ __forceinline__ int eight() const {
    return first_eight(expert, head->starts[expert]) + (row - head->starts[expert]) / 8;
  }
};

// COPYING threads: what a unit has besides values is asked for, so that it is in the L2 cache when it is read.
__device__ __forceinline__ void ask_for_scales(const Unit& unit, const Scale* scales, [[maybe_unused]] const Element* bias) {
  constexpr int BYTES = TILE_N * GROUPS * (int)sizeof(Scale) / SCALED_ROWS;
  const int thread = threadIdx.x - MULTIPLYING, row = unit.column(0), present = min(TILE_N, SIZE_N - row);
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    const i64 first = (i64)unit.expert * SCALE_ROWS + (half * SIZE_N + row) / SCALED_ROWS;
    const unsigned char* from = (const unsigned char*)(scales + first * GROUPS);
    const int bytes = present == TILE_N ? BYTES : present * GROUPS * (int)sizeof(Scale) / SCALED_ROWS;
    for (int i = thread * 32; i < bytes; i += COPYING * 32) prefetch(from + i);
#ifdef BIAS
    if (thread < present / 16) prefetch(bias + (i64)unit.expert * ROWS + half * SIZE_N + row + thread * 16);
#endif
  }
}

// COPYING threads: 16 bytes of a row each at a time, a stage's rows one after the other.
__device__ __forceinline__ void produce_weights(
    const unsigned char* weights, const Scale* scales, const Element* bias, const Head& head, const Ring& ring) {
  constexpr int EACH = ROW_BYTES / 16, TOGETHER = COPYING / EACH;
  static_assert(TOGETHER == 8, "rows that are copied together are all gates, or all values");
  const u64 policy = read_once_policy();
  const int thread = threadIdx.x - MULTIPLYING, first = thread / EACH, column = thread % EACH * 16;
  const u32 begin = begin_of(ring) + place_in_stage(first, column);
  Place place = {0, 1};
  for (Unit unit(head); unit.is_there(); unit.advance()) {
    ask_for_scales(unit, scales, bias);
    const int row = unit.column(0) + first, present = SIZE_N - row;
    const unsigned char* from = weights + ((i64)unit.expert * ROWS + row) * W_BYTES + (column < W_BYTES ? column : 0);
    for (int step = 0; step < STEPS_OF_K; step++) {
      const int there = W_BYTES % ROW_BYTES == 0 || step * ROW_BYTES + column < W_BYTES ? 16 : 0;
      const u32 to = begin + place.at * W_STAGE;
      barrier_wait(ring.empty + place.at * 8, place.parity);
#pragma unroll
      for (int i = 0; i < TILE; i += TOGETHER) {
        const int n = HALVES == 2 ? i / 16 * 8 : i;
        if (n < present)
          copy_some(to + i * PITCH, from + (n + (HALVES == 2 ? i / 8 % 2 * (i64)SIZE_N : 0)) * W_BYTES, there, policy);
      }
      arrive_when_copied(ring.full + place.at * 8);
      place.advance(ring.stages);
      if ((step + 1) * ROW_BYTES + column < W_BYTES) from += ROW_BYTES;
    }
  }
}

// One thread: the eights of a unit, window by window.
__device__ __forceinline__ void produce_x(const Element* x, const Head& head, const Ring& ring) {
  Place place = {0, 1};
  for (Unit unit(head); unit.is_there(); unit.advance()) {
    const int eights = (unit.count + 7) / 8;
    const Element* from = x + (i64)unit.eight() * LAID_WINDOWS * EIGHT;
    for (int window = 0; window < LAID_WINDOWS; window++) {
      const u32 barrier = ring.full + place.at * 8, to = ring.begin + place.at * X_STAGE;
      barrier_wait(ring.empty + place.at * 8, place.parity);
      barrier_expect(barrier, eights * EIGHT * 2);
      for (int i = 0; i < eights; i++)
        copy(to + i * EIGHT * 2, from + ((i64)i * LAID_WINDOWS + window) * EIGHT, EIGHT * 2, barrier);
      place.advance(ring.stages);
    }
  }
}

// --- what is made of sums --------------------------------------------------------------------------------------------

// What sums of two rows of the weight, the thread's own and the one 8 below, are multiplied with, and what is added.
struct Finish {
  float times[2], plus[2];

  Finish() = default;
  __device__ __forceinline__ Finish(
      const Unit& unit, int first, [[maybe_unused]] const Scale* scales, [[maybe_unused]] const float* whole,
      [[maybe_unused]] const Element* bias) {
    for (int half = 0; half < 2; half++) {
      const int row = min(unit.weight_row(first + row_of(2 * half)), ROWS - 1);
      [[maybe_unused]] const i64 of_all = (i64)unit.expert * ROWS + row;
      times[half] = 1, plus[half] = 0;
#ifdef FP4
      times[half] = FP4_SUMS;
#endif
#ifndef GROUP
      times[half] *= as_float(scales[(i64)unit.expert * SCALE_ROWS + row / SCALED_ROWS]);
#endif
#ifdef WHOLE
      const float all = whole[WHOLE == 1 ? unit.expert : of_all];
#ifdef DIVIDED
      times[half] /= all;
#else
      times[half] *= all;
#endif
#endif
#ifdef BIAS
      plus[half] = widened(bias[of_all]);
#endif
    }
  }

  __device__ __forceinline__ float operator()(float sum, int half) const { return sum * times[half] + plus[half]; }
};

#ifdef LAYS
// A thread has two neighbouring columns of the product, rows of y, of its row of the weight, a column of y: with the
// thread that has the other element of the same word of a laid row it exchanges one, so that each stores two.
__device__ __forceinline__ void lay_two(Element* y, const Unit& unit, int n, int m, float first, float second) {
  constexpr int PARTNER = BITS == 4 ? 16 : 4;
  const bool is_second = threadIdx.x & PARTNER;
  const float other = __shfl_xor_sync(0xffffffff, is_second ? first : second, PARTNER);
  const u32 pair = is_second ? rounded(other) | (u32)rounded(second) << 16 : rounded(first) | (u32)rounded(other) << 16;
  const int row = m + is_second, column = n - (is_second ? (BITS == 4 ? 4 : 1) : 0);
  if (row < unit.count && column < SIZE_N)
    *(u32*)(y + (i64)(unit.eight() + row / 8) * LAYS * EIGHT + place_of(column, row % 8)) = pair;
}
#endif

// A warp group: 64 rows of each band of a tile.
__device__ __forceinline__ void multiply(
    Result* y, const Head& head, [[maybe_unused]] const int* pairs, const Scale* scales, const float* whole,
    const Element* bias, const Ring& w_ring, const Ring& x_ring) {
  Multiplier multiplier(w_ring, x_ring);
  const auto load = [&](Scales (&made)[BANDS], const Unit& unit, int step) {
#pragma unroll
    for (int band = 0; band < BANDS; band++) {
      ScaledRow rows[2] = {};
#ifdef GROUP
      for (int half = 0; half < 2; half++) {
        const int row = min(unit.weight_row(band * BAND + row_of(2 * half)), ROWS - 1);
        rows[half].scales = scales + ((i64)unit.expert * SCALE_ROWS + row / SCALED_ROWS) * GROUPS;
      }
#endif
      made[band].load(rows, step * WINDOWS * WINDOW, SIZE_K - 1);
    }
  };
  Unit unit(head), after = unit;
  Scales own[BANDS], next[BANDS];
  if (unit.is_there()) load(next, unit, 0);
  for (; unit.is_there(); unit = after) {
    after.advance();
    Finish finish[BANDS];
#pragma unroll
    for (int band = 0; band < BANDS; band++) finish[band] = Finish(unit, band * BAND, scales, whole, bias);
    float sums[ALL_SUMS];
#ifdef STEPS
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0;
#endif
    int adds = 0;
    for (int step = 0; step < STEPS_OF_K; step++) {
#pragma unroll
      for (int band = 0; band < BANDS; band++) own[band] = next[band];
      if (step + 1 < STEPS_OF_K)
        load(next, unit, step + 1);
      else if (after.is_there())
        load(next, after, 0);
      multiplier.add_stage(sums, own, adds);
    }
    multiplier.finish();
#pragma unroll
    for (int band = 0; band < BANDS; band++) {
      const int n = unit.column(band * BAND + row_of(0));
#pragma unroll
      for (int i = band * SUMS; i < (band + 1) * SUMS; i += 4) {
        const int m = column_of(i - band * SUMS);
#ifdef GATED
        const float made[2] = {activated(finish[band](sums[i], 0), finish[band](sums[i + 2], 1)),
                               activated(finish[band](sums[i + 1], 0), finish[band](sums[i + 3], 1))};
#else
        const float made[4] = {activated(finish[band](sums[i], 0), 0), activated(finish[band](sums[i + 1], 0), 0),
                               activated(finish[band](sums[i + 2], 1), 0), activated(finish[band](sums[i + 3], 1), 0)};
#endif
#pragma unroll
        for (int half = 0; half < 2 / HALVES; half++) {
#ifdef LAYS
          lay_two(y, unit, n + 8 * half, m, made[2 * half], made[2 * half + 1]);
#else
#pragma unroll
          for (int j = 0; j < 2; j++)
            if (m + j < unit.count && n + 8 * half < SIZE_N) {
              Result& to = y[(i64)pairs[unit.row + m + j] * SIZE_N + n + 8 * half];
#ifdef WIDE
              to = made[2 * half + j];
#else
              to = rounded(made[2 * half + j]);
#endif
            }
#endif
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE) product_experts(
    Result* y, const Element* x, const unsigned char* weights, const Scale* scales, const float* whole,
    const Element* bias, const int* starts, const int* pairs) {
  extern __shared__ __align__(128) unsigned char memory[];
  Head& head = *(Head*)memory;
  const u32 begin = shared_address(memory) + sizeof(Head);
  const Ring w_ring = {begin, shared_address(head.w_full), shared_address(head.w_empty), STAGES};
  const Ring x_ring = {begin + STAGES * W_STAGE, shared_address(head.x_full), shared_address(head.x_empty), X_STAGES};
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x < MAX_STAGES) {
    const u32 at = threadIdx.x * 8;
    barrier_init(w_ring.full + at, COPYING), barrier_init(w_ring.empty + at, MULTIPLYING / 32);
    barrier_init(x_ring.full + at, 1), barrier_init(x_ring.empty + at, MULTIPLYING / 32);
    barrier_init_fence();
  }
#ifdef STARTS_ARE_NEW
  wait_for_kernel_in_front();
#endif
  let_next_kernel_start();
  number_units(head, starts);
  if (warp >= W_WARP) {
    give_registers<COPYING_REGISTERS>();
    if (warp < X_WARP) {
      produce_weights(weights, scales, bias, head, w_ring);
    } else if (warp == X_WARP) {
      wait_for_kernel_in_front();
      if (threadIdx.x % 32 == 0) produce_x(x, head, x_ring);
    }
  } else {
    take_registers<MULTIPLYING_REGISTERS>();
    wait_for_kernel_in_front();
    multiply(y, head, pairs, scales, whole, bias, w_ring, x_ring);
  }
}
