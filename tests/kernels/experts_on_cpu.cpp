// Runs kernels/quantised_experts/stream.cu on a CPU: a fiber for each thread of a block, one block after the other.
//
// "experts.inc" is the source without the functions in PTX, which are written here and in halves_on_cpu.h in C++. What
// they are given is checked (alignment, room in shared memory, arrivals at barriers, and how many pieces of weights are
// on their way), and weights, scales and x end in front of a page that may not be read; shared memory and results are
// NaN before.
// Arguments: tokens, how ids are drawn (0 at random, 1 some of no expert, 2 one expert for all, 3 no expert for all),
// blocks. Prints the largest error relative to 1 + |expected|, and a checksum of the first pair's row.

#include "blocks_on_cpu.h"

static u32 addresses[19][32];
inline void load_two_matrices(u32 (&to)[2], u32 from) {
  CHECK(from % 16 == 0 && from + 16 <= shared_bytes);
  addresses[warp_of()][lane()] = from;
  __syncwarp();
  for (int i = 0; i < 2; i++)
    memcpy(&to[i], shared + addresses[warp_of()][8 * i + lane() / 4] + lane() % 4 * 4, 4);
  __syncwarp();
}

#include "experts.inc"

static std::mt19937 generator(1);

constexpr size_t ALIGNED = 16;    // bytes of which all memory is a multiple

static Element* drawn(size_t count, float scale) {
  Element* made = at_the_end<Element>(count, ALIGNED);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < count; i++) made[i] = rounded(normal(generator) * scale);
  return made;
}

static unsigned char* drawn_bytes(size_t count, int least, int most) {
  unsigned char* made = at_the_end<unsigned char>(count, ALIGNED);
  std::uniform_int_distribution<int> uniform(least, most);
  for (size_t i = 0; i < count; i++) made[i] = uniform(generator);
  return made;
}

static float* drawn_scales(size_t count, float size) {
  float* made = at_the_end<float>(count, ALIGNED);
  std::uniform_real_distribution<float> uniform(0.5f * size, 1.5f * size);
  for (size_t i = 0; i < count; i++) made[i] = uniform(generator);
  return made;
}

static std::vector<i64> drawn_ids(int tokens, int how) {
  std::vector<i64> ids(tokens * TOP_K);
  for (auto& id : ids) {
    id = how == 2 ? 1 : how == 3 ? -1 : generator() / 64 % EXPERTS;
    if (how == 1 && generator() / 64 % 3 == 0) id = generator() / 64 % 2 ? -1 : EXPERTS + 5;
  }
  ids[0] = how == 3 ? -1 : 1;    // the same for the first pair's row in all
  return ids;
}

int main(int, char** given) {
  const int tokens = atoi(given[1]), how = atoi(given[2]), pairs = tokens * TOP_K;
  CHECK(pairs <= MOST_PAIRS);
  gridDim.x = atoi(given[3]);
  shared_bytes = sizeof(Head) + STAGES * STAGE_BYTES;
  CHECK(shared_bytes <= 227 << 10);
  most_on_their_way = IN_FLIGHT;
  const size_t rows = (size_t)EXPERTS * ROWS;
  const float size = 1 / sqrtf(SIZE_K);
  const unsigned char* weights = drawn_bytes(rows * ROW_BYTES, 0, 255);
#ifdef FP4
  constexpr int groups = SIZE_K / GROUP;
#ifdef FLOAT8_SCALES
  const unsigned char* scales = drawn_bytes(rows * groups, 0, 40);    // with the smallest
#else
  const unsigned char* scales = drawn_bytes(rows * groups, 118, 123);
#endif
  const auto scale_of = [&](size_t at) {
#ifdef FLOAT8_SCALES
    return of_float8(scales[at]);
#else
    return ldexpf(1, scales[at] - 127);
#endif
  };
#else
#ifdef GROUP
  constexpr int groups = SIZE_K / GROUP;
#else
  constexpr int groups = 1;
#endif
#if SCALE_BYTES == 4
  const float* scales = drawn_scales(rows * groups, size / 4);
  const auto scale_of = [&](size_t at) { return scales[at]; };
#else
  const Element* scales = drawn(rows * groups, size / 4);
  const auto scale_of = [&](size_t at) { return widened(scales[at]); };
#endif
#endif
  const float* whole = drawn_scales(rows, 1);
  const Element* bias = drawn(rows, 1);
  generator.seed(2);    // the first row of x is the same, however many there are
#ifdef OF_TOKENS
  const Element* x = drawn((size_t)tokens * SIZE_K, 1);
#else
  const Element* x = drawn((size_t)pairs * SIZE_K, 1);
#endif
  generator.seed(tokens);
  const std::vector<i64> ids = drawn_ids(tokens, how);
  const size_t beyond = 64, results = (size_t)pairs * SIZE_N;
  std::vector<Result> y(results + beyond);
  memset((void*)y.data(), 0x7f, y.size() * sizeof(Result));
  const std::vector<Result> before = y;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
    memset(shared, 0xff, sizeof shared);
    barriers.clear();
    num_waiting = 0;
    of_block = fibers::Meeting(THREADS);
    for (auto& each : of_warp) each = fibers::Meeting(32);
    for (unsigned i = 0; i < THREADS; i++)
      fibers::add([&] {
        stream_experts(y.data(), x, weights, (const unsigned char*)scales, whole, bias, ids.data(), TOP_K, 1, pairs);
      });
    fibers::run();
#ifdef IDS_ARE_NEW
    CHECK(num_waiting == THREADS);
#else
    CHECK(num_waiting == THREADS - 32);    // all but the warp that asks for weights
#endif
  }

  const auto product = [&](int pair, int expert, int row) {
    double sum = 0;
    for (int k = 0; k < SIZE_K; k++) {
      const size_t at = ((size_t)expert * ROWS + row) * SIZE_K + k;
      const int nibble = weights[at / 2] >> at % 2 * 4 & 15;
#ifdef FP4
      const float value = of_fp4(nibble);
#else
      const float value = nibble - ZERO;
#endif
      const float scale = scale_of(((size_t)expert * ROWS + row) * groups + k / (SIZE_K / groups));
#ifdef OF_TOKENS
      sum += (double)widened(x[(size_t)(pair / TOP_K) * SIZE_K + k]) * value * scale;
#else
      sum += (double)widened(x[(size_t)pair * SIZE_K + k]) * value * scale;
#endif
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
  for (int pair = 0; pair < pairs; pair++)
    for (int n = 0; n < SIZE_N; n++) {
      const Result& found = y[(size_t)pair * SIZE_N + n];
      if (ids[pair] < 0 || ids[pair] >= EXPERTS) {
        CHECK(memcmp(&found, &before[0], sizeof found) == 0);
        continue;
      }
      const int expert = (int)ids[pair];
      float value = product(pair, expert, n), second = HALVES == 2 ? product(pair, expert, SIZE_N + n) : 0;
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
  for (size_t i = 0; i < beyond; i++) CHECK(memcmp(&y[results + i], &before[0], sizeof(Result)) == 0);
  printf("%g %llu\n", largest, checksum);
}
