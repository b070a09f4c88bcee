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
// Programmatic dependent launch: the kernel lets the next one start at once. All it reads but the lists is written by
// kernels in front.
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
constexpr u32 ARRIVED = EXISTS + STAGES * 8;           // of each stage
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

__device__ __forceinline__ void load_matrices_transposed(u32 (&to)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ float widened(float value) { return value; }

// Two neighbours, rounded.
__device__ __forceinline__ u32 rounded(float first, float second) {
  u32 both;
#ifdef FLOAT16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#endif
  return both;
}

__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void store_word(u32 to, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

__device__ __forceinline__ u32 load_word(u32 from) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
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

// What this thread wrote to shared memory, before copies in bulk come there.
__device__ __forceinline__ void order_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- entries ---------------------------------------------------------------------------------------------------------

struct Lists {
  const int *cu_seqlens, *kv_lens, *page_indices, *page_indptr, *page_start;
};

// Keys are counted from the first that is kept.
struct Seen {
  const int* pages;
  int start, count;    // the number of the first, and how many the token sees
};

__device__ __forceinline__ Seen seen_by(int token, int num_seqs, const Lists& lists) {
  int seq = 0;    // sequences that end before the token; padding belongs to one more, without keys
  for (int first = 0; first < num_seqs; first += 32) {
    const int b = first + threadIdx.x % 32;
    seq += __popc(__ballot_sync(0xffffffff, b < num_seqs && lists.cu_seqlens[min(b, num_seqs - 1) + 1] <= token));
  }
  if (seq >= num_seqs) return {lists.page_indices, 0, 0};
  const int start = lists.page_start[seq], first_page = lists.page_indptr[seq], end_page = lists.page_indptr[seq + 1];
  const int visible = lists.kv_lens[seq] - start - (lists.cu_seqlens[seq + 1] - token) + 1;
  return {lists.page_indices + first_page, start, min(visible, (end_page - first_page) * PAGE_SIZE)};
}

struct Cache {
  const Element* rows;
  i64 stride_p, stride_s;
};

// Where a key's row is; null where an entry is no key of the token.
__device__ __forceinline__ const Element* row_of(int entry, const Seen& seen, const Cache& cache) {
  const int key = entry - seen.start;
  if (key < 0 || key >= seen.count) return nullptr;
  return cache.rows + (seen.pages[key / PAGE_SIZE] * cache.stride_p + key % PAGE_SIZE * cache.stride_s);
}

// The rows of a tile's entries, two for each lane of a warp.
struct Rows {
  const Element* of[TILE / 32];
};

__device__ __forceinline__ Rows rows_of(const int* selected, i64 stride, int tile, const Seen& seen, const Cache& cache) {
  Rows rows;
#pragma unroll
  for (int i = 0; i < TILE / 32; i++) {
    const int entry = tile * TILE + i * 32 + threadIdx.x % 32;
    rows.of[i] = entry < COUNT ? row_of(selected[entry * stride], seen, cache) : nullptr;
  }
  return rows;
}

// One warp has the rows brought to a stage.
__device__ __forceinline__ void copy_tile(u32 base, int stage, const Rows& rows) {
  const int lane = threadIdx.x % 32;
  const u32 arrived = base + ARRIVED + stage * 8, at = base + RING + stage * STAGE_BYTES;
  u32 exists[TILE / 32], count = 0;
#pragma unroll
  for (int i = 0; i < TILE / 32; i++) {
    exists[i] = __ballot_sync(0xffffffff, rows.of[i] != nullptr);
    count += __popc(exists[i]);
    if (!rows.of[i]) {
      for (int piece = 0; piece < PIECES; piece++)
        store_piece(at + (i * 32 + lane) * KEY_PITCH + piece * 16, {0, 0, 0, 0});
      order_before_copies();
    }
    if (lane == 0) store_word(base + EXISTS + stage * 8 + i * 4, exists[i]);
  }
  __syncwarp();
  if (lane == 0) barrier_expect(arrived, count * WIDTH * 2);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < TILE / 32; i++)
    if (rows.of[i]) copy(at + (i * 32 + lane) * KEY_PITCH, rows.of[i], WIDTH * 2, arrived);
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
  for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
    const int row = i / PIECES, piece = i % PIECES;
    const bool is_latent = piece < LATENT / 8;
    Piece found = {0, 0, 0, 0};
    if (row < num_rows) {
      const Element* from = is_latent ? given.latent + row * LATENT + piece * 8
                                      : given.rope + row * given.stride_h + (piece * 8 - LATENT) * given.stride_d;
      if (is_latent || in_pieces) {
        found = *(const Piece*)__builtin_assume_aligned(from, 16);
      } else {
#pragma unroll
        for (int j = 0; j < 4; j++)
          found.words[j] = from[2 * j * given.stride_d] | (u32)from[(2 * j + 1) * given.stride_d] << 16;
      }
    }
    store_piece(to + piece_at(row, PIECES, piece), found);
  }
}

// --- a tile ----------------------------------------------------------------------------------------------------------

// Of a warp in the first product: rows `lane / 4` and that + 8 of its tile of rows.
struct Softmax {
  float highest[2], total[2];    // of scores in base 2; of weights, over the lane's keys alone
};

constexpr int KEY_TILES = OWN_KEYS / 8;

__device__ __forceinline__ void multiply_keys(float (&scores)[KEY_TILES][4], u32 base, int stage, int row, int key) {
  const int lane = threadIdx.x % 32;
  const u32 keys = base + RING + stage * STAGE_BYTES + (key + lane % 8 + lane / 16 * 8) * KEY_PITCH + lane / 8 % 2 * 16;
#pragma unroll
  for (int tile = 0; tile < KEY_TILES; tile++)
#pragma unroll
    for (int i = 0; i < 4; i++) scores[tile][i] = 0;
#pragma unroll 4
  for (int step = 0; step < PIECES / 2; step++) {
    u32 a[4];
    load_matrices(a, base + QUERIES + piece_at(row + lane % 16, PIECES, step * 2 + lane / 16));
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; tile += 2) {
      u32 b[4];
      load_matrices(b, keys + tile * 8 * KEY_PITCH + step * 32);
      multiply_add(scores[tile], a, b[0], b[1]);
      multiply_add(scores[tile + 1], a, b[2], b[3]);
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
    u32 a[ROW_TILES][4];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
      load_matrices(a[tile], base + WEIGHTS + piece_at(tile * 16 + lane % 16, TILE / 8, step * 2 + lane / 16));
#pragma unroll
    for (int i = 0; i < OWN_SIZE / 16; i++) {
      u32 b[4];
      load_matrices_transposed(b, latents + step * 16 * KEY_PITCH + i * 32);
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; tile++) {
        multiply_add(sums[tile][2 * i], a[tile], b[0], b[1]);
        multiply_add(sums[tile][2 * i + 1], a[tile], b[2], b[3]);
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

// Of a row: the highest score of all CTAs, their total weight, and what this CTA's sums are to be multiplied with.
struct Joint {
  float highest, total, fade;
};

__device__ __forceinline__ Joint joint_of(u32 base, int row, u32 rank) {
  Joint joint = {NONE, 0, 0};
  float own = NONE;
#pragma unroll
  for (u32 other = 0; other < CLUSTER; other++) {
    const float highest = __uint_as_float(load_far(base + OF_ROWS + row * 8, other));
    joint.highest = max(joint.highest, highest);
    if (other == rank) own = highest;
  }
  const float reference = joint.highest == NONE ? 0 : joint.highest;
#pragma unroll
  for (u32 other = 0; other < CLUSTER; other++)
    joint.total += __uint_as_float(load_far(base + OF_ROWS + row * 8 + 4, other)) *
                   power_of_2(__uint_as_float(load_far(base + OF_ROWS + row * 8, other)) - reference);
  joint.fade = power_of_2(own - reference);
  return joint;
}

// Each CTA joins as much of all latents, and is given that of the others. `row`: the number of the CTA's first.
__device__ __forceinline__ void join(const Sums& sums, const Results& to, u32 base, i64 row, int num_rows, u32 rank) {
  constexpr int SHARE = LATENT / CLUSTER;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp * OWN_SIZE;
  meet_cluster();    // all have told of their rows, and nobody needs the ring
#pragma unroll
  for (int tile = 0; tile < ROW_TILES; tile++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int own = tile * 16 + lane / 4 + j * 8;
      const Joint joint = joint_of(base, own, rank);
#pragma unroll
      for (int i = 0; i < OWN_SIZE / 8; i++) {
        const int element = first + i * 8 + lane % 4 * 2;
        const float a = sums[tile][i][2 * j] * joint.fade, b = sums[tile][i][2 * j + 1] * joint.fade;
        if (CLUSTER == 1) {
          if (own < num_rows) write(to, row + own, element, a, b, joint.total);
        } else {
          store_far(base + JOINED + ((rank * ROWS + own) * SHARE + element % SHARE) * 4, element / SHARE, a, b);
        }
      }
    }
  if (CLUSTER > 1) {
    meet_cluster();
    for (int i = threadIdx.x; i < num_rows * SHARE / 2; i += THREADS) {
      const int own = i / (SHARE / 2), element = i % (SHARE / 2) * 2;
      float a = 0, b = 0;
#pragma unroll
      for (int other = 0; other < CLUSTER; other++) {
        const u32 at = base + JOINED + ((other * ROWS + own) * SHARE + element) * 4;
        a += __uint_as_float(load_word(at));
        b += __uint_as_float(load_word(at + 4));
      }
      write(to, row + own, rank * SHARE + element, a, b, joint_of(base, own, rank).total);
    }
  }
#ifdef PARTS
  if (rank == 0 && threadIdx.x < num_rows) {
    const Joint joint = joint_of(base, threadIdx.x, rank);
    float* at = to.weights + ((row + threadIdx.x) * to.num_parts + to.part) * 2;
    at[0] = joint.highest;
    at[1] = joint.total;
  }
#endif
  if (CLUSTER > 1) meet_cluster();    // the others may still read what this CTA told
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) attend_selected(
    Element* y, float* partial, float* weights, const Element* q_latent, const Element* q, const Element* keys,
    const int* selected, const Sink* sinks, const int* cu_seqlens, const int* kv_lens, const int* page_indices,
    const int* page_indptr, const int* page_start, i64 num_seqs, i64 num_parts, i64 q_stride_t, i64 q_stride_h,
    i64 q_stride_d, i64 stride_p, i64 stride_s, i64 selected_stride_t, i64 selected_stride_m) {
  extern __shared__ __align__(128) unsigned char memory[];
  let_next_kernel_start();
  const u32 base = shared_address(memory), rank = blockIdx.x % CLUSTER;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const i64 token = blockIdx.z;
  const int head = blockIdx.y * ROWS, num_rows = min(ROWS, HEADS - head);
  const Seen seen = seen_by(token, num_seqs, {cu_seqlens, kv_lens, page_indices, page_indptr, page_start});
  const Cache cache = {keys, stride_p, stride_s};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) barrier_init(base + ARRIVED + stage * 8, 1);
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_kernel_in_front();

  const int all = seen.count > 0 ? (COUNT + TILE - 1) / TILE : 0, ctas = gridDim.x;
  const int first = all * (int)blockIdx.x / ctas, end = all * ((int)blockIdx.x + 1) / ctas;
  selected += token * selected_stride_t;
  if (warp == 0)
    for (int stage = 0; stage < STAGES && first + stage < end; stage++)
      copy_tile(base, stage, rows_of(selected, selected_stride_m, first + stage, seen, cache));
  load_queries(base + QUERIES,
               {q_latent + (token * HEADS + head) * LATENT, q + token * q_stride_t + head * q_stride_h + NOPE * q_stride_d,
                q_stride_h, q_stride_d}, num_rows);
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
  u32 parity = 0;
#pragma unroll 1
  for (int tile = first; tile < end; tile++) {
    Rows following;
    const bool is_copied = warp == 0 && tile + STAGES < end;
    if (is_copied) following = rows_of(selected, selected_stride_m, tile + STAGES, seen, cache);
    barrier_wait(base + ARRIVED + stage * 8, parity);
    if (load_word(base + EXISTS + stage * 8) | load_word(base + EXISTS + stage * 8 + 4)) {
      float scores[KEY_TILES][4];
      multiply_keys(scores, base, stage, row, key);
      weigh(softmax, scores, base, stage, row, key);
      __syncthreads();
      add_latents(sums, base, stage, warp * OWN_SIZE);
    }
    __syncthreads();
    if (is_copied) copy_tile(base, stage, following);
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  tell_rows(softmax, base, row, key / OWN_KEYS);
  if (CLUSTER == 1) __syncthreads();
  join(sums, {y, partial, weights, num_parts, (i64)blockIdx.x / CLUSTER}, base, token * HEADS + head, num_rows, rank);
}
