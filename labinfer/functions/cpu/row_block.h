// Blocks of a matrix product that stay in the caches, and the input rows of a block.
#pragma once

#include "panel.h"

namespace {

// Blocks of a product, whose operands stay in the caches: `rows` rows are multiplied with a chunk of `inputs` inputs of a panel before the next
// panel is read, and with the chunks of `panels` adjacent panels before the next chunk of inputs.
struct Blocks {
  int64_t rows, inputs, panels;

  // Number of chunks of `size` inputs.
  int64_t chunks(int64_t size) const { return std::max<int64_t>(1, (size + inputs - 1) / inputs); }
};

// Blocks of a product of `rows` rows of `inputs` inputs with `panels` panels. Rows are multiplied in up to PASSES passes of the kernel per block,
// and blocks have similar sizes, in whole passes. Chunks are multiples of `unit` inputs, and longer for rows of a single pass, which reads each
// chunk once. If the rows fit into a quarter of the cache, and for kernels with AMX tiles, a chunk has all inputs.
template <typename Kernel>
Blocks choose_blocks(int64_t rows, int64_t inputs, int64_t unit, int64_t panels, int threads) {
  constexpr int64_t ROWS = IN_TILES<Kernel> ? TILE_ROWS : Kernel::ROWS, PASSES = 16, CHUNK = 512, PANELS = 8, PIECES = 4;
  int64_t row_bytes = std::max<int64_t>(inputs, 1) * sizeof(typename Kernel::Input);
  int64_t most = IN_TILES<Kernel> ? std::max(5 * CACHE / 2 / row_bytes, ROWS) : PASSES * ROWS;
  rows = std::max<int64_t>(rows, 1);
  int64_t blocks = (rows + most - 1) / most;
  int64_t together = up_to((rows + blocks - 1) / blocks, ROWS);
  if (IN_TILES<Kernel> || std::min(rows, together) * row_bytes <= CACHE / 4) return {together, std::max<int64_t>(inputs, unit), 1};
  return {together, up_to(rows <= ROWS ? 4 * CHUNK : CHUNK, unit), std::clamp<int64_t>(panels * blocks / (PIECES * threads), 1, PANELS)};
}

// Rows per pass of a kernel or form over `rows` rows: equal passes, because a last pass with few rows is wasteful; whole tiles for AMX.
template <typename Kernel>
int64_t pass_rows(int64_t rows) {
  int64_t passes = (rows + Kernel::ROWS - 1) / Kernel::ROWS;
  return up_to((rows + passes - 1) / passes, IN_TILES<Kernel> ? TILE_ROWS : 1);
}

// Block of input rows in the format of a kernel or form. The rows of a pass are interleaved by words of 4 bytes (word i of all rows, then word
// i + 1), so that they are one stream, read at constant offsets: separate rows evict each other from the first-level cache if they are a power
// of two apart. AMX tiles take rows as they are, without `memory`.
template <typename Kernel>
class RowBlock {
 public:
  using Input = typename Kernel::Input;

  // Takes `count` rows of `numbers` numbers, `stride` apart; interleaved rows are in `memory`. Kernels with AMX tiles interleave up to FEW rows,
  // which they multiply with vector instructions.
  template <typename Number>
  void take(const Number* x, int64_t stride, int64_t count, int64_t numbers, LineVector<Input>& memory) {
    if constexpr (IN_TILES<Kernel>) {
      data = x, size = stride, step = 0;
      if constexpr (Kernel::FEW > 0)
        if (count <= Kernel::FEW) interleave(x, stride, count, numbers, memory);
    } else {
      interleave(x, stride, count, numbers, memory);
    }
  }

  bool is_interleaved() const { return step; }

  // Inputs, from `begin` on, of the rows of the pass that starts at `row`.
  const Input* at(int64_t row, int64_t begin) const { return data + row * size + begin * (step ? std::min(step, rows - row) : 1); }

  // Numbers from row to row that are not interleaved.
  int64_t stride() const { return size; }

 private:
  // Interleaves `count` rows, pass by pass; the arguments are those of take.
  template <typename Number>
  void interleave(const Number* x, int64_t stride, int64_t count, int64_t numbers, LineVector<Input>& memory) {
    constexpr int64_t WORD = 4 / sizeof(Input);  // numbers in a word
    rows = count, size = numbers, step = pass_rows<Kernel>(count);
    if (int64_t(memory.size()) < rows * size + WIDTH * WORD) memory.resize(rows * size + WIDTH * WORD);
    data = memory.data();
    for (int64_t row = 0; row < rows; row += step)
      interleave_pass(std::min(step, rows - row), size / WORD, memory.data() + row * size,
                      [&](int64_t i, int64_t word, int64_t some) { return Kernel::load_words(x + (row + i) * stride, word, some); });
  }

  // Interleaves `count` rows of `words_each` words. Writes up to a vector after the end.
  template <typename Load>
  static void interleave_pass(int64_t count, int64_t words_each, Input* out, Load load) {
    uint32_t* to = (uint32_t*)out;
    for (int64_t first = 0; first < words_each; first += WIDTH) {
      int64_t some = std::min<int64_t>(WIDTH, words_each - first);
      words block[WIDTH] = {};
      for (int64_t row = 0; row < count; ++row) block[row] = load(row, first, some);
      if (count > 1) transpose(block);
      for (int64_t i = 0; i < (count > 1 ? some : 1); ++i) store(to + (first + i) * count, block[i]);
    }
  }

  const Input* data = nullptr;
  int64_t rows = 0, size = 0, step = 0;  // step: interleaved rows
};

}  // namespace
