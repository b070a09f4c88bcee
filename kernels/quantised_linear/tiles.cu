// tiles: y[m, n] = sum over k of x[m, k] * w[n, k], for 9 to 256 rows of x and weights w in few bits.
//
// Values are made in registers, where the tensor cores of a warp group take one of their operands from (wgmma): w is
// read once as it is stored, and never written. The kernels, one after the other:
//
//   lay_input       x in the order in which the products take it, so that a stage of it is copied at once
//   product_tiles   tiles of 128 rows of w, and of COLUMNS of x
//   sum_tiles       with SUMS_APART: what several blocks have parts of
//
// The order of x. A thread takes 16 bytes of a row of w at a time, for 128 k of the row four threads (a window). The
// tensor cores multiply 16 k at a time, of which a thread has four in each of two rows; which four is up to us, if only
// x has the same order. So each word of w gives what it has, two values at a time, and no value moves:
//
//   4 bits   word j of thread t has k = 32 t + 8 j + ..
//            product 2 j + m takes its values 2 m, 2 m + 4, 2 m + 1 and 2 m + 5
//   8 bits   word j of the q-th 16 bytes of thread t has k = 64 q + 16 t + 4 j + ..
//            product 4 q + j takes all four
//
// What a block does. Two warp groups multiply, each 64 rows of a tile. Two warps copy rows of w into a ring in shared
// memory, WINDOWS windows at a time; one more warp copies x into another. Units of work, which are a stage of w of a
// tile, are numbered tile after tile, and each block has as many as the others, one after the other. Of tiles that lie
// in several blocks each writes its part; the block that is ready last, or sum_tiles, adds them up in the order of
// blocks. Where tiles are divided depends on the layer and the grid alone. So a row of y has the same bits whatever the
// other rows are, and however many up to COLUMNS.
//
// Programmatic dependent launch: as in stream.cu. Weights, scales, points and bias must not be written by a kernel in
// front.
//
// Defines:
//   FLOAT16          elements are float16; else bfloat16
//   SUMS_APART       sum_tiles adds up parts of tiles, which takes less time of many rows
//   COLUMNS=n        rows of x that a tile has: 16, 32, 64, 128 or 256
//   WINDOWS=n        windows of a row of w in a stage; inputs are a multiple of 128 * WINDOWS
//   BIAS             bias[outputs] is added before y is rounded
// and of w, one of
//   PACKED4          words of eight values of four bits; OFFSET is subtracted, and with POINTS a point
//   FP4              bytes of two values, e2m1, the first in the lower half
//   FLOAT8           float8_e4m3fn
//   INT8             int8, or with OFFSET=128 words of four values of eight bits less that
// with scales that are
//   GROUP=n          those of n neighbours in a row, scales[outputs / SCALED_ROWS, inputs / n]; without it one a row
//   SCALED_ROWS=n    so many rows have the same scales
//   SCALE=k          stored as: 0 element, 1 float32, 2 float8_e4m3fn, 3 float8_e8m0fnu, 4 float16
//   STEPS            sums of 128 k are multiplied by scales; without it values are, if there are groups
//   GLOBAL=n         sums are multiplied by global_scale[n > 1 ? outputs : 1], float32
//   DIVIDES          or divided
//   POINTS           points[outputs / 8, groups] of PACKED4, words of eight points of neighbouring rows, to which
//                    OFFSET is added; points[outputs / 4, groups] of INT8 with OFFSET, where groups are of 128 n

#include "half.cuh"
#include "few_bits.cuh"
#include "ring.cuh"
#include "warp_group.cuh"

constexpr int TILE = 128;                       // rows of w in a tile
constexpr int WINDOW = 128;                     // k that four threads read of a row at once
constexpr int PRODUCTS = WINDOW / 16;           // of a window, each over 16 k
constexpr int MULTIPLYING = 256, THREADS = MULTIPLYING + 128;
constexpr int COPYING = 64;                     // threads that copy w
constexpr int W_WARP = MULTIPLYING / 32, X_WARP = W_WARP + COPYING / 32;
#if defined(PACKED4) || defined(FP4)
#define IN_FOUR_BITS
constexpr int BITS = 4;
#else
constexpr int BITS = 8;
#endif
[[maybe_unused]] constexpr int PER_WORD = 32 / BITS;    // points in a word
constexpr int LOADS = BITS / 4;                 // 16 bytes of a row that a thread takes of a window
constexpr int ROW_BYTES = WINDOWS * WINDOW / 8 * BITS;
constexpr int PITCH = ROW_BYTES % 128 == 0 ? ROW_BYTES + 64 : ROW_BYTES;    // two rows of a window in different banks
constexpr int W_STAGE = TILE * PITCH;
constexpr int X_PRODUCTS = COLUMNS > 128 ? PRODUCTS / 2 : PRODUCTS;         // of a stage of x
constexpr int X_STAGE = X_PRODUCTS * 16 * COLUMNS * 2;
constexpr int BATCH = 4;                        // products that are asked for together
constexpr int WIDTH = COLUMNS > 128 ? 128 : COLUMNS;                        // columns of one instruction
constexpr int TIMES = COLUMNS / WIDTH;
constexpr int SUMS = COLUMNS / 2;               // that a thread has
constexpr int MAX_STAGES = 16;
#ifdef GROUP
// Neighbours of a row that a thread has in a window, and where the next ones begin; groups that these lie in.
constexpr int OWN_K = BITS == 4 ? 32 : 16, GROUP_STEP = BITS == 4 ? 16 : 64;
constexpr int GROUPS_READ = BITS == 4 ? 1 + (GROUP % 32 != 0) : 1 + (GROUP % 128 != 0);
#endif

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_once(u32 to, const unsigned char* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void load_words(u32 (&to)[4], u32 from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void sync_multiplying_warps() {
  asm volatile("bar.sync 2, %0;" ::"n"(MULTIPLYING) : "memory");
}

// Counts; what threads of the block wrote before is there for whoever counts after.
__device__ __forceinline__ u32 counted(u32* counter) {
  __threadfence();
  const u32 before = atomicAdd(counter, 1);
  __threadfence();
  return before;
}

__device__ __forceinline__ void sync_block() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// --- values ----------------------------------------------------------------------------------------------------------

#if SCALE == 0
typedef Element Scale;
#elif SCALE == 1
typedef float Scale;
#elif SCALE == 4
typedef u16 Scale;
#else
typedef unsigned char Scale;
#endif

// A scale as pairs of values are multiplied by it.
__device__ __forceinline__ u32 as_factor(Scale scale) {
#if SCALE == 0
  return twice(scale);
#elif SCALE == 2
  return fp4_scale_of_float8(scale, 0);
#elif SCALE == 3
  return fp4_scale_of_power(scale, 0);
#else
  return 0;
#endif
}

// The j-th pair of a product, of the words that a thread has of a row's window: less a point, times a factor.
__device__ __forceinline__ u32 pair_of(
    const u32 (&words)[4 * LOADS], int product, int j, [[maybe_unused]] int point, [[maybe_unused]] u32 factor) {
#ifdef IN_FOUR_BITS
  const u32 word = words[product / 2], i = 2 * (product % 2) + j;
#else
  const u32 word = words[product];
#endif
#if defined(FP4)
  return scaled_fp4(word, i, factor);
#else
#if defined(PACKED4)
  const u32 pair = elements_of_nibbles(word, i, point);
#elif defined(FLOAT8)
  const u32 pair = elements_of_float8(word, j);
#elif defined(POINTS)
  const u32 pair = subtracted(elements_of_bytes<false>(word, j), twice(rounded((float)(point - 128))));
#elif defined(OFFSET)
  const u32 pair = elements_of_bytes<false>(word, j);
#else
  const u32 pair = elements_of_bytes<true>(word, j);
#endif
#if defined(GROUP) && !defined(STEPS)
  return multiplied(pair, factor);
#else
  return pair;
#endif
#endif
}

__device__ __forceinline__ float as_float(Scale scale) {
#if SCALE == 0
  return widened(scale);
#elif SCALE == 1
  return scale;
#elif SCALE == 4
  return widened_float16(scale);
#else
  return 1.0f;
#endif
}

// --- the order of x --------------------------------------------------------------------------------------------------

// Where element `e` of pair `t` of half `h` of product `i` of a window lies in x.
__device__ __forceinline__ int place_in_window(int i, int h, int t, int e) {
  if (BITS == 4) return 32 * t + 8 * (i / 2) + 2 * (i % 2) + h + 4 * e;
  return 64 * (i / 4) + 16 * t + 4 * (i % 4) + 2 * h + e;
}

// image[tiles, windows, products, halves, COLUMNS, 8]: of each row of x, of which a tile has COLUMNS, the eight
// elements that a half of a product takes. A warp lays a window of a row; eight neighbouring rows are a block's, so
// that it writes 128 bytes at once.
extern "C" __global__ void __launch_bounds__(256) lay_input(
    Element* image, u32* counters, const Element* x, i64 rows, i64 inputs, i64 tiles) {
  __shared__ Element window[8][WINDOW];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, windows = (int)inputs / WINDOW;
  const int row = (int)blockIdx.x / windows * 8 + warp, own = (int)blockIdx.x % windows;
  let_next_kernel_start();
  wait_for_kernel_in_front();
  for (int i = blockIdx.x * 256 + threadIdx.x; i < tiles; i += gridDim.x * 256) counters[i] = 0;
  if (row < rows) *(u64*)&window[warp][lane * 4] = *(const u64*)&x[(i64)row * inputs + own * WINDOW + lane * 4];
  __syncthreads();
  // 16 halves of products x 8 rows: neighbouring threads have neighbouring rows
  const int half = threadIdx.x / 16, n = threadIdx.x % 16;
  if (n < 8) {
    const int from = (int)blockIdx.x / windows * 8 + n;
    u32 made[4];
#pragma unroll
    for (int t = 0; t < 4; t++)
      made[t] = window[n][place_in_window(half / 2, half % 2, t, 0)] |
                (u32)window[n][place_in_window(half / 2, half % 2, t, 1)] << 16;
    if (from < rows) {
      const i64 before = ((i64)(from / COLUMNS * windows + own) * 2 * PRODUCTS + half) * COLUMNS + from % COLUMNS;
      uint4* to = (uint4*)(image + before * 8);
      *to = make_uint4(made[0], made[1], made[2], made[3]);
    }
  }
}

// --- who does what ---------------------------------------------------------------------------------------------------

// Units of work: `stages` of each tile, of which `wide` have the same rows of w, `total` of all, which `blocks` share;
// those of a block from `first` to `end`.
struct Units {
  int stages, wide, total, blocks, first, end;

  __device__ __forceinline__ Units(int outputs, int inputs, int rows, int blocks) : blocks(blocks), first(0), end(0) {
    stages = inputs / (WINDOWS * WINDOW);
    wide = (rows + COLUMNS - 1) / COLUMNS;
    total = (outputs + TILE - 1) / TILE * wide * stages;
  }

  // The first row of w and the first row of x in a tile: those with the same rows of w follow one another.
  __device__ __forceinline__ int row(int tile) const { return tile / wide * TILE; }
  __device__ __forceinline__ int column(int tile) const { return tile % wide * COLUMNS; }

  __device__ __forceinline__ int first_in(int block) const { return (u32)block * (u32)total / (u32)blocks; }
  __device__ __forceinline__ int block_with(int unit) const { return (((u32)unit + 1) * (u32)blocks - 1) / (u32)total; }

  // The blocks that have the first and the last unit of a tile.
  __device__ __forceinline__ int first_of(int tile) const { return block_with(tile * stages); }
  __device__ __forceinline__ int last_of(int tile) const { return block_with((tile + 1) * stages - 1); }
};

struct Weight {
  const unsigned char* values;
  const Scale* scales;
  const u32* points;
  const float* global_scale;
  const Element* bias;
  int outputs, inputs;
};

// Stages in shared memory: where they begin, and a barrier each for when it is full and when it is empty.
struct Ring {
  u32 begin, full, empty;
  int stages;
};

// COPYING threads: 16 bytes of a row each at a time, a stage's rows one after the other.
__device__ __forceinline__ void produce_weights(const Weight& w, const Units& units, const Ring& ring) {
  constexpr int EACH = ROW_BYTES / 16, TOGETHER = COPYING / EACH;
  const u64 policy = read_once_policy();
  const int thread = threadIdx.x - MULTIPLYING, first = thread / EACH, column = thread % EACH * 16;
  const i64 row_bytes = (i64)w.inputs / 8 * BITS;
  Place place = {0, 1};
  for (int unit = units.first; unit < units.end; unit++) {
    const int row = units.row(unit / units.stages), stage = unit % units.stages, present = min(TILE, w.outputs - row);
    const unsigned char* from = w.values + (row + first) * row_bytes + stage * ROW_BYTES + column;
    const u32 to = ring.begin + place.at * W_STAGE + first * PITCH + column;
    barrier_wait(ring.empty + place.at * 8, place.parity);
#pragma unroll 8
    for (int i = 0; i < TILE / TOGETHER; i++)
      if (i * TOGETHER + first < present) copy_once(to + i * TOGETHER * PITCH, from + i * TOGETHER * row_bytes, policy);
    arrive_when_copied(ring.full + place.at * 8);
    place.advance(ring.stages);
  }
}

// One thread: x as `lay_input` has laid it.
__device__ __forceinline__ void produce_x(const Element* image, const Units& units, const Ring& ring) {
  constexpr int OF_UNIT = WINDOWS * PRODUCTS / X_PRODUCTS;
  Place place = {0, 1};
  for (int unit = units.first; unit < units.end; unit++) {
    const int before = unit / units.stages % units.wide * units.stages + unit % units.stages;
    const unsigned char* from = (const unsigned char*)image + (i64)before * OF_UNIT * X_STAGE;
    for (int i = 0; i < OF_UNIT; i++) {
      const u32 barrier = ring.full + place.at * 8;
      barrier_wait(ring.empty + place.at * 8, place.parity);
      barrier_expect(barrier, X_STAGE);
      copy(ring.begin + place.at * X_STAGE, from + i * X_STAGE, X_STAGE, barrier);
      place.advance(ring.stages);
    }
  }
}

// The scales and points of a stage that a thread's values have, in two rows of w.
struct Scales {
#ifdef GROUP
  Scale scales[WINDOWS][2][GROUPS_READ];
#endif
#ifdef POINTS
  u32 points[WINDOWS][2];
#endif

  // Of a unit, for the row `row` of its tile and the one 8 below: asked for a stage before they are needed.
  __device__ __forceinline__ void load(const Weight& w, const Units& units, int unit, int row) {
#ifdef GROUP
    const int groups = w.inputs / GROUP, first = unit % units.stages * WINDOWS * WINDOW + OWN_K * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int n = min(units.row(unit / units.stages) + row + 8 * half, w.outputs - 1);
#pragma unroll
      for (int window = 0; window < WINDOWS; window++) {
        const int k = first + window * WINDOW;
#pragma unroll
        for (int i = 0; i < GROUPS_READ; i++)
          scales[window][half][i] = w.scales[(i64)(n / SCALED_ROWS) * groups + (k + i * GROUP_STEP) / GROUP];
#ifdef POINTS
        points[window][half] = w.points[(i64)(n / PER_WORD) * groups + k / GROUP];
#endif
      }
    }
#endif
  }
};

// The operands of BATCH products of a window, from the one with number `first` on.
__device__ __forceinline__ void make_values(
    u32 (&a)[BATCH][4], const u32 (&words)[2][4 * LOADS], [[maybe_unused]] const Scales& scales,
    [[maybe_unused]] int window, int first) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
#ifdef POINTS
    const int shift = threadIdx.x % 32 / 4 % PER_WORD * BITS;
    const int point = OFFSET + (scales.points[window][half] >> shift & ((1 << BITS) - 1));
#elif defined(PACKED4)
    constexpr int point = OFFSET;
#else
    constexpr int point = 0;
#endif
#pragma unroll
    for (int i = 0; i < 2 * BATCH; i++) {
      const int product = first + i / 2;
#if defined(GROUP) && !defined(STEPS)
      const u32 factor = as_factor(scales.scales[window][half][GROUPS_READ > 1 ? product / (PRODUCTS / 2) : 0]);
#else
      constexpr u32 factor = 0;
#endif
      a[i / 2][half + i % 2 * 2] = pair_of(words[half], product, i % 2, point, factor);
    }
  }
}

// y[m, n] of a sum.
__device__ __forceinline__ void finish(Element* y, const Weight& w, int m, int n, float sum) {
#ifdef FP4
  sum *= FP4_SUMS;
#endif
#ifndef GROUP
  sum *= as_float(w.scales[n / SCALED_ROWS]);
#endif
#ifdef GLOBAL
  const float of_all = w.global_scale[GLOBAL > 1 ? n : 0];
#ifdef DIVIDES
  sum /= of_all;
#else
  sum *= of_all;
#endif
#endif
#ifdef BIAS
  sum += widened(w.bias[n]);
#endif
  y[(i64)m * w.outputs + n] = rounded(sum);
}

// Where the i-th sum of a thread stands in a tile.
__device__ __forceinline__ int row_of(int i) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
__device__ __forceinline__ int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// Sums of part of a tile: float4[2 * blocks, SUMS / 4, MULTIPLYING], of the first tile of a block and of its last.
__device__ __forceinline__ float4* part_of(float4* parts, int block, bool is_first, int quarter) {
  return parts + ((i64)(2 * block + !is_first) * (SUMS / 4) + quarter) * MULTIPLYING + threadIdx.x;
}

struct alignas(128) Head {
  u64 w_full[MAX_STAGES], w_empty[MAX_STAGES], x_full[MAX_STAGES], x_empty[MAX_STAGES];
  int is_last[2];
};
static_assert(sizeof(Head) == 640, "as tiles.py has it");

__device__ __forceinline__ void store_sum(
    Element* y, const Weight& w, const Units& units, int tile, int rows, int i, float sum) {
  const int n = units.row(tile) + row_of(i), m = units.column(tile) + column_of(i);
  if (m < rows && n < w.outputs) finish(y, w, m, n, sum);
}

// EACH of a thread's sums in a tile, from one on: of its parts, in the order of the blocks that have them.
template <int EACH>
__device__ __forceinline__ void add_parts(
    Element* y, const Weight& w, const Units& units, float4* parts, int tile, int rows, int from) {
  float sums[EACH] = {};
  const int last = units.last_of(tile);
#pragma unroll 4
  for (int block = units.first_of(tile); block <= last; block++) {
    const bool is_first = units.first_in(block) / units.stages == tile;
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
      const float4 part = __ldcg(part_of(parts, block, is_first, (from + i) / 4));
      sums[i] += part.x, sums[i + 1] += part.y, sums[i + 2] += part.z, sums[i + 3] += part.w;
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) store_sum(y, w, units, tile, rows, from + i, sums[i]);
}

// Where the tensor cores find a product's part of a stage of x: eights of rows are 128 bytes apart, and its halves as
// many bytes as all rows of one have.
__device__ __forceinline__ u64 described_halves(u32 address) {
  return (u64)(address >> 4 & 0x3fff) | (u64)COLUMNS << 16 | (u64)8 << 32;
}

// A warp group: 64 rows of each tile.
__device__ __forceinline__ void multiply_tiles(
    Element* y, float4* parts, [[maybe_unused]] u32* counters, const Weight& w, const Units& units, int rows,
    const Ring& w_ring, const Ring& x_ring, [[maybe_unused]] int (&is_last)[2]) {
  const int lane = threadIdx.x % 32, row = row_of(0);
  const u32 own = row * PITCH + lane % 4 * 16;
  Place w_place = {0, 0}, x_place = {0, 0};
  [[maybe_unused]] int divided_first = -1, divided_last = -1;    // tiles that others have parts of, too
  int held = -1;    // a stage of x that products which are asked for still read
  const auto release_x = [&]() {
    __syncwarp();
    if (lane == 0 && held >= 0) barrier_arrive(x_ring.empty + held * 8);
    held = -1;
  };
  Scales next;
  next.load(w, units, units.first, row);
  for (int unit = units.first; unit < units.end;) {
    const int tile = unit / units.stages, end = min(units.end, (tile + 1) * units.stages);
    const bool is_whole = end - unit == units.stages, is_first = unit == units.first;
    float sums[SUMS];
#ifdef STEPS
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0;
    float of_window[SUMS];
    float* const target = of_window;
#else
    float* const target = sums;
#endif
    int adds = 0;
    u32 a[PRODUCTS / BATCH][BATCH][4];
    for (; unit < end; unit++) {
      const Scales scales = next;
      if (unit + 1 < units.end) next.load(w, units, unit + 1, row);
      barrier_wait(w_ring.full + w_place.at * 8, w_place.parity);
      const u32 stage = w_ring.begin + w_place.at * W_STAGE + own;
#pragma unroll
      for (int window = 0; window < WINDOWS; window++) {
        u32 words[2][4 * LOADS];
#pragma unroll
        for (int i = 0; i < 2 * LOADS; i++) {
          u32 four[4];
          load_words(four, stage + i / LOADS * 8 * PITCH + window * WINDOW / 8 * BITS + i % LOADS * 64);
#pragma unroll
          for (int j = 0; j < 4; j++) words[i / LOADS][i % LOADS * 4 + j] = four[j];
        }
        if (window == WINDOWS - 1) {
          __syncwarp();
          if (lane == 0) barrier_arrive(w_ring.empty + w_place.at * 8);
          w_place.advance(w_ring.stages);
        }
#ifdef STEPS
        adds = 0;
#endif
#pragma unroll
        for (int batch = 0; batch < PRODUCTS / BATCH; batch++) {
          make_values(a[batch], words, scales, window, batch * BATCH);
          const int in_stage = batch * BATCH % X_PRODUCTS;
          if (in_stage == 0) barrier_wait(x_ring.full + x_place.at * 8, x_place.parity);
          const u64 x = described_halves(x_ring.begin + x_place.at * X_STAGE) + in_stage * 2 * COLUMNS;
          let_products_begin();
#pragma unroll
          for (int i = 0; i < BATCH; i++) {
#pragma unroll
            for (int j = 0; j < TIMES; j++)
              multiply_group<WIDTH>(target + j * (WIDTH / 2), a[batch][i], x + i * 2 * COLUMNS + j * WIDTH, adds);
            adds = 1;
          }
          end_batch();
          wait_for_batches<1>();
          if (in_stage == 0) release_x();    // that of the batch in front
          if (in_stage + BATCH == X_PRODUCTS) {
            held = x_place.at;
            x_place.advance(x_ring.stages);
          }
        }
#ifdef STEPS
        wait_for_batches<0>();
        release_x();
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] += of_window[i] * as_float(scales.scales[window][i / 2 % 2][0]);
#endif
      }
    }
    wait_for_batches<0>();
    release_x();
    if (is_whole) {
#pragma unroll
      for (int i = 0; i < SUMS; i++) store_sum(y, w, units, tile, rows, i, sums[i]);
    } else {
      (is_first ? divided_first : divided_last) = tile;
#pragma unroll
      for (int i = 0; i < SUMS / 4; i++)
        *part_of(parts, blockIdx.x, is_first, i) =
            make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    }
  }
#ifndef SUMS_APART
  // Who is last to have a part of a tile ready adds up all of them.
  if (divided_first < 0 && divided_last < 0) return;
  sync_multiplying_warps();
  if (lane == 0 && threadIdx.x < 64) {
    const int tile = threadIdx.x == 0 ? divided_first : divided_last;
    const int others = units.last_of(tile) - units.first_of(tile);
    is_last[threadIdx.x / 32] = tile >= 0 && counted(counters + tile) == others;
  }
  sync_multiplying_warps();
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    const int tile = i == 0 ? divided_first : divided_last;
    if (is_last[i]) add_parts<SUMS>(y, w, units, parts, tile, rows, 0);
  }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) product_tiles(
    Element* y, float4* parts, u32* counters, const Element* image, const unsigned char* values, const Scale* scales,
    const u32* points, const float* global_scale, const Element* bias, i64 rows, i64 outputs, i64 inputs, i64 w_stages,
    i64 x_stages) {
  extern __shared__ __align__(128) unsigned char memory[];
  Head& head = *(Head*)memory;
  let_next_kernel_start();
  const Weight w = {values, scales, points, global_scale, bias, (int)outputs, (int)inputs};
  Units units(w.outputs, w.inputs, (int)rows, gridDim.x);
  units.first = units.first_in(blockIdx.x), units.end = units.first_in(blockIdx.x + 1);
  const u32 begin = shared_address(memory + sizeof(Head));
  const Ring w_ring = {begin, shared_address(head.w_full), shared_address(head.w_empty), (int)w_stages};
  const Ring x_ring = {begin + w_ring.stages * W_STAGE, shared_address(head.x_full), shared_address(head.x_empty),
                       (int)x_stages};
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x < MAX_STAGES) {
    const u32 at = threadIdx.x * 8;
    barrier_init(w_ring.full + at, COPYING), barrier_init(w_ring.empty + at, MULTIPLYING / 32);
    barrier_init(x_ring.full + at, 1), barrier_init(x_ring.empty + at, MULTIPLYING / 32);
    barrier_init_fence();
  }
  sync_block();
  if (warp >= W_WARP) {
    give_registers();
    if (warp < X_WARP) {
      produce_weights(w, units, w_ring);
    } else if (warp == X_WARP) {
      wait_for_kernel_in_front();
      if (threadIdx.x % 32 == 0) produce_x(image, units, x_ring);
    }
  } else {
    take_registers();
    wait_for_kernel_in_front();
    multiply_tiles(y, parts, counters, w, units, (int)rows, w_ring, x_ring, head.is_last);
  }
}

#ifdef SUMS_APART
// What the last block would do: 16 columns of a tile a block.
extern "C" __global__ void __launch_bounds__(MULTIPLYING) sum_tiles(
    Element* y, float4* parts, const Scale* scales, const float* global_scale, const Element* bias, i64 rows,
    i64 outputs, i64 inputs, i64 blocks) {
  let_next_kernel_start();
  const Weight w = {nullptr, scales, nullptr, global_scale, bias, (int)outputs, (int)inputs};
  const Units units(w.outputs, w.inputs, (int)rows, (int)blocks);
  const int tile = blockIdx.x;
  wait_for_kernel_in_front();    // before any of them ends: what comes next waits for this kernel alone
  if (tile * units.stages >= units.total || units.first_of(tile) == units.last_of(tile)) return;
  add_parts<8>(y, w, units, parts, tile, (int)rows, blockIdx.y * 8);
}
#endif
