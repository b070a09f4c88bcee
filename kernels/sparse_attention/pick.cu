// pick_keys: of each row's scores the places of the COUNT largest, as pick.cuh finds them. A cluster of CTAs takes a row.
//
// Programmatic dependent launch: the kernel lets the next one start at once, and reads the lists of the step before it
// waits for the kernel in front.
//
// Defines those of rows.cuh and pick.cuh, and TOGETHER: CTAs that a multiprocessor has at once.

#include "half.cuh"
#include "sparse_attention/rows.cuh"
constexpr u32 PICKS_AT = 0;
#include "sparse_attention/pick.cuh"

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, TOGETHER) pick_keys(
    int* out, const int* scores, const int* cu_seqlens, const int* kv_lens, const int* page_indptr,
    const int* page_start, i64 num_rows, i64 num_seqs, i64 num_slots) {
  let_next_kernel_start();
  const Lists lists = {cu_seqlens, kv_lens, nullptr, page_indptr, page_start, (int)num_seqs, (int)num_rows, num_slots};
  const Row row = row_of(blockIdx.y, lists);
  wait_for_kernel_in_front();
  if (row.num_keys < 0) return;
  pick_row(out + (i64)row.token * COUNT, row, scores + place_of(row, lists), blockIdx.x);
}
