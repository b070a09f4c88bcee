// product_float8: y[m, n] = sum over k of x[m, k] * w[n, k], for 9 to 256 rows of x, both of float8_e4m3fn with scales.
//
// Tiles of 128 rows of w and of COLUMNS rows of x, over 128 k at a time. Two warps copy rows of w into a ring in shared
// memory, and two those of x, both in the order in which the tensor cores read them (wgmma). Two warp groups multiply,
// each 64 rows of a tile. What they sum over 128 k is added to sums in float32, times scales if BLOCKS have them: the
// tensor cores alone keep 14 digits of a sum. Meanwhile these sum over the next 128 k.
//
// A cluster takes a tile, and each of its blocks as many k as the others. In the end a block is given what the others
// have of its share of the sums, and adds them in the order of the blocks: a row of y has the same bits whatever the
// other rows are. Where there are more tiles than multiprocessors, a block takes several. A thread has sums of one row of
// w and two of x, and y lies the other way round: numbers are exchanged in registers, and written 16 bytes at a time.
//
// Programmatic dependent launch: the next kernel may start at once, and the ring begins to be filled with w before the
// wait. Weights, their scales and bias must not be written by a kernel in front.
//
// Defines:
//   FLOAT16          y and bias are float16; else bfloat16
//   COLUMNS=n        rows of x that a tile has: 16, 32, 64 or 128
//   STAGES=n         of the ring
//   CLUSTER=n        blocks that share a tile; 1 where a block takes several
//   BLOCKS           scales of w are of blocks of 128 x 128, those of x of 128 in a row: [rows, inputs / 128]
//   ONE_SCALE        w has one scale; else, and without BLOCKS, each row has
//   ONE_X_SCALE      x has one scale; else, and without BLOCKS, each row has
//   BIAS             bias[outputs] is added before y is rounded

#include "half.cuh"
#include "ring.cuh"
#include "warp_group.cuh"

constexpr int TILE = 128;                       // rows of w in a tile
constexpr int STAGE_INPUTS = 128;
constexpr int MULTIPLYING = 256, COPYING = 128, THREADS = MULTIPLYING + COPYING;
constexpr int W_WARP = MULTIPLYING / 32, X_WARP = W_WARP + 2;
constexpr int SUMS = COLUMNS / 2, EIGHTS = SUMS / 8;    // of a thread: an eight are those of 16 columns
constexpr bool HAS_MANY_SUMS = COLUMNS > 64;
constexpr u32 W_STAGE = TILE * STAGE_INPUTS, X_STAGE = COLUMNS * STAGE_INPUTS;

// Where things are in shared memory, in bytes.
constexpr u32 W_RING = 0;
constexpr u32 X_RING = W_RING + STAGES * W_STAGE;
constexpr u32 GIVEN = X_RING + STAGES * X_STAGE;             // sums that others have, 16 bytes of a thread together
constexpr int SHARE = (EIGHTS + CLUSTER - 1) / CLUSTER;      // of a thread's eights, of each block
constexpr u32 X_SCALES = GIVEN + (CLUSTER - 1) * SHARE * MULTIPLYING * 32;
#if defined(BLOCKS)
constexpr int NUM_X_SCALES = STAGES * COLUMNS;
#elif defined(ONE_X_SCALE)
constexpr int NUM_X_SCALES = 0;
#else
#define OF_ROWS_OF_X
constexpr int NUM_X_SCALES = MULTIPLYING;
#endif
constexpr u32 FULL = X_SCALES + NUM_X_SCALES * 4;            // barriers
constexpr u32 EMPTY = FULL + STAGES * 8;
constexpr u32 W_SCALES = EMPTY + STAGES * 8;                 // of each stage, of BLOCKS

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

// 16 bytes of memory that is read once, or several times; and 4.
__device__ __forceinline__ void copy_once(u32 to, const unsigned char* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void copy_piece(u32 to, const unsigned char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_scale(u32 to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ float load_scale(u32 from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}

__device__ __forceinline__ float2 load_scales(u32 from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

__device__ __forceinline__ void store_scale(u32 to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

__device__ __forceinline__ void sync_multiplying() { asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLYING) : "memory"); }

__device__ __forceinline__ float4 load_four(u32 from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from) : "memory");
  return x;
}

// To a block of the cluster.
__device__ __forceinline__ void give_four(u32 to, u32 rank, const float* x) {
  asm volatile("{ .reg .u32 far; mapa.shared::cluster.u32 far, %0, %1; "
               "st.shared::cluster.v4.f32 [far], {%2, %3, %4, %5}; }" ::
                   "r"(to), "r"(rank), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// What a thread wrote before it arrives, others read after they have waited.
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

// --- w and x ---------------------------------------------------------------------------------------------------------

struct Weight {
  const unsigned char *values, *x;
  const float *scales, *x_scales;
  const Element* bias;
  int outputs, inputs;
};

// --- who does what ---------------------------------------------------------------------------------------------------

// A block's stages, of each of its tiles: `wide` of these have the same rows of w, and follow one another.
struct Work {
  int tiles, wide, clusters, first_tile, first, end;

  __device__ __forceinline__ Work(const Weight& w, int rows) {
    const int stages = w.inputs / STAGE_INPUTS, rank = blockIdx.x % CLUSTER;
    wide = (rows + COLUMNS - 1) / COLUMNS;
    tiles = (w.outputs + TILE - 1) / TILE * wide;
    clusters = gridDim.x / CLUSTER;
    first_tile = blockIdx.x / CLUSTER;
    first = stages * rank / CLUSTER, end = stages * (rank + 1) / CLUSTER;
  }

  // The first row of w in a tile, and the first row of x.
  __device__ __forceinline__ int row(int tile) const { return tile / wide * TILE; }
  __device__ __forceinline__ int column(int tile) const { return tile % wide * COLUMNS; }
};

// Calls for each stage, when its place in the ring is empty.
template <typename Copy>
__device__ __forceinline__ void fill(u32 base, const Work& work, Copy copy) {
  Place place = {0, 1};
  for (int tile = work.first_tile; tile < work.tiles; tile += work.clusters)
    for (int stage = work.first; stage < work.end; stage++) {
      barrier_wait(base + EMPTY + place.at * 8, place.parity);
      copy(tile, stage, place.at);
      arrive_when_copied(base + FULL + place.at * 8);
      place.advance(STAGES);
    }
}

// A thread's part of so many rows of 128 bytes that two warps copy, eight rows at a time, eight of their threads a row.
struct Part {
  int first, piece;

  __device__ __forceinline__ Part() : first(threadIdx.x % 64 / 8), piece(threadIdx.x % 8) {}

  // Of rows that are `apart` bytes from one to the next, so many of which are there.
  template <int ROWS, typename Copy>
  __device__ __forceinline__ void copy_rows(u32 to, const unsigned char* from, i64 apart, int present, Copy copy) const {
    const int own = present - first;
    to += place_in_block(first, piece);
    from += first * apart + piece * 16;
#pragma unroll
    for (int i = 0; i < ROWS; i += 8) {
      if (i < own) copy(to + i * 128, from);
      from += 8 * apart;
    }
  }
};

// Rows of w, and the scales of BLOCKS of them.
__device__ __forceinline__ void bring_weights(u32 base, const Weight& w, const Work& work) {
  const u64 policy = read_once_policy();
  const Part part;
  fill(base, work, [&](int tile, int stage, int at) {
    const int row = work.row(tile);
    part.copy_rows<TILE>(base + W_RING + at * W_STAGE, w.values + (i64)row * w.inputs + stage * STAGE_INPUTS, w.inputs,
                         w.outputs - row, [&](u32 to, const unsigned char* from) { copy_once(to, from, policy); });
#ifdef BLOCKS
    if (threadIdx.x % 64 == 0)
      copy_scale(base + W_SCALES + at * 4, w.scales + row / STAGE_INPUTS * (w.inputs / STAGE_INPUTS) + stage);
#endif
  });
}

// Rows of x, and their scales where BLOCKS have some.
__device__ __forceinline__ void bring_x(u32 base, const Weight& w, const Work& work, int rows) {
  const Part part;
  fill(base, work, [&](int tile, int stage, int at) {
    const int first = work.column(tile);
    part.copy_rows<COLUMNS>(base + X_RING + at * X_STAGE, w.x + (i64)first * w.inputs + stage * STAGE_INPUTS, w.inputs,
                            rows - first, [&](u32 to, const unsigned char* from) { copy_piece(to, from); });
#ifdef BLOCKS
    for (int i = threadIdx.x % 64; i < min(COLUMNS, rows - first); i += 64)
      copy_scale(base + X_SCALES + (at * COLUMNS + i) * 4,
                 w.x_scales + (i64)(first + i) * (w.inputs / STAGE_INPUTS) + stage);
#endif
  });
}

// Where the i-th sum of a thread stands in a tile: two rows, a multiple of 8 apart, and two columns of each eight.
__device__ __forceinline__ int row_of(int i) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
__device__ __forceinline__ int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// What sums of a row of w are multiplied with, and what is added then.
struct Row {
  float scale = 1, bias = 0;

  __device__ __forceinline__ Row(const Weight& w, int n) {
    if (n >= w.outputs) return;
#ifndef BLOCKS
#ifdef ONE_SCALE
    scale = w.scales[0];
#else
    scale = w.scales[n];
#endif
#ifdef ONE_X_SCALE
    scale *= w.x_scales[0];
#endif
#endif
#ifdef BIAS
    bias = widened(w.bias[n]);
#endif
  }
};

#ifdef OF_ROWS_OF_X
// The scales of x to shared memory, by all who multiply.
__device__ __forceinline__ void keep_x_scales(u32 base, const Weight& w, int rows) {
  const int m = threadIdx.x;
  if (m < rows) store_scale(base + X_SCALES + m * 4, w.x_scales[m]);
  sync_multiplying();
}
#endif

// Of four lanes with four words each, lane i gets word i of all.
__device__ __forceinline__ void exchange(u32 (&words)[4]) {
#pragma unroll
  for (int apart = 1; apart < 4; apart *= 2) {
    const bool is_upper = threadIdx.x & apart;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & apart) continue;
      const u32 got = __shfl_xor_sync(0xffffffff, is_upper ? words[i] : words[i + apart], apart);
      if (is_upper) words[i] = got;
      else words[i + apart] = got;
    }
  }
}

// y of the sums of 16 columns from m on, and of the warp's 16 rows of w from n on. Each lane writes 16 bytes.
__device__ __forceinline__ void finish(
    Element* y, u32 base, const Weight& w, const Row (&own_rows)[2], int m, int n, int rows, const float (&sums)[8]) {
  u32 words[4];    // two columns each: of both rows, then the same 8 columns further
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const Row& row = own_rows[i % 2];
    float first = sums[2 * i] * row.scale, second = sums[2 * i + 1] * row.scale;
#ifdef OF_ROWS_OF_X
    const float2 scales = load_scales(base + X_SCALES + (m + column_of(2 * i)) * 4);
    first *= scales.x, second *= scales.y;
#endif
    words[i] = transposed(rounded(first + row.bias, second + row.bias));
  }
  exchange(words);
  const int lane = threadIdx.x % 32;
  m += lane % 4 / 2 * 8 + lane / 4, n += lane % 2 * 8;
  if (m >= rows || n >= w.outputs) return;
  Element* to = y + (i64)m * w.outputs + n;
  if (w.outputs % 8 == 0) {
    *(uint4*)to = uint4{words[0], words[1], words[2], words[3]};
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (n + i < w.outputs) to[i] = words[i / 2] >> i % 2 * 16;
}

// Each block is given a share of the eights of all: every CLUSTER-th. Writes those that it has then.
__device__ __forceinline__ void join(
    Element* y, u32 base, const Weight& w, float (&sums)[SUMS], const Row (&own_rows)[2], int row, int column,
    int rows) {
  const int rank = blockIdx.x % CLUSTER;
  const auto place_from = [&](int source, int four) {    // of a block that gives
    return base + GIVEN + (((source * SHARE + four / 2 / CLUSTER) * 2 + four % 2) * MULTIPLYING + threadIdx.x) * 16;
  };
  if (CLUSTER > 1) {
    wait_for_cluster();    // all have begun
#pragma unroll
    for (int four = 0; four < 2 * EIGHTS; four++) {
      const int owner = four / 2 % CLUSTER;
      if (owner != rank) give_four(place_from(rank - (rank > owner), four), owner, sums + 4 * four);
    }
    arrive_at_cluster();
    wait_for_cluster();
  }
#pragma unroll
  for (int eight = 0; eight < EIGHTS; eight++) {
    if (eight % CLUSTER != rank) continue;
    float total[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
    for (int source = 0; source < CLUSTER; source++)
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float* own = sums + 8 * eight + i;
        const float4 part = source == rank ? float4{own[0], own[1], own[2], own[3]}
                                           : load_four(place_from(source - (source > rank), 2 * eight + i / 4));
        total[i] += part.x, total[i + 1] += part.y, total[i + 2] += part.z, total[i + 3] += part.w;
      }
    finish(y, base, w, own_rows, column + 16 * eight, row + threadIdx.x / 32 * 16, rows, total);
  }
}

// A warp group: 64 rows of each tile. The products of a stage are added up while those of the next one are made.
__device__ __forceinline__ void multiply_tiles(Element* y, u32 base, const Weight& w, const Work& work, int rows) {
  const int lane = threadIdx.x % 32, group = threadIdx.x / 128;
  const int last = work.end - 1;
  Place begun = {0, 0}, added = {0, 0};
  for (int tile = work.first_tile; tile < work.tiles; tile += work.clusters) {
    const int row = work.row(tile);
    const Row own_rows[2] = {{w, row + row_of(0)}, {w, row + row_of(2)}};
    float sums[SUMS], even[SUMS], odd[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0;
    const auto begin = [&](float (&products)[SUMS]) {
      barrier_wait(base + FULL + begun.at * 8, begun.parity);
      show_to_tensor_cores();
      const u32 of_w = base + W_RING + begun.at * W_STAGE + group * 64 * 128, of_x = base + X_RING + begun.at * X_STAGE;
      let_products_begin();
#pragma unroll
      for (int step = 0; step < STAGE_INPUTS / 32; step++)
        multiply_group_float8<COLUMNS>(products, described(of_w + step * 32), described(of_x + step * 32), step > 0);
      end_batch();
      begun.advance(STAGES);
    };
    const auto add = [&](const float (&products)[SUMS]) {
#ifdef BLOCKS
      const float scale = load_scale(base + W_SCALES + added.at * 4);
#pragma unroll
      for (int i = 0; i < SUMS; i += 4) {
        const float2 of_x = load_scales(base + X_SCALES + (added.at * COLUMNS + column_of(i)) * 4);
        const float first = scale * of_x.x, second = scale * of_x.y;
        sums[i] += products[i] * first, sums[i + 1] += products[i + 1] * second;
        sums[i + 2] += products[i + 2] * first, sums[i + 3] += products[i + 3] * second;
      }
#else
#pragma unroll
      for (int i = 0; i < SUMS; i++) sums[i] += products[i];
#endif
      __syncwarp();
      if (lane == 0) barrier_arrive(base + EMPTY + added.at * 8);
      added.advance(STAGES);
    };
    begin(even);
    for (int stage = work.first;; stage += 2) {
      if (stage == last) {
        wait_for_batches<0>();
        add(even);
        break;
      }
      begin(odd);
      wait_for_batches<1>();
      add(even);
      if (stage + 1 == last) {
        wait_for_batches<0>();
        add(odd);
        break;
      }
      begin(even);
      wait_for_batches<1>();
      add(odd);
    }
    join(y, base, w, sums, own_rows, row, work.column(tile), rows);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) product_float8(
    Element* y, const unsigned char* x, const unsigned char* values, const float* scales, const float* x_scales,
    const Element* bias, i64 rows, i64 outputs, i64 inputs) {
  extern __shared__ __align__(1024) unsigned char memory[];
  let_next_kernel_start();
  const u32 base = shared_address(memory);
  const Weight w = {values, x, scales, x_scales, bias, (int)outputs, (int)inputs};
  const Work work(w, (int)rows);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x < STAGES) {
    barrier_init(base + FULL + threadIdx.x * 8, COPYING);
    barrier_init(base + EMPTY + threadIdx.x * 8, W_WARP);
    barrier_init_fence();
  }
  __syncthreads();
  if (CLUSTER > 1) arrive_at_cluster();
  if (warp < W_WARP) {
    if (HAS_MANY_SUMS) take_registers();
    wait_for_kernel_in_front();
#ifdef OF_ROWS_OF_X
    keep_x_scales(base, w, (int)rows);
#endif
    multiply_tiles(y, base, w, work, (int)rows);
    return;
  }
  if (HAS_MANY_SUMS) give_registers();
  if (warp < X_WARP) {
    bring_weights(base, w, work);
  } else {
    wait_for_kernel_in_front();
    bring_x(base, w, work, (int)rows);
  }
  if (CLUSTER > 1) {
    wait_for_cluster();
    arrive_at_cluster();
    wait_for_cluster();
  }
}
