// The inner loops of products in small whole numbers: 32 outputs for a few rows, 4 inputs at a time. All sums are exact, so
// every processor finds the same.
#pragma once

#include <algorithm>

#include "dots.h"

namespace {

// For each byte of a register, of which the upper halves are zeros, the entry of a table of 16; the table is there four times.
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

// A coding says how codes of BITS bits stand for whole numbers, to which MIDDLE is added so that they are not negative, what
// multiplies them, and the bytes of a scale: 2 for float16, 1 for the exponent of a power of two.
template <int BITS_>
struct Uniform {
  static constexpr int NUMBER = BITS_ == 5 ? 4 : BITS_ / 8, BITS = BITS_, MIDDLE = 1 << (BITS - 1), SCALE_BYTES = 2, SHIFT = BITS == 8 ? CodeDot<BITS>::SHIFT : 0;
  using Dot = CodeDot<BITS>;
  static typename Dot::Weights weights(lane_words codes) { return Dot::template weights<BITS>(codes); }
  static constexpr int number(int code) { return code; }
};

// Twice the numbers of MXFP4 (OCP Microscaling Formats 1.0, 5.3.3).
struct E2m1 {
  static constexpr int NUMBER = 2, BITS = 4, MIDDLE = 12, SCALE_BYTES = 1, SHIFT = 0;
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

// The numbers of IQ4_NL and IQ4_XS (ggml-org/llama.cpp, ggml/src/ggml-common.h, kvalues_iq4nl).
struct Iq4 {
  static constexpr int NUMBER = 3, BITS = 4, MIDDLE = 128, SCALE_BYTES = 2, SHIFT = CodeDot<8>::SHIFT;
  using Dot = CodeDot<8>;
#define NUMBERS 1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241
  alignas(64) static constexpr uint8_t TABLE[64] = {NUMBERS, NUMBERS, NUMBERS, NUMBERS};
#undef NUMBERS
  static typename Dot::Weights weights(lane_words codes) { return Dot::template weights<8>(look_up(TABLE, codes)); }
  static constexpr int number(int code) { return TABLE[code]; }
};

// What every group has beside its scale: nothing, a zero point that is taken off its codes, or a minimum that is added to its weights.
enum Offset { NONE, ZEROS, MINIMA };

// What a group's sums begin with: in start is minus the middle of the codes times the sum of the group's inputs. With an offset
// the middle is 1, and the caller adds start by itself, times the offset.
template <typename Coding, Offset OFFSET>
inline int32_t first_sum(int32_t start) {
  constexpr int MIDDLE = OFFSET ? 1 : Coding::MIDDLE;
  return (OFFSET ? 0 : start) - Coding::SHIFT * (start / MIDDLE);
}

// How codes stand in words of 4 bytes of every output. A word has those of STEP inputs: with 8 bits 4, otherwise 8, of which the
// first four fill the lowest bits of the bytes, and the second four what is left above them. With 5 bits these have room for their
// UPPER bits only: their LOWER ones, of SHARED words, are in a word before these, the first word's in the lowest bits.
template <int BITS>
struct CodeWords {
  static constexpr int STEP = BITS == 8 ? 4 : 8, UPPER = 8 - BITS, LOWER = BITS == 8 ? 0 : BITS - UPPER;
  static constexpr int64_t SHARED = LOWER ? 8 / LOWER : 1, BYTES = STEP * BITS / 8;  // of an output for each step, shared words parted

  static constexpr int64_t place(int64_t step) { return LOWER ? step + step / SHARED + 1 : step; }
  static constexpr int64_t lower_place(int64_t step) { return step / SHARED * (SHARED + 1); }
};

// A register's outputs' weights of a step's first four inputs, and of its second four where there are any; codes begin with that
// register of the first step.
template <typename Coding>
struct StepWeights {
  using Words = CodeWords<Coding::BITS>;
  typename Coding::Dot::Weights part[Words::STEP / 4];

  __attribute__((always_inline)) inline StepWeights(const uint8_t* codes, int64_t step) {
    lane_words word = load<lane_words>(codes + Words::place(step) * 4 * PANEL);
#ifdef __x86_64__
    asm("" : "+v"(word));  // loaded once: gcc may read it anew for every row
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

// Some rows times one panel's codes of so many inputs. done(row, i, sums) is given the i-th register of a row's sums.
template <typename Coding, int ROWS, typename Done>
__attribute__((always_inline)) inline void multiply_codes(const typename Coding::Dot::Input* x, int64_t stride, const uint8_t* codes,
                                                          int64_t inputs, const int32_t* first, const Stream& stream, Done done) {
  using Dot = typename Coding::Dot;
  using Words = CodeWords<Coding::BITS>;
  constexpr int STEP = Words::STEP, ACROSS = PANEL / LANES;
  constexpr int TOGETHER = ROWS * ACROSS <= Dot::HELD       ? ACROSS
                           : ROWS * ACROSS / 2 <= Dot::HELD ? ACROSS / 2
                                                            : ACROSS / 4;
  for (int column = 0; column < ACROSS; column += TOGETHER) {
    lane_ints total[ROWS][TOGETHER];
    for (int row = 0; row < ROWS; ++row)
      for (int i = 0; i < TOGETHER; ++i) total[row][i] = first[row] - lane_ints{};
    const uint8_t* from = codes + column * REGISTER;
    auto add = [&](auto& sums, int64_t step, int64_t end) __attribute__((always_inline)) {
      for (; step < end; ++step) {
        const char* ahead = stream.ahead<ROWS>(from + step * Words::BYTES * PANEL);  // evenly: lines in bursts come in late
        for (int line = 0; line < TOGETHER * LANES * Words::BYTES; line += 64) __builtin_prefetch(ahead + line);
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
              typename Dot::Inputs given = Dot::inputs(x + row * stride + step * STEP + 4 * part, turn);
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

// Panels of 32 outputs: for each 4 inputs the 4 bytes of every output. out (ROWS, 32) = start of a row + its products.
template <int ROWS>
inline void panel_int8(const CodeDot<8>::Input* x, int64_t stride, const uint8_t* weight, int64_t inputs, const int32_t* start,
                       float* out, const Stream& stream) {
  int32_t first[ROWS];
  for (int row = 0; row < ROWS; ++row) first[row] = first_sum<Uniform<8>, NONE>(start[row]);
  multiply_codes<Uniform<8>, ROWS>(x, stride, weight, inputs, first, stream, [&](int row, int i, lane_ints sums) {
    store(out + row * PANEL + i * LANES, __builtin_convertvector(sums, lanes));
  });
}

// LANES scales or offsets of a group, from that of lane i on.
template <int BYTES>
inline lanes group_numbers(const uint8_t* from, int i) {
  if constexpr (BYTES == 2) return widen_float16(load<lane_halves>(from + 2 * i));
  typedef uint8_t lane_bytes __attribute__((vector_size(LANES)));
  return (lanes)(__builtin_convertvector(load<lane_bytes>(from + i), lane_words) << 23);  // 2^-127 becomes 0
}

// A single one.
template <int BYTES>
inline float group_number(const uint8_t* from, int64_t i) {
  if (BYTES == 2) return widen_float16(load<uint16_t>(from + 2 * i));
  uint32_t bits = uint32_t(from[i]) << 23;
  return load<float>(&bits);
}

// The sums of a row's codes in a group, as numbers: off is minus the middle's part, see panel_groups.
template <typename Coding, Offset OFFSET>
inline lanes group_product(lane_ints sums, float off, lanes scale, lanes offset) {
  lanes sum = __builtin_convertvector(sums, lanes);
  if constexpr (OFFSET == ZEROS) sum += offset * off;  // all of these are whole numbers below 2^24, so nothing is rounded
  sum *= scale;
  if constexpr (OFFSET == MINIMA) sum -= offset * off;
  return sum;
}

// A row has sums of whole numbers and of floats: with AVX-512 those of so many rows are held in registers. Those in floats of more rows
// stay in memory, to which they go once for each group.
constexpr int ROWS_HELD = 6;

// Whether what a product has beside whole sums leaves registers for those of more rows than ROWS_HELD. Others take up to 40 % longer then.
template <typename Coding>
constexpr bool has_free_registers([[maybe_unused]] Offset offset) {
#ifdef HAS_BYTE_DOT
  return REGISTER == 64 && std::is_same_v<Coding, Uniform<4>> && offset == NONE;
#else
  return false;
#endif
}

// Panels of 32 outputs: for each group of inputs 32 scales, with an offset 32 of these in float16 as well, then
// the codes, see CodeWords. start (ROWS, groups): as above, for each group; with an offset minus the sum of the group's x. A
// group has a multiple of 8 inputs, of 32 with codes of 5 bits.
template <int ROWS, typename Coding, Offset OFFSET>
inline void panel_groups(const typename Coding::Dot::Input* x, int64_t stride, const uint8_t* weight, int64_t groups, int64_t group,
                         const int32_t* start, float* out, const Stream& stream) {
  constexpr int SCALES = Coding::SCALE_BYTES * PANEL;
  constexpr bool IS_HELD = ROWS <= ROWS_HELD;
  lanes held[IS_HELD ? ROWS : 1][PANEL / LANES] = {};
  if constexpr (!IS_HELD) std::memset(out, 0, ROWS * PANEL * sizeof(float));
  for (int64_t number = 0; number < groups; ++number) {
    lanes scales[PANEL / LANES], offsets[PANEL / LANES] = {};
    for (int i = 0; i < PANEL / LANES; ++i) {
      scales[i] = group_numbers<Coding::SCALE_BYTES>(weight, i * LANES);
      if (OFFSET) offsets[i] = group_numbers<2>(weight + SCALES, i * LANES);
    }
    weight += SCALES + (OFFSET ? 2 * PANEL : 0);
    int32_t first[ROWS];
    for (int row = 0; row < ROWS; ++row) first[row] = first_sum<Coding, OFFSET>(start[row * groups + number]);
    multiply_codes<Coding, ROWS>(x, stride, weight, group, first, stream, [&](int row, int i, lane_ints sums) {
      lanes product = group_product<Coding, OFFSET>(sums, float(start[row * groups + number]), scales[i], offsets[i]);
      float* to = out + row * PANEL + i * LANES;
      if constexpr (IS_HELD) held[row][i] += product;
      else store(to, load<lanes>(to) + product);
    });
    x += group, weight += group * Coding::BITS / 8 * PANEL;
  }
  if constexpr (IS_HELD)
    for (int row = 0; row < ROWS; ++row)
      for (int i = 0; i < PANEL / LANES; ++i) store(out + row * PANEL + i * LANES, held[row][i]);
}

}  // namespace
