// Threads as ranks over shared_memory.cpp: built with ThreadSanitizer, which knows what C++ promises on any processor.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../../../labinfer/comm/shared_memory.cpp"

int main() {
  for (int64_t size : {2, 3, 5}) {
    constexpr int64_t SLOT = 128 * 1024;
    std::vector<Counter> counters(size);
    std::vector<uint8_t> slots(2 * size * SLOT);
    std::vector<std::thread> ranks;
    for (int64_t rank = 0; rank < size; ++rank) {
      ranks.emplace_back([&, rank] {
        Member member{counters.data(), slots.data(), rank, size, SLOT, 0, 0, NOTHING};
        std::vector<float> data(SLOT / 4);
        for (int number = 0; number < 20; ++number) {
          int64_t count = number % 3 == 0 ? 5 : SLOT / 4 - number;  // sums by every rank, and by one for all
          for (int64_t i = 0; i < count; ++i) data[i] = float(number + rank);
          if (number % 5 == 4) {
            while (exchange(&member, data.data(), count * 4, 1000) >= 0) {}
            member.operations -= 1;  // of the operation that is over
            for (int64_t peer = 0; peer < size; ++peer) {
              if (slot<float>(member, peer)[count - 1] != float(number + peer)) std::abort();
            }
            member.operations += 1;
            continue;
          }
          while (all_reduce_float32(&member, data.data(), count, 1000) >= 0) {}
          for (int64_t i = 0; i < count; ++i) {
            if (data[i] != float(number * size + size * (size - 1) / 2)) std::abort();
          }
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
  }
  std::puts("done");
}
