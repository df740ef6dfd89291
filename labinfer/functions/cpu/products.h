// Outputs of matrix products: written as they are, summed over segments of the inputs, or with the activation of a gated MLP as an epilogue.
#pragma once

#include "activations.h"
#include "row_block.h"
#include "thread_pool.h"

namespace {

// Adjacent inputs of a product, multiplied with a matrix of their own.
struct Segment {
  const void* weight;
  const float* scales;  // scales of the outputs; null if stored with the weights
  int64_t inputs, lead;
  float global_scale;
  int32_t additions;  // pairs of sums to add after this product, see Segments
  int32_t in_12_bits;
};

// Segments of a product, whose products are added along a tree as on a stack: after each product its `additions` pairs of topmost sums are
// added. `sums` (sums, tokens, outputs) receives the sums that remain on the stack; null if one sum remains, which is rounded to the output's dtype.
struct Segments {
  const Segment* each;
  int64_t count;
  float* sums;

  bool is_single() const { return count == 1 && !sums; }  // without additions
  int64_t inputs() const {
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += each[i].inputs;
    return total;
  }
};

// Panels times rows of float32 sums (8 KiB) that a thread aims at for each segment, with at least the panels of Blocks.
constexpr int64_t SUMMED_ROWS = 64;

// A chunk of inputs of a panel of the matrix of a segment, see Blocks.
struct PanelIndex {
  int64_t segment, number, chunk = 0;
};

// 2 × 16 numbers of a bias, zeros without one and from `outputs` on.
template <typename T>
inline void load_bias(const T* bias, int64_t output, int64_t outputs, floats& low, floats& high) {
  T some[PANEL] = {};
  if (bias) std::memcpy(some, bias + output, std::min<int64_t>(PANEL, outputs - output) * sizeof(T));
  low = load_floats(some), high = load_floats(some + WIDTH);
}

// Memory of a thread for the sums of `rows` rows of panels whose inputs have several chunks.
inline float* chunk_sums(int64_t rows) {
  static thread_local LineVector<float> sums;
  if (int64_t(sums.size()) < rows * PANEL) sums.resize(rows * PANEL);
  return sums.data();
}

// make() creates a thread's products. products.chunks(segment) is the number of chunks of a segment's inputs, see Blocks.
// products.multiply(first, panel, next, sums, write) multiplies the rows of the block that begins at row `first` with a chunk of a panel.
// Products of chunks are added up in `sums` (rows of the block, 32). After a panel's last chunk, write(token, low, high) is called with
// 2 × 16 outputs of each row; outputs after the last one are undefined. The beginning of the chunk `next` is prefetched.

// out (tokens, outputs): products, or their sums over segments.
template <typename Kernel, typename T, typename Make>
void write_products(const Segments& segments, T* out, int64_t tokens, int64_t outputs, const Blocks& blocks, int threads, Make make) {
  int64_t panels = (outputs + PANEL - 1) / PANEL;
  RowWriter<Kernel> writer(out, tokens, outputs);
  auto put = [&](auto* to, floats low, floats high, int64_t count) {
    if (count >= PANEL) return writer.write(to, low, high);
    std::remove_pointer_t<decltype(to)> rest[PANEL];
    store_floats(rest, low), store_floats(rest + WIDTH, high);
    std::memcpy(to, rest, count * sizeof(*to));
  };
  // A thread multiplies `adjacent` panels chunk by chunk, and segment by segment: a segment's panels are adjacent in memory, so reads are
  // mostly sequential. With segments they are half of its share of the panels, or all of an odd share: no thread multiplies more than its
  // share.
  int64_t block = std::max<int64_t>(1, std::min(tokens, blocks.rows)), share = (panels + threads - 1) / threads;
  int64_t most = std::max(blocks.panels, SUMMED_ROWS / block);
  int64_t adjacent = segments.is_single() ? blocks.panels : std::clamp<int64_t>(share % 2 ? share : share / 2, 1, most);
  int64_t groups = (panels + adjacent - 1) / adjacent;
  in_parallel(threads, (tokens + blocks.rows - 1) / blocks.rows * groups, [&](Pieces& pieces) {
    static thread_local LineVector<float> stack;  // kept from call to call, so that nothing is allocated
    int64_t size = block * PANEL, level = adjacent * size;
    if (!segments.is_single() && int64_t(stack.size()) < segments.count * level) stack.resize(segments.count * level);
    float* parts = chunk_sums(adjacent * block);
    auto products = make();
    for (int64_t piece; pieces.next(piece);) {
      int64_t first = piece / groups * blocks.rows, begin = piece % groups * adjacent, output = begin * PANEL;
      int64_t rows = std::min(blocks.rows, tokens - first), count = std::min(adjacent, panels - begin);
      auto multiply = [&](int64_t segment, auto write) {
        for (int64_t chunk = 0, chunks = products.chunks(segment); chunk < chunks; ++chunk)
          for (int64_t panel = 0; panel < count; ++panel) {
            PanelIndex next{segment, begin + panel + 1, chunk};
            if (panel + 1 == count && chunk + 1 < chunks) next = {segment, begin, chunk + 1};
            else if (panel + 1 == count) next = segment + 1 < segments.count ? PanelIndex{segment + 1, begin} : PanelIndex{0, begin + count};
            products.multiply(first, {segment, begin + panel, chunk}, next, parts + panel * size,
                              [&](int64_t token, floats low, floats high) { write(panel, token, low, high); });
          }
      };
      if (segments.is_single()) {
        multiply(0, [&](int64_t panel, int64_t token, floats low, floats high) {
          int64_t column = output + panel * PANEL;
          put(out + token * outputs + column, low, high, outputs - column);
        });
        continue;
      }
      float* top = stack.data();  // after the topmost sums (panels, block, PANEL)
      for (int64_t i = 0; i < segments.count; ++i) {
        int64_t additions = segments.each[i].additions;
        float* sums = additions ? top - level : top;
        multiply(i, [&](int64_t panel, int64_t token, floats low, floats high) {
          float* to = sums + panel * size + (token - first) * PANEL;
          if (additions) low += load<floats>(to), high += load<floats>(to + WIDTH);
          store(to, low), store(to + WIDTH, high);
        });
        for (; additions > 1; --additions, sums -= level)
          for (int64_t at = 0; at < (count - 1) * size + rows * PANEL; at += WIDTH)
            store(sums - level + at, load<floats>(sums - level + at) + load<floats>(sums + at));
        top = sums + level;
      }
      for (const float* sums = stack.data(); sums < top; sums += level)
        for (int64_t panel = 0; panel < count; ++panel)
          for (int64_t row = 0; row < rows; ++row) {
            const float* from = sums + panel * size + row * PANEL;
            floats low = load<floats>(from), high = load<floats>(from + WIDTH);
            int64_t column = output + panel * PANEL, at = (first + row) * outputs + column;
            if (segments.sums) put(segments.sums + (sums - stack.data()) / level * tokens * outputs + at, low, high, outputs - column);
            else put(out + at, low, high, outputs - column);
          }
    }
    writer.finish();
  });
}

// out (tokens, columns) = activate(gate) * up, with `columns` gate outputs and as many up outputs. A thread multiplies rows with a panel of
// gates and the matching panel of ups; rounding equals that of linear followed by the activation.
template <typename Kernel, typename T, typename Make>
void write_gated(Finish finish, T* out, int64_t tokens, int64_t columns, const Blocks& blocks, int threads, Make make) {
  int64_t panels = columns / PANEL, pairs = (blocks.panels + 1) / 2, groups = (panels + pairs - 1) / pairs;
  int64_t block = std::min(tokens, blocks.rows);
  RowWriter<Kernel> writer(out, tokens, columns);
  in_parallel(threads, (tokens + blocks.rows - 1) / blocks.rows * groups, [&](Pieces& pieces) {
    static thread_local LineVector<T> gates;  // kept from call to call, so that nothing is allocated
    int64_t size = block * PANEL;
    if (int64_t(gates.size()) < size) gates.resize(size);
    float* parts = chunk_sums(2 * pairs * block);
    auto products = make();
    int64_t chunks = products.chunks(0);
    for (int64_t piece; pieces.next(piece);) {
      int64_t first = piece / groups * blocks.rows, begin = piece % groups * pairs, end = std::min(panels, begin + pairs);
      for (int64_t chunk = 0; chunk < chunks; ++chunk)
        for (int64_t number = begin; number < end; ++number) {
          PanelIndex gate_panel{0, number, chunk}, up_panel{0, panels + number, chunk}, next{0, number + 1, chunk};
          if (number + 1 == end) next = chunk + 1 < chunks ? PanelIndex{0, begin, chunk + 1} : PanelIndex{0, end};
          float* sums = parts + 2 * (number - begin) * size;
          products.multiply(first, gate_panel, up_panel, sums, [&](int64_t token, floats low, floats high) {
            T* gate = &gates[(token - first) * PANEL];
            store_floats(gate, low), store_floats(gate + WIDTH, high);
          });
          products.multiply(first, up_panel, next, sums + size, [&](int64_t token, floats low, floats high) {
            const T* gate = &gates[(token - first) * PANEL];
            writer.write(out + token * columns + number * PANEL, gated(finish, load_floats(gate), rounded<T>(low), gate),
                         gated(finish, load_floats(gate + WIDTH), rounded<T>(high), gate));
          });
        }
    }
    writer.finish();
  });
}

}  // namespace
