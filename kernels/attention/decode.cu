// decode_attention: attention of single tokens to the keys in pages of a cache, in one launch however many keys there are.
//
// A cluster of CTAs takes a token and up to 8 query heads that share a key head. Its keys come in blocks of 16: the
// first block is that of the first warp of the first CTA, the second that of the first warp of the second CTA, and so
// on in turns. A warp has a ring of its own in shared memory, which it fills by itself: warps meet only at the end.
//
//   scores [16 keys x 8 heads] = keys [16 x SIZE] * queries [SIZE x 8]          mma.m16n8k16, keys as its rows
//   sums   [SIZE x 8 heads]   += values [16 x SIZE]^T * weights [16 x 8]        the same, elements of a head as its rows
//
// At the end each warp sends its sums to the shared memory of the CTAs that join them, each of which writes some of the
// elements of all heads. A CTA counts the bytes that come; when all have, it adds them in the order of warps and CTAs. So
// a result depends on the token's own keys, and on CLUSTER and WARPS, bit for bit. Where a cluster is one CTA, its warps
// leave their sums in their own rings, and one warp alone writes its own.
//
// Keys and values of 8 bits lie in the ring as they are, and become float16 in registers: it has all numbers of
// float8_e4m3fn, and one instruction converts two of them. All products are of float16 then, whatever the queries are.
// A lane is given words of the ring, which are four elements of 8 bits, not two: so a head's elements are taken in
// another order, in which queries are loaded too, and results are put back in order where they are written.
//
// Programmatic dependent launch: the kernel lets the next one start at once. Before it waits for the kernel in front, it
// reads the lists of the step, and copies the keys of earlier steps: those of this step's tokens, which a kernel in
// front writes, are the last of a sequence.
//
// Defines:
//   FLOAT16                              elements are float16; else bfloat16
//   CACHE_FLOAT8                         keys and values are float8_e4m3fn; else they are elements
//   K_SCALE, V_SCALE                     keys and values are what the caches hold times k_scale[1] and v_scale[1]
//   HEADS, KV_HEADS, SIZE, PAGE_SIZE     SIZE, of keys and of values, is a multiple of 16 up to 256
//   SCALE, SOFT_CAP, WINDOW, CHUNK       those of the op; 0 for no cap, no window, no chunks
//   SINKS, SINKS_FLOAT32, SLOPES         there are such tensors; sinks have the elements' type, or are float32
//   CLUSTER, WARPS, STAGES               CTAs of a cluster, their warps, and blocks in the ring of a warp
//   ONE_QUERY                            a block for each sequence and key head, which takes it if it has one token; else
//                                        a block for each token

#include "half.cuh"

// What a lane has of 16 elements of a head: two pairs of neighbours. LANE_STEP is from a lane's first pair to the next
// lane's, PAIR_STEP from the lane's own first pair to its second.
#ifdef CACHE_FLOAT8
typedef unsigned char Stored;    // an element of a cache
constexpr int LANE_STEP = 4, PAIR_STEP = 2;
constexpr float RAISED = 15;     // weights are 2^RAISED at most, so that float16 has digits for the small ones, too
#else
typedef Element Stored;
constexpr int LANE_STEP = 2, PAIR_STEP = 8;
constexpr float RAISED = 0;
#endif

constexpr int KEYS = 16;                               // of a block
constexpr int COLUMNS = 8;                             // heads of a tile
constexpr int GROUP = HEADS / KV_HEADS;                // heads that share a key head
constexpr int GROUPS = (GROUP + COLUMNS - 1) / COLUMNS;
constexpr int TILES = SIZE / 16;                       // tiles of sums, each of 16 elements of all heads
constexpr int IN_PIECE = 16 / sizeof(Stored);          // elements of 16 bytes
constexpr int PIECES = SIZE / IN_PIECE;                // of a key or value
constexpr int PITCH = 16 * (PIECES | 1);               // bytes from row to row: ldmatrix finds 8 rows in different banks
constexpr int BLOCK_BYTES = KEYS * PITCH;              // of keys or values
constexpr int PARTS = CLUSTER * WARPS;
constexpr int OWN_TILES = (TILES + CLUSTER - 1) / CLUSTER;    // that a CTA joins
constexpr int TILE_BYTES = 32 * 16;                    // four sums of each lane
constexpr int WEIGHT_BYTES = 4 * 16;                   // highest scores and total weights of 8 heads
constexpr int SUMS_BYTES = TILES * TILE_BYTES + WEIGHT_BYTES;
constexpr int STAGES_BYTES = STAGES * 2 * BLOCK_BYTES;
constexpr int RING_BYTES = CLUSTER > 1 || STAGES_BYTES > SUMS_BYTES ? STAGES_BYTES : SUMS_BYTES;    // of a warp
// Where the sums of parts are, and their weights. A CTA alone has them in the rings: each warp leaves its own there.
constexpr int SUMS_PITCH = CLUSTER > 1 ? OWN_TILES * TILE_BYTES : RING_BYTES;
constexpr int WEIGHTS_PITCH = CLUSTER > 1 ? WEIGHT_BYTES : RING_BYTES;
constexpr int WEIGHTS_AT = CLUSTER > 1 ? PARTS * SUMS_PITCH : TILES * TILE_BYTES;
constexpr int JOINED_BYTES = CLUSTER > 1 ? PARTS * (SUMS_PITCH + WEIGHTS_PITCH) : 0;
constexpr float FACTOR = SCALE, CAP = SOFT_CAP;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float NONE = -3e38f;                         // the score of a key that is not seen

#ifdef SINKS_FLOAT32
typedef float Sink;
#else
typedef Element Sink;
#endif

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

// 16 bytes, if `wanted`. `bytes` of them are read, 0 or 16; the others are zeros.
__device__ __forceinline__ void copy_piece(u32 to, const Stored* from, u32 bytes, bool wanted) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %3, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2; }" ::
          "r"(to), "l"(from), "r"(bytes), "r"((u32)wanted) : "memory");
}

__device__ __forceinline__ float widened(float value) { return value; }

// Writes to the shared memory of a CTA of the cluster, and counts the bytes at its barrier.
__device__ __forceinline__ void send(u32 to, u32 rank, float a, float b, float c, float d, u32 barrier) {
  asm volatile(
      "{ .reg .u32 far, at; mapa.shared::cluster.u32 far, %0, %1; mapa.shared::cluster.u32 at, %2, %1; "
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [far], {%3, %4, %5, %6}, [at]; }" ::
          "r"(to), "r"(rank), "r"(barrier), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

__device__ __forceinline__ void store_near(u32 to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

__device__ __forceinline__ float4 load_near(u32 from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from) : "memory");
  return x;
}

// --- what a token sees ----------------------------------------------------------------------------------------------

struct Lists {
  const int *cu_seqlens, *kv_lens, *page_indices, *page_indptr, *page_start;
};

// What the lists say of a sequence.
struct Sequence {
  int queries_start, queries_end, start, length, first_page, end_page;
  __device__ __forceinline__ bool has(int token) const { return queries_start <= token && token < queries_end; }
};

__device__ __forceinline__ Sequence sequence_of(const Lists& lists, int seq) {
  return {lists.cu_seqlens[seq], lists.cu_seqlens[seq + 1], lists.page_start[seq], lists.kv_lens[seq],
          lists.page_indptr[seq], lists.page_indptr[seq + 1]};
}

// Keys are counted from the first slot of the sequence's first page.
struct Seen {
  const int* pages;
  int position;        // of the token itself
  int lowest, end;     // the keys that it sees
  int old_end;         // keys before it were written in earlier steps
};

__device__ __forceinline__ Seen seen_by(int token, const Sequence& sequence, const Lists& lists) {
  const int length = sequence.length - sequence.start;
  Seen seen;
  seen.pages = lists.page_indices + sequence.first_page;
  seen.position = length - (sequence.queries_end - token);
  seen.old_end = length - (sequence.queries_end - sequence.queries_start);
  seen.end = min(seen.position + 1, (sequence.end_page - sequence.first_page) * PAGE_SIZE);
  seen.lowest = 0;
  if (WINDOW > 0) seen.lowest = max(0, seen.position - WINDOW + 1);
  if (CHUNK > 0) seen.lowest = max(0, (seen.position + sequence.start) / max(CHUNK, 1) * CHUNK - sequence.start);
  return seen;
}

__device__ __forceinline__ Seen nothing_seen(const Lists& lists) { return {lists.page_indices, 0, 0, 0, 0}; }

#ifdef ONE_QUERY

// Of the sequence with this number: its token, which is set to -1 if it has another number of them than one. Tokens
// past the last sequence are one more, without keys.
__device__ __forceinline__ Seen seen_by_only_token(
    int seq, int num_seqs, int num_tokens, int& token, const Lists& lists) {
  if (seq >= num_seqs) {
    token = lists.cu_seqlens[num_seqs];
    if (num_tokens - token != 1) token = -1;
    return nothing_seen(lists);
  }
  const Sequence sequence = sequence_of(lists, seq);
  token = sequence.queries_end - sequence.queries_start == 1 ? sequence.queries_start : -1;
  return seen_by(sequence.queries_start, sequence, lists);
}

#else

// Where all sequences have one token, it is that of the sequence with its number; else the sequence is looked for.
__device__ __forceinline__ Seen seen_by_token(int token, int num_seqs, const Lists& lists) {
  if (num_seqs == 0) return nothing_seen(lists);
  const Sequence likely = sequence_of(lists, min(token, num_seqs - 1));
  if (likely.has(token)) return seen_by(token, likely, lists);
  const int lane = threadIdx.x % 32;
  int seq = 0;    // sequences that end before the token; padding belongs to one more, without keys
  for (int first = 0; first < num_seqs; first += 32) {
    const int b = first + lane;
    seq += __popc(__ballot_sync(0xffffffff, b < num_seqs && lists.cu_seqlens[min(b, num_seqs - 1) + 1] <= token));
  }
  return seq < num_seqs ? seen_by(token, sequence_of(lists, seq), lists) : nothing_seen(lists);
}

#endif

// --- keys and values ------------------------------------------------------------------------------------------------

// Of one head; all rows are aligned to 16 bytes. A page is far from having 2^31 elements, a cache is not.
struct Cache {
  const Stored *k, *v;
  int k_stride_p, k_stride_s, v_stride_p, v_stride_s;
};

constexpr bool IN_ONE_PAGE = PAGE_SIZE % KEYS == 0;    // all keys of a block

// The page of a lane's key, of a block's; lane 16 has the first one again.
__device__ __forceinline__ int page_of(const Seen& seen, int block) {
  const int key = block * KEYS + (IN_ONE_PAGE ? 0 : threadIdx.x % KEYS);
  return key < seen.end ? seen.pages[key / PAGE_SIZE] : 0;
}

// One warp copies the rows of a block whose keys are before `end`, and makes zeros of those that are not seen: slots
// without a key hold anything, NaN too, and a weight of zero would not keep that out.
__device__ __forceinline__ void copy_block(
    const Cache& cache, const Seen& seen, int block, int page, int end, u32 stage) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < (KEYS * PIECES + 31) / 32; i++) {
    const int row = (lane + 32 * i) / PIECES, piece = (lane + 32 * i) % PIECES, key = block * KEYS + row;
    const i64 of_row = IN_ONE_PAGE ? page : __shfl_sync(0xffffffff, page, row);
    const int slot = (IN_ONE_PAGE ? block * KEYS % PAGE_SIZE + row : key % PAGE_SIZE);
    const u32 to = stage + row * PITCH + piece * 16, bytes = key < end ? 16 : 0;
    const bool wanted = (KEYS * PIECES % 32 == 0 || row < KEYS) && (key < end || key >= seen.end);
    const int first = piece * IN_PIECE;
    copy_piece(to, cache.k + (of_row * cache.k_stride_p + slot * cache.k_stride_s + first), bytes, wanted);
    copy_piece(to + BLOCK_BYTES, cache.v + (of_row * cache.v_stride_p + slot * cache.v_stride_s + first), bytes,
               wanted);
  }
}

// The rows of a block that `copy_block` left out: those of this step's tokens. They are few.
__device__ __forceinline__ void copy_new_rows(const Cache& cache, const Seen& seen, int block, int page, u32 stage) {
  const int first = max(seen.old_end - block * KEYS, 0), end = min(seen.end - block * KEYS, KEYS);
#pragma unroll 1
  for (int row = first; row < end; row++) {
    const i64 of_row = IN_ONE_PAGE ? page : __shfl_sync(0xffffffff, page, row);
    const int slot = (block * KEYS + row) % PAGE_SIZE;
#pragma unroll
    for (int i = threadIdx.x % 32; i < (2 * PIECES + 31) / 32 * 32; i += 32) {
      const bool is_key = i < PIECES;
      const int piece = is_key ? i : i - PIECES;
      const Stored* from = is_key ? cache.k + (of_row * cache.k_stride_p + slot * cache.k_stride_s)
                                  : cache.v + (of_row * cache.v_stride_p + slot * cache.v_stride_s);
      copy_piece(stage + (is_key ? 0 : BLOCK_BYTES) + row * PITCH + piece * 16, from + piece * IN_PIECE, 16,
                 i < 2 * PIECES);
    }
  }
}

// --- what a warp adds up --------------------------------------------------------------------------------------------

// A lane has keys `lane / 4` and that + 8 of a block, and heads `2 (lane % 4)` and that + 1.
struct Sums {
  float highest[2], total[2];    // of scores in base 2, less RAISED; of weights, over the lane's keys alone
  float values[TILES][4];        // elements `lane / 4` and that + 8 of a tile; of 8 bits `lane / 4 * 2` and that + 1
};

__device__ __forceinline__ void load_queries(u32 (&queries)[TILES][2], const Element* q, i64 stride_h, i64 stride_d,
                                             int num_heads) {
  const int lane = threadIdx.x % 32, head = lane / 4;
  const Element* row = q + head * stride_h + lane % 4 * LANE_STEP * stride_d;
  const bool by_pairs = stride_d == 1 && ((u64)q | (u64)(2 * stride_h)) % 4 == 0;
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) queries[i / 2][i % 2] = 0;
  if (head >= num_heads) return;
  if (by_pairs) {
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++)
      queries[i / 2][i % 2] = *(const u32*)(row + (i / 2 * 16 + i % 2 * PAIR_STEP));
  } else {
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
      const int first = i / 2 * 16 + i % 2 * PAIR_STEP;
      queries[i / 2][i % 2] = row[first * stride_d] | (u32)row[(first + 1) * stride_d] << 16;
    }
  }
}

#ifdef CACHE_FLOAT8

// Queries in bfloat16 as float16: those of a head times a power of two that makes the largest 2^14 to 2^15. Gives what
// undoes this, of head `lane / 4`. What is then below 2^-14 is rounded, by 2^-25 at most: that is 2^-39 of the largest,
// less than sums in float32 lose.
__device__ __forceinline__ float fitted_to_float16(u32 (&queries)[TILES][2]) {
  u32 largest = 0;    // as float32: but for the sign, numbers are in the order of their bits
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    const u32 pair = queries[i / 2][i % 2] & 0x7fff7fff;
    largest = max(largest, max(pair, pair << 16));
  }
  largest = max(largest, __shfl_xor_sync(0xffffffff, largest, 1));
  largest = max(largest, __shfl_xor_sync(0xffffffff, largest, 2));
  const u32 exponent = max(largest >> 23, 15u);    // a factor for less would be infinite
  const float factor = __uint_as_float((127 + 14 + 127 - exponent) << 23);
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    const u32 pair = queries[i / 2][i % 2];
    queries[i / 2][i % 2] =
        rounded_to_float16(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xffff0000) * factor);
  }
  return __uint_as_float((exponent - 14) << 23);
}

// --- products of a block: 8 bits, two tiles at a time ---------------------------------------------------------------

// The lane's address for four matrices: rows 0 to 7 and 8 to 15 of a tile, and of the next one, or where there is none
// of the same again.
__device__ __forceinline__ u32 two_tiles(u32 block, int tile) {
  const int lane = threadIdx.x % 32;
  return block + lane % 16 * PITCH + (tile + (tile + 1 < TILES ? lane / 16 : 0)) * 16;
}

// A word has the elements `lane % 4 * 4` to that + 3 of a key. In the product they take the places of `lane % 4 * 2`,
// that + 1, that + 8 and that + 9, as the same of a query do.
__device__ __forceinline__ void multiply_keys(
    float (&scores)[4], float (&more)[4], const u32 (&queries)[TILES][2], u32 keys) {
#pragma unroll
  for (int tile = 0; tile < TILES; tile += 2) {
    u32 words[4];
    load_matrices(words, two_tiles(keys, tile));
#pragma unroll
    for (int i = 0; i < 2 && tile + i < TILES; i++) {
      const u32 low = words[2 * i], high = words[2 * i + 1];
      const u32 a[4] = {float16_of_float8(low, 0), float16_of_float8(high, 0), float16_of_float8(low, 1),
                        float16_of_float8(high, 1)};
      multiply_add_float16(i ? more : scores, a, queries[tile + i][0], queries[tile + i][1]);
    }
  }
}

__device__ __forceinline__ u32 as_operand(float first, float second) { return rounded_to_float16(first, second); }

// A word has elements `lane / 4 * 2` and that + 1 of one key's value, and then the same of the next key's. The first of
// each are of row `lane / 4` in the product, the others of row `lane / 4 + 8`.
__device__ __forceinline__ void add_values(Sums& sums, const float (&fade)[2], u32 b0, u32 b1, u32 values) {
#pragma unroll
  for (int tile = 0; tile < TILES; tile += 2) {
    u32 words[4];
    load_matrices_transposed(words, two_tiles(values, tile));
#pragma unroll
    for (int i = 0; i < 2 && tile + i < TILES; i++) {
      const u32 low = __byte_perm(words[2 * i], 0, 0x3120), high = __byte_perm(words[2 * i + 1], 0, 0x3120);
      const u32 a[4] = {float16_of_float8(low, 0), float16_of_float8(low, 1), float16_of_float8(high, 0),
                        float16_of_float8(high, 1)};
#pragma unroll
      for (int j = 0; j < 4; j++) sums.values[tile + i][j] *= fade[j % 2];
      multiply_add_float16(sums.values[tile + i], a, b0, b1);
    }
  }
}

#else

// --- products of a block: elements ----------------------------------------------------------------------------------

__device__ __forceinline__ void multiply_keys(
    float (&scores)[4], float (&more)[4], const u32 (&queries)[TILES][2], u32 keys) {
  const int lane = threadIdx.x % 32;
  const u32 from = keys + lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    u32 a[4];
    load_matrices(a, from + tile * 32);
    multiply_add(tile % 2 ? more : scores, a, queries[tile][0], queries[tile][1]);
  }
}

__device__ __forceinline__ u32 as_operand(float first, float second) { return rounded(first, second); }

__device__ __forceinline__ void add_values(Sums& sums, const float (&fade)[2], u32 b0, u32 b1, u32 values) {
  const int lane = threadIdx.x % 32;
  const u32 from = values + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    u32 a[4];
    load_matrices_transposed(a, from + tile * 32);
#pragma unroll
    for (int i = 0; i < 4; i++) sums.values[tile][i] *= fade[i % 2];
    multiply_add(sums.values[tile], a, b0, b1);
  }
}

#endif

// --- a block --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float capped(float score) {
  const float small = power_of_2(-2 * LOG2_E / max(CAP, 1e-30f) * fabsf(score));
  const float y = CAP * (1 - small) / (1 + small);
  return score < 0 ? -y : y;
}

// Adds a block of keys, which lie in a stage, to the sums. `factors`: of the lane's two heads, what makes scores of
// products.
__device__ __forceinline__ void add_block(
    Sums& sums, const u32 (&queries)[TILES][2], const float (&factors)[2], const float (&slopes)[2], const Seen& seen,
    int block, u32 stage) {
  const int lane = threadIdx.x % 32, key = block * KEYS + lane / 4;
  float scores[4] = {0, 0, 0, 0}, more[4] = {0, 0, 0, 0};    // two sums, so that products overlap
  multiply_keys(scores, more, queries, stage);
  float fade[2];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int at = key + i / 2 * 8;
    float score = (scores[i] + more[i]) * factors[i % 2];
#ifdef SLOPES
    score -= slopes[i % 2] * (seen.position - at);
#endif
    if (CAP > 0) score = capped(score);
    scores[i] = at >= seen.lowest && at < seen.end ? score * LOG2_E : NONE;
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    float highest = max(scores[j], scores[j + 2]);
#pragma unroll
    for (int other = 4; other < 32; other *= 2) highest = max(highest, __shfl_xor_sync(0xffffffff, highest, other));
    highest = max(highest - RAISED, sums.highest[j]);
    const float reference = highest == NONE ? 0 : highest;
    fade[j] = power_of_2(sums.highest[j] - reference);
    scores[j] = power_of_2(scores[j] - reference);
    scores[j + 2] = power_of_2(scores[j + 2] - reference);
    sums.total[j] = sums.total[j] * fade[j] + scores[j] + scores[j + 2];
    sums.highest[j] = highest;
  }
  const u32 b0 = transposed(as_operand(scores[0], scores[1])), b1 = transposed(as_operand(scores[2], scores[3]));
  add_values(sums, fade, b0, b1, stage + BLOCK_BYTES);
}

// --- what a CTA does ------------------------------------------------------------------------------------------------

__device__ __forceinline__ void give(u32 to, u32 rank, float a, float b, float c, float d, u32 barrier) {
  if (CLUSTER == 1)
    store_near(to, a, b, c, d);
  else
    send(to, rank, a, b, c, d, barrier);
}

// A warp's sums, to the CTAs that join them. Each joins every CLUSTER-th tile.
__device__ __forceinline__ void hand_over(const Sums& sums, int part, u32 joined, u32 weights, u32 barrier) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const float(&x)[4] = sums.values[tile];
    const u32 to = joined + part * SUMS_PITCH + tile / CLUSTER * TILE_BYTES + lane * 16;
    give(to, tile % CLUSTER, x[0], x[1], x[2], x[3], barrier);
  }
  if (lane / 4 < CLUSTER)
    give(weights + part * WEIGHTS_PITCH + lane % 4 * 16, lane / 4, sums.highest[0], sums.highest[1], sums.total[0],
         sums.total[1], barrier);
}

// One warp: a tile of the result. `factor`: of the lane's two heads.
__device__ __forceinline__ void write_tile(Element* out, const float (&y)[4], const float (&factor)[2], int tile,
                                           int num_heads) {
  const int lane = threadIdx.x % 32;
  u32 first = transposed(rounded(y[0] * factor[0], y[1] * factor[1]));
  u32 second = transposed(rounded(y[2] * factor[0], y[3] * factor[1]));
#ifdef CACHE_FLOAT8    // every second element, and those between them
  const u32 even = first, odd = second;
  first = __byte_perm(even, odd, 0x5410);
  second = __byte_perm(even, odd, 0x7632);
#endif
  if (lane / 4 < num_heads) {    // pairs of neighbouring elements of head `lane / 4`
    u32* to = (u32*)(out + lane / 4 * SIZE + tile * 16 + lane % 4 * LANE_STEP);
    to[0] = first;
    to[PAIR_STEP / 2] = second;
  }
}

// One warp: a tile of the result, of what the parts are. `sinks`: in base 2, of the lane's two heads.
__device__ __forceinline__ void join(Element* out, const float (&sinks)[2], float v_scale, int tile, int num_parts,
                                     int num_heads, u32 joined, u32 weights) {
  const int lane = threadIdx.x % 32;
  const u32 sums_at = joined + tile / CLUSTER * TILE_BYTES + lane * 16, weights_at = weights + lane % 4 * 16;
  float highest[2] = {sinks[0], sinks[1]}, total[2] = {0, 0}, y[4] = {0, 0, 0, 0};
  for (int part = lane / 4; part < num_parts; part += 8) {
    const float4 found = load_near(weights_at + part * WEIGHTS_PITCH);
    highest[0] = max(highest[0], found.x);
    highest[1] = max(highest[1], found.y);
  }
  float reference[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
#pragma unroll
    for (int other = 4; other < 32; other *= 2)
      highest[j] = max(highest[j], __shfl_xor_sync(0xffffffff, highest[j], other));
    reference[j] = highest[j] == NONE ? 0 : highest[j];
  }
#pragma unroll 1
  for (int start = 0; start < num_parts; start += 8) {
    float scale[2] = {0, 0};    // of part `start + lane / 4`
    if (start + lane / 4 < num_parts) {
      const float4 found = load_near(weights_at + (start + lane / 4) * WEIGHTS_PITCH);
      scale[0] = power_of_2(found.x - reference[0]);
      scale[1] = power_of_2(found.y - reference[1]);
      total[0] += found.z * scale[0];
      total[1] += found.w * scale[1];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (start + i >= num_parts) break;
      const float4 x = load_near(sums_at + (start + i) * SUMS_PITCH);
      const float first = __shfl_sync(0xffffffff, scale[0], i * 4 + lane % 4);
      const float second = __shfl_sync(0xffffffff, scale[1], i * 4 + lane % 4);
      y[0] += x.x * first;
      y[1] += x.y * second;
      y[2] += x.z * first;
      y[3] += x.w * second;
    }
  }
  float factor[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
#pragma unroll
    for (int other = 4; other < 32; other *= 2) total[j] += __shfl_xor_sync(0xffffffff, total[j], other);
    total[j] += power_of_2(sinks[j] - reference[j]);
    factor[j] = total[j] == 0 ? 0 : reciprocal(total[j]) * v_scale;
  }
  write_tile(out, y, factor, tile, num_heads);
}

// A warp that has all of a token's keys.
__device__ __forceinline__ void write_alone(Element* out, const Sums& sums, const float (&sinks)[2], float v_scale,
                                            int num_heads) {
  float factor[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const float highest = max(sums.highest[j], sinks[j]), reference = highest == NONE ? 0 : highest;
    const float scale = power_of_2(sums.highest[j] - reference);
    const float total = sums.total[j] * scale + power_of_2(sinks[j] - reference);
    factor[j] = total == 0 ? 0 : reciprocal(total) * v_scale * scale;
  }
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) write_tile(out, sums.values[tile], factor, tile, num_heads);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32 * WARPS) decode_attention(
    Element* out, const Element* q, const Stored* k, const Stored* v, const float* k_scale, const float* v_scale,
    const Sink* sinks, const float* slopes, const int* cu_seqlens, const int* kv_lens, const int* page_indices,
    const int* page_indptr, const int* page_start, i64 num_tokens, i64 num_seqs, i64 q_stride_t, i64 q_stride_h,
    i64 q_stride_d, i64 k_stride_p, i64 k_stride_s, i64 k_stride_h, i64 v_stride_p, i64 v_stride_s, i64 v_stride_h) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ u64 all_given;
  let_next_kernel_start();
  const u32 barrier = shared_address(&all_given);
  if (CLUSTER > 1) {
    if (threadIdx.x == 0) {
      barrier_init(barrier, 1);
      barrier_init_fence();
    }
    __syncwarp();
    arrive_with_nothing_written();    // has begun: its shared memory may be written
  }
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int rank = blockIdx.x, kv_head = blockIdx.y / GROUPS, of_group = blockIdx.y % GROUPS * COLUMNS;
  const int head = kv_head * GROUP + of_group, num_heads = min(COLUMNS, GROUP - of_group);
  const u32 joined = shared_address(memory), weights = joined + WEIGHTS_AT;
  const u32 ring = joined + JOINED_BYTES + warp * RING_BYTES;
  const Lists lists = {cu_seqlens, kv_lens, page_indices, page_indptr, page_start};
  int token = blockIdx.z;
#ifdef ONE_QUERY
  const Seen seen = seen_by_only_token(blockIdx.z, num_seqs, num_tokens, token, lists);
  if (token < 0) {    // one block waits all the same: what follows may rely on what was in front
    if (blockIdx.x + blockIdx.y + blockIdx.z == 0) wait_for_kernel_in_front();
    return;
  }
#else
  const Seen seen = seen_by_token(token, num_seqs, lists);
#endif
  const Cache cache = {k + kv_head * k_stride_h, v + kv_head * v_stride_h,
                       (int)k_stride_p, (int)k_stride_s, (int)v_stride_p, (int)v_stride_s};

  const int first_block = seen.lowest / KEYS;
  const int num_blocks = seen.end > seen.lowest ? (seen.end + KEYS - 1) / KEYS - first_block : 0;
  const int part = warp * CLUSTER + rank, first = first_block + part;    // then every PARTS-th block
  const int count = num_blocks > part ? (num_blocks - part + PARTS - 1) / PARTS : 0;
  // The pages of a block are asked for one block ahead. `page` is that of block `copied`.
  int copied = 0, page = page_of(seen, first), last_page = page;
#pragma unroll 1
  for (; copied < STAGES; copied++) {
    if (copied < count) {
      const int following = page_of(seen, first + (copied + 1) * PARTS);
      copy_block(cache, seen, first + copied * PARTS, page, seen.old_end, ring + copied * 2 * BLOCK_BYTES);
      last_page = page;
      page = following;
    }
    end_group_of_copies();
  }
  wait_for_kernel_in_front();
  // New tokens are the last of a sequence, and nearly always in one block.
#pragma unroll 1
  for (int i = min(count, STAGES) - 1; i >= 0 && (first + i * PARTS + 1) * KEYS > seen.old_end; i--) {
    copy_new_rows(cache, seen, first + i * PARTS, last_page, ring + i * 2 * BLOCK_BYTES);
    if (i > 0) last_page = page_of(seen, first + (i - 1) * PARTS);
  }
  end_group_of_copies();

  u32 queries[TILES][2];
  load_queries(queries, q + (i64)token * q_stride_t + head * q_stride_h, q_stride_h, q_stride_d, num_heads);
  float factors[2] = {FACTOR, FACTOR}, value_scale = 1;
#ifdef K_SCALE
#pragma unroll
  for (int j = 0; j < 2; j++) factors[j] *= k_scale[0];
#endif
#ifdef V_SCALE
  value_scale = v_scale[0];
#endif
  float own_sinks[2] = {NONE, NONE}, own_slopes[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < 2; j++)
    if (lane % 4 * 2 + j < num_heads) {
#ifdef SINKS
      own_sinks[j] = widened(sinks[head + lane % 4 * 2 + j]) * LOG2_E;
#endif
#ifdef SLOPES
      own_slopes[j] = slopes[head + lane % 4 * 2 + j];
#endif
    }
#if defined(CACHE_FLOAT8) && !defined(FLOAT16)    // after all loads: it waits for the queries
  const float fitted = fitted_to_float16(queries);
#pragma unroll
  for (int j = 0; j < 2; j++) factors[j] *= __shfl_sync(0xffffffff, fitted, (lane % 4 * 2 + j) * 4);
#endif

  Sums sums = {{NONE, NONE}};
  int at = 0;
#pragma unroll 1
  for (int i = 0; i < count; i++) {
    const int block = first + i * PARTS;
    // The group of a block's first copies has STAGES - 1 others after it at most; new rows have come in the last of all.
    if (i < STAGES && (block + 1) * KEYS > seen.old_end)
      wait_for_copies<0>();
    else
      wait_for_copies<STAGES - 1>();
    __syncwarp();
    add_block(sums, queries, factors, own_slopes, seen, block, ring + at * 2 * BLOCK_BYTES);
    __syncwarp();
    if (i + STAGES < count) {
      const int following = page_of(seen, block + (STAGES + 1) * PARTS);
      copy_block(cache, seen, block + STAGES * PARTS, page, seen.end, ring + at * 2 * BLOCK_BYTES);
      page = following;
    }
    end_group_of_copies();
    at = at + 1 == STAGES ? 0 : at + 1;
  }

#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int other = 4; other < 32; other *= 2) sums.total[j] += __shfl_xor_sync(0xffffffff, sums.total[j], other);
  Element* result = out + ((i64)token * HEADS + head) * SIZE;
  if (PARTS == 1) return write_alone(result, sums, own_sinks, value_scale, num_heads);
  if (CLUSTER > 1) wait_for_cluster();    // all of it has begun
  if (CLUSTER > 1 && threadIdx.x == 0) {
    const int own_tiles = (TILES - rank + CLUSTER - 1) / CLUSTER;
    barrier_expect(barrier, min(num_blocks, PARTS) * (own_tiles * TILE_BYTES + WEIGHT_BYTES));
  }
  if (count > 0) hand_over(sums, part, joined, weights, barrier);
  __syncwarp();
  if (CLUSTER == 1)
    __syncthreads();
  else
    barrier_wait(barrier);
  for (int tile = warp * CLUSTER + rank; tile < TILES; tile += PARTS)
    join(result, own_sinks, value_scale, tile, min(num_blocks, PARTS), num_heads, joined, weights);
}
