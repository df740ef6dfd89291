// Products of int8 rows with matrices of any form.
#pragma once

#include "products.h"
#include "rounded.h"

namespace {

// Matrix of a segment: its int8 rows, weights and scales. `global_scale` multiplies all scales that are stored with the data.
template <typename Form>
struct Operand {
  Form form;
  RoundedRows rows;
  const uint8_t* weight;
  const float* scales;  // null if scales are stored with the data
  float global_scale;
};

template <typename Form, typename T>
struct Operands {
  std::vector<Operand<Form>> each;  // by segment
  const T* bias;                    // null for none
  int64_t tokens, outputs;
  Blocks blocks;
};

// Products of blocks of rows with panels, on one thread.
template <typename Form, typename T>
class RoundedProducts {
 public:
  explicit RoundedProducts(const Operands<Form, T>& operands) : all(operands), rows_in(operands.each.size()) {}

  // Number of chunks of a segment's panels.
  int64_t chunks(int64_t segment) const { return all.blocks.chunks(all.each[segment].form.padded()); }

  // Products of the block of rows at `first` with a chunk of a panel; see write_products.
  template <typename Write>
  void multiply(int64_t first, PanelIndex panel, PanelIndex next, float* sums, Write write) {
    const Operand<Form>& own = all.each[panel.segment];
    int64_t count = std::min(all.blocks.rows, all.tokens - first), step = pass_rows<Form>(count), output = panel.number * PANEL;
    const float* scales = own.scales ? own.scales + output : nullptr;
    floats add_low, add_high;
    load_bias(all.bias, output, all.outputs, add_low, add_high);
    if (first != taken) take(first, count);
    const Form& form = own.form;
    int64_t begin = panel.chunk * all.blocks.inputs, some = std::min(all.blocks.inputs, form.padded() - begin), bytes = form.bytes(some);
    const uint8_t* weight = own.weight + panel.number * form.panel_bytes() + form.bytes(begin);
    const Operand<Form>& after = all.each[next.segment];
    const uint8_t* next_weight = after.weight + next.number * after.form.panel_bytes() + after.form.bytes(next.chunk * all.blocks.inputs);
    const Stream whole = panel_stream(weight, bytes, next_weight);
    bool is_whole = chunks(panel.segment) == 1;
    for (Pass pass{0, (count + step - 1) / step}; pass.number < pass.count; ++pass.number) {
      int64_t row = pass.number * step, token = first + row;
      Stretch range = form.read_in_pass(weight, some);
      Stream stream = pass.stream<Form>(whole, range, bytes, range.bytes);
      multiply_panel(state, form, rows_in[panel.segment], row, int(std::min(step, count - row)), begin, some, weight,
                     own.rows.start + token * form.groups(), is_whole ? memory : sums + row * PANEL, stream,
                     [&](int begin, int some, auto sums) {
                       for (int row = 0; row < some; ++row) {
                         float scale = own.rows.scale[token + begin + row] * own.global_scale;
                         floats low = scaled(sums(row, 0), scale, scales, add_low);
                         floats high = scaled(sums(row, 1), scale, scales ? scales + WIDTH : nullptr, add_high);
                         write(token + begin + row, low, high);
                       }
                     });
    }
  }

 private:
  using Dot = typename Form::Dot;

  // Makes the block's rows the current ones, in memory that the thread keeps from call to call.
  void take(int64_t first, int64_t count) {
    static thread_local std::vector<LineVector<typename Dot::Input>> wide, interleaved;
    if (wide.size() < rows_in.size()) wide.resize(rows_in.size()), interleaved.resize(rows_in.size());
    for (size_t i = 0; i < rows_in.size(); ++i) {
      int64_t padded = all.each[i].form.padded();
      rows_in[i].take(inputs<Dot>(all.each[i].rows.q + first * padded, count * padded, wide[i]), padded, count, padded, interleaved[i]);
    }
    taken = first;
  }

  const Operands<Form, T>& all;
  int64_t taken = -1;  // first row of the block in rows_in
  std::vector<RowBlock<Form>> rows_in;  // by segment
  PanelState<Form> state;
  alignas(64) float memory[Form::ROWS * PANEL];
};

// Creates the form of a segment; `group` is the group size of forms with groups.
template <typename Form>
struct FormMaker {
  int64_t group = 0;
  Form operator()(int64_t inputs, int64_t lead) const { return Form(inputs, group, lead); }
};

// Products with weights of the forms that make(inputs, lead) creates.
template <typename T, typename Make>
void multiply(Make make, const T* x, const Segments& segments, const T* bias, T* out, int64_t tokens, int64_t outputs, Finish finish,
              int threads) {
  using Form = decltype(make(0, 0));
  static thread_local std::vector<Rounded> rounded;  // the pool's threads read the caller's
  if (int64_t(rounded.size()) < segments.count) rounded.resize(segments.count);
  Operands<Form, T> operands{{}, bias, tokens, outputs, {}};
  int64_t inputs = segments.inputs(), padded = 0, unit = 1024;  // chunks of integers may be twice as long as those of bfloat16
  for (int64_t i = 0; i < segments.count; ++i) {
    const Segment& segment = segments.each[i];
    Form form = make(segment.inputs, segment.lead);
    rounded[i].resize(form, tokens), padded += form.padded(), unit = up_to(unit, form.unit());
    operands.each.push_back({form, rounded[i].rows(), (const uint8_t*)segment.weight, segment.scales, segment.global_scale});
  }
  for_each(round_threads(tokens * inputs, threads), tokens, [&, rounded = rounded.data()](int64_t row) {
    const T* from = x + row * inputs;
    for (size_t i = 0; i < operands.each.size(); from += operands.each[i++].form.inputs) rounded[i].round_row(operands.each[i].form, from, row);
  });
  int64_t panels = (finish == Finish::NOTHING ? outputs + PANEL - 1 : outputs / 2) / PANEL;
  Blocks blocks = operands.blocks = choose_blocks<Form>(tokens, padded, unit, panels, threads);
  auto products = [&] { return RoundedProducts<Form, T>(operands); };
  if (finish == Finish::NOTHING) write_products<Form>(segments, out, tokens, outputs, blocks, threads, products);
  else write_gated<Form>(finish, out, tokens, outputs / 2, blocks, threads, products);
}

}  // namespace
