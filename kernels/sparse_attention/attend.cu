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
//   ROWS                       32 or 64
//   CLUSTER, STAGES            CTAs of a cluster, and tiles in the ring
//   PARTS                      there are several clusters for a token's heads, and these leave parts
//   VALUE, ASKS_FOR_WEIGHT     elements of a value; asks for what the next product multiplies by, of `weight`
//                              [HEADS * (NOPE + VALUE), LATENT], while there is little else to read

#include "half.cuh"

constexpr int TILE = 64;                               // entries
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int WIDTH = LATENT + ROPE;
constexpr int PIECES = WIDTH / 8;                      // of 16 bytes, of a key
constexpr int ROW_TILES = ROWS / 16;                   // each of as many warps in the first product
constexpr int KEY_GROUPS = WARPS / ROW_TILES;          // of a tile, each of a warp for each row tile
constexpr int OWN_KEYS = TILE / KEY_GROUPS;
constexpr int OWN_SIZE = LATENT / WARPS;               // of a warp in the second product
constexpr int KEY_PITCH = (PIECES | 1) * 16;           // ldmatrix finds 8 rows in different banks
constexpr int STAGE_BYTES = TILE * KEY_PITCH;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float FACTOR = SCALE * LOG2_E;
constexpr float NONE = -3e38f;                         // the score of an entry that is no key of the token
static_assert(PIECES % 8 == 0 && LATENT % (16 * WARPS) == 0 && OWN_KEYS % 16 == 0, "whole tiles");

// Where things are in shared memory, in bytes.
constexpr u32 RING = 0;
constexpr u32 QUERIES = RING + STAGES * STAGE_BYTES;
constexpr u32 WEIGHTS = QUERIES + ROWS * PIECES * 16;
constexpr u32 HIGHEST = WEIGHTS + ROWS * TILE * 2;     // of each row, by group of keys; in the end their total weights
constexpr u32 FADES = HIGHEST + KEY_GROUPS * ROWS * 4;
constexpr u32 EXISTS = FADES + ROWS * 4;               // of each stage a bit for each of the 64
// And in the end, where the ring was: sums that the CTA joins, of each CTA; and of each row highest score and total.
constexpr u32 JOINED = RING;
constexpr u32 OF_ROWS = QUERIES;

#ifdef SINKS_FLOAT32
typedef float Sink;
#else
typedef Element Sink;
#endif

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

struct Piece { u32 words[4]; };

__device__ __forceinline__ float widened(float value) { return value; }

__device__ __forceinline__ void store_word(u32 to, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

__device__ __forceinline__ void store_byte(u32 to, u32 x) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

__device__ __forceinline__ u32 load_word(u32 from) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}

// 16 bytes, of which `bytes` are read, 0 or 16; the others are zeros.
__device__ __forceinline__ void copy_piece(u32 to, const Element* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void store_piece(u32 to, const Piece& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.words[0]), "r"(x.words[1]), "r"(x.words[2]),
               "r"(x.words[3]) : "memory");
}

// Of a CTA of the cluster.
__device__ __forceinline__ u32 load_far(u32 from, u32 rank) {
  u32 x;
  asm volatile("{ .reg .u32 far; mapa.shared::cluster.u32 far, %1, %2; ld.shared::cluster.u32 %0, [far]; }"
               : "=r"(x) : "r"(from), "r"(rank) : "memory");
  return x;
}

__device__ __forceinline__ void store_far(u32 to, u32 rank, float a, float b) {
  asm volatile("{ .reg .u32 far; mapa.shared::cluster.u32 far, %0, %1; st.shared::cluster.v2.f32 [far], {%2, %3}; }" ::
                   "r"(to), "r"(rank), "f"(a), "f"(b) : "memory");
}

// What a thread wrote before it meets the others, they read afterwards.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// So that it is in the L2 cache when it is read.
__device__ __forceinline__ void ask_early(const Element* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// --- entries ---------------------------------------------------------------------------------------------------------

struct Lists {
  const int *cu_seqlens, *kv_lens, *page_indices, *page_indptr, *page_start;
};

// Keys are counted from the first that is kept.
struct Seen {
  const int* pages;    // there is one, whatever it says, where the token sees no key
  int start, count;    // the number of the first, and how many the token sees
};

__device__ __forceinline__ Seen seen_by(int token, int num_seqs, const Lists& lists) {
  int seq = 0;    // sequences that end before the token; padding belongs to one more, without keys
  for (int first = 0; first < num_seqs; first += 32) {
    const int b = first + threadIdx.x % 32;
    seq += __popc(__ballot_sync(0xffffffff, b < num_seqs && lists.cu_seqlens[min(b, num_seqs - 1) + 1] <= token));
  }
  if (seq >= num_seqs) return {lists.cu_seqlens, 0, 0};
  const int start = lists.page_start[seq], first_page = lists.page_indptr[seq], end_page = lists.page_indptr[seq + 1];
  const int visible = lists.kv_lens[seq] - start - (lists.cu_seqlens[seq + 1] - token) + 1;
  const int count = min(visible, (end_page - first_page) * PAGE_SIZE);
  return {count > 0 ? lists.page_indices + first_page : lists.cu_seqlens, start, count};
}

struct Cache {
  const Element* rows;
  i64 stride_p, stride_s;
};

// A key of the token, -1 where an entry is none, and its page, which is loaded and not looked at.
struct Key {
  int number, page;
};

__device__ __forceinline__ Key key_of(int entry, const Seen& seen) {
  const int number = entry - seen.start;
  const bool is_seen = number >= 0 && number < seen.count;
  return {is_seen ? number : -1, seen.pages[is_seen ? number / PAGE_SIZE : 0]};
}

// Of an entry that is no key, some row.
__device__ __forceinline__ const Element* row_of(const Key& key, const Cache& cache) {
  return cache.rows + (key.number < 0 ? 0 : key.page * cache.stride_p + key.number % PAGE_SIZE * cache.stride_s);
}

// A warp has some entries of each tile: its first lanes have one each.
constexpr int OWN_ENTRIES = TILE / WARPS;

// The lane's entry of a tile; -1 if it has none.
__device__ __forceinline__ int entry_of(const int* selected, i64 stride, int tile, int end) {
  const int lane = threadIdx.x % 32, at = tile * TILE + threadIdx.x / 32 * OWN_ENTRIES + lane;
  const bool exists = lane < OWN_ENTRIES && tile < end && at < COUNT;
  return exists ? selected[at * stride] : -1;
}

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

// --- queries ---------------------------------------------------------------------------------------------------------

// Pieces of 8 rows that are loaded together are in different banks.
__device__ __forceinline__ u32 piece_at(int row, int pieces, int piece) { return (row * pieces + (piece ^ row % 8)) * 16; }

struct Given {
  const Element *latent, *rope;    // of the CTA's first row; the latents lie side by side
  i64 stride_h, stride_d;          // of the rope part
};

__device__ __forceinline__ void load_queries(u32 to, const Given& given, int num_rows) {
  const bool in_pieces = given.stride_d == 1 && ((u64)given.rope | (u64)(2 * given.stride_h)) % 16 == 0;
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
    const int row = i / PIECES, piece = i % PIECES;
    const bool is_latent = piece < LATENT / 8;
    const Element* from = is_latent ? given.latent + row * LATENT + piece * 8
                                    : given.rope + row * given.stride_h + (piece * 8 - LATENT) * given.stride_d;
    const u32 at = to + piece_at(row, PIECES, piece);
    if (row < num_rows && (is_latent || in_pieces)) {
      copy_piece(at, from, 16);
      continue;
    }
    Piece found = {0, 0, 0, 0};
    if (row < num_rows) {
#pragma unroll
      for (int j = 0; j < 4; j++)
        found.words[j] = from[2 * j * given.stride_d] | (u32)from[(2 * j + 1) * given.stride_d] << 16;
    }
    store_piece(at, found);
  }
  end_group_of_copies();
}

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
  __syncthreads();
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

// --- what a CTA found ------------------------------------------------------------------------------------------------

struct Results {
  Element* y;          // [T, HEADS, LATENT]
  float* partial;      // [T, HEADS, parts, LATENT]
  float* weights;      // [T, HEADS, parts, 2]: highest scores and total weights
  i64 num_parts, part;
};

// Of two neighbours of a row.
__device__ __forceinline__ void write(const Results& to, i64 row, int element, float a, float b, float total) {
#ifdef PARTS
  *(float2*)(to.partial + (row * to.num_parts + to.part) * LATENT + element) = {a, b};
#else
  const float factor = total == 0 ? 0 : 1 / total;
  *(u32*)(to.y + row * LATENT + element) = rounded(a * factor, b * factor);
#endif
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
  __syncthreads();
  if (threadIdx.x < ROWS) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < KEY_GROUPS; i++)
      total += __uint_as_float(load_word(base + HIGHEST + (i * ROWS + threadIdx.x) * 4));
    store_word(base + OF_ROWS + threadIdx.x * 8, load_word(base + FADES + threadIdx.x * 4));
    store_word(base + OF_ROWS + threadIdx.x * 8 + 4, __float_as_uint(total));
  }
}

// Of each row what the CTA's sums are to be multiplied with, in FADES, and the total weight of all CTAs, in HIGHEST; and
// where they are parts, the weight of these. A thread for each row.
__device__ __forceinline__ void join_rows(const Results& to, u32 base, i64 row, int num_rows, u32 rank) {
  if (threadIdx.x >= ROWS) return;
  const u32 own = base + OF_ROWS + threadIdx.x * 8;
  float highest[CLUSTER], totals[CLUSTER], most = NONE, total = 0;
#pragma unroll
  for (u32 other = 0; other < CLUSTER; other++) {
    highest[other] = __uint_as_float(load_far(own, other));
    totals[other] = __uint_as_float(load_far(own + 4, other));
  }
#pragma unroll
  for (u32 other = 0; other < CLUSTER; other++) most = max(most, highest[other]);
  const float reference = most == NONE ? 0 : most;
#pragma unroll
  for (u32 other = 0; other < CLUSTER; other++) {
    const float fade = power_of_2(highest[other] - reference);
    total += totals[other] * fade;
    if (other == rank) store_word(base + FADES + threadIdx.x * 4, __float_as_uint(fade));
  }
  store_word(base + HIGHEST + threadIdx.x * 4, __float_as_uint(total));
#ifdef PARTS
  if (rank == 0 && threadIdx.x < num_rows) {
    float* at = to.weights + ((row + threadIdx.x) * to.num_parts + to.part) * 2;
    at[0] = most;
    at[1] = total;
  }
#endif
}

// Each CTA joins as much of all latents, and is given that of the others. `row`: the number of the CTA's first.
__device__ __forceinline__ void join(const Sums& sums, const Results& to, u32 base, i64 row, int num_rows, u32 rank) {
  constexpr int SHARE = LATENT / CLUSTER;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp * OWN_SIZE;
  meet_cluster();    // all have told of their rows, and nobody needs the ring
  join_rows(to, base, row, num_rows, rank);
  __syncthreads();
#pragma unroll
  for (int tile = 0; tile < ROW_TILES; tile++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int own = tile * 16 + lane / 4 + j * 8;
      const float fade = __uint_as_float(load_word(base + FADES + own * 4));
      const float total = __uint_as_float(load_word(base + HIGHEST + own * 4));
#pragma unroll
      for (int i = 0; i < OWN_SIZE / 8; i++) {
        const int element = first + i * 8 + lane % 4 * 2;
        const float a = sums[tile][i][2 * j] * fade, b = sums[tile][i][2 * j + 1] * fade;
        if (CLUSTER == 1) {
          if (own < num_rows) write(to, row + own, element, a, b, total);
        } else {
          store_far(base + JOINED + ((rank * ROWS + own) * SHARE + element % SHARE) * 4, element / SHARE, a, b);
        }
      }
    }
  if (CLUSTER == 1) return;
  meet_cluster();
#pragma unroll 2
  for (int i = threadIdx.x; i < num_rows * SHARE / 2; i += THREADS) {
    const int own = i / (SHARE / 2), element = i % (SHARE / 2) * 2;
    float a = 0, b = 0;
#pragma unroll
    for (int other = 0; other < CLUSTER; other++) {
      const u32 at = base + JOINED + ((other * ROWS + own) * SHARE + element) * 4;
      a += __uint_as_float(load_word(at));
      b += __uint_as_float(load_word(at + 4));
    }
    write(to, row + own, rank * SHARE + element, a, b, __uint_as_float(load_word(base + HIGHEST + own * 4)));
  }
}

// The rows of the weight that make values, of some heads for each CTA.
__device__ __forceinline__ void ask_for_values(const Element* weight) {
  constexpr int ROWS_AT_ONCE = 8;
  const int cta = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z), ctas = gridDim.x * gridDim.y * gridDim.z;
  const int row = threadIdx.x * ROWS_AT_ONCE;
  if (row >= VALUE) return;
  for (int head = cta; head < HEADS; head += ctas)
    ask_early(weight + ((i64)head * (NOPE + VALUE) + NOPE + row) * LATENT, min(ROWS_AT_ONCE, VALUE - row) * LATENT * 2);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) attend_selected(
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
  const auto entry_in = [&](int tile) { return entry_of(selected, selected_stride_m, tile, end); };
  int entries[STAGES + 1];
#pragma unroll
  for (int i = 0; i <= STAGES; i++) entries[i] = entry_in(first + i);
  Key keys_of_tile[STAGES];
#pragma unroll
  for (int i = 0; i < STAGES; i++) keys_of_tile[i] = key_of(entries[i], seen);
  int next_entry = entries[STAGES];    // of tile + STAGES
  load_queries(base + QUERIES,
               {q_latent + (token * HEADS + head) * LATENT, q + token * q_stride_t + head * q_stride_h + NOPE * q_stride_d,
                q_stride_h, q_stride_d}, num_rows);
  // A group of copies for the queries and one for each stage, if there is a tile for it or not.
#pragma unroll
  for (int i = 0; i < STAGES; i++)
    if (first + i < end)
      copy_rows(base, i, keys_of_tile[i], cache);
    else
      end_group_of_copies();
  wait_for_copies<STAGES - 1>();
  __syncthreads();

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
      __syncthreads();
      add_latents(sums, base, stage, warp * OWN_SIZE);
    }
    if (STAGES > 1) wait_for_copies<STAGES < 2 ? 0 : STAGES - 2>();    // of the next tile
    __syncthreads();
    if (tile + STAGES < end)
      copy_rows(base, stage, next_key, cache);
    else
      end_group_of_copies();
    if (STAGES == 1) {
      wait_for_copies<0>();
      __syncthreads();
    }
    if (++stage == STAGES) stage = 0;
  }
  tell_rows(softmax, base, row, key / OWN_KEYS);
  join(sums, {y, partial, weights, num_parts, (i64)blockIdx.x / CLUSTER}, base, token * HEADS + head, num_rows, rank);
}
