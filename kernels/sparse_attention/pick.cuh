// The places of the COUNT largest of a row's scores, in ascending order, without a sort.
//
// A cluster of CTAs takes a row. Each of them has a part of its scores, in order, in shared memory if there is room.
// They count together how many scores are in each of BINS bins, and go on with those of the bin that has the COUNT-th
// largest:
//
//   first     bins of equal width, of which the first has most of the scores, by a sample: these are not counted. Few
//             scores are in the same one of the others
//   then      while there are too many in it, bins of equally many integers (`in_order`); four times at most, whatever
//             the scores are
//   in the end each CTA is given all scores of that bin, and finds the COUNT-th largest among them
//
// Then each warp writes the places of what it has above that score, and of the first that equal it. So what is selected
// says nothing of how it was found: of equal scores it is the first ones.
//
// Defines, beside those of rows.cuh:
//   CLUSTER, WARPS    CTAs of a cluster, and warps of a CTA, of which each thread has a bin
//   NEAR              scores that a CTA has in shared memory; more of them it reads twice
//   PICKS_AT          where in shared memory, in bytes: a multiple of 16
//
// Include half.cuh and rows.cuh in front of it.

#pragma once

constexpr int THREADS = 32 * WARPS, BINS = THREADS;
constexpr int ROOM = THREADS;                       // for scores of one bin
constexpr int SAMPLES = 4;                          // of the sample, for each thread
constexpr int AT_ONCE = THREADS > 384 ? 2 : 8;      // fours that a thread loads together, if it has registers for them
constexpr int LEAST = -0x7fffffff - 1, MOST = 0x7fffffff;
constexpr int LOWEST = (int)0x807fffff;             // in the order of scores: -infinity

// Rows of scores begin at a multiple of four.
#ifdef BY_TOKEN
constexpr bool IN_FOURS = true;
#else
constexpr bool IN_FOURS = PAGE_SIZE % 4 == 0;
#endif

struct alignas(16) Four { int of[4]; };

extern __shared__ __align__(1024) unsigned char memory[];

// Where things are in it, in bytes.
constexpr u32 COUNTS = PICKS_AT;                    // of bins: two of them, of this time and of the one before
constexpr u32 KEPT = COUNTS + 2 * BINS * 4;         // scores of the bin, of all CTAs, and the places of these scores
constexpr u32 RANKS = KEPT + ROOM * 8;              // how many of them are larger, or equal and before
constexpr u32 OF_WARPS = RANKS + ROOM * 4;          // two numbers of each warp
constexpr u32 FOUND = OF_WARPS + (WARPS + 1) / 2 * 16;    // five numbers
constexpr u32 TAKEN = FOUND + 20;                   // how many scores of the bin the CTA has sent
constexpr u32 LARGER = FOUND + 24;                  // three counts
constexpr u32 SCORES = FOUND + 48;

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

// Places in shared memory count from its first byte.
__device__ __forceinline__ int load_near(u32 from) {
  int x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared_address(memory) + from) : "memory");
  return x;
}

__device__ __forceinline__ Four load_four(u32 from) {
  Four x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.of[0]), "=r"(x.of[1]), "=r"(x.of[2]), "=r"(x.of[3]) : "r"(shared_address(memory) + from)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_near(u32 to, int x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(memory) + to), "r"(x) : "memory");
}

__device__ __forceinline__ void add_near(u32 at, int x) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(shared_address(memory) + at), "r"(x) : "memory");
}

// Gives what was there before.
__device__ __forceinline__ int take_near(u32 at) {
  int x;
  asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(x) : "r"(shared_address(memory) + at) : "memory");
  return x;
}

// Four numbers.
__device__ __forceinline__ void copy_four(u32 to, const int* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(memory) + to), "l"(from) : "memory");
}

// One number.
__device__ __forceinline__ void copy_one(u32 to, const int* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(memory) + to), "l"(from) : "memory");
}

// Until all of this thread's copies have arrived.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Of a CTA of the cluster.
__device__ __forceinline__ int load_far(u32 from, u32 rank) {
  int x;
  asm volatile("{ .reg .u32 far; mapa.shared::cluster.u32 far, %1, %2; ld.shared::cluster.u32 %0, [far]; }"
               : "=r"(x) : "r"(shared_address(memory) + from), "r"(rank) : "memory");
  return x;
}

__device__ __forceinline__ void store_far(u32 to, u32 rank, int x) {
  asm volatile("{ .reg .u32 far; mapa.shared::cluster.u32 far, %0, %1; st.shared::cluster.u32 [far], %2; }" ::
                   "r"(shared_address(memory) + to), "r"(rank), "r"(x) : "memory");
}

// What a thread wrote before it arrives, others read after they have waited.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// --- bins ------------------------------------------------------------------------------------------------------------

// The first bin has all scores up to `low`, the last one those from `high` on. Between, by value, bin i begins about
// where (value - origin) * factor is i; else at the integer low + i * 2^shift.
struct Bins {
  int low, high;
  bool are_by_value;
  float origin, factor;
  int shift;
};

__device__ __forceinline__ Bins bins_of(int low, int high, bool may_be_by_value) {
  Bins bins = {low, high, false, value_of(low), 0, 0};
  bins.shift = max(0, 32 - __clz((u32)high - (u32)low) - (31 - __clz(BINS)));
  if (!may_be_by_value) return bins;
  bins.factor = (BINS - 1) / (value_of(high) - bins.origin);
  // Neither for an infinity, nor a NaN, nor equal scores; nor where a product would be lost.
  bins.are_by_value = bins.factor > 1e-30f && bins.factor < 1e30f;
  return bins;
}

// Ascends with the score. NaN, for which `min` gives the other number, is in the last bin.
__device__ __forceinline__ float in_bins(int score, const Bins& bins) {
  return (value_of(score) - bins.origin) * bins.factor;
}

__device__ __forceinline__ int bin_by_value(int score, const Bins& bins) {
  return (int)max(min(in_bins(score, bins), (float)(BINS - 1)), 0.0f);
}

__device__ __forceinline__ int bin_of(int score, const Bins& bins) {
  if (bins.are_by_value) return bin_by_value(score, bins);
  return ((u32)min(max(score, bins.low), bins.high) - (u32)bins.low) >> bins.shift;
}

// The least score of this bin or of one above; all lanes of a warp look for it: each time at 32 numbers, between two of
// which it is then. If there is none, LEAST, to which the largest number's successor goes.
__device__ __forceinline__ int least_of(int bin, const Bins& bins) {
  u32 base = 0;    // from that of -infinity on
#pragma unroll
  for (int bit = 27; bit >= 0; bit = bit > 5 || bit == 0 ? bit - 5 : 0) {
    const u64 own = base + ((u64)(threadIdx.x % 32) << bit);
    const bool is_below = own <= (u32)MOST - (u32)LOWEST && bin_of((int)((u32)own + (u32)LOWEST), bins) < bin;
    const int below = __popc(__ballot_sync(0xffffffff, is_below));
    if (below > 0) base += ((below - 1) << bit) + 1;
  }
  return (int)(base + (u32)LOWEST);
}

// --- what threads tell each other ------------------------------------------------------------------------------------

// Of this lane and those behind it.
__device__ __forceinline__ int sum_from(int own) {
#pragma unroll
  for (int far = 1; far < 32; far *= 2) {
    const int other = __shfl_down_sync(0xffffffff, own, far);
    if (threadIdx.x % 32 + far < 32) own += other;
  }
  return own;
}

// --- a row -----------------------------------------------------------------------------------------------------------

// What one CTA has of a row.
struct Part {
  const int* scores;    // of the row
  int first, count;
  bool are_near, keeps_marks;    // scores are in shared memory; or marks of them, in their place
};

__device__ __forceinline__ int score_of(const Part& part, int i) {
  return part.are_near ? load_near(SCORES + 4 * i) : part.scores[part.first + i];
}

// And the three behind it, whether or not they are the part's: `i` is a multiple of four.
__device__ __forceinline__ Four four_of(const Part& part, int i) {
  if (part.are_near) return load_four(SCORES + 4 * i);
  if (IN_FOURS) return *(const Four*)(part.scores + part.first + i);
  Four found;
#pragma unroll
  for (int j = 0; j < 4; j++) found.of[j] = part.scores[part.first + min(i + j, part.count - 1)];
  return found;
}

// Scores above `high` are selected, and the first `wanted` of those from `low` to `high`. Before this CTA's there are
// so many above, and between.
struct Bound {
  int low, high, wanted, above_before, equal_before;
};

// 1 above the bound, 0 within.
__device__ __forceinline__ int side_of(int score, const Bound& bound) {
  return score > bound.high ? 1 : score >= bound.low ? 0 : -1;
}

__device__ __forceinline__ int up_to_four(int count) { return (count + 3) / 4 * 4; }

// Writes the number of keys that are seen, or -1: all are selected.
__device__ __forceinline__ void write_all(int* to, const Row& row, int rank) {
  for (int i = rank * THREADS + threadIdx.x; i < COUNT; i += CLUSTER * THREADS)
    to[i] = i < row.num_keys ? row.kept + i : -1;
}

// Has the part brought near. Gives the bins of a sample, the same in all CTAs. As many neighbouring lanes are a group as have
// one of the COUNT largest scores of the row, on average, or two where there are many groups: the least of all groups'
// largest scores is hardly above the COUNT-th then, and not far below.
__device__ __forceinline__ Bins load_part(const Part& part, int num_keys) {
  if (part.are_near) {
    for (int i = 4 * threadIdx.x; i < part.count; i += 4 * THREADS) {
      const int* from = part.scores + part.first + i;
      if (IN_FOURS) {
        copy_four(SCORES + 4 * i, from);
      } else {
        for (int j = 0; j < min(4, part.count - i); j++) copy_one(SCORES + 4 * (i + j), from + j);
      }
    }
  }
  const int apart = max(1, num_keys / (SAMPLES * THREADS));
  int high = LEAST;
#pragma unroll
  for (int i = 0; i < SAMPLES; i++)
    high = max(high, part.scores[min((i * (int)THREADS + (int)threadIdx.x) * apart, num_keys - 1)]);
  int low = high;
#pragma unroll
  for (int far = 1; far < 32; far *= 2) {
    const int other = __shfl_xor_sync(0xffffffff, low, far);
    if (2 * far * SAMPLES <= num_keys / COUNT * (far < 8 ? 2 : 1)) low = max(low, other);
  }
  low = __reduce_min_sync(0xffffffff, low);
  high = __reduce_max_sync(0xffffffff, high);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane < 2) store_near(OF_WARPS + warp * 8 + lane * 4, lane ? high : low);
  if (threadIdx.x < 4) store_near(TAKEN + threadIdx.x * 4, 0);
  store_near(RANKS + threadIdx.x * 4, 0);
  store_near(COUNTS + threadIdx.x * 4, 0);
  wait_for_copies();
  __syncthreads();
  low = __reduce_min_sync(0xffffffff, lane < WARPS ? load_near(OF_WARPS + lane * 8) : MOST);
  high = __reduce_max_sync(0xffffffff, lane < WARPS ? load_near(OF_WARPS + lane * 8 + 4) : LEAST);
  return bins_of(low, high, true);
}

// What a warp has of the CTA's part, in pieces: of each a lane has `run` scores that lie together, 32 at most. `first` and
// `run` are multiples of four.
struct Range {
  int first, end, run;
  __device__ __forceinline__ int piece() const { return 32 * run; }
  __device__ __forceinline__ int last_piece() const { return first + max(0, end - first - 1) / piece() * piece(); }
};

// A lane's scores of a piece: a bit for each that is above a bound, or within it.
struct Marks {
  u32 above, within;
};

// `side` says of a score: 1 above, 0 within.
template <typename Side>
__device__ __forceinline__ Marks marks_of(const Part& part, const Range& own, int start, Side side) {
  const int lane = threadIdx.x % 32, fours = own.run / 4, first = start + lane * own.run;
  Marks marks = {0, 0};
  const auto mark = [&](const Four& scores, int four) {
    u32 above = 0, within = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int found = first + 4 * four + j < own.end ? side(scores.of[j]) : -1;
      above |= (found > 0) << j;
      within |= (found == 0) << j;
    }
    marks.above |= above << 4 * four;
    marks.within |= within << 4 * four;
  };
  if (part.are_near) {
    int four = lane % fours;    // lanes begin at different ones, so that they find them in different banks
    for (int i = 0; i < fours; i++) {
      if (first + 4 * four < own.end) mark(four_of(part, first + 4 * four), four);
      four = four + 1 == fours ? 0 : four + 1;
    }
    return marks;
  }
#pragma unroll 1
  for (int begin = 0; begin < fours; begin += AT_ONCE) {
    Four scores[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (begin + i < fours && first + 4 * (begin + i) < own.end) scores[i] = four_of(part, first + 4 * (begin + i));
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (begin + i < fours && first + 4 * (begin + i) < own.end) mark(scores[i], begin + i);
  }
  return marks;
}

// Of a part that is near: a bit for each of the lane's scores of a piece that reaches `least`.
__device__ __forceinline__ u32 reaching(const Range& own, int start, int least) {
  const int fours = own.run / 4, first = start + (int)threadIdx.x % 32 * own.run, left = own.end - first;
  u32 bits = 0;
  int four = threadIdx.x % 32 % fours;    // as in marks_of
  for (int i = 0; i < fours; i++) {
    if (4 * four < left) {
      const Four scores = load_four(SCORES + 4 * (first + 4 * four));
      u32 found = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) found |= (u32)(scores.of[j] >= least) << j;
      bits |= found << 4 * four;
    }
    four = four + 1 == fours ? 0 : four + 1;
  }
  return left >= 32 ? bits : left > 0 ? bits & ((1u << left) - 1) : 0;
}

// Where the lane's marks of a piece are kept, unless it is the last, which may end early.
__device__ __forceinline__ u32 place_of_marks(const Range& own, int start) {
  return SCORES + 8 * (start / own.run + threadIdx.x % 32);
}

__device__ __forceinline__ void keep_marks(const Range& own, int start, const Marks& marks) {
  store_near(place_of_marks(own, start), marks.above);
  store_near(place_of_marks(own, start) + 4, marks.within);
}

__device__ __forceinline__ Marks kept_marks(const Range& own, int start) {
  return {(u32)load_near(place_of_marks(own, start)), (u32)load_near(place_of_marks(own, start) + 4)};
}

// Calls with the place of each bit in the part, and the bit.
template <typename Each>
__device__ __forceinline__ void each_of(u32 bits, const Range& own, int start, Each each) {
  for (; bits; bits &= bits - 1) each(start + (int)threadIdx.x % 32 * own.run + __ffs(bits) - 1, bits & -bits);
}

// The bin with the COUNT-th largest score, above which `above` others are.
struct Bin {
  int number;
  int above, above_before;    // scores above it, of all CTAs, and of those before this one
  int count, before;          // scores in it
};

// Counts scores by value, but those in the first bin: `least` is where the second begins. Where they are near, leaves marks
// of what it counts of the range's last piece.
__device__ __forceinline__ void count_by_value(const Part& part, const Range& own, const Bins& bins, int least,
                                               Marks& marks) {
  const auto count = [&](int score) {
    const int bin = bin_by_value(score, bins);
    if (bin > 0) add_near(COUNTS + bin * 4, 1);
  };
  if (part.are_near) {
    for (int start = own.first; start < own.end; start += own.piece()) {
      marks.within = reaching(own, start, least);
      each_of(marks.within, own, start, [&](int at, u32) { count(score_of(part, at)); });
    }
    return;
  }
  for (int first = 4 * threadIdx.x; first < part.count; first += AT_ONCE * 4 * THREADS) {
    Four scores[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (first + i * 4 * THREADS < part.count) scores[i] = four_of(part, first + i * 4 * THREADS);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (first + i * 4 * THREADS + j < part.count) count(scores[i].of[j]);
  }
}

// COUNTS are zeros the first time.
__device__ __forceinline__ Bin bin_with_bound(const Part& part, const Range& own_range, const Bins& bins, int least,
                                              const Bound& limits, const Bin& last, int times, int num_keys, u32 rank,
                                              Marks& marks) {
  const u32 counts = COUNTS + times % 2 * BINS * 4;
  if (bins.are_by_value) {
    count_by_value(part, own_range, bins, least, marks);
  } else {
    store_near(counts + threadIdx.x * 4, 0);
    __syncthreads();
    for (int i = threadIdx.x; i < part.count; i += THREADS) {
      const int score = score_of(part, i);
      if (side_of(score, limits) == 0) add_near(counts + bin_of(score, bins) * 4, 1);
    }
  }
  meet_cluster();
  int own = 0, own_before = 0;    // scores in the thread's bin
#pragma unroll
  for (int other = 0; other < CLUSTER; other++) {
    const int count = load_far(counts + threadIdx.x * 4, other);
    own += count;
    own_before += other < rank ? count : 0;
  }
  // And in those above it: of its warp, then of the warps behind.
  int more = sum_from(own), more_before = sum_from(own_before);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) {
    store_near(OF_WARPS + warp * 8, more);
    store_near(OF_WARPS + warp * 8 + 4, more_before);
  }
  __syncthreads();
  const bool is_behind = lane > warp && lane < WARPS;
  more += __reduce_add_sync(0xffffffff, is_behind ? load_near(OF_WARPS + lane * 8) : 0) + last.above - own;
  more_before += __reduce_add_sync(0xffffffff, is_behind ? load_near(OF_WARPS + lane * 8 + 4) : 0) - own_before;
  if (bins.are_by_value && threadIdx.x == 0) {
    own = num_keys - more;
    own_before = part.first - more_before;
  }
  if (more < COUNT && more + own >= COUNT) {
    const int found[5] = {(int)threadIdx.x, more, last.above_before + more_before, own, own_before};
#pragma unroll
    for (int i = 0; i < 5; i++) store_near(FOUND + i * 4, found[i]);
  }
  __syncthreads();
  return {load_near(FOUND), load_near(FOUND + 4), load_near(FOUND + 8), load_near(FOUND + 12), load_near(FOUND + 16)};
}

// Marks of a bin become marks of a bound in it.
__device__ __forceinline__ Marks marks_in_bin(const Part& part, const Range& own, int start, const Marks& of_bin, int bound) {
  Marks marks = {of_bin.above, 0};
  each_of(of_bin.within, own, start, [&](int at, u32 bit) {
    const int score = score_of(part, at);
    if (score > bound) marks.above |= bit;
    if (score == bound) marks.within |= bit;
  });
  return marks;
}

// The COUNT-th largest score, which is in this bin: all scores of the bin go to all CTAs. Leaves the marks of the range's
// last piece, and keeps those of the others. `are_counted`: `marks` are of what was counted from `least` on.
__device__ __forceinline__ Bound bound_in(const Part& part, const Range& own, const Bins& bins, int least,
                                          const Bound& limits, const Bin& bin, bool are_counted, Marks& marks) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 counted_last = marks.within;
  for (int start = own.first; start < own.end; start += own.piece()) {
    if (are_counted) {
      const u32 counted = start == own.last_piece() ? counted_last : reaching(own, start, least);
      marks = {0, 0};
      each_of(counted, own, start, [&](int at, u32 bit) {
        const int number = bin_by_value(score_of(part, at), bins);
        if (number > bin.number) marks.above |= bit;
        if (number == bin.number) marks.within |= bit;
      });
    } else {
      marks = marks_of(part, own, start, [&](int score) {
        const int side = side_of(score, limits), number = bin_of(score, bins);
        return side ? side : number > bin.number ? 1 : number == bin.number ? 0 : -1;
      });
    }
    if (part.keeps_marks && start < own.last_piece()) keep_marks(own, start, marks);
    each_of(marks.within, own, start, [&](int at, u32) {
      const int score = score_of(part, at);
      const u32 to = KEPT + (bin.before + take_near(TAKEN)) * 8;
#pragma unroll
      for (int other = 0; other < CLUSTER; other++) {
        store_far(to, other, score);
        store_far(to + 4, other, part.first + at);
      }
    });
  }
  __syncwarp();
  meet_cluster();
  for (int first = 0; first < bin.count; first += 32) {
    if (first + lane >= bin.count) continue;
    const u32 at = KEPT + (first + lane) * 8;
    const int score = load_near(at), place = load_near(at + 4);
    int larger = 0;
    for (int i = warp; i < bin.count; i += WARPS) {
      const int other = load_near(KEPT + i * 8), its_place = load_near(KEPT + i * 8 + 4);
      larger += other > score || (other == score && its_place < place);
    }
    add_near(RANKS + (first + lane) * 4, larger);
  }
  __syncthreads();
  const int wanted = COUNT - bin.above;
  const bool exists = threadIdx.x < bin.count;
  const int score = exists ? load_near(KEPT + threadIdx.x * 8) : LEAST;
  const int place = exists ? load_near(KEPT + threadIdx.x * 8 + 4) : 0;
  if (exists && load_near(RANKS + threadIdx.x * 4) == wanted - 1) store_near(FOUND, score);
  __syncthreads();
  const int bound = load_near(FOUND);
  const bool is_before = place < part.first, is_above = exists && score > bound, is_equal = exists && score == bound;
  const int counts[3] = {__popc(__ballot_sync(0xffffffff, is_above)),
                         __popc(__ballot_sync(0xffffffff, is_above && is_before)),
                         __popc(__ballot_sync(0xffffffff, is_equal && is_before))};
  if (lane == 0 && exists) {
#pragma unroll
    for (int i = 0; i < 3; i++) add_near(LARGER + i * 4, counts[i]);
  }
  __syncthreads();
  marks = marks_in_bin(part, own, own.last_piece(), marks, bound);
  if (part.keeps_marks) {
    for (int start = own.first; start < own.last_piece(); start += own.piece())
      keep_marks(own, start, marks_in_bin(part, own, start, kept_marks(own, start), bound));
  }
  return {bound, bound, wanted - load_near(LARGER), bin.above_before + load_near(LARGER + 4), load_near(LARGER + 8)};
}

__device__ __forceinline__ Bound bound_of(const Part& part, const Range& own, int num_keys, u32 rank, Marks& marks) {
  Bins bins = load_part(part, num_keys);
  Bound limits = {LEAST, MOST};
  Bin bin = {0, 0, 0, 0, 0};
  const int least = bins.are_by_value ? least_of(1, bins) : 0;
#pragma unroll 1
  for (int times = 0;; times++) {
    bin = bin_with_bound(part, own, bins, least, limits, bin, times, num_keys, rank, marks);
    const bool are_counted = bins.are_by_value && part.are_near && bin.number > 0;
    if (bin.count <= ROOM) return bound_in(part, own, bins, least, limits, bin, are_counted, marks);
    const int end = least_of(bin.number + 1, bins);
    limits.low = max(limits.low, least_of(bin.number, bins));
    limits.high = end == LEAST ? limits.high : min(limits.high, end - 1);
    if (limits.low == limits.high) break;    // so many are equal
    bins = bins_of(limits.low, limits.high, false);
  }
  meet_cluster();    // the others may still read this CTA's counts
  const Bound bound = {limits.low, limits.high, COUNT - bin.above, bin.above_before, bin.before};
  for (int start = part.keeps_marks ? own.first : own.last_piece(); start < own.end; start += own.piece()) {
    marks = marks_of(part, own, start, [&](int score) { return side_of(score, bound); });
    if (part.keeps_marks && start < own.last_piece()) keep_marks(own, start, marks);
  }
  return bound;
}

// `marks` are those of the range's last piece.
__device__ __forceinline__ void write_places(int* to, const Row& row, const Part& part, const Range& own,
                                             const Bound& bound, const Marks& marks) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, last = own.last_piece();
  const auto marks_from = [&](int start) {
    if (start == last) return marks;
    if (part.keeps_marks) return kept_marks(own, start);
    return marks_of(part, own, start, [&](int score) { return side_of(score, bound); });
  };
  int above = 0, equal = 0;
  for (int start = own.first; start < own.end; start += own.piece()) {
    const Marks found = marks_from(start);
    above += __popc(found.above);
    equal += __popc(found.within);
  }
  above = __reduce_add_sync(0xffffffff, above);
  equal = __reduce_add_sync(0xffffffff, equal);
  if (lane < 2) store_near(OF_WARPS + warp * 8 + lane * 4, lane ? equal : above);
  __syncthreads();
  const bool is_before = lane < warp;
  above = bound.above_before + __reduce_add_sync(0xffffffff, is_before ? load_near(OF_WARPS + lane * 8) : 0);
  equal = bound.equal_before + __reduce_add_sync(0xffffffff, is_before ? load_near(OF_WARPS + lane * 8 + 4) : 0);
  for (int start = own.first; start < own.end; start += own.piece()) {
    const Marks found = marks_from(start);
    // Both counts of a lane in one number: a piece has no more than 1,024 of each.
    const int both = __popc(found.above) | __popc(found.within) << 16, up_to = sum_up_to(both);
    int own_above = above + ((up_to - both) & 0xffff), own_equal = equal + ((up_to - both) >> 16);
    each_of(found.above | found.within, own, start, [&](int at, u32 bit) {
      const bool is_above = found.above & bit;
      if (is_above || own_equal < bound.wanted)
        to[own_above + min(own_equal, bound.wanted)] = row.kept + part.first + at;
      own_above += is_above;
      own_equal += !is_above;
    });
    const int all = __shfl_sync(0xffffffff, up_to, 31);
    above += all & 0xffff;
    equal += all >> 16;
  }
}

// What a CTA of the cluster does for a row that exists. `scores` are the row's.
__device__ __forceinline__ void pick_row(int* to, const Row& row, const int* scores, u32 rank) {
  if (row.num_keys <= COUNT) {
    write_all(to, row, rank);
    return;
  }
  const int each = up_to_four((row.num_keys + CLUSTER - 1) / CLUSTER), first = min((int)rank * each, row.num_keys);
  const int count = min(each, row.num_keys - first);
  const int of_thread = up_to_four((count + THREADS - 1) / THREADS), own = min(count, (int)threadIdx.x / 32 * 32 * of_thread);
  const Range range = {own, min(count, own + 32 * of_thread), max(4, min(32, of_thread))};
  const bool are_near = count <= NEAR;
  const Part part = {scores, first, count, are_near, !are_near && 8 * (count / range.run + 32) <= 4 * NEAR};
  Marks marks = {0, 0};
  const Bound bound = bound_of(part, range, row.num_keys, rank, marks);
  write_places(to, row, part, range, bound, marks);
}
