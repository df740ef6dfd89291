// Mixture of experts: the gated MLPs of a layer's experts, each for the tokens routed to it, in one call.
#include "activations.h"
#include "experts.h"
#include "replay.h"
#include "thread_pool.h"

namespace {

constexpr int64_t READING = 6;         // rows for which multiplying a panel takes about as long as reading it from memory
constexpr int64_t MANY = 4 * READING;  // rows of an expert from which on reading it is negligible
constexpr int64_t PARTS = 8;           // maximum work items per core, so that other cores can steal from a slow one
constexpr int64_t TOGETHER = 8;        // panels of the down matrix per work item, if there are enough: all rows are read once per item

// Activations of a call (bfloat16, or float32 if `wide`, as with float16 and float32 weights), and its partial sums. A call may be split
// into parts with some of the experts each; the first part initializes the sums, the last one writes the output.
struct Call {
  const void* x;
  const int64_t* ids;    // (tokens, slots)
  const float* weights;  // routing weights, (tokens, slots)
  void* out;
  float* sums;           // (tokens, hidden up to 32); null for a call in one part
  int64_t tokens, slots, first;
  int32_t is_first, is_last, wide, gelu;
  float alpha, limit, gate_limit, offset;           // see clamped_gate.py
  const float *gate_bias, *up_bias, *down_bias;     // biases of each local expert; null for none
  int64_t bias_columns, bias_outputs;               // elements per expert in the biases, padded to a multiple of 32
};

// Activated inputs of down, from 16 gate and 16 up outputs. Not inlined, as many copies take long to compile.
__attribute__((noinline)) floats activate(const Call& call, int64_t expert, int64_t column, floats gate, floats up) {
  if (!call.gate_bias) return (call.gelu ? Gelu::many(gate) : Silu::many(gate)) * up;
  int64_t at = expert * call.bias_columns + column;
  floats most = same(call.limit), most_gate = same(call.gate_limit), bound_gate = gate + load<floats>(call.gate_bias + at);
  floats bound_up = larger(-most, up + load<floats>(call.up_bias + at));
  bound_gate = -larger(-most_gate, -bound_gate), bound_up = -larger(-most, -bound_up);
  return bound_gate / (1.0f + exponential(-bound_gate * call.alpha)) * (bound_up + call.offset);
}

// Pairs of a token and a local expert, sorted by expert: rows of one expert are adjacent, in token order.
struct Routing {
  std::vector<int64_t> experts, begin;  // experts with rows, and the first row of each, plus the end
  std::vector<int64_t> token;           // token of each row
  std::vector<float> weight;
  std::vector<int64_t> place;           // next row of each expert while sorting

  int64_t rows() const { return begin.back(); }

  // First row of an expert (by its index in `experts`) whose token is `from` or a later one.
  int64_t row_of(int64_t expert, int64_t from) const {
    auto tokens = token.begin();
    return std::lower_bound(tokens + begin[expert], tokens + begin[expert + 1], from) - tokens;
  }

  void sort(const Call& call, const Experts& here) {
    int64_t pairs = call.tokens * call.slots;
    place.assign(here.count, 0);
    auto is_here = [&](int64_t i) {
      int64_t expert = call.ids[i] - call.first;
      return expert >= 0 && expert < here.count && here.data[expert];
    };
    for (int64_t i = 0; i < pairs; ++i)
      if (is_here(i)) ++place[call.ids[i] - call.first];
    experts.clear();
    begin.assign(1, 0);
    for (int64_t expert = 0; expert < here.count; ++expert) {
      int64_t rows = place[expert];
      place[expert] = begin.back();
      if (!rows) continue;
      experts.push_back(expert);
      begin.push_back(begin.back() + rows);
    }
    token.resize(rows());
    weight.resize(rows());
    for (int64_t i = 0; i < pairs; ++i) {
      if (!is_here(i)) continue;
      int64_t row = place[call.ids[i] - call.first]++;
      token[row] = i / call.slots;
      weight[row] = call.weights[i];
    }
  }
};

// Input rows of any form, and the blocks in which one thread multiplies them.
template <typename Form>
class Rows {
 public:
  using Dot = typename Form::Dot;
  struct Block {
    RoundedRows rows;
    RowBlock<Form> x;
  };
  static constexpr int64_t NUMBER = sizeof(typename Dot::Input);  // bytes of a block's element

  template <typename T>
  void set(const Form& form, const T* x, int64_t rows, int64_t stride, int threads) {
    rounded.round(form, x, rows, stride, threads);
  }

  Block take(const Form& form, int64_t first, int64_t count) const {
    RoundedRows all = rounded.rows();
    return block(form, {all.q + first * form.padded(), all.scale + first, all.start + first * form.groups()}, count);
  }

  Block gather(const Form& form, const int64_t* numbers, int64_t count) const {
    static thread_local Rounded near;  // kept from call to call, so that nothing is allocated
    near.gather(form, rounded.rows(), numbers, count);
    return block(form, near.rows(), count);
  }

  // Calls each(row, low, high) with 2 × 16 outputs of each row.
  template <typename Each>
  static void multiply(PanelState<Form>& state, const Form& form, const Block& in, int64_t first, int count, const uint8_t* panel,
                       const float* scales, float global_scale, float* memory, const Stream& stream, Each each) {
    multiply_panel(state, form, in.x, first, count, 0, form.padded(), panel, in.rows.start + first * form.groups(), memory, stream,
                   [&](int begin, int some, auto sums) {
                     for (int row = 0; row < some; ++row) {
                       float scale = in.rows.scale[first + begin + row] * global_scale;
                       each(first + begin + row, scaled(sums(row, 0), scale, scales), scaled(sums(row, 1), scale, scales ? scales + WIDTH : nullptr));
                     }
                   });
  }

 private:
  static Block block(const Form& form, const RoundedRows& rows, int64_t count) {
    static thread_local LineVector<typename Dot::Input> wide, interleaved;  // kept from call to call, so that nothing is allocated
    Block block{rows, {}};
    block.x.take(inputs<Dot>(rows.q, count * form.padded(), wide), form.padded(), count, form.padded(), interleaved);
    return block;
  }

  Rounded rounded;
};

template <typename Kernel>
class Rows<Dense<Kernel>> {
 public:
  using Form = Dense<Kernel>;
  using Activation = typename Kernel::Activation;
  using Block = RowBlock<Kernel>;
  static constexpr int64_t NUMBER = sizeof(typename Kernel::Input);

  void set(const Form&, const Activation* rows_in, int64_t, int64_t apart, int) { x = rows_in, stride = apart; }

  Block take(const Form& form, int64_t first, int64_t count) const {
    return block(x + first * stride, stride, count, form.padded());
  }

  Block gather(const Form& form, const int64_t* numbers, int64_t count) const {
    static thread_local std::vector<Activation> near;
    int64_t padded = form.padded();
    if (int64_t(near.size()) < count * padded) near.resize(count * padded);
    for (int64_t row = 0; row < count; ++row) {
      near[(row + 1) * padded - 1] = 0;
      std::memcpy(&near[row * padded], x + numbers[row] * stride, form.inputs * sizeof(Activation));
    }
    return block(near.data(), padded, count, padded);
  }

  template <typename Each>
  static void multiply(PanelState<Form>& state, const Form& form, const Block& in, int64_t first, int count, const uint8_t* panel, const float*,
                       float, float* memory, const Stream& stream, Each each) {
    auto weights = (const typename Kernel::Stored*)panel;
    int64_t steps = form.padded() / Kernel::STEP;
    auto done = [&](int begin, int some, auto sums) {
      for (int row = 0; row < some; ++row) each(first + begin + row, sums(row, 0), sums(row, 1));
    };
    if constexpr (IN_TILES<Kernel>) {
      Kernel::panel(state, count, in.at(first, 0), in.stride(), weights, steps, memory, stream, done);
    } else {
      multiply_panel<Kernel>(count, in.at(first, 0), weights, steps, false, memory, stream);
      done(0, count, FloatSums{memory});
    }
  }

 private:
  static Block block(const Activation* x, int64_t stride, int64_t count, int64_t padded) {
    static thread_local LineVector<typename Kernel::Input> memory;  // kept from call to call, so that nothing is allocated
    Block block;
    block.take(x, stride, count, padded, memory);
    return block;
  }

  const Activation* x;
  int64_t stride;
};

// Panels of a packed matrix, and the scales of their products.
struct Panels {
  const uint8_t* data;
  const float* scales;  // null if there are no scales, or if they are stored with the data
  float global_scale;
  int64_t begin, end;
  const uint8_t* next;  // data that this thread reads next; null for none
};

template <typename Form>
Panels panels_of(const uint8_t* expert, const Layout<Form>& layout, bool is_down, int64_t begin, int64_t end,
                 const uint8_t* next) {
  int64_t scales = is_down ? layout.down_scales() : layout.gate_scales();
  return {expert + (is_down ? layout.down_begin() : 0), Form::OUTPUT_SCALES ? (const float*)(expert + scales) : nullptr,
          load<float>(expert + layout.global_scales() + is_down * sizeof(float)), begin, end, next};
}

// Address of a panel of an expert's down matrix.
template <typename Form>
const uint8_t* down_panel(const uint8_t* expert, const Layout<Form>& layout, int64_t panel) {
  return expert + layout.down_begin() + panel * layout.down.panel_bytes();
}

// Multiplies rows with panels. take(first, count) prepares a block of rows; each(panel, row, low, high) gets 2 × 16 outputs of a row.
// Panels are read from memory for every block of rows, so blocks have similar sizes and may exceed their share of the cache by
// half, which avoids one more block.
template <typename Form, typename Take, typename Each>
void multiply(const Form& form, const Panels& panels, int64_t rows, Take take, Each each) {
  constexpr int ROWS = Form::ROWS;
  alignas(64) float memory[ROWS * PANEL];
  PanelState<Form> state;
  const char* end = (const char*)panels.data + panels.end * form.panel_bytes();
  Stream stream{end, panels.next ? (const char*)panels.next - end : -2 * AHEAD};  // panels that were read before are in the cache
  int64_t blocks = std::max<int64_t>(1, (rows * form.padded() * Rows<Form>::NUMBER + CACHE / 2) / CACHE);
  int64_t together = (rows + blocks - 1) / blocks;
  for (int64_t first = 0; first < rows; first += together) {
    int64_t count = std::min(together, rows - first), step = pass_rows<Form>(count);
    auto rows_in = take(first, count);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel)
      for (int64_t row = 0; row < count; row += step) {
        stream.is_near = row > 0;
        int now = int(std::min(step, count - row));
        Rows<Form>::multiply(state, form, rows_in, row, now, panels.data + panel * form.panel_bytes(),
                             panels.scales ? panels.scales + panel * PANEL : nullptr, panels.global_scale, memory, stream,
                             [&](int64_t at, floats low, floats high) { each(panel, first + at, low, high); });
      }
  }
}

// activation(gate) * up of every row, to out (rows, columns padded to a multiple of 16). The panels of all experts form one list,
// partitioned by the number of their rows; a core's work items are adjacent, so that it reads memory sequentially.
template <typename Form, typename T>
void multiply_gates(const Layout<Form>& layout, const uint8_t* const* experts, const Routing& routing,
                    const Rows<Form>& rows_in, T* out, const Call& call, int threads) {
  int64_t panels = layout.gate_panels, total = 0, active = routing.experts.size();
  for (int64_t i = 0; i < active; ++i) total += (routing.begin[i + 1] - routing.begin[i] + READING) * panels;
  int64_t cores = pool_size(threads), each = std::clamp<int64_t>(active * panels / cores, 1, PARTS), parts = cores * each;
  for_each(threads, parts, [&](int64_t part) {
    int64_t from = total * part / parts, to = total * (part + 1) / parts;
    auto panel_at = [&](int64_t i, int64_t at) {  // index of the first panel at or after this position in the list
      int64_t passed = (routing.begin[i] + i * READING) * panels, cost = routing.begin[i + 1] - routing.begin[i] + READING;
      return std::clamp<int64_t>((at - passed + cost - 1) / cost, 0, panels);
    };
    for (int64_t i = 0; i < active; ++i) {
      int64_t first = routing.begin[i], rows = routing.begin[i + 1] - first;
      int64_t begin = panel_at(i, from), end = panel_at(i, to);
      if (begin >= end) continue;
      const uint8_t *expert = experts[routing.experts[i]], *next = nullptr;
      if (end < panels) next = expert + end * layout.gate_up.panel_bytes();
      else if (i + 1 < active) next = experts[routing.experts[i + 1]];
      bool goes_on = (part + 1) % each || (i + 1 < active && panel_at(i + 1, to) > 0);
      if (!next || !goes_on)
        next = down_panel(experts[routing.experts[0]], layout, layout.down_panels * (part / each) / cores);
      Panels own = panels_of(expert, layout, false, begin, end, next);
      auto take = [&](int64_t row, int64_t count) {
        return rows_in.gather(layout.gate_up, &routing.token[first + row], count);
      };
      multiply(layout.gate_up, own, rows, take, [&](int64_t panel, int64_t row, floats gate, floats up) {
        store_floats(out + ((first + row) * panels + panel) * WIDTH,
                     activate(call, routing.experts[i], panel * WIDTH, gate, up));
      });
    }
  });
}

// Writes `count` sums to out, starting at element `first`.
using GiveOut = void (*)(void* out, int64_t first, const float* sums, int64_t count);

template <typename T>
void give_out(void* out, int64_t first, const float* sums, int64_t count) {
  T* to = (T*)out + first;
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) store_floats(to + i, load<floats>(sums + i));
  for (; i < count; ++i) set(to[i], sums[i]);
}

// out (tokens, hidden): the weighted sums of the down products, in float32 and in expert order. A work item is a range of columns for some
// tokens, so a token's result depends neither on other tokens nor on the number of threads. With few rows, time is spent on reading panels:
// each core reads one contiguous part of an expert. Many rows are split into more items.
template <typename Form>
void multiply_downs(const Layout<Form>& layout, const uint8_t* const* experts, const Routing& routing,
                    const Rows<Form>& rows_in, float* sums, GiveOut give_out, const Call& call, int threads) {
  int64_t panels = layout.down_panels, width = panels * PANEL, active = routing.experts.size();
  int64_t cores = pool_size(threads), most = routing.rows() / std::max<int64_t>(1, active * MANY);
  int64_t parts = most ? std::clamp(panels / TOGETHER, cores, cores * PARTS) : cores;
  int64_t blocks = most ? std::min(most, (2 * cores + parts - 1) / parts) : 1;  // blocks of tokens: at least two work items per core
  for_each(threads, blocks * parts, [&](int64_t piece) {
    int64_t block = piece / parts, part = piece % parts;
    int64_t from = call.tokens * block / blocks, to = call.tokens * (block + 1) / blocks;
    int64_t begin = panels * part / parts, end = panels * (part + 1) / parts;
    if (begin == end) return;
    int64_t column = begin * PANEL, columns = std::min(end * PANEL, layout.hidden) - column;
    for (int64_t token = from; call.is_first && token < to; ++token)
      std::memset(sums + token * width + column, 0, (end - begin) * PANEL * sizeof(float));
    for (int64_t i = 0; i < active; ++i) {
      int64_t first = routing.row_of(i, from), rows = routing.row_of(i, to) - first;
      auto take = [&](int64_t row, int64_t count) { return rows_in.take(layout.down, first + row, count); };
      const uint8_t* next = i + 1 < active ? down_panel(experts[routing.experts[i + 1]], layout, begin) : nullptr;
      multiply(layout.down, panels_of(experts[routing.experts[i]], layout, true, begin, end, next), rows, take,
               [&](int64_t panel, int64_t row, floats low, floats high) {
                 float* to = sums + routing.token[first + row] * width + panel * PANEL;
                 float weight = routing.weight[first + row];
                 const float* bias = call.down_bias;
                 if (bias) bias += routing.experts[i] * call.bias_outputs + panel * PANEL;
                 for (int half = 0; half < PANEL; half += WIDTH) {
                   floats product = half ? high : low;
                   if (bias) product += load<floats>(bias + half);
                   store(to + half, load<floats>(to + half) + product * weight);
                 }
               });
    }
    for (int64_t token = from; call.is_last && token < to; ++token)
      give_out(call.out, token * layout.hidden + column, sums + token * width + column, columns);
  });
}

template <typename T, typename Form>
void run(const Layout<Form>& layout, const uint8_t* const* experts, const Routing& routing, const Call& call, int threads) {
  static thread_local Rows<Form> inputs, hidden;  // kept from call to call, so that nothing is allocated
  static thread_local std::vector<T> activations;
  static thread_local std::vector<float> own_sums;
  int64_t columns = layout.gate_panels * WIDTH, width = layout.down_panels * PANEL;
  if (int64_t(activations.size()) < routing.rows() * columns) activations.resize(routing.rows() * columns);
  if (!call.sums && int64_t(own_sums.size()) < call.tokens * width) own_sums.resize(call.tokens * width);
  inputs.set(layout.gate_up, (const T*)call.x, call.tokens, layout.hidden, threads);
  multiply_gates(layout, experts, routing, inputs, activations.data(), call, threads);
  hidden.set(layout.down, activations.data(), routing.rows(), columns, threads);
  multiply_downs(layout, experts, routing, hidden, call.sums ? call.sums : own_sums.data(), give_out<T>, call, threads);
}

template <typename Form>
void run_with(const Layout<Form>& layout, const Experts& experts, const Routing& routing, const Call& call, int threads) {
  if (call.wide) run<float>(layout, experts.data, routing, call, threads);
  else run<bf16>(layout, experts.data, routing, call, threads);
}

template <typename Kernel>
void run_with(const Layout<Dense<Kernel>>& layout, const Experts& experts, const Routing& routing, const Call& call,
              int threads) {
  run<typename Kernel::Activation>(layout, experts.data, routing, call, threads);
}

template <typename Kernel>
void run_experts(const Experts& experts, const Call& call, int threads) {
  static thread_local Routing routing;
  routing.sort(call, experts);
  with_layout<Kernel>(experts, [&](const auto& layout) { run_with(layout, experts, routing, call, threads); });
}

}  // namespace

// C functions for ctypes; experts.py checks shapes and dtypes before the call.
extern "C" {

// out (tokens, hidden): for each token of x the weighted sum of the outputs of its experts. ids are the model's expert numbers, `first` is
// the first local one; experts of other ranks add nothing.
void experts(const Experts* experts, const Call* call, int threads) { run_experts<Fma>(*experts, *call, threads); }
REPLAYABLE(experts)

#ifdef HAS_BFLOAT16_DOT
void experts_dot(const Experts* experts, const Call* call, int threads) { run_experts<Dot>(*experts, *call, threads); }
REPLAYABLE(experts_dot)
#endif

#ifdef HAS_AMX
void experts_amx(const Experts* experts, const Call* call, int threads) { run_experts<Amx>(*experts, *call, threads); }
REPLAYABLE(experts_amx)
#endif

}  // extern "C"
