// Tiles of 128 or 256 rows of a weight w in few bits, by two warp groups: what they are made of, however tiles are
// shared out.
//
// Values are made in registers, where the tensor cores of a warp group take one of their operands from (wgmma): w is
// never written. Two warps copy rows of w into a ring in shared memory, WINDOWS windows at a time, and one more copies x
// into another.
//
// The order of x. A thread takes 16 bytes of a row of w at a time, for 128 k of the row four threads (a window). The
// tensor cores multiply 16 k at a time, of which a thread has four in each of two rows; which four is up to us, if only
// x has the same order. So each word of w gives what it has, two values at a time, and no value moves:
//
//   4 bits   word j of thread t has k = 32 t + 8 j + ..
//            product 2 j + m takes its values 2 m, 2 m + 4, 2 m + 1 and 2 m + 5
//   8 bits   word j of the q-th 16 bytes of thread t has k = 64 q + 16 t + 4 j + ..
//            product 4 q + j takes all four
//
// In each half of a product a row of x has eight elements, which lie together: a stage of x is [products, halves,
// COLUMNS, 8], or with X_IN_EIGHTS [COLUMNS / 8, products, halves, 8, 8].
//
// Defines, besides FLOAT16 (elements are float16; else bfloat16):
//   COLUMNS=n        rows of x that a tile has: 16, 32, 64, 128 or 256
//   WINDOWS=n        windows of a row of w in a stage
//   AT_ONCE=n        blocks that a multiprocessor has room for: 1 or 2
//   BANDS=n          bands of 128 rows of w that a tile has, 1 or 2: each is multiplied with the x that is there; two
//                    without STEPS, and with up to 128 rows of x
//   X_IN_EIGHTS      as above
// of w, one of
//   PACKED4          words of eight values of four bits; OFFSET is subtracted, and with POINTS a point
//   FP4              bytes of two values, e2m1, the first in the lower half
//   FLOAT8           float8_e4m3fn
//   INT8             int8, or with OFFSET=128 words of four values of eight bits less that
// with scales that are
//   GROUP=n          those of n neighbours in a row; without it one a row
//   SCALE=k          stored as: 0 element, 1 float32, 2 float8_e4m3fn, 3 float8_e8m0fnu, 4 float16
//   STEPS            sums of 128 k are multiplied by scales; without it values are, if there are groups
//   POINTS           words of eight points of neighbouring rows of PACKED4, to which OFFSET is added; of four of INT8 with
//                    OFFSET, where groups are of 128 n
//
// After half.cuh, few_bits.cuh, ring.cuh and warp_group.cuh.

#pragma once

constexpr int BAND = 128;                       // rows of w that two warp groups multiply at a time
constexpr int TILE = BANDS * BAND;              // rows of w in a tile
constexpr int WINDOW = 128;                     // k that four threads read of a row at once
constexpr int PRODUCTS = WINDOW / 16;           // of a window, each over 16 k
constexpr int MULTIPLYING = 256, THREADS = MULTIPLYING + 128;
constexpr int COPYING = 64;                     // threads that copy w
constexpr int W_WARP = MULTIPLYING / 32, X_WARP = W_WARP + COPYING / 32;
// Registers of a thread as a block begins; then of those that copy, and that multiply.
constexpr int REGISTERS = 65536 / (AT_ONCE * THREADS) / 8 * 8;
constexpr int COPYING_REGISTERS = AT_ONCE == 1 ? 40 : 32, MULTIPLYING_REGISTERS = AT_ONCE == 1 ? 232 : 104;
static_assert((THREADS - MULTIPLYING) * COPYING_REGISTERS + MULTIPLYING * MULTIPLYING_REGISTERS <= THREADS * REGISTERS,
              "a block that asks for more waits for ever");
#if defined(PACKED4) || defined(FP4)
#define IN_FOUR_BITS
constexpr int BITS = 4;
#else
constexpr int BITS = 8;
#endif
[[maybe_unused]] constexpr int PER_WORD = 32 / BITS;    // points in a word
constexpr int LOADS = BITS / 4;                 // 16 bytes of a row that a thread takes of a window
constexpr int ROW_BYTES = WINDOWS * WINDOW / 8 * BITS;
// Two rows of a window lie in different banks: rows of 128 bytes exchange their halves where their number is odd.
constexpr bool EXCHANGED = ROW_BYTES == 128;
constexpr int PITCH = ROW_BYTES % 128 == 0 && !EXCHANGED ? ROW_BYTES + 64 : ROW_BYTES;
constexpr int W_STAGE = TILE * PITCH;
constexpr int X_PRODUCTS = COLUMNS > 128 ? PRODUCTS / 2 : PRODUCTS;         // of a stage of x
constexpr int X_STAGE = X_PRODUCTS * 16 * COLUMNS * 2;
constexpr int BATCH = 4;                        // products that are asked for together
constexpr int WIDTH = COLUMNS > 128 ? 128 : COLUMNS;                        // columns of one instruction
constexpr int TIMES = COLUMNS / WIDTH;
constexpr int SUMS = COLUMNS / 2;               // that a thread has of a band
constexpr int ALL_SUMS = BANDS * SUMS;
static_assert(BANDS == 1 || X_PRODUCTS == PRODUCTS, "a stage of x is there for all bands");
constexpr int MAX_STAGES = 16;
#ifdef GROUP
// Neighbours of a row that a thread has in a window, and where the next ones begin; groups that these lie in.
constexpr int OWN_K = BITS == 4 ? 32 : 16, GROUP_STEP = BITS == 4 ? 16 : 64;
constexpr int GROUPS_READ = BITS == 4 ? 1 + (GROUP % 32 != 0) : 1 + (GROUP % 128 != 0);
#endif

// How far apart halves of products, eights of rows and products are in a stage of x, in 16 bytes.
#ifdef X_IN_EIGHTS
constexpr int HALF_APART = 8, EIGHT_APART = 2 * PRODUCTS * 8, PRODUCT_APART = 2 * 8;
#else
constexpr int HALF_APART = COLUMNS, EIGHT_APART = 8, PRODUCT_APART = 2 * COLUMNS;
#endif

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_once(u32 to, const unsigned char* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void load_words(u32 (&to)[4], u32 from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// --- values ----------------------------------------------------------------------------------------------------------

#if SCALE == 0
typedef Element Scale;
#elif SCALE == 1
typedef float Scale;
#elif SCALE == 4
typedef u16 Scale;
#else
typedef unsigned char Scale;
#endif

// A scale as pairs of values are multiplied by it.
__device__ __forceinline__ u32 as_factor(Scale scale) {
#if SCALE == 0
  return twice(scale);
#elif SCALE == 2
  return fp4_scale_of_float8(scale, 0);
#elif SCALE == 3
  return fp4_scale_of_power(scale, 0);
#else
  return 0;
#endif
}

// The j-th pair of a product, of the words that a thread has of a row's window: less a point, times a factor.
__device__ __forceinline__ u32 pair_of(
    const u32 (&words)[4 * LOADS], int product, int j, [[maybe_unused]] int point, [[maybe_unused]] u32 factor) {
#ifdef IN_FOUR_BITS
  const u32 word = words[product / 2], i = 2 * (product % 2) + j;
#else
  const u32 word = words[product];
#endif
#if defined(FP4)
  return scaled_fp4(word, i, factor);
#else
#if defined(PACKED4)
  const u32 pair = elements_of_nibbles(word, i, point);
#elif defined(FLOAT8)
  const u32 pair = elements_of_float8(word, j);
#elif defined(POINTS)
  const u32 pair = subtracted(elements_of_bytes<false>(word, j), twice(rounded((float)(point - 128))));
#elif defined(OFFSET)
  const u32 pair = elements_of_bytes<false>(word, j);
#else
  const u32 pair = elements_of_bytes<true>(word, j);
#endif
#if defined(GROUP) && !defined(STEPS)
  return multiplied(pair, factor);
#else
  return pair;
#endif
#endif
}

__device__ __forceinline__ float as_float(Scale scale) {
#if SCALE == 0
  return widened(scale);
#elif SCALE == 1
  return scale;
#elif SCALE == 4
  return widened_float16(scale);
#else
  return 1.0f;
#endif
}

// --- the order of x --------------------------------------------------------------------------------------------------

// Where element `e` of pair `t` of half `h` of product `i` of a window lies in x.
__device__ __forceinline__ int place_in_window(int i, int h, int t, int e) {
  if (BITS == 4) return 32 * t + 8 * (i / 2) + 2 * (i % 2) + h + 4 * e;
  return 64 * (i / 4) + 16 * t + 4 * (i % 4) + 2 * h + e;
}

// Where the tensor cores find a product's part of a stage of x.
__device__ __forceinline__ u64 described_x(u32 address) {
  return (u64)(address >> 4 & 0x3fff) | (u64)HALF_APART << 16 | (u64)EIGHT_APART << 32;
}

// Where 16 bytes of a row, which begin at byte `column`, lie in a stage of w.
__device__ __forceinline__ u32 place_in_stage(int row, int column) {
  return row * PITCH + (EXCHANGED && row % 2 ? column ^ 64 : column);
}

// --- a stage ---------------------------------------------------------------------------------------------------------

// Stages in shared memory: where they begin, and a barrier each for when it is full and when it is empty.
struct Ring {
  u32 begin, full, empty;
  int stages;
};

// Where a ring begins, for a warp that copies with a cache hint: in a register of each lane. In one that all share, ptxas
// of CUDA 13.0 may leave it out of the lanes' addresses, and then encodes no legal instruction.
__device__ __forceinline__ u32 begin_of(const Ring& ring) { return __shfl_sync(0xffffffff, ring.begin, 0); }

// Where the i-th sum of a thread stands in a band.
__device__ __forceinline__ int row_of(int i) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
__device__ __forceinline__ int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// Where the scales and points of a row of w begin.
struct ScaledRow {
  const Scale* scales;
  const u32* points;
};

// The scales and points of a stage that a thread's values have, in two rows of w: its own, and the one 8 below.
struct Scales {
#ifdef GROUP
  Scale scales[WINDOWS][2][GROUPS_READ];
#endif
#ifdef POINTS
  u32 points[WINDOWS][2];
#endif

  // Of the stage that begins at k = `first`, asked for a stage before they are needed. There are none behind `last`.
  __device__ __forceinline__ void load(
      [[maybe_unused]] const ScaledRow (&rows)[2], [[maybe_unused]] int first, [[maybe_unused]] int last) {
#ifdef GROUP
    first += OWN_K * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int window = 0; window < WINDOWS; window++) {
        const int k = first + window * WINDOW;
#pragma unroll
        for (int i = 0; i < GROUPS_READ; i++)
          scales[window][half][i] = rows[half].scales[min(k + i * GROUP_STEP, last) / GROUP];
#ifdef POINTS
        points[window][half] = rows[half].points[min(k, last) / GROUP];
#endif
      }
#endif
  }
};

// The operands of BATCH products of a window, from the one with number `first` on.
__device__ __forceinline__ void make_values(
    u32 (&a)[BATCH][4], const u32 (&words)[2][4 * LOADS], [[maybe_unused]] const Scales& scales,
    [[maybe_unused]] int window, int first) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
#ifdef POINTS
    const int shift = threadIdx.x % 32 / 4 % PER_WORD * BITS;
    const int point = OFFSET + (scales.points[window][half] >> shift & ((1 << BITS) - 1));
#elif defined(PACKED4)
    constexpr int point = OFFSET;
#else
    constexpr int point = 0;
#endif
#pragma unroll
    for (int i = 0; i < 2 * BATCH; i++) {
      const int product = first + i / 2;
#if defined(GROUP) && !defined(STEPS)
      const u32 factor = as_factor(scales.scales[window][half][GROUPS_READ > 1 ? product / (PRODUCTS / 2) : 0]);
#else
      constexpr u32 factor = 0;
#endif
      a[i / 2][half + i % 2 * 2] = pair_of(words[half], product, i % 2, point, factor);
    }
  }
}

// A warp group's place in both rings, and the operands of products that are on their way.
struct Multiplier {
  const Ring& w_ring;
  const Ring& x_ring;
  Place w_place = {0, 0}, x_place = {0, 0};
  int held = -1;    // a stage of x that products which are asked for still read
  u32 a[PRODUCTS / BATCH][BATCH][4];

  __device__ __forceinline__ Multiplier(const Ring& w_ring, const Ring& x_ring) : w_ring(w_ring), x_ring(x_ring) {}

  __device__ __forceinline__ void release_x() {
    __syncwarp();
    if (threadIdx.x % 32 == 0 && held >= 0) barrier_arrive(x_ring.empty + held * 8);
    held = -1;
  }

  // Adds the products of a stage to a thread's sums, which are none yet where `adds` is 0. They are its own again after
  // `finish`, and with STEPS at once. `scales` are those of each band.
  __device__ __forceinline__ void add_stage(float (&sums)[ALL_SUMS], const Scales (&scales)[BANDS], int& adds) {
    const int lane = threadIdx.x % 32;
#ifdef STEPS
    static_assert(BANDS == 1, "there are registers for the sums of one");
    float of_window[SUMS];
    float* const target = of_window;
#else
    float* const target = sums;
#endif
    barrier_wait(w_ring.full + w_place.at * 8, w_place.parity);
    const u32 stage = w_ring.begin + w_place.at * W_STAGE + row_of(0) * PITCH + lane % 4 * 16;
    const int odd = EXCHANGED ? lane / 4 % 2 : 0;
#pragma unroll
    for (int window = 0; window < WINDOWS; window++) {
#ifdef STEPS
      adds = 0;
#endif
#pragma unroll
      for (int band = 0; band < BANDS; band++) {
        const u32 row = stage + band * BAND * PITCH;
        u32 words[2][4 * LOADS];
#pragma unroll
        for (int i = 0; i < 2 * LOADS; i++) {
          u32 four[4];
          load_words(four, row + i / LOADS * 8 * PITCH + ((window * LOADS + i % LOADS) ^ odd) * 64);
#pragma unroll
          for (int j = 0; j < 4; j++) words[i / LOADS][i % LOADS * 4 + j] = four[j];
        }
        if (window == WINDOWS - 1 && band == BANDS - 1) {
          __syncwarp();
          if (lane == 0) barrier_arrive(w_ring.empty + w_place.at * 8);
          w_place.advance(w_ring.stages);
        }
        int adds_now = adds;
#pragma unroll
        for (int batch = 0; batch < PRODUCTS / BATCH; batch++) {
          make_values(a[batch], words, scales[band], window, batch * BATCH);
          const int in_stage = batch * BATCH % X_PRODUCTS;
          const bool is_new = in_stage == 0 && band == 0;
          if (is_new) barrier_wait(x_ring.full + x_place.at * 8, x_place.parity);
          const u64 x = described_x(x_ring.begin + x_place.at * X_STAGE) + in_stage * PRODUCT_APART;
          let_products_begin();
#pragma unroll
          for (int i = 0; i < BATCH; i++) {
#pragma unroll
            for (int j = 0; j < TIMES; j++)
              multiply_group<WIDTH>(
                  target + band * SUMS + j * (WIDTH / 2), a[batch][i],
                  x + i * PRODUCT_APART + j * (WIDTH / 8 * EIGHT_APART), adds_now);
            adds_now = 1;
          }
          end_batch();
          wait_for_batches<1>();
          if (is_new) release_x();    // that of the batch in front
          if (in_stage + BATCH == X_PRODUCTS && band == BANDS - 1) {
            held = x_place.at;
            x_place.advance(x_ring.stages);
          }
        }
      }
      adds = 1;
#ifdef STEPS
      finish();
#pragma unroll
      for (int i = 0; i < SUMS; i++) sums[i] += of_window[i] * as_float(scales[0].scales[window][i / 2 % 2][0]);
#endif
    }
  }

  __device__ __forceinline__ void finish() {
    wait_for_batches<0>();
    release_x();
  }
};
