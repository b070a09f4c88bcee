// attend_selected: attention of a token's heads, in the space of latents, to the latents that are selected for it.
//
// A CTA takes a token, ROWS of its heads, and some of the entries that are selected for it, in tiles of 64. Other CTAs
// take other entries: those of a cluster join what they found in shared memory, clusters leave it as parts.
//
//   scores [ROWS x 64]    = queries [ROWS x WIDTH] * keys [64 x WIDTH]^T       mma.m16n8k16; a key is a latent and its rope
//   sums [ROWS x LATENT]  = sums * fade + weights [ROWS x 64] * latents        the same
//
// In the first product a warp has 16 heads and some of the keys; in the second all heads and an eighth of the latent. So
// weights go through shared memory, and what the sums are to be multiplied with. An entry that is no key of the token has
// no weight, and zeros in the place of its latent: a weight of zero would not keep a NaN out.
//
// Programmatic dependent launch: the kernel lets the next one start at once. All it reads but the lists and the weight
// is written by kernels in front.
//
// Defines:
//   FLOAT16                    elements are float16; else bfloat16
//   HEADS, NOPE, LATENT, ROPE  a query is of NOPE and ROPE elements; LATENT is a multiple of 128, ROPE one of 16
//   COUNT, PAGE_SIZE           entries of a token, and tokens of a page
//   SCALE                      of the scores
//   SINKS, SINKS_FLOAT32       there are sinks; they have the elements' type, or are float32
//   ROWS                       32
//   CLUSTER, STAGES            CTAs of a cluster, and tiles in the ring
//   PARTS                      there are several clusters for a token's heads, and these leave parts
//   VALUE, ASKS_FOR_WEIGHT     elements of a value; asks for what the next product multiplies by, of `weight`
//                              [HEADS * (NOPE + VALUE), LATENT], while there is little else to read

#include "half.cuh"
#include "sparse_attention/token.cuh"
#include "sparse_attention/found.cuh"

constexpr int WARPS = MULTIPLYING / 32;
constexpr int ROW_TILES = ROWS / 16;                   // each of as many warps in the first product
constexpr int KEY_GROUPS = WARPS / ROW_TILES;          // of a tile, each of a warp for each row tile
constexpr int OWN_KEYS = TILE / KEY_GROUPS;
constexpr int OWN_SIZE = LATENT / WARPS;               // of a warp in the second product
constexpr int OWN_ENTRIES = TILE / WARPS;             // which a warp brings
constexpr int KEY_PITCH = (PIECES | 1) * 16;           // ldmatrix finds 8 rows in different banks
constexpr int STAGE_BYTES = TILE * KEY_PITCH;
static_assert(PIECES % 8 == 0 && LATENT % (16 * WARPS) == 0 && OWN_KEYS % 16 == 0, "whole tiles");
static_assert(JOINED_BYTES <= STAGES * STAGE_BYTES, "what is joined has room where the ring was");

// Where things are in shared memory, in bytes.
constexpr u32 RING = 0;
constexpr u32 QUERIES = RING + STAGES * STAGE_BYTES;
constexpr u32 WEIGHTS = QUERIES + ROWS * PIECES * 16;
constexpr u32 HIGHEST = WEIGHTS + ROWS * TILE * 2;     // of each row, by group of keys; in the end their total weights
constexpr u32 FADES = HIGHEST + KEY_GROUPS * ROWS * 4;
constexpr u32 EXISTS = FADES + ROWS * 4;               // of each stage a bit for each of the 64

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

__device__ __forceinline__ void store_byte(u32 to, u32 x) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

// --- entries ---------------------------------------------------------------------------------------------------------

// Has the rows of the warp's entries brought to a stage, piece by piece; zeros in the place of those that are no keys.
__device__ __forceinline__ void copy_rows(u32 base, int stage, const Key& key, const Cache& cache) {
  static_assert(OWN_ENTRIES * PIECES % 32 == 0, "as many pieces for each lane");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 at = base + RING + stage * STAGE_BYTES + warp * OWN_ENTRIES * KEY_PITCH;
  const u32 exists = __ballot_sync(0xffffffff, key.number >= 0);
  const u64 row = (u64)row_of(key, cache);
#pragma unroll
  for (int i = 0; i < OWN_ENTRIES * PIECES / 32; i++) {
    const int own = (i * 32 + lane) / PIECES, piece = (i * 32 + lane) % PIECES;
    const Element* from = (const Element*)__shfl_sync(0xffffffff, row, own);
    copy_piece(at + own * KEY_PITCH + piece * 16, from + piece * 8, exists >> own & 1 ? 16 : 0);
  }
  end_group_of_copies();
  if (lane == 0) store_byte(base + EXISTS + stage * 8 + warp, exists);
}

// Pieces of 8 rows that are loaded together are in different banks.
__device__ __forceinline__ u32 piece_at(int row, int pieces, int piece) { return (row * pieces + (piece ^ row % 8)) * 16; }

// --- a tile ----------------------------------------------------------------------------------------------------------

// Of a warp in the first product: rows `lane / 4` and that + 8 of its tile of rows.
struct Softmax {
  float highest[2], total[2];    // of scores in base 2; of weights, over the lane's keys alone
};

constexpr int KEY_TILES = OWN_KEYS / 8;

// What a step of the first product multiplies. It is loaded one step ahead.
struct Step {
  u32 a[4], b[KEY_TILES / 2][4];
};

__device__ __forceinline__ void multiply_keys(float (&scores)[KEY_TILES][4], u32 base, int stage, int row, int key) {
  constexpr int STEPS = PIECES / 2;
  const int lane = threadIdx.x % 32;
  const u32 keys = base + RING + stage * STAGE_BYTES + (key + lane % 8 + lane / 16 * 8) * KEY_PITCH + lane / 8 % 2 * 16;
  const auto load = [&](Step& to, int step) {
    load_matrices(to.a, base + QUERIES + piece_at(row + lane % 16, PIECES, step * 2 + lane / 16));
#pragma unroll
    for (int i = 0; i < KEY_TILES / 2; i++) load_matrices(to.b[i], keys + i * 16 * KEY_PITCH + step * 32);
  };
#pragma unroll
  for (int tile = 0; tile < KEY_TILES; tile++)
#pragma unroll
    for (int i = 0; i < 4; i++) scores[tile][i] = 0;
  Step steps[2];
  load(steps[0], 0);
#pragma unroll 4
  for (int step = 0; step < STEPS; step++) {
    if (step + 1 < STEPS) load(steps[(step + 1) % 2], step + 1);
    const Step& now = steps[step % 2];
#pragma unroll
    for (int i = 0; i < KEY_TILES / 2; i++) {
      multiply_add(scores[2 * i], now.a, now.b[i][0], now.b[i][1]);
      multiply_add(scores[2 * i + 1], now.a, now.b[i][2], now.b[i][3]);
    }
  }
}

// The weights of a warp's keys for its rows, and what the rows' sums are to be multiplied with.
__device__ __forceinline__ void weigh(Softmax& softmax, float (&scores)[KEY_TILES][4], u32 base, int stage, int row,
                                      int key) {
  const int lane = threadIdx.x % 32, group = key / OWN_KEYS;
  const u32 exists = load_word(base + EXISTS + stage * 8 + key / 32 * 4) >> key % 32;
  float highest[2] = {NONE, NONE};
#pragma unroll
  for (int tile = 0; tile < KEY_TILES; tile++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bool is_key = exists >> (tile * 8 + lane % 4 * 2 + i % 2) & 1;
      scores[tile][i] = is_key ? scores[tile][i] * FACTOR : NONE;
      highest[i / 2] = max(highest[i / 2], scores[tile][i]);
    }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    highest[j] = max(highest[j], __shfl_xor_sync(0xffffffff, highest[j], 1));
    highest[j] = max(highest[j], __shfl_xor_sync(0xffffffff, highest[j], 2));
    if (lane % 4 == 0)
      store_word(base + HIGHEST + (group * ROWS + row + lane / 4 + j * 8) * 4, __float_as_uint(highest[j]));
  }
  sync_multiplying_warps();
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int own = row + lane / 4 + j * 8;
    float most = softmax.highest[j];
#pragma unroll
    for (int i = 0; i < KEY_GROUPS; i++)
      most = max(most, __uint_as_float(load_word(base + HIGHEST + (i * ROWS + own) * 4)));
    const float reference = most == NONE ? 0 : most, fade = power_of_2(softmax.highest[j] - reference);
    softmax.highest[j] = most;
    softmax.total[j] *= fade;
    if (group == 0 && lane % 4 == 0) store_word(base + FADES + own * 4, __float_as_uint(fade));
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; tile++) {
      const float a = power_of_2(scores[tile][2 * j] - reference), b = power_of_2(scores[tile][2 * j + 1] - reference);
      softmax.total[j] += a + b;
      store_word(base + WEIGHTS + piece_at(own, TILE / 8, key / 8 + tile) + lane % 4 * 4, rounded(a, b));
    }
  }
}

// Of a warp in the second product: of all rows, elements `lane % 4 * 2` and that + 1 of each eight.
typedef float Sums[ROW_TILES][OWN_SIZE / 8][4];

__device__ __forceinline__ void add_latents(Sums& sums, u32 base, int stage, int first) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < ROW_TILES; tile++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float fade = __uint_as_float(load_word(base + FADES + (tile * 16 + lane / 4 + j * 8) * 4));
#pragma unroll
      for (int i = 0; i < OWN_SIZE / 8; i++) {
        sums[tile][i][2 * j] *= fade;
        sums[tile][i][2 * j + 1] *= fade;
      }
    }
  const u32 latents = base + RING + stage * STAGE_BYTES + lane % 16 * KEY_PITCH + first * 2 + lane / 16 * 16;
#pragma unroll
  for (int step = 0; step < TILE / 16; step++) {
    u32 a[ROW_TILES][4], b[2][4];    // of the latents, which are loaded one product ahead
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
      load_matrices(a[tile], base + WEIGHTS + piece_at(tile * 16 + lane % 16, TILE / 8, step * 2 + lane / 16));
    load_matrices_transposed(b[0], latents + step * 16 * KEY_PITCH);
#pragma unroll
    for (int i = 0; i < OWN_SIZE / 16; i++) {
      if (i + 1 < OWN_SIZE / 16) load_matrices_transposed(b[(i + 1) % 2], latents + step * 16 * KEY_PITCH + (i + 1) * 32);
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; tile++) {
        multiply_add(sums[tile][2 * i], a[tile], b[i % 2][0], b[i % 2][1]);
        multiply_add(sums[tile][2 * i + 1], a[tile], b[i % 2][2], b[i % 2][3]);
      }
    }
  }
}

// Of each row the highest score and the total weight of the CTA, by row.
__device__ __forceinline__ void tell_rows(const Softmax& softmax, u32 base, int row, int group) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    float total = softmax.total[j];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    const int own = row + lane / 4 + j * 8;
    if (lane % 4 == 0) store_word(base + HIGHEST + (group * ROWS + own) * 4, __float_as_uint(total));
    if (lane % 4 == 0 && group == 0) store_word(base + FADES + own * 4, __float_as_uint(softmax.highest[j]));
  }
  sync_multiplying_warps();
  if (threadIdx.x < ROWS) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < KEY_GROUPS; i++)
      total += __uint_as_float(load_word(base + HIGHEST + (i * ROWS + threadIdx.x) * 4));
    store_word(base + QUERIES + threadIdx.x * 8, load_word(base + FADES + threadIdx.x * 4));
    store_word(base + QUERIES + threadIdx.x * 8 + 4, __float_as_uint(total));
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(MULTIPLYING) attend_selected(
    Element* y, float* partial, float* weights, const Element* q_latent, const Element* q, const Element* keys,
    const int* selected, const Sink* sinks, const int* cu_seqlens, const int* kv_lens, const int* page_indices,
    const int* page_indptr, const int* page_start, i64 num_seqs, i64 num_parts, i64 q_stride_t, i64 q_stride_h,
    i64 q_stride_d, i64 stride_p, i64 stride_s, i64 selected_stride_t, i64 selected_stride_m,
    const Element* weight) {
  extern __shared__ __align__(128) unsigned char memory[];
  let_next_kernel_start();
  const u32 base = shared_address(memory), rank = blockIdx.x % CLUSTER;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const i64 token = blockIdx.z;
  const int head = blockIdx.y * ROWS, num_rows = min(ROWS, HEADS - head);
  const Seen seen = seen_by(token, num_seqs, {cu_seqlens, kv_lens, page_indices, page_indptr, page_start});
  const Cache cache = {keys, stride_p, stride_s};
#ifdef ASKS_FOR_WEIGHT
  ask_for_values(weight);
#endif
  wait_for_kernel_in_front();

  const int all = seen.count > 0 ? (COUNT + TILE - 1) / TILE : 0, ctas = gridDim.x;
  const int first = all * (int)blockIdx.x / ctas, end = all * ((int)blockIdx.x + 1) / ctas;
  selected += token * selected_stride_t;
  // Entries are loaded a tile before the pages of their keys, and pages before a tile whose end has the copies: nothing
  // waits for either.
  const auto entry_in = [&](int tile) { return entry_of<OWN_ENTRIES>(selected, selected_stride_m, tile, end, warp); };
  int entries[STAGES + 1];
#pragma unroll
  for (int i = 0; i <= STAGES; i++) entries[i] = entry_in(first + i);
  Key keys_of_tile[STAGES];
#pragma unroll
  for (int i = 0; i < STAGES; i++) keys_of_tile[i] = key_of(entries[i], seen);
  int next_entry = entries[STAGES];    // of tile + STAGES
  load_queries(
      {q_latent + (token * HEADS + head) * LATENT, q + token * q_stride_t + head * q_stride_h + NOPE * q_stride_d,
       q_stride_h, q_stride_d},
      num_rows, [&](int row, int piece) { return base + QUERIES + piece_at(row, PIECES, piece); });
  // A group of copies for the queries and one for each stage, if there is a tile for it or not.
#pragma unroll
  for (int i = 0; i < STAGES; i++)
    if (first + i < end)
      copy_rows(base, i, keys_of_tile[i], cache);
    else
      end_group_of_copies();
  wait_for_copies<STAGES - 1>();
  sync_multiplying_warps();

  const int row = warp % ROW_TILES * 16, key = warp / ROW_TILES * OWN_KEYS;    // in the first product
  Softmax softmax = {{NONE, NONE}, {0, 0}};
#ifdef SINKS
  // A sink is a key whose value is zero: it is among the first entries' weights.
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int own = row + lane / 4 + j * 8;
    if (blockIdx.x == 0 && own < num_rows) {
      softmax.highest[j] = widened(sinks[head + own]) * LOG2_E;
      softmax.total[j] = key == 0 && lane % 4 == 0 ? 1 : 0;
    }
  }
#endif
  Sums sums;
#pragma unroll
  for (int i = 0; i < ROW_TILES * (OWN_SIZE / 8) * 4; i++) ((float*)sums)[i] = 0;
  int stage = 0;
#pragma unroll 1
  for (int tile = first; tile < end; tile++) {
    const Key next_key = key_of(next_entry, seen);
    next_entry = entry_in(tile + STAGES + 1);
    if (load_word(base + EXISTS + stage * 8) | load_word(base + EXISTS + stage * 8 + 4)) {
      float scores[KEY_TILES][4];
      multiply_keys(scores, base, stage, row, key);
      weigh(softmax, scores, base, stage, row, key);
      sync_multiplying_warps();
      add_latents(sums, base, stage, warp * OWN_SIZE);
    }
    if (STAGES > 1) wait_for_copies<STAGES < 2 ? 0 : STAGES - 2>();    // of the next tile
    sync_multiplying_warps();
    if (tile + STAGES < end)
      copy_rows(base, stage, next_key, cache);
    else
      end_group_of_copies();
    if (STAGES == 1) {
      wait_for_copies<0>();
      sync_multiplying_warps();
    }
    if (++stage == STAGES) stage = 0;
  }
  tell_rows(softmax, base, row, key / OWN_KEYS);
  // Where the ring was, and the queries.
  join(sums, 0, warp * OWN_SIZE, {y, partial, weights, num_parts, (i64)blockIdx.x / CLUSTER},
       {base + RING, base + QUERIES, base + FADES, base + HIGHEST}, token * HEADS + head, num_rows, rank);
}
