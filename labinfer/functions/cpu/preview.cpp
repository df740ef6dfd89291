// Logits of which only the largest matters: approximate ones by a copy of the head in 4 bits, exact ones of those that may be it.
#include "dense.h"
#include "replay.h"
#include "rounded.h"

namespace {

struct Preview {
  const uint8_t* codes;  // Int4
  const float* spread;   // (2, outputs up to 32): root mean squares of what rounding took from weights, and of rounded weights
  int64_t group;
  float unit, sigmas;
};

template <typename T>
inline float norm(const T* x, int64_t size) {
  floats squares{};
  float rest = 0;
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) squares += load_floats(x + i) * load_floats(x + i);
  for (; i < size; ++i) rest += as_float(x[i]) * as_float(x[i]);
  return std::sqrt(sum(squares) + rest);
}

// Length of what rounding took from a row.
template <typename T>
inline float lost(const T* x, const int8_t* q, float scale, int64_t size) {
  float squares = 0;
  for (int64_t i = 0; i < size; ++i) squares += (as_float(x[i]) - q[i] * scale) * (as_float(x[i]) - q[i] * scale);
  return std::sqrt(squares);
}

// A panel of approximate logits of one row, and how far off they may be.
struct Approximate {
  alignas(64) float logits[PANEL], errors[PANEL];
};

// One row in 8 bits, and what is multiplied with the spread.
template <typename T>
struct PreviewRow {
  const Preview& preview;
  Int4 form;
  RoundedRows row;
  const Int4::Dot::Input* row_in;
  int64_t outputs;
  float length, off;

  PreviewRow(const Preview& preview, const T* x, Rounded& memory, LineVector<Int4::Dot::Input>& wide, int64_t outputs, int64_t size)
      : preview(preview), form(size, preview.group), outputs(outputs) {
    memory.round(form, x, 1, size, 1);
    row = memory.rows();
    row_in = inputs<Int4::Dot>(row.q, form.padded(), wide);
    length = preview.sigmas * norm(x, size), off = preview.sigmas * lost(x, row.q, row.scale[0], size);
  }

  void panel(int64_t number, Approximate& to) const {
    PanelState<Int4> state;
    multiply_panel(state, form, 1, row_in, preview.codes + number * form.panel_bytes(), row.start, to.logits, {}, [](auto...) {});
    const float *taken = preview.spread + number * PANEL, *rounded = taken + up_to(outputs, PANEL);
    for (int64_t i = 0; i < PANEL; i += WIDTH) {
      store(to.logits + i, load<floats>(to.logits + i) * (row.scale[0] * preview.unit));
      store(to.errors + i, load<floats>(taken + i) * length + load<floats>(rounded + i) * off);
    }
    for (int64_t i = outputs - number * PANEL; i < PANEL; ++i) to.logits[i] = -INFINITY;  // of no output
  }
};

// out (outputs) of one row. exact(panel) writes a panel's logits there; where one is further off than it may be, or nothing can
// be said, all are exact.
template <typename T, typename Exact>
void keep_largest(const T* x, const Preview& preview, T* out, int64_t outputs, int64_t inputs, int threads, Exact exact) {
  static thread_local Rounded rounded;
  static thread_local LineVector<Int4::Dot::Input> wide;
  static thread_local std::vector<float> bounds;  // of each panel: the most that a logit may be, and the least that one is
  static thread_local std::vector<int64_t> numbers;
  PreviewRow<T> row(preview, x, rounded, wide, outputs, inputs);
  int64_t panels = up_to(outputs, PANEL) / PANEL;
  bounds.resize(2 * panels), numbers.clear();
  float *most = bounds.data(), *least = most + panels;  // the threads of the team share the caller's
  for_each(threads, panels, [&, most, least](int64_t number) {
    Approximate near;
    row.panel(number, near);
    floats high = same(-INFINITY), low = high;
    for (int64_t i = 0; i < PANEL; i += WIDTH) {
      floats logits = load<floats>(near.logits + i), errors = load<floats>(near.errors + i);
      high = larger(logits + errors, high), low = larger(logits - errors, low);
    }
    most[number] = largest(high), least[number] = largest(low);
  });
  float bar = *std::max_element(least, least + panels);
  constexpr float EPSILON = sizeof(T) == 2 ? 0x1p-7f : 0x1p-23f;
  for (int64_t number = 0; number < panels; ++number)  // rounded, a logit may be as large
    if (most[number] + EPSILON * std::fabs(most[number]) >= bar) numbers.push_back(number);
  const std::vector<int64_t>& candidates = numbers;
  std::atomic<bool> is_off{!std::isfinite(bar) || candidates.empty()};
  T never;
  set(never, -INFINITY);
  std::fill_n(out, outputs, never);
  const int64_t* first = candidates.data();
  for_each(threads, candidates.size(), [&, first](int64_t index) {
    int64_t number = first[index], begin = number * PANEL;
    Approximate near;
    row.panel(number, near);
    exact(number);
    for (int64_t i = begin; i < std::min(outputs, begin + PANEL); ++i) {
      float logit = as_float(out[i]), off = std::fabs(logit - near.logits[i - begin]);
      if (!(off <= near.errors[i - begin] + EPSILON * std::fabs(logit))) is_off = true;
    }
  });
  if (is_off) for_each(threads, panels, exact);
}

template <typename Kernel, typename Weights>
void largest_of_dense(const bf16* x, const Weights& weight, const Preview& preview, bf16* out, int64_t tokens, int64_t outputs,
                      int64_t inputs, int threads) {
  for (int64_t token = 0; token < tokens; ++token, x += inputs, out += outputs)
    keep_largest(x, preview, out, outputs, inputs, threads, [&](int64_t number) {
      if ((number + 1) * PANEL > outputs) {
        const bf16* row = weight.rest(number);
        for (int64_t output = number * PANEL; output < outputs; ++output, row += inputs) out[output] = narrow(dot(x, row, inputs));
        return;
      }
      alignas(64) float memory[PANEL];
      PanelState<Kernel> state;
      weight.template panel<Kernel>(state, number, number + 1, Kernel::inputs(x, inputs), 1, Pass{0, 1}, memory, [&](int, int, auto sums) {
        for (int half = 0; half < 2; ++half) store(out + number * PANEL + half * WIDTH, narrow(sums(0, half)));
      });
    });
}

template <typename T>
void largest_of_int8(const T* x, const uint8_t* data, const float* scales, const Preview& preview, T* out, int64_t tokens,
                     int64_t outputs, int64_t inputs, int threads) {
  static thread_local Rounded rounded;
  static thread_local LineVector<Int8::Dot::Input> wide;
  Int8 form{inputs};
  for (int64_t token = 0; token < tokens; ++token, x += inputs, out += outputs) {
    rounded.round(form, x, 1, inputs, 1);
    RoundedRows row = rounded.rows();
    const Int8::Dot::Input* row_in = ::inputs<Int8::Dot>(row.q, form.padded(), wide);
    keep_largest(x, preview, out, outputs, inputs, threads, [&](int64_t number) {
      alignas(64) float block[PANEL];
      PanelState<Int8> state;
      multiply_panel(state, form, 1, row_in, data + number * form.panel_bytes(), row.start, block, {}, [](auto...) {});
      for (int64_t i = number * PANEL; i < std::min(outputs, (number + 1) * PANEL); ++i)
        set(out[i], block[i % PANEL] * scales[i] * row.scale[0]);
    });
  }
}

}  // namespace

// Plain C functions over pointers, called through ctypes. They check nothing: head_preview.py checks shapes and types.
extern "C" {

// out (tokens, outputs) = x (tokens, inputs) times packed weights, but -inf where a logit cannot be the row's largest; rounded
// weights (codes) in groups say which can, within so many sigmas.
#define LARGEST(NAME, KERNEL, WEIGHTS, DATA)                                                                             \
  void NAME(const bf16* x, const DATA* weight, const uint8_t* codes, const float* spread, int64_t group, float unit,     \
            float sigmas, bf16* out, int64_t tokens, int64_t outputs, int64_t inputs, int threads) {                     \
    largest_of_dense<KERNEL>(x, WEIGHTS, {codes, spread, group, unit, sigmas}, out, tokens, outputs, \
                             inputs, threads);                                                                           \
  }                                                                                                                      \
  REPLAYABLE(NAME)

LARGEST(largest_logits, Fma, (Plain{weight, inputs}), bf16)
LARGEST(largest_logits12, Fma, (Packed12(weight, outputs, inputs)), uint8_t)
#ifdef HAS_BFLOAT16_DOT
LARGEST(largest_logits_dot, Dot, (Plain{weight, inputs}), bf16)
LARGEST(largest_logits12_dot, Dot, (Packed12(weight, outputs, inputs)), uint8_t)
#endif

// The same with weights in 8 bits; x and out are bfloat16 or, with wide, float32.
void largest_logits_int8(const void* x, const uint8_t* data, const float* scales, const uint8_t* codes, const float* spread,
                         int64_t group, float unit, float sigmas, void* out, int64_t tokens, int64_t outputs, int64_t inputs,
                         int wide, int threads) {
  Preview preview{codes, spread, group, unit, sigmas};
  if (wide) largest_of_int8((const float*)x, data, scales, preview, (float*)out, tokens, outputs, inputs, threads);
  else largest_of_int8((const bf16*)x, data, scales, preview, (bf16*)out, tokens, outputs, inputs, threads);
}
REPLAYABLE(largest_logits_int8)

}  // extern "C"
