// Attention over a paged KV cache.
#include "panel.h"

namespace {

// Several query tokens of one sequence, the last of its context, over all it has cached. A tile of query tokens packs
// the keys and values it sees as linear's weights are packed, and both products run through the same panels.
template <typename Kernel>
void attend_tiles(const bf16* q, const bf16* k_cache, const bf16* v_cache, const int64_t* table, const int64_t* head_ptr,
                  bf16* out, int64_t tokens, int64_t context, int64_t heads, int64_t kv_heads, int64_t size,
                  int64_t block_size, float scale, int64_t window, int threads) {
  using Input = typename Kernel::Input;
  constexpr int64_t TILE = 256, KEYS = 512;  // query tokens of a tile, keys of a step of the running softmax
  int64_t tiles = (tokens + TILE - 1) / TILE, most = 0;
  for (int64_t kv = 0; kv < kv_heads; ++kv) most = std::max(most, head_ptr[kv + 1] - head_ptr[kv]);
#pragma omp parallel num_threads(threads)
  {
    std::vector<bf16> keys(KEYS * size), values(KEYS * size);
    std::vector<Input> query(TILE * most * size), weights(Kernel::ROWS * KEYS);
    std::vector<float> total(TILE * most * size), top(TILE * most), mass(TILE * most), scores(Kernel::ROWS * KEYS);
    alignas(64) float block[Kernel::ROWS * PANEL];
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t tile = 0; tile < tiles; ++tile)
      for (int64_t kv = 0; kv < kv_heads; ++kv) {
        int64_t first = (tiles - 1 - tile) * TILE, count = std::min(TILE, tokens - first);  // the longest first
        int64_t group = head_ptr[kv + 1] - head_ptr[kv], rows = count * group, position = context - tokens + first;
        for (int64_t token = 0; token < count; ++token) {
          const bf16* at = q + ((first + token) * heads + head_ptr[kv]) * size;
          for (int64_t i = 0; i < group * size; i += WIDTH) store_floats(&query[token * group * size + i], load_floats(at + i));
        }
        std::fill_n(total.begin(), rows * size, 0.0f);
        std::fill_n(top.begin(), rows, -INFINITY);
        std::fill_n(mass.begin(), rows, 0.0f);
        int64_t lowest = window ? std::max<int64_t>(0, position - window + 1) : 0, end = position + count;
        for (int64_t begin = lowest; begin < end; begin += KEYS) {
          int64_t here = std::min(KEYS, end - begin), padded = (here + PANEL - 1) / PANEL * PANEL;
          for (int64_t key = 0; key < padded; ++key) {
            int64_t at = begin + std::min(key, here - 1);  // what is past the end gets no weight
            int64_t row = ((table[at / block_size] * block_size + at % block_size) * kv_heads + kv) * size;
            bf16* to = &keys[key / PANEL * PANEL * size + key % PANEL * 2];
            for (int64_t pair = 0; pair < size / 2; ++pair) std::memcpy(to + pair * 2 * PANEL, k_cache + row + 2 * pair, 4);
            to = &values[key / 2 * 2 * PANEL + key % 2];
            for (int64_t i = 0; i < size; ++i) to[i / PANEL * PANEL * padded + i % PANEL * 2] = v_cache[row + i];
          }
          for (int64_t row = 0; row < rows; row += Kernel::ROWS) {
            int some = int(std::min<int64_t>(Kernel::ROWS, rows - row));
            int64_t visible = position + (row + some - 1) / group + 1 - begin;  // by the last of these rows
            if (visible <= 0) continue;
            int64_t width = std::min(padded, (visible + PANEL - 1) / PANEL * PANEL);
            Panel<Kernel> multiply = panel_of<Kernel>(some);
            for (int64_t key = 0; key < width; key += PANEL) {
              multiply(&query[row * size], size, &keys[key * size], size / 2, block);
              for (int r = 0; r < some; ++r) std::memcpy(&scores[r * KEYS + key], block + r * PANEL, sizeof(float) * PANEL);
            }
            for (int r = 0; r < some; ++r) {
              int64_t own = position + (row + r) / group - begin;  // the last key it sees, from here
              int64_t from = window ? std::max<int64_t>(0, own - window + 1) : 0, to = std::min(here - 1, own);
              float* score = &scores[r * KEYS];
              for (int64_t key = 0; key < std::min(from, width); ++key) score[key] = -INFINITY;
              for (int64_t key = std::max<int64_t>(0, to + 1); key < width; ++key) score[key] = -INFINITY;
              floats peak = same(-INFINITY);
              for (int64_t key = 0; key < width; key += WIDTH) {
                floats value = load<floats>(score + key);
                peak = value > peak ? value : peak;
              }
              float now = std::max(top[row + r], largest(peak) * scale);
              Input* weight = &weights[r * KEYS];
              if (now == -INFINITY) {
                std::fill_n(weight, width, Input(0));
                continue;
              }
              floats sum_here{};
              for (int64_t key = 0; key < width; key += WIDTH) {
                floats value = exponential(load<floats>(score + key) * scale - now);
                value = load<floats>(score + key) == -INFINITY ? floats{} : value;
                sum_here += value;
                store_floats(weight + key, value);
              }
              float correction = std::exp(top[row + r] - now);
              mass[row + r] = mass[row + r] * correction + sum(sum_here);
              top[row + r] = now;
              for (int64_t i = 0; i < size; ++i) total[(row + r) * size + i] *= correction;
            }
            for (int64_t i = 0; i < size; i += PANEL) {
              multiply(weights.data(), KEYS, &values[i * padded], width / 2, block);
              for (int r = 0; r < some; ++r)
                for (int j = 0; j < PANEL; ++j) total[(row + r) * size + i + j] += block[r * PANEL + j];
            }
          }
        }
        for (int64_t row = 0; row < rows; ++row) {
          bf16* to = out + ((first + row / group) * heads + head_ptr[kv] + row % group) * size;
          for (int64_t i = 0; i < size; ++i) to[i] = narrow(total[row * size + i] / mass[row]);
        }
      }
  }
}

}  // namespace

// Plain C functions over pointers, called through ctypes. They check nothing: bfloat16.py checks shapes and types.
extern "C" {

// One query token for each sequence over all it has cached, straight from the blocks: a softmax that is corrected as it
// goes (Milakov & Gimelshein 2018, arXiv:1805.02867). head_ptr says which query heads read each KV head.
void attend_one(const bf16* q, const bf16* k_cache, const bf16* v_cache, const int64_t* tables, int64_t table_width,
                const int64_t* context_lens, const int64_t* head_ptr, bf16* out, int64_t sequences, int64_t heads,
                int64_t kv_heads, int64_t size, int64_t block_size, float scale, int64_t window, int threads) {
  constexpr int TOKENS = WIDTH;  // scores of so many tokens are a vector
  int64_t vectors = size / WIDTH, most = 0;
  for (int64_t kv = 0; kv < kv_heads; ++kv) most = std::max(most, head_ptr[kv + 1] - head_ptr[kv]);
#pragma omp parallel num_threads(threads)
  {
    std::vector<floats> query(most * vectors), total(most * vectors), keys(TOKENS * vectors), values(TOKENS * vectors);
    std::vector<float> top(most), mass(most);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t sequence = 0; sequence < sequences; ++sequence)
      for (int64_t kv = 0; kv < kv_heads; ++kv) {
        int64_t group = head_ptr[kv + 1] - head_ptr[kv], context = context_lens[sequence];
        const int64_t* table = tables + sequence * table_width;
        const bf16* at = q + (sequence * heads + head_ptr[kv]) * size;
        for (int64_t i = 0; i < group * vectors; ++i) {
          query[i] = widen(load<halves>(at + i * WIDTH)) * scale;
          total[i] = floats{};
        }
        for (int64_t head = 0; head < group; ++head) top[head] = -INFINITY, mass[head] = 0;
        for (int64_t begin = window && context > window ? context - window : 0; begin < context; begin += TOKENS) {
          int64_t count = std::min<int64_t>(TOKENS, context - begin);
          for (int64_t token = 0; token < count; ++token) {
            int64_t position = begin + token;
            int64_t slot = table[position / block_size] * block_size + position % block_size;
            int64_t row = (slot * kv_heads + kv) * size;
            for (int64_t i = 0; i < vectors; ++i) {
              keys[token * vectors + i] = widen(load<halves>(k_cache + row + i * WIDTH));
              values[token * vectors + i] = widen(load<halves>(v_cache + row + i * WIDTH));
            }
          }
          for (int64_t head = 0; head < group; ++head) {
            floats scores = same(-INFINITY);
            for (int64_t token = 0; token < count; ++token) {
              floats product{};
              for (int64_t i = 0; i < vectors; ++i) product += query[head * vectors + i] * keys[token * vectors + i];
              scores[token] = sum(product);
            }
            float now = std::max(top[head], largest(scores)), correction = std::exp(top[head] - now);
            floats weights = exponential(scores - now);
            for (int64_t token = count; token < TOKENS; ++token) weights[token] = 0;
            mass[head] = mass[head] * correction + sum(weights);
            top[head] = now;
            for (int64_t i = 0; i < vectors; ++i) {
              floats sum_here = total[head * vectors + i] * correction;
              for (int64_t token = 0; token < count; ++token) sum_here += weights[token] * values[token * vectors + i];
              total[head * vectors + i] = sum_here;
            }
          }
        }
        bf16* to = out + (sequence * heads + head_ptr[kv]) * size;
        for (int64_t head = 0; head < group; ++head)
          for (int64_t i = 0; i < vectors; ++i)
            store(to + (head * vectors + i) * WIDTH, narrow(total[head * vectors + i] / mass[head]));
      }
  }
}

// Several query tokens of one sequence, the last of its context, over all it has cached.
void attend_many(const bf16* q, const bf16* k_cache, const bf16* v_cache, const int64_t* table, const int64_t* head_ptr,
                 bf16* out, int64_t tokens, int64_t context, int64_t heads, int64_t kv_heads, int64_t size,
                 int64_t block_size, float scale, int64_t window, int threads) {
  attend_tiles<Fma>(q, k_cache, v_cache, table, head_ptr, out, tokens, context, heads, kv_heads, size, block_size, scale,
                    window, threads);
}

#ifdef __AVX512BF16__
void attend_many_dot(const bf16* q, const bf16* k_cache, const bf16* v_cache, const int64_t* table, const int64_t* head_ptr,
                     bf16* out, int64_t tokens, int64_t context, int64_t heads, int64_t kv_heads, int64_t size,
                     int64_t block_size, float scale, int64_t window, int threads) {
  attend_tiles<Dot>(q, k_cache, v_cache, table, head_ptr, out, tokens, context, heads, kv_heads, size, block_size, scale,
                    window, threads);
}
#endif

}  // extern "C"
