// Vectorized 2^x and e^x, 16 at a time.
#pragma once

#include "vectors.h"

namespace {

// 2^x to 3 parts in a million, for x from -126 on.
inline floats bounded_power_of_two(floats x) {
  floats rounded = x + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  floats rest = x - (rounded - 12582912.0f);
  floats value = same(9.56051e-3f);  // fitted to [-1/2, 1/2] by least squares of the relative error
  value = value * rest + 5.591704e-2f;
  value = value * rest + 2.4024981e-1f;
  value = value * rest + 6.9312197e-1f;
  value = value * rest + 9.9999919e-1f;
  return (floats)((words)value + ((words)rounded << 23));
}

// 2^x with that precision; 0 below the smallest float.
inline floats power_of_two(floats x) { return bounded_power_of_two(larger(same(-126.0f), x)); }

// e^x with that precision, within the exponents of a float.
inline floats exponential(floats x) {
  floats power = x * 1.44269504f;
  return power_of_two(smaller(same(126.0f), power));
}

// 2^x for x between -1/2 and 1/2, to half a unit in the last place of a float.
inline floats exact_root(floats x) {
  floats value = same(1.534581159e-4f);  // minimax polynomial of the relative error
  value = value * x + 1.339993122e-3f;
  value = value * x + 9.618488959e-3f;
  value = value * x + 5.550328777e-2f;
  value = value * x + 2.402264689e-1f;
  value = value * x + 6.931472057e-1f;
  return value * x + 1.0f;
}

// 2^x to float32 precision; 0 below the smallest normal float.
inline floats exact_power_of_two(floats x) {
  floats bounded = larger(same(-126.0f), x), rounded = bounded + 12582912.0f;
  floats value = exact_root(bounded - (rounded - 12582912.0f));
  return from_on(-126.0f, x, (floats)((words)value + ((words)rounded << 23)));
}

// e^x to float32 precision, with x clamped to the exponents of a float.
inline floats exact_exponential(floats x) {
  x = smaller(same(87.0f), larger(same(-87.0f), x));
  floats rounded = x * 1.44269504f + 12582912.0f, whole = rounded - 12582912.0f;
  floats rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln 2 in two parts, of which the first has few digits
  return (floats)((words)exact_root(rest * 1.44269504f) + ((words)rounded << 23));
}

// tanh(x) to float32 precision: by a Taylor polynomial up to 1/4, where the difference of exponentials would cancel.
inline floats exact_tanh(floats x) {
  constexpr float BOUND = 0.25f;
  floats near = smaller(same(BOUND), larger(same(-BOUND), x)), square = near * near;
  floats value = square * 2.1869488e-2f - 5.3968254e-2f;
  value = value * square + 1.3333333e-1f;
  value = value * square - 3.3333333e-1f;
  value = near + near * square * value;
  return value + from_on(BOUND, larger(x, -x), 2.0f / (1.0f + exact_exponential(-2.0f * x)) - 1.0f - value);
}

}  // namespace
