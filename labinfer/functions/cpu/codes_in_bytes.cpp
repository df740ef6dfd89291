// Products with weights in codes that become bytes, in tiles.
#include "codes_in_bytes.h"
#include "replay.h"
#include "rounded_products.h"

#ifdef HAS_AMX
namespace {

typedef int16_t lane_shorts __attribute__((vector_size(REGISTER)));

// What is multiplied with a scale: a code's number less its middle, or less its group's zero point, which may be one past the codes.
template <typename Coding, Offset OFFSET>
constexpr int most_of() {
  if (OFFSET == ZEROS) return 1 << Coding::BITS;
  int most = 0;
  for (int code = 0; code < 1 << Coding::BITS; ++code) {
    int off = Coding::number(code) - Coding::MIDDLE;
    most = std::max(most, off < 0 ? -off : off);
  }
  return most;
}

// Numbers are multiplied in 16 bits, SHIFT bits to the left so that their factors have 15 bits and are below one. even and odd are those
// of the even bytes and of the odd ones of a word's part.
template <typename Coding, int MOST>
struct ShiftedNumbers {
  static constexpr int SHIFT = [] {
    int shift = 0;
    while (MOST << shift < 128) ++shift;
    return shift;
  }();
  StepWeights<Coding> weights;

  ShiftedNumbers(const uint8_t* codes, int64_t step) : weights(codes, step) {}
  lane_shorts even(int part) const { return (lane_shorts)(weights.part[part] & 0x00ff00ff) << SHIFT; }
  lane_shorts odd(int part) const { return (lane_shorts)(weights.part[part] >> 8 & 0x00ff00ff) << SHIFT; }
};

// Codes of 4 bits that are numbers go to their places with one shift at most.
template <int MOST>
struct ShiftedNumbers<Uniform<4>, MOST> {
  static constexpr int SHIFT = 4;
  lane_words word;

  ShiftedNumbers(const uint8_t* codes, int64_t step) : word(load<lane_words>(codes + step * 4 * PANEL)) {}
  lane_shorts even(int part) const { return (lane_shorts)((part ? word : word << 4) & 0x00f000f0); }
  lane_shorts odd(int part) const { return (lane_shorts)((part ? word >> 8 : word >> 4) & 0x00f000f0); }
};

template <typename Coding, Offset>
void largest_scales(const uint8_t* panel, int64_t groups, int64_t group_bytes, float* largest) {
  for (int half = 0; half < 2; ++half) {
    lanes most{};
    for (int64_t group = 0; group < groups; ++group)
      most = larger(magnitude(group_numbers<Coding::SCALE_BYTES>(panel + group * group_bytes, half * WIDTH)), most);
    store(largest + half * WIDTH, most);
  }
}

// A number in both halves of each word.
inline lane_shorts twice(lane_ints numbers) { return (lane_shorts)((numbers & 0xffff) | numbers << 16); }

template <typename Coding, Offset OFFSET>
void decode_group(const uint8_t* weight, int64_t group, const float* factors, char* to) {
  using Words = CodeWords<Coding::BITS>;
  using Numbers = ShiftedNumbers<Coding, most_of<Coding, OFFSET>()>;
  constexpr int STEP = Words::STEP;
  constexpr int64_t SCALES = Coding::SCALE_BYTES * PANEL, HEAD = SCALES + (OFFSET ? 2 * PANEL : 0);
  for (int half = 0; half < 2; ++half) {
    lanes scale = group_numbers<Coding::SCALE_BYTES>(weight, half * WIDTH) * load<lanes>(factors + half * WIDTH);
    lane_shorts factor = twice((lane_ints)nearest(scale * float(1 << (15 - Numbers::SHIFT))));
    lane_ints zero = lane_ints{} + Coding::MIDDLE;
    if (OFFSET) zero = __builtin_convertvector(group_numbers<2>(weight + SCALES, half * WIDTH), lane_ints);
    lane_shorts middle = twice(zero << Numbers::SHIFT);
    auto product = [&](lane_shorts numbers) { return (lane_words)_mm512_mulhrs_epi16((__m512i)(numbers - middle), (__m512i)factor); };
    const uint8_t* codes = weight + HEAD + half * REGISTER;
    for (int64_t step = 0; step < group / STEP; ++step) {
      Numbers numbers(codes, step);
#pragma GCC unroll 2
      for (int part = 0; part < STEP / 4; ++part) {
        lane_words even = product(numbers.even(part)), odd = product(numbers.odd(part));
        store(to + (step * STEP + 4 * part) * PANEL + half * REGISTER, (even & 0x00ff00ff) | (lane_words)((lane_shorts)odd << 8));
      }
    }
  }
}

template <typename Coding, Offset OFFSET = NONE>
const ByteCoding* coding_of() {
  static constexpr int MOST = most_of<Coding, OFFSET>();
  static constexpr ByteCoding coding{Grouped<Coding, OFFSET>::HEAD, Coding::BITS, MOST, largest_scales<Coding, OFFSET>,
                                     decode_group<Coding, OFFSET>};
  return &coding;
}

}  // namespace

const ByteCoding* byte_coding(int bits, int coding, int offset) {
  if (offset == MINIMA) return nullptr;
  if (coding == E2M1) return coding_of<E2m1>();
  if (coding == IQ4) return coding_of<Iq4>();
  if (bits == 4) return offset == ZEROS ? coding_of<Uniform<4>, ZEROS>() : coding_of<Uniform<4>>();
  return bits == 5 && offset == NONE ? coding_of<Uniform<5>>() : nullptr;
}

extern "C" {

void linear_groups_amx(const void* x, const uint8_t* data, const void* bias, void* out, int64_t tokens, int64_t outputs, int64_t inputs,
                       int64_t group, int64_t lead, int bits, int coding, int offset, float unit, int wide, int finish, int threads);

// The same in bfloat16, with weights that have lost a little: each is rounded to a 127th of its output's largest one.
void linear_groups_bytes(const void* x, const uint8_t* data, const void* bias, void* out, int64_t tokens, int64_t outputs, int64_t inputs,
                         int64_t group, int64_t lead, int bits, int coding, int offset, float unit, int wide, int finish, int threads) {
  const ByteCoding* bytes = byte_coding(bits, coding, offset);
  if (!bytes || wide)
    return linear_groups_amx(x, data, bias, out, tokens, outputs, inputs, group, lead, bits, coding, offset, unit, wide, finish, threads);
  multiply(CodesInBytes(*bytes, inputs, group, lead), (const bf16*)x, data, nullptr, (const bf16*)bias, (bf16*)out, tokens, outputs, unit,
           Finish(finish), threads);
}
REPLAYABLE(linear_groups_bytes)

}  // extern "C"
#endif
