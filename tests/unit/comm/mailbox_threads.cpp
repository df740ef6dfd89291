// Threads as ranks over mailboxes.cpp: built with ThreadSanitizer, which knows what C++ promises on any processor.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../../../labinfer/comm/mailboxes.cpp"

int main() {
  constexpr int64_t ROOM = 1024;  // messages begin at all places of the ring
  constexpr int MESSAGES = 20000;
  static struct {
    Box box;
    uint8_t ring[ROOM];
  } shared{};
  auto size_of = [](int number) { return int64_t(number) * 37 % 901; };
  std::thread sender([&] {
    std::vector<uint8_t> data(901);
    for (int number = 0; number < MESSAGES; ++number) {
      int64_t size = size_of(number), head = size / 3;
      for (int64_t i = 0; i < size; ++i) data[i] = uint8_t(number + i);
      while (!box_post(&shared.box, ROOM, data.data(), head, data.data() + head, size - head)) std::this_thread::yield();
    }
  });
  std::thread receiver([&] {
    std::vector<uint8_t> data(901);
    for (int number = 0; number < MESSAGES; ++number) {
      int64_t size = size_of(number), found;
      while ((found = box_take(&shared.box, ROOM, data.data(), size)) < 0) std::this_thread::yield();
      if (found != size) std::abort();
      for (int64_t i = 0; i < size; ++i) {
        if (data[i] != uint8_t(number + i)) std::abort();
      }
    }
    if (box_take(&shared.box, ROOM, data.data(), 0) != -1) std::abort();
  });
  sender.join();
  receiver.join();
  std::puts("done");
}
