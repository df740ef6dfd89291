// Products of int8 rows with quantized weights, with AMX tiles.
#pragma once

#include "rounded.h"

#ifdef HAS_AMX
// Product of any number of rows, in tiles of the given shape, with a panel of a grouped form; see GroupPanel.
using GroupPanelAmx = void (*)(void* shape, int rows, const int8_t*, int64_t, const uint8_t*, int64_t, int64_t, const int32_t*, float*,
                               const void*);
GroupPanelAmx group_panel_amx(int form);
#endif

namespace {

template <typename Form>
struct InTiles;

// Form to use together with a kernel: with AMX tiles if the kernel has them.
template <typename Kernel, typename Form>
using FormBeside = std::conditional_t<IN_TILES<Kernel>, InTiles<Form>, Form>;

#ifdef HAS_AMX
// Counterpart of FloatSums for integers, to which a row's start is added.
struct WholeSums {
  const int32_t *sums, *start;
  floats operator()(int row, int half) const {
    return to_floats(load<ints>(sums + row * PANEL + half * WIDTH) + start[row]);
  }
};

// Form whose products use AMX tiles. Results have identical bits, as integer sums are exact.
template <typename Form>
struct InTiles : Form {
  static constexpr int ROWS = Form::OUTPUT_SCALES ? Amx::ROWS : Amx::ROWS / 4;  // with groups, fewer: the rows' float sums must stay in a near cache
  static constexpr int FEW = Form::OUTPUT_SCALES ? std::min(8, Form::ROWS) : ROWS_HELD;  // rows up to which vector instructions are as fast

  using Form::Form;
  explicit InTiles(const Form& form) : Form(form) {}

  template <typename Done>
  void panel(TileShape& shape, const RowBlock<InTiles>& block, int64_t row, int rows, const uint8_t* weight, const int32_t* start, float* memory,
             const Stream& stream, Done done) const {
    const int8_t* x = block.at(row, 0);
    if (block.is_interleaved()) {
      auto panel = form_panel_among<Form>(rows, std::make_integer_sequence<int, FEW>{});
      panel(*this, {x, start, this->groups()}, weight, this->padded(), false, memory, stream);
      done(0, rows, this->sums(memory));
    } else if constexpr (Form::OUTPUT_SCALES) {
      multiply_tiles<Numbers::UNSIGNED_WEIGHTS>(
          shape, rows, (const char*)x, this->padded(), PanelInMemory{(const char*)weight, stream}, this->padded(), (char*)memory,
          [&](int row, int count, const char* sums) { done(row, count, WholeSums{(const int32_t*)sums, start + row}); });
    } else {
      group_panel_amx(Form::NUMBER)(&shape, rows, x, this->padded(), weight, this->groups(), this->group, start, memory, &stream);
      done(0, rows, FloatSums{memory});
    }
  }
};

template <typename Form>
constexpr bool IN_TILES<InTiles<Form>> = true;
template <typename Form>
struct PanelState<InTiles<Form>> : TileShape {};
#endif

}  // namespace
