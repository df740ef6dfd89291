// Attention of many rows: panels of keys or values that are converted to float32 once per span.
#pragma once

#include <numeric>
#include <utility>

#include "attention_inner.h"

namespace {

// Products of many rows with panels of keys or values that are converted to float32 once, instead of in every pass of FmaUnits. Sums have
// the same bits as those of FmaUnits.
struct WidePanel {
  // Rows and columns per pass: a step of 6 rows times 64 columns loads fewer operands than one of 13 rows times 32 columns.
  static constexpr int ROWS = 6, COLUMNS = 2 * PANEL;
  // Minimum rows for which the conversion was measured to pay.
  static constexpr int64_t MANY = 72;

  // Converts pairs of steps, `stride` elements apart, of up to four groups of 16 columns; from(i) is the address of group i.
  template <typename From>
  static void convert(From from, int64_t groups, int64_t pairs, int64_t stride, float* to) {
    const bf16* at[COLUMNS / UNIT];
    for (int64_t i = 0; i < COLUMNS / UNIT; ++i) at[i] = from(std::min(i, groups - 1));
    for (int64_t pair = 0; pair < pairs; ++pair, to += 2 * COLUMNS)
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd)
#pragma GCC unroll 4
        for (int i = 0; i < COLUMNS; i += LANES) {
          lane_words both = load<lane_words>(at[i / UNIT] + pair * stride + i % UNIT * 2);
          store(to + odd * COLUMNS + i, odd ? both & 0xffff0000 : both << 16);
        }
  }

  // out = COUNT rows times the first WIDTH columns at `panel`.
  template <Rows KIND, int WIDTH, int COUNT>
  static void multiply(const float* x, const float* panel, int64_t pairs, float* out, int64_t out_stride) {
    using At = Distance<KIND, COUNT>;
    constexpr int ACROSS = WIDTH / LANES, TOGETHER = together(COUNT, ACROSS < 4 ? ACROSS : std::gcd(ACROSS, 4));
    for (int column = 0; column < WIDTH; column += TOGETHER * LANES) {
      lanes total[COUNT][TOGETHER] = {};
      const float *input = x, *at = panel + column;
      for (int64_t pair = 0; pair < pairs; ++pair, input += At::PAIR, at += 2 * COLUMNS)
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; ++odd) {
          lanes wide[TOGETHER];
#pragma GCC unroll 4
          for (int j = 0; j < TOGETHER; ++j) wide[j] = load<lanes>(at + odd * COLUMNS + j * LANES);
#pragma GCC unroll 6
          for (int row = 0; row < COUNT; ++row) {
            float factor = input[row * At::ROW + odd];
#pragma GCC unroll 4
            for (int j = 0; j < TOGETHER; ++j) total[row][j] += wide[j] * factor;
          }
        }
      for (int row = 0; row < COUNT; ++row)
        for (int j = 0; j < TOGETHER; ++j) store(out + row * out_stride + column + j * LANES, total[row][j]);
    }
  }

  // Function for up to ROWS rows times the first columns, in whole groups of 16.
  template <Rows KIND>
  static auto multiply_of(int rows, int64_t columns) {
    return among<KIND>(std::make_integer_sequence<int, COLUMNS / UNIT * ROWS>())[(columns - 1) / UNIT * ROWS + rows - 1];
  }

 private:
  using Multiply = void (*)(const float*, const float*, int64_t, float*, int64_t);

  template <Rows KIND, int... I>
  static const Multiply* among(std::integer_sequence<int, I...>) {
    static constexpr Multiply variants[] = {multiply<KIND, (I / ROWS + 1) * UNIT, I % ROWS + 1>...};
    return variants;
  }
};

}  // namespace
