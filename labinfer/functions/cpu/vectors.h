// Operations on vectors of 16 numbers, for any register size.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "registers.h"

namespace {

using bf16 = uint16_t;
constexpr int PANEL = 2 * WIDTH;       // outputs of a product that are computed at once
constexpr int64_t CACHE = 512 * 1024;  // bytes of second-level cache by which blocks of inputs are sized
constexpr int64_t AHEAD = 8192;        // prefetch distance in bytes; the hardware prefetcher alone does not reach that far

// Allocator of memory aligned to cache lines.
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

// Contiguous range of memory.
struct Stretch {
  const char* begin;
  int64_t bytes;

  Stretch(const void* begin, int64_t bytes) : begin((const char*)begin), bytes(bytes) {}
  const char* end() const { return begin + bytes; }
};

// Sequential read of weights, with the distance from its end to the beginning of the next stream, which prefetches follow. `is_near` marks
// memory that is in the cache already.
struct Stream {
  const char* end = (const char*)UINTPTR_MAX;
  int64_t jump = 0;
  bool is_near = false;

  Stream() = default;
  Stream(const char* end, int64_t jump) : end(end), jump(jump) {}

  // Prefetch address during a pass of ROWS rows. A pass of few rows is usually the only one, and its inner loop has no time for more than
  // an addition.
  template <int ROWS = 1>
  const char* ahead(const void* at) const {
    const char* soon = (const char*)at + AHEAD;
    if constexpr (CAN_SPREAD && ROWS >= 6) soon = fetched + ((intptr_t(at) - read) * share >> SHIFT);
    return soon < end ? soon : soon + jump;
  }

  // Stream of one of several passes over a range: meanwhile it prefetches its share of the next stream, which has `bytes` bytes.
  Stream in_pass(const Stretch& range, int64_t next_bytes, int64_t pass, int64_t passes) const {
    Stream stream;
    stream.read = intptr_t(range.begin);
    stream.fetched = end + jump + pass * next_bytes / passes;
    stream.share = (next_bytes << SHIFT) / (range.bytes * passes);
    return stream;
  }

  // Not used with smaller registers, where arithmetic takes several times as long as memory.
  static constexpr bool CAN_SPREAD = REGISTER == 64;

 private:
  static constexpr int SHIFT = 12;

  intptr_t read = 0;
  const char* fetched = (const char*)AHEAD;
  int64_t share = 1 << SHIFT;  // bytes prefetched per byte read, in units of 2^-SHIFT
};

// Hides an address from the compiler, so that it reloads from there instead of keeping the value in a register that sums need.
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

inline floats widen(halves value) { return (floats)(widen_words(value) << 16); }

inline halves narrow(floats value) {
#if defined(__AVX512BF16__)  // subnormal numbers become 0
  return (halves)_mm512_cvtneps_pbh((__m512)value);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  __m256i narrowed[2];
  for (int i = 0; i < 2; ++i) {
    __m256i bits = (__m256i)value.part[i], odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff)), 16);
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps((__m256)value.part[i], (__m256)value.part[i], _CMP_UNORD_Q));
    narrowed[i] = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc0), is_nan);
  }
  return join_halves(narrowed[0], narrowed[1]);
#else
  words bits = (words)value;
  words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  words nan = words{} - (0x7f800000 - (bits & 0x7fffffff) >> 31);
  return low_halves((rounded & ~nan) | (nan & 0x7fc0));
#endif
}

// float16 to float32, for finite numbers: the bits as a float are 2^112 times too small, also for subnormals.
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

// float16 activation to float32; it may be infinite or NaN.
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

// Rounds to the nearest integers, ties to even.
inline ints nearest(floats value) {
#ifdef __AVX512F__
  return (ints)_mm512_cvtps_epi32((__m512)value);
#else
  ints whole;
#if defined(__AVX2__)
  for (int i = 0; i < ints::COUNT; ++i) whole.part[i] = (ints::Part)_mm256_cvtps_epi32((__m256)value.part[i]);
#else
  for (int i = 0; i < WIDTH; ++i) whole[i] = int32_t(std::nearbyint(value[i]));
#endif
  return whole;
#endif
}

// Loads numbers of any type as float32.
inline floats load_floats(const half* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
  floats wide;
  for (int i = 0; i < 2; ++i) wide.part[i] = (lanes)_mm256_cvtph_ps(load<__m128i>(from + 8 * i));
  return wide;
#elif defined(__aarch64__)
  floats wide;
  for (int i = 0; i < 4; ++i) wide.part[i] = (lanes)vcvt_f32_f16(vreinterpret_f16_u16(load<uint16x4_t>(from + 4 * i)));
  return wide;
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
  for (int i = 0; i < 2; ++i) store(to + 8 * i, _mm256_cvtps_ph((__m256)value.part[i], 0));
#elif defined(__aarch64__)
  for (int i = 0; i < 4; ++i) store(to + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)value.part[i])));
#else
  for (int i = 0; i < WIDTH; ++i) to[i] = narrow_half(value[i]);
#endif
}
inline float as_float(half value) { return widen(value); }
inline float as_float(int8_t value) { return value; }
inline void set(half& to, float value) { to = narrow_half(value); }
inline floats load_floats(const bf16* from) { return widen(load<halves>(from)); }
inline floats load_floats(const int8_t* from) {
#if defined(__AVX2__) && !defined(__AVX512F__)  // loads each half from memory, see docs/decisions/0070
  floats wide;
  for (int i = 0; i < 2; ++i)
    wide.part[i] = (lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * i))));
  return wide;
#else
  return to_floats(widen_bytes(load<few_bytes>(from)));
#endif
}
inline floats load_floats(const float* from) { return load<floats>(from); }
inline void store_floats(bf16* to, floats value) { store(to, narrow(value)); }
inline void store_floats(float* to, floats value) { store(to, value); }
inline float as_float(bf16 value) { return widen(value); }
inline float as_float(float value) { return value; }
inline void set(bf16& to, float value) { to = narrow(value); }
inline void set(float& to, float value) { to = value; }

// Shuffle of two vectors: the i-th number is a[Places::of(i, SIZE)], where indices from SIZE on refer to b. V has SIZE numbers of 4 bytes.
template <typename Places, typename V>
inline V shuffled(V a, V b) {
  constexpr int SIZE = sizeof(V) / 4;
#define FOUR(i) Places::of(i, SIZE), Places::of(i + 1, SIZE), Places::of(i + 2, SIZE), Places::of(i + 3, SIZE)
#ifdef __clang__
#define SHUFFLED(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // gcc has __builtin_shufflevector from version 12 on
  typedef uint32_t Indices __attribute__((vector_size(sizeof(V))));
#define SHUFFLED(...) __builtin_shuffle(a, b, Indices{__VA_ARGS__})
#endif
  if constexpr (SIZE == 16) return SHUFFLED(FOUR(0), FOUR(4), FOUR(8), FOUR(12));
  else if constexpr (SIZE == 8) return SHUFFLED(FOUR(0), FOUR(4));
  else return SHUFFLED(FOUR(0));
#undef SHUFFLED
#undef FOUR
}

// One transposition step of two rows a and b of a matrix: lanes without STEP's bit come from the lanes of a and b without it, or, with
// SECOND, from those with it. Stages of 8, 4, 2, 1 transpose 16 rows.
template <int STEP, bool SECOND>
struct Woven {
  static constexpr int of(int i, int size) { return i & STEP ? (SECOND ? size + i : size + i - STEP) : (SECOND ? i + STEP : i); }
};

template <int STEP, bool SECOND>
inline words both(const words& a, const words& b) {
#ifdef __AVX512F__
  return shuffled<Woven<STEP, SECOND>>(a, b);
#else
  constexpr int APART = STEP / LANES;  // registers
  words chosen;
  for (int i = 0; i < words::COUNT; ++i)
    if constexpr (APART == 0) chosen.part[i] = shuffled<Woven<STEP % LANES, SECOND>>(a.part[i], b.part[i]);
    else if (i & APART) chosen.part[i] = SECOND ? b.part[i] : b.part[i - APART];
    else chosen.part[i] = SECOND ? a.part[i + APART] : a.part[i];
  return chosen;
#endif
}

// Swaps each number with the one whose index differs by STEP's bit.
template <int STEP>
struct Swapped {
  static constexpr int of(int i, int) { return i ^ STEP; }
};

template <int STEP>
inline floats exchanged(const floats& value) {
#ifdef __AVX512F__
  return shuffled<Swapped<STEP>>(value, value);
#else
  floats changed;
  for (int i = 0; i < floats::COUNT; ++i)
    if constexpr (STEP < LANES) changed.part[i] = shuffled<Swapped<STEP>>(value.part[i], value.part[i]);
    else changed.part[i] = value.part[i ^ STEP / LANES];
  return changed;
#endif
}

// larger, smaller, "x if not below a bound, else 0", and a * b + c (rounded once if the processor has FMA). Written with intrinsics,
// because compilers turn the expressions into one instruction only sometimes. If an argument is NaN, the second one is returned.
#if defined(__AVX512F__)
inline floats larger(floats a, floats b) { return (floats)_mm512_max_ps((__m512)a, (__m512)b); }
inline floats smaller(floats a, floats b) { return (floats)_mm512_min_ps((__m512)a, (__m512)b); }
inline floats from_on(float bound, floats x, floats value) { return x < bound ? floats{} : value; }
inline floats multiply_add(floats a, floats b, floats c) { return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#else
#if defined(__AVX__)
inline lanes larger(lanes a, lanes b) { return (lanes)_mm256_max_ps((__m256)a, (__m256)b); }
inline lanes smaller(lanes a, lanes b) { return (lanes)_mm256_min_ps((__m256)a, (__m256)b); }
inline lanes from_on(lanes bound, lanes x, lanes value) {
  return (lanes)_mm256_andnot_ps(_mm256_cmp_ps((__m256)x, (__m256)bound, _CMP_LT_OQ), (__m256)value);
}
#elif defined(__aarch64__)
inline lanes larger(lanes a, lanes b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline lanes smaller(lanes a, lanes b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline lanes from_on(lanes bound, lanes x, lanes value) { return vbslq_f32(vcltq_f32(x, bound), vdupq_n_f32(0.0f), value); }
#elif defined(__SSE2__)
inline lanes larger(lanes a, lanes b) { return (lanes)_mm_max_ps((__m128)a, (__m128)b); }
inline lanes smaller(lanes a, lanes b) { return (lanes)_mm_min_ps((__m128)a, (__m128)b); }
inline lanes from_on(lanes bound, lanes x, lanes value) {
  return (lanes)_mm_andnot_ps(_mm_cmplt_ps((__m128)x, (__m128)bound), (__m128)value);
}
#else
inline lanes larger(lanes a, lanes b) { return a > b ? a : b; }
inline lanes smaller(lanes a, lanes b) { return a < b ? a : b; }
inline lanes from_on(lanes bound, lanes x, lanes value) { return x < bound ? lanes{} : value; }
#endif
inline lanes multiply_add(lanes a, lanes b, lanes c) {
#if defined(__FMA__)
  return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
inline floats larger(floats a, const floats& b) {
  for (int i = 0; i < floats::COUNT; ++i) a.part[i] = larger(a.part[i], b.part[i]);
  return a;
}
inline floats smaller(floats a, const floats& b) {
  for (int i = 0; i < floats::COUNT; ++i) a.part[i] = smaller(a.part[i], b.part[i]);
  return a;
}
inline floats from_on(float bound, const floats& x, floats value) {
  for (int i = 0; i < floats::COUNT; ++i) value.part[i] = from_on(bound - lanes{}, x.part[i], value.part[i]);
  return value;
}
inline floats multiply_add(floats a, const floats& b, const floats& c) {
  for (int i = 0; i < floats::COUNT; ++i) a.part[i] = multiply_add(a.part[i], b.part[i], c.part[i]);
  return a;
}
#endif

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
