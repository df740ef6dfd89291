// Vector types of 16 numbers: compiler vectors if they fit into a register, else arrays of registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr int WIDTH = 16;  // floats in a vector

// Bytes of a vector register, and number of registers. Loops that keep sums in registers use native vectors, because compilers keep wider
// vectors in memory.
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

typedef float lanes __attribute__((vector_size(REGISTER)));
typedef uint32_t lane_words __attribute__((vector_size(REGISTER)));
typedef uint16_t lane_halves __attribute__((vector_size(REGISTER / 2)));

template <typename V>
constexpr bool IN_REGISTERS = false;

#ifdef __AVX512F__
typedef float floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH)));
typedef int8_t few_bytes __attribute__((vector_size(WIDTH)));
#else
// 16 numbers in several registers, with the operators of compiler vectors. Compilers keep vectors wider than a register in memory and pass
// them between operations through it.
template <typename T>
struct Registers {
  static constexpr int BYTES = std::min<int>(REGISTER, WIDTH * sizeof(T)), COUNT = WIDTH * sizeof(T) / BYTES;
  typedef T Part __attribute__((vector_size(BYTES)));
  Part part[COUNT];

  Registers() = default;
  template <typename Other>
  explicit Registers(const Registers<Other>& bits) {  // bit cast
    static_assert(sizeof(Other) == sizeof(T));
    for (int i = 0; i < COUNT; ++i) part[i] = (Part)bits.part[i];
  }
  T operator[](int i) const { return part[i / (WIDTH / COUNT)][i % (WIDTH / COUNT)]; }
  T& operator[](int i) { return ((T*)part)[i]; }

#define EACH(OPERATION)                      \
  for (int i = 0; i < COUNT; ++i) OPERATION; \
  return a;
#define OPERATOR(SIGN)                                                                                           \
  friend Registers operator SIGN(Registers a, const Registers& b) { EACH(a.part[i] = a.part[i] SIGN b.part[i]) } \
  friend Registers operator SIGN(Registers a, T b) { EACH(a.part[i] = a.part[i] SIGN b) }                        \
  friend Registers operator SIGN(T b, Registers a) { EACH(a.part[i] = b SIGN a.part[i]) }                        \
  friend Registers& operator SIGN##=(Registers& a, const Registers& b) { return a = a SIGN b; }                  \
  friend Registers& operator SIGN##=(Registers& a, T b) { return a = a SIGN b; }
  OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/) OPERATOR(&) OPERATOR(|) OPERATOR(^)
  friend Registers operator-(Registers a) { EACH(a.part[i] = -a.part[i]) }
  friend Registers operator~(Registers a) { EACH(a.part[i] = ~a.part[i]) }
  friend Registers operator<<(Registers a, int count) { EACH(a.part[i] = a.part[i] << count) }
  friend Registers operator>>(Registers a, int count) { EACH(a.part[i] = a.part[i] >> count) }
#undef OPERATOR
#undef EACH
};
template <typename T>
constexpr bool IN_REGISTERS<Registers<T>> = true;
using floats = Registers<float>;
using ints = Registers<int32_t>;
using words = Registers<uint32_t>;
using halves = Registers<uint16_t>;
using few_bytes = Registers<int8_t>;

// Mask: all bits set where a number is not less than the bound.
inline ints operator>=(const floats& a, float b) {
  ints mask;
  for (int i = 0; i < floats::COUNT; ++i) mask.part[i] = a.part[i] >= b;
  return mask;
}
inline ints operator<=(const floats& a, const floats& b) {
  ints mask;
  for (int i = 0; i < floats::COUNT; ++i) mask.part[i] = a.part[i] <= b.part[i];
  return mask;
}
#endif

template <typename V>
inline V load(const void* from) {
  V value;
  if constexpr (IN_REGISTERS<V>)
    for (int i = 0; i < V::COUNT; ++i) value.part[i] = load<typename V::Part>((const char*)from + i * V::BYTES);
  else
    std::memcpy(&value, from, sizeof(V));
  return value;
}

template <typename V>
inline void store(void* to, V value) {
  if constexpr (IN_REGISTERS<V>)
    for (int i = 0; i < V::COUNT; ++i) store((char*)to + i * V::BYTES, value.part[i]);
  else
    std::memcpy(to, &value, sizeof(V));
}

// Integer conversions: compilers convert elements one by one if the size changes by more than a factor of two.
#if defined(__AVX512F__)
inline words widen_words(halves value) { return (words)_mm512_cvtepu16_epi32((__m256i)value); }
inline ints widen_bytes(few_bytes value) { return (ints)_mm512_cvtepi8_epi32((__m128i)value); }
inline halves low_halves(words value) { return (halves)_mm512_cvtepi32_epi16((__m512i)value); }
inline few_bytes low_bytes(words value) { return (few_bytes)_mm512_cvtepi32_epi8((__m512i)value); }
inline floats to_floats(ints value) { return __builtin_convertvector(value, floats); }
#else
inline floats to_floats(ints value) {
  floats numbers;
  for (int i = 0; i < floats::COUNT; ++i) numbers.part[i] = __builtin_convertvector(value.part[i], lanes);
  return numbers;
}
#if defined(__AVX2__)
inline words widen_words(halves value) {
  __m256i whole = (__m256i)value.part[0];
  words wide;
  wide.part[0] = (lane_words)_mm256_cvtepu16_epi32(_mm256_castsi256_si128(whole));
  wide.part[1] = (lane_words)_mm256_cvtepu16_epi32(_mm256_extracti128_si256(whole, 1));
  return wide;
}
inline ints widen_bytes(few_bytes value) {
  __m128i whole = (__m128i)value.part[0];
  ints wide;
  wide.part[0] = (ints::Part)_mm256_cvtepi8_epi32(whole);
  wide.part[1] = (ints::Part)_mm256_cvtepi8_epi32(_mm_srli_si128(whole, 8));
  return wide;
}
inline halves join_halves(__m256i a, __m256i b) {
  halves joined;
  joined.part[0] = (halves::Part)_mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
  return joined;
}
inline halves low_halves(words value) {
  value &= 0xffff;
  return join_halves((__m256i)value.part[0], (__m256i)value.part[1]);
}
inline few_bytes low_bytes(words value) {
  __m256i low = (__m256i)low_halves(value & 0xff).part[0];
  few_bytes bytes;
  bytes.part[0] = (few_bytes::Part)_mm_packus_epi16(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  return bytes;
}
#elif defined(__aarch64__)
inline words widen_words(halves value) {
  words wide;
  for (int i = 0; i < 2; ++i) {
    uint16x8_t part = (uint16x8_t)value.part[i];
    wide.part[2 * i] = (lane_words)vmovl_u16(vget_low_u16(part)), wide.part[2 * i + 1] = (lane_words)vmovl_high_u16(part);
  }
  return wide;
}
inline ints widen_bytes(few_bytes value) {
  int16x8_t part[2] = {vmovl_s8(vget_low_s8(value.part[0])), vmovl_high_s8(value.part[0])};
  ints wide;
  for (int i = 0; i < 2; ++i)
    wide.part[2 * i] = vmovl_s16(vget_low_s16(part[i])), wide.part[2 * i + 1] = vmovl_high_s16(part[i]);
  return wide;
}
inline halves low_halves(words value) {
  halves low;
  for (int i = 0; i < 2; ++i)
    low.part[i] = (halves::Part)vuzp1q_u16((uint16x8_t)value.part[2 * i], (uint16x8_t)value.part[2 * i + 1]);
  return low;
}
inline few_bytes low_bytes(words value) {
  halves low = low_halves(value);
  few_bytes bytes;
  bytes.part[0] = (few_bytes::Part)vuzp1q_u8((uint8x16_t)low.part[0], (uint8x16_t)low.part[1]);
  return bytes;
}
#else
template <typename To, typename From>
inline Registers<To> converted(const Registers<From>& value) {
  Registers<To> numbers;
  for (int i = 0; i < WIDTH; ++i) numbers[i] = To(value[i]);
  return numbers;
}
inline words widen_words(halves value) { return converted<uint32_t>(value); }
inline ints widen_bytes(few_bytes value) { return converted<int32_t>(value); }
inline halves low_halves(words value) { return converted<uint16_t>(value); }
inline few_bytes low_bytes(words value) { return converted<int8_t>(value); }
#endif
#endif

}  // namespace
