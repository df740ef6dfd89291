// The inner loops of products in small whole numbers: 32 outputs for a few rows, 4 inputs at a time. All sums are exact, so
// every processor finds the same.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "vectors.h"

namespace {

typedef int32_t lane_ints __attribute__((vector_size(REGISTER)));

// How a processor multiplies 4 codes of each output, a register of them, with 4 inputs of a row. It reads inputs as Input, and
// holds them for all outputs as Inputs. Sums take the products of at most RUN inputs and then become whole() numbers. SHIFT is
// what codes of 8 bits lose on the way to Weights. ROWS rows are multiplied at a time, with HELD registers for sums.
constexpr int64_t NO_LIMIT = std::numeric_limits<int64_t>::max();

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || \
    defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_DOTPROD)
#define HAS_BYTE_DOT
// Dot products of bytes.
struct ByteDot {
  using Input = int8_t;
  using Inputs = lane_ints;
  using Weights = lane_words;
  using Sums = lane_ints;
  static constexpr int64_t RUN = NO_LIMIT;
  static constexpr int ROWS = REGISTER == 64 ? 13 : 6, HELD = REGISTERS == 32 ? 26 : 12;
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
  static constexpr int SHIFT = 128;  // both factors have signs
#else
  static constexpr int SHIFT = 0;
#endif

  static Inputs inputs(const int8_t* x) { return load<int32_t>(x) - lane_ints{}; }
  template <int BITS>
  static Weights weights(lane_words codes) { return BITS == 8 && SHIFT ? codes ^ 0x80808080 : codes; }
  static lane_ints whole(Sums sums) { return sums; }

  static Sums add(Sums sums, Weights weights, Inputs x) {
#if defined(__AVX512VNNI__)
    return (lane_ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (lane_ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)x);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (lane_ints)vusdotq_s32((int32x4_t)sums, (uint8x16_t)weights, (int8x16_t)x);
#else
    return (lane_ints)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, (int8x16_t)x);
#endif
  }
};
template <int BITS>
using CodeDot = ByteDot;

#elif defined(__SSE2__)
// One instruction of the processor on all of a register.
#if defined(__AVX512BW__)
#define WHOLE_REGISTER(NAME, a, b) (lane_ints) _mm512_##NAME((__m512i)(a), (__m512i)(b))
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define WHOLE_REGISTER(NAME, a, b) (lane_ints) _mm256_##NAME((__m256i)(a), (__m256i)(b))
#else
#define WHOLE_REGISTER(NAME, a, b) in_parts((lane_ints)(a), (lane_ints)(b), [](__m128i one, __m128i other) { return _mm_##NAME(one, other); })
template <typename Operation>
inline lane_ints in_parts(lane_ints a, lane_ints b, Operation operation) {
  constexpr int PARTS = REGISTER / 16;
  __m128i one[PARTS], other[PARTS];
  std::memcpy(one, &a, REGISTER), std::memcpy(other, &b, REGISTER);
  for (int i = 0; i < PARTS; ++i) one[i] = operation(one[i], other[i]);
  return load<lane_ints>(one);
}
#endif

// Products of pairs in 16 bits: the first and third input of each 4, then the second and fourth, so that an output has one sum.
struct PairDot {
  using Input = int16_t;
  struct Inputs {
    lane_ints even, odd;
  };
  struct Weights {
    lane_words even, odd;
  };
  using Sums = lane_ints;
  static constexpr int64_t RUN = NO_LIMIT;
  static constexpr int ROWS = REGISTERS == 32 ? 10 : 5, HELD = 2 * ROWS, SHIFT = 0;

  static void widen(const int8_t* x, int64_t count, int16_t* to) {
    for (int64_t i = 0; i < count; i += 4) {
      to[i] = x[i], to[i + 1] = x[i + 2];
      to[i + 2] = x[i + 1], to[i + 3] = x[i + 3];
    }
  }

  static Inputs inputs(const int16_t* x) { return {load<int32_t>(x) - lane_ints{}, load<int32_t>(x + 2) - lane_ints{}}; }
  template <int BITS>
  static Weights weights(lane_words codes) { return {codes & 0x00ff00ff, codes >> 8 & 0x00ff00ff}; }
  static lane_ints whole(Sums sums) { return sums; }
  static Sums add(Sums sums, Weights weights, Inputs x) {
    return sums + WHOLE_REGISTER(madd_epi16, weights.even, x.even) + WHOLE_REGISTER(madd_epi16, weights.odd, x.odd);
  }
};

#ifdef __SSSE3__
// Products of codes of 4 bits, of which 16 fit into 16 bits: 16 * 15 * 127 < 2^15.
struct NibbleDot {
  using Input = int8_t;
  using Inputs = lane_ints;
  using Weights = lane_words;
  typedef int16_t Sums __attribute__((vector_size(REGISTER)));
  static constexpr int64_t RUN = 32;
  static constexpr int ROWS = PairDot::ROWS, HELD = PairDot::HELD, SHIFT = 0;

  static Inputs inputs(const int8_t* x) { return load<int32_t>(x) - lane_ints{}; }
  template <int BITS>
  static Weights weights(lane_words codes) { return codes; }
  static lane_ints whole(Sums sums) { return WHOLE_REGISTER(madd_epi16, sums, Sums{} + 1); }
  static Sums add(Sums sums, Weights weights, Inputs x) { return sums + (Sums)WHOLE_REGISTER(maddubs_epi16, weights, x); }
};
template <int BITS>
using CodeDot = std::conditional_t<BITS == 4, NibbleDot, PairDot>;
#else
template <int BITS>
using CodeDot = PairDot;
#endif
#undef WHOLE_REGISTER

#else
// Any processor: each of the 4 inputs by itself.
struct SingleDot {
  using Input = int32_t;
  struct Inputs {
    int32_t each[4];
  };
  struct Weights {
    lane_ints each[4];
  };
  using Sums = lane_ints;
  static constexpr int64_t RUN = NO_LIMIT;
  static constexpr int ROWS = 6, HELD = REGISTERS / 2, SHIFT = 0;

  static void widen(const int8_t* x, int64_t count, int32_t* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = x[i];
  }

  static Inputs inputs(const int32_t* x) { return {{x[0], x[1], x[2], x[3]}}; }
  template <int BITS>
  static Weights weights(lane_words codes) {
    return {{(lane_ints)(codes & 0xff), (lane_ints)(codes >> 8 & 0xff), (lane_ints)(codes >> 16 & 0xff), (lane_ints)(codes >> 24)}};
  }
  static lane_ints whole(Sums sums) { return sums; }
  static Sums add(Sums sums, const Weights& weights, const Inputs& x) {
    for (int i = 0; i < 4; ++i) sums += weights.each[i] * x.each[i];
    return sums;
  }
};
template <int BITS>
using CodeDot = SingleDot;
#endif

// What a group's sums begin with: in start is minus the middle of the codes times the sum of the group's inputs. With ZEROS
// the caller adds start by itself, times the zero point.
template <int BITS, bool ZEROS>
inline int32_t first_sum(int32_t start) {
  constexpr int MIDDLE = ZEROS ? 1 : 1 << (BITS - 1), SHIFT = BITS == 8 ? CodeDot<BITS>::SHIFT : 0;
  return (ZEROS ? 0 : start) - SHIFT * (start / MIDDLE);
}

// Some rows times one panel's codes of so many inputs: for each 4 bytes of every output, 4 inputs of 8 bits or 8 of 4 bits,
// of which the first four are in the low halves. done(row, i, sums) is given the i-th register of a row's sums.
template <int BITS, int ROWS, typename Done>
__attribute__((always_inline)) inline void multiply_codes(const int8_t* x, int64_t stride, const uint8_t* codes, int64_t inputs, const int32_t* first,
                           const Stream& stream, Done done) {
  using Dot = CodeDot<BITS>;
  using Input = typename Dot::Input;
  constexpr bool WIDENS = !std::is_same_v<Input, int8_t>;
  constexpr int STEP = 32 / BITS, ACROSS = PANEL / LANES, BLOCK = WIDENS ? 512 : 1;
  constexpr int TOGETHER = ROWS * ACROSS <= Dot::HELD       ? ACROSS
                           : ROWS * ACROSS / 2 <= Dot::HELD ? ACROSS / 2
                                                            : ACROSS / 4;
  Input wide[WIDENS ? ROWS * BLOCK : 1];
  lane_ints kept[WIDENS ? ROWS : 1][ACROSS];  // from block to block
  for (int64_t begin = 0; begin < inputs;) {
    int64_t size = WIDENS ? std::min<int64_t>(BLOCK, inputs - begin) : inputs, apart = WIDENS ? BLOCK : stride;
    const Input* rows;
    if constexpr (WIDENS) {
      for (int row = 0; row < ROWS; ++row) Dot::widen(x + row * stride + begin, size, wide + row * BLOCK);
      rows = wide;
    } else {
      rows = x;
    }
    for (int column = 0; column < ACROSS; column += TOGETHER) {
      lane_ints total[ROWS][TOGETHER];
      for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < TOGETHER; ++i)
          total[row][i] = WIDENS && begin ? kept[row][column + i] : first[row] - lane_ints{};
      const uint8_t* from = codes + column * REGISTER;
      auto add = [&](auto& sums, int64_t step, int64_t end) __attribute__((always_inline)) {
        for (; step < end; ++step) {
          const uint8_t* at = from + step * 4 * PANEL;
          const char* ahead = stream.ahead(at);
          for (int line = 0; line < TOGETHER * REGISTER; line += 64) __builtin_prefetch(ahead + line);
          typename Dot::Weights weights[STEP / 4][TOGETHER];
#pragma GCC unroll 8
          for (int i = 0; i < TOGETHER; ++i) {
            lane_words word = load<lane_words>(at + i * REGISTER);
#ifdef __x86_64__
            asm("" : "+v"(word));  // loaded once: gcc may read it anew for every row
#endif
            weights[0][i] = Dot::template weights<BITS>(BITS == 4 ? word & 0x0f0f0f0f : word);
            if constexpr (BITS == 4) weights[1][i] = Dot::template weights<BITS>(word >> 4 & 0x0f0f0f0f);
          }
#pragma GCC unroll 16
          for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 2
            for (int part = 0; part < STEP / 4; ++part) {
              typename Dot::Inputs given = Dot::inputs(rows + row * apart + step * STEP + 4 * part);
#pragma GCC unroll 8
              for (int i = 0; i < TOGETHER; ++i) sums[row][i] = Dot::add(sums[row][i], weights[part][i], given);
            }
          }
        }
      };
      if constexpr (Dot::RUN == NO_LIMIT) {
        add(total, 0, size / STEP);
      } else {
        for (int64_t step = 0; step < size / STEP; step += Dot::RUN / STEP) {
          typename Dot::Sums sums[ROWS][TOGETHER] = {};
          add(sums, step, std::min(size / STEP, step + Dot::RUN / STEP));
          for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < TOGETHER; ++i) total[row][i] += Dot::whole(sums[row][i]);
        }
      }
      for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < TOGETHER; ++i)
          if (!WIDENS || begin + size == inputs) done(row, column + i, total[row][i]);
          else kept[WIDENS ? row : 0][column + i] = total[row][i];
    }
    begin += size;
    codes += size / STEP * 4 * PANEL;
  }
}

// Panels of 32 outputs: for each 4 inputs the 4 bytes of every output. out (ROWS, 32) = start of a row + its products.
template <int ROWS>
inline void panel_int8(const int8_t* x, int64_t stride, const uint8_t* weight, int64_t inputs, const int32_t* start,
                       float* out, const Stream& stream) {
  int32_t first[ROWS];
  for (int row = 0; row < ROWS; ++row) first[row] = first_sum<8, false>(start[row]);
  multiply_codes<8, ROWS>(x, stride, weight, inputs, first, stream, [&](int row, int i, lane_ints sums) {
    store(out + row * PANEL + i * LANES, __builtin_convertvector(sums, lanes));
  });
}

// Panels of 32 outputs: for each group of inputs 32 scales in float16, with ZEROS 32 zero points in float16 as well, then
// the codes. Of 4 bits, for each 8 inputs 4 bytes of every output, the first four inputs in their low halves; of 8 bits,
// for each 4 inputs 4 bytes of every output. start (ROWS, groups): as above, for each group; with ZEROS minus the sum of
// the group's x. A group has a multiple of 8 inputs.
template <int ROWS, int BITS, bool ZEROS>
inline void panel_groups(const int8_t* x, int64_t stride, const uint8_t* weight, int64_t groups, int64_t group,
                         const int32_t* start, float* out, const Stream& stream) {
  for (int i = 0; i < 2 * ROWS; ++i) store(out + i * WIDTH, floats{});
  for (int64_t number = 0; number < groups; ++number) {
    lanes scales[PANEL / LANES], zeros[PANEL / LANES];
    for (int i = 0; i < PANEL / LANES; ++i) {
      scales[i] = widen_float16(load<lane_halves>(weight + 2 * i * LANES));
      if (ZEROS) zeros[i] = widen_float16(load<lane_halves>(weight + 2 * (PANEL + i * LANES)));
    }
    weight += (ZEROS ? 4 : 2) * PANEL;
    int32_t first[ROWS];
    for (int row = 0; row < ROWS; ++row) first[row] = first_sum<BITS, ZEROS>(start[row * groups + number]);
    multiply_codes<BITS, ROWS>(x, stride, weight, group, first, stream, [&](int row, int i, lane_ints sums) {
      lanes sum = __builtin_convertvector(sums, lanes);
      if constexpr (ZEROS)  // all of these are whole numbers below 2^24, so nothing is rounded
        sum += zeros[i] * float(start[row * groups + number]);
      float* to = out + row * PANEL + i * LANES;
      store(to, load<lanes>(to) + sum * scales[i]);
    });
    x += group, weight += group * BITS / 8 * PANEL;
  }
}

}  // namespace
