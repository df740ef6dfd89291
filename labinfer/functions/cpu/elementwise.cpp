// Elementwise functions: norms, activations, rope with the KV cache write.
#include <cfloat>
#include <type_traits>
#include <vector>

#include "activations.h"
#include "replay.h"
#include "thread_pool.h"
#include "attention_inner.h"

namespace {

template <typename Number>
inline void rotate(const Number* from, const Number* cos, const Number* sin, Number* to, int64_t size) {
  int64_t middle = size / 2, i = 0;
  for (; i + WIDTH <= middle; i += WIDTH) {
    floats low = load_floats(from + i), high = load_floats(from + i + middle);
    store_floats(to + i, low * load_floats(cos + i) - high * load_floats(sin + i));
    store_floats(to + i + middle, high * load_floats(cos + i + middle) + low * load_floats(sin + i + middle));
  }
  for (; i < middle; ++i) {
    float low = as_float(from[i]), high = as_float(from[i + middle]);
    set(to[i], low * as_float(cos[i]) - high * as_float(sin[i]));
    set(to[i + middle], high * as_float(cos[i + middle]) + low * as_float(sin[i + middle]));
  }
}

// QK norms over each head's dimensions, with weights (size) in the dtype of the heads, or in float32 if `wide`; values have no weights.
struct HeadNorms {
  const void *q, *k;
  float eps;
  int32_t after_rotation, is_wide, values;
};

// Rotary embedding: angles (tokens, rotated) of the first dimensions of each head.
template <typename Number>
struct Positions {
  const Number *cos, *sin;
  const HeadNorms* norms;  // null for none
  int64_t size, rotated;
  bool interleaved;  // pairs (2i, 2i + 1) instead of (i, i + rotated / 2)
};

template <typename Number>
inline void normalize(float* head, const HeadNorms& norms, const void* weight, int64_t size) {
  float squares = 0;
  for (int64_t i = 0; i < size; ++i) squares += head[i] * head[i];
  float scale = 1.0f / std::sqrt(squares / size + norms.eps);
  if (!weight)
    for (int64_t i = 0; i < size; ++i) head[i] *= scale;
  else if (norms.is_wide)
    for (int64_t i = 0; i < size; ++i) head[i] *= scale * ((const float*)weight)[i];
  else
    for (int64_t i = 0; i < size; ++i) head[i] *= scale * as_float(((const Number*)weight)[i]);
}

template <typename Number>
inline void rotate_pairs(float* head, const Number* cos, const Number* sin, int64_t size, int64_t step, int64_t apart) {
  for (int64_t i = 0, low = 0; i < size / 2; ++i, low += step) {
    float a = head[low], b = head[low + apart];
    head[low] = a * as_float(cos[low]) - b * as_float(sin[low]);
    head[low + apart] = b * as_float(cos[low + apart]) + a * as_float(sin[low + apart]);
  }
}

// Norm and rope of one query or key head. If there is more than rope, it is computed in `wide` and rounded once.
template <typename Number>
inline void position(const Number* from, const Positions<Number>& at, bool is_key, int64_t token, float* wide, Number* to) {
  const Number *cos = at.cos + token * at.rotated, *sin = at.sin + token * at.rotated;
  if (!at.norms && !at.interleaved) {
    rotate(from, cos, sin, to, at.rotated);
    if (at.rotated < at.size) std::memcpy(to + at.rotated, from + at.rotated, (at.size - at.rotated) * sizeof(Number));
    return;
  }
  for (int64_t i = 0; i < at.size; ++i) wide[i] = as_float(from[i]);
  const void* weight = !at.norms ? nullptr : is_key ? at.norms->k : at.norms->q;
  if (at.norms && !at.norms->after_rotation) normalize<Number>(wide, *at.norms, weight, at.size);
  if (at.interleaved) rotate_pairs(wide, cos, sin, at.rotated, 2, 1);
  else rotate_pairs(wide, cos, sin, at.rotated, 1, at.rotated / 2);
  if (at.norms && at.norms->after_rotation) normalize<Number>(wide, *at.norms, weight, at.size);
  for (int64_t i = 0; i < at.size; ++i) set(to[i], wide[i]);
}

template <typename Number>
inline void normalize_value(const Number* from, const HeadNorms& norms, int64_t size, float* wide, Number* to) {
  for (int64_t i = 0; i < size; ++i) wide[i] = as_float(from[i]);
  normalize<Number>(wide, norms, nullptr, size);
  for (int64_t i = 0; i < size; ++i) set(to[i], wide[i]);
}

// Quantizes a head to int8 (-127 to 127); returns its scale. See layer_cache.py.
template <typename Number>
inline float round_head(const Number* from, int8_t* to, int64_t size) {
  float peak = 0;
  for (int64_t i = 0; i < size; ++i) {
    float value = std::fabs(as_float(from[i]));
    peak = value <= peak ? peak : value;  // NaN stays NaN
  }
  float scale = peak / 127.0f;
  if (scale < FLT_MIN) scale = FLT_MIN;
  for (int64_t i = 0; i < size; ++i) to[i] = int8_t(std::isfinite(scale) ? std::nearbyint(as_float(from[i]) / scale) : 0.0f);
  return scale;
}

// Writes a token's keys or values of a KV head to its row, or to its places in a unit of a tiled cache. See attention_inner.h.
template <typename T>
inline void write_head(T* cache, const T* numbers, int64_t row, int64_t key, int64_t size, bool tiled, bool is_key) {
  T* unit = cache + (row - key) * size;
  if (!tiled) std::memcpy(cache + row * size, numbers, size * sizeof(T));
  else if (is_key)
    for (int64_t i = 0; i < size; i += 2) std::memcpy(unit + i * UNIT + key * 2, numbers + i, 2 * sizeof(T));
  else
    for (int64_t i = 0; i < size; ++i) unit[(key / 2 * size + i) * 2 + key % 2] = numbers[i];
}

// Rounds to the precision of a type; the result is still a float.
template <typename Number>
inline float rounded(float value) {
  Number number;
  set(number, value);
  return as_float(number);
}

// hidden += delta (if given); out = hidden / rms(hidden) * weight, rounded as torch rounds: a 16-bit weight multiplies the rounded value, a
// float32 weight the unrounded one.
template <typename Number, typename Weight>
void add_norm(Number* hidden, const Number* delta, const Weight* weight, Number* out, int64_t tokens, int64_t size, float eps,
              int threads) {
  for_each(threads, tokens, [&](int64_t token) {
    Number *at = hidden + token * size, *to = out + token * size;
    const Number* add = delta ? delta + token * size : nullptr;
    floats squares{};
    float rest = 0;
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) {
      floats value = load_floats(at + i);
      if (add) {
        value = rounded<Number>(value + load_floats(add + i));
        store_floats(at + i, value);
      }
      squares += value * value;
    }
    for (; i < size; ++i) {
      if (add) set(at[i], as_float(at[i]) + as_float(add[i]));
      rest += as_float(at[i]) * as_float(at[i]);
    }
    float scale = 1.0f / std::sqrt((sum(squares) + rest) / size + eps);
    for (i = 0; i + WIDTH <= size; i += WIDTH) {
      floats value = rounded<Weight>(load_floats(at + i) * scale);
      store_floats(to + i, load_floats(weight + i) * value);
    }
    for (; i < size; ++i) set(to[i], as_float(weight[i]) * rounded<Weight>(as_float(at[i]) * scale));
  });
}

// out (tokens, size) = activate(gate) * up, from the halves of (tokens, 2 size).
template <typename Activate, typename Number>
void gate_by(const Number* gate_up, Number* out, int64_t tokens, int64_t size, int threads) {
  for_each(threads, tokens, [&](int64_t token) {
    const Number *gate = gate_up + token * 2 * size, *up = gate + size;
    Number* to = out + token * size;
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH)
      store_floats(to + i, gated<Activate>(load_floats(gate + i), load_floats(up + i), gate));
    if (i == size) return;
    Number gates[WIDTH]{}, ups[WIDTH]{};  // a scalar exponential would differ: a column's bits depend on where its shard begins
    std::copy(gate + i, gate + size, gates), std::copy(up + i, up + size, ups);
    store_floats(gates, gated<Activate>(load_floats(gates), load_floats(ups), gate));
    std::copy(gates, gates + size - i, to + i);
  });
}

// Writes a head of keys or values to its cache row in the cache's dtype.
template <typename Number, typename T>
inline void convert_head(T* cache, const Number* from, T* memory, int64_t row, int64_t key, int64_t size, bool tiled,
                         bool is_key) {
  if constexpr (std::is_same_v<Number, T>) {
    write_head(cache, from, row, key, size, tiled, is_key);
  } else {
    for (int64_t i = 0; i < size; ++i) set(memory[i], as_float(from[i]));
    write_head(cache, memory, row, key, size, tiled, is_key);
  }
}

// From qkv (tokens, (heads + 2 kv_heads) size): writes rotated queries to q (tokens, heads, size), and rotated keys and values to their
// slots of (slots, kv_heads, size) in the cache's dtype (int8 with scales (slots, kv_heads)), or tiled, see attention_inner.h. See
// Positions.
template <typename Number>
void rotate_all(const Number* qkv, const Positions<Number>& positions, const int64_t* slots, Number* q, void* k_cache,
                float* k_scales, void* v_cache, float* v_scales, int64_t tokens, int64_t heads, int64_t kv_heads,
                Dtype cache_dtype, int64_t block_size, bool tiled, int threads) {
  int64_t size = positions.size;
  for_each(threads, tokens, [&](int64_t token) {
    static thread_local std::vector<Number> turned;  // kept from call to call, so that nothing is allocated
    static thread_local std::vector<float> wide;
    if (int64_t(turned.size()) < size) turned.resize(size), wide.resize(size);
    const Number* from = qkv + token * (heads + 2 * kv_heads) * size;
    for (int64_t head = 0; head < heads; ++head, from += size)
      position(from, positions, false, token, wide.data(), q + (token * heads + head) * size);
    for (int64_t head = 0; head < 2 * kv_heads; ++head, from += size) {
      bool is_key = head < kv_heads;
      int64_t slot = slots[token], kv = head % kv_heads, key = slot % block_size % UNIT;
      int64_t row = slot * kv_heads + kv;
      if (tiled) row = (slot / block_size * kv_heads + kv) * block_size + slot % block_size;
      void* cache = is_key ? k_cache : v_cache;
      bool is_normal_value = !is_key && positions.norms && positions.norms->values;
      if (is_key) position(from, positions, true, token, wide.data(), turned.data());
      if (is_normal_value) normalize_value(from, *positions.norms, size, wide.data(), turned.data());
      const Number* numbers = is_key || is_normal_value ? turned.data() : from;
      float* memory = wide.data();  // reuses `wide`, which is large enough for any dtype
      if (cache_dtype == Dtype::INT8) {
        (is_key ? k_scales : v_scales)[row] = round_head(numbers, (int8_t*)memory, size);
        write_head((int8_t*)cache, (const int8_t*)memory, row, key, size, tiled, is_key);
      } else {
        with_dtype(cache_dtype, cache, [&](auto* typed) {
          convert_head(typed, numbers, (decltype(typed))memory, row, key, size, tiled, is_key);
        });
      }
    }
  });
}

}  // namespace

// C functions for ctypes; floats.py checks shapes and dtypes before the call.
extern "C" {

#define ELEMENTWISE(NAME, NUMBER)                                                                                            \
  void add_rms_norm##NAME(NUMBER* hidden, const NUMBER* delta, const void* weight, NUMBER* out, int64_t tokens,               \
                          int64_t size, float eps, int is_wide, int threads) {                                               \
    if (is_wide) add_norm(hidden, delta, (const float*)weight, out, tokens, size, eps, threads);                             \
    else add_norm(hidden, delta, (const NUMBER*)weight, out, tokens, size, eps, threads);                                    \
  }                                                                                                                          \
  REPLAYABLE(add_rms_norm##NAME)                                                                                             \
  void silu_and_mul##NAME(const NUMBER* gate_up, NUMBER* out, int64_t tokens, int64_t size, int threads) {                   \
    gate_by<Silu>(gate_up, out, tokens, size, threads);                                                                      \
  }                                                                                                                          \
  REPLAYABLE(silu_and_mul##NAME)                                                                                             \
  void gelu_and_mul##NAME(const NUMBER* gate_up, NUMBER* out, int64_t tokens, int64_t size, int threads) {                   \
    gate_by<Gelu>(gate_up, out, tokens, size, threads);                                                                      \
  }                                                                                                                          \
  REPLAYABLE(gelu_and_mul##NAME)                                                                                             \
  void rotate_and_write##NAME(const NUMBER* qkv, const NUMBER* cos, const NUMBER* sin, const HeadNorms* norms,               \
                              const int64_t* slots, NUMBER* q, void* k_cache, float* k_scales, void* v_cache,                \
                              float* v_scales, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size,                \
                              int64_t rotated, int interleaved, int cache_dtype, int64_t block_size, int tiled,              \
                              int threads) {                                                                                 \
    rotate_all(qkv, {cos, sin, norms, size, rotated, bool(interleaved)}, slots, q, k_cache, k_scales, v_cache, v_scales,     \
               tokens, heads, kv_heads, Dtype(cache_dtype), block_size, bool(tiled), threads);                               \
  }                                                                                                                          \
  REPLAYABLE(rotate_and_write##NAME)

ELEMENTWISE(_bfloat16, bf16)
ELEMENTWISE(_float32, float)
ELEMENTWISE(_float16, half)

}  // extern "C"
