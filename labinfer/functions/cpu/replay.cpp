// Replays many recorded calls in one, so that the pool's threads do not fall asleep in between.
#include <cstdint>

#include "thread_pool.h"

namespace {

struct Call {
  void (*function)(const int64_t*);  // see replay.h
  const int64_t* words;
};

}  // namespace

extern "C" {

void replay(const Call* calls, int64_t count) {
  Awake awake;
  for (int64_t i = 0; i < count; ++i) calls[i].function(calls[i].words);
}

}  // extern "C"
