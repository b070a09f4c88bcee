// Barriers in shared memory that count arrivals and copies, on a CPU, beside clusters_on_cpu.h. Copies that arrive late do
// so in any order, while threads wait.

#pragma once

#include <map>
#include <random>
#include <utility>

struct Barrier { int count, pending; u32 phase; };
static std::map<std::pair<u32, u32>, Barrier> barriers;    // by CTA of the cluster and address

inline void barrier_init(u32 barrier, u32 count) {
  CHECK(barrier % 8 == 0 && at(barrier, 8));
  barriers[{current->rank, barrier}] = {(int)count, (int)count, 0};
}
inline void barrier_init_fence() {}
static void arrive_at(u32 rank, u32 barrier) {
  Barrier& found = barriers.at({rank, barrier});
  CHECK(found.pending > 0);
  if (--found.pending > 0) return;
  found.phase ^= 1;
  found.pending = found.count;
}
inline void barrier_arrive(u32 barrier) { arrive_at(current->rank, barrier); }

// A thread's copies that end with an arrival.
struct Batch { u32 thread, barrier; std::vector<Copy> copies; };
static std::vector<Batch> on_their_way;
static void end_a_batch() {
  static std::minstd_rand chance(1);
  if (on_their_way.empty()) return;
  std::swap(on_their_way[chance() / 64 % on_their_way.size()], on_their_way.back());
  const Batch ends = std::move(on_their_way.back());
  on_their_way.pop_back();
  const size_t own = fibers::running;
  fibers::running = ends.thread;    // whose shared memory it is
  for (const Copy& copy : ends.copies) arrive(copy);
  arrive_at(current->rank, ends.barrier);
  fibers::running = own;
}
inline void arrive_when_copied(u32 barrier) {
  on_their_way.push_back({(u32)fibers::running, barrier, std::move(current->groups.back())});
  current->groups.back().clear();
  if (!copies_are_late) end_a_batch();
}
inline void barrier_wait(u32 barrier, u32 parity) {
  while (barriers.at({current->rank, barrier}).phase == parity) {
    end_a_batch();
    fibers::let_others_run();
  }
}
