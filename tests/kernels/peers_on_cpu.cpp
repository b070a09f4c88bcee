// Runs kernels/collectives/peers.cu on a CPU: ranks side by side, a fiber for each thread of their blocks. A kernel ends
// when all its threads have.
//
// "peers.inc" is the kernels' source without the functions that are PTX, which are written here in C++: words of a
// vector arrive one by one, in any order, with pauses between them. Every rank makes the same calls, of random kinds and
// sizes, on numbers in which words are EMPTY now and then, all in one memory. Argument: a seed. Prints how many calls
// were right, and ends with what was wrong else. Between calls, a rank may be two kernels behind another, as on GPUs.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "fibers.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define CHECK(what, ...) \
  ((what) ? (void)0 : (printf("line %d: %s does not hold: ", __LINE__, #what), printf(__VA_ARGS__), fflush(stdout), _Exit(1)))

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(16) Vector { u32 word[4]; };
struct Index { unsigned x; };

constexpr u32 EMPTY = 0x80000000u;
constexpr int POLLS = 64, PARTS = 1;
constexpr u32 BLOCKS = 3, THREADS = 4, CAPACITY = 40, TURN = 1 << 16;
constexpr int CALLS = 400;

// A row is 5 vectors for 4 threads: of a thread's second ones one alone is there.
#define WIDTH 5
#define EPS 1e-5
#define OFFSET 1.0
constexpr u32 ROWS = CAPACITY / WIDTH;

struct Block { fibers::Meeting all{THREADS}; float shared[2][THREADS]; };
struct Thread { int rank; Index thread, block, grid; Block* shares; };

static std::map<size_t, Thread> threads;    // by the places of their fibers
static std::minstd_rand chance;
static Thread& current() { return threads[fibers::running]; }
#define RANK (current().rank)
#define threadIdx (current().thread)
#define blockIdx (current().block)
#define gridDim (current().grid)
static constexpr Index blockDim = {THREADS};

// Most often not at all, now and then as long as another rank needs for a call.
static void dawdle() {
  const u32 drawn = chance() / 64 % 256;
  for (int i = drawn == 0 ? 300 : drawn < 32 ? 1 : 0; i > 0; i--) fibers::let_others_run();
}
inline Vector seen(const Vector* at) {
  Vector found;
  for (int i = 0; i < 4; i++) {
    dawdle();
    found.word[i] = at->word[i];
  }
  if (found.word[0] == EMPTY) fibers::let_others_run();
  return found;
}
inline void put(Vector* at, Vector value) {
  const int first = chance() / 64 % 4;
  for (int i = 0; i < 4; i++) {
    at->word[(first + i) % 4] = value.word[(first + i) % 4];
    dawdle();
  }
}
inline u64 nanoseconds() { return 0; }
inline void fail() { CHECK(false, "rank %d has waited too long", RANK); }
inline void __syncthreads() { current().shares->all.arrive_and_wait(); }
inline void wait_for_previous() {}
inline u32 counted(const u32* counter) { return *counter; }
inline void count_more(u32* counter, u32 more) { *counter += more; }
inline float inverse_root(float value) { return 1.0f / std::sqrt(value); }
inline float block_sum(float value, u32 turn) {
  float(&shared)[THREADS] = current().shares->shared[turn & 1];
  shared[threadIdx.x] = value;
  __syncthreads();
  float sum = 0.0f;
  for (float each : shared) sum += each;
  return sum;
}
inline float part(u32 word, int) { float value; memcpy(&value, &word, 4); return value; }
inline u32 rounded(const float* value) { u32 word; memcpy(&word, value, 4); return word; }

#include "peers.inc"

enum Kind { ONE_SHOT, TWO_SHOT, NORM_ONE_SHOT, NORM_TWO_SHOT };
constexpr u64 HALF = 2 * RANKS * CAPACITY;

// What a rank has for all its calls.
struct Memory {
  std::vector<Vector> places = std::vector<Vector>(2 * HALF, {{EMPTY, EMPTY, EMPTY, EMPTY}});
  u32 calls[2] = {};
};

// `count` vectors, or rows.
struct Call { Kind kind; u32 count, num_blocks; bool in_place; };

static float number(u32 call, u32 rank, u32 i) {
  std::minstd_rand made(1 + call * 7919 + rank * 104729 + i * 31);
  made.discard(3);
  return made() % 5 == 0 ? -0.0f : (float)(int)(made() % 2001) - 1000.0f;
}

static std::vector<Vector> vectors(u32 call, u32 rank, u32 count) {
  std::vector<Vector> made(count);
  for (u32 i = 0; i < 4 * count; i++) {
    const float value = number(call, rank, i);
    memcpy(&made[i / 4].word[i % 4], &value, 4);
  }
  return made;
}

static float at(const std::vector<Vector>& of, u32 i) {
  float found;
  memcpy(&found, &of[i / 4].word[i % 4], 4);
  return found;
}

constexpr u32 RESIDUAL = 100, WEIGHT = 101;    // in place of a rank: numbers that all have

static void check(u32 call, const Call& made, const std::vector<Vector>& out, const std::vector<Vector>& stream) {
  const bool is_norm = made.kind >= NORM_ONE_SHOT;
  for (u32 i = 0; i < 4 * out.size(); i++) {
    float sum = 0.0f;
    for (int each = 0; each < RANKS; each++) sum += number(call, each, i);
    if (is_norm) sum += number(call, RESIDUAL, i);
    const float found = at(is_norm ? stream : out, i);
    CHECK(found == sum, "call %u of kind %d, %u, rank %d, number %u: %g, expected %g", call, made.kind, made.count, RANK, i,
          found, sum);
  }
  for (u32 row = 0; is_norm && row < made.count; row++) {
    double squares = 0.0;
    for (u32 i = 0; i < 4 * WIDTH; i++) squares += std::pow(at(stream, row * 4 * WIDTH + i), 2);
    for (u32 i = 0; i < 4 * WIDTH; i++) {
      const float found = at(out, row * 4 * WIDTH + i);
      const double normed = at(stream, row * 4 * WIDTH + i) / std::sqrt(squares / (4 * WIDTH) + EPS);
      const double expected = normed * (number(call, WEIGHT, i) + OFFSET);
      CHECK(std::abs(found - expected) <= 1e-4 * std::abs(expected), "call %u of kind %d, rank %d, row %u, number %u: %g, "
            "expected %g", call, made.kind, RANK, row, i, found, expected);
    }
  }
}

static void rank_of(int rank, std::vector<Memory>& memory, const std::vector<Call>& script, bool is_alone = false) {
  RANK = rank;
  for (u32 call = 0; call < script.size(); call++) {
    const auto [kind, count, num_blocks, in_place] = script[call];
    const u32 size = kind >= NORM_ONE_SHOT ? count * WIDTH : count;
    std::vector<Vector> x = vectors(call, rank, size), other(size), stream(size);
    const std::vector<Vector> residual = vectors(call, RESIDUAL, size), weight = vectors(call, WEIGHT, WIDTH);
    Vector* p[8] = {};
    for (int each = 0; each < RANKS; each++) p[each] = memory[each].places.data();
    Vector* const out = in_place ? x.data() : other.data();
    std::vector<Block> blocks(num_blocks);
    u32 num_running = num_blocks * THREADS;
    for (u32 i = 0; i < num_blocks * THREADS; i++)
      fibers::add([&, i] {
        current() = {rank, {i % THREADS}, {i / THREADS}, {num_blocks}, &blocks[i / THREADS]};
        u32* const calls = memory[rank].calls;
        if (kind >= NORM_ONE_SHOT)
          (kind == NORM_ONE_SHOT ? norm_one_shot : norm_two_shot)(
              x.data(), out, stream.data(), residual.data(), weight.data(), count, calls, HALF, 0, p[0], p[1], p[2], p[3],
              p[4], p[5], p[6], p[7]);
        else
          (kind == ONE_SHOT ? one_shot : two_shot)(
              x.data(), out, count, calls, HALF, 0, p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]);
        num_running--;
      });
    while (num_running > 0) fibers::let_others_run();
    if (!is_alone) check(call, script[call], in_place ? x : other, stream);
  }
}

// The last rank is lost, and the others are told: all their calls end, and are counted.
static int without_the_last(unsigned seed) {
  std::vector<Memory> memory(RANKS);
  const std::vector<Call> script = {
      {ONE_SHOT, 9, 2, false}, {NORM_ONE_SHOT, 5, 3, false}, {TWO_SHOT, CAPACITY, 2, true}, {NORM_TWO_SHOT, ROWS, 1, false}};
  chance.seed(seed * 31 + 1);
  for (int rank = 0; rank < RANKS - 1; rank++) {
    memory[rank].calls[1] = 1;
    fibers::add([&, rank] { rank_of(rank, memory, script, true); });
  }
  fibers::run(1);
  for (int rank = 0; rank < RANKS - 1; rank++)
    CHECK(memory[rank].calls[0] == script.size() * TURN, "rank %d counts %u", rank, memory[rank].calls[0]);
  printf("%zu\n", script.size());
  return 0;
}

int main(int count, char** arguments) {
  const unsigned seed = atoi(arguments[1]);
  if (count > 2) return without_the_last(seed);
  std::vector<Memory> memory(RANKS);
  std::minstd_rand made(seed + 1);
  made.discard(5);
  std::vector<Call> script;
  for (int i = 0; i < CALLS; i++) {
    const Kind kind = (Kind)(made() % 4);
    const u32 least = kind == TWO_SHOT || kind == NORM_TWO_SHOT ? RANKS : 1;
    const u32 most = kind >= NORM_ONE_SHOT ? ROWS : made() % 3 == 0 ? RANKS + 2 : CAPACITY;
    script.push_back({kind, least + made() % (most - least + 1), 1 + made() % BLOCKS, made() % 4 == 0});
  }
  chance.seed(seed * 31 + 1);
  for (int rank = 0; rank < RANKS; rank++) fibers::add([&, rank] { rank_of(rank, memory, script); });
  fibers::run(1);
  for (auto& each : memory)
    for (auto& vector : each.places)
      for (u32 word : vector.word) CHECK(word == EMPTY, "%08x is left in memory", word);
  printf("%zu\n", script.size());
}
