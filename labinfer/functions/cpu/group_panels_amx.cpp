// Products of rows with panels of all grouped forms, with AMX tiles.
#include "rounded_tiles.h"

#ifdef HAS_AMX
namespace {

static_assert(LANES == WIDTH, "a row of a tile is a register");

// Unpacked panel: 4 bytes (inputs) of each output are adjacent; the end of a group that does not fill a step stays zero.
template <typename Coding>
void decode(const uint8_t* codes, int64_t group, char* to) {
  constexpr int STEP = CodeWords<Coding::BITS>::STEP;
  for (int64_t step = 0; step < group / STEP; ++step, to += STEP * PANEL)
    for (int i = 0; i < PANEL * 4; i += REGISTER) {
      StepWeights<Coding> weights(codes + i, step);
      for (int part = 0; part < STEP / 4; ++part) store(to + part * 4 * PANEL + i, weights.part[part]);
    }
}

// Result of panel_groups, with the same operations in the same order; a group at a time for all rows, so that codes are decoded once.
template <typename Form>
void multiply(void* shape, int rows, const int8_t* x, int64_t stride, const uint8_t* weight, int64_t groups, int64_t group, const int32_t* start,
              float* out, const void* stream) {
  using Coding = typename Form::Coding;
  constexpr Offset OFFSET = Form::OFFSET;
  alignas(64) int32_t sums[TILE_ROWS * PANEL];
  static thread_local LineVector<char> memory;  // kept from call to call, so that nothing is allocated
  int64_t step = std::min<int64_t>(TILE_BYTES, group), size = up_to(group, step) * PANEL, code_bytes = group * Form::BITS / 8 * PANEL;
  if (int64_t(memory.size()) < size) memory.resize(size);
  char* weights = memory.data();
  std::memset(weights + group * PANEL, 0, size - group * PANEL);
  std::memset(out, 0, rows * PANEL * sizeof(float));
  for (int64_t number = 0; number < groups; ++number, x += group, weight += code_bytes) {
    lanes scales[2], offsets[2] = {};
    for (int half = 0; half < 2; ++half) {
      scales[half] = group_numbers<Coding::SCALE_BYTES>(weight, half * WIDTH);
      if (OFFSET) offsets[half] = group_numbers<2>(weight + Coding::SCALE_BYTES * PANEL, half * WIDTH);
    }
    weight += Form::HEAD;
    const char* ahead = ((const Stream*)stream)->ahead(weight);
    for (int64_t line = 0; line < code_bytes && !((const Stream*)stream)->is_near; line += 64) __builtin_prefetch(ahead + line);
    decode<Coding>(weight, group, weights);
    for (int first = 0; first < rows; first += TILE_ROWS) {
      int count = std::min(TILE_ROWS, rows - first);
      bool has_second = count > WIDTH;
      ((TileShape*)shape)->set(count, int(step));
      clear_sums(has_second);
      for (int64_t i = 0; i < group; i += step)
        add_step<Numbers::UNSIGNED_WEIGHTS>(has_second, (const char*)x + first * stride + i, stride, weights + i * PANEL,
                         weights + i * PANEL + TILE_BYTES, PANEL * 4);
      store_sums(has_second, sums, PANEL * 4);
      for (int row = 0; row < count; ++row) {
        int32_t begin = start[(first + row) * groups + number];
        for (int half = 0; half < 2; ++half) {
          float* to = out + (first + row) * PANEL + half * WIDTH;
          lane_ints whole = load<lane_ints>(sums + row * PANEL + half * WIDTH) + first_sum<Coding, OFFSET>(begin);
          lanes total = load<lanes>(to);
          total += group_product<Coding, OFFSET>(whole, float(begin), scales[half], offsets[half]);
          store(to, total);
        }
      }
    }
  }
}

template <typename... Forms>
GroupPanelAmx among(int form) {
  GroupPanelAmx panel = nullptr;
  ((form == Forms::NUMBER ? void(panel = multiply<Forms>) : void()), ...);
  return panel;
}

}  // namespace

GroupPanelAmx group_panel_amx(int form) {
  return among<Grouped<Uniform<4>>, Grouped<Uniform<4>, ZEROS>, Grouped<Uniform<4>, MINIMA>, Grouped<Uniform<5>>,
               Grouped<Uniform<5>, MINIMA>, Grouped<Uniform<8>>, Grouped<Uniform<8>, ZEROS>, Grouped<Uniform<8>, MINIMA>,
               Grouped<E2m1>, Grouped<Nvfp4>, Grouped<Iq4>>(form);
}
#endif
