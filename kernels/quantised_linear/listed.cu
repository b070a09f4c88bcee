// product_listed: y[m, n] = sum over k of x[m, k] * w[n, k] + bias[n], where a list says which group each input is of.
//
// The weight lies as a GPTQ checkpoint with act order has it: words[inputs / 8, outputs], eight inputs of an output in an
// int32, the first in the lowest bits; points[groups, outputs / 8], eight outputs in one; scales[groups, outputs]. Value k
// of output n is (q - point - OFFSET) * scale of the group that is groups_of[k], rounded to the type of x. An input of no
// such group has no weight.
//
// A CTA has 32 outputs and 16 rows of x. In shared memory are scales and points of its outputs, those of all groups, so
// that each value finds its own in one load (four outputs' scales, and their points, lie in 16 bytes), and the list of
// groups. Its warps take turns at STEP rows of words. Lane 4 j + i has the words of row i, of outputs 4 j to 4 j + 3; so
// in four products of mma.m16n8k16 it has column j, and the k that the lanes of x with the same i have, in whatever
// order: x's are paired as a word's are. Lanes of one j and all i read as many groups at once, in any order, and would
// meet in the same banks. So there are COPIES of the table, and in copy i outputs are 2 i places further.
//
// At the end the sums of all warps are added in their order: a row of y has the same bits in each run and step.
//
// Programmatic dependent launch: the kernel lets the next one start at once. Before it waits for the kernel in front, it
// reads what no kernel writes: scales, points, and the first words.
//
// Defines:
//   FLOAT16            elements are float16; else bfloat16
//   SCALES_FLOAT16     scales are float16; else elements
//   OFFSET=n           from 0 to 16
//   BIAS               there is one
//   COPIES=n           4 or 1
//   WARPS=n            of a CTA, up to 16

#include "half.cuh"
#include "few_bits.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int OUTPUTS = 32, ROWS = 16;        // of a CTA
constexpr int STEP = 4;                       // rows of words that a warp takes at a time, a lane one of them
constexpr int AHEAD = 4;                      // of these, on their way
constexpr int WORD = 8;                       // inputs of a word
constexpr int EACH = 4;                       // outputs of a lane
constexpr int CHUNKS = OUTPUTS / EACH;        // of a row of the table, of 16 bytes
#ifdef FLOAT16
constexpr u32 RAISED = 0x6400;                // 1024, whose last digits are those of a value of `raised_nibbles`
#else
constexpr u32 RAISED = 0x4300;                // 128
#endif

struct alignas(16) Four {
  u32 words[4];
};
struct alignas(8) Two {
  u32 words[2];
};

typedef float Sums[EACH][4];                  // of each column of a lane, as mma has them

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

__device__ __forceinline__ Four load_four(u32 from) {
  Four found;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.words[0]), "=r"(found.words[1]), "=r"(found.words[2]), "=r"(found.words[3]) : "r"(from)
               : "memory");
  return found;
}

__device__ __forceinline__ void store_four(u32 to, const Four& four) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(four.words[0]), "r"(four.words[1]),
               "r"(four.words[2]), "r"(four.words[3]) : "memory");
}

__device__ __forceinline__ void store_shared(u32 to, u16 value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(value) : "memory");
}

__device__ __forceinline__ void store_shared(u32 to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

__device__ __forceinline__ float load_shared(u32 from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
  return value;
}

// Read once, past the cache that x needs.
__device__ __forceinline__ Four load_once(const u32* from) {
  Four found;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.words[0]), "=r"(found.words[1]), "=r"(found.words[2]), "=r"(found.words[3]) : "l"(from));
  return found;
}

// --- the table -------------------------------------------------------------------------------------------------------

// A pair of values times their scales, rounded to elements.
__device__ __forceinline__ u32 scaled(u32 values, u32 scales) {
#if defined(FLOAT16) || !defined(SCALES_FLOAT16)
  return multiplied(values, scales);
#else
  return rounded(widened((Element)values) * widened_float16((u16)scales),
                 widened((Element)(values >> 16)) * widened_float16((u16)(scales >> 16)));
#endif
}

// Where four outputs' scales and points are, in a copy of the table.
__device__ __forceinline__ u32 place_of(int group, int chunk, int copy) {
  return (u32)(group * COPIES + copy) * (CHUNKS * 16) + (chunk + 2 * copy) % CHUNKS * 16;
}

// The list, as places in the table, in units of 16 bytes.
__device__ __forceinline__ void fill_list(u32 list, const int* groups_of, int inputs, int groups) {
  for (int k = threadIdx.x; k < inputs; k += THREADS)
    store_shared(list + 2 * k, (u16)(min((u32)groups_of[k], (u32)groups) * (COPIES * CHUNKS)));
}

// Scales of the CTA's outputs, and what they subtract; after those of all groups, zeros.
__device__ __forceinline__ void fill_table(
    u32 table, const u16* scales, const u32* points, int first, int outputs, int groups) {
  for (int own = threadIdx.x; own < (groups + 1) * CHUNKS; own += THREADS) {
    const int group = own / CHUNKS, chunk = own % CHUNKS, output = first + chunk * EACH;
    Four entry = {{0, 0, RAISED * 0x10001, RAISED * 0x10001}};
    if (group < groups && output < outputs) {
      const Two found = *(const Two*)(scales + (i64)group * outputs + output);
      entry.words[0] = found.words[0], entry.words[1] = found.words[1];
      const u32 less = points[(i64)group * (outputs / WORD) + output / WORD] >> output % WORD * 4;
#pragma unroll
      for (int i = 0; i < EACH; i += 2) {
        const u32 low = RAISED + OFFSET + (less >> 4 * i & 15), high = RAISED + OFFSET + (less >> (4 * i + 4) & 15);
        entry.words[2 + i / 2] = low | high << 16;
      }
    }
#pragma unroll
    for (int copy = 0; copy < COPIES; copy++) store_four(table + place_of(group, chunk, copy), entry);
  }
}

// --- products --------------------------------------------------------------------------------------------------------

// Inputs i and i + 4 of eight neighbours.
__device__ __forceinline__ void pair_inputs(u32 (&pairs)[4], const Four& x) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    pairs[i] = __byte_perm(x.words[i / 2], x.words[2 + i / 2], i % 2 ? 0x7632 : 0x5410);
}

// Adds the products of a lane's words with its inputs, whose groups are listed in `of`.
__device__ __forceinline__ void multiply(
    Sums& sums, const Four& words, const Four& of, const u32 (&above)[4], const u32 (&below)[4], u32 table) {
  const auto place = [&](int k) { return table + (k % 2 ? of.words[k / 2] >> 16 : of.words[k / 2] & 0xffff) * 16; };
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 values[EACH][2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int nibble = 2 * half + i;
      const Four first = load_four(place(nibble)), second = load_four(place(nibble + 4));
#pragma unroll
      for (int c = 0; c < EACH; c++) {
        const u32 which = c % 2 ? 0x7632 : 0x5410;
        const u32 scales = __byte_perm(first.words[c / 2], second.words[c / 2], which);
        const u32 less = __byte_perm(first.words[2 + c / 2], second.words[2 + c / 2], which);
        values[c][i] = scaled(subtracted(raised_nibbles(words.words[c], nibble), less), scales);
      }
    }
    const u32 x[4] = {above[2 * half], below[2 * half], above[2 * half + 1], below[2 * half + 1]};
#pragma unroll
    for (int c = 0; c < EACH; c++) multiply_add(sums[c], x, values[c][0], values[c][1]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) product_listed(
    Element* y, const Element* x, const u32* words, const u16* scales, const u32* points, const int* groups_of,
    const Element* bias, i64 num_rows, i64 num_outputs, i64 num_inputs, i64 num_groups) {
  extern __shared__ __align__(128) unsigned char memory[];
  let_next_kernel_start();
  const int outputs = (int)num_outputs, inputs = (int)num_inputs, groups = (int)num_groups;
  const int rows_of_words = inputs / WORD, steps = (rows_of_words + STEP - 1) / STEP;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = lane % 4, j = lane / 4;
  const int first = blockIdx.x * OUTPUTS, row = blockIdx.y * ROWS, output = first + j * EACH;
  const bool has_outputs = output < outputs;

  // A lane's words of a step of its warp's, and what it has none of is nothing.
  const auto words_of = [&](int step) {
    const int word = step * STEP + i;
    return word < rows_of_words && has_outputs ? load_once(words + (i64)word * outputs + output) : Four{};
  };
  // Its inputs of that step, of rows j and j + 8.
  const auto inputs_of = [&](int step, Four (&found)[2]) {
    const int word = step * STEP + i;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      found[half] = {};
      if (word < rows_of_words && row + j + 8 * half < num_rows)
        found[half] = *(const Four*)(x + (row + j + 8 * half) * (i64)inputs + word * WORD);
    }
  };
  Four ahead[AHEAD], next[2];
#pragma unroll
  for (int n = 0; n < AHEAD; n++) ahead[n] = words_of(warp + n * WARPS);
  const u32 list = shared_address(memory), entries = list + (inputs * 2 + 127) / 128 * 128;
  fill_list(list, groups_of, inputs, groups);
  fill_table(entries, scales, points, first, outputs, groups);
  wait_for_kernel_in_front();
  inputs_of(warp, next);
  __syncthreads();

  const u32 table = entries + place_of(0, j, i % COPIES), nothing = groups * (COPIES * CHUNKS) * 0x10001;
  Sums sums = {};
#pragma unroll 1
  for (int start = warp; start < steps; start += AHEAD * WARPS) {
#pragma unroll
    for (int n = 0; n < AHEAD; n++) {
      const int step = start + n * WARPS, word = step * STEP + i;
      if (step >= steps) break;
      const Four own = ahead[n], of = word < rows_of_words ? load_four(list + 2 * word * WORD)
                                                           : Four{nothing, nothing, nothing, nothing};
      u32 above[4], below[4];
      pair_inputs(above, next[0]);
      pair_inputs(below, next[1]);
      inputs_of(step + WARPS, next);
      ahead[n] = words_of(step + AHEAD * WARPS);
      multiply(sums, own, of, above, below, table);
    }
  }

  __syncthreads();    // the table has been read: sums are in its place
#pragma unroll
  for (int c = 0; c < EACH; c++)
#pragma unroll
    for (int k = 0; k < 4; k++)
      store_shared(list + 4 * ((warp * EACH * 4 + c * 4 + k) * 32 + lane), sums[c][k]);
  __syncthreads();
#pragma unroll
  for (int part = threadIdx.x; part < ROWS * OUTPUTS; part += THREADS) {
    const int c = part / 32 / 4, k = part / 32 % 4;
    const int own_row = row + j + k / 2 * 8, own = first + (i * 2 + k % 2) * EACH + c;
    float sum = 0;
#pragma unroll
    for (int of_warp = 0; of_warp < WARPS; of_warp++) sum += load_shared(list + 4 * (of_warp * ROWS * OUTPUTS + part));
    if (own_row >= num_rows || own >= outputs) continue;
#ifdef BIAS
    sum += widened(bias[own]);
#endif
    y[(i64)own_row * outputs + own] = rounded(sum);
  }
}
