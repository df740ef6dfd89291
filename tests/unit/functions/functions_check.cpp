// Whole functions of models in each dtype against plain ones, for the processor that they are compiled for: products, norms,
// activations, attention over what was written to a cache, and the recurrence of Mamba-2.
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "attention_inner.h"

extern "C" {
#define DECLARE(DTYPE, NUMBER)                                                                                            \
  void add_rms_norm_##DTYPE(NUMBER*, const NUMBER*, const void*, NUMBER*, int64_t, int64_t, float, int, int);             \
  void silu_and_mul_##DTYPE(const NUMBER*, NUMBER*, int64_t, int64_t, int);                                               \
  void gelu_and_mul_##DTYPE(const NUMBER*, NUMBER*, int64_t, int64_t, int);                                               \
  void rotate_and_write_##DTYPE(const NUMBER*, const NUMBER*, const NUMBER*, const void*, const int64_t*, NUMBER*, void*, \
                                float*, void*, float*, int64_t, int64_t, int64_t, int64_t, int64_t, int, int, int64_t,    \
                                int, int);                                                                                \
  void causal_conv_##DTYPE(const NUMBER*, const float*, const float*, NUMBER*, const int64_t*, const int64_t*,            \
                           const int64_t*, NUMBER*, int64_t, int64_t, int64_t, int64_t, int);                             \
  void selective_scan_##DTYPE(const NUMBER*, const NUMBER*, const float*, const float*, const float*, const int64_t*,     \
                              float*, const int64_t*, const int64_t*, const int64_t*, NUMBER*, int64_t, int64_t, int64_t, \
                              int64_t, int64_t, int64_t, float, float, int);                                              \
  void gated_group_norm_##DTYPE(const NUMBER*, const NUMBER*, const NUMBER*, NUMBER*, int64_t, int64_t, int64_t, int64_t, \
                                float, int);
DECLARE(bfloat16, bf16)
DECLARE(float32, float)
DECLARE(float16, half)
void pack_float32(float*, int64_t, int64_t, int);
void pack_float16(half*, int64_t, int64_t, int);
void linear_float32(const float*, const float*, const float*, float*, int64_t, int64_t, int64_t, int, int);
void linear_float16(const half*, const half*, const half*, half*, int64_t, int64_t, int64_t, int, int);
void pack_weight(bf16*, int64_t, int64_t, int);
void linear(const bf16*, const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t, int, int);
#define ATTEND(NAME)                                                                                                      \
  void NAME(const void*, const void*, const float*, const void*, const float*, const int64_t*, const int64_t*,            \
            const int64_t*, const int64_t*, const int64_t*, const float*, void*, int64_t, int64_t, int64_t, int64_t,      \
            int64_t, int, int, int, float, float, int64_t, int);
ATTEND(attend)
#ifdef HAS_BFLOAT16_DOT
ATTEND(attend_dot)
#endif
#ifdef HAS_AMX
ATTEND(attend_amx)
int64_t allow_amx();
#endif
}

namespace {

constexpr int THREADS = 2;
int failures = 0;
std::mt19937 random_bits(1);

int whole(int low, int high) { return low + int(random_bits() % uint32_t(high - low + 1)); }

void check(double got, double expected, double bound, const std::string& what) {
  if (std::fabs(got - expected) <= bound * (1.0 + std::fabs(expected))) return;
  if (++failures < 10) std::printf("wrong: %s: %g, not %g\n", what.c_str(), got, expected);
}

struct Bfloat16Functions {
  using Number = bf16;
  static constexpr Dtype DTYPE = Dtype::BFLOAT16;
  static constexpr double NEAR = 0x1p-6;
  static constexpr const char* NAME = "bfloat16";
  static constexpr auto norm = add_rms_norm_bfloat16;
  static constexpr auto silu = silu_and_mul_bfloat16, gelu = gelu_and_mul_bfloat16;
  static constexpr auto rotate = rotate_and_write_bfloat16;
  static constexpr auto conv = causal_conv_bfloat16;
  static constexpr auto scan = selective_scan_bfloat16;
  static constexpr auto group_norm = gated_group_norm_bfloat16;
};
struct Float32Functions {
  using Number = float;
  static constexpr Dtype DTYPE = Dtype::FLOAT32;
  static constexpr double NEAR = 4e-6;
  static constexpr const char* NAME = "float32";
  static constexpr auto norm = add_rms_norm_float32;
  static constexpr auto silu = silu_and_mul_float32, gelu = gelu_and_mul_float32;
  static constexpr auto rotate = rotate_and_write_float32;
  static constexpr auto conv = causal_conv_float32;
  static constexpr auto scan = selective_scan_float32;
  static constexpr auto group_norm = gated_group_norm_float32;
  static constexpr auto pack = pack_float32;
  static constexpr auto linear = linear_float32;
};
struct Float16Functions {
  using Number = half;
  static constexpr Dtype DTYPE = Dtype::FLOAT16;
  static constexpr double NEAR = 0x1p-9;
  static constexpr const char* NAME = "float16";
  static constexpr auto norm = add_rms_norm_float16;
  static constexpr auto silu = silu_and_mul_float16, gelu = gelu_and_mul_float16;
  static constexpr auto rotate = rotate_and_write_float16;
  static constexpr auto conv = causal_conv_float16;
  static constexpr auto scan = selective_scan_float16;
  static constexpr auto group_norm = gated_group_norm_float16;
  static constexpr auto pack = pack_float16;
  static constexpr auto linear = linear_float16;
};

// Numbers with so few bits that every dtype holds them; int8, too, where the largest of a head is 127 / 64.
template <typename Number>
std::vector<Number> some(int64_t count, int most = 127, float unit = 1.0f / 64) {
  std::vector<Number> numbers(count);
  for (Number& number : numbers) set(number, float(whole(-most, most)) * unit);
  return numbers;
}

// Sums of few bits, which are exact.
template <typename Functions>
void check_linear(int64_t tokens, int64_t outputs, int64_t inputs) {
  using Number = typename Functions::Number;
  auto x = some<Number>(tokens * inputs, 1, 1.0f), weight = some<Number>(outputs * inputs, 1, 1.0f);
  auto bias = some<Number>(outputs, 9, 1.0f), packed = weight;
  std::vector<Number> out(tokens * outputs);
  Functions::pack(packed.data(), outputs, inputs, THREADS);
  Functions::linear(x.data(), packed.data(), bias.data(), out.data(), tokens, outputs, inputs, 0, THREADS);
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t output = 0; output < outputs; ++output) {
      float sum = as_float(bias[output]);
      for (int64_t i = 0; i < inputs; ++i) sum += as_float(x[token * inputs + i]) * as_float(weight[output * inputs + i]);
      check(as_float(out[token * outputs + output]), sum, 0, std::string(Functions::NAME) + " product");
    }
}

// A product with the activation of a gated MLP has the bits of both after each other.
void check_gated(int64_t tokens, int64_t columns, int64_t inputs) {
  auto x = some<bf16>(tokens * inputs), weight = some<bf16>(2 * columns * inputs), bias = some<bf16>(2 * columns);
  std::vector<bf16> gate_up(tokens * 2 * columns), expected(tokens * columns), got(tokens * columns);
  pack_weight(weight.data(), 2 * columns, inputs, THREADS);
  linear(x.data(), weight.data(), bias.data(), gate_up.data(), tokens, 2 * columns, inputs, 0, THREADS);
  for (bool gelu : {false, true}) {
    (gelu ? gelu_and_mul_bfloat16 : silu_and_mul_bfloat16)(gate_up.data(), expected.data(), tokens, columns, THREADS);
    linear(x.data(), weight.data(), bias.data(), got.data(), tokens, 2 * columns, inputs, gelu ? 2 : 1, THREADS);
    for (size_t i = 0; i < got.size(); ++i) check(as_float(got[i]), as_float(expected[i]), 0, gelu ? "gated by GELU" : "gated by SiLU");
  }
}

template <typename Functions>
void check_elementwise(int64_t tokens, int64_t size) {
  using Number = typename Functions::Number;
  auto hidden = some<Number>(tokens * size), delta = some<Number>(tokens * size), weight = some<Number>(size), before = hidden;
  std::vector<Number> out(tokens * size);
  Functions::norm(hidden.data(), delta.data(), weight.data(), out.data(), tokens, size, 1e-5f, sizeof(Number) == 4, THREADS);
  for (int64_t token = 0; token < tokens; ++token) {
    double squares = 0;
    for (int64_t i = 0; i < size; ++i) {
      double sum = as_float(hidden[token * size + i]);
      check(sum, as_float(before[token * size + i]) + as_float(delta[token * size + i]), Functions::NEAR, "sum");
      squares += sum * sum;
    }
    for (int64_t i = 0; i < size; ++i)
      check(as_float(out[token * size + i]),
            as_float(hidden[token * size + i]) / std::sqrt(squares / size + 1e-5) * as_float(weight[i]), Functions::NEAR,
            std::string(Functions::NAME) + " norm");
  }
  auto gate_up = some<Number>(tokens * 2 * size, 127, 1.0f / 8);
  for (bool is_silu : {true, false}) {
    (is_silu ? Functions::silu : Functions::gelu)(gate_up.data(), out.data(), tokens, size, THREADS);
    for (int64_t token = 0; token < tokens; ++token)
      for (int64_t i = 0; i < size; ++i) {
        double gate = as_float(gate_up[token * 2 * size + i]), up = as_float(gate_up[token * 2 * size + size + i]);
        double slope = is_silu ? gate : 1.5957691216 * (gate + 0.044715 * gate * gate * gate);
        check(as_float(out[token * size + i]), gate / (1 + std::exp(-slope)) * up, Functions::NEAR,
              std::string(Functions::NAME) + (is_silu ? " silu" : " gelu"));
      }
  }
}

// Bytes of a cache's numbers.
int64_t number_bytes(Dtype dtype) { return dtype == Dtype::FLOAT32 ? 4 : dtype == Dtype::INT8 ? 1 : 2; }

// The last tokens of one sequence, whose keys and values are written first.
template <typename Functions, typename Attend>
void check_attention(Attend attend, Dtype cache_dtype, bool tiled, int64_t size, int64_t context, int64_t tokens) {
  using Number = typename Functions::Number;
  constexpr int64_t HEADS = 3, KV = 2, ROW = HEADS + 2 * KV, BLOCK = 16;
  int64_t blocks = (context + BLOCK - 1) / BLOCK;
  auto qkv = some<Number>(context * ROW * size);
  for (int64_t head = 0; head < context * ROW; ++head) set(qkv[head * size], 127.0f / 64);
  std::vector<int64_t> slots(context), table(blocks);
  for (int64_t i = 0; i < blocks; ++i) table[i] = blocks - 1 - i;
  for (int64_t i = 0; i < context; ++i) slots[i] = table[i / BLOCK] * BLOCK + i % BLOCK;
  std::vector<Number> q(context * HEADS * size), out(tokens * HEADS * size);
  std::vector<char> keys(blocks * BLOCK * KV * size * number_bytes(cache_dtype), 0x7f), values = keys;
  std::vector<float> key_scales(blocks * BLOCK * KV), value_scales = key_scales;
  bool has_scales = cache_dtype == Dtype::INT8;
  float *k_scales = has_scales ? key_scales.data() : nullptr, *v_scales = has_scales ? value_scales.data() : nullptr;
  Functions::rotate(qkv.data(), nullptr, nullptr, nullptr, slots.data(), q.data(), keys.data(), k_scales, values.data(), v_scales,
                    context, HEADS, KV, size, 0, 0, int(cache_dtype), BLOCK, tiled, THREADS);
  int64_t table_ptr[] = {0, blocks}, row_ptr[] = {0, tokens}, lengths[] = {context}, head_ptr[] = {0, 1, 3};
  const Number* from = q.data() + (context - tokens) * HEADS * size;
  attend(from, keys.data(), k_scales, values.data(), v_scales, table.data(), table_ptr, row_ptr, lengths, head_ptr, nullptr,
         out.data(), 1, HEADS, KV, size, BLOCK, int(Functions::DTYPE), int(cache_dtype), tiled, 0.3f, 0.0f, 0, THREADS);
  auto number = [&](int64_t token, int64_t head, int64_t i) { return double(as_float(qkv[(token * ROW + head) * size + i])); };
  std::string what = std::string(Functions::NAME) + " attention over dtype " + std::to_string(int(cache_dtype)) +
                     (tiled ? " in tiles of " : " in rows of ") + std::to_string(size);
  for (int64_t row = 0; row < tokens; ++row)
    for (int64_t head = 0; head < HEADS; ++head) {
      int64_t token = context - tokens + row, kv = head > 0;
      std::vector<double> sums(size), weights(token + 1);
      double mass = 0;
      for (int64_t key = 0; key <= token; ++key) {
        double score = 0;
        for (int64_t i = 0; i < size; ++i) score += number(token, head, i) * number(key, HEADS + kv, i);
        mass += weights[key] = std::exp(0.3 * score);
      }
      for (int64_t key = 0; key <= token; ++key)
        for (int64_t i = 0; i < size; ++i) sums[i] += weights[key] / mass * number(key, HEADS + KV + kv, i);
      for (int64_t i = 0; i < size; ++i)
        check(as_float(out[(row * HEADS + head) * size + i]), sums[i], Functions::NEAR, what);
    }
}

template <typename Functions, typename Attend>
void check_caches(Attend attend) {
  for (Dtype cache_dtype : {Dtype::BFLOAT16, Dtype::FLOAT32, Dtype::FLOAT16, Dtype::INT8}) {
    for (int64_t size : {32, 48}) check_attention<Functions>(attend, cache_dtype, true, size, 40, 9);
    check_attention<Functions>(attend, cache_dtype, true, 16, 300, 1);
    for (int64_t size : {7, 38}) check_attention<Functions>(attend, cache_dtype, false, size, 40, 9);
  }
}

double silu(double value) { return value / (1 + std::exp(-value)); }

// Two sequences, of which the first continues a state. `threads` decides whether the columns of a head are computed apart.
template <typename Functions>
void check_mamba(int64_t heads, int64_t state_size, int64_t head_size, int threads) {
  using Number = typename Functions::Number;
  constexpr int64_t TOKENS = 21, GROUPS = 2, WIDTH_OF_CONV = 4;
  int64_t row_ptr[] = {0, 1, TOKENS}, lengths[] = {9, TOKENS - 1}, slots[] = {1, 0}, values = heads * head_size;
  int64_t channels = values + 2 * GROUPS * state_size, size = heads * state_size * head_size;
  auto x = some<Number>(TOKENS * channels), inputs = some<Number>(2 * (WIDTH_OF_CONV - 1) * channels), kept = inputs;
  auto taps = some<float>(WIDTH_OF_CONV * channels, 31), bias = some<float>(channels);
  std::vector<Number> xbc(TOKENS * channels), out(TOKENS * values);
  Functions::conv(x.data(), taps.data(), bias.data(), kept.data(), row_ptr, lengths, slots, xbc.data(), 2, channels, channels,
                  WIDTH_OF_CONV, THREADS);
  auto dt = some<Number>(TOKENS * heads);
  auto rate = some<float>(heads), dt_bias = some<float>(heads), skip = some<float>(heads), state = some<float>(2 * size);
  for (float& number : rate) number = std::fabs(number);
  std::vector<double> exact(state.begin(), state.end());
  std::vector<int64_t> groups(heads);
  for (int64_t head = 0; head < heads; ++head) groups[head] = head > 0;
  Functions::scan(xbc.data(), dt.data(), rate.data(), dt_bias.data(), skip.data(), groups.data(), state.data(), row_ptr, lengths,
                  slots, out.data(), heads, 2, heads, GROUPS, state_size, head_size, 0.25f, 2.0f, threads);
  for (int64_t b = 0; b < 2; ++b) {
    double* matrix = exact.data() + slots[b] * size;
    bool is_new = lengths[b] == row_ptr[b + 1] - row_ptr[b];
    if (is_new) std::fill_n(matrix, size, 0.0);
    for (int64_t t = row_ptr[b]; t < row_ptr[b + 1]; ++t) {
      for (int64_t c = 0; c < channels; ++c) {
        double sum = bias[c];
        for (int64_t w = 0; w < WIDTH_OF_CONV; ++w) {
          int64_t from = t - row_ptr[b] + w - WIDTH_OF_CONV + 1, past = slots[b] * (WIDTH_OF_CONV - 1) + w;
          if (from >= 0) sum += taps[w * channels + c] * as_float(x[(row_ptr[b] + from) * channels + c]);
          else if (!is_new) sum += taps[w * channels + c] * as_float(inputs[(past + t - row_ptr[b]) * channels + c]);
        }
        check(as_float(xbc[t * channels + c]), silu(sum), Functions::NEAR, std::string(Functions::NAME) + " convolution");
      }
      const Number *token = xbc.data() + t * channels, *keys = token + values;
      for (int64_t head = 0; head < heads; ++head) {
        double step = std::log1p(std::exp(double(as_float(dt[t * heads + head])) + dt_bias[head]));
        step = std::min(2.0, std::max(0.25, step));
        for (int64_t p = 0; p < head_size; ++p) {
          double input = as_float(token[head * head_size + p]), read = skip[head] * input;
          for (int64_t n = 0; n < state_size; ++n) {
            double& number = matrix[(head * state_size + n) * head_size + p];
            int64_t at = groups[head] * state_size + n;
            number = std::exp(-rate[head] * step) * number + as_float(keys[at]) * step * input;
            read += as_float(keys[GROUPS * state_size + at]) * number;
          }
          double magnitude = Functions::NEAR * std::sqrt(double(state_size));
          check(as_float(out[t * values + head * head_size + p]), read, magnitude, std::string(Functions::NAME) + " scan");
        }
      }
    }
  }
  for (int64_t i = 0; i < 2 * size; ++i) check(state[i], exact[i], 1e-5, std::string(Functions::NAME) + " state");
  auto gate = some<Number>(TOKENS * values), weight = some<Number>(values), normed = out;
  Functions::group_norm(out.data(), gate.data(), weight.data(), normed.data(), values, TOKENS, heads, head_size, 1e-5f, THREADS);
  for (int64_t group = 0; group < TOKENS * heads; ++group) {
    double squares = 0;
    auto gated = [&](int64_t i) { return as_float(out[i]) * silu(as_float(gate[i])); };
    for (int64_t i = group * head_size; i < (group + 1) * head_size; ++i) squares += gated(i) * gated(i);
    for (int64_t i = group * head_size; i < (group + 1) * head_size; ++i)
      check(as_float(normed[i]), gated(i) / std::sqrt(squares / head_size + 1e-5) * as_float(weight[i % values]),
            Functions::NEAR, std::string(Functions::NAME) + " norm of groups");
  }
}

template <typename Functions>
void check_mambas() {
  check_mamba<Functions>(3, 5, 7, 1);
  check_mamba<Functions>(3, 18, 150, 1);
  check_mamba<Functions>(2, 9, 150, 4);
}

// Every number of float16 comes back, infinite ones and those that are none, too, one by one and many at once.
void check_halves() {
  for (uint32_t first = 0; first < 0x10000; first += WIDTH) {
    half numbers[WIDTH], back[WIDTH];
    for (int i = 0; i < WIDTH; ++i) numbers[i].bits = uint16_t(first + i);
    store_floats(back, load_floats(numbers));
    for (int i = 0; i < WIDTH; ++i) {
      bool is_none = (numbers[i].bits & 0x7fff) > 0x7c00;
      uint16_t alone = narrow_half(widen(numbers[i])).bits;
      for (uint16_t got : {back[i].bits, alone})
        if (is_none ? (got & 0x7fff) <= 0x7c00 : got != numbers[i].bits) check(got, numbers[i].bits, 0, "float16");
    }
  }
  for (float value : {65519.0f, 65520.0f, 1e9f, 0x1p-25f, 0x1.8p-25f, 1.00048828125f, 1.00146484375f}) {
    half numbers[WIDTH];
    store_floats(numbers, same(value));
    check(numbers[0].bits, narrow_half(value).bits, 0, "float16 of a float");
  }
  check(narrow_half(65519.0f).bits, 0x7bff, 0, "largest float16");
  check(narrow_half(65520.0f).bits, 0x7c00, 0, "infinite float16");
}

}  // namespace

int main() {
  check_halves();
  for (int64_t tokens : {1, 14, 250}) {
    check_linear<Float32Functions>(tokens, 70, 300);
    check_linear<Float16Functions>(tokens, 70, 300);
  }
  check_gated(1, 64, 38);
  check_gated(37, 96, 38);
  check_elementwise<Bfloat16Functions>(3, 39);
  check_elementwise<Float32Functions>(3, 39);
  check_elementwise<Float16Functions>(3, 39);
  check_mambas<Bfloat16Functions>();
  check_mambas<Float32Functions>();
  check_mambas<Float16Functions>();
  check_caches<Bfloat16Functions>(attend);
  check_caches<Float32Functions>(attend);
  check_caches<Float16Functions>(attend);
#ifdef HAS_BFLOAT16_DOT
  check_caches<Bfloat16Functions>(attend_dot);
#endif
#ifdef HAS_AMX
  if (allow_amx()) check_caches<Bfloat16Functions>(attend_amx);
#endif
  std::printf("%d wrong\n", failures);
  return failures != 0;
}
