// A barrier for each CTA that counts the bytes which other CTAs of the cluster write, once: after clusters_on_cpu.h.

#pragma once

struct Barrier { int arrivals; i64 bytes; };
static std::vector<Barrier> barriers;    // one of each CTA
inline void barrier_init(u32, u32 arrivals) { barriers[current->rank] = {(int)arrivals, 0}; }
inline void barrier_init_fence() {}
inline void barrier_expect(u32, u32 bytes) {
  CHECK(barriers[current->rank].arrivals-- == 1);
  barriers[current->rank].bytes += bytes;
}
inline void barrier_wait(u32) {
  while (barriers[current->rank].arrivals > 0 || barriers[current->rank].bytes != 0) fibers::let_others_run();
}
inline void arrive_with_nothing_written() { arrive_at_cluster(); }

// Before and after a cluster.
static void make_barriers() { barriers.assign(CLUSTER, {-1, 0}); }
static void check_barriers() {
  for (const Barrier& each : barriers) CHECK(each.bytes == 0);
}
