// stream_linear: y[m, n] = sum over k of x[m, k] * w[n, k], for 1 to 8 rows of x, as fast as memory gives the weights.
//
// The weights lie as a checkpoint has them, w[outputs, inputs] in row-major order. 16 rows of w are a tile, and the
// CTAs, one to an SM, share the tiles out in runs. In a CTA
//
//   - one thread of a producer warp copies pieces of rows into a ring in shared memory, far ahead of those who read it;
//   - one more warp brings the pieces of x;
//   - eight warps multiply: mma.m16n8k16 with the weights as its 16 rows and the rows of x as its 8 columns. Each warp
//     takes every eighth run of 32 k, whatever the pieces are, into two sums; the 16 sums are added in one order.
//
// So a row of y does not depend on the other rows of x, nor on how many there are, nor on the grid, bit for bit.
//
// Programmatic dependent launch: the kernel lets the next one start at once, and waits for the one in front before it
// reads x or the residual, or writes y. Weights and bias must not be written by a kernel in front of it: the ring is
// filled before the wait, which is where the time between two kernels goes otherwise.
//
// Defines:
//   FLOAT16          elements are float16; else bfloat16
//   BIAS             bias[outputs] is added before y is rounded
//   RESIDUAL         residual[m, n] is added to the rounded product, and the sum rounded; it may be y
//   GATE=f           f is silu, gelu or gelu_tanh; y[m, n] = f(a) * b, where a is the rounded product with row n of the
//                    first half of w, and b that with row n of the second; y has half as many columns as w has rows
//   PASS=n           so many tiles share one reading of x; 1 where all of x stays in shared memory
//   UNROLL=n         so many steps of the inner loop in a row
//
// inputs must be a multiple of 32, w aligned to 16 bytes; x may have any strides, and lies best in rows aligned to 16
// bytes. The arguments from `tiles_each` on are the plan: how tiles are shared out, the pieces, what shared memory has.

#include "half.cuh"

constexpr int TILE = 16;              // rows of w in a tile
constexpr int ROWS = 8;               // rows of x at most
constexpr int WARPS = 8;              // that multiply
constexpr int STEP = 32;              // k that a warp takes at a time
constexpr int TURN = STEP * WARPS;    // k after which it is the same warp's turn: pieces are multiples of it
constexpr int W_WARP = WARPS, X_WARP = WARPS + 1;
constexpr int THREADS = 32 * (WARPS + 2);
constexpr int MAX_STAGES = 12;        // pieces of 16 rows in the ring
constexpr int MAX_X_SLOTS = 8;        // pieces of x in shared memory
constexpr int PAD = 16;               // bytes after a piece, so that ldmatrix finds its 8 rows in different banks

#ifndef PASS
#define PASS 1
#endif
#ifndef UNROLL
#define UNROLL 4
#endif

#ifdef GATE
constexpr int HALVES = 2;             // rows 0 to 7 of a tile are gates, rows 8 to 15 values
#else
constexpr int HALVES = 1;
#endif
constexpr int TILE_COLUMNS = TILE / HALVES;    // columns of y that a tile makes

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}

// True in one thread of the warp; unlike a comparison with a lane's number, it leaves the code behind it uniform.
__device__ __forceinline__ bool elected() {
  u32 chosen;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
  return chosen;
}

__device__ __forceinline__ u64 read_once_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_once(u32 to, const Element* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

__device__ __forceinline__ void copy(u32 to, const Element* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void store_shared(u32 to, Element value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(value) : "memory");
}

__device__ __forceinline__ Element rounded(float value) {
  Element narrow;
#ifdef FLOAT16
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
#endif
  return narrow;
}

// The warp that arrives goes on; those that sync wait until all threads of the block are here.
__device__ __forceinline__ void arrive_at_start() { asm volatile("bar.arrive 2, %0;" ::"n"(THREADS) : "memory"); }

__device__ __forceinline__ void sync_at_start() { asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory"); }

__device__ __forceinline__ void sync_multiplying_warps() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
}

// --- activations ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float silu(float a) { return a / (1.0f + __expf(-a)); }
__device__ __forceinline__ float gelu(float a) { return 0.5f * a * (1.0f + erff(a * 0.7071067811865476f)); }
__device__ __forceinline__ float gelu_tanh(float a) {
  return 0.5f * a * (1.0f + tanhf(0.7978845608028654f * (a + 0.044715f * a * a * a)));
}

// --- what a CTA does ------------------------------------------------------------------------------------------------

// How it goes through w and x, the same in all CTAs but for their tiles: from `Plan` in records.py.
struct Plan {
  int first, end;         // the tiles of this CTA
  int piece, pieces;      // k of a piece of a row, the last one may be shorter; pieces of a row
  int pitch;              // bytes from a row's piece to the next row's in shared memory
  int x_slots, stages;    // pieces of x and of w in shared memory
  bool keeps_x;           // each piece of x has a slot of its own

  __device__ int length(int index, int inputs) const { return min(piece, inputs - index * piece); }
};

// A place in a ring: whoever walks it meets each barrier in one phase after the other.
struct Place {
  int at;
  u32 parity;

  __device__ __forceinline__ void advance(int length) {
    if (++at == length) {
      at = 0;
      parity ^= 1;
    }
  }
};

// One thread: the pieces of w, in the order in which they are multiplied. It waits for nothing but room in the ring.
__device__ __forceinline__ void produce_weights(
    const Plan& plan, const Element* w, int columns, int inputs, u32 ring, u32 full, u32 empty) {
  const u64 policy = read_once_policy();
  Place place = {0, 1};    // the first round finds the ring empty
  for (int start = plan.first; start < plan.end; start += PASS)
    for (int index = 0; index < plan.pieces; index++)
      for (int tile = start; tile < min(start + PASS, plan.end); tile++) {
        const int column = tile * TILE_COLUMNS, present = min(TILE_COLUMNS, columns - column);
        const u32 bytes = plan.length(index, inputs) * sizeof(Element), barrier = full + place.at * 8;
        u32 to = ring + place.at * TILE * plan.pitch;
        barrier_wait(empty + place.at * 8, place.parity);
        barrier_expect(barrier, bytes * present * HALVES);
#pragma unroll 1
        for (int half = 0; half < HALVES; half++) {
          const Element* from = w + ((i64)half * columns + column) * inputs + index * plan.piece;
          if (present == TILE_COLUMNS) {    // addresses are added up: to compute each anew takes longer than its copy
#pragma unroll
            for (int row = 0; row < TILE_COLUMNS; row++) {
              copy_once(to, from, bytes, barrier, policy);
              to += plan.pitch;
              from += inputs;
            }
          } else {
#pragma unroll 1
            for (int row = 0; row < present; row++)
              copy_once(to + row * plan.pitch, from + (i64)row * inputs, bytes, barrier, policy);
            to += TILE_COLUMNS * plan.pitch;
          }
        }
        place.advance(plan.stages);
      }
}

// One warp: the pieces of x, once if they are kept, else once a pass.
__device__ __forceinline__ void produce_x(
    const Plan& plan, const Element* x, i64 row_stride, i64 stride, int rows, int inputs, u32 slots, u32 full,
    u32 empty) {
  const int lane = threadIdx.x % 32;
  const bool copies = stride == 1 && (u64)x % 16 == 0 && (rows == 1 || row_stride % 8 == 0);
  Place place = {0, 1};
  for (int start = plan.first; start < plan.end; start += PASS) {
    for (int index = 0; index < plan.pieces; index++) {
      const int begin = index * plan.piece, length = plan.length(index, inputs);
      const u32 barrier = full + place.at * 8, to = slots + place.at * rows * plan.pitch;
      barrier_wait(empty + place.at * 8, place.parity);
      if (copies) {
        if (elected()) {
          barrier_expect(barrier, rows * length * sizeof(Element));
          const Element* from = x + begin;
          u32 to_row = to;
#pragma unroll
          for (int row = 0; row < ROWS; row++)
            if (row < rows) {
              copy(to_row, from, length * sizeof(Element), barrier);
              to_row += plan.pitch;
              from += row_stride;
            }
        }
      } else {
#pragma unroll 1
        for (int row = 0; row < rows; row++)
#pragma unroll 2
          for (int k = lane; k < length; k += 32)
            store_shared(to + row * plan.pitch + k * sizeof(Element), x[row * row_stride + (begin + k) * stride]);
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
      }
      __syncwarp();
      place.advance(plan.x_slots);
    }
    if (plan.keeps_x) return;
  }
}

// A warp's part of a tile's product with a piece of x: of each run of TURN, its STEP.
__device__ __forceinline__ void multiply_piece(float (&sums)[2][4], u32 w_rows, u32 x_rows, int length) {
#pragma unroll UNROLL
  for (int k = 0; k < length; k += TURN) {
    u32 a[4], b[4];
    load_matrices(b, x_rows + k * sizeof(Element));
    load_matrices(a, w_rows + k * sizeof(Element));
    multiply_add(sums[0], a, b[0], b[1]);
    load_matrices(a, w_rows + (k + STEP / 2) * sizeof(Element));
    multiply_add(sums[1], a, b[2], b[3]);
  }
}

typedef float Partials[WARPS][TILE][ROWS];

// What lies in front of the ring.
struct alignas(128) Head {
  u64 w_full[MAX_STAGES], w_empty[MAX_STAGES], x_full[MAX_X_SLOTS], x_empty[MAX_X_SLOTS];
  Partials partials;
};
static_assert(sizeof(Head) == 4480, "as records.py has it");

// The sum over the warps of row `row` of a tile with row `m` of x.
__device__ __forceinline__ float summed(const Partials& partials, int row, int m) {
  float sum = partials[0][row][m];
#pragma unroll
  for (int warp = 1; warp < WARPS; warp++) sum += partials[warp][row][m];
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) stream_linear(
    Element* y, const Element* x, const Element* w, const Element* bias, const Element* residual, i64 x_row_stride,
    i64 x_stride, i64 residual_row_stride, i64 num_rows, i64 num_outputs, i64 num_inputs, i64 tiles_each,
    i64 tiles_more, i64 piece, i64 pieces, i64 stages, i64 x_slots) {
  extern __shared__ __align__(128) unsigned char memory[];
  Head& head = *(Head*)memory;
  let_next_kernel_start();
  const int rows = (int)num_rows, columns = (int)num_outputs / HALVES, inputs = (int)num_inputs;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  Plan plan;
  plan.first = (int)tiles_each * (int)blockIdx.x + min((int)blockIdx.x, (int)tiles_more);
  plan.end = plan.first + (int)tiles_each + ((int)blockIdx.x < (int)tiles_more);    // some have one more
  plan.piece = (int)piece, plan.pieces = (int)pieces, plan.pitch = plan.piece * (int)sizeof(Element) + PAD;
  plan.x_slots = (int)x_slots, plan.stages = (int)stages;
  plan.keeps_x = plan.x_slots == plan.pieces;
  const u32 ring = shared_address(memory + sizeof(Head)), slots = ring + plan.stages * TILE * plan.pitch;
  if (warp == W_WARP) {
    if (lane < plan.stages) {
      barrier_init(shared_address(&head.w_full[lane]), 1);
      barrier_init(shared_address(&head.w_empty[lane]), WARPS);
    }
    barrier_init_fence();
    __syncwarp();
    arrive_at_start();
    if (elected())
      produce_weights(plan, w, columns, inputs, ring, shared_address(head.w_full), shared_address(head.w_empty));
    return;
  }
  if (warp == X_WARP) {
    if (lane < plan.x_slots) {
      barrier_init(shared_address(&head.x_full[lane]), 1);
      barrier_init(shared_address(&head.x_empty[lane]), WARPS);
    }
    barrier_init_fence();
    __syncwarp();
  }
  sync_at_start();
  wait_for_kernel_in_front();
  if (warp == X_WARP) {
    produce_x(plan, x, x_row_stride, x_stride, rows, inputs, slots, shared_address(head.x_full),
              shared_address(head.x_empty));
    return;
  }

  const int own_row = threadIdx.x % TILE_COLUMNS, own_m = threadIdx.x / TILE_COLUMNS;    // what it writes of a tile
  // Where the lane points ldmatrix to: of w 16 rows x 16 k, of x 8 rows x 32 k; rows that x has not are its last.
  const u32 w_lane = (lane % 16) * plan.pitch + (warp * STEP + lane / 16 * 8) * sizeof(Element);
  const u32 x_lane = min(lane % 8, rows - 1) * plan.pitch + (warp * STEP + lane / 8 * 8) * sizeof(Element);
  Place w_place = {0, 0}, x_place = {0, 0};
  for (int start = plan.first; start < plan.end; start += PASS) {
    const int count = min(PASS, plan.end - start);
    float sums[PASS][2][4] = {};
    Element biases[PASS][HALVES] = {};    // asked for early, as the residual: nothing would hide it at the end
#ifdef RESIDUAL
    Element residuals[PASS] = {};
#endif
#pragma unroll
    for (int i = 0; i < PASS; i++) {
      const int column = (start + i) * TILE_COLUMNS + own_row;
      if (i < count && own_m < rows && column < columns) {
#ifdef BIAS
        for (int half = 0; half < HALVES; half++) biases[i][half] = bias[half * columns + column];
#endif
#ifdef RESIDUAL
        residuals[i] = residual[own_m * residual_row_stride + column];
#endif
      }
    }
    for (int index = 0; index < plan.pieces; index++) {
      // Each warp's own steps in the piece; the last piece may be too short for some of the warps.
      const int length = plan.length(index, inputs) - warp * STEP;
      barrier_wait(shared_address(&head.x_full[x_place.at]), x_place.parity);
      const u32 x_rows = slots + x_place.at * rows * plan.pitch + x_lane;
#pragma unroll
      for (int i = 0; i < PASS; i++)
        if (i < count) {
          barrier_wait(shared_address(&head.w_full[w_place.at]), w_place.parity);
          multiply_piece(sums[i], ring + w_place.at * TILE * plan.pitch + w_lane, x_rows, length);
          __syncwarp();
          if (lane == 0) barrier_arrive(shared_address(&head.w_empty[w_place.at]));
          w_place.advance(plan.stages);
        }
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&head.x_empty[x_place.at]));
      x_place.advance(plan.x_slots);
      if (plan.keeps_x) x_place.parity = 0;    // what is kept stays in its first phase
    }
#pragma unroll
    for (int i = 0; i < PASS; i++)
      if (i < count) {
        sync_multiplying_warps();    // the tile before has been read
#pragma unroll
        for (int j = 0; j < 4; j++)
          head.partials[warp][lane / 4 + j / 2 * 8][lane % 4 * 2 + j % 2] = sums[i][0][j] + sums[i][1][j];
        sync_multiplying_warps();
        const int column = (start + i) * TILE_COLUMNS + own_row;
        if (own_m < rows && column < columns) {
          float value = summed(head.partials, own_row, own_m) + widened(biases[i][0]);
#ifdef GATE
          const float factor = summed(head.partials, own_row + TILE_COLUMNS, own_m) + widened(biases[i][1]);
          value = GATE(widened(rounded(value))) * widened(rounded(factor));
#endif
#ifdef RESIDUAL
          value = widened(rounded(value)) + widened(residuals[i]);
#endif
          y[(i64)own_m * columns + column] = rounded(value);
        }
      }
  }
}
