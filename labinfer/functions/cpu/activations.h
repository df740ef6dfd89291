// Activations of gated MLPs.
#pragma once
#include <cmath>

#include "vectors.h"

namespace {

inline floats silu(floats value) { return value / (1.0f + exponential(-value)); }
inline float silu(float value) { return value / (1.0f + std::exp(-value)); }

// The tanh form, of which 1 + tanh(u) = 2 / (1 + exp(-2u)). Below -30 it is 0 within rounding, as at -30.
constexpr float GELU_SLOPE = -1.5957691216f, GELU_CUBIC = 0.044715f;  // -2 sqrt(2 / pi)
inline floats gelu(floats value) {
  value = larger(same(-30.0f), value);
  return value / (1.0f + exponential(GELU_SLOPE * (value + GELU_CUBIC * value * value * value)));
}
inline float gelu(float value) {
  value = value < -30.0f ? -30.0f : value;
  return value / (1.0f + std::exp(GELU_SLOPE * (value + GELU_CUBIC * value * value * value)));
}

// e to the power of x for what becomes a number of a type.
inline floats exponential(floats x, const bf16*) { return exponential(x); }
inline floats exponential(floats x, const half*) { return exponential(x); }
inline floats exponential(floats x, const float*) { return exact_exponential(x); }

// The same activations, as exact as numbers of a type are.
struct Silu {
  template <typename Number>
  static floats many(floats value, const Number* kind) { return value / (1.0f + exponential(-value, kind)); }
  static float one(float value) { return silu(value); }
};

struct Gelu {
  template <typename Number>
  static floats many(floats value, const Number* kind) {
    value = larger(same(-30.0f), value);
    return value / (1.0f + exponential(GELU_SLOPE * (value + GELU_CUBIC * value * value * value), kind));
  }
  static float one(float value) { return gelu(value); }
};

}  // namespace
