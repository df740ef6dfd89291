// Matrix products with packed float32 and float16 weights, accumulated in float32, and embedding lookups in packed tables.
#include "packed.h"
#include "panel.h"
#include "replay.h"

namespace {

// Chunk of the K dimension. Each chunk is summed by itself, then chunk sums are added: the order does not depend on the number of rows,
// rounding errors grow with at most the square root of the inputs, and a chunk of a panel stays in the cache for all rows.
constexpr int64_t CHUNK = 256;
constexpr int64_t MOST_ROWS = 240;  // maximum rows multiplied with a panel before the next one is read

// Copies the `count` outputs after the last whole panel, which are stored as plain rows, into a panel, so that they are summed in the order of
// other outputs. Columns from `count` on are undefined.
template <typename Stored>
const Stored* pack_rest(const Stored* rows, int64_t count, int64_t inputs) {
  static thread_local LineVector<Stored> panel;
  if (int64_t(panel.size()) < PANEL * inputs) panel.resize(PANEL * inputs);
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = 0; i < inputs; ++i) panel[i * PANEL + row] = rows[row * inputs + i];
  return panel.data();
}

// Multiplies rows with a panel, one chunk of inputs at a time: sums (rows, PANEL).
template <typename Kernel>
void multiply_in_chunks(const float* x, const typename Kernel::Stored* panel, int64_t rows, int64_t inputs, float* sums) {
  alignas(64) float part[Kernel::ROWS * PANEL];
  int64_t step = pass_rows<Kernel>(rows);
  PanelState<Kernel> state;
  for (int64_t begin = 0; begin < inputs; begin += CHUNK)
    for (int64_t row = 0; row < rows; row += step) {
      int count = int(std::min(step, rows - row));
      float* to = sums + row * PANEL;
      multiply_panel<Kernel>(state, count, x + row * inputs + begin, inputs, panel + begin * PANEL, std::min(CHUNK, inputs - begin),
                             begin ? part : to, {}, [](auto...) {});
      for (int64_t i = 0; begin && i < count * PANEL; i += WIDTH) store(to + i, load<floats>(to + i) + load<floats>(part + i));
    }
}

// out = x times weight, plus bias. The summation order of a row is independent of the other rows (batch invariant).
template <typename Dtype, typename Number>
void multiply(const Number* x, const typename Dtype::Stored* weight, const Number* bias, Number* out, int64_t tokens,
              int64_t outputs, int64_t inputs, int threads) {
  using Kernel = FloatKernel<Dtype>;
  constexpr int64_t TOGETHER = MOST_ROWS / Kernel::ROWS * Kernel::ROWS;
  int64_t panels = outputs / PANEL, blocks = (tokens + TOGETHER - 1) / TOGETHER;
  int64_t parts = (outputs + PANEL - 1) / PANEL;  // including the partial panel at the end
  in_parallel(threads, blocks * parts, [&](Pieces& pieces) {
    alignas(64) float sums[TOGETHER * PANEL];
    const float* rows = nullptr;
    int64_t taken = -1;  // first row that `rows` points to
    for (int64_t piece; pieces.next(piece);) {
      int64_t first = piece / parts * TOGETHER, count = std::min(TOGETHER, tokens - first), output = piece % parts * PANEL;
      if (first != taken) rows = Kernel::inputs(x + first * inputs, count * inputs), taken = first;
      Number* to = out + first * outputs;
      if (output == panels * PANEL) {
        multiply_in_chunks<Kernel>(rows, pack_rest(weight + output * inputs, outputs - output, inputs), count, inputs, sums);
        for (int64_t row = 0; row < count; ++row)
          for (int64_t rest = output; rest < outputs; ++rest)
            set(to[row * outputs + rest], sums[row * PANEL + rest - output] + (bias ? as_float(bias[rest]) : 0.0f));
        continue;
      }
      multiply_in_chunks<Kernel>(rows, weight + output * inputs, count, inputs, sums);
      for (int64_t row = 0; row < count; ++row)
        for (int side = 0; side < PANEL; side += WIDTH) {
          floats value = load<floats>(sums + row * PANEL + side);
          store_floats(to + row * outputs + output + side, bias ? value + load_floats(bias + output + side) : value);
        }
    }
  });
}

}  // namespace

// C functions for ctypes; floats.py checks shapes and dtypes before the call. Linear is out (tokens, outputs) = x (tokens, inputs) times
// packed weight, plus bias if there is one. The only epilogue here is Finish::NOTHING.
extern "C" {

#define UNPAIRED(DTYPE, KIND, NUMBER)                                                                                     \
  void pack_##DTYPE(KIND::Stored* weight, int64_t outputs, int64_t inputs, int threads) {                                 \
    pack_in_place(weight, outputs, inputs, threads, [=](const KIND::Stored* rows, KIND::Stored* to) {                     \
      for (int64_t i = 0; i < inputs; ++i)                                                                                \
        for (int row = 0; row < PANEL; ++row) to[i * PANEL + row] = rows[row * inputs + i];                               \
    });                                                                                                                   \
  }                                                                                                                       \
  void linear_##DTYPE(const NUMBER* x, const KIND::Stored* weight, const NUMBER* bias, NUMBER* out, int64_t tokens,       \
                      int64_t outputs, int64_t inputs, int, int threads) {                                                \
    multiply<KIND>(x, weight, bias, out, tokens, outputs, inputs, threads);                                               \
  }                                                                                                                       \
  REPLAYABLE(linear_##DTYPE)                                                                                              \
  void embedding_##DTYPE(const int64_t* ids, const KIND::Stored* table, KIND::Stored* out, int64_t tokens,                \
                         int64_t outputs, int64_t inputs, int64_t first, int threads) {                                   \
    const KIND::Stored* rest = table + outputs / PANEL * PANEL * inputs;                                                  \
    look_up(ids, rest, out, tokens, outputs, inputs, first, threads, [=](int64_t panel, int64_t row, KIND::Stored* to) {  \
      const KIND::Stored* at = table + panel * PANEL * inputs + row;                                                      \
      for (int64_t i = 0; i < inputs; ++i) to[i] = at[i * PANEL];                                                         \
    });                                                                                                                   \
  }                                                                                                                       \
  REPLAYABLE(embedding_##DTYPE)

UNPAIRED(float32, Float32, float)
UNPAIRED(float16, Float16, half)

}  // extern "C"
