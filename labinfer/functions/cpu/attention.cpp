// Attention over a paged KV cache, for one query token of a sequence or many: both products run through linear's panels.
#include "panel.h"
#include "replay.h"
#include "team.h"

namespace {

constexpr int64_t TILE = 256;       // query tokens whose keys and values are packed once for all
constexpr int64_t KEYS = 512;       // keys of a step of the running softmax
constexpr int64_t FEW_KEYS = 128;   // the same for so few rows that packing is most of the work: what is packed stays near
constexpr int64_t PIECE = 512;      // the fewest keys of a sequence that are worth a thread of their own
constexpr float LOG2_E = 1.44269504f;

// (slots, KV heads, size) in bfloat16, or in int8 with a scale (slots, KV heads) for each head.
struct Cache {
  const void* data;
  const float* scales;
};

// What all sequences have in common.
struct Batch {
  const bf16* q;
  Cache keys, values;
  const int64_t *tables, *table_ptr, *row_ptr, *context_lens, *head_ptr;
  bf16* out;
  int64_t heads, kv_heads, size, block_size;
  float scale;
  int64_t window;
};

// Some query tokens of a sequence, with the heads that read one KV head, and the keys that they see.
struct Tile {
  int64_t sequence, kv, first, count;   // tokens from the sequence's first new one
  int64_t begin, end;                   // keys
  int64_t piece, pieces;                // where they are dealt to several threads
};

// A thread's own memory, kept from call to call. What is multiplied with panels is of the kernel's type.
template <typename Kernel>
struct Scratch {
  std::vector<bf16> staged, keys, values;
  std::vector<typename Kernel::Input> query, weights;
  std::vector<float> total, top, mass, scores;
};

template <typename T>
T* room(std::vector<T>& memory, int64_t size) {
  if (int64_t(memory.size()) < size) memory.resize(size);
  return memory.data();
}

// 32 values: for each 32 of their numbers and each pair of keys the numbers of both one beside the other, zeros past the
// end. The same numbers of all keys stand together, so the next ones are a stride on.
void pack_values(const bf16* const* rows, int64_t size, int64_t stride, bf16* to) {
  for (int64_t i = 0; i < size; i += PANEL, to += stride)
    for (int64_t key = 0; key < PANEL; key += 2) {
      bf16* at = to + key * PANEL;
      if (i + PANEL <= size) {
        for (int half = 0; half < 2; ++half) {
          words even = __builtin_convertvector(load<halves>(rows[key] + i + half * WIDTH), words);
          words odd = __builtin_convertvector(load<halves>(rows[key + 1] + i + half * WIDTH), words);
          store(at + half * 2 * WIDTH, even | odd << 16);
        }
      } else {
        for (int64_t j = 0; j < PANEL; ++j)
          for (int k = 0; k < 2; ++k) at[2 * j + k] = i + j < size ? rows[key + k][i + j] : bf16(0);
      }
    }
}

// A step of the running softmax of one row (Milakov & Gimelshein 2018, arXiv:1805.02867), in powers of two: scores to
// weights, and the factor that corrects what was summed before. Keys outside of from ... to are not seen.
template <typename Input>
inline float step_of_row(float* score, Input* weight, int64_t width, int64_t from, int64_t to, float scale, float& top,
                         float& mass) {
  for (int64_t key = 0; key < std::min(from, width); ++key) score[key] = -INFINITY;
  for (int64_t key = std::max<int64_t>(0, to + 1); key < width; ++key) score[key] = -INFINITY;
  floats peak = same(-INFINITY);
  for (int64_t key = 0; key < width; key += WIDTH) {
    floats value = load<floats>(score + key);
    peak = value > peak ? value : peak;
  }
  float now = std::max(top, largest(peak) * scale);
  if (now == -INFINITY) {
    std::fill_n(weight, width, Input(0));
    return 1.0f;
  }
  floats sum_here{};
  for (int64_t key = 0; key < width; key += WIDTH) {
    floats value = power_of_two(load<floats>(score + key) * scale - now);
    sum_here += value;
    store_floats(weight + key, value);
  }
  float correction = std::exp2(top - now);
  mass = mass * correction + sum(sum_here);
  top = now;
  return correction;
}

// The slots of the keys begin ... begin + count of a tile's sequence, and of 32 at least: what is past the end is the last
// of them, and gets no weight.
void find_slots(const Batch& batch, const Tile& tile, int64_t begin, int64_t count, int64_t* slots) {
  const int64_t* block = batch.tables + batch.table_ptr[tile.sequence] + begin / batch.block_size;
  int64_t offset = begin % batch.block_size, key = 0;
  for (; key < count; offset = 0, ++block)
    for (; offset < batch.block_size && key < count; ++offset, ++key) slots[key] = *block * batch.block_size + offset;
  for (; key < PANEL; ++key) slots[key] = slots[count - 1];
}

// What 32 slots hold of one KV head: where it is, or, of an int8 cache, times its scales in staged.
void find_rows(const Batch& batch, const Cache& cache, int64_t kv, const int64_t* slots, bf16* staged, const bf16** rows) {
  for (int key = 0; key < PANEL; ++key) {
    int64_t row = slots[key] * batch.kv_heads + kv;
    if (!cache.scales) {
      rows[key] = (const bf16*)cache.data + row * batch.size;
      continue;
    }
    const int8_t* at = (const int8_t*)cache.data + row * batch.size;
    bf16* to = staged + key * batch.size;
    rows[key] = to;
    float scale = cache.scales[row];
    int64_t i = 0;
    for (; i + WIDTH <= batch.size; i += WIDTH)
      store(to + i, narrow(__builtin_convertvector(load<few_bytes>(at + i), floats) * scale));
    for (; i < batch.size; ++i) to[i] = narrow(at[i] * scale);
  }
}

// The cache lines of 32 slots are on their way while others are computed with: blocks are anywhere, the hardware cannot
// foresee them.
void prefetch(const Batch& batch, const Cache& cache, int64_t kv, const int64_t* slots) {
  int64_t bytes = batch.size * (cache.scales ? 1 : sizeof(bf16));
  for (int key = 0; key < PANEL; ++key)
    for (int64_t at = 0; at < bytes; at += 64)
      __builtin_prefetch((const char*)cache.data + (slots[key] * batch.kv_heads + kv) * bytes + at);
}

// Sums of weighted values (rows, padded), with each row's largest score and mass of weights, into scratch.
template <typename Kernel>
void run(const Batch& batch, const Tile& tile, Scratch<Kernel>& scratch) {
  using Input = typename Kernel::Input;
  constexpr int ROWS = Kernel::ROWS;
  int64_t size = batch.size, padded = up_to(size, PANEL), group = batch.head_ptr[tile.kv + 1] - batch.head_ptr[tile.kv];
  int64_t rows = tile.count * group, token = batch.row_ptr[tile.sequence] + tile.first;
  int64_t num_new = batch.row_ptr[tile.sequence + 1] - batch.row_ptr[tile.sequence];
  int64_t position = batch.context_lens[tile.sequence] - num_new + tile.first;
  int64_t step = rows > ROWS ? KEYS : FEW_KEYS;
  float scale = batch.scale * LOG2_E;

  bf16 *keys = room(scratch.keys, step * size), *values = room(scratch.values, step * padded);
  Input *query = room(scratch.query, rows * size), *weights = room(scratch.weights, ROWS * step);
  float *total = room(scratch.total, rows * padded), *scores = room(scratch.scores, ROWS * step);
  float *top = room(scratch.top, rows), *mass = room(scratch.mass, rows);
  for (int64_t i = 0; i < tile.count; ++i) {
    const bf16* at = batch.q + ((token + i) * batch.heads + batch.head_ptr[tile.kv]) * size;
    for (int64_t j = 0; j < group * size; ++j) set(query[i * group * size + j], as_float(at[j]));
  }
  std::fill_n(total, rows * padded, 0.0f);
  std::fill_n(top, rows, -INFINITY);
  std::fill_n(mass, rows, 0.0f);

  alignas(64) float block[ROWS * PANEL];
  bf16* staged = room(scratch.staged, PANEL * size);
  const bf16* found[PANEL];
  int64_t slots[2][PANEL];
  int current = 0;
  find_slots(batch, tile, tile.begin, std::min<int64_t>(PANEL, tile.end - tile.begin), slots[0]);
  for (int64_t begin = tile.begin; begin < tile.end; begin += step) {
    int64_t here = std::min(step, tile.end - begin), filled = up_to(here, PANEL);
    for (int64_t key = 0; key < filled; key += PANEL, current ^= 1) {
      int64_t next = begin + key + PANEL;
      if (next < tile.end) {
        find_slots(batch, tile, next, std::min<int64_t>(PANEL, tile.end - next), slots[current ^ 1]);
        prefetch(batch, batch.keys, tile.kv, slots[current ^ 1]);
        prefetch(batch, batch.values, tile.kv, slots[current ^ 1]);
      }
      find_rows(batch, batch.keys, tile.kv, slots[current], staged, found);
      pack_panel(found, size, keys + key * size);
      find_rows(batch, batch.values, tile.kv, slots[current], staged, found);
      pack_values(found, size, filled * PANEL, values + key * PANEL);
    }
    for (int64_t row = 0; row < rows; row += ROWS) {
      int some = int(std::min<int64_t>(ROWS, rows - row));
      int64_t visible = position + (row + some - 1) / group + 1 - begin;  // by the last of these rows
      if (visible <= 0) continue;
      int64_t width = std::min(filled, up_to(visible, PANEL));
      Panel<Kernel> multiply = panel_of<Kernel>(some);
      for (int64_t key = 0; key < width; key += PANEL) {
        multiply(query + row * size, size, keys + key * size, size / 2, block, {});
        for (int r = 0; r < some; ++r) std::memcpy(scores + r * step + key, block + r * PANEL, sizeof(float) * PANEL);
      }
      for (int r = 0; r < some; ++r) {
        int64_t own = position + (row + r) / group - begin;  // the last key it sees, from here
        int64_t from = batch.window ? std::max<int64_t>(0, own - batch.window + 1) : 0;
        float correction = step_of_row(scores + r * step, weights + r * step, width, from, std::min(here - 1, own), scale,
                                       top[row + r], mass[row + r]);
        float* sums = total + (row + r) * padded;
        if (correction != 1.0f)
          for (int64_t i = 0; i < padded; i += WIDTH) store(sums + i, load<floats>(sums + i) * correction);
      }
      for (int64_t i = 0; i < padded; i += PANEL) {
        multiply(weights, step, values + i * filled, width / 2, block, {});
        for (int r = 0; r < some; ++r)
          for (int j = 0; j < PANEL; j += WIDTH) {
            float* sums = total + (row + r) * padded + i + j;
            store(sums, load<floats>(sums) + load<floats>(block + r * PANEL + j));
          }
      }
    }
  }
}

void write(const Batch& batch, const Tile& tile, const float* total, const float* mass) {
  int64_t padded = up_to(batch.size, PANEL), group = batch.head_ptr[tile.kv + 1] - batch.head_ptr[tile.kv];
  int64_t token = batch.row_ptr[tile.sequence] + tile.first;
  for (int64_t row = 0; row < tile.count * group; ++row) {
    bf16* to = batch.out + ((token + row / group) * batch.heads + batch.head_ptr[tile.kv] + row % group) * batch.size;
    for (int64_t i = 0; i < batch.size; ++i) to[i] = narrow(total[row * padded + i] / mass[row]);
  }
}

// One row's pieces become a whole.
template <typename Kernel>
void join(const Batch& batch, const std::vector<Tile>& tiles, std::vector<Scratch<Kernel>>& partial, size_t first) {
  int64_t padded = up_to(batch.size, PANEL);
  Scratch<Kernel>& whole = partial[first];
  int64_t rows = tiles[first].count * (batch.head_ptr[tiles[first].kv + 1] - batch.head_ptr[tiles[first].kv]);
  for (size_t other = 0; other < tiles.size(); ++other) {
    const Tile &a = tiles[first], &b = tiles[other];
    if (other == first || b.sequence != a.sequence || b.kv != a.kv || b.first != a.first) continue;
    for (int64_t row = 0; row < rows; ++row) {
      float now = std::max(whole.top[row], partial[other].top[row]);
      if (now == -INFINITY) continue;
      float mine = std::exp2(whole.top[row] - now), its = std::exp2(partial[other].top[row] - now);
      for (int64_t i = row * padded; i < (row + 1) * padded; ++i)
        whole.total[i] = whole.total[i] * mine + partial[other].total[i] * its;
      whole.mass[row] = whole.mass[row] * mine + partial[other].mass[row] * its;
      whole.top[row] = now;
    }
  }
  write(batch, tiles[first], whole.total.data(), whole.mass.data());
}

// The work of a call, the largest tiles first. Where there is less of it than threads, keys are dealt, too.
void deal(const Batch& batch, int64_t sequences, int threads, std::vector<Tile>& tiles) {
  tiles.clear();
  int64_t together = 0;
  for (int64_t sequence = 0; sequence < sequences; ++sequence)
    together += up_to(batch.row_ptr[sequence + 1] - batch.row_ptr[sequence], TILE) / TILE * batch.kv_heads;
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    int64_t num_new = batch.row_ptr[sequence + 1] - batch.row_ptr[sequence];
    for (int64_t first = 0; first < num_new; first += TILE) {
      int64_t count = std::min(TILE, num_new - first), position = batch.context_lens[sequence] - num_new + first;
      int64_t begin = batch.window ? std::max<int64_t>(0, position - batch.window + 1) : 0, keys = position + count - begin;
      int64_t pieces = std::max<int64_t>(1, std::min<int64_t>(threads / together, keys / PIECE));
      for (int64_t kv = 0; kv < batch.kv_heads; ++kv)
        for (int64_t piece = 0; piece < pieces; ++piece)
          tiles.push_back({sequence, kv, first, count, begin + keys * piece / pieces, begin + keys * (piece + 1) / pieces,
                           piece, pieces});
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) {
    return a.count * (a.end - a.begin) > b.count * (b.end - b.begin);
  });
}

template <typename Kernel>
void attend_all(const Batch& batch, int64_t sequences, int threads) {
  static thread_local std::vector<Tile> dealt;
  static thread_local std::vector<Scratch<Kernel>> pieces;
  deal(batch, sequences, threads, dealt);
  const std::vector<Tile>& tiles = dealt;  // the team shares the caller's
  bool divided = std::any_of(tiles.begin(), tiles.end(), [](const Tile& tile) { return tile.pieces > 1; });
  if (divided && pieces.size() < tiles.size()) pieces.resize(tiles.size());
  std::vector<Scratch<Kernel>>& partial = pieces;
  for_each(threads, tiles.size(), [&](int64_t i) {
    static thread_local Scratch<Kernel> own;
    if (tiles[i].pieces > 1) {
      run(batch, tiles[i], partial[i]);
    } else {
      run(batch, tiles[i], own);
      write(batch, tiles[i], own.total.data(), own.mass.data());
    }
  });
  if (!divided) return;
  for_each(threads, tiles.size(), [&](int64_t i) {
    if (tiles[i].pieces > 1 && tiles[i].piece == 0) join(batch, tiles, partial, i);
  });
}

}  // namespace

// Plain C functions over pointers, called through ctypes. They check nothing: bfloat16.py checks shapes and types.
extern "C" {

// Causal attention of all sequences' new tokens, q and out (tokens, heads, size), over what is cached of them. The caches
// are in bfloat16, or in int8 where there are scales. The tokens of a sequence are rows row_ptr[b] ... row_ptr[b + 1], its
// blocks tables[table_ptr[b]] ...; head_ptr says which query heads read each KV head.
#define ATTEND(NAME, KERNEL)                                                                                             \
  void NAME(const bf16* q, const void* k_cache, const float* k_scales, const void* v_cache, const float* v_scales,       \
            const int64_t* tables, const int64_t* table_ptr, const int64_t* row_ptr, const int64_t* context_lens,        \
            const int64_t* head_ptr, bf16* out, int64_t sequences, int64_t heads, int64_t kv_heads, int64_t size,        \
            int64_t block_size, float scale, int64_t window, int threads) {                                              \
    Batch batch{q, {k_cache, k_scales}, {v_cache, v_scales}, tables, table_ptr, row_ptr, context_lens, head_ptr, out,    \
                heads, kv_heads, size, block_size, scale, window};                                                       \
    attend_all<KERNEL>(batch, sequences, threads);                                                                       \
  }                                                                                                                      \
  REPLAYABLE(NAME)

ATTEND(attend, Fma)
#ifdef HAS_BFLOAT16_DOT
ATTEND(attend_dot, Dot)
#endif

}  // extern "C"
