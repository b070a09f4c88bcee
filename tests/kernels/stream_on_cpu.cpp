// Runs kernels/linear/stream.cu on a CPU: a fiber for each thread of a block, one block after the other.
//
// "stream.inc" is the kernel's source, and that of few_bits.cuh, without the functions that are PTX, which are written
// here and in halves_on_cpu.h in C++. What they are given is checked (alignment, room in shared memory, arrivals at
// barriers), w and x end in front of a page that may not be read, and shared memory and results are NaN before.
// Arguments: rows, outputs, inputs, how x lies (0 in row-major order, 1 with gaps of 16 bytes between rows, 2 every
// second element), and of a plan (`Plan` in stream_plan.py) the kernel's arguments, the slots for scales, how many
// blocks there are, and bytes of shared memory. Prints the largest error relative to 1 + |expected|, and a checksum of
// the first row.

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "fibers.h"
#include "halves_on_cpu.h"

#define __global__
#define __launch_bounds__(...)
#define CHECK(what) \
  ((what) ? (void)0 : (printf("line %d: %s does not hold\n", __LINE__, #what), fflush(stdout), _Exit(1)))

typedef unsigned long long u64;
typedef long long i64;
using std::min;

struct Index { unsigned x; };
#define threadIdx (Index{(unsigned)fibers::running})
static Index blockIdx, gridDim;
alignas(128) static unsigned char shared[256 << 10];    // dynamic shared memory; addresses count from here
static u32 shared_bytes;
static fibers::Meeting of_block, of_multiplying_warps, of_warp[18];

static u32 warp_of() { return threadIdx.x / 32; }
static u32 lane_of() { return threadIdx.x % 32; }
inline void __syncwarp() { of_warp[warp_of()].arrive_and_wait(); }
inline u32 __shfl_sync(u32, u32 value, int) { return value; }    // the source asks for a warp's number
inline float __expf(float a) { return expf(a); }
inline u32 shared_address(const void* at) { return (u32)((const char*)at - (const char*)shared); }
inline unsigned char* at(u32 address) { return shared + (int)address; }

struct Barrier { int count, pending; i64 bytes; u32 phase; };
static std::map<u32, Barrier> barriers;

inline void barrier_init(u32 barrier, u32 count) {
  CHECK(barrier % 8 == 0 && barrier + 8 <= shared_bytes);
  barriers[barrier] = {(int)count, (int)count, 0, 0};
}
inline void barrier_init_fence() {}
static void change(u32 barrier, int arrivals, i64 bytes) {
  Barrier& found = barriers.at(barrier);
  CHECK(found.pending >= arrivals);
  found.pending -= arrivals;
  found.bytes += bytes;
  CHECK(found.bytes >= 0);
  if (found.pending == 0 && found.bytes == 0) {
    found.phase ^= 1;
    found.pending = found.count;
  }
}
inline void barrier_arrive(u32 barrier) { change(barrier, 1, 0); }
inline void barrier_expect(u32 barrier, u32 bytes) { change(barrier, 1, bytes); }
inline void barrier_wait(u32 barrier, u32 parity) {
  while (barriers.at(barrier).phase == parity) fibers::let_others_run();
}

inline bool elected() { return lane_of() == 0; }
inline u64 read_once_policy() { return 0; }
inline void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  CHECK((u64)from % 16 == 0 && to % 16 == 0 && bytes % 16 == 0 && bytes > 0 && to + bytes <= shared_bytes);
  memcpy(at(to), from, bytes);
  change(barrier, 0, -(i64)bytes);
}
inline void copy_once(u32 to, const unsigned char* from, u32 bytes, u32 barrier, u64) {
  copy(to, from, bytes, barrier);
}
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

static u32 addresses[18][32], given_a[18][32][4], given_b[18][32][2];
inline void load_matrices(u32 (&to)[4], u32 from) {
  CHECK(from % 16 == 0 && from + 16 <= shared_bytes);
  addresses[warp_of()][lane_of()] = from;
  __syncwarp();
  for (int i = 0; i < 4; i++) memcpy(&to[i], at(addresses[warp_of()][8 * i + lane_of() / 4]) + lane_of() % 4 * 4, 4);
  __syncwarp();
}
static void multiply_add_of(float (*value)(u16), float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 warp = warp_of(), lane = lane_of(), b[2] = {b0, b1};
  memcpy(given_a[warp][lane], a, sizeof a);
  memcpy(given_b[warp][lane], b, sizeof b);
  __syncwarp();
  for (int j = 0; j < 4; j++) {
    const int row = lane / 4 + j / 2 * 8, column = lane % 4 * 2 + j % 2;
    for (int k = 0; k < 16; k++) {    // a pair of neighbouring k is a register
      const u32 from_a = given_a[warp][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> k % 2 * 16;
      const u32 from_b = given_b[warp][column * 4 + k % 8 / 2][k / 8] >> k % 2 * 16;
      sums[j] += value((u16)from_a) * value((u16)from_b);
    }
  }
  __syncwarp();
}
inline void multiply_add(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  multiply_add_of(widened, sums, a, b0, b1);
}
inline void multiply_add_float16(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  multiply_add_of(Float16::wide, sums, a, b0, b1);
}

static int num_waiting;
inline void let_next_kernel_start() {}
inline void wait_for_kernel_in_front() { num_waiting++; }
inline void arrive_at_start() {
  __syncwarp();
  (void)of_block.arrive();
}
inline void sync_at_start() { of_block.arrive_and_wait(); }
inline void sync_multiplying_warps() { of_multiplying_warps.arrive_and_wait(); }

#include "stream.inc"

static std::mt19937 generator(1);

// Memory that ends where it may not be read any more.
template <typename T>
static T* at_the_end(size_t count) {
  const size_t page = 4096, bytes = count * sizeof(T), pages = (bytes + page - 1) / page * page;
  char* begin = (char*)mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(begin != MAP_FAILED && mprotect(begin + pages, page, PROT_NONE) == 0);
  return (T*)(begin + pages - bytes);
}

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
  int plan[7];
  for (int i = 0; i < 7; i++) plan[i] = atoi(given[5 + i]);
  const int columns = outputs / HALVES, residual_stride = columns + 5;
  gridDim.x = atoi(given[12]);
  shared_bytes = atoi(given[13]);
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
    for (auto& each : of_warp) each = fibers::Meeting(32);
    for (unsigned i = 0; i < THREADS; i++)
      fibers::add([=, &y] {
        stream_linear(
            y.data(), x, (const unsigned char*)w, bias, residual, row_stride, stride, residual_stride, rows, outputs,
            inputs, plan[0], plan[1], plan[2], plan[3], plan[4], plan[5]
#ifdef IN_FEW_BITS
            , plan[6], (const unsigned char*)scales, x_scales, points, whole
#endif
        );
      });
    fibers::run();
    CHECK(num_waiting == THREADS - 32);    // all but the warp that asks for weights
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
