// Memory of the device: a caching allocator with statistics and snapshots, and pinned memory.
#include "runtime.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <pybind11/stl.h>
#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/csrc/utils/pybind.h>

#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>

namespace py = pybind11;
using namespace pybind11::literals;
using c10::Device, c10::DeviceIndex, c10::DataPtr, c10::Stream;

namespace gcu {
namespace {
using c10::CachingDeviceAllocator::DeviceStats;
constexpr size_t kSmall = 1 << 20;  // bytes up to which statistics call a block small

using Frames = std::shared_ptr<torch::CapturedTraceback>;

struct Block {
  void* pointer;
  size_t size, requested;
  DeviceIndex device;
  c10::StreamId stream;
  bool allocated = true;
  int pending = 0;                           // events of other streams that are still awaited
  std::vector<c10::StreamId> others;         // streams that use it beside its own
  Frames made_at;
};

struct Trace {
  const char* action;
  size_t address, size;
  c10::StreamId stream;
  int64_t time;
  Frames at;
};

// Eight sizes between a power of two and the next, so that an eighth is wasted at most.
size_t size_class(size_t size) {
  if (size <= 512) return 512;
  size_t step = std::max<size_t>(512, (size_t{1} << (63 - __builtin_clzll(size - 1))) / 8);
  return (size + step - 1) / step * step;
}

// Blocks are kept for the next tensor of their size on the same stream, where the order of work
// makes reuse safe. A block that other streams used waits for what they had to do by then.
struct CachingAllocator final : c10::DeviceAllocator {
  struct OfDevice {
    std::map<std::pair<c10::StreamId, size_t>, std::vector<Block*>> free;
    std::deque<std::pair<gcuEvent_t, Block*>> waiting;
    std::deque<Trace> traces;
    DeviceStats stats;
  };
  std::mutex mutex;
  std::unordered_map<void*, Block*> blocks;
  std::array<OfDevice, kMostDevices> devices;
  std::atomic<size_t> history{0};  // entries of traces to keep
  std::atomic<bool> stacks{false};

  static void raw_delete(void* pointer);

  void note(OfDevice& here, const char* action, const Block& block, Frames at = nullptr) {
    if (!history) return;
    here.traces.push_back({action, reinterpret_cast<size_t>(block.pointer), block.size,
                           block.stream, c10::getTime() / 1000, std::move(at)});
    if (here.traces.size() > history) here.traces.pop_front();
  }

  // Taken before the lock: it may wait for Python's.
  Frames context() {
    return stacks ? torch::CapturedTraceback::gather(true, false, false) : nullptr;
  }

  static void tell(c10::CachingAllocator::StatArray& stat, const Block& block, int64_t amount,
                   bool up) {
    size_t pool = block.size <= kSmall ? 1 : 2;
    for (size_t kind : {size_t{0}, pool}) up ? stat[kind].increase(amount) : stat[kind].decrease(amount);
  }
  static void told(DeviceStats& stats, const Block& block, bool up) {
    tell(stats.allocation, block, 1, up);
    tell(stats.allocated_bytes, block, block.size, up);
    tell(stats.requested_bytes, block, block.requested, up);
  }
  static void active(DeviceStats& stats, const Block& block, bool up) {
    tell(stats.active, block, 1, up);
    tell(stats.active_bytes, block, block.size, up);
  }
  static void segment(DeviceStats& stats, const Block& block, bool up) {
    tell(stats.segment, block, 1, up);
    tell(stats.reserved_bytes, block, block.size, up);
    (up ? stats.num_device_alloc : stats.num_device_free)++;
  }

  void finish(OfDevice& here, Block* block) {
    active(here.stats, *block, false);
    note(here, "free_completed", *block);
    here.free[{block->stream, block->size}].push_back(block);
  }

  void collect(OfDevice& here, bool wait) {
    for (size_t left = here.waiting.size(); left; left--) {
      auto [event, block] = here.waiting.front();
      here.waiting.pop_front();
      if (wait) check(library().gcuEventSynchronize(event));
      else if (library().gcuEventQuery(event) == gcuErrorNotReady) {
        here.waiting.emplace_back(event, block);
        continue;
      }
      library().gcuEventDestroy(event);
      if (--block->pending == 0) finish(here, block);
    }
  }

  void release(OfDevice& here) {
    collect(here, true);
    for (auto& [key, cached] : here.free)
      for (Block* block : cached) {
        check(library().gcuFree(block->pointer));
        segment(here.stats, *block, false);
        note(here, "segment_free", *block);
        blocks.erase(block->pointer);
        delete block;
      }
    here.free.clear();
  }

  Block* fresh(OfDevice& here, size_t size, size_t requested, const Stream& stream,
               const Frames& from) {
    void* pointer = nullptr;
    gcuError error = library().gcuMalloc(&pointer, size);
    if (error == gcuErrorOutOfMemory) {
      here.stats.num_alloc_retries++;
      release(here);
      error = library().gcuMalloc(&pointer, size);
    }
    if (error == gcuErrorOutOfMemory) {
      here.stats.num_ooms++;
      gcuMemoryInfo info{};
      library().gcuMemGetInfo(&info, stream.device_index());
      note(here, "oom", Block{reinterpret_cast<void*>(info.free), requested, requested,
                              stream.device_index(), stream.id()}, from);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "gcu out of memory. Tried to allocate ", requested,
                       " bytes on device ", int(stream.device_index()), ", of whose ", info.total,
                       " bytes ", info.free, " are free; ",
                       here.stats.allocated_bytes[0].current, " are in use by tensors.");
    }
    check(error);
    auto* block = new Block{pointer, size, requested, stream.device_index(), stream.id()};
    blocks[pointer] = block;
    segment(here.stats, *block, true);
    note(here, "segment_alloc", *block);
    return block;
  }

  DataPtr allocate(size_t requested) override {
    DeviceIndex device = current_device();
    if (!requested) return {nullptr, nullptr, &raw_delete, Device(kDevice, device)};
    Stream stream = current_stream(device);
    size_t size = size_class(requested);
    Frames here_from = context();
    std::lock_guard<std::mutex> lock(mutex);
    OfDevice& here = devices[device];
    if (!here.waiting.empty()) collect(here, false);
    Block* block;
    auto cached = here.free.find({stream.id(), size});
    if (cached != here.free.end() && !cached->second.empty()) {
      block = cached->second.back();
      cached->second.pop_back();
    } else {
      block = fresh(here, size, requested, stream, here_from);
    }
    block->requested = requested;
    block->allocated = true;
    block->made_at = here_from;
    told(here.stats, *block, true);
    active(here.stats, *block, true);
    note(here, "alloc", *block, std::move(here_from));
    return {block->pointer, block->pointer, &raw_delete, Device(kDevice, device)};
  }

  void give_back(void* pointer) {
    Frames here_from = context();
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find(pointer);
    if (found == blocks.end()) return;
    Block* block = found->second;
    OfDevice& here = devices[block->device];
    block->allocated = false;
    told(here.stats, *block, false);
    note(here, "free_requested", *block, std::move(here_from));
    for (c10::StreamId other : block->others) {
      OnDevice on(block->device);
      gcuEvent_t event = nullptr;
      if (library().gcuEventCreate(&event) != gcuSuccess) continue;
      library().gcuEventRecord(event, reinterpret_cast<gcuStream_t>(other));
      here.waiting.emplace_back(event, block);
      block->pending++;
    }
    block->others.clear();
    if (!block->pending) finish(here, block);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &raw_delete; }
  void copy_data(void* target, const void* source, size_t size) const override {
    check(library().gcuMemcpyAsync(target, source, size, gcuMemcpyDefault,
                               handle(current_stream(current_device()))));
  }
  bool initialized() override { return is_ready(); }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> lock(mutex);
    for (OfDevice& here : devices) release(here);
  }
  void recordStream(const DataPtr& data, Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find(data.get_context());
    if (found == blocks.end() || found->second->stream == stream.id()) return;
    auto& others = found->second->others;
    if (std::find(others.begin(), others.end(), stream.id()) == others.end())
      others.push_back(stream.id());
  }
  DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    return devices[given(device)].stats;
  }
  template <typename Change> void for_all_stats(DeviceIndex device, Change change) {
    std::lock_guard<std::mutex> lock(mutex);
    DeviceStats& s = devices[given(device)].stats;
    for (auto* stat : {&s.allocation, &s.segment, &s.active, &s.allocated_bytes,
                       &s.reserved_bytes, &s.active_bytes, &s.requested_bytes})
      for (auto& kind : *stat) change(kind);
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    for_all_stats(device, [](auto& stat) { stat.reset_accumulated(); });
    DeviceStats& s = devices[given(device)].stats;
    s.num_alloc_retries = s.num_ooms = s.num_device_alloc = s.num_device_free = 0;
  }
  void resetPeakStats(DeviceIndex device) override {
    for_all_stats(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    gcuMemoryInfo info{};
    check(library().gcuMemGetInfo(&info, given(device)));
    return {info.free, info.total};
  }
};

CachingAllocator* caching = new CachingAllocator;  // never deleted: tensors outlive everything
void CachingAllocator::raw_delete(void* pointer) { caching->give_back(pointer); }
REGISTER_ALLOCATOR(kDevice, caching);

// Pinned memory of the host: the library's own, given back when the last tensor has gone.
struct PinnedAllocator final : at::HostAllocator {
  static void raw_delete(void* pointer) { if (pointer) library().gcuHostFree(pointer); }
  DataPtr allocate(size_t size) override {
    void* pointer = nullptr;
    if (size) check(library().gcuHostAlloc(&pointer, size));
    return {pointer, pointer, &raw_delete, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &raw_delete; }
  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }
  // The library frees pinned memory when the copies that were begun with it are done.
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator* pinned = new PinnedAllocator;
REGISTER_HOST_ALLOCATOR(kDevice, pinned)


// ---------------------------------------------------------------- snapshots, as torch.cuda's
py::list frames_of(const Frames& context) {
  py::list made;
  if (!context) return made;
  auto found = torch::symbolize({context.get()});
  for (uint64_t i : found.tracebacks.at(0)) {
    auto& frame = found.all_frames.at(i);
    made.append(py::dict("filename"_a = frame.filename, "name"_a = frame.funcname,
                         "line"_a = frame.lineno));
  }
  return made;
}

py::dict segment_of(const Block& b) {
  bool active = b.allocated || b.pending;
  const char* state =
      b.allocated ? "active_allocated" : active ? "active_pending_free" : "inactive";
  auto address = reinterpret_cast<size_t>(b.pointer);
  py::list blocks;
  blocks.append(py::dict("address"_a = address, "size"_a = b.size, "state"_a = state,
                         "requested_size"_a = b.requested, "frames"_a = frames_of(b.made_at)));
  return py::dict("device"_a = int(b.device), "address"_a = address, "total_size"_a = b.size,
                  "allocated_size"_a = b.allocated ? b.size : 0,
                  "active_size"_a = active ? b.size : 0,
                  "requested_size"_a = b.allocated ? b.requested : 0, "stream"_a = b.stream,
                  "segment_type"_a = b.size <= kSmall ? "small" : "large",
                  "segment_pool_id"_a = py::make_tuple(0, 0), "is_expandable"_a = false,
                  "frames"_a = py::list(), "blocks"_a = blocks);
}

py::dict snapshot() {
  std::vector<Block> blocks;
  std::vector<std::deque<Trace>> traces;
  {
    py::gil_scoped_release others_may_run;
    std::lock_guard<std::mutex> lock(caching->mutex);
    for (auto& [pointer, block] : caching->blocks) blocks.push_back(*block);
    for (int i = 0; i < device_count(); i++) traces.push_back(caching->devices[i].traces);
  }
  py::list segments, by_device;
  for (const Block& block : blocks) segments.append(segment_of(block));
  for (size_t device = 0; device < traces.size(); device++) {
    py::list entries;
    for (const Trace& t : traces[device]) {
      py::dict made("action"_a = t.action, "size"_a = t.size, "stream"_a = t.stream,
                    "time_us"_a = t.time, "device"_a = device, "frames"_a = frames_of(t.at));
      made[t.action == std::string("oom") ? "device_free" : "addr"] = t.address;
      entries.append(made);
    }
    by_device.append(entries);
  }
  return py::dict("segments"_a = segments, "device_traces"_a = by_device,
                  "allocator_settings"_a = py::dict(), "external_annotations"_a = py::list());
}
}  // namespace



at::Allocator* allocator() { return caching; }
at::Allocator* pinned_allocator() { return pinned; }
void record_stream(const DataPtr& data, Stream stream) { caching->recordStream(data, stream); }

void bind_memory(py::module_& m) {
  m.def("snapshot", &snapshot);
  m.def("record_history", [](size_t entries, bool stacks, bool clear) {
    std::lock_guard<std::mutex> lock(caching->mutex);
    caching->history = entries;
    caching->stacks = stacks;
    if (clear) for (auto& here : caching->devices) here.traces.clear();
  });
}

}  // namespace gcu
