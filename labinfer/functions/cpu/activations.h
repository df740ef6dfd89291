// Activations of gated MLPs.
#pragma once
#include <cmath>

#include "exponentials.h"

namespace {

// e to the power of x for what becomes a number of a type.
inline floats exponential(floats x, const bf16*) { return exponential(x); }
inline floats exponential(floats x, const half*) { return exponential(x); }
inline floats exponential(floats x, const float*) { return exact_exponential(x); }

// Vectors are as exact as numbers of a type are.
struct Silu {
  template <typename Number = bf16>
  static floats many(floats value, const Number* kind = nullptr) { return value / (1.0f + exponential(-value, kind)); }
  static float one(float value) { return value / (1.0f + std::exp(-value)); }
};

// The tanh form, of which 1 + tanh(u) = 2 / (1 + exp(-2u)). Below -30 it is 0 within rounding, as at -30.
struct Gelu {
  template <typename Number = bf16>
  static floats many(floats value, const Number* kind = nullptr) {
    value = larger(same(-30.0f), value);
    return value / (1.0f + exponential(power(value), kind));
  }
  static float one(float value) {
    value = value < -30.0f ? -30.0f : value;
    return value / (1.0f + std::exp(power(value)));
  }

  template <typename Value>  // -2u
  static Value power(Value value) { return -1.5957691216f * (value + 0.044715f * value * value * value); }
};

// End of a product: nothing more, or the activation of a gated MLP. dense.py has the same.
enum class Finish { NOTHING, SILU, GELU };

// Rounded to a type of numbers, and still floats.
template <typename Number>
inline floats rounded(floats value) {
  Number numbers[WIDTH];
  store_floats(numbers, value);
  return load_floats(numbers);
}
template <>
inline floats rounded<bf16>(floats value) { return widen(narrow(value)); }
template <>
inline floats rounded<float>(floats value) { return value; }

// activate(gate) * up of numbers of a type.
template <typename Activate, typename Number>
inline floats gated(floats gate, floats up, const Number* kind) {
  return rounded<Number>(Activate::many(gate, kind)) * up;
}
template <typename Number>
inline floats gated(Finish finish, floats gate, floats up, const Number* kind) {
  return finish == Finish::SILU ? gated<Silu>(gate, up, kind) : gated<Gelu>(gate, up, kind);
}

}  // namespace
