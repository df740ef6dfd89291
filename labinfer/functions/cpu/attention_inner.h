// Inner loops of attention: query or weight rows times 32 columns of keys or values, in the memory layout of the KV cache.
#pragma once

#include "amx.h"
#include "exponentials.h"

namespace {

// A tiled KV cache stores the keys of 16 tokens of a KV head as a unit (pairs of dimensions, 16 keys, 2), and their values as a unit (pairs
// of keys, dimensions, 2): the operands of a product's step are adjacent, and a unit is read sequentially.
constexpr int UNIT = WIDTH;
// Prefetch distance in units, to the second-level cache: the first-level cache has too few line fill buffers.
constexpr int AHEAD_UNITS = 4;

// Dtypes of activations and of a KV cache. INT8 (caches only) has scales.
enum class Dtype : int { BFLOAT16, FLOAT32, FLOAT16, INT8 };

constexpr Dtype dtype_of(const bf16*) { return Dtype::BFLOAT16; }
constexpr Dtype dtype_of(const float*) { return Dtype::FLOAT32; }

// Calls use(pointer) with the pointer cast to its floating-point dtype.
template <typename Use>
inline void with_dtype(Dtype dtype, void* pointer, Use use) {
  if (dtype == Dtype::BFLOAT16) use((bf16*)pointer);
  else if (dtype == Dtype::FLOAT16) use((half*)pointer);
  else use((float*)pointer);
}

// Keys of one softmax block (span). Spans begin at multiples of SPAN, are computed independently, and are joined in order: a token's output
// has identical bits in any batch and on any thread.
constexpr int64_t SPAN = 256;

// Memory layout of the rows that kernels read (but for AMX tiles), with strides known at compile time. QUERIES: pair by pair, the first
// pair of all rows, then the second of all rows. WEIGHTS: one row after another.
enum class Rows { QUERIES, WEIGHTS };
template <Rows ROWS, int COUNT>
struct Distance {
  static constexpr int64_t ROW = ROWS == Rows::QUERIES ? 2 : SPAN, PAIR = ROWS == Rows::QUERIES ? 2 * COUNT : 2;
};

// Matrix operand: groups of pairs; each group has separate addresses of its first 16 and its second 16 columns. Meanwhile the groups at
// soon_first and soon_second are prefetched.
template <typename Element>
struct Columns {
  const Element *const *first, *const *second;
  const Element *const *soon_first, *const *soon_second;
  int64_t first_offset, second_offset;  // of the columns, counted from the groups' addresses, in elements
  int64_t pairs, group;                 // pairs in all, and per group except the last
  int64_t stride;                       // elements from pair to pair
};

// Maximum rows that are multiplied in a single sequential pass over the units, by processors with enough registers.
constexpr int FEW_ROWS = REGISTER == 64 ? 7 : 0;

// 2^x to 8 parts in 100,000, for weights in bfloat16; 0 below the smallest normal float.
inline floats rough_power_of_two(floats x) {
  floats rounded = x + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  floats rest = x - (rounded - 12582912.0f);
  floats value = same(5.517164e-2f);  // minimax polynomial of the relative error on [-1/2, 1/2]
  value = value * rest + 2.4261113e-1f;
  value = value * rest + 6.9326097e-1f;
  value = value * rest + 9.9992806e-1f;
  value = (floats)((words)value + ((words)rounded << 23));
  return from_on(-126.0f, x, value);
}

// bfloat16 keys and values converted to float32 in registers, with FMA; for any processor.
struct FmaUnits {
  using Input = float;
  using Element = bf16;
  static constexpr int ROWS = REGISTER == 64 ? 13 : 6, FEW = FEW_ROWS;

  static floats power_of_two(floats x) { return from_on(-126.0f, x, bounded_power_of_two(x)); }

  static lanes add(lanes total, lane_words both, const float* pair) {
    total += (lanes)(both << 16) * pair[0];
    return total + (lanes)(both & 0xffff0000) * pair[1];
  }

  template <Rows KIND, int COUNT>
  static void multiply(const float* x, const Columns<bf16>& columns, float* out, int64_t out_stride) {
    using At = Distance<KIND, COUNT>;
    constexpr int ACROSS = PANEL / LANES, TOGETHER = together(COUNT, ACROSS);
    constexpr int UNIT_REGISTERS = UNIT / LANES, AT_ONCE = std::max(1, TOGETHER / UNIT_REGISTERS);  // units that are read at once
    // A loaded register is kept until both of its halves are multiplied, if there are enough registers.
    constexpr bool STAYS = REGISTERS == 32 || (COUNT + 2) * TOGETHER + 2 <= REGISTERS;
    for (int column = 0; column < ACROSS; column += TOGETHER) {
      lanes total[COUNT][TOGETHER] = {};
      const float* input = x;
      int64_t left = columns.pairs;
      for (int64_t i = 0; left > 0; ++i, left -= columns.group) {
        const bf16 *at[AT_ONCE], *soon[AT_ONCE];
#pragma GCC unroll 2
        for (int unit = 0; unit < AT_ONCE; ++unit) {
          bool is_first = column / UNIT_REGISTERS + unit == 0;
          int64_t from = column % UNIT_REGISTERS * LANES * 2 + (is_first ? columns.first_offset : columns.second_offset);
          at[unit] = (is_first ? columns.first : columns.second)[i] + from;
          soon[unit] = (is_first ? columns.soon_first : columns.soon_second)[i] + from;
        }
        int64_t pairs = std::min(left, columns.group);
        for (int64_t pair = 0; pair < pairs; ++pair, input += At::PAIR) {
#pragma GCC unroll 2
          for (int unit = 0; unit < AT_ONCE; ++unit) {
            if (TOGETHER >= UNIT_REGISTERS || column % UNIT_REGISTERS == 0) __builtin_prefetch(soon[unit], 0, 2);
            soon[unit] += columns.stride;
          }
#pragma GCC unroll 2
          for (int odd = 0; odd < 2; ++odd) {
            lanes wide[TOGETHER];
#pragma GCC unroll 8
            for (int j = 0; j < TOGETHER; ++j) {
              const bf16* numbers = at[j / UNIT_REGISTERS] + j % UNIT_REGISTERS * LANES * 2;
              lane_words both = load<lane_words>(STAYS ? numbers : opaque(numbers));
              wide[j] = (lanes)(odd ? both & 0xffff0000 : both << 16);
            }
#pragma GCC unroll 16
            for (int row = 0; row < COUNT; ++row) {
              float factor = input[row * At::ROW + odd];
#pragma GCC unroll 8
              for (int j = 0; j < TOGETHER; ++j) total[row][j] += wide[j] * factor;
            }
          }
#pragma GCC unroll 2
          for (int unit = 0; unit < AT_ONCE; ++unit) at[unit] += columns.stride;
        }
      }
      for (int row = 0; row < COUNT; ++row)
        for (int j = 0; j < TOGETHER; ++j) store(out + row * out_stride + (column + j) * LANES, total[row][j]);
    }
  }
};

// float32 keys and values: the even and odd elements of pairs have separate sums, which are added at the end.
struct FloatUnits {
  using Input = float;
  using Element = float;
  static constexpr int ROWS = REGISTER == 64 ? 13 : 6, FEW = 0;
  typedef uint64_t lane_pairs __attribute__((vector_size(REGISTER)));

  static floats power_of_two(floats x) { return exact_power_of_two(x); }

  template <Rows KIND, int COUNT>
  static void multiply(const float* x, const Columns<float>& columns, float* out, int64_t out_stride) {
    using At = Distance<KIND, COUNT>;
    constexpr int ACROSS = 2 * PANEL / LANES, TOGETHER = together(COUNT, std::min(4, 2 * UNIT / LANES));  // at most the registers of one unit
    for (int column = 0; column < ACROSS; column += TOGETHER) {
      lanes total[COUNT][TOGETHER] = {};
      const float* input = x;
      int64_t left = columns.pairs, from = column * LANES % (2 * UNIT);
      bool is_first = column * LANES < 2 * UNIT;
      const float* const* units = is_first ? columns.first : columns.second;
      const float* const* soon_units = is_first ? columns.soon_first : columns.soon_second;
      from += is_first ? columns.first_offset : columns.second_offset;
      for (int64_t i = 0; left > 0; ++i, left -= columns.group) {
        const float *at = units[i] + from, *soon = soon_units[i] + from;
        int64_t pairs = std::min(left, columns.group);
        for (int64_t pair = 0; pair < pairs; ++pair, at += columns.stride, soon += columns.stride, input += At::PAIR) {
          for (int byte = 0; byte < TOGETHER * REGISTER; byte += 64) __builtin_prefetch((const char*)soon + byte, 0, 2);
          lanes both[TOGETHER];
#pragma GCC unroll 4
          for (int j = 0; j < TOGETHER; ++j) both[j] = load<lanes>(at + j * LANES);
#pragma GCC unroll 16
          for (int row = 0; row < COUNT; ++row) {
            lanes factor = (lanes)(load<uint64_t>(input + row * At::ROW) - lane_pairs{});
#pragma GCC unroll 4
            for (int j = 0; j < TOGETHER; ++j) total[row][j] += both[j] * factor;
          }
        }
      }
      for (int row = 0; row < COUNT; ++row) {
        float apart[TOGETHER * LANES];
        std::memcpy(apart, total[row], sizeof(apart));
        float* to = out + row * out_stride + column * LANES / 2;
        for (int j = 0; j < TOGETHER * LANES / 2; ++j) to[j] = apart[2 * j] + apart[2 * j + 1];
      }
    }
  }
};

#ifdef HAS_BFLOAT16_DOT
// bfloat16 pair dot-product instruction, accumulated in float32.
struct DotUnits {
  using Input = bf16;
  using Element = bf16;
  static constexpr int ROWS = Dot::ROWS, FEW = FEW_ROWS;

  static floats power_of_two(floats x) { return rough_power_of_two(x); }

  static lanes add(lanes total, lane_words both, const bf16* pair) {
    return Dot::add(total, both, load<uint32_t>(pair) - lane_words{});
  }

  template <Rows KIND, int COUNT>
  static void multiply(const bf16* x, const Columns<bf16>& columns, float* out, int64_t out_stride) {
    using At = Distance<KIND, COUNT>;
    constexpr int ACROSS = PANEL / LANES, TOGETHER = together(COUNT, ACROSS);
    for (int column = 0; column < ACROSS; column += TOGETHER) {
      lanes total[COUNT][TOGETHER] = {};
      const bf16* input = x;
      int64_t left = columns.pairs;
      for (int64_t i = 0; left > 0; ++i, left -= columns.group) {
        const bf16 *at[2] = {columns.first[i] + columns.first_offset, columns.second[i] + columns.second_offset};
        const bf16 *soon[2] = {columns.soon_first[i] + columns.first_offset, columns.soon_second[i] + columns.second_offset};
        int64_t pairs = std::min(left, columns.group);
        for (int64_t pair = 0, from = 0; pair < pairs; ++pair, from += columns.stride, input += At::PAIR) {
          lane_words both[TOGETHER];
#pragma GCC unroll 8
          for (int j = 0; j < TOGETHER; ++j) {
            int lane = (column + j) * LANES;
            both[j] = load<lane_words>(at[lane / UNIT] + from + lane % UNIT * 2);
          }
          if (column == 0) {
            __builtin_prefetch(soon[0] + from, 0, 2);
            __builtin_prefetch(soon[1] + from, 0, 2);
          }
#pragma GCC unroll 16
          for (int row = 0; row < COUNT; ++row) {
            lane_words factor = load<uint32_t>(input + row * At::ROW) - lane_words{};
#pragma GCC unroll 8
            for (int j = 0; j < TOGETHER; ++j) total[row][j] = Dot::add(total[row][j], both[j], factor);
          }
        }
      }
      for (int row = 0; row < COUNT; ++row)
        for (int j = 0; j < TOGETHER; ++j) store(out + row * out_stride + (column + j) * LANES, total[row][j]);
    }
  }
};
#endif

#ifdef HAS_AMX
// AMX tiles; rows are stored one after another.
struct AmxUnits {
  using Input = bf16;
  using Element = bf16;
  static constexpr int ROWS = TILE_ROWS, FEW = 0;

  static floats power_of_two(floats x) { return rough_power_of_two(x); }

  // Scores (rows, SPAN): queries (rows, size) times `units` units of keys.
  static void multiply_keys(TileShape& shape, int rows, const bf16* query, int64_t size, const bf16* const* keys, int64_t units,
                            float* scores) {
    constexpr int64_t ROW = 2 * UNIT * sizeof(bf16);
    int64_t step = std::min<int64_t>(TILE_BYTES / 4, size / 2);
    while (size / 2 % step) --step;
    shape.set(rows, int(4 * step));
    for (int64_t unit = 0; unit < units; unit += 2) {
      auto *first = (const char*)keys[unit], *second = (const char*)keys[unit + 1];
      clear_sums(rows > WIDTH);
      for (int64_t pair = 0; pair < size / 2; pair += step)
        add_step<Numbers::BFLOAT16>(rows > WIDTH, (const char*)(query + 2 * pair), size * sizeof(bf16), first + pair * ROW, second + pair * ROW, ROW);
      store_sums(rows > WIDTH, scores + unit * UNIT, SPAN * sizeof(float));
      for (int64_t ahead : {unit + AHEAD_UNITS, unit + AHEAD_UNITS + 1})
        for (int64_t pair = 0; pair < size / 2; ++pair) __builtin_prefetch((const char*)keys[ahead] + pair * ROW, 0, 2);
    }
  }

  // Sums (rows, out_size) of `units` units of values (`width` dimensions), weighted by weights (rows, SPAN). Units are contiguous and are
  // multiplied in twos, as half a tile takes as long as a whole one. After an odd number of units, the next weights are zeros.
  static void multiply_values(TileShape& shape, int rows, const bf16* weights, const bf16* values, int64_t units, int64_t width,
                              float* out, int64_t out_size) {
    shape.set(rows, TILE_BYTES);
    for (int64_t i = 0; i < width; i += PANEL) {
      int64_t second = i + WIDTH < width ? i + WIDTH : i;
      clear_sums(rows > WIDTH);
      for (int64_t unit = 0; unit < units; unit += 2) {
        const bf16* pairs = values + unit * UNIT * width;
        add_step<Numbers::BFLOAT16>(rows > WIDTH, (const char*)(weights + unit * UNIT), SPAN * sizeof(bf16), (const char*)(pairs + 2 * i),
                                    (const char*)(pairs + 2 * second), 2 * width * sizeof(bf16));
      }
      store_sums(rows > WIDTH, out + i, out_size * sizeof(float));
    }
  }
};

template <>
constexpr bool IN_TILES<AmxUnits> = true;
template <>
struct PanelState<AmxUnits> : TileShape {};
#endif

// Rows (at most the kernel's FEW) times one unit of keys, or up to 64 dimensions of values, at once: memory is read as one sequential
// stream, which the hardware prefetcher follows. For processors with enough registers.
template <typename Kernel, Rows KIND, int COUNT, int ACROSS>
void multiply_straight(const typename Kernel::Input* x, const Columns<bf16>& columns, float* out, int64_t out_stride) {
  using At = Distance<KIND, COUNT>;
  lanes total[COUNT][ACROSS] = {};
  const typename Kernel::Input* input = x;
  int64_t left = columns.pairs;
  for (int64_t i = 0; left > 0; ++i, left -= columns.group) {
    const bf16* at = columns.first[i] + columns.first_offset;
    const bf16* soon = columns.soon_first[i] + columns.first_offset;
    int64_t pairs = std::min(left, columns.group);
    for (int64_t pair = 0; pair < pairs; ++pair, at += columns.stride, soon += columns.stride, input += At::PAIR) {
      lane_words both[ACROSS];
#pragma GCC unroll 4
      for (int j = 0; j < ACROSS; ++j) {
        both[j] = load<lane_words>(at + j * 2 * UNIT);
        __builtin_prefetch(soon + j * 2 * UNIT, 0, 2);
      }
#pragma GCC unroll 7
      for (int row = 0; row < COUNT; ++row)
#pragma GCC unroll 4
        for (int j = 0; j < ACROSS; ++j) total[row][j] = Kernel::add(total[row][j], both[j], input + row * At::ROW);
    }
  }
  for (int row = 0; row < COUNT; ++row)
    for (int j = 0; j < ACROSS; ++j) store(out + row * out_stride + j * UNIT, total[row][j]);
}

// Rows times 32 columns to out (rows, out_stride), for a number of rows up to the kernel's.
template <typename Kernel>
using Multiply = void (*)(const typename Kernel::Input*, const Columns<typename Kernel::Element>&, float*, int64_t);

template <typename Kernel, Rows KIND, int... COUNT>
constexpr Multiply<Kernel> multiply_among(int rows, std::integer_sequence<int, COUNT...>) {
  constexpr Multiply<Kernel> variants[] = {Kernel::template multiply<KIND, COUNT + 1>...};
  return variants[rows - 1];
}

template <typename Kernel, Rows KIND>
constexpr Multiply<Kernel> multiply_of(int rows) {
  return multiply_among<Kernel, KIND>(rows, std::make_integer_sequence<int, Kernel::ROWS>{});
}

template <typename Kernel, Rows KIND, int ACROSS, int... COUNT>
constexpr Multiply<Kernel> straight_among(int rows, std::integer_sequence<int, COUNT...>) {
  constexpr Multiply<Kernel> variants[] = {multiply_straight<Kernel, KIND, COUNT + 1, ACROSS>..., nullptr};
  return variants[rows - 1];
}

template <typename Kernel, Rows KIND, int ACROSS>
constexpr Multiply<Kernel> straight_of(int rows) {
  return straight_among<Kernel, KIND, ACROSS>(rows, std::make_integer_sequence<int, Kernel::FEW>{});
}

}  // namespace
