// Runs kernels/quantised_linear/tiles.cu on a CPU: a fiber for each thread of a block, one block after the other.
//
// "tiles.inc" is the kernel's source, and that of few_bits.cuh, without the functions that are PTX, which are written
// here and in halves_on_cpu.h in C++. What they are given is checked (alignment, room in shared memory, arrivals at
// barriers), x, w and what belongs to it end in front of a page that may not be read, and shared memory, the workspace
// and results are NaN before. Arguments: rows, outputs, inputs, and of a plan (`Plan` in tiles.py) the stages of w and
// of x, blocks, and bytes of shared memory. Prints the largest error relative to 1 + |expected|, and a checksum of the
// first row.

#include "blocks_on_cpu.h"
#include "warp_group_on_cpu.h"

#define __shared__ static

struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float4 __ldcg(const float4* from) { return *from; }

inline void sync_block() { of_block.arrive_and_wait(); }
inline u32 counted(u32* counter) { return (*counter)++; }

inline void arrive_when_copied(u32 barrier) { change(barrier, 1, 0); }
inline void copy_once(u32 to, const unsigned char* from, u64) {
  CHECK((u64)from % 16 == 0 && to % 16 == 0 && to + 16 <= shared_bytes);
  memcpy(at(to), from, 16);
}
inline void load_words(u32 (&words)[4], u32 from) {
  CHECK(from % 16 == 0 && from + 16 <= shared_bytes);
  memcpy(words, at(from), 16);
}

inline float float_of_float8(unsigned char bits) { return of_float8(bits); }

#include "tiles.inc"

static std::mt19937 generator(1);

template <typename T, typename Drawn>
static T* drawn(size_t count, Drawn each) {
  T* made = at_the_end<T>(count);
  for (size_t i = 0; i < count; i++) made[i] = each();
  return made;
}

static Element normal(float scale) { return rounded(std::normal_distribution<float>()(generator) * scale); }

// Runs a kernel of so many threads, block by block; the blocks are taken from the last to the first.
template <typename Kernel>
static void run(Index grid, unsigned threads, Kernel kernel) {
  gridDim = grid;
  for (unsigned y = 0; y < grid.y; y++)
    for (unsigned x = grid.x; x-- > 0;) {
      blockIdx = {x, y};
      memset(shared, 0xff, sizeof shared);
      barriers.clear();
      of_block = fibers::Meeting((int)threads);
      of_multiplying_warps = fibers::Meeting(MULTIPLYING);
      for (auto& each : of_warp) each = fibers::Meeting(32);
      for (unsigned i = 0; i < threads; i++) fibers::add(kernel);
      fibers::run();
    }
}

int main(int, char** given) {
  const int rows = atoi(given[1]), outputs = atoi(given[2]), inputs = atoi(given[3]);
  const int w_stages = atoi(given[4]), x_stages = atoi(given[5]), blocks = atoi(given[6]);
  shared_bytes = atoi(given[7]);
#ifdef GROUP
  const int groups = inputs / GROUP;
#else
  const int groups = 1;
#endif
  const float size = 1 / sqrtf(inputs);
  const unsigned char* w = drawn<unsigned char>((size_t)outputs * inputs / 8 * BITS, [] {
    unsigned char byte;
    do byte = generator() >> 8;
    while (BITS == 8 && (byte & 0x7f) == 0x7f);    // not a number
    return byte;
  });
  const size_t num_scales = (size_t)(outputs + SCALED_ROWS - 1) / SCALED_ROWS * groups;
  std::uniform_real_distribution<float> about(0.5f * size, 1.5f * size);
#if SCALE == 0
  const Scale* scales = drawn<Scale>(num_scales, [&] { return rounded(about(generator) / (BITS == 8 ? 100 : 6)); });
#elif SCALE == 1
  const Scale* scales = drawn<Scale>(num_scales, [&] { return about(generator) / (BITS == 8 ? 100 : 6); });
#elif SCALE == 4
  const Scale* scales = drawn<Scale>(num_scales, [&] { return Float16::narrow(about(generator) / 6); });
#elif SCALE == 2
  const Scale* scales = drawn<Scale>(num_scales, [&] { return generator() >> 8 & 0x3f; });
#else
  const Scale* scales = drawn<Scale>(num_scales, [&] { return 118 + (generator() >> 8 & 3); });
#endif
  const u32* points = drawn<u32>((size_t)(outputs + PER_WORD - 1) / PER_WORD * groups, [] { return generator(); });
  const float* whole = drawn<float>(outputs, [&] { return about(generator) * (size < 1 ? 1 : 2); });
  const Element* bias = drawn<Element>(outputs, [] { return normal(1); });
  generator.seed(2);    // the first row of x is the same, however many there are
  const Element* x = drawn<Element>((size_t)rows * inputs, [] { return normal(1); });

  const size_t beyond = 64;
  const Units units(outputs, inputs, rows, blocks);
  const int tiles = units.total / units.stages, padded = (rows + COLUMNS - 1) / COLUMNS * COLUMNS;
  std::vector<Element> y((size_t)rows * outputs + beyond, 0x7fff);
  Element* image = at_the_end<Element>((size_t)padded * inputs);
  float4* parts = at_the_end<float4>((size_t)2 * blocks * (SUMS / 4) * MULTIPLYING);
  u32* counters = at_the_end<u32>(tiles);
  memset(image, 0xff, (size_t)padded * inputs * 2);
  memset(parts, 0xff, (size_t)2 * blocks * SUMS * MULTIPLYING * 4);
  memset(counters, 0xff, tiles * 4);
  run({(unsigned)(inputs / WINDOW * ((rows + 7) / 8)), 1}, 256,
      [&] { lay_input(image, counters, x, rows, inputs, tiles); });
  num_waiting = 0;
  run({(unsigned)blocks, 1}, THREADS, [&] {
    product_tiles(y.data(), parts, counters, image, w, scales, points, whole, bias, rows, outputs, inputs, w_stages,
                  x_stages);
  });
  CHECK(num_waiting == blocks * (MULTIPLYING + 32));    // all but the warps that bring w, and those that do nothing
#ifdef SUMS_APART
  run({(unsigned)tiles, SUMS / 8}, MULTIPLYING,
      [&] { sum_tiles(y.data(), parts, scales, whole, bias, rows, outputs, inputs, blocks); });
#endif

  const auto weight = [&](int n, int k) {
    const i64 at = (i64)n * inputs + k;
    const int scale = n / SCALED_ROWS * groups + k / (inputs / groups);
#if SCALE == 0
    float times = widened(scales[scale]);
#elif SCALE == 1
    float times = scales[scale];
#elif SCALE == 4
    float times = widened_float16(scales[scale]);
#elif SCALE == 2
    float times = of_float8(scales[scale]);
#else
    float times = ldexpf(1, scales[scale] - 127);
#endif
#ifdef GLOBAL
#ifdef DIVIDES
    times /= whole[GLOBAL > 1 ? n : 0];
#else
    times *= whole[GLOBAL > 1 ? n : 0];
#endif
#endif
    const int bits = BITS == 8 ? w[at] : w[at / 2] >> at % 2 * 4 & 15;
#if defined(FP4)
    return of_fp4(bits) * times;
#elif defined(FLOAT8)
    return of_float8(bits) * times;
#elif defined(INT8) && !defined(OFFSET)
    return (signed char)bits * times;
#else
    int less = OFFSET;
#ifdef POINTS
    less += points[n / PER_WORD * groups + k / (inputs / groups)] >> n % PER_WORD * BITS & ((1 << BITS) - 1);
#endif
    return (bits - less) * times;
#endif
  };
  double largest = 0;
  u64 checksum = 0;
  for (int n = 0; n < outputs; n++) {
    std::vector<float> values(inputs);
    for (int k = 0; k < inputs; k++) values[k] = weight(n, k);
    for (int m = 0; m < rows; m++) {
      double expected = 0;
      for (int k = 0; k < inputs; k++) expected += (double)widened(x[(i64)m * inputs + k]) * values[k];
#ifdef BIAS
      expected += widened(bias[n]);
#endif
      const double error = fabs(widened(y[(size_t)m * outputs + n]) - expected) / (1 + fabs(expected));
      largest = std::isnan(error) ? INFINITY : std::max(largest, error);
    }
    checksum = checksum * 1099511628211u + y[n];
  }
  for (size_t i = 0; i < beyond; i++) CHECK(y[(size_t)rows * outputs + i] == 0x7fff);
  printf("%g %llu\n", largest, checksum);
}
