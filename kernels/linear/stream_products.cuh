// How a warp of stream.cu multiplies its part of a tile with a piece of x: of 16 bits, or of few.
//
// stream.cu, in the middle of which this is included, has the defines and what comes of them.

#pragma once

// What a piece has in shared memory besides. Where groups of k have scales: those of a tile, and of x, the piece's first
// k, and how many groups a row has. And where sums begin with sums of x: where those of a lane's two rows are.
struct OfPiece {
  const unsigned char* scales;
  const float* x_scales;
  int first, groups;
  u32 x_sums[2];
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

// Values that are lowered, and what sums are multiplied with for it.
#if defined(MXFP4)
#define LOWERED FP4_LOWERED
#elif defined(PACKED4) && !defined(FLOAT16)
#define LOWERED NIBBLES_LOWERED
#endif
#ifdef LOWERED
constexpr float SUMS_RAISED = 1 / (LOWERED * X_RAISED);
#else
#define LOWERED 1
constexpr float SUMS_RAISED = 1;
#endif

// What values are too large by, of all rows: sums begin with it times the sum of x, less than nothing; and so with points.
#if defined(PACKED4) && !defined(FLOAT16)
constexpr int LESS = OFFSET;
#elif defined(PACKED8)
constexpr int LESS = OFFSET - 128;
#else
constexpr int LESS = 0;
#endif
#ifdef POINTS
constexpr bool SUBTRACTS = true;
constexpr float X_SUMS = -LOWERED;    // of sums of x that are kept: the rest differs from group to group
#else
constexpr bool SUBTRACTS = LESS != 0;
constexpr float X_SUMS = -LESS * LOWERED;
#endif
#if defined(IN_FOUR_BITS) || (defined(PACKED8) && (defined(POINTS) || OFFSET != 128))
#define PREPARES_X
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
  return lowered_fp4(word, i);
#elif defined(NVFP4)
  return scaled_fp4(word, i, scale);
#elif defined(FLOAT16)
  return elements_of_nibbles(word, i, OFFSET);    // sums of what is 1024 too large would lose digits of float16
#else
  return lowered_nibbles(word, i);
#endif
}

// A lane has words of w of rows lane / 4 and 8 below, and of x the k of these words in a row: so which k an mma takes
// for which is not what its layout says, but the same for both. `scales`: of the words, if values have some.
__device__ __forceinline__ void multiply_words(
    float (&products)[2][4], u32 above, u32 below, u32 x_words, int half, const u32 (&scales)[2]) {
  u32 b[WORD / 2];
  load_words(b, x_words);
#pragma unroll
  for (int i = 0; i < WORD / 2; i += 2) {
    const u32 a[4] = {values_of(above, i, scales[0]), values_of(below, i, scales[1]),
                      values_of(above, i + 1, scales[0]), values_of(below, i + 1, scales[1])};
    // Two sums, so that not each mma waits for the last one; where each half is a group, there are others besides.
    const int to = WORD == 4 ? half : SUMMED > LOADED / 2 ? i / 2 : 0;
    multiply_add(products[to], a, b[i], b[i + 1]);
  }
}

#ifndef IN_FP4
__device__ __forceinline__ float scale_at(const unsigned char* scales, int index) {
#if SCALE_BYTES == 4
  return ((const float*)scales)[index];
#elif defined(SCALES_FLOAT16)
  return widened_float16(((const u16*)scales)[index]);
#else
  return widened(((const Element*)scales)[index]);
#endif
}
#endif
// A warp's part of a tile's product with a piece of x: of each run of TURN, its STEP.
__device__ __forceinline__ void multiply_piece(
    float (&sums)[2][4], u32 w_rows, u32 x_rows, int first, int length, const OfPiece& of) {
  const int lane = threadIdx.x % 32;
#pragma unroll UNROLL
  for (int k = 0; k < length; k += TURN) {
    const u32 w_step = w_rows + k / 8 * BITS, x_step = x_rows + k * sizeof(Input);
    // Of what is summed together: the scale of rows lane / 4 and 8 below, and what the lane's four sums begin with.
    float scales[STEP / SUMMED][2], begin[STEP / SUMMED][4] = {};
#pragma unroll
    for (int i = 0; i < STEP / SUMMED; i++) scales[i][0] = scales[i][1] = 1;
    if (SUBTRACTS)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        u32 x_sums[STEP / SUMMED];
        load_words(x_sums, of.x_sums[j] + (u32)(first + k) / SUMMED * 4);
        for (int i = 0; i < STEP / SUMMED; i++) begin[i][j] = begin[i][2 + j] = __uint_as_float(x_sums[i]);
      }
#ifdef GROUP
    const auto group_of = [&](int own) {    // of a k of the step; what changes from step to step is added
      const u32 before = of.first + first + own;
      return TURN % GROUP == 0 ? before / GROUP + (u32)k / GROUP : (before + k) / GROUP;
    };
    [[maybe_unused]] const u32 group = group_of(0);
#endif
#if defined(IN_FP4)
    u32 stored[2][STEP / GROUP / 4];
#pragma unroll
    for (int j = 0; j < 2; j++)
      load_words(stored[j], shared_address(of.scales) + (lane / 4 + 8 * j) * (of.groups + SCALE_PAD) + group);
#ifdef MXFP4
#pragma unroll
    for (int i = 0; i < STEP / SUMMED; i++)
      for (int j = 0; j < 2; j++) scales[i][j] = power_of(stored[j][i / 4] >> i % 4 * 8 & 255);
#endif
#elif defined(GROUP)
#pragma unroll
    for (int i = 0; i < STEP / SUMMED; i++) {
      const u32 own = group_of(i * SUMMED);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int row = lane / 4 + 8 * j;
        scales[i][j] = j && SCALE_ROWS == 1 ? scales[i][0]
                                            : scale_at(of.scales, row % SCALE_ROWS * of.groups + own);
#ifdef POINTS
        const u32* points = (const u32*)(of.scales + SCALE_ROWS * SCALE_BYTES * of.groups);
        const u32 word = points[row / WORD * of.groups + own];
        const float less = LESS + (int)(word >> row % WORD * BITS & ((1 << BITS) - 1));
        begin[i][2 * j] *= less, begin[i][2 * j + 1] *= less;
#endif
      }
    }
#endif
    float own[2][4] = {}, (&products)[2][4] = ARE_WHOLE ? sums : own;
    if (SUBTRACTS)
      for (int j = 0; j < 4; j++) own[0][j] = begin[0][j];
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
        const int byte = at / GROUP % 4 + lane % 4 / 2;
        multiply_words(products, above, below, x_step + at * sizeof(Input), half,
                       {fp4_scale_of_float8(stored[0][at / GROUP / 4], byte),
                        fp4_scale_of_float8(stored[1][at / GROUP / 4], byte)});
#else
        multiply_words(products, above, below, x_step + at * sizeof(Input), half, {});
#endif
        if (ARE_WHOLE || done % SUMMED != 0) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          float sum = products[0][j], scale = scales[done / SUMMED - 1][j / 2];
          if (SUMMED > LOADED / 2) sum += products[1][j];
#if defined(GROUP) && defined(X_FLOAT8)
          const int m = lane % 4 * 2 + j % 2;
          scale *= of.x_scales[m * of.groups + group];
#endif
          sums[0][j] += sum * scale;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) products[0][j] = begin[done / SUMMED % (STEP / SUMMED)][j], products[1][j] = 0;
      }
    }
  }
}

#else

constexpr float SUMS_RAISED = 1;

// A warp's part of a tile's product with a piece of x: of each run of TURN, its STEP.
__device__ __forceinline__ void multiply_piece(
    float (&sums)[2][4], u32 w_rows, u32 x_rows, int, int length, const OfPiece&) {
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
