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

}  // namespace
