// Matrix products with an epilogue: the activation of a gated MLP.
#pragma once

#include "activations.h"
#include "panel.h"
#include "thread_pool.h"

namespace {

// out (tokens, columns) = activate(gate) * up, with `columns` gate outputs and as many up outputs. A thread multiplies rows with a panel of
// gates and the matching panel of ups; rounding equals that of linear followed by the activation. make() creates a thread's products, whose
// multiply(first, panel, next, write) calls write(token, low, high) with 2 × 16 outputs of each row of a block; the beginning of panel
// `next` is prefetched.
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
      products.multiply(first, number, panels + number, [&](int64_t token, floats low, floats high) {
        T* gate = &gates[(token - first) * PANEL];
        store_floats(gate, low), store_floats(gate + WIDTH, high);
      });
      products.multiply(first, panels + number, number + 1, [&](int64_t token, floats low, floats high) {
        const T* gate = &gates[(token - first) * PANEL];
        writer.write(out + token * columns + number * PANEL, gated(finish, load_floats(gate), rounded<T>(low), gate),
                     gated(finish, load_floats(gate + WIDTH), rounded<T>(high), gate));
      });
    }
    writer.finish();
  });
}

}  // namespace
