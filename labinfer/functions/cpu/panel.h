// Panel layout of weights, and the inner loops of floating-point matrix products: 32 outputs for a few rows.
#pragma once

#include <utility>
#include <vector>

#include "vectors.h"

namespace {

// Weights are stored in panels of 32 outputs: for each pair of inputs the 32 pairs of weights, so that the inner loop reads sequentially.
// Remaining rows (fewer than a panel) are stored unchanged. float16 and float32 panels have single inputs instead of pairs, see
// gemm_f32.cpp.

// Transposes 16 vectors of 16 words in place.
inline void transpose(words* rows) {
#define STAGE(STEP)                                                                                      \
  for (int i = 0; i < WIDTH; ++i)                                                                        \
    if (!(i & STEP)) {                                                                                   \
      words a = rows[i], b = rows[i + STEP];                                                             \
      rows[i] = both<STEP, false>(a, b);                                                                 \
      rows[i + STEP] = both<STEP, true>(a, b);                                                           \
    }
  STAGE(8) STAGE(4) STAGE(2) STAGE(1)
#undef STAGE
}

// Loads or stores the first `count` words of a vector; a full vector needs no call of memcpy.
inline words load_some(const void* from, int64_t count) {
  if (count == WIDTH) return load<words>(from);
  words value{};
  std::memcpy(&value, from, 4 * count);
  return value;
}
inline void store_some(void* to, words value, int64_t count) {
  if (count == WIDTH) store(to, value);
  else std::memcpy(to, &value, 4 * count);
}

// Loads up to 16 rows of up to 16 words (`stride` words apart) as 16 columns, zero-padded.
inline void load_transposed(const uint32_t* from, int64_t stride, int64_t rows, int64_t columns, words* block) {
  if (rows == WIDTH && columns == WIDTH)
    for (int row = 0; row < WIDTH; ++row) block[row] = load<words>(from + row * stride);
  else
    for (int row = 0; row < WIDTH; ++row) block[row] = row < rows ? load_some(from + row * stride, columns) : words{};
  transpose(block);
}

// Calls put(i, word i of all rows) for up to 16 rows of up to 16 words, `stride` words apart; missing rows are zeros.
template <typename Put>
inline void transpose_block(const uint32_t* from, int64_t stride, int64_t rows, int64_t columns, Put put) {
  words block[WIDTH];
  load_transposed(from, stride, rows, columns, block);
  for (int64_t i = 0; i < columns; ++i) put(i, block[i]);
}

// Calls put(i, word i of all rows) for up to 16 rows of `columns` words, `stride` words apart.
template <typename Put>
inline void transpose_rows(const uint32_t* from, int64_t stride, int64_t rows, int64_t columns, Put put) {
  for (int64_t word = 0; word < columns; word += WIDTH)
    transpose_block(from + word, stride, rows, std::min<int64_t>(WIDTH, columns - word),
                    [&](int64_t i, words column) { put(word + i, column); });
}

// Read stream of a panel of `bytes` bytes, followed by the panel at `next`.
inline Stream panel_stream(const void* panel, int64_t bytes, const void* next) {
  const char* end = (const char*)panel + bytes;
  return {end, (const char*)next - end};
}

// Packs 32 rows of an even size into a panel.
inline void pack_panel(const bf16* const* rows, int64_t size, bf16* to) {
  for (int first = 0; first < PANEL; first += WIDTH, to += 2 * WIDTH) {
    int64_t i = 0;
    for (; i + 2 * WIDTH <= size; i += 2 * WIDTH) {
      words block[WIDTH];
      for (int row = 0; row < WIDTH; ++row) block[row] = load<words>(rows[first + row] + i);
      transpose(block);
      for (int pair = 0; pair < WIDTH; ++pair) store(to + (i / 2 + pair) * 2 * PANEL, block[pair]);
    }
    for (; i < size; i += 2)
      for (int row = 0; row < WIDTH; ++row) std::memcpy(to + i * PANEL + row * 2, rows[first + row] + i, 2 * sizeof(bf16));
  }
}

// A kernel multiplies a panel with up to ROWS rows of its Input type. The fastest kernel depends on the processor: some do a bfloat16 dot
// product at half the rate of float32.

// Dtypes of stored weights. widen() loads the weights of one input, of STEP adjacent ones.
struct Bfloat16 {
  using Stored = bf16;
  using Activation = bf16;
  static constexpr int STEP = 2;
  static lanes widen(const bf16* at, int odd) {
    lane_words both = load<lane_words>(at);
    return (lanes)(odd ? both & 0xffff0000 : both << 16);
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Activation = float;
  static constexpr int STEP = 1;
  static lanes widen(const uint16_t* at, int) { return widen_float16(load<lane_halves>(at)); }
};

struct Float32 {
  using Stored = float;
  using Activation = float;
  static constexpr int STEP = 1;
  static lanes widen(const float* at, int) { return load<lanes>(at); }
};

// Number of output registers (at most `most`) that are summed at once, so that the sums of all rows, one register of weights each, and one
// input fit into the registers. With one too many the compiler spills sums to memory.
constexpr int together(int rows, int most) {
  return most == 1 || (rows + 1) * most < REGISTERS ? most : together(rows, most / 2);
}

// Sums of COUNT rows in registers, over some of the outputs of a panel.
template <int COUNT, int TOGETHER>
struct RowSums {
  lanes total[COUNT][TOGETHER] = {};

  // Starts with the sums of rows in memory, PANEL apart, or with zeros.
  RowSums(const float* from, bool adds) {
    if (!adds) return;
#pragma GCC unroll 16
    for (int row = 0; row < COUNT; ++row)
#pragma GCC unroll 8
      for (int i = 0; i < TOGETHER; ++i) total[row][i] = load<lanes>(from + row * PANEL + i * LANES);
  }
  lanes* operator[](int row) { return total[row]; }
  void store_to(float* to) const {
#pragma GCC unroll 16
    for (int row = 0; row < COUNT; ++row)
#pragma GCC unroll 8
      for (int i = 0; i < TOGETHER; ++i) store(to + row * PANEL + i * LANES, total[row][i]);
  }
};

// FMA kernel: weights are converted to float32 in registers; for any processor. Input rows are interleaved float32 numbers.
template <typename Dtype>
struct FloatKernel {
  using Input = float;
  using Stored = typename Dtype::Stored;
  using Activation = typename Dtype::Activation;
  static constexpr int ROWS = REGISTER == 64 ? 13 : 6, STEP = Dtype::STEP;

  // Words i … i + some - 1 of a row, some <= 16: float32 numbers.
  template <typename Number>
  static words load_words(const Number* x, int64_t i, int64_t some) {
    if (some == WIDTH) return (words)load_floats(x + i);
    Number rest[WIDTH] = {};
    std::memcpy(rest, x + i, some * sizeof(Number));
    return (words)load_floats(rest);
  }

  template <int COUNT>
  static void panel(const float* x, const Stored* weight, int64_t steps, bool adds, float* sums, const Stream& stream) {
    constexpr int ACROSS = PANEL / LANES, TOGETHER = together(COUNT, ACROSS);
    for (int column = 0; column < ACROSS; column += TOGETHER) {
      RowSums<COUNT, TOGETHER> total(sums + column * LANES, adds);
      const float* input = x;
      for (int64_t step = 0; step < steps; ++step, input += COUNT * STEP) {
        const Stored* at = weight + (step * PANEL + column * LANES) * STEP;
        constexpr int BYTES = TOGETHER * LANES * STEP * sizeof(Stored);
        const char* ahead = stream.ahead<COUNT>(at);
        for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(ahead + line);
#pragma GCC unroll 2
        for (int odd = 0; odd < STEP; ++odd) {
          lanes wide[TOGETHER];
#pragma GCC unroll 8
          for (int i = 0; i < TOGETHER; ++i) {
            const Stored* numbers = at + i * LANES * STEP;
            wide[i] = Dtype::widen(STEP == 2 && REGISTERS == 16 ? opaque(numbers) : numbers, odd);
          }
#pragma GCC unroll 16
          for (int row = 0; row < COUNT; ++row) {
            float number = input[odd * COUNT + row];
#pragma GCC unroll 8
            for (int i = 0; i < TOGETHER; ++i) total[row][i] += wide[i] * number;
          }
        }
      }
      total.store_to(sums + column * LANES);
    }
  }
};

using Fma = FloatKernel<Bfloat16>;

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_BFLOAT16_DOT
// Kernel with the bfloat16 pair dot-product instruction, accumulated in float32. Input rows are interleaved pairs.
struct Dot {
  using Input = bf16;
  using Stored = bf16;
  using Activation = bf16;
  static constexpr int ROWS = REGISTER == 64 ? 13 : 6, STEP = 2;

  static words load_words(const bf16* x, int64_t i, int64_t some) { return load_some(x + 2 * i, some); }

  static lanes add(lanes total, lane_words weights, lane_words input) {
#ifdef __AVX512BF16__
    return (lanes)_mm512_dpbf16_ps((__m512)total, (__m512bh)weights, (__m512bh)input);
#else
    return (lanes)vbfdotq_f32((float32x4_t)total, (bfloat16x8_t)weights, (bfloat16x8_t)input);
#endif
  }

  template <int COUNT>
  static void panel(const bf16* x, const bf16* weight, int64_t pairs, bool adds, float* sums, const Stream& stream) {
    constexpr int ACROSS = PANEL / LANES, TOGETHER = together(COUNT, ACROSS);
    for (int column = 0; column < ACROSS; column += TOGETHER) {
      RowSums<COUNT, TOGETHER> total(sums + column * LANES, adds);
      const bf16* input = x;
      for (int64_t pair = 0; pair < pairs; ++pair, input += 2 * COUNT) {
        const bf16* at = weight + (pair * PANEL + column * LANES) * 2;
        lane_words weights[TOGETHER];
#pragma GCC unroll 8
        for (int i = 0; i < TOGETHER; ++i) weights[i] = load<lane_words>(at + i * LANES * 2);
        const char* ahead = stream.ahead<COUNT>(at);
        for (int line = 0; line < TOGETHER * REGISTER; line += 64) __builtin_prefetch(ahead + line);
#pragma GCC unroll 16
        for (int row = 0; row < COUNT; ++row) {
          lane_words both = load<uint32_t>(input + 2 * row) - lane_words{};
#pragma GCC unroll 8
          for (int i = 0; i < TOGETHER; ++i) total[row][i] = add(total[row][i], weights[i], both);
        }
      }
      total.store_to(sums + column * LANES);
    }
  }
};
#endif

constexpr int TILE_ROWS = 2 * WIDTH;  // rows that an AMX kernel multiplies at once

// Whether a kernel uses AMX tiles: it takes any number of rows up to its ROWS at run time, best a multiple of 32; see amx.h.
template <typename Kernel>
constexpr bool IN_TILES = false;

// Per-thread state of a kernel between panels; see TileShape.
template <typename Kernel>
struct PanelState {};

// Writes 32 outputs of rows. Calls that write more than STREAMED bytes use non-temporal stores, because a cached store would first read
// each line. STREAMED was measured: two second-level caches.
template <typename Kernel>
class RowWriter {
 public:
  template <typename T>
  RowWriter(const T* out, int64_t rows, int64_t outputs)
      : streams(IN_TILES<Kernel> && sizeof(T) == sizeof(bf16) && uintptr_t(out) % 64 == 0 && outputs % PANEL == 0 &&
                rows * outputs * int64_t(sizeof(T)) > STREAMED) {}

  template <typename T>
  void write(T* to, floats low, floats high) const { store_floats(to, low), store_floats(to + WIDTH, high); }
  void write(bf16* to, floats low, floats high) const {
#ifdef __AVX512BF16__
    if (streams) return _mm512_stream_si512((__m512i*)to, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#endif
    store(to, narrow(low)), store(to + WIDTH, narrow(high));
  }

  // Fence before other threads read the outputs.
  void finish() const {
#ifdef __AVX512BF16__
    if (streams) _mm_sfence();
#endif
  }

 private:
  static constexpr int64_t STREAMED = 8 * CACHE;

  bool streams;
};

// Index of a thread's pass over a panel; each pass has other rows of the block.
struct Pass {
  int64_t number, count;
  bool is_first() const { return number == 0; }
  bool is_last() const { return number + 1 == count; }

  // Prefetch stream of a pass over a range. `whole` is the stream of the panel, which has `bytes` bytes; `kept` bytes (of the panel or
  // its decoded form) are read in every pass. If both panels fit in the cache, each pass prefetches its share of the next panel, as
  // memory and arithmetic take about equally long; the first pass does not if it may have to fetch its own panel. Not done
  // for AMX kernels, which spread their own prefetches, nor for kernels of up to six rows, which did not become faster.
  template <typename Kernel>
  Stream stream(const Stream& whole, const Stretch& range, int64_t bytes, int64_t kept) const {
    Stream stream = whole;
    if constexpr (!IN_TILES<Kernel>) {
      int64_t skipped = kept + bytes <= CACHE ? 0 : 1;
      bool is_panel = range.end() == whole.end, has_room = kept <= CACHE && (count > 1 || !is_panel);
      if (Stream::CAN_SPREAD && Kernel::ROWS > 6 && has_room && number >= skipped)
        stream = whole.in_pass(range, bytes, number - skipped, count - skipped);
      else if (!is_panel) stream = Stream();
    }
    stream.is_near = !is_first();
    return stream;
  }
};

template <typename Kernel>
using Panel = void (*)(const typename Kernel::Input*, const typename Kernel::Stored*, int64_t, bool, float*, const Stream&);

template <typename Kernel, int... ROWS>
constexpr Panel<Kernel> panel_among(int rows, std::integer_sequence<int, ROWS...>) {
  constexpr Panel<Kernel> variants[] = {Kernel::template panel<ROWS + 1>...};
  return variants[rows - 1];
}

// Product of `rows` interleaved rows with `steps` steps of a panel, written to `sums` (rows, 32), or added to them.
template <typename Kernel>
inline void multiply_panel(int rows, const typename Kernel::Input* x, const typename Kernel::Stored* weight, int64_t steps, bool adds,
                           float* sums, const Stream& stream) {
  panel_among<Kernel>(rows, std::make_integer_sequence<int, Kernel::ROWS>{})(x, weight, steps, adds, sums, stream);
}

// Sums (rows, 32) of a panel's product, read 16 at a time: the first half (0) or the second (1).
struct FloatSums {
  const float* sums;
  floats operator()(int row, int half) const { return load<floats>(sums + row * PANEL + half * WIDTH); }
};

}  // namespace
