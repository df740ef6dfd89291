// The keys and values of a span as attention multiplies them: where the cache holds them, or laid out for it.
#pragma once

#include <vector>

#include "units.h"

namespace {

constexpr int64_t UNITS = SPAN / UNIT;

// (slots, KV heads, size), or in tiles (blocks, KV heads, units of a block; see units.h); in bfloat16, or in int8 with scales
// (slots, KV heads), or (blocks, KV heads, keys of a block). Where values are part of keys there is one KV head, and scales are
// (slots, 2): of the values, and of what is behind them.
struct Cache {
  const void* data;
  const float* scales;
};

// What all sequences have in common.
struct Batch {
  const bf16* q;
  Cache keys, values;
  const int64_t *tables, *table_ptr, *row_ptr, *context_lens, *head_ptr;
  bf16* out;
  int64_t heads, kv_heads, size, block_size;
  bool tiled;
  float scale;
  int64_t window, value_size;
  bool shared;         // values are the first numbers of the keys
  const float* sinks;  // of each head: a logit that counts without a value; null for none

  bool has_scales() const { return keys.scales && !shared; }  // that are not in the numbers already, as they are laid out
  int64_t group(int64_t kv) const { return head_ptr[kv + 1] - head_ptr[kv]; }
  int64_t width() const { return up_to(value_size, PANEL); }  // of a row of sums
};

// Some query tokens of a sequence, with the heads that read one KV head, and the keys that they see.
struct Tile {
  int64_t sequence, kv, first, count;  // tokens from the sequence's first new one
  int64_t begin, end;                  // keys
  int64_t first_span, end_span;        // of these
  int64_t whole;                       // where they are dealt to several threads; else -1
};

template <typename T>
T* room(std::vector<T>& memory, int64_t size) {
  if (int64_t(memory.size()) < size) memory.resize(size);
  return memory.data();
}

// Whole numbers in bfloat16, which has them all.
inline halves narrow_exact(few_bytes whole) {
  return low_halves((words)__builtin_convertvector(widen_bytes(whole), floats) >> 16);
}

// The units of a tile's span, of a KV head's keys or values.
struct Units {
  const Batch& batch;
  const Cache& cache;
  const Tile& tile;

  const int64_t* table() const { return batch.tables + batch.table_ptr[tile.sequence]; }

  // Its first key among those of all blocks' KV heads, in tiles.
  int64_t key_of(int64_t unit) const {
    int64_t units = batch.block_size / UNIT;
    return (table()[unit / units] * batch.kv_heads + tile.kv) * batch.block_size + unit % units * UNIT;
  }

  const bf16* in_place(int64_t unit) const { return (const bf16*)cache.data + key_of(unit) * batch.size; }

  // A unit of an int8 cache as numbers in bfloat16, without the scales, which are exact.
  void widen_unit(int64_t unit, int64_t next, bf16* to, float* scales) const {
    const int8_t* from = (const int8_t*)cache.data + key_of(unit) * batch.size;
    const int8_t* soon = (const int8_t*)cache.data + key_of(next) * batch.size;
    for (int64_t i = 0; i < UNIT * batch.size; i += WIDTH) {
      if (i % 64 == 0) __builtin_prefetch(soon + i);
      store(to + i, narrow_exact(load<few_bytes>(from + i)));
    }
    std::memcpy(scales, cache.scales + key_of(unit), UNIT * sizeof(float));
  }

  // Rows of a cache that is not in tiles: 16 (or fewer, then zeros) one after another, in bfloat16. Zeros, too, before
  // the first key that is seen: the table need not say where those are.
  void stage(int64_t unit, int64_t count, bf16* rows, float* scales) const {
    for (int64_t key = 0; key < UNIT; ++key) {
      bf16* to = rows + key * batch.size;
      if (scales) scales[key] = 0.0f;
      int64_t at = unit * UNIT + key;
      if (key >= count || at < tile.begin) {
        std::fill_n(to, batch.size, bf16(0));
        continue;
      }
      int64_t row = (table()[at / batch.block_size] * batch.block_size + at % batch.block_size) * batch.kv_heads + tile.kv;
      if (!cache.scales) {
        std::memcpy(to, (const bf16*)cache.data + row * batch.size, batch.size * sizeof(bf16));
        continue;
      }
      const int8_t* from = (const int8_t*)cache.data + row * batch.size;
      if (batch.shared) {
        for (int64_t i = 0; i < batch.size; ++i) to[i] = narrow(from[i] * cache.scales[2 * row + (i >= batch.value_size)]);
        continue;
      }
      for (int64_t i = 0; i < batch.size; ++i) to[i] = narrow(float(from[i]));
      scales[key] = cache.scales[row];
    }
  }
};

inline void pack_keys(const bf16* rows, int64_t size, bf16* to) {
  transpose_rows((const uint32_t*)rows, size / 2, UNIT, size / 2,
                 [&](int64_t pair, words column) { store(to + pair * 2 * UNIT, column); });
}

// Of rows of any length the first size numbers, and zeros up to width.
inline void pack_values(const bf16* rows, int64_t length, int64_t size, int64_t width, bf16* to) {
  for (int64_t key = 0; key < UNIT; key += 2, rows += 2 * length, to += 2 * width) {
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH)
      store(to + 2 * i, widen_words(load<halves>(rows + i)) | widen_words(load<halves>(rows + length + i)) << 16);
    for (; i < width; ++i)
      for (int odd = 0; odd < 2; ++odd) to[2 * i + odd] = i < size ? rows[odd * length + i] : bf16(0);
  }
}

// Units that cannot be read where they are.
struct UnitMemory {
  std::vector<bf16> rows, keys, values;
};

// Where the units of a span are: keys, then values, then the first keys of the next span.
struct Span {
  const bf16* units[2 * (UNITS + 1) + AHEAD_UNITS];
  float key_scales[SPAN], value_scales[SPAN];
  int64_t count, width;  // units, and numbers of a row of values

  // The units of keys begin ... end; begin is the first of one, what is past the end is zero among the values.
  void find(const Batch& batch, const Tile& tile, int64_t begin, int64_t end, UnitMemory& memory) {
    int64_t first = begin / UNIT, last = (tile.end - 1) / UNIT, even = up_to(end - begin, 2 * UNIT) / UNIT;
    count = up_to(end - begin, UNIT) / UNIT, width = up_to(batch.value_size, WIDTH);
    Units keys{batch, batch.keys, tile}, values{batch, batch.values, tile};
    bool in_place = batch.tiled && !batch.keys.scales;
    bf16 *own_keys = nullptr, *own_values = room(memory.values, SPAN * width), *rows = nullptr;
    if (!in_place) own_keys = room(memory.keys, SPAN * batch.size), rows = room(memory.rows, UNIT * batch.size);
    for (int64_t i = 0; i < count; ++i) {
      const bf16 *&key_unit = units[i], *&value_unit = units[even + i];
      int64_t here = std::min<int64_t>(UNIT, end - begin - i * UNIT), next = std::min(last, first + i + AHEAD_UNITS);
      bf16 *to_keys = own_keys + i * UNIT * batch.size, *to_values = own_values + i * UNIT * width;
      if (in_place) {
        key_unit = keys.in_place(first + i), value_unit = values.in_place(first + i);
        if (here == UNIT) continue;
        std::memcpy(to_values, value_unit, UNIT * width * sizeof(bf16));
      } else if (batch.tiled) {
        keys.widen_unit(first + i, next, to_keys, key_scales + i * UNIT);
        values.widen_unit(first + i, next, to_values, value_scales + i * UNIT);
        key_unit = to_keys;
      } else {
        keys.stage(first + i, here, rows, batch.has_scales() ? key_scales + i * UNIT : nullptr);
        pack_keys(rows, batch.size, to_keys);
        if (!batch.shared) values.stage(first + i, here, rows, batch.has_scales() ? value_scales + i * UNIT : nullptr);
        pack_values(rows, batch.size, batch.value_size, width, to_values);
        key_unit = to_keys;
      }
      value_unit = to_values;
      for (int64_t key = here; key < UNIT; ++key) {
        value_scales[i * UNIT + key] = 0.0f;
        for (int64_t j = 0; j < width; ++j) to_values[(key / 2 * width + j) * 2 + key % 2] = 0;
      }
    }
    if (count < even) units[count] = units[count - 1];
    for (int64_t i = 0; i < AHEAD_UNITS; ++i)
      units[even + count + i] = in_place ? keys.in_place(std::min(last, first + count + i)) : own_keys;
  }

  const bf16* const* keys() const { return units; }
  const bf16* const* values() const { return units + up_to(count, 2); }
};

}  // namespace
