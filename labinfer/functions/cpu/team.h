// Work that is dealt to the threads of a team.
#pragma once

#include <atomic>
#include <cstdint>

// A region is so many pieces of work. Its threads take them one by one: each has a range of its own, which it takes from the front,
// and when that is done it takes from the back of others' ranges. So a slow core holds nobody up, a thread reads memory in one
// stretch as long as all are as fast, and a thread that sleeps is not waited for. Which thread does what is never the same twice:
// a piece must not depend on it.

// Pieces from one to another, packed as begin and end so that both change at once.
struct alignas(64) Range {
  std::atomic<uint64_t> bounds{0};
};

// What a thread of a region takes pieces from. A helper thread on a core of another process stops when is_idle becomes 0.
class Pieces {
 public:
  Pieces(Range* ranges, int number, int own, const std::atomic<uint32_t>* is_idle = nullptr)
      : ranges(ranges), is_idle(is_idle), number(number), from(own) {}

  // The next one; false when there is none left.
  bool next(int64_t& piece) {
    if (is_idle && !is_idle->load(std::memory_order_relaxed)) return false;
    for (; tried < number; ++tried, from = from + 1 < number ? from + 1 : 0) {
      std::atomic<uint64_t>& bounds = ranges[from].bounds;
      uint64_t now = bounds.load(std::memory_order_relaxed);
      for (uint32_t begin, end; begin = uint32_t(now >> 32), end = uint32_t(now), begin < end;) {
        bool is_own = tried == 0;
        uint64_t rest = is_own ? uint64_t(begin + 1) << 32 | end : uint64_t(begin) << 32 | (end - 1);
        if (!bounds.compare_exchange_weak(now, rest, std::memory_order_relaxed)) continue;
        piece = is_own ? begin : end - 1;
        return true;
      }
    }
    return false;
  }

 private:
  Range* ranges;
  const std::atomic<uint32_t>* is_idle;
  int number, from, tried = 0;
};

// A core of another process, which is idle while the word is not 0.
struct SharedCore {
  const std::atomic<uint32_t>* is_idle;
  int64_t cpu;
};

// Runs work(data, pieces) once on the calling thread and on each of the others that comes in time, threads at most; returns when
// all pieces are done. From within a region it runs on the calling thread alone.
void run_region(int threads, int64_t count, void (*work)(void*, Pieces&), void* data);

// Threads of a region that began now, with those on idle cores of other processes.
int team_size(int threads);

// While one is there, the others of the calling thread's team wait for work without sleeping: for many regions in a row.
struct Awake {
  Awake();
  ~Awake();
};

namespace {

// run(pieces) once on each thread that takes part, which takes pieces until there are none.
template <typename Run>
inline void in_parallel(int threads, int64_t count, Run run) {
  run_region(threads, count, [](void* data, Pieces& pieces) { (*(Run*)data)(pieces); }, &run);
}

// run(piece) for each piece.
template <typename Run>
inline void for_each(int threads, int64_t count, Run run) {
  in_parallel(threads, count, [&](Pieces& pieces) {
    for (int64_t piece; pieces.next(piece);) run(piece);
  });
}

}  // namespace
