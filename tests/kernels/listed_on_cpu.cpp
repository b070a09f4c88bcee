// Runs kernels/quantised_linear/listed.cu on a CPU: "listed.inc" is its source without the functions that are PTX.

#define CLUSTER 1
#include "clusters_on_cpu.h"

inline u32 __byte_perm(u32 a, u32 b, u32 places) {
  const u64 both = (u64)b << 32 | a;
  u32 made = 0;
  for (int i = 0; i < 4; i++) made |= (u32)(both >> (places >> 4 * i & 7) * 8 & 255) << 8 * i;
  return made;
}
inline float widened_float16(u16 value) { return of_float16(value); }
inline u32 float16_of_float8(u32, int) { abort(); }
inline u32 masked_with(u32 bits, u32 mask, u32 others) { return (bits & mask) | others; }
inline u32 multiplied(u32 a, u32 b) {
  return rounded(widened((Element)a) * widened((Element)b), widened((Element)(a >> 16)) * widened((Element)(b >> 16)));
}
inline u32 subtracted(u32 a, u32 b) {
  return rounded(widened((Element)a) - widened((Element)b), widened((Element)(a >> 16)) - widened((Element)(b >> 16)));
}

template <typename T>
static T load_near(u32 from) {
  CHECK(from % sizeof(T) == 0);
  T found;
  memcpy((void*)&found, at(from, sizeof(T)), sizeof(T));
  return found;
}
template <typename T>
static void store_near(u32 to, const T& given) {
  CHECK(to % sizeof(T) == 0);
  memcpy(at(to, sizeof(T)), (const void*)&given, sizeof(T));
}
struct Four;
static Four load_four(u32 from);
static void store_four(u32 to, const Four& four);
static Four load_once(const u32* from);
inline void store_shared(u32 to, u16 value) { store_near(to, value); }
inline void store_shared(u32 to, float value) { store_near(to, value); }
inline float load_shared(u32 from) { return load_near<float>(from); }

#include "listed.inc"

static Four load_four(u32 from) { return load_near<Four>(from); }
static void store_four(u32 to, const Four& four) { store_near(to, four); }
static Four load_once(const u32* from) {
  CHECK((u64)from % sizeof(Four) == 0);
  return *(const Four*)from;
}

static const u64* arguments;
static void run_thread() {
  const u64* a = arguments;
  product_listed((Element*)a[0], (const Element*)a[1], (const u32*)a[2], (const u16*)a[3], (const u32*)a[4],
                 (const int*)a[5], (const Element*)a[6], a[7], a[8], a[9], a[10]);
}

extern "C" void run(const u64* args, const u32* grid, u32 num_threads, u32 shared_bytes, u32 late, const u64* changed,
                    u32 count) {
  arguments = args;
  run_clusters({grid, num_threads, shared_bytes, late, changed, count}, run_thread, [] {}, [] {});
}
