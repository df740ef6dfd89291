// Matrix products with packed float32 and float16 weights, accumulated in float32, and embedding lookups in packed tables.
#include "packed.h"
#include "products.h"
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

// Multiplies rows, from input `from` on, with a panel, one chunk of inputs at a time: sums (rows, PANEL).
template <typename Kernel>
void multiply_in_chunks(const RowBlock<Kernel>& x, int64_t from, const typename Kernel::Stored* panel, int64_t rows, int64_t inputs, float* sums) {
  alignas(64) float part[Kernel::ROWS * PANEL];
  int64_t step = pass_rows<Kernel>(rows);
  for (int64_t begin = 0; begin < inputs; begin += CHUNK)
    for (int64_t row = 0; row < rows; row += step) {
      int count = int(std::min(step, rows - row));
      float* to = sums + row * PANEL;
      multiply_panel<Kernel>(count, x.at(row, from + begin), panel + begin * PANEL, std::min(CHUNK, inputs - begin), false, begin ? part : to, {});
      for (int64_t i = 0; begin && i < count * PANEL; i += WIDTH) store(to + i, load<floats>(to + i) + load<floats>(part + i));
    }
}

// Products of blocks of rows with panels, plus bias, on one thread. The summation order of a row is independent of the other rows (batch
// invariant).
template <typename Dtype, typename Number>
class Products {
 public:
  using Kernel = FloatKernel<Dtype>;
  static constexpr int64_t TOGETHER = MOST_ROWS / Kernel::ROWS * Kernel::ROWS;

  Products(const Number* x, const Segments& segments, const Number* bias, int64_t tokens, int64_t outputs)
      : x(x), segments(segments), bias(bias), tokens(tokens), outputs(outputs), stride(segments.inputs()) {}

  int64_t chunks(int64_t) const { return 1; }  // of write_products: sums are added per CHUNK here

  // Products of the block of rows at `first` with a panel; see write_products.
  template <typename Write>
  void multiply(int64_t first, PanelIndex panel, PanelIndex, float*, Write write) {
    int64_t rows = std::min(TOGETHER, tokens - first), inputs = segments.each[panel.segment].inputs, output = panel.number * PANEL;
    static thread_local LineVector<float> memory;  // kept from call to call, so that nothing is allocated
    if (first != taken) rows_in.take(x + first * stride, stride, rows, stride, memory), taken = first;
    auto weight = (const typename Dtype::Stored*)segments.each[panel.segment].weight + output * inputs;
    if (output + PANEL > outputs) weight = pack_rest(weight, outputs - output, inputs);
    int64_t begin = Segments{segments.each, panel.segment, nullptr}.inputs();
    multiply_in_chunks<Kernel>(rows_in, begin, weight, rows, inputs, sums);
    floats low, high;
    load_bias(bias, output, outputs, low, high);
    for (int64_t row = 0; row < rows; ++row)
      write(first + row, load<floats>(sums + row * PANEL) + low, load<floats>(sums + row * PANEL + WIDTH) + high);
  }

 private:
  const Number* x;
  const Segments& segments;
  const Number* bias;
  int64_t tokens, outputs, stride, taken = -1;  // taken: first row of the block in rows_in
  RowBlock<Kernel> rows_in;
  alignas(64) float sums[TOGETHER * PANEL];
};

template <typename Dtype, typename Number>
void multiply(const Number* x, const Segments& segments, const Number* bias, Number* out, int64_t tokens, int64_t outputs, int threads) {
  using Own = Products<Dtype, Number>;
  write_products<typename Own::Kernel>(segments, out, tokens, outputs, {Own::TOGETHER, std::max<int64_t>(segments.inputs(), 1), 1}, threads,
                                       [&] { return Own(x, segments, bias, tokens, outputs); });
}

}  // namespace

// C functions for ctypes; floats.py checks shapes and dtypes before the call. Linear is out (tokens, outputs) = x (tokens, inputs) times
// packed weight, plus bias if there is one; sum_linear adds the products of segments, see Segments. The only epilogue here is
// Finish::NOTHING.
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
    Segment all{weight, nullptr, inputs, 0, 1.0f, 0, false};                                                                     \
    multiply<KIND>(x, {&all, 1, nullptr}, bias, out, tokens, outputs, threads);                                           \
  }                                                                                                                       \
  REPLAYABLE(linear_##DTYPE)                                                                                              \
  void sum_linear_##DTYPE(const NUMBER* x, const Segment* segments, int64_t count, NUMBER* out, float* sums,              \
                          int64_t tokens, int64_t outputs, int threads) {                                                 \
    multiply<KIND, NUMBER>(x, {segments, count, sums}, nullptr, out, tokens, outputs, threads);                           \
  }                                                                                                                       \
  REPLAYABLE(sum_linear_##DTYPE)                                                                                          \
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
