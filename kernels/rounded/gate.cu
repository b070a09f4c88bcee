// rounded_gate: the gate of a feed-forward layer, whose rows are rounded to float8_e4m3fn with one scale each.
//
// One multiprocessor takes 4 us for a row of 14,336 elements, whatever it computes them with: an exponential, two
// quotients and two roundings each. So a cluster of CTAs shares a row. Each thread keeps what it has computed in
// registers, and each warp sends its largest magnitude to all CTAs of the cluster, which count the bytes that come.
//
//   y[n]      = f(x[n]) * x[WIDTH + n], rounded to the type of x
//   scale     = largest |y| / 448
//   values[n] = y[n] / scale, or over 1 in place of 0, rounded to float8_e4m3fn
//
// Programmatic dependent launch: the kernel lets the next one start at once, and waits for the one in front.
//
// Defines:
//   FLOAT16                elements are float16; else bfloat16
//   GATE=f                 f is silu, gelu or gelu_tanh
//   WIDTH                  of the result, a multiple of 8
//   CLUSTER, WARPS         CTAs of a cluster, and their warps

#include "half.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int RUN = 8;                                           // neighbours that a thread takes together
constexpr int RUNS = WIDTH / RUN;
constexpr int AT_ONCE = CLUSTER * THREADS;                       // runs of a row that all threads have
constexpr int EACH = (RUNS + AT_ONCE - 1) / AT_ONCE;             // runs of a thread, at most
constexpr int PARTS = CLUSTER * WARPS;                           // warps that share a row
constexpr u32 INFINITE = 0x7f800000;

struct alignas(16) Run { u32 pairs[RUN / 2]; };    // one load

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

// A word to the shared memory of a CTA of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void send(u32 to, u32 rank, u32 word, u32 barrier) {
  asm volatile(
      "{ .reg .u32 far, at; mapa.shared::cluster.u32 far, %0, %1; mapa.shared::cluster.u32 at, %2, %1; "
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [far], %3, [at]; }" ::
          "r"(to), "r"(rank), "r"(barrier), "r"(word) : "memory");
}

__device__ __forceinline__ u32 load_near(u32 from) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}

// Two numbers as float8_e4m3fn, the largest of them in place of larger ones; the first is the lower byte.
__device__ __forceinline__ u32 rounded_to_float8(float first, float second) {
  u16 both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
  return both;
}

// --- elements --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float silu(float a) { return a * reciprocal(1.0f + __expf(-a)); }
__device__ __forceinline__ float gelu(float a) { return 0.5f * a * (1.0f + erff(a * 0.7071067811865476f)); }
__device__ __forceinline__ float gelu_tanh(float a) {
  return 0.5f * a * (1.0f + tanhf(0.7978845608028654f * (a + 0.044715f * a * a * a)));
}

// Neighbours in a row; rows that are no multiple of 16 bytes apart, or have gaps, are read one by one.
__device__ __forceinline__ Run load_run(const Element* row, i64 stride, bool is_aligned, int first) {
  if (is_aligned) return *(const Run*)(row + first);
  Run run;
#pragma unroll
  for (int i = 0; i < RUN / 2; i++)
    run.pairs[i] = row[(first + 2 * i) * stride] | (u32)row[(first + 2 * i + 1) * stride] << 16;
  return run;
}

// What the quotients of a row have in common: they are those of float32, rounded once, but for some below 2^-12, which
// float8_e4m3fn doesn't have. The reciprocal's error is made good by what remains, which is exact. Divisors are scaled,
// so that no number on the way is subnormal or infinite. Two signs are turned, so that -0 stays what it is.
struct Divisor {
  float size, negative_power, negative_near;
  __device__ __forceinline__ float quotient(float x) const {
    const float less = x * negative_power, first = less * negative_near;
    return fmaf(fmaf(size, first, less), negative_near, first);
  }
};

__device__ __forceinline__ Divisor divisor(float scale) {
  const float x = scale == 0 ? 1.0f : scale, power = x < 0x1p-60f ? 0x1p80f : x > 0x1p60f ? 0x1p-80f : 1.0f;
  if (x == __uint_as_float(INFINITE)) return {0.0f, -power, -0.0f};    // quotients are 0, of infinities NaN
  const float size = x * power, near = reciprocal(size);
  return {size, -power, -fmaf(fmaf(-size, near, 1.0f), near, near)};
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) rounded_gate(
    u64* values, float* scales, const Element* x, i64 inner, i64 x_stride_o, i64 x_stride_i, i64 x_stride_f) {
  extern __shared__ __align__(128) unsigned char memory[];    // the largest magnitude of each warp of the cluster
  __shared__ u64 all_given;
  let_next_kernel_start();
  const u32 barrier = shared_address(&all_given), largest_at = shared_address(memory);
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_expect(barrier, PARTS * 4);
  }
  __syncwarp();
  arrive_with_nothing_written();    // has begun, and has a barrier
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = blockIdx.x % CLUSTER;
  const i64 row = blockIdx.x / CLUSTER;
  const Element* gates = x + row / inner * x_stride_o + row % inner * x_stride_i;
  const Element* others = gates + WIDTH * x_stride_f;
  const bool is_aligned = x_stride_f == 1 && ((u64)gates | (u64)others) % 16 == 0;
  wait_for_kernel_in_front();

  Run gate[EACH], other[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int run = i * AT_ONCE + rank * THREADS + threadIdx.x;
    if (run < RUNS) {
      gate[i] = load_run(gates, x_stride_f, is_aligned, run * RUN);
      other[i] = load_run(others, x_stride_f, is_aligned, run * RUN);
    }
  }
  u32 largest = 0;    // magnitudes are in the order of their bits, and NaN is the largest
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int run = i * AT_ONCE + rank * THREADS + threadIdx.x;
    if (run >= RUNS) break;
#pragma unroll
    for (int j = 0; j < RUN / 2; j++) {
      const u32 a = gate[i].pairs[j], b = other[i].pairs[j];
      const u32 y = rounded(GATE(widened((Element)a)) * widened((Element)b),
                            GATE(widened((Element)(a >> 16))) * widened((Element)(b >> 16)));
      gate[i].pairs[j] = y;
      largest = max(largest, max(y & 0x7fff, y >> 16 & 0x7fff));
    }
  }
#pragma unroll
  for (int other_lane = 16; other_lane > 0; other_lane /= 2)
    largest = max(largest, __shfl_xor_sync(0xffffffff, largest, other_lane));
  wait_for_cluster();
  if (lane < CLUSTER) send(largest_at + (rank * WARPS + warp) * 4, lane, largest, barrier);
  barrier_wait(barrier);
  largest = 0;
#pragma unroll
  for (int part = 0; part < PARTS; part += 32)
    if (part + lane < PARTS) largest = max(largest, load_near(largest_at + (part + lane) * 4));
#pragma unroll
  for (int other_lane = 16; other_lane > 0; other_lane /= 2)
    largest = max(largest, __shfl_xor_sync(0xffffffff, largest, other_lane));

  const float scale = widened((Element)largest) / 448.0f;
  const Divisor by = divisor(scale);
  if (rank == 0 && threadIdx.x == 0) scales[row] = scale;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int run = i * AT_ONCE + rank * THREADS + threadIdx.x;
    if (run >= RUNS) break;
    u32 words[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < RUN / 2; j++) {
      const u32 y = gate[i].pairs[j];
      const u32 both = rounded_to_float8(by.quotient(widened((Element)y)), by.quotient(widened((Element)(y >> 16))));
      words[j / 2] |= both << 16 * (j % 2);
    }
    values[row * RUNS + run] = (u64)words[1] << 32 | words[0];
  }
}
