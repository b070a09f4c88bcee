// Runs kernels/collectives/peers.cu on a CPU: ranks side by side, a thread for each block, whose threads run one after
// the other. A kernel ends when all its blocks have.
//
// "peers.inc" is the kernels' source without the functions that are PTX, which are written here in C++: words of a
// vector arrive one by one, in any order, with pauses between them. Every rank makes the same calls, of random kinds and
// sizes, on numbers in which words are EMPTY now and then. Argument: a seed. Prints how many calls were right, and ends
// with what was wrong else. Between calls, a rank may be two kernels behind another, as on GPUs.

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

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
constexpr int POLLS = 4096, PARTS = 1;
constexpr u32 BLOCKS = 3, THREADS = 4, CAPACITY = 40;
constexpr int CALLS = 100;

static thread_local int RANK;
static thread_local Index threadIdx, blockIdx;
static thread_local std::minstd_rand* chance;
static constexpr Index gridDim = {BLOCKS}, blockDim = {THREADS};

// Most often not at all, now and then as long as another rank needs for a call.
static void dawdle() {
  const u32 drawn = (*chance)() % 256;
  for (int i = drawn == 0 ? 300 : drawn < 32 ? 1 : 0; i > 0; i--) std::this_thread::yield();
}
inline std::atomic_ref<u32> word_at(const Vector* at, int i) { return std::atomic_ref<u32>(((Vector*)at)->word[i]); }
inline Vector seen(const Vector* at) {
  dawdle();
  Vector found;
  for (int i = 0; i < 4; i++) found.word[i] = word_at(at, i).load(std::memory_order_relaxed);
  if (found.word[0] == EMPTY) std::this_thread::yield();
  return found;
}
inline void put(Vector* at, Vector value) {
  const int first = (*chance)() % 4;
  for (int i = 0; i < 4; i++) {
    word_at(at, (first + i) % 4).store(value.word[(first + i) % 4], std::memory_order_relaxed);
    dawdle();
  }
}
inline u64 nanoseconds() { return 0; }
inline void fail() { CHECK(false, "rank %d was told to stop", RANK); }
inline void __syncthreads() {}
inline float part(u32 word, int) { float value; memcpy(&value, &word, 4); return value; }
inline u32 rounded(const float* value) { u32 word; memcpy(&word, value, 4); return word; }

#include "peers.inc"

using Kernel = void (*)(const Vector*, Vector*, u32, u32*, u32, u64, PEERS);
struct Way { Kernel kernel; u32 slots, slot; std::vector<std::vector<Vector>> memory; std::vector<std::vector<u32>> calls; };

static Way way(Kernel kernel, u32 slots, u32 slot) {
  const Vector empty = {{EMPTY, EMPTY, EMPTY, EMPTY}};
  return {kernel, slots, slot, std::vector(RANKS, std::vector<Vector>(2 * slots * slot, empty)),
          std::vector(RANKS, std::vector<u32>(BLOCKS + 1, 0))};
}

static float number(u32 call, u32 rank, u32 i) {
  std::minstd_rand made(1 + call * 7919 + rank * 104729 + i * 31);
  made.discard(3);
  return made() % 5 == 0 ? -0.0f : (float)(int)(made() % 2001) - 1000.0f;
}

struct Call { int way; u32 count; bool in_place; };

static void rank_of(int rank, std::vector<Way>& ways, const std::vector<Call>& script, unsigned seed) {
  std::minstd_rand own(seed * 31 + rank + 1);
  chance = &own;
  for (u32 number_of_call = 0; number_of_call < script.size(); number_of_call++) {
    const auto [kind, count, in_place] = script[number_of_call];
    Way& used = ways[kind];
    std::vector<Vector> x(count), other(count);
    for (u32 i = 0; i < 4 * count; i++) {
      const float value = number(number_of_call, rank, i);
      memcpy(&x[i / 4].word[i % 4], &value, 4);
    }
    Vector* p[8] = {};
    for (int each = 0; each < RANKS; each++) p[each] = used.memory[each].data();
    Vector* const out = in_place ? x.data() : other.data();
    std::vector<std::thread> blocks;
    for (u32 block = 0; block < BLOCKS; block++)
      blocks.emplace_back([&, block, chosen = own()] {
        std::minstd_rand of_block(chosen);
        chance = &of_block;
        RANK = rank;
        blockIdx.x = block;
        for (u32 thread = THREADS; thread-- > 0;) {    // the first thread counts the call, so it comes last
          threadIdx.x = thread;
          used.kernel(x.data(), out, count, used.calls[rank].data(), used.slot, 0, p[0], p[1], p[2], p[3], p[4], p[5],
                      p[6], p[7]);
        }
      });
    for (auto& each : blocks) each.join();
    for (u32 i = 0; i < 4 * count; i++) {
      float sum = 0.0f, found;
      for (int each = 0; each < RANKS; each++) sum += number(number_of_call, each, i);
      memcpy(&found, &out[i / 4].word[i % 4], 4);
      CHECK(found == sum, "call %u of way %d, %u vectors, rank %d, number %u: %g, expected %g", number_of_call, kind, count,
            rank, i, found, sum);
    }
  }
}

int main(int, char** arguments) {
  const unsigned seed = atoi(arguments[1]);
  std::vector<Way> ways = {way(one_shot, RANKS, CAPACITY), way(two_shot, 2 * RANKS, (CAPACITY + RANKS - 1) / RANKS)};
  std::minstd_rand made(seed + 1);
  made.discard(5);
  std::vector<Call> script;
  for (int i = 0; i < CALLS; i++) {
    const u32 count = made() % 3 == 0 ? 1 + made() % 3 : 1 + made() % CAPACITY;
    script.push_back({(int)(made() % 2), count, made() % 4 == 0});
  }
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < RANKS; rank++)
    ranks.emplace_back([&, rank] { rank_of(rank, ways, script, seed); });
  for (auto& each : ranks) each.join();
  for (auto& used : ways)
    for (auto& memory : used.memory)
      for (auto& vector : memory)
        for (u32 word : vector.word) CHECK(word == EMPTY, "%08x is left in memory", word);
  printf("%zu\n", script.size());
}
