// The keys and values of a span as attention multiplies them: where the cache holds them, or laid out for it.
#pragma once

#include <type_traits>
#include <vector>

#include "units.h"

namespace {

constexpr int64_t UNITS = SPAN / UNIT;

// (slots, KV heads, size), or in tiles (blocks, KV heads, units of a block; see units.h); in any dtype, in int8 with scales
// (slots, KV heads), or (blocks, KV heads, keys of a block). Where values are part of keys there is one KV head, and scales are
// (slots, 2): of the values, and of what is behind them.
struct Cache {
  const void* data;
  const float* scales;
  Dtype dtype;
};

// A piece of work: some query tokens of a sequence, for the heads that read kv_heads KV heads from kv on, and the keys that they see.
struct Tile {
  int64_t sequence, kv, kv_heads;
  int64_t first, count;                // tokens from the sequence's first new one
  int64_t begin, end;                  // keys
  int64_t first_span, end_span;        // of these
  int64_t whole;                       // where they are dealt to several threads; else -1

  // The keys of a span that it reads; the first is the first of a unit.
  int64_t first_key(int64_t span) const { return std::max(span * SPAN, begin / UNIT * UNIT); }
  int64_t end_key(int64_t span) const { return std::min((span + 1) * SPAN, end); }
};

// What all sequences have in common.
struct Batch {
  const void* q;
  Cache keys, values;
  const int64_t *tables, *table_ptr, *row_ptr, *context_lens, *head_ptr;
  void* out;
  Dtype dtype;  // of queries and of what comes out
  int64_t heads, kv_heads, size, block_size;
  bool tiled;
  float scale;
  int64_t window, value_size;
  bool shared;         // values are the first numbers of the keys
  const float* sinks;  // of each head: a logit that counts without a value; null for none

  int64_t even_size() const { return up_to(size, 2); }
  bool has_scales() const { return keys.scales && !shared; }  // that are not in the numbers already, as they are laid out
  int64_t group(int64_t kv, int64_t kv_heads = 1) const { return head_ptr[kv + kv_heads] - head_ptr[kv]; }
  int64_t rows(const Tile& tile) const { return tile.count * group(tile.kv, tile.kv_heads); }
  // The position of a tile's first token in its sequence.
  int64_t position(const Tile& tile) const {
    return context_lens[tile.sequence] - (row_ptr[tile.sequence + 1] - row_ptr[tile.sequence]) + tile.first;
  }
  int64_t width() const { return up_to(value_size, PANEL); }  // of a row of sums
};

template <typename T, typename Allocator>
T* room(std::vector<T, Allocator>& memory, int64_t size) {
  if (int64_t(memory.size()) < size) memory.resize(size);
  return memory.data();
}

// Numbers of a cache as numbers that are multiplied; bfloat16 has all whole ones of int8.
inline void convert(bf16* to, const int8_t* from) { store(to, low_halves((words)load_floats(from) >> 16)); }
template <typename To, typename From>
inline void convert(To* to, const From* from) {
  store_floats(to, load_floats(from));
}

// So many numbers times a scale.
template <typename To, typename From>
inline void multiply_by(float scale, const From* from, To* to, int64_t count) {
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) store_floats(to + i, load_floats(from + i) * scale);
  for (; i < count; ++i) set(to[i], as_float(from[i]) * scale);
}

// use(numbers) with the type of those of a cache.
template <typename Use>
inline void with_numbers(const Cache& cache, Use use) {
  if (cache.dtype == Dtype::INT8) use((const int8_t*)cache.data);
  else with_dtype(cache.dtype, (void*)cache.data, use);
}

// The units of a tile's span, of a KV head's keys or values.
template <typename Element>
struct Units {
  const Batch& batch;
  const Cache& cache;
  const Tile& tile;
  int64_t kv;

  const int64_t* table() const { return batch.tables + batch.table_ptr[tile.sequence]; }

  // Its first key among those of all blocks' KV heads, in tiles.
  int64_t key_of(int64_t unit) const {
    int64_t units = batch.block_size / UNIT;
    return (table()[unit / units] * batch.kv_heads + kv) * batch.block_size + unit % units * UNIT;
  }

  const Element* in_place(int64_t unit) const { return (const Element*)cache.data + key_of(unit) * batch.size; }

  // Whether its rows, all of which are seen, stand one after another as they are multiplied.
  bool has_rows(int64_t unit, int64_t count) const {
    bool is_whole = count == UNIT && unit * UNIT >= tile.begin && batch.block_size % UNIT == 0;
    return is_whole && batch.kv_heads == 1 && batch.size % 2 == 0 && cache.dtype == dtype_of((const Element*)nullptr);
  }

  // A unit of a cache in tiles of another dtype; of int8 without the scales, which are exact.
  void convert_unit(int64_t unit, int64_t next, Element* to, float* scales) const {
    with_numbers(cache, [&](auto* numbers) {
      auto* from = numbers + key_of(unit) * batch.size;
      auto* soon = (const char*)(numbers + key_of(next) * batch.size);
      for (int64_t i = 0; i < UNIT * batch.size; i += WIDTH) {
        int64_t bytes = i * sizeof(*from);
        if (bytes % 64 == 0) __builtin_prefetch(soon + bytes);
        convert(to + i, from + i);
      }
    });
    if (!cache.scales) return;
    __builtin_prefetch(cache.scales + key_of(next));
    std::memcpy(scales, cache.scales + key_of(unit), UNIT * sizeof(float));
  }

  // Rows of a cache that is not in tiles: 16 (or fewer, then zeros) one after another, each with a zero behind it if its size is
  // odd. Zeros, too, before the first key that is seen: the table need not say where those are.
  void stage(int64_t unit, int64_t count, Element* rows, float* scales) const {
    for (int64_t key = 0; key < UNIT; ++key) {
      Element* to = rows + key * batch.even_size();
      int64_t at = unit * UNIT + key;
      bool is_seen = key < count && at >= tile.begin;
      if (scales) scales[key] = 0.0f;
      std::fill(to + (is_seen ? batch.size : 0), to + batch.even_size(), Element(0));
      if (!is_seen) continue;
      int64_t row = (table()[at / batch.block_size] * batch.block_size + at % batch.block_size) * batch.kv_heads + kv;
      with_numbers(cache, [&](auto* numbers) {
        auto* from = numbers + row * batch.size;
        if (batch.shared && cache.scales) {
          int64_t count = batch.value_size;
          multiply_by(cache.scales[2 * row], from, to, count);
          multiply_by(cache.scales[2 * row + 1], from + count, to + count, batch.size - count);
        } else if (std::is_same_v<const Element*, decltype(from)> || std::is_same_v<Element*, decltype(from)>)
          std::memcpy(to, from, batch.size * sizeof(Element));
        else
          for (int64_t i = 0; i < batch.size; ++i) set(to[i], as_float(from[i]));
      });
      if (scales) scales[key] = cache.scales[row];
    }
  }
};

inline void pack_keys(const bf16* rows, int64_t size, bf16* to) {
  transpose_rows((const uint32_t*)rows, size / 2, UNIT, size / 2,
                 [&](int64_t pair, words column) { store(to + pair * 2 * UNIT, column); });
}
inline void pack_keys(const float* rows, int64_t size, float* to) {
  for (int64_t i = 0; i < size; i += 2, to += 2 * UNIT)
    for (int64_t key = 0; key < UNIT; ++key) std::memcpy(to + 2 * key, rows + key * size + i, 2 * sizeof(float));
}

// 16 numbers of each of two keys as pairs.
inline void pair_up(const bf16* even, const bf16* odd, bf16* to) {
  store(to, widen_words(load<halves>(even)) | widen_words(load<halves>(odd)) << 16);
}
inline void pair_up(const float* even, const float* odd, float* to) {
  for (int64_t i = 0; i < WIDTH; ++i) to[2 * i] = even[i], to[2 * i + 1] = odd[i];
}

// Of rows of any length the first size numbers, and zeros up to width.
template <typename Element>
inline void pack_values(const Element* rows, int64_t length, int64_t size, int64_t width, Element* to) {
  for (int64_t key = 0; key < UNIT; key += 2, rows += 2 * length, to += 2 * width) {
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) pair_up(rows + i, rows + length + i, to + 2 * i);
    for (; i < width; ++i)
      for (int odd = 0; odd < 2; ++odd) to[2 * i + odd] = i < size ? rows[odd * length + i] : Element(0);
  }
}

// Units that are laid out anew.
template <typename Element>
struct UnitMemory {
  LineVector<Element> rows, keys, values;
};

// Where the units of a span are: keys, then values, then the next span's, as many.
template <typename Element>
struct Span {
  const Element* units[4 * (UNITS + 1) + AHEAD_UNITS];
  float key_scales[SPAN], value_scales[SPAN];
  int64_t count, width;  // units, and numbers of a row of values

  // The units of keys begin ... end; begin is the first of one, what is past the end is zero among the values. With gathers these stand one
  // after another, an even number of units. Of the next span only the first keys are found unless it looks further.
  void find(const Batch& batch, const Tile& tile, int64_t kv, int64_t begin, int64_t end, bool gathers, bool looks_further,
            UnitMemory<Element>& memory) {
    int64_t first = begin / UNIT, last = (tile.end - 1) / UNIT, even = up_to(end - begin, 2 * UNIT) / UNIT;
    int64_t size = batch.even_size();
    count = up_to(end - begin, UNIT) / UNIT, width = up_to(batch.value_size, WIDTH);
    Units<Element> keys{batch, batch.keys, tile, kv}, values{batch, batch.values, tile, kv};
    bool in_place = batch.tiled && batch.keys.dtype == dtype_of((const Element*)nullptr);
    Element *own_keys = nullptr, *own_values = room(memory.values, SPAN * width), *rows = nullptr;
    if (!in_place) own_keys = room(memory.keys, SPAN * size), rows = room(memory.rows, UNIT * size);
    for (int64_t i = 0; i < count; ++i) {
      const Element *&key_unit = units[i], *&value_unit = units[even + i];
      int64_t here = std::min<int64_t>(UNIT, end - begin - i * UNIT), next = std::min(last, first + i + AHEAD_UNITS);
      Element *to_keys = own_keys + i * UNIT * size, *to_values = own_values + i * UNIT * width;
      if (in_place) {
        key_unit = keys.in_place(first + i), value_unit = values.in_place(first + i);
        if (here == UNIT && !gathers) continue;
        std::memcpy(to_values, value_unit, UNIT * width * sizeof(Element));
      } else if (batch.tiled) {
        keys.convert_unit(first + i, next, to_keys, key_scales + i * UNIT);
        values.convert_unit(first + i, next, to_values, value_scales + i * UNIT);
        key_unit = to_keys;
      } else {
        const Element* key_rows = rows;
        if (keys.has_rows(first + i, here)) key_rows = keys.in_place(first + i);
        else keys.stage(first + i, here, rows, batch.has_scales() ? key_scales + i * UNIT : nullptr);
        pack_keys(key_rows, size, to_keys);
        if (!batch.shared) values.stage(first + i, here, rows, batch.has_scales() ? value_scales + i * UNIT : nullptr);
        pack_values(batch.shared ? key_rows : rows, size, batch.value_size, width, to_values);
        key_unit = to_keys;
      }
      value_unit = to_values;
      for (int64_t key = here; key < UNIT; ++key) {
        value_scales[i * UNIT + key] = 0.0f;
        for (int64_t j = 0; j < width; ++j) to_values[(key / 2 * width + j) * 2 + key % 2] = 0;
      }
    }
    if (count < even) units[count] = units[count - 1];
    if (count < even && gathers) std::fill_n(own_values + count * UNIT * width, UNIT * width, Element(0));
    auto next = [&](const Units<Element>& of, int64_t i) { return in_place ? of.in_place(std::min(last, first + count + i)) : own_keys; };
    int64_t further = looks_further ? count : 0;
    for (int64_t i = 0; i < further; ++i) units[even + count + i] = next(keys, i), units[even + 2 * count + i] = next(values, i);
    for (int64_t i = 0; i < AHEAD_UNITS; ++i) units[even + count + 2 * further + i] = next(keys, i);
  }

  const Element* const* keys() const { return units; }
  const Element* const* values() const { return units + up_to(count, 2); }

  // What is fetched while keys, and while values are read: what comes soon, or the same of the next span.
  const Element* const* soon_keys(bool looks_further) const { return keys() + (looks_further ? up_to(count, 2) + count : AHEAD_UNITS); }
  const Element* const* soon_values(bool looks_further) const { return values() + (looks_further ? 2 * count : AHEAD_UNITS); }
};

}  // namespace
