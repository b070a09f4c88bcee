// tiles: y[m, n] = sum over k of x[m, k] * w[n, k], for 9 to 256 rows of x and weights w in few bits.
//
// few_bits_tiles.cuh says how values are multiplied as they are stored: w is read once. The kernels, one after the other:
//
//   lay_input       x in the order in which the products take it, so that a stage of it is copied at once
//   product_tiles   tiles of 128 rows of w, and of COLUMNS of x
//   sum_tiles       with SUMS_APART: what several blocks have parts of
//
// What a block does. Units of work, which are a stage of w of a tile, are numbered tile after tile, and each block has as
// many as the others, one after the other. Of tiles that lie in several blocks each writes its part; the block that is
// ready last, or sum_tiles, adds them up in the order of blocks. Where tiles are divided depends on the layer and the grid
// alone. So a row of y has the same bits whatever the other rows are, and however many up to COLUMNS.
//
// Programmatic dependent launch: as in stream.cu. Weights, scales, points and bias must not be written by a kernel in
// front.
//
// Defines, besides those of few_bits_tiles.cuh:
//   SUMS_APART       sum_tiles adds up parts of tiles, which takes less time of many rows
//   WINDOWS=n        inputs are a multiple of 128 * WINDOWS
//   BIAS             bias[outputs] is added before y is rounded
//   SCALED_ROWS=n    so many rows have the same scales: scales[outputs / SCALED_ROWS, groups or 1]
//   GLOBAL=n         sums are multiplied by global_scale[n > 1 ? outputs : 1], float32
//   DIVIDES          or divided
//   POINTS           points[outputs / 8, groups] of PACKED4, points[outputs / 4, groups] of INT8

#include "half.cuh"
#include "few_bits.cuh"
#include "ring.cuh"
#include "warp_group.cuh"
#define BANDS 1
#include "few_bits_tiles.cuh"

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

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

// --- the order of x --------------------------------------------------------------------------------------------------

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

// COPYING threads: 16 bytes of a row each at a time, a stage's rows one after the other.
__device__ __forceinline__ void produce_weights(const Weight& w, const Units& units, const Ring& ring) {
  constexpr int EACH = ROW_BYTES / 16, TOGETHER = COPYING / EACH;
  const u64 policy = read_once_policy();
  const int thread = threadIdx.x - MULTIPLYING, first = thread / EACH, column = thread % EACH * 16;
  const i64 row_bytes = (i64)w.inputs / 8 * BITS;
  const u32 begin = begin_of(ring) + place_in_stage(first, column);
  Place place = {0, 1};
  for (int unit = units.first; unit < units.end; unit++) {
    const int row = units.row(unit / units.stages), stage = unit % units.stages, present = min(TILE, w.outputs - row);
    const unsigned char* from = w.values + (row + first) * row_bytes + stage * ROW_BYTES + column;
    const u32 to = begin + place.at * W_STAGE;
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

// A warp group: 64 rows of each tile.
__device__ __forceinline__ void multiply_tiles(
    Element* y, float4* parts, [[maybe_unused]] u32* counters, const Weight& w, const Units& units, int rows,
    const Ring& w_ring, const Ring& x_ring, [[maybe_unused]] int (&is_last)[2]) {
  const int lane = threadIdx.x % 32;
  [[maybe_unused]] int divided_first = -1, divided_last = -1;    // tiles that others have parts of, too
  Multiplier multiplier(w_ring, x_ring);
  const auto load = [&](Scales& scales, int unit) {
    ScaledRow scaled[2];
#ifdef GROUP
    for (int half = 0; half < 2; half++) {
      const int n = min(units.row(unit / units.stages) + row_of(2 * half), w.outputs - 1), groups = w.inputs / GROUP;
      scaled[half] = {w.scales + (i64)(n / SCALED_ROWS) * groups, w.points + (i64)(n / PER_WORD) * groups};
    }
#endif
    scales.load(scaled, unit % units.stages * WINDOWS * WINDOW, 0x7fffffff);
  };
  Scales next;
  load(next, units.first);
  for (int unit = units.first; unit < units.end;) {
    const int tile = unit / units.stages, end = min(units.end, (tile + 1) * units.stages);
    const bool is_whole = end - unit == units.stages, is_first = unit == units.first;
    float sums[SUMS];
#ifdef STEPS
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0;
#endif
    int adds = 0;
    for (; unit < end; unit++) {
      const Scales scales[BANDS] = {next};
      if (unit + 1 < units.end) load(next, unit + 1);
      multiplier.add_stage(sums, scales, adds);
    }
    multiplier.finish();
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

extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE) product_tiles(
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
    give_registers<COPYING_REGISTERS>();
    if (warp < X_WARP) {
      produce_weights(w, units, w_ring);
    } else if (warp == X_WARP) {
      wait_for_kernel_in_front();
      if (threadIdx.x % 32 == 0) produce_x(image, units, x_ring);
    }
  } else {
    take_registers<MULTIPLYING_REGISTERS>();
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
