// Vectors of 16 float64, int64 or uint64 numbers.
#pragma once

#include "vectors.h"

namespace {

// Vector types wider than any register. Compilers split arithmetic on them well but comparisons badly; comparisons use floats.
typedef double doubles __attribute__((vector_size(8 * WIDTH)));
typedef int64_t longs __attribute__((vector_size(8 * WIDTH)));
typedef uint64_t hashes __attribute__((vector_size(8 * WIDTH)));
// Narrow types for compiler conversions from and to these vectors.
typedef float wide_floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t wide_ints __attribute__((vector_size(4 * WIDTH)));

inline doubles to_doubles(const floats& x) { return __builtin_convertvector(load<wide_floats>(&x), doubles); }
inline floats to_floats(doubles x) {
  wide_floats narrowed = __builtin_convertvector(x, wide_floats);
  return load<floats>(&narrowed);
}
inline longs to_longs(const ints& x) { return __builtin_convertvector(load<wide_ints>(&x), longs); }

inline doubles exponential(doubles x) {  // for x from -700 to 700, to about one unit in the last place
  doubles scaled = x * 1.4426950408889634 + 6755399441055744.0;  // adding 1.5 * 2^52 rounds to a whole number
  longs power = (longs)scaled << 52;
  doubles whole = scaled - 6755399441055744.0;
  doubles rest = x - whole * 6.93145751953125e-1 - whole * 1.42860682030941723212e-6;
  doubles value = doubles{} + 1.0 / 6227020800.0;
  for (double factor : {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                        1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
    value = value * rest + factor;
  return (doubles)((longs)value + power);
}

}  // namespace
