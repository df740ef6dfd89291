// What the cards compute: every operator runs torch's CPU kernel on the bytes of the cards' tensors.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "device.h"

namespace fake_device {

namespace {

using at::Tensor;

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// Operators whose output has a size, or a value, that the host needs.
const std::set<std::string> kWaiting = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::bincount",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::equal",
};

std::atomic<int64_t> num_kernels{0};

void refuse_float64(c10::ScalarType dtype, const std::string& what) {
  TORCH_CHECK(
      behaviour().has_float64 || dtype != at::kDouble, what, ": ", c10::get_privateuse1_backend(),
      " does not support DT_DOUBLE");
}

// A tensor of the host that has the bytes of a card's tensor.
Tensor host_view(const Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr data(bytes_at(storage.mutable_data()), c10::Device(c10::kCPU));
  c10::Storage bytes(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(bytes), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return view;
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto type = dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
  refuse_float64(type, "aten::empty");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, card_allocator(), kKeys, type, format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  auto type = dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
  refuse_float64(type, "aten::empty_strided");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, card_allocator(), kKeys, type);
}

// The host tensors that stand for a call's device tensors.
class HostArguments {
 public:
  explicit HostArguments(std::string name) : name_(std::move(name)) {}

  Tensor of(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kDevice) {
      is_mixed_ |= tensor.dim() > 0;
      other_ = tensor.device();
      return tensor;
    }
    refuse_float64(tensor.scalar_type(), name_);
    if (!device_) device_ = tensor.device();
    TORCH_CHECK(
        *device_ == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ", *device_,
        " and ", tensor.device(), "! (", name_, ")");
    originals_.push_back({tensor, host_view(tensor)});
    return originals_.back().view;
  }

  // Indices may be the host's: torch copies them to the card, in every call. For aten::index that was done to find out its shape.
  Tensor index_of(const Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() == kDevice) return of(tensor);
    if (name_ != "aten::index") {
      count(UPLOAD);
      finish_copies();
    }
    return tensor;
  }

  void check_devices() const {
    TORCH_CHECK(
        !device_ || !is_mixed_, "Expected all tensors to be on the same device, but found at least two devices, ",
        *device_, " and ", other_, "! (", name_, ")");
  }

  // For operators that are given a device and no tensor.
  void make_on(c10::Device device) {
    if (!device_) device_ = device;
  }

  // A kernel may have given its output another size.
  void reflect_sizes() const {
    for (const auto& [tensor, view] : originals_) {
      if (view.sizes() == tensor.sizes() && view.strides() == tensor.strides()) continue;
      auto made = is_behind(tensor, view) ? as_view(tensor, view) : on_card(view);
      tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
      tensor.unsafeGetTensorImpl()->set_storage_offset(made.storage_offset());
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
    }
  }

  // The device's tensor of one that a kernel returned.
  Tensor result(const Tensor& host) const {
    if (!host.defined()) return host;
    refuse_float64(host.scalar_type(), name_);
    for (const auto& [tensor, view] : originals_) {
      if (host.is_same(view)) return tensor;
      if (is_behind(tensor, host)) return as_view(tensor, host);
    }
    return on_card(host);
  }

 private:
  struct Argument {
    Tensor tensor, view;
  };

  Tensor on_card(const Tensor& host) const {
    auto made = empty_strided(host.sizes(), host.strides(), host.scalar_type(), {}, device_, {});
    if (host.numel() > 0) host_view(made).copy_(host);
    return made;
  }

  static bool is_behind(const Tensor& tensor, const Tensor& host) {
    return host.storage().nbytes() > 0 && host.storage().data() == bytes_at(tensor.storage().data());
  }

  static Tensor as_view(const Tensor& tensor, const Tensor& host) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), host.dtype());
    made.unsafeGetTensorImpl()->set_storage_offset(host.storage_offset());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    return made;
  }

  std::string name_;
  std::optional<c10::Device> device_;
  c10::Device other_ = c10::kCPU;
  bool is_mixed_ = false;
  std::vector<Argument> originals_;
};

// Puts host tensors in the place of a value's device tensors.
void replace_tensors(c10::IValue& value, HostArguments& arguments) {
  if (value.isTensor()) {
    value = arguments.of(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<Tensor> views;
    for (const Tensor& tensor : value.toTensorList()) views.push_back(arguments.of(tensor));
    value = c10::List<Tensor>(views);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> views;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
      views.push_back(tensor ? std::optional<Tensor>(arguments.index_of(*tensor)) : std::nullopt);
    }
    value = views;
  } else if (value.isDevice() && value.toDevice().type() == kDevice) {
    arguments.make_on(value.toDevice());
    value = c10::Device(c10::kCPU);
  }
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.operator_name().name;
  HostArguments arguments(name);
  auto given = torch::jit::last(*stack, schema.arguments().size());
  for (size_t i = 0; i < given.size(); ++i) {
    replace_tensors((*stack)[stack->size() - given.size() + i], arguments);
  }
  arguments.check_devices();
  ++num_kernels;
  if (kWaiting.count(name)) {
    count(WAIT);
    finish_copies();
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  arguments.reflect_sizes();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = arguments.result(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> made;
      for (const Tensor& tensor : value.toTensorList()) made.push_back(arguments.result(tensor));
      value = c10::List<Tensor>(made);
    }
  }
}

// A copy that was asked for and has not been waited for.
struct Copy {
  int64_t number;
  Tensor host;
  Tensor bytes;  // of an upload, the host's at the time; of a download, those to deliver
  bool is_upload;
  std::string site;
};
std::deque<Copy> open_copies;
std::mutex copies_mutex;
std::atomic<int64_t> copies_begun{0};

void begin_copy(Tensor host, Tensor bytes, bool is_upload, std::string site) {
  std::lock_guard lock(copies_mutex);
  open_copies.push_back({++copies_begun, std::move(host), std::move(bytes), is_upload, std::move(site)});
}

bool is_same_bytes(const Tensor& a, const Tensor& b) {
  auto x = a.contiguous(), y = b.contiguous();
  return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

Tensor contiguous_copy(const Tensor& tensor) {
  auto made = at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.dtype()));
  return made.copy_(tensor);
}

void check_source(const Copy& upload) {
  TORCH_CHECK(
      is_same_bytes(upload.host, upload.bytes), "fake device: the host wrote to the source of the non-blocking copy at ",
      upload.site, " before it waited for the copy");
}

// Before an upload from the same memory: a host that never waits is found out here.
void check_open_uploads_from(const void* source) {
  std::vector<Copy> same;
  {
    std::lock_guard lock(copies_mutex);
    for (const auto& copy : open_copies) {
      if (copy.is_upload && copy.host.const_data_ptr() == source) same.push_back(copy);
    }
  }
  for (const auto& copy : same) check_source(copy);
}

// Uploads read the host's bytes at once, and look at them again when something waits: a host that has written to them by then
// would have given a real card either the old or the new ones.
void upload(const Tensor& from, const Tensor& to, bool non_blocking) {
  c10::InferenceMode inference;
  bool is_late = non_blocking && behaviour().late_copies;
  auto site = count(non_blocking ? LATE_UPLOAD : UPLOAD);
  auto view = host_view(to);
  if (is_late) {
    check_open_uploads_from(from.const_data_ptr());
    auto bytes = contiguous_copy(from);
    view.copy_(bytes);
    begin_copy(from, bytes, true, site);
  } else {
    if (!non_blocking) finish_copies();
    view.copy_(from);
  }
}

// The host finds poison until something waits.
void download(const Tensor& from, const Tensor& to, bool non_blocking) {
  c10::InferenceMode inference;
  bool is_late = non_blocking && behaviour().late_copies;
  auto site = count(non_blocking ? LATE_DOWNLOAD : DOWNLOAD);
  if (from.scalar_type() != to.scalar_type()) refuse_float64(to.scalar_type(), "copy to the host");
  if (is_late) {
    auto bytes = contiguous_copy(host_view(from).expand_as(to).to(to.scalar_type()));
    auto poison = at::empty_like(bytes);
    if (poison.nbytes() > 0) std::memset(poison.mutable_data_ptr(), kPoison, poison.nbytes());
    auto target = to;
    target.copy_(poison);
    begin_copy(to, bytes, false, site);
  } else {
    if (!non_blocking) finish_copies();
    auto target = to;
    target.copy_(host_view(from));
  }
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool is_upload = from.device().type() != kDevice, is_download = to.device().type() != kDevice;
  if (!is_upload) refuse_float64(from.scalar_type(), "aten::copy_");
  if (!is_download) refuse_float64(to.scalar_type(), "aten::copy_");
  if (is_upload) {
    upload(from, to, non_blocking);
  } else if (is_download) {
    download(from, to, non_blocking);
  } else {
    ++num_kernels;
    c10::InferenceMode inference;
    host_view(to).copy_(host_view(from));
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

c10::Scalar local_scalar(const Tensor& tensor) {
  refuse_float64(tensor.scalar_type(), "aten::_local_scalar_dense");
  count(DOWNLOAD);
  finish_copies();
  return host_view(tensor).item();
}

const Tensor& resize(const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  size_t needed = at::detail::computeStorageNbytesContiguous(size, tensor.itemsize(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) {
    auto made = empty({int64_t(needed)}, at::kByte, {}, tensor.device(), {}, {});
    size_t kept = tensor.storage().nbytes();
    if (kept > 0) std::memcpy(bytes_at(made.storage().data()), bytes_at(tensor.storage().data()), kept);
    auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(std::move(made.storage().unsafeGetStorageImpl()->mutable_data_ptr()));
    storage->set_nbytes(needed);
  }
  impl->set_sizes_contiguous(size);
  return tensor;
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  HostArguments arguments("aten::convolution");
  auto x = arguments.of(input), w = arguments.of(weight);
  std::optional<Tensor> b;
  if (bias && bias->defined()) b = arguments.of(*bias);
  arguments.check_devices();
  ++num_kernels;
  return arguments.result(
      at::convolution_symint(x, w, b, stride, padding, dilation, transposed, output_padding, groups));
}

}  // namespace

int64_t last_copy() { return copies_begun; }

bool has_open_copies(int64_t up_to) {
  std::lock_guard lock(copies_mutex);
  return !open_copies.empty() && open_copies.front().number <= up_to;
}

void finish_copies(int64_t up_to) {
  c10::InferenceMode inference;
  while (true) {
    std::optional<Copy> copy;
    {
      std::lock_guard lock(copies_mutex);
      if (open_copies.empty() || open_copies.front().number > up_to) return;
      copy = std::move(open_copies.front());
      open_copies.pop_front();
    }
    if (copy->is_upload) {
      check_source(*copy);
    } else {
      copy->host.copy_(copy->bytes);
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("convolution_overrideable", convolution);
}

TORCH_LIBRARY(fake_device, m) { m.def("host_view(Tensor tensor) -> Tensor"); }
TORCH_LIBRARY_IMPL(fake_device, PrivateUse1, m) { m.impl("host_view", host_view); }

extern "C" int64_t fake_device_num_kernels() { return num_kernels; }

}  // namespace fake_device
