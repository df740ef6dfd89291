// Layers with a recurrent state of fixed size: the gated delta rule (Yang et al. 2024, arXiv:2412.06464), its convolution and its norm.
// Columns of the state are independent, so work is partitioned by heads and columns: a thread runs all tokens of a sequence while the
// columns stay in its cache.
#include <vector>

#include "recurrence.h"
#include "replay.h"
#include "thread_pool.h"

namespace {

constexpr int64_t CHANNELS = 512;    // channels of a convolution per work item
constexpr int ROW = REGISTERS / 4;   // column registers for a single token: two sums of each stay in registers
constexpr int FEW = PANEL / LANES;   // column registers for several tokens: those of all rows stay in the first-level cache
constexpr float L2_EPS = 1e-6f;

// Causal convolution of the first `channels` of x (tokens, stride); weight (width, channels); bias (channels) or null; state (slots,
// width - 1, channels).
template <typename T>
void convolve(const T* x, int64_t stride, const float* weight, const float* bias, T* state, const Sequences& all, T* out,
              int64_t channels, int64_t width, int threads) {
  int64_t pieces = (channels + CHANNELS - 1) / CHANNELS, past = width - 1;
  for_each(threads, all.count * pieces, [&](int64_t item) {
    int64_t b = item / pieces, first = item % pieces * CHANNELS, size = std::min(CHANNELS, channels - first);
    int64_t tokens = all.tokens(b);
    const T* rows = x + all.row_ptr[b] * stride + first;
    T* before = state + all.slots[b] * past * channels + first;
    if (all.is_new(b))
      for (int64_t w = 0; w < past; ++w) std::fill_n(before + w * channels, size, T{});
    auto input = [&](int64_t n) { return n < 0 ? before + (past + n) * channels : rows + n * stride; };
    for (int64_t n = 0; n < tokens; ++n) {
      T* to = out + (all.row_ptr[b] + n) * channels + first;
      int64_t c = 0;
      for (; c + WIDTH <= size; c += WIDTH) {
        floats total = bias ? load<floats>(bias + first + c) : floats{};
        for (int64_t w = 0; w < width; ++w)
          total += load<floats>(weight + w * channels + first + c) * load_floats(input(n - past + w) + c);
        store_floats(to + c, silu(total));
      }
      for (; c < size; ++c) {
        float total = bias ? bias[first + c] : 0;
        for (int64_t w = 0; w < width; ++w)
          total += weight[w * channels + first + c] * as_float(input(n - past + w)[c]);
        set(to[c], silu(total));
      }
    }
    for (int64_t w = 0; w < past; ++w) {  // oldest first, so that no input is overwritten before it is used
      const T* from = input(tokens - past + w);
      if (from != before + w * channels) std::copy_n(from, size, before + w * channels);
    }
  });
}

// Arguments of a call that all heads share.
template <typename T>
struct Rule {
  const T *qkv, *gates;
  const float *rate, *bias;
  const int64_t* key_heads;
  float* state;
  T* out;
  int64_t heads, num_keys, key_size, value_size;

  int64_t columns() const { return 2 * num_keys * key_size + heads * value_size; }  // columns of qkv
};

struct Item {
  int64_t sequence, head, first, size;  // columns of the head's state
};

// Scaled key and query of a token, and the gates' factors on the state and on the correction.
struct Token {
  std::vector<float> k, q;
  float decay, beta, kq;
};

template <typename T>
void read_token(const Rule<T>& rule, int64_t row, int64_t head, Token& token) {
  int64_t size = rule.key_size, at = rule.key_heads[head] * size;
  const T *q = rule.qkv + row * rule.columns() + at, *k = q + rule.num_keys * size;
  float squares_q = 0, squares_k = 0, product = 0;
  floats sums_q{}, sums_k{}, products{};
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) {
    floats query = load_floats(q + i), key = load_floats(k + i);
    sums_q += query * query, sums_k += key * key, products += query * key;
  }
  for (; i < size; ++i) {
    float query = as_float(q[i]), key = as_float(k[i]);
    squares_q += query * query, squares_k += key * key, product += query * key;
  }
  float scale_q = 1.0f / (std::sqrt(sum(sums_q) + squares_q + L2_EPS) * std::sqrt(float(size)));
  float scale_k = 1.0f / std::sqrt(sum(sums_k) + squares_k + L2_EPS);
  for (i = 0; i + WIDTH <= size; i += WIDTH) {
    store(token.q.data() + i, load_floats(q + i) * scale_q);
    store(token.k.data() + i, load_floats(k + i) * scale_k);
  }
  for (; i < size; ++i) token.q[i] = as_float(q[i]) * scale_q, token.k[i] = as_float(k[i]) * scale_k;
  token.kq = (sum(products) + product) * scale_q * scale_k;
  const T* gates = rule.gates + row * 2 * rule.heads + head;
  float a = as_float(gates[rule.heads]) + rule.bias[head];
  float softplus = a > 20.0f ? a : std::log1p(std::exp(a));
  token.decay = std::exp(-rule.rate[head] * softplus);
  token.beta = 1.0f / (1.0f + std::exp(-as_float(gates[0])));
}

// Products of a key and a query with the columns of a state.
template <int N>
struct Read {
  lanes k[N] = {}, q[N] = {};

  void add(float key, float query, const lanes* row) {
    for (int n = 0; n < N; ++n) k[n] += key * row[n], q[n] += query * row[n];
  }
};

// Runs all tokens of a sequence on N registers of columns of a head's state. Each pass applies a token's update and reads the state for the
// next token. The output follows from the values read: q (decay S + k d) = decay (q S) + (q k) d.
template <int N, typename T>
void advance(const Rule<T>& rule, const Item& item, int64_t row, int64_t tokens, float* state, int64_t stride,
             Token (&pair)[2]) {
  Read<N> read;
  read_token(rule, row, item.head, pair[0]);
  const float *key = pair[0].k.data(), *query = pair[0].q.data();
  for (int64_t i = 0, size = rule.key_size; i < size; ++i) {
    lanes values[N];
    for (int n = 0; n < N; ++n) values[n] = load<lanes>(state + i * stride + n * LANES);
    read.add(key[i], query[i], values);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    Token &token = pair[t % 2], &next = pair[(t + 1) % 2];
    const T* value = rule.qkv + (row + t) * rule.columns() + 2 * rule.num_keys * rule.key_size +
                     item.head * rule.value_size + item.first;
    T* out = rule.out + ((row + t) * rule.heads + item.head) * rule.value_size + item.first;
    float wide[N * LANES] = {};
    for (int64_t j = 0; j < item.size; ++j) wide[j] = as_float(value[j]);
    lanes correction[N];
    for (int n = 0; n < N; ++n) {
      correction[n] = (load<lanes>(wide + n * LANES) - token.decay * read.k[n]) * token.beta;
      store(wide + n * LANES, token.decay * read.q[n] + token.kq * correction[n]);
    }
    for (int64_t j = 0; j < item.size; ++j) set(out[j], wide[j]);
    bool is_last = t + 1 == tokens;
    if (!is_last) read_token(rule, row + t + 1, item.head, next);
    Read<N> ahead;
    const float *key = token.k.data(), *next_key = next.k.data(), *next_query = next.q.data();
    const float decay = token.decay;
    for (int64_t i = 0, size = rule.key_size; i < size; ++i) {
      lanes values[N];
      for (int n = 0; n < N; ++n) {
        float* at = state + i * stride + n * LANES;
        values[n] = decay * load<lanes>(at) + key[i] * correction[n];
        store(at, values[n]);
      }
      if (!is_last) ahead.add(next_key[i], next_query[i], values);
    }
    read = ahead;
  }
}

// Columns that do not fill registers, and those of several tokens, are copied to contiguous memory.
template <int N, typename T>
void advance_copy(const Rule<T>& rule, const Item& item, int64_t row, int64_t tokens, float* state, Token (&pair)[2]) {
  constexpr int64_t COLUMNS = N * LANES;
  static thread_local std::vector<float> kept;
  kept.assign(rule.key_size * COLUMNS, 0.0f);
  for (int64_t i = 0; i < rule.key_size; ++i)
    std::copy_n(state + i * rule.value_size, item.size, kept.data() + i * COLUMNS);
  advance<N>(rule, item, row, tokens, kept.data(), COLUMNS, pair);
  for (int64_t i = 0; i < rule.key_size; ++i)
    std::copy_n(kept.data() + i * COLUMNS, item.size, state + i * rule.value_size);
}

template <typename T>
void apply(const Rule<T>& rule, const Sequences& all, int threads) {
  std::vector<Item> items;
  for (int64_t b = 0; b < all.count; ++b) {
    int64_t columns = (all.tokens(b) == 1 ? ROW : FEW) * LANES;
    for (int64_t head = 0; head < rule.heads; ++head)
      for (int64_t first = 0; first < rule.value_size; first += columns)
        items.push_back({b, head, first, std::min(columns, rule.value_size - first)});
  }
  for_each(threads, items.size(), [&](int64_t index) {
    static thread_local Token pair[2];
    for (Token& token : pair) token.k.resize(rule.key_size), token.q.resize(rule.key_size);
    const Item& item = items[index];
    int64_t row = all.row_ptr[item.sequence], tokens = all.tokens(item.sequence);
    float* state = rule.state + (all.slots[item.sequence] * rule.heads + item.head) * rule.key_size * rule.value_size;
    state += item.first;
    if (all.is_new(item.sequence))
      for (int64_t i = 0; i < rule.key_size; ++i) std::fill_n(state + i * rule.value_size, item.size, 0.0f);
    if (tokens > 1) advance_copy<FEW>(rule, item, row, tokens, state, pair);
    else if (item.size < ROW * LANES) advance_copy<ROW>(rule, item, row, tokens, state, pair);
    else advance<ROW>(rule, item, row, tokens, state, rule.value_size, pair);
  });
}

// Gated RMSNorm: x and out (tokens, heads, size), gate (tokens, stride), of which the first heads * size.
template <typename T>
void norm_and_gate(const T* x, const T* gate, int64_t stride, const T* weight, T* out, int64_t tokens, int64_t heads,
                   int64_t size, float eps, int threads) {
  for_each(threads, tokens, [&](int64_t token) {
    for (int64_t head = 0; head < heads; ++head) {
      const T *from = x + (token * heads + head) * size, *by = gate + token * stride + head * size;
      T* to = out + (token * heads + head) * size;
      floats squares{};
      float rest = 0;
      int64_t i = 0;
      for (; i + WIDTH <= size; i += WIDTH) squares += load_floats(from + i) * load_floats(from + i);
      for (; i < size; ++i) rest += as_float(from[i]) * as_float(from[i]);
      float scale = 1.0f / std::sqrt((sum(squares) + rest) / size + eps);
      for (i = 0; i + WIDTH <= size; i += WIDTH)
        store_floats(to + i, load_floats(from + i) * scale * load_floats(weight + i) * silu(load_floats(by + i)));
      for (; i < size; ++i) set(to[i], as_float(from[i]) * scale * as_float(weight[i]) * silu(as_float(by[i])));
    }
  });
}

}  // namespace

// C functions for ctypes; delta_rule.py checks shapes and dtypes before the call.
extern "C" {

#define OF_TYPE(T, NAME)                                                                                               \
  void causal_conv_##NAME(const T* x, const float* weight, const float* bias, T* state, const int64_t* row_ptr,        \
                          const int64_t* context_lens, const int64_t* slots, T* out, int64_t sequences,                \
                          int64_t stride, int64_t channels, int64_t width, int threads) {                              \
    Sequences all{row_ptr, context_lens, slots, sequences};                                                            \
    convolve(x, stride, weight, bias, state, all, out, channels, width, threads);                                      \
  }                                                                                                                    \
  void delta_rule_##NAME(const T* qkv, const T* gates, const float* rate, const float* bias,                           \
                         const int64_t* key_heads, float* state, const int64_t* row_ptr, const int64_t* context_lens,  \
                         const int64_t* slots, T* out, int64_t sequences, int64_t heads, int64_t num_keys,             \
                         int64_t key_size, int64_t value_size, int threads) {                                          \
    Rule<T> rule{qkv, gates, rate, bias, key_heads, state, out, heads, num_keys, key_size, value_size};                \
    apply(rule, {row_ptr, context_lens, slots, sequences}, threads);                                                   \
  }                                                                                                                    \
  void gated_norm_##NAME(const T* x, const T* gate, const T* weight, T* out, int64_t stride, int64_t tokens,           \
                         int64_t heads, int64_t size, float eps, int threads) {                                        \
    norm_and_gate(x, gate, stride, weight, out, tokens, heads, size, eps, threads);                                    \
  }                                                                                                                    \
  REPLAYABLE(causal_conv_##NAME)                                                                                       \
  REPLAYABLE(delta_rule_##NAME)                                                                                        \
  REPLAYABLE(gated_norm_##NAME)
OF_TYPE(bf16, bfloat16)
OF_TYPE(float, float32)
OF_TYPE(half, float16)
#undef OF_TYPE

}  // extern "C"
