// attend_selected: what attend.cu does, of 64 heads, by two warp groups.
//
// A CTA takes a token, 64 of its heads, and some of the entries that are selected for it, in tiles of 64, one after the
// other. Four warps bring the tiles, row by row. Of the two groups that multiply one owns a tile, in turns:
//
//   scores [64 x 64]   = queries [64 x WIDTH] * keys [64 x WIDTH]^T     the owner, which makes weights of them
//   sums [64 x LATENT] = sums * fade + weights [64 x 64] * latents      each half of the latents
//
// The owner has the weights in registers. The other finds them where the rope parts of the keys were, which no sum needs.
//
// Weights are relative to a reference, which the owner of a tile is given by the owner of the one before. It is a highest
// score, but not always the highest so far: only if that is FAR above, the reference follows, and sums fade.
//
// Programmatic dependent launch, and defines: as in attend.cu; but ROWS are 64, STAGES 2, ROPE is 64, and LATENT 128, 256
// or 512.

#include "half.cuh"
#include "ring.cuh"
#include "warp_group.cuh"
#include "sparse_attention/token.cuh"
#include "sparse_attention/found.cuh"

constexpr int THREADS = MULTIPLYING + 128;
constexpr int WARPS = MULTIPLYING / 32, BRINGING = 4;        // warps
constexpr int OWN_ENTRIES = TILE / BRINGING;                 // of a warp that brings
constexpr int BLOCKS = WIDTH / 64;                           // of queries, and of a tile's keys; the last has rope parts
constexpr u32 STAGE_BYTES = BLOCKS * BLOCK_BYTES;
constexpr int OWN_SIZE = LATENT / 2;                         // of a warp group in the second product
constexpr int STEPS = 64 / 16;                               // of a block
constexpr float FAR = 8;                                     // in powers of 2
static_assert(ROWS == 64 && STAGES == 2 && ROPE == 64 && OWN_SIZE >= 64, "what the products are made for");
static_assert(JOINED_BYTES <= STAGES * STAGE_BYTES, "what is joined has room where the ring was");

// Where things are in shared memory, in bytes.
constexpr u32 RING = 0;
constexpr u32 QUERIES = RING + STAGES * STAGE_BYTES;
constexpr u32 REFERENCES = QUERIES + STAGE_BYTES;            // of each row
constexpr u32 FADES = REFERENCES + ROWS * 4;                 // by stage
constexpr u32 TOTALS = FADES + STAGES * ROWS * 4;            // of each row, by warp group
constexpr u32 EXISTS = TOTALS + 2 * ROWS * 4;                // of each stage a bit for each of the 64
constexpr u32 FULL = EXISTS + STAGES * 8;                    // barriers
constexpr u32 EMPTY = FULL + STAGES * 8;

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

__device__ __forceinline__ void store_half_word(u32 to, u32 x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"((u16)x) : "memory");
}

// The weights of a stage: the owner gives them, and goes on; the other waits for them.
__device__ __forceinline__ void give_weights(int stage) {
  asm volatile("bar.arrive %0, %1;" ::"r"(2 + stage), "n"(MULTIPLYING) : "memory");
}

__device__ __forceinline__ void wait_for_weights(int stage) {
  asm volatile("bar.sync %0, %1;" ::"r"(2 + stage), "n"(MULTIPLYING) : "memory");
}

__device__ __forceinline__ void sync_group(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(5 + group) : "memory");
}

__device__ __forceinline__ void sync_all_warps() { asm volatile("bar.sync 4, %0;" ::"n"(THREADS) : "memory"); }

// --- tiles -----------------------------------------------------------------------------------------------------------

// A warp brings the rows of its entries to a stage; zeros in the place of those that are no keys.
__device__ __forceinline__ void copy_rows(u32 base, int stage, int warp, const Key& key, const Cache& cache) {
  const int lane = threadIdx.x % 32, piece = lane % 8;
  const u32 exists = __ballot_sync(0xffffffff, key.number >= 0);
  const u64 row = (u64)row_of(key, cache);
#pragma unroll
  for (int i = 0; i < OWN_ENTRIES / 4; i++) {
    const int own = i * 4 + lane / 8;
    const Element* from = (const Element*)__shfl_sync(0xffffffff, row, own) + piece * 8;
    const u32 to = base + RING + stage * STAGE_BYTES + place_in_block(warp * OWN_ENTRIES + own, piece);
    const u32 bytes = exists >> own & 1 ? 16 : 0;
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) copy_piece(to + block * BLOCK_BYTES, from + block * 64, bytes);
  }
  arrive_when_copied(base + FULL + stage * 8);
  if (lane == 0) {
    store_half_word(base + EXISTS + stage * 8 + warp * 2, exists);
    barrier_arrive(base + FULL + stage * 8);
  }
}

// Entries are loaded two tiles before they are needed, and the pages of their keys one.
__device__ __forceinline__ void bring_tiles(u32 base, const int* selected, i64 stride, const Seen& seen,
                                            const Cache& cache, int first, int end) {
  const int warp = threadIdx.x / 32 - WARPS;
  const auto entry_in = [&](int tile) { return entry_of<OWN_ENTRIES>(selected, stride, tile, end, warp); };
  Key key = key_of(entry_in(first), seen);
  int next_entry = entry_in(first + 1);
  Place place = {0, 1};
#pragma unroll 1
  for (int tile = first; tile < end; tile++) {
    const Key next_key = key_of(next_entry, seen);
    next_entry = entry_in(tile + 2);
    barrier_wait(base + EMPTY + place.at * 8, place.parity);
    copy_rows(base, place.at, warp, key, cache);
    key = next_key;
    place.advance(STAGES);
  }
}

// --- products --------------------------------------------------------------------------------------------------------

// A thread has rows `row_of_thread()` and that + 8, and elements `lane % 4 * 2` and that + 1 of each eight.
typedef float Scores[TILE / 8][4];
typedef float Sums[1][OWN_SIZE / 8][4];
typedef u32 Weights[STEPS][4];

__device__ __forceinline__ int row_of_thread() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

struct Softmax {
  float reference[2], total[2];    // of scores in base 2; of weights, of the warp group's tiles and the lane's keys alone
};

__device__ __forceinline__ void multiply_keys(Scores& scores, u32 base, int stage) {
  let_products_begin();
#pragma unroll
  for (int block = 0; block < BLOCKS; block++)
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const u32 at = block * BLOCK_BYTES + step * 32;
      multiply_group<TILE>(&scores[0][0], described(base + QUERIES + at),
                           described(base + RING + stage * STAGE_BYTES + at), block + step > 0);
    }
  end_batch();
}

// The weights of a tile, in registers and for the other warp group; and `fades`, by which sums so far are multiplied.
__device__ __forceinline__ void weigh(Softmax& softmax, Weights& weights, float (&fades)[2], Scores& scores, u32 base,
                                      int stage, u64 exists) {
  const int lane = threadIdx.x % 32, row = row_of_thread();
  if (exists != ~0ull) {
    const u64 own = exists >> lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < TILE / 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (!(own >> (i * 8 + j % 2) & 1)) scores[i][j] = NONE;
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    float highest = NONE;
#pragma unroll
    for (int i = 0; i < TILE / 8; i++) highest = max(highest, max(scores[i][2 * j], scores[i][2 * j + 1]));
    highest = max(highest, __shfl_xor_sync(0xffffffff, highest, 1));
    highest = max(highest, __shfl_xor_sync(0xffffffff, highest, 2)) * FACTOR;
    const float before = softmax.reference[j], reference = highest > before + FAR ? highest : before;
    fades[j] = power_of_2(before - reference);
    softmax.reference[j] = reference;
    softmax.total[j] *= fades[j];
    if (lane % 4 == 0) {
      store_word(base + REFERENCES + (row + j * 8) * 4, __float_as_uint(reference));
      store_word(base + FADES + (stage * ROWS + row + j * 8) * 4, __float_as_uint(fades[j]));
    }
#pragma unroll
    for (int i = 0; i < TILE / 8; i++) {
      const float a = power_of_2(scores[i][2 * j] * FACTOR - reference);
      const float b = power_of_2(scores[i][2 * j + 1] * FACTOR - reference);
      softmax.total[j] += a + b;
      weights[i / 2][i % 2 * 2 + j] = rounded(a, b);
    }
  }
  sync_group(threadIdx.x / 128);    // no warp reads the keys any more
  const u32 to = base + RING + (stage + 1) * STAGE_BYTES - BLOCK_BYTES + lane % 4 * 4;
#pragma unroll
  for (int i = 0; i < TILE / 8; i++)
#pragma unroll
    for (int j = 0; j < 2; j++) store_word(to + place_in_block(row + j * 8, i), weights[i / 2][i % 2 * 2 + j]);
  show_to_tensor_cores();
}

__device__ __forceinline__ void fade(Sums& sums, const float (&fades)[2]) {
  if (!__any_sync(0xffffffff, fades[0] != 1 || fades[1] != 1)) return;
#pragma unroll
  for (int i = 0; i < OWN_SIZE / 8; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) sums[0][i][j] *= fades[j / 2];
}

// Of a warp group's half: the first of the 16 latents of a step.
__device__ __forceinline__ u64 latents_of(u32 base, int stage, int group, int step) {
  return described(base + RING + stage * STAGE_BYTES + group * (OWN_SIZE / 64) * BLOCK_BYTES + step * 16 * 128, BLOCK_BYTES);
}

__device__ __forceinline__ void add_own(Sums& sums, const Weights& weights, u32 base, int stage, int group) {
  let_products_begin();
#pragma unroll
  for (int step = 0; step < STEPS; step++)
    multiply_group<OWN_SIZE, 1>(&sums[0][0][0], weights[step], latents_of(base, stage, group, step), 1);
  end_batch();
}

__device__ __forceinline__ void add_others(Sums& sums, u32 base, int stage, int group) {
  const u32 weights = base + RING + (stage + 1) * STAGE_BYTES - BLOCK_BYTES;
  let_products_begin();
#pragma unroll
  for (int step = 0; step < STEPS; step++)
    multiply_group<OWN_SIZE, 1>(&sums[0][0][0], described(weights + step * 32), latents_of(base, stage, group, step), 1);
  end_batch();
}

// Gives a stage back when the products that read it are done: before the next one is waited for, so that both may be on
// their way.
__device__ __forceinline__ void give_back(u32 base, int& held) {
  wait_for_batches<0>();
  if (held >= 0 && threadIdx.x % 32 == 0) barrier_arrive(base + EMPTY + held * 8);
  held = -1;
}

// A warp group multiplies a CTA's tiles, of which every other one is its own.
__device__ __forceinline__ void multiply_tiles(Softmax& softmax, Sums& sums, u32 base, int group, int count) {
  const int row = row_of_thread();
  Place place = {0, 0};
  int held = -1;         // a stage that products still read
  int owner = 0;         // of the next tile that has keys
#pragma unroll 1
  for (int tile = 0; tile < count; tile++, place.advance(STAGES)) {
    const int stage = place.at;
    give_back(base, held);
    barrier_wait(base + FULL + stage * 8, place.parity);
    show_to_tensor_cores();
    const u64 exists = load_word(base + EXISTS + stage * 8) | (u64)load_word(base + EXISTS + stage * 8 + 4) << 32;
    if (exists == 0) {
      if (threadIdx.x % 32 == 0) barrier_arrive(base + EMPTY + stage * 8);
      continue;
    }
    float fades[2];
    if (owner == group) {
      Scores scores;
      Weights weights;
      multiply_keys(scores, base, stage);
      wait_for_batches<0>();
#pragma unroll
      for (int j = 0; j < 2; j++)
        softmax.reference[j] = __uint_as_float(load_word(base + REFERENCES + (row + j * 8) * 4));
      weigh(softmax, weights, fades, scores, base, stage, exists);
      give_weights(stage);
      fade(sums, fades);
      add_own(sums, weights, base, stage, group);
    } else {
      wait_for_weights(stage);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        fades[j] = __uint_as_float(load_word(base + FADES + (stage * ROWS + row + j * 8) * 4));
        softmax.total[j] *= fades[j];
      }
      fade(sums, fades);
      add_others(sums, base, stage, group);
    }
    held = stage;
    owner ^= 1;
  }
  wait_for_batches<0>();
}

// Of each row the reference and the total weight of the CTA, by row.
__device__ __forceinline__ void tell_rows(const Softmax& softmax, u32 base, int group) {
  const int lane = threadIdx.x % 32, row = row_of_thread();
#pragma unroll
  for (int j = 0; j < 2; j++) {
    float total = softmax.total[j];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    if (lane % 4 == 0) store_word(base + TOTALS + (group * ROWS + row + j * 8) * 4, __float_as_uint(total));
  }
  sync_multiplying_warps();
  if (threadIdx.x < ROWS) {
    const u32 own = base + TOTALS + threadIdx.x * 4;
    const float total = __uint_as_float(load_word(own)) + __uint_as_float(load_word(own + ROWS * 4));
    store_word(base + QUERIES + threadIdx.x * 8, load_word(base + REFERENCES + threadIdx.x * 4));
    store_word(base + QUERIES + threadIdx.x * 8 + 4, __float_as_uint(total));
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) attend_selected(
    Element* y, float* partial, float* weights, const Element* q_latent, const Element* q, const Element* keys,
    const int* selected, const Sink* sinks, const int* cu_seqlens, const int* kv_lens, const int* page_indices,
    const int* page_indptr, const int* page_start, i64 num_seqs, i64 num_parts, i64 q_stride_t, i64 q_stride_h,
    i64 q_stride_d, i64 stride_p, i64 stride_s, i64 selected_stride_t, i64 selected_stride_m,
    const Element* weight) {
  extern __shared__ __align__(1024) unsigned char memory[];
  let_next_kernel_start();
  const u32 base = shared_address(memory), rank = blockIdx.x % CLUSTER;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const i64 token = blockIdx.z;
  const int head = blockIdx.y * ROWS, num_rows = min(ROWS, HEADS - head);
  const Seen seen = seen_by(token, num_seqs, {cu_seqlens, kv_lens, page_indices, page_indptr, page_start});
#ifdef ASKS_FOR_WEIGHT
  ask_for_values(weight);
#endif
  if (threadIdx.x < STAGES) {
    barrier_init(base + FULL + threadIdx.x * 8, BRINGING * 32 + BRINGING);
    barrier_init(base + EMPTY + threadIdx.x * 8, WARPS);
    barrier_init_fence();
  }
  sync_all_warps();
  wait_for_kernel_in_front();
  const int all = seen.count > 0 ? (COUNT + TILE - 1) / TILE : 0, ctas = gridDim.x;
  const int first = all * (int)blockIdx.x / ctas, end = all * ((int)blockIdx.x + 1) / ctas;
  if (warp >= WARPS) {
    give_registers();
    bring_tiles(base, selected + token * selected_stride_t, selected_stride_m, seen, {keys, stride_p, stride_s}, first, end);
    leave();
    return;
  }
  take_registers();
  load_queries(
      {q_latent + (token * HEADS + head) * LATENT, q + token * q_stride_t + head * q_stride_h + NOPE * q_stride_d,
       q_stride_h, q_stride_d},
      num_rows,
      [&](int row, int piece) { return base + QUERIES + piece / 8 * BLOCK_BYTES + place_in_block(row, piece % 8); });
  const int group = warp / 4, row = row_of_thread();
  Softmax softmax = {{NONE, NONE}, {0, 0}};
#ifdef SINKS
  // A sink is a key whose value is zero: it is among the first entries' weights.
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int own = row + j * 8;
    if (blockIdx.x == 0 && own < num_rows) {
      softmax.reference[j] = widened(sinks[head + own]) * LOG2_E;
      softmax.total[j] = group == 0 && lane % 4 == 0 ? 1 : 0;
    }
  }
#endif
#pragma unroll
  for (int j = 0; j < 2; j++)
    if (group == 0 && lane % 4 == 0)
      store_word(base + REFERENCES + (row + j * 8) * 4, __float_as_uint(softmax.reference[j]));
  Sums sums;
#pragma unroll
  for (int i = 0; i < OWN_SIZE / 8 * 4; i++) ((float*)sums)[i] = 0;
  wait_for_copies<0>();
  show_to_tensor_cores();
  sync_multiplying_warps();
  multiply_tiles(softmax, sums, base, group, end - first);
  tell_rows(softmax, base, group);
  // Where the ring was, and the queries.
  join(sums, row_of_thread() - lane / 4, group * OWN_SIZE, {y, partial, weights, num_parts, (i64)blockIdx.x / CLUSTER},
       {base + RING, base + QUERIES, base + FADES, base + TOTALS}, token * HEADS + head, num_rows, rank);
}
