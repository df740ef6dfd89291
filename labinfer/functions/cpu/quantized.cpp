// Matrix products with quantized weights, and rows of quantized tables.
#include "quantize_int4.h"
#include "replay.h"
#include "rounded_products.h"
#include "rounded_tiles.h"

namespace {

// Product with activations in bfloat16, or in float32 if `wide`.
template <typename Make>
void multiply_any(Make make, const void* x, const Segments& segments, const void* bias, void* out, int64_t tokens, int64_t outputs,
                  int wide, Finish finish, int threads) {
  if (wide) multiply(make, (const float*)x, segments, (const float*)bias, (float*)out, tokens, outputs, finish, threads);
  else multiply(make, (const bf16*)x, segments, (const bf16*)bias, (bf16*)out, tokens, outputs, finish, threads);
}

// row(output): address of a row of `weight`.
template <typename T>
auto rows_of(const T* weight, int64_t inputs) {
  return [=](int64_t output) { return weight + output * inputs; };
}

// Dequantized weight of an output: number(address of its panel, output within it, input).
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
                    int64_t outputs, float global_scale, int64_t first, int threads) {
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
    float scale = group_number<Coding::SCALE_BYTES>(at, output) * global_scale;
    float offset = OFFSET ? group_number<2>(at + Coding::SCALE_BYTES * PANEL, output) : 0.0f;
    if (OFFSET == MINIMA) return code * scale + offset * global_scale;
    return (Coding::number(code) - (OFFSET ? offset : float(Coding::MIDDLE))) * scale;
  });
}

}  // namespace

// C functions for ctypes; quantized.py checks shapes and dtypes before the call. Weights, biases, inputs and outputs are bfloat16 or, with
// `wide`, float32.
extern "C" {

// Quantizes weight (outputs, inputs) to int8: data (panels of 32 rows, inputs padded to a multiple of 4) and scales (rows padded to a
// multiple of 32).
void quantize_int8(const void* weight, uint8_t* data, float* scales, int64_t outputs, int64_t inputs, int wide,
                   int threads) {
  Int8 form{inputs};
  if (wide) quantize<float>(form, rows_of((const float*)weight, inputs), data, scales, outputs, threads);
  else quantize<bf16>(form, rows_of((const bf16*)weight, inputs), data, scales, outputs, threads);
}

// Quantizes weight (outputs, inputs) to int4: data (panels of 32 rows, groups, 64 + 16 group bytes). global_scale is a power of two that
// multiplies all scales.
void quantize_int4(const void* weight, uint8_t* data, int64_t outputs, int64_t inputs, int64_t group, float global_scale, int wide,
                   int threads) {
  Int4 form{inputs, group};
  if (wide) quantize_int4_rows<float>(form, rows_of((const float*)weight, inputs), data, outputs, global_scale, threads);
  else quantize_int4_rows<bf16>(form, rows_of((const bf16*)weight, inputs), data, outputs, global_scale, threads);
}

// Packs codes to data (panels of 32 rows: of each group scales, offsets if any, codes). global_scale is a power of two that multiplies all
// scales and minima. Without groups (8 bits only), scales are separate (rows padded to a multiple of 32).
void pack_codes(const uint32_t* words, const float* scales, const void* offsets, uint8_t* data, float* output_scales,
                int64_t outputs, int64_t inputs, int64_t group, int bits, int coding, int offset, float global_scale, int threads) {
  auto put = [&](auto form) {
    pack(form, Codes{words, scales, offsets}, halves_of(outputs), data, output_scales, up_to(outputs, PANEL) / PANEL, global_scale,
         threads);
  };
  if (group) with_groups(inputs, group, 0, bits, coding, offset, put);
  else put(Int8{inputs});
}

// out (tokens, outputs) = x (tokens, inputs) times the weight, plus bias if there is one. With an epilogue (see Finish) out is (tokens,
// outputs / 2), from the gate and up halves, which are whole panels. SUM adds the products of segments, see Segments.
#define LINEAR_INT8(NAME, SUM, FORM)                                                                                          \
  void NAME(const void* x, const uint8_t* data, const float* scales, const void* bias, void* out, int64_t tokens,             \
            int64_t outputs, int64_t inputs, int wide, int finish, int threads) {                                             \
    Segment all{data, scales, inputs, 0, 1.0f, 0, false};                                                                     \
    multiply_any(FormMaker<FORM>{}, x, {&all, 1, nullptr}, bias, out, tokens, outputs, wide, Finish(finish), threads);        \
  }                                                                                                                           \
  REPLAYABLE(NAME)                                                                                                            \
  void SUM(const void* x, const Segment* segments, int64_t count, void* out, float* sums, int64_t tokens, int64_t outputs,    \
           int wide, int threads) {                                                                                           \
    multiply_any(FormMaker<FORM>{}, x, {segments, count, sums}, nullptr, out, tokens, outputs, wide, Finish::NOTHING,         \
                 threads);                                                                                                    \
  }                                                                                                                           \
  REPLAYABLE(SUM)

// Product with weights in groups; `lead` inputs of other ranks precede the first input in its group.
#define LINEAR_GROUPS(NAME, SUM, FORM)                                                                                        \
  void NAME(const void* x, const uint8_t* data, const void* bias, void* out, int64_t tokens, int64_t outputs, int64_t inputs, \
            int64_t group, int64_t lead, int bits, int coding, int offset, float global_scale, int wide, int finish,          \
            int threads) {                                                                                                    \
    Segment all{data, nullptr, inputs, lead, global_scale, 0, false};                                                         \
    with_groups(inputs, group, lead, bits, coding, offset, [&](auto form) {                                                   \
      multiply_any(FormMaker<FORM>{group}, x, {&all, 1, nullptr}, bias, out, tokens, outputs, wide, Finish(finish), threads); \
    });                                                                                                                       \
  }                                                                                                                           \
  REPLAYABLE(NAME)                                                                                                            \
  void SUM(const void* x, const Segment* segments, int64_t count, void* out, float* sums, int64_t tokens, int64_t outputs,    \
           int64_t group, int bits, int coding, int offset, int wide, int threads) {                                          \
    with_groups(0, group, 0, bits, coding, offset, [&](auto form) {                                                           \
      multiply_any(FormMaker<FORM>{group}, x, {segments, count, sums}, nullptr, out, tokens, outputs, wide, Finish::NOTHING,  \
                   threads);                                                                                                  \
    });                                                                                                                       \
  }                                                                                                                           \
  REPLAYABLE(SUM)

LINEAR_INT8(linear_int8, sum_linear_int8, Int8)
LINEAR_GROUPS(linear_groups, sum_linear_groups, decltype(form))
#ifdef HAS_AMX
LINEAR_INT8(linear_int8_amx, sum_linear_int8_amx, InTiles<Int8>)
LINEAR_GROUPS(linear_groups_amx, sum_linear_groups_amx, InTiles<decltype(form)>)
#endif

// out (tokens, inputs): rows id - first of a quantized table with `outputs` rows, zeros for ids outside.
void embedding_int8(const int64_t* ids, const uint8_t* data, const float* scales, void* out, int64_t tokens,
                    int64_t outputs, int64_t inputs, int64_t first, int wide, int threads) {
  if (wide) rows_of_int8(ids, data, scales, (float*)out, tokens, outputs, inputs, first, threads);
  else rows_of_int8(ids, data, scales, (bf16*)out, tokens, outputs, inputs, first, threads);
}
REPLAYABLE(embedding_int8)

// Rows of a table quantized in groups; see linear_groups.
void embedding_groups(const int64_t* ids, const uint8_t* data, void* out, int64_t tokens, int64_t outputs, int64_t inputs,
                      int64_t first, int64_t group, int64_t lead, int bits, int coding, int offset, float global_scale, int wide,
                      int threads) {
  with_groups(inputs, group, lead, bits, coding, offset, [&](auto form) {
    if (wide) rows_of_groups(form, ids, data, (float*)out, tokens, outputs, global_scale, first, threads);
    else rows_of_groups(form, ids, data, (bf16*)out, tokens, outputs, global_scale, first, threads);
  });
}
REPLAYABLE(embedding_groups)

}  // extern "C"
