// int8 dot-product instructions by processor: 4 weight codes of each output (as many outputs as a register has words) times 4 inputs.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "vectors.h"

namespace {

typedef int32_t lane_ints __attribute__((vector_size(REGISTER)));

constexpr int64_t NO_LIMIT = std::numeric_limits<int64_t>::max();

// Interface of a dot-product class. It multiplies the 4 inputs of a row in TURNS instructions. Rows are stored as Input: bytes, or wider
// integers that widen() makes of them once, in the order that the instruction needs: a word of 4 bytes for each turn. Inputs is the operand
// of one turn for all outputs.
// Sums accumulates at most RUN inputs; whole() converts it to int32. SHIFT is subtracted from 8-bit codes when they become Weights. ROWS
// rows are multiplied at a time, with at most HELD registers of sums.

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || \
    defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_DOTPROD)
#define HAS_BYTE_DOT
// Byte dot products in one instruction: AVX-VNNI, AVX512-VNNI, or Arm dotprod / i8mm.
struct ByteDot {
  using Input = int8_t;
  using Inputs = lane_ints;
  using Weights = lane_words;
  using Sums = lane_ints;
  static constexpr int64_t RUN = NO_LIMIT;
  static constexpr int TURNS = 1, ROWS = REGISTER == 64 ? 13 : 6, HELD = REGISTERS == 32 ? 26 : 12;
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
  static constexpr int SHIFT = 128;  // the instruction is signed × signed
#else
  static constexpr int SHIFT = 0;
#endif

  static Inputs inputs(const int8_t* word) { return load<int32_t>(word) - lane_ints{}; }
  template <int BITS>
  static Weights weights(lane_words codes) { return BITS == 8 && SHIFT ? codes ^ 0x80808080 : codes; }
  static lane_ints whole(Sums sums) { return sums; }

  static Sums add(Sums sums, Weights weights, Inputs x, int) {
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
// Applies one 128-, 256- or 512-bit instruction to a full register.
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

// Compiler barrier on a sum: without it, compilers reorder products and spill when there are only 16 registers.
template <typename Sums>
inline Sums in_turn(Sums sums) {
  if constexpr (REGISTERS == 16) asm("" : "+v"(sums));
  return sums;
}

// int16 pair products (pmaddwd): the first and third of each 4 inputs, then the second and fourth, so that each output has one sum.
struct PairDot {
  using Input = int16_t;
  using Inputs = lane_ints;
  struct Weights {
    lane_words pair[2];
  };
  using Sums = lane_ints;
  static constexpr int64_t RUN = NO_LIMIT;
  static constexpr int TURNS = 2, ROWS = REGISTERS == 32 ? 10 : 5, HELD = 2 * ROWS, SHIFT = 0;

  static void widen(const int8_t* x, int64_t count, int16_t* to) {
    for (int64_t i = 0; i < count; i += 4) {
      to[i] = x[i], to[i + 1] = x[i + 2];
      to[i + 2] = x[i + 1], to[i + 3] = x[i + 3];
    }
  }

  static Inputs inputs(const int16_t* word) { return load<int32_t>(word) - lane_ints{}; }
  template <int BITS>
  static Weights weights(lane_words codes) {
    typedef uint16_t Pairs __attribute__((vector_size(REGISTER)));
    return {{codes & 0x00ff00ff, (lane_words)((Pairs)codes >> 8)}};
  }
  static lane_ints whole(Sums sums) { return sums; }
  static Sums add(Sums sums, const Weights& weights, Inputs x, int turn) {
    return in_turn(sums + WHOLE_REGISTER(madd_epi16, weights.pair[turn], x));
  }
};

#ifdef __SSSE3__
// int16 sums of byte products (pmaddubsw) for codes up to MOST: 4-bit codes allow 16 inputs, as 16 * 15 * 127 < 2^15, 5-bit codes allow 8.
template <int MOST>
struct SmallDot {
  using Input = int8_t;
  using Inputs = lane_ints;
  using Weights = lane_words;
  typedef int16_t Sums __attribute__((vector_size(REGISTER)));
  static constexpr int64_t RUN = 32767 / (127 * MOST) / 8 * 16;
  static constexpr int TURNS = 1, ROWS = PairDot::ROWS, HELD = PairDot::HELD, SHIFT = 0;

  static Inputs inputs(const int8_t* word) { return load<int32_t>(word) - lane_ints{}; }
  template <int BITS>
  static Weights weights(lane_words codes) { return codes; }
  static lane_ints whole(Sums sums) { return WHOLE_REGISTER(madd_epi16, sums, Sums{} + 1); }
  static Sums add(Sums sums, Weights weights, Inputs x, int) {
    return in_turn(sums + (Sums)WHOLE_REGISTER(maddubs_epi16, weights, x));
  }
};
template <int BITS>
using CodeDot = std::conditional_t<BITS < 8, SmallDot<(1 << BITS) - 1>, PairDot>;
#define HAS_SMALL_DOT
#else
template <int BITS>
using CodeDot = PairDot;
#endif
#undef WHOLE_REGISTER

#else
// Portable fallback: each of the 4 inputs by itself.
struct SingleDot {
  using Input = int32_t;
  using Inputs = int32_t;
  struct Weights {
    lane_ints each[4];
  };
  using Sums = lane_ints;
  static constexpr int64_t RUN = NO_LIMIT;
  static constexpr int TURNS = 4, ROWS = 6, HELD = REGISTERS / 2, SHIFT = 0;

  static void widen(const int8_t* x, int64_t count, int32_t* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = x[i];
  }

  static Inputs inputs(const int32_t* word) { return *word; }
  template <int BITS>
  static Weights weights(lane_words codes) {
    return {{(lane_ints)(codes & 0xff), (lane_ints)(codes >> 8 & 0xff), (lane_ints)(codes >> 16 & 0xff), (lane_ints)(codes >> 24)}};
  }
  static lane_ints whole(Sums sums) { return sums; }
  static Sums add(Sums sums, const Weights& weights, Inputs x, int turn) { return sums + weights.each[turn] * x; }
};
template <int BITS>
using CodeDot = SingleDot;
#endif

}  // namespace
