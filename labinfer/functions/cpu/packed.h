// Packing of matrices into panels, and lookups of single rows.
#pragma once

#include <cstring>
#include <vector>

#include "thread_pool.h"
#include "vectors.h"

namespace {

// Packs weight (outputs, inputs) into panels in place: write(rows, to) makes a panel from a copy of its rows.
template <typename Stored, typename Write>
void pack_in_place(Stored* weight, int64_t outputs, int64_t inputs, int threads, Write write) {
  in_parallel(threads, outputs / PANEL, [&](Pieces& pieces) {
    std::vector<Stored> rows(PANEL * inputs);
    for (int64_t number; pieces.next(number);) {
      Stored* to = weight + number * PANEL * inputs;
      std::memcpy(rows.data(), to, rows.size() * sizeof(Stored));
      write(rows.data(), to);
    }
  });
}

// out (tokens, inputs): rows id - first of a table with `outputs` rows, zeros for ids outside. read(panel, row, to) reads a row of a panel;
// rows after the last panel are in `rest`, unpacked.
template <typename Stored, typename Read>
void look_up(const int64_t* ids, const Stored* rest, Stored* out, int64_t tokens, int64_t outputs, int64_t inputs,
             int64_t first, int threads, Read read) {
  int64_t packed = outputs / PANEL * PANEL;
  for_each(threads, tokens, [&](int64_t token) {
    int64_t row = ids[token] - first;
    Stored* to = out + token * inputs;
    if (row < 0 || row >= outputs) std::memset(to, 0, inputs * sizeof(Stored));
    else if (row >= packed) std::memcpy(to, rest + (row - packed) * inputs, inputs * sizeof(Stored));
    else read(row / PANEL, row % PANEL, to);
  });
}

}  // namespace
