// Runs kernels/sparse_attention/score.cu, pick.cu or prompts.cu on a CPU: "selection.inc" is one of them, without the
// functions that are PTX. PICKS: it is one of the latter; PROMPTS: the last.

#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef PICKS
#define TURNS_IN_FRONT 100    // warps that bring keys fill the ring first, which those that have waited empty
#endif
#include "clusters_on_cpu.h"
#include "barriers_on_cpu.h"
#include "warp_group_on_cpu.h"

template <typename T>
inline T shifted(T value, int source) {    // of a lane of the warp; its own where there is none
  const T found = exchanged(value, source < 0 || source > 31 ? lane() : source);
  return found;
}
inline int __shfl_up_sync(u32, int value, int far) { return shifted(value, (int)lane() - far); }
inline int __shfl_down_sync(u32, int value, int far) { return shifted(value, (int)lane() + far); }
template <typename Of>
inline int over_warp(int own, Of of) {
  for (int far = 16; far > 0; far /= 2) own = of(own, __shfl_xor_sync(0xffffffff, own, far));
  return own;
}
inline int __reduce_min_sync(u32, int x) { return over_warp(x, [](int a, int b) { return min(a, b); }); }
inline int __reduce_max_sync(u32, int x) { return over_warp(x, [](int a, int b) { return max(a, b); }); }
inline int __reduce_add_sync(u32, int x) { return over_warp(x, [](int a, int b) { return a + b; }); }
inline int __ffs(u32 x) { return __builtin_ffs(x); }
inline int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
inline int __float_as_int(float number) {
  int bits;
  memcpy(&bits, &number, 4);
  return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(bits); }

struct Piece { u32 words[4]; };
inline void copy_piece(u32 to, const Element* from, bool wanted) { copy_piece(to, from, 16, wanted); }
inline void copy_piece_once(u32 to, const Element* from, bool wanted, u64) { copy_piece(to, from, wanted); }
inline u64 read_once_policy() { return 0; }
inline float positive(float x) { return x < 0 ? 0 : x; }

inline int load_near(u32 from) {
  int x;
  memcpy(&x, at(from, 4), 4);
  return x;
}
struct Four;
template <typename T = Four>
inline T load_four(u32 from) {
  CHECK(from % 16 == 0);
  T x;
  memcpy(&x, at(from, 16), 16);
  return x;
}
inline void store_near(u32 to, int x) { memcpy(at(to, 4), &x, 4); }
inline void add_near(u32 to, int x) { store_near(to, load_near(to) + x); }
inline int take_near(u32 from) {
  const int x = load_near(from);
  store_near(from, x + 1);
  return x;
}
#ifdef PICKS    // the others have a function of this name by themselves
inline void copy_one(u32 to, const int* from) { current->groups.back().push_back({to, from, 4}); }
inline void copy_four(u32 to, const int* from) {
  CHECK(to % 16 == 0 && (u64)from % 16 == 0);
  current->groups.back().push_back({to, from, 16});
}
inline void wait_for_copies() {
  for (const Copy& copy : current->groups.back()) memcpy(at(copy.to, copy.bytes), copy.from, copy.bytes);
  current->groups.back().clear();
}
#endif
inline int load_far(u32 from, u32 rank) {
  CHECK(of_cluster.turn > 0 && rank < shared.size() && from + 4 <= shared[rank].size());
  int x;
  memcpy(&x, shared[rank].data() + from, 4);
  return x;
}
inline void store_far(u32 to, u32 rank, int x) {
  CHECK(of_cluster.turn > 0 && rank < shared.size() && to + 4 <= shared[rank].size());
  memcpy(shared[rank].data() + to, &x, 4);
}
inline void meet_cluster() { of_cluster.arrive_and_wait(); }

inline void store_piece(u32 to, const Piece& x) {
  CHECK(to % 16 == 0);
  memcpy(at(to, 16), &x, 16);
}
static fibers::Meeting of_multiplying, of_turns[2], of_groups[2];    // of warp groups
inline void sync_group(int group) { of_groups[group].arrive_and_wait(); }
inline void wait_for_turn(int group) { of_turns[group].arrive_and_wait(); }
inline void give_turn(int group) { (void)of_turns[group].arrive(); }
inline void sync_multiplying_warps() { of_multiplying.arrive_and_wait(); }

#include "selection.inc"

static const u64* arguments;
static void run_thread() {
  const u64* a = arguments;
  const auto list = [&](int i) { return (const int*)a[i]; };
#if defined(PROMPTS)
  select_prompts((int*)a[0], (int*)a[1], (const Element*)a[2], (const float*)a[3], (const Element*)a[4], list(5), list(6),
                 list(7), list(8), list(9), a[10], a[11], a[12], a[13], a[14], a[15], a[16], a[17], a[18], a[19]);
#elif defined(PICKS)
  pick_keys((int*)a[0], list(1), list(2), list(3), list(4), list(5), a[6], a[7], a[8]);
#else
  score_keys((int*)a[0], (const Element*)a[1], (const float*)a[2], (const Element*)a[3], list(4), list(5), list(6),
             list(7), list(8), a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16], a[17], a[18]);
#endif
}

static void begin() {
  barriers.clear();
  of_multiplying = of_turns[0] = of_turns[1] = fibers::Meeting(256);
  of_groups[0] = of_groups[1] = fibers::Meeting(128);
}

extern "C" void run(const u64* args, const u32* grid, u32 num_threads, u32 shared_bytes, u32 late, const u64* changed,
                    u32 count) {
  arguments = args;
  run_clusters({grid, num_threads, shared_bytes, late, changed, count}, run_thread, begin, [] {});
}
