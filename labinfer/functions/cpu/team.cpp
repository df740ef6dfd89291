// The threads of a team: they wait for regions of work, shortly without sleeping, and take pieces.
#include "team.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
// How long a thread that waits looks again and again before it sleeps. Between the calls of a step in Python it is short: whoever
// it waits for may be without a core. In a replayed step nothing takes long.
constexpr std::chrono::microseconds SHORT{10}, LONG{200};

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks until it is there or the time is over; says whether it is there.
template <typename There>
bool look(std::chrono::microseconds time, There there) {
  Clock::time_point end{};
  for (;;) {
    for (int i = 0; i < 64; ++i, pause())
      if (there()) return true;
    Clock::time_point now = Clock::now();
    if (end == Clock::time_point{}) end = now + time;
    else if (now > end) return false;
  }
}

// The threads that work for one thread. A region's number, how many of them are inside, and whether more may enter are one word, so
// that the last to leave and the end of a region never miss each other.
class Team {
 public:
  ~Team() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stops = true;
      state.fetch_add(REGION);
    }
    wake.notify_all();
    for (std::thread& other : others) other.join();
  }

  void run(int threads, int64_t count, void (*work)(void*, Pieces&), void* data) {
    while (int(others.size()) + 1 < threads) add();
    this->work = work, this->data = data, members = threads;
    for (int i = 0; i < threads; ++i)
      ranges[i].bounds.store(uint64_t(count * i / threads) << 32 | uint64_t(count * (i + 1) / threads), std::memory_order_relaxed);
    state.store(((state.load(std::memory_order_relaxed) & ~(REGION - 1)) + REGION) | OPEN);
    call();
    work_as(0);
    state.fetch_and(~OPEN);
    auto empty = [&] { return state.load(std::memory_order_acquire) % REGION == 0; };
    while (!look(LONG, empty)) std::this_thread::yield();  // someone in the middle of a piece has no core
  }

  void keep_awake(int change) {
    if (awake += change; change > 0) call();
  }

 private:
  static constexpr uint32_t OPEN = 1, INSIDE = 2, REGION = 1 << 16;
  static constexpr int MOST = 1024;

  alignas(64) std::atomic<uint32_t> state{0};
  alignas(64) std::atomic<int> sleeping{0}, awake{0};
  void (*work)(void*, Pieces&) = nullptr;
  void* data = nullptr;
  int members = 0;
  std::unique_ptr<Range[]> ranges{new Range[MOST]};
  std::vector<std::thread> others;
  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<bool> stops{false};

  void add() {
    int number = int(others.size()) + 1;
    uint32_t seen = state.load() / REGION;
    others.emplace_back([this, number, seen] { serve(number, seen); });
  }

  void call() {
    if (sleeping.load() == 0) return;
    std::lock_guard<std::mutex> lock(mutex);  // whoever is about to sleep does so first
    wake.notify_all();
  }

  void work_as(int number) {
    Pieces pieces(ranges.get(), members, number);
    work(data, pieces);
  }

  void serve(int number, uint32_t seen);
};

thread_local bool is_inside = false;
thread_local std::unique_ptr<Team> team;

void Team::serve(int number, uint32_t seen) {
  is_inside = true;
  for (;;) {
    uint32_t now;
    auto is_new = [&] { return now = state.load(), now / REGION != seen; };
    while (!look(awake.load() ? LONG : SHORT, is_new)) {
      std::unique_lock<std::mutex> lock(mutex);
      ++sleeping;
      bool kept = awake.load();
      wake.wait(lock, [&] { return is_new() || (!kept && awake.load()); });
      --sleeping;
    }
    seen = now / REGION;
    while (now & OPEN && now / REGION == seen)
      if (state.compare_exchange_weak(now, now + INSIDE)) {
        if (number < members) work_as(number);
        state.fetch_sub(INSIDE);
        break;
      }
    if (stops) return;  // written before the region's number
  }
}

// The other threads are not there in a forked process.
void forget() { team.release(); }

Team& own_team() {
  if (!team) {
    static int once = pthread_atfork(nullptr, nullptr, forget);
    (void)once;
    team.reset(new Team);
  }
  return *team;
}

}  // namespace

void run_region(int threads, int64_t count, void (*work)(void*, Pieces&), void* data) {
  if (threads > count) threads = int(count);
  if (threads > 1 && !is_inside) {
    is_inside = true;
    own_team().run(threads, count, work, data);
    is_inside = false;
    return;
  }
  Range all;
  all.bounds.store(uint64_t(count), std::memory_order_relaxed);
  Pieces pieces(&all, 1, 0);
  if (count > 0) work(data, pieces);
}

Awake::Awake() { own_team().keep_awake(1); }
Awake::~Awake() { own_team().keep_awake(-1); }
