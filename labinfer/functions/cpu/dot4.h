// The inner loops of products in small whole numbers: 32 outputs for a few rows, 4 inputs at a time.
#pragma once

#include <utility>

#include "vectors.h"

namespace {

// total + the four products of each lane's unsigned bytes with the four signed bytes of x.
inline ints dot4(ints total, words weight, int32_t x) {
#ifdef __AVX512VNNI__
  return (ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weight, _mm512_set1_epi32(x));
#else
  for (int i = 0; i < 4; ++i) total += (ints)(weight >> (8 * i) & 0xff) * int32_t(int8_t(x >> (8 * i)));
  return total;
#endif
}

// Panels of 32 outputs: for each 4 inputs the 4 bytes of every output. out (ROWS, 32) = start of a row + its products.
template <int ROWS>
inline void panel_int8(const int8_t* x, int64_t stride, const uint8_t* weight, int64_t quads, const int32_t* start,
                       float* out, const Stream& stream) {
  ints low[ROWS], high[ROWS];
  for (int row = 0; row < ROWS; ++row) low[row] = high[row] = start[row] - ints{};
  for (int64_t quad = 0; quad < quads; ++quad) {
    const uint8_t* at = weight + quad * 4 * PANEL;
    words first = load<words>(at), second = load<words>(at + 4 * WIDTH);
    const char* ahead = stream.ahead(at);
    __builtin_prefetch(ahead);
    __builtin_prefetch(ahead + 64);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) {
      int32_t input = load<int32_t>(x + row * stride + 4 * quad);
      low[row] = dot4(low[row], first, input);
      high[row] = dot4(high[row], second, input);
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    store(out + row * PANEL, __builtin_convertvector(low[row], floats));
    store(out + row * PANEL + WIDTH, __builtin_convertvector(high[row], floats));
  }
}

// Panels of 32 outputs: for each group of inputs 32 scales in float16, with ZEROS 32 zero points in float16 as well, then
// the codes. Of 4 bits, for each 8 inputs 4 bytes of every output, the first four inputs in their low halves; of 8 bits,
// for each 4 inputs 4 bytes of every output. start (ROWS, groups): as above, for each group; with ZEROS minus the sum of
// the group's x. A group has a multiple of 8 inputs.
template <int ROWS, int BITS, bool ZEROS>
inline void panel_groups(const int8_t* x, int64_t stride, const uint8_t* weight, int64_t groups, int64_t group,
                         const int32_t* start, float* out, const Stream& stream) {
  for (int i = 0; i < 2 * ROWS; ++i) store(out + i * WIDTH, floats{});
  for (int64_t number = 0; number < groups; ++number) {
    floats low_scale = widen_float16(load<halves>(weight)), high_scale = widen_float16(load<halves>(weight + 2 * WIDTH));
    weight += 2 * PANEL;
    floats low_zero{}, high_zero{};
    if constexpr (ZEROS) {
      low_zero = widen_float16(load<halves>(weight)), high_zero = widen_float16(load<halves>(weight + 2 * WIDTH));
      weight += 2 * PANEL;
    }
    ints low[ROWS], high[ROWS];
    for (int row = 0; row < ROWS; ++row) low[row] = high[row] = (ZEROS ? 0 : start[row * groups + number]) - ints{};
    for (int64_t input = 0; input < group; input += 8, weight += BITS * PANEL) {
      words even_first = load<words>(weight), even_second = load<words>(weight + 4 * WIDTH), odd_first, odd_second;
      if constexpr (BITS == 4) {
        odd_first = even_first >> 4 & 0x0f0f0f0f, odd_second = even_second >> 4 & 0x0f0f0f0f;
        even_first &= 0x0f0f0f0f, even_second &= 0x0f0f0f0f;
      } else {
        odd_first = load<words>(weight + 4 * PANEL), odd_second = load<words>(weight + 4 * PANEL + 4 * WIDTH);
      }
      const char* ahead = stream.ahead(weight);
      for (int line = 0; line < BITS * PANEL; line += 64) __builtin_prefetch(ahead + line);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; ++row) {
        const int8_t* at = x + row * stride + input;
        int32_t even = load<int32_t>(at), odd = load<int32_t>(at + 4);
        low[row] = dot4(dot4(low[row], even_first, even), odd_first, odd);
        high[row] = dot4(dot4(high[row], even_second, even), odd_second, odd);
      }
    }
    x += group;
    for (int row = 0; row < ROWS; ++row) {
      floats low_sum = __builtin_convertvector(low[row], floats), high_sum = __builtin_convertvector(high[row], floats);
      if constexpr (ZEROS) {  // all of these are whole numbers below 2^24, so nothing is rounded
        float inputs = float(start[row * groups + number]);
        low_sum += low_zero * inputs, high_sum += high_zero * inputs;
      }
      float* to = out + row * PANEL;
      store(to, load<floats>(to) + low_sum * low_scale);
      store(to + WIDTH, load<floats>(to + WIDTH) + high_sum * high_scale);
    }
  }
}

}  // namespace
