// Matrix products with 4- and 5-bit weights that are unpacked to int8.
#include "unpack_to_int8.h"
#include "replay.h"
#include "rounded_products.h"

#ifdef HAS_CODES_IN_BYTES
namespace {

typedef int16_t lane_int16 __attribute__((vector_size(REGISTER)));

// Largest magnitude of code minus middle.
template <typename Coding>
constexpr int largest_number() {
  int most = 0;
  for (int code = 0; code < 1 << Coding::BITS; ++code) {
    int off = Coding::number(code) - Coding::MIDDLE;
    most = std::max(most, off < 0 ? -off : off);
  }
  return most;
}

// 16-bit fixed-point multiplication: numbers are shifted left by SHIFT, and factors have 15 bits and are below one. even and odd are the
// even and odd bytes of a word's part.
template <typename Coding>
struct ShiftedNumbers {
  static constexpr int SHIFT = [] {
    int shift = 0;
    while (largest_number<Coding>() << shift < 128) ++shift;
    return shift;
  }();
  StepWeights<Coding> weights;

  ShiftedNumbers(const uint8_t* codes, int64_t step) : weights(codes, step) {}
  lane_int16 even(int part) const { return (lane_int16)(weights.part[part] & 0x00ff00ff) << SHIFT; }
  lane_int16 odd(int part) const { return (lane_int16)(weights.part[part] >> 8 & 0x00ff00ff) << SHIFT; }
};

// Uniform 4-bit codes need at most one shift.
template <>
struct ShiftedNumbers<Uniform<4>> {
  static constexpr int SHIFT = 4;
  lane_words word;

  ShiftedNumbers(const uint8_t* codes, int64_t step) : word(load<lane_words>(codes + step * 4 * PANEL)) {}
  lane_int16 even(int part) const { return (lane_int16)((part ? word : word << 4) & 0x00f000f0); }
  lane_int16 odd(int part) const { return (lane_int16)((part ? word >> 8 : word >> 4) & 0x00f000f0); }
};

template <typename Coding, Offset OFFSET>
void largest_weights(const uint8_t* panel, int64_t groups, int64_t group_bytes, float* largest) {
  constexpr float TOP = (1 << Coding::BITS) - 1;
  for (int half = 0; half < 2; ++half) {
    lanes most{}, zeros{};  // zeros become NaN if a scale is not finite, and so does the output
    for (int64_t group = 0; group < groups; ++group) {
      const uint8_t* at = panel + group * group_bytes;
      lanes scale = magnitude(group_numbers<Coding::SCALE_BYTES>(at, half * WIDTH)), number = same(float(largest_number<Coding>()));
      if (OFFSET) {
        lanes zero = group_numbers<2>(at + Coding::SCALE_BYTES * PANEL, half * WIDTH);
        number = larger(zero, TOP - zero);
      }
      most = larger(scale * number, most);
      zeros += scale * 0.0f;
    }
    store(largest + half * WIDTH, most + zeros);
  }
}

// Copies a 16-bit number to both halves of each word.
inline lane_int16 twice(lane_ints numbers) { return (lane_int16)((numbers & 0xffff) | numbers << 16); }

template <typename Coding, Offset OFFSET>
void decode_codes(const uint8_t* weight, int64_t group, const float* factors, char* to) {
  using Words = CodeWords<Coding::BITS>;
  using Numbers = ShiftedNumbers<Coding>;
  constexpr int STEP = Words::STEP;
  constexpr int64_t SCALES = Coding::SCALE_BYTES * PANEL, HEAD = SCALES + (OFFSET ? 2 * PANEL : 0);
  for (int half = 0; half < 2; ++half) {
    lanes scale = group_numbers<Coding::SCALE_BYTES>(weight, half * WIDTH) * load<lanes>(factors + half * WIDTH);
    lane_int16 factor = twice((lane_ints)nearest(scale * float(1 << (15 - Numbers::SHIFT))));
    lane_ints zero = lane_ints{} + Coding::MIDDLE;
    if (OFFSET) zero = __builtin_convertvector(group_numbers<2>(weight + SCALES, half * WIDTH), lane_ints);
    lane_int16 middle = twice(zero << Numbers::SHIFT);
    auto product = [&](lane_int16 numbers) { return (lane_words)_mm512_mulhrs_epi16((__m512i)(numbers - middle), (__m512i)factor); };
    const uint8_t* codes = weight + HEAD + half * REGISTER;
    for (int64_t step = 0; step < group / STEP; ++step) {
      Numbers numbers(codes, step);
#pragma GCC unroll 2
      for (int part = 0; part < STEP / 4; ++part) {
        lane_words even = product(numbers.even(part)), odd = product(numbers.odd(part));
        lane_words bytes = (even & 0x00ff00ff) | (lane_words)((lane_int16)odd << 8);
        store(to + (step * STEP + 4 * part) * PANEL + half * REGISTER, bytes ^ 0x01010101u * BYTE_MIDDLE);
      }
    }
  }
}

template <typename Coding, Offset OFFSET = NONE>
const ByteCoding* byte_coding_for() {
  static constexpr ByteCoding coding{Grouped<Coding, OFFSET>::HEAD, Coding::BITS, largest_weights<Coding, OFFSET>,
                                     decode_codes<Coding, OFFSET>};
  return &coding;
}

// Creates the form of a segment, see FormMaker.
struct BytesMaker {
  const ByteCoding& coding;
  int64_t group;
  CodesInBytes operator()(int64_t inputs, int64_t lead) const { return {coding, inputs, group, lead}; }
};

}  // namespace

const ByteCoding* byte_coding(int bits, int coding, int offset) {
  if (offset == MINIMA) return nullptr;
  if (coding == E2M1) return byte_coding_for<E2m1>();
  if (coding == NVFP4) return byte_coding_for<Nvfp4>();
  if (coding == IQ4) return byte_coding_for<Iq4>();
  if (bits == 4) return offset == ZEROS ? byte_coding_for<Uniform<4>, ZEROS>() : byte_coding_for<Uniform<4>>();
  return bits == 5 && offset == NONE ? byte_coding_for<Uniform<5>>() : nullptr;
}

extern "C" {

#ifdef HAS_AMX
#define WITH_GROUPS linear_groups_amx
#define SUM_WITH_GROUPS sum_linear_groups_amx
#else
#define WITH_GROUPS linear_groups
#define SUM_WITH_GROUPS sum_linear_groups
#endif
void WITH_GROUPS(const void* x, const uint8_t* data, const void* bias, void* out, int64_t tokens, int64_t outputs, int64_t inputs,
                 int64_t group, int64_t lead, int bits, int coding, int offset, float global_scale, int wide, int finish, int threads);
void SUM_WITH_GROUPS(const void* x, const Segment* segments, int64_t count, void* out, float* sums, int64_t tokens, int64_t outputs,
                     int64_t group, int bits, int coding, int offset, int wide, int threads);

// Product in bfloat16 with slightly requantized weights: each is rounded to a 127th of its output's largest weight.
void linear_groups_bytes(const void* x, const uint8_t* data, const void* bias, void* out, int64_t tokens, int64_t outputs, int64_t inputs,
                         int64_t group, int64_t lead, int bits, int coding, int offset, float global_scale, int wide, int finish,
                         int threads) {
  const ByteCoding* bytes = byte_coding(bits, coding, offset);
  if (!bytes || wide)
    return WITH_GROUPS(x, data, bias, out, tokens, outputs, inputs, group, lead, bits, coding, offset, global_scale, wide, finish, threads);
  Segment all{data, nullptr, inputs, lead, global_scale, 0, false};
  multiply(BytesMaker{*bytes, group}, (const bf16*)x, {&all, 1, nullptr}, (const bf16*)bias, (bf16*)out, tokens, outputs, Finish(finish),
           threads);
}
REPLAYABLE(linear_groups_bytes)

// Sum of the products of segments, each computed as by linear_groups_bytes.
void sum_linear_groups_bytes(const void* x, const Segment* segments, int64_t count, void* out, float* sums, int64_t tokens,
                             int64_t outputs, int64_t group, int bits, int coding, int offset, int wide, int threads) {
  const ByteCoding* bytes = byte_coding(bits, coding, offset);
  if (!bytes || wide) return SUM_WITH_GROUPS(x, segments, count, out, sums, tokens, outputs, group, bits, coding, offset, wide, threads);
  multiply(BytesMaker{*bytes, group}, (const bf16*)x, {segments, count, sums}, (const bf16*)nullptr, (bf16*)out, tokens, outputs,
           Finish::NOTHING, threads);
}
REPLAYABLE(sum_linear_groups_bytes)
#undef WITH_GROUPS
#undef SUM_WITH_GROUPS

}  // extern "C"
#endif
