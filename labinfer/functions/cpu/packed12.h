// Lossless 12-bit compression of bfloat16, and products of few rows with it.
#pragma once

#include "panel.h"

namespace {

// The lower byte of a weight (mantissa and the exponent's last bit) is stored unchanged. Of the upper byte 4 bits are stored: the sign, and
// the offset of the remaining exponent from its panel's base. The few weights with other exponents are patched from a list per group of 16
// inputs. Panels and pairs are those of panel.h; two pairs take 64 lower bytes of the first, 64 of the second, and 64 with the upper bytes
// of both.
constexpr int64_t PAIRS = 8, GROUP_INPUTS = 2 * PAIRS;  // pairs and inputs of a group
constexpr int64_t QUAD_BYTES = 192, GROUP_BYTES = PAIRS / 2 * QUAD_BYTES;
constexpr int64_t GROUP_WEIGHTS = GROUP_INPUTS * PANEL;
constexpr int UPPERS = 8;  // number of distinct upper bytes, without signs

typedef uint8_t lane_bytes __attribute__((vector_size(REGISTER)));
typedef uint16_t lane_shorts __attribute__((vector_size(REGISTER)));
constexpr int SHORTS = REGISTER / 2;  // weights in a register

// Pointers to a panel's parts.
struct Panel12 {
  const uint8_t* planes;
  const uint16_t* counts;   // number of patches of each group
  const uint32_t* patches;  // patches from the first group on: the position in the group's weights in panel.h order, then the weight
  uint8_t base;
  Stream stream;  // read stream of `planes`
};

// A matrix in contiguous memory: the panels' planes, the index of each panel's first patch, the remaining rows (in 16 bits), the groups'
// patch counts, the panels' bases, all patches.
struct Matrix12 {
  int64_t panels, groups;
  const uint8_t* planes;
  const int64_t* begin;  // (panels + 1)
  const bf16* last_rows;
  const uint16_t* counts;  // (panels, groups)
  const uint8_t* bases;
  const uint32_t* patches;

  Matrix12(const uint8_t* data, int64_t outputs, int64_t inputs)
      : panels(outputs / PANEL), groups((inputs + GROUP_INPUTS - 1) / GROUP_INPUTS), planes(data) {
    begin = (const int64_t*)(planes + panels * groups * GROUP_BYTES);
    last_rows = (const bf16*)(begin + panels + 1);
    counts = (const uint16_t*)(last_rows + outputs % PANEL * inputs);
    bases = (const uint8_t*)(counts + panels * groups);
    patches = (const uint32_t*)(data + up_to(bases + panels - data, sizeof(uint32_t)));
  }

  int64_t bytes(int64_t count) const { return (const uint8_t*)(patches + count) - planes; }

  // Address of panel `number`.
  const uint8_t* at(int64_t number) const { return planes + number * groups * GROUP_BYTES; }

  // `count` groups of panel `number` from group `first` on; the memory at `next` is read after them.
  Panel12 panel(int64_t number, int64_t first, int64_t count, const void* next) const {
    const uint8_t* from = at(number) + first * GROUP_BYTES;
    const uint16_t* own = counts + number * groups;
    int64_t skipped = 0;
    for (int64_t group = 0; group < first; ++group) skipped += own[group];
    return {from, own + first, patches + begin[number] + skipped, bases[number], panel_stream(from, count * GROUP_BYTES, next)};
  }
  Panel12 panel(int64_t number) const { return panel(number, 0, groups, at(number + 1)); }
};

// Interleaves the bytes of two registers: of every 16 bytes the first 8, or the last 8.
template <bool LAST>
inline lane_shorts interleave(lane_bytes one, lane_bytes other) {
#if defined(__AVX512BW__)
  auto a = (__m512i)one, b = (__m512i)other;
  return (lane_shorts)(LAST ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  auto a = (__m256i)one, b = (__m256i)other;
  return (lane_shorts)(LAST ? _mm256_unpackhi_epi8(a, b) : _mm256_unpacklo_epi8(a, b));
#elif defined(__aarch64__)
  return (lane_shorts)(LAST ? vzip2q_u8(one, other) : vzip1q_u8(one, other));
#else
  lane_bytes out;
  for (int i = 0; i < REGISTER; ++i) out[i] = (i % 2 ? other : one)[i / 16 * 16 + LAST * 8 + i % 16 / 2];
  return (lane_shorts)out;
#endif
}

// Decoded weights of two pairs of inputs, for the outputs whose bytes begin at `place`.
struct Quad {
  lane_shorts half[2][2];  // by pair and half

  Quad(const uint8_t* from, int64_t place, uint8_t base) {
    auto codes = load<lane_bytes>(from + 128 + place);
    lane_bytes first = (codes & 0x80) | ((codes & 7) + base);
    auto next = (lane_bytes)((lane_shorts)codes << 4), other = (lane_bytes)((lane_shorts)codes >> 4);
    lane_bytes second = (next & 0x80) | ((other & 7) + base);
    auto lower = load<lane_bytes>(from + place);
    half[0][0] = interleave<false>(lower, first);
    half[0][1] = interleave<true>(lower, first);
    lower = load<lane_bytes>(from + 64 + place);
    half[1][0] = interleave<false>(lower, second);
    half[1][1] = interleave<true>(lower, second);
  }
};

inline void decode_quad(const uint8_t* from, uint8_t base, bf16* to) {
#pragma GCC unroll 4
  for (int place = 0; place < 64; place += REGISTER) {
    Quad quad(from, place, base);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) store(to + i * PANEL + place / 2, quad.half[i / 2][i % 2]);
  }
}

inline void decode_group(const uint8_t* from, uint8_t base, const uint32_t* patches, int64_t count, bf16* to) {
  for (int64_t quad = 0; quad < PAIRS / 2; ++quad) decode_quad(from + quad * QUAD_BYTES, base, to + quad * 4 * PANEL);
  for (int64_t i = 0; i < count; ++i) to[patches[i] >> 16] = bf16(patches[i]);
}

// Panel that is decoded shortly before AMX tiles read it, because a read directly after a write stalls; see PanelInMemory.
class DecodedPanel {
 public:
  // Decodes into `memory` in the layout of panel.h, the last group zero-padded. If is_kept, other rows read it again. Otherwise the first
  // RING weights of memory are a ring buffer: they stay in the first-level cache and cover twice the near distance.
  DecodedPanel(const Panel12& panel, int64_t groups, bf16* to, bool is_kept)
      : panel(panel), groups(groups), mask(is_kept ? -1 : RING - 1), patches(panel.patches), to(to) {}

  void ready(int64_t end) {
    int64_t soon = std::min(groups, (end + LEAD + GROUP_ROW - 1) / GROUP_ROW);
    for (; next < soon; ++next) {
      decode_group(panel.planes + next * GROUP_BYTES, panel.base, patches, panel.counts[next], to + (next * GROUP_WEIGHTS & mask));
      patches += panel.counts[next];
    }
  }

  const char* step(int64_t from) const { return (const char*)(to + (from / int64_t(sizeof(bf16)) * PANEL & mask)); }
  int64_t lines() const { return 2 * GROUP_BYTES / 64; }  // a step of a tile is two groups
  const char* ahead(int64_t from, bool) const { return panel.stream.ahead(panel.planes + from / GROUP_ROW * GROUP_BYTES); }

 private:
  static constexpr int64_t GROUP_ROW = GROUP_INPUTS * sizeof(bf16), LEAD = 4 * GROUP_ROW, RING = 1 << 14;  // GROUP_ROW, LEAD: bytes

  Panel12 panel;
  int64_t groups, mask, next = 0;
  const uint32_t* patches;
  bf16* to;
};

// Decodes `groups` groups to memory in the layout of panel.h, the last group of a panel zero-padded.
inline void decode_groups(const Panel12& panel, int64_t groups, bf16* to) {
  const uint32_t* patches = panel.patches;
  for (int64_t group = 0; group < groups; patches += panel.counts[group++])
    decode_group(panel.planes + group * GROUP_BYTES, panel.base, patches, panel.counts[group], to + group * GROUP_WEIGHTS);
}

// Kernels that decode 12-bit weights in registers, with the same operations in the same order as the kernels of panel.h. Groups with patches
// and a partial last group are decoded to memory. With more than 10 rows all groups are: the sums of the rows leave no registers for decoding.
template <int COUNT, typename Decoded, typename Loaded>
inline void for_groups(const Panel12& panel, int64_t pairs, Decoded from_quad, Loaded from_memory) {
  constexpr bool HAS_REGISTERS = COUNT <= 10;
  alignas(64) bf16 own[GROUP_WEIGHTS];
  const uint32_t* patches = panel.patches;
  const uint8_t* at = panel.planes;
  for (int64_t first = 0, group = 0; first < pairs; first += PAIRS, ++group, at += GROUP_BYTES) {
    int64_t count = panel.counts[group];
    if (HAS_REGISTERS && count == 0 && first + PAIRS <= pairs) {
      for (int64_t i = 0; i < PAIRS / 2; ++i) {
        const uint8_t* now = at + i * QUAD_BYTES;
        const char* ahead = panel.stream.ahead<COUNT>(now);
        for (int line = 0; line < QUAD_BYTES; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        from_quad(first + 2 * i, now);
      }
      continue;
    }
    const char* ahead = panel.stream.ahead<COUNT>(at);
    for (int64_t line = 0; line < GROUP_BYTES; line += 64) __builtin_prefetch(ahead + line, 0, 2);
    decode_group(at, panel.base, patches, count, own);
    patches += count;
    for (int64_t pair = 0; pair < std::min(PAIRS, pairs - first); ++pair) from_memory(first + pair, own + pair * 2 * PANEL);
  }
}

// Adds the products of interleaved rows with a pair of inputs to `total`; `both` has the pair's weights.
template <int COUNT, int TOGETHER>
inline void add_pair(const Fma*, const float* x, const lane_shorts* both, RowSums<COUNT, TOGETHER>& total) {
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
    lanes wide[TOGETHER];
#pragma GCC unroll 8
    for (int i = 0; i < TOGETHER; ++i) wide[i] = (lanes)(odd ? (lane_words)both[i] & 0xffff0000 : (lane_words)both[i] << 16);
#pragma GCC unroll 16
    for (int row = 0; row < COUNT; ++row) {
      float input = x[odd * COUNT + row];
#pragma GCC unroll 8
      for (int i = 0; i < TOGETHER; ++i) total[row][i] += wide[i] * input;
    }
  }
}

#ifdef HAS_BFLOAT16_DOT
template <int COUNT, int TOGETHER>
inline void add_pair(const Dot*, const bf16* x, const lane_shorts* both, RowSums<COUNT, TOGETHER>& total) {
#pragma GCC unroll 16
  for (int row = 0; row < COUNT; ++row) {
    lane_words input = load<uint32_t>(x + 2 * row) - lane_words{};
#pragma GCC unroll 8
    for (int i = 0; i < TOGETHER; ++i) total[row][i] = Dot::add(total[row][i], (lane_words)both[i], input);
  }
}
#endif

// Counterpart of multiply_panel for COUNT rows and 12-bit weights.
template <typename Kernel, int COUNT>
void multiply12(const typename Kernel::Input* x, const Panel12& weight, int64_t pairs, bool adds, float* sums) {
  constexpr int ACROSS = PANEL / LANES, TOGETHER = together(COUNT, ACROSS);
#pragma GCC unroll 8
  for (int column = 0; column < ACROSS; column += TOGETHER) {
    RowSums<COUNT, TOGETHER> total(sums + column * LANES, adds);
    for_groups<COUNT>(
        weight, pairs,
        [&](int64_t pair, const uint8_t* from) {
          lane_shorts both[2][TOGETHER];
#pragma GCC unroll 8
          for (int i = 0; i < TOGETHER; ++i) {
            int half = (column + i) / (ACROSS / 2), place = (column + i) % (ACROSS / 2) * REGISTER;
            Quad quad(from, place, weight.base);
            both[0][i] = quad.half[0][half];
            both[1][i] = quad.half[1][half];
          }
          add_pair((Kernel*)nullptr, x + 2 * pair * COUNT, both[0], total);
          add_pair((Kernel*)nullptr, x + 2 * (pair + 1) * COUNT, both[1], total);
        },
        [&](int64_t pair, const bf16* at) {
          lane_shorts both[TOGETHER];
#pragma GCC unroll 8
          for (int i = 0; i < TOGETHER; ++i) both[i] = load<lane_shorts>(at + (column + i) * SHORTS);
          add_pair((Kernel*)nullptr, x + 2 * pair * COUNT, both, total);
        });
    total.store_to(sums + column * LANES);
  }
}

template <typename Kernel>
using PanelOf12 = void (*)(const typename Kernel::Input*, const Panel12&, int64_t, bool, float*);

template <typename Kernel, int... ROWS>
constexpr PanelOf12<Kernel> panel12_among(int rows, std::integer_sequence<int, ROWS...>) {
  constexpr PanelOf12<Kernel> variants[] = {multiply12<Kernel, ROWS + 1>...};
  return variants[rows - 1];
}

template <typename Kernel>
constexpr PanelOf12<Kernel> panel12_of(int rows) {
  return panel12_among<Kernel>(rows, std::make_integer_sequence<int, Kernel::ROWS>{});
}

}  // namespace
