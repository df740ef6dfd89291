// Products with weights as whole numbers, and rows of a rounded table.
#include "replay.h"
#include "rounded_tiles.h"

namespace {

// 32 outputs of a row: times the scales, plus the bias; fewer at the end of the matrix.
template <typename Form, typename T>
inline void finish(const RowWriter<Form>& writer, T* out, const float* block, float row_scale, const float* scales, const T* bias,
                   int64_t count) {
  floats value[2];
  for (int half = 0; half < 2; ++half)
    value[half] = scaled(block + half * WIDTH, row_scale, scales ? scales + half * WIDTH : nullptr);
  if (count == PANEL) {
    for (int half = 0; bias && half < 2; ++half) value[half] += load_floats(bias + half * WIDTH);
    writer.write(out, value[0], value[1]);
  } else {
    T rest[PANEL];
    for (int i = 0; i < count; ++i) {
      set(rest[i], value[i / WIDTH][i % WIDTH] + (bias ? as_float(bias[i]) : 0.0f));
    }
    std::memcpy(out, rest, count * sizeof(T));
  }
}

// unit is what all scales among the data are multiplied with.
template <typename Form, typename T>
void multiply(const Form& form, const T* x, const uint8_t* weight, const float* scales, const T* bias, T* out,
              int64_t tokens, int64_t outputs, float unit, int threads) {
  static thread_local Rounded rounded;  // kept from call to call, so that nothing is allocated
  rounded.round(form, x, tokens, form.inputs, threads);
  RoundedRows rows_in = rounded.rows();  // the threads of the team share the caller's
  int64_t panels = (outputs + PANEL - 1) / PANEL, padded = form.padded(), groups = form.groups();
  int64_t together = rows_together<Form>(padded), blocks = (tokens + together - 1) / together;
  RowWriter<Form> writer(out, tokens, outputs);
  in_parallel(threads, blocks * panels, [&](Pieces& pieces) {
    alignas(64) float block[Form::ROWS * PANEL];
    PanelState<Form> state;
    for (int64_t piece; pieces.next(piece);) {
      int64_t first = piece / panels * together, number = piece % panels, output = number * PANEL;
      int64_t last = std::min(tokens, first + together), step = pass_rows<Form>(last - first);
      Stream stream;
      for (int64_t token = first; token < last; token += step) {
        int rows = int(std::min(step, last - token));
        multiply_panel(state, form, rows, rows_in.q + token * padded, weight + number * form.panel_bytes(),
                       rows_in.start + token * groups, block, stream);
        stream.is_near = true;
        for (int row = 0; row < rows; ++row)
          finish(writer, out + (token + row) * outputs + output, block + row * PANEL, rows_in.scale[token + row] * unit,
                 Form::OUTPUT_SCALES ? scales + output : nullptr, bias ? bias + output : nullptr,
                 std::min<int64_t>(PANEL, outputs - output));
      }
    }
    writer.finish();
  });
}

// A call's activations are bfloat16 or, with wide, float32.
template <typename Form>
void multiply_any(const Form& form, const void* x, const uint8_t* weight, const float* scales, const void* bias, void* out,
                 int64_t tokens, int64_t outputs, float unit, int wide, int threads) {
  if (wide) multiply(form, (const float*)x, weight, scales, (const float*)bias, (float*)out, tokens, outputs, unit, threads);
  else multiply(form, (const bf16*)x, weight, scales, (const bf16*)bias, (bf16*)out, tokens, outputs, unit, threads);
}

template <typename Form, typename T>
void quantize_rows(const Form& form, const T* weight, uint8_t* data, float* scales, int64_t outputs, float unit,
                   int threads) {
  auto row = [&](int64_t output) { return weight + output * form.inputs; };
  quantize<T>(form, row, data, scales, outputs, unit, threads);
}

// A weight of an output: number(at its panel, output within it, input).
template <typename Form, typename T, typename Number>
void look_up(const Form& form, const int64_t* ids, const uint8_t* data, T* out, int64_t tokens, int64_t outputs, int64_t first,
             int threads, Number number) {
  for_each(threads, tokens, [&](int64_t token) {
    int64_t row = ids[token] - first;
    bool inside = row >= 0 && row < outputs;
    const uint8_t* panel = inside ? data + row / PANEL * form.panel_bytes() : nullptr;
    for (int64_t i = 0; i < form.inputs; ++i) set(out[token * form.inputs + i], inside ? number(panel, row, i) : 0.0f);
  });
}

template <typename T>
void rows_of_int8(const int64_t* ids, const uint8_t* data, const float* scales, T* out, int64_t tokens, int64_t outputs,
                  int64_t inputs, int64_t first, int threads) {
  look_up(Int8{inputs}, ids, data, out, tokens, outputs, first, threads, [&](const uint8_t* panel, int64_t row, int64_t i) {
    return (panel[i / 4 * 4 * PANEL + row % PANEL * 4 + i % 4] - Int8::MIDDLE) * scales[row];
  });
}

template <typename Coding, Offset OFFSET, typename T>
void rows_of_groups(const Grouped<Coding, OFFSET>& form, const int64_t* ids, const uint8_t* data, T* out, int64_t tokens,
                    int64_t outputs, float unit, int64_t first, int threads) {
  look_up(form, ids, data, out, tokens, outputs, first, threads, [&](const uint8_t* panel, int64_t row, int64_t i) {
    int64_t output = row % PANEL, number = (form.lead + i) / form.group, place = (form.lead + i) % form.group;
    const uint8_t *at = panel + number * form.group_bytes(), *codes = at + form.HEAD + output * 4;
    using Words = CodeWords<Coding::BITS>;
    int64_t step = place / Words::STEP, byte = place % 4;
    int code = codes[Words::place(step) * 4 * PANEL + byte];
    if (place % Words::STEP < 4) {
      code &= (1 << Coding::BITS) - 1;
    } else {
      code = code >> Coding::BITS << Words::LOWER;
      if (Words::LOWER)
        code |= codes[Words::lower_place(step) * 4 * PANEL + byte] >> step % Words::SHARED * Words::LOWER & ((1 << Words::LOWER) - 1);
    }
    float scale = group_number<Coding::SCALE_BYTES>(at, output) * unit;
    float offset = OFFSET ? group_number<2>(at + Coding::SCALE_BYTES * PANEL, output) : 0.0f;
    if (OFFSET == MINIMA) return code * scale + offset * unit;
    return (Coding::number(code) - (OFFSET ? offset : float(Coding::MIDDLE))) * scale;
  });
}

}  // namespace

// Plain C functions over pointers, called through ctypes. They check nothing: quantized.py checks shapes and types.
// Weights, biases, inputs and outputs are bfloat16 or, with wide, float32.
extern "C" {

// weight (outputs, inputs) to data (panels of 32 rows, inputs up to 4) and scales (rows up to 32).
void quantize_int8(const void* weight, uint8_t* data, float* scales, int64_t outputs, int64_t inputs, int wide,
                   int threads) {
  Int8 form{inputs};
  if (wide) quantize_rows(form, (const float*)weight, data, scales, outputs, 1.0f, threads);
  else quantize_rows(form, (const bf16*)weight, data, scales, outputs, 1.0f, threads);
}

// weight (outputs, inputs) to data (panels of 32 rows, groups, 64 + 16 group bytes); unit is a power of two, which all
// scales are to be multiplied with.
void quantize_int4(const void* weight, uint8_t* data, int64_t outputs, int64_t inputs, int64_t group, float unit, int wide,
                   int threads) {
  Int4 form{inputs, group};
  if (wide) quantize_rows(form, (const float*)weight, data, nullptr, outputs, unit, threads);
  else quantize_rows(form, (const bf16*)weight, data, nullptr, outputs, unit, threads);
}

// Codes to data (panels of 32 rows: of each group scales, offsets if there are any, codes); unit is a power of two, which
// all scales and minima are to be multiplied with. Without groups, which is for 8 bits, scales are put beside them (rows up to 32).
void pack_codes(const uint32_t* words, const float* scales, const void* offsets, uint8_t* data, float* output_scales,
                int64_t outputs, int64_t inputs, int64_t group, int bits, int coding, int offset, float unit, int threads) {
  auto put = [&](auto form) {
    pack(form, Codes{words, scales, offsets}, halves_of(outputs), data, output_scales, up_to(outputs, PANEL) / PANEL, unit, threads);
  };
  if (group) with_groups(inputs, group, 0, bits, coding, offset, put);
  else put(Int8{inputs});
}

// out (tokens, outputs) = x (tokens, inputs) times the weight, plus bias if there is one.
void linear_int8(const void* x, const uint8_t* data, const float* scales, const void* bias, void* out, int64_t tokens,
                 int64_t outputs, int64_t inputs, int wide, int threads) {
  multiply_any(Int8{inputs}, x, data, scales, bias, out, tokens, outputs, 1.0f, wide, threads);
}
REPLAYABLE(linear_int8)

// The same with weights in groups, before whose first input lead others are held.
void linear_groups(const void* x, const uint8_t* data, const void* bias, void* out, int64_t tokens, int64_t outputs,
                   int64_t inputs, int64_t group, int64_t lead, int bits, int coding, int offset, float unit, int wide, int threads) {
  with_groups(inputs, group, lead, bits, coding, offset, [&](auto form) {
    multiply_any(form, x, data, nullptr, bias, out, tokens, outputs, unit, wide, threads);
  });
}
REPLAYABLE(linear_groups)

#ifdef HAS_AMX
void linear_int8_amx(const void* x, const uint8_t* data, const float* scales, const void* bias, void* out, int64_t tokens,
                     int64_t outputs, int64_t inputs, int wide, int threads) {
  multiply_any(InTiles<Int8>{inputs}, x, data, scales, bias, out, tokens, outputs, 1.0f, wide, threads);
}
REPLAYABLE(linear_int8_amx)

void linear_groups_amx(const void* x, const uint8_t* data, const void* bias, void* out, int64_t tokens, int64_t outputs,
                       int64_t inputs, int64_t group, int64_t lead, int bits, int coding, int offset, float unit, int wide,
                       int threads) {
  with_groups(inputs, group, lead, bits, coding, offset, [&](auto form) {
    multiply_any(InTiles<decltype(form)>(form), x, data, nullptr, bias, out, tokens, outputs, unit, wide, threads);
  });
}
REPLAYABLE(linear_groups_amx)
#endif

// out (tokens, inputs): row id - first of a quantised table of so many outputs, zeros for ids outside.
void embedding_int8(const int64_t* ids, const uint8_t* data, const float* scales, void* out, int64_t tokens,
                    int64_t outputs, int64_t inputs, int64_t first, int wide, int threads) {
  if (wide) rows_of_int8(ids, data, scales, (float*)out, tokens, outputs, inputs, first, threads);
  else rows_of_int8(ids, data, scales, (bf16*)out, tokens, outputs, inputs, first, threads);
}
REPLAYABLE(embedding_int8)

// The same of a table in groups; see linear_groups.
void embedding_groups(const int64_t* ids, const uint8_t* data, void* out, int64_t tokens, int64_t outputs, int64_t inputs,
                      int64_t first, int64_t group, int64_t lead, int bits, int coding, int offset, float unit, int wide,
                      int threads) {
  with_groups(inputs, group, lead, bits, coding, offset, [&](auto form) {
    if (wide) rows_of_groups(form, ids, data, (float*)out, tokens, outputs, unit, first, threads);
    else rows_of_groups(form, ids, data, (bf16*)out, tokens, outputs, unit, first, threads);
  });
}
REPLAYABLE(embedding_groups)

}  // extern "C"
