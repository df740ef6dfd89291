// The Mamba-2 mixer (Dao & Gu 2024, arXiv:2405.21060): the scan of its states, and its gated norm. delta_rule.cpp has its convolution.
// Tiles of a state stay in registers for a block of tokens. Every number of the state, and every sum of an output, passes through the
// same operations in the same order for any number of tokens.
#include <vector>

#include "recurrence.h"
#include "replay.h"
#include "thread_pool.h"

namespace {

constexpr int TOKENS = WIDTH;                     // tokens of a block
constexpr int COLUMNS = 4, ROWS = REGISTERS / 8;  // registers of a tile of the state: half of all
constexpr int64_t PIECE = COLUMNS * LANES;        // columns of a tile
constexpr int64_t PIECES_PER_THREAD = 4;          // work items below which heads are split by columns

// Arguments of a call that all heads share.
template <typename T>
struct Scan {
  const T *xbc, *dt;
  int64_t dt_stride;
  const float *rate, *bias, *skip;
  const int64_t* groups;
  float min_dt, max_dt;
  float* state;
  T* out;
  int64_t heads, num_groups, state_size, head_size;

  int64_t columns() const { return heads * head_size + 2 * num_groups * state_size; }  // columns of xbc
};

struct Item {
  int64_t sequence, head, first, size;  // columns of the head's state
};

// A head's inputs of a block of tokens in float32, and its outputs. Rows of b and c lie apart by no power of two.
struct Block {
  int64_t tokens, width, row;
  float decay[TOKENS];
  LineVector<float> x, b, c, out;  // x is multiplied by dt

  void resize(int64_t columns, int64_t state_size) {
    width = up_to(columns, LANES), row = up_to(state_size, WIDTH) + WIDTH;
    x.assign(TOKENS * width, 0.0f), out.assign(TOKENS * width, 0.0f);
    b.resize(TOKENS * row), c.resize(TOKENS * row);
  }
};

// Runs the block's tokens on a tile: R rows of the state from `n` on, and C registers of columns from `column` on.
template <int R, int C>
void advance(Block& block, float* state, int64_t stride, int64_t n, int64_t column) {
  lanes tile[R][C];
  float* at = state + n * stride + column;
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i) {
      const float* from = at + r * stride + i * LANES;
      __builtin_prefetch((const char*)from + AHEAD);
      tile[r][i] = load<lanes>(from);
    }
  for (int64_t t = 0; t < block.tokens; ++t) {
    const float *b = block.b.data() + t * block.row + n, *c = block.c.data() + t * block.row + n;
    const float* x = block.x.data() + t * block.width + column;
    float* out = block.out.data() + t * block.width + column;
    const lanes decay = block.decay[t] - lanes{};
    lanes sums[C];
    for (int i = 0; i < C; ++i) sums[i] = load<lanes>(out + i * LANES);
    for (int r = 0; r < R; ++r) {
      const lanes in = b[r] - lanes{}, read = c[r] - lanes{};
      for (int i = 0; i < C; ++i) {
        tile[r][i] = multiply_add(in, load<lanes>(x + i * LANES), decay * tile[r][i]);
        sums[i] = multiply_add(read, tile[r][i], sums[i]);
      }
    }
    for (int i = 0; i < C; ++i) store(out + i * LANES, sums[i]);
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i) store(at + r * stride + i * LANES, tile[r][i]);
}

template <int R>
void advance_rows(Block& block, float* state, int64_t stride, int64_t n) {
  int64_t column = 0;
  for (; column + PIECE <= block.width; column += PIECE) advance<R, COLUMNS>(block, state, stride, n, column);
  for (; column < block.width; column += LANES) advance<R, 1>(block, state, stride, n, column);
}

template <typename T>
void widen_row(const T* from, int64_t size, float* to) {
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) store(to + i, load_floats(from + i));
  for (; i < size; ++i) to[i] = as_float(from[i]);
}

// Reads a block's tokens from row `first` on, and begins their outputs with D x.
template <typename T>
void read_block(const Scan<T>& scan, const Item& item, int64_t first, Block& block) {
  float raw[TOKENS] = {}, steps[TOKENS];
  for (int64_t t = 0; t < block.tokens; ++t) raw[t] = as_float(scan.dt[(first + t) * scan.dt_stride + item.head]);
  floats dt = precise_softplus(load<floats>(raw) + scan.bias[item.head]);
  dt = smaller(same(scan.max_dt), larger(same(scan.min_dt), dt));
  store(steps, dt), store(block.decay, precise_exponential(dt * -scan.rate[item.head]));
  const float skip = scan.skip[item.head];
  for (int64_t t = 0; t < block.tokens; ++t) {
    const T* row = scan.xbc + (first + t) * scan.columns();
    const T* b = row + scan.heads * scan.head_size + scan.groups[item.head] * scan.state_size;
    widen_row(b, scan.state_size, block.b.data() + t * block.row);
    widen_row(b + scan.num_groups * scan.state_size, scan.state_size, block.c.data() + t * block.row);
    const T* from = row + item.head * scan.head_size + item.first;
    float *x = block.x.data() + t * block.width, *out = block.out.data() + t * block.width;
    widen_row(from, item.size, x);
    int64_t i = 0;
    for (; i + LANES <= block.width; i += LANES) {
      lanes value = load<lanes>(x + i);
      store(out + i, skip * value), store(x + i, steps[t] * value);
    }
  }
}

template <typename T>
void write_block(const Scan<T>& scan, const Item& item, int64_t first, const Block& block) {
  for (int64_t t = 0; t < block.tokens; ++t) {
    const float* from = block.out.data() + t * block.width;
    T* to = scan.out + ((first + t) * scan.heads + item.head) * scan.head_size + item.first;
    int64_t i = 0;
    for (; i + WIDTH <= item.size; i += WIDTH) store_floats(to + i, load<floats>(from + i));
    for (; i < item.size; ++i) set(to[i], from[i]);
  }
}

template <typename T>
void run_item(const Scan<T>& scan, const Item& item, int64_t row, int64_t tokens, float* state, int64_t stride,
              Block& block) {
  for (int64_t done = 0; done < tokens; done += TOKENS) {
    block.tokens = std::min<int64_t>(TOKENS, tokens - done);
    read_block(scan, item, row + done, block);
    int64_t n = 0;
    for (; n + ROWS <= scan.state_size; n += ROWS) advance_rows<ROWS>(block, state, stride, n);
    for (; n < scan.state_size; ++n) advance_rows<1>(block, state, stride, n);
    write_block(scan, item, row + done, block);
  }
}

template <typename T>
void scan_states(const Scan<T>& scan, const Sequences& all, int threads) {
  int64_t size = all.count * scan.heads < PIECES_PER_THREAD * threads ? PIECE : scan.head_size;
  std::vector<Item> items;
  for (int64_t b = 0; b < all.count; ++b)
    for (int64_t head = 0; head < scan.heads; ++head)
      for (int64_t first = 0; first < scan.head_size; first += size)
        items.push_back({b, head, first, std::min(size, scan.head_size - first)});
  for_each(threads, items.size(), [&](int64_t index) {
    static thread_local Block block;
    static thread_local LineVector<float> copy;
    const Item& item = items[index];
    int64_t row = all.row_ptr[item.sequence], tokens = all.tokens(item.sequence), stride = scan.head_size;
    float* state = scan.state + (all.slots[item.sequence] * scan.heads + item.head) * scan.state_size * stride;
    state += item.first;
    if (all.is_new(item.sequence))
      for (int64_t n = 0; n < scan.state_size; ++n) std::fill_n(state + n * stride, item.size, 0.0f);
    block.resize(item.size, scan.state_size);
    if (block.width == item.size) return run_item(scan, item, row, tokens, state, stride, block);
    copy.assign(scan.state_size * block.width, 0.0f);  // columns that do not fill registers
    for (int64_t n = 0; n < scan.state_size; ++n) std::copy_n(state + n * stride, item.size, &copy[n * block.width]);
    run_item(scan, item, row, tokens, copy.data(), block.width, block);
    for (int64_t n = 0; n < scan.state_size; ++n) std::copy_n(&copy[n * block.width], item.size, state + n * stride);
  });
}

// Gated norm: out = x * silu(gate), normalized over each group of channels, times weight. Shapes: x and out (tokens, groups, size), weight
// (groups, size), gate (tokens, stride), of whose rows the first groups * size numbers are read.
template <typename T>
void gate_and_norm(const T* x, const T* gate, int64_t stride, const T* weight, T* out, int64_t tokens, int64_t groups,
                   int64_t size, float eps, int threads) {
  for_each(threads, tokens * groups, [&](int64_t item) {
    static thread_local LineVector<float> gated;
    gated.resize(size);
    int64_t token = item / groups, first = item % groups * size;
    const T *from = x + item * size, *by = gate + token * stride + first, *factors = weight + first;
    T* to = out + item * size;
    floats squares{};
    float rest = 0;
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) {
      floats value = load_floats(from + i) * silu(load_floats(by + i));
      squares += value * value;
      store(&gated[i], value);
    }
    for (; i < size; ++i) gated[i] = as_float(from[i]) * silu(as_float(by[i])), rest += gated[i] * gated[i];
    float scale = 1.0f / std::sqrt((sum(squares) + rest) / size + eps);
    for (i = 0; i + WIDTH <= size; i += WIDTH)
      store_floats(to + i, load<floats>(&gated[i]) * scale * load_floats(factors + i));
    for (; i < size; ++i) set(to[i], gated[i] * scale * as_float(factors[i]));
  });
}

}  // namespace

// C functions for ctypes; mamba.py passes contiguous tensors of matching sizes.
extern "C" {

#define OF_TYPE(T, NAME)                                                                                               \
  void selective_scan_##NAME(const T* xbc, const T* dt, const float* rate, const float* bias, const float* skip,       \
                             const int64_t* groups, float* state, const int64_t* row_ptr,                              \
                             const int64_t* context_lens, const int64_t* slots, T* out, int64_t dt_stride,             \
                             int64_t sequences, int64_t heads, int64_t num_groups, int64_t state_size,                 \
                             int64_t head_size, float min_dt, float max_dt, int threads) {                             \
    Scan<T> scan{xbc,    dt,     dt_stride, rate, bias,  skip,       groups,     min_dt,                               \
                 max_dt, state,  out,       heads, num_groups, state_size, head_size};                                 \
    scan_states(scan, {row_ptr, context_lens, slots, sequences}, threads);                                             \
  }                                                                                                                    \
  void gated_group_norm_##NAME(const T* x, const T* gate, const T* weight, T* out, int64_t stride, int64_t tokens,     \
                               int64_t groups, int64_t size, float eps, int threads) {                                 \
    gate_and_norm(x, gate, stride, weight, out, tokens, groups, size, eps, threads);                                   \
  }                                                                                                                    \
  REPLAYABLE(selective_scan_##NAME)                                                                                    \
  REPLAYABLE(gated_group_norm_##NAME)
OF_TYPE(bf16, bfloat16)
OF_TYPE(float, float32)
OF_TYPE(half, float16)
#undef OF_TYPE

}  // extern "C"
