// What layers with a recurrent state share: their sequences, and functions whose errors would add up in a state.
#pragma once

#include "vectors.h"

namespace {

// Token ranges and state slots of the sequences.
struct Sequences {
  const int64_t *row_ptr, *context_lens, *slots;
  int64_t count;

  int64_t tokens(int64_t b) const { return row_ptr[b + 1] - row_ptr[b]; }
  bool is_new(int64_t b) const { return context_lens[b] == tokens(b); }
};

// e^x to a few parts in ten million, because errors accumulate in the state. exponentials.h has faster versions.
inline floats precise_exponential(floats x) {
  x = smaller(same(87.0f), larger(same(-87.0f), x));
  floats rounded = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
  floats whole = rounded - 12582912.0f;
  floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;  // x - whole * ln 2: ln 2 is the sum of 0.693359375, whose product is exact, and -2.1e-4
  floats value = same(1.0f / 720.0f);  // Taylor series for |x| up to ln 2 / 2
  value = value * rest + 1.0f / 120.0f;
  value = value * rest + 1.0f / 24.0f;
  value = value * rest + 1.0f / 6.0f;
  value = value * rest + 0.5f;
  value = value * rest + 1.0f;
  value = value * rest + 1.0f;
  return (floats)((words)value + ((words)rounded << 23));
}

// log(1 + e^x) to a few parts in ten million.
inline floats precise_softplus(floats x) {
  floats power = precise_exponential(-magnitude(x)), ratio = power / (power + 2.0f), square = ratio * ratio;
  floats value = same(1.0f / 15.0f);  // log(1 + power) = 2 artanh(ratio), a series with ratio up to 1/3
  for (int denominator = 13; denominator > 0; denominator -= 2) value = value * square + 1.0f / denominator;
  return larger(x, floats{}) + 2.0f * ratio * value;
}

inline floats silu(floats value) { return value / (1.0f + precise_exponential(-value)); }
inline float silu(float value) { return value / (1.0f + std::exp(-value)); }

}  // namespace
