// Weights in codes of 4 or 5 bits that become bytes, with one scale for an output, before they are multiplied.
#pragma once

#include "rounded.h"

#if defined(HAS_AMX) || defined(__AVX512VNNI__)
#define HAS_CODES_IN_BYTES

// How weights of a form in groups become bytes. Functions take a panel or group where its scales begin.
struct ByteCoding {
  int64_t head, bits;  // of a group: bytes before its codes; of a code

  // The largest weight, without its sign, that each output can have; groups are so many bytes apart. Not finite where a scale is not.
  void (*largest_weights)(const uint8_t* panel, int64_t groups, int64_t group_bytes, float* largest);

  // A group's weights times a factor for each output, rounded, to a panel of bytes, to which BYTE_MIDDLE is added.
  void (*decode_codes)(const uint8_t* weight, int64_t group, const float* factors, char* to);
};

// Null for forms that keep their groups: those of 8 bits, which would lose more than they have lost, and those with minima.
const ByteCoding* byte_coding(int bits, int coding, int offset);

namespace {

// A thread's panel in bytes of so many inputs, for all rows that are multiplied with it. It is kept from call to call, so that nothing is
// allocated.
struct DecodedBytes {
  LineVector<char> bytes;
  float scales[PANEL];
};
inline DecodedBytes& decoded_bytes(int64_t inputs) {
  static thread_local DecodedBytes decoded;
  if (int64_t(decoded.bytes.size()) < inputs * PANEL) decoded.bytes.resize(inputs * PANEL);
  return decoded;
}

#ifdef HAS_AMX
constexpr int BYTE_ROWS = Amx::ROWS;
constexpr uint32_t BYTE_MIDDLE = 0;  // tiles take bytes with signs

// A panel whose codes become bytes a little before tiles read them, see PanelInMemory.
class BytePanel {
 public:
  BytePanel(const ByteCoding& coding, const uint8_t* weight, int64_t groups, int64_t group, int64_t group_bytes, const float* factors,
            const Stream& stream, char* to)
      : coding(coding), weight(weight), groups(groups), group(group), group_bytes(group_bytes), factors(factors), stream(stream), to(to) {}

  void ready(int64_t end) {
    for (; next < groups && next * group < end + LEAD; ++next) {
      const uint8_t* at = weight + next * group_bytes;
      // scales of the next panel, all of which are looked at before it is multiplied
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

// Sums of whole numbers times the outputs' scales, see FloatSums.
struct ScaledSums {
  const int32_t* sums;
  const float* scales;
  floats operator()(int row, int half) const {
    return to_floats(load<ints>(sums + row * PANEL + half * WIDTH)) * load<floats>(scales + half * WIDTH);
  }
};
#else
constexpr int BYTE_ROWS = ByteDot::ROWS;
constexpr uint32_t BYTE_MIDDLE = Int8::MIDDLE;
#endif

// A form in groups. Its weights become bytes for the first pass of a block of rows: in tiles a little ahead of them, otherwise all
// before it.
struct CodesInBytes {
  using Dot = ByteDot;
  static constexpr int ROWS = BYTE_ROWS, MIDDLE = BYTE_MIDDLE;
  const ByteCoding& coding;
  int64_t inputs, code_group, lead, group;

  CodesInBytes(const ByteCoding& coding, int64_t inputs, int64_t group, int64_t lead)
      : coding(coding), inputs(inputs), code_group(group), lead(lead), group(up_to(lead + inputs, group)) {}

  // Of rows, all of whose inputs are one group.
  int64_t padded() const { return group; }
  int64_t groups() const { return 1; }

  int64_t group_bytes() const { return coding.head + PANEL * code_group * coding.bits / 8; }
  int64_t panel_bytes() const { return group / code_group * group_bytes(); }
  Stretch read_in_pass(const uint8_t*) const { return {decoded_bytes(group).bytes.data(), PANEL * group}; }

  // A panel's scales of outputs to decoded, and what its weights are multiplied with to become bytes.
  void scale_outputs(const uint8_t* weight, DecodedBytes& decoded, float* factors) const {
    coding.largest_weights(weight, group / code_group, group_bytes(), decoded.scales);
    for (int i = 0; i < PANEL; ++i) {
      decoded.scales[i] /= 127.0f;
      factors[i] = decoded.scales[i] > 0 ? std::min(1.0f / decoded.scales[i], FLT_MAX) : 0.0f;
    }
  }

#ifdef HAS_AMX
  template <typename Done>
  void panel(TileShape& shape, int rows, const int8_t* x, const uint8_t* weight, const int32_t*, float* memory, const Stream& stream,
             Done done) const {
    DecodedBytes& decoded = decoded_bytes(group);
    float factors[PANEL];
    auto multiply = [&](auto&& source) {
      multiply_tiles<Numbers::SIGNED_WEIGHTS>(
          shape, rows, (const char*)x, group, source, group, (char*)memory,
          [&](int row, int count, const char* sums) { done(row, count, ScaledSums{(const int32_t*)sums, decoded.scales}); });
    };
    if (stream.is_near) return multiply(PanelInMemory{decoded.bytes.data(), stream});
    scale_outputs(weight, decoded, factors);
    multiply(BytePanel(coding, weight, group / code_group, code_group, group_bytes(), factors, stream, decoded.bytes.data()));
  }
#else
  template <int COUNT>
  static void panel(const CodesInBytes& form, const int8_t* x, const uint8_t* weight, const int32_t* start, float* out,
                    const Stream& stream) {
    DecodedBytes& decoded = decoded_bytes(form.group);
    if (!stream.is_near) form.decode(weight, decoded);
    panel_int8<COUNT>(x, form.group, (const uint8_t*)decoded.bytes.data(), form.group, start, out, stream);
    for (float* sums = out; sums < out + COUNT * PANEL; sums += PANEL)
      for (int i = 0; i < PANEL; i += WIDTH) store(sums + i, load<floats>(sums + i) * load<floats>(decoded.scales + i));
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
