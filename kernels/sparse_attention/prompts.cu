// select_prompts: what the queries of sequences with several select, and -1 for padding.
//
// A CTA takes TOKENS neighbouring queries of a sequence at a time, and all keys that the last of them sees. Four warps
// bring the keys, 64 at a time; two warp groups take turns with them, and multiply all heads of all TOKENS:
//
//   products [64 keys x heads] = keys [64 x SIZE] * queries [SIZE x heads]      half of the heads at a time
//
// The scores of the tile are in memory that only this CTA uses. Then all threads pick each token's (pick.cuh), while they
// are in the L2 cache.
//
// Programmatic dependent launch: the kernel lets the next one start at once. All it reads but the lists is written by
// kernels in front.
//
// Defines, beside those of rows.cuh, of which BY_TOKEN is one, of heads.cuh but COLUMNS and
// ARE_READ_ONCE, and of pick.cuh:
//   TOKENS            of a tile: 4, or 2 of 128 heads
//   STAGES            keys in the ring, in 64: an even number

#include "half.cuh"
#include "ring.cuh"
#include "warp_group.cuh"
#include "sparse_attention/rows.cuh"

constexpr int COLUMNS = TOKENS * HEADS, HALF = COLUMNS / 2;
constexpr bool ARE_READ_ONCE = false;
#include "sparse_attention/heads.cuh"

constexpr int TOGETHER = TOKENS / 2;                         // tokens of a half
static_assert(STAGES % 2 == 0 && 32 * WARPS == MULTIPLYING + BRINGING, "a stage is always the same warp group's");

// Where things are in shared memory, in bytes.
constexpr u32 RING = 0;
constexpr u32 QUERIES = RING + STAGES * STAGE_BYTES;
constexpr u32 FULL = QUERIES + BLOCKS * QUERY_BYTES;         // barriers
constexpr u32 EMPTY = FULL + STAGES * 8;
constexpr u32 PICKS_AT = EMPTY + STAGES * 8;
static_assert(PICKS_AT % 16 == 0, "fours are loaded there");

#include "sparse_attention/pick.cuh"

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

// Warp groups take turns: each waits for its own, which the other gives.
__device__ __forceinline__ void wait_for_turn(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(2 + group), "n"(MULTIPLYING) : "memory");
}

__device__ __forceinline__ void give_turn(int group) {
  asm volatile("bar.arrive %0, %1;" ::"r"(2 + group), "n"(MULTIPLYING) : "memory");
}

__device__ __forceinline__ void sync_multiplying_warps() {
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLYING) : "memory");
}

// --- tiles -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int tiles_of(const Sequence& seq) {
  const int queries = seq.end - seq.start;
  return queries > 1 ? (queries + TOKENS - 1) / TOKENS : 0;
}

// Of a lane's sequence; one that doesn't exist has no tiles.
__device__ __forceinline__ Sequence own_sequence(int first, const Lists& lists) {
  const int own = first + threadIdx.x % 32;
  return own < lists.num_seqs ? sequence_in(own, lists) : Sequence{0, 0, 0, 0, 0, 0};
}

// How many there are, and the most keys that a query of them sees.
struct Tiles {
  int count, longest;
};

__device__ __forceinline__ Tiles tiles_of_all(const Lists& lists) {
  Tiles all = {0, 0};
  for (int first = 0; first < lists.num_seqs; first += 32) {
    const Sequence seq = own_sequence(first, lists);
    const int count = tiles_of(seq);
    all.count += count;
    if (count > 0) all.longest = max(all.longest, row_in(seq.end - 1, seq).num_keys);
  }
  return {__reduce_add_sync(0xffffffff, all.count), __reduce_max_sync(0xffffffff, all.longest)};
}

struct Tile {
  Sequence seq;
  int first, count;    // tokens
};

// Of a tile that exists.
__device__ __forceinline__ Tile tile_at(int tile, const Lists& lists) {
  for (int first = 0, before = 0;; first += 32) {
    const Sequence seq = own_sequence(first, lists);
    const int count = tiles_of(seq), end = before + sum_up_to(count);
    if (const u32 found = __ballot_sync(0xffffffff, end > tile)) {
      const int lane = __ffs(found) - 1;
      const auto of_it = [&](int value) { return __shfl_sync(0xffffffff, value, lane); };
      const Sequence its = {of_it(seq.start), of_it(seq.end),        of_it(seq.length),
                            of_it(seq.kept),  of_it(seq.first_page), of_it(seq.end_page)};
      const int token = its.start + (tile - of_it(end - count)) * TOKENS;
      return {its, token, min(TOKENS, its.end - token)};
    }
    before = __shfl_sync(0xffffffff, end, 31);
  }
}

// --- keys ------------------------------------------------------------------------------------------------------------

// The keys of a tile, a stage after the other: of each a warp brings 16. Their pages are loaded a stage ahead.
__device__ __forceinline__ void bring_keys(u32 base, const Cache& cache, const int* pages, int count, Place& place) {
  const auto page_of = [&](int key) { return key < count ? pages[key / PAGE_SIZE] : 0; };
  int page = page_of(own_key());
#pragma unroll 1
  for (int first = 0; first < count; first += KEYS, place.advance(STAGES)) {
    const int key = first + own_key(), next_page = page_of(key + KEYS);
    barrier_wait(base + EMPTY + place.at * 8, place.parity);
    bring_stage(base + RING + place.at * STAGE_BYTES, cache, key, page, count, base + FULL + place.at * 8);
    page = next_page;
  }
}

// --- scores ----------------------------------------------------------------------------------------------------------

typedef float Products[HALF / 2];

// Half of the heads with the keys of a stage. The other warp group is let in when half of this is done: what both ask for
// at once ends at once, and then nothing is multiplied while both add up.
__device__ __forceinline__ void multiply_keys(Products& products, u32 base, int stage, int half, int group) {
  constexpr int STEPS = SIZE / 16;
  const u32 keys = base + RING + stage * STAGE_BYTES, queries = base + QUERIES + half * HALF * 128;
  wait_for_turn(group);
  let_products_begin();
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const int block = step / 4, at = step % 4 * 32;
    multiply_group<HALF>(products, described(keys + block * BLOCK_BYTES + at),
                         described(queries + block * QUERY_BYTES + at), step > 0);
    if (step == STEPS / 2 - 1) end_batch();
  }
  end_batch();
  wait_for_batches<1>();
  give_turn(1 - group);
  wait_for_batches<0>();
}

// Where the scores of a tile go: `stride` of each of its tokens, of keys that the last one sees.
struct Target {
  int* scores;
  i64 stride;
  int keys, tokens;
};

// Of the tokens of a half, and of the thread's keys, `key` and that + 8. Of four lanes with the same scores each writes one.
__device__ __forceinline__ void write_scores(const Target& to, const Products& products, const Weights& weights, int half,
                                             int key) {
  const int own = threadIdx.x % 4;
  float score = 0;
#pragma unroll
  for (int token = 0; token < TOGETHER; token++) {
    float sums[2];
    add_up(sums, products + token * (HEADS / 2), weights + half * (HALF / 8) + token * (HEADS / 8));
#pragma unroll
    for (int j = 0; j < 2; j++) score = own == token * 2 + j ? sums[j] : score;
  }
  const int token = half * TOGETHER + own / 2;
  key += own % 2 * 8;
  if (own < 2 * TOGETHER && token < to.tokens && key < to.keys) to.scores[token * to.stride + key] = in_order(score);
}

// A warp group takes every other stage, whatever tile it belongs to.
__device__ __forceinline__ void score_keys(const Target& to, const Weights& weights, u32 base, int group, Place& place) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int all = (to.keys + KEYS - 1) / KEYS, is_second = place.at % 2 != group;
#pragma unroll 1
  for (int i = 0; i < all; i++, place.advance(STAGES)) {
    if (place.at % 2 != group) continue;
    barrier_wait(base + FULL + place.at * 8, place.parity);
    show_to_tensor_cores();
#pragma unroll
    for (int half = 0; half < 2; half++) {
      Products products;
      multiply_keys(products, base, place.at, half, group);
      if (half == 1 && lane == 0) barrier_arrive(base + EMPTY + place.at * 8);
      write_scores(to, products, weights, half, i * KEYS + row);
    }
  }
  // Who has a stage less than the other gives its turns.
  for (int half = 0; half < 2 * (all % 2 && is_second); half++) {
    wait_for_turn(group);
    give_turn(1 - group);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) select_prompts(
    int* out, int* scores, const Element* q, const float* weights, const Element* keys, const int* cu_seqlens,
    const int* kv_lens, const int* page_indices, const int* page_indptr, const int* page_start, i64 num_tokens,
    i64 num_seqs, i64 num_places, i64 q_stride_t, i64 q_stride_h, i64 q_stride_d, i64 weights_stride_t,
    i64 weights_stride_h, i64 stride_p, i64 stride_s) {
  let_next_kernel_start();
  const u32 base = shared_address(memory);
  const Lists lists = {cu_seqlens, kv_lens, page_indices, page_indptr, page_start, (int)num_seqs, (int)num_tokens, 0};
  const Given given = {q, weights, q_stride_t, q_stride_h, q_stride_d, weights_stride_t, weights_stride_h};
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const Tiles tiles = tiles_of_all(lists);
  // As many CTAs as there is room for the scores of take tiles.
  const i64 stride = up_to_four(tiles.longest);
  const int ctas = (int)min((i64)gridDim.x, num_places / max((i64)1, TOKENS * stride));
  int* own = scores + blockIdx.x * TOKENS * stride;
  if (threadIdx.x < STAGES) {
    barrier_init(base + FULL + threadIdx.x * 8, BRINGING);
    barrier_init(base + EMPTY + threadIdx.x * 8, 4);
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_kernel_in_front();
  Place place = {0, warp < MULTIPLYING / 32 ? 0u : 1u};
  if (warp / 4 == 1) give_turn(0);
#pragma unroll 1
  for (int i = blockIdx.x; i < tiles.count && blockIdx.x < ctas; i += ctas) {
    const Tile tile = tile_at(i, lists);
    const int count = row_in(tile.first + tile.count - 1, tile.seq).num_keys;
    if (count > COUNT) {
      if (warp < MULTIPLYING / 32) {
        Weights own_weights;
        load_queries<MULTIPLYING>(base + QUERIES, given, {tile.first, tile.count}, threadIdx.x);
        load_weights(own_weights, given, {tile.first, tile.count});
        sync_multiplying_warps();
        score_keys({own, stride, count, tile.count}, own_weights, base, warp / 4, place);
      } else {
        bring_keys(base, {keys, stride_p, stride_s}, page_indices + tile.seq.first_page, count, place);
      }
      __syncthreads();
    }
#pragma unroll 1
    for (int j = 0; j < tile.count; j++) {
      const Row row = row_in(tile.first + j, tile.seq);
      pick_row(out + (i64)row.token * COUNT, row, own + j * stride, 0);
      __syncthreads();    // what the next one writes to shared memory, this one may still read
    }
  }
  for (int token = cu_seqlens[num_seqs] + blockIdx.x; token < num_tokens; token += gridDim.x)
    write_all(out + (i64)token * COUNT, {token, 0, 0, 0, 0}, 0);
}
