// Cards of the make-believe accelerator: memory, streams, events, and what torch asks of a backend.
//
// Every card has two mappings of the same size: one that nobody may touch, whose addresses are those of its tensors, and the bytes
// themselves at a constant distance, which only the kernels in operators.cpp know. A host that reads a card's tensor gets a
// segmentation fault.
#include "device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace fake_device {

namespace {

constexpr size_t kAlignment = 512;
constexpr size_t kReturned = 1 << 20;  // from so many bytes on, freed memory goes back to the system
constexpr int kMaxCards = 16;

using Counter = void (*)(int event, char* site, int size);
std::atomic<Counter> counter{nullptr};

// Addresses and bytes of all cards.
struct Mappings {
  char* addresses = nullptr;
  char* bytes = nullptr;
  size_t size = 0;
};
Mappings mappings;

struct Card {
  std::map<size_t, size_t> free;  // sizes by offset, never two beside each other
  std::map<size_t, size_t> used;
  c10::CachingDeviceAllocator::DeviceStats stats;
  bool was_used = false;
};
Card cards[kMaxCards];
std::mutex cards_mutex;

thread_local int current_card = 0;
thread_local int64_t current_streams[kMaxCards] = {};
std::atomic<int64_t> num_streams{0};

void start_cards() {
  const auto& how = behaviour();
  TORCH_CHECK(how.num_cards <= kMaxCards && how.card_bytes % kAlignment == 0, "fake device: wrong numbers");
  mappings.size = how.num_cards * how.card_bytes;
  auto map = [](int protection) {
    void* begin = mmap(nullptr, mappings.size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(begin != MAP_FAILED, "fake device: no room for ", mappings.size, " bytes");
    return static_cast<char*>(begin);
  };
  mappings.addresses = map(PROT_NONE);
  mappings.bytes = map(PROT_READ | PROT_WRITE);
  for (int card = 0; card < how.num_cards; ++card) cards[card].free[0] = how.card_bytes;
}

void note_use(Card& card, size_t size, bool grows) {
  for (auto* stat : {&card.stats.allocated_bytes[0], &card.stats.reserved_bytes[0], &card.stats.active_bytes[0]}) {
    grows ? stat->increase(size) : stat->decrease(size);
  }
}

void free_address(void* address) {
  std::lock_guard lock(cards_mutex);
  size_t place = static_cast<char*>(address) - mappings.addresses;
  auto& card = cards[place / behaviour().card_bytes];
  size_t offset = place % behaviour().card_bytes;
  auto used = card.used.find(offset);
  size_t size = used->second;
  card.used.erase(used);
  note_use(card, size, false);
  if (size >= kReturned) {
    size_t begin = (place + 4095) / 4096 * 4096, end = (place + size) / 4096 * 4096;
    madvise(mappings.bytes + begin, end - begin, MADV_DONTNEED);
  }
  auto next = card.free.lower_bound(offset);
  if (next != card.free.end() && offset + size == next->first) {
    size += next->second;
    next = card.free.erase(next);
  }
  if (next != card.free.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  card.free[offset] = size;
}

c10::DataPtr allocate_on(int index, size_t num_bytes) {
  c10::Device device(kDevice, static_cast<c10::DeviceIndex>(index));
  if (num_bytes == 0) return {nullptr, device};
  size_t size = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
  std::lock_guard lock(cards_mutex);
  auto& card = cards[index];
  for (auto it = card.free.begin(); it != card.free.end(); ++it) {
    auto [offset, room] = *it;
    if (room < size) continue;
    card.free.erase(it);
    if (room > size) card.free[offset + size] = room - size;
    card.used[offset] = size;
    card.was_used = true;
    note_use(card, size, true);
    size_t place = index * behaviour().card_bytes + offset;
    std::memset(mappings.bytes + place, kPoison, size);
    char* address = mappings.addresses + place;
    return {address, address, &free_address, device};
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, c10::get_privateuse1_backend(), " out of memory: tried to allocate ", num_bytes, " bytes");
}

// For torch.accelerator's figures, as most vendors have one.
struct CardAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override { return allocate_on(current_card, num_bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_address; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(bytes_at(to), bytes_at(from), count);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard lock(cards_mutex);
    return cards[index].stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override { cards[index].stats.allocated_bytes[0].reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex index) override { cards[index].stats.allocated_bytes[0].reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    std::lock_guard lock(cards_mutex);
    size_t total = behaviour().card_bytes;
    return {total - size_t(cards[index].stats.allocated_bytes[0].current), total};
  }
};

// As in torch_musa, whose allocator torch.accelerator cannot ask.
struct PlainAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override { return allocate_on(current_card, num_bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_address; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(bytes_at(to), bytes_at(from), count);
  }
};

// Host memory that a card could reach by itself.
struct PinnedAllocator final : c10::Allocator {
  static std::map<char*, size_t>& blocks() {
    static auto* all = new std::map<char*, size_t>;
    return *all;
  }
  static bool owns(const void* data) {
    std::lock_guard lock(cards_mutex);
    auto block = blocks().upper_bound(static_cast<char*>(const_cast<void*>(data)));
    if (block == blocks().begin()) return false;
    --block;
    return static_cast<const char*>(data) < block->first + block->second;
  }
  static void release(void* data) {
    std::lock_guard lock(cards_mutex);
    blocks().erase(static_cast<char*>(data));
    std::free(data);
  }
  c10::DataPtr allocate(size_t num_bytes) override {
    size_t size = (num_bytes + kAlignment) / kAlignment * kAlignment;
    void* data = std::aligned_alloc(kAlignment, size);
    std::memset(data, kPoison, size);
    std::lock_guard lock(cards_mutex);
    blocks()[static_cast<char*>(data)] = size;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

struct StreamEvent {
  int64_t copy;  // the last one that was asked for when the event was recorded
  double seconds;
  bool was_asked = false;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void wait_for(int64_t copy) {
  count(WAIT);
  finish_copies(copy);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device getDevice() const override { return {kDevice, static_cast<c10::DeviceIndex>(current_card)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < deviceCount(), device, ": there are ", int(deviceCount()), " cards");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_card = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(behaviour().num_cards); }

  c10::Stream stream(c10::Device device, int64_t id) const {
    if (device.index() < 0) device = getDevice();
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_streams[device.index() < 0 ? current_card : device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return stream(device, ++num_streams); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device, ++num_streams); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return !has_open_copies(); }
  void synchronizeStream(const c10::Stream&) const override { wait_for(INT64_MAX); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for(INT64_MAX); }

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new StreamEvent;
    *static_cast<StreamEvent*>(*event) = {last_copy(), now()};
  }
  void block(void*, const c10::Stream&) const override {}
  // Not yet at the first time, so that nobody takes an answer for certain.
  bool queryEvent(void* event) const override {
    auto* recorded = static_cast<StreamEvent*>(event);
    if (recorded == nullptr || !has_open_copies(recorded->copy)) return true;
    if (recorded->was_asked) finish_copies(recorded->copy);
    return std::exchange(recorded->was_asked, true);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_for(static_cast<StreamEvent*>(event)->copy);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<StreamEvent*>(event);
  }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    return 1e3 * (static_cast<StreamEvent*>(last)->seconds - static_cast<StreamEvent*>(first)->seconds);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return cards[index].was_used; }
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({kDevice, index}); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_card); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : Guard().exchangeDevice({kDevice, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::owns(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* allocator = new PinnedAllocator;
    return allocator;
  }
  c10::Device getDeviceFromPtr(void* address) const override {
    size_t place = static_cast<char*>(address) - mappings.addresses;
    return {kDevice, static_cast<c10::DeviceIndex>(place / behaviour().card_bytes)};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = allocate_on(storage.device().index(), size);
    size_t kept = std::min(size, storage.nbytes());
    if (kept > 0) std::memcpy(bytes_at(data.get()), bytes_at(storage.data()), kept);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

Behaviour& behaviour() {
  static Behaviour how;
  return how;
}

std::string count(Event event) {
  char site[256] = "";
  if (auto call = counter.load()) call(event, site, sizeof site);
  return site;
}

bool is_address(const void* address) {
  auto* place = static_cast<const char*>(address);
  return place >= mappings.addresses && place < mappings.addresses + mappings.size;
}

void* bytes_at(const void* address) {
  if (address == nullptr) return nullptr;
  TORCH_CHECK(is_address(address), "fake device: not an address of a card");
  return mappings.bytes + (static_cast<const char*>(address) - mappings.addresses);
}

c10::Allocator* card_allocator() { return c10::GetAllocator(kDevice); }

extern "C" {

void fake_device_start(int num_cards, int64_t card_bytes, int has_float64, int late_copies, int plain_allocator) {
  behaviour() = {num_cards, size_t(card_bytes), has_float64 != 0, late_copies != 0, plain_allocator != 0};
  start_cards();
  c10::Allocator* allocator = new CardAllocator;
  if (behaviour().plain_allocator) allocator = new PlainAllocator;
  c10::SetAllocator(kDevice, allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

void fake_device_count_with(Counter call) { counter = call; }

int fake_device_current() { return current_card; }

void fake_device_set(int index) { Guard().setDevice({kDevice, static_cast<c10::DeviceIndex>(index)}); }

int64_t fake_device_allocated(int index, int peak) {
  std::lock_guard lock(cards_mutex);
  const auto& stat = cards[index].stats.allocated_bytes[0];
  return peak ? stat.peak : stat.current;
}

int fake_device_was_used(int index) { return cards[index].was_used; }

}  // extern "C"

}  // namespace fake_device
