// Many calls as one: between them no time passes in which the other threads would fall asleep.
#include <cstdint>

#include "team.h"

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
