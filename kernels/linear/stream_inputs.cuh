// How the warps of stream.cu that multiply prepare x for weights in few bits: in a word's order, and with sums.
//
// stream.cu, in the middle of which this is included, has the defines and what comes of them; stream_products.cuh says
// what products want. The threads share x out in chunks of 16 bytes: with KEEPS_X of all of x, which they bring from
// memory, else of a piece that has come.

#pragma once

constexpr int CHUNK = 16 / (int)sizeof(Input);    // k
constexpr int TAKERS = 32 * WARPS;                // threads that take chunks

#ifndef IN_FEW_BITS
constexpr bool SUBTRACTS = false;
constexpr int SUMMED = CHUNK;
constexpr float X_SUMS = 0;
#endif

// After a row of x come the sums of it, of SUMMED each: where, of the k from `k` on.
__device__ __forceinline__ u32 x_sums_at(u32 x_rows, int row, int k, int x_pitch, int x_width) {
  return x_rows + row * x_pitch + x_width * (int)sizeof(Input) + X_PAD + k / SUMMED * 4;
}

__device__ __forceinline__ int bytes_of_x_sums(int x_width) {
  return SUBTRACTS ? (x_width / SUMMED * 4 + 127) / 128 * 128 : 0;
}

// Where a chunk lies in memory, and where it is to be, as its sum is; there is none if `to` is 0.
struct Chunk {
  const void* from;
  u32 to, sum_to;
};

// Of four bits pairs are made of eight neighbours, i and i + 4, as those of a word of w are.
__device__ __forceinline__ void prepare(u32 (&x)[4]) {
#ifdef IN_FOUR_BITS
  const u32 given[4] = {x[0], x[1], x[2], x[3]};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[i] = __byte_perm(given[i / 2], given[i / 2 + 2], i % 2 ? 0x7632 : 0x5410);
#if defined(MXFP4)
    x[i] = raised_x(x[i]);
#elif defined(PACKED4) && !defined(FLOAT16)
    x[i] = raised_x_of_nibbles(x[i], i);
#endif
  }
#endif
}

// Stores a chunk as it is multiplied, and the sums of those that its warp has. All lanes are here; x is 0 where there
// is none.
__device__ __forceinline__ void store_chunk(u32 (&x)[4], const Chunk& chunk) {
  const int lane = threadIdx.x % 32, group = lane / (SUMMED / CHUNK);
  float sum = 0;
  if (SUBTRACTS) {    // products with ones, whose column n is the sum of lanes 4 n to 4 n + 3, and a lane has two of
    float sums[4] = {};
    multiply_add(sums, {ONES, ONES, ONES, ONES}, x[0], x[1]);
    multiply_add(sums, {ONES, ONES, ONES, ONES}, x[2], x[3]);
    sum = SUMMED > 32 ? sums[0] + sums[1] : group % 2 ? sums[1] : sums[0];
    if (SUMMED > 64) sum += __shfl_xor_sync(0xffffffff, sum, 1);
#ifdef PACKED4
    sum *= X_RAISED;
#endif
  }
  if (chunk.to == 0) return;
  prepare(x);
  store_words(chunk.to, x[0], x[1], x[2], x[3]);
  // Of a group's lanes the one that has its columns.
  if (SUBTRACTS && lane == group * (SUMMED / CHUNK) + group * SUMMED / 64) store_shared(chunk.sum_to, sum * X_SUMS);
}

#ifdef KEEPS_X

// All of x, from memory.
struct Keeper {
  static constexpr int AT_ONCE = 4;    // chunks that a thread asks for before it stores the first

  const Input* x;
  i64 row_stride, stride;
  u32 x_rows, lies_apart;
  int each, all, x_pitch, x_width;    // chunks of a row, and of x
  Chunk chunks[AT_ONCE];

  // While the kernel in front still runs: what can be computed without x.
  __device__ Keeper(
      u32 x_rows, const Input* x, i64 row_stride, i64 stride, int rows, int inputs, int x_pitch, int x_width)
      : x(x), row_stride(row_stride), stride(stride), x_rows(x_rows), each(inputs / CHUNK), all(rows * each),
        x_pitch(x_pitch), x_width(x_width) {
    lies_apart = stride != 1 || (u64)x % 16 != 0 || (rows > 1 && row_stride * sizeof(Input) % 16 != 0);
    compute_now(lies_apart);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      chunks[i] = chunk(threadIdx.x + i * TAKERS);
      compute_now(chunks[i].from), compute_now(chunks[i].to), compute_now(chunks[i].sum_to);
    }
  }

  __device__ Chunk chunk(int index) const {
    const int row = index / each, k = (index - row * each) * CHUNK;
    if (index >= all) return {nullptr, 0, 0};
    return {x + row * row_stride + k * stride, x_rows + row * x_pitch + k * (u32)sizeof(Input),
            x_sums_at(x_rows, row, k, x_pitch, x_width)};
  }

  __device__ void keep() {
    if (lies_apart) return gather();
#pragma unroll 1
    for (int first = 0; first < all; first += AT_ONCE * TAKERS) {
      if (first > 0)
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) chunks[i] = chunk(first + threadIdx.x + i * TAKERS);
      u32 words[AT_ONCE][4] = {};
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (chunks[i].to != 0) load_input(words[i], chunks[i].from);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (first + i * TAKERS < all) store_chunk(words[i], chunks[i]);
    }
  }

  // Elements that lie apart, one by one.
  __device__ void gather() const {
    constexpr int OF_WORD = 4 / (int)sizeof(Input);
#pragma unroll 1
    for (int first = 0; first < all; first += TAKERS) {
      const Chunk own = chunk(first + threadIdx.x);
      u32 words[4] = {};
      if (own.to != 0)
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
          words[i / OF_WORD] |= (u32)((const Input*)own.from)[i * stride] << i % OF_WORD * 8 * (int)sizeof(Input);
      store_chunk(words, own);
    }
  }
};

#elif defined(PREPARES_X)

// A piece of x that has come, in place.
__device__ __forceinline__ void prepare_x(u32 x_piece, int rows, int length, int x_pitch, int x_width) {
  const int each = length / CHUNK;
#pragma unroll 1
  for (int first = 0; first < rows * each; first += TAKERS) {
    const int index = first + threadIdx.x, row = index / each, k = (index - row * each) * CHUNK;
    const u32 at = x_piece + row * x_pitch + k * (u32)sizeof(Input);
    Chunk own = {nullptr, at, x_sums_at(x_piece, row, k, x_pitch, x_width)};
    u32 words[4] = {};
    if (row < rows) load_words(words, own.to);
    else own.to = 0;
    store_chunk(words, own);
  }
  fence_before_copies();
  sync_multiplying_warps();
}

#else

__device__ __forceinline__ void prepare_x(u32, int, int, int, int) {}

#endif
