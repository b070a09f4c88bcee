// What the tensor cores of a warp group multiply (wgmma): 64 rows, and where they find elements in shared memory.
//
// Include half.cuh in front of it.

#pragma once

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

// Registers go from warps that copy to those that multiply, of blocks of three warp groups.
template <int left = 40>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(left)); }
template <int all = 232>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(all)); }

// What lies in registers is the tensor cores' from here on, and ours again where all but `left` batches are done.
__device__ __forceinline__ void let_products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_batch() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int left>
__device__ __forceinline__ void wait_for_batches() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

// What threads wrote to shared memory, or copied there by themselves, is there for the tensor cores from here on.
__device__ __forceinline__ void show_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Arrives at the barrier when all copies that this thread has asked for have come.
__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

#ifdef FLOAT16
#define GROUP_TYPES "f32.f16.f16"
#else
#define GROUP_TYPES "f32.bf16.bf16"
#endif
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D64(i) D16(i), D16(i + 16), D16(i + 32), D16(i + 48)
#define S8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define S16 S8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define S32 S16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define S64 S32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51" \
  ", %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define S128 S64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82" \
  ", %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103"    \
  ", %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121"     \
  ", %122, %123, %124, %125, %126, %127"
#define OF_REGISTERS(n, sums, a, b, p, t, ...)                                                                      \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " p ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16." GROUP_TYPES    \
               " {" sums "}, {" a "}, " b ", p, 1, 1, " t "; }"                                                     \
               : __VA_ARGS__ : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(w), "r"(adds), "n"(BY_ROW))
#define OF_MEMORY(n, sums, a, b, p, t, ...)                                                                         \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " p ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16." GROUP_TYPES    \
               " {" sums "}, " a ", " b ", p, 1, 1, 0, " t "; }"                                                    \
               : __VA_ARGS__ : "l"(x), "l"(w), "r"(adds), "n"(BY_ROW))

// sums[64 x N] (+)= x[64 x 16] * w[16 x N], by a warp group: its warps have 16 rows each, and of each eight columns a lane
// has two of row `lane / 4`, from lane % 4 * 2 on, then two of the row 8 below. x is in registers, or in shared memory
// as w is (`described`). There each column of w lies together, or BY_ROW each row. N is 16, 32, 64, 128 or 256.
template <int N, int BY_ROW = 0>
__device__ __forceinline__ void multiply_group(float* d, const u32 (&x)[4], u64 w, int adds) {
  const u32 a0 = x[0], a1 = x[1], a2 = x[2], a3 = x[3];
  if constexpr (N == 16) {
    OF_REGISTERS(16, S8, "%8, %9, %10, %11", "%12", "%13", "%14", D4(0), D4(4));
  } else if constexpr (N == 32) {
    OF_REGISTERS(32, S16, "%16, %17, %18, %19", "%20", "%21", "%22", D16(0));
  } else if constexpr (N == 64) {
    OF_REGISTERS(64, S32, "%32, %33, %34, %35", "%36", "%37", "%38", D16(0), D16(16));
  } else if constexpr (N == 128) {
    OF_REGISTERS(128, S64, "%64, %65, %66, %67", "%68", "%69", "%70", D64(0));
  } else {
    static_assert(N == 256, "there are instructions for so many columns");
    OF_REGISTERS(256, S128, "%128, %129, %130, %131", "%132", "%133", "%134", D64(0), D64(64));
  }
}

template <int N, int BY_ROW = 0>
__device__ __forceinline__ void multiply_group(float* d, u64 x, u64 w, int adds) {
  if constexpr (N == 16) {
    OF_MEMORY(16, S8, "%8", "%9", "%10", "%11", D4(0), D4(4));
  } else if constexpr (N == 32) {
    OF_MEMORY(32, S16, "%16", "%17", "%18", "%19", D16(0));
  } else if constexpr (N == 64) {
    OF_MEMORY(64, S32, "%32", "%33", "%34", "%35", D16(0), D16(16));
  } else if constexpr (N == 128) {
    OF_MEMORY(128, S64, "%64", "%65", "%66", "%67", D64(0));
  } else {
    static_assert(N == 256, "there are instructions for so many columns");
    OF_MEMORY(256, S128, "%128", "%129", "%130", "%131", D64(0), D64(64));
  }
}

#define OF_FLOAT8(n, sums, a, b, p, ...)                                                                            \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " p ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3"   \
               " {" sums "}, " a ", " b ", p, 1, 1; }"                                                              \
               : __VA_ARGS__ : "l"(x), "l"(w), "r"(adds))

// The same of 32 float8_e4m3fn of each row and column, which take as many bytes. N is 16, 32, 64 or 128.
template <int N>
__device__ __forceinline__ void multiply_group_float8(float* d, u64 x, u64 w, int adds) {
  if constexpr (N == 16) {
    OF_FLOAT8(16, S8, "%8", "%9", "%10", D4(0), D4(4));
  } else if constexpr (N == 32) {
    OF_FLOAT8(32, S16, "%16", "%17", "%18", D16(0));
  } else if constexpr (N == 64) {
    OF_FLOAT8(64, S32, "%32", "%33", "%34", D16(0), D16(16));
  } else {
    static_assert(N == 128, "there are instructions for so many columns");
    OF_FLOAT8(128, S64, "%64", "%65", "%66", D64(0));
  }
}

// --- blocks of elements ----------------------------------------------------------------------------------------------

// 64 rows of 128 bytes, of which the 16 bytes with number i stand at i ^ row % 8, so that the same ones of eight rows are
// in different banks. A block begins at a multiple of 1,024.
constexpr u32 BLOCK_BYTES = 64 * 128;

__device__ __forceinline__ u32 place_in_block(int row, int piece) { return row * 128 + (piece ^ row % 8) * 16; }

// Rows of blocks, for `multiply_group`: 16 of their elements from `address` on, or BY_ROW 16 rows of them, and their
// columns, of which 64 are a block's and the next ones `apart` bytes behind.
__device__ __forceinline__ u64 described(u32 address, u32 apart = 16) {
  return (u64)(address >> 4 & 0x3fff) | (u64)(apart >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
