// What score.cu and prompts.cu have in common: warps that bring keys, 64 at a time, heads in shared memory, and what a warp
// group's products of both come to.
//
//   products [64 keys x COLUMNS] = keys [64 x SIZE] * queries [SIZE x COLUMNS]
//   score[key] = sum_h weights[h] * SCALE * max(queries[h] . keys[key], 0)
//
// Defines, beside those of rows.cuh:
//   FLOAT16           elements are float16; else bfloat16
//   HEADS, SIZE       8, 16, 32, 64 or 128; 64 or 128
//   SCALE             more than 0
//   ARE_READ_ONCE     keys are: they leave the L2 cache first, so that scores stay there
//   COLUMNS           heads that are in shared memory together: of several tokens, or of one and zeros
//
// Include half.cuh, warp_group.cuh and rows.cuh in front of it.

#pragma once

constexpr int KEYS = 64;                                     // of a stage
constexpr int MULTIPLYING = 256, BRINGING = 128;             // threads
constexpr int BLOCKS = SIZE / 64;
constexpr u32 STAGE_BYTES = BLOCKS * BLOCK_BYTES;
constexpr u32 QUERY_BYTES = COLUMNS * 128;                   // of 64 elements of each
constexpr float FACTOR = SCALE;

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

struct Piece { u32 words[4]; };

__device__ __forceinline__ void store_piece(u32 to, const Piece& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.words[0]), "r"(x.words[1]), "r"(x.words[2]),
               "r"(x.words[3]) : "memory");
}

// --- keys ------------------------------------------------------------------------------------------------------------

struct Cache {
  const Element* keys;
  i64 stride_p, stride_s;
};

// Which of a stage's keys a lane of a warp that brings them asks for the page of. A warp brings 16.
__device__ __forceinline__ int own_key() { return (threadIdx.x - MULTIPLYING) / 32 * 16 + threadIdx.x % 16; }

// Has the warp's keys brought to a stage: `key` is the lane's in its row, which has `count`, and `page` that key's.
__device__ __forceinline__ void bring_stage(u32 stage, const Cache& cache, int key, int page, int count, u32 full) {
  const int lane = threadIdx.x % 32, piece = lane % 8, first_key = key - lane % 16, first_row = own_key() - lane % 16;
  const u64 policy = ARE_READ_ONCE ? read_once_policy() : 0;
  const u64 row = (u64)(cache.keys + (page * cache.stride_p + key % PAGE_SIZE * cache.stride_s));
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int at = i * 4 + lane / 8;
    const Element* from = (const Element*)__shfl_sync(0xffffffff, row, at) + piece * 8;
    const u32 to = stage + place_in_block(first_row + at, piece);
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
      const bool exists = first_key + at < count;
      if (ARE_READ_ONCE)
        copy_piece_once(to + block * BLOCK_BYTES, from + block * 64, exists, policy);
      else
        copy_piece(to + block * BLOCK_BYTES, from + block * 64, exists);
    }
  }
  arrive_when_copied(full);
}

// --- queries ---------------------------------------------------------------------------------------------------------

struct Given {
  const Element* q;
  const float* weights;
  i64 q_stride_t, q_stride_h, q_stride_d, weights_stride_t, weights_stride_h;
};

// Neighbours, of which each has HEADS of the columns; those behind them are zeros.
struct Tokens {
  int first, count;
};

// By so many threads, of which this one is number `thread`.
template <int LOADING>
__device__ __forceinline__ void load_queries(u32 to, const Given& given, const Tokens& tokens, int thread) {
  const bool in_pieces = given.q_stride_d == 1 && ((u64)given.q | (u64)(2 * given.q_stride_h) |
                                                  (u64)(2 * given.q_stride_t)) % 16 == 0;
#pragma unroll 4
  for (int i = thread; i < COLUMNS * (SIZE / 8); i += LOADING) {
    const int row = i / (SIZE / 8), piece = i % (SIZE / 8), token = row / HEADS;
    const u32 at = to + piece / 8 * QUERY_BYTES + place_in_block(row, piece % 8);
    const Element* from = given.q + (tokens.first + token) * given.q_stride_t + row % HEADS * given.q_stride_h +
                          piece * 8 * given.q_stride_d;
    if (token < tokens.count && in_pieces) {
      copy_piece(at, from, true);
      continue;
    }
    Piece found = {0, 0, 0, 0};
    if (token < tokens.count) {
#pragma unroll
      for (int j = 0; j < 4; j++)
        found.words[j] = from[2 * j * given.q_stride_d] | (u32)from[(2 * j + 1) * given.q_stride_d] << 16;
    }
    store_piece(at, found);
  }
  end_group_of_copies();
  wait_for_copies<0>();
  show_to_tensor_cores();
}

// A thread's: of each eight heads those of its columns, times the scale.
typedef float Weights[COLUMNS / 8][2];

__device__ __forceinline__ void load_weights(Weights& weights, const Given& given, const Tokens& tokens) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 8 * 2; i++) {
    const int row = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
    const i64 token = tokens.first + row / HEADS, head = row % HEADS;
    const bool exists = row / HEADS < tokens.count;
    weights[i / 2][i % 2] =
        exists ? given.weights[token * given.weights_stride_t + head * given.weights_stride_h] * FACTOR : 0;
  }
}

// --- scores ----------------------------------------------------------------------------------------------------------

// What a token's products give of the thread's keys, number `lane / 4` of the warp's and that + 8. Four lanes have the same
// ones, and some heads each.
__device__ __forceinline__ void add_up(float (&sums)[2], const float* products, const float (*weights)[2]) {
  sums[0] = sums[1] = 0;
#pragma unroll
  for (int i = 0; i < HEADS / 8; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) sums[j / 2] += positive(products[i * 4 + j]) * weights[i][j % 2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    sums[j] += __shfl_xor_sync(0xffffffff, sums[j], 1);
    sums[j] += __shfl_xor_sync(0xffffffff, sums[j], 2);
  }
}
