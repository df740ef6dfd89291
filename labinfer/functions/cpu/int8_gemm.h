// Inner loops of int8 matrix products: 32 outputs for a few rows, 4 inputs at a time. Integer sums are exact, so every processor gets
// identical results.
#pragma once

#include <algorithm>

#include "int8_dot.h"

namespace {

// Table lookup of each byte of `codes` (whose upper four bits are zero) in a table of 16 entries, which is stored four times.
inline lane_words look_up(const uint8_t* table, lane_words codes) {
#if defined(__AVX512BW__)
  return (lane_words)_mm512_shuffle_epi8(load<__m512i>(table), (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (lane_words)_mm256_shuffle_epi8(load<__m256i>(table), (__m256i)codes);
#elif defined(__aarch64__)
  return (lane_words)vqtbl1q_u8(load<uint8x16_t>(table), (uint8x16_t)codes);
#else
  uint8_t bytes[REGISTER];
  std::memcpy(bytes, &codes, REGISTER);
  for (uint8_t& byte : bytes) byte = table[byte];
  return load<lane_words>(bytes);
#endif
}

// A coding maps codes of BITS bits to integers plus MIDDLE (so that they are not negative) and names the dot product to use. SCALE_BYTES is
// 2 for float16 scales, 1 for power-of-two exponents.
template <int BITS_>
struct Uniform {
  static constexpr int NUMBER = BITS_ == 5 ? 4 : BITS_ / 8, BITS = BITS_, MIDDLE = 1 << (BITS - 1), SCALE_BYTES = 2, SHIFT = BITS == 8 ? CodeDot<BITS>::SHIFT : 0;
  using Dot = CodeDot<BITS>;
  static typename Dot::Weights weights(lane_words codes) { return Dot::template weights<BITS>(codes); }
  static constexpr int number(int code) { return code; }
};

// Values of MXFP4 and NVFP4, doubled (OCP Microscaling Formats 1.0, 5.3.3).
template <int SCALE_BYTES_>
struct Float4 {
  static constexpr int NUMBER = SCALE_BYTES_ == 1 ? 2 : 5, BITS = 4, MIDDLE = 12, SCALE_BYTES = SCALE_BYTES_, SHIFT = 0;
#ifdef HAS_SMALL_DOT
  using Dot = SmallDot<24>;
#else
  using Dot = CodeDot<4>;
#endif
#define NUMBERS 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
  alignas(64) static constexpr uint8_t TABLE[64] = {NUMBERS, NUMBERS, NUMBERS, NUMBERS};
#undef NUMBERS
  static typename Dot::Weights weights(lane_words codes) { return Dot::template weights<4>(look_up(TABLE, codes)); }
  static constexpr int number(int code) { return TABLE[code]; }
};

using E2m1 = Float4<1>;
using Nvfp4 = Float4<2>;

// Values of IQ4_NL and IQ4_XS (ggml-org/llama.cpp, ggml/src/ggml-common.h, kvalues_iq4nl).
struct Iq4 {
  static constexpr int NUMBER = 3, BITS = 4, MIDDLE = 128, SCALE_BYTES = 2, SHIFT = CodeDot<8>::SHIFT;
  using Dot = CodeDot<8>;
#define NUMBERS 1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241
  alignas(64) static constexpr uint8_t TABLE[64] = {NUMBERS, NUMBERS, NUMBERS, NUMBERS};
#undef NUMBERS
  static typename Dot::Weights weights(lane_words codes) { return Dot::template weights<8>(look_up(TABLE, codes)); }
  static constexpr int number(int code) { return TABLE[code]; }
};

// Offset of each quantization group: none, a zero point that is subtracted from codes, or a minimum that is added to weights.
enum Offset { NONE, ZEROS, MINIMA };

// Initial value of a group's sums. `start` is minus the coding's middle times the sum of the group's inputs. With an offset the middle is
// 1, and the caller adds `start` times the offset.
template <typename Coding, Offset OFFSET>
inline int32_t first_sum(int32_t start) {
  constexpr int MIDDLE = OFFSET ? 1 : Coding::MIDDLE;
  return (OFFSET ? 0 : start) - Coding::SHIFT * (start / MIDDLE);
}

// Bit layout of codes in 4-byte words of each output. A word has the codes of STEP inputs: 4 with 8 bits, otherwise 8: the first four in
// the low bits of the bytes, the second four in the remaining bits above them. 5-bit codes have room there for their UPPER bits only: the
// LOWER bits of SHARED words are in a word before them, the first word's in the lowest bits.
template <int BITS>
struct CodeWords {
  static constexpr int STEP = BITS == 8 ? 4 : 8, UPPER = 8 - BITS, LOWER = BITS == 8 ? 0 : BITS - UPPER;
  static constexpr int64_t SHARED = LOWER ? 8 / LOWER : 1, BYTES = STEP * BITS / 8;  // per output and step, with the shared words divided among their steps

  static constexpr int64_t place(int64_t step) { return LOWER ? step + step / SHARED + 1 : step; }
  static constexpr int64_t lower_place(int64_t step) { return step / SHARED * (SHARED + 1); }
};

// Weights of a register's outputs for a step: its first four inputs, and its second four if there are any. `codes` points to that register
// in the first step.
template <typename Coding>
struct StepWeights {
  using Words = CodeWords<Coding::BITS>;
  typename Coding::Dot::Weights part[Words::STEP / 4];

  __attribute__((always_inline)) inline StepWeights(const uint8_t* codes, int64_t step) {
    lane_words word = load<lane_words>(codes + Words::place(step) * 4 * PANEL);
#ifdef __x86_64__
    asm("" : "+v"(word));  // load once: gcc may otherwise reload it for every row
#endif
    if constexpr (Coding::BITS == 8) {
      part[0] = Coding::weights(word);
    } else {
      constexpr uint32_t EACH = 0x01010101;
      lane_words second = word >> Words::UPPER & EACH * (((1 << Words::UPPER) - 1) << Words::LOWER);
      if constexpr (Words::LOWER > 0) {
        lane_words rest = load<lane_words>(codes + Words::lower_place(step) * 4 * PANEL) >> uint32_t(step % Words::SHARED * Words::LOWER);
        second |= rest & EACH * ((1 << Words::LOWER) - 1);
      }
      part[0] = Coding::weights(word & EACH * ((1 << Coding::BITS) - 1)), part[1] = Coding::weights(second);
    }
  }
};

// Multiplies ROWS interleaved rows with a panel of codes over `inputs` inputs. first(row, i) is the initial value of the i-th register of a row's
// sums, which done(row, i, sums) gets.
template <typename Coding, int ROWS, typename First, typename Done>
__attribute__((always_inline)) inline void multiply_codes(const typename Coding::Dot::Input* x, const uint8_t* codes, int64_t inputs,
                                                          First first, const Stream& stream, Done done) {
  using Dot = typename Coding::Dot;
  using Words = CodeWords<Coding::BITS>;
  constexpr int STEP = Words::STEP, ACROSS = PANEL / LANES, WORD = 4 / sizeof(typename Dot::Input);
  constexpr int TOGETHER = ROWS * ACROSS <= Dot::HELD       ? ACROSS
                           : ROWS * ACROSS / 2 <= Dot::HELD ? ACROSS / 2
                                                            : ACROSS / 4;
  for (int column = 0; column < ACROSS; column += TOGETHER) {
    lane_ints total[ROWS][TOGETHER];
    for (int row = 0; row < ROWS; ++row)
      for (int i = 0; i < TOGETHER; ++i) total[row][i] = first(row, column + i);
    const uint8_t* from = codes + column * REGISTER;
    auto add = [&](auto& sums, int64_t step, int64_t end) __attribute__((always_inline)) {
      for (; step < end; ++step) {
        const char* ahead = stream.ahead<ROWS>(from + step * Words::BYTES * PANEL);  // spread evenly, because lines fetched in bursts arrive late
        for (int line = 0; line < TOGETHER * LANES * Words::BYTES; line += 64) __builtin_prefetch(ahead + line);
        const typename Dot::Input* from_x = x + step * STEP * ROWS;
        typename Dot::Weights weights[STEP / 4][TOGETHER];
#pragma GCC unroll 8
        for (int i = 0; i < TOGETHER; ++i) {
          StepWeights<Coding> own(from + i * REGISTER, step);
#pragma GCC unroll 2
          for (int part = 0; part < STEP / 4; ++part) weights[part][i] = own.part[part];
        }
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 2
          for (int part = 0; part < STEP / 4; ++part) {
#pragma GCC unroll 4
            for (int turn = 0; turn < Dot::TURNS; ++turn) {
              typename Dot::Inputs given = Dot::inputs(from_x + ((part * Dot::TURNS + turn) * ROWS + row) * WORD);
#pragma GCC unroll 8
              for (int i = 0; i < TOGETHER; ++i) sums[row][i] = Dot::add(sums[row][i], weights[part][i], given, turn);
            }
          }
        }
      }
    };
    if constexpr (Dot::RUN == NO_LIMIT) {
      add(total, 0, inputs / STEP);
    } else {
      for (int64_t step = 0; step < inputs / STEP; step += Dot::RUN / STEP) {
        typename Dot::Sums sums[ROWS][TOGETHER] = {};
        add(sums, step, std::min(inputs / STEP, step + Dot::RUN / STEP));
        for (int row = 0; row < ROWS; ++row)
          for (int i = 0; i < TOGETHER; ++i) total[row][i] += Dot::whole(sums[row][i]);
      }
    }
    for (int row = 0; row < ROWS; ++row)
      for (int i = 0; i < TOGETHER; ++i) done(row, column + i, total[row][i]);
  }
}

// Panel of 32 outputs with int8 weights: for each 4 inputs, 4 bytes of every output. sums (ROWS, 32) = start of the row + its products, or
// products are added to sums.
template <int ROWS>
inline void panel_int8(const CodeDot<8>::Input* x, const uint8_t* weight, int64_t inputs, const int32_t* start, bool adds, int32_t* sums,
                       const Stream& stream) {
  auto first = [&](int row, int i) {
    return adds ? load<lane_ints>(sums + row * PANEL + i * LANES) : first_sum<Uniform<8>, NONE>(start[row]) - lane_ints{};
  };
  multiply_codes<Uniform<8>, ROWS>(x, weight, inputs, first, stream,
                                   [&](int row, int i, lane_ints total) { store(sums + row * PANEL + i * LANES, total); });
}

// LANES scales or offsets of a group, starting at output i.
template <int BYTES>
inline lanes group_numbers(const uint8_t* from, int i) {
  if constexpr (BYTES == 2) return widen_float16(load<lane_halves>(from + 2 * i));
  typedef uint8_t lane_bytes __attribute__((vector_size(LANES)));
  return (lanes)(__builtin_convertvector(load<lane_bytes>(from + i), lane_words) << 23);  // 2^-127 becomes 0
}

// One scale or offset of a group, of output i.
template <int BYTES>
inline float group_number(const uint8_t* from, int64_t i) {
  if (BYTES == 2) return widen_float16(load<uint16_t>(from + 2 * i));
  uint32_t bits = uint32_t(from[i]) << 23;
  return load<float>(&bits);
}

// Scaled sums of a row's codes in a group. `off` is the row's start of the group, see panel_groups.
template <typename Coding, Offset OFFSET>
inline lanes group_product(lane_ints sums, float off, lanes scale, lanes offset) {
  lanes sum = __builtin_convertvector(sums, lanes);
  if constexpr (OFFSET == ZEROS) sum += offset * off;  // integers below 2^24, so nothing is rounded
  sum *= scale;
  if constexpr (OFFSET == MINIMA) sum -= offset * off;
  return sum;
}

// A row has integer and float sums. With AVX-512, both kinds are kept in registers for up to this many rows. For more rows, the float sums
// are in memory and updated once per group.
constexpr int ROWS_HELD = 6;

// Whether products of more than ROWS_HELD rows are worth it: a coding needs few other registers, and its groups are not so short (16 inputs
// in NVFP4) that updates of the float sums in memory take longer than the passes that are saved.
template <typename Coding>
constexpr bool has_free_registers([[maybe_unused]] Offset offset) {
#ifdef HAS_BYTE_DOT
  return REGISTER == 64 && Coding::BITS == 4 && !std::is_same_v<Coding, Nvfp4> && offset == NONE;
#else
  return false;
#endif
}

// Panel of 32 outputs quantized in groups: for each group of inputs 32 scales, with an offset 32 float16 offsets, then the codes (see
// CodeWords). start (ROWS, starts): of each group minus MIDDLE times the sum of its inputs, with an offset minus that sum. A group has a
// multiple of 8 inputs, with 5-bit codes of 32. Products are written to out (ROWS, 32), or added to it.
template <int ROWS, typename Coding, Offset OFFSET>
inline void panel_groups(const typename Coding::Dot::Input* x, const uint8_t* weight, int64_t groups, int64_t group, const int32_t* start,
                         int64_t starts, bool adds, float* out, const Stream& stream) {
  constexpr int SCALES = Coding::SCALE_BYTES * PANEL;
  constexpr bool IS_HELD = ROWS <= ROWS_HELD;
  lanes held[IS_HELD ? ROWS : 1][PANEL / LANES] = {};
  if (!IS_HELD && !adds) std::memset(out, 0, ROWS * PANEL * sizeof(float));
  if (IS_HELD && adds)
    for (int row = 0; row < ROWS; ++row)
      for (int i = 0; i < PANEL / LANES; ++i) held[row][i] = load<lanes>(out + row * PANEL + i * LANES);
  for (int64_t number = 0; number < groups; ++number) {
    lanes scales[PANEL / LANES], offsets[PANEL / LANES] = {};
    for (int i = 0; i < PANEL / LANES; ++i) {
      scales[i] = group_numbers<Coding::SCALE_BYTES>(weight, i * LANES);
      if (OFFSET) offsets[i] = group_numbers<2>(weight + SCALES, i * LANES);
    }
    weight += SCALES + (OFFSET ? 2 * PANEL : 0);
    auto first = [&](int row, int) { return first_sum<Coding, OFFSET>(start[row * starts + number]) - lane_ints{}; };
    multiply_codes<Coding, ROWS>(x, weight, group, first, stream, [&](int row, int i, lane_ints sums) {
      lanes product = group_product<Coding, OFFSET>(sums, float(start[row * starts + number]), scales[i], offsets[i]);
      float* to = out + row * PANEL + i * LANES;
      if constexpr (IS_HELD) held[row][i] += product;
      else store(to, load<lanes>(to) + product);
    });
    x += group * ROWS, weight += group * Coding::BITS / 8 * PANEL;
  }
  if constexpr (IS_HELD)
    for (int row = 0; row < ROWS; ++row)
      for (int i = 0; i < PANEL / LANES; ++i) store(out + row * PANEL + i * LANES, held[row][i]);
}

}  // namespace
