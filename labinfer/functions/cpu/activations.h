// Activations of gated MLPs.
#pragma once
#include "exponentials.h"

namespace {

// e^x to the precision of the result's type.
inline floats exponential(floats x, const bf16*) { return exponential(x); }
inline floats exponential(floats x, const half*) { return exponential(x); }
inline floats exponential(floats x, const float*) { return exact_exponential(x); }

struct Silu {
  template <typename Number = bf16>
  static floats many(floats value, const Number* kind = nullptr) { return value / (1.0f + exponential(-value, kind)); }
};

// GELU, tanh approximation, with 1 + tanh(u) = 2 / (1 + exp(-2u)). Inputs below -30 give the result of -30, which is 0 within rounding.
struct Gelu {
  template <typename Number = bf16>
  static floats many(floats value, const Number* kind = nullptr) {
    value = larger(same(-30.0f), value);
    return value / (1.0f + exponential(power(value), kind));
  }

  template <typename Value>  // -2u
  static Value power(Value value) { return -1.5957691216f * (value + 0.044715f * value * value * value); }
};

// Epilogue of a product: none, or the activation of a gated MLP. Values equal those in dense.py.
enum class Finish { NOTHING, SILU, GELU };

// Rounds to the precision of a type; results are still floats.
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

// activate(gate) * up for one type.
template <typename Activate, typename Number>
inline floats gated(floats gate, floats up, const Number* kind) {
  return rounded<Number>(Activate::many(gate, kind)) * up;
}
template <typename Number>
inline floats gated(Finish finish, floats gate, floats up, const Number* kind) {
  return finish == Finish::SILU ? gated<Silu>(gate, up, kind) : gated<Gelu>(gate, up, kind);
}

}  // namespace
