// stream_linear: y[m, n] = sum over k of x[m, k] * w[n, k], for 1 to 8 rows of x, as fast as memory gives the weights.
//
// The weights lie as a checkpoint has them, w[outputs, inputs] in row-major order, in 16 bits or in few. 16 rows of w
// are a tile, and the CTAs, one to an SM, share the tiles out in runs. In a CTA
//
//   - one thread of a producer warp copies pieces of rows into a ring in shared memory, far ahead of those who read it,
//     but asks for no more at a time than keeps memory busy: what other kernels want of it would come after all that;
//   - one more warp brings the pieces of x, or with KEEPS_X those who multiply bring all of it;
//   - a team of warps multiplies: mma.m16n8k16 with the weights as its 16 rows and the rows of x as its 8 columns. They
//     take turns at runs of STEP k, whatever the pieces are, each into two sums, which are added in one order. Weights
//     in few bits become operands in registers: the same k of w and x meet, in whatever order. Of four bits more are
//     made of as many bytes, which takes more warps.
//
// Two TEAMS have every second tile each, and each its own ring and producer: of few bits a warp has little to do for a
// tile beside what each tile takes anyway, so that two teams get further than one that is twice as large.
//
// So a row of y does not depend on the other rows of x, nor on how many there are, nor on the grid, bit for bit.
//
// Programmatic dependent launch: the kernel lets the next one start at once, and waits for the one in front before it
// reads x or the residual, or writes y. Weights and bias must not be written by a kernel in front of it: it asks for
// the first weights before the wait, and for more as these come, until the ring is full. That is where the time between
// two kernels goes otherwise.
//
// Defines:
//   FLOAT16          elements are float16; else bfloat16
//   BIAS             bias[outputs] is added before y is rounded
//   RESIDUAL         residual[m, n] is added to the rounded product, and the sum rounded; it may be y
//   GATE=f           f is silu, gelu or gelu_tanh; y[m, n] = f(a) * b, where a is the rounded product with row n of the
//                    first half of w, and b that with row n of the second; y has half as many columns as w has rows
//   TEAMS=n          1 or 2; there are as many warps in all
//   PASS=n           so many tiles share one reading of x, a multiple of TEAMS; no more where all of x stays in shared
//                    memory
//   KEEPS_X          all of x stays in shared memory, each row in one piece, and the warps that multiply bring it: only
//                    where they prepare x, as for weights in four bits. Without it x may stay, too, in pieces that each
//                    have a slot
//   UNROLL=n         so many steps of the inner loop in a row
//   COPIES_ALONE     nothing is multiplied, and y is nothing: what the bytes and the order of kernels take is measured so
//
// and for weights in few bits (`Stored` in stream_plan.py):
//
//   FLOAT8           w is float8_e4m3fn
//   INT8             w is int8
//   PACKED4, PACKED8 w has 4 or 8 bits, neighbours in an int32, the first in the lowest; OFFSET=n is subtracted
//   POINTS           so is points[outputs / 8 or 4, groups], of neighbours along outputs, packed as w is
//   MXFP4            w is FP4, two in a byte, with scales of E8M0 for each 32
//   NVFP4            w is FP4 with scales of float8_e4m3fn for each 16, and whole[1], or of rows with WHOLE_ROWS, of
//                    WHOLE_BYTES (as SCALE_BYTES), which multiplies the sums, or DIVIDES them
//   X_FLOAT8         x is float8_e4m3fn, as w is, and has scales; X_SCALES=n: n apart from row to row, 1 or 0
//   STEP=n           the run of k, 128 if there is no other reason
//   GROUP=n          n neighbours in a row of w, a multiple of STEP, have a scale, scales[outputs / SCALED_ROWS, groups];
//                    so have those of x, if it is float8. Without it a row has one, or SCALED_ROWS rows together. Of
//                    four bits n may be a part of STEP, and a multiple of 32, but for NVFP4's 16
//   SCALED_ROWS=n    so many rows of w have the same scales: 1, or with GROUP a multiple of 16
//   SCALE_BYTES=n    of a scale of w: 4 for float32; 2, of the type of y, or float16 with SCALES_FLOAT16; 1 in FP4
//
// inputs must be a multiple of STEP, w aligned to 16 bytes, and so each row of scales with GROUP; x may have any strides,
// and lies best in rows aligned to 16 bytes. The arguments from `tiles_each` on are the plan: how tiles are shared out,
// the pieces, what shared memory has.

#include "half.cuh"
#include "few_bits.cuh"
#include "ring.cuh"

#if defined(FLOAT8) || defined(INT8) || defined(PACKED8)
#define IN_FEW_BITS
constexpr int BITS = 8;               // of a weight
#elif defined(PACKED4) || defined(MXFP4) || defined(NVFP4)
#define IN_FEW_BITS
#define IN_FOUR_BITS
constexpr int BITS = 4;
#if !defined(PACKED4)
#define IN_FP4
#endif
#else
constexpr int BITS = 16;
#endif

constexpr int TILE = 16;              // rows of w in a tile
constexpr int ROWS = 8;               // rows of x at most
#ifndef TEAMS
#define TEAMS 1
#endif
constexpr int WARPS = BITS == 4 ? 16 : 8;       // that multiply
constexpr int TEAM = WARPS / TEAMS;             // of a team
constexpr int BUFFERS = BITS == 4 ? 2 : 1;      // tiles whose sums are in shared memory: of two, warps wait once a tile
#ifndef STEP
#define STEP 32                       // k that a warp takes at a time
#endif
constexpr int TURN = STEP * TEAM;     // k after which it is the same warp's turn: pieces are multiples of it
constexpr int W_WARP = WARPS, X_WARP = WARPS + TEAMS;
#ifdef KEEPS_X
constexpr int THREADS = 32 * X_WARP;
#else
constexpr int THREADS = 32 * (X_WARP + 1);
#endif
constexpr int MAX_STAGES = 12;        // pieces of 16 rows in the rings
constexpr int MAX_X_SLOTS = 8;        // pieces of x in shared memory
constexpr int PAD = 16;               // bytes after a piece, so that ldmatrix finds its 8 rows in different banks

#ifdef X_FLOAT8
typedef unsigned char Input;          // an element of x
#else
typedef Element Input;
#endif
// After a piece of x, of which lanes read as many k at a time as a word of w has: 8 rows in different banks then, too.
constexpr int X_PAD = sizeof(Input) * 128 / BITS;
#ifdef GROUP
constexpr int SCALE_ROWS = SCALED_ROWS == 1 ? TILE : 1;    // rows of scales of a tile
constexpr int SCALE_PAD = SCALE_BYTES == 1 ? PAD : 0;      // bytes after a row of many, as after a piece of w
#ifdef POINTS
constexpr int POINT_ROWS = TILE * BITS / 32;               // and of words of points
#else
constexpr int POINT_ROWS = 0;
#endif
#endif

#ifndef PASS
#define PASS TEAMS
#endif
constexpr int OWN = PASS / TEAMS;     // a team's tiles that share one reading of x
#ifndef UNROLL
#if defined(FLOAT8) && defined(GROUP) && !defined(X_FLOAT8)
#define UNROLL 2    // with the scales of four there are not enough registers
#elif !defined(IN_FOUR_BITS)
#define UNROLL 4
#elif PASS == TEAMS && !defined(NVFP4) && !(defined(MXFP4) && defined(FLOAT16))
#define UNROLL 2    // a thread of sixteen warps has 96 registers, and there are others to wait for
#else
#define UNROLL 1
#endif
#endif

#ifdef GATE
constexpr int HALVES = 2;             // rows 0 to 7 of a tile are gates, rows 8 to 15 values
#else
constexpr int HALVES = 1;
#endif
constexpr int TILE_COLUMNS = TILE / HALVES;    // columns of y that a tile makes

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

__device__ __forceinline__ void store_shared(u32 to, u16 value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(value) : "memory");
}

// Sixteen bytes of x, which a block reads once: .cg leaves the L1 cache out. What the kernel in front has written is
// visible after the wait for it.
__device__ __forceinline__ void load_input(u32 (&to)[4], const void* from) {
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from) : "memory");
}

__device__ __forceinline__ void store_shared(u32 to, unsigned char value) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"((u32)value) : "memory");
}

__device__ __forceinline__ void store_shared(u32 to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

// Neighbouring words.
__device__ __forceinline__ void load_words(u32 (&to)[1], u32 from) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_words(u32 (&to)[2], u32 from) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_words(u32 (&to)[4], u32 from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void store_words(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// What the thread has written to shared memory comes before copies that overwrite it.
__device__ __forceinline__ void fence_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The warp that arrives goes on; those that sync wait until all threads of the block are here.
__device__ __forceinline__ void arrive_at_start() { asm volatile("bar.arrive 2, %0;" ::"n"(THREADS) : "memory"); }

__device__ __forceinline__ void sync_at_start() { asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory"); }

// Computed by now, rather than where it is first used.
__device__ __forceinline__ void compute_now(u32& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void compute_now(const void*& value) { asm volatile("" : "+l"(value)); }

__device__ __forceinline__ void sync_multiplying_warps() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
}

__device__ __forceinline__ void sync_team(int team) {
  asm volatile("bar.sync %0, %1;" ::"r"(3 + team), "n"(32 * TEAM) : "memory");
}

// --- activations ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float silu(float a) { return a / (1.0f + __expf(-a)); }
__device__ __forceinline__ float gelu(float a) { return 0.5f * a * (1.0f + erff(a * 0.7071067811865476f)); }
__device__ __forceinline__ float gelu_tanh(float a) {
  return 0.5f * a * (1.0f + tanhf(0.7978845608028654f * (a + 0.044715f * a * a * a)));
}

// --- what a CTA does ------------------------------------------------------------------------------------------------

// How it goes through w and x, the same in all CTAs but for their tiles: from `Plan` in stream_plan.py.
struct Plan {
  int first, end;         // the tiles of this CTA
  int piece, pieces;      // k of a piece of a row, the last one may be shorter; pieces of a row
  int x_width;            // k of a row of x that lie together: of a piece, with KEEPS_X all
  int pitch, x_pitch;     // bytes from a row's piece to the next row's in shared memory, of w and of x
  int x_slots, stages;    // pieces of x and, of a team, of w in shared memory
  int in_flight;          // of these, how many a team has asked for at most, and not got
#ifndef KEEPS_X
  bool has_all_slots;     // each piece of x has a slot of its own, and stays there
#endif
  int scale_slots;        // tiles of a team whose scales are there, if they lie in groups

  __device__ int length(int index, int inputs) const { return min(piece, inputs - index * piece); }
};

#ifdef GROUP
// Of a tile, and its points after them.
__device__ __forceinline__ int bytes_of_scales(int groups) {
  return SCALE_ROWS * (groups * SCALE_BYTES + SCALE_PAD) + POINT_ROWS * groups * 4;
}
#endif

// A place after the next `length` is the first again; there are as many as a team's tiles in a pass, or no second pass.
__device__ __forceinline__ int wrapped(int place, int length) { return place < length ? place : place - length; }

// One thread: the pieces of w for a team, in the order in which they are multiplied. It waits for room in the ring, and
// for pieces that are on their way.
__device__ __forceinline__ void produce_weights(
    const Plan& plan, int team, const unsigned char* w, const unsigned char* scales, const u32* points, int columns,
    int inputs, u32 ring, u32 scale_slots, u32 full, u32 empty) {
  const u64 policy = read_once_policy();
  const int row_bytes = inputs / 8 * BITS, piece_bytes = plan.piece / 8 * BITS;
  Place place = {0, 1};    // the first round finds the ring empty
  Place arriving = {0, 0};
  int asked = 0;
#ifdef GROUP
  int scale_slot = 0;
#endif
  for (int start = plan.first; start < plan.end; start += PASS) {
    for (int index = 0; index < plan.pieces; index++)
      for (int i = 0; i < OWN && start + i * TEAMS + team < plan.end; i++) {
        const int column = (start + i * TEAMS + team) * TILE_COLUMNS, present = min(TILE_COLUMNS, columns - column);
        const u32 bytes = plan.length(index, inputs) / 8 * BITS, barrier = full + place.at * 8;
        u32 to = ring + place.at * TILE * plan.pitch;
        if (asked < plan.in_flight) {
          asked++;
        } else {
          barrier_wait(full + arriving.at * 8, arriving.parity);
          arriving.advance(plan.stages);
        }
        barrier_wait(empty + place.at * 8, place.parity);
#ifdef GROUP    // all of a tile's scales come with its first piece
        const int groups = inputs / GROUP, point_rows = min(POINT_ROWS, (present * BITS + 31) / 32);
        const u32 scale_bytes = groups * min(SCALE_ROWS, present) * SCALE_BYTES, point_bytes = groups * point_rows * 4;
        const u32 slot = scale_slots + wrapped(scale_slot + i, plan.scale_slots) * bytes_of_scales(groups);
        barrier_expect(barrier, bytes * present + (index == 0 ? scale_bytes + point_bytes : 0));
        if (index == 0 && SCALE_PAD == 0) {
          copy(slot, scales + (i64)(column / SCALED_ROWS) * groups * SCALE_BYTES, scale_bytes, barrier);
#ifdef POINTS
          const u32* from = points + (i64)column * BITS / 32 * groups;
          copy(slot + SCALE_ROWS * groups * SCALE_BYTES, from, point_bytes, barrier);
#endif
        }
#else
        barrier_expect(barrier, bytes * present * HALVES);
#endif
#pragma unroll 1
        for (int half = 0; half < HALVES; half++) {
          const unsigned char* from = w + ((i64)half * columns + column) * row_bytes + index * piece_bytes;
          if (present == TILE_COLUMNS) {    // addresses are added up: to compute each anew takes longer than its copy
#pragma unroll
            for (int row = 0; row < TILE_COLUMNS; row++) {
              copy_once(to, from, bytes, barrier, policy);
              to += plan.pitch;
              from += row_bytes;
            }
          } else {
#pragma unroll 1
            for (int row = 0; row < present; row++)
              copy_once(to + row * plan.pitch, from + (i64)row * row_bytes, bytes, barrier, policy);
            to += TILE_COLUMNS * plan.pitch;
          }
        }
#ifdef IN_FP4    // after the weights, which are more
        if (index == 0) {
          const unsigned char* from = scales + (i64)column * groups;
          u32 to_row = slot;
#pragma unroll 4
          for (int row = 0; row < present; row++) {
            copy(to_row, from, groups, barrier);
            to_row += groups + SCALE_PAD;
            from += groups;
          }
        }
#endif
        place.advance(plan.stages);
      }
#ifdef GROUP
    scale_slot = wrapped(scale_slot + OWN, plan.scale_slots);
#endif
  }
}

#ifndef KEEPS_X
// One warp: the pieces of x, once if each has a slot, else once a pass.
__device__ __forceinline__ void produce_x(
    const Plan& plan, const Input* x, i64 row_stride, i64 stride, int rows, int inputs, u32 slots, u32 full,
    u32 empty) {
  const int lane = threadIdx.x % 32;
  const bool copies = stride == 1 && (u64)x % 16 == 0 && (rows == 1 || row_stride * sizeof(Input) % 16 == 0);
  Place place = {0, 1};
  for (int start = plan.first; start < plan.end; start += PASS) {
    for (int index = 0; index < plan.pieces; index++) {
      const int begin = index * plan.piece, length = plan.length(index, inputs);
      const u32 barrier = full + place.at * 8, to = slots + place.at * rows * plan.x_pitch;
      barrier_wait(empty + place.at * 8, place.parity);
      if (copies) {
        if (elected()) {
          barrier_expect(barrier, rows * length * sizeof(Input));
          const Input* from = x + begin;
          u32 to_row = to;
#pragma unroll
          for (int row = 0; row < ROWS; row++)
            if (row < rows) {
              copy(to_row, from, length * sizeof(Input), barrier);
              to_row += plan.x_pitch;
              from += row_stride;
            }
        }
      } else {
#pragma unroll 1
        for (int row = 0; row < rows; row++)
#pragma unroll 2
          for (int k = lane; k < length; k += 32)
            store_shared(to + row * plan.x_pitch + k * sizeof(Input), x[row * row_stride + (begin + k) * stride]);
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
      }
      __syncwarp();
      place.advance(plan.x_slots);
    }
    if (plan.has_all_slots) return;
  }
}
#endif

#include "linear/stream_products.cuh"
#if defined(KEEPS_X) && !defined(PREPARES_X)
#error KEEPS_X is for an x that is prepared
#endif
#include "linear/stream_inputs.cuh"

typedef float Partials[WARPS][TILE][ROWS];

// What lies in front of the ring.
struct alignas(128) Head {
  u64 w_full[TEAMS][MAX_STAGES / TEAMS], w_empty[TEAMS][MAX_STAGES / TEAMS];
  u64 x_full[MAX_X_SLOTS], x_empty[MAX_X_SLOTS];
  Partials partials[BUFFERS];
};
static_assert(sizeof(Head) == 384 + 512 * WARPS * BUFFERS, "as stream_plan.py has it");

// The sum over the warps of a team, of which `warp` is the first, of row `row` of a tile with row `m` of x.
__device__ __forceinline__ float summed(const Partials& partials, int warp, int row, int m) {
  float sum = partials[warp][row][m];
#pragma unroll
  for (int i = 1; i < TEAM; i++) sum += partials[warp + i][row][m];
  return sum;
}

#if defined(IN_FEW_BITS) && (!defined(GROUP) || defined(NVFP4))
#define SCALES_SUMS    // those of tiles
#endif
#ifdef NVFP4
// What the sums of a row are multiplied with.
__device__ __forceinline__ float whole_scale(const void* whole, int row) {
#if WHOLE_BYTES == 4
  const float scale = ((const float*)whole)[WHOLE_ROWS * row];
#else
  const float scale = widened(((const Element*)whole)[WHOLE_ROWS * row]);
#endif
#ifdef DIVIDES
  return FP4_SUMS / scale;
#else
  return FP4_SUMS * scale;
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) stream_linear(
    Element* y, const Input* x, const unsigned char* w, const Element* bias, const Element* residual, i64 x_row_stride,
    i64 x_stride, i64 residual_row_stride, i64 num_rows, i64 num_outputs, i64 num_inputs, i64 tiles_each,
    i64 tiles_more, i64 piece, i64 pieces, i64 stages, i64 in_flight, i64 x_slots
#ifdef IN_FEW_BITS
    , i64 scale_slots, const unsigned char* scales, const float* x_scales, const u32* points, const void* whole
#define SCALES scales, points
#else
#define SCALES nullptr, nullptr
#endif
) {
  extern __shared__ __align__(128) unsigned char memory[];
  Head& head = *(Head*)memory;
  let_next_kernel_start();
  const int rows = (int)num_rows, columns = (int)num_outputs / HALVES, inputs = (int)num_inputs;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  Plan plan;
  plan.first = (int)tiles_each * (int)blockIdx.x + min((int)blockIdx.x, (int)tiles_more);
  plan.end = plan.first + (int)tiles_each + ((int)blockIdx.x < (int)tiles_more);    // some have one more
  plan.piece = (int)piece, plan.pieces = (int)pieces;
  plan.pitch = plan.piece / 8 * BITS + PAD;
#ifdef KEEPS_X
  plan.x_width = (inputs + TURN - 1) / TURN * TURN;
#else
  plan.x_width = plan.piece;
#endif
  plan.x_pitch = plan.x_width * (int)sizeof(Input) + X_PAD + bytes_of_x_sums(plan.x_width);
  plan.x_slots = (int)x_slots, plan.stages = (int)stages, plan.in_flight = (int)in_flight;
#ifndef KEEPS_X
  plan.has_all_slots = plan.x_slots == plan.pieces;
#endif
  const int team = warp < W_WARP ? warp / TEAM : min(warp - W_WARP, TEAMS - 1);
  const u32 rings = shared_address(memory + sizeof(Head)), of_ring = plan.stages * TILE * plan.pitch;
  const u32 ring = rings + team * of_ring, slots = rings + TEAMS * of_ring;
  const unsigned char* tile_scales = memory + sizeof(Head) + (slots - rings) + plan.x_slots * rows * plan.x_pitch;
  OfPiece of_piece = {};
#ifdef GROUP
  const int of_tile = bytes_of_scales(inputs / GROUP);
  plan.scale_slots = (int)scale_slots;
  float* own_x_scales = (float*)(tile_scales + TEAMS * plan.scale_slots * of_tile);
  tile_scales += team * plan.scale_slots * of_tile;
  of_piece.x_scales = own_x_scales, of_piece.groups = inputs / GROUP;
#endif
  const u32 full = shared_address(head.w_full[team]), empty = shared_address(head.w_empty[team]);
  if (warp >= W_WARP && warp < X_WARP) {
    if (lane < plan.stages) {
      barrier_init(full + lane * 8, 1);
      barrier_init(empty + lane * 8, TEAM);
    }
    barrier_init_fence();
    __syncwarp();
    arrive_at_start();
    if (elected())
      produce_weights(plan, team, w, SCALES, columns, inputs, ring, shared_address(tile_scales), full, empty);
    return;
  }
#ifndef KEEPS_X
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
#endif

  const int member = warp % TEAM;
  const int own_row = threadIdx.x % TILE_COLUMNS, own_m = threadIdx.x % (32 * TEAM) / TILE_COLUMNS;    // what it writes
  // Where the lane points ldmatrix to: of w 16 rows x 16 k, of x 8 rows x 32 k; rows that x has not are its last.
  u32 w_lane = (lane % 16) * plan.pitch + member * STEP / 8 * BITS + lane / 16 * 16;
#if defined(IN_FEW_BITS) && !defined(X_FLOAT8)    // no ldmatrix: the k of a word, of the row that the lane multiplies
  u32 x_lane = min(lane / 4, rows - 1) * plan.x_pitch + (member * STEP + lane % 4 * 32 / BITS) * sizeof(Input);
#else
  u32 x_lane = min(lane % 8, rows - 1) * plan.x_pitch + member * STEP * sizeof(Input) + lane / 8 * 16;
#endif
  u32 own_x_sums[2];
  for (int i = 0; i < 2; i++)
    own_x_sums[i] = x_sums_at(slots, min(lane % 4 * 2 + i, rows - 1), 0, plan.x_pitch, plan.x_width);
#ifdef KEEPS_X
  compute_now(w_lane), compute_now(x_lane), compute_now(own_x_sums[0]), compute_now(own_x_sums[1]);
  Keeper keeper(slots, x, x_row_stride, x_stride, rows, inputs, plan.x_pitch, plan.x_width);
  wait_for_kernel_in_front();
#ifndef COPIES_ALONE
  keeper.keep();
#endif
  sync_at_start();    // x has come, and the barriers of the rings are there
#elif defined(GROUP) && defined(X_FLOAT8)
  for (int i = threadIdx.x; i < rows * of_piece.groups; i += 32 * WARPS) own_x_scales[i] = x_scales[i];
  sync_multiplying_warps();
#endif
  Place w_place = {0, 0};
  [[maybe_unused]] Place x_place = {0, 0};
  int buffer = 0;
#ifdef GROUP
  int scale_slot = 0;
#endif
  for (int start = plan.first; start < plan.end; start += PASS) {
    float sums[OWN][2][4] = {};
    Element biases[OWN][HALVES] = {};    // asked for early, as others are: nothing would hide it at the end
#ifdef SCALES_SUMS
    float scale[OWN][HALVES] = {};
#endif
#ifdef RESIDUAL
    Element residuals[OWN] = {};
#endif
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int tile = start + i * TEAMS + team, column = tile * TILE_COLUMNS + own_row;
      if (tile < plan.end && own_m < rows && column < columns) {
#ifdef BIAS
        for (int half = 0; half < HALVES; half++) biases[i][half] = bias[half * columns + column];
#endif
#ifdef RESIDUAL
        residuals[i] = residual[own_m * residual_row_stride + column];
#endif
#if defined(NVFP4)
        for (int half = 0; half < HALVES; half++) scale[i][half] = whole_scale(whole, half * columns + column);
#elif defined(SCALES_SUMS)
        for (int half = 0; half < HALVES; half++) {
          scale[i][half] = scale_at(scales, (half * columns + column) / SCALED_ROWS);
#ifdef X_FLOAT8
          scale[i][half] *= x_scales[X_SCALES * own_m];
#endif
        }
#endif
      }
    }
    for (int index = 0; index < plan.pieces; index++) {
      // Each warp's own steps in the piece; the last piece may be too short for some of the warps.
      const int whole = plan.length(index, inputs), length = whole - member * STEP;
#ifdef KEEPS_X
      const u32 x_piece = slots + index * plan.piece * sizeof(Input), x_sums = index * plan.piece / SUMMED * 4;
#else
      const u32 x_sums = x_place.at * rows * plan.x_pitch, x_piece = slots + x_sums;
      barrier_wait(shared_address(&head.x_full[x_place.at]), x_place.parity);
      prepare_x(x_piece, rows, whole, plan.x_pitch, plan.x_width);
#endif
      for (int i = 0; i < 2; i++) of_piece.x_sums[i] = own_x_sums[i] + x_sums;
#pragma unroll
      for (int i = 0; i < OWN; i++)
        if (start + i * TEAMS + team < plan.end) {
          barrier_wait(full + w_place.at * 8, w_place.parity);
          const u32 w_rows = ring + w_place.at * TILE * plan.pitch + w_lane;
#ifdef GROUP
          of_piece.scales = tile_scales + wrapped(scale_slot + i, plan.scale_slots) * of_tile;
          of_piece.first = index * plan.piece;
#endif
#ifndef COPIES_ALONE
          multiply_piece(sums[i], w_rows, x_piece + x_lane, member * STEP, length, of_piece);
#endif
          __syncwarp();
          if (lane == 0) barrier_arrive(empty + w_place.at * 8);
          w_place.advance(plan.stages);
        }
#ifndef KEEPS_X
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&head.x_empty[x_place.at]));
      x_place.advance(plan.x_slots);
      if (plan.has_all_slots) x_place.parity = 0;    // what is kept stays in its first phase
#endif
    }
#ifdef GROUP
    scale_slot = wrapped(scale_slot + OWN, plan.scale_slots);
#endif
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int tile = start + i * TEAMS + team;
      if (tile < plan.end) {
        Partials& partials = head.partials[buffer];
        buffer = (buffer + 1) % BUFFERS;
        if (BUFFERS == 1) sync_team(team);    // the tile before has been read
#pragma unroll
        for (int j = 0; j < 4; j++)
          partials[warp][lane / 4 + j / 2 * 8][lane % 4 * 2 + j % 2] = sums[i][0][j] + sums[i][1][j];
        sync_team(team);
        const int column = tile * TILE_COLUMNS + own_row;
        if (own_m < rows && column < columns) {
          const auto product = [&](int half) {
            float sum = summed(partials, team * TEAM, own_row + half * TILE_COLUMNS, own_m) * SUMS_RAISED;
#ifdef SCALES_SUMS
            sum *= scale[i][half];
#endif
            return sum + widened(biases[i][half]);
          };
          float value = product(0);
#ifdef GATE
          const float factor = product(1);
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
}
