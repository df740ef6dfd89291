// Products with packed weights in float16, computed in float32, and rows of a packed table.
#include "panel.h"
#include "replay.h"
#include "team.h"

namespace {

using Kernel = FloatKernel<Float16>;

// The panel of an output after the last whole panel stays as it was: rows of inputs.
inline float dot(const float* a, const uint16_t* b, int64_t size) {
  floats total{};
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) total += load<floats>(a + i) * widen_float16(load<halves>(b + i));
  float rest = sum(total);
  for (; i < size; ++i) rest += a[i] * widen_float16(b[i]);
  return rest;
}

}  // namespace

// Plain C functions over pointers, called through ctypes. They check nothing: float16.py checks shapes and types.
extern "C" {

// weight (outputs, inputs) is put into panels where it stands.
void pack_float16(uint16_t* weight, int64_t outputs, int64_t inputs, int threads) {
  in_parallel(threads, outputs / PANEL, [&](Pieces& pieces) {
    std::vector<uint16_t> rows(PANEL * inputs);
    for (int64_t number; pieces.next(number);) {
      uint16_t* to = weight + number * PANEL * inputs;
      std::memcpy(rows.data(), to, rows.size() * sizeof(uint16_t));
      for (int64_t i = 0; i < inputs; ++i)
        for (int row = 0; row < PANEL; ++row) to[i * PANEL + row] = rows[row * inputs + i];
    }
  });
}

// out (tokens, outputs) = x (tokens, inputs) times packed weight, plus bias if there is one; all but the weight in float32. A
// row's sums are in the same order whatever stands beside it.
void linear_float16(const float* x, const uint16_t* weight, const float* bias, float* out, int64_t tokens, int64_t outputs,
                    int64_t inputs, int threads) {
  constexpr int ROWS = Kernel::ROWS;
  int64_t panels = outputs / PANEL, row_bytes = inputs * sizeof(float);
  int64_t together = std::max<int64_t>(ROWS, CACHE / row_bytes / ROWS * ROWS), blocks = (tokens + together - 1) / together;
  int64_t parts = (outputs + PANEL - 1) / PANEL;  // with the outputs after the last panel
  in_parallel(threads, blocks * parts, [&](Pieces& pieces) {
    alignas(64) float block[ROWS * PANEL];
    for (int64_t piece; pieces.next(piece);) {
      int64_t first = piece / parts * together, number = piece % parts, output = number * PANEL;
      int64_t count = std::min(together, tokens - first), passes = (count + ROWS - 1) / ROWS;
      int64_t step = (count + passes - 1) / passes;  // all of the same size: few rows in the last would waste it
      for (int64_t token = first; number == panels && token < first + count; ++token)
        for (int64_t rest = output; rest < outputs; ++rest)
          out[token * outputs + rest] = dot(x + token * inputs, weight + rest * inputs, inputs) + (bias ? bias[rest] : 0.0f);
      for (int64_t token = first; number < panels && token < first + count; token += step) {
        int rows = int(std::min(step, first + count - token));
        panel_of<Kernel>(rows)(x + token * inputs, inputs, weight + output * inputs, inputs, block, {});
        for (int row = 0; row < rows; ++row)
          for (int half = 0; half < PANEL; half += WIDTH) {
            floats sums = load<floats>(block + row * PANEL + half);
            store(out + (token + row) * outputs + output + half, bias ? sums + load<floats>(bias + output + half) : sums);
          }
      }
    }
  });
}
REPLAYABLE(linear_float16)

// out (tokens, inputs): row id - first of a packed table of so many outputs, zeros for ids outside.
void embedding_float16(const int64_t* ids, const uint16_t* table, uint16_t* out, int64_t tokens, int64_t outputs,
                       int64_t inputs, int64_t first, int threads) {
  int64_t packed = outputs / PANEL * PANEL;
  for_each(threads, tokens, [&](int64_t token) {
    int64_t row = ids[token] - first;
    uint16_t* to = out + token * inputs;
    if (row < 0 || row >= outputs) {
      std::memset(to, 0, inputs * sizeof(uint16_t));
    } else if (row >= packed) {
      std::memcpy(to, table + row * inputs, inputs * sizeof(uint16_t));
    } else {
      const uint16_t* at = table + row / PANEL * PANEL * inputs + row % PANEL;
      for (int64_t i = 0; i < inputs; ++i) to[i] = at[i * PANEL];
    }
  });
}
REPLAYABLE(embedding_float16)

}  // extern "C"
