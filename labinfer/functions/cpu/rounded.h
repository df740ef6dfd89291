// Quantized weights of 8, 5 or 4 bits, input rows rounded to int8, and their products.
#pragma once

#include <utility>
#include <vector>

#include "amx.h"
#include "int8_gemm.h"
#include "thread_pool.h"

// Product of rows with a panel of a grouped form, see panel_groups in int8_gemm.h; the first argument is its Dot's Input, the last one a
// Stream.
using GroupPanel = void (*)(const void*, const uint8_t*, int64_t, int64_t, const int32_t*, int64_t, bool, float*, const void*);

// Product function of a form and a number of rows, instantiated once for all files because it takes long to compile.
GroupPanel group_panel(int form, int rows);

namespace {

// Sums (rows, 32) of integers, see FloatSums.
struct IntegerSums {
  const float* sums;
  floats operator()(int row, int half) const { return to_floats(load<ints>(sums + row * PANEL + half * WIDTH)); }
};

// Inputs of interleaved rows, and the starts of the inputs' groups (see RoundedRows), `starts` apart from row to row.
template <typename Input>
struct RowInputs {
  const Input* x;
  const int32_t* start;
  int64_t starts;
};

// Base of forms: words of their input rows, see RowBlock.
template <typename Input>
struct InputWords {
  static words load_words(const Input* x, int64_t i, int64_t some) { return load_some((const uint32_t*)x + i, some); }
};

// A form is a storage format of quantized weights in panels of 32 outputs: integers plus MIDDLE, so that they are not negative. Its
// products take up to ROWS rows of its Input at once, and any multiple of unit() inputs.

// int8 weights, with separate scales per output.
struct Int8 : InputWords<CodeDot<8>::Input> {
  using Dot = CodeDot<8>;
  using Input = Dot::Input;
  static constexpr int ROWS = Dot::ROWS, MIDDLE = 128;
  static constexpr bool OUTPUT_SCALES = true;
  static constexpr int64_t lead = 0;
  int64_t inputs, group;

  explicit Int8(int64_t inputs, int64_t = 0, int64_t = 0) : inputs(inputs), group(up_to(inputs, 4)) {}
  int64_t padded() const { return group; }
  int64_t groups() const { return 1; }
  int64_t unit() const { return 4; }
  // Bytes of some inputs of a panel.
  int64_t bytes(int64_t some) const { return PANEL * some; }
  int64_t panel_bytes() const { return bytes(padded()); }
  // Memory that each pass over some inputs of a panel reads.
  Stretch read_in_pass(const uint8_t* panel, int64_t some) const { return {panel, bytes(some)}; }
  IntegerSums sums(const float* memory) const { return {memory}; }

  template <int COUNT>
  static void panel(const Int8&, const RowInputs<Input>& in, const uint8_t* weight, int64_t some, bool adds, float* sums, const Stream& stream) {
    panel_int8<COUNT>(in.x, weight, some, in.start, adds, (int32_t*)sums, stream);
  }
};

// Codes of 4, 5 or 8 bits, interleaved with a scale per output and group of inputs, and with a float16 offset instead of the middle if
// there is one. `lead` zero inputs precede the first: its group begins in another rank's inputs.
template <typename Coding_, Offset OFFSET_ = NONE>
struct Grouped : InputWords<typename Coding_::Dot::Input> {
  using Coding = Coding_;
  using Dot = typename Coding::Dot;
  using Input = typename Dot::Input;
  static constexpr Offset OFFSET = OFFSET_;
  static constexpr int ROWS = std::min(has_free_registers<Coding>(OFFSET) ? 12 : ROWS_HELD, Dot::ROWS);
  static constexpr int MIDDLE = OFFSET ? 1 : Coding::MIDDLE;
  static constexpr int NUMBER = Coding::NUMBER * 3 + OFFSET, BITS = Coding::BITS, HEAD = PANEL * (Coding::SCALE_BYTES + (OFFSET ? 2 : 0));
  static constexpr bool OUTPUT_SCALES = false;
  int64_t inputs, group, lead;

  Grouped(int64_t inputs, int64_t group, int64_t lead = 0) : inputs(inputs), group(group), lead(lead) {}
  int64_t padded() const { return up_to(lead + inputs, group); }
  int64_t groups() const { return padded() / group; }
  int64_t unit() const { return group; }
  int64_t group_bytes() const { return HEAD + PANEL * group * BITS / 8; }
  int64_t bytes(int64_t some) const { return some / group * group_bytes(); }
  int64_t panel_bytes() const { return bytes(padded()); }
  Stretch read_in_pass(const uint8_t* panel, int64_t some) const { return {panel, bytes(some)}; }
  FloatSums sums(const float* memory) const { return {memory}; }

  template <int COUNT>
  static void panel(const Grouped& form, const RowInputs<Input>& in, const uint8_t* weight, int64_t some, bool adds, float* sums,
                    const Stream& stream) {
    group_panel(NUMBER, COUNT)(in.x, weight, some / form.group, form.group, in.start, in.starts, adds, sums, &stream);
  }
};

using Int4 = Grouped<Uniform<4>>;

// Codings, numbered as in packed_weight.py.
enum CodingNumber : int64_t { UNIFORM, E2M1, NVFP4, IQ4 };

// Calls `use` with the form of grouped weights. Only uniform codes have offsets, and 5-bit codes have no zero points.
template <typename Use>
void with_groups(int64_t inputs, int64_t group, int64_t lead, int bits, int64_t coding, int64_t offset, Use use) {
  auto with = [&](auto coding) {
    using Coding = decltype(coding);
    if (offset == ZEROS) use(Grouped<Coding, ZEROS>{inputs, group, lead});
    else if (offset == MINIMA) use(Grouped<Coding, MINIMA>{inputs, group, lead});
    else use(Grouped<Coding>{inputs, group, lead});
  };
  if (coding == E2M1) use(Grouped<E2m1>{inputs, group, lead});
  else if (coding == NVFP4) use(Grouped<Nvfp4>{inputs, group, lead});
  else if (coding == IQ4) use(Grouped<Iq4>{inputs, group, lead});
  else if (bits == 4) with(Uniform<4>());
  else if (bits == 8) with(Uniform<8>());
  else if (offset == MINIMA) use(Grouped<Uniform<5>, MINIMA>{inputs, group, lead});
  else use(Grouped<Uniform<5>>{inputs, group, lead});
}

template <typename Form>
using FormPanel = void (*)(const Form&, const RowInputs<typename Form::Input>&, const uint8_t*, int64_t, bool, float*, const Stream&);

template <typename Form, int... ROWS>
constexpr FormPanel<Form> form_panel_among(int rows, std::integer_sequence<int, ROWS...>) {
  constexpr FormPanel<Form> variants[] = {Form::template panel<ROWS + 1>...};
  return variants[rows - 1];
}

// Multiplies `count` rows of a block, from `row` on, with `some` inputs of a panel from `begin` on. After the panel's last inputs, calls
// done(row, count, sums) for all rows, some at a time; `memory` (rows, 32) is for sums, to which later inputs add. `start` is that of the first
// row, see RoundedRows.
template <typename Form, typename Done>
inline void multiply_panel(PanelState<Form>& state, const Form& form, const RowBlock<Form>& rows, int64_t row, int count, int64_t begin,
                           int64_t some, const uint8_t* weight, const int32_t* start, float* memory, const Stream& stream, Done done) {
  if constexpr (IN_TILES<Form>) {
    form.panel(state, rows, row, count, weight, start, memory, stream, done);
  } else {
    auto panel = form_panel_among<Form>(count, std::make_integer_sequence<int, Form::ROWS>{});
    panel(form, {rows.at(row, begin), start + begin / form.group, form.groups()}, weight, some, begin > 0, memory, stream);
    if (begin + some == form.padded()) done(0, count, form.sums(memory));
  }
}

// int8 rows: x ≈ q * scale. The sum of a group's inputs times the weights' middle is subtracted again (start).
struct RoundedRows {
  const int8_t* q;       // (rows, padded)
  const float* scale;    // (rows)
  const int32_t* start;  // (rows, groups): minus MIDDLE times the sum of the group's q
};

// `count` elements of int8 rows in the format of a Dot; copied if it does not take bytes.
template <typename Dot>
const typename Dot::Input* inputs(const int8_t* q, int64_t count, LineVector<typename Dot::Input>& memory) {
  if constexpr (std::is_same_v<typename Dot::Input, int8_t>) {
    return q;
  } else {
    if (int64_t(memory.size()) < count) memory.resize(count);
    Dot::widen(q, count, memory.data());
    return memory.data();
  }
}

// Sizes of a form on which rounded rows depend.
struct RowShape {
  int64_t inputs, padded, lead, groups, group;
  int middle;

  template <typename Form>
  RowShape(const Form& form)
      : inputs(form.inputs), padded(form.padded()), lead(form.lead), groups(form.groups()), group(form.group), middle(Form::MIDDLE) {}
};

// Threads that round `elements` elements of rows: a few are not worth a barrier.
inline int round_threads(int64_t elements, int threads) { return elements >= 1 << 13 ? threads : 1; }

// Memory of int8 rows.
class Rounded {
 public:
  // Rounds the rows of x (`stride` apart).
  template <typename T>
  void round(const RowShape& shape, const T* x, int64_t rows, int64_t stride, int threads) {
    resize(shape, rows);
    for_each(round_threads(rows * shape.inputs, threads), rows, [&](int64_t row) { round_row(shape, x + row * stride, row); });
  }

  // Copies some of another object's rows to adjacent memory.
  void gather(const RowShape& shape, const RoundedRows& from, const int64_t* numbers, int64_t rows) {
    resize(shape, rows);
    int64_t padded = shape.padded, groups = shape.groups;
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(&q[row * padded], from.q + numbers[row] * padded, padded);
      scale[row] = from.scale[numbers[row]];
      std::memcpy(&start[row * groups], from.start + numbers[row] * groups, groups * sizeof(int32_t));
    }
  }

  RoundedRows rows() const { return {q.data(), scale.data(), start.data()}; }

  void resize(const RowShape& shape, int64_t rows) {
    int64_t size = rows * shape.padded + TILE_BYTES;  // AMX products may read past the end, and multiply those bytes with zeros
    if (int64_t(q.size()) < size) q.resize(size);
    if (int64_t(scale.size()) < rows) scale.resize(rows);
    if (int64_t(start.size()) < rows * shape.groups) start.resize(rows * shape.groups);
  }

  // Rounds one row; there is memory for it (resize).
  template <typename T>
  void round_row(const RowShape& shape, const T* x, int64_t row) {
    int64_t inputs = shape.inputs, padded = shape.padded, groups = shape.groups;
    floats most{}, zeros{};  // zeros become NaN if a number is not finite, and so does the row
    int64_t i = 0;
    for (; i + WIDTH <= inputs; i += WIDTH) {
      floats value = load_floats(x + i);
      zeros += value * 0.0f;
      most = larger(magnitude(value), most);
    }
    float peak = largest(most), zero = sum(zeros);
    for (; i < inputs; ++i) {
      zero += as_float(x[i]) * 0.0f;
      peak = std::max(peak, std::fabs(as_float(x[i])));
    }
    peak += zero;
    float factor = peak > 0 ? 127.0f / peak : 0.0f;
    scale[row] = peak / 127.0f;
    int8_t *all = &q[row * padded], *to = all + shape.lead;
    std::memset(all, 0, shape.lead);
    for (i = 0; i + WIDTH <= inputs; i += WIDTH) {
      words bits = (words)(load_floats(x + i) * factor + 12582912.0f);  // fused, so one rounding; 1.5 * 2^23 leaves the integer in the low bits
      store(to + i, low_bytes(bits));
    }
    for (; i < padded - shape.lead; ++i) to[i] = i < inputs ? int8_t(std::nearbyint(double(as_float(x[i])) * factor)) : 0;
    for (int64_t number = 0; number < groups; ++number) {
      int32_t sum = 0;
      for (int64_t j = number * shape.group; j < (number + 1) * shape.group; ++j) sum += all[j];
      start[row * groups + number] = -shape.middle * sum;
    }
  }

 private:
  LineVector<int8_t> q;
  std::vector<float> scale;
  std::vector<int32_t> start;
};

// 16 sums of a row's products, times its scale and the outputs' scales (if any), plus other values.
inline floats scaled(floats value, float row_scale, const float* output_scales, floats other = floats{}) {
  if (output_scales) value *= load<floats>(output_scales);
  return multiply_add(value, same(row_scale), other);
}

// A group of weights of one output as floats, zero-padded to full vectors.
struct WeightGroup {
  std::vector<float> values;
  int64_t vectors = 0;

  template <typename T>
  void take(const T* from, int64_t count, int64_t size) {
    vectors = up_to(size, WIDTH) / WIDTH;
    values.assign(vectors * WIDTH, 0.0f);
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) store(&values[i], load_floats(from + i));
    for (; i < count; ++i) values[i] = as_float(from[i]);
  }

  floats operator[](int64_t vector) const { return load<floats>(&values[vector * WIDTH]); }

  // Weight with the largest magnitude; the first of equal ones.
  float extreme() const {
    floats most{}, least{};
    for (int64_t i = 0; i < vectors; ++i) {
      floats value = (*this)[i];
      most = larger(value, most);
      least = smaller(value, least);
    }
    float high = largest(most), low = -largest(-least);
    if (high != -low) return high > -low ? high : low;
    for (float value : values)
      if (std::fabs(value) == high) return value;
    return 0.0f;
  }
};

// Quantizes rows of weights into panels. row(output) is a row's address; null for a row of zeros, as are rows from `outputs` on.
template <typename T, typename Rows>
void quantize(const Int8& form, Rows row, uint8_t* data, float* scales, int64_t outputs, int threads) {
  in_parallel(threads, up_to(outputs, PANEL), [&](Pieces& pieces) {
    WeightGroup group;
    for (int64_t output; pieces.next(output);) {
      const T* from = output < outputs ? row(output) : nullptr;
      uint8_t* at = data + output / PANEL * form.panel_bytes() + output % PANEL * 4;
      group.take(from, from ? form.inputs : 0, form.padded());
      float peak = std::fabs(group.extreme()), factor = peak > 0 ? 127.0f / peak : 0.0f;
      scales[output] = peak / 127.0f;
      for (int64_t i = 0; i < form.padded(); i += WIDTH) {
        words bits = (words)(group[i / WIDTH] * factor + 12582912.0f);  // as in RoundedRows
        auto codes = low_bytes(bits) + int8_t(Int8::MIDDLE);
        for (int64_t j = 0; j < WIDTH && i + j < form.padded(); j += 4) std::memcpy(at + (i + j) * PANEL, (char*)&codes + j, 4);
      }
    }
  });
}

// Reorders 8 codes of 4 bits: the first four to the low halves of the bytes, the others to the high halves.
inline words in_halves(words codes) {
  auto spread = [](words four) {
    four = (four | four << 8) & 0x00ff00ff;
    return (four | four << 4) & 0x0f0f0f0f;
  };
  return spread(codes & 0xffff) | spread(codes >> 16) << 4;
}

// Quantized matrix: words of codes along the inputs of each output, as in codes.py, and scales and offsets of its groups.
struct Codes {
  const uint32_t* words;  // (outputs, words)
  const float* scales;    // (outputs, groups)
  const void* offsets;    // (outputs, groups): zero points as bytes, or minima as float32
};

// Up to 16 adjacent rows of a matrix, which form one half of a panel, zero-padded.
struct Half {
  int64_t row, count;
};

// Rows of a matrix in its own order.
inline auto halves_of(int64_t rows) {
  return [rows](int64_t half) { return Half{half * WIDTH, std::clamp<int64_t>(rows - half * WIDTH, 0, WIDTH)}; };
}

// Packs codes into panels without requantizing; rows(half) are the rows of each half.
template <typename Rows>
void pack(const Int8& form, const Codes& codes, Rows rows, uint8_t* data, float* scales, int64_t panels, float, int threads) {
  int64_t quads = form.padded() / 4;
  for_each(threads, 2 * panels, [&](int64_t half) {
    Half own = rows(half);
    uint8_t* at = data + half / 2 * form.panel_bytes() + half % 2 * WIDTH * 4;
    for (int64_t i = 0; i < WIDTH; ++i) scales[half * WIDTH + i] = i < own.count ? codes.scales[own.row + i] : 0.0f;
    transpose_rows(codes.words + own.row * quads, quads, own.count, quads,
                   [&](int64_t quad, words column) { store(at + quad * PANEL * 4, column); });
  });
}

// global_scale is a power of two, by which all scales are to be multiplied.
template <typename Coding, Offset OFFSET, typename Rows>
void pack(const Grouped<Coding, OFFSET>& form, const Codes& codes, Rows rows, uint8_t* data, float*, int64_t panels, float global_scale,
          int threads) {
  constexpr int BITS = Coding::BITS, SCALE_BYTES = Coding::SCALE_BYTES;
  int64_t groups = form.groups(), group_words = form.group * BITS / 32, row_words = groups * group_words;
  std::vector<int64_t> places(row_words);  // position of each of a row's words in the panel
  for (int64_t i = 0; i < row_words; ++i)
    places[i] = i / group_words * form.group_bytes() + form.HEAD + i % group_words * PANEL * 4;
  for_each(threads, 2 * panels, [&](int64_t half) {
    Half own = rows(half);
    for (int64_t number = 0; number < groups; ++number) {
      uint8_t* at = data + half / 2 * form.panel_bytes() + number * form.group_bytes();
      for (int64_t i = 0; i < WIDTH; ++i) {
        bool present = i < own.count;
        int64_t place = half % 2 * WIDTH + i, index = (own.row + i) * groups + number;
        float scale = present ? codes.scales[index] / global_scale : 0.0f, offset = 0.0f;
        if constexpr (SCALE_BYTES == 2) store(at + 2 * place, narrow_float16(scale));
        else at[place] = uint8_t(load<uint32_t>(&scale) >> 23);
        if (OFFSET == ZEROS && present) offset = ((const uint8_t*)codes.offsets)[index];
        if (OFFSET == MINIMA && present) offset = ((const float*)codes.offsets)[index] / global_scale;
        if (OFFSET) store(at + SCALE_BYTES * PANEL + 2 * place, narrow_float16(offset));
      }
    }
    uint8_t* at = data + half / 2 * form.panel_bytes() + half % 2 * WIDTH * 4;
    transpose_rows(codes.words + own.row * row_words, row_words, own.count, row_words,
                   [&](int64_t i, words column) { store(at + places[i], BITS == 4 ? in_halves(column) : column); });
  });
}

}  // namespace
