// bfloat16 compressed to 12 bits: packing and lookups.
#include "packed.h"
#include "packed12.h"
#include "replay.h"

namespace {

typedef uint16_t panel_row __attribute__((vector_size(2 * PANEL)));  // weights of half a pair of inputs
typedef uint8_t panel_bytes __attribute__((vector_size(2 * PANEL)));
typedef uint8_t row_bytes __attribute__((vector_size(PANEL)));
typedef uint64_t eights __attribute__((vector_size(PANEL)));

// Upper byte of a weight without its sign.
inline int upper(bf16 weight) { return weight >> 8 & 0x7f; }

// Base of a panel: the first of the consecutive upper bytes that represent the most weights, estimated from every seventh weight.
inline int best_base(const bf16* weights, int64_t count) {
  int32_t numbers[128] = {}, held = 0;
  for (int64_t i = 0; i < count; i += 7) ++numbers[upper(weights[i])];
  for (int i = 0; i < UPPERS; ++i) held += numbers[i];
  int32_t best = 0, most = held;
  for (int first = 1; first + UPPERS <= 128; ++first) {
    held += numbers[first + UPPERS - 1] - numbers[first - 1];
    if (held > most) most = held, best = first;
  }
  return best;
}

// Mask of the weights whose upper byte is out of range.
inline panel_row outside(panel_row weights, int base) {
  return (panel_row)(((weights >> 8) & 0x7f) - uint16_t(base) >= uint16_t(UPPERS));
}

// Number of out-of-range weights among `count`, a multiple of 32.
inline int64_t count_outside(const bf16* weights, int64_t count, int base) {
  int64_t total = 0;
  while (count > 0) {
    panel_row counts{};
    int64_t now = std::min<int64_t>(count, PANEL << 12);
    for (int64_t i = 0; i < now; i += PANEL) counts -= outside(load<panel_row>(weights + i), base);
    for (int i = 0; i < PANEL; ++i) total += counts[i];
    weights += now, count -= now;
  }
  return total;
}

// Lower bytes of a pair of inputs in two halves: of each 8 weights of the first, then of the second.
inline panel_bytes lower_bytes(panel_row first, panel_row second) {
  auto one = (eights)__builtin_convertvector(first, row_bytes), other = (eights)__builtin_convertvector(second, row_bytes);
  uint64_t both[] = {one[0], other[0], one[1], other[1], one[2], other[2], one[3], other[3]};
  return load<panel_bytes>(both);
}

// Packs a panel of panel.h (last group zero-padded) into planes, counts and patches; `size` is the panel's size in pairs.
inline void encode_panel(const bf16* from, int64_t size, int64_t groups, int base, uint8_t* planes, uint16_t* counts,
                         uint32_t* patches) {
  for (int64_t group = 0; group < groups; ++group, from += GROUP_WEIGHTS, size -= GROUP_WEIGHTS) {
    panel_row is_outside{};
    for (int64_t quad = 0; quad < PAIRS / 2; ++quad, planes += QUAD_BYTES) {
      panel_bytes code[2];
      for (int pair = 0; pair < 2; ++pair) {
        const bf16* at = from + (2 * quad + pair) * 2 * PANEL;
        auto first = load<panel_row>(at), second = load<panel_row>(at + PANEL);
        is_outside |= outside(first, base) | outside(second, base);
        store(planes + pair * 2 * PANEL, lower_bytes(first, second));
        code[pair] = lower_bytes(first >> 8, second >> 8);
      }
      for (auto& each : code) each = (each & 0x80) | (((each & 0x7f) - uint8_t(base)) & 7);
      // bit 7: sign of the first pair, bits 6-4: number of the second, bit 3: sign of the second, bits 2-0: number of the first
      store(planes + 4 * PANEL, code[0] | (code[1] & 7) << 4 | code[1] >> 4);
    }
    uint32_t any = 0;
    for (int i = 0; i < PANEL; ++i) any |= is_outside[i];
    uint32_t* begin = patches;
    for (int64_t i = 0; any && i < std::min(size, GROUP_WEIGHTS); ++i)
      if (unsigned(upper(from[i]) - base) >= UPPERS) *patches++ = uint32_t(i) << 16 | from[i];
    counts[group] = uint16_t(patches - begin);
  }
}

// Unpacks the weights of one row of a panel.
inline void decode_row(const Panel12& panel, int64_t row, int64_t inputs, bf16* to) {
  int64_t place = row % WIDTH / 4 * 16 + row / WIDTH * 8 + row % 4 * 2;  // position of the row's first weight among the bytes of a pair
  for (int64_t pair = 0; pair < inputs / 2; ++pair) {
    const uint8_t* quad = panel.planes + pair / 2 * QUAD_BYTES + place;
    for (int odd = 0; odd < 2; ++odd) {
      int code = quad[4 * PANEL + odd];
      if (pair % 2) code = code << 4 | code >> 4;
      int above = (code & 0x80) | ((code & 7) + panel.base);
      to[2 * pair + odd] = bf16(above << 8 | quad[pair % 2 * 2 * PANEL + odd]);
    }
  }
  const uint32_t* patch = panel.patches;
  for (int64_t first = 0, group = 0; first < inputs; first += GROUP_INPUTS, ++group)
    for (const uint32_t* end = patch + panel.counts[group]; patch < end; ++patch) {
      int64_t at = *patch >> 16;
      if (at % (2 * PANEL) / 2 == row) to[first + at / (2 * PANEL) * 2 + at % 2] = bf16(*patch);
    }
}

}  // namespace

// C functions for ctypes; packed12.py checks shapes and dtypes before the call.
extern "C" {

// Computes the base of each panel, and begin (panels + 1): the index of each panel's first patch. Returns the number of patches.
int64_t count_patches(const bf16* weight, int64_t outputs, int64_t inputs, uint8_t* bases, int64_t* begin, int threads) {
  int64_t panels = outputs / PANEL, size = PANEL * inputs;
  begin[0] = 0;
  for_each(threads, panels, [&](int64_t number) {
    const bf16* from = weight + number * size;
    bases[number] = uint8_t(best_base(from, size));
    begin[number + 1] = count_outside(from, size, bases[number]);
  });
  for (int64_t number = 0; number < panels; ++number) begin[number + 1] += begin[number];
  return begin[panels];
}

// Bytes of a matrix with `num_patches` patches.
int64_t packed12_bytes(int64_t outputs, int64_t inputs, int64_t patches) {
  return Matrix12(nullptr, outputs, inputs).bytes(patches);
}

// Packs weight (outputs, inputs), with even inputs, into data; bases and begin come from count_patches.
void pack12(const bf16* weight, const uint8_t* bases, const int64_t* begin, uint8_t* data, int64_t outputs, int64_t inputs,
            int threads) {
  Matrix12 to(data, outputs, inputs);
  std::memcpy((void*)to.begin, begin, (to.panels + 1) * sizeof(int64_t));
  std::memcpy((void*)to.bases, bases, to.panels);
  std::memcpy((void*)to.last_rows, weight + to.panels * PANEL * inputs, outputs % PANEL * inputs * sizeof(bf16));
  in_parallel(threads, to.panels, [&](Pieces& pieces) {
    std::vector<bf16> panel(to.groups * GROUP_WEIGHTS);
    const bf16* rows[PANEL];
    for (int64_t number; pieces.next(number);) {
      for (int row = 0; row < PANEL; ++row) rows[row] = weight + (number * PANEL + row) * inputs;
      pack_panel(rows, inputs, panel.data());
      Panel12 place = to.panel(number);
      encode_panel(panel.data(), inputs * PANEL, to.groups, place.base, (uint8_t*)place.planes, (uint16_t*)place.counts,
                   (uint32_t*)place.patches);
    }
  });
}

// Embedding lookup in a 12-bit table.
void embedding12(const int64_t* ids, const uint8_t* table, bf16* out, int64_t tokens, int64_t outputs, int64_t inputs,
                 int64_t first, int threads) {
  Matrix12 matrix(table, outputs, inputs);
  look_up(ids, matrix.last_rows, out, tokens, outputs, inputs, first, threads,
          [&](int64_t panel, int64_t row, bf16* to) { decode_row(matrix.panel(panel), row, inputs, to); });
}
REPLAYABLE(embedding12)

}  // extern "C"
