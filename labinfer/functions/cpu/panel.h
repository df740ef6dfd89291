// The inner loop of linear and of attention over several query tokens.
#pragma once

#include <utility>

#include "vectors.h"

namespace {

// Weights are held in panels of 32 outputs: for each pair of inputs the 32 pairs of weights one after another, so that a
// step of the inner loop reads one straight stream. The last rows, fewer than a panel, stay as they were.

#ifdef __AVX512BF16__
template <int ROWS>
inline void panel(const bf16* x, int64_t stride, const bf16* weight, int64_t pairs, float* out) {
  __m512 low[ROWS], high[ROWS];
  for (int row = 0; row < ROWS; ++row) low[row] = high[row] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const bf16* at = weight + pair * 2 * PANEL;
    __m512bh first = (__m512bh)_mm512_loadu_si512(at), second = (__m512bh)_mm512_loadu_si512(at + PANEL);
    __builtin_prefetch((const char*)at + AHEAD);
    __builtin_prefetch((const char*)at + AHEAD + 64);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) {
      __m512bh input = (__m512bh)_mm512_set1_epi32(load<int32_t>(x + row * stride + 2 * pair));
      low[row] = _mm512_dpbf16_ps(low[row], first, input);
      high[row] = _mm512_dpbf16_ps(high[row], second, input);
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    _mm512_storeu_ps(out + row * PANEL, low[row]);
    _mm512_storeu_ps(out + row * PANEL + WIDTH, high[row]);
  }
}
constexpr int MAX_ROWS = 13;
#else
template <int ROWS>
inline void panel(const bf16* x, int64_t stride, const bf16* weight, int64_t pairs, float* out) {
  floats low[ROWS] = {}, high[ROWS] = {};
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const bf16* at = weight + pair * 2 * PANEL;
    words first = load<words>(at), second = load<words>(at + PANEL);
    __builtin_prefetch((const char*)at + AHEAD);
    __builtin_prefetch((const char*)at + AHEAD + 64);
    floats first_even = (floats)(first << 16), first_odd = (floats)(first & 0xffff0000);
    floats second_even = (floats)(second << 16), second_odd = (floats)(second & 0xffff0000);
    for (int row = 0; row < ROWS; ++row) {
      float even = widen(x[row * stride + 2 * pair]), odd = widen(x[row * stride + 2 * pair + 1]);
      low[row] += first_even * even + first_odd * odd;
      high[row] += second_even * even + second_odd * odd;
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    store(out + row * PANEL, low[row]);
    store(out + row * PANEL + WIDTH, high[row]);
  }
}
constexpr int MAX_ROWS = 6;
#endif

using Panel = void (*)(const bf16*, int64_t, const bf16*, int64_t, float*);
template <int... ROWS>
constexpr Panel panel_of(int rows, std::integer_sequence<int, ROWS...>) {
  constexpr Panel found[] = {panel<ROWS + 1>...};
  return found[rows - 1];
}

}  // namespace
