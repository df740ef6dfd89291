// One pass over the activations each.
#include <cfloat>
#include <vector>

#include "activations.h"
#include "replay.h"
#include "team.h"
#include "units.h"

namespace {

inline void rotate(const bf16* from, const bf16* cos, const bf16* sin, bf16* to, int64_t size) {
  int64_t half = size / 2, i = 0;
  for (; i + WIDTH <= half; i += WIDTH) {
    floats low = load_floats(from + i), high = load_floats(from + i + half);
    store_floats(to + i, low * load_floats(cos + i) - high * load_floats(sin + i));
    store_floats(to + i + half, high * load_floats(cos + i + half) + low * load_floats(sin + i + half));
  }
  for (; i < half; ++i) {
    float low = widen(from[i]), high = widen(from[i + half]);
    to[i] = narrow(low * widen(cos[i]) - high * widen(sin[i]));
    to[i + half] = narrow(high * widen(cos[i + half]) + low * widen(sin[i + half]));
  }
}

// Norms of all heads over their dimensions, with weights (size) in bfloat16, or in float32 where they are wide; those of values
// have none.
struct HeadNorms {
  const void *q, *k;
  float eps;
  int32_t after_rotation, is_wide, values;
};

// Positions of the heads of all tokens: angles (tokens, rotated) of their first dimensions.
struct Positions {
  const bf16 *cos, *sin;
  const HeadNorms* norms;  // null for none
  int64_t size, rotated;
  bool interleaved;  // pairs (2i, 2i + 1) instead of (i, i + rotated / 2)
};

inline void normalize(float* head, const HeadNorms& norms, const void* weight, int64_t size) {
  float squares = 0;
  for (int64_t i = 0; i < size; ++i) squares += head[i] * head[i];
  float scale = 1.0f / std::sqrt(squares / size + norms.eps);
  if (!weight)
    for (int64_t i = 0; i < size; ++i) head[i] *= scale;
  else if (norms.is_wide)
    for (int64_t i = 0; i < size; ++i) head[i] *= scale * ((const float*)weight)[i];
  else
    for (int64_t i = 0; i < size; ++i) head[i] *= scale * widen(((const bf16*)weight)[i]);
}

inline void rotate_pairs(float* head, const bf16* cos, const bf16* sin, int64_t size, int64_t step, int64_t apart) {
  for (int64_t i = 0, low = 0; i < size / 2; ++i, low += step) {
    float a = head[low], b = head[low + apart];
    head[low] = a * widen(cos[low]) - b * widen(sin[low]);
    head[low + apart] = b * widen(cos[low + apart]) + a * widen(sin[low + apart]);
  }
}

// One head, of the queries or of the keys. What is not only rotated is computed in wide and rounded once.
inline void position(const bf16* from, const Positions& at, bool is_key, int64_t token, float* wide, bf16* to) {
  const bf16 *cos = at.cos + token * at.rotated, *sin = at.sin + token * at.rotated;
  if (!at.norms && !at.interleaved) {
    rotate(from, cos, sin, to, at.rotated);
    if (at.rotated < at.size) std::memcpy(to + at.rotated, from + at.rotated, (at.size - at.rotated) * sizeof(bf16));
    return;
  }
  for (int64_t i = 0; i < at.size; ++i) wide[i] = widen(from[i]);
  const void* weight = !at.norms ? nullptr : is_key ? at.norms->k : at.norms->q;
  if (at.norms && !at.norms->after_rotation) normalize(wide, *at.norms, weight, at.size);
  if (at.interleaved) rotate_pairs(wide, cos, sin, at.rotated, 2, 1);
  else rotate_pairs(wide, cos, sin, at.rotated, 1, at.rotated / 2);
  if (at.norms && at.norms->after_rotation) normalize(wide, *at.norms, weight, at.size);
  for (int64_t i = 0; i < at.size; ++i) to[i] = narrow(wide[i]);
}

inline void normalize_value(const bf16* from, const HeadNorms& norms, int64_t size, float* wide, bf16* to) {
  for (int64_t i = 0; i < size; ++i) wide[i] = widen(from[i]);
  normalize(wide, norms, nullptr, size);
  for (int64_t i = 0; i < size; ++i) to[i] = narrow(wide[i]);
}

// A head in whole numbers within 127 of 0; returns its scale. See layer_cache.py.
inline float round_head(const bf16* from, int8_t* to, int64_t size) {
  float peak = 0;
  for (int64_t i = 0; i < size; ++i) {
    float value = std::fabs(widen(from[i]));
    peak = value <= peak ? peak : value;  // what is no number stays
  }
  float scale = peak / 127.0f;
  if (scale < FLT_MIN) scale = FLT_MIN;
  for (int64_t i = 0; i < size; ++i) to[i] = int8_t(std::isfinite(scale) ? std::nearbyint(widen(from[i]) / scale) : 0.0f);
  return scale;
}

// A token's numbers of a KV head to row, in tiles to their places among those of its unit of keys, or of values. See units.h.
template <typename T>
inline void write_head(T* cache, const T* numbers, int64_t row, int64_t key, int64_t size, bool tiled, bool is_key) {
  T* unit = cache + (row - key) * size;
  if (!tiled) std::memcpy(cache + row * size, numbers, size * sizeof(T));
  else if (is_key)
    for (int64_t i = 0; i < size; i += 2) std::memcpy(unit + i * UNIT + key * 2, numbers + i, 2 * sizeof(T));
  else
    for (int64_t i = 0; i < size; ++i) unit[(key / 2 * size + i) * 2 + key % 2] = numbers[i];
}

// hidden += delta (if there is one); out = hidden / rms(hidden) * weight, rounded where torch rounds: before the product with
// a weight in bfloat16, only after that with one in float32.
template <typename Weight>
void add_norm(bf16* hidden, const bf16* delta, const Weight* weight, bf16* out, int64_t tokens, int64_t size, float eps,
              int threads) {
  auto rounded = [](floats value) { return sizeof(Weight) == sizeof(bf16) ? widen(narrow(value)) : value; };
  auto rounded_one = [](float value) { return sizeof(Weight) == sizeof(bf16) ? widen(narrow(value)) : value; };
  for_each(threads, tokens, [&](int64_t token) {
    bf16 *at = hidden + token * size, *to = out + token * size;
    const bf16* add = delta ? delta + token * size : nullptr;
    floats squares{};
    float rest = 0;
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) {
      floats value = widen(load<halves>(at + i));
      if (add) {
        halves rounded = narrow(value + widen(load<halves>(add + i)));
        store(at + i, rounded);
        value = widen(rounded);
      }
      squares += value * value;
    }
    for (; i < size; ++i) {
      if (add) at[i] = narrow(widen(at[i]) + widen(add[i]));
      rest += widen(at[i]) * widen(at[i]);
    }
    float scale = 1.0f / std::sqrt((sum(squares) + rest) / size + eps);
    for (i = 0; i + WIDTH <= size; i += WIDTH) {
      floats value = rounded(widen(load<halves>(at + i)) * scale);
      store(to + i, narrow(load_floats(weight + i) * value));
    }
    for (; i < size; ++i) to[i] = narrow(as_float(weight[i]) * rounded_one(widen(at[i]) * scale));
  });
}

// out (tokens, size) = activate(gate) * up of the halves of (tokens, 2 size).
template <typename Activate>
void gate_by(Activate activate, const bf16* gate_up, bf16* out, int64_t tokens, int64_t size, int threads) {
  for_each(threads, tokens, [&](int64_t token) {
    const bf16 *gate = gate_up + token * 2 * size, *up = gate + size;
    bf16* to = out + token * size;
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) {
      floats value = widen(narrow(activate(widen(load<halves>(gate + i)))));
      store(to + i, narrow(value * widen(load<halves>(up + i))));
    }
    for (; i < size; ++i) to[i] = narrow(widen(narrow(activate(widen(gate[i])))) * widen(up[i]));
  });
}

}  // namespace

// Plain C functions over pointers, called through ctypes. They check nothing: bfloat16.py checks shapes and types.
extern "C" {

void add_rms_norm(bf16* hidden, const bf16* delta, const void* weight, bf16* out, int64_t tokens, int64_t size, float eps,
                  int is_wide, int threads) {
  if (is_wide) add_norm(hidden, delta, (const float*)weight, out, tokens, size, eps, threads);
  else add_norm(hidden, delta, (const bf16*)weight, out, tokens, size, eps, threads);
}
REPLAYABLE(add_rms_norm)

void silu_and_mul(const bf16* gate_up, bf16* out, int64_t tokens, int64_t size, int threads) {
  gate_by([](auto value) { return silu(value); }, gate_up, out, tokens, size, threads);
}
REPLAYABLE(silu_and_mul)

void gelu_and_mul(const bf16* gate_up, bf16* out, int64_t tokens, int64_t size, int threads) {
  gate_by([](auto value) { return gelu(value); }, gate_up, out, tokens, size, threads);
}
REPLAYABLE(gelu_and_mul)

// From qkv (tokens, (heads + 2 kv_heads) size): rotated queries to q (tokens, heads, size), rotated keys and values to
// their slots of (slots, kv_heads, size): in bfloat16, or in int8 where there are scales (slots, kv_heads); or in tiles, see
// units.h. See Positions.
void rotate_and_write(const bf16* qkv, const bf16* cos, const bf16* sin, const HeadNorms* norms, const int64_t* slots,
                      bf16* q, void* k_cache, float* k_scales, void* v_cache, float* v_scales, int64_t tokens,
                      int64_t heads, int64_t kv_heads, int64_t size, int64_t rotated, int interleaved,
                      int64_t block_size, int tiled, int threads) {
  Positions positions{cos, sin, norms, size, rotated, bool(interleaved)};
  for_each(threads, tokens, [&](int64_t token) {
    static thread_local std::vector<bf16> turned;  // kept from call to call, so that nothing is allocated
    static thread_local std::vector<int8_t> rounded;
    static thread_local std::vector<float> wide;
    if (int64_t(turned.size()) < size) turned.resize(size), rounded.resize(size), wide.resize(size);
    const bf16* from = qkv + token * (heads + 2 * kv_heads) * size;
    for (int64_t head = 0; head < heads; ++head, from += size)
      position(from, positions, false, token, wide.data(), q + (token * heads + head) * size);
    for (int64_t head = 0; head < 2 * kv_heads; ++head, from += size) {
      bool is_key = head < kv_heads;
      int64_t slot = slots[token], kv = head % kv_heads, key = slot % block_size % UNIT;
      int64_t row = slot * kv_heads + kv;
      if (tiled) row = (slot / block_size * kv_heads + kv) * block_size + slot % block_size;
      void* cache = is_key ? k_cache : v_cache;
      float* scales = is_key ? k_scales : v_scales;
      bool is_normal_value = !is_key && norms && norms->values;
      if (is_key) position(from, positions, true, token, wide.data(), turned.data());
      if (is_normal_value) normalize_value(from, *norms, size, wide.data(), turned.data());
      const bf16* numbers = is_key || is_normal_value ? turned.data() : from;
      if (scales) {
        scales[row] = round_head(numbers, rounded.data(), size);
        write_head((int8_t*)cache, rounded.data(), row, key, size, tiled, is_key);
      } else {
        write_head((bf16*)cache, numbers, row, key, size, tiled, is_key);
      }
    }
  });
}
REPLAYABLE(rotate_and_write)

}  // extern "C"
