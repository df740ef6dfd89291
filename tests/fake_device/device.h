// A make-believe accelerator: torch's PrivateUse1 over host memory. Here is what its two files share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace fake_device {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kPoison = 0x7f;

// How this process's cards behave; plugin.py sets it once.
struct Behaviour {
  int num_cards = 2;
  size_t card_bytes = 0;
  bool has_float64 = true;    // otherwise every tensor of this type is refused
  bool late_copies = false;   // non-blocking copies run when something waits
  bool plain_allocator = false;  // torch.accelerator has no memory figures
};
Behaviour& behaviour();

// What counts.py counts, in the order of its KINDS.
enum Event { UPLOAD, LATE_UPLOAD, DOWNLOAD, LATE_DOWNLOAD, WAIT };

// Counts an event. Returns the Python line that caused it; empty where nothing counts.
std::string count(Event event);

// The bytes behind an address of a card. Addresses themselves can be neither read nor written.
void* bytes_at(const void* address);
bool is_address(const void* address);
c10::Allocator* card_allocator();

// Copies that wait for a card, in the order in which they were asked for.
int64_t last_copy();
void finish_copies(int64_t up_to = INT64_MAX);
bool has_open_copies(int64_t up_to = INT64_MAX);

}  // namespace fake_device
