// Packing of single experts into the layout of experts.cpp.
#include "experts.h"
#include "quantize_int4.h"

namespace {

// Quantized matrix in the checkpoint's codes; global_scale is a power of two that multiplies the groups' scales.
struct UnpackedCodes {
  Codes codes;
  float global_scale;
};

// Packs rows of a matrix into panels. row(output) is a row's address; null for a row of zeros.
template <typename T, typename Kernel, typename Row>
void pack_panels(const Dense<Kernel>& form, Row row, uint8_t* data, float*, int64_t outputs, float, int threads) {
  int64_t padded = form.padded();
  in_parallel(threads, (outputs + PANEL - 1) / PANEL, [&](Pieces& pieces) {
    std::vector<T> rows(PANEL * padded);
    const T* rows_of_panel[PANEL];
    for (int i = 0; i < PANEL; ++i) rows_of_panel[i] = rows.data() + i * padded;
    for (int64_t number; pieces.next(number);) {
      int64_t first = number * PANEL;
      for (int i = 0; i < PANEL; ++i) {
        const T* from = first + i < outputs ? row(first + i) : nullptr;
        T* to = rows.data() + i * padded;
        if (from) std::memcpy(to, from, form.inputs * sizeof(T));
        else std::memset(to, 0, form.inputs * sizeof(T));
      }
      T* to = (T*)(data + number * form.panel_bytes());
      if constexpr (Kernel::STEP == 2) {
        pack_panel(rows_of_panel, padded, to);
      } else {
        for (int64_t input = 0; input < padded; ++input)
          for (int i = 0; i < PANEL; ++i) to[input * PANEL + i] = rows_of_panel[i][input];
      }
    }
  });
}

template <typename T, typename Form, typename Row>
void pack_panels(const Form& form, Row row, uint8_t* data, float* scales, int64_t outputs, float, int threads) {
  quantize<T>(form, row, data, scales, outputs, threads);
}

template <typename T, typename Row>
void pack_panels(const Int4& form, Row row, uint8_t* data, float*, int64_t outputs, float global_scale, int threads) {
  quantize_int4_rows<T>(form, row, data, outputs, global_scale, threads);
}

// Packs gate_up (2 columns, hidden), gates first, and down (hidden, columns) into an expert's memory.
template <typename Form, typename T>
void pack(const Layout<Form>& layout, const T* gate_up, const T* down, uint8_t* to, float gate_up_scale, float down_scale,
          int threads) {
  int64_t hidden = layout.hidden, columns = layout.columns;
  auto gate_or_up = [=](int64_t output) -> const T* {
    int64_t column = output / PANEL * WIDTH + output % WIDTH;
    bool is_up = output % PANEL >= WIDTH;
    return column < columns ? gate_up + (is_up * columns + column) * hidden : nullptr;
  };
  pack_panels<T>(layout.gate_up, gate_or_up, to, (float*)(to + layout.gate_scales()), layout.gate_panels * PANEL,
                 gate_up_scale, threads);
  pack_panels<T>(layout.down, [=](int64_t output) { return down + output * columns; }, to + layout.down_begin(),
                 (float*)(to + layout.down_scales()), hidden, down_scale, threads);
  store(to + layout.global_scales(), gate_up_scale);
  store(to + layout.global_scales() + sizeof(float), down_scale);
}

// Packs gate_up and down from codes into an expert's memory.
template <typename Form>
void pack(const Layout<Form>& layout, const UnpackedCodes& gate_up, const UnpackedCodes& down, uint8_t* to, int threads) {
  auto gate_or_up = [columns = layout.columns](int64_t half) {
    Half gates = halves_of(columns)(half / 2);
    return Half{half % 2 * columns + gates.row, gates.count};
  };
  pack(layout.gate_up, gate_up.codes, gate_or_up, to, (float*)(to + layout.gate_scales()), layout.gate_panels, gate_up.global_scale,
       threads);
  pack(layout.down, down.codes, halves_of(layout.hidden), to + layout.down_begin(), (float*)(to + layout.down_scales()),
       layout.down_panels, down.global_scale, threads);
  store(to + layout.global_scales(), gate_up.global_scale);
  store(to + layout.global_scales() + sizeof(float), down.global_scale);
}

}  // namespace

// C functions for ctypes; experts.py checks shapes and dtypes before the call.
extern "C" {

// Bytes of one expert.
int64_t expert_bytes(const Experts* experts) {
  int64_t bytes = 0;
  with_layout<Fma>(*experts, [&](const auto& layout) { bytes = layout.bytes(); });
  return bytes;
}

// Packs an expert, see pack. For quantized layouts, weights are bfloat16 or (with `wide`) float32, and are rounded to int4 without zero
// points or to int8 with a scale per output; the global scales are powers of two that multiply int4 scales, else 1.
void pack_expert(const Experts* experts, int64_t number, const void* gate_up, const void* down, float gate_up_scale,
                 float down_scale, int wide, int threads) {
  uint8_t* to = const_cast<uint8_t*>(experts->data[number]);
  auto with = [&](const auto& layout, auto weight) {
    using T = decltype(weight);
    pack(layout, (const T*)gate_up, (const T*)down, to, gate_up_scale, down_scale, threads);
  };
  auto rounded = [&](const auto& layout) { wide ? with(layout, float()) : with(layout, bf16()); };
  switch (experts->weights) {
    case INT4: return rounded(Layout<Int4>(*experts));
    case INT8: return rounded(Layout<Int8>(*experts));
    case BFLOAT16: return with(Layout<Dense<Fma>>(*experts), bf16());
    case FLOAT16: return with(Layout<Dense<FloatKernel<Float16>>>(*experts), uint16_t());
    case FLOAT32: return with(Layout<Dense<FloatKernel<Float32>>>(*experts), float());
  }
}

void pack_expert_codes(const Experts* experts, int64_t number, const UnpackedCodes* gate_up, const UnpackedCodes* down,
                       int threads) {
  uint8_t* to = const_cast<uint8_t*>(experts->data[number]);
  with_codes(*experts, [&](const auto& layout) { pack(layout, *gate_up, *down, to, threads); });
}

}  // extern "C"
