// Messages between two processes of one machine, over memory that they share: a ring of bytes with one writer and one reader.
//
// Each end writes one of two counters, the other one reads it: an increment is a release and the read of it an acquire, so a
// message is whole before it is seen, and is taken before its place is written again.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

// Before a ring; mailboxes.py knows its size. Both count bytes since the start, each in a cache line of its own and its neighbour.
struct Box {
  alignas(128) std::atomic<uint64_t> sent;
  alignas(128) std::atomic<uint64_t> taken;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(Box) == 256, "see mailboxes.py");

// The ring of a box: ``room`` bytes, a multiple of 8, in which positions go on at the beginning.
struct Ring {
  uint8_t* bytes;
  int64_t room;

  Ring(Box* box, int64_t room) : bytes(reinterpret_cast<uint8_t*>(box + 1)), room(room) {}

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

// Bytes that a message takes: its size, and itself in whole words.
inline int64_t framed(int64_t size) { return int64_t(sizeof(int64_t)) + (size + 7) / 8 * 8; }

}  // namespace

extern "C" {

// Post a message of two parts. Returns 0 where there is no room for it yet.
int64_t box_post(Box* box, int64_t room, const void* head, int64_t head_size, const void* body, int64_t body_size) {
  Ring ring(box, room);
  int64_t size = head_size + body_size;
  uint64_t at = box->sent.load(std::memory_order_relaxed);
  if (int64_t(at - box->taken.load(std::memory_order_acquire)) + framed(size) > room) return 0;
  ring.put(at, &size, sizeof size);
  ring.put(at + sizeof size, head, head_size);
  ring.put(at + sizeof size + uint64_t(head_size), body, body_size);
  box->sent.store(at + uint64_t(framed(size)), std::memory_order_release);
  return 1;
}

// Take the oldest message, if it has ``size`` bytes. Returns its size, also where that is another one; -1 where there is none.
int64_t box_take(Box* box, int64_t room, void* message, int64_t size) {
  Ring ring(box, room);
  uint64_t at = box->taken.load(std::memory_order_relaxed);
  if (box->sent.load(std::memory_order_acquire) == at) return -1;
  int64_t found;
  ring.get(at, &found, sizeof found);
  if (found != size) return found;
  ring.get(at + sizeof found, message, size);
  box->taken.store(at + uint64_t(framed(size)), std::memory_order_release);
  return found;
}

}  // extern "C"
