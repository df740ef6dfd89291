// Keys and values of a span as attention multiplies them: in place in the KV cache, or converted into scratch memory.
#pragma once

#include <type_traits>
#include <vector>

#include "attention_inner.h"

namespace {

constexpr int64_t UNITS = SPAN / UNIT;

// One KV cache (keys or values). Layout (slots, KV heads, size), or tiled (blocks, KV heads, units of a block; see attention_inner.h), in
// any dtype. int8 has scales (slots, KV heads) or (blocks, KV heads, keys of a block). If values are a part of the keys (latent attention),
// there is one KV head, and scales are (slots, 2): of the values, and of the dimensions after them.
struct Cache {
  const void* data;
  const float* scales;
  Dtype dtype;
};

// Work item: `count` query tokens of a sequence, for the heads that read `kv_heads` KV heads from `kv` on, and the range of keys that they
// see.
struct Tile {
  int64_t sequence, kv, kv_heads;
  int64_t first, count;                // tokens, counted from the sequence's first new token
  int64_t begin, end;                  // keys
  int64_t first_span, end_span;        // spans with these keys
  int64_t split;                       // index in `wholes` if the spans are split among threads; else -1

  // Range of keys that the tile reads in a span; it begins at a unit's first key.
  int64_t first_key(int64_t span) const { return std::max(span * SPAN, begin / UNIT * UNIT); }
  int64_t end_key(int64_t span) const { return std::min((span + 1) * SPAN, end); }
};

// Arguments of an attention call that all sequences share.
struct Batch {
  const void* q;
  Cache keys, values;
  const int64_t *tables, *table_ptr, *row_ptr, *context_lens, *head_ptr;
  void* out;
  Dtype dtype;  // of queries and outputs
  int64_t heads, kv_heads, size, block_size;
  bool tiled;
  float scale;
  int64_t window, value_size;
  bool shared;         // values are the first dimensions of the keys
  const float* sinks;  // attention sinks: one logit per head, without a value; null for none
  float cap = 0;       // soft cap of the scores; 0 for none

  int64_t even_size() const { return up_to(size, 2); }
  bool has_scales() const { return keys.scales && !shared; }  // scales that are applied to scores and weights; shared caches are scaled when they are converted
  int64_t group(int64_t kv, int64_t kv_heads = 1) const { return head_ptr[kv + kv_heads] - head_ptr[kv]; }
  int64_t rows(const Tile& tile) const { return tile.count * group(tile.kv, tile.kv_heads); }
  // Position of the tile's first token in its sequence.
  int64_t position(const Tile& tile) const {
    return context_lens[tile.sequence] - (row_ptr[tile.sequence + 1] - row_ptr[tile.sequence]) + tile.first;
  }
  int64_t width() const { return up_to(value_size, PANEL); }  // floats in a row of output sums
};

template <typename T, typename Allocator>
T* room(std::vector<T, Allocator>& memory, int64_t size) {
  if (int64_t(memory.size()) < size) memory.resize(size);
  return memory.data();
}

// Converts 16 cached elements to the kernel's dtype; bfloat16 represents every int8 exactly.
inline void convert(bf16* to, const int8_t* from) { store(to, low_halves((words)load_floats(from) >> 16)); }
template <typename To, typename From>
inline void convert(To* to, const From* from) {
  store_floats(to, load_floats(from));
}

// to[i] = from[i] * scale for `count` elements.
template <typename To, typename From>
inline void multiply_by(float scale, const From* from, To* to, int64_t count) {
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) store_floats(to + i, load_floats(from + i) * scale);
  for (; i < count; ++i) set(to[i], as_float(from[i]) * scale);
}

// Calls use(elements) with the cache's data cast to its dtype.
template <typename Use>
inline void with_numbers(const Cache& cache, Use use) {
  if (cache.dtype == Dtype::INT8) use((const int8_t*)cache.data);
  else with_dtype(cache.dtype, (void*)cache.data, use);
}

// Units of a tile's span in the keys or values of one KV head.
template <typename Element>
struct Units {
  const Batch& batch;
  const Cache& cache;
  const Tile& tile;
  int64_t kv;

  const int64_t* table() const { return batch.tables + batch.table_ptr[tile.sequence]; }

  // Index of a unit's first key in a tiled cache, over blocks, KV heads and keys.
  int64_t key_of(int64_t unit) const {
    int64_t units = batch.block_size / UNIT;
    return (table()[unit / units] * batch.kv_heads + kv) * batch.block_size + unit % units * UNIT;
  }

  const Element* in_place(int64_t unit) const { return (const Element*)cache.data + key_of(unit) * batch.size; }

  // Whether the unit's rows are complete, fully visible, and contiguous in the kernel's dtype, so that they can be used in place.
  bool has_rows(int64_t unit, int64_t count) const {
    bool is_whole = count == UNIT && unit * UNIT >= tile.begin && batch.block_size % UNIT == 0;
    return is_whole && batch.kv_heads == 1 && batch.size % 2 == 0 && cache.dtype == dtype_of((const Element*)nullptr);
  }

  // Converts a unit of a tiled cache of another dtype; int8 is converted exactly, without its scales.
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

  // Copies the rows of a unit from a cache that is not tiled: 16 rows, zero-padded to an even size. Rows after `count` and before the
  // first visible key are zeros: the block table need not be valid there.
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

// Interleaves 16 elements of two keys as pairs.
inline void pair_up(const bf16* even, const bf16* odd, bf16* to) {
  store(to, widen_words(load<halves>(even)) | widen_words(load<halves>(odd)) << 16);
}
inline void pair_up(const float* even, const float* odd, float* to) {
  for (int64_t i = 0; i < WIDTH; ++i) to[2 * i] = even[i], to[2 * i + 1] = odd[i];
}

// Packs the first `size` elements of each row as a unit of values, zero-padded to `width`.
template <typename Element>
inline void pack_values(const Element* rows, int64_t length, int64_t size, int64_t width, Element* to) {
  for (int64_t key = 0; key < UNIT; key += 2, rows += 2 * length, to += 2 * width) {
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) pair_up(rows + i, rows + length + i, to + 2 * i);
    for (; i < width; ++i)
      for (int odd = 0; odd < 2; ++odd) to[2 * i + odd] = i < size ? rows[odd * length + i] : Element(0);
  }
}

// Scratch memory of converted units.
template <typename Element>
struct UnitMemory {
  LineVector<Element> rows, keys, values;
};

// Addresses of a span's units: keys, then values, then as many of the next span for prefetching.
template <typename Element>
struct Span {
  const Element* units[4 * (UNITS + 1) + AHEAD_UNITS];
  float key_scales[SPAN], value_scales[SPAN];
  int64_t count, width;  // number of units; elements of a row of values

  // Sets the addresses of the units with keys begin ... end (begin is a unit's first key); values past the end are zeroed. With `gathers`
  // the values are made contiguous, in an even number of units. Addresses of the next span cover its first keys only, unless
  // looks_further.
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

  // Addresses to prefetch while keys and while values are read: units soon to be read, or those of the next span.
  const Element* const* soon_keys(bool looks_further) const { return keys() + (looks_further ? up_to(count, 2) + count : AHEAD_UNITS); }
  const Element* const* soon_values(bool looks_further) const { return values() + (looks_further ? 2 * count : AHEAD_UNITS); }
};

}  // namespace
