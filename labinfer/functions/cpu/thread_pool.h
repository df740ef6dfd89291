// Thread pool with work stealing: parallel regions whose work items are partitioned over threads.
#pragma once

#include <atomic>
#include <cstdint>

// A parallel region consists of numbered work items (pieces). Each thread has a contiguous range of them, from which it takes items in
// order. A thread that has finished its range steals from the back of other ranges. So a slow core delays nobody, each thread reads memory
// sequentially while all are equally fast, and a sleeping thread is not waited for. Which thread computes an item varies from run to run: a
// result must not depend on it.

// Range of work items. Begin and end are packed into one word, so that both change atomically.
struct alignas(64) Range {
  std::atomic<uint64_t> bounds{0};
};

// Iterator over the work items that a thread takes in a region. A helper thread on a core of another process stops when `is_idle` becomes
// 0.
class Pieces {
 public:
  Pieces(Range* ranges, int number, int own, const std::atomic<uint32_t>* is_idle = nullptr)
      : ranges(ranges), is_idle(is_idle), number(number), from(own) {}

  // Takes the next item. Returns false when no item is left.
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

// Core of another process; the process idles while `is_idle` is not 0.
struct SharedCore {
  const std::atomic<uint32_t>* is_idle;
  int64_t cpu;
};

// Runs work(data, pieces) once on the calling thread and on each other thread that arrives in time, at most `threads` in all. Returns when
// all items are done. A nested region runs on the calling thread alone.
void run_region(int threads, int64_t count, void (*work)(void*, Pieces&), void* data);

// Number of threads that a region started now would have, including helper threads on idle cores of other processes.
int pool_size(int threads);

// RAII guard: while one exists, the threads of the caller's pool spin between regions instead of sleeping. For many regions in a row.
struct Awake {
  Awake();
  ~Awake();
};

namespace {

// Calls run(pieces) once on each participating thread.
template <typename Run>
inline void in_parallel(int threads, int64_t count, Run run) {
  run_region(threads, count, [](void* data, Pieces& pieces) { (*(Run*)data)(pieces); }, &run);
}

// Calls run(piece) for each work item.
template <typename Run>
inline void for_each(int threads, int64_t count, Run run) {
  in_parallel(threads, count, [&](Pieces& pieces) {
    for (int64_t piece; pieces.next(piece);) run(piece);
  });
}

}  // namespace
