// bfloat16 matrices, plain and in 12 bits, read panel by panel in products.
#pragma once

#include "amx.h"
#include "packed12.h"
#include "panel.h"

namespace {

// Weights packed by pack_weight.
struct Plain {
  const bf16* weight;
  int64_t inputs;

  // Address of panel `number`.
  const bf16* at(int64_t number) const { return weight + number * PANEL * inputs; }

  // Rows after the last panel, unpacked.
  const bf16* rest(int64_t panels) const { return weight + panels * PANEL * inputs; }

  // Multiplies rows, `stride` apart, with a panel, see multiply_panel, in one of a thread's passes over it. The memory at `next` is read
  // after it.
  template <typename Kernel, typename Done>
  void panel(PanelState<Kernel>& state, int64_t number, const void* next, const typename Kernel::Input* x, int64_t stride, int rows,
             Pass pass, float* memory, Done done) const {
    int64_t bytes = PANEL * inputs * sizeof(bf16);
    Stream stream = pass.stream<Kernel>(panel_stream(at(number), bytes, next), {at(number), bytes}, bytes, bytes);
    multiply_panel<Kernel>(state, rows, x, stride, at(number), inputs / 2, memory, stream, done);
  }
};

// Thread-local memory for a decoded panel.
inline LineVector<bf16>& decoded_panel() {
  static thread_local LineVector<bf16> whole;
  return whole;
}

// 12-bit weights. The first of several passes decodes the panel for the others; with AMX tiles also for itself, shortly before use.
struct Packed12 : Matrix12 {
  int64_t inputs;

  Packed12(const void* data, int64_t outputs, int64_t inputs) : Matrix12((const uint8_t*)data, outputs, inputs), inputs(inputs) {}

  const bf16* rest(int64_t) const { return last_rows; }

  template <typename Kernel, typename Done>
  void panel(PanelState<Kernel>& state, int64_t number, const void* next, const typename Kernel::Input* x, int64_t stride, int rows,
             Pass pass, float* memory, Done done) const {
    LineVector<bf16>& whole = decoded_panel();
    bool is_kept = IN_TILES<Kernel> || !pass.is_last();
    if (pass.is_first() && is_kept && int64_t(whole.size()) < groups * GROUP_WEIGHTS) whole.resize(groups * GROUP_WEIGHTS);
    Panel12 panel = Matrix12::panel(number, next);
    Stretch packed{panel.planes, groups * GROUP_BYTES}, decoded{whole.data(), groups * GROUP_WEIGHTS * int64_t(sizeof(bf16))};
    panel.stream = pass.stream<Kernel>(panel.stream, pass.is_first() ? packed : decoded, packed.bytes, decoded.bytes);
    if (pass.is_first()) {
      if constexpr (IN_TILES<Kernel>) {
        bool is_read_again = !pass.is_last() || (rows > TILE_ROWS && rows % TILE_ROWS);
        return Kernel::panel(state, rows, x, stride, DecodedPanel(panel, groups, whole.data(), is_read_again), inputs / 2, memory, done);
      } else {
        panel12_of<Kernel>(rows)(x, stride, panel, inputs / 2, is_kept ? whole.data() : nullptr, memory);
        return done(0, rows, FloatSums{memory});
      }
    }
    multiply_panel<Kernel>(state, rows, x, stride, whole.data(), inputs / 2, memory, panel.stream, done);
  }
};

// A matrix in 16 or in 12 bits.
class Bfloat16Matrix {
 public:
  Bfloat16Matrix(const void* data, int64_t outputs, int64_t inputs, bool in_12_bits)
      : plain{(const bf16*)data, inputs}, packed(data, outputs, inputs), in_12_bits(in_12_bits) {}

  const void* at(int64_t number) const { return in_12_bits ? (const void*)packed.at(number) : plain.at(number); }
  const bf16* rest(int64_t panels) const { return in_12_bits ? packed.rest(panels) : plain.rest(panels); }

  template <typename Kernel, typename... Arguments>
  void panel(PanelState<Kernel>& state, Arguments... arguments) const {
    if (in_12_bits) packed.template panel<Kernel>(state, arguments...);
    else plain.template panel<Kernel>(state, arguments...);
  }

 private:
  Plain plain;
  Packed12 packed;
  bool in_12_bits;
};

}  // namespace
