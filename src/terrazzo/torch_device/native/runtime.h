// What the files of the device share: the runtime library, and what hangs on it.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <pybind11/pybind11.h>

#include "gcu_runtime.h"

namespace gcu {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 64;

// Functions of the library that we call. They are found when the device is first used, so that
// loading this file costs nothing and needs no library.
#define GCU_FUNCTIONS(X)                                                                         \
  X(gcuGetLastErrorMessage) X(gcuGetErrorString) X(gcuGetDeviceCount) X(gcuSetDevice)            \
  X(gcuGetDevice) X(gcuDeviceSynchronize) X(gcuMalloc) X(gcuFree) X(gcuMemcpyAsync)              \
  X(gcuMemcpyPeerAsync) X(gcuMemGetInfo) X(gcuPointerGetDevice) X(gcuHostAlloc) X(gcuHostFree)   \
  X(gcuHostIsPinned) X(gcuLaunchPlan) X(gcuStreamCreateWithPriority) X(gcuStreamSynchronize)     \
  X(gcuStreamQuery) X(gcuStreamWaitEvent) X(gcuEventCreate) X(gcuEventDestroy)                   \
  X(gcuEventRecord) X(gcuEventQuery) X(gcuEventSynchronize) X(gcuEventElapsedTime)            \
  X(gcuTraceStart) X(gcuTraceStop) X(gcuTraceRead) X(gcuTraceTag) X(gcuGetDeviceProperties)

struct Library {
#define GCU_FIELD(name) decltype(&::name) name;
  GCU_FUNCTIONS(GCU_FIELD)
#undef GCU_FIELD
};

bool is_ready();             // whether the library has been loaded
const Library& library();    // loads it: torch.gcu._lazy_init() says how
void check(gcuError error);  // raises what the library says is wrong
int device_count();
int current_device();
inline c10::DeviceIndex given(c10::DeviceIndex device) {
  return device < 0 ? c10::DeviceIndex(current_device()) : device;
}

// The current device of this thread while it lives.
struct OnDevice {
  explicit OnDevice(int device);
  ~OnDevice();
  int before;
};

c10::Stream current_stream(c10::DeviceIndex device);
inline gcuStream_t handle(const c10::Stream& stream) {
  return reinterpret_cast<gcuStream_t>(stream.id());  // 0: the default stream of a device
}

at::Allocator* allocator();
at::Allocator* pinned_allocator();
void record_stream(const c10::DataPtr& data, c10::Stream stream);
at::Generator host_generator(const at::Generator& generator);  // whose numbers are drawn
at::Generator default_host_generator(c10::DeviceIndex device);

bool run_compiled(const c10::OperatorHandle& op, torch::jit::Stack* stack);  // false: there is none
void profile_if_asked();  // when the library has been loaded
void bind_memory(pybind11::module_& m);
void bind_plans(pybind11::module_& m);
void bind_operators(pybind11::module_& m);
void bind_distributed(pybind11::module_& m);

}  // namespace gcu
