// bfloat16 matrices, plain and in 12 bits, read panel by panel in products.
#pragma once

#include "amx.h"
#include "packed12.h"
#include "row_block.h"

namespace {

// Some inputs of a panel: `inputs` inputs from `begin` on.
struct Chunk {
  int64_t number, begin, inputs;
};

// Weights packed by pack_weight.
struct Plain {
  const bf16* weight;
  int64_t inputs;

  // Address of a panel, from input `begin` on.
  const bf16* at(int64_t number, int64_t begin) const { return weight + (number * inputs + begin) * PANEL; }

  // Rows after the last panel, unpacked.
  const bf16* rest(int64_t panels) const { return weight + panels * PANEL * inputs; }

  // Multiplies `count` rows with a chunk, in one of a thread's passes over it, and calls done(row, some, sums) after the last chunk of the
  // panel. The memory at `next` is read after the chunk.
  template <typename Kernel, typename Done>
  void multiply(PanelState<Kernel>& state, const Chunk& chunk, const void* next, const RowBlock<Kernel>& rows, int64_t row, int64_t begin, int count,
                Pass pass, float* sums, Done done) const {
    const bf16* from = at(chunk.number, chunk.begin);
    int64_t bytes = PANEL * chunk.inputs * sizeof(bf16);
    Stream stream = pass.stream<Kernel>(panel_stream(from, bytes, next), {from, bytes}, bytes, bytes);
    if constexpr (IN_TILES<Kernel>) {
      Kernel::panel(state, count, rows.at(row, begin), rows.stride(), from, inputs / 2, sums, stream, done);
    } else {
      multiply_panel<Kernel>(count, rows.at(row, begin), from, chunk.inputs / 2, chunk.begin > 0, sums, stream);
      if (chunk.begin + chunk.inputs == inputs) done(0, count, FloatSums{sums});
    }
  }
};

// Thread-local memory for decoded weights.
inline LineVector<bf16>& decoded_weights() {
  static thread_local LineVector<bf16> decoded;
  return decoded;
}

// 12-bit weights. The first of several passes decodes a chunk for all of them. With AMX tiles, weights are decoded shortly before use.
struct Packed12 : Matrix12 {
  int64_t inputs;

  Packed12(const void* data, int64_t outputs, int64_t inputs) : Matrix12((const uint8_t*)data, outputs, inputs), inputs(inputs) {}

  const uint8_t* at(int64_t number, int64_t begin) const { return Matrix12::at(number) + begin / GROUP_INPUTS * GROUP_BYTES; }
  const bf16* rest(int64_t) const { return last_rows; }

  template <typename Kernel, typename Done>
  void multiply(PanelState<Kernel>& state, const Chunk& chunk, const void* next, const RowBlock<Kernel>& rows, int64_t row, int64_t begin, int count,
                Pass pass, float* sums, Done done) const {
    int64_t groups = (chunk.inputs + GROUP_INPUTS - 1) / GROUP_INPUTS;
    LineVector<bf16>& decoded = decoded_weights();
    bool is_single = !IN_TILES<Kernel> && pass.count == 1;
    if (!is_single && int64_t(decoded.size()) < groups * GROUP_WEIGHTS) decoded.resize(groups * GROUP_WEIGHTS);
    Panel12 panel = Matrix12::panel(chunk.number, chunk.begin / GROUP_INPUTS, groups, next);
    Stretch packed{panel.planes, groups * GROUP_BYTES}, whole{decoded.data(), groups * GROUP_WEIGHTS * int64_t(sizeof(bf16))};
    const typename Kernel::Input* x = rows.at(row, begin);
    if constexpr (IN_TILES<Kernel>) {
      panel.stream = pass.stream<Kernel>(panel.stream, pass.is_first() ? packed : whole, packed.bytes, whole.bytes);
      bool is_read_again = !pass.is_last() || (count > TILE_ROWS && count % TILE_ROWS);
      if (!pass.is_first()) Kernel::panel(state, count, x, rows.stride(), decoded.data(), inputs / 2, sums, panel.stream, done);
      else
        Kernel::panel(state, count, x, rows.stride(), DecodedPanel(panel, groups, decoded.data(), is_read_again), inputs / 2, sums, done);
    } else {
      bool adds = chunk.begin > 0;
      if (is_single) {
        panel12_of<Kernel>(count)(x, panel, chunk.inputs / 2, adds, sums);
      } else {
        if (pass.is_first()) decode_groups(panel, groups, decoded.data());
        Stream stream = pass.stream<Kernel>(panel.stream, whole, packed.bytes, whole.bytes);
        multiply_panel<Kernel>(count, x, decoded.data(), chunk.inputs / 2, adds, sums, stream);
      }
      if (chunk.begin + chunk.inputs == inputs) done(0, count, FloatSums{sums});
    }
  }
};

// A matrix in 16 or in 12 bits.
class Bfloat16Matrix {
 public:
  Bfloat16Matrix(const void* data, int64_t outputs, int64_t inputs, bool in_12_bits)
      : plain{(const bf16*)data, inputs}, packed(data, outputs, inputs), in_12_bits(in_12_bits) {}

  const void* at(int64_t number, int64_t begin) const { return in_12_bits ? (const void*)packed.at(number, begin) : plain.at(number, begin); }
  const bf16* rest(int64_t panels) const { return in_12_bits ? packed.rest(panels) : plain.rest(panels); }

  template <typename Kernel, typename... Arguments>
  void multiply(PanelState<Kernel>& state, const Arguments&... arguments) const {
    if (in_12_bits) packed.template multiply<Kernel>(state, arguments...);
    else plain.template multiply<Kernel>(state, arguments...);
  }

 private:
  Plain plain;
  Packed12 packed;
  bool in_12_bits;
};

}  // namespace
