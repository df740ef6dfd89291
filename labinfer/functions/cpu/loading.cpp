// Loading of checkpoint slices: range reads, reordering along inputs, decoding, rounding.
#include <cerrno>
#include <unistd.h>

#include "panel.h"
#include "thread_pool.h"

namespace {

constexpr int64_t BLOCK = 1 << 18;  // bytes of one read call: an expert's matrix is enough for several threads

// Storage types of one byte: integers, and float8 e4m3.
struct Integer {
  static floats many(const uint8_t* from) { return to_floats(widen_bytes(load<few_bytes>(from)) & 0xff); }
  static float one(uint8_t number) { return number; }
};

// e4m3 bits shifted left by seven are a float16 that is 2^8 times smaller; only NaN must be mapped to NO_NUMBER.
struct Float8 {
  static constexpr float NO_NUMBER = 480;
  static floats many(const uint8_t* from) {
    words wide = (words)widen_bytes(load<few_bytes>(from));
    floats value = widen_float16(low_halves(wide << 7 & 0xbf80)) * 256.0f;
    return (floats)((words)value | ((words)(magnitude(value) >= NO_NUMBER) & 0x7fc00000));
  }
  static float one(uint8_t number) {
    float value = widen_float16(uint16_t((number & 0x80) << 8 | (number & 0x7f) << 7)) * 256.0f;
    return std::fabs(value) >= NO_NUMBER ? NAN : value;
  }
};

// out = (number - zero) * scale, for numbers that share zero and scale.
template <typename Source, typename T>
void decode_run(const uint8_t* numbers, float zero, float scale, T* out, int64_t count) {
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) store_floats(out + i, (Source::many(numbers + i) - zero) * scale);
  for (; i < count; ++i) set(out[i], (Source::one(numbers[i]) - zero) * scale);
}

struct Stored {
  const uint8_t* numbers;  // (rows, bytes), `stride` bytes apart; columns begin after `skip` numbers; with `halves`, two in a byte
  const float* scales;     // (rows, groups), group_stride apart
  const uint8_t* zeros;    // zero points, (rows, groups); null if `middle` is the zero point of all
  const int32_t* order;    // group of each column (act-order); null if groups are consecutive, the first shorter by `lead`
  int64_t stride, group_stride, group, lead, skip;
  float middle;
  bool halves;
};

template <typename Source, typename T>
void decode_rows(const Stored& from, T* out, int64_t out_stride, int64_t rows, int64_t columns, int threads) {
  in_parallel(threads, rows, [&](Pieces& pieces) {
    std::vector<uint8_t> unpacked(from.halves ? up_to(from.skip + columns, 2) : 0);
    for (int64_t row; pieces.next(row);) {
      const uint8_t* numbers = from.numbers + row * from.stride;
      if (from.halves) {
        for (int64_t i = 0; i < int64_t(unpacked.size()) / 2; ++i) {
          unpacked[2 * i] = numbers[i] & 15;
          unpacked[2 * i + 1] = numbers[i] >> 4;
        }
        numbers = unpacked.data();
      }
      numbers += from.skip;
      const float* scales = from.scales + row * from.group_stride;
      const uint8_t* zeros = from.zeros ? from.zeros + row * from.group_stride : nullptr;
      T* to = out + row * out_stride;
      auto zero = [&](int64_t number) { return zeros ? float(zeros[number]) : from.middle; };
      if (from.order) {
        for (int64_t i = 0; i < columns; ++i)
          set(to[i], (Source::one(numbers[i]) - zero(from.order[i])) * scales[from.order[i]]);
        continue;
      }
      for (int64_t first = 0, number = 0; first < columns; ++number) {
        int64_t end = from.group ? std::min(columns, (number + 1) * from.group - from.lead) : columns;
        decode_run<Source>(numbers + first, zero(number), scales[number], to + first, end - first);
        first = end;
      }
    }
  });
}

// Transposes 8 words of 8 codes: code j of word i becomes code i of word j.
template <typename V>
void exchange_codes(V* rows) {
#define STAGE(STEP, MASK)                                               \
  for (int i = 0; i < 8; ++i)                                           \
    if (!(i & STEP)) {                                                  \
      V changed = ((rows[i] >> 4 * STEP) ^ rows[i + STEP]) & MASK;      \
      rows[i + STEP] ^= changed;                                        \
      rows[i] ^= changed << 4 * STEP;                                   \
    }
  STAGE(4, 0x0000ffffu) STAGE(2, 0x00ff00ffu) STAGE(1, 0x0f0f0f0fu)
#undef STAGE
}

}  // namespace

// C functions for ctypes; loading.py checks shapes and dtypes before the call.
extern "C" {

// Reads rows of a file, `stride` bytes apart, to out. Returns false if the file ends early or cannot be read.
int64_t read_rows(int file, int64_t position, int64_t stride, uint8_t* out, int64_t out_stride, int64_t rows, int64_t bytes,
              int threads) {
  if (stride == bytes && out_stride == bytes) bytes *= rows, rows = 1;
  int64_t blocks = (bytes + BLOCK - 1) / BLOCK;
  std::atomic<bool> complete{true};
  for_each(threads, rows * blocks, [&](int64_t i) {
    int64_t row = i / blocks, begin = i % blocks * BLOCK, end = std::min(bytes, begin + BLOCK);
    while (begin < end) {
      ssize_t count = pread(file, out + row * out_stride + begin, end - begin, position + row * stride + begin);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) break;
      begin += count;
    }
    if (begin < end) complete = false;
  });
  return complete;
}

// out (columns, rows) = words (rows, columns); strides in words.
void transpose_words(const uint32_t* from, int64_t stride, uint32_t* out, int64_t out_stride, int64_t rows, int64_t columns,
                     int threads) {
  for_each(threads, (columns + WIDTH - 1) / WIDTH, [&](int64_t piece) {
    int64_t column = piece * WIDTH;
    for (int64_t row = 0; row < rows; row += WIDTH) {
      int64_t height = std::min<int64_t>(WIDTH, rows - row);
      transpose_block(from + row * stride + column, stride, height, std::min<int64_t>(WIDTH, columns - column),
                      [&](int64_t i, words word) { store_some(out + (column + i) * out_stride + row, word, height); });
    }
  });
}

// Reorders AWQ words (inputs, columns), with 8 outputs in each (output 2 i in code i, output 2 i + 1 in code i + 4), to out (8 columns,
// words of 8 inputs); strides in words.
void transpose_awq(const uint32_t* from, int64_t stride, uint32_t* out, int64_t out_stride, int64_t inputs, int64_t columns,
                   int threads) {
  for_each(threads, (columns + WIDTH - 1) / WIDTH, [&](int64_t piece) {
    int64_t column = piece * WIDTH;
    for (int64_t first = 0; first < inputs; first += 8 * WIDTH) {
      int64_t width = std::min<int64_t>(WIDTH, columns - column), height = std::min<int64_t>(8 * WIDTH, inputs - first);
      words codes[8][WIDTH];  // by code and by word of 8 inputs
      for (int64_t word = 0; word < WIDTH; ++word) {
        words rows[8];
        for (int64_t i = 0; i < 8; ++i) {
          int64_t input = 8 * word + i;
          rows[i] = input < height ? load_some(from + (first + input) * stride + column, width) : words{};
        }
        exchange_codes(rows);
        for (int code = 0; code < 8; ++code) codes[code][word] = rows[code];
      }
      for (int code = 0; code < 8; ++code) {
        int64_t output = code % 4 * 2 + code / 4;
        transpose(codes[code]);
        for (int64_t i = 0; i < width; ++i)
          store_some(out + (8 * (column + i) + output) * out_stride + first / 8, codes[code][i], (height + 7) / 8);
      }
    }
  });
}

// Checksum: sum of 64-bit words times odd numbers. The upper half of each word is mixed into its lower half, so that two changed top bits
// do not cancel.
int64_t checksum(const uint8_t* from, int64_t bytes) {
  uint64_t total = 0;
  for (int64_t i = 0; i < bytes / 8; ++i) {
    uint64_t word;
    std::memcpy(&word, from + 8 * i, 8);
    total += (word ^ word >> 32) * (2 * i + 1);
  }
  return int64_t(total);
}

// Dequantizes 4- or 8-bit integers, or e4m3 with `float8`, to out (rows, columns) in bfloat16, or float32 with `wide`: see Stored. Strides
// in elements.
void decode(const uint8_t* numbers, int64_t stride, const float* scales, const uint8_t* zeros, int64_t group_stride,
            const int32_t* order, void* out, int64_t out_stride, int64_t rows, int64_t columns, int64_t group, int64_t lead,
            int64_t skip, int bits, int float8, int wide, int threads) {
  Stored from{numbers, scales, zeros, order, stride, group_stride, group, lead, skip, float8 ? 0.0f : float(1 << (bits - 1)), bits == 4};
  auto call = [&](auto source) {
    if (wide) decode_rows<decltype(source)>(from, (float*)out, out_stride, rows, columns, threads);
    else decode_rows<decltype(source)>(from, (bf16*)out, out_stride, rows, columns, threads);
  };
  if (float8) call(Float8{});
  else call(Integer{});
}

// Quantizes values (rows, columns) to 8-bit codes (rows, groups of `group` inputs; the first codes stand for `lead` zeros) and scales
// (rows, groups) of 11 bits. Strides in elements.
void round_groups(const float* values, int64_t stride, uint8_t* codes, int64_t code_stride, float* scales, int64_t scale_stride,
                  int64_t rows, int64_t columns, int64_t group, int64_t lead, int threads) {
  int64_t groups = (lead + columns + group - 1) / group;
  for_each(threads, rows, [&](int64_t row) {
    const float* from = values + row * stride - lead;
    for (int64_t number = 0; number < groups; ++number) {
      int64_t begin = std::max(number * group, lead), end = std::min((number + 1) * group, lead + columns);
      uint8_t* to = codes + row * code_stride;
      floats most{}, zeros{};  // zeros become NaN if a number is not finite, and so does the scale
      int64_t i = begin;
      for (; i + WIDTH <= end; i += WIDTH) {
        floats value = load<floats>(from + i);
        most = larger(magnitude(value), most);
        zeros += value * 0.0f;
      }
      float peak = largest(most), zero = sum(zeros);
      for (; i < end; ++i) {
        peak = std::max(peak, std::fabs(from[i]));
        zero += from[i] * 0.0f;
      }
      float scale = (peak + zero) / 127.0f;
      uint32_t rounded;
      std::memcpy(&rounded, &scale, 4);
      if (std::isfinite(scale)) rounded = (rounded + 0x1fff) & ~0x1fffu;  // NaN may have all bits set, so it is not rounded
      std::memcpy(&scale, &rounded, 4);
      scales[row * scale_stride + number] = scale;
      float factor = scale > 0 ? 1.0f / scale : 0.0f;
      std::memset(to + number * group, 128, begin - number * group);
      i = begin;
      for (; i + WIDTH <= end; i += WIDTH)
        store(to + i, low_bytes((words)nearest(load<floats>(from + i) * factor)) ^ int8_t(-128));
      for (; i < end; ++i) to[i] = uint8_t(int32_t(std::nearbyint(from[i] * factor)) + 128);
      std::memset(to + end, 128, (number + 1) * group - end);
    }
  });
}

}  // extern "C"
