// Expert routing: the router's product, scores and choice.
#include <limits>
#include <vector>

#include "replay.h"
#include "thread_pool.h"
#include "vectors.h"

namespace {

constexpr int TOGETHER = 4;  // tokens and experts whose products are computed at once

enum Scores : int32_t { SOFTMAX, SIGMOID, CHOSEN };

// Parameters of the routing rule; see routing_rule.py.
struct Rule {
  int64_t experts, chosen, groups, chosen_groups, group_best;
  int32_t scores, is_normalized;
  float least_sum, scale;
};

// Loads fewer numbers than a vector has, zero-padded.
template <typename T>
inline floats load_rest(const T* from, int64_t count) {
  T padded[WIDTH] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load_floats(padded);
}

// Products of TOKENS rows of x with EXPERTS weight rows. The order of each sum is independent of how many are computed at once, also for
// the partial vector at the end, because compilers round scalar loops arbitrarily.
template <int TOKENS, int EXPERTS, typename T, typename Weight>
void dot_products(const T* x, const Weight* weight, int64_t size, float* logits, int64_t stride) {
  floats total[TOKENS][EXPERTS] = {};
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH)
    for (int expert = 0; expert < EXPERTS; ++expert) {
      const Weight* at = weight + expert * size + i;
      __builtin_prefetch((const char*)at + AHEAD);
      floats factor = load_floats(at);
      for (int token = 0; token < TOKENS; ++token) total[token][expert] += load_floats(x + token * size + i) * factor;
    }
  for (int expert = 0; i < size && expert < EXPERTS; ++expert) {
    floats factor = load_rest(weight + expert * size + i, size - i);
    for (int token = 0; token < TOKENS; ++token) total[token][expert] += load_rest(x + token * size + i, size - i) * factor;
  }
  for (int token = 0; token < TOKENS; ++token)
    for (int expert = 0; expert < EXPERTS; ++expert) logits[token * stride + expert] = sum(total[token][expert]);
}

// logits (tokens, experts) = x (tokens, size) times weight (experts, size).
template <typename T, typename Weight>
void multiply(const T* x, const Weight* weight, float* logits, int64_t tokens, int64_t experts, int64_t size, int threads) {
  int64_t token_blocks = (tokens + TOGETHER - 1) / TOGETHER, expert_blocks = (experts + TOGETHER - 1) / TOGETHER;
  for_each(threads, token_blocks * expert_blocks, [&](int64_t piece) {
    int64_t first = piece / expert_blocks * TOGETHER, last = std::min(tokens, first + TOGETHER);
    int64_t begin = piece % expert_blocks * TOGETHER, end = std::min(experts, begin + TOGETHER);
    const Weight* rows = weight + begin * size;
    float* out = logits + begin;
    if (last - first == TOGETHER)
      for (int64_t expert = begin; expert < end; ++expert, rows += size, ++out)
        dot_products<TOGETHER, 1>(x + first * size, rows, size, out + first * experts, experts);
    else if (end - begin == TOGETHER)
      for (int64_t token = first; token < last; ++token)
        dot_products<1, TOGETHER>(x + token * size, rows, size, out + token * experts, experts);
    else
      for (int64_t expert = begin; expert < end; ++expert, rows += size, ++out)
        for (int64_t token = first; token < last; ++token)
          dot_products<1, 1>(x + token * size, rows, size, out + token * experts, experts);
  });
}

template <typename T>
void multiply(const T* x, const void* weight, bool is_narrow, float* logits, int64_t tokens, int64_t experts, int64_t size,
              int threads) {
  if (is_narrow) multiply(x, (const bf16*)weight, logits, tokens, experts, size, threads);
  else multiply(x, (const float*)weight, logits, tokens, experts, size, threads);
}

// Index of the largest number that is not taken yet; the first of equal ones.
inline int64_t take_largest(float* numbers, int64_t count, std::vector<char>& taken) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i)
    if (!taken[i] && (best < 0 || numbers[i] > numbers[best])) best = i;
  taken[best] = 1;
  return best;
}

// Sets experts to minus infinity outside of the groups with the largest sums of their best experts.
void keep_best_groups(float* ranked, const Rule& rule, std::vector<float>& sums, std::vector<char>& taken) {
  int64_t size = rule.experts / rule.groups;
  sums.resize(rule.groups);
  for (int64_t group = 0; group < rule.groups; ++group) {
    taken.assign(size, 0);
    float* own = ranked + group * size;
    sums[group] = own[take_largest(own, size, taken)];
    for (int64_t i = 1; i < std::min(size, rule.group_best); ++i) sums[group] += own[take_largest(own, size, taken)];
  }
  taken.assign(rule.groups, 0);
  for (int64_t i = 0; i < rule.chosen_groups; ++i) take_largest(sums.data(), rule.groups, taken);
  for (int64_t expert = 0; expert < rule.experts; ++expert)
    if (!taken[expert / size]) ranked[expert] = -std::numeric_limits<float>::infinity();
}

// Turns the logits of one token into scores, and chooses experts: ids and weights (chosen).
void choose(float* scores, const float* bias, const float* factors, const Rule& rule, int64_t* ids, float* weights) {
  static thread_local std::vector<float> ranked, sums;  // kept from call to call, so that nothing is allocated
  static thread_local std::vector<char> taken;
  int64_t experts = rule.experts;
  if (rule.scores == CHOSEN) {
    for (int64_t i = 0; bias && i < experts; ++i) scores[i] += bias[i];
    bias = nullptr;
  } else if (rule.scores == SIGMOID) {
    for (int64_t i = 0; i < experts; ++i) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
  } else {
    float top = scores[0], total = 0;
    for (int64_t i = 1; i < experts; ++i) top = std::max(top, scores[i]);
    for (int64_t i = 0; i < experts; ++i) total += scores[i] = std::exp(scores[i] - top);
    for (int64_t i = 0; i < experts; ++i) scores[i] /= total;
  }
  ranked.assign(scores, scores + experts);
  for (int64_t i = 0; bias && i < experts; ++i) ranked[i] += bias[i];
  if (rule.chosen_groups < rule.groups) keep_best_groups(ranked.data(), rule, sums, taken);
  taken.assign(experts, 0);
  float total = 0;
  for (int64_t i = 0; i < rule.chosen; ++i) {
    ids[i] = take_largest(ranked.data(), experts, taken);
    total += weights[i] = scores[ids[i]];
  }
  if (rule.scores == CHOSEN) {
    float top = weights[0], mass = 0;  // weights[0] is the largest
    for (int64_t i = 0; i < rule.chosen; ++i) mass += weights[i] = std::exp(weights[i] - top);
    for (int64_t i = 0; i < rule.chosen; ++i) weights[i] /= mass;
  } else {
    float divisor = rule.is_normalized ? std::max(total, rule.least_sum) : 1.0f;
    for (int64_t i = 0; i < rule.chosen; ++i) weights[i] = weights[i] / divisor * rule.scale;
  }
  for (int64_t i = 0; factors && i < rule.chosen; ++i) weights[i] *= factors[ids[i]];
}

}  // namespace

// C functions for ctypes; routing.py checks shapes and dtypes before the call.
extern "C" {

// ids and weights (tokens, chosen) for x (tokens, size) in bfloat16, or float32 with `wide`; weight (experts, size) in float32, or bfloat16
// with `narrow`; bias and weight factors (experts) or null. counts (experts), if given, are incremented by each expert's tokens.
void route(const Rule* rule, const void* x, const void* weight, const float* bias, const float* factors, int64_t* ids,
           float* weights, int64_t* counts, int64_t tokens, int64_t size, int wide, int narrow, int threads) {
  static thread_local std::vector<float> memory;
  int64_t experts = rule->experts, chosen = rule->chosen;
  if (int64_t(memory.size()) < tokens * experts) memory.resize(tokens * experts);
  float* logits = memory.data();  // shared with the pool's threads: it is the caller's thread-local memory
  if (wide) multiply((const float*)x, weight, narrow, logits, tokens, experts, size, threads);
  else multiply((const bf16*)x, weight, narrow, logits, tokens, experts, size, threads);
  for_each(threads, tokens, [&](int64_t token) {
    choose(logits + token * experts, bias, factors, *rule, ids + token * chosen, weights + token * chosen);
  });
  if (counts)
    for (int64_t i = 0; i < tokens * chosen; ++i) ++counts[ids[i]];
}
REPLAYABLE(route)

}  // extern "C"
