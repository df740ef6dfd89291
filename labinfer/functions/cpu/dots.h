// How processors multiply small whole numbers: 4 codes of each output, as many outputs as a register has words, with 4 inputs.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "vectors.h"

namespace {

typedef int32_t lane_ints __attribute__((vector_size(REGISTER)));

constexpr int64_t NO_LIMIT = std::numeric_limits<int64_t>::max();

// A processor's way takes the 4 inputs of a row in so many TURNS. It reads rows as Input: bytes, or wider numbers that widen() makes of
// them once, in the order that it wants. Those of a turn, for all outputs, are Inputs. Sums take the products of at most RUN inputs and then
// become whole() numbers. SHIFT is what codes of 8 bits lose on the way to Weights. ROWS rows are multiplied at a time, with at most HELD
// registers of sums.

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
  static constexpr int TURNS = 1, ROWS = REGISTER == 64 ? 13 : 6, HELD = REGISTERS == 32 ? 26 : 12;
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
  static constexpr int SHIFT = 128;  // both factors have signs
#else
  static constexpr int SHIFT = 0;
#endif

  static Inputs inputs(const int8_t* x, int) { return load<int32_t>(x) - lane_ints{}; }
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

// Sums as they are at this place. Compilers take products from elsewhere first, and of 16 registers there are too few for them.
template <typename Sums>
inline Sums in_turn(Sums sums) {
  if constexpr (REGISTERS == 16) asm("" : "+v"(sums));
  return sums;
}

// Products of pairs in 16 bits: the first and third input of each 4, then the second and fourth, so that an output has one sum.
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

  static Inputs inputs(const int16_t* x, int turn) { return load<int32_t>(x + 2 * turn) - lane_ints{}; }
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
// Products of codes up to MOST, as many as fit into 16 bits: for codes of 4 bits 16, as 16 * 15 * 127 < 2^15, for those of 5 bits 8.
template <int MOST>
struct SmallDot {
  using Input = int8_t;
  using Inputs = lane_ints;
  using Weights = lane_words;
  typedef int16_t Sums __attribute__((vector_size(REGISTER)));
  static constexpr int64_t RUN = 32767 / (127 * MOST) / 8 * 16;
  static constexpr int TURNS = 1, ROWS = PairDot::ROWS, HELD = PairDot::HELD, SHIFT = 0;

  static Inputs inputs(const int8_t* x, int) { return load<int32_t>(x) - lane_ints{}; }
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
// Any processor: each of the 4 inputs by itself.
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

  static Inputs inputs(const int32_t* x, int turn) { return x[turn]; }
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
