// Recorded calls with their arguments, for replay.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace {

template <typename T>
inline T argument(const int64_t* word) {
  T value;
  std::memcpy(&value, word, sizeof(T));
  return value;
}

template <typename... T, size_t... I>
inline void call(void (*function)(T...), const int64_t* words, std::index_sequence<I...>) {
  function(argument<T>(words + I)...);
}

template <typename... T>
inline void call(void (*function)(T...), const int64_t* words) {
  call(function, words, std::index_sequence_for<T...>{});
}

}  // namespace

// replay_NAME calls NAME with arguments from memory, each at the beginning of a word. For functions without state besides the memory that
// their pointers name.
#define REPLAYABLE(NAME) \
  void replay_##NAME(const int64_t* words) { call(NAME, words); }
