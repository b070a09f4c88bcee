// Runs kernels/sparse_attention/attend.cu or attend_groups.cu on a CPU: "attend.inc" is the source without the functions
// that are PTX.

#include "clusters_on_cpu.h"
#include "barriers_on_cpu.h"
#include "warp_group_on_cpu.h"

struct float2 { float x, y; };
inline u32 __float_as_uint(float number) {
  u32 bits;
  memcpy(&bits, &number, 4);
  return bits;
}

struct Piece { u32 words[4]; };
inline void store_word(u32 to, u32 x) { memcpy(at(to, 4), &x, 4); }
inline void store_half_word(u32 to, u32 x) { memcpy(at(to, 2), &x, 2); }
inline void store_byte(u32 to, u32 x) { *at(to, 1) = x; }
inline u32 load_word(u32 from) {
  u32 x;
  memcpy(&x, at(from, 4), 4);
  return x;
}
inline float2 load_pair(u32 from) {
  CHECK(from % 8 == 0);
  float2 x;
  memcpy(&x, at(from, 8), 8);
  return x;
}
inline void store_piece(u32 to, const Piece& x) {
  CHECK(to % 16 == 0);
  memcpy(at(to, 16), &x, 16);
}
inline void copy_piece(u32 to, const Element* from, u32 bytes) { copy_piece(to, from, bytes, true); }
inline u32 load_far(u32 from, u32 rank) {
  CHECK(of_cluster.turn > 0 && rank < shared.size() && from + 4 <= shared[rank].size());
  u32 x;
  memcpy(&x, shared[rank].data() + from, 4);
  return x;
}
inline void store_far(u32 to, u32 rank, float a, float b) {
  CHECK(of_cluster.turn > 0 && to % 8 == 0 && rank < shared.size() && to + 8 <= shared[rank].size());
  const float x[2] = {a, b};
  memcpy(shared[rank].data() + to, x, 8);
}
inline void meet_cluster() { of_cluster.arrive_and_wait(); }
inline void ask_early(const Element* from, u32 bytes) {
  CHECK((u64)from % 16 == 0 && bytes % 16 == 0);
  for (u32 i = 0; i < bytes / 2; i++) (void)*(volatile const Element*)(from + i);
}

// Of each CTA: threads that multiply; those that give or want the weights of a stage; and warp groups.
static std::vector<fibers::Meeting> of_multiplying, of_weights[2], of_groups[2];
inline void sync_multiplying_warps() { of_multiplying[current->rank].arrive_and_wait(); }
inline void sync_group(int group) { of_groups[group][current->rank].arrive_and_wait(); }
inline void sync_all_warps() { __syncthreads(); }
inline void give_weights(int stage) { (void)of_weights[stage][current->rank].arrive(); }
inline void wait_for_weights(int stage) { of_weights[stage][current->rank].arrive_and_wait(); }

#include "attend.inc"

static const u64* arguments;
static void run_thread() {
  const u64* a = arguments;
  const auto list = [&](int i) { return (const int*)a[i]; };
  const auto elements = [&](int i) { return (const Element*)a[i]; };
  attend_selected((Element*)a[0], (float*)a[1], (float*)a[2], elements(3), elements(4), elements(5), list(6),
                  (const Sink*)a[7], list(8), list(9), list(10), list(11), list(12), a[13], a[14], a[15], a[16], a[17],
                  a[18], a[19], a[20], a[21], elements(22));
}

static void begin() {
  barriers.clear();
  for (auto* each : {&of_multiplying, &of_weights[0], &of_weights[1]}) each->assign(CLUSTER, fibers::Meeting(MULTIPLYING));
  for (auto& each : of_groups) each.assign(CLUSTER, fibers::Meeting(128));
}

extern "C" void run(const u64* args, const u32* grid, u32 num_threads, u32 shared_bytes, u32 late, const u64* changed,
                    u32 count) {
  arguments = args;
  run_clusters({grid, num_threads, shared_bytes, late, changed, count}, run_thread, begin, [] {});
}
