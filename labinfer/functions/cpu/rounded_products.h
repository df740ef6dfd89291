// Products of int8 rows with matrices of any form.
#pragma once

#include "products.h"
#include "rounded.h"

namespace {

// Operands of a call: int8 rows, weights, scales and bias. `global_scale` multiplies all scales that are stored with the data.
template <typename Form, typename T>
struct Operands {
  const Form& form;
  RoundedRows rows;
  const uint8_t* weight;
  const float* scales;  // null if scales are stored with the data
  const T* bias;        // null for none
  int64_t tokens, outputs;
  float global_scale;
  int64_t together;  // rows of a block
};

// Products of blocks of rows with panels, on one thread.
template <typename Form, typename T>
class RoundedProducts {
 public:
  explicit RoundedProducts(const Operands<Form, T>& operands) : all(operands) {}

  // Calls write(token, low, high) with 2 × 16 outputs of each row of the block that begins at `first`; outputs after the last one are
  // undefined. `next` is the panel after it.
  template <typename Write>
  void multiply(int64_t first, int64_t panel, int64_t next, Write write) {
    int64_t count = std::min(all.together, all.tokens - first), step = pass_rows<Form>(count), output = panel * PANEL;
    const float* scales = all.scales ? all.scales + output : nullptr;
    T some_bias[PANEL] = {};
    if (all.bias) std::memcpy(some_bias, all.bias + output, std::min<int64_t>(PANEL, all.outputs - output) * sizeof(T));
    floats add_low = load_floats(some_bias), add_high = load_floats(some_bias + WIDTH);
    if (first != taken) rows_in = inputs<Dot>(all.rows.q + first * all.form.padded(), count * all.form.padded(), wide()), taken = first;
    int64_t bytes = all.form.panel_bytes();
    const uint8_t* weight = all.weight + panel * bytes;
    const Stream whole = panel_stream(all.weight, bytes, panel, next);
    for (Pass pass{0, (count + step - 1) / step}; pass.number < pass.count; ++pass.number) {
      int64_t token = first + pass.number * step;
      Stretch range = all.form.read_in_pass(weight);
      Stream stream = pass.stream<Form>(whole, range, bytes, range.bytes);
      multiply_panel(state, all.form, int(std::min(step, first + count - token)), rows_in + (token - first) * all.form.padded(),
                     weight, all.rows.start + token * all.form.groups(), memory, stream,
                     [&](int begin, int some, auto sums) {
                       for (int row = 0; row < some; ++row) {
                         float scale = all.rows.scale[token + begin + row] * all.global_scale;
                         floats low = scaled(sums(row, 0), scale, scales, add_low);
                         floats high = scaled(sums(row, 1), scale, scales ? scales + WIDTH : nullptr, add_high);
                         write(token + begin + row, low, high);
                       }
                     });
    }
  }

 private:
  using Dot = typename Form::Dot;

  // Thread-local memory.
  static LineVector<typename Dot::Input>& wide() {
    static thread_local LineVector<typename Dot::Input> memory;
    return memory;
  }

  const Operands<Form, T>& all;
  int64_t taken = -1;  // first row of the block in rows_in
  const typename Dot::Input* rows_in = nullptr;
  PanelState<Form> state;
  alignas(64) float memory[Form::ROWS * PANEL];
};

// Rounds the rows of x into memory that is reused between calls.
template <typename Form, typename T>
RoundedRows round_rows(const Form& form, const T* x, int64_t tokens, int threads) {
  static thread_local Rounded rounded;
  rounded.round(form, x, tokens, form.inputs, threads);
  return rounded.rows();  // shared with the pool's threads: it is the caller's thread-local memory
}

template <typename Form, typename T>
void multiply(const Operands<Form, T>& operands, T* out, int threads) {
  int64_t tokens = operands.tokens, outputs = operands.outputs, panels = (outputs + PANEL - 1) / PANEL, together = operands.together;
  RowWriter<Form> writer(out, tokens, outputs);
  in_parallel(threads, (tokens + together - 1) / together * panels, [&](Pieces& pieces) {
    RoundedProducts<Form, T> products(operands);
    for (int64_t piece; pieces.next(piece);) {
      int64_t number = piece % panels, output = number * PANEL;
      products.multiply(piece / panels * together, number, number + 1, [&](int64_t token, floats low, floats high) {
        T* to = out + token * outputs + output;
        if (output + PANEL <= outputs) return writer.write(to, low, high);
        T rest[PANEL];
        store_floats(rest, low), store_floats(rest + WIDTH, high);
        std::memcpy(to, rest, (outputs - output) * sizeof(T));
      });
    }
    writer.finish();
  });
}

template <typename Form, typename T>
void multiply(const Form& form, const T* x, const uint8_t* weight, const float* scales, const T* bias, T* out, int64_t tokens,
              int64_t outputs, float global_scale, Finish finish, int threads) {
  int64_t panels = (finish == Finish::NOTHING ? outputs + PANEL - 1 : outputs / 2) / PANEL;
  int64_t together = rows_together<Form>(tokens, form.padded() * sizeof(typename Form::Dot::Input), panels, threads);
  Operands<Form, T> operands{form, round_rows(form, x, tokens, threads), weight, scales, bias, tokens, outputs, global_scale, together};
  if (finish == Finish::NOTHING) return multiply(operands, out, threads);
  write_gated<Form>(finish, out, tokens, outputs / 2, together, threads,
                    [&] { return RoundedProducts<Form, T>(operands); });
}

}  // namespace
