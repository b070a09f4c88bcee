// score_keys: the scores of keys in pages of a cache, for rows that see more keys than are selected.
//
//   score[key] = sum_h weights[h] * max(SCALE * queries[h] . keys[key], 0)
//
// The keys of all rows come in blocks of 16, one row's after the other's. Each CTA takes as many of these blocks as the
// others, one after the other, so that rows of any lengths keep all of them busy. Its warps take turns; each has a ring
// of its own in shared memory, which it fills by itself, and the queries in registers:
//
//   products [16 keys x 8 heads] = keys [16 x SIZE] * queries [SIZE x 8]         mma.m16n8k16, keys as its rows
//
// A lane takes eight elements of a key or a query together, 16 bytes: so the elements come in another order than in
// memory, the same for both.
//
// Programmatic dependent launch: the kernel lets the next one start at once. Before it waits for the kernel in front, it
// reads the lists of the step, and copies blocks of keys of earlier steps.
//
// Defines, beside those of rows.cuh:
//   FLOAT16           elements are float16; else bfloat16
//   HEADS, SIZE       a multiple of 8 and one of 32, of no more than 8192 elements together
//   SCALE             more than 0
//   WARPS, STAGES     of a CTA, and blocks in the ring of a warp

#include "half.cuh"
#include "sparse_attention/rows.cuh"

constexpr int KEYS = 16;                            // of a block
constexpr int TILES = HEADS / 8;
constexpr int TOGETHER = TILES % 4 == 0 ? 4 : TILES % 2 == 0 ? 2 : 1;    // whose products are on their way at once
constexpr int STEPS = SIZE / 32;                    // two products of 16 elements each
constexpr int PIECES = SIZE / 8;                    // of 16 bytes, of a key
constexpr int BLOCK_BYTES = KEYS * PIECES * 16;
constexpr float FACTOR = SCALE;
constexpr bool IN_ONE_PAGE = PAGE_SIZE % KEYS == 0;    // all keys of a block

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

struct Piece { u32 words[4]; };

// So that it is near when it is loaded.
__device__ __forceinline__ void ask_early(const int* number) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(number));
}

__device__ __forceinline__ Piece load_piece(u32 from) {
  Piece x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3]) : "r"(from) : "memory");
  return x;
}

// --- blocks of keys --------------------------------------------------------------------------------------------------

// Where a warp is among the blocks of all rows: its row, the number of its first block, and of the next row's.
struct Place {
  Row row;
  int first, end;
};

__device__ __forceinline__ int blocks_of(const Row& row) {
  return row.num_keys > COUNT ? (row.num_keys + KEYS - 1) / KEYS : 0;
}

// `own` is the lane's row of the first 32.
__device__ __forceinline__ int blocks_of_all(const Row& own, const Lists& lists) {
  int count = blocks_of(own);
  for (int first = 32; first < lists.num_rows; first += 32)
    count += blocks_of(row_of(first + threadIdx.x % 32, lists));
  return __reduce_add_sync(0xffffffff, count);
}

// Of a block that exists.
__device__ __forceinline__ Place place_of_block(int block, Row own, const Lists& lists) {
  int before = 0;
  for (int first = 32;; first += 32) {
    const int count = blocks_of(own), end = before + sum_up_to(count);
    if (const u32 found = __ballot_sync(0xffffffff, end > block)) {
      const int lane = __ffs(found) - 1;
      const auto of_it = [&](int value) { return __shfl_sync(0xffffffff, value, lane); };
      return {{of_it(own.token), of_it(own.num_keys), of_it(own.old_keys), of_it(own.kept), of_it(own.first_page)},
              of_it(end - count), of_it(end)};
    }
    before = __shfl_sync(0xffffffff, end, 31);
    own = row_of(first + threadIdx.x % 32, lists);
  }
}

struct Cache {
  const Element* keys;
  i64 stride_p, stride_s;
};

// The page of a lane's key, of a row's block: of the last key for those that the row doesn't see.
__device__ __forceinline__ const int* page_at(const Row& row, int block, const Lists& lists) {
  const int key = block * KEYS + (IN_ONE_PAGE ? 0 : threadIdx.x % KEYS);
  return lists.page_indices + row.first_page + min(key, row.num_keys - 1) / PAGE_SIZE;
}

__device__ __forceinline__ int page_of(const Row& row, int block, const Lists& lists) {
  return *page_at(row, block, lists);
}

// Pieces of two neighbouring rows that are loaded together are in different banks.
__device__ __forceinline__ u32 piece_at(int row, int piece) {
  return (row * PIECES + (PIECES % 8 == 0 ? piece ^ row % 2 * 4 : piece)) * 16;
}

// One warp copies the keys of a row's block that it sees. What is in the place of others gives scores that nobody reads.
__device__ __forceinline__ void copy_block(const Cache& cache, const Row& row, int block, int page, u32 stage) {
#pragma unroll
  for (int i = 0; i < KEYS * PIECES / 32; i++) {
    const int own = threadIdx.x % 32 + 32 * i, at = own / PIECES, piece = own % PIECES, key = block * KEYS + at;
    const i64 of_row = IN_ONE_PAGE ? page : __shfl_sync(0xffffffff, page, at);
    const int slot = IN_ONE_PAGE ? block * KEYS % PAGE_SIZE + at : key % PAGE_SIZE;
    copy_piece(stage + piece_at(at, piece), cache.keys + (of_row * cache.stride_p + slot * cache.stride_s + piece * 8),
               key < row.num_keys);
  }
}

__device__ __forceinline__ bool is_new(const Row& row, int block) { return (block + 1) * KEYS > row.old_keys; }

// --- scores ----------------------------------------------------------------------------------------------------------

// A lane has head `lane / 4` of each tile, and eight elements of each step; and the weights of two heads.
struct Queries {
  Piece pieces[TILES][STEPS];
  float weights[TILES][2];
};

struct Given {
  const Element* q;
  const float* weights;
  i64 q_stride_t, q_stride_h, q_stride_d, weights_stride_t, weights_stride_h;
};

__device__ __forceinline__ void load_queries(Queries& to, const Given& given, i64 token) {
  const int lane = threadIdx.x % 32;
  const Element* q = given.q + token * given.q_stride_t + lane / 4 * given.q_stride_h;
  const bool in_pieces = given.q_stride_d == 1 && ((u64)given.q | (u64)(2 * given.q_stride_h) |
                                                  (u64)(2 * given.q_stride_t)) % 16 == 0;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const Element* from = q + tile * 8 * given.q_stride_h + (step * 32 + lane % 4 * 8) * given.q_stride_d;
      if (in_pieces) {
        to.pieces[tile][step] = *(const Piece*)__builtin_assume_aligned(from, 16);
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
          to.pieces[tile][step].words[i] =
              from[2 * i * given.q_stride_d] | (u32)from[(2 * i + 1) * given.q_stride_d] << 16;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
      to.weights[tile][i] =
          given.weights[token * given.weights_stride_t + (tile * 8 + lane % 4 * 2 + i) * given.weights_stride_h];
  }
}

// Of keys `lane / 4` and that + 8 of a block, over the lane's heads alone.
__device__ __forceinline__ void add_scores(float (&scores)[2], const Queries& queries, u32 stage) {
  const int row = threadIdx.x % 32 / 4, piece = threadIdx.x % 4;
  Piece low[STEPS], high[STEPS];
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    low[step] = load_piece(stage + piece_at(row, step * 4 + piece));
    high[step] = load_piece(stage + piece_at(row + 8, step * 4 + piece));
  }
#pragma unroll
  for (int tile = 0; tile < TILES; tile += TOGETHER) {
    float products[TOGETHER][4] = {};
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) {
      const u32 *a = low[i / 2].words + i % 2 * 2, *b = high[i / 2].words + i % 2 * 2;
      const u32 keys[4] = {a[0], b[0], a[1], b[1]};
#pragma unroll
      for (int j = 0; j < TOGETHER; j++) {
        const u32* q = queries.pieces[tile + j][i / 2].words + i % 2 * 2;
        multiply_add(products[j], keys, q[0], q[1]);
      }
    }
#pragma unroll
    for (int j = 0; j < TOGETHER; j++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        scores[i / 2] += positive(products[j][i] * FACTOR) * queries.weights[tile + j][i % 2];
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) score_keys(
    int* scores, const Element* q, const float* weights, const Element* keys, const int* cu_seqlens,
    const int* kv_lens, const int* page_indices, const int* page_indptr, const int* page_start, i64 num_rows,
    i64 num_seqs, i64 num_slots, i64 q_stride_t, i64 q_stride_h, i64 q_stride_d, i64 weights_stride_t,
    i64 weights_stride_h, i64 stride_p, i64 stride_s) {
  extern __shared__ __align__(128) unsigned char memory[];
  let_next_kernel_start();
  const Lists lists = {cu_seqlens, kv_lens, page_indices, page_indptr, page_start, (int)num_seqs, (int)num_rows, num_slots};
  const Given given = {q, weights, q_stride_t, q_stride_h, q_stride_d, weights_stride_t, weights_stride_h};
  const Cache cache = {keys, stride_p, stride_s};
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const u32 ring = shared_address(memory) + warp * STAGES * BLOCK_BYTES;
  const Row own_row = row_of(lane, lists);
  const i64 all = blocks_of_all(own_row, lists);
  const int first = (int)(all * blockIdx.x / gridDim.x) + warp, end = (int)(all * (blockIdx.x + 1) / gridDim.x);
  if (first >= end) {
    wait_for_kernel_in_front();    // else what is behind might not wait for it
    return;
  }

  // The pages of the ring's first blocks are all asked for before any is used.
  const Place begin = place_of_block(first, own_row, lists);
  Place ahead = begin;    // of block `first + stage * WARPS`
  const auto follow = [&](Place& at, int block) {
    if (block >= at.end) at = place_of_block(block, own_row, lists);
  };
#pragma unroll 1
  for (int block = first; block < min(end, first + STAGES * WARPS); block += WARPS) {
    follow(ahead, block);
    ask_early(page_at(ahead.row, block - ahead.first, lists));
  }
  bool has_new = false;    // one of these blocks has keys of this step
  {
    Place at = begin;
#pragma unroll 1
    for (int stage = 0; stage < STAGES; stage++) {
      const int block = first + stage * WARPS;
      if (block < end) {
        follow(at, block);
        const int own = block - at.first;
        if (is_new(at.row, own))
          has_new = true;
        else
          copy_block(cache, at.row, own, page_of(at.row, own, lists), ring + stage * BLOCK_BYTES);
      }
      end_group_of_copies();
    }
  }
  wait_for_kernel_in_front();
  if (has_new) {
    Place at = begin;
#pragma unroll 1
    for (int stage = 0; stage < STAGES && first + stage * WARPS < end; stage++) {
      follow(at, first + stage * WARPS);
      const int own = first + stage * WARPS - at.first;
      if (is_new(at.row, own))
        copy_block(cache, at.row, own, page_of(at.row, own, lists), ring + stage * BLOCK_BYTES);
    }
    end_group_of_copies();
    wait_for_copies<0>();
  }

  Queries queries;
  Place place = begin;
  load_queries(queries, given, place.row.token);
  int at = 0, copied = first + STAGES * WARPS, page = 0;    // the page of block `copied`, asked for one block ahead
  const auto ask = [&] {
    if (copied >= end) return;
    follow(ahead, copied);
    page = page_of(ahead.row, copied - ahead.first, lists);
  };
  ask();
#pragma unroll 1
  for (int i = first; i < end; i += WARPS) {
    if (i >= place.end) {
      place = place_of_block(i, own_row, lists);
      load_queries(queries, given, place.row.token);
    }
    wait_for_copies<STAGES - 1>();    // the group of a block's copies has as many after it
    __syncwarp();
    const u32 stage = ring + at * BLOCK_BYTES;
    float sums[2] = {0, 0};
    add_scores(sums, queries, stage);
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int other = 1; other < 4; other *= 2) sums[j] += __shfl_xor_sync(0xffffffff, sums[j], other);
    const int key = (i - place.first) * KEYS + lane / 4 + lane % 4 * 8;    // of two lanes of four
    if (lane % 4 < 2 && key < place.row.num_keys)
      scores[place_of(place.row, lists) + key] = in_order(lane % 4 ? sums[1] : sums[0]);
    __syncwarp();
    if (copied < end) {
      const Row row = ahead.row;
      const int block = copied - ahead.first, own_page = page;
      copied += WARPS;
      ask();
      copy_block(cache, row, block, own_page, stage);
    }
    end_group_of_copies();
    at = at + 1 == STAGES ? 0 : at + 1;
  }
}
