// What score.cu and pick.cu have in common: the rows of a selection, which are queries, and the scores of their keys.
//
// Defines:
//   BY_TOKEN                 a row is a token, and has room for scores of all slots of the page lists; else a row is a
//                            sequence with one query, and its scores stand where its slots are in those lists
//   COUNT, RATE, PAGE_SIZE   those of the op: keys that are selected, tokens of a key, keys of a page

#pragma once

struct Lists {
  const int *cu_seqlens, *kv_lens, *page_indices, *page_indptr, *page_start;
  int num_seqs, num_rows;
  i64 num_slots;
};

// Keys are counted from the first that is kept.
struct Row {
  int token;
  int num_keys;      // that it sees; 0 for padding, and -1 where it is no row: nothing is selected
  int old_keys;      // those that were written in earlier steps
  int kept;          // the number of the first
  int first_page;    // in the page lists
};

// Each lane's own row. All lanes of the warp ask.
__device__ __forceinline__ Row row_of(int row, const Lists& lists) {
  int seq = row;
#ifdef BY_TOKEN
  seq = 0;    // sequences that end before the token
  for (int first = 0; first < lists.num_seqs; first += 32) {
    const int own = first + threadIdx.x % 32;
    const int end = own < lists.num_seqs ? lists.cu_seqlens[own + 1] : 0x7fffffff;
#pragma unroll
    for (int lane = 0; lane < 32; lane++) seq += __shfl_sync(0xffffffff, end, lane) <= row;
  }
#endif
  if (row >= lists.num_rows) return {0, -1, 0, 0, 0};
  if (seq >= lists.num_seqs) return {row, 0, 0, 0, 0};
  const int start = lists.cu_seqlens[seq], end = lists.cu_seqlens[seq + 1], length = lists.kv_lens[seq];
  const int first_page = lists.page_indptr[seq], end_page = lists.page_indptr[seq + 1];
#ifdef BY_TOKEN
  const int token = row;
#else
  const int token = start;
  if (end - start != 1) return {0, -1, 0, 0, 0};
#endif
  Row found;
  found.token = token;
  found.kept = lists.page_start[seq] / RATE;
  found.num_keys = max(0, min((length - (end - token) + 1) / RATE - found.kept, (end_page - first_page) * PAGE_SIZE));
  found.old_keys = (length - (end - start)) / RATE - found.kept;
  found.first_page = first_page;
  return found;
}

// Where a row's scores begin.
__device__ __forceinline__ i64 place_of(const Row& row, const Lists& lists) {
#ifdef BY_TOKEN
  return row.token * lists.num_slots;
#else
  return (i64)row.first_page * PAGE_SIZE;
#endif
}

// A score is kept as an integer of the same order: -0 as 0, NaN above all.
__device__ __forceinline__ int in_order(float score) {
  const int bits = score == 0 ? 0 : __float_as_int(score);
  return score != score ? 0x7fffffff : bits ^ (bits >> 31 & 0x7fffffff);
}

__device__ __forceinline__ float value_of(int score) { return __int_as_float(score ^ (score >> 31 & 0x7fffffff)); }
