// Stress test of the thread pool: regions one after another and from several threads at once. Each item is done once, before its region ends.
#include <cstdio>
#include <thread>
#include <vector>

#include "thread_pool.h"

extern "C" void use_idle_cores(const SharedCore* cores, int64_t count);

static std::atomic<long> wrong{0};

static void regions(int threads, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    int64_t count = round % 97;
    std::vector<int> done(count);
    for_each(1 + round % threads, count, [&](int64_t piece) {
      ++done[piece];
      if (round % 50 == 0) for_each(threads, 3, [&](int64_t) { done[piece] += 0; });  // a region within one
    });
    for (int times : done) wrong += times != 1;
    if (round % 500 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));  // the others fall asleep
    if (round % 1000 == 0) {
      Awake awake;
      for (int i = 0; i < 100; ++i) for_each(threads, 2, [&](int64_t) {});
    }
  }
}

int main() {
  regions(4, 20000);
  std::vector<std::thread> callers;  // each has a pool of its own
  for (int i = 0; i < 3; ++i) callers.emplace_back(regions, 3, 3000);
  for (std::thread& caller : callers) caller.join();

  std::atomic<uint32_t> is_idle{0};  // of a core that its owner takes back again and again
  std::atomic<bool> done{false};
  SharedCore core{&is_idle, 0};
  use_idle_cores(&core, 1);
  std::thread owner([&] {
    for (int i = 0; !done; is_idle.store(++i % 2)) std::this_thread::sleep_for(std::chrono::microseconds(i % 90));
  });
  regions(2, 10000);
  use_idle_cores(nullptr, 0);
  regions(2, 100);
  done = true;
  owner.join();
  std::printf("%ld\n", wrong.load());
  return wrong != 0;
}
