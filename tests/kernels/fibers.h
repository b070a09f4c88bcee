// The threads of a kernel on a CPU, as fibers of one thread: each runs until it waits for another.
//
// In turns and in order, but one warp in four, drawn at random, is passed over: what runs ahead of what differs from turn
// to turn, and is the same in each run of a program. Threads of the system would wait by the C library's conditions,
// which were seen to lose one wake-up in many thousands (glibc 2.36; perhaps its bug 25847).

#pragma once

#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace fibers {

struct Fiber {
  std::function<void()> body;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
};

inline std::vector<std::unique_ptr<Fiber>> all;
inline size_t running;    // whose turn it is: its place among all
inline ucontext_t scheduler;

inline void let_others_run() { swapcontext(&all[running]->context, &scheduler); }

inline void begin() {
  Fiber& own = *all[running];
  own.body();
  own.done = true;
  let_others_run();
}

// May be called by a fiber, too. The new one has the first place whose own is done, or one more.
inline void add(std::function<void()> body) {
  constexpr size_t room = 64 << 10;
  size_t place = 0;
  while (place < all.size() && !all[place]->done) place++;
  if (place == all.size()) {
    all.push_back(std::make_unique<Fiber>());
    all[place]->stack = std::make_unique<char[]>(room);
  }
  Fiber& made = *all[place];
  made.body = std::move(body);
  made.done = false;
  getcontext(&made.context);
  made.context.uc_stack.ss_sp = made.stack.get();
  made.context.uc_stack.ss_size = room;
  makecontext(&made.context, begin, 0);
}

// Runs all to their ends. So many neighbours are passed over together.
inline void run(size_t warp = 32) {
  static std::minstd_rand chance(1);
  bool is_passed_over = false;
  for (bool left = true; left;) {
    left = false;
    for (size_t i = 0; i < all.size(); i++) {
      if (i % warp == 0) is_passed_over = chance() / 64 % 4 == 0;
      left |= !all[i]->done;
      if (is_passed_over || all[i]->done) continue;
      running = i;
      swapcontext(&scheduler, &all[i]->context);
    }
  }
  all.clear();
}

// So many of them wait for each other, again and again.
class Meeting {
 public:
  explicit Meeting(int count = 0) : count(count) {}
  bool arrive() {    // whether this was the last one
    if (++arrived < count) return false;
    arrived = 0;
    turn++;
    return true;
  }
  void arrive_and_wait() {
    const unsigned own = turn;
    if (arrive()) return;
    while (turn == own) let_others_run();
  }
  bool has_begun() const { return arrived > 0 || turn > 0; }
  unsigned turn = 0;

 private:
  int count, arrived = 0;
};

}    // namespace fibers
