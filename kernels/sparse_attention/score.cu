// score_keys: the scores of keys in pages of a cache, for rows that see more keys than are selected.
//
// The keys of all rows come in tiles of 64, one row's after the other's. Each CTA takes as many tiles as the others, one
// after the other, so that rows of any lengths keep all of them busy. Four warps bring keys to a ring; two warp groups take
// turns with its stages, and multiply a row's heads, of which each has a copy.
//
// Programmatic dependent launch: the kernel lets the next one start at once. Before it waits for the kernel in front, it
// reads the lists of the step, and has keys of earlier steps brought.
//
// Defines, beside those of rows.cuh and of heads.cuh but COLUMNS and ARE_READ_ONCE:
//   STAGES            tiles in the ring: an even number

#include "half.cuh"
#include "ring.cuh"
#include "warp_group.cuh"
#include "sparse_attention/rows.cuh"

constexpr int COLUMNS = HEADS < 16 ? 16 : HEADS;    // warp groups multiply no fewer
constexpr bool ARE_READ_ONCE = true;
#include "sparse_attention/heads.cuh"

constexpr int PAGES_AT_ONCE = 4;                    // which a lane asks for together, as many tiles ahead
static_assert(STAGES % 2 == 0, "a stage is always the same warp group's");

// Where things are in shared memory, in bytes.
constexpr u32 RING = 0;
constexpr u32 QUERIES = RING + STAGES * STAGE_BYTES;
constexpr u32 FULL = QUERIES + 2 * BLOCKS * QUERY_BYTES;    // barriers
constexpr u32 EMPTY = FULL + STAGES * 8;

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

__device__ __forceinline__ void sync_group(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

// --- tiles -----------------------------------------------------------------------------------------------------------

// A row, the number of its first tile among those of all rows, and of the next row's.
struct Tiles {
  Row row;
  int first, end;
};

__device__ __forceinline__ int tiles_of(const Row& row) {
  return row.num_keys > COUNT ? (row.num_keys + KEYS - 1) / KEYS : 0;
}

// `own` is the lane's row of the first 32.
__device__ __forceinline__ int tiles_of_all(const Row& own, const Lists& lists) {
  int count = tiles_of(own);
  for (int first = 32; first < lists.num_rows; first += 32)
    count += tiles_of(row_of(first + threadIdx.x % 32, lists));
  return __reduce_add_sync(0xffffffff, count);
}

// Of a tile that exists.
__device__ __forceinline__ Tiles row_of_tile(int tile, Row own, const Lists& lists) {
  int before = 0;
  for (int first = 32;; first += 32) {
    const int count = tiles_of(own), end = before + sum_up_to(count);
    if (const u32 found = __ballot_sync(0xffffffff, end > tile)) {
      const int lane = __ffs(found) - 1;
      const auto of_it = [&](int value) { return __shfl_sync(0xffffffff, value, lane); };
      return {{of_it(own.token), of_it(own.num_keys), of_it(own.old_keys), of_it(own.kept), of_it(own.first_page)},
              of_it(end - count), of_it(end)};
    }
    before = __shfl_sync(0xffffffff, end, 31);
    own = row_of(first + threadIdx.x % 32, lists);
  }
}

// --- what warps do ---------------------------------------------------------------------------------------------------

// Has tiles of a row brought, from number `first` of its own to `end`. Those with keys of this step are there when the
// kernel in front has ended. Pages are asked for some tiles ahead.
__device__ __forceinline__ void bring_tiles(u32 base, const Cache& cache, const Row& row, int first, int end, Place& place,
                                            bool& has_waited, const int* pages) {
  const auto page_of = [&](int tile) {
    const int key = tile * KEYS + own_key();
    return tile < end && key < row.num_keys ? pages[key / PAGE_SIZE] : 0;
  };
  int own[PAGES_AT_ONCE], next[PAGES_AT_ONCE];
#pragma unroll
  for (int i = 0; i < PAGES_AT_ONCE; i++) own[i] = page_of(first + i);
#pragma unroll 1
  for (; first < end; first += PAGES_AT_ONCE) {
#pragma unroll
    for (int i = 0; i < PAGES_AT_ONCE; i++) next[i] = page_of(first + PAGES_AT_ONCE + i);
#pragma unroll
    for (int i = 0; i < PAGES_AT_ONCE; i++) {
      const int tile = first + i;
      if (tile < end) {
        if (!has_waited && (tile + 1) * KEYS > row.old_keys) {
          wait_for_kernel_in_front();
          has_waited = true;
        }
        barrier_wait(base + EMPTY + place.at * 8, place.parity);
        bring_stage(base + RING + place.at * STAGE_BYTES, cache, tile * KEYS + own_key(), own[i], row.num_keys,
                    base + FULL + place.at * 8);
        place.advance(STAGES);
      }
      own[i] = next[i];
    }
  }
}

// A warp group's share of these tiles: every other one.
__device__ __forceinline__ void score_tiles(int* scores, u32 base, const Given& given, const Row& row, int first, int end,
                                            Place& place) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const u32 queries = base + QUERIES + group * BLOCKS * QUERY_BYTES;
  Weights weights;
  sync_group(group);    // nobody multiplies by the row before
  load_queries<128>(queries, given, {row.token, 1}, threadIdx.x % 128);
  load_weights(weights, given, {row.token, 1});
  sync_group(group);
#pragma unroll 1
  for (int tile = first; tile < end; tile++, place.advance(STAGES)) {
    if (place.at % 2 != group) continue;
    barrier_wait(base + FULL + place.at * 8, place.parity);
    show_to_tensor_cores();
    float products[COLUMNS / 2];
    let_products_begin();
#pragma unroll
    for (int step = 0; step < SIZE / 16; step++)
      multiply_group<COLUMNS>(
          products, described(base + RING + place.at * STAGE_BYTES + step / 4 * BLOCK_BYTES + step % 4 * 32),
          described(queries + step / 4 * QUERY_BYTES + step % 4 * 32), step > 0);
    end_batch();
    wait_for_batches<0>();
    if (lane == 0) barrier_arrive(base + EMPTY + place.at * 8);
    float sums[2];
    add_up(sums, products, weights);
    const int key = tile * KEYS + warp * 16 + lane / 4 + lane % 4 * 8;    // of two lanes of four
    if (lane % 4 < 2 && key < row.num_keys) scores[key] = in_order(lane % 4 ? sums[1] : sums[0]);
  }
}

extern "C" __global__ void __launch_bounds__(MULTIPLYING + BRINGING, 1) score_keys(
    int* scores, const Element* q, const float* weights, const Element* keys, const int* cu_seqlens,
    const int* kv_lens, const int* page_indices, const int* page_indptr, const int* page_start, i64 num_rows,
    i64 num_seqs, i64 num_slots, i64 q_stride_t, i64 q_stride_h, i64 q_stride_d, i64 weights_stride_t,
    i64 weights_stride_h, i64 stride_p, i64 stride_s) {
  extern __shared__ __align__(1024) unsigned char memory[];
  let_next_kernel_start();
  const Lists lists = {cu_seqlens, kv_lens, page_indices, page_indptr, page_start, (int)num_seqs, (int)num_rows, num_slots};
  const u32 base = shared_address(memory);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x < STAGES) {
    barrier_init(base + FULL + threadIdx.x * 8, BRINGING);
    barrier_init(base + EMPTY + threadIdx.x * 8, 4);
    barrier_init_fence();
  }
  const Row own_row = row_of(threadIdx.x % 32, lists);
  const i64 all = tiles_of_all(own_row, lists);
  const int first = (int)(all * blockIdx.x / gridDim.x), end = (int)(all * (blockIdx.x + 1) / gridDim.x);
  const bool is_bringing = warp >= MULTIPLYING / 32;
  Place place = {0, is_bringing ? 1u : 0u};
  bool has_waited = false;
  __syncthreads();
  if (!is_bringing) wait_for_kernel_in_front();
#pragma unroll 1
  for (int tile = first; tile < end;) {
    const Tiles at = row_of_tile(tile, own_row, lists);
    const int own_first = tile - at.first, own_end = min(end, at.end) - at.first;
    if (is_bringing)
      bring_tiles(base, {keys, stride_p, stride_s}, at.row, own_first, own_end, place, has_waited,
                  page_indices + at.row.first_page);
    else
      score_tiles(scores + place_of(at.row, lists), base,
                  {q, weights, q_stride_t, q_stride_h, q_stride_d, weights_stride_t, weights_stride_h}, at.row, own_first,
                  own_end, place);
    tile = at.end;
  }
  if (is_bringing && !has_waited) wait_for_kernel_in_front();
}
