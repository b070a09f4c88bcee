// What attend.cu and attend_groups.cu have in common behind their products: what CTAs found is joined and written.
//
// Defines: those of attend.cu. Include half.cuh and token.cuh in front of it.

#pragma once

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

__device__ __forceinline__ void store_word(u32 to, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

__device__ __forceinline__ u32 load_word(u32 from) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}

__device__ __forceinline__ void sync_multiplying_warps() {
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLYING) : "memory");
}

// Of a CTA of the cluster.
__device__ __forceinline__ u32 load_far(u32 from, u32 rank) {
  u32 x;
  asm volatile("{ .reg .u32 far; mapa.shared::cluster.u32 far, %1, %2; ld.shared::cluster.u32 %0, [far]; }"
               : "=r"(x) : "r"(from), "r"(rank) : "memory");
  return x;
}

__device__ __forceinline__ void store_far(u32 to, u32 rank, float a, float b) {
  asm volatile("{ .reg .u32 far; mapa.shared::cluster.u32 far, %0, %1; st.shared::cluster.v2.f32 [far], {%2, %3}; }" ::
                   "r"(to), "r"(rank), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ float2 load_pair(u32 from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

// What a thread wrote before it meets the others, they read afterwards.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// So that it is in the L2 cache when it is read.
__device__ __forceinline__ void ask_early(const Element* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// --- what a CTA found ------------------------------------------------------------------------------------------------

struct Results {
  Element* y;          // [T, HEADS, LATENT]
  float* partial;      // [T, HEADS, parts, LATENT]
  float* weights;      // [T, HEADS, parts, 2]: what weights are relative to, and their totals
  i64 num_parts, part;
};

// Of two neighbours of a row.
__device__ __forceinline__ void write(const Results& to, i64 row, int element, float a, float b, float total) {
#ifdef PARTS
  *(float2*)(to.partial + (row * to.num_parts + to.part) * LATENT + element) = {a, b};
#else
  const float factor = total == 0 ? 0 : 1 / total;
  *(u32*)(to.y + row * LATENT + element) = rounded(a * factor, b * factor);
#endif
}

// Where it is in shared memory: sums that the CTA joins, of each CTA; of each row, for the others, highest score and total
// weight; and what its sums are to be multiplied with, and the total weight of all.
struct Found {
  u32 joined, of_rows, fades, totals;
};

// By what all CTAs told of their rows; where they leave a part, its weight. A thread for each row.
__device__ __forceinline__ void join_rows(const Results& to, const Found& found, i64 row, int num_rows, u32 rank) {
  if (threadIdx.x >= ROWS) return;
  const u32 own = found.of_rows + threadIdx.x * 8;
  float highest[CLUSTER], totals[CLUSTER], most = NONE, total = 0;
#pragma unroll
  for (u32 other = 0; other < CLUSTER; other++) {
    highest[other] = __uint_as_float(load_far(own, other));
    totals[other] = __uint_as_float(load_far(own + 4, other));
  }
#pragma unroll
  for (u32 other = 0; other < CLUSTER; other++) most = max(most, highest[other]);
  const float reference = most == NONE ? 0 : most;
#pragma unroll
  for (u32 other = 0; other < CLUSTER; other++) {
    const float fade = power_of_2(highest[other] - reference);
    total += totals[other] * fade;
    if (other == rank) store_word(found.fades + threadIdx.x * 4, __float_as_uint(fade));
  }
  store_word(found.totals + threadIdx.x * 4, __float_as_uint(total));
#ifdef PARTS
  if (rank == 0 && threadIdx.x < num_rows) {
    float* at = to.weights + ((row + threadIdx.x) * to.num_parts + to.part) * 2;
    at[0] = most;
    at[1] = total;
  }
#endif
}

constexpr int SHARE = LATENT / CLUSTER, PITCH = SHARE + 8;    // a warp writes 8 rows together, each to other banks
constexpr u32 JOINED_BYTES = CLUSTER > 1 ? CLUSTER * ROWS * PITCH * 4 : 0;

// Each CTA joins as much of all latents, and is given that of the others. A warp's sums are of 16 rows for each TILE, from
// `first_row` of the CTA's on, and eights of elements, from `first` on. `row`: the number of the CTA's first. Threads that
// don't multiply call `leave` instead.
template <int TILES, int EIGHTS>
__device__ __forceinline__ void join(const float (&sums)[TILES][EIGHTS][4], int first_row, int first, const Results& to,
                                     const Found& found, i64 row, int num_rows, u32 rank) {
  const int lane = threadIdx.x % 32;
  meet_cluster();    // all have told of their rows, and nobody needs the ring
  join_rows(to, found, row, num_rows, rank);
  sync_multiplying_warps();
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int own = first_row + tile * 16 + lane / 4 + j * 8;
      const float fade = __uint_as_float(load_word(found.fades + own * 4));
      const float total = __uint_as_float(load_word(found.totals + own * 4));
#pragma unroll
      for (int i = 0; i < EIGHTS; i++) {
        const int element = first + i * 8 + lane % 4 * 2;
        const float a = sums[tile][i][2 * j] * fade, b = sums[tile][i][2 * j + 1] * fade;
        if (CLUSTER == 1) {
          if (own < num_rows) write(to, row + own, element, a, b, total);
        } else {
          store_far(found.joined + ((rank * ROWS + own) * PITCH + element % SHARE) * 4, element / SHARE, a, b);
        }
      }
    }
  if (CLUSTER == 1) return;
  meet_cluster();
#pragma unroll 2
  for (int i = threadIdx.x; i < num_rows * SHARE / 2; i += MULTIPLYING) {
    const int own = i / (SHARE / 2), element = i % (SHARE / 2) * 2;
    float a = 0, b = 0;
#pragma unroll
    for (int other = 0; other < CLUSTER; other++) {
      const float2 its = load_pair(found.joined + ((other * ROWS + own) * PITCH + element) * 4);
      a += its.x;
      b += its.y;
    }
    write(to, row + own, rank * SHARE + element, a, b, __uint_as_float(load_word(found.totals + own * 4)));
  }
}

__device__ __forceinline__ void leave() {
  meet_cluster();
  if (CLUSTER > 1) meet_cluster();
}

// The rows of the weight that make values, of some heads for each CTA.
__device__ __forceinline__ void ask_for_values(const Element* weight) {
  constexpr int ROWS_AT_ONCE = 8;
  const int cta = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z), ctas = gridDim.x * gridDim.y * gridDim.z;
  const int row = threadIdx.x * ROWS_AT_ONCE;
  if (row >= VALUE) return;
  for (int head = cta; head < HEADS; head += ctas)
    ask_early(weight + ((i64)head * (NOPE + VALUE) + NOPE + row) * LATENT, min(ROWS_AT_ONCE, VALUE - row) * LATENT * 2);
}
