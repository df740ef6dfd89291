// Threads as ranks over shared_memory_ring.cpp: built with ThreadSanitizer, which knows what C++ promises on any processor.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../../../labinfer/comm/shared_memory_ring.cpp"

int main() {
  constexpr int64_t ROOM = 1024;  // messages begin at all places of the ring
  constexpr int MESSAGES = 20000;
  static struct {
    Counters counters;
    uint8_t bytes[ROOM];
  } shared{};
  static Event event{};
  auto size_of = [](int number) { return int64_t(number) * 37 % 901; };
  std::thread sender([&] {
    std::vector<uint8_t> data(901);
    for (int number = 0; number < MESSAGES; ++number) {
      int64_t size = size_of(number), head = size / 3;
      for (int64_t i = 0; i < size; ++i) data[i] = uint8_t(number + i);
      while (!ring_write(&shared.counters, ROOM, &event, data.data(), head, data.data() + head, size - head)) std::this_thread::yield();
    }
  });
  std::thread receiver([&] {
    std::vector<uint8_t> data(901);
    for (int number = 0; number < MESSAGES; ++number) {
      int64_t size = size_of(number), found;
      for (;;) {
        int64_t count = event_count(&event);
        if ((found = ring_read(&shared.counters, ROOM, data.data(), size)) >= 0) break;
        event_sleep(&event, count, 1000000000);
      }
      if (found != size) std::abort();
      for (int64_t i = 0; i < size; ++i) {
        if (data[i] != uint8_t(number + i)) std::abort();
      }
    }
    if (ring_read(&shared.counters, ROOM, data.data(), 0) != -1) std::abort();
  });
  sender.join();
  receiver.join();
  std::puts("done");
}
