// A described chip as a device of PyTorch: streams, events, random numbers, and what torch asks of
// every device (a guard, hooks), over the runtime library of the chip. Memory is in memory.cpp,
// operators are in operators.cpp.
#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <mutex>

namespace py = pybind11;
using c10::Device, c10::DeviceIndex, c10::DataPtr, c10::Stream;

namespace gcu {
namespace {
Library table;
std::atomic<bool> loaded{false};
constexpr int kPool = 32;  // streams of each kind that a device hands out in turn

void load(const std::string& path) {
  void* found = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  TORCH_CHECK(found, dlerror());
#define GCU_FIND(name)                                              \
  table.name = reinterpret_cast<decltype(&::name)>(dlsym(found, #name)); \
  TORCH_CHECK(table.name || #name == std::string("gcuLaunchPlan"), path, " has no " #name);
  GCU_FUNCTIONS(GCU_FIND)
#undef GCU_FIND
  loaded = true;
  profile_if_asked();
}
}  // namespace

bool is_ready() { return loaded; }

const Library& library() {
  if (!loaded) {
    py::gil_scoped_acquire gil;
    try {
      py::module_::import(("torch." + c10::get_privateuse1_backend()).c_str()).attr("_lazy_init")();
    } catch (py::error_already_set& error) {
      error.restore();
      python_error raised;
      raised.persist();
      throw raised;
    }
  }
  return table;
}

void check(gcuError error) {
  if (error == gcuSuccess) return;
  std::string why = table.gcuGetLastErrorMessage();
  if (why.empty()) why = table.gcuGetErrorString(error);
  TORCH_CHECK_WITH(OutOfMemoryError, error != gcuErrorOutOfMemory, why);
  TORCH_CHECK(false, why);
}

int current_device() {
  int device = 0;
  check(library().gcuGetDevice(&device));
  return device;
}

OnDevice::OnDevice(int device) : before(current_device()) {
  if (before == device) { before = -1; return; }
  check(table.gcuSetDevice(device));
}
OnDevice::~OnDevice() { if (before >= 0) table.gcuSetDevice(before); }

// ---------------------------------------------------------------- streams
namespace {
thread_local std::array<c10::StreamId, kMostDevices> current_streams{};

Stream stream_of(DeviceIndex device, c10::StreamId id) {
  return Stream(Stream::UNSAFE, Device(kDevice, device), id);
}

// Streams are made once and kept: copies of them are everywhere, and nobody owns them.
Stream pooled(DeviceIndex device, int priority) {
  static std::mutex mutex;
  static std::map<std::pair<int, int>, std::pair<size_t, std::vector<gcuStream_t>>> pools;
  std::lock_guard<std::mutex> lock(mutex);
  auto& [next, streams] = pools[{device, priority}];
  if (streams.size() < kPool) {
    OnDevice on(device);
    gcuStream_t made = nullptr;
    check(table.gcuStreamCreateWithPriority(&made, priority));
    streams.push_back(made);
  }
  return stream_of(device, reinterpret_cast<c10::StreamId>(streams[next++ % kPool]));
}
}  // namespace

Stream current_stream(DeviceIndex device) { return stream_of(device, current_streams[device]); }

namespace {
// ---------------------------------------------------------------- the guard
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device device) const override {
    Device before(kDevice, current_device());
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kDevice, current_device()); }
  void setDevice(Device device) const override {
    if (device.index() < 0) return;
    TORCH_CHECK(device.index() < deviceCount(), "The device index is out of range. It must be in [0, ",
                int(deviceCount()), "), but got ", int(device.index()), ".");
    check(library().gcuSetDevice(device.index()));
  }
  // All types: what has no code for the device runs on the CPU.
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (loaded && device.index() >= 0) table.gcuSetDevice(device.index());
  }
  DeviceIndex deviceCount() const noexcept override {
    int count = 0;
    try {
      library().gcuGetDeviceCount(&count);
    } catch (const std::exception& error) {
      TORCH_WARN_ONCE("the device gcu cannot be used: ", error.what());
    }
    return std::min(count, kMostDevices);
  }
  Stream getStream(Device device) const override { return current_stream(given(device.index())); }
  Stream getDefaultStream(Device device) const override { return stream_of(given(device.index()), 0); }
  Stream getStreamFromGlobalPool(Device device, bool high) const override {
    return pooled(given(device.index()), high ? -1 : 0);
  }
  Stream getNewStream(Device device, int priority) const override {
    return pooled(given(device.index()), priority);
  }
  Stream exchangeStream(Stream stream) const override {
    Stream before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return handle(stream); }
  bool queryStream(const Stream& stream) const override {
    OnDevice on(stream.device_index());
    gcuError error = table.gcuStreamQuery(handle(stream));
    if (error == gcuErrorNotReady) return false;
    check(error);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    OnDevice on(stream.device_index());
    check(table.gcuStreamSynchronize(handle(stream)));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    OnDevice on(given(device));
    check(table.gcuDeviceSynchronize());
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    OnDevice on(stream.device_index());
    if (!*event) check(table.gcuEventCreate(reinterpret_cast<gcuEvent_t*>(event)));
    check(table.gcuEventRecord(static_cast<gcuEvent_t>(*event), handle(stream)));
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    OnDevice on(stream.device_index());
    check(table.gcuStreamWaitEvent(handle(stream), static_cast<gcuEvent_t>(event)));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    gcuError error = table.gcuEventQuery(static_cast<gcuEvent_t>(event));
    if (error == gcuErrorNotReady) return false;
    check(error);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) check(table.gcuEventSynchronize(static_cast<gcuEvent_t>(event)));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (event) table.gcuEventDestroy(static_cast<gcuEvent_t>(event));
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    float milliseconds = 0;
    check(table.gcuEventElapsedTime(&milliseconds, static_cast<gcuEvent_t>(start),
                                    static_cast<gcuEvent_t>(end)));
    return milliseconds;
  }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& stream) const override {
    record_stream(data, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---------------------------------------------------------------- random numbers
// The numbers are the CPU's for the same seed, so that what is drawn can be compared.
struct Generator final : c10::GeneratorImpl {
  at::Generator host;
  Generator(DeviceIndex device, at::Generator of)
      : GeneratorImpl(Device(kDevice, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(of)) {}
  c10::GeneratorImpl* inner() const { return host.unsafeGetGeneratorImpl(); }
  void set_current_seed(uint64_t seed) override { inner()->set_current_seed(seed); }
  uint64_t current_seed() const override { return inner()->current_seed(); }
  uint64_t seed() override { return inner()->seed(); }
  void set_offset(uint64_t offset) override { inner()->set_offset(offset); }
  uint64_t get_offset() const override { return inner()->get_offset(); }
  void set_state(const c10::TensorImpl& state) override { inner()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), host.clone()); }
};

const at::Generator& default_generator(DeviceIndex device) {
  static std::mutex mutex;
  static std::map<DeviceIndex, at::Generator> made;
  device = given(device);
  std::lock_guard<std::mutex> lock(mutex);
  auto& found = made[device];
  if (!found.defined())
    found = at::make_generator<Generator>(device, at::detail::createCPUGenerator(
        c10::detail::getNonDeterministicRandom()));
  return found;
}
}  // namespace

at::Generator host_generator(const at::Generator& generator) {
  auto* ours = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  return ours ? ours->host : generator;
}
at::Generator default_host_generator(DeviceIndex device) {
  return host_generator(default_generator(device));
}

// ---------------------------------------------------------------- hooks
namespace {
Guard guard;

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override { library(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return guard.deviceCount() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return loaded; }
  DeviceIndex deviceCount() const override { return guard.deviceCount(); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex device) const override {
    guard.setDevice(Device(kDevice, device));
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return guard.exchangeDevice(Device(kDevice, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(given(device), at::detail::createCPUGenerator());
  }
  Device getDeviceFromPtr(void* data) const override {
    int device = -1;
    check(library().gcuPointerGetDevice(&device, data));
    TORCH_CHECK(device >= 0, "this is no memory of the device gcu");
    return Device(kDevice, device);
  }
  bool isPinnedPtr(const void* data) const override {
    int found = 0;
    return loaded && table.gcuHostIsPinned(&found, data) == gcuSuccess && found;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard on(storage.device());
    DataPtr made = allocator()->allocate(size);
    size_t kept = std::min(size, storage.nbytes());
    if (kept) allocator()->copy_data(made.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// Torch starts a thread for each device when the first gradient is computed. Where that was before
// this file was loaded there are none or, beside a GPU, too few, and no gradient could be computed
// on the device.
struct Engine : torch::autograd::Engine {
  static void start() {
    auto& engine = torch::autograd::Engine::get_default_engine();
    engine.initialize_device_threads_pool();
    auto& started = engine.*(&Engine::device_ready_queues_);
    if (started.size() >= size_t(guard.deviceCount())) return;
    if (!started.empty()) (engine.*(&Engine::stop))();
    (engine.*(&Engine::start_device_threads))();
  }
};

}  // namespace

int device_count() { return guard.deviceCount(); }

}  // namespace gcu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("load", &gcu::load);
  m.def("is_ready", &gcu::is_ready);
  m.def("device_count", &gcu::device_count);
  m.def("default_generator", &gcu::default_generator, py::return_value_policy::copy);
  m.def("start_autograd", &gcu::Engine::start, py::call_guard<py::gil_scoped_release>());
  m.def("current_stream_handle",
        [] { return int64_t(gcu::current_stream(gcu::current_device()).id()); });
  gcu::bind_memory(m);
  gcu::bind_plans(m);
  gcu::bind_operators(m);
  gcu::bind_distributed(m);
}
