// Operators of the device: copies and views, those that are compiled, the way by the CPU, autocast.
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/quantized/Quantizer.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/library.h>
#include <torch/version.h>

#include <mutex>
#include <unordered_map>

namespace py = pybind11;
using at::IntArrayRef, at::Scalar, at::ScalarType, at::Tensor;
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using at::DimnameList; // which older lists for autocast name without its namespace
#endif

namespace gcu {
namespace {
c10::DispatchKeySet keys() { return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }

bool is_here(const Tensor& tensor) { return tensor.device().type() == kDevice; }

// ---------------------------------------------------------------- what runs on the CPU
std::mutex counting;
std::unordered_map<std::string, int64_t> fallbacks;
std::atomic<bool> forbidden{false};

// What is about to run on the CPU is counted, or is an error.
void count_fallback(const std::string& shown) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !forbidden, shown, " has no code for the device gcu, and TZ_GCU_FALLBACK=error forbids to ",
      "run it on the CPU. Without it torch.gcu.fallbacks() counts such calls.");
  std::lock_guard<std::mutex> lock(counting);
  fallbacks[shown]++;
}

// ---------------------------------------------------------------- memory
Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard on(c10::device_or_default(device));
  return at::detail::empty_generic(size, allocator(), keys(), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device,
                     std::optional<bool>) {
  const c10::DeviceGuard on(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, allocator(), keys(),
                                           c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, IntArrayRef size,
                      std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    size_t wanted = at::detail::computeStorageNbytesContiguous(size, self.itemsize(),
                                                               self.storage_offset());
    if (self.numel() && wanted > self.storage().nbytes())
      at::native::resize_bytes_nocuda(self.storage(), wanted);
  }
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size,
                    IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  size_t wanted = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(),
                                                   self.itemsize(), offset);
  if (self.numel() && wanted > self.storage().nbytes())
    at::native::resize_bytes_nocuda(self.storage(), wanted);
  return self;
}

Tensor& set_source(Tensor& self, at::Storage source) {
  int64_t size = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {size}, {});
}

Tensor& set_empty(Tensor& self) {
  at::Storage fresh(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
  return set_storage(self, std::move(fresh), 0, {0}, {});
}

void record(Tensor& self, at::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

// ---------------------------------------------------------------- copies
// The same memory as a tensor of the host, which its addresses allow.
Tensor on_host(const Tensor& tensor) {
  Tensor made = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                              tensor.options().device(at::kCPU));
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

// Whether the bytes of one, as they lie, are those of the other.
bool is_plain(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

void move(const Tensor& source, const Tensor& target, bool wait) {
  const Tensor& here = is_here(target) ? target : source;
  OnDevice on(here.get_device());
  auto stream = handle(current_stream(here.get_device()));
  check(library().gcuMemcpyAsync(target.data_ptr(), source.data_ptr(), source.nbytes(),
                                 gcuMemcpyDefault, stream));
  if (wait) check(library().gcuStreamSynchronize(stream));
}

void synchronize(const Tensor& tensor) {
  OnDevice on(tensor.get_device());
  check(library().gcuStreamSynchronize(handle(current_stream(tensor.get_device()))));
}

// As a kernel of the chip, where one can be compiled.
bool copy_compiled(const Tensor& source, const Tensor& target) {
  if (!target.is_non_overlapping_and_dense() && source.storage().is_alias_of(target.storage()))
    return copy_compiled(source.clone(at::MemoryFormat::Contiguous), target);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  torch::jit::Stack stack{target, source, false};
  return run_compiled(op, &stack);
}

void copy_on_devices(const Tensor& source, const Tensor& target) {
  bool same = source.get_device() == target.get_device();
  if (!same) synchronize(source);
  if (is_plain(source, target)) return move(source, target, !same);
  if (same && copy_compiled(source, target)) return;
  if (same) count_fallback("aten::copy_");
  synchronize(target);
  synchronize(source);
  on_host(target).copy_(on_host(source));
}

void copy_in(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (is_plain(source, target)) return move(source, target, !(non_blocking && source.is_pinned()));
  bool dense = target.is_non_overlapping_and_dense() && !target.is_conj() && !target.is_neg();
  at::DimVector strides = c10::contiguous_strides(target.sizes());
  if (dense) strides.assign(target.strides().begin(), target.strides().end());
  Tensor laid = at::empty_strided(target.sizes(), strides, target.options().device(at::kCPU));
  laid.copy_(source);
  if (dense) return move(laid, target, true);
  Tensor brought = at::empty_like(laid, laid.options().device(target.device()));
  move(laid, brought, true);
  copy_on_devices(brought, target);
}

void copy_out(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (is_plain(source, target)) return move(source, target, !(non_blocking && target.is_pinned()));
  if (!source.is_non_overlapping_and_dense()) {
    Tensor packed = at::empty(source.sizes(), source.options());
    copy_on_devices(source, packed);
    return copy_out(packed, target, false);
  }
  Tensor laid = at::empty_strided(source.sizes(), source.strides(),
                                  source.options().device(at::kCPU));
  move(source, laid, true);
  if (source.is_conj()) laid._set_conj(true);
  if (source.is_neg()) laid._set_neg(true);
  target.copy_(laid);
}

void copy_tensor(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (!target.numel()) return;
  if (source.sizes() != target.sizes())
    return copy_tensor(source.expand(target.sizes()), target, non_blocking);
  TORCH_CHECK(!source.is_meta(), "cannot copy out of a meta tensor: it has no data");
  if (is_here(source) && is_here(target)) copy_on_devices(source, target);
  else if (is_here(target)) copy_in(source.to(at::kCPU), target, non_blocking);
  else if (target.is_cpu()) copy_out(source, target, non_blocking);
  else target.copy_(source.to(at::kCPU));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  copy_tensor(source, target, non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  copy_tensor(source, target, false);
  return target;
}

at::Scalar local_scalar(const Tensor& self) { return at::_local_scalar_dense(self.to(at::kCPU)); }
}  // namespace

// ---------------------------------------------------------------- compiled, or by the CPU
namespace {
c10::DeviceIndex device_of(const torch::jit::Stack& stack, size_t arguments) {
  for (auto& value : torch::jit::last(stack, arguments)) {
    if (value.isTensor() && value.toTensor().defined() && is_here(value.toTensor()))
      return value.toTensor().get_device();
    if (value.isDevice() && value.toDevice().type() == kDevice)
      return given(value.toDevice().index());
  }
  return current_device();
}

// Draws from the generator of the device, which the CPU's operators know as one of their own.
void with_generator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  size_t first = stack->size() - arguments.size();
  bool named = false;
  auto device = device_of(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[first + i];
    if (arguments[i].name() != "generator") continue;
    named = true;
    value = value.isNone() ? default_host_generator(device) : host_generator(value.toGenerator());
  }
  if (named) return at::native::cpu_fallback(op, stack);
  // It takes the default one, which is ours for as long.
  auto ours = default_host_generator(device);
  auto theirs = at::detail::getDefaultCPUGenerator();
  auto before = theirs.get_state();
  theirs.set_state(ours.get_state());
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    theirs.set_state(before);
    throw;
  }
  ours.set_state(theirs.get_state());
  theirs.set_state(before);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  if (!draws && run_compiled(op, stack)) return;
  const auto& name = op.operator_name();
  count_fallback(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
  if (draws) return with_generator(op, stack);
  at::native::cpu_fallback(op, stack);
}

// ---------------------------------------------------------------- quantised tensors
// Their bytes lie on the device; what is made of them the CPU makes.
Tensor quantized_like(const Tensor& from, at::Device device) {
  Tensor made = at::new_qtensor(from.sizes(), from.options().device(device), at::make_per_tensor_affine_quantizer(
      from.q_scale(), from.q_zero_point(), from.scalar_type()));
  move(from, made, true);
  return made;
}

Tensor quantize(const Tensor& self, double scale, int64_t zero_point, ScalarType dtype) {
  count_fallback("aten::quantize_per_tensor");
  return quantized_like(at::quantize_per_tensor(self.cpu(), scale, zero_point, dtype), self.device());
}

Tensor dequantize(const Tensor& self) {
  count_fallback("aten::dequantize.self");
  return quantized_like(self, at::kCPU).dequantize().to(self.device());
}

// ---------------------------------------------------------------- what torch asks of tensors
// What torch._utils.set_tensor_metadata says of a tensor goes with it into files and out of them.
struct Metadata final : c10::BackendMeta {
  std::unordered_map<std::string, bool> said;
};

void get_metadata(const Tensor& tensor, std::unordered_map<std::string, bool>& said) {
  auto* found = dynamic_cast<Metadata*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  if (found) said = found->said;
}

void set_metadata(const Tensor& tensor, std::unordered_map<std::string, bool>& said) {
  auto made = c10::make_intrusive<Metadata>();
  made->said = said;
  tensor.unsafeGetTensorImpl()->set_backend_meta(made);
}

[[maybe_unused]] const bool has_metadata = [] {
  torch::jit::TensorBackendMetaRegistry(kDevice, &get_metadata, &set_metadata);
  return true;
}();

// Data of the one may become that of the other: `x.data = y`, as modules move their parameters.
bool may_take_data_of(const Tensor& self, const Tensor& other) {
  auto is_dense = [](const Tensor& t) {
    return t.layout() == at::kStrided && (t.is_cpu() || is_here(t)) && !t.is_quantized();
  };
  return self.key_set() == other.key_set() || (is_dense(self) && is_dense(other));
}

Tensor refused_cross_entropy(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(false, "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to "
              "autocast. Take binary_cross_entropy_with_logits or BCEWithLogitsLoss, which have the "
              "sigmoid in them and are safe, or disable autocast for the call.");
}
}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &set_empty);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("record_stream", &record);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("quantize_per_tensor", &quantize);
  m.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
  // Without these torch would choose a backend for convolutions, and has none for a device of ours.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, QuantizedPrivateUse1, m) {
  m.impl("dequantize.self", &dequantize);
  m.impl("q_scale", &at::native::q_scale_quant);
  m.impl("q_zero_point", &at::native::q_zero_point_quant);
  m.impl("qscheme", &at::native::qscheme_quant);
}

// Copies see to these bits themselves; torch would resolve them by a copy, for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// ---------------------------------------------------------------- autocast: the lists of CUDA
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define GCU_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define GCU_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define GCU_FP32_TYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define GCU_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(GCU_LOWER)
  AT_FORALL_FP32(GCU_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(GCU_FP32_TYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(GCU_PROMOTE)
  m.impl("binary_cross_entropy", &refused_cross_entropy);
}

void bind_operators(py::module_& m) {
  m.def("fallbacks", [] {
    std::lock_guard<std::mutex> lock(counting);
    return fallbacks;
  });
  m.def("reset_fallbacks", [] {
    std::lock_guard<std::mutex> lock(counting);
    fallbacks.clear();
  });
  m.def("forbid_fallbacks", [](bool forbid) { forbidden = forbid; });
}

}  // namespace gcu
