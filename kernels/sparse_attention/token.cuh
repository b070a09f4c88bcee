// What attend.cu and attend_groups.cu have in common in front of their products: a token's queries, the keys that it sees,
// and the entries that are selected for it.
//
// Defines: those of attend.cu. Include half.cuh in front of it.

#pragma once

constexpr int TILE = 64;                               // entries
constexpr int WIDTH = LATENT + ROPE;
constexpr int PIECES = WIDTH / 8;                      // of 16 bytes, of a key
constexpr int MULTIPLYING = 256;                       // threads
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float FACTOR = SCALE * LOG2_E;
constexpr float NONE = -3e38f;                         // the score of an entry that is no key of the token

#ifdef SINKS_FLOAT32
typedef float Sink;
#else
typedef Element Sink;
#endif

// --- what PTX has and C++ has not ------------------------------------------------------------------------------------

struct Piece { u32 words[4]; };

__device__ __forceinline__ float widened(float value) { return value; }

// 16 bytes, of which `bytes` are read, 0 or 16; the others are zeros.
__device__ __forceinline__ void copy_piece(u32 to, const Element* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void store_piece(u32 to, const Piece& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.words[0]), "r"(x.words[1]), "r"(x.words[2]),
               "r"(x.words[3]) : "memory");
}

// --- entries ---------------------------------------------------------------------------------------------------------

struct Lists {
  const int *cu_seqlens, *kv_lens, *page_indices, *page_indptr, *page_start;
};

// Keys are counted from the first that is kept.
struct Seen {
  const int* pages;    // there is one, whatever it says, where the token sees no key
  int start, count;    // the number of the first, and how many the token sees
};

__device__ __forceinline__ Seen seen_by(int token, int num_seqs, const Lists& lists) {
  int seq = 0;    // sequences that end before the token; padding belongs to one more, without keys
  for (int first = 0; first < num_seqs; first += 32) {
    const int b = first + threadIdx.x % 32;
    seq += __popc(__ballot_sync(0xffffffff, b < num_seqs && lists.cu_seqlens[min(b, num_seqs - 1) + 1] <= token));
  }
  if (seq >= num_seqs) return {lists.cu_seqlens, 0, 0};
  const int start = lists.page_start[seq], first_page = lists.page_indptr[seq], end_page = lists.page_indptr[seq + 1];
  const int visible = lists.kv_lens[seq] - start - (lists.cu_seqlens[seq + 1] - token) + 1;
  const int count = min(visible, (end_page - first_page) * PAGE_SIZE);
  return {count > 0 ? lists.page_indices + first_page : lists.cu_seqlens, start, count};
}

struct Cache {
  const Element* rows;
  i64 stride_p, stride_s;
};

// A key of the token, -1 where an entry is none, and its page, which is loaded and not looked at.
struct Key {
  int number, page;
};

__device__ __forceinline__ Key key_of(int entry, const Seen& seen) {
  const int number = entry - seen.start;
  const bool is_seen = number >= 0 && number < seen.count;
  return {is_seen ? number : -1, seen.pages[is_seen ? number / PAGE_SIZE : 0]};
}

// Of an entry that is no key, some row.
__device__ __forceinline__ const Element* row_of(const Key& key, const Cache& cache) {
  return cache.rows + (key.number < 0 ? 0 : key.page * cache.stride_p + key.number % PAGE_SIZE * cache.stride_s);
}

// A warp has OWN entries of each tile: its first lanes have one each. -1 if the lane has none.
template <int OWN>
__device__ __forceinline__ int entry_of(const int* selected, i64 stride, int tile, int end, int warp) {
  const int lane = threadIdx.x % 32, at = tile * TILE + warp * OWN + lane;
  const bool exists = lane < OWN && tile < end && at < COUNT;
  return exists ? selected[at * stride] : -1;
}

// --- queries ---------------------------------------------------------------------------------------------------------

struct Given {
  const Element *latent, *rope;    // of the CTA's first row; the latents lie side by side
  i64 stride_h, stride_d;          // of the rope part
};

// By the threads that multiply; `place` says of a row and one of its PIECES where it goes.
template <typename Place>
__device__ __forceinline__ void load_queries(const Given& given, int num_rows, Place place) {
  const bool in_pieces = given.stride_d == 1 && ((u64)given.rope | (u64)(2 * given.stride_h)) % 16 == 0;
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * PIECES; i += MULTIPLYING) {
    const int row = i / PIECES, piece = i % PIECES;
    const bool is_latent = piece < LATENT / 8;
    const Element* from = is_latent ? given.latent + row * LATENT + piece * 8
                                    : given.rope + row * given.stride_h + (piece * 8 - LATENT) * given.stride_d;
    const u32 at = place(row, piece);
    if (row < num_rows && (is_latent || in_pieces)) {
      copy_piece(at, from, 16);
      continue;
    }
    Piece found = {0, 0, 0, 0};
    if (row < num_rows) {
#pragma unroll
      for (int j = 0; j < 4; j++)
        found.words[j] = from[2 * j * given.stride_d] | (u32)from[(2 * j + 1) * given.stride_d] << 16;
    }
    store_piece(at, found);
  }
  end_group_of_copies();
}
