// Products with packed weights.
#include "dense.h"
#include "packed.h"
#include "replay.h"

namespace {

template <typename Kernel, typename Weights>
void multiply(const bf16* x, const Weights& weight, const bf16* bias, bf16* out, int64_t tokens, int64_t outputs,
              int64_t inputs, int threads) {
  int64_t panels = outputs / PANEL, row_bytes = inputs * sizeof(typename Kernel::Input);
  int64_t together = rows_together<Kernel>(row_bytes), blocks = (tokens + together - 1) / together;
  int64_t parts = (outputs + PANEL - 1) / PANEL;  // with the outputs after the last panel
  RowWriter<Kernel> writer(out, tokens, outputs);
  in_parallel(threads, blocks * parts, [&](Pieces& pieces) {
    alignas(64) float block[Kernel::ROWS * PANEL];
    PanelState<Kernel> state;
    const typename Kernel::Input* rows_in = nullptr;
    int64_t taken = -1;  // the first row of those
    for (int64_t piece; pieces.next(piece);) {
      int64_t first = piece / parts * together, number = piece % parts;
      int64_t count = std::min(together, tokens - first), step = pass_rows<Kernel>(count);
      if (number == panels) {
        const bf16* row = weight.rest(panels);
        for (int64_t output = panels * PANEL; output < outputs; ++output, row += inputs)
          for (int64_t token = first; token < first + count; ++token)
            out[token * outputs + output] =
                narrow(dot(x + token * inputs, row, inputs) + (bias ? widen(bias[output]) : 0.0f));
        continue;
      }
      if (first != taken) rows_in = Kernel::inputs(x + first * inputs, count * inputs), taken = first;
      floats add_low{}, add_high{};
      if (bias) {
        add_low = widen(load<halves>(bias + number * PANEL));
        add_high = widen(load<halves>(bias + number * PANEL + WIDTH));
      }
      for (int64_t token = 0; token < count; token += step) {
        int rows = int(std::min(step, count - token));
        weight.template panel<Kernel>(state, number, rows_in + token * inputs, rows, token == 0, token + step >= count, block);
        for (int row = 0; row < rows; ++row) {
          bf16* to = out + (first + token + row) * outputs + number * PANEL;
          writer.write(to, load<floats>(block + row * PANEL) + add_low, load<floats>(block + row * PANEL + WIDTH) + add_high);
        }
      }
    }
    writer.finish();
  });
}

}  // namespace

// Plain C functions over pointers, called through ctypes. They check nothing: floats.py checks shapes and types.
extern "C" {

// weight (outputs, inputs) is put into panels where it stands; inputs is even.
void pack_weight(bf16* weight, int64_t outputs, int64_t inputs, int threads) {
  pack_in_place(weight, outputs, inputs, threads, [=](const bf16* rows, bf16* to) {
    const bf16* each[PANEL];
    for (int row = 0; row < PANEL; ++row) each[row] = rows + row * inputs;
    pack_panel(each, inputs, to);
  });
}

// out (tokens, outputs) = x (tokens, inputs) times packed weight, plus bias if there is one.
#define LINEAR(NAME, KERNEL, WEIGHTS, DATA)                                                                              \
  void NAME(const bf16* x, const DATA* weight, const bf16* bias, bf16* out, int64_t tokens, int64_t outputs,             \
            int64_t inputs, int threads) {                                                                               \
    multiply<KERNEL>(x, WEIGHTS, bias, out, tokens, outputs, inputs, threads);                                           \
  }                                                                                                                      \
  REPLAYABLE(NAME)

// With weights as pack_weight leaves them, and as pack12 has packed them.
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
