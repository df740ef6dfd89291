// Sums and exchanges between processes of one machine, over memory that they share.
//
// Every rank has a counter and two slots. In an operation it copies its part into one of its slots, increments its
// counter, waits until all counters are as high, and reads the others' parts. The increment is a release and the read of
// a counter an acquire, so this is correct on processors that reorder memory accesses too.
//
// The next operation takes the other slot. A rank that writes to the first slot again has seen all ranks arrive at the
// operation in between, so all were done reading: an operation needs no second barrier at its end.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

namespace {

using bf16 = uint16_t;

struct alignas(128) Counter {  // a cache line, and its neighbour, which some processors fetch with it
  std::atomic<uint64_t> arrivals;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(Counter) == 128, "see shared_memory.py");

enum Phase : int64_t { NOTHING, POSTED, SUMMED };

// A rank's view of the segment; shared_memory.py has the same fields. Only counters and slots point to shared memory.
struct Member {
  Counter* counters;  // (size)
  uint8_t* slots;     // (2, size, slot_bytes)
  int64_t rank, size, slot_bytes;
  uint64_t arrivals;    // increments of this rank's counter
  uint64_t operations;  // complete operations
  Phase phase;          // of the present operation
};

constexpr int64_t SHARE_BYTES = 32 * 1024;  // bytes of reading saved, above which a sum is worth a second barrier
constexpr std::chrono::microseconds SPIN(2);  // enough for ranks that arrive together to see each other's counters
constexpr int64_t BLOCK = 512;              // numbers summed at a time, in the nearest cache

inline float widen(float value) { return value; }

inline float widen(bf16 value) {
  uint32_t bits = uint32_t(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

inline void narrow(float value, float* to) { *to = value; }

inline void narrow(float value, bf16* to) {  // to the nearest, ties to even, as torch does
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  *to = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
inline T* slot(const Member& m, int64_t rank) {
  return (T*)(m.slots + ((m.operations % 2) * m.size + rank) * m.slot_bytes);
}

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void arrive(Member& m) { m.counters[m.rank].arrivals.store(++m.arrivals, std::memory_order_release); }

// First rank whose counter is still behind this rank's after `nanoseconds`; -1 if there is none.
int64_t late(const Member& m, int64_t nanoseconds) {
  using clock = std::chrono::steady_clock;
  clock::time_point begin{};
  for (int64_t rank = 0; rank < m.size; ++rank) {
    while (m.counters[rank].arrivals.load(std::memory_order_acquire) < m.arrivals) {
      auto now = clock::now();
      if (begin == clock::time_point{}) begin = now;
      if (now - begin >= std::chrono::nanoseconds(nanoseconds)) return rank;
      if (now - begin < SPIN) {
        cpu_relax();
      } else {
        sched_yield();  // the rank that is late may be waiting for this very core
      }
    }
  }
  return -1;
}

// Sums elements [begin, end) over all ranks' slots, in float32 and in rank order, and rounds once.
template <typename T>
void sum(const Member& m, int64_t begin, int64_t end, T* to) {
  float total[BLOCK];
  for (int64_t at = begin; at < end; at += BLOCK) {
    int64_t count = std::min(BLOCK, end - at);
    for (int64_t rank = 0; rank < m.size; ++rank) {
      const T* from = slot<T>(m, rank) + at;
      if (rank == 0) {
        for (int64_t i = 0; i < count; ++i) total[i] = widen(from[i]);
      } else {
        for (int64_t i = 0; i < count; ++i) total[i] += widen(from[i]);
      }
    }
    for (int64_t i = 0; i < count; ++i) narrow(total[i], to + at + i);
  }
}

int64_t complete(Member& m) {
  m.phase = NOTHING;
  ++m.operations;
  return -1;
}

template <typename T>
int64_t all_reduce(Member& m, T* data, int64_t count, int64_t nanoseconds) {
  bool shared = count * int64_t(sizeof(T)) * (m.size - 2) > SHARE_BYTES;  // each rank sums a part for all
  int64_t share = ((count + m.size - 1) / m.size + 63) / 64 * 64;         // whole cache lines
  auto bound = [&](int64_t rank) { return std::min(count, rank * share); };
  if (m.phase == NOTHING) {
    std::memcpy(slot<T>(m, m.rank), data, count * sizeof(T));
    arrive(m);
    m.phase = POSTED;
  }
  if (m.phase == POSTED) {
    int64_t rank = late(m, nanoseconds);
    if (rank >= 0) return rank;
    if (!shared) {
      sum(m, 0, count, data);
      return complete(m);
    }
    sum(m, bound(m.rank), bound(m.rank + 1), slot<T>(m, m.rank));  // nobody else reads this part of this slot
    arrive(m);
    m.phase = SUMMED;
  }
  int64_t rank = late(m, nanoseconds);
  if (rank >= 0) return rank;
  for (rank = 0; rank < m.size; ++rank) {
    int64_t begin = bound(rank);
    std::memcpy(data + begin, slot<T>(m, rank) + begin, (bound(rank + 1) - begin) * sizeof(T));
  }
  return complete(m);
}

}  // namespace

// Each function waits at most `nanoseconds` at each barrier. It returns -1 when it is complete; otherwise the rank that is
// late, and must be called again with the same arguments. The data must fit into a slot.
extern "C" {

int64_t all_reduce_float32(Member* member, float* data, int64_t count, int64_t nanoseconds) {
  return all_reduce(*member, data, count, nanoseconds);
}

int64_t all_reduce_bfloat16(Member* member, bf16* data, int64_t count, int64_t nanoseconds) {
  return all_reduce(*member, data, count, nanoseconds);
}

// Publishes bytes of this rank in its slot. The slots that other ranks publish in this operation can be read until the next one begins.
int64_t exchange(Member* member, const void* data, int64_t bytes, int64_t nanoseconds) {
  Member& m = *member;
  if (m.phase == NOTHING) {
    std::memcpy(slot<uint8_t>(m, m.rank), data, bytes);
    arrive(m);
    m.phase = POSTED;
  }
  int64_t rank = late(m, nanoseconds);
  return rank >= 0 ? rank : complete(m);
}

}  // extern "C"
