// Attention over a paged KV cache, for one query token of a sequence or many.
#include <vector>

#include "attention_tiles.h"
#include "replay.h"
#include "thread_pool.h"
#include "wide_panel.h"

namespace {

constexpr int64_t AHEAD_EACH = UNITS / 2;  // units prefetched per KV head in tiles of several KV heads
constexpr float LOG2_E = 1.44269504f;

// Scratch memory of a thread, reused between calls.
template <typename Kernel>
struct Scratch {
  UnitMemory<typename Kernel::Element> units[MOST_TOGETHER];
  LineVector<typename Kernel::Input> query, weights;
  LineVector<float> total, part, scores, panels;
};

// Maximum score of the visible keys `from` to `to` of one row, times `scale`. Scores of hidden keys in the same vectors become -infinity.
inline float find_top(float* score, int64_t from, int64_t to, float scale, const float* key_scales) {
  if (from >= to) return -INFINITY;
  int64_t begin = from / WIDTH * WIDTH, seen = up_to(to, WIDTH), key = begin;
  floats peaks[4] = {same(-INFINITY), same(-INFINITY), same(-INFINITY), same(-INFINITY)};  // four independent chains hide the latency
  if (key_scales)
    for (int64_t key = begin; key < seen; key += WIDTH)
      store(score + key, load<floats>(score + key) * load<floats>(key_scales + key));
  for (int64_t key = begin; key < from; ++key) score[key] = -INFINITY;
  for (int64_t key = to; key < seen; ++key) score[key] = -INFINITY;
  for (; key + 4 * WIDTH <= seen; key += 4 * WIDTH)
    for (int i = 0; i < 4; ++i) peaks[i] = larger(load<floats>(score + key + i * WIDTH), peaks[i]);
  for (; key < seen; key += WIDTH) peaks[0] = larger(load<floats>(score + key), peaks[0]);
  return largest(larger(larger(peaks[1], peaks[0]), larger(peaks[3], peaks[2]))) * scale;
}

// Soft cap of one row's scores, cap * tanh(score * scale / cap), for the vectors of the keys `from` to `to` (Gemma 2, arXiv:2408.00118).
inline void cap_scores(float* score, int64_t from, int64_t to, float scale, float cap, const float* key_scales) {
  for (int64_t key = from / WIDTH * WIDTH; key < up_to(to, WIDTH); key += WIDTH) {
    floats value = load<floats>(score + key) * (scale / cap);
    if (key_scales) value *= load<floats>(key_scales + key);
    store(score + key, cap * exact_tanh(value));
  }
}

// Softmax of one row of scores (Milakov & Gimelshein 2018, arXiv:1805.02867) in powers of two, relative to its maximum score (top). Returns
// the sum of its weights. Only keys from `from` to `to` are visible; the others from `first` up to `width` get weight 0.
template <typename Kernel>
float soften(const float* score, typename Kernel::Input* weight, int64_t first, int64_t width, int64_t from, int64_t to, float scale,
             float top, const float* value_scales) {
  using Input = typename Kernel::Input;
  int64_t begin = from / WIDTH * WIDTH, seen = up_to(to, WIDTH);
  if (top == -INFINITY) begin = seen = first;
  if (first < begin) std::fill_n(weight + first, begin - first, Input(0));
  floats sum_here{};
  for (int64_t key = begin; key < seen; key += WIDTH) {
    floats value = Kernel::power_of_two(load<floats>(score + key) * scale - top);
    sum_here += value;
    if (value_scales) value *= load<floats>(value_scales + key);
    store_floats(weight + key, value);
  }
  if (seen < width) std::fill_n(weight + seen, width - seen, Input(0));
  return begin < seen ? sum(sum_here) : 0.0f;
}

// Merges a span's partial softmax result into the sum of earlier spans. Not inlined, so that it rounds identically everywhere.
__attribute__((noinline)) void join(float* total, float& top, float& mass, const float* part, float part_top,
                                    float part_mass, int64_t width) {
  if (part_top == -INFINITY) return;
  if (top == -INFINITY) {  // first span
    std::memcpy(total, part, width * sizeof(float));
    top = part_top, mass = part_mass;
    return;
  }
  bool grows = part_top > top;
  float factor = std::exp2(grows ? top - part_top : part_top - top);
  float mine = grows ? factor : 1.0f, its = grows ? 1.0f : factor;
  for (int64_t i = 0; i < width; i += WIDTH)
    store(total + i, load<floats>(total + i) * mine + load<floats>(part + i) * its);
  mass = mass * mine + part_mass * its;
  top = grows ? part_top : top;
}

inline void copy_pair(bf16* to, const bf16* from) { std::memcpy(to, from, 2 * sizeof(bf16)); }
template <typename To, typename From>
inline void copy_pair(To* to, const From* from) {
  set(to[0], as_float(from[0])), set(to[1], as_float(from[1]));
}

// Packs a tile's queries of a KV head, for passes of `at_once` rows.
template <typename Kernel>
void pack_query(const Batch& batch, const Tile& tile, int64_t kv, int64_t at_once, typename Kernel::Input* query) {
  int64_t group = batch.group(kv), rows = tile.count * group, token = batch.row_ptr[tile.sequence] + tile.first;
  int64_t size = batch.size;
  with_dtype(batch.dtype, (void*)batch.q, [&](auto* q) {
    for (int64_t row = 0; row < rows; ++row) {
      int64_t pass = row / at_once * at_once, some = std::min(at_once, rows - pass), i = 0;
      auto* from = q + ((token + row / group) * batch.heads + batch.head_ptr[kv] + row % group) * size;
      typename Kernel::Input* to = query + (IN_TILES<Kernel> ? row * batch.even_size() : pass * batch.even_size() + (row - pass) * 2);
      for (; i + 2 <= size; i += 2, to += IN_TILES<Kernel> ? 2 : 2 * some) copy_pair(to, from + i);
      if (i < size) set(to[0], as_float(from[i])), to[1] = 0;
    }
  });
}

// Scores (rows, SPAN) = queries times `units` units of keys, while the units at `soon` are prefetched.
template <typename Kernel>
void multiply_keys(PanelState<Kernel>& state, int rows, const typename Kernel::Input* query, int64_t size,
                   const typename Kernel::Element* const* keys, int64_t units, const typename Kernel::Element* const* soon, float* scores) {
  if constexpr (IN_TILES<Kernel>) {
    Kernel::multiply_keys(state, rows, query, size, keys, units, scores);
  } else {
    bool few = rows <= Kernel::FEW;
    Multiply<Kernel> multiply = few ? straight_of<Kernel, Rows::QUERIES, 1>(rows) : multiply_of<Kernel, Rows::QUERIES>(rows);
    for (int64_t unit = 0; unit < units; unit += few ? 1 : 2)
      multiply(query, {keys + unit, keys + unit + 1, soon + unit, soon + unit + 1, 0, 0, size / 2, size / 2, 2 * UNIT}, scores + unit * UNIT, SPAN);
  }
}

// out (rows, out_size) = weights (rows, SPAN) times `units` units of a span's values.
template <typename Kernel>
void multiply_values(PanelState<Kernel>& state, int rows, const typename Kernel::Input* weights, const Span<typename Kernel::Element>& span,
                     int64_t units, const typename Kernel::Element* const* soon, float* out, int64_t out_size) {
  const typename Kernel::Element* const* values = span.values();
  int64_t width = span.width;
  if constexpr (IN_TILES<Kernel>) {
    Kernel::multiply_values(state, rows, weights, values[0], units, width, out, out_size);
  } else {
    int64_t pairs = units * UNIT / 2, i = 0;
    if (rows <= Kernel::FEW)
      for (; i + 4 * UNIT <= width; i += 4 * UNIT)
        straight_of<Kernel, Rows::WEIGHTS, 4>(rows)(weights, {values, nullptr, soon, nullptr, 2 * i, 0, pairs, UNIT / 2, 2 * width}, out + i, out_size);
    for (; i < width; i += PANEL) {
      int64_t second = i + WIDTH < width ? i + WIDTH : i;
      multiply_of<Kernel, Rows::WEIGHTS>(rows)(weights, {values, values, soon, soon, 2 * i, 2 * second, pairs, UNIT / 2, 2 * width}, out + i, out_size);
    }
  }
}

// Softmax of a head's rows over the keys begin ... end of a span, with the causal mask. Sets the weights of keys `first` to `width`.
template <typename Kernel>
void soften_rows(const Batch& batch, const Tile& tile, int64_t kv, int64_t row, int rows, int64_t begin, int64_t end, int64_t first,
                 int64_t width, const Span<typename Kernel::Element>& span, float* scores, typename Kernel::Input* weights, float* top,
                 float* mass) {
  int64_t from[Kernel::ROWS], to[Kernel::ROWS], group = batch.group(kv);
  float scale = (batch.cap ? 1.0f : batch.scale) * LOG2_E;
  const float* key_scales = batch.has_scales() ? span.key_scales : nullptr;
  // All maxima first: the latency of one is hidden by the others.
  for (int r = 0; r < rows; ++r) {
    int64_t own = batch.position(tile) + (row + r) / group - begin;  // last visible key, relative to begin
    from[r] = batch.window ? std::max<int64_t>(0, own - batch.window + 1) : 0, to[r] = std::min(end - begin, own + 1);
    if (batch.cap && from[r] < to[r]) cap_scores(scores + r * SPAN, from[r], to[r], batch.scale, batch.cap, key_scales);
    top[r] = find_top(scores + r * SPAN, from[r], to[r], scale, batch.cap ? nullptr : key_scales);
  }
  for (int r = 0; r < rows; ++r)
    mass[r] = soften<Kernel>(scores + r * SPAN, weights + r * SPAN, first, width, from[r], to[r], scale, top[r],
                             batch.has_scales() ? span.value_scales : nullptr);
}

// Computes each span of a tile with one KV head. Calls take(span, row, sums, top, mass) with each row's weighted sum of values, maximum
// score and sum of weights.
template <typename Kernel, typename Take>
void run_alone(const Batch& batch, const Tile& tile, Scratch<Kernel>& scratch, Take take) {
  using Input = typename Kernel::Input;
  int64_t size = batch.even_size(), width = batch.width(), group = batch.group(tile.kv), rows = tile.count * group;
  int64_t at_once = pass_rows<Kernel>(rows);
  // The second pass over a span reads it from the second-level cache and prefetches the next span, if both fit.
  bool looks_further = !IN_TILES<Kernel> && at_once < rows && 2 * SPAN * (size + width) * int64_t(sizeof(typename Kernel::Element)) < CACHE;
  Input *query = room(scratch.query, rows * size), *weights = room(scratch.weights, Kernel::ROWS * SPAN);
  float *scores = room(scratch.scores, Kernel::ROWS * SPAN), *part = room(scratch.part, Kernel::ROWS * width);
  float top[Kernel::ROWS], mass[Kernel::ROWS];
  Span<typename Kernel::Element> span;
  PanelState<Kernel> state;
  pack_query<Kernel>(batch, tile, tile.kv, at_once, query);
  for (int64_t index = tile.first_span; index < tile.end_span; ++index) {
    int64_t begin = tile.first_key(index), end = tile.end_key(index);
    span.find(batch, tile, tile.kv, begin, end, IN_TILES<Kernel>, looks_further, scratch.units[0]);
    for (int64_t row = 0; row < rows; row += at_once) {
      int some = int(std::min(at_once, rows - row));
      bool further = looks_further && row == at_once;
      int64_t seen = batch.position(tile) + (row + some - 1) / group + 1 - begin;  // keys visible to the last of these rows
      int64_t units = std::min(span.count, up_to(std::max<int64_t>(0, seen), UNIT) / UNIT);
      multiply_keys<Kernel>(state, some, query + row * size, size, span.keys(), units, span.soon_keys(further), scores);
      soften_rows<Kernel>(batch, tile, tile.kv, row, some, begin, end, 0, up_to(units, 2) * UNIT, span, scores, weights, top, mass);
      multiply_values<Kernel>(state, some, weights, span, units, span.soon_values(further), part, width);
      for (int r = 0; r < some; ++r) take(index, row + r, part + r * width, top[r], mass[r]);
    }
  }
}

// Computes each span of a tile with several KV heads that have few rows each. Their units of a block share a memory page, which is
// prefetched in address order, because the hardware prefetcher works within a page that is read in full.
template <typename Kernel, typename Take>
void run_together(const Batch& batch, const Tile& tile, Scratch<Kernel>& scratch, Take take) {
  using Element = typename Kernel::Element;
  int64_t size = batch.size, width = batch.width(), heads = tile.kv_heads;
  auto* query = room(scratch.query, heads * Kernel::FEW * size);
  auto* weights = room(scratch.weights, heads * Kernel::FEW * SPAN);
  float *scores = room(scratch.scores, heads * Kernel::FEW * SPAN), *part = room(scratch.part, Kernel::FEW * width);
  float top[MOST_TOGETHER][Kernel::FEW], mass[MOST_TOGETHER][Kernel::FEW];
  Span<Element> spans[MOST_TOGETHER];
  const Element* order[(2 * UNITS + AHEAD_EACH) * MOST_TOGETHER];  // addresses of keys, of values, and of the next span's first keys
  PanelState<Kernel> state;
  auto rows = [&](int64_t head) { return int(tile.count * batch.group(tile.kv + head)); };
  for (int64_t head = 0; head < heads; ++head)
    pack_query<Kernel>(batch, tile, tile.kv + head, Kernel::FEW, query + head * Kernel::FEW * size);
  for (int64_t index = tile.first_span; index < tile.end_span; ++index) {
    int64_t begin = tile.first_key(index), end = tile.end_key(index);
    int64_t count = up_to(end - begin, UNIT) / UNIT, last = (tile.end - 1) / UNIT;
    for (int64_t head = 0; head < heads; ++head) {
      spans[head].find(batch, tile, tile.kv + head, begin, end, false, false, scratch.units[head]);
      const Element** to = order + head;
      for (int64_t i = 0; i < count; ++i, to += heads) *to = spans[head].keys()[i], to[count * heads] = spans[head].values()[i];
      to += count * heads;
      Units<Element> keys{batch, batch.keys, tile, tile.kv + head};
      for (int64_t i = 0; i < AHEAD_EACH; ++i, to += heads) *to = keys.in_place(std::min(last, begin / UNIT + count + i));
    }
    const Element* const* soon = order + heads * AHEAD_EACH;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t head = 0; head < heads; ++head, ++soon)
        multiply_keys<Kernel>(state, rows(head), query + head * Kernel::FEW * size, size, spans[head].keys() + i, 1, soon,
                              scores + head * Kernel::FEW * SPAN + i * UNIT);
    for (int64_t head = 0; head < heads; ++head)
      soften_rows<Kernel>(batch, tile, tile.kv + head, 0, rows(head), begin, end, 0, up_to(count, 2) * UNIT, spans[head],
                          scores + head * Kernel::FEW * SPAN, weights + head * Kernel::FEW * SPAN, top[head], mass[head]);
    for (int64_t head = 0; head < heads; ++head, soon += count) {
      multiply_values<Kernel>(state, rows(head), weights + head * Kernel::FEW * SPAN, spans[head], count, soon, part, width);
      int64_t first = tile.count * batch.group(tile.kv, head);
      for (int r = 0; r < rows(head); ++r) take(index, first + r, part + r * width, top[head][r], mass[head][r]);
    }
  }
}

// Computes each span of a tile with many rows of one KV head. The span's keys and values are converted to float32 once for all rows.
template <typename Take>
void run_wide(const Batch& batch, const Tile& tile, Scratch<FmaUnits>& scratch, Take take) {
  constexpr int64_t ROWS = WidePanel::ROWS, COLUMNS = WidePanel::COLUMNS;
  int64_t size = batch.even_size(), width = batch.width(), group = batch.group(tile.kv), rows = tile.count * group;
  float *query = room(scratch.query, rows * size), *scores = room(scratch.scores, ROWS * SPAN), *part = room(scratch.part, ROWS * width);
  float *keys = room(scratch.panels, SPAN * (size + up_to(width, COLUMNS))), *values = keys + SPAN * size;
  float top[ROWS], mass[ROWS];
  Span<bf16> span;
  pack_query<FmaUnits>(batch, tile, tile.kv, ROWS, query);
  for (int64_t index = tile.first_span; index < tile.end_span; ++index) {
    int64_t begin = tile.first_key(index), end = tile.end_key(index), position = batch.position(tile) - begin;
    span.find(batch, tile, tile.kv, begin, end, false, false, scratch.units[0]);
    for (int64_t unit = 0; unit < span.count; unit += COLUMNS / UNIT)
      WidePanel::convert([&](int64_t i) { return span.keys()[unit + i]; }, span.count - unit, size / 2, 2 * UNIT, keys + unit * UNIT * size);
    for (int64_t unit = 0; unit < span.count; ++unit)
      for (int64_t column = 0; column < width; column += COLUMNS)
        WidePanel::convert([&](int64_t i) { return span.values()[unit] + 2 * (column + i * UNIT); }, (span.width - column) / UNIT, UNIT / 2,
                           2 * span.width, values + column * SPAN + unit * UNIT * COLUMNS);
    for (int64_t row = 0; row < rows; row += ROWS) {
      int some = int(std::min(ROWS, rows - row));
      // Range of keys that some of the rows see, counted from `begin`; it begins at a unit's first key.
      int64_t to = std::clamp<int64_t>(position + (row + some - 1) / group + 1, 0, end - begin), from = 0;
      if (batch.window) from = std::clamp<int64_t>(position + row / group - batch.window + 1, 0, to) / UNIT * UNIT;
      for (int64_t key = from, next; key < to; key = next) {
        int64_t panel = key / COLUMNS * COLUMNS;
        next = panel + COLUMNS;
        WidePanel::multiply_of<Rows::QUERIES>(some, std::min(next, to) - key)(query + row * size, keys + panel * size + (key - panel), size / 2,
                                                                              scores + key, SPAN);
      }
      soften_rows<FmaUnits>(batch, tile, tile.kv, row, some, begin, end, from, up_to(to, 2), span, scores, scores, top, mass);
      for (int64_t column = 0; column < width; column += COLUMNS)
        WidePanel::multiply_of<Rows::WEIGHTS>(some, std::min(COLUMNS, span.width - column))(
            scores + from, values + column * SPAN + from * COLUMNS, (to - from + 1) / 2, part + column, width);
      for (int r = 0; r < some; ++r) take(index, row + r, part + r * width, top[r], mass[r]);
    }
  }
}

template <typename Kernel, typename Take>
void run(const Batch& batch, const Tile& tile, Scratch<Kernel>& scratch, Take take) {
  if constexpr (Kernel::FEW > 0)
    if (tile.kv_heads > 1) return run_together(batch, tile, scratch, take);
  if constexpr (std::is_same_v<Kernel, FmaUnits>)
    if (batch.rows(tile) >= WidePanel::MANY) return run_wide(batch, tile, scratch, take);
  run_alone(batch, tile, scratch, take);
}

void write(const Batch& batch, const Tile& tile, int64_t row, const float* total, float top, float mass) {
  int64_t token = batch.row_ptr[tile.sequence] + tile.first, kv = tile.kv;
  for (; row >= tile.count * batch.group(kv); ++kv) row -= tile.count * batch.group(kv);
  int64_t group = batch.group(kv), head = batch.head_ptr[kv] + row % group;
  if (batch.sinks) mass += std::exp2(batch.sinks[head] * LOG2_E - top);  // may be infinite: the sink then takes all the weight
  float factor = 1.0f / mass;
  with_dtype(batch.dtype, batch.out, [&](auto* out) {
    auto* to = out + ((token + row / group) * batch.heads + head) * batch.value_size;
    int64_t i = 0;
    for (; i + WIDTH <= batch.value_size; i += WIDTH) store_floats(to + i, load<floats>(total + i) * factor);
    for (; i < batch.value_size; ++i) set(to[i], total[i] * factor);
  });
}

// Computes all spans of a tile in order, and joins them.
template <typename Kernel>
void finish(const Batch& batch, const Tile& tile, Scratch<Kernel>& scratch) {
  int64_t width = batch.width(), rows = batch.rows(tile);
  float *total = room(scratch.total, rows * (width + 2)), *top = total + rows * width, *mass = top + rows;
  std::fill_n(top, rows, -INFINITY);
  run(batch, tile, scratch, [=](int64_t, int64_t row, const float* part, float part_top, float part_mass) {
    join(total + row * width, top[row], mass[row], part, part_top, part_mass, width);
  });
  for (int64_t row = 0; row < rows; ++row) write(batch, tile, row, total + row * width, top[row], mass[row]);
}

// Computes some spans of a split tile; the thread that finishes last joins them all.
template <typename Kernel>
void finish_part(const Batch& batch, const Tile& tile, SplitTile& split, float* memory, Scratch<Kernel>& scratch) {
  int64_t width = batch.width(), rows = batch.rows(tile), stride = rows * (width + 2);
  memory += split.memory;
  run(batch, tile, scratch, [=](int64_t span, int64_t row, const float* part, float part_top, float part_mass) {
    float* to = memory + (span - split.tile.first_span) * stride;
    std::memcpy(to + row * width, part, width * sizeof(float));
    to[rows * width + row] = part_top, to[rows * width + rows + row] = part_mass;
  });
  if (__atomic_sub_fetch(&split.pending, 1, __ATOMIC_ACQ_REL)) return;
  float* total = room(scratch.total, width);
  for (int64_t row = 0; row < rows; ++row) {
    float top = -INFINITY, mass = 0.0f;
    const float* from = memory;
    for (int64_t span = split.tile.first_span; span < split.tile.end_span; ++span, from += stride)
      join(total, top, mass, from + row * width, from[rows * width + row], from[rows * width + rows + row], width);
    write(batch, tile, row, total, top, mass);
  }
}

template <typename Kernel>
void attend_all(const Batch& batch, int64_t sequences, int threads) {
  static thread_local std::vector<Tile> own_tiles;
  static thread_local std::vector<SplitTile> own_split_tiles;
  static thread_local std::vector<float> parts;
  partition(batch, sequences, heads_together<Kernel>(batch, sequences, threads), threads, own_tiles, own_split_tiles, parts);
  std::vector<Tile>& tiles = own_tiles;  // shared with the pool's threads: it is the caller's thread-local vector
  std::vector<SplitTile>& split_tiles = own_split_tiles;
  float* memory = parts.data();
  for_each(threads, tiles.size(), [&](int64_t i) {
    static thread_local Scratch<Kernel> scratch;
    if (tiles[i].split < 0) finish(batch, tiles[i], scratch);
    else finish_part(batch, tiles[i], split_tiles[tiles[i].split], memory, scratch);
  });
}

}  // namespace

// C functions for ctypes; floats.py checks shapes and dtypes before the call.
extern "C" {

// Causal attention of all sequences' new tokens, q and out (tokens, heads, size), over their KV cache (see Cache). Sequence b has the rows
// row_ptr[b] ... row_ptr[b + 1] and the blocks tables[table_ptr[b]] ...; head_ptr maps query heads to KV heads. bfloat16, also with an int8
// cache, has kernels of its own; other dtypes are multiplied in float32.
#define ATTEND(NAME, KERNEL)                                                                                             \
  void NAME(const void* q, const void* k_cache, const float* k_scales, const void* v_cache, const float* v_scales,       \
            const int64_t* tables, const int64_t* table_ptr, const int64_t* row_ptr, const int64_t* context_lens,        \
            const int64_t* head_ptr, const float* sinks, void* out, int64_t sequences, int64_t heads, int64_t kv_heads,  \
            int64_t size, int64_t block_size, int dtype, int cache_dtype, int tiled, float scale, float cap,             \
            int64_t window, int threads) {                                                                               \
    Cache keys{k_cache, k_scales, Dtype(cache_dtype)}, values{v_cache, v_scales, Dtype(cache_dtype)};                    \
    Batch batch{q, keys, values, tables, table_ptr, row_ptr, context_lens, head_ptr, out, Dtype(dtype), heads, kv_heads, \
                size, block_size, bool(tiled), scale, window, size, false, sinks, cap};                                  \
    bool is_narrow = keys.dtype == Dtype::BFLOAT16 || keys.dtype == Dtype::INT8;                                         \
    if (batch.dtype == Dtype::BFLOAT16 && is_narrow) attend_all<KERNEL>(batch, sequences, threads);                      \
    else attend_all<FloatUnits>(batch, sequences, threads);                                                              \
  }                                                                                                                      \
  REPLAYABLE(NAME)

// Latent attention: q (tokens, heads, size) over cached rows (slots, size) that are keys of all heads, and whose first `rank` elements are
// values: out (tokens, heads, rank). A row is read once for all heads of one or more tokens. Dtypes as for ATTEND.
#define ATTEND_LATENT(NAME, KERNEL)                                                                                      \
  void NAME(const void* q, const void* cache, const float* scales, const int64_t* tables, const int64_t* table_ptr,      \
            const int64_t* row_ptr, const int64_t* context_lens, void* out, int64_t sequences, int64_t heads,            \
            int64_t size, int64_t rank, int64_t block_size, int dtype, int cache_dtype, float scale, int threads) {      \
    int64_t head_ptr[] = {0, heads};                                                                                     \
    Cache rows{cache, scales, Dtype(cache_dtype)};                                                                       \
    Batch batch{q, rows, rows, tables, table_ptr, row_ptr, context_lens, head_ptr, out, Dtype(dtype), heads, 1,          \
                size, block_size, false, scale, 0, rank, true, nullptr};                                                 \
    bool is_narrow = rows.dtype == Dtype::BFLOAT16 || rows.dtype == Dtype::INT8;                                         \
    if (batch.dtype == Dtype::BFLOAT16 && is_narrow) attend_all<KERNEL>(batch, sequences, threads);                      \
    else attend_all<FloatUnits>(batch, sequences, threads);                                                              \
  }                                                                                                                      \
  REPLAYABLE(NAME)

ATTEND(attend, FmaUnits)
ATTEND_LATENT(attend_latent, FmaUnits)
#ifdef HAS_BFLOAT16_DOT
ATTEND(attend_dot, DotUnits)
ATTEND_LATENT(attend_latent_dot, DotUnits)
#endif
#ifdef HAS_AMX
ATTEND(attend_amx, AmxUnits)
ATTEND_LATENT(attend_latent_amx, AmxUnits)
#endif

}  // extern "C"
