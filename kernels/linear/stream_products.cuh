// How a warp of stream.cu multiplies its part of a tile with a piece of x: of 16 bits, or of few.
//
// stream.cu, in the middle of which this is included, has the defines and what comes of them.

#pragma once

// In shared memory, where groups of k have scales: those of a tile, and of x; the warp's first k in the piece, and how
// many groups a row has.
struct GroupScales {
  const unsigned char* tile;
  const float* x;
  int first, groups;
};

#ifdef IN_FEW_BITS

// Whether sums of steps need no more than to be added, where values have two sums for all of them.
#if defined(IN_FOUR_BITS) || defined(GROUP)
constexpr bool ARE_WHOLE = false;
#else
constexpr bool ARE_WHOLE = true;
#endif
constexpr int WORD = 32 / BITS, LOADED = 8 * WORD;    // k of a word, and of a row in what ldmatrix brings

// k whose products are summed before they are scaled.
#if defined(GROUP) && !defined(NVFP4)
constexpr int SUMMED = GROUP < STEP ? GROUP : STEP;
static_assert(GROUP % SUMMED == 0 && STEP % SUMMED == 0 && SUMMED % (LOADED / 2) == 0, "whole groups, or a part");
#else
constexpr int SUMMED = STEP;
#endif

// What values are too large by, of all rows: the sum of x times it is subtracted from sums, and so are points.
#if defined(PACKED4) && !defined(FLOAT16)
constexpr int LESS = NIBBLES_FROM + OFFSET;
#elif defined(PACKED8)
constexpr int LESS = OFFSET - 128;
#else
constexpr int LESS = 0;
#endif
#ifdef POINTS
constexpr bool SUBTRACTS = true;
#else
constexpr bool SUBTRACTS = LESS != 0;
#endif

// Two values of a word, as few_bits.cuh pairs them; those of NVFP4 times their scale.
__device__ __forceinline__ u32 values_of(u32 word, int i, u32 scale) {
#if defined(FLOAT8)
  return elements_of_float8(word, i);
#elif defined(INT8)
  return elements_of_bytes<true>(word, i);
#elif defined(PACKED8)
  return elements_of_bytes<false>(word, i);
#elif defined(MXFP4)
  return elements_of_fp4(word, i);
#elif defined(NVFP4)
  return scaled_fp4(word, i, scale);
#elif defined(FLOAT16)
  return elements_of_nibbles(word, i, OFFSET);    // sums of what is 1024 too large would lose digits of float16
#else
  return raised_nibbles(word, i);
#endif
}

// A lane has words of w of rows lane / 4 and 8 below, and of x the k of these words in a row: so which k an mma takes
// for which is not what its layout says, but the same for both. `scales`: of the words, if values have some.
__device__ __forceinline__ void multiply_words(
    float (&products)[2][4], float (&inputs)[2][4], u32 above, u32 below, u32 x_words, int half,
    const u32 (&scales)[2]) {
  const u32 ones[4] = {ONES, ONES, ONES, ONES};
  u32 b[WORD / 2];
  load_words(b, x_words);
#pragma unroll
  for (int i = 0; i < WORD / 2; i += 2) {
    const u32 a[4] = {values_of(above, i, scales[0]), values_of(below, i, scales[1]),
                      values_of(above, i + 1, scales[0]), values_of(below, i + 1, scales[1])};
    // Two sums, so that not each mma waits for the last one; where each half is a group, there are others besides.
    const int to = WORD == 4 ? half : SUMMED > LOADED / 2 ? i / 2 : 0;
    multiply_add(products[to], a, b[i], b[i + 1]);
    if (SUBTRACTS) multiply_add(inputs[to], ones, b[i], b[i + 1]);
  }
}

#ifdef IN_FP4
// Two to the power that byte i has, less 127. That of 0 is no power, but too small to matter.
__device__ __forceinline__ float power_of(u32 word, int i) {
  return __uint_as_float((i < 3 ? word << (23 - 8 * i) : word >> 1) & 0x7f800000);
}
#else
__device__ __forceinline__ float scale_at(const unsigned char* scales, int index) {
#if SCALE_BYTES == 4
  return ((const float*)scales)[index];
#else
  return widened(((const Element*)scales)[index]);
#endif
}
#endif
// A warp's part of a tile's product with a piece of x: of each run of TURN, its STEP.
__device__ __forceinline__ void multiply_piece(
    float (&sums)[2][4], u32 w_rows, u32 x_rows, int length, const GroupScales& of_tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll UNROLL
  for (int k = 0; k < length; k += TURN) {
    const u32 w_step = w_rows + k / 8 * BITS, x_step = x_rows + k * sizeof(Input);
    // Of what is summed together: the scale of rows lane / 4 and 8 below, and what their values are too large by.
    float scales[STEP / SUMMED][2], less[STEP / SUMMED][2];
#pragma unroll
    for (int i = 0; i < STEP / SUMMED; i++)
      for (int j = 0; j < 2; j++) scales[i][j] = 1, less[i][j] = LESS;
#if defined(IN_FP4)
    u32 stored[2][STEP / GROUP / 4];
#pragma unroll
    for (int j = 0; j < 2; j++)
      load_words(stored[j], shared_address(of_tile.tile) + (lane / 4 + 8 * j) * (of_tile.groups + SCALE_PAD) +
                                (of_tile.first + k) / GROUP);
#ifdef MXFP4
#pragma unroll
    for (int i = 0; i < STEP / SUMMED; i++)
      for (int j = 0; j < 2; j++) scales[i][j] = power_of(stored[j][i / 4], i % 4);
#endif
#elif defined(GROUP)
#pragma unroll
    for (int i = 0; i < STEP / SUMMED; i++) {
      const int group = (of_tile.first + k + i * SUMMED) / GROUP;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int row = lane / 4 + 8 * j;
        scales[i][j] = j && SCALE_ROWS == 1 ? scales[i][0]
                                            : scale_at(of_tile.tile, row % SCALE_ROWS * of_tile.groups + group);
#ifdef POINTS
        const u32* points = (const u32*)(of_tile.tile + SCALE_ROWS * SCALE_BYTES * of_tile.groups);
        const u32 word = points[row / WORD * of_tile.groups + group];
        less[i][j] += (int)(word >> row % WORD * BITS & ((1 << BITS) - 1));
#endif
      }
    }
#endif
    float own[2][4] = {}, inputs[2][4] = {}, (&products)[2][4] = ARE_WHOLE ? sums : own;
#pragma unroll
    for (int i = 0; i < STEP; i += LOADED) {
      u32 words[4];
      load_matrices(words, w_step + i / 8 * BITS);
#ifdef X_FLOAT8
      u32 x[4];
      if (i % (2 * LOADED) == 0) load_matrices(x, x_step + i);
#endif
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 above = words[2 * half], below = words[2 * half + 1];
        const int at = i + half * LOADED / 2, done = at + LOADED / 2;
#if defined(X_FLOAT8)
        const u32 word = x[i / LOADED % 2 * 2 + half];
        const u32 a[4] = {float16_of_float8(above, 0), float16_of_float8(below, 0), float16_of_float8(above, 1),
                          float16_of_float8(below, 1)};
        multiply_add_float16(products[half], a, float16_of_float8(word, 0), float16_of_float8(word, 1));
#elif defined(NVFP4)    // two of the lanes that share a row have words of one group, two of the next
        const int group = at / GROUP % 4 + lane % 4 / 2;
        multiply_words(products, inputs, above, below, x_step + at * sizeof(Input), half,
                       {fp4_scale_of_float8(stored[0][at / GROUP / 4], group),
                        fp4_scale_of_float8(stored[1][at / GROUP / 4], group)});
#else
        multiply_words(products, inputs, above, below, x_step + at * sizeof(Input), half, {});
#endif
        if (ARE_WHOLE || done % SUMMED != 0) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          float sum = products[0][j], of_inputs = inputs[0][j % 2], scale = scales[done / SUMMED - 1][j / 2];
          if (SUMMED > LOADED / 2) sum += products[1][j], of_inputs += inputs[1][j % 2];
          if (SUBTRACTS) sum -= of_inputs * less[done / SUMMED - 1][j / 2];
#if defined(GROUP) && defined(X_FLOAT8)
          const int m = lane % 4 * 2 + j % 2;
          scale *= of_tile.x[m * of_tile.groups + (of_tile.first + k) / GROUP];
#endif
          sums[0][j] += sum * scale;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) products[0][j] = products[1][j] = inputs[0][j] = inputs[1][j] = 0;
      }
    }
  }
}

#ifdef IN_FOUR_BITS

// Once for each piece of x that has come: of eight neighbours i and i + 4 become pairs, as those of a word of w do. A
// warp orders what it alone reads, its STEP of each run of TURN.
__device__ __forceinline__ void order_x(u32 x_step, int rows, int x_pitch, int length) {
  constexpr int EACH = STEP / WORD;
#pragma unroll 1
  for (int k = 0; k < length; k += TURN)
#pragma unroll 2
    for (int i = threadIdx.x % 32; i < rows * EACH; i += 32) {
      const u32 at = x_step + i / EACH * x_pitch + (k + i % EACH * WORD) * sizeof(Input);
      u32 x[4];
      load_words(x, at);
      const auto pair = [](u32 first, u32 second, bool upper) {
        return __byte_perm(first, second, upper ? 0x7632 : 0x5410);
      };
      store_words(at, pair(x[0], x[2], false), pair(x[0], x[2], true), pair(x[1], x[3], false), pair(x[1], x[3], true));
    }
  fence_before_copies();
  __syncwarp();
}

#endif

#else

// A warp's part of a tile's product with a piece of x: of each run of TURN, its STEP.
__device__ __forceinline__ void multiply_piece(
    float (&sums)[2][4], u32 w_rows, u32 x_rows, int length, const GroupScales&) {
#pragma unroll UNROLL
  for (int k = 0; k < length; k += TURN) {
    u32 a[4], b[4];
    load_matrices(b, x_rows + k * sizeof(Element));
    load_matrices(a, w_rows + k * sizeof(Element));
    multiply_add(sums[0], a, b[0], b[1]);
    load_matrices(a, w_rows + (k + STEP / 2) * sizeof(Element));
    multiply_add(sums[1], a, b[2], b[3]);
  }
}

#endif
