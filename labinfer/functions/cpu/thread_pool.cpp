// Thread pool: threads spin briefly, then sleep, until a parallel region starts.
#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
// Spin times of a waiting thread before it sleeps. Short between the calls of a step that runs in Python, because the thread it waits for
// may lack a core; long in a replayed step, where calls follow each other at once.
constexpr std::chrono::microseconds SHORT{10}, LONG{200};

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until there() or until the time is over. Returns whether there() became true.
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

// Cores of other processes that every pool may use from its next region on, and the number of calls of use_idle_cores.
std::mutex shared_mutex;
std::vector<SharedCore> shared_cores;
std::atomic<int> shared_changes{0};

// Worker threads of one calling thread, and helper threads on cores of other processes, which sleep unless there is work and their core is
// idle. The region's number, the number of threads inside, and whether more may enter are one atomic word, so that the last thread to leave
// and the end of a region cannot miss each other.
class ThreadPool {
  struct Helper {
    explicit Helper(const SharedCore& core) : core(core) {}
    bool is_idle() const { return core.is_idle->load(std::memory_order_acquire); }

    SharedCore core;
    int range = -1;  // index in the current region; -1 if the helper has no part in it
    std::atomic<bool> sleeps{false}, stops{false};
    std::thread thread;
  };

 public:
  ~ThreadPool() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stops = true;
      state.fetch_add(REGION);
    }
    wake.notify_all();
    for (std::thread& other : others) other.join();
    stop_helpers();
  }

  void run(int threads, int64_t count, void (*work)(void*, Pieces&), void* data) {
    threads = std::min(threads, MOST / 2);
    while (int(others.size()) + 1 < threads) add();
    if (seen_changes != shared_changes.load()) start_helpers();
    this->work = work, this->data = data, members = num_ranges = threads;
    for (Helper& helper : helpers) helper.range = helper.is_idle() && num_ranges < count ? num_ranges++ : -1;
    for (int i = 0; i < num_ranges; ++i) {
      uint64_t begin = count * i / num_ranges, end = count * (i + 1) / num_ranges;
      ranges[i].bounds.store(begin << 32 | end, std::memory_order_relaxed);
    }
    state.store(((state.load(std::memory_order_relaxed) & ~(REGION - 1)) + REGION) | OPEN);
    call();
    work_as(0);
    state.fetch_and(~OPEN);
    auto empty = [&] { return state.load(std::memory_order_acquire) % REGION == 0; };
    while (!look(LONG, empty)) std::this_thread::yield();  // a thread in the middle of an item may lack a core
  }

  int size(int threads) {
    if (seen_changes != shared_changes.load()) start_helpers();
    return threads + int(std::count_if(helpers.begin(), helpers.end(), [](const Helper& helper) { return helper.is_idle(); }));
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
  int members = 0, num_ranges = 0, seen_changes = 0;
  std::unique_ptr<Range[]> ranges{new Range[MOST]};
  std::vector<std::thread> others;
  std::deque<Helper> helpers;
  std::mutex mutex;
  std::condition_variable wake, wake_helpers;
  std::atomic<bool> stops{false};

  void add() {
    int number = int(others.size()) + 1;
    uint32_t seen = state.load() / REGION;
    others.emplace_back([this, number, seen] { serve(number, seen); });
  }

  void call() {
    bool others_sleep = sleeping.load() > 0, helpers_sleep = false;
    for (Helper& helper : helpers) helpers_sleep |= helper.sleeps.load() && helper.is_idle();
    if (!others_sleep && !helpers_sleep) return;
    std::lock_guard<std::mutex> lock(mutex);  // so that a thread that is about to sleep is asleep before the notification
    if (others_sleep) wake.notify_all();
    if (helpers_sleep) wake_helpers.notify_all();
  }

  void work_as(int number, const std::atomic<uint32_t>* is_idle = nullptr) {
    Pieces pieces(ranges.get(), num_ranges, number, is_idle);
    work(data, pieces);
  }

  // Enters the open region if its number is still `seen`.
  template <typename Work>
  void enter(uint32_t now, uint32_t seen, Work work) {
    while (now & OPEN && now / REGION == seen)
      if (state.compare_exchange_weak(now, now + INSIDE)) {
        work();
        state.fetch_sub(INSIDE);
        return;
      }
  }

  void start_helpers();
  void stop_helpers();
  void serve(int number, uint32_t seen);
  void help(Helper& helper, uint32_t seen);
};

thread_local bool is_inside = false;
thread_local std::unique_ptr<ThreadPool> pool;

void ThreadPool::serve(int number, uint32_t seen) {
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
    enter(now, seen, [&] {
      if (number < members) work_as(number);
    });
    if (stops) return;  // written before the region's number is incremented
  }
}

void ThreadPool::help(Helper& helper, uint32_t seen) {
  is_inside = true;
#ifdef __linux__
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(helper.core.cpu, &cores);
  if (pthread_setaffinity_np(pthread_self(), sizeof(cores), &cores)) return;  // this process may not use the core
#endif
  while (!helper.stops) {
    uint32_t now = 0;
    auto is_new = [&] { return now = state.load(), now / REGION != seen; };
    bool has_work = awake.load() && helper.is_idle() && look(LONG, [&] { return is_new() || !helper.is_idle(); }) && is_new();
    if (!has_work) {
      std::unique_lock<std::mutex> lock(mutex);
      helper.sleeps = true;
      wake_helpers.wait(lock, [&] { return helper.stops || (helper.is_idle() && is_new()); });
      helper.sleeps = false;
      if (helper.stops) return;
    }
    seen = now / REGION;
    if (helper.is_idle())
      enter(now, seen, [&] {
        if (helper.range >= 0) work_as(helper.range, helper.core.is_idle);
      });
  }
}

void ThreadPool::stop_helpers() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (Helper& helper : helpers) helper.stops = true;
  }
  wake_helpers.notify_all();
  for (Helper& helper : helpers) helper.thread.join();
  helpers.clear();
}

// Replaces the helper threads by one for each core in shared_cores.
void ThreadPool::start_helpers() {
  stop_helpers();
  std::lock_guard<std::mutex> lock(shared_mutex);
  seen_changes = shared_changes.load();
  uint32_t seen = state.load() / REGION;
  for (const SharedCore& core : shared_cores) {
    if (int(helpers.size()) == MOST / 2) return;
    Helper& helper = helpers.emplace_back(core);
    helper.thread = std::thread([this, &helper, seen] { help(helper, seen); });
  }
}

// Runs in the child after a fork: the worker threads do not exist there, so the pool is leaked.
void forget() { pool.release(); }

ThreadPool& own_pool() {
  if (!pool) {
    static int once = pthread_atfork(nullptr, nullptr, forget);
    (void)once;
    pool.reset(new ThreadPool);
  }
  return *pool;
}

}  // namespace

void run_region(int threads, int64_t count, void (*work)(void*, Pieces&), void* data) {
  if (threads > count) threads = int(count);
  if (count > 1 && (threads > 1 || shared_changes.load()) && !is_inside) {
    is_inside = true;
    own_pool().run(threads, count, work, data);
    is_inside = false;
    return;
  }
  Range all;
  all.bounds.store(uint64_t(count), std::memory_order_relaxed);
  Pieces pieces(&all, 1, 0);
  if (count > 0) work(data, pieces);
}

int pool_size(int threads) { return is_inside ? 1 : shared_changes.load() ? own_pool().size(threads) : threads; }

Awake::Awake() { own_pool().keep_awake(1); }
Awake::~Awake() { own_pool().keep_awake(-1); }

extern "C" {

// Makes all pools also use cores of other processes while these are idle. Replaces the cores of an earlier call, whose flags must stay
// readable.
void use_idle_cores(const SharedCore* cores, int64_t count) {
  std::lock_guard<std::mutex> lock(shared_mutex);
  shared_cores.assign(cores, cores + count);
  ++shared_changes;
}

}  // extern "C"
