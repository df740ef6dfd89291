// Microbenchmarks of the processor's roofline limits, for `bench functions`. Each function does a known amount of work and returns it, for
// the caller to time; the instructions are those of the kernels.
#include "amx.h"
#include "int8_gemm.h"
#include "thread_pool.h"

namespace {

constexpr int CHAINS = 12;  // independent sums, more than an instruction's latency needs

// Runs `rounds` rounds of sum = step(sum) on all independent sums of each thread. Initial values are unknown to the compiler, so that it
// cannot merge the sums, and results are stored, so that it cannot drop them.
template <typename Number, typename V, typename Step>
void keep_busy(int64_t rounds, int threads, Step step) {
  for_each(threads, threads, [&](int64_t) {
    volatile int beginning = 0;
    V total[CHAINS];
    for (int i = 0; i < CHAINS; ++i) total[i] = V{} + Number(beginning);
    for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 12
      for (int i = 0; i < CHAINS; ++i) total[i] = step(total[i]);
    for (int i = 1; i < CHAINS; ++i) total[0] += total[i];
    volatile char sink[sizeof(V)];
    for (size_t i = 0; i < sizeof(V); ++i) sink[i] = reinterpret_cast<const char*>(total)[i];
    (void)sink;
  });
}

#ifdef HAS_AMX
// Tile steps on rows and weights in the first-level cache.
template <Numbers NUMBERS>
int64_t fill_tiles(int64_t steps, int threads) {
  for_each(threads, threads, [&](int64_t) {
    static const LastStep zeros{};
    alignas(64) char sums[TILE_ROWS * PANEL * 4];
    TileShape shape;
    shape.set(TILE_ROWS, TILE_BYTES);
    clear_sums(true);
    for (int64_t step = 0; step < steps; ++step)
      add_step<NUMBERS>(true, zeros.rows, TILE_BYTES, zeros.weights, zeros.weights + TILE_BYTES, PANEL * 4);
    store_sums(true, sums, PANEL * 4);
  });
  return steps * threads * TILE_ROWS * PANEL * (NUMBERS == Numbers::BFLOAT16 ? TILE_BYTES / 2 : TILE_BYTES) * 2;
}
#endif

}  // namespace

extern "C" {

// Reads `bytes` bytes, which should exceed the caches. Returns the number of bytes.
int64_t roofline_memory(const uint8_t* data, int64_t bytes, int threads) {
  constexpr int64_t STEP = 4 * REGISTER;
  int64_t steps = bytes / STEP;
  std::atomic<uint32_t> bits{0};
  for_each(threads, threads, [&](int64_t part) {
    lane_words seen[4] = {};
    for (int64_t step = steps * part / threads; step < steps * (part + 1) / threads; ++step) {
      const uint8_t* at = data + step * STEP;
      for (int64_t ahead = 0; ahead < STEP; ahead += 64) __builtin_prefetch(at + AHEAD + ahead);
      for (int i = 0; i < 4; ++i) seen[i] |= load<lane_words>(at + i * REGISTER);
    }
    lane_words all = seen[0] | seen[1] | seen[2] | seen[3];
    for (int i = 0; i < LANES; ++i) bits |= all[i];
  });
  volatile uint32_t sink = bits;
  (void)sink;
  return steps * STEP;
}

// float32 FMA. Returns the number of multiplications and additions.
int64_t roofline_float32(int64_t rounds, int threads) {
  volatile float factor = 0.5f, summand = 1.0f;
  lanes by = factor - lanes{}, plus = summand - lanes{};
  keep_busy<float, lanes>(rounds, threads, [=](lanes total) { return total * by + plus; });
  return rounds * threads * CHAINS * LANES * 2;
}

#ifdef HAS_BFLOAT16_DOT
// bfloat16 dot products. Returns the number of multiplications and additions.
int64_t roofline_dot(int64_t rounds, int threads) {
  volatile uint32_t pair = 0x3f803f80;
  lane_words one = pair - lane_words{};
  keep_busy<float, lanes>(rounds, threads, [=](lanes total) { return Dot::add(total, one, one); });
  return rounds * threads * CHAINS * LANES * 4;
}
#endif

#ifdef HAS_BYTE_DOT
// int8 dot products. Returns the number of multiplications and additions.
int64_t roofline_int8(int64_t rounds, int threads) {
  volatile uint32_t four = 0x01010101;
  lane_words one = four - lane_words{};
  keep_busy<int32_t, lane_ints>(rounds, threads, [=](lane_ints total) { return ByteDot::add(total, one, (lane_ints)one, 0); });
  return rounds * threads * CHAINS * LANES * 8;
}
#endif

#ifdef HAS_AMX
// AMX tile products. Returns the number of multiplications and additions.
int64_t roofline_amx(int64_t rounds, int threads) { return fill_tiles<Numbers::BFLOAT16>(rounds, threads); }
int64_t roofline_int8_amx(int64_t rounds, int threads) { return fill_tiles<Numbers::UNSIGNED_WEIGHTS>(rounds, threads); }
#endif

}  // extern "C"
