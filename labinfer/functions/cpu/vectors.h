// Vectors of 16 numbers, whatever the registers are: the compiler's own type, with operators.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

using bf16 = uint16_t;
constexpr int WIDTH = 16;           // floats in a vector
constexpr int PANEL = 2 * WIDTH;    // outputs of a product that are computed together
constexpr int64_t CACHE = 512 * 1024;  // bytes of the second-level cache that a block of inputs may take
constexpr int64_t AHEAD = 8192;     // bytes that are fetched ahead of a stream: the hardware alone does not look so far

// The processor's own vectors: bytes of one, and how many there are. Loops that keep sums in registers are written over
// them, since compilers keep wider vectors in memory.
#if defined(__AVX512F__)
constexpr int REGISTER = 64, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int REGISTER = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int REGISTER = 16, REGISTERS = 32;
#else
constexpr int REGISTER = 16, REGISTERS = 16;
#endif
constexpr int LANES = REGISTER / 4;  // floats in a register

// Memory that begins at a cache line, as what is read a line at a time should.
template <typename T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <typename Other>
  LineAllocator(const LineAllocator<Other>&) {}
  T* allocate(size_t count) { return (T*)::operator new(count * sizeof(T), std::align_val_t(64)); }
  void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t(64)); }
  bool operator==(const LineAllocator&) const { return true; }
  bool operator!=(const LineAllocator&) const { return false; }
};
template <typename T>
using LineVector = std::vector<T, LineAllocator<T>>;

// A stream of weights that is read to its end, whence it jumps to where the next one begins: what is fetched ahead follows it.
// One that was read before is near already.
struct Stream {
  const char* end = (const char*)UINTPTR_MAX;
  int64_t jump = 0;
  bool is_near = false;

  const char* ahead(const void* at) const {
    const char* soon = (const char*)at + AHEAD;
    return soon < end ? soon : soon + jump;
  }
};

typedef float floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH)));
typedef float lanes __attribute__((vector_size(REGISTER)));
typedef uint32_t lane_words __attribute__((vector_size(REGISTER)));
typedef uint16_t lane_halves __attribute__((vector_size(REGISTER / 2)));

typedef int8_t few_bytes __attribute__((vector_size(WIDTH)));

template <typename V>
inline V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <typename V>
inline void store(void* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

// The same address, of which the compiler knows nothing: it reads again what is there instead of keeping it in a register, of which
// sums need all.
template <typename T>
inline const T* opaque(const T* at) {
  asm volatile("" : "+r"(at));
  return at;
}

inline float widen(bf16 value) {
  uint32_t bits = uint32_t(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

inline bf16 narrow(float value) {  // to the nearest, ties to even, as torch does
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Whole numbers of other sizes: the compilers' own conversions take numbers one by one where a vector is several registers or
// changes its size by more than two.
#if defined(__AVX512F__)
inline words widen_words(halves value) { return (words)_mm512_cvtepu16_epi32((__m256i)value); }
inline ints widen_bytes(few_bytes value) { return (ints)_mm512_cvtepi8_epi32((__m128i)value); }
inline halves low_halves(words value) { return (halves)_mm512_cvtepi32_epi16((__m512i)value); }
inline few_bytes low_bytes(words value) { return (few_bytes)_mm512_cvtepi32_epi8((__m512i)value); }
#elif defined(__AVX2__)
template <typename Wide, typename Narrow, typename Convert>
inline Wide in_registers(Narrow value, Convert convert) {
  __m128i part[2] = {};
  std::memcpy(&part[0], &value, sizeof(value) / 2);
  std::memcpy(&part[1], (const char*)&value + sizeof(value) / 2, sizeof(value) / 2);
  __m256i wide[2] = {convert(part[0]), convert(part[1])};
  return load<Wide>(wide);
}
inline words widen_words(halves value) { return in_registers<words>(value, [](__m128i part) { return _mm256_cvtepu16_epi32(part); }); }
inline ints widen_bytes(few_bytes value) { return in_registers<ints>(value, [](__m128i part) { return _mm256_cvtepi8_epi32(part); }); }
inline halves join_halves(__m256i a, __m256i b) { return (halves)_mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8); }
inline halves low_halves(words value) {
  value &= 0xffff;
  __m256i part[2];
  std::memcpy(part, &value, sizeof(value));
  return join_halves(part[0], part[1]);
}
inline few_bytes low_bytes(words value) {
  halves low = low_halves(value & 0xff);
  __m128i part[2];
  std::memcpy(part, &low, sizeof(low));
  return (few_bytes)_mm_packus_epi16(part[0], part[1]);
}
#else
inline words widen_words(halves value) { return __builtin_convertvector(value, words); }
inline ints widen_bytes(few_bytes value) { return __builtin_convertvector(value, ints); }
inline halves low_halves(words value) { return __builtin_convertvector(value, halves); }
inline few_bytes low_bytes(words value) { return __builtin_convertvector(value, few_bytes); }
#endif

inline floats widen(halves value) { return (floats)(widen_words(value) << 16); }

inline halves narrow(floats value) {
#if defined(__AVX512BF16__)  // numbers too small for a normal float become 0
  return (halves)_mm512_cvtneps_pbh((__m512)value);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  __m256 part[2];
  std::memcpy(part, &value, sizeof(value));
  __m256i narrowed[2];
  for (int i = 0; i < 2; ++i) {
    __m256i bits = _mm256_castps_si256(part[i]), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff)), 16);
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(part[i], part[i], _CMP_UNORD_Q));
    narrowed[i] = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc0), is_nan);
  }
  return join_halves(narrowed[0], narrowed[1]);
#else
  words bits = (words)value;
  words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  words nan = (words)((bits & 0x7fffffff) > 0x7f800000);
  return low_halves((rounded & ~nan) | (nan & 0x7fc0));
#endif
}

// float16, of finite numbers only: its bits as those of a float are 2^112 times too small, also where it is denormal.
#ifdef __AVX512F__
inline floats widen_float16(halves value) { return (floats)_mm512_cvtph_ps((__m256i)value); }
#else
template <typename Wide, typename Bits>
inline Wide widen_float16(Bits bits) {
  Wide magnitude = (Wide)((bits & 0x7fff) << 13) * 0x1p112f;
  return (Wide)((Bits)magnitude | (bits & 0x8000) << 16);
}

inline floats widen_float16(halves value) { return widen_float16<floats>(widen_words(value)); }
#if defined(__F16C__)
inline lanes widen_float16(lane_halves value) { return (lanes)_mm256_cvtph_ps((__m128i)value); }
#else
inline lanes widen_float16(lane_halves value) { return widen_float16<lanes>(__builtin_convertvector(value, lane_words)); }
#endif
#endif

inline uint16_t narrow_float16(float value) {  // to the nearest, ties to even; smaller than 65520
  float magnitude = std::fabs(value), step = 0.5f;
  uint32_t bits, half;
  std::memcpy(&half, &step, 4);
  if (magnitude < 0x1p-14f) {  // denormal: its step is that of the floats from 1/2 on
    magnitude += step;
    std::memcpy(&bits, &magnitude, 4);
    bits -= half;
  } else {
    std::memcpy(&bits, &magnitude, 4);
    bits = (bits + 0xfff + (bits >> 13 & 1) >> 13) - (112 << 10);
  }
  return uint16_t(bits | (std::signbit(value) ? 0x8000 : 0));
}

inline float widen_float16(uint16_t value) {
  uint32_t bits = uint32_t(value & 0x7fff) << 13;
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  return std::copysign(magnitude * 0x1p112f, value & 0x8000 ? -1.0f : 1.0f);
}

// A number in float16 as activations are: it need not be finite.
struct half {
  uint16_t bits;
};

inline float widen(half value) {
#ifdef __F16C__
  return _cvtsh_ss(value.bits);
#else
  if ((value.bits & 0x7c00) != 0x7c00) return widen_float16(value.bits);
  return std::copysign(value.bits & 0x3ff ? NAN : INFINITY, value.bits & 0x8000 ? -1.0f : 1.0f);
#endif
}

inline half narrow_half(float value) {
#ifdef __F16C__
  return {_cvtss_sh(value, 0)};
#else
  uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (value != value) return {uint16_t(sign | 0x7e00)};
  if (std::fabs(value) >= 65520.0f) return {uint16_t(sign | 0x7c00)};
  return {narrow_float16(value)};
#endif
}

inline int64_t up_to(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

inline floats same(float value) { return value - floats{}; }

// The nearest whole numbers, ties to even.
inline ints nearest(floats value) {
#ifdef __AVX512F__
  return (ints)_mm512_cvtps_epi32((__m512)value);
#else
  ints whole;
  for (int i = 0; i < WIDTH; ++i) whole[i] = int32_t(std::nearbyint(value[i]));
  return whole;
#endif
}

// Numbers of any type, as floats.
inline floats load_floats(const half* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
  __m256 wide[2] = {_mm256_cvtph_ps(load<__m128i>(from)), _mm256_cvtph_ps(load<__m128i>(from + 8))};
  return load<floats>(wide);
#elif defined(__aarch64__)
  float32x4_t wide[4];
  for (int i = 0; i < 4; ++i) wide[i] = vcvt_f32_f16(vreinterpret_f16_u16(load<uint16x4_t>(from + 4 * i)));
  return load<floats>(wide);
#else
  floats wide;
  for (int i = 0; i < WIDTH; ++i) wide[i] = widen(from[i]);
  return wide;
#endif
}
inline void store_floats(half* to, floats value) {
#if defined(__AVX512F__)
  store(to, _mm512_cvtps_ph((__m512)value, 0));
#elif defined(__F16C__)
  __m256 part[2];
  std::memcpy(part, &value, sizeof(value));
  for (int i = 0; i < 2; ++i) store(to + 8 * i, _mm256_cvtps_ph(part[i], 0));
#elif defined(__aarch64__)
  float32x4_t part[4];
  std::memcpy(part, &value, sizeof(value));
  for (int i = 0; i < 4; ++i) store(to + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(part[i])));
#else
  for (int i = 0; i < WIDTH; ++i) to[i] = narrow_half(value[i]);
#endif
}
inline float as_float(half value) { return widen(value); }
inline float as_float(int8_t value) { return value; }
inline void set(half& to, float value) { to = narrow_half(value); }
inline floats load_floats(const bf16* from) { return widen(load<halves>(from)); }
inline floats load_floats(const int8_t* from) {
#if defined(__AVX2__) && !defined(__AVX512F__)  // straight from memory: a vector of bytes in two parts would go through it once more
  __m256 wide[2];
  for (int i = 0; i < 2; ++i)
    wide[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * i))));
  return load<floats>(wide);
#else
  return __builtin_convertvector(widen_bytes(load<few_bytes>(from)), floats);
#endif
}
inline floats load_floats(const float* from) { return load<floats>(from); }
inline void store_floats(bf16* to, floats value) { store(to, narrow(value)); }
inline void store_floats(float* to, floats value) { store(to, value); }
inline float as_float(bf16 value) { return widen(value); }
inline float as_float(float value) { return value; }
inline void set(bf16& to, float value) { to = narrow(value); }
inline void set(float& to, float value) { to = value; }

// Each number in the place of the one whose index differs by STEP's bit.
template <int STEP>
inline floats exchanged(floats value) {
#define AT(i) (i) ^ STEP
#define EACH AT(0), AT(1), AT(2), AT(3), AT(4), AT(5), AT(6), AT(7), AT(8), AT(9), AT(10), AT(11), AT(12), AT(13), AT(14), AT(15)
#ifdef __clang__
  return __builtin_shufflevector(value, value, EACH);
#else  // gcc has the other one from version 12 on
  return __builtin_shuffle(value, words{EACH});
#endif
#undef EACH
#undef AT
}

// Of two vectors, a before b in a matrix: its lanes without STEP's bit come from those of a and b without it, or, with
// SECOND, from those with it. In stages of 8, 4, 2, 1 this transposes.
template <int STEP, bool SECOND>
inline words both(words a, words b) {
#define AT(i) ((i) & STEP ? (SECOND ? 16 + (i) : 16 + (i) - STEP) : (SECOND ? (i) + STEP : (i)))
#define EACH AT(0), AT(1), AT(2), AT(3), AT(4), AT(5), AT(6), AT(7), AT(8), AT(9), AT(10), AT(11), AT(12), AT(13), AT(14), AT(15)
#ifdef __clang__
  return __builtin_shufflevector(a, b, EACH);
#else
  return __builtin_shuffle(a, b, words{EACH});
#endif
#undef EACH
#undef AT
}

// a > b ? a : b, a < b ? a : b, and what is where x is not below a bound, else 0; compilers take the choices one by one where a
// vector is several registers. Of a number and none the second comes out.
#if defined(__AVX2__) && !defined(__AVX512F__)
#define BY_REGISTERS(OPERATION)                                                                                          \
  __m256 one[2], other[2];                                                                                               \
  std::memcpy(one, &a, sizeof(a)), std::memcpy(other, &b, sizeof(b));                                                    \
  for (int i = 0; i < 2; ++i) one[i] = OPERATION;                                                                        \
  return load<floats>(one);
inline floats larger(floats a, floats b) { BY_REGISTERS(_mm256_max_ps(one[i], other[i])) }
inline floats smaller(floats a, floats b) { BY_REGISTERS(_mm256_min_ps(one[i], other[i])) }
inline floats from_on(float bound, floats a, floats b) {
  BY_REGISTERS(_mm256_andnot_ps(_mm256_cmp_ps(one[i], _mm256_set1_ps(bound), _CMP_LT_OQ), other[i]))
}
#elif defined(__aarch64__)
#define BY_REGISTERS(OPERATION)                                                                                          \
  float32x4_t one[4], other[4];                                                                                          \
  std::memcpy(one, &a, sizeof(a)), std::memcpy(other, &b, sizeof(b));                                                    \
  for (int i = 0; i < 4; ++i) one[i] = OPERATION;                                                                        \
  return load<floats>(one);
inline floats larger(floats a, floats b) { BY_REGISTERS(vbslq_f32(vcgtq_f32(one[i], other[i]), one[i], other[i])) }
inline floats smaller(floats a, floats b) { BY_REGISTERS(vbslq_f32(vcltq_f32(one[i], other[i]), one[i], other[i])) }
inline floats from_on(float bound, floats a, floats b) {
  BY_REGISTERS(vbslq_f32(vcltq_f32(one[i], vdupq_n_f32(bound)), vdupq_n_f32(0.0f), other[i]))
}
#else
inline floats larger(floats a, floats b) { return a > b ? a : b; }
inline floats smaller(floats a, floats b) { return a < b ? a : b; }
inline floats from_on(float bound, floats x, floats value) { return x < bound ? floats{} : value; }
#endif
#undef BY_REGISTERS

// a * b + c, rounded once where the processor can. Compilers do so on their own at some places and not at others.
inline floats multiply_add(floats a, floats b, floats c) {
#if defined(__AVX512F__)
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  __m256 part[3][2];
  std::memcpy(part[0], &a, sizeof(a)), std::memcpy(part[1], &b, sizeof(b)), std::memcpy(part[2], &c, sizeof(c));
  for (int i = 0; i < 2; ++i) part[0][i] = _mm256_fmadd_ps(part[0][i], part[1][i], part[2][i]);
  return load<floats>(part[0]);
#elif defined(__aarch64__)
  float32x4_t part[3][4];
  std::memcpy(part[0], &a, sizeof(a)), std::memcpy(part[1], &b, sizeof(b)), std::memcpy(part[2], &c, sizeof(c));
  for (int i = 0; i < 4; ++i) part[0][i] = vfmaq_f32(part[2][i], part[0][i], part[1][i]);
  return load<floats>(part[0]);
#else
  return a * b + c;
#endif
}

inline floats magnitude(floats value) { return (floats)((words)value & 0x7fffffff); }

inline float sum(floats value) {
  value += exchanged<8>(value);
  value += exchanged<4>(value);
  value += exchanged<2>(value);
  return value[0] + value[1];
}

inline float largest(floats value) {
  value = larger(value, exchanged<8>(value));
  value = larger(value, exchanged<4>(value));
  value = larger(value, exchanged<2>(value));
  return std::max(value[0], value[1]);
}

}  // namespace
