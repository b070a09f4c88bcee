// What score.cu, pick.cuh and prompts.cu have in common: the rows of a selection, which are queries, and the scores of
// their keys.
//
// Defines:
//   BY_TOKEN                 a row is a token, and has room for scores of all slots of the page lists; else a row is a
//                            sequence with one query, and its scores stand where its slots are in those lists
//   COUNT, RATE, PAGE_SIZE   those of the op: keys that are selected, tokens of a key, keys of a page

#pragma once

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

// 16 bytes, if `wanted`.
__device__ __forceinline__ void copy_piece(u32 to, const Element* from, bool wanted) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16; }" ::
          "r"(to), "l"(from), "r"((u32)wanted) : "memory");
}

// The same of memory that is read once.
__device__ __forceinline__ void copy_piece_once(u32 to, const Element* from, bool wanted, u64 policy) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %2, 0; "
      "@p cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %3; }" ::
          "r"(to), "l"(from), "r"((u32)wanted), "l"(policy) : "memory");
}

// At least 0; NaN stays NaN.
__device__ __forceinline__ float positive(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// --- rows ------------------------------------------------------------------------------------------------------------

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

// What a step's lists say of a sequence.
struct Sequence {
  int start, end;              // tokens
  int length, kept;            // tokens with those of its cache, and the first of them that is kept
  int first_page, end_page;
};

// Of a sequence that exists.
__device__ __forceinline__ Sequence sequence_in(int seq, const Lists& lists) {
  return {lists.cu_seqlens[seq], lists.cu_seqlens[seq + 1], lists.kv_lens[seq], lists.page_start[seq],
          lists.page_indptr[seq], lists.page_indptr[seq + 1]};
}

__device__ __forceinline__ Row row_in(int row, const Sequence& seq) {
#ifdef BY_TOKEN
  const int token = row;
#else
  const int token = seq.start;
  if (seq.end - seq.start != 1) return {0, -1, 0, 0, 0};
#endif
  Row found;
  found.token = token;
  found.kept = seq.kept / RATE;
  found.num_keys = max(0, min((seq.length - (seq.end - token) + 1) / RATE - found.kept,
                              (seq.end_page - seq.first_page) * PAGE_SIZE));
  found.old_keys = (seq.length - (seq.end - seq.start)) / RATE - found.kept;
  found.first_page = seq.first_page;
  return found;
}

// Each lane's own row. All lanes of the warp ask; what they load is asked for at once.
__device__ __forceinline__ Row row_of(int row, const Lists& lists) {
#ifdef BY_TOKEN
  Row found = {row, row < lists.num_rows ? 0 : -1, 0, 0, 0};
  for (int first = 0; first < lists.num_seqs; first += 32) {
    const int own = first + threadIdx.x % 32;
    const Sequence seq = own < lists.num_seqs ? sequence_in(own, lists) : Sequence{0, 0x7fffffff, 0, 0, 0, 0};
    // Of the sequences, in ascending order, the first that ends behind the token; the last if none does.
    int at = 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) at += __shfl_sync(0xffffffff, seq.end, at + step - 1) <= row ? step : 0;
    const auto of_it = [&](int value) { return __shfl_sync(0xffffffff, value, at); };
    const Sequence its = {of_it(seq.start), of_it(seq.end),        of_it(seq.length),
                          of_it(seq.kept),  of_it(seq.first_page), of_it(seq.end_page)};
    if (row < lists.num_rows && row >= its.start && row < its.end && first + at < lists.num_seqs)
      found = row_in(row, its);
  }
  return found;
#else
  if (row >= lists.num_rows) return {0, -1, 0, 0, 0};
  return row_in(row, sequence_in(row, lists));
#endif
}

// Where a row's scores begin.
__device__ __forceinline__ i64 place_of(const Row& row, const Lists& lists) {
#ifdef BY_TOKEN
  return row.token * lists.num_slots;
#else
  return (i64)row.first_page * PAGE_SIZE;
#endif
}

// Of each lane and those before it.
__device__ __forceinline__ int sum_up_to(int own) {
#pragma unroll
  for (int far = 1; far < 32; far *= 2) {
    const int other = __shfl_up_sync(0xffffffff, own, far);
    if (threadIdx.x % 32 >= far) own += other;
  }
  return own;
}

// A score is kept as an integer of the same order: -0 as 0, NaN above all.
__device__ __forceinline__ int in_order(float score) {
  const int bits = score == 0 ? 0 : __float_as_int(score);
  return score != score ? 0x7fffffff : bits ^ (bits >> 31 & 0x7fffffff);
}

__device__ __forceinline__ float value_of(int score) { return __int_as_float(score ^ (score >> 31 & 0x7fffffff)); }
