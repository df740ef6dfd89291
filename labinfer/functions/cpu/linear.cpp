// Matrix products (linear) with packed bfloat16 weights.
#include "dense.h"
#include "packed.h"
#include "products.h"
#include "replay.h"

namespace {

// Matrix of a segment. Its inputs are at `begin` of a row in which every segment is padded to an even number of inputs.
struct Matrix {
  Bfloat16Matrix weights;
  int64_t begin, inputs;
};

struct Matrices {
  std::vector<Matrix> each;
  int64_t inputs = 0, padded = 0, outputs;

  Matrices(const Segments& segments, int64_t outputs) : outputs(outputs) {
    for (int64_t i = 0; i < segments.count; ++i) {
      const Segment& segment = segments.each[i];
      int64_t even = up_to(segment.inputs, 2);
      each.push_back({{segment.weight, outputs, even, bool(segment.in_12_bits)}, padded, segment.inputs});
      inputs += segment.inputs, padded += even;
    }
  }
};

// Products of blocks of rows with panels, plus bias, on one thread.
template <typename Kernel>
class Products {
 public:
  Products(const bf16* x, const Matrices& matrices, const bf16* bias, int64_t tokens, const Blocks& blocks)
      : x(x), matrices(matrices), bias(bias), tokens(tokens), blocks(blocks) {}

  // Number of chunks of a segment's panels.
  int64_t chunks(int64_t segment) const { return blocks.chunks(up_to(matrices.each[segment].inputs, 2)); }

  // Products of the block of rows at `first` with a chunk of a panel; see write_products.
  template <typename Write>
  void multiply(int64_t first, PanelIndex panel, PanelIndex next, float* sums, Write write) {
    const auto& [weights, begin, inputs] = matrices.each[panel.segment];
    int64_t count = std::min(blocks.rows, tokens - first), output = panel.number * PANEL, left = matrices.outputs - output;
    if (first != taken) take(first, count), taken = first;
    floats low, high;
    load_bias(bias, output, matrices.outputs, low, high);
    auto add = [&](int64_t token, floats some_low, floats some_high) { write(token, some_low + low, some_high + high); };
    int64_t even = up_to(inputs, 2), chunk = panel.chunk * blocks.inputs;
    if (chunks(panel.segment) == 1) sums = nullptr;
    Chunk now{panel.number, chunk, std::min(blocks.inputs, even - chunk)};
    const void* after = matrices.each[next.segment].weights.at(next.number, next.chunk * blocks.inputs);
    if (left >= PANEL) return run(weights, now, after, first, count, begin + chunk, sums, add);
    Plain last{pack_rest(weights.rest(panel.number), left, even), even};
    now.number = 0;
    run(last, now, last.at(0, 0), first, count, begin + chunk, sums, add);
  }

 private:
  // Multiplies the block's rows, from `input` on, with a chunk. Sums of a pass are in `memory` if the chunk has all inputs of the panel.
  template <typename Columns, typename Write>
  void run(const Columns& columns, const Chunk& chunk, const void* next, int64_t first, int64_t rows, int64_t input, float* sums, Write write) {
    int64_t step = pass_rows<Kernel>(rows);
    for (Pass pass{0, (rows + step - 1) / step}; pass.number < pass.count; ++pass.number) {
      int64_t begin = pass.number * step;
      columns.template multiply<Kernel>(state, chunk, next, rows_in, begin, input, int(std::min(step, rows - begin)), pass,
                                        sums ? sums + begin * PANEL : memory, [&](int row, int some, auto sums) {
                                          for (int i = 0; i < some; ++i) write(first + begin + row + i, sums(i, 0), sums(i, 1));
                                        });
    }
  }

  // Takes the rows of a block; an odd number of inputs of a segment is followed by a zero.
  void take(int64_t first, int64_t count) {
    static thread_local LineVector<typename Kernel::Input> memory;  // kept from call to call, so that nothing is allocated
    static thread_local LineVector<bf16> even;
    const bf16* from = x + first * matrices.inputs;
    if (matrices.padded == matrices.inputs) return rows_in.take(from, matrices.inputs, count, matrices.padded, memory);
    if (int64_t(even.size()) < count * matrices.padded) even.resize(count * matrices.padded);
    for (bf16* to = even.data(); to < even.data() + count * matrices.padded; to += matrices.padded)
      for (const auto& [weights, begin, inputs] : matrices.each) {
        std::memcpy(to + begin, from, inputs * sizeof(bf16));
        if (inputs % 2) to[begin + inputs] = 0;
        from += inputs;
      }
    rows_in.take(even.data(), matrices.padded, count, matrices.padded, memory);
  }

  // The outputs after the last whole panel (`count` unpacked rows) as a panel, so that they are summed in the order of other outputs.
  // Columns from `count` on are undefined.
  static const bf16* pack_rest(const bf16* rows, int64_t count, int64_t inputs) {
    static thread_local LineVector<bf16> last;
    if (int64_t(last.size()) < PANEL * inputs) last.resize(PANEL * inputs);
    const bf16* each[PANEL];
    for (int64_t row = 0; row < PANEL; ++row) each[row] = rows + std::min(row, count - 1) * inputs;
    if (count > 2) pack_panel(each, inputs, last.data());
    else
      for (int64_t row = 0; row < count; ++row)
        for (int64_t i = 0; i < inputs; i += 2) std::memcpy(&last[i * PANEL + row * 2], each[row] + i, 2 * sizeof(bf16));
    return last.data();
  }

  const bf16* x;
  const Matrices& matrices;
  const bf16* bias;
  int64_t tokens;
  Blocks blocks;
  int64_t taken = -1;  // first row of the block in rows_in
  RowBlock<Kernel> rows_in;
  PanelState<Kernel> state;
  alignas(64) float memory[Kernel::ROWS * PANEL];
};

template <typename Kernel>
void multiply(const bf16* x, const Segments& segments, const bf16* bias, bf16* out, int64_t tokens, int64_t outputs, Finish finish,
              int threads) {
  Matrices matrices(segments, outputs);
  int64_t panels = (finish == Finish::NOTHING ? outputs + PANEL - 1 : outputs / 2) / PANEL;
  Blocks blocks = choose_blocks<Kernel>(tokens, matrices.padded, GROUP_INPUTS, panels, threads);
  auto make = [&] { return Products<Kernel>(x, matrices, bias, tokens, blocks); };
  if (finish == Finish::NOTHING) write_products<Kernel>(segments, out, tokens, outputs, blocks, threads, make);
  else write_gated<Kernel>(finish, out, tokens, outputs / 2, blocks, threads, make);
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
#define LINEAR(NAME, KERNEL, IN_12_BITS)                                                                                      \
  void NAME(const bf16* x, const void* weight, const bf16* bias, bf16* out, int64_t tokens, int64_t outputs, int64_t inputs,  \
            int finish, int threads) {                                                                                        \
    Segment all{weight, nullptr, inputs, 0, 1.0f, 0, IN_12_BITS};                                                             \
    multiply<KERNEL>(x, {&all, 1, nullptr}, bias, out, tokens, outputs, Finish(finish), threads);                             \
  }                                                                                                                           \
  REPLAYABLE(NAME)

// Sum of the products of segments, see Segments.
#define SUM_LINEAR(NAME, KERNEL)                                                                                              \
  void NAME(const bf16* x, const Segment* segments, int64_t count, bf16* out, float* sums, int64_t tokens, int64_t outputs,   \
            int threads) {                                                                                                    \
    multiply<KERNEL>(x, {segments, count, sums}, nullptr, out, tokens, outputs, Finish::NOTHING, threads);                    \
  }                                                                                                                           \
  REPLAYABLE(NAME)

// Weights packed by pack_weight, and by pack12.
#define LINEARS(KERNEL, SUFFIX)             \
  LINEAR(linear##SUFFIX, KERNEL, false)     \
  LINEAR(linear12##SUFFIX, KERNEL, true)    \
  SUM_LINEAR(sum_linear##SUFFIX, KERNEL)

LINEARS(Fma, )
#ifdef HAS_BFLOAT16_DOT
LINEARS(Dot, _dot)
#endif
#ifdef HAS_AMX
LINEARS(Amx, _amx)
#endif

// Embedding lookup in a packed table; see look_up.
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
