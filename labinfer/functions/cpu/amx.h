// Matrix products with AMX tiles (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18): 16 rows times 16
// outputs at a time, over 64 bytes of each row. A panel already has the tile layout: 4 bytes of each output are adjacent.
#pragma once

#include <type_traits>

#include "row_block.h"

namespace {

constexpr int TILE_BYTES = 64;  // bytes of a tile row

}  // namespace

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512F__) && \
    defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define HAS_AMX

namespace {

// AMX instructions as inline assembly: the compiler's intrinsics do not declare which memory they read.
template <int TILE>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "n"(TILE) : "memory");
}
template <int TILE>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "n"(TILE) : "memory");
}
template <int TILE>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "n"(TILE));
}
// Operands of a tile product: pairs of bfloat16, or fours of int8; int8 rows are signed, int8 weights are unsigned or signed.
enum class Numbers { BFLOAT16, UNSIGNED_WEIGHTS, SIGNED_WEIGHTS };

template <Numbers NUMBERS, int SUMS, int ROWS, int WEIGHTS>
inline void add_product() {
  if constexpr (NUMBERS == Numbers::BFLOAT16)
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(SUMS), "n"(ROWS), "n"(WEIGHTS));
  else if constexpr (NUMBERS == Numbers::UNSIGNED_WEIGHTS)
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(SUMS), "n"(ROWS), "n"(WEIGHTS));
  else
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(SUMS), "n"(ROWS), "n"(WEIGHTS));
}

// Tile configuration of a thread. It is kept between panels, as setting it takes as long as three steps. The destructor releases the tiles:
// other functions may use them, and the system saves tiles in use at every context switch.
class TileShape {
 public:
  TileShape() = default;
  TileShape(const TileShape&) = delete;
  ~TileShape() {
    if (rows) asm volatile("tilerelease");
  }

  // Configures tiles for up to 32 rows times 32 outputs, with `bytes` bytes of each row per step. Tiles 0 and 1 are sums of the first 16
  // rows, 2 and 3 of the others, 4 and 5 rows, 6 and 7 weights.
  void set(int num_rows, int row_bytes) {
    if (num_rows == rows && row_bytes == bytes) return;
    rows = num_rows, bytes = row_bytes;
    struct {
      uint8_t palette, begin, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } shape{};
    shape.palette = 1;
    auto tile = [&](int number, int tile_rows, int tile_bytes) {
      shape.rows[number] = uint8_t(tile_rows), shape.row_bytes[number] = uint16_t(tile_rows ? tile_bytes : 0);
    };
    int first = std::min(rows, WIDTH), second = rows - first;
    for (int number : {0, 1}) {
      tile(number, first, TILE_BYTES), tile(2 + number, second, TILE_BYTES), tile(6 + number, bytes / 4, TILE_BYTES);
      tile(4 + number, number ? second : first, bytes);
    }
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }

 private:
  int rows = 0, bytes = 0;
};

inline void clear_sums(bool has_second) {
  clear_tile<0>(), clear_tile<1>();
  if (has_second) clear_tile<2>(), clear_tile<3>();
}

// Loads the sums of up to 32 rows from `out`, whose rows are `stride` bytes apart.
inline void load_sums(bool has_second, const void* out, int64_t stride) {
  const char *from = (const char*)out, *below = from + WIDTH * stride;
  load_tile<0>(from, stride), load_tile<1>(from + TILE_BYTES, stride);
  if (has_second) load_tile<2>(below, stride), load_tile<3>(below + TILE_BYTES, stride);
}

// Stores the sums of up to 32 rows to `out`, whose rows are `stride` bytes apart.
inline void store_sums(bool has_second, void* out, int64_t stride) {
  char *to = (char*)out, *below = to + WIDTH * stride;
  store_tile<0>(to, stride), store_tile<1>(to + TILE_BYTES, stride);
  if (has_second) store_tile<2>(below, stride), store_tile<3>(below + TILE_BYTES, stride);
}

// Adds the product of one step of rows (`stride` bytes apart) and two tiles of weights (rows `apart` bytes apart) to the sums.
template <Numbers NUMBERS>
inline void add_step(bool has_second, const char* x, int64_t stride, const char* first, const char* second, int64_t apart) {
  load_tile<6>(first, apart), load_tile<4>(x, stride);
  add_product<NUMBERS, 0, 4, 6>();
  load_tile<7>(second, apart);
  add_product<NUMBERS, 1, 4, 7>();
  if (!has_second) return;
  load_tile<5>(x + WIDTH * stride, stride);
  add_product<NUMBERS, 2, 5, 6>();
  add_product<NUMBERS, 3, 5, 7>();
}

constexpr int64_t STEP_BYTES = TILE_BYTES / 4 * PANEL * 4;  // bytes of a panel that a step reads

// Zero-padded copies of the ends of rows and of a panel that do not fill a step.
struct LastStep {
  alignas(64) char rows[TILE_ROWS * TILE_BYTES], weights[STEP_BYTES];

  void take_weights(const char* panel, int64_t bytes) {
    std::memcpy(weights, panel, bytes * PANEL);
    std::memset(weights + bytes * PANEL, 0, STEP_BYTES - bytes * PANEL);
  }

  void take_rows(const char* x, int64_t stride, int count, int64_t bytes) {
    std::memset(rows, 0, sizeof(rows));
    for (int row = 0; row < count; ++row) std::memcpy(rows + row * TILE_BYTES, x + row * stride, bytes);
  }
};

// Bytes of each row that are multiplied before moving to other rows: this part of a panel stays in the first-level cache, for which a step
// would otherwise wait.
constexpr int64_t NEAR_BYTES = 8 * TILE_BYTES;

// Panel in memory in tile layout. Panels of other formats are decoded into memory during the product.
struct PanelInMemory {
  const char* data;
  const Stream& stream;

  // Called before the panel's bytes up to `end` of each row are read for the first time.
  void ready(int64_t) const {}

  // Address of the bytes of the panel that a step reads, from byte `from` of each row on.
  const char* step(int64_t from) const { return data + from * PANEL; }

  // Lines to prefetch with a step, and the address of the first. With many rows there is much time between two steps of a panel:
  // prefetched lines are read once all rows have been multiplied with the near bytes.
  int64_t lines() const { return stream.is_near ? 0 : STEP_BYTES / 64; }
  const char* ahead(int64_t from, bool many_rows) const {
    return stream.ahead(data + from * PANEL + (many_rows ? NEAR_BYTES * PANEL - AHEAD : 0));
  }
};

// Multiplies rows of `bytes` bytes, `stride` bytes apart, with one panel. Calls done(row, count, sums) with float32 or int32 sums of
// `count` rows from `row` on. `memory` has room for the sums of all rows; if a whole panel is near, all rows reuse the first part.
// Prefetches are spread over the rows, because a processor stalls when it prefetches more lines at once than it has fill buffers.
template <Numbers NUMBERS, typename Source, typename Done>
void multiply_tiles(TileShape& shape, int rows, const char* x, int64_t stride, Source&& source, int64_t bytes, char* memory, Done done) {
  constexpr int64_t OUT = PANEL * 4;
  int64_t whole = bytes / TILE_BYTES * TILE_BYTES, rest = bytes - whole, apart = whole > NEAR_BYTES ? OUT : 0;
  int even = rows / TILE_ROWS * TILE_ROWS, blocks = std::max(1, even / TILE_ROWS);
  LastStep last;
  auto multiply = [&](int row, int count, int64_t begin, int64_t end) {
    bool has_second = count > WIDTH;
    const char* at = x + row * stride;
    char* sums = memory + row * apart;
    int64_t lines = source.lines(), first_line = lines * (row / TILE_ROWS) / blocks;
    int64_t end_line = std::min(lines, lines * (row / TILE_ROWS + 1) / blocks);
    if (begin) load_sums(has_second, sums, OUT);
    else clear_sums(has_second);
    for (int64_t from = begin; from < end; from += TILE_BYTES) {
      if (row == 0) source.ready(from + TILE_BYTES);
      const char* weights = source.step(from);
      add_step<NUMBERS>(has_second, at + from, stride, weights, weights + TILE_BYTES, OUT);
      const char* ahead = source.ahead(from, blocks > 1);
      for (int64_t line = first_line; line < end_line; ++line) __builtin_prefetch(ahead + line * 64, 0, 2);
    }
    if (rest && end == whole) {
      if (row == 0) source.ready(bytes), last.take_weights(source.step(whole), rest);
      last.take_rows(at + whole, stride, count, rest);
      add_step<NUMBERS>(has_second, last.rows, TILE_BYTES, last.weights, last.weights + TILE_BYTES, OUT);
    }
    store_sums(has_second, sums, OUT);
    if (end == whole) done(row, count, sums);
  };
  if (even) shape.set(TILE_ROWS, TILE_BYTES);
  for (int64_t begin = 0; even && (begin < whole || begin == 0); begin += NEAR_BYTES)
    for (int row = 0; row < even; row += TILE_ROWS) multiply(row, TILE_ROWS, begin, std::min(whole, begin + NEAR_BYTES));
  if (rows > even) {
    shape.set(rows - even, TILE_BYTES);
    multiply(even, rows - even, 0, whole);
  }
}

// AMX kernel for bfloat16; see panel.h.
struct Amx {
  using Input = bf16;
  using Stored = bf16;
  using Activation = bf16;
  static constexpr int ROWS = 512, STEP = 2, FEW = 0;

  template <typename Done>
  static void panel(TileShape& shape, int rows, const bf16* x, int64_t stride, const bf16* weight, int64_t pairs, float* memory,
                    const Stream& stream, Done done) {
    panel(shape, rows, x, stride, PanelInMemory{(const char*)weight, stream}, pairs, memory, done);
  }

  // Product with a panel that is decoded into memory meanwhile.
  template <typename Source, typename Done>
  static void panel(TileShape& shape, int rows, const bf16* x, int64_t stride, Source&& source, int64_t pairs, float* memory, Done done) {
    multiply_tiles<Numbers::BFLOAT16>(shape, rows, (const char*)x, 2 * stride, source, 4 * pairs, (char*)memory,
                                      [&](int row, int count, const char* sums) { done(row, count, FloatSums{(const float*)sums}); });
  }
};

template <>
constexpr bool IN_TILES<Amx> = true;
template <>
struct PanelState<Amx> : TileShape {};

}  // namespace
#endif
