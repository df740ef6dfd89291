// Token sampling: argmax, and draws from top-k / top-p sets that are found by counting (radix selection) instead of sorting.
#include <array>
#include <functional>
#include <limits>
#include <vector>

#include "float64_vectors.h"
#include "exponentials.h"
#include "thread_pool.h"

namespace {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr double LIKELIEST = 1099511627776.0;  // weight of the largest logit, 2^40
constexpr double FAR = 40;                      // distance below the largest logit, after the temperature, beyond which weights are 0
constexpr double NEAR[] = {4, 6, 8, 10, 13, 17};  // smaller distances that may contain most of the weight
constexpr int BOUNDS = 7;                         // the distances of NEAR, and FAR

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;

constexpr int64_t SHARED = 1 << 18;  // logits from which on reading takes longer than waking another thread

constexpr int64_t SEARCHED = 256;  // logits of a block that is searched for its known maximum

constexpr int32_t PLACES[WIDTH] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Parameters of a draw, with the fields of the Python struct; log_min_p is the logarithm of min_p.
struct Draw {
  int64_t row, position, seed, top_k;
  double temperature, top_p, log_min_p;
};

struct Top {
  float value;
  int64_t id;
};

// Last candidate of a set: larger logits are candidates, too, and equal logits up to its id.
struct Cut {
  float logit;
  int64_t id;
};

struct Listed {
  float logit;
  int32_t id;
  int64_t weight;
  Listed() {}  // leaves a long list uninitialized
};

struct Drawn {
  double score;
  int64_t id;
};

// Loads the next logits of a row, padded with -inf at its end.
template <typename T>
inline floats read(const T* from, int64_t left) {
  if (left >= WIDTH) return load_floats(from);
  floats values = same(NOTHING);
  for (int64_t i = 0; i < left; ++i) values[i] = as_float(from[i]);
  return values;
}

inline bool any(ints mask) {
  uint64_t parts[WIDTH / 2], bits = 0;
  std::memcpy(parts, &mask, sizeof(mask));
  for (uint64_t part : parts) bits |= part;
  return bits;
}

// The larger of two; `second` comes after `first` in the row.
inline Top larger(Top first, Top second) {
  if (first.value != first.value) return first;
  return second.value != second.value || second.value > first.value ? second : first;
}

// Argmax: the first of the largest logits, or the first NaN if there is one. Blocks are compared by their maximum, and one block is
// searched.
template <typename T>
Top largest_of(const T* row, int64_t begin, int64_t end) {
  Top largest{NOTHING, begin};
  for (int64_t block = begin; block < end; block += SEARCHED) {
    int64_t stop = std::min(end, block + SEARCHED);
    floats best = same(NOTHING);
    words unordered{};
    for (int64_t i = block; i < stop; i += WIDTH) {
      floats x = read(row + i, stop - i);
      best = larger(x, best);
      unordered |= 0x7f800000 - ((words)x & 0x7fffffff);  // negative for a NaN, whose bits are more than infinity's
    }
    if (any((ints)(unordered >> 31)))
      for (int64_t i = block; i < stop; ++i)
        if (as_float(row[i]) != as_float(row[i])) return {as_float(row[i]), i};
    float top = ::largest(best);
    if (top > largest.value) largest = {top, block};
  }
  if (largest.value != NOTHING)
    while (as_float(row[largest.id]) != largest.value) ++largest.id;
  return largest;
}

// Probabilities as integers, whose sum is independent of the order; logits are relative to the largest one, after the temperature.
inline longs weigh(floats x, double temperature, double largest, float far) {
  doubles scaled = to_doubles(::larger(same(far), x)) / temperature;
  return __builtin_convertvector(exponential(scaled - largest) * LIKELIEST, longs);
}

template <typename V>
inline V split_mix(V x) {
  x += GAMMA;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

inline double gumbel(uint64_t bits) { return -std::log(-std::log((double(bits >> 11) + 0.5) * 0x1p-53)); }

inline uint32_t in_order(float value) {  // order-preserving map from float to integer; 0 and -0 are equal
  uint32_t bits;
  value += 0.0f;
  std::memcpy(&bits, &value, 4);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

inline float from_order(uint32_t key) {
  uint32_t bits = key >> 31 ? key & 0x7fffffff : ~key;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Smallest logit that is at least `scaled` after division by the temperature.
float least(double scaled, double temperature) {
  if (!std::isfinite(scaled)) return NOTHING;
  float logit = float(scaled * temperature);
  while (logit / temperature >= scaled) logit = std::nextafter(logit, NOTHING);
  while (logit / temperature < scaled) logit = std::nextafter(logit, -NOTHING);
  return logit;
}

// Cut: the last token before which the tokens with larger logits, or equal ones with smaller ids, weigh less than the limit. Finds one
// digit of the sorted order at a time (radix selection). Tokens come by id.
Cut cut_at(std::vector<Listed> tokens, double limit) {
  constexpr int BITS = 11;
  int64_t before = 0;
  uint32_t prefix = 0;  // known prefix of the cut's logit, in sorted order
  std::vector<int64_t> sums(1 << BITS);
  for (int shift : {22, 11, 0}) {
    std::fill(sums.begin(), sums.end(), 0);
    for (const Listed& token : tokens) sums[(in_order(token.logit) >> shift) & ((1 << BITS) - 1)] += token.weight;
    int digit = (1 << BITS) - 1;
    for (; digit > 0 && double(before + sums[digit]) < limit; --digit) before += sums[digit];
    prefix = prefix << BITS | digit;
    auto differs = [&](const Listed& token) { return in_order(token.logit) >> shift != prefix; };
    tokens.erase(std::remove_if(tokens.begin(), tokens.end(), differs), tokens.end());
  }
  Cut cut{from_order(prefix), 0};
  for (size_t i = 0; i < tokens.size() && double(before) < limit; before += tokens[i++].weight) cut.id = tokens[i].id;
  return cut;
}

inline bool is_in(float logit, int64_t id, Cut cut) { return logit > cut.logit || (logit == cut.logit && id <= cut.id); }

// One row of logits, in blocks that several threads may process.
template <typename T>
struct Row {
  const T* logits;
  int64_t size;
  int threads;

  bool takes_top_k(const Draw& draw) const { return draw.top_k > 0 && draw.top_k < size; }

  int64_t block_length(int64_t blocks) const {
    int64_t length = (size + blocks - 1) / blocks;
    return (length + WIDTH - 1) / WIDTH * WIDTH;
  }

  // Computes the largest logit of every block.
  std::vector<Top> tops(int64_t num_needed) const {
    int64_t length = block_length(num_needed), blocks = (size + length - 1) / length;
    std::vector<Top> maxima(blocks);
    for_each(size >= SHARED ? threads : 1, blocks, [&](int64_t b) {
      maxima[b] = largest_of(logits, b * length, std::min(size, (b + 1) * length));
    });
    return maxima;
  }

  Top largest(const std::vector<Top>& tops) const {
    Top best = tops[0];
    for (const Top& top : tops) best = larger(best, top);
    return best;
  }

  // Tokens whose logits are at least `logit`, by id, each with weight 1. If all tokens qualify, the row's padding follows.
  std::vector<Listed> from(float logit) const {
    ints counts{};
    for (int64_t i = 0; i < size; i += WIDTH) counts -= read(logits + i, size - i) >= logit;
    int64_t count = 0;
    for (int lane = 0; lane < WIDTH; ++lane) count += counts[lane];
    std::vector<Listed> listed(count + WIDTH);
    Listed* next = listed.data();
    for (int64_t i = 0; i < size; i += WIDTH) {
      floats x = read(logits + i, size - i);
      if (!any(x >= logit)) continue;
      for (int lane = 0; lane < WIDTH; ++lane) {
        next->logit = x[lane];
        next->id = int32_t(i + lane);
        next->weight = 1;
        next += x[lane] >= logit;
      }
    }
    listed.resize(count);
    return listed;
  }

  // Total weight of the tokens whose logits are at least each bound.
  std::array<int64_t, BOUNDS> masses(const std::array<float, BOUNDS>& bounds, double temperature, double largest) const {
    int64_t length = block_length(threads);
    std::atomic<int64_t> sums[BOUNDS] = {};
    for_each(threads, (size + length - 1) / length, [&](int64_t block) {
      int64_t begin = block * length;
      longs within[BOUNDS] = {};
      for (int64_t i = begin, end = std::min(size, begin + length); i < end; i += WIDTH) {
        floats x = read(logits + i, end - i);
        if (!any(x >= bounds[BOUNDS - 1])) continue;
        longs weights = weigh(x, temperature, largest, bounds[BOUNDS - 1]);
        for (int n = 0; n < BOUNDS; ++n) within[n] += weights & to_longs(x >= bounds[n]);
      }
      for (int n = 0; n < BOUNDS; ++n)
        for (int lane = 0; lane < WIDTH; ++lane) sums[n] += within[n][lane];
    });
    std::array<int64_t, BOUNDS> totals;
    std::copy(sums, sums + BOUNDS, totals.begin());
    return totals;
  }

  // Cut of top-k, and all its candidates by id.
  Cut top_k(int64_t count, const std::vector<Top>& tops, std::vector<Listed>& tokens) const {
    // The k-th largest block maximum is a lower bound: k logits are at least that large.
    std::vector<float> values;
    for (const Top& top : tops) values.push_back(top.value);
    float bound = NOTHING;
    if (count <= int64_t(values.size())) {
      std::nth_element(values.begin(), values.begin() + count - 1, values.end(), std::greater<float>());
      bound = values[count - 1];
    }
    tokens = from(bound);
    Cut cut = cut_at(tokens, double(count));
    auto outside = [&](const Listed& token) { return !is_in(token.logit, token.id, cut); };
    tokens.erase(std::remove_if(tokens.begin(), tokens.end(), outside), tokens.end());
    return cut;
  }

  Cut last_candidate(const Draw& draw, const std::vector<Top>& tops, double largest) const {
    Cut cut{NOTHING, size};
    std::vector<Listed> tokens;
    bool some = takes_top_k(draw);
    if (some) cut = top_k(draw.top_k, tops, tokens);
    if (draw.top_p < 1.0) {
      std::array<float, BOUNDS> bounds;
      for (int n = 0; n < BOUNDS - 1; ++n) bounds[n] = least(largest - NEAR[n], draw.temperature);
      bounds[BOUNDS - 1] = least(largest - FAR, draw.temperature);
      double limit = draw.top_p;
      if (!some) {
        std::array<int64_t, BOUNDS> within = masses(bounds, draw.temperature, largest);
        limit *= double(within.back());
        int n = 0;
        while (double(within[n]) < limit) ++n;
        tokens = from(bounds[n]);
      }
      int64_t total = 0;
      for (size_t i = 0; i < tokens.size(); i += WIDTH) {
        int count = std::min<size_t>(WIDTH, tokens.size() - i);
        floats x = same(NOTHING);
        for (int lane = 0; lane < count; ++lane) x[lane] = tokens[i + lane].logit;
        longs weights = weigh(x, draw.temperature, largest, bounds[BOUNDS - 1]);
        for (int lane = 0; lane < count; ++lane) total += tokens[i + lane].weight = weights[lane];
      }
      if (some) limit *= double(total);
      cut = cut_at(std::move(tokens), limit);
    }
    float bound = least(largest + draw.log_min_p, draw.temperature);
    return bound > cut.logit ? Cut{bound, size} : cut;
  }

  // Gumbel-max: the candidate with the largest sum of logit and noise. For most candidates the noise is not computed: with u uniform it
  // is -log(-log u), and -log u >= 1 - u, so a token can win only if 1 - u <= exp(its logit - the best sum).
  Drawn best_of(const Draw& draw, Cut cut, uint64_t key, Drawn best, int64_t begin, int64_t end) const {
    const double inverse = 1.0 / draw.temperature;
    for (int64_t i = begin; i < end; i += WIDTH) {
      floats x = read(logits + i, end - i);
      ints may_win = x >= cut.logit;
      if (!any(may_win)) continue;
      hashes bits = split_mix(key + __builtin_convertvector(load<wide_ints>(PLACES) + int32_t(i), hashes) * GAMMA);
      wide_ints upper = __builtin_convertvector(~bits >> 33, wide_ints);
      floats rest = ::to_floats(load<ints>(&upper)) * 0x1p-31f;
      double bound = best.score - 1e-3 - 1e-14 * std::abs(best.score);  // margin above the error of the float32 exponential
      doubles ahead = to_doubles(x) * inverse - bound;
      may_win &= rest <= exponential(to_floats(ahead));
      if (!any(may_win)) continue;
      for (int64_t lane = 0; lane < std::min<int64_t>(WIDTH, end - i); ++lane) {
        if (!may_win[lane] || !is_in(x[lane], i + lane, cut)) continue;
        double score = double(x[lane]) / draw.temperature + gumbel(bits[lane]);
        if (score > best.score || (score == best.score && i + lane < best.id)) best = {score, i + lane};
      }
    }
    return best;
  }

  int64_t drawn(const Draw& draw) const {
    int64_t vectors = (size + WIDTH - 1) / WIDTH;
    std::vector<Top> tops = this->tops(takes_top_k(draw) ? std::min(4 * draw.top_k, vectors) : threads);
    Top top = largest(tops);
    if (!std::isfinite(top.value)) return top.id;
    double largest = top.value / draw.temperature;
    Cut cut = last_candidate(draw, tops, largest);
    uint64_t key = split_mix(split_mix(uint64_t(draw.seed)) + uint64_t(draw.position));
    Drawn first{largest + gumbel(split_mix(key + uint64_t(top.id) * GAMMA)), top.id};
    int64_t length = block_length(threads), blocks = (size + length - 1) / length;
    std::vector<Drawn> bests(blocks);
    for_each(threads, blocks, [&](int64_t b) {
      bests[b] = best_of(draw, cut, key, first, b * length, std::min(size, (b + 1) * length));
    });
    Drawn best = first;
    for (const Drawn& one : bests)
      if (one.score > best.score || (one.score == best.score && one.id < best.id)) best = one;
    return best.id;
  }
};

// Threads take rows. If there are more threads than rows, all threads share each row in turn.
template <typename Call>
void for_rows(int64_t rows, int threads, Call of_row) {
  if (threads == 1 || rows < threads) {
    for (int64_t row = 0; row < rows; ++row) of_row(row, threads);
  } else {
    for_each(threads, rows, [&](int64_t row) { of_row(row, 1); });
  }
}

template <typename T>
void argmax_of(const T* logits, int64_t* ids, int64_t rows, int64_t size, int threads) {
  for_rows(rows, threads, [&](int64_t b, int inside) {
    Row<T> row{logits + b * size, size, inside};
    ids[b] = row.largest(row.tops(inside)).id;
  });
}

template <typename T>
void sample_of(const T* logits, const Draw* draws, int64_t* ids, int64_t count, int64_t size, int threads) {
  for_rows(count, threads, [&](int64_t n, int inside) {
    ids[n] = Row<T>{logits + draws[n].row * size, size, inside}.drawn(draws[n]);
  });
}

}  // namespace

// C functions for ctypes; sampling.py checks shapes and dtypes before the call.
extern "C" {

void argmax_bfloat16(const bf16* logits, int64_t* ids, int64_t rows, int64_t size, int threads) {
  argmax_of(logits, ids, rows, size, threads);
}

void argmax_float32(const float* logits, int64_t* ids, int64_t rows, int64_t size, int threads) {
  argmax_of(logits, ids, rows, size, threads);
}

void sample_bfloat16(const bf16* logits, const Draw* draws, int64_t* ids, int64_t count, int64_t size, int threads) {
  sample_of(logits, draws, ids, count, size, threads);
}

void sample_float32(const float* logits, const Draw* draws, int64_t* ids, int64_t count, int64_t size, int threads) {
  sample_of(logits, draws, ids, count, size, threads);
}

}  // extern "C"
