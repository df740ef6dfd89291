// Latent attention apart from its products with latents: norm, rope, and the per-head weights before and after.
#include <cfloat>
#include <vector>

#include "attention_inner.h"
#include "replay.h"
#include "thread_pool.h"

namespace {

constexpr int64_t TOKENS = 16;  // tokens that are multiplied with a head's weights while these are in the cache
constexpr int64_t ROWS = 4;     // weight rows that are added at once

template <typename T>
inline void rotate_pairs(T* numbers, const T* cos, const T* sin, int64_t size, bool interleaved) {
  int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : size / 2;
  for (int64_t i = 0, low = 0; i < size / 2; ++i, low += step) {
    float a = as_float(numbers[low]), b = as_float(numbers[low + apart]);
    set(numbers[low], a * as_float(cos[low]) - b * as_float(sin[low]));
    set(numbers[low + apart], b * as_float(cos[low + apart]) + a * as_float(sin[low + apart]));
  }
}

// Rounds as torch does: before the product with the weight, and after it.
template <typename T>
inline void normalize(const T* from, const T* weight, T* to, int64_t size, float eps) {
  float squares = 0;
  for (int64_t i = 0; i < size; ++i) squares += as_float(from[i]) * as_float(from[i]);
  float scale = 1.0f / std::sqrt(squares / size + eps);
  for (int64_t i = 0; i < size; ++i) {
    T scaled;
    set(scaled, as_float(from[i]) * scale);
    set(to[i], as_float(weight[i]) * as_float(scaled));
  }
}

// Quantizes to int8 (-127 to 127); returns the scale. See layer_cache.py.
template <typename T>
inline float round_part(const T* from, int8_t* to, int64_t size) {
  float peak = 0;
  for (int64_t i = 0; i < size; ++i) {
    float value = std::fabs(as_float(from[i]));
    peak = value <= peak ? peak : value;  // NaN stays NaN
  }
  float scale = std::max(peak / 127.0f, FLT_MIN);
  if (!std::isfinite(peak)) scale = peak;
  for (int64_t i = 0; i < size; ++i) to[i] = int8_t(std::isfinite(scale) ? std::nearbyint(as_float(from[i]) / scale) : 0.0f);
  return scale;
}

// total += numbers (count, at most ROWS) times rows. Not inlined, so that it rounds identically for any number of tokens.
template <typename T>
__attribute__((noinline)) void add_rows(float* total, const T* numbers, const T* rows, int64_t count, int64_t size) {
  float factor[ROWS] = {};
  int64_t whole = size / WIDTH * WIDTH;
  for (int64_t row = 0; row < count; ++row) factor[row] = as_float(numbers[row]);
  if (count == ROWS)
    for (int64_t i = 0; i < whole; i += WIDTH) {
      floats sum_here = load<floats>(total + i);
      for (int64_t row = 0; row < ROWS; ++row) sum_here += load_floats(rows + row * size + i) * factor[row];
      store(total + i, sum_here);
    }
  else
    for (int64_t row = 0; row < count; ++row)
      for (int64_t i = 0; i < whole; i += WIDTH)
        store(total + i, load<floats>(total + i) + load_floats(rows + row * size + i) * factor[row]);
  for (int64_t i = whole; i < size; ++i)
    for (int64_t row = 0; row < count; ++row) total[i] += as_float(rows[row * size + i]) * factor[row];
}

// out = rows (count, at most ROWS) times numbers. Not inlined, so that it rounds identically for any number of tokens.
template <typename T>
__attribute__((noinline)) void multiply_rows(const float* numbers, const T* rows, T* out, int64_t count, int64_t size) {
  floats total[ROWS] = {};
  int64_t whole = size / WIDTH * WIDTH;
  if (count == ROWS)
    for (int64_t i = 0; i < whole; i += WIDTH) {
      floats here = load<floats>(numbers + i);
      for (int64_t row = 0; row < ROWS; ++row) total[row] += load_floats(rows + row * size + i) * here;
    }
  else
    for (int64_t row = 0; row < count; ++row)
      for (int64_t i = 0; i < whole; i += WIDTH) total[row] += load_floats(rows + row * size + i) * load<floats>(numbers + i);
  for (int64_t row = 0; row < count; ++row) {
    float value = sum(total[row]);
    for (int64_t i = whole; i < size; ++i) value += as_float(rows[row * size + i]) * numbers[i];
    set(out[row], value);
  }
}

// Thread-local memory for the rows of a head's tokens.
float* row_memory(int64_t rows, int64_t size) {
  static thread_local std::vector<float> memory;  // kept from call to call, so that nothing is allocated
  if (int64_t(memory.size()) < rows * size) memory.resize(rows * size);
  return memory.data();
}

// Calls run(head, first token, end) for each head and block of tokens; the blocks of a head are consecutive.
template <typename Run>
void for_heads(int64_t tokens, int64_t heads, int threads, Run run) {
  int64_t parts = (tokens + TOKENS - 1) / TOKENS;
  for_each(threads, heads * parts, [&](int64_t piece) {
    int64_t first = piece % parts * TOKENS;
    run(piece / parts, first, std::min(tokens, first + TOKENS));
  });
}

// Applies rope to the last dimensions of q (tokens, heads, size) in place, and writes the normalized latent and the rotated key of kv
// (tokens, rank + rotated; rows `stride` apart) to their slots of (slots, rank + rotated): in the cache's dtype, with scales (slots, 2) if
// it is int8. Angles (tokens, rotated).
template <typename T>
void write(T* q, const T* kv, const T* cos, const T* sin, const T* norm, const int64_t* slots, void* cache, float* scales, int64_t tokens,
           int64_t heads, int64_t size, int64_t rank, int64_t rotated, int64_t stride, float eps, int interleaved, Dtype dtype, int threads) {
  for_each(threads, tokens, [&](int64_t token) {
    static thread_local std::vector<T> memory;  // kept from call to call, so that nothing is allocated
    int64_t width = rank + rotated, first = slots[token] * width;
    if (int64_t(memory.size()) < width) memory.resize(width);
    const T *own_cos = cos + token * rotated, *own_sin = sin + token * rotated;
    for (int64_t head = 0; head < heads; ++head)
      rotate_pairs(q + (token * heads + head + 1) * size - rotated, own_cos, own_sin, rotated, interleaved);
    T* row = memory.data();
    normalize(kv + token * stride, norm, row, rank, eps);
    std::memcpy(row + rank, kv + token * stride + rank, rotated * sizeof(T));
    rotate_pairs(row + rank, own_cos, own_sin, rotated, interleaved);
    if (dtype == Dtype::INT8) {
      scales[2 * slots[token]] = round_part(row, (int8_t*)cache + first, rank);
      scales[2 * slots[token] + 1] = round_part(row + rank, (int8_t*)cache + first + rank, rotated);
      return;
    }
    with_dtype(dtype, cache, [&](auto* numbers) {
      for (int64_t i = 0; i < width; ++i) set(numbers[first + i], as_float(row[i]));
    });
  });
}

// Absorbed queries: out (tokens, heads, rank + rotated) from q (tokens, heads, unrotated + rotated) and weight (heads, unit, rank), whose
// first rows of each head are its key weights. The rotated part is copied.
template <typename T>
void absorb(const T* q, const T* weight, T* out, int64_t tokens, int64_t heads, int64_t unrotated, int64_t rotated, int64_t unit,
            int64_t rank, int threads) {
  for_heads(tokens, heads, threads, [&](int64_t head, int64_t first, int64_t end) {
    float* totals = row_memory(end - first, rank);
    std::fill_n(totals, (end - first) * rank, 0.0f);
    const T* rows = weight + head * unit * rank;
    for (int64_t row = 0; row < unrotated; row += ROWS)
      for (int64_t token = first; token < end; ++token)
        add_rows(totals + (token - first) * rank, q + (token * heads + head) * (unrotated + rotated) + row, rows + row * rank,
                 std::min(ROWS, unrotated - row), rank);
    for (int64_t token = first; token < end; ++token) {
      T* to = out + (token * heads + head) * (rank + rotated);
      const float* from = totals + (token - first) * rank;
      int64_t i = 0;
      for (; i + WIDTH <= rank; i += WIDTH) store_floats(to + i, load<floats>(from + i));
      for (; i < rank; ++i) set(to[i], from[i]);
      std::memcpy(to + rank, q + (token * heads + head) * (unrotated + rotated) + unrotated, rotated * sizeof(T));
    }
  });
}

// Values from sums of latents: out (tokens, heads, unit - unrotated) from sums (tokens, heads, rank) and the value rows of each head's
// weight.
template <typename T>
void expand(const T* sums, const T* weight, T* out, int64_t tokens, int64_t heads, int64_t unrotated, int64_t unit, int64_t rank,
            int threads) {
  int64_t size = unit - unrotated;
  for_heads(tokens, heads, threads, [&](int64_t head, int64_t first, int64_t end) {
    const T* rows = weight + (head * unit + unrotated) * rank;
    float* wide = row_memory(end - first, rank);
    for (int64_t token = first; token < end; ++token) {
      const T* from = sums + (token * heads + head) * rank;
      float* to = wide + (token - first) * rank;
      int64_t i = 0;
      for (; i + WIDTH <= rank; i += WIDTH) store(to + i, load_floats(from + i));
      for (; i < rank; ++i) to[i] = as_float(from[i]);
    }
    for (int64_t row = 0; row < size; row += ROWS)
      for (int64_t token = first; token < end; ++token)
        multiply_rows(wide + (token - first) * rank, rows + row * rank, out + (token * heads + head) * size + row,
                      std::min(ROWS, size - row), rank);
  });
}

}  // namespace

// C functions for ctypes; latent.py checks shapes and dtypes before the call. See write, absorb and expand.
extern "C" {

#define OF_TYPE(T, NAME)                                                                                                        \
  void write_latent_##NAME(T* q, const T* kv, const T* cos, const T* sin, const T* norm, const int64_t* slots, void* cache,     \
                           float* scales, int64_t tokens, int64_t heads, int64_t size, int64_t rank, int64_t rotated,           \
                           int64_t stride, float eps, int interleaved, int cache_dtype, int threads) {                          \
    write(q, kv, cos, sin, norm, slots, cache, scales, tokens, heads, size, rank, rotated, stride, eps, interleaved,            \
          Dtype(cache_dtype), threads);                                                                                         \
  }                                                                                                                             \
  void absorb_queries_##NAME(const T* q, const T* weight, T* out, int64_t tokens, int64_t heads, int64_t unrotated,             \
                             int64_t rotated, int64_t unit, int64_t rank, int threads) {                                        \
    absorb(q, weight, out, tokens, heads, unrotated, rotated, unit, rank, threads);                                             \
  }                                                                                                                             \
  void expand_values_##NAME(const T* sums, const T* weight, T* out, int64_t tokens, int64_t heads, int64_t unrotated,           \
                            int64_t unit, int64_t rank, int threads) {                                                          \
    expand(sums, weight, out, tokens, heads, unrotated, unit, rank, threads);                                                   \
  }                                                                                                                             \
  REPLAYABLE(write_latent_##NAME)                                                                                               \
  REPLAYABLE(absorb_queries_##NAME)                                                                                             \
  REPLAYABLE(expand_values_##NAME)
OF_TYPE(bf16, bfloat16)
OF_TYPE(float, float32)
OF_TYPE(half, float16)
#undef OF_TYPE

}  // extern "C"
