// Quantization to int4 by groups, of 16 outputs at a time: each lane of a vector is an output.
#pragma once

#include <cfloat>

#include "rounded.h"

namespace {

// Loads inputs `begin` to begin + count of 16 rows into values[input], zero-padded to `size` inputs; a null row has zeros.
template <typename T>
void load_groups(const T* const* rows, int64_t begin, int64_t count, int64_t size, floats* values) {
  for (int64_t i = 0; i < size; i += WIDTH) {
    words block[WIDTH];
    for (int row = 0; row < WIDTH; ++row) {
      floats value{};
      if (rows[row] && i + WIDTH <= count) value = load_floats(rows[row] + begin + i);
      else if (rows[row])
        for (int64_t j = 0; i + j < count; ++j) value[j] = as_float(rows[row][begin + i + j]);
      block[row] = (words)value;
    }
    transpose(block);
    for (int j = 0; j < WIDTH; ++j) values[i + j] = (floats)block[j];
  }
}

inline floats choose(words mask, floats yes, floats no) { return (floats)(((words)yes & mask) | ((words)no & ~mask)); }

// Mask of the lanes that are not 0.
inline words not_zero(floats value) { return (words)(same(FLT_TRUE_MIN) <= magnitude(value)); }

inline floats clamp_int4(floats value) { return smaller(same(7.0f), larger(same(-8.0f), value)); }

// int4 scales of 16 groups (codes -8 ... 7) with the least squared error, among candidates near the one that just covers the group's
// largest weight; float16 numbers, to be multiplied by global_scale. `size` is a multiple of 16.
inline floats best_scales(const floats* values, int64_t size, float global_scale) {
  constexpr int STEPS = 9;
  float inverse_global = 1.0f / global_scale;  // exact
  floats peak{}, extreme{}, best{}, least = same(INFINITY);
  for (int64_t i = 0; i < size; ++i) peak = larger(magnitude(values[i]), peak);
  for (int64_t i = size; i-- > 0;) extreme = choose((words)(peak <= magnitude(values[i])), values[i], extreme);  // the first of equal ones
  words usable = not_zero(extreme);  // until a scale is too small for float16
  for (int step = 0; step < STEPS; ++step) {
    half stored[WIDTH];
    store_floats(stored, extreme / (-8.0f + 0.25f * step) * inverse_global);
    floats number = load_floats(stored), scale = number * global_scale;
    usable &= not_zero(scale);
    floats inverse = smaller(same(FLT_MAX), larger(same(-FLT_MAX), 1.0f / scale));
    floats errors[WIDTH]{};
    for (int64_t i = 0; i < size; i += WIDTH)
#pragma GCC unroll 16
      for (int lane = 0; lane < WIDTH; ++lane) {
        floats whole = clamp_int4(values[i + lane] * inverse) + 12582912.0f - 12582912.0f;  // 1.5 * 2^23: the nearest
        floats off = values[i + lane] - scale * whole;
        errors[lane] += off * off;
      }
#define HALVE(COUNT) \
  for (int lane = 0; lane < COUNT; ++lane) errors[lane] += errors[lane + COUNT];
    HALVE(8) HALVE(4) HALVE(2) HALVE(1)
#undef HALVE
    words better = usable & ~(words)(least <= errors[0]);
    best = choose(better, number, best);
    least = choose(better, errors[0], least);
  }
  return best;
}

// Quantizes rows of weights into panels. row(output) is a row's address; null for a row of zeros, as are rows from `outputs` on.
// global_scale is a power of two that multiplies all scales.
template <typename T, typename Rows>
void quantize_int4_rows(const Int4& form, Rows row, uint8_t* data, int64_t outputs, float global_scale, int threads) {
  int64_t size = form.group, padded = up_to(size, WIDTH);
  in_parallel(threads, up_to(outputs, PANEL) / WIDTH, [&](Pieces& pieces) {
    LineVector<floats> values(padded);
    const T* rows[WIDTH];
    for (int64_t number; pieces.next(number);) {
      for (int i = 0; i < WIDTH; ++i) rows[i] = number * WIDTH + i < outputs ? row(number * WIDTH + i) : nullptr;
      int64_t first = number * WIDTH % PANEL;
      uint8_t* at = data + number * WIDTH / PANEL * form.panel_bytes();
      for (int64_t begin = 0; begin < form.inputs; begin += size, at += form.group_bytes()) {
        load_groups(rows, begin, std::min(size, form.inputs - begin), padded, values.data());
        floats best = best_scales(values.data(), padded, global_scale), scale = best * global_scale;
        store_floats((half*)at + first, best);
        uint8_t* to = at + Int4::HEAD + first * 4;
        for (int64_t i = 0; i < size; i += 8, to += 4 * PANEL) {
          words codes{};
          for (int j = 0; j < 8; ++j) {  // the first four in the low halves of the bytes
            ints whole = nearest(clamp_int4(values[i + j] / scale));
            codes |= (((words)whole & not_zero(scale)) + Int4::MIDDLE) << (j % 4 * 8 + j / 4 * 4);
          }
          store(to, codes);
        }
      }
    }
  });
}

}  // namespace
