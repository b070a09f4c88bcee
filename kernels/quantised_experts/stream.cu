// stream_experts: y[pair, n] = sum over k of x[pair, k] * w[expert of the pair, n, k], for pairs of few tokens and their
// experts, as fast as memory gives the weights of the experts that have any.
//
// The weights lie as a checkpoint has them, w[experts, ROWS, SIZE_K] in four bits. Each CTA puts the pairs into the order
// of experts, of which up to COLUMNS of an expert are an item, and 16 rows of its weight a tile; and the CTAs, one to an
// SM, share the tiles of all items out in runs. In a CTA
//
//   - one thread copies rows into a ring in shared memory, far ahead of those who read it, of which no more are on
//     their way than keep memory busy;
//   - sixteen warps multiply: mma.m16n8k16 with the weights as its 16 rows and rows of x of the item as its 8 columns.
//     They take turns at runs of STEP k, so that each has its part of x in registers, as long as the item is the same.
//     Weights become operands in registers: the same k of w and x meet, in whatever order;
//   - two warps add up the sixteen sums of each tile, in one order, and write what is made of them.
//
// So a row of y depends on its row of x and the weights alone, bit for bit: not on other pairs, nor on their number.
//
// Programmatic dependent launch: weights must not be written by a kernel in front. With IDS_ARE_NEW the kernel in front
// may have written the ids: the kernel waits for it, and then lets the next one start. Without, the ids were there
// before the kernel in front let this one start. So its first weights are requested before that has ended, and it waits
// where it reads x, or writes y.
//
// Defines:
//   SIZE_N=n         columns of y, a multiple of 8
//   SIZE_K=n         columns of w and x
//   EXPERTS=n, TOP_K=n
//   IDS_ARE_NEW      as above
//   OF_TOKENS        x has a row for each token; else for each pair
//   BIAS             bias[experts, ROWS] is added
//   ACTIVATION=f     y is activated, as expert_activation.cuh says
//   GATED            w has ROWS = 2 * SIZE_N rows, gates before values; else ROWS is SIZE_N
//   WIDE             y is float32; else of the type of x, bfloat16
//   COLUMNS=n        8 or 16
//   MOST_PAIRS=n     there are no more pairs: a multiple of 16
//   PIECES=n         a row is copied in so many pieces of the same length
//   STAGES=n         pieces of 16 rows in the ring, of which IN_FLIGHT=n are asked for at a time
//   COPIES_ALONE     nothing is multiplied, and y is nothing: what the bytes and the order of kernels take is measured so
//
// and how w is stored, one of
//
//   FP4              with scales[experts, ROWS, SIZE_K / GROUP] of a byte, E8M0, or with FLOAT8_SCALES float8; GROUP is
//                    32 or 16, and a row's scales are an even number
//   PACKED4          eight neighbours in an int32, the first in the lowest bits; ZERO is subtracted; with
//                    scales[experts, ROWS, SIZE_K / GROUP] of SCALE_BYTES: 4 for float32, 2 for the type of x. GROUP is a
//                    multiple of STEP; without it a row has one scale
//
// and of both
//
//   WHOLE=n          sums are multiplied with whole[experts, n], float32, n being 1 or ROWS, or DIVIDED by it
//   STEP=n           k that a warp takes at a time: a multiple of 32
//
// A row of a piece is a multiple of 16 bytes and of STEP k. x lies in row-major order, aligned to 16 bytes.

#include "half.cuh"
#include "few_bits.cuh"
#include "ring.cuh"
#include "expert_activation.cuh"

constexpr int TILE = 16;              // rows of w in a tile
constexpr int EIGHTS = COLUMNS / 8;   // of rows of x in an item
constexpr int WARPS = 16;             // that multiply
constexpr int COPYING_WARP = WARPS, FIRST_ADDING_WARP = WARPS + 1, ADDING_WARPS = 2;
constexpr int THREADS = 32 * (WARPS + 1 + ADDING_WARPS);
constexpr int MAX_STAGES = 12;
static_assert(MOST_PAIRS <= THREADS, "a thread has a pair");
constexpr int BUFFERS = 2;            // tiles whose sums are in shared memory

#ifdef GATED
constexpr int HALVES = 2;             // rows 0 to 7 of a tile are gates, rows 8 to 15 values
#else
constexpr int HALVES = 1;
#endif
constexpr int ROWS = HALVES * SIZE_N;
constexpr int TILE_N = TILE / HALVES; // columns of y that a tile makes
constexpr int TILES = (SIZE_N + TILE_N - 1) / TILE_N;    // of an expert

constexpr int WORD = 8;               // k of a word
constexpr int UNIT = 4 * WORD;        // k that lie in 16 bytes of a row, which ldmatrix gives to four lanes
#if defined(FP4) && !defined(FLOAT8_SCALES)    // in float32 they are multiplied with sums
constexpr bool SCALES_ARE_POWERS = true;
static_assert(GROUP == UNIT, "a scale for what a word of each of four lanes has");
#else
constexpr bool SCALES_ARE_POWERS = false;
#endif
// Sums of a warp for the same result: an mma need not wait for the one before it. Where scales are
// powers a unit has sums of its own, of two mma, and other units go on meanwhile.
constexpr int CHAINS = SCALES_ARE_POWERS ? 1 : 2 / EIGHTS;
constexpr int UNITS = STEP / UNIT;
constexpr int PIECE = SIZE_K / PIECES;
constexpr int STEPS = PIECE / STEP, EACH = (STEPS + WARPS - 1) / WARPS;    // of a piece, and at most of a warp's
constexpr int ROW_BYTES = SIZE_K / 2, PIECE_BYTES = PIECE / 2;
// Whole rows may lie in shared memory as they do in memory, if no more than two of the 8 that ldmatrix reads are in the
// same banks: 8 rows are one copy then. A thread asks for one in 100 cycles, which is too few of less than 2 KiB.
constexpr bool TOGETHER = PIECES == 1 && ROW_BYTES / 16 % 4 != 0;
constexpr int PITCH = PIECE_BYTES + (TOGETHER || PIECE_BYTES % 32 ? 0 : 16);    // else all 8 are in different banks
#ifdef FP4
constexpr int ROW_SCALES = SIZE_K / GROUP;    // which come with a piece: those of the whole row
#else
constexpr int ROW_SCALES = 0;
#endif
constexpr int STAGE_BYTES = TILE * (PITCH + ROW_SCALES);

#ifdef WIDE
typedef float Result;
#else
typedef Element Result;
#endif

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

// Two 8 x 8 matrices of 16 bits; lane 8 i + j, of the first sixteen, gives the address of row j of matrix i.
__device__ __forceinline__ void load_two_matrices(u32 (&to)[2], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1]) : "r"(from) : "memory");
}

// --- what a CTA does --------------------------------------------------------------------------------------------------

typedef float Sums[WARPS][TILE][COLUMNS];

// Pairs of an expert, of those in order: which, and how many.
struct Item {
  int expert, first, count;
};

struct alignas(16) Four {
  int each[4];
};

// What lies in front of the ring.
struct alignas(128) Head {
  u64 full[MAX_STAGES], empty[MAX_STAGES], summed[BUFFERS], added[BUFFERS];
  Four expert_of[MOST_PAIRS / 4], leads[MOST_PAIRS / 4];    // experts of pairs, and of those that are the first of an item
  int num_items, ordered[MOST_PAIRS];
  Item items[MOST_PAIRS];
  alignas(16) Sums sums[BUFFERS];
};
static_assert(sizeof(Head) == 256 + 24 * MOST_PAIRS + 2048 * COLUMNS, "as streamed.py has it");

// All threads: the pairs in the order of experts, and of their numbers, and the items. What is no expert's is left out.
__device__ __forceinline__ void put_into_order(Head& head, const i64* ids, i64 token_stride, i64 stride, int pairs) {
  const int own = threadIdx.x, fours = (pairs + 3) / 4;
  int expert = EXPERTS, before = 0, same = 0, all = 0;
  bool leads = false;
  if (own < pairs) {
    const i64 id = ids[own / TOP_K * token_stride + own % TOP_K * stride];
    expert = id < 0 || id >= EXPERTS ? EXPERTS : (int)id;
  }
  if (own < 4 * fours) head.expert_of[own / 4].each[own % 4] = own < pairs ? expert : EXPERTS + 1;
  __syncthreads();
  if (own < 4 * fours) {
#pragma unroll 1
    for (int four = 0; four < fours; four++) {
      const Four found = head.expert_of[four];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        before += found.each[i] < expert;
        same += found.each[i] == expert && 4 * four + i < own;
        all += found.each[i] == expert;
      }
    }
    leads = expert < EXPERTS && same % COLUMNS == 0;
    head.leads[own / 4].each[own % 4] = leads ? expert : EXPERTS;
    if (expert < EXPERTS) head.ordered[before + same] = own;
  }
  __syncthreads();
  if (own < pairs) {
    int item = same / COLUMNS, leading = 0;
#pragma unroll 1
    for (int four = 0; four < fours; four++) {
      const Four found = head.leads[four];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        item += found.each[i] < expert;
        leading += found.each[i] < EXPERTS;
      }
    }
    if (leads) head.items[item] = {expert, before + same, all - same < COLUMNS ? all - same : COLUMNS};
    if (own == 0) head.num_items = leading;
  }
  __syncthreads();
}

// One thread: the tiles from `first` to `end`, in pieces. It waits for room in the ring, and for pieces on their way.
__device__ __forceinline__ void copy_weights(
    Head& head, const unsigned char* weights, const unsigned char* scales, u32 ring, int first, int end) {
  const u64 policy = read_once_policy();
  Place place = {0, 1};    // the first round finds the ring empty
  Place arriving = {0, 0};
  int asked = 0;
  for (int tile = first; tile < end; tile++) {
    const i64 row = (i64)head.items[tile / TILES].expert * ROWS + tile % TILES * TILE_N;
    // Of two eights of rows the second may not be there, in a tile that is no gate's and its values'.
    const bool is_whole = HALVES == 2 || tile % TILES * TILE_N + 8 < SIZE_N;
    for (int piece = 0; piece < PIECES; piece++) {
      const u32 barrier = shared_address(&head.full[place.at]);
      u32 to = ring + place.at * STAGE_BYTES;
      if (asked < IN_FLIGHT) {
        asked++;
      } else {
        barrier_wait(shared_address(&head.full[arriving.at]), arriving.parity);
        arriving.advance(STAGES);
      }
      barrier_wait(shared_address(&head.empty[place.at]), place.parity);
      barrier_expect(barrier, 8 * (PIECE_BYTES + ROW_SCALES) * (is_whole ? 2 : 1));
#pragma unroll 1
      for (int eight = 0; eight < (is_whole ? 2 : 1); eight++) {
        const i64 begin = row + eight * (HALVES == 2 ? SIZE_N : 8);
        const unsigned char* from = weights + begin * ROW_BYTES + piece * PIECE_BYTES;
        if (ROW_SCALES) copy_once(ring + place.at * STAGE_BYTES + TILE * PITCH + eight * 8 * ROW_SCALES,
                                  scales + begin * ROW_SCALES, 8 * ROW_SCALES, barrier, policy);
        constexpr int AT_ONCE = TOGETHER ? 8 : 1;
#pragma unroll
        for (int i = 0; i < 8 / AT_ONCE; i++) {
          copy_once(to, from, PIECE_BYTES * AT_ONCE, barrier, policy);
          to += PITCH * AT_ONCE;
          from += ROW_BYTES * AT_ONCE;
        }
      }
      place.advance(STAGES);
    }
  }
}

typedef u32 Inputs[PIECES * EACH][UNITS][EIGHTS][WORD / 2];
typedef float Products[EIGHTS][CHAINS][4];

struct alignas(2 * WORD) Neighbours {
  u32 words[WORD / 2];
};

// A lane's part of a row of x, one of eight, as operands: of each unit the k of its word.
__device__ __forceinline__ void load_inputs(Inputs& inputs, int eight, const Element* x, bool is_row) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < PIECES * EACH; i++) {
    const int step = i % EACH * WARPS + warp;
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
      Neighbours found = {};
      if (is_row && step < STEPS)
        found = *(const Neighbours*)(x + i / EACH * PIECE + step * STEP + unit * UNIT + lane % 4 * WORD);
      for (int j = 0; j < WORD / 2; j++) {    // nibbles j and j + 4 are a pair
        const u32 pair = __byte_perm(found.words[j / 2], found.words[j / 2 + 2], j % 2 ? 0x7632 : 0x5410);
        inputs[i][unit][eight][j] = SCALES_ARE_POWERS ? raised_x(pair) : pair;
      }
    }
  }
}

// Adds the product of a unit: `above` and `below` are words of rows lane / 4 and 8 below.
__device__ __forceinline__ void multiply_unit(
    Products& sums, u32 above, u32 below, const u32 (&inputs)[EIGHTS][WORD / 2], u32 scale_above, u32 scale_below,
    int unit) {
#pragma unroll
  for (int i = 0; i < WORD / 4; i++) {
#if defined(FP4) && !defined(FLOAT8_SCALES)
    const u32 a[4] = {lowered_fp4(above, 2 * i), lowered_fp4(below, 2 * i), lowered_fp4(above, 2 * i + 1),
                      lowered_fp4(below, 2 * i + 1)};
#elif defined(FP4)
    const u32 a[4] = {scaled_fp4(above, 2 * i, scale_above), scaled_fp4(below, 2 * i, scale_below),
                      scaled_fp4(above, 2 * i + 1, scale_above), scaled_fp4(below, 2 * i + 1, scale_below)};
#else
    const u32 a[4] = {elements_of_nibbles(above, 2 * i, ZERO), elements_of_nibbles(below, 2 * i, ZERO),
                      elements_of_nibbles(above, 2 * i + 1, ZERO), elements_of_nibbles(below, 2 * i + 1, ZERO)};
#endif
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++)
      multiply_add(sums[eight][(unit * (WORD / 4) + i) % CHAINS], a, inputs[eight][2 * i], inputs[eight][2 * i + 1]);
  }
}

__device__ __forceinline__ float total(const float (&sums)[CHAINS][4], int j) {
  return CHAINS == 1 ? sums[0][j] : sums[0][j] + sums[CHAINS - 1][j];
}

#ifndef FP4

__device__ __forceinline__ float scale_at(const unsigned char* scales, i64 index) {
#if SCALE_BYTES == 4
  return ((const float*)scales)[index];
#else
  return widened(((const Element*)scales)[index]);
#endif
}

#ifdef GROUP

typedef float GroupScales[EACH][2];

// The scales of a warp's steps of a piece: of rows lane / 4, and 8 below.
__device__ __forceinline__ void load_scales(
    GroupScales& made, const unsigned char* scales, i64 row_above, i64 row_below, int piece) {
  constexpr int GROUPS = SIZE_K / GROUP;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int step = i * WARPS + threadIdx.x / 32;
    if ((i + 1) * WARPS > STEPS && step >= STEPS) break;
    const int group = (piece * PIECE + step * STEP) / GROUP;
    made[i][0] = scale_at(scales, row_above * GROUPS + group);
    made[i][1] = scale_at(scales, row_below * GROUPS + group);
  }
}

#endif
#endif

// A warp's part of a tile's product with a piece of x: of each STEP, whose turn it is. `rows` is where the lane points
// ldmatrix to, `scales` where those of its first word are.
__device__ __forceinline__ void multiply_piece(
    Products& sums, const Inputs& inputs, int piece, u32 rows, const unsigned char* scales
#if !defined(FP4) && defined(GROUP)
    , const GroupScales& group_scales
#endif
) {
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if ((i + 1) * WARPS > STEPS && i * WARPS + threadIdx.x / 32 >= STEPS) break;
#if !defined(FP4) && defined(GROUP)
    Products part = {};
#endif
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
#if defined(FP4) && !defined(FLOAT8_SCALES)    // a unit is a group
      Products part = {};
#elif defined(FP4) || !defined(GROUP)
      Products& part = sums;
#endif
      u32 words[2], above = 0, below = 0;
      load_two_matrices(words, rows + (i * WARPS * UNITS + unit) * 16);
#ifdef FP4
      constexpr int SKIPPED = WARPS * STEP / GROUP;
      const int at = piece * (PIECE / GROUP) + i * SKIPPED + unit * (UNIT / GROUP);
      const u32 byte_above = scales[at], byte_below = scales[at + 8 * ROW_SCALES];
#ifdef FLOAT8_SCALES
      above = fp4_scale_of_float8(byte_above, 0), below = fp4_scale_of_float8(byte_below, 0);
#endif
#endif
      multiply_unit(part, words[0], words[1], inputs[piece * EACH + i][unit], above, below, unit);
#if defined(FP4) && !defined(FLOAT8_SCALES)
#pragma unroll
      for (int j = 0; j < 4 * EIGHTS; j++)
        sums[j / 4][0][j % 4] += total(part[j / 4], j % 4) * power_of(j % 4 < 2 ? byte_above : byte_below);
#endif
    }
#if !defined(FP4) && defined(GROUP)
#pragma unroll
    for (int j = 0; j < 4 * EIGHTS; j++)
      sums[j / 4][0][j % 4] += total(part[j / 4], j % 4) * group_scales[i][j % 4 / 2];
#endif
  }
}

// The tiles from `first` to `end`: a warp's part of all sums.
__device__ __forceinline__ void multiply(
    Head& head, const Element* x, const unsigned char* scales, const unsigned char* memory, u32 ring, int first, int end) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 own_rows = ring + lane % 16 * PITCH + warp * UNITS * 16;
  const unsigned char* own_scales = memory + TILE * PITCH + lane / 4 * ROW_SCALES;
#ifdef FP4
  own_scales += warp * (STEP / GROUP) + lane % 4 * WORD / GROUP;
#endif
  Inputs inputs;
  int item = -1;
  Place place = {0, 0}, buffer = {0, 1};
  for (int tile = first; tile < end; tile++) {
    if (tile / TILES != item) {
      item = tile / TILES;
#pragma unroll
      for (int eight = 0; eight < EIGHTS; eight++) {
        const int column = 8 * eight + lane / 4;
        const bool is_row = column < head.items[item].count;
        const int pair = is_row ? head.ordered[head.items[item].first + column] : 0;
#ifdef OF_TOKENS
        load_inputs(inputs, eight, x + (i64)(pair / TOP_K) * SIZE_K, is_row);
#else
        load_inputs(inputs, eight, x + (i64)pair * SIZE_K, is_row);
#endif
      }
    }
    Products sums = {};
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
#if !defined(FP4) && defined(GROUP)
      const i64 row = tile % TILES * TILE_N + lane / 4, below = row + (HALVES == 2 ? SIZE_N : 8);
      const i64 begin = (i64)head.items[item].expert * ROWS * (SIZE_K / GROUP);
      GroupScales group_scales;
      load_scales(group_scales, scales + begin * SCALE_BYTES, row, below < ROWS ? below : row, piece);
#endif
      barrier_wait(shared_address(&head.full[place.at]), place.parity);
#ifndef COPIES_ALONE
      multiply_piece(sums, inputs, piece, own_rows + place.at * STAGE_BYTES, own_scales + place.at * STAGE_BYTES
#if !defined(FP4) && defined(GROUP)
                     , group_scales
#endif
      );
#endif
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&head.empty[place.at]));
      place.advance(STAGES);
    }
    barrier_wait(shared_address(&head.added[buffer.at]), buffer.parity);
#pragma unroll
    for (int j = 0; j < 4 * EIGHTS; j++)
      head.sums[buffer.at][warp][lane / 4 + j % 4 / 2 * 8][j / 4 * 8 + lane % 4 * 2 + j % 2] = total(sums[j / 4], j % 4);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&head.summed[buffer.at]));
    buffer.advance(BUFFERS);
  }
}

// What a sum is multiplied with: scales of the row that is the `row`th of all experts', for which no k counts.
__device__ __forceinline__ float factor_of(const unsigned char* scales, const float* whole, i64 expert, int row) {
  float factor = 1.0f;
#if defined(FP4) && !defined(FLOAT8_SCALES)
  factor = 1 / (FP4_LOWERED * X_RAISED);
#elif defined(FP4)
  factor = FP4_SUMS;
#elif !defined(GROUP)
  factor = scale_at(scales, expert * ROWS + row);
#endif
#ifdef WHOLE
  const float all = whole[WHOLE == 1 ? expert : expert * ROWS + row];
#ifdef DIVIDED
  factor = factor / all;
#else
  factor *= all;
#endif
#endif
  return factor;
}

__device__ __forceinline__ Result result_of(float value) {
#ifdef WIDE
  return value;
#else
  return rounded(value);
#endif
}

// Writes what is made of the sums of a column of a tile: of row n of the expert's, and if it is there of the second.
__device__ __forceinline__ void write_results(Result* to, int n, int second, float value, float other) {
#ifdef GATED
  to[n] = result_of(activated(value, other));
#else
  to[n] = result_of(activated(value, 0.0f));
  if (second < ROWS) to[second] = result_of(activated(other, 0.0f));
#endif
}

// The tiles from `first` to `end`: adds up the warps' sums, and writes what is made of them.
__device__ __forceinline__ void add_up(
    Head& head, Result* y, const unsigned char* scales, const float* whole, const Element* bias, int first, int end) {
  const int own = threadIdx.x - 32 * FIRST_ADDING_WARP, row = own / 8, lane = threadIdx.x % 32;
  Place buffer = {0, 0};
  for (int tile = first; tile < end; tile++) {
    const Item item = head.items[tile / TILES];
    const int n = tile % TILES * TILE_N + row, second = n + (HALVES == 2 ? SIZE_N : 8);
    float biases[2] = {}, factors[2] = {}, values[EIGHTS][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int own_row = half ? second : n;
      if (own_row >= ROWS) continue;
      factors[half] = factor_of(scales, whole, item.expert, own_row);
#ifdef BIAS
      biases[half] = widened(bias[(i64)item.expert * ROWS + own_row]);
#endif
    }
    barrier_wait(shared_address(&head.summed[buffer.at]), buffer.parity);
#pragma unroll
    for (int i = 0; i < 2 * EIGHTS; i++) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < WARPS; warp++)
        sum += head.sums[buffer.at][warp][row + i % 2 * 8][i / 2 * 8 + own % 8];
      values[i / 2][i % 2] = sum * factors[i % 2] + biases[i % 2];
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&head.added[buffer.at]));
    buffer.advance(BUFFERS);
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
      const int column = 8 * eight + own % 8;
      if (column >= item.count) continue;
      Result* to = y + (i64)head.ordered[item.first + column] * SIZE_N;
      write_results(to, n, second, values[eight][0], values[eight][1]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) stream_experts(
    Result* y, const Element* x, const unsigned char* weights, const unsigned char* scales, const float* whole,
    const Element* bias, const i64* ids, i64 ids_token_stride, i64 ids_stride, i64 num_pairs) {
  extern __shared__ __align__(128) unsigned char memory[];
  Head& head = *(Head*)memory;
#ifdef IDS_ARE_NEW
  wait_for_kernel_in_front();
#endif
  let_next_kernel_start();
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp == COPYING_WARP) {
    if (lane < STAGES) {
      barrier_init(shared_address(&head.full[lane]), 1);
      barrier_init(shared_address(&head.empty[lane]), WARPS);
    }
    if (lane < BUFFERS) {
      barrier_init(shared_address(&head.summed[lane]), WARPS);
      barrier_init(shared_address(&head.added[lane]), ADDING_WARPS);
    }
    barrier_init_fence();
  }
  put_into_order(head, ids, ids_token_stride, ids_stride, (int)num_pairs);
  const u32 tiles = head.num_items * TILES;
  const int first = tiles * blockIdx.x / gridDim.x, end = tiles * (blockIdx.x + 1) / gridDim.x;
  const u32 ring = shared_address(memory + sizeof(Head));
  if (warp == COPYING_WARP) {
    if (elected()) copy_weights(head, weights, scales, ring, first, end);
    return;
  }
#ifndef IDS_ARE_NEW
  wait_for_kernel_in_front();
#endif
  if (warp < WARPS)
    multiply(head, x, scales, memory + sizeof(Head), ring, first, end);
  else
    add_up(head, y, scales, whole, bias, first, end);
}
