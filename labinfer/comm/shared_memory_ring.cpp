// Messages between two processes of one machine over shared memory: ring buffers of bytes with one writer and one reader, and
// events that wake a process which sleeps until a message comes.
//
// Each end of a ring writes one of two counters, the other end reads it: an increment is a release and the read of it an acquire, so
// a message is whole before it is seen, and is read before its place is written again.
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>

namespace {

// Header of a ring; shared_memory_ring.py knows its size. Both counters count bytes since the start. Each has its own cache line and the
// next one.
struct Counters {
  alignas(128) std::atomic<uint64_t> written;
  alignas(128) std::atomic<uint64_t> read;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(Counters) == 256, "see shared_memory_ring.py");

// Wake-up event of one process; shared_memory_ring.py knows its size.
struct alignas(128) Event {
  std::atomic<uint32_t> count;   // of notifications
  std::atomic<uint32_t> sleeps;  // whether the process sleeps until the next one
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Event) == 128, "see shared_memory_ring.py");

// Payload of a ring: ``room`` bytes, a multiple of 8. Positions wrap around.
struct Ring {
  uint8_t* bytes;
  int64_t room;

  Ring(Counters* counters, int64_t room) : bytes(reinterpret_cast<uint8_t*>(counters + 1)), room(room) {}

  void put(uint64_t at, const void* from, int64_t size) const {
    int64_t begin = int64_t(at % uint64_t(room)), first = std::min(size, room - begin);
    if (size > 0) std::memcpy(bytes + begin, from, first);
    if (size > first) std::memcpy(bytes, static_cast<const uint8_t*>(from) + first, size - first);
  }

  void get(uint64_t at, void* to, int64_t size) const {
    int64_t begin = int64_t(at % uint64_t(room)), first = std::min(size, room - begin);
    if (size > 0) std::memcpy(to, bytes + begin, first);
    if (size > first) std::memcpy(static_cast<uint8_t*>(to) + first, bytes, size - first);
  }
};

// Bytes of a message with its size in front of it, rounded up to whole words.
inline int64_t framed(int64_t size) { return int64_t(sizeof(int64_t)) + (size + 7) / 8 * 8; }

}  // namespace

extern "C" {

void event_notify(Event* event) {
  event->count.fetch_add(1);
#ifdef __linux__
  if (event->sleeps.load()) syscall(SYS_futex, &event->count, FUTEX_WAKE, 1, nullptr, nullptr, 0);
#endif
}

int64_t event_count(Event* event) { return event->count.load(); }

// Sleeps until the event's count differs from ``count``, or the timeout passes.
void event_sleep(Event* event, int64_t count, int64_t nanoseconds) {
  timespec limit{time_t(nanoseconds / 1000000000), long(nanoseconds % 1000000000)};
#ifdef __linux__
  event->sleeps.store(1);
  syscall(SYS_futex, &event->count, FUTEX_WAIT, uint32_t(count), &limit, nullptr, 0);
  event->sleeps.store(0);
#else
  nanosleep(&limit, nullptr);
#endif
}

// Writes a message of two parts, and notifies the reader. Returns 0 if the ring has no room for the message yet.
int64_t ring_write(Counters* counters, int64_t room, Event* reader, const void* head, int64_t head_size, const void* body,
                   int64_t body_size) {
  Ring ring(counters, room);
  int64_t size = head_size + body_size;
  uint64_t at = counters->written.load(std::memory_order_relaxed);
  if (int64_t(at - counters->read.load(std::memory_order_acquire)) + framed(size) > room) return 0;
  ring.put(at, &size, sizeof size);
  ring.put(at + sizeof size, head, head_size);
  ring.put(at + sizeof size + uint64_t(head_size), body, body_size);
  counters->written.store(at + uint64_t(framed(size)), std::memory_order_release);
  event_notify(reader);
  return 1;
}

// Reads the oldest message if it has ``size`` bytes. Returns the message's size, even if it differs; -1 without a message.
int64_t ring_read(Counters* counters, int64_t room, void* message, int64_t size) {
  Ring ring(counters, room);
  uint64_t at = counters->read.load(std::memory_order_relaxed);
  if (counters->written.load(std::memory_order_acquire) == at) return -1;
  int64_t message_size;
  ring.get(at, &message_size, sizeof message_size);
  if (message_size != size) return message_size;
  ring.get(at + sizeof message_size, message, size);
  counters->read.store(at + uint64_t(framed(size)), std::memory_order_release);
  return message_size;
}

}  // extern "C"
