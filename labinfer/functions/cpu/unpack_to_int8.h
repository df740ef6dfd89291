// Unpacks 4- and 5-bit weights to int8, with one scale per output, before they are multiplied.
#pragma once

#include <cfloat>

#include "rounded.h"

#if defined(HAS_AMX) || defined(__AVX512VNNI__)
#define HAS_CODES_IN_BYTES

// Unpacking functions of a grouped form. They take the address of a panel's or group's scales.
struct ByteCoding {
  int64_t head, bits;  // bytes of a group before its codes; bits of a code

  // Largest magnitude that each output's weights can have; groups are `stride` bytes apart. Not finite if a scale is not finite.
  void (*largest_weights)(const uint8_t* panel, int64_t groups, int64_t group_bytes, float* largest);

  // Writes a group's weights times a factor per output, rounded, to an int8 panel, plus BYTE_MIDDLE.
  void (*decode_codes)(const uint8_t* weight, int64_t group, const float* factors, char* to);
};

// Unpacking functions of a form. Null for forms with minima, and for 8-bit forms, to which requantization would add more error than they
// have.
const ByteCoding* byte_coding(int bits, int coding, int offset);

namespace {

// Thread-local int8 panel of `inputs` inputs, for all rows that are multiplied with it.
struct DecodedBytes {
  LineVector<char> bytes;
  float scales[PANEL];
};
inline DecodedBytes& decoded_bytes(int64_t inputs) {
  static thread_local DecodedBytes decoded;
  if (int64_t(decoded.bytes.size()) < inputs * PANEL) decoded.bytes.resize(inputs * PANEL);
  return decoded;
}

// Integer sums times the outputs' scales, see FloatSums.
struct ScaledSums {
  const float* sums;
  const float* scales;
  floats operator()(int row, int half) const {
    return to_floats(load<ints>(sums + row * PANEL + half * WIDTH)) * load<floats>(scales + half * WIDTH);
  }
};

#ifdef HAS_AMX
constexpr int BYTE_ROWS = Amx::ROWS;
constexpr uint32_t BYTE_MIDDLE = 0;  // tiles take signed bytes

// Panel whose codes are unpacked shortly before AMX tiles read them, see PanelInMemory.
class BytePanel {
 public:
  BytePanel(const ByteCoding& coding, const uint8_t* weight, int64_t groups, int64_t group, int64_t group_bytes, const float* factors,
            const Stream& stream, char* to)
      : coding(coding), weight(weight), groups(groups), group(group), group_bytes(group_bytes), factors(factors), stream(stream), to(to) {}

  void ready(int64_t end) {
    for (; next < groups && next * group < end + LEAD; ++next) {
      const uint8_t* at = weight + next * group_bytes;
      // scales of the next panel, all of which are read before it is multiplied
      const uint8_t* soon = at + groups * group_bytes + stream.jump;
      for (int64_t byte = 0; byte < coding.head; byte += 64) __builtin_prefetch(soon + byte, 0, 2);
      coding.decode_codes(at, group, factors, to + next * group * PANEL);
    }
  }

  const char* step(int64_t from) const { return to + from * PANEL; }
  int64_t lines() const { return (group_bytes + group - 1) / group; }
  const char* ahead(int64_t from, bool) const { return stream.ahead(weight + from * group_bytes / group); }

 private:
  static constexpr int64_t LEAD = 2 * TILE_BYTES;

  const ByteCoding& coding;
  const uint8_t* weight;
  int64_t groups, group, group_bytes, next = 0;
  const float* factors;
  const Stream& stream;
  char* to;
};

#else
constexpr int BYTE_ROWS = ByteDot::ROWS;
constexpr uint32_t BYTE_MIDDLE = Int8::MIDDLE;
#endif

// Grouped form whose weights are unpacked in the first pass of a block of rows: shortly before they are used with AMX tiles, otherwise all
// at once.
struct CodesInBytes : InputWords<int8_t> {
  using Dot = ByteDot;
  using Input = int8_t;
  static constexpr int ROWS = BYTE_ROWS, MIDDLE = BYTE_MIDDLE, FEW = 0;
  const ByteCoding& coding;
  int64_t inputs, code_group, lead, group;

  CodesInBytes(const ByteCoding& coding, int64_t inputs, int64_t group, int64_t lead)
      : coding(coding), inputs(inputs), code_group(group), lead(lead), group(up_to(lead + inputs, group)) {}

  // Shape of rounded rows whose inputs form a single group.
  int64_t padded() const { return group; }
  int64_t groups() const { return 1; }

  int64_t unit() const { return group; }  // outputs have one scale, so all inputs of a panel are unpacked together
  int64_t group_bytes() const { return coding.head + PANEL * code_group * coding.bits / 8; }
  int64_t bytes(int64_t some) const { return some / code_group * group_bytes(); }
  int64_t panel_bytes() const { return bytes(group); }
  Stretch read_in_pass(const uint8_t*, int64_t) const { return {decoded_bytes(group).bytes.data(), PANEL * group}; }
  ScaledSums sums(const float* memory) const { return {memory, decoded_bytes(group).scales}; }

  // Writes a panel's output scales to `decoded`, and the factors that turn its weights into int8.
  void scale_outputs(const uint8_t* weight, DecodedBytes& decoded, float* factors) const {
    coding.largest_weights(weight, group / code_group, group_bytes(), decoded.scales);
    for (int i = 0; i < PANEL; ++i) {
      decoded.scales[i] /= 127.0f;
      factors[i] = decoded.scales[i] > 0 ? std::min(1.0f / decoded.scales[i], FLT_MAX) : 0.0f;
    }
  }

#ifdef HAS_AMX
  template <typename Done>
  void panel(TileShape& shape, const RowBlock<CodesInBytes>& block, int64_t row, int rows, const uint8_t* weight, const int32_t*, float* memory,
             const Stream& stream, Done done) const {
    const int8_t* x = block.at(row, 0);
    DecodedBytes& decoded = decoded_bytes(group);
    float factors[PANEL];
    auto multiply = [&](auto&& source) {
      multiply_tiles<Numbers::SIGNED_WEIGHTS>(
          shape, rows, (const char*)x, group, source, group, (char*)memory,
          [&](int row, int count, const char* sums) { done(row, count, ScaledSums{(const float*)sums, decoded.scales}); });
    };
    if (stream.is_near) return multiply(PanelInMemory{decoded.bytes.data(), stream});
    scale_outputs(weight, decoded, factors);
    multiply(BytePanel(coding, weight, group / code_group, code_group, group_bytes(), factors, stream, decoded.bytes.data()));
  }
#else
  template <int COUNT>
  static void panel(const CodesInBytes& form, const RowInputs<int8_t>& in, const uint8_t* weight, int64_t, bool, float* sums, const Stream& stream) {
    DecodedBytes& decoded = decoded_bytes(form.group);
    if (!stream.is_near) form.decode(weight, decoded);
    panel_int8<COUNT>(in.x, (const uint8_t*)decoded.bytes.data(), form.group, in.start, false, (int32_t*)sums, stream);
  }

 private:
  void decode(const uint8_t* weight, DecodedBytes& decoded) const {
    float factors[PANEL];
    scale_outputs(weight, decoded, factors);
    char* to = decoded.bytes.data();
    const uint8_t* end = weight + panel_bytes();
    for (; weight < end; weight += group_bytes(), to += code_group * PANEL) {
      for (const uint8_t* soon = weight + AHEAD; soon < std::min(end, weight + AHEAD + group_bytes()); soon += 64) __builtin_prefetch(soon);
      coding.decode_codes(weight, code_group, factors, to);
    }
  }
#endif
};

#ifdef HAS_AMX
template <>
constexpr bool IN_TILES<CodesInBytes> = true;
template <>
struct PanelState<CodesInBytes> : TileShape {};
#endif

}  // namespace
#endif
