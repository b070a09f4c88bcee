// Runs kernels/linear/stream.cu on a CPU: a fiber for each thread of a block, one block after the other.
//
// "stream.inc" is the kernel's source, and that of few_bits.cuh, without the functions that are PTX, which are written
// here and in halves_on_cpu.h in C++. What they are given is checked (alignment, room in shared memory, arrivals at
// barriers, and how many pieces of w are on their way), w and x end in front of a page that may not be read, and shared
// memory and results are NaN before. Arguments: rows, outputs, inputs, how x lies (0 in row-major order, 1 with gaps of
// 16 bytes between rows, 2 every second element), and of a plan (`Plan` in stream_plan.py) the kernel's arguments, the
// slots for scales, how many blocks there are, and bytes of shared memory. Prints the largest error relative to 1 +
// |expected|, and a checksum of the first row.

#include "blocks_on_cpu.h"

template <typename T>
inline void store_shared(u32 to, T value) {
  CHECK(to + sizeof value <= shared_bytes);
  memcpy(at(to), &value, sizeof value);
}
template <size_t N>
inline void load_words(u32 (&words)[N], u32 from) {
  CHECK(from % sizeof words == 0 && from + sizeof words <= shared_bytes);
  memcpy(words, at(from), sizeof words);
}

inline void store_words(u32 to, u32 a, u32 b, u32 c, u32 d) {
  const u32 words[] = {a, b, c, d};
  CHECK(to % 16 == 0 && to + 16 <= shared_bytes);
  memcpy(at(to), words, 16);
}
inline void fence_before_copies() {}
inline void load_input(u32 (&words)[4], const void* from) {
  CHECK((u64)from % 16 == 0);
  memcpy(words, from, 16);
}
inline void compute_now(u32) {}
inline void compute_now(const void*) {}

static fibers::Meeting of_team[4];
inline void sync_team(int team) { of_team[team].arrive_and_wait(); }

static u32 addresses[18][32];
inline void load_matrices(u32 (&to)[4], u32 from) {
  CHECK(from % 16 == 0 && from + 16 <= shared_bytes);
  addresses[warp_of()][lane()] = from;
  __syncwarp();
  for (int i = 0; i < 4; i++) memcpy(&to[i], at(addresses[warp_of()][8 * i + lane() / 4]) + lane() % 4 * 4, 4);
  __syncwarp();
}
inline void multiply_add_float16(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  multiply_add_of(Float16::wide, sums, a, b0, b1);
}

inline void arrive_at_start() {
  __syncwarp();
  (void)of_block.arrive();
}
inline void sync_at_start() { of_block.arrive_and_wait(); }

#include "stream.inc"

static std::mt19937 generator(1);

static Element* drawn(size_t count, float scale) {
  Element* made = at_the_end<Element>(count);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < count; i++) made[i] = rounded(normal(generator) * scale);
  return made;
}

static unsigned char* drawn_bytes(size_t count) {
  unsigned char* made = at_the_end<unsigned char>(count);
  for (size_t i = 0; i < count; i++)
    do made[i] = generator() >> 8;
    while ((made[i] & 0x7f) == 0x7f);    // not a number
  return made;
}

// Scales of which so many make a sum about 1.
static float* drawn_scales(size_t count, float size) {
  float* made = at_the_end<float>(count);
  std::uniform_real_distribution<float> uniform(0.5f * size, 1.5f * size);
  for (size_t i = 0; i < count; i++) made[i] = uniform(generator);
  return made;
}

int main(int, char** given) {
  const int rows = atoi(given[1]), outputs = atoi(given[2]), inputs = atoi(given[3]), lies = atoi(given[4]);
  int plan[8];
  for (int i = 0; i < 8; i++) plan[i] = atoi(given[5 + i]);
  const int columns = outputs / HALVES, residual_stride = columns + 5;
  gridDim.x = atoi(given[13]);
  shared_bytes = atoi(given[14]);
  most_on_their_way = plan[5] * TEAMS;
  const i64 stride = lies == 2 ? 2 : 1;
  const i64 row_stride = lies == 0 ? inputs : lies == 1 ? inputs + 16 / sizeof(Input) : 2 * inputs + 3;
  const size_t x_count = (rows - 1) * row_stride + (inputs - 1) * stride + 1;
#ifdef IN_FEW_BITS
#ifdef GROUP
  const int groups = inputs / GROUP;
#else
  const int groups = 1;
#endif
  // Values of about so much, and scales of which so many make a sum about 1.
  const size_t num_scales = (size_t)(outputs + SCALED_ROWS - 1) / SCALED_ROWS * groups;
  const float size = (BITS == 8 ? 1 / 120.0f : 1 / 8.0f) / sqrtf(inputs);
  const unsigned char* w = drawn_bytes((size_t)outputs * inputs / 8 * BITS);
  const size_t num_points = (size_t)(outputs * BITS + 31) / 32 * groups;
  const u32* points = (const u32*)drawn_bytes(4 * num_points);
#ifdef DIVIDES
  const float* whole = drawn_scales(outputs, 100 / size);
#else
  const float* whole = drawn_scales(outputs, size / 100);
#endif
#if SCALE_BYTES == 1
  unsigned char* scales = drawn_bytes(num_scales);
  for (size_t i = 0; i < num_scales; i++)
#ifdef MXFP4
    scales[i] = 127 + (int)log2f(size) - scales[i] % 3;
#else
    scales[i] &= 0x7f;
#endif
#elif SCALE_BYTES == 4
  const float* scales = drawn_scales(num_scales, size);
#elif defined(SCALES_FLOAT16)
  u16* scales = at_the_end<u16>(num_scales);
  for (size_t i = 0; i < num_scales; i++) scales[i] = Float16::narrow(size * (0.5f + i % 7 / 7.0f));
#else
  const Element* scales = drawn(num_scales, size);
#endif
#else
  const Element* w = drawn((size_t)outputs * inputs, 1 / sqrtf(inputs));
#endif
  generator.seed(2);    // the first row of x is the same, however many there are
#ifdef X_FLOAT8
  const Input* x = drawn_bytes(x_count);
  generator.seed(3);
  const float* x_scales = drawn_scales((size_t)rows * groups, 1 / 120.0f);
#else
  const Input* x = drawn(x_count, 1);
  [[maybe_unused]] const float* x_scales = nullptr;
#endif
  generator.seed(4);
  const Element* bias = drawn(outputs, 1);
  const Element* residual = drawn((size_t)rows * residual_stride, 1);
  const size_t beyond = 64;
  std::vector<Element> y((size_t)rows * columns + beyond, 0x7fff);
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
    memset(shared, 0xff, sizeof shared);
    barriers.clear();
    num_waiting = 0;
    of_block = fibers::Meeting(THREADS);
    of_multiplying_warps = fibers::Meeting(32 * WARPS);
    for (auto& each : of_team) each = fibers::Meeting(32 * TEAM);
    for (auto& each : of_warp) each = fibers::Meeting(32);
    for (unsigned i = 0; i < THREADS; i++)
      fibers::add([=, &y] {
        stream_linear(
            y.data(), x, (const unsigned char*)w, bias, residual, row_stride, stride, residual_stride, rows, outputs,
            inputs, plan[0], plan[1], plan[2], plan[3], plan[4], plan[5], plan[6]
#ifdef IN_FEW_BITS
            , plan[7], (const unsigned char*)scales, x_scales, points, whole
#endif
        );
      });
    fibers::run();
    CHECK(num_waiting == THREADS - 32 * TEAMS);    // all but the warps that ask for weights
  }

  const auto weight = [&](int n, int k) {
#ifdef IN_FEW_BITS
    const i64 at = (i64)n * inputs + k;
    const int scale = n / SCALED_ROWS * groups + k / (inputs / groups);
#if defined(MXFP4)
    const float times = ldexpf(1, scales[scale] - 127);
#elif defined(NVFP4) && defined(DIVIDES)
    const float times = of_float8(scales[scale]) / whole[WHOLE_ROWS * n];
#elif defined(NVFP4)
    const float times = of_float8(scales[scale]) * whole[WHOLE_ROWS * n];
#elif SCALE_BYTES == 4
    const float times = scales[scale];
#elif defined(SCALES_FLOAT16)
    const float times = widened_float16(scales[scale]);
#else
    const float times = widened(scales[scale]);
#endif
#if defined(FLOAT8)
    return of_float8(w[at]) * times;
#elif defined(INT8)
    return (signed char)w[at] * times;
#elif defined(MXFP4) || defined(NVFP4)
    return of_fp4(w[at / 2] >> at % 2 * 4 & 15) * times;
#else
    int value = (BITS == 8 ? w[at] : w[at / 2] >> at % 2 * 4 & 15) - OFFSET;
#ifdef POINTS
    constexpr int EACH = 32 / BITS;
    value -= points[n / EACH * groups + k / (inputs / groups)] >> n % EACH * BITS & ((1 << BITS) - 1);
#endif
    return value * times;
#endif
#else
    return widened(w[(i64)n * inputs + k]);
#endif
  };
  const auto input = [&](int m, int k) {
#ifdef X_FLOAT8
    const int scale = X_SCALES * (m * groups + k / (inputs / groups));
    return of_float8(x[m * row_stride + k * stride]) * x_scales[scale];
#else
    return widened(x[m * row_stride + k * stride]);
#endif
  };
  const auto product = [&](int m, int n) {
    double sum = 0;
    for (int k = 0; k < inputs; k++) sum += (double)input(m, k) * weight(n, k);
#ifdef BIAS
    sum += widened(bias[n]);
#endif
    return (float)sum;
  };
  double largest = 0;
  u64 checksum = 0;
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < columns; n++) {
      float expected = product(m, n);
#ifdef GATE
      expected = GATE(widened(rounded(expected))) * widened(rounded(product(m, columns + n)));
#endif
#ifdef RESIDUAL
      expected = widened(rounded(expected)) + widened(residual[m * residual_stride + n]);
#endif
      const double error = fabs(widened(y[(size_t)m * columns + n]) - expected) / (1 + fabs(expected));
      largest = std::isnan(error) ? INFINITY : std::max(largest, error);
      if (m == 0) checksum = checksum * 1099511628211u + y[n];
    }
  for (size_t i = 0; i < beyond; i++) CHECK(y[(size_t)rows * columns + i] == 0x7fff);
  printf("%g %llu\n", largest, checksum);
}
