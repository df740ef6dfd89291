// Bells of the ranks of a machine, over memory that they share: whoever sends something rings the receiver's.
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cstdint>
#include <ctime>

namespace {

// One for each rank; doorbells.py knows its size.
struct alignas(128) Bell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> sleeps;  // whether the rank sleeps until it rings
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Bell) == 128, "see doorbells.py");

}  // namespace

extern "C" {

void bell_ring(Bell* bell) {
  bell->rings.fetch_add(1);
#ifdef __linux__
  if (bell->sleeps.load()) syscall(SYS_futex, &bell->rings, FUTEX_WAKE, 1, nullptr, nullptr, 0);
#endif
}

int64_t bell_rings(Bell* bell) { return bell->rings.load(); }

// Sleep until it has rung since it had rung so many times, or the time is over.
void bell_sleep(Bell* bell, int64_t rings, int64_t nanoseconds) {
  timespec limit{time_t(nanoseconds / 1000000000), long(nanoseconds % 1000000000)};
#ifdef __linux__
  bell->sleeps.store(1);
  syscall(SYS_futex, &bell->rings, FUTEX_WAIT, uint32_t(rings), &limit, nullptr, 0);
  bell->sleeps.store(0);
#else
  nanosleep(&limit, nullptr);
#endif
}

}  // extern "C"
