// Memory layout of a layer's experts.
#pragma once

#include "rounded_tiles.h"

namespace {

enum Weights : int64_t { INT4, INT8, BFLOAT16, FLOAT16, FLOAT32, INT5 };

// A rank's experts of a layer. Quantized weights have scales per group of inputs, 8-bit ones per output if group is 0; coding and offset
// are those of rounded.h. `lead` zero inputs precede the first input of down.
struct Experts {
  const uint8_t* const* data;  // address of each expert; null for experts without rows in this call
  int64_t count, hidden, columns, weights, group, coding, offset, lead;
};

// Form of floating-point weights, with the interface of the quantized forms in rounded.h.
template <typename Kernel>
struct Dense {
  static constexpr int ROWS = Kernel::ROWS;
  static constexpr bool OUTPUT_SCALES = false;
  int64_t inputs;

  explicit Dense(int64_t inputs, int64_t = 0, int64_t = 0) : inputs(inputs) {}
  int64_t padded() const { return up_to(inputs, Kernel::STEP); }
  int64_t panel_bytes() const { return PANEL * padded() * sizeof(typename Kernel::Stored); }
};

template <typename Kernel>
constexpr bool IN_TILES<Dense<Kernel>> = IN_TILES<Kernel>;
template <typename Kernel>
struct PanelState<Dense<Kernel>> : PanelState<Kernel> {};

// Offsets of an expert's parts: panels of gate and up, each of 16 gate and the matching 16 up outputs, then the panels of down; output
// scales follow their panels; the global scales of both matrices are last. Columns are zero-padded to a multiple of 16, outputs of down to 32.
template <typename Form>
struct Layout {
  int64_t hidden, columns;
  Form gate_up, down;
  int64_t gate_panels = (columns + WIDTH - 1) / WIDTH, down_panels = (hidden + PANEL - 1) / PANEL;

  explicit Layout(const Experts& of)
      : hidden(of.hidden), columns(of.columns), gate_up(of.hidden, of.group), down(of.columns, of.group, of.lead) {}

  int64_t gate_scales() const { return gate_panels * gate_up.panel_bytes(); }
  int64_t down_begin() const { return gate_scales() + scales(gate_panels); }
  int64_t down_scales() const { return down_begin() + down_panels * down.panel_bytes(); }
  int64_t global_scales() const { return down_scales() + scales(down_panels); }
  int64_t bytes() const { return up_to(global_scales() + 2 * sizeof(float), 64); }

 private:
  static int64_t scales(int64_t panels) { return Form::OUTPUT_SCALES ? panels * PANEL * sizeof(float) : 0; }
};

// Calls `use` with the layout of quantized experts, whose products use AMX if the kernel does.
template <typename Kernel = Fma, typename Use>
void with_codes(const Experts& of, Use use) {
  if (of.weights == INT8 && !of.group) return use(Layout<FormBeside<Kernel, Int8>>(of));
  int bits = of.weights == INT4 ? 4 : of.weights == INT5 ? 5 : 8;
  with_groups(of.hidden, of.group, 0, bits, of.coding, of.offset, [&](auto form) {
    use(Layout<FormBeside<Kernel, decltype(form)>>(of));
  });
}

// Calls `use` with the layout of experts, with the given kernel for bfloat16.
template <typename Kernel, typename Use>
void with_layout(const Experts& of, Use use) {
  if (of.weights == BFLOAT16) use(Layout<Dense<Kernel>>(of));
  else if (of.weights == FLOAT16) use(Layout<Dense<FloatKernel<Float16>>>(of));
  else if (of.weights == FLOAT32) use(Layout<Dense<FloatKernel<Float32>>>(of));
  else with_codes<Kernel>(of, use);
}

}  // namespace
