// What kernels take from warp_group.cuh, on a CPU: products of a warp group, warp by warp, 16 of its 64 rows each. Those of
// 16 bits are made when they are asked for, whatever is waited for.
//
// Include it behind what has `lane()`, `at(address, bytes)`, `__syncwarp()`, and `given_by_warp(x)`: what each lane of the
// warp gives, until the next `__syncwarp()`.

#pragma once

#include <map>

// Where an element is of an operand that is described as PTX says (matrix descriptors): of k the number `k`, of the others
// `n`. It takes so many bytes.
static u32 place_of_element(u64 operand, bool by_row, int n, int k, int size) {
  const u32 begin = (operand & 0x3fff) << 4, leading = (operand >> 16 & 0x3fff) << 4, eight = (operand >> 32 & 0x3fff) << 4;
  u32 from;
  if (operand >> 62 == 0) {
    CHECK(!by_row);
    from = begin + k / 8 * leading + n / 8 * eight + n % 8 * 16 + k % 8 * 2;
  } else {
    CHECK(operand >> 62 == 1);
    from = by_row ? begin + n / 64 * leading + n % 64 * 2 + k / 8 * eight + k % 8 * 128
                  : begin + n / 8 * eight + n % 8 * 128 + k * size;
    from ^= (from >> 7 & 7) << 4;
  }
  return from;
}
static float element_at(u64 operand, bool by_row, int n, int k) {
  u16 found;
  memcpy(&found, at(place_of_element(operand, by_row, n, k, 2), 2), 2);
  return widened(found);
}

template <typename Row>
static void multiply_rows(float* d, Row x, u64 w, int adds, int columns, bool by_row) {
  for (int i = 0; i < columns / 2; i++) {
    const int row = lane() / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
    float sum = adds ? d[i] : 0;
    for (int k = 0; k < 16; k++) sum += x(row, k) * element_at(w, by_row, column, k);
    d[i] = sum;
  }
}

template <int N, int BY_ROW = 0>
static void multiply_group(float* d, const u32 (&x)[4], u64 w, int adds) {
  const auto given = given_by_warp(x);
  const auto of_x = [&](int row, int k) {    // a pair of neighbouring k is a register
    return widened((u16)(given(row % 8 * 4 + k % 8 / 2)[row / 8 + k / 8 * 2] >> k % 2 * 16));
  };
  multiply_rows(d, of_x, w, adds, N, BY_ROW);
  __syncwarp();
}
template <int N, int BY_ROW = 0>
static void multiply_group(float* d, u64 x, u64 w, int adds) {
  const int first = threadIdx.x / 32 % 4 * 16;
  multiply_rows(d, [&](int row, int k) { return element_at(x, false, first + row, k); }, w, adds, N, BY_ROW);
  __syncwarp();
}

inline void let_products_begin() {}

#ifdef FLOAT8_PRODUCTS    // and there is of_float8
// Those of float8 are made when they are waited for, of what is in shared memory then; until then there is NaN.
struct Float8Product { float* d; u64 x, w; int adds, columns; };
static std::map<int, std::vector<std::vector<Float8Product>>> asked_for;    // by each thread, in batches
static void make(const Float8Product& product) {
  const auto [d, x, w, adds, columns] = product;
  const auto at_place = [](u64 operand, int n, int k) {
    return of_float8(*at(place_of_element(operand, false, n, k, 1), 1));
  };
  const int first = threadIdx.x / 32 % 4 * 16;
  for (int i = 0; i < columns / 2; i++) {
    const int row = first + lane() / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
    float sum = adds ? d[i] : 0;
    for (int k = 0; k < 32; k++) sum += at_place(x, row, k) * at_place(w, column, k);
    d[i] = sum;
  }
}
template <int N>
static void multiply_group_float8(float* d, u64 x, u64 w, int adds) {
  auto& batches = asked_for[fibers::running];
  if (batches.empty()) batches.emplace_back();
  batches.back().push_back({d, x, w, adds, N});
  if (!adds) std::fill(d, d + N / 2, NAN);
}
inline void end_batch() { asked_for[fibers::running].emplace_back(); }
template <int left>
static void wait_for_batches() {
  auto& batches = asked_for[fibers::running];
  CHECK(batches.back().empty());
  while (batches.size() > left + 1) {
    for (const Float8Product& each : batches.front()) make(each);
    batches.erase(batches.begin());
  }
  __syncwarp();
}
#else
inline void end_batch() {}
template <int left>
inline void wait_for_batches() {}
#endif

inline void show_to_tensor_cores() {}
template <int = 40>
inline void give_registers() {}
template <int = 232>
inline void take_registers() {}
