// Runs kernels/quantised_experts/tiles.cu on a CPU: a fiber for each thread of a block, one block after the other.
//
// "tiles.inc" is the kernel's source, and that of the headers beside it, without the functions that are PTX, which are
// written here and in halves_on_cpu.h in C++. What they are given is checked (alignment, room in shared memory, arrivals
// at barriers), x, w and what belongs to it end in front of a page that may not be read, and shared memory, rows that are
// laid and results are NaN before. With LAYS the rows of y are read where they are laid.
// Arguments: tokens, how ids are drawn (0 at random, 1 some of no expert, 2 one expert for all, 3 no expert for all),
// blocks, bytes of shared memory. Prints the largest error relative to 1 + |expected|, and a checksum of the first pair's
// row.

#include "blocks_on_cpu.h"
#include "warp_group_on_cpu.h"

#define __shared__ static

inline void arrive_when_copied(u32 barrier) { change(barrier, 1, 0); }
inline void copy_some(u32 to, const unsigned char* from, int bytes, u64) {
  CHECK((u64)from % 16 == 0 && to % 16 == 0 && to + 16 <= shared_bytes && (bytes == 0 || bytes == 16));
  memset(at(to), 0, 16);
  memcpy(at(to), from, bytes);
  volatile unsigned char is_readable = *from;
  (void)is_readable;
}
inline void load_words(u32 (&words)[4], u32 from) {
  CHECK(from % 16 == 0 && from + 16 <= shared_bytes);
  memcpy(words, at(from), 16);
}
inline void prefetch(const void* from) {
  volatile unsigned char is_readable = *(const unsigned char*)from;
  (void)is_readable;
}
inline int __shfl_up_sync(u32, int value, int apart) {
  static int given[32];
  given[lane()] = value;
  __syncwarp();
  const int found = given[(int)lane() < apart ? lane() : lane() - apart];
  __syncwarp();
  return found;
}

#include "tiles.inc"

static std::mt19937 generator(1);

template <typename T, typename Drawn>
static T* drawn(size_t count, Drawn each) {
  T* made = at_the_end<T>(count, 16);
  for (size_t i = 0; i < count; i++) made[i] = each();
  return made;
}

static Element normal(float scale) { return rounded(std::normal_distribution<float>()(generator) * scale); }

static std::vector<int> drawn_ids(int tokens, int how) {
  std::vector<int> ids(tokens * TOP_K);
  for (auto& id : ids) {
    id = how == 2 ? 1 : how == 3 ? EXPERTS : generator() / 64 % EXPERTS;
    if (how == 1 && generator() / 64 % 3 == 0) id = EXPERTS;
  }
  ids[0] = how == 3 ? EXPERTS : 1;    // the same for the first pair's row in all
  return ids;
}

// Runs a kernel of so many threads, block by block.
template <typename Kernel>
static void run(Index grid, unsigned threads, Kernel kernel) {
  gridDim = grid;
  for (unsigned y = 0; y < grid.y; y++)
    for (unsigned x = grid.x; x-- > 0;) {
      blockIdx = {x, y};
      memset(shared, 0xff, sizeof shared);
      barriers.clear();
      of_block = fibers::Meeting((int)threads);
      for (auto& each : of_warp) each = fibers::Meeting(32);
      for (unsigned i = 0; i < threads; i++) fibers::add(kernel);
      fibers::run();
    }
}

int main(int, char** given) {
  const int tokens = atoi(given[1]), how = atoi(given[2]), pairs_count = tokens * TOP_K;
  const unsigned blocks = atoi(given[3]);
  shared_bytes = atoi(given[4]);
  CHECK(sizeof(Head) + STAGES * W_STAGE + X_STAGES * X_STAGE <= shared_bytes);
  const float size = 1 / sqrtf(SIZE_K);
  const size_t rows = (size_t)EXPERTS * ROWS;
  const unsigned char* w = drawn<unsigned char>(rows * W_BYTES, [] {
    unsigned char byte;
    do byte = generator() >> 8;
    while (BITS == 8 && (byte & 0x7f) == 0x7f);    // not a number
    return byte;
  });
  const size_t num_scales = (size_t)EXPERTS * SCALE_ROWS * GROUPS;
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
  const float* whole = drawn<float>(rows, [&] { return about(generator) * (size < 1 ? 1 : 2); });
  const Element* bias = drawn<Element>(rows, [] { return normal(1); });
  generator.seed(2);    // the first row of x is the same, however many there are
  const Element* x = drawn<Element>((size_t)tokens * SIZE_K, [] { return normal(1); });
  generator.seed(tokens);
  const std::vector<int> ids = drawn_ids(tokens, how);
  int* starts = at_the_end<int>(EXPERTS + 2);
  int* pairs = at_the_end<int>(pairs_count);
  std::vector<int> place(pairs_count);    // of pairs in their order
  int count = 0;
  for (int expert = 0; expert <= EXPERTS; expert++) {
    starts[expert] = count;
    for (int pair = 0; pair < pairs_count; pair++)
      if (ids[pair] == expert) place[pair] = count, pairs[count++] = pair;
  }
  starts[EXPERTS + 1] = count;

#ifdef LAYS
  constexpr int H_WINDOWS = LAYS;
#else
  constexpr int H_WINDOWS = 1;
#endif
  const int eights = pairs_count / 8 + EXPERTS;
  Element* x_laid = at_the_end<Element>((size_t)eights * LAID_WINDOWS * EIGHT);
  Element* h_laid = at_the_end<Element>((size_t)eights * H_WINDOWS * EIGHT);
  memset(x_laid, 0xff, (size_t)eights * LAID_WINDOWS * EIGHT * 2);
  memset(h_laid, 0xff, (size_t)eights * H_WINDOWS * EIGHT * 2);
  run({(unsigned)eights, (LAID_WINDOWS + 7) / 8}, 256,
      [&] { lay_rows(x_laid, h_laid, starts, pairs, x, H_WINDOWS); });
  const size_t beyond = 64, results = (size_t)pairs_count * SIZE_N;
  std::vector<Result> by_pair(results + beyond);
  memset((void*)by_pair.data(), 0x7f, by_pair.size() * sizeof(Result));
  const std::vector<Result> before = by_pair;
#ifdef LAYS
  Result* y = h_laid;
#else
  Result* y = by_pair.data();
#endif
  num_waiting = 0;
  run({blocks, 1}, THREADS, [&] { product_experts(y, x_laid, w, scales, whole, bias, starts, pairs); });
#ifdef STARTS_ARE_NEW
  CHECK(num_waiting == (int)blocks * (THREADS + MULTIPLYING + 32));
#else
  CHECK(num_waiting == (int)blocks * (MULTIPLYING + 32));    // all but the warps that bring w, and those that do nothing
#endif

  const auto product = [&](int pair, int expert, int row) {
    double sum = 0;
    for (int k = 0; k < SIZE_K; k++) {
      const size_t at = ((size_t)expert * ROWS + row) * SIZE_K + k;
      const size_t scale = ((size_t)expert * SCALE_ROWS + row / SCALED_ROWS) * GROUPS + k / (SIZE_K / GROUPS);
#if SCALE == 0
      const float times = widened(scales[scale]);
#elif SCALE == 1
      const float times = scales[scale];
#elif SCALE == 4
      const float times = widened_float16(scales[scale]);
#elif SCALE == 2
      const float times = of_float8(scales[scale]);
#else
      const float times = ldexpf(1, scales[scale] - 127);
#endif
      const int bits = BITS == 8 ? w[at] : w[at / 2] >> at % 2 * 4 & 15;
#if defined(FP4)
      const float value = of_fp4(bits) * times;
#elif defined(FLOAT8)
      const float value = of_float8(bits) * times;
#elif defined(INT8) && !defined(OFFSET)
      const float value = (signed char)bits * times;
#else
      const float value = (bits - OFFSET) * times;
#endif
      sum += (double)widened(x[(size_t)(pair / TOP_K) * SIZE_K + k]) * value;
    }
#ifdef WHOLE
    const float all = whole[WHOLE == 1 ? expert : expert * ROWS + row];
#ifdef DIVIDED
    sum /= all;
#else
    sum *= all;
#endif
#endif
#ifdef BIAS
    sum += widened(bias[(size_t)expert * ROWS + row]);
#endif
    return (float)sum;
  };
  double largest = 0;
  u64 checksum = 0;
  for (int pair = 0; pair < pairs_count; pair++) {
    const int expert = ids[pair];
#ifdef LAYS
    if (expert == EXPERTS) continue;
    const int row = place[pair] - starts[expert];
    const Result* own = h_laid + (size_t)(first_eight(expert, starts[expert]) + row / 8) * LAYS * EIGHT;
    for (int n = SIZE_N; n < LAYS * WINDOW; n++) CHECK(own[place_of(n, row % 8)] == 0);
#endif
    for (int n = 0; n < SIZE_N; n++) {
#ifdef LAYS
      const Result& found = own[place_of(n, row % 8)];
#else
      const Result& found = by_pair[(size_t)pair * SIZE_N + n];
      if (expert == EXPERTS) {
        CHECK(memcmp(&found, &before[0], sizeof found) == 0);
        continue;
      }
#endif
      float value = product(pair, expert, n);
      [[maybe_unused]] float second = HALVES == 2 ? product(pair, expert, SIZE_N + n) : 0;
#ifdef LIMIT
      value = fminf(value, LIMIT), second = fmaxf(fminf(second, LIMIT), -(float)LIMIT);
#endif
#ifdef ACTIVATION
      value = ACTIVATION(value, (float)ALPHA);
#endif
#ifdef GATED
      value *= second + (float)PLUS;
#endif
#ifdef WIDE
      const float number = found;
#else
      const float number = widened(found);
#endif
      const double error = fabs(number - value) / (1 + fabs(value));
      largest = std::isnan(error) ? INFINITY : std::max(largest, error);
      u32 bits = 0;
      memcpy(&bits, &found, sizeof found);
      if (pair == 0) checksum = checksum * 1099511628211u + bits;
    }
  }
  for (size_t i = 0; i < beyond; i++) CHECK(memcmp(&by_pair[results + i], &before[0], sizeof(Result)) == 0);
  printf("%g %llu\n", largest, checksum);
}
