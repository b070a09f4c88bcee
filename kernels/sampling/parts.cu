// What ranks tell each other to draw tokens, each of which has the logits of a part of the vocabulary. Their GPUs write
// each other's memory, as in kernels/collectives/peers.cu.
//
// On the way each word is a u64: the word, and 1 above it. Whoever takes it makes it 0 again; so any bits can be sent.
//
// scanned: every rank sends what its programs found of each row, every step. Its places are two halves, used in turn.
// drawn: for rows that are drawn, the best scores, or lists of tokens; and the logits of rows that need all, one after
//     another. Its places need no halves: a rank writes to them again in the next step's `drawn`, after `scanned` of
//     that step, in which it had words of all ranks, which had ended this step by then.
//
// Defines: RANK, RANKS; SIZE tokens, COLUMNS of a rank's logits; WIDE: they are float32, else of 16 bits; and from
// limits.py SPLITS, OWN_GROUPS, PASSES, CAPACITY, KEYS, PLAN.
//
// `most_rows` are those of the memory, `splits` a rank's programs for a row. `calls` has the counter, and one word more:
// not 0, words are polled a few times and no longer, and what is drawn is worthless. Whoever waits `limit` ns ends with
// an error.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#ifdef WIDE
typedef u32 Element;
constexpr int TOGETHER = 1;           // elements of a word
#else
typedef unsigned short Element;
constexpr int TOGETHER = 2;
#endif

constexpr int OPEN = 1, SHARED = 2, LISTED = 3;    // kinds of rows; 0: the token is known
constexpr u32 TURN = 1 << 16, BLOCKS = 32;         // BLOCKS: of `drawn`, at most
constexpr u32 SCAN_WORDS = SPLITS / RANKS * (3 + OWN_GROUPS);    // of a row, at most
constexpr u32 LIST_WORDS = 1 + 2 * CAPACITY;
constexpr u32 ROW_WORDS = (COLUMNS + TOGETHER - 1) / TOGETHER;

#define PEERS u64 *p0, u64 *p1, u64 *p2, u64 *p3, u64 *p4, u64 *p5, u64 *p6, u64 *p7
#define LISTED_PEERS {p0, p1, p2, p3, p4, p5, p6, p7}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ void put(u64* at, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" :: "l"(at), "l"(value) : "memory");
}

__device__ __forceinline__ u64 seen(const u64* at) {
  u64 found;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(found) : "l"(at) : "memory");
  return found;
}

struct Patience { const volatile u32* stop; u64 limit; };

// The word that arrives at a place of this rank, which is empty afterwards.
__device__ __forceinline__ u32 taken(u64* at, Patience patience) {
  u64 found = seen(at), began = 0;
  for (u32 polls = 1; found == 0; polls++) {
    if (polls % 256 == 0) {
      if (began == 0) began = nanoseconds();
      if (*patience.stop) return 0;
      if (nanoseconds() - began > patience.limit) asm volatile("trap;");
    }
    found = seen(at);
  }
  put(at, 0);
  return (u32)found;
}

// Gives this rank's word to all others, at the same place of each.
__device__ __forceinline__ void tell(u64* const (&peers)[8], u64 place, u32 word) {
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++)
    if (rank != RANK) put(peers[rank] + place, (u64)1 << 32 | word);
}

extern "C" __global__ void __launch_bounds__(256) scanned(
    u32* tops, u32* least, u32* places, u32* maxima, u32 splits, u32 most_rows, u32* calls, u64 limit, PEERS) {
  wait_for_previous();
  u64* const peers[8] = LISTED_PEERS;
  const Patience patience = {calls + 1, limit};
  u32 counted;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(counted) : "l"(calls) : "memory");
  const u64 row = blockIdx.x, slot = (u64)most_rows * SCAN_WORDS, half = counted / TURN % 2 * RANKS * slot;
  const u32 words = splits * (3 + OWN_GROUPS);

  const auto at = [&](u32 rank, u32 word) {
    const u64 first = row * SPLITS + rank * splits;
    if (word >= 3 * splits) return maxima + first * OWN_GROUPS + (word - 3 * splits);
    return (word < splits ? tops : word < 2 * splits ? least : places) + first + word % splits;
  };
  for (u32 word = threadIdx.x; word < words; word += blockDim.x)
    tell(peers, half + RANK * slot + row * SCAN_WORDS + word, *at(RANK, word));
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++)
    if (rank != RANK)
      for (u32 word = threadIdx.x; word < words; word += blockDim.x)
        *at(rank, word) = taken(peers[RANK] + half + rank * slot + row * SCAN_WORDS + word, patience);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(calls, blockIdx.x == 0 ? TURN - (gridDim.x - 1) : 1);
}

extern "C" __global__ void __launch_bounds__(256) drawn(
    u32* scores, u32* tokens, u32* plan, u32* keys, const Element* logits, i64 stride, Element* whole, u32 rows,
    u32 splits, u32 most_rows, u32* calls, u64 limit, PEERS) {
  wait_for_previous();
  __shared__ u32 counts[RANKS];
  u64* const peers[8] = LISTED_PEERS;
  const Patience patience = {calls + 1, limit};
  const u64 lists = 2 * RANKS * (u64)most_rows * SCAN_WORDS, slot = (u64)most_rows * LIST_WORDS;
  const u64 whole_rows = lists + RANKS * slot;

  const auto scored = [&](u64 row, u32 rank, u32 word) {
    return (word < splits ? scores : tokens) + row * PASSES * SPLITS + rank * splits + word % splits;
  };
  for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const u32 kind = plan[row * PLAN], count = plan[row * PLAN + 1];
    const u64 to = lists + RANK * slot + row * LIST_WORDS;
    if (kind == OPEN)
      for (u32 word = threadIdx.x; word < 2 * splits; word += blockDim.x) tell(peers, to + word, *scored(row, RANK, word));
    if (kind == LISTED) {
      if (threadIdx.x == 0) tell(peers, to, count);
      for (u32 word = threadIdx.x; word < 2 * min(count, CAPACITY); word += blockDim.x)
        tell(peers, to + 1 + word, keys[2 * (row * KEYS + CAPACITY) + word]);
    }
  }
  for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const u32 kind = plan[row * PLAN];
    u64* const from = peers[RANK] + lists + row * LIST_WORDS;
    if (kind == OPEN)
#pragma unroll
      for (int rank = 0; rank < RANKS; rank++)
        if (rank != RANK)
          for (u32 word = threadIdx.x; word < 2 * splits; word += blockDim.x)
            *scored(row, rank, word) = taken(from + rank * slot + word, patience);
    if (kind != LISTED) continue;
    if (threadIdx.x < RANKS)
      counts[threadIdx.x] = threadIdx.x == RANK ? plan[row * PLAN + 1] : taken(from + threadIdx.x * slot, patience);
    __syncthreads();
    u32 first = 0;    // of a rank's entries in the common list; none lies beyond CAPACITY
    for (int rank = 0; rank < RANKS; rank++) {
      const u32 listed = min(counts[rank], CAPACITY);
      for (u32 word = threadIdx.x; word < 2 * listed; word += blockDim.x) {
        const u32 entry = rank == RANK ? keys[2 * (row * KEYS + CAPACITY) + word]
                                       : taken(from + rank * slot + 1 + word, patience);
        if (2 * first + word < 2 * CAPACITY) keys[2 * row * KEYS + 2 * first + word] = entry;
      }
      first += counts[rank];
    }
    __syncthreads();
    if (threadIdx.x == 0) plan[row * PLAN + 1] = first;
  }
  __syncthreads();
  u32 turn = 0;
  for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const u32 kind = plan[row * PLAN];
    if (kind != SHARED && !(kind == LISTED && plan[row * PLAN + 1] > CAPACITY)) continue;
    const u64 place = whole_rows + (blockIdx.x * 2 + turn++ % 2) * RANKS * (u64)ROW_WORDS;
    const auto write = [&](u32 rank, u32 word, u32 value) {
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        const u32 column = word * TOGETHER + i;
        if (column < COLUMNS && (u64)rank * COLUMNS + column < SIZE)
          whole[row * SIZE + (u64)rank * COLUMNS + column] = (Element)(value >> 16 * i);
      }
    };
    for (u32 word = threadIdx.x; word < ROW_WORDS; word += blockDim.x) {
      u32 value = 0;
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
        if (word * TOGETHER + i < COLUMNS) value |= (u32)logits[(i64)row * stride + word * TOGETHER + i] << 16 * i;
      tell(peers, place + (u64)RANK * ROW_WORDS + word, value);
      write(RANK, word, value);
    }
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++)
      if (rank != RANK)
        for (u32 word = threadIdx.x; word < ROW_WORDS; word += blockDim.x)
          write(rank, word, taken(peers[RANK] + place + (u64)rank * ROW_WORDS + word, patience));
    __threadfence_system();    // places are empty before another rank can know that this one is done with the row
    __syncthreads();
  }
}
