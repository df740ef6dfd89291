// Matrix products (linear) with packed bfloat16 weights.
#include "dense.h"
#include "packed.h"
#include "products.h"
#include "replay.h"

namespace {

// Products of blocks of rows with panels, plus bias, on one thread.
template <typename Kernel, typename Weights>
class Products {
 public:
  Products(const bf16* x, const Weights& weight, const bf16* bias, int64_t tokens, int64_t inputs, int64_t together)
      : x(x), weight(weight), bias(bias), tokens(tokens), inputs(inputs), together(together) {}

  // Calls write(token, low, high) with 2 × 16 outputs of each row of the block that begins at `first`; `next` is the panel after it.
  template <typename Write>
  void multiply(int64_t first, int64_t panel, int64_t next, Write write) {
    run(weight, bias ? bias + panel * PANEL : nullptr, first, panel, next, write);
  }

  // Multiplies with the outputs after the last whole panel (`count` unpacked rows): they are copied into a panel, so that they are summed in
  // the order of other outputs. Calls write(token, sums), without a bias.
  template <typename Write>
  void multiply_rest(int64_t first, const bf16* rows, int64_t count, Write write) {
    static thread_local LineVector<bf16> last;  // columns from `count` on are undefined
    if (int64_t(last.size()) < PANEL * inputs) last.resize(PANEL * inputs);
    const bf16* each[PANEL];
    for (int64_t row = 0; row < PANEL; ++row) each[row] = rows + std::min(row, count - 1) * inputs;
    if (count > 2) pack_panel(each, inputs, last.data());
    else
      for (int64_t row = 0; row < count; ++row)
        for (int64_t i = 0; i < inputs; i += 2) std::memcpy(&last[i * PANEL + row * 2], each[row] + i, 2 * sizeof(bf16));
    run(Plain{last.data(), inputs}, nullptr, first, 0, 0, [&](int64_t token, floats low, floats high) {
      float sums[PANEL];
      store(sums, low), store(sums + WIDTH, high);
      write(token, sums);
    });
  }

 private:
  template <typename Columns, typename Write>
  void run(const Columns& columns, const bf16* added, int64_t first, int64_t panel, int64_t next, Write write) {
    int64_t count = std::min(together, tokens - first), step = pass_rows<Kernel>(count);
    if (first != taken) rows_in = Kernel::inputs(x + first * inputs, count * inputs), taken = first;
    floats add_low{}, add_high{};
    if (added) add_low = widen(load<halves>(added)), add_high = widen(load<halves>(added + WIDTH));
    for (Pass pass{0, (count + step - 1) / step}; pass.number < pass.count; ++pass.number) {
      int64_t begin = pass.number * step;
      columns.template panel<Kernel>(state, panel, next, rows_in + begin * inputs, int(std::min(step, count - begin)), pass, memory,
                                     [&](int row, int some, auto sums) {
                                       for (int i = 0; i < some; ++i)
                                         write(first + begin + row + i, sums(i, 0) + add_low, sums(i, 1) + add_high);
                                     });
    }
  }

  const bf16* x;
  const Weights& weight;
  const bf16* bias;
  int64_t tokens, inputs, together, taken = -1;  // taken: first row of the block in rows_in
  const typename Kernel::Input* rows_in = nullptr;
  PanelState<Kernel> state;
  alignas(64) float memory[Kernel::ROWS * PANEL];
};

template <typename Kernel, typename Weights>
void multiply(const bf16* x, const Weights& weight, const bf16* bias, bf16* out, int64_t tokens, int64_t outputs,
              int64_t inputs, int threads) {
  int64_t panels = outputs / PANEL, parts = (outputs + PANEL - 1) / PANEL;  // including the partial panel at the end
  int64_t together = rows_together<Kernel>(tokens, inputs * sizeof(typename Kernel::Input), parts, threads);
  RowWriter<Kernel> writer(out, tokens, outputs);
  in_parallel(threads, (tokens + together - 1) / together * parts, [&](Pieces& pieces) {
    Products<Kernel, Weights> products(x, weight, bias, tokens, inputs, together);
    for (int64_t piece; pieces.next(piece);) {
      int64_t block = piece / parts, number = piece % parts;
      if (number < panels) {
        products.multiply(block * together, number, number + 1, [&](int64_t token, floats low, floats high) {
          writer.write(out + token * outputs + number * PANEL, low, high);
        });
        continue;
      }
      products.multiply_rest(block * together, weight.rest(panels), outputs - panels * PANEL, [&](int64_t token, const float* sums) {
        for (int64_t output = panels * PANEL; output < outputs; ++output)
          out[token * outputs + output] = narrow(sums[output - panels * PANEL] + (bias ? widen(bias[output]) : 0.0f));
      });
    }
    writer.finish();
  });
}

template <typename Kernel, typename Weights>
void multiply_gated(Finish finish, const bf16* x, const Weights& weight, const bf16* bias, bf16* out, int64_t tokens, int64_t columns,
                    int64_t inputs, int threads) {
  int64_t together = rows_together<Kernel>(tokens, inputs * sizeof(typename Kernel::Input), columns / PANEL, threads);
  write_gated<Kernel>(finish, out, tokens, columns, together, threads,
                      [&] { return Products<Kernel, Weights>(x, weight, bias, tokens, inputs, together); });
}

}  // namespace

// C functions for ctypes; floats.py checks shapes and dtypes before the call.
extern "C" {

// Packs weight (outputs, inputs) into panels in place; inputs is even.
void pack_weight(bf16* weight, int64_t outputs, int64_t inputs, int threads) {
  pack_in_place(weight, outputs, inputs, threads, [=](const bf16* rows, bf16* to) {
    const bf16* each[PANEL];
    for (int row = 0; row < PANEL; ++row) each[row] = rows + row * inputs;
    pack_panel(each, inputs, to);
  });
}

// out (tokens, outputs) = x (tokens, inputs) times packed weight, plus bias if there is one. With an epilogue (see Finish) out is (tokens,
// outputs / 2), from the gate and up halves, which are whole panels.
#define LINEAR(NAME, KERNEL, WEIGHTS, DATA)                                                                                     \
  void NAME(const bf16* x, const DATA* weight, const bf16* bias, bf16* out, int64_t tokens, int64_t outputs, int64_t inputs,    \
            int finish, int threads) {                                                                                          \
    auto weights = WEIGHTS;                                                                                                     \
    using Weights = decltype(weights);                                                                                          \
    if (Finish(finish) == Finish::NOTHING)                                                                                      \
      multiply<KERNEL, Weights>(x, weights, bias, out, tokens, outputs, inputs, threads);                                       \
    else multiply_gated<KERNEL, Weights>(Finish(finish), x, weights, bias, out, tokens, outputs / 2, inputs, threads);          \
  }                                                                                                                             \
  REPLAYABLE(NAME)

// Weights packed by pack_weight, and by pack12.
#define LINEARS(PLAIN, TWELVE, KERNEL)                            \
  LINEAR(PLAIN, KERNEL, (Plain{weight, inputs}), bf16)            \
  LINEAR(TWELVE, KERNEL, (Packed12(weight, outputs, inputs)), uint8_t)

LINEARS(linear, linear12, Fma)
#ifdef HAS_BFLOAT16_DOT
LINEARS(linear_dot, linear12_dot, Dot)
#endif
#ifdef HAS_AMX
LINEARS(linear_amx, linear12_amx, Amx)
#endif

// See look_up.
void embedding(const int64_t* ids, const bf16* table, bf16* out, int64_t tokens, int64_t outputs, int64_t inputs,
               int64_t first, int threads) {
  const bf16* rest = Plain{table, inputs}.rest(outputs / PANEL);
  look_up(ids, rest, out, tokens, outputs, inputs, first, threads, [=](int64_t panel, int64_t row, bf16* to) {
    const bf16* at = table + panel * PANEL * inputs + row * 2;
    for (int64_t pair = 0; pair < inputs / 2; ++pair) std::memcpy(to + 2 * pair, at + pair * 2 * PANEL, 2 * sizeof(bf16));
  });
}
REPLAYABLE(embedding)

}  // extern "C"
