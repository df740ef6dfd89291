// Latent attention apart from its products with latents: norm, rope, and the per-head weights before and after.
#include <cfloat>
#include <vector>

#include "replay.h"
#include "thread_pool.h"
#include "vectors.h"

namespace {

constexpr int64_t TOKENS = 16;  // tokens that are multiplied with a head's weights while these are in the cache
constexpr int64_t ROWS = 4;     // weight rows that are added at once

inline void rotate_pairs(bf16* numbers, const bf16* cos, const bf16* sin, int64_t size, bool interleaved) {
  int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : size / 2;
  for (int64_t i = 0, low = 0; i < size / 2; ++i, low += step) {
    float a = widen(numbers[low]), b = widen(numbers[low + apart]);
    numbers[low] = narrow(a * widen(cos[low]) - b * widen(sin[low]));
    numbers[low + apart] = narrow(b * widen(cos[low + apart]) + a * widen(sin[low + apart]));
  }
}

// Rounds as torch does: before the product with the weight, and after it.
inline void normalize(const bf16* from, const bf16* weight, bf16* to, int64_t size, float eps) {
  float squares = 0;
  for (int64_t i = 0; i < size; ++i) squares += widen(from[i]) * widen(from[i]);
  float scale = 1.0f / std::sqrt(squares / size + eps);
  for (int64_t i = 0; i < size; ++i) to[i] = narrow(widen(weight[i]) * widen(narrow(widen(from[i]) * scale)));
}

// Quantizes to int8 (-127 to 127); returns the scale. See layer_cache.py.
inline float round_part(const bf16* from, int8_t* to, int64_t size) {
  float peak = 0;
  for (int64_t i = 0; i < size; ++i) {
    float value = std::fabs(widen(from[i]));
    peak = value <= peak ? peak : value;  // NaN stays NaN
  }
  float scale = std::max(peak / 127.0f, FLT_MIN);
  if (!std::isfinite(peak)) scale = peak;
  for (int64_t i = 0; i < size; ++i) to[i] = int8_t(std::isfinite(scale) ? std::nearbyint(widen(from[i]) / scale) : 0.0f);
  return scale;
}

// total += numbers (count, at most ROWS) times rows. Not inlined, so that it rounds identically for any number of tokens.
__attribute__((noinline)) void add_rows(float* total, const bf16* numbers, const bf16* rows, int64_t count, int64_t size) {
  float factor[ROWS] = {};
  for (int64_t row = 0; row < count; ++row) factor[row] = widen(numbers[row]);
  if (count == ROWS) {
    for (int64_t i = 0; i < size; i += WIDTH) {
      floats sum_here = load<floats>(total + i);
      for (int64_t row = 0; row < ROWS; ++row) sum_here += load_floats(rows + row * size + i) * factor[row];
      store(total + i, sum_here);
    }
    return;
  }
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = 0; i < size; i += WIDTH)
      store(total + i, load<floats>(total + i) + load_floats(rows + row * size + i) * factor[row]);
}

// out = rows (count, at most ROWS) times numbers. Not inlined, so that it rounds identically for any number of tokens.
__attribute__((noinline)) void multiply_rows(const float* numbers, const bf16* rows, bf16* out, int64_t count, int64_t size) {
  floats total[ROWS] = {};
  if (count == ROWS)
    for (int64_t i = 0; i < size; i += WIDTH) {
      floats here = load<floats>(numbers + i);
      for (int64_t row = 0; row < ROWS; ++row) total[row] += load_floats(rows + row * size + i) * here;
    }
  else
    for (int64_t row = 0; row < count; ++row)
      for (int64_t i = 0; i < size; i += WIDTH) total[row] += load_floats(rows + row * size + i) * load<floats>(numbers + i);
  for (int64_t row = 0; row < count; ++row) out[row] = narrow(sum(total[row]));
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

}  // namespace

// C functions for ctypes; latent.py checks shapes and dtypes before the call.
extern "C" {

// Applies rope to the last dimensions of q (tokens, heads, size) in place, and writes the normalized latent and the rotated key of kv
// (tokens, rank + rotated; rows `stride` apart) to their slots of (slots, rank + rotated): in bfloat16, or in int8 if there are scales
// (slots, 2). Angles (tokens, rotated).
void write_latent(bf16* q, const bf16* kv, const bf16* cos, const bf16* sin, const bf16* norm, const int64_t* slots, void* cache,
                  float* scales, int64_t tokens, int64_t heads, int64_t size, int64_t rank, int64_t rotated, int64_t stride,
                  float eps, int interleaved, int threads) {
  for_each(threads, tokens, [&](int64_t token) {
    static thread_local std::vector<bf16> memory;  // kept from call to call, so that nothing is allocated
    int64_t width = rank + rotated;
    if (int64_t(memory.size()) < width) memory.resize(width);
    const bf16 *own_cos = cos + token * rotated, *own_sin = sin + token * rotated;
    for (int64_t head = 0; head < heads; ++head)
      rotate_pairs(q + (token * heads + head + 1) * size - rotated, own_cos, own_sin, rotated, interleaved);
    bf16* row = scales ? memory.data() : (bf16*)cache + slots[token] * width;
    normalize(kv + token * stride, norm, row, rank, eps);
    std::memcpy(row + rank, kv + token * stride + rank, rotated * sizeof(bf16));
    rotate_pairs(row + rank, own_cos, own_sin, rotated, interleaved);
    if (!scales) return;
    int8_t* rounded = (int8_t*)cache + slots[token] * width;
    scales[2 * slots[token]] = round_part(row, rounded, rank);
    scales[2 * slots[token] + 1] = round_part(row + rank, rounded + rank, rotated);
  });
}
REPLAYABLE(write_latent)

// Absorbed queries: out (tokens, heads, rank + rotated) from q (tokens, heads, unrotated + rotated) and weight (heads, unit, rank), whose
// first rows of each head are its key weights. The rotated part is copied.
void absorb_queries(const bf16* q, const bf16* weight, bf16* out, int64_t tokens, int64_t heads, int64_t unrotated,
                    int64_t rotated, int64_t unit, int64_t rank, int threads) {
  for_heads(tokens, heads, threads, [&](int64_t head, int64_t first, int64_t end) {
    float* totals = row_memory(end - first, rank);
    std::fill_n(totals, (end - first) * rank, 0.0f);
    const bf16* rows = weight + head * unit * rank;
    for (int64_t row = 0; row < unrotated; row += ROWS)
      for (int64_t token = first; token < end; ++token)
        add_rows(totals + (token - first) * rank, q + (token * heads + head) * (unrotated + rotated) + row, rows + row * rank,
                 std::min(ROWS, unrotated - row), rank);
    for (int64_t token = first; token < end; ++token) {
      bf16* to = out + (token * heads + head) * (rank + rotated);
      for (int64_t i = 0; i < rank; i += WIDTH) store_floats(to + i, load<floats>(totals + (token - first) * rank + i));
      std::memcpy(to + rank, q + (token * heads + head) * (unrotated + rotated) + unrotated, rotated * sizeof(bf16));
    }
  });
}
REPLAYABLE(absorb_queries)

// Values from sums of latents: out (tokens, heads, unit - unrotated) from sums (tokens, heads, rank) and the value rows of each head's
// weight.
void expand_values(const bf16* sums, const bf16* weight, bf16* out, int64_t tokens, int64_t heads, int64_t unrotated,
                   int64_t unit, int64_t rank, int threads) {
  int64_t size = unit - unrotated;
  for_heads(tokens, heads, threads, [&](int64_t head, int64_t first, int64_t end) {
    const bf16* rows = weight + (head * unit + unrotated) * rank;
    float* wide = row_memory(end - first, rank);
    for (int64_t token = first; token < end; ++token)
      for (int64_t i = 0; i < rank; i += WIDTH)
        store(wide + (token - first) * rank + i, load_floats(sums + (token * heads + head) * rank + i));
    for (int64_t row = 0; row < size; row += ROWS)
      for (int64_t token = first; token < end; ++token)
        multiply_rows(wide + (token - first) * rank, rows + row * rank, out + (token * heads + head) * size + row,
                      std::min(ROWS, size - row), rank);
  });
}
REPLAYABLE(expand_values)

}  // extern "C"
