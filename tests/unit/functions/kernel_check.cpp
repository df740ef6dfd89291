// The inner loops of products against plain ones, for the processor that this is compiled for; with "speed" their rates.
#include <chrono>
#include <cstdio>
#include <random>
#include <string>

#include "rounded_tiles.h"

extern "C" int64_t allow_amx();

namespace {

int failures = 0;
#ifdef HAS_AMX
const bool has_amx = allow_amx();
#endif
std::mt19937 random_bits(1);

#define CHECK(condition, ...)           \
  if (!(condition)) {                   \
    if (++failures < 10) {              \
      std::printf("wrong: " __VA_ARGS__); \
      std::printf("\n");                \
    }                                   \
  }

int whole(int low, int high) { return low + int(random_bits() % uint32_t(high - low + 1)); }

// Inputs, or the most that there can be in size: sums must not overflow on the way.
std::vector<int8_t> some_inputs(int64_t count, bool extreme) {
  std::vector<int8_t> x(count);
  int sign = whole(0, 1) ? 1 : -1;
  for (int8_t& value : x) value = int8_t(extreme ? 127 * sign : whole(-127, 127));
  return x;
}

// Numbers of rows that are multiplied at once: all, but of those in tiles only some on either side of whole ones, and the most.
template <typename Kernel>
std::vector<int> row_counts() {
  std::vector<int> numbers;
  for (int rows = 1; rows <= Kernel::ROWS; ++rows)
    if (!IN_TILES<Kernel> || (rows <= 4 * TILE_ROWS && (rows % 16 < 2 || rows % 16 == 15)) || rows == Kernel::ROWS)
      numbers.push_back(rows);
  return numbers;
}

// For multiply_panel: its sums, written to a vector (rows, 32).
auto keep_in(std::vector<float>& out) {
  return [&out](int first, int count, auto sums) {
    for (int row = 0; row < count; ++row)
      for (int half = 0; half < 2; ++half) store(&out[(first + row) * PANEL + half * WIDTH], sums(row, half));
  };
}

// Sums (rows, 32) of the product of rows with a panel, in one chunk of inputs and in several.
template <typename Form, typename Check>
void multiply_rows(const Form& form, int rows, const std::vector<int8_t>& x, const std::vector<uint8_t>& panel, const std::vector<int32_t>& start,
                   Check check) {
  int64_t padded = form.padded(), unit = form.unit();
  LineVector<typename Form::Input> wide, memory;
  RowBlock<Form> block;
  block.take(::inputs<typename Form::Dot>(x.data(), x.size(), wide), padded, rows, padded, memory);
  for (int64_t some : {padded, up_to(padded / 3, unit)}) {
    if (!some || (IN_TILES<Form> && some < padded)) continue;
    std::vector<float> out(rows * PANEL, -1.0f), sums(rows * PANEL);
    PanelState<Form> state;
    for (int64_t begin = 0; begin < padded; begin += some)
      multiply_panel(state, form, block, 0, rows, begin, std::min(some, padded - begin), panel.data() + form.bytes(begin), start.data(), sums.data(), {},
                     keep_in(out));
    check(out);
  }
}

// A panel of codes, and the product of a row with output, as whole numbers for each group.
template <typename Form>
void check_form(int64_t inputs, int64_t group, bool extreme) {
  using Coding = typename Form::Coding;
  constexpr Offset OFFSET = Form::OFFSET;
  constexpr int BITS = Coding::BITS, SCALE_BYTES = Coding::SCALE_BYTES;
  Form form{inputs, group};
  int64_t padded = form.padded(), groups = form.groups(), code_bytes = group * BITS / 8 * PANEL;
  std::vector<uint8_t> panel(form.panel_bytes());
  int most = (1 << BITS) - 1;
  std::vector<int> codes(PANEL * padded), scales(PANEL * groups), offsets(PANEL * groups);
  for (int& code : codes) code = extreme ? whole(0, 1) * most : whole(0, most);
  for (int& scale : scales) scale = SCALE_BYTES == 1 ? 1 << whole(0, 2) : whole(-2, 2);
  for (int& offset : offsets) offset = whole(0, most);
  for (int64_t number = 0; number < groups; ++number) {
    uint8_t* at = &panel[number * form.group_bytes()];
    for (int output = 0; output < PANEL; ++output) {
      float scale = float(scales[output * groups + number]);
      if (SCALE_BYTES == 2) store(at + 2 * output, narrow_float16(scale));
      else at[output] = uint8_t(load<uint32_t>(&scale) >> 23);
      if (OFFSET) store(at + SCALE_BYTES * PANEL + 2 * output, narrow_float16(float(offsets[output * groups + number])));
    }
    at += Form::HEAD;
    for (int output = 0; output < PANEL; ++output)
      for (int64_t i = 0; i < group; ++i) {
        int code = codes[output * padded + number * group + i];
        uint8_t* bytes = at + output * 4 + i % 4;
        int64_t word = i / 8;
        bool is_second = i % 8 >= 4;
        if (BITS == 8) bytes[i / 4 * 4 * PANEL] = uint8_t(code);
        if (BITS == 4) bytes[word * 4 * PANEL] |= uint8_t(is_second ? code << 4 : code);
        if (BITS == 5) {
          bytes[(word + word / 4 + 1) * 4 * PANEL] |= uint8_t(is_second ? code >> 2 << 5 : code);
          bytes[word / 4 * 5 * 4 * PANEL] |= uint8_t(is_second ? (code & 3) << 2 * (word % 4) : 0);
        }
      }
    at += code_bytes;
  }
  std::vector<int8_t> x = some_inputs(Form::ROWS * padded + TILE_BYTES, extreme);
  std::vector<int32_t> start(Form::ROWS * groups);
  for (int64_t i = 0; i < Form::ROWS * groups; ++i) {
    int32_t sum = 0;
    for (int64_t j = 0; j < group; ++j) sum += x[i * group + j];
    start[i] = -Form::MIDDLE * sum;
  }
  for (int rows : row_counts<Form>()) multiply_rows(form, rows, x, panel, start, [&](const std::vector<float>& out) {
    for (int row = 0; row < rows; ++row)
      for (int output = 0; output < PANEL; ++output) {
        float expected = 0;
        for (int64_t number = 0; number < groups; ++number) {
          int64_t sum = 0, added = 0, offset = offsets[output * groups + number];
          int64_t zero = OFFSET == ZEROS ? offset : OFFSET == MINIMA ? 0 : Coding::MIDDLE;
          for (int64_t i = number * group; i < (number + 1) * group; ++i) {
            sum += (Coding::number(codes[output * padded + i]) - zero) * x[row * padded + i];
            added += offset * x[row * padded + i];
          }
          expected += float(sum) * float(scales[output * groups + number]);
          if (OFFSET == MINIMA) expected += float(added);
        }
        CHECK(out[row * PANEL + output] == expected, "%d bits, group %d, row %d of %d, output %d: %f, not %f", BITS, int(group),
              row, rows, output, out[row * PANEL + output], expected);
      }
  });
}

template <typename Coding, Offset OFFSET = NONE>
void check_groups(int64_t inputs, int64_t group, bool extreme) {
  check_form<Grouped<Coding, OFFSET>>(inputs, group, extreme);
#ifdef HAS_AMX
  if (has_amx) check_form<InTiles<Grouped<Coding, OFFSET>>>(inputs, group, extreme);
#endif
}

template <typename Form>
void check_int8(int64_t inputs, bool extreme) {
  Form form{inputs};
  int64_t padded = form.padded();
  std::vector<uint8_t> panel(form.panel_bytes());
  for (uint8_t& code : panel) code = uint8_t(extreme ? whole(0, 1) * 255 : whole(0, 255));
  std::vector<int8_t> x = some_inputs(Form::ROWS * padded, extreme);
  std::vector<int32_t> start(Form::ROWS);
  for (int row = 0; row < Form::ROWS; ++row) {
    for (int64_t i = 0; i < padded; ++i) start[row] -= Int8::MIDDLE * x[row * padded + i];
  }
  for (int rows : row_counts<Form>()) multiply_rows(form, rows, x, panel, start, [&](const std::vector<float>& out) {
    for (int row = 0; row < rows; ++row)
      for (int output = 0; output < PANEL; ++output) {
        int32_t sum = 0;
        for (int64_t i = 0; i < padded; ++i) sum += (panel[i / 4 * 4 * PANEL + output * 4 + i % 4] - 128) * x[row * padded + i];
        CHECK(out[row * PANEL + output] == float(sum), "int8, %d inputs, row %d of %d, output %d: %f, not %d", int(inputs), row,
              rows, output, out[row * PANEL + output], sum);
      }
  });
}

// Numbers with few bits, so that all sums are exact in whatever order.
void to_stored(int value, bf16& to) { to = narrow(float(value)); }
void to_stored(int value, float& to) { to = float(value); }

template <typename Kernel, bool IS_FLOAT16>
void check_floats(const char* name, int64_t inputs) {
  constexpr int STEP = Kernel::STEP, ROWS = Kernel::ROWS;
  std::vector<int> weight(PANEL * inputs), x(ROWS * inputs);
  for (int& value : weight) value = whole(-15, 15);
  for (int& value : x) value = whole(-15, 15);
  std::vector<typename Kernel::Stored> panel(PANEL * inputs);
  for (int output = 0; output < PANEL; ++output)
    for (int64_t i = 0; i < inputs; ++i) {
      typename Kernel::Stored& to = panel[i / STEP * STEP * PANEL + output * STEP + i % STEP];
      if constexpr (IS_FLOAT16) to = narrow_float16(float(weight[output * inputs + i]));
      else to_stored(weight[output * inputs + i], to);
    }
  std::vector<typename Kernel::Activation> given(ROWS * inputs);
  for (int64_t i = 0; i < ROWS * inputs; ++i) to_stored(x[i], given[i]);
  for (int rows : row_counts<Kernel>()) {
    std::vector<float> out(rows * PANEL, -1.0f), memory(rows * PANEL);
    LineVector<typename Kernel::Input> interleaved;
    RowBlock<Kernel> block;
    block.take(given.data(), inputs, rows, inputs, interleaved);
    if constexpr (IN_TILES<Kernel>) {
      PanelState<Kernel> state;
      Kernel::panel(state, rows, block.at(0, 0), block.stride(), panel.data(), inputs / STEP, memory.data(), {}, keep_in(out));
    } else {
      int64_t part = up_to(inputs / 3, STEP);  // in two chunks
      multiply_panel<Kernel>(rows, block.at(0, 0), panel.data(), part / STEP, false, out.data(), {});
      multiply_panel<Kernel>(rows, block.at(0, part), panel.data() + part * PANEL, (inputs - part) / STEP, true, out.data(), {});
    }
    for (int row = 0; row < rows; ++row)
      for (int output = 0; output < PANEL; ++output) {
        int sum = 0;
        for (int64_t i = 0; i < inputs; ++i) sum += weight[output * inputs + i] * x[row * inputs + i];
        CHECK(out[row * PANEL + output] == float(sum), "%s, %d inputs, row %d of %d, output %d: %f, not %d", name, int(inputs), row,
              rows, output, out[row * PANEL + output], sum);
      }
  }
}

// Finite numbers of float16 to float32 in registers, as one by one; float32 to bfloat16 likewise.
void check_conversions() {
  for (uint32_t first = 0; first < 0x7c00; first += LANES) {
    lane_halves bits;
    for (int i = 0; i < LANES; ++i) bits[i] = uint16_t(std::min<uint32_t>(first + i, 0x7bff) | (i % 2 ? 0x8000 : 0));
    lanes wide = widen_float16(bits);
    for (int i = 0; i < LANES; ++i) CHECK(wide[i] == widen_float16(uint16_t(bits[i])), "float16 %x: %g", bits[i], wide[i]);
  }
  for (int round = 0; round < 4096; ++round) {
    floats value;
    for (int i = 0; i < WIDTH; ++i) value[i] = std::ldexp(float(random_bits()), whole(-140, 90)) * (whole(0, 1) ? 1.0f : -1.0f);
    halves got = narrow(value);
    for (int i = 0; i < WIDTH; ++i)
      CHECK(got[i] == narrow(value[i]) || std::fabs(value[i]) < 0x1p-126f, "bfloat16 of %g: %x", value[i], got[i]);
  }
}

// The best rate of many short runs on one thread, in products and sums a second: others may have the core meanwhile.
template <typename Run>
double best_rate(double operations, Run run) {
  double best = 1e9;
  for (int i = 0; i < 400; ++i) {
    auto begin = std::chrono::steady_clock::now();
    run();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return operations / best;
}

// Products with 16 panels of 896 inputs, which stay in the second-level cache.
template <typename Form>
void measure(const char* name, const Form& form, int64_t rows) {
  constexpr int64_t PANELS = 16;
  LineVector<uint8_t> panels(PANELS * form.panel_bytes(), 17);
  LineVector<typename Form::Input> x(rows * form.padded() + TILE_BYTES, 3), memory;
  RowBlock<Form> block;
  block.take(x.data(), form.padded(), rows, form.padded(), memory);
  std::vector<int32_t> start(rows * form.groups());
  std::vector<float> out(Form::ROWS * PANEL);
  int64_t step = pass_rows<Form>(rows);
  PanelState<Form> state;
  double rate = best_rate(2.0 * double(rows * PANELS * PANEL * form.inputs), [&] {
    for (int64_t panel = 0; panel < PANELS; ++panel)
      for (int64_t row = 0; row < rows; row += step)
        multiply_panel(state, form, block, row, int(std::min(step, rows - row)), 0, form.padded(), &panels[panel * form.panel_bytes()],
                       &start[row * form.groups()], out.data(), {}, [](auto...) {});
  });
  double bytes = double(form.panel_bytes()) / double(2 * PANEL * form.inputs * rows);
  std::printf("%s %d %.1f %.1f\n", name, int(rows), rate / 1e9, rate * bytes / 1e9);
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1 && std::string(arguments[1]) == "speed") {
    for (int64_t rows : {1, 8, 64}) {
      measure("int8", Int8{896}, rows), measure("int4", Int4{896, 32}, rows);
      measure("int8-groups", Grouped<Uniform<8>>{896, 32}, rows), measure("int4-minima", Grouped<Uniform<4>, MINIMA>{896, 32}, rows);
      measure("int5", Grouped<Uniform<5>>{896, 32}, rows), measure("int5-minima", Grouped<Uniform<5>, MINIMA>{896, 32}, rows);
      measure("e2m1", Grouped<E2m1>{896, 32}, rows), measure("iq4", Grouped<Iq4>{896, 32}, rows);
#ifdef HAS_AMX
      if (!has_amx) continue;
      measure("int8-amx", InTiles<Int8>{896}, rows), measure("int4-amx", InTiles<Int4>{896, 32}, rows);
      measure("int4-64-amx", InTiles<Int4>{896, 64}, rows);
      measure("int4-minima-amx", InTiles<Grouped<Uniform<4>, MINIMA>>{896, 32}, rows);
#endif
    }
    return 0;
  }
  for (bool extreme : {false, true}) {
    for (int64_t inputs : {1, 4, 30, 512, 516, 1100}) {
      check_int8<Int8>(inputs, extreme);
#ifdef HAS_AMX
      if (has_amx) check_int8<InTiles<Int8>>(inputs, extreme);
#endif
    }
    for (int64_t group : {8, 32, 40, 128, 520}) {
      check_groups<Uniform<4>>(2 * group - 3, group, extreme);
      check_groups<Uniform<4>, ZEROS>(group, group, extreme);
      check_groups<Uniform<4>, MINIMA>(2 * group, group, extreme);
      check_groups<Uniform<8>>(group, group, extreme);
      check_groups<Uniform<8>, ZEROS>(2 * group - 1, group, extreme);
      check_groups<Uniform<8>, MINIMA>(group, group, extreme);
      check_groups<E2m1>(2 * group - 3, group, extreme);
      check_groups<Nvfp4>(2 * group - 3, group, extreme);
      check_groups<Iq4>(2 * group - 3, group, extreme);
    }
    for (int64_t group : {32, 128, 544}) {
      check_groups<Uniform<5>>(2 * group - 3, group, extreme);
      check_groups<Uniform<5>, MINIMA>(2 * group, group, extreme);
    }
  }
  for (int64_t inputs : {2, 64, 130, 512, 1100}) {
    check_floats<Fma, false>("bfloat16", inputs);
    check_floats<FloatKernel<Float16>, true>("float16", inputs);
    check_floats<FloatKernel<Float32>, false>("float32", inputs);
#ifdef HAS_BFLOAT16_DOT
    check_floats<Dot, false>("bfloat16 dot", inputs);
#endif
#ifdef HAS_AMX
    if (has_amx) check_floats<Amx, false>("bfloat16 AMX", inputs);
#endif
  }
  check_conversions();
  std::printf("%d wrong\n", failures);
  return failures != 0;
}
