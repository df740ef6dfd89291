// Outputs of matrix products: written as they are, summed over segments of the inputs, or with the activation of a gated MLP as an epilogue.
#pragma once

#include "activations.h"
#include "panel.h"
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

// A panel of the matrix of a segment.
struct PanelIndex {
  int64_t segment, number;
};

// 2 × 16 numbers of a bias, zeros without one and from `outputs` on.
template <typename T>
inline void load_bias(const T* bias, int64_t output, int64_t outputs, floats& low, floats& high) {
  T some[PANEL] = {};
  if (bias) std::memcpy(some, bias + output, std::min<int64_t>(PANEL, outputs - output) * sizeof(T));
  low = load_floats(some), high = load_floats(some + WIDTH);
}

// make() creates a thread's products. Their multiply(first, panel, next, write) calls write(token, low, high) with 2 × 16 outputs of each
// row of the block of `together` rows that begins at `first`; outputs after the last one are undefined. The beginning of panel `next` is
// prefetched.

// out (tokens, outputs): products, or their sums over segments.
template <typename Kernel, typename T, typename Make>
void write_products(const Segments& segments, T* out, int64_t tokens, int64_t outputs, int64_t together, int threads, Make make) {
  int64_t panels = (outputs + PANEL - 1) / PANEL;
  RowWriter<Kernel> writer(out, tokens, outputs);
  auto put = [&](auto* to, floats low, floats high, int64_t count) {
    if (count >= PANEL) return writer.write(to, low, high);
    std::remove_pointer_t<decltype(to)> rest[PANEL];
    store_floats(rest, low), store_floats(rest + WIDTH, high);
    std::memcpy(to, rest, count * sizeof(*to));
  };
  in_parallel(threads, (tokens + together - 1) / together * panels, [&](Pieces& pieces) {
    static thread_local LineVector<float> stack;  // kept from call to call, so that nothing is allocated
    int64_t size = std::min(tokens, together) * PANEL;
    if (!segments.is_single() && int64_t(stack.size()) < segments.count * size) stack.resize(segments.count * size);
    auto products = make();
    for (int64_t piece; pieces.next(piece);) {
      int64_t first = piece / panels * together, number = piece % panels, output = number * PANEL;
      if (segments.is_single()) {
        products.multiply(first, {0, number}, {0, number + 1},
                          [&](int64_t token, floats low, floats high) { put(out + token * outputs + output, low, high, outputs - output); });
        continue;
      }
      int64_t rows = std::min(together, tokens - first);
      float* top = stack.data();  // after the topmost sums (rows, PANEL)
      for (int64_t i = 0; i < segments.count; ++i) {
        int64_t additions = segments.each[i].additions;
        PanelIndex next = i + 1 < segments.count ? PanelIndex{i + 1, number} : PanelIndex{0, number + 1};
        float* sums = additions ? top - size : top;
        products.multiply(first, {i, number}, next, [&](int64_t token, floats low, floats high) {
          float* to = sums + (token - first) * PANEL;
          if (additions) low += load<floats>(to), high += load<floats>(to + WIDTH);
          store(to, low), store(to + WIDTH, high);
        });
        for (; additions > 1; --additions, sums -= size)
          for (int64_t at = 0; at < rows * PANEL; at += WIDTH) store(sums - size + at, load<floats>(sums - size + at) + load<floats>(sums + at));
        top = sums + size;
      }
      for (const float* sums = stack.data(); sums < top; sums += size)
        for (int64_t row = 0; row < rows; ++row) {
          floats low = load<floats>(sums + row * PANEL), high = load<floats>(sums + row * PANEL + WIDTH);
          int64_t at = (first + row) * outputs + output;
          if (segments.sums) put(segments.sums + (sums - stack.data()) / size * tokens * outputs + at, low, high, outputs - output);
          else put(out + at, low, high, outputs - output);
        }
    }
    writer.finish();
  });
}

// out (tokens, columns) = activate(gate) * up, with `columns` gate outputs and as many up outputs. A thread multiplies rows with a panel of
// gates and the matching panel of ups; rounding equals that of linear followed by the activation.
template <typename Kernel, typename T, typename Make>
void write_gated(Finish finish, T* out, int64_t tokens, int64_t columns, int64_t together, int threads, Make make) {
  int64_t panels = columns / PANEL;
  RowWriter<Kernel> writer(out, tokens, columns);
  in_parallel(threads, (tokens + together - 1) / together * panels, [&](Pieces& pieces) {
    static thread_local LineVector<T> gates;  // kept from call to call, so that nothing is allocated
    int64_t numbers = std::min(tokens, together) * PANEL;
    if (int64_t(gates.size()) < numbers) gates.resize(numbers);
    auto products = make();
    for (int64_t piece; pieces.next(piece);) {
      int64_t first = piece / panels * together, number = piece % panels;
      products.multiply(first, {0, number}, {0, panels + number}, [&](int64_t token, floats low, floats high) {
        T* gate = &gates[(token - first) * PANEL];
        store_floats(gate, low), store_floats(gate + WIDTH, high);
      });
      products.multiply(first, {0, panels + number}, {0, number + 1}, [&](int64_t token, floats low, floats high) {
        const T* gate = &gates[(token - first) * PANEL];
        writer.write(out + token * columns + number * PANEL, gated(finish, load_floats(gate), rounded<T>(low), gate),
                     gated(finish, load_floats(gate + WIDTH), rounded<T>(high), gate));
      });
    }
    writer.finish();
  });
}

}  // namespace
